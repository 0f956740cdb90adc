"""Engines in threads and in processes; nothing of them may be left when a test ends."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_fakes import FakeRunner, make_engine
from engine_harness import HERE, EngineThread, children, descriptors

from foreword.scheduler.errors import EngineUnavailable
from foreword.service.engine.client import EngineClient
from foreword.service.engine.config import EngineConfig
from foreword.service.engine.supervisor import EngineSupervisor


@pytest.fixture
def short_temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files whose path is short enough for a socket; must be empty in the end."""
    directory = Path(tempfile.mkdtemp(prefix="e-"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    left = sorted(directory.rglob("*"))
    shutil.rmtree(directory)
    assert left == []


@pytest.fixture
def serve(short_temp: Path) -> Iterator[Callable[..., EngineThread]]:
    """Serve an engine with a fake runner from a thread."""
    threads: list[EngineThread] = []

    def start(step_s: float = 0.0, **settings: int) -> EngineThread:
        thread = EngineThread(make_engine(EngineConfig("fake", **settings), FakeRunner(step_s)), short_temp)  # type: ignore[arg-type]
        threads.append(thread)
        return thread

    yield start
    for thread in threads:
        thread.close()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., object]]:
    """Connect clients to engines; they must end without any sink left."""
    clients: list[EngineClient] = []

    async def start(thread: EngineThread, front_end: int = 0) -> EngineClient:
        client = EngineClient(front_end)
        clients.append(client)
        await client.connect(thread.address)
        return client

    yield start
    for client in clients:
        client.disconnect(EngineUnavailable("the test is over"))
        assert not client._sinks
        assert not client._admissions


@pytest.fixture
async def launch(short_temp: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., EngineSupervisor]]:
    """Make supervisors of fake engines; afterwards nothing of them may be left."""
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    supervisors: list[EngineSupervisor] = []
    before = descriptors()

    def make(factory: str = "build_slow", model_path: str = "fake", **callbacks: object) -> EngineSupervisor:
        config = EngineConfig(model_path, log_level="warning")
        supervisor = EngineSupervisor(config, EngineClient(), factory=f"engine_fakes:{factory}", **callbacks)  # type: ignore[arg-type]
        supervisors.append(supervisor)
        return supervisor

    yield make
    for supervisor in supervisors:
        await supervisor.stop()
        assert not supervisor.client._sinks
        assert not supervisor.client._admissions
    gc.collect()
    left = {name: file for name, file in descriptors().items() if name not in before}
    assert left == {}
    assert children() == []
