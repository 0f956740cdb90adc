"""The server: sockets, services, the engine behind them, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.checkpoint.default_model import DEFAULT_MODEL_NAME, default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.scheduler.errors import ConfigError, EngineUnavailable
from foreword.service.config import ServerConfig
from foreword.service.engine.client import EngineClient
from foreword.service.engine.config import EngineConfig
from foreword.service.engine.supervisor import EngineSupervisor
from foreword.service.frontend.boundary import ErrorBoundary
from foreword.service.frontend.engine_service import EngineService
from foreword.service.frontend.frontend import Frontend, State
from foreword.service.frontend.generation_service import GenerationService
from foreword.service.frontend.model import ServedModel
from foreword.service.frontend.model_service import ModelService
from foreword.service.frontend.reflection import add_reflection
from foreword.service.frontend.tokenization_service import TokenizationService
from foreword.service.shutdown import Shutdown
from foreword.service.text.processor import TextProcessor
from foreword.v1 import (
    engine_service_pb2_grpc,
    generation_service_pb2_grpc,
    model_service_pb2_grpc,
    tokenization_service_pb2_grpc,
)

_log = structlog.get_logger(__name__)

SERVICES = (
    "foreword.v1.GenerationService",
    "foreword.v1.TokenizationService",
    "foreword.v1.ModelService",
    "foreword.v1.EngineService",
)
HEALTH_SERVICE = "grpc.health.v1.Health"

FLUSH_S = 1.0
"""Time the last messages of ended calls get to reach their clients; it also ends idle streams at shutdown."""

Progress = Callable[[str, int, int], None]


def channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Options of the gRPC server. gRPC ignores names it does not know, so tests compare them with the library's own."""
    return [
        ("grpc.so_reuseport", 0),  # a second server on the port must fail
        ("grpc.max_receive_message_length", config.max_receive_message_bytes),
        ("grpc.max_send_message_length", config.max_send_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients may ping during a long prefill
    ]


class Server:
    """One front end and its engine process, from start to stop.

    Attributes:
        address: it listens at, with the port that was picked when the configured one is 0.
        frontend: what the services share.
    """

    def __init__(self, config: ServerConfig, engine: EngineClient, model: ServedModel) -> None:
        """Bind the port.

        Raises:
            ConfigError: the address cannot be used, or a certificate not be read.
        """
        self.frontend = Frontend(engine, model, config)
        self._config = config
        self._server = grpc.aio.server(interceptors=[ErrorBoundary()], options=channel_options(config))
        self._health = health.aio.HealthServicer()
        self._health_changed = asyncio.Event()
        self._add_services()
        self.address = self._bind()
        self._health_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take calls. Those that need an engine are UNAVAILABLE until there is one."""
        await self._report_health()
        await self._server.start()
        self._health_task = asyncio.create_task(self._follow_health())

    def note_engine(self, ready: bool) -> None:
        """Take the news that the engine became ready or died."""
        _log.info("engine", ready=ready)
        self._health_changed.set()

    async def drain(self, grace_s: float) -> None:
        """Report NOT_SERVING, give load balancers time to notice, then refuse new generations and wait for the others.

        Args:
            grace_s: how long to wait; generations left then are ended by `stop`.
        """
        registry = self.frontend.registry
        self.frontend.is_draining = True
        await self._report_health()
        _log.info("draining", active=len(registry), grace_s=grace_s)
        await asyncio.sleep(self._config.drain_delay_s)
        registry.is_closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await registry.wait_until_empty()

    async def stop(self) -> None:
        """End all calls and close the port."""
        self.frontend.registry.is_closed = True
        self.frontend.registry.fail_all(EngineUnavailable("the server is shutting down"))
        if self._health_task is not None:
            self._health_task.cancel()
            await asyncio.gather(self._health_task, return_exceptions=True)
        await self._server.stop(FLUSH_S)

    def _add_services(self) -> None:
        frontend, server = self.frontend, self._server
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(frontend), server)
        tokenization_service_pb2_grpc.add_TokenizationServiceServicer_to_server(TokenizationService(frontend), server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(frontend), server)
        engine_service = EngineService(frontend)  # type: ignore[abstract]  # the boundary answers for the rest
        engine_service_pb2_grpc.add_EngineServiceServicer_to_server(engine_service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection((*SERVICES, HEALTH_SERVICE), server)

    def _bind(self) -> str:
        address = self._config.listen_address
        _check_port_is_free(address)
        try:
            if self._config.has_tls:
                port = self._server.add_secure_port(address, _credentials(self._config))
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError:
            cause = "tls_certificate, tls_private_key: no certificate chain in PEM format, or not its key"
            raise ConfigError(
                cause if self._config.has_tls else f"listen_address: cannot listen on {address}"
            ) from None
        return f"{address.rpartition(':')[0]}:{port}"

    async def _follow_health(self) -> None:
        while True:
            await self._health_changed.wait()
            self._health_changed.clear()
            await self._report_health()

    async def _report_health(self) -> None:
        """The server itself is alive as long as it answers; its services serve when an engine does."""
        status = health_pb2.HealthCheckResponse
        is_ready = self.frontend.state is State.READY
        for service in SERVICES:
            await self._health.set(service, status.SERVING if is_ready else status.NOT_SERVING)
        is_draining = self.frontend.state is State.DRAINING
        await self._health.set("", status.NOT_SERVING if is_draining else status.SERVING)


def _check_port_is_free(address: str) -> None:
    """Find out that a port is taken before gRPC does, whose own report is not one line."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{address} is in use; choose another with --listen-address") from None
        raise ConfigError(f"listen_address: cannot listen on {address}: {error.strerror or error}") from None


def _credentials(config: ServerConfig) -> grpc.ServerCredentials:
    files = {"tls_private_key": config.tls_private_key, "tls_certificate": config.tls_certificate}
    contents = []
    for name, path in files.items():
        try:
            contents.append(Path(path or "").read_bytes())
        except OSError as error:
            raise ConfigError(f"{name}: {path}: {error.strerror}") from None
    return grpc.ssl_server_credentials([(contents[0], contents[1])])


def engine_config(config: ServerConfig, checkpoint: Checkpoint) -> EngineConfig:
    """What the engine process needs to know.

    Raises:
        ConfigError: the model was not made for a context of this length.
    """
    limit = checkpoint.config.get("max_position_embeddings")
    if isinstance(limit, int) and (config.max_model_len or 0) > limit:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than the {limit} tokens of the model's context"
        )
    return EngineConfig(
        model_path=str(checkpoint.path),
        device=config.device,
        dtype=config.dtype,
        num_threads=config.threads or 0,
        block_size=config.block_size,
        kv_cache_bytes=config.kv_cache_memory or 0,
        max_num_sequences=config.max_num_sequences,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len or 0,
        max_num_waiting=config.max_num_waiting,
        max_num_waiting_tokens=config.max_num_waiting_tokens,
        speculation=config.speculation,
        max_draft_tokens=config.max_draft_tokens,
        log_level=config.log_level,
        log_json=config.has_json_log,
    )


@asynccontextmanager
async def running_server(
    config: ServerConfig, on_progress: Progress = lambda stage, done, total: None
) -> AsyncIterator[Server]:
    """A server that serves its model; on leaving, it ends its calls and its engine at once.

    Args:
        config: all settings; tests set `listen_address="127.0.0.1:0"`.
        on_progress: called with (stage, done, total) while the model loads.

    Raises:
        ConfigError: the address or a setting cannot be used.
        CheckpointError: the model cannot be read.
        EngineUnavailable, EngineFault: the engine did not start.
    """
    _check_port_is_free(config.listen_address)  # before time is spent on a model
    path = default_model_path() if config.model is None else Path(config.model)
    on_progress("tokenizer", 0, 1)
    checkpoint = await asyncio.to_thread(open_checkpoint, path)
    name = config.served_name or (DEFAULT_MODEL_NAME if config.model is None else path.stem)
    text = await asyncio.to_thread(TextProcessor, checkpoint, num_threads=config.tokenizer_threads)
    has_chat_template = checkpoint.chat_template is not None
    model = ServedModel(name, checkpoint.architecture, text, checkpoint.eos_token_ids, has_chat_template)
    engine = EngineClient()
    try:
        settings = engine_config(config, checkpoint)
        server = Server(config, engine, model)
        supervisor = EngineSupervisor(
            settings,
            engine,
            on_progress=on_progress,
            on_ready=server.note_engine,
            engine_timeout_s=config.engine_timeout_s,
        )
        await server.start()
        try:
            await asyncio.gather(supervisor.start(), text.start())
            yield server
        finally:
            await server.stop()
            await supervisor.stop()
    finally:
        text.close()


async def serve(
    config: ServerConfig, on_progress: Progress, body: Callable[[Server, Shutdown], Awaitable[None]]
) -> None:
    """Start a server, run `body` with it, and drain it when that returns; a signal may end all of it early.

    Args:
        config: all settings.
        on_progress: called with (stage, done, total) while the model loads.
        body: usually waits for the shutdown.
    """
    with Shutdown() as shutdown:
        try:
            async with running_server(config, on_progress) as server:
                await body(server, shutdown)
                await server.drain(config.drain_grace_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not shutdown.was_forced or task is None:
                raise
            task.uncancel()
