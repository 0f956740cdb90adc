"""What a token is: a pure function of logits, seed and position.

For one row of logits x `[V]`, every backend computes

1. fail, if x holds NaN or +inf;
2. x[id] = -inf for each masked id (end tokens, while `min_output_tokens` is not reached); fail, if nothing is left;
3. greedy, if temperature < 1e-5: the greatest x, the lowest id of equals;
4. otherwise keep a set of ids, each rule working on what the one before it kept and always keeping equal logits
   together:
   top-k: x at least the k-th greatest;
   top-p: x at least the greatest value v for which softmax(x / temperature) has mass >= p on {x >= v};
   min-p: x at least max(x) + temperature * ln(min_p);
5. draw from softmax(x / temperature) over the kept ids by the Gumbel-max trick: the greatest
   (x - max(x)) / temperature + noise(seed, position, id), the lowest id of equals.

The noise is counter-based (Philox4x32-10, Salmon et al. 2011), so neighbours, batch size, preemption and speculation
cannot change a token. Key: the low and high word of the seed. Ids are served in groups of 64: id i takes output word
(i // 16) % 4 of the counter ((i // 64) * 16 + i % 16, low and high word of position, 0). A word w becomes
u = (2 * (w >> 9) + 1) / 2^24 and the noise -ln(-ln u).

The log probability of the token is under softmax(x) of step 1: the model's own distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.scheduler.request import Request
from foreword.scheduler.step import StepPlan

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this is greedy."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of L rows of logits. Host arrays.

    Attributes:
        temperature: float32 `[L]`.
        top_k: int32 `[L]`; 0 keeps all.
        top_p: float32 `[L]`; 1 keeps all.
        min_p: float32 `[L]`; 0 keeps all.
        seed: uint64 `[L]`.
        position: int64 `[L]` position in its sequence of the token that is drawn.
        masked_ids: int32 `[L, M]`; the first `num_masked` of a row cannot be drawn. Ids outside the vocabulary have no
            effect.
        num_masked: int32 `[L]`.
        want_logprob: bool `[L]`.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    masked_ids: npt.NDArray[np.int32]
    num_masked: npt.NDArray[np.int32]
    want_logprob: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens drawn from L rows of logits. Host arrays.

    Attributes:
        token_ids: int32 `[L]`; 0 where failed.
        logprobs: float32 `[L]`; 0 where not asked for or failed.
        failed: bool `[L]` rows whose logits cannot be sampled.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    failed: npt.NDArray[np.bool_]


class SamplingState:
    """Sampling parameters of every row of the scheduler, set when a request is admitted to the row."""

    def __init__(self, max_num_sequences: int) -> None:
        self._temperature = np.zeros(max_num_sequences, np.float32)
        self._top_k = np.zeros(max_num_sequences, np.int32)
        self._top_p = np.ones(max_num_sequences, np.float32)
        self._min_p = np.zeros(max_num_sequences, np.float32)
        self._seed = np.zeros(max_num_sequences, np.uint64)
        self._want_logprob = np.zeros(max_num_sequences, np.bool_)
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
            masked_ids=self._end_ids[rows],
            num_masked=np.where(ends_too_early, self._num_end_ids[rows], 0).astype(np.int32),
            want_logprob=self._want_logprob[rows],
        )
