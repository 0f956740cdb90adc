"""How many tokens and steps a generation took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from foreword.scheduler.step import StepKind
from foreword.service.engine.messages import StepHeader
from foreword.service.frontend.output import Record


@dataclass(slots=True)
class Counts:
    """Tokens and steps of a generation up to now, over all of its outputs; those of the prompt are counted once.

    Attributes:
        verifications: how often so many drafts of a drafter (its index) were checked and so many accepted.
    """

    num_prompt: int = 0
    num_prompt_computed: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    verifications: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    _last_step_id: int = 0
    _last_prefill_step_id: int = 0

    def add(self, header: StepHeader, record: Record, last: Record) -> None:
        """Add what a record of a step brings to what the last one of its output said; a step counts for all outputs."""
        self.num_drafted += record.num_drafted
        self.num_accepted += record.num_accepted
        if record.step_kind != StepKind.NONE and header.step_id != self._last_step_id:
            self._last_step_id = header.step_id
            self.num_steps += 1
        if record.num_prefill_chunks > last.num_prefill_chunks and header.step_id != self._last_prefill_step_id:
            self._last_prefill_step_id = header.step_id
            self.num_prefill_chunks += 1
        self.num_preemptions += record.num_preemptions - last.num_preemptions
        self.num_recomputed += record.num_recomputed - last.num_recomputed
        if record.num_drafted:
            self.verifications[record.drafter, record.num_drafted, record.num_accepted] += 1
