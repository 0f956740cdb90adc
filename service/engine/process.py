"""Main program of the engine process; its standard input is the lifeline (see `control`)."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from foreword.scheduler.errors import ConfigError, EngineFault, ForewordError
from foreword.service.engine.config import EngineConfig
from foreword.service.engine.control import (
    Event,
    Launch,
    LoadFailed,
    Loading,
    Ready,
    StepFailed,
    decode_launch,
    encode_line,
)
from foreword.service.engine.engine import Engine, StepFault
from foreword.service.engine.loop import EngineLoop
from foreword.service.engine.messages import ErrorRecord
from foreword.service.logs import configure_logging

Progress = Callable[[str, int, int], None]
Factory = Callable[[EngineConfig, Progress], Engine]

logger = structlog.get_logger("foreword.engine")


def main() -> int:
    """Build the engine and serve until the lifeline ends; the exit status is 0 if that was why it ended."""
    gc.disable()  # what loading makes stays: looking for garbage in it costs a second and finds none
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor
    lifeline = socket.socket(fileno=sys.stdin.fileno())
    launch = decode_launch(lifeline.makefile("rb").readline())
    configure_logging(launch.config.log_level, launch.config.log_json)
    try:
        return _serve(launch, lifeline)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the supervisor is gone


def _serve(launch: Launch, lifeline: socket.socket) -> int:
    def tell(event: Event) -> None:
        lifeline.sendall(encode_line(event))

    try:
        engine = _build(launch, lambda stage, done, total: tell(Loading(stage, done, total)))
        loop = EngineLoop(engine, launch.address, lifeline.fileno())
    except ForewordError as error:
        tell(LoadFailed(ErrorRecord.of(error)))
        return 1
    gc.freeze()  # nor is it looked at again, which would hold a step up for a tenth of a second
    gc.enable()
    tell(Ready())
    try:
        loop.run()
    except StepFault as fault:
        logger.error(
            "step failed",
            step_id=fault.step_id,
            num_sequences=len(fault.request_keys),
            exc_info=fault.__cause__,
        )
        tell(StepFailed(fault.request_keys, str(fault)))
        return 1
    finally:
        loop.close()
    _tidy(launch.address)
    return 0


def _build(launch: Launch, progress: Progress) -> Engine:
    """Call the factory; whatever it raises becomes a domain error."""
    module, _, name = launch.factory.partition(":")
    try:
        factory: Factory = getattr(importlib.import_module(module), name)
        engine = factory(launch.config, progress)
    except (ForewordError, BrokenPipeError, ConnectionResetError):
        raise
    except MemoryError:
        raise ConfigError("not enough memory for the model and its KV cache") from None
    except Exception as error:
        logger.exception("engine could not be built")
        raise EngineFault(f"the engine could not be built: {type(error).__name__}: {error}") from error
    engine.info = dataclasses.replace(engine.info, load_duration_s=(time.monotonic_ns() - launch.start_ns) / 1e9)
    return engine


def _tidy(address: str) -> None:
    """Remove the socket and its directory, for a supervisor that died cannot."""
    path = Path(address.removeprefix("ipc://"))
    with suppress(OSError):
        path.unlink()
        path.parent.rmdir()


if __name__ == "__main__":
    sys.exit(main())
