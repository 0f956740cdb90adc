"""n-gram lookup on the device proposes what the drafter of the host proposes."""

from __future__ import annotations

import numpy as np
import pytest
from ngram_case import POISON, VOCAB, Histories, check, int32, proposals_of

from foreword.gpu.kernels.table import FOLDER


@pytest.mark.parametrize("order", [0, 1, 2])
def test_kernels_and_drafter_propose_the_same(order: int) -> None:
    check(FOLDER, order)


@pytest.mark.parametrize(
    ("tokens", "limit", "expected"),
    [
        ([1], 4, ([], 0)),
        ([1, 2], 4, ([], 0)),
        ([7, 7, 7], 5, ([7, 7, 7, 7, 7], 2)),
        ([1, 2, 3, 1, 2], 4, ([3, 1, 2, 3], 2)),
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], 1, ([4], 2)),
        ([5, 1, 2, 3, 9, 1, 2, 8, 5, 1, 2], 2, ([3, 9], 3)),
        ([1, 2, 3, 4, 5, 6, 7, 0, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4, 5, 6], 1, ([8], 5)),
        ([1, 2, VOCAB, 1, 2], 4, ([], 0)),
        ([1, 2, 3, VOCAB, 1, 2], 4, ([3], 2)),
        ([1, 2, 3, 1, VOCAB, 2], 4, ([], 0)),
        ([1, 2, 3, 1, 2], 0, ([], 0)),
        ([1, 2, 3, 1, 2], -3, ([], 0)),
    ],
)
def test_drafts(tokens: list[int], limit: int, expected: tuple[list[int], int]) -> None:
    assert proposals_of(tokens, limit, Histories()) == expected


@pytest.mark.parametrize("limit", [31, 32, 33, 64])
def test_more_drafts_than_a_warp_has_lanes(limit: int) -> None:
    drafts, _ = proposals_of([*range(40), 0, 1], limit, Histories(max_draft_tokens=64))
    assert drafts == [(2 + i) % 40 for i in range(limit)]


@pytest.mark.parametrize("distance", [126, 127, 128, 129, 260])
def test_a_longer_match_is_found_behind_a_shorter_one_in_another_tile(distance: int) -> None:
    """One warp looks at 128 places at a time."""
    tokens = [500, 1, 2, 3, 77, *range(100, 100 + distance), 2, 3, 88, 500, 1, 2, 3]
    assert proposals_of(tokens, 1, Histories()) == ([77], 4)


def test_the_search_ends_with_the_first_full_match() -> None:
    """What lies before is not even read: it is poisoned here, and with it the older match."""
    histories = Histories()
    gram = [1, 2, 3, 4, 5]
    tokens = [*gram, 77, *range(100, 300), *gram, 88, *gram]
    assert proposals_of(tokens, 1, histories) == ([88], 5)
    histories.tokens[1, :50] = POISON
    assert histories.propose(int32(1), int32(1)).token_ids.tolist() == [88]


@pytest.mark.parametrize("context_len", [1, 2, 131_072])
def test_context_lengths(context_len: int) -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB, context_len)
    tokens[-3:] = tokens[:3]
    histories = Histories(2, 131_072, num_warps=4)
    drafts, confidence = proposals_of(tokens.tolist(), 6, histories)
    assert confidence == (0 if context_len < 3 else 3)
    assert drafts == (tokens[3:9].tolist() if confidence else [])


def test_a_row_that_starts_anew_forgets_its_tokens() -> None:
    histories = Histories()
    assert proposals_of([1, 2, 3, 4, 1, 2], 2, histories)[0] == [3, 4]
    assert proposals_of([9, 1, 2], 2, histories) == ([], 0)


def test_tokens_beyond_the_end_of_a_row_are_not_kept() -> None:
    histories = Histories(2, 8)
    histories.observe(int32(0), int32(6), int32(1, 2, 3), int32(0, 3))
    assert histories.tokens[0].tolist() == [-1] * 6 + [1, 2]
    assert histories.lengths.tolist() == [8, 0]
    assert (histories.tokens[1] == POISON).all()
