"""Tokens of an output that wait for each other, so that fewer messages carry them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Coalescer:
    """Says when the waiting tokens of one output leave: the first at once, later ones together.

    Attributes:
        is_due: what waits leaves now.
    """

    __slots__ = ("_delay_s", "_notify", "_num_tokens", "_timer", "is_due")

    def __init__(self, num_tokens: int, delay_s: float, notify: Callable[[], None]) -> None:
        """Wait for nothing yet.

        Args:
            num_tokens: so many leave together.
            delay_s: fewer leave once the first of them has waited so long.
            notify: called when that time has passed.
        """
        self.is_due = True
        self._num_tokens = num_tokens
        self._delay_s = delay_s
        self._notify = notify
        self._timer: asyncio.TimerHandle | None = None

    def add(self, num_waiting: int) -> None:
        """Take the news that further tokens wait, which are `num_waiting` now."""
        if self.is_due:
            return
        if num_waiting >= self._num_tokens:
            self.is_due = True
            self.close()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._end_delay)

    def restart(self) -> None:
        """Take the news that everything has left."""
        self.is_due = self._num_tokens == 1
        self.close()

    def close(self) -> None:
        """Wait no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_delay(self) -> None:
        self._timer = None
        self.is_due = True
        self._notify()
