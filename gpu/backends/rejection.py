"""Rejection sampling of drafts (Leviathan et al., 2023; Chen et al., 2023), the oracle of the kernel `reject`.

A row has the distribution p of the model and a draft x that was drawn from q; no q means that x was certain. With u
uniform in [0, 1), x is accepted if u * q(x) < p(x). Otherwise a token is drawn in proportion to max(p - q, 0), or to p
where rounding leaves nothing of that. Where there is no draft, as behind the last one that was accepted, a token is
drawn in proportion to p. Either way it is distributed as p. A rejected draft has p(x) <= q(x) and is not drawn again:
what comes out of a sequence ends with the first row whose token is not its draft, the rule of `acceptance`.

The random words are those of `sampling` for the row's seed and position, with a purpose of their own as last word of
the counter: 1 for u, the upper 24 bits of the first word of counter 0; 2 for the draw, in which the id with the
greatest weight / -ln(u[id]) wins, the lowest id of equals.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.gpu.backends.numpy_backend import philox
from foreword.scheduler.step import BoolArray, Int32Array, Int64Array

ACCEPTANCE, RESIDUAL = 1, 2
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def reject(
    p: Float32, q: Float32 | None, draft_ids: Int32Array, seeds: npt.NDArray[np.uint64], positions: Int64Array
) -> tuple[Int32Array, BoolArray]:
    """Draw a token for each row by the rule above.

    Args:
        p: `[L, V]`, each row with the sum 1.
        q: `[L, V]`, finite, each row with the sum 1; None for drafts that are points.
        draft_ids: `[L]`; an id outside the vocabulary, -1, is no draft.
        seeds: `[L]`.
        positions: `[L]` of each token in its sequence.

    Returns:
        token_ids `[L]`, 0 where failed; failed `[L]`, rows of p with a value that is negative, infinite or NaN, or with
        nothing above 0.
    """
    num_rows, vocab_size = p.shape
    token_ids = np.zeros(num_rows, np.int32)
    failed = np.asarray(~((p >= 0) & (p < np.inf)).all(axis=1) | ~(p > 0).any(axis=1), np.bool_)
    for i in np.flatnonzero(~failed):
        seed, position, draft_id = int(seeds[i]), int(positions[i]), int(draft_ids[i])
        weights: Float64 = p[i].astype(np.float64)
        if 0 <= draft_id < vocab_size:
            proposed = (np.arange(vocab_size) == draft_id).astype(np.float64) if q is None else q[i].astype(np.float64)
            u = float(_words(seed, position, ACCEPTANCE, 1)[0, 0] >> np.uint32(8)) / 2**24
            if u * proposed[draft_id] < weights[draft_id]:
                token_ids[i] = draft_id
                continue
            residual = np.maximum(weights - proposed, 0)
            weights = residual if residual.any() else weights
        token_ids[i] = (weights / _exponentials(seed, position, vocab_size)).argmax()
    return token_ids, failed


def _exponentials(seed: int, position: int, vocab_size: int) -> Float64:
    """`[V]` exponential variables of the ids at a position."""
    groups = -(-vocab_size // 64)
    words = _words(seed, position, RESIDUAL, groups * 16).reshape(4, groups, 16).transpose(1, 0, 2).reshape(-1)
    exponentials: Float64 = -np.log((2 * (words[:vocab_size] >> np.uint32(9)).astype(np.float64) + 1) / 2**24)
    return exponentials


def _words(seed: int, position: int, purpose: int, num_counters: int) -> npt.NDArray[np.uint32]:
    counter = np.zeros((4, num_counters), np.uint32)
    counter[0] = np.arange(num_counters)
    counter[1], counter[2], counter[3] = position & 0xFFFF_FFFF, position >> 32, purpose
    return philox(counter, (seed & 0xFFFF_FFFF, seed >> 32))
