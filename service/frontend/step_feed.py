"""Tells watchers of every step of the engine; nobody waits for a watcher."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from foreword.service.engine.messages import StepHeader

MAX_UNREAD_STEPS = 1024
"""Steps kept for a watcher that does not read."""

MAX_MESSAGE_STEPS = MAX_UNREAD_STEPS // 2
"""So many steps are sent before the time to collect them is over, so that collecting alone drops none."""


class StepWatcher:
    """The steps that one client has not been sent yet; the oldest give way when there are too many."""

    def __init__(self, closed: asyncio.Event) -> None:
        self._closed = closed
        self._unread: deque[StepHeader] = deque()
        self._num_dropped = 0
        self._has_news = asyncio.Event()
        self._is_ample = asyncio.Event()

    def put(self, header: StepHeader) -> None:
        """Keep a step."""
        if len(self._unread) == MAX_UNREAD_STEPS:
            self._unread.popleft()
            self._num_dropped += 1
        self._unread.append(header)
        self._has_news.set()
        if len(self._unread) >= MAX_MESSAGE_STEPS:
            self._is_ample.set()

    def close(self) -> None:
        """No further step follows."""
        self._has_news.set()
        self._is_ample.set()

    async def wait(self, coalesce_s: float) -> bool:
        """Return once there is a step and further ones have been collected for a while; false when none will come."""
        await self._has_news.wait()
        if coalesce_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(coalesce_s):
                    await self._is_ample.wait()
        return bool(self._unread)

    def take(self) -> tuple[list[StepHeader], int]:
        """The steps since the last time, in order, and how many before them were dropped."""
        headers, num_dropped = list(self._unread), self._num_dropped
        self._unread.clear()
        self._num_dropped = 0
        if not self._closed.is_set():
            self._has_news.clear()
            self._is_ample.clear()
        return headers, num_dropped


class StepFeed:
    """Hands each step to every watcher; without one, that costs nothing.

    Attributes:
        closed: set when the server stops, which ends all watches.
    """

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self._watchers: set[StepWatcher] = set()

    def publish(self, header: StepHeader) -> None:
        """Hand on a step."""
        for watcher in self._watchers:
            watcher.put(header)

    def close(self) -> None:
        """End all watches, those to come included."""
        self.closed.set()
        for watcher in self._watchers:
            watcher.close()

    @contextmanager
    def watch(self) -> Iterator[StepWatcher]:
        """A watcher of the steps from now on."""
        watcher = StepWatcher(self.closed)
        self._watchers.add(watcher)
        if self.closed.is_set():
            watcher.close()
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)
