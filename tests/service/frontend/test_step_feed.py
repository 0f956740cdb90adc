from __future__ import annotations

import asyncio
from dataclasses import replace

from foreword.service.engine.messages import StepHeader
from foreword.service.frontend.step_feed import MAX_MESSAGE_STEPS, MAX_UNREAD_STEPS, StepFeed

from .conftest import LOAD

HEADER = StepHeader(0, 0, 0, 0, 0, 1, 1, LOAD)


def publish(feed: StepFeed, first: int, last: int) -> None:
    for step_id in range(first, last + 1):
        feed.publish(replace(HEADER, step_id=step_id))


async def test_what_does_not_fit_is_counted_exactly() -> None:
    feed = StepFeed()
    with feed.watch() as lazy, feed.watch() as eager:
        for step_id in range(1, 3001):
            publish(feed, step_id, step_id)
            headers, num_dropped = eager.take()
            assert ([header.step_id for header in headers], num_dropped) == ([step_id], 0)
        headers, num_dropped = lazy.take()
        assert num_dropped == 3000 - MAX_UNREAD_STEPS
        assert [header.step_id for header in headers] == list(range(num_dropped + 1, 3001))
        publish(feed, 3001, 3002)
        headers, num_dropped = lazy.take()
        assert ([header.step_id for header in headers], num_dropped) == ([3001, 3002], 0)


async def test_a_watcher_sees_steps_from_its_beginning_to_its_end() -> None:
    feed = StepFeed()
    publish(feed, 1, 1)
    with feed.watch() as watcher:
        publish(feed, 2, 2)
    publish(feed, 3, 3)
    assert [header.step_id for header in watcher.take()[0]] == [2]


async def test_collecting_ends_early_when_there_are_many() -> None:
    feed = StepFeed()
    with feed.watch() as watcher:
        waiting = asyncio.create_task(watcher.wait(3600))
        publish(feed, 1, MAX_MESSAGE_STEPS - 1)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        publish(feed, MAX_MESSAGE_STEPS, MAX_MESSAGE_STEPS)
        assert await asyncio.wait_for(waiting, 5)
        assert len(watcher.take()[0]) == MAX_MESSAGE_STEPS


async def test_the_end_of_the_feed_ends_watches() -> None:
    feed = StepFeed()
    with feed.watch() as idle, feed.watch() as behind:
        waiting = asyncio.create_task(idle.wait(3600))
        publish(feed, 1, 1)
        await asyncio.sleep(0)
        idle.take()
        publish(feed, 2, 2)
        feed.close()
        assert await asyncio.wait_for(waiting, 5)
        assert len(idle.take()[0]) == 1
        assert not await idle.wait(3600)
        assert await behind.wait(3600)
        assert len(behind.take()[0]) == 2
        assert not await behind.wait(3600)
    with feed.watch() as late:
        assert not await late.wait(3600)
