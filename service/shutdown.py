"""How a terminal or an init system ends the server."""

from __future__ import annotations

import asyncio
import signal
from types import TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Shutdown:
    """Turns the first SIGINT or SIGTERM into a request for an orderly end, and any other into a cancel.

    Only a task that waits for the request can end in good order; while it does something else, such as loading a model,
    the first signal cancels it, too.

    Attributes:
        was_forced: the task was cancelled by a signal.
    """

    def __init__(self) -> None:
        self.was_forced = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._requested = asyncio.Event()
        self._is_awaited = False
        self._was_signalled = False

    async def wait(self) -> None:
        """Return when an orderly end is asked for."""
        self._is_awaited = True
        await self._requested.wait()

    def request(self) -> None:
        """Ask for an orderly end without a signal."""
        self._requested.set()

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._is_awaited and not self._was_signalled:
            self._was_signalled = True
            self.request()
        elif self._task is not None:
            self.was_forced = True
            self._task.cancel()
