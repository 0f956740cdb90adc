"""Guides of the scheduler's rows: each follows one sequence through its grammar.

A guide stands behind the last token that came out. For a verification it looks ahead along the drafts and comes back,
so what it allows at a position depends on the tokens before it alone: the same tokens come out for every number of
drafts, and after a preemption.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from foreword.gpu.backends.acceptance import AcceptedTokens
from foreword.gpu.backends.sampling import SamplingBatch, TokenMasks
from foreword.gpu.guided.grammar import GrammarCompiler
from foreword.scheduler.request import Request
from foreword.scheduler.step import BoolArray, FinishReason, Int32Array, StepPlan

MAX_RESTARTS = 16


class Guide:
    """A grammar and a sequence that follows it.

    Attributes:
        end_ids: tokens that may be drawn where the grammar may end.
        is_alone: its matcher shares nothing with those of other sequences, and looks at no drafts.
        matcher: of the library.
    """

    def __init__(self, compiler: GrammarCompiler, request: Request, token_ids: list[int]) -> None:
        """Follow the tokens that a sequence has generated before."""
        ends = request.stopping.eos_token_ids + request.stopping.stop_token_ids
        special_ids = compiler.vocabulary.special_token_ids
        self.end_ids = tuple(token_id for token_id in ends if token_id in special_ids)
        self._compiler = compiler
        self._grammar = request.grammar
        self._token_ids = token_ids
        self._num_restarts = 0
        self.is_alone = False
        self.matcher = compiler.matcher(request.grammar)
        self.matcher.consume_tokens(token_ids)

    @property
    def is_stuck(self) -> bool:
        """It cannot be followed any further."""
        return self.matcher.is_error()

    def restart(self) -> None:
        """Follow the sequence again from its beginning, alone from now on.

        What is too complex behind a draft, or for all sequences with this grammar together, need not be so for the
        tokens that came out of this one. The library counts what it has looked at, so the end may still come a token
        sooner or later than without drafts.
        """
        if self._num_restarts < MAX_RESTARTS:
            self._num_restarts += 1
            self.is_alone = True
            self._compiler.forget(self._grammar)
            self.matcher = self._compiler.matcher_of_its_own(self._grammar)
            self.matcher.consume_tokens(self._token_ids)

    def follow(self, token_id: int) -> bool:
        """Take a token that came out; true when nothing may follow it."""
        self._token_ids.append(token_id)
        return self.matcher.consume_token(token_id) and self.matcher.is_stopped() and self.matcher.is_accepting()

    def num_allowed(self, draft_ids: list[int]) -> int:
        """How many of these tokens could come next, one after the other; an end token is none of them."""
        if self.is_alone:
            return 0
        count: int = self.matcher.validate_tokens(draft_ids)
        if self.matcher.is_error():  # behind a draft, which need not come out
            self.restart()
        return count

    def forced_ids(self) -> list[int]:
        """The tokens that come next where the grammar leaves one text only.

        They are the tokenizer's own way to write that text; the model may choose another.
        """
        if self.is_alone:
            return []
        token_ids: list[int] = self.matcher.compute_ff_tokens()
        if self.matcher.is_error():
            self.restart()
            return []
        return token_ids


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Positions of one guided sequence in a step: `start:end` of the step's logits."""

    index: int  # of the sequence in the plan
    guide: Guide
    start: int
    end: int


class GuidedRows:
    """Guides of all rows whose request has a grammar, and the token masks that they make of a step's positions."""

    def __init__(self, compiler: GrammarCompiler, num_threads: int) -> None:
        """Guide no row yet.

        Args:
            compiler: of the model's vocabulary.
            num_threads: that compute masks.
        """
        self._compiler = compiler
        self._executor = LLExecutor(num_threads)
        self._guides: dict[int, Guide] = {}
        self._num_words = compiler.vocabulary.num_words
        self._words = np.zeros((0, self._num_words), np.uint32)
        self._parts: list[_Part] = []

    def admit(self, plan: StepPlan) -> None:
        """Take the grammars of the requests that (re)start in rows, and what those had generated before."""
        for i, (row, request) in enumerate(plan.admitted):
            self._guides.pop(row, None)
            if request.grammar:
                start, end = plan.output_offsets[i : i + 2]
                self._guides[row] = Guide(self._compiler, request, plan.output_token_ids[start:end].tolist())

    def concerns(self, plan: StepPlan) -> bool:
        """Whether a grammar restricts any position of a step."""
        return bool(self._parts_of(plan))

    def restrict(self, plan: StepPlan, params: SamplingBatch) -> SamplingBatch:
        """Add to the masks of a step what the grammars allow at its positions."""
        self._parts = self._parts_of(plan)
        if not self._parts:
            return params
        allowed = self._allowed(plan)
        index = params.masks.index.copy()
        positions = np.concatenate([np.arange(part.start, part.end) for part in self._parts])
        is_masked = index[positions] >= 0
        allowed[is_masked] &= params.masks.words[index[positions[is_masked]]]
        index[positions] = len(params.masks.words) + np.arange(len(positions))
        masks = TokenMasks(np.concatenate([params.masks.words, allowed]), index)
        return dataclasses.replace(params, masks=masks)

    def follow(
        self, plan: StepPlan, params: SamplingBatch, tokens: AcceptedTokens
    ) -> tuple[AcceptedTokens, Int32Array | None]:
        """Take the tokens that came out of a step; other rows may have been restricted for the next one meanwhile.

        Args:
            plan: of the step.
            params: from `restrict`.
            tokens: drawn with them.

        Returns:
            the tokens without those behind the end of a grammar, and `StepResult.constraint_reasons`.
        """
        self._parts = self._parts_of(plan)
        if not self._parts:
            return tokens, None
        counts = np.diff(tokens.offsets)
        reasons = np.zeros(plan.num_sequences, np.int32)
        for part in self._parts:
            if tokens.failed[part.index]:
                reasons[part.index] = self._reason_of_failure(part, params)
                del self._guides[int(plan.rows[part.index])]
                continue
            start, end = tokens.offsets[part.index : part.index + 2]
            for count, token_id in enumerate(tokens.token_ids[start:end].tolist(), 1):
                if token_id in part.guide.end_ids:
                    break
                if part.guide.follow(token_id):
                    reasons[part.index] = FinishReason.CONSTRAINT_COMPLETE
                    counts[part.index] = count
                    del self._guides[int(plan.rows[part.index])]
                    break
        return tokens.first(counts), reasons

    def amend(
        self, rows: Int32Array, limits: Int32Array, offsets: Int32Array, token_ids: Int32Array
    ) -> tuple[Int32Array, Int32Array, BoolArray]:
        """Make proposals agree with the grammars.

        Those of a row end before the first token that its grammar does not allow. Where there are none, and the grammar
        leaves one text only, the tokens of that text are proposed.

        Args:
            rows: `[B]` whose last tokens have been followed.
            limits: `[B]` how many tokens may be proposed.
            offsets: `[B + 1]` proposals of row b are `offsets[b]:offsets[b + 1]`.
            token_ids: `[D]` proposals.

        Returns:
            the offsets and proposals now, and `[B]` whether a row's come from its grammar.
        """
        is_forced = np.zeros(len(rows), np.bool_)
        parts = [token_ids[start:end] for start, end in itertools.pairwise(offsets.tolist())]
        for b, (row, limit) in enumerate(zip(rows.tolist(), limits.tolist(), strict=True)):
            guide = self._guides.get(row)
            if guide is None or not limit:
                continue
            if len(parts[b]):
                parts[b] = parts[b][: guide.num_allowed(parts[b].tolist())]
            if not len(parts[b]):
                parts[b] = np.array(guide.forced_ids()[:limit], np.int32)
                is_forced[b] = len(parts[b]) > 0
        ends = np.cumsum([0, *map(len, parts)]).astype(np.int32)
        return ends, np.concatenate(parts) if parts else token_ids, is_forced

    def _parts_of(self, plan: StepPlan) -> list[_Part]:
        offsets = plan.logits_offsets.tolist()
        return [
            _Part(b, self._guides[row], offsets[b], offsets[b + 1])
            for b, row in enumerate(plan.rows.tolist() if self._guides else ())
            if row in self._guides and offsets[b] < offsets[b + 1]
        ]

    def _allowed(self, plan: StepPlan) -> npt.NDArray[np.uint32]:
        """What the grammars allow at the positions of all parts, `[P, ceil(V / 32)]`."""
        num_positions = sum(part.end - part.start for part in self._parts)
        if num_positions > len(self._words):
            self._words = np.zeros((num_positions, self._num_words), np.uint32)
        words = self._words[:num_positions]
        words[:] = 0  # positions behind a draft that is not allowed stay so
        self._fill(plan, words)
        vocab_size = self._compiler.vocabulary.size
        word, bit = vocab_size // 32, np.uint32(1 << vocab_size % 32)
        may_end = words[:, word] & bit != 0
        words[:, word] &= ~bit
        first = 0
        for part in self._parts:
            here = np.arange(first, first + part.end - part.start)
            for token_id in part.guide.end_ids:
                words[here[may_end[here]], token_id // 32] |= np.uint32(1 << token_id % 32)
            first += part.end - part.start
        return words[:, : -(-vocab_size // 32)]

    def _fill(self, plan: StepPlan, words: npt.NDArray[np.uint32]) -> None:
        """Let the library write its masks, in which one bit behind the vocabulary says that the grammar may end."""
        token_ids = plan.token_ids[plan.logits_indices]
        plain, drafted, first = [], [], 0
        for part in self._parts:
            if part.guide.is_stuck:
                part.guide.restart()
            draft_ids = token_ids[part.start + 1 : part.end].tolist()
            if draft_ids and not part.guide.is_alone:
                drafted.append((part.guide, first, draft_ids))
            else:
                plain.append((part.guide, first))
            first += part.end - part.start
        layout = (words.ctypes.data, self._num_words * 4, len(words))
        if drafted:
            jobs = [(guide.matcher, at, draft_ids) for guide, at, draft_ids in drafted]
            self._executor.unsafe_compute_mask_ptr_with_draft_token(jobs, *layout)
        if plain:
            self._executor.unsafe_compute_mask_ptr([(guide.matcher, at) for guide, at in plain], *layout)
        for guide, at, draft_ids in [*drafted, *((guide, at, []) for guide, at in plain)]:
            if guide.is_stuck:
                words[at : at + 1 + len(draft_ids)] = 0
                guide.restart()
                guide.matcher.unsafe_compute_mask_ptr(words[at:].ctypes.data, self._num_words * 4)
                if guide.is_stuck:
                    words[at] = 0

    def _reason_of_failure(self, part: _Part, params: SamplingBatch) -> FinishReason:
        """Why no token could be drawn behind the last one."""
        words = params.masks.words[params.masks.index[part.start]]
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        bits[params.masked_ids[part.start, : params.num_masked[part.start]]] = 0
        if bits.any():
            return FinishReason.NONE  # the logits' fault
        may_end = not part.guide.is_stuck and part.guide.matcher.is_accepting()
        return FinishReason.CONSTRAINT_COMPLETE if may_end else FinishReason.CONSTRAINT_STUCK
