"""One thread whose work is taken from the tenants in turn, so that a flood waits for itself."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from foreword.scheduler.errors import QueueFull

Result = TypeVar("Result")


class FairExecutor:
    """Runs one piece of work at a time. Each tenant that has work waiting gets every n-th turn, n of them waiting.

    Safe for concurrent use.
    """

    def __init__(self, thread_name: str, max_waiting: int) -> None:
        """Prepare; the thread starts at the first work.

        Args:
            thread_name: of the one thread.
            max_waiting: pieces of work of one tenant.
        """
        self._max_waiting = max_waiting
        self._executor = ThreadPoolExecutor(1, thread_name)
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, tenant: str, work: Callable[[], Result]) -> Future[Result]:
        """Hand in work; its future may be cancelled until the work begins.

        Raises:
            QueueFull: too much of the tenant's work waits already.
        """
        future: Future[Result] = Future()
        with self._lock:
            waiting = deque(entry for entry in self._queues.get(tenant, ()) if not entry[0].cancelled())
            if len(waiting) >= self._max_waiting:
                raise QueueFull(
                    f"{len(waiting)} constraints of this tenant wait to be compiled", max_waiting=self._max_waiting
                )
            waiting.append((future, work))
            self._queues[tenant] = waiting
        self._executor.submit(self._run_next)
        return future

    def close(self) -> None:
        """Wait for the work that has begun; the rest is cancelled."""
        while (entry := self._take()) is not None:
            entry[0].cancel()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run_next(self) -> None:
        """Do the work whose turn it is, which need not be that which was handed in with this call."""
        while (entry := self._take()) is not None:
            future, work = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
                return

    def _take(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if not self._queues:
                return None
            tenant, waiting = self._queues.popitem(last=False)
            entry = waiting.popleft()
            if waiting:
                self._queues[tenant] = waiting  # behind all others
            return entry
