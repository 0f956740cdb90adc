"""What a token is: a pure function of logits, seed and position.

For one row of logits x `[V]`, every backend computes

1. fail, if x holds NaN or +inf;
2. x[id] += bias in float32, for each id of the logit bias;
3. x[id] = -inf for each id that the row's token mask does not allow, and for each masked id (end tokens, while
   `min_output_tokens` is not reached); fail, if nothing is left;
4. penalties, for each id of the history that is not masked: x / repetition where x > 0, otherwise x * repetition; from
   that frequency * n, and presence if n > 0, for an id that is n times in the output; in float64, rounded to a finite
   float32 at the end;
5. greedy, if temperature < 1e-5: the greatest x, the lowest id of equals;
6. otherwise keep a set of ids, each rule working on what the one before it kept and always keeping equal logits
   together:
   top-k: x at least the k-th greatest;
   top-p: x at least the greatest value v for which softmax(x / temperature) has mass >= p on {x >= v};
   min-p: x at least max(x) + temperature * ln(min_p);
   typical-p (Meister et al., 2022): with q the softmax of x / temperature over what is kept, -ln q at most d away from
   the entropy of q, for the least d for which that has mass >= p;
7. draw from softmax(x / temperature) over the kept ids by the Gumbel-max trick: the greatest
   (x - max(x)) / temperature + noise(seed, position, id), the lowest id of equals;
8. or, in a row whose draft is accepted by rejection sampling, draw by the rule of `rejection` with that softmax as p
   and the draft as a point: take the draft with its own probability, otherwise another kept id as in step 7, with noise
   of another purpose.

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

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this is greedy."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which ids may be drawn at L positions. Host arrays.

    Attributes:
        words: uint32 `[M, ceil(V / 32)]`; bit i % 32 of word i // 32 is set where id i may be drawn.
        index: int32 `[L]` row of `words`, -1 where every id may be drawn.
    """

    words: npt.NDArray[np.uint32]
    index: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogitBiases:
    """What is added to logits at L positions. Host arrays.

    Attributes:
        offsets: int32 `[M + 1]` bias m has the entries `offsets[m]:offsets[m + 1]`.
        ids: int32, of the vocabulary, each once in a bias.
        values: float32, added to the logits of `ids`.
        index: int32 `[L]` bias of each row, -1 for none.
    """

    offsets: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]
    index: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HistoryCounts:
    """The tokens before L positions, drafts among them, as penalties see them. Host arrays.

    Attributes:
        offsets: int32 `[M + 1]` history m has the entries `offsets[m]:offsets[m + 1]`.
        ids: int32, of the vocabulary, each once in a history.
        counts: int32, how often each id is in the output; 0 for one that is in the prompt only.
        index: int32 `[L]` history of each row, -1 for a row without penalties.
    """

    offsets: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of L rows of logits. Host arrays.

    Attributes:
        temperature: float32 `[L]`.
        top_k: int32 `[L]`; 0 keeps all.
        top_p: float32 `[L]`; 1 keeps all.
        min_p: float32 `[L]`; 0 keeps all.
        typical_p: float32 `[L]`; 1 keeps all.
        repetition_penalty: float32 `[L]`.
        frequency_penalty: float32 `[L]`.
        presence_penalty: float32 `[L]`.
        seed: uint64 `[L]`.
        position: int64 `[L]` position in its sequence of the token that is drawn.
        biases: of each row.
        masks: of each row.
        history: of each row.
        masked_ids: int32 `[L, M]`; the first `num_masked` of a row cannot be drawn. Ids outside the vocabulary have no
            effect.
        num_masked: int32 `[L]`.
        by_rejection: bool `[L]` rows whose draft is accepted by rejection sampling.
        draft_ids: int32 `[L]` draft that such a row checks; an id outside the vocabulary, -1, is none.
        want_logprob: bool `[L]`.
        want_scores: bool `[L]` rows whose tokens are to be scored; None for none.
        num_top: most probable tokens at each position that is scored.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    typical_p: npt.NDArray[np.float32]
    repetition_penalty: npt.NDArray[np.float32]
    frequency_penalty: npt.NDArray[np.float32]
    presence_penalty: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    biases: LogitBiases
    masks: TokenMasks
    history: HistoryCounts
    masked_ids: npt.NDArray[np.int32]
    num_masked: npt.NDArray[np.int32]
    by_rejection: npt.NDArray[np.bool_]
    draft_ids: npt.NDArray[np.int32]
    want_logprob: npt.NDArray[np.bool_]
    want_scores: npt.NDArray[np.bool_] | None = None
    num_top: int = 0


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
