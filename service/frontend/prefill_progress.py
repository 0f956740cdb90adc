"""How much of a prompt is computed, for callers that want to know meanwhile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens in the KV cache at an instant of the monotonic clock, and how many of them were cached before."""

    num_computed: int
    num_cached: int
    instant_ns: int


class PrefillProgress:
    """Keeps the latest progress until it is taken. What a preemption undid is not told again."""

    def __init__(self) -> None:
        self._num_computed = 0
        self._news: Progress | None = None

    def note(self, progress: Progress) -> bool:
        """Take the state after a step; true when more is computed than ever before."""
        if progress.num_computed <= self._num_computed:
            return False
        self._num_computed = progress.num_computed
        self._news = progress
        return True

    def take(self) -> Progress | None:
        """The latest progress, if there was any since the last time."""
        news, self._news = self._news, None
        return news
