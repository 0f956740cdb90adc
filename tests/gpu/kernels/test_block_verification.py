"""Block verification (Sun et al., 2024): kernels follow the rule, and what comes out is distributed as the model's."""

from __future__ import annotations

import numpy as np
import pytest
from block_case import NO_TOKEN, BlockCase, check
from rejection_case import distribution, run_kernel, stream

from foreword.gpu.backends.acceptance import AcceptedTokens, accept
from foreword.gpu.backends.sampling import Samples
from foreword.gpu.kernels.table import FOLDER


def come_out(case: BlockCase, token_ids: np.ndarray, failed: np.ndarray) -> AcceptedTokens:
    """What the kernel `accept` makes of drawn tokens."""
    samples = Samples(token_ids, np.zeros(len(token_ids), np.float32), failed)
    return accept(samples, np.roll(case.draft_ids, 1), case.offsets)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_kernels_follow_the_rule(order: int) -> None:
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
    sound = come_out(case, *case.run())
    case.p[6 + place, 31] = bad
    got = case.run()
    assert got[1].tolist() == [row == 6 + place for row in range(18)]
    for values, want in zip(got, case.reference(), strict=True):
        np.testing.assert_array_equal(values, want)
    after = come_out(case, *got)
    counts, counts_before = np.diff(after.offsets), np.diff(sound.offsets)
    assert counts[[0, 2]].tolist() == counts_before[[0, 2]].tolist()
    assert counts[1] <= place
    assert after.failed.tolist() == [False, place == 0, False]


def test_a_model_that_agrees_accepts_every_draft() -> None:
    case = BlockCase.random([4, 0, 7], 64, with_q=True)
    case.q = case.p.copy()
    case.draft_ids[:] = np.where(case.draft_ids == NO_TOKEN, NO_TOKEN, case.p.argmax(axis=1))
    token_ids, failed = case.run()
    assert np.diff(come_out(case, token_ids, failed).offsets).tolist() == [5, 1, 8]


@pytest.mark.parametrize("with_q", [True, False])
def test_two_tokens_are_distributed_as_the_models_and_blocks_are_longer(with_q: bool) -> None:
    """Pairs of tokens; where one comes out, the model draws the other, as in the next step."""
    count, vocab_size, rng = 2000, 5, np.random.default_rng(3)
    p = np.array([distribution(i, vocab_size, zeros=0) for i in (1, 2, 3)])
    q = np.array([distribution(i, vocab_size, zeros=0) for i in (4, 5, 6)])
    drafts = np.stack([rng.choice(vocab_size, count, p=x / x.astype(np.float64).sum()) for x in q], axis=1)
    if not with_q:
        drafts[:] = p.argmax(axis=1)
    drafts[:, 2] = NO_TOKEN
    offsets = np.arange(0, 3 * count + 1, 3, dtype=np.int32)
    rows = (np.tile(p, (count, 1)), np.tile(q, (count, 1)) if with_q else None, drafts.astype(np.int32).reshape(-1))
    case = BlockCase(*rows, *stream(3 * count), offsets)
    out = come_out(case, *case.run())
    lengths = np.diff(out.offsets)
    first = out.token_ids[out.offsets[:-1]]
    second = rng.choice(vocab_size, count, p=p[1] / p[1].astype(np.float64).sum())
    second[lengths > 1] = out.token_ids[out.offsets[:-1][lengths > 1] + 1]
    counts = np.bincount(first * vocab_size + second, minlength=vocab_size**2)
    expected = count * np.outer(p[0], p[1]).reshape(-1)
    assert ((counts - expected) ** 2 / expected).sum() / (vocab_size**2 - 1) < 1.8

    one_by_one = np.diff(come_out(case, *run_kernel(*rows, *stream(3 * count))).offsets)
    if with_q:
        assert lengths.mean() > one_by_one.mean() + 0.01
    else:
        assert lengths.mean() == pytest.approx(one_by_one.mean(), abs=0.05)
