"""Rejection sampling: tokens are distributed as the model's, by enumeration; kernel and oracle draw the same ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from rejection_case import check, distribution, run_kernel, stream

from foreword.gpu.backends.rejection import reject
from foreword.gpu.kernels.table import FOLDER

Reject = Callable[..., tuple[np.ndarray, np.ndarray]]
DRAWS = 2500


@pytest.fixture(params=["numpy", "kernel"])
def draw(request: pytest.FixtureRequest) -> Reject:
    return reject if request.param == "numpy" else run_kernel


def rows(x: np.ndarray, count: int = DRAWS) -> np.ndarray:
    return np.ascontiguousarray(np.broadcast_to(x, (count, len(x))))


def chi_square(token_ids: np.ndarray, p: np.ndarray) -> float:
    """Per degree of freedom, over ids that are expected at least five times; ids without probability must not occur."""
    counts, expected = np.bincount(token_ids, minlength=len(p)), len(token_ids) * p.astype(np.float64)
    assert not counts[p == 0].any()
    common = expected >= 5
    rest = expected[~common].sum()
    terms = (counts[common] - expected[common]) ** 2 / expected[common]
    total = terms.sum() + ((counts[~common].sum() - rest) ** 2 / rest if rest else 0)
    return float(total / max(common.sum() - (rest == 0), 1))


@pytest.mark.parametrize("vocab_size", [17, 64])
@pytest.mark.parametrize("proposal", ["near", "far", "point", "none"])
def test_tokens_are_distributed_as_the_models(draw: Reject, proposal: str, vocab_size: int) -> None:
    p, rng = distribution(1, vocab_size), np.random.default_rng(5)
    q = distribution(2, vocab_size)
    if proposal == "near":
        q = (0.7 * p + 0.3 * q).astype(np.float32)
    drafts = rng.choice(vocab_size, DRAWS, p=q / q.astype(np.float64).sum()).astype(np.int32)
    if proposal in ("point", "none"):
        drafts[:] = p.argmax() if proposal == "point" else -1
    token_ids, failed = draw(rows(p), rows(q) if proposal in ("near", "far") else None, drafts, *stream(DRAWS))
    assert not failed.any()
    assert chi_square(token_ids, p) < 2
    accepted = (token_ids == drafts).mean()
    expected = {"near": np.minimum(p, q).sum(), "far": np.minimum(p, q).sum(), "point": p.max(), "none": 0}[proposal]
    assert accepted == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_kernel_and_oracle_draw_the_same(order: int) -> None:
    check(FOLDER, order)


def test_a_draft_from_the_models_own_distribution_is_accepted(draw: Reject) -> None:
    p = distribution(3, 17)
    drafts = np.random.default_rng(0).choice(17, 300, p=p / p.astype(np.float64).sum()).astype(np.int32)
    token_ids, _ = draw(rows(p, 300), rows(p, 300), drafts, *stream(300))
    assert token_ids.tolist() == drafts.tolist()


def test_rows_that_cannot_be_drawn_from_fail_alone(draw: Reject) -> None:
    p = rows(distribution(4, 17), 5).copy()
    p[0, 3], p[1, 16], p[2, 0], p[3] = np.nan, np.inf, -0.5, 0
    token_ids, failed = draw(p, None, np.full(5, 2, np.int32), *stream(5))
    assert failed.tolist() == [True, True, True, True, False]
    assert token_ids[:4].tolist() == [0, 0, 0, 0]


def test_what_rounding_leaves_nothing_of_is_drawn_from_p(draw: Reject) -> None:
    """A proposal above p everywhere: the residual is empty."""
    p = rows(distribution(6, 17), 50)
    token_ids, failed = draw(p, p * np.float32(4) + np.float32(0.1), np.full(50, 1, np.int32), *stream(50))
    assert not failed.any()
    assert (p[np.arange(50), token_ids] > 0).all()
