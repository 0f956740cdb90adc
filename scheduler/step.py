"""The arrays that cross the scheduler's border once per step.

    plan = scheduler.schedule(now)        StepPlan     scheduler -> device: what to compute
    result = runner.execute(plan)         StepResult   device -> scheduler: which tokens came out
    update = scheduler.apply(result)      StepUpdate   scheduler -> front end: what each sequence gained

Axis letters: B sequences in the step, T tokens in the step, L positions to draw at, P prompt tokens to score, N tokens
that came out, U sequences with news, A rows admitted, R block-table entries that changed.

Plan and update arrays are views of buffers that the scheduler reuses: they are valid until the plan's result is applied
(plan) or until the next `apply` (update).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from foreword.scheduler.request import Request

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class StepKind(IntEnum):
    """What a step did for a sequence."""

    NONE = 0  # no computation: the sequence was ended by a cancel or a deadline
    PREFILL = 1  # computed prompt tokens (or recomputed tokens after a preemption)
    DECODE = 2  # one token in, one token out
    VERIFY = 3  # checked draft tokens


class FinishReason(IntEnum):
    """Why the scheduler ended a sequence."""

    NONE = 0  # it goes on
    EOS = 1  # drew one of `StoppingParams.eos_token_ids`
    STOP_TOKEN = 2  # drew one of `StoppingParams.stop_token_ids`
    LENGTH = 3  # `max_output_tokens` reached
    CONTEXT_LIMIT = 4  # `SchedulerConfig.max_model_len` reached
    DEADLINE = 5
    CANCELLED = 6
    FAILED = 7  # the device reported the sequence as failed (its logits were not finite), or it cannot get a block
    CONSTRAINT_COMPLETE = 8  # its grammar allows nothing further
    CONSTRAINT_STUCK = 9  # its grammar allows no token that may be drawn, or became too complex to follow


class DraftState(IntEnum):
    """Whether drafts are proposed, and why not."""

    ACTIVE = 0  # they are
    NO_DRAFTER = 1
    DISABLED = 2  # the operator turned speculation off
    DRAFTER_FAILED = 3
    NO_GAIN = 4  # checking them would cost more time than they are expected to save
    CACHE_PRESSURE = 5  # they would take blocks that other sequences may need
    PREFILL_PRESSURE = 6  # prompts wait for the time that drafts would take


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the device computes in one step. Token t of the step belongs to the sequence b whose range holds t.

    Attributes:
        step_id: counts from 1.
        rows: `[B]` stable row of each sequence; indexes every per-row state (block table, sampling parameters).
        generations: `[B]` how often the row was (re)assigned; a result for an older generation is dropped.
        query_offsets: `[B + 1]` tokens of sequence b are `query_offsets[b]:query_offsets[b + 1]`.
        context_lens: `[B]` tokens of sequence b in the KV cache once this step has run.
        token_ids: `[T]`; -1 is the token that the step before drew for the same row, whose result the scheduler has not
            seen yet (`SchedulerConfig.lookahead`).
        positions: `[T]` position of each token in its sequence, from 0.
        slot_mapping: `[T]` where each token's key and value go: block * block_size + offset in block.
        logits_indices: `[L]` tokens (of T) that a token is drawn behind, ascending.
        logits_offsets: `[B + 1]` logits of sequence b are `logits_offsets[b]:logits_offsets[b + 1]`; an empty range
            means that b's prompt is not complete yet. With k draft tokens a sequence has k + 1.
        scored_indices: `[P]` tokens (of T) that a prompt token to be scored follows, ascending.
        scored_token_ids: `[P]` those prompt tokens.
        scored_offsets: `[B + 1]` of sequence b, `scored_offsets[b]:scored_offsets[b + 1]` are to be scored.
        block_table_updates: `[R, 3]` (row, index, block): entries of the device's `[max_num_sequences,
            max_blocks_per_sequence]` block table that changed since the last plan; apply before computing.
        admitted: rows that (re)start with this plan and their requests; the device takes sampling parameters from
            them. A preempted sequence that resumes appears again.
        output_offsets: `[A + 1]` what admitted row a had generated before, nothing unless it resumes, is
            `output_token_ids[output_offsets[a]:output_offsets[a + 1]]`.
        output_token_ids: of all admitted rows.
        num_prefill_sequences: of B, sequences whose prompt is computed, or computed again after a preemption.
        num_prefill_tokens: of T, tokens of those.
        num_preempted: sequences that lost their blocks to others in this plan.
    """

    step_id: int
    rows: Int32Array
    generations: Int32Array
    query_offsets: Int32Array
    context_lens: Int32Array
    token_ids: Int32Array
    positions: Int32Array
    slot_mapping: Int32Array
    logits_indices: Int32Array
    logits_offsets: Int32Array
    scored_indices: Int32Array
    scored_token_ids: Int32Array
    scored_offsets: Int32Array
    block_table_updates: Int32Array
    admitted: tuple[tuple[int, Request], ...]
    output_offsets: Int32Array
    output_token_ids: Int32Array
    num_prefill_sequences: int = 0
    num_prefill_tokens: int = 0
    num_preempted: int = 0

    @property
    def num_sequences(self) -> int:
        """B; 0 when there is nothing to compute."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def head_indices(self) -> Int32Array:
        """`[L + P]` tokens (of T) whose logits are needed: those to draw behind, then those to score behind."""
        if not len(self.scored_indices):
            return self.logits_indices
        return np.concatenate([self.logits_indices, self.scored_indices])


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens proposed for the next step, to be verified by it. Sequence order is the plan's.

    Attributes:
        offsets: `[B + 1]` drafts of sequence b are `offsets[b]:offsets[b + 1]`; only a sequence that has tokens in the
            same result can have drafts, which follow the last of them.
        token_ids: `[D]`.
        drafters: `[B]` who proposed each sequence's drafts, as an index of the device's drafters; None for
            0 everywhere.
    """

    offsets: Int32Array
    token_ids: Int32Array
    drafters: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the model's own distribution says of M tokens, each at its position.

    Attributes:
        logprobs: `[M]` log probability of each token.
        ranks: `[M]` how many tokens are more probable, plus 1.
        num_top: W, most probable tokens at each position.
        top_token_ids: `[M * W]` those of the first position, then of the second, ...; most probable first, the lowest
            id of equals first.
        top_logprobs: `[M * W]` their log probabilities.
    """

    logprobs: Float32Array
    ranks: Int32Array
    num_top: int
    top_token_ids: Int32Array
    top_logprobs: Float32Array

    def take(self, indices: npt.NDArray[np.integer] | npt.NDArray[np.bool_] | slice) -> TokenScores:
        """Those of some of the tokens."""
        shape = (len(self.ranks), self.num_top)
        return TokenScores(
            self.logprobs[indices],
            self.ranks[indices],
            self.num_top,
            self.top_token_ids.reshape(shape)[indices].ravel(),
            self.top_logprobs.reshape(shape)[indices].ravel(),
        )


@dataclass(frozen=True, slots=True)
class StepForecast:
    """What the device expected of a step that only generates. All 0 where it expected nothing.

    Attributes:
        model_duration_ns: time of the step in the target model and sampling.
        undrafted_duration_ns: time in which the tokens that came out would have come out without drafts; 0 also for a
            step that checked none.
    """

    model_duration_ns: int = 0
    undrafted_duration_ns: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device computed for a plan. Sequence order is the plan's.

    Attributes:
        step_id: of the plan.
        token_offsets: `[B + 1]` accepted tokens of sequence b are `token_offsets[b]:token_offsets[b + 1]`: none while
            its prompt is incomplete, otherwise one plus the accepted drafts.
        token_ids: `[N]`.
        logprobs: `[N]` log probability of each token under the model's own distribution; zero where the request did
            not ask.
        failed: `[B]` true where no token could be drawn; such a sequence has no tokens.
        constraint_reasons: `[B]` `FinishReason.CONSTRAINT_COMPLETE` where the grammar ends behind the last token,
            `CONSTRAINT_STUCK` where it is why no token could be drawn, otherwise `NONE`; None for all none.
        draft_duration_ns: time spent proposing.
        model_duration_ns: time spent in the target model and sampling.
        drafts: proposals for the next step; None for none at all.
        draft_state: whether the device proposes at present.
        scores: of the N tokens, zero where the request did not ask; None when none did.
        prompt_scores: of the P prompt tokens; None when there are none.
        forecast: what the device expected of the step before it ran.
    """

    step_id: int
    token_offsets: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array
    failed: BoolArray
    draft_duration_ns: int = 0
    model_duration_ns: int = 0
    drafts: Drafts | None = None
    draft_state: DraftState = DraftState.NO_DRAFTER
    constraint_reasons: Int32Array | None = None
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None
    forecast: StepForecast = field(default_factory=StepForecast)


SEQUENCE_UPDATE = np.dtype(
    [
        ("request_key", np.int64),
        ("first_scheduled_ns", np.int64),  # monotonic clock of the `schedule` that first planned it; 0 while it waits
        ("num_tokens", np.int32),  # tokens that came out in this step, after truncation at the finishing token
        ("num_prompt_computed", np.int32),  # prompt tokens in the KV cache, cached ones included
        ("num_scored", np.int32),  # prompt tokens that were scored in this step, in order; the first has no score
        ("num_cached", np.int32),  # prompt tokens that the prefix cache supplied, counted once
        ("num_drafted", np.int32),  # draft tokens checked in this step
        ("num_accepted", np.int32),  # of those, accepted and kept
        ("num_steps", np.int32),  # steps so far
        ("num_prefill_chunks", np.int32),  # of those, with prompt tokens
        ("num_preemptions", np.int32),  # so far
        ("num_recomputed", np.int32),  # tokens computed again after preemptions, so far
        ("step_kind", np.int16),  # StepKind
        ("finish_reason", np.int16),  # FinishReason
        ("drafter", np.int16),  # of the draft tokens checked in this step, as in `Drafts.drafters`; 0 without any
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """What each sequence gained in a step, including those that a cancel or deadline ended without computing.

    Attributes:
        step_id: of the plan.
        sequences: `[U]` of dtype `SEQUENCE_UPDATE`.
        token_ids: `[N]` tokens of the sequences, in order, `num_tokens` each.
        logprobs: `[N]`.
        draft_state: `PREFILL_PRESSURE` or `CACHE_PRESSURE` when drafts were proposed for the step and the plan had room
            for none of them, otherwise `ACTIVE`.
        result_indices: `[N]` where each token stands in the result.
        scored_indices: where the scores of prompt tokens stand in the result, `num_scored` of each sequence in order.
    """

    step_id: int
    sequences: npt.NDArray[np.void]
    token_ids: Int32Array
    logprobs: Float32Array
    draft_state: DraftState
    result_indices: Int32Array
    scored_indices: Int32Array


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """Gauges after a step.

    Attributes:
        num_running: sequences that hold a row.
        num_waiting: requests that wait for a row.
        num_waiting_tokens: their prompt tokens.
        num_paused: running sequences whose client does not read.
        num_free_blocks: blocks that no sequence holds; what the prefix cache keeps in them can be evicted.
        num_cached_blocks: blocks in the prefix cache, held or not.
        num_blocks: all blocks.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_paused: int
    num_free_blocks: int
    num_cached_blocks: int
    num_blocks: int
