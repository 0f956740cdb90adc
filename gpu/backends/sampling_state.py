"""Sampling parameters of the scheduler's rows, from the requests that run in them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.gpu.backends.sampling import LogitBiases, SamplingBatch, TokenMasks
from foreword.gpu.backends.token_history import TokenHistory
from foreword.scheduler.request import AcceptanceRule, Request
from foreword.scheduler.step import Float32Array, Int32Array, StepPlan


class SamplingState:
    """Sampling parameters of every row of the scheduler, set when a request is admitted to the row."""

    def __init__(self, max_num_sequences: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_num_sequences, np.float32)
        self._top_k = np.zeros(max_num_sequences, np.int32)
        self._top_p = np.ones(max_num_sequences, np.float32)
        self._min_p = np.zeros(max_num_sequences, np.float32)
        self._typical_p = np.ones(max_num_sequences, np.float32)
        self._repetition_penalty = np.ones(max_num_sequences, np.float32)
        self._frequency_penalty = np.zeros(max_num_sequences, np.float32)
        self._presence_penalty = np.zeros(max_num_sequences, np.float32)
        self._seed = np.zeros(max_num_sequences, np.uint64)
        self._by_rejection = np.zeros(max_num_sequences, np.bool_)
        self._want_logprob = np.zeros(max_num_sequences, np.bool_)
        self._want_scores = np.zeros(max_num_sequences, np.bool_)
        self._num_top = np.zeros(max_num_sequences, np.int32)
        self._biases: dict[int, tuple[Int32Array, Float32Array]] = {}
        self._masks: dict[int, npt.NDArray[np.uint32]] = {}
        self._history = TokenHistory(max_num_sequences, vocab_size)
        self._first_free_position = np.zeros(max_num_sequences, np.int64)
        self._end_ids = np.zeros((max_num_sequences, 8), np.int32)
        self._num_end_ids = np.zeros(max_num_sequences, np.int32)

    def admit(self, row: int, request: Request, output_token_ids: Int32Array) -> None:
        """Take the parameters of the request that (re)starts in a row, and what it had generated before."""
        sampling, stopping = request.sampling, request.stopping
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._typical_p[row] = sampling.typical_p
        self._repetition_penalty[row] = sampling.repetition_penalty
        self._frequency_penalty[row] = sampling.frequency_penalty
        self._presence_penalty[row] = sampling.presence_penalty
        self._seed[row] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        # Drafts are points, for which block verification accepts runs of the same distribution (`rejection`).
        self._by_rejection[row] = request.acceptance is not AcceptanceRule.EXACT_MATCH
        self._want_logprob[row] = request.want_logprobs
        self._want_scores[row] = request.want_ranks or request.num_top_logprobs
        self._num_top[row] = request.num_top_logprobs
        self._first_free_position[row] = len(request.prompt_token_ids) + stopping.min_output_tokens
        end_ids = stopping.eos_token_ids + stopping.stop_token_ids
        missing = len(end_ids) - self._end_ids.shape[1]
        if missing > 0:
            self._end_ids = np.pad(self._end_ids, ((0, 0), (0, missing)))
        self._end_ids[row, : len(end_ids)] = end_ids
        self._num_end_ids[row] = len(end_ids)
        self._admit_history(row, request, output_token_ids)
        self._biases.pop(row, None)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._biases[row] = np.array(ids, np.int32), np.array(values, np.float32)
        self._masks.pop(row, None)
        if sampling.allowed_token_ids or sampling.banned_token_ids:
            self._masks[row] = mask_words(sampling.allowed_token_ids, sampling.banned_token_ids, self._vocab_size)

    def _admit_history(self, row: int, request: Request, output_token_ids: Int32Array) -> None:
        sampling, prompt = request.sampling, request.prompt_token_ids
        if sampling.repetition_penalty == 1 and sampling.frequency_penalty == sampling.presence_penalty == 0:
            self._history.forget(row)
            return
        max_num_tokens = len(prompt) + request.stopping.max_output_tokens
        if sampling.repetition_penalty == 1:
            prompt = prompt[:0]
        self._history.follow(row, np.ascontiguousarray(prompt), output_token_ids, max_num_tokens)

    def append(self, plan: StepPlan, token_offsets: Int32Array, token_ids: Int32Array) -> None:
        """Take the tokens that came out of a step, which are those of its result."""
        self._history.append(plan.rows, token_offsets, token_ids)

    def num_top(self, rows: Int32Array) -> int:
        """Most probable tokens that one of some rows wants; the others get as many."""
        return min(int(self._num_top[rows].max()), self._vocab_size)

    def select(self, plan: StepPlan) -> SamplingBatch:
        """Parameters of each position whose logits the plan needs."""
        rows = np.repeat(plan.rows, np.diff(plan.logits_offsets))
        position = plan.positions[plan.logits_indices].astype(np.int64) + 1
        ends_too_early = position < self._first_free_position[rows]
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            typical_p=self._typical_p[rows],
            repetition_penalty=self._repetition_penalty[rows],
            frequency_penalty=self._frequency_penalty[rows],
            presence_penalty=self._presence_penalty[rows],
            seed=self._seed[rows],
            position=position,
            biases=self._select_biases(rows),
            masks=self._select_masks(rows),
            history=self._history.counts_before(plan.rows, plan.logits_offsets, plan.token_ids[plan.logits_indices]),
            masked_ids=self._end_ids[rows],
            num_masked=np.where(ends_too_early, self._num_end_ids[rows], 0).astype(np.int32),
            by_rejection=self._by_rejection[rows],
            draft_ids=_draft_ids(plan),
            want_logprob=self._want_logprob[rows],
            want_scores=self._want_scores[rows],
            num_top=self.num_top(plan.rows),
        )

    def _select_biases(self, rows: Int32Array) -> LogitBiases:
        """Biases of the logits of these rows `[L]`."""
        index = np.full(len(rows), -1, np.int32)
        biases: list[tuple[Int32Array, Float32Array]] = []
        if self._biases:
            for row in np.unique(rows).tolist():
                if row in self._biases:
                    index[rows == row] = len(biases)
                    biases.append(self._biases[row])
        if not biases:
            return LogitBiases(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), index)
        ids, values = (np.concatenate(parts) for parts in zip(*biases, strict=True))
        offsets = np.cumsum([0] + [len(part) for part, _ in biases]).astype(np.int32)
        return LogitBiases(offsets, ids, values, index)

    def _select_masks(self, rows: Int32Array) -> TokenMasks:
        """Masks of the logits of these rows `[L]`."""
        index = np.full(len(rows), -1, np.int32)
        masks: list[npt.NDArray[np.uint32]] = []
        if self._masks:
            for row in np.unique(rows).tolist():
                if row in self._masks:
                    index[rows == row] = len(masks)
                    masks.append(self._masks[row])
        words = np.stack(masks) if masks else np.zeros((0, num_mask_words(self._vocab_size)), np.uint32)
        return TokenMasks(words, index)


def _draft_ids(plan: StepPlan) -> Int32Array:
    """The draft that each position of the plan's logits checks, `[L]`; -1 at the last of a sequence."""
    input_ids = plan.token_ids[plan.logits_indices]
    draft_ids = np.append(input_ids[1:], np.int32(-1))[: len(input_ids)]
    draft_ids[plan.logits_offsets[1:][np.diff(plan.logits_offsets) > 0] - 1] = -1
    return draft_ids


def num_mask_words(vocab_size: int) -> int:
    """Words of a token mask."""
    return -(-vocab_size // 32)


def mask_words(
    allowed_token_ids: tuple[int, ...], banned_token_ids: tuple[int, ...], vocab_size: int
) -> npt.NDArray[np.uint32]:
    """The token mask of a request: the allowed ids, or all when none is named, without the banned ones."""
    bits = np.zeros(num_mask_words(vocab_size) * 32, np.uint8)
    bits[list(allowed_token_ids) or slice(vocab_size)] = 1
    bits[list(banned_token_ids)] = 0
    return np.packbits(bits, bitorder="little").view(np.dtype("<u4")).astype(np.uint32)
