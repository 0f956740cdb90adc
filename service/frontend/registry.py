"""Which generations are under way in this server, by their callers' ids."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator

from foreword.scheduler.errors import DuplicateRequest, EngineUnavailable, ForewordError, UnknownRequest
from foreword.service.frontend.generation import Generation

MAX_RECENT = 4096
"""Ended generations whose ids are remembered."""


class GenerationRegistry:
    """Active generations, and the ids of recently ended ones.

    Attributes:
        is_closed: no further generation is let in.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._active: dict[str, Generation] = {}
        self._serials: dict[str, int] = {}
        self._last_serial = 0
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """Number of active generations."""
        return len(self._active)

    def __iter__(self) -> Iterator[Generation]:
        """Active generations, oldest first."""
        return iter(list(self._active.values()))

    def check_free(self, request_id: str) -> None:
        """Accept an id that no active generation has.

        Raises:
            DuplicateRequest: one has.
            EngineUnavailable: the registry is closed.
        """
        if self.is_closed:
            raise EngineUnavailable("the server is shutting down")
        if request_id in self._active:
            raise DuplicateRequest(f"a generation with request_id {request_id!r} is active", request_id=request_id)

    def add(self, generation: Generation) -> None:
        """Make a generation known by its id, which must be free."""
        request_id = generation.settings.request_id
        self._active[request_id] = generation
        self._last_serial += 1
        self._serials[request_id] = self._last_serial
        self._empty.clear()

    def remove(self, generation: Generation, *, remember: bool) -> None:
        """Forget a generation; its id stays known for a while if it was ever admitted."""
        request_id = generation.settings.request_id
        del self._active[request_id]
        del self._serials[request_id]
        if remember:
            self._recent[request_id] = None
            self._recent.move_to_end(request_id)
            if len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)
        if not self._active:
            self._empty.set()

    def page(self, after: int, size: int) -> tuple[list[Generation], int]:
        """Part of the active generations, oldest first.

        Args:
            after: the mark that the previous part came with; 0 for the first part.
            size: most generations to return.

        Returns:
            Generations that are younger than the mark, and the mark of the next part; 0 when there is none.

        Raises:
            ValueError: there never was such a mark.
        """
        if not 0 <= after <= self._last_serial:
            raise ValueError(after)
        younger = [request_id for request_id, serial in self._serials.items() if serial > after]
        part = younger[:size]
        mark = self._serials[part[-1]] if len(younger) > size else 0
        return [self._active[request_id] for request_id in part], mark

    def cancel(self, request_id: str) -> bool:
        """End a generation early. False when it had ended already.

        Raises:
            UnknownRequest: no active or recent generation has this id.
        """
        generation = self._active.get(request_id)
        if generation is not None:
            was_active = not generation.is_over
            generation.cancel()
            return was_active
        if request_id in self._recent:
            return False
        raise UnknownRequest(f"no generation with request_id {request_id!r} is active or ended recently")

    def fail_all(self, error: ForewordError) -> None:
        """End all generations with an error."""
        for generation in self:
            generation.fail(error)

    async def wait_until_empty(self) -> None:
        """Return once no generation is active."""
        await self._empty.wait()
