"""How a server's work comes to an orderly end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from foreword.service.frontend.registry import GenerationRegistry


class Drain:
    """Asked for once; a later request can only make it shorter.

    Attributes:
        is_requested: the server is about to end.
        on_request: called by each request; must neither block nor raise.
    """

    def __init__(self, registry: GenerationRegistry, delay_s: float) -> None:
        """Prepare.

        Args:
            registry: generations that are to end.
            delay_s: time between the request and the refusal of new generations.
        """
        self.is_requested = False
        self.on_request: Callable[[], None] = lambda: None
        self._registry = registry
        self._delay_s = delay_s
        self._closing_s = math.inf  # this and the next by the event loop's clock
        self._deadline_s = math.inf
        self._timeout: asyncio.Timeout | None = None
        self._requested = asyncio.Event()

    @property
    def remaining_s(self) -> float:
        """Time that generations under way still have; infinite unless the drain is requested."""
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    def request(self, grace_s: float) -> None:
        """Ask for the end; generations that are left a grace after new ones are refused are not waited for."""
        now_s = asyncio.get_running_loop().time()
        self._closing_s = min(self._closing_s, now_s + self._delay_s)
        self._deadline_s = min(self._deadline_s, max(now_s, self._closing_s) + grace_s)
        if self._timeout is not None:
            self._timeout.reschedule(self._deadline_s)
        self.is_requested = True
        self._requested.set()
        self.on_request()

    async def wait(self) -> None:
        """Return once the end is asked for."""
        await self._requested.wait()

    async def finish(self) -> None:
        """Refuse new generations after the delay, then wait for the others as long as they have."""
        await asyncio.sleep(self._closing_s - asyncio.get_running_loop().time())
        self._registry.is_closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._deadline_s) as self._timeout:
                try:
                    await self._registry.wait_until_empty()
                finally:
                    self._timeout = None
