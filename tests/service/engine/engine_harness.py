"""Engines in threads, and the account of what a process holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from foreword.service.engine.engine import Engine
from foreword.service.engine.loop import EngineLoop

HERE = Path(__file__).parent


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


def descriptors() -> dict[str, str]:
    """Open files of this process and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found


def children() -> list[str]:
    """Processes that this one started and that still exist, zombies included."""
    pids = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            pids += (task / "children").read_text().split()
    return pids


class EngineThread:
    """An engine loop in a thread of this process."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self.engine = engine
        self.num_steps = 0
        self._path = directory / "engine"
        self.address = f"ipc://{self._path}"
        self._lifeline, theirs = socket.socketpair()
        self._theirs = theirs
        step = engine.step

        def counted_step() -> object:
            self.num_steps += 1
            return step()

        engine.step = counted_step  # type: ignore[method-assign, assignment]
        self.loop = EngineLoop(engine, self.address, theirs.fileno())
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._lifeline.close()
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        self.loop.close()
        self._theirs.close()
        self._path.unlink()
