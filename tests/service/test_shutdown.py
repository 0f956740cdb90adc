from __future__ import annotations

import asyncio
import os
import signal

import pytest

from foreword.service.shutdown import SIGNALS, Shutdown


@pytest.mark.parametrize("number", SIGNALS)
async def test_first_signal_asks_and_second_cancels(number: signal.Signals) -> None:
    async def serve() -> None:
        with Shutdown() as shutdown:
            try:
                await shutdown.wait()
                steps.append("drain")
                os.kill(os.getpid(), number)
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                steps.append(f"cancelled {shutdown.was_forced}")

    steps: list[str] = []
    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(task, 5)
    assert steps == ["drain", "cancelled True"]


async def test_signal_while_nobody_waits_cancels() -> None:
    with Shutdown() as shutdown:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(10)
    assert shutdown.was_forced
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def test_handlers_are_removed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Shutdown():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
