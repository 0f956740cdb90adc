"""Rejection sampling of drafts, the oracle of the kernels in `rejection.cu`.

Token by token (Leviathan et al., 2023; Chen et al., 2023): a row has the distribution p of the model and a draft x that
was drawn from q; no q means that x was certain. With u uniform in [0, 1), x is accepted if u * q(x) < p(x). Otherwise a
token is drawn in proportion to max(p - q, 0), or to p where rounding leaves nothing of that. Where there is no draft,
as behind the last one that was accepted, a token is drawn in proportion to p. Either way it is distributed as p. A
rejected draft has p(x) <= q(x) and is not drawn again: what comes out of a sequence ends with the first row whose token
is not its draft, the rule of `acceptance`.

Block by block (Sun et al., 2024): the drafts x[1..n] of a sequence are judged together, and a later one may save an
earlier one. Their joint ratios are J[0] = 1 and J[i] = min(J[i-1] * p(x[i]) / q(x[i]), 1). A run of i drafts can be
left with the mass S[i], the sum of max(J[i] * p - q, 0) over the ids of row i, and stands if u[i] * (S[i] + 1 - J[i]) <
S[i] or J[i] = 1; one of all n drafts if u[n] < J[n]. The longest run that stands is accepted, and behind it a token is
drawn in proportion to max(J[i] * p - q, 0), or to p behind all n. Runs are never shorter in the mean than token by
token, and of the same distribution where drafts are points: both rules then accept at least i with probability J[i].

The random words are those of `sampling` for the row's seed, with a purpose of their own as last word of the counter. u
is the upper 24 bits of the first word of counter 0 at the row's position, purpose 1, or in a block that of counter i -
1 at the position of the sequence's first row, purpose 3: what was seen of u[i] when a block ended before it must not
decide again in the next one. A draw takes purpose 2 at the row's position; the id with the greatest weight / -ln(u[id])
wins, the lowest id of equals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.gpu.backends.noise import ACCEPTANCE, BLOCK_ACCEPTANCE, RESIDUAL, exponentials, uniforms
from foreword.scheduler.step import BoolArray, Int32Array, Int64Array

Float = npt.NDArray[np.floating[Any]]
Float64 = npt.NDArray[np.float64]
UInt64Array = npt.NDArray[np.uint64]


def reject(
    p: Float, q: Float | None, draft_ids: Int32Array, seeds: UInt64Array, positions: Int64Array
) -> tuple[Int32Array, BoolArray]:
    """Draw a token for each row, token by token.

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
    failed = ~_can_be_drawn_from(p)
    for i in np.flatnonzero(~failed).tolist():
        seed, position, draft_id = int(seeds[i]), int(positions[i]), int(draft_ids[i])
        weights: Float64 = p[i].astype(np.float64)
        if 0 <= draft_id < vocab_size:
            proposed = _proposed(q, i, draft_id, vocab_size)
            if uniforms(seed, position, ACCEPTANCE, 1)[0] * proposed[draft_id] < weights[draft_id]:
                token_ids[i] = draft_id
                continue
            residual = np.maximum(weights - proposed, 0)
            weights = residual if residual.any() else weights
        token_ids[i] = _draw(weights, seed, position)
    return token_ids, failed


def reject_blocks(
    p: Float,
    q: Float | None,
    draft_ids: Int32Array,
    logits_offsets: Int32Array,
    seeds: UInt64Array,
    positions: Int64Array,
) -> tuple[Int32Array, BoolArray]:
    """Draw a token for each row that comes out, block by block.

    Args:
        p: `[L, V]`, each row with the sum 1.
        q: `[L, V]`, finite, each row with the sum 1; None for drafts that are points.
        draft_ids: `[L]`; an id outside the vocabulary, -1, is no draft and ends its block.
        logits_offsets: `[B + 1]` rows of sequence b are `logits_offsets[b]:logits_offsets[b + 1]`, a block.
        seeds: `[L]`.
        positions: `[L]` of each token in its sequence.

    Returns:
        token_ids `[L]`, 0 where failed; failed `[L]`, rows that cannot be drawn from and all that stand behind the
        token that ends a run. A row that cannot be drawn from ends its block before it.
    """
    num_rows, vocab_size = p.shape
    token_ids, failed = np.zeros(num_rows, np.int32), np.ones(num_rows, np.bool_)
    can_draw = _can_be_drawn_from(p)
    has_draft = can_draw & (draft_ids >= 0) & (draft_ids < vocab_size)
    for first, end in zip(logits_offsets[:-1].tolist(), logits_offsets[1:].tolist(), strict=True):
        num_drafts = int(np.append(has_draft[first:end], False).argmin())
        drafts = draft_ids[first : first + num_drafts].tolist()
        count, residual = 0, None
        if drafts:
            u = uniforms(int(seeds[first]), int(positions[first]), BLOCK_ACCEPTANCE, num_drafts)
            count, residual = _longest_run(p[first:end], q if q is None else q[first:end], drafts, u)
        last = first + count
        token_ids[first:last], failed[first:last] = drafts[:count], False
        if last < end and can_draw[last]:
            weights = p[last].astype(np.float64) if residual is None or not residual.any() else residual
            token_ids[last], failed[last] = _draw(weights, int(seeds[last]), int(positions[last])), False
    return token_ids, failed


def _longest_run(p: Float, q: Float | None, drafts: list[int], u: Float64) -> tuple[int, Float64 | None]:
    """How many drafts of a block are accepted, and what the token behind them is drawn from unless that is p."""
    residuals: list[Float64] = []
    joint, count = 1.0, 0
    for i, draft_id in enumerate(drafts):
        own, proposed = p[i].astype(np.float64), _proposed(q, i, draft_id, p.shape[1])
        residuals.append(np.maximum(joint * own - proposed, 0))
        mass = float(residuals[i].sum())
        if i and (joint == 1 or u[i - 1] * (mass + 1 - joint) < mass):
            count = i
        reached = joint * float(own[draft_id])
        joint = 0.0 if not reached else min(reached / proposed[draft_id], 1.0) if proposed[draft_id] else 1.0
    if u[-1] < joint:
        return len(drafts), None
    residuals[count][drafts[count]] = 0  # what is left of it there is rounding
    return count, residuals[count]


def _can_be_drawn_from(p: Float) -> BoolArray:
    """Rows `[L]` of finite values, none below 0 and some above."""
    return np.asarray(((p >= 0) & (p < np.inf)).all(axis=1) & (p > 0).any(axis=1), np.bool_)


def _proposed(q: Float | None, row: int, draft_id: int, vocab_size: int) -> Float64:
    """What the draft of a row was drawn from."""
    proposed: Float64 = np.zeros(vocab_size) if q is None else q[row].astype(np.float64)
    if q is None:
        proposed[draft_id] = 1
    return proposed


def _draw(weights: Float64, seed: int, position: int) -> int:
    """The id drawn in proportion to weights `[V]`, as a race of exponential variables."""
    return int((weights / exponentials(seed, position, RESIDUAL, len(weights))).argmax())
