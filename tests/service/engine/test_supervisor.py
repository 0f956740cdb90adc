from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_fakes import NO_LIMIT, POISON, RecordingSink, expected_tokens, make_request
from engine_harness import HERE, children, until

from foreword.scheduler.errors import CheckpointError, ConfigError, EngineFault, EngineUnavailable
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.step import FinishReason
from foreword.service.engine.supervisor import EngineSupervisor

Launch = Callable[..., EngineSupervisor]


async def generate(supervisor: EngineSupervisor, max_output_tokens: int = 8) -> RecordingSink:
    sink = RecordingSink()
    request = make_request(supervisor.client.new_request_key(), max_output_tokens=max_output_tokens)
    await supervisor.client.submit(request, sink)
    return sink


def processor_ticks(pid: int) -> int:
    """Processor time that a process has used, in clock ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_an_engine_loads_serves_and_ends(launch: Launch, short_temp: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    ready: list[bool] = []
    supervisor = launch("build_fast", on_progress=lambda *news: progress.append(news), on_ready=ready.append)
    assert not supervisor.client.ready
    await supervisor.start()
    assert progress == [("weights", 1, 3), ("weights", 2, 3), ("weights", 3, 3)]
    assert ready == [True]
    info = supervisor.client.info
    assert info is not None
    assert info.device_name == "fake"
    assert 0 < info.load_duration_s < 20
    (directory,) = short_temp.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    sink = await generate(supervisor)
    await until(lambda: sink.ended)
    assert sink.token_ids == expected_tokens(4, 8)
    last = await generate(supervisor, max_output_tokens=NO_LIMIT)
    await supervisor.stop()
    assert last.finish_reason is FinishReason.LENGTH or isinstance(last.error, EngineUnavailable)
    assert ready == [True, False]
    assert supervisor.pid is None
    with pytest.raises(EngineUnavailable, match="stopped"):
        await generate(supervisor)


async def test_many_requests_through_the_process(launch: Launch) -> None:
    supervisor = launch("build_fast")
    await supervisor.start()
    sinks = await asyncio.gather(*(generate(supervisor, 1 + n % 20) for n in range(1000)))
    await until(lambda: all(sink.ended for sink in sinks))
    for n, sink in enumerate(sinks):
        assert sink.token_ids == expected_tokens(4, 1 + n % 20)
    await until(lambda: supervisor.client.load.num_running == 0)


async def test_a_killed_engine_is_noticed_within_a_second_and_replaced(launch: Launch) -> None:
    ready: list[bool] = []
    supervisor = launch(on_ready=ready.append)
    await supervisor.start()
    sinks = [await generate(supervisor, NO_LIMIT) for _ in range(5)]
    await until(lambda: all(len(sink.token_ids) > 3 for sink in sinks))
    first = supervisor.pid
    assert first is not None
    killed = time.monotonic()
    os.kill(first, signal.SIGKILL)
    await until(lambda: all(sink.ended for sink in sinks))
    assert time.monotonic() - killed < 1.0
    for sink in sinks:
        assert isinstance(sink.error, EngineUnavailable)
        assert sink.error.message == "engine process exited with code -9"
        assert sink.token_ids == expected_tokens(4, len(sink.token_ids))
    assert ready == [True, False]
    with pytest.raises(EngineUnavailable, match="-9"):
        await generate(supervisor)
    await until(lambda: supervisor.client.ready)
    assert ready == [True, False, True]
    assert supervisor.pid not in (None, first)
    sink = await generate(supervisor)
    await until(lambda: sink.ended)
    assert sink.token_ids == expected_tokens(4, 8)


async def test_a_killed_engine_fails_what_is_being_submitted(launch: Launch) -> None:
    supervisor = launch()
    await supervisor.start()
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    submission = asyncio.create_task(generate(supervisor))
    await asyncio.sleep(0)
    os.kill(supervisor.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match="-9"):
        await submission


async def test_a_device_fault_fails_the_step_and_the_engine(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    supervisor = launch()
    await supervisor.start()
    running = await generate(supervisor, NO_LIMIT)
    await until(lambda: running.num_updates > 0)
    poison = RecordingSink()
    request = Request(supervisor.client.new_request_key(), np.array([POISON], np.int32), StoppingParams(NO_LIMIT))
    try:
        await supervisor.client.submit(request, poison)
    except EngineFault as error:  # the news of the fault overtook the admission
        poison.error = error
    else:
        await until(lambda: poison.ended)
    await until(lambda: running.ended)
    assert isinstance(running.error, EngineFault)
    assert isinstance(poison.error, EngineFault)
    assert "RuntimeError" in poison.error.message
    await until(lambda: supervisor.client.ready)
    log = capfd.readouterr().err
    assert "RuntimeError" in log
    assert "poison of the prompt" not in log


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("build_damaged", CheckpointError, "^fake: not a model file$"),
        ("build_too_large", ConfigError, "memory"),
        ("build_wrong", EngineFault, "TypeError: a mistake"),
        ("build_deadly", EngineUnavailable, "^engine process exited with code 7 while loading$"),
        ("build_unheard_of", EngineFault, "build_unheard_of"),
    ],
)
async def test_a_first_start_that_fails_is_an_error(
    launch: Launch, factory: str, error: type[Exception], message: str
) -> None:
    ready: list[bool] = []
    supervisor = launch(factory, on_ready=ready.append)
    with pytest.raises(error, match=message):
        await supervisor.start()
    assert ready == []
    assert not supervisor.client.ready
    assert supervisor.pid is None
    assert children() == []


async def test_a_restart_that_fails_is_tried_again(launch: Launch, short_temp: Path) -> None:
    marker = short_temp / "marker"
    supervisor = launch("build_once", model_path=str(marker))
    await supervisor.start()
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    await until(lambda: supervisor.pid is None)
    await until(lambda: supervisor.pid is not None)
    await until(lambda: supervisor.pid is None)
    assert not supervisor.client.ready
    marker.unlink()
    await until(lambda: supervisor.client.ready)
    marker.unlink()


async def test_an_interrupt_does_not_reach_the_engine(launch: Launch) -> None:
    supervisor = launch()
    await supervisor.start()
    assert supervisor.pid is not None
    assert os.getpgid(supervisor.pid) != os.getpgid(0)
    os.kill(supervisor.pid, signal.SIGINT)
    sink = await generate(supervisor)
    await until(lambda: sink.ended)
    assert sink.finish_reason is FinishReason.LENGTH


async def test_an_engine_that_still_loads_can_be_given_up(launch: Launch) -> None:
    supervisor = launch("build_endless")
    start = asyncio.create_task(supervisor.start())
    await until(lambda: supervisor.pid is not None)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert children() == []


async def test_an_engine_that_hangs_is_killed(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.service.engine.supervisor._TERMINATE_TIMEOUT_S", 0.2)
    supervisor = launch()
    await supervisor.start()
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    await supervisor.stop(grace_s=0.1)
    assert children() == []


@pytest.mark.parametrize("phase", ["idle", "submitting", "running", "paused"])
async def test_an_engine_that_does_not_respond_is_replaced(launch: Launch, phase: str) -> None:
    supervisor = launch(engine_timeout_s=0.5)
    await supervisor.start()
    first, sink = supervisor.pid, None
    assert first is not None
    if phase in ("running", "paused"):
        sink = await generate(supervisor, NO_LIMIT)
        await until(lambda: sink.num_updates > 0)
        if phase == "paused":
            supervisor.client.pause(supervisor.client.new_request_key() - 1)
    os.kill(first, signal.SIGSTOP)
    stopped = time.monotonic()
    if phase == "submitting":
        with pytest.raises(EngineUnavailable, match=r"^engine did not respond for 0.5 s$"):
            await generate(supervisor)
    await until(lambda: not supervisor.client.ready)
    assert 0.4 < time.monotonic() - stopped < 2.0
    if sink is not None:
        assert isinstance(sink.error, EngineUnavailable)
        assert sink.error.message == "engine did not respond for 0.5 s"
    await until(lambda: supervisor.client.ready)
    assert supervisor.pid not in (None, first)


async def test_an_engine_that_is_slow_or_has_nothing_to_do_is_left_alone(launch: Launch) -> None:
    supervisor = launch(engine_timeout_s=0.2)  # of twenty steps
    await supervisor.start()
    first = supervisor.pid
    sink = await generate(supervisor, 80)
    await until(lambda: sink.ended)
    assert sink.finish_reason is FinishReason.LENGTH
    paused = await generate(supervisor, NO_LIMIT)
    supervisor.client.pause(supervisor.client.new_request_key() - 1)
    await asyncio.sleep(0.6)
    assert not paused.ended
    assert supervisor.pid == first


async def test_stopping_twice_and_before_the_start_is_harmless(launch: Launch) -> None:
    supervisor = launch("build_fast")
    await supervisor.stop()
    await supervisor.start()
    await supervisor.stop()
    await supervisor.stop()


async def test_stopping_while_it_waits_to_restart(launch: Launch) -> None:
    supervisor = launch()
    await supervisor.start()
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    await until(lambda: not supervisor.client.ready)
    await supervisor.stop()
    assert children() == []


async def test_an_idle_engine_uses_no_processor_time(launch: Launch) -> None:
    supervisor = launch("build_fast")
    await supervisor.start()
    sink = await generate(supervisor)
    await until(lambda: sink.ended)
    assert supervisor.pid is not None
    await asyncio.sleep(0.5)  # what the first generation left to do
    before = processor_ticks(supervisor.pid)
    await asyncio.sleep(0.5)
    assert processor_ticks(supervisor.pid) - before <= 1, "busy waiting would take up to 50"


ORPHAN = """
import asyncio, sys
from foreword.service.engine.client import EngineClient
from foreword.service.engine.config import EngineConfig
from foreword.service.engine.supervisor import EngineSupervisor
from foreword.service.logs import configure_logging

async def main():
    configure_logging("error", json=True)
    supervisor = EngineSupervisor(EngineConfig("fake"), EngineClient(), factory="engine_fakes:build_slow")
    await supervisor.start()
    forbidden = {"torch", "foreword.gpu", "foreword.scheduler.scheduler", "multiprocessing"} & set(sys.modules)
    print(supervisor.pid, sorted(forbidden), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_an_engine_does_not_outlive_its_supervisor(short_temp: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}", "TMPDIR": str(short_temp)}
    with subprocess.Popen([sys.executable, "-c", ORPHAN], env=environment, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pid, _, forbidden = supervisor.stdout.readline().decode().partition(" ")
        supervisor.kill()
    assert forbidden.strip() == "[]", "the front end's process holds none of the engine's modules"
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
    assert list(short_temp.iterdir()) == [], "nor does its socket"
