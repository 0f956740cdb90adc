"""What proposes tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from foreword.scheduler.request import Request
from foreword.scheduler.step import Int32Array, StepPlan


@dataclass(frozen=True, slots=True)
class Proposals:
    """Drafts of some rows, in buffers that the next `propose` overwrites.

    Attributes:
        offsets: int32 `[B + 1]`; drafts of row b are `offsets[b]:offsets[b + 1]`.
        token_ids: int32 `[D]`, all in the vocabulary.
        confidences: int32 `[B]` how much the drafter has to go by, from 1 to its `max_confidence`; rows of equal
            confidence are accepted about equally often. 0 for a row without a proposal.
        drafters: int32 `[B]` who proposed, as an index of the drafter's `names`; None for the only one.
    """

    offsets: Int32Array
    token_ids: Int32Array
    confidences: Int32Array
    drafters: Int32Array | None = None


@runtime_checkable
class PlanDrafter(Protocol):
    """A drafter that computes what the target computes."""

    def see(self, plan: StepPlan) -> None:
        """Take the plan of the step whose tokens come next."""


class Drafter(Protocol):
    """Follows the tokens of every row of the scheduler and guesses how they go on.

    Attributes:
        name: that requests and operators use.
        names: of the drafters that it chooses among; its own alone if it does not choose.
        max_confidence: greatest confidence of a proposal.
    """

    name: str
    names: tuple[str, ...]
    max_confidence: int

    def admit(self, row: int, request: Request, output_token_ids: Int32Array) -> None:
        """Forget what a row held; it (re)starts with the prompt of a request and the output so far."""

    def observe(
        self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array, starts: Int32Array, ends: Int32Array
    ) -> None:
        """Learn tokens that stand in rows: b's are `token_ids[starts[b]:ends[b]]`, from `positions[b]` on.

        Those at positions that are known already change nothing.
        """

    def propose(self, rows: Int32Array, limits: Int32Array) -> Proposals:
        """Guess what follows the last token of each row, at most `limits[b]` tokens."""
