"""A sequence of the reference scheduler: a request and all that happened to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from foreword.scheduler.request import Request
from foreword.scheduler.step import FinishReason, StepKind


@dataclass(eq=False)
class ReferenceSequence:
    """A request and all that happened to it."""

    request: Request
    order: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    drafter: int = 0
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0
    num_cached_blocks: int = 0
    num_computed: int = 0
    num_computed_max: int = 0
    prefill_end: int = 0
    leader: ReferenceSequence | None = None  # output of the request that computes the prompt, until it has or ends
    is_paused: bool = False
    num_scheduled: int = 0  # tokens in the last plan that it is part of
    num_planned: int = 0  # plans without a result yet that it is part of
    is_awaited: bool = False  # what it computes next depends on a result
    is_reported: bool = False  # its end is part of an update
    num_overtaken: int = 0
    num_admitted_before: int = 0  # of all requests, when it last paused without a row
    finish_reason: FinishReason = FinishReason.NONE
    first_scheduled_ns: int = 0
    num_prompt_computed: int = 0
    num_scored: int = 1  # leading prompt tokens that are scored, if any is to be
    num_cached: int = 0
    num_steps: int = 0
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Sorts running sequences in the order in which they are served."""
        return -self.request.priority, self.order

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Tokens that it has generated."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_prefill(self) -> bool:
        """It has not computed what it knew when it got its row."""
        return self.num_computed < self.prefill_end

    @property
    def is_scored(self) -> bool:
        """No prompt token is to be scored any more."""
        return not self.request.want_prompt_logprobs or self.num_scored == self.num_prompt

    @property
    def is_ready(self) -> bool:
        """It may be scheduled."""
        return not self.is_paused and self.leader is None

    @property
    def can_be_planned(self) -> bool:
        """It may be part of the next plan, if it holds a row."""
        return self.row is not None and not (self.is_paused or self.is_awaited or self.finish_reason)

    @property
    def has_progress(self) -> bool:
        """False when it gained no token since it resumed after a preemption."""
        return self.num_preemptions == 0 or len(self.tokens) > self.prefill_end

    @property
    def has_earned_its_row(self) -> bool:
        """It gained as many tokens as it must before a waiting request may take its row: 0, 1, 3, 7 and so on."""
        return len(self.tokens) - self.prefill_end >= (1 << self.num_preemptions) - 1

    def update(
        self, step_kind: StepKind, num_tokens: int, num_drafted: int, num_accepted: int, num_scored: int = 0
    ) -> tuple[int, ...]:
        """Its record of dtype `SEQUENCE_UPDATE`."""
        return (
            self.request.request_key,
            self.first_scheduled_ns,
            num_tokens,
            self.num_prompt_computed,
            num_scored,
            self.num_cached,
            num_drafted,
            num_accepted,
            self.num_steps,
            self.num_prefill_chunks,
            self.num_preemptions,
            self.num_recomputed,
            step_kind,
            self.finish_reason,
            self.drafter if num_drafted else 0,
        )
