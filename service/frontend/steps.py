"""Which engine steps a generation's tokens come from, for those who ask for the timing of every step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from foreword.service.engine.messages import StepHeader


@dataclass(slots=True)
class _Source:
    """A step with tokens that are still held back."""

    header: StepHeader
    kind: int
    num_drafted: int
    num_accepted: int
    arrival_ns: int
    num_held: int
    drafter: int


@dataclass(slots=True)
class StepShare:
    """What one step contributed to one delta.

    Attributes:
        header: facts about the step.
        kind: `scheduler.step.StepKind` for this sequence.
        num_drafted: draft tokens of this sequence that the step checked.
        num_accepted: of those, accepted.
        num_tokens: tokens of the delta that come from the step.
        hold_ns: longest time one of them waited for the rest of a character or of a possible stop string.
        release_ns: when the first of them could be sent.
        drafter: index of who proposed the draft tokens.
        emit_ns: when the delta was handed to gRPC.
    """

    header: StepHeader
    kind: int
    num_drafted: int
    num_accepted: int
    num_tokens: int
    hold_ns: int
    release_ns: int
    drafter: int = 0
    emit_ns: int = 0


class StepLedger:
    """Follows tokens from their steps to the deltas they leave with."""

    def __init__(self) -> None:
        self._sources: deque[_Source] = deque()
        self._shares: list[StepShare] = []
        self._last: _Source | None = None

    def add(
        self,
        header: StepHeader,
        kind: int,
        num_drafted: int,
        num_accepted: int,
        num_tokens: int,
        now_ns: int,
        drafter: int = 0,
    ) -> None:
        """Note a step's tokens, all of them held at first."""
        if num_tokens:
            self._sources.append(_Source(header, kind, num_drafted, num_accepted, now_ns, num_tokens, drafter))

    def release(self, num_tokens: int, now_ns: int) -> None:
        """Note that the longest held tokens can be sent now."""
        while num_tokens:
            source = self._sources[0]
            count = min(num_tokens, source.num_held)
            hold_ns = now_ns - source.arrival_ns
            if self._shares and source is self._last:
                self._shares[-1].num_tokens += count
                self._shares[-1].hold_ns = hold_ns
            else:
                self._shares.append(
                    StepShare(
                        source.header,
                        source.kind,
                        source.num_drafted,
                        source.num_accepted,
                        count,
                        hold_ns,
                        now_ns,
                        source.drafter,
                    )
                )
                self._last = source
            source.num_held -= count
            num_tokens -= count
            if not source.num_held:
                self._sources.popleft()

    def hand_over(self, now_ns: int) -> None:
        """Note that all tokens released since the last time went to gRPC."""
        for share in reversed(self._shares):
            if share.emit_ns:
                break
            share.emit_ns = now_ns
        self._last = None

    def take(self) -> list[StepShare]:
        """The shares handed over since the last time."""
        shares, self._shares = self._shares, []
        return shares
