"""Block verification draws what its oracle draws."""

from __future__ import annotations

import numpy as np
import pytest
from block_case import NO_TOKEN, BlockCase, check

from foreword.gpu.backends.acceptance import AcceptedTokens, accept
from foreword.gpu.backends.sampling import Samples
from foreword.gpu.kernels.table import FOLDER


def come_out(case: BlockCase, token_ids: np.ndarray, failed: np.ndarray) -> AcceptedTokens:
    """What the kernel `accept` makes of drawn tokens."""
    samples = Samples(token_ids, np.zeros(len(token_ids), np.float32), failed)
    return accept(samples, np.roll(case.draft_ids, 1), case.offsets)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_kernels_and_oracle_draw_the_same(order: int) -> None:
    check(FOLDER, order)


@pytest.mark.parametrize("with_q", [True, False])
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 31, 32, 33])
def test_numbers_of_drafts(num_drafts: int, with_q: bool) -> None:
    """None of them, and more than a warp has lanes."""
    case = BlockCase.random([num_drafts] * 3, 64, with_q=with_q, far=0.01)
    for got, want in zip(case.run(), case.reference(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("with_q", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5])
@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_row_that_cannot_be_drawn_from_ends_its_own_sequence(place: int, bad: float, with_q: bool) -> None:
    case = BlockCase.random([5, 5, 5], 32, with_q=with_q, far=0.0)
    sound = np.diff(come_out(case, *case.run()).offsets)
    case.p[6 + place, 31] = bad
    got = case.run()
    for values, want in zip(got, case.reference(), strict=True):
        np.testing.assert_array_equal(values, want)
    out = come_out(case, *got)
    counts = np.diff(out.offsets)
    assert counts[[0, 2]].tolist() == sound[[0, 2]].tolist()
    assert counts[1] <= place
    assert out.failed.tolist() == [False, place == 0, False]


def test_a_model_that_agrees_accepts_every_draft() -> None:
    case = BlockCase.random([4, 0, 7], 64, with_q=True)
    case.q = case.p.copy()
    case.draft_ids[:] = np.where(case.draft_ids == NO_TOKEN, NO_TOKEN, case.p.argmax(axis=1))
    token_ids, failed = case.run()
    assert np.diff(come_out(case, token_ids, failed).offsets).tolist() == [5, 1, 8]
