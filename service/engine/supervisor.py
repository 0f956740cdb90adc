"""Keeps one engine process alive."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from foreword.scheduler.errors import EngineFault, EngineUnavailable, ForewordError
from foreword.service.engine.client import EngineClient
from foreword.service.engine.config import EngineConfig
from foreword.service.engine.control import (
    Event,
    Launch,
    LoadFailed,
    Loading,
    Ready,
    StepFailed,
    decode_event,
    encode_line,
)

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_HEALTHY_LIFE_S = 60.0
_REAP_TIMEOUT_S = 0.5
_TERMINATE_TIMEOUT_S = 2.0
_CHECKS_PER_TIMEOUT = 10
"""Short enough that time in which this process itself was stopped does not count as the engine's."""

_LINE_LIMIT = 1 << 20
_STANDARD_ERROR = 2

logger = structlog.get_logger("foreword.engine")


class EngineSupervisor:
    """Starts the engine process, connects a client to it, and starts another one when it dies.

    The process is executed afresh, so it shares no state with this one: not its modules, not its event loop, not its
    sockets. It has a process group of its own, out of reach of a terminal's Ctrl-C.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        *,
        on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        on_ready: Callable[[bool], None] = lambda ready: None,
        factory: str = "foreword.service.engine.builder:build_engine",
        engine_timeout_s: float = 60.0,
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            config: of every engine started.
            client: is connected to each engine in turn.
            on_progress: called with (stage, done, total) while an engine loads.
            on_ready: called with True when an engine takes requests, with False when it has died or is stopped.
            factory: "module:function" that builds the engine in its process.
            engine_timeout_s: an engine that says nothing for so long is killed; more than its longest step takes.
        """
        self.client = client
        self._config = config
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._factory = factory
        self._engine_timeout_s = engine_timeout_s
        self._directory: Path | None = None
        self._process: Process | None = None
        self._events: asyncio.StreamReader | None = None
        self._lifeline: asyncio.StreamWriter | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The engine process, None when there is none."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the engine and wait until it takes requests; cancel it to give the engine up.

        Raises:
            CheckpointError, ConfigError, EngineFault: the engine cannot be built.
            EngineUnavailable: its process died while it loaded.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="foreword-"))  # mode 0700
        try:
            await self._launch()
        except BaseException:
            await self.stop(grace_s=0.0)
            raise
        self._keeper = asyncio.create_task(self._keep_alive(), name="engine-supervisor")

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the engine, first by asking; generations that still run fail. Nothing is left behind.

        Args:
            grace_s: how long to wait before the process is terminated, and later killed.
        """
        if self._keeper is not None:
            self._keeper.cancel()
            (outcome,) = await asyncio.gather(self._keeper, return_exceptions=True)
            if isinstance(outcome, Exception):
                logger.error("supervision had failed", exc_info=outcome)
            self._keeper = None
        await self._end_process(EngineUnavailable("the engine was stopped"), grace_s)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _launch(self) -> None:
        """Start one process and wait until it takes requests."""
        address = f"ipc://{self._directory}/engine"
        ours, theirs = socket.socketpair()
        with theirs:
            self._events, self._lifeline = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "foreword.service.engine.process"),
                stdin=theirs.fileno(),
                stdout=_STANDARD_ERROR,
                process_group=0,
            )
        launch = Launch(self._factory, self._config, address, time.monotonic_ns())
        self._lifeline.write(encode_line(launch))
        await self._await_ready()
        await self.client.connect(address)
        logger.info("engine is ready", pid=self.pid)
        self._on_ready(True)

    async def _await_ready(self) -> None:
        while True:
            match await self._next_event():
                case Loading(stage, done, total):
                    self._on_progress(stage, done, total)
                case Ready():
                    return
                case LoadFailed(error):
                    raise error.to_error()
                case None:
                    raise EngineUnavailable(f"{await self._cause_of_death()} while loading")

    async def _keep_alive(self) -> None:
        """Restart the engine whenever it dies, waiting longer each time unless it lived well."""
        delay_s = _FIRST_DELAY_S
        born = time.monotonic()
        while True:
            if self.client.ready:
                await self._watch()
                if time.monotonic() - born >= _HEALTHY_LIFE_S:
                    delay_s = _FIRST_DELAY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            born = time.monotonic()
            try:
                await self._launch()
            except (ForewordError, OSError) as error:
                logger.error("engine could not be restarted", error=str(error), retry_s=delay_s)
                await self._end_process(EngineUnavailable(f"the engine could not be restarted: {error}"), 0.0)

    async def _watch(self) -> None:
        """Wait until the engine has died, or kill it when it hangs; end what it worked on."""
        watchdog = asyncio.create_task(self._kill_when_silent(), name="engine-watchdog")
        try:
            while (event := await self._next_event()) is not None:
                if isinstance(event, StepFailed):
                    self.client.fail(event.request_keys, EngineFault(event.message))
        finally:
            watchdog.cancel()
            await asyncio.wait([watchdog])
        has_hung = not watchdog.cancelled()
        cause = f"engine did not respond for {self._engine_timeout_s:g} s" if has_hung else await self._cause_of_death()
        logger.error("engine died", cause=cause)
        await self._end_process(EngineUnavailable(cause), 0.0)

    async def _kill_when_silent(self) -> None:
        """Return once the engine has said nothing for too long, not even when asked, and was killed for it."""
        num_silent = 0
        while num_silent < _CHECKS_PER_TIMEOUT:
            num_received = self.client.num_received
            self.client.ping()
            await asyncio.sleep(self._engine_timeout_s / _CHECKS_PER_TIMEOUT)
            num_silent = 0 if self.client.num_received != num_received else num_silent + 1
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _next_event(self) -> Event | None:
        """What the process says next; None once it has died."""
        assert self._events is not None
        with suppress(ConnectionResetError):
            if line := await self._events.readline():
                return decode_event(line)
        return None

    async def _cause_of_death(self) -> str:
        if await self._has_ended(_REAP_TIMEOUT_S):
            assert self._process is not None
            return f"engine process exited with code {self._process.returncode}"
        return "engine process closed its lifeline"

    async def _end_process(self, error: ForewordError, grace_s: float) -> None:
        """Leave neither connection nor process, whatever state they are in."""
        if self._lifeline is not None:
            self._lifeline.close()
            with suppress(ConnectionError):
                await self._lifeline.wait_closed()
        if self.client.ready:
            self.client.disconnect(error)
            self._on_ready(False)
        if self._process is not None:
            if not await self._has_ended(grace_s):
                with suppress(ProcessLookupError):
                    self._process.terminate()
            if not await self._has_ended(_TERMINATE_TIMEOUT_S):
                with suppress(ProcessLookupError):
                    self._process.kill()
            await self._process.wait()
            self._process = None

    async def _has_ended(self, timeout_s: float) -> bool:
        assert self._process is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # `wait_for` may lose a cancellation before Python 3.12
                await self._process.wait()
            return True
        return False
