"""The server: sockets, services, the engine behind them, and an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import structlog
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.checkpoint.default_model import DEFAULT_MODEL_NAME, default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.scheduler.errors import ConfigError, EngineUnavailable
from foreword.service.config import ServerConfig
from foreword.service.engine.client import EngineClient
from foreword.service.engine.config import EngineConfig
from foreword.service.engine.supervisor import EngineSupervisor
from foreword.service.frontend.engine_service import EngineService
from foreword.service.frontend.frontend import Frontend, State
from foreword.service.frontend.generation_service import GenerationService
from foreword.service.frontend.model import ServedModel
from foreword.service.frontend.model_service import ModelService
from foreword.service.frontend.reflection import add_reflection
from foreword.service.frontend.tokenization_service import TokenizationService
from foreword.service.listener import Listener, check_port_is_free
from foreword.service.metrics_server import MetricsServer
from foreword.service.shutdown import Shutdown
from foreword.service.text.processor import TextProcessor
from foreword.v1 import (
    engine_service_pb2_grpc,
    generation_service_pb2_grpc,
    model_service_pb2_grpc,
    tokenization_service_pb2_grpc,
)

_log = structlog.get_logger(__name__)

CALLER_SERVICES = ("foreword.v1.GenerationService", "foreword.v1.TokenizationService", "foreword.v1.ModelService")
ENGINE_SERVICE = "foreword.v1.EngineService"
SERVICES = (*CALLER_SERVICES, ENGINE_SERVICE)
HEALTH_SERVICE = "grpc.health.v1.Health"
CHANNELZ_SERVICE = "grpc.channelz.v1.Channelz"

FLUSH_S = 1.0
"""Time the last messages of ended calls get to reach their clients; it also ends idle streams at shutdown."""

Progress = Callable[[str, int, int], None]


class Server:
    """One front end and its engine process, from start to stop.

    Attributes:
        address: it listens at, with the port that was picked when the configured one is 0.
        admin_address: the same for `EngineService`.
        metrics_server: serves metrics once started, if the settings say so.
        frontend: what the services share.
    """

    def __init__(self, config: ServerConfig, engine: EngineClient, model: ServedModel) -> None:
        """Bind the port.

        Raises:
            ConfigError: the address cannot be used, or a certificate not be read.
        """
        self.frontend = Frontend(engine, model, config)
        self._config = config
        self._health = health.aio.HealthServicer()
        self._health_changed = asyncio.Event()
        self._drained = asyncio.Event()
        count_error = self.frontend.metrics.count_error
        self._listeners = [Listener(config, "listen_address", count_error)]
        if config.admin_listen_address is not None:
            self._listeners.append(Listener(config, "admin_listen_address", count_error))
        self._add_services()
        self.address = self._listeners[0].address
        self.admin_address = self._listeners[-1].address
        self.metrics_server: MetricsServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take calls. Those that need an engine are UNAVAILABLE until there is one.

        Raises:
            ConfigError: the address for metrics cannot be used.
        """
        if self._config.metrics_listen_address is not None:
            self.metrics_server = MetricsServer(self._config.metrics_listen_address, self.frontend.metrics)
        await self._report_health()
        for listener in self._listeners:
            await listener.grpc_server.start()
        self._tasks = [asyncio.create_task(self._follow_health()), asyncio.create_task(self._follow_drain())]

    def note_engine(self, ready: bool) -> None:
        """Take the news that the engine became ready or died."""
        _log.info("engine", ready=ready)
        self._health_changed.set()

    async def drain(self, grace_s: float) -> None:
        """Report NOT_SERVING, give load balancers time to notice, then refuse new generations and wait for the others.

        Args:
            grace_s: how long to wait, unless an operator has said; generations left then are ended by `stop`.
        """
        if not self.frontend.drain.is_requested:
            self.frontend.drain.request(grace_s)
        await self._drained.wait()

    async def stop(self) -> None:
        """End all calls and close the port."""
        self.frontend.registry.is_closed = True
        self.frontend.registry.fail_all(EngineUnavailable("the server is shutting down"))
        self.frontend.steps.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.metrics_server is not None:
            await self.metrics_server.stop()
        await asyncio.gather(*(listener.grpc_server.stop(FLUSH_S) for listener in self._listeners))

    def _add_services(self) -> None:
        frontend, listener = self.frontend, self._listeners[0].grpc_server
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(frontend), listener)
        tokenization_service_pb2_grpc.add_TokenizationServiceServicer_to_server(TokenizationService(frontend), listener)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(frontend), listener)
        self._add_common_services(listener, SERVICES if self._config.has_shared_listener else CALLER_SERVICES)
        if len(self._listeners) > 1:
            self._add_common_services(self._listeners[1].grpc_server, (ENGINE_SERVICE,))

    def _add_common_services(self, listener: grpc.aio.Server, services: tuple[str, ...]) -> None:
        """Add what every listener has, and `EngineService` where `services` names it."""
        if ENGINE_SERVICE in services:
            engine_service_pb2_grpc.add_EngineServiceServicer_to_server(EngineService(self.frontend), listener)
            if self._config.channelz:
                channelz.add_channelz_servicer(listener)
                services = (*services, CHANNELZ_SERVICE)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, listener)
        add_reflection((*services, HEALTH_SERVICE), listener)

    async def _follow_health(self) -> None:
        while True:
            await self._health_changed.wait()
            self._health_changed.clear()
            await self._report_health()

    async def _follow_drain(self) -> None:
        drain = self.frontend.drain
        await drain.wait()
        await self._report_health()
        _log.info("draining", active=len(self.frontend.registry), grace_s=round(drain.remaining_s, 3))
        await drain.finish()
        self._drained.set()

    async def _report_health(self) -> None:
        """The server itself is alive as long as it answers; its services serve when an engine does."""
        status = health_pb2.HealthCheckResponse
        is_ready = self.frontend.state is State.READY
        for service in SERVICES:
            await self._health.set(service, status.SERVING if is_ready else status.NOT_SERVING)
        is_draining = self.frontend.state is State.DRAINING
        await self._health.set("", status.NOT_SERVING if is_draining else status.SERVING)


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
        tenant_weights=config.tenant_weights,
        speculation=config.speculation,
        draft_model_path=config.draft_model or "",
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
    for setting in (
        "listen_address",
        "admin_listen_address",
        "metrics_listen_address",
    ):  # before time is spent on a model
        if (address := getattr(config, setting)) is not None:
            check_port_is_free(address, setting)
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
        body: usually waits for the shutdown, which a signal or `DrainServer` asks for.
    """
    with Shutdown() as shutdown:
        try:
            async with running_server(config, on_progress) as server:
                server.frontend.drain.on_request = shutdown.request
                await body(server, shutdown)
                await server.drain(config.drain_grace_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not shutdown.was_forced or task is None:
                raise
            task.uncancel()
