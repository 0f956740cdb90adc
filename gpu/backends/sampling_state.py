"""Sampling parameters of the scheduler's rows, from the requests that run in them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.gpu.backends.sampling import SamplingBatch, TokenMasks
from foreword.scheduler.request import Request
from foreword.scheduler.step import Int32Array, StepPlan


class SamplingState:
    """Sampling parameters of every row of the scheduler, set when a request is admitted to the row."""

    def __init__(self, max_num_sequences: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_num_sequences, np.float32)
        self._top_k = np.zeros(max_num_sequences, np.int32)
        self._top_p = np.ones(max_num_sequences, np.float32)
        self._min_p = np.zeros(max_num_sequences, np.float32)
        self._seed = np.zeros(max_num_sequences, np.uint64)
        self._want_logprob = np.zeros(max_num_sequences, np.bool_)
        self._masks: dict[int, npt.NDArray[np.uint32]] = {}
        self._first_free_position = np.zeros(max_num_sequences, np.int64)
        self._end_ids = np.zeros((max_num_sequences, 8), np.int32)
        self._num_end_ids = np.zeros(max_num_sequences, np.int32)

    def admit(self, row: int, request: Request) -> None:
        """Take the parameters of the request that (re)starts in a row."""
        sampling, stopping = request.sampling, request.stopping
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._want_logprob[row] = request.want_logprobs
        self._first_free_position[row] = len(request.prompt_token_ids) + stopping.min_output_tokens
        end_ids = stopping.eos_token_ids + stopping.stop_token_ids
        missing = len(end_ids) - self._end_ids.shape[1]
        if missing > 0:
            self._end_ids = np.pad(self._end_ids, ((0, 0), (0, missing)))
        self._end_ids[row, : len(end_ids)] = end_ids
        self._num_end_ids[row] = len(end_ids)
        self._masks.pop(row, None)
        if sampling.allowed_token_ids or sampling.banned_token_ids:
            self._masks[row] = mask_words(sampling.allowed_token_ids, sampling.banned_token_ids, self._vocab_size)

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
            seed=self._seed[rows],
            position=position,
            masks=self._select_masks(rows),
            masked_ids=self._end_ids[rows],
            num_masked=np.where(ends_too_early, self._num_end_ids[rows], 0).astype(np.int32),
            want_logprob=self._want_logprob[rows],
        )

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
