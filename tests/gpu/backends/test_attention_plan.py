"""The attention's work list: every row and split exactly once, within the workspace."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.gpu.backends.attention_plan import SPLIT, AttentionPlan, AttentionPlanner

Sequences = list[tuple[int, int]]


def planner(**changes: object) -> AttentionPlanner:
    fields = {"group": 4, "num_kv_heads": 8, "window": None, "narrow_rows": 16, "wide_rows": 64}
    return AttentionPlanner(**(fields | {"num_workers": 500, "max_partials": 10**6} | changes))


def plan(sequences: Sequences, **changes: object) -> AttentionPlan:
    offsets = np.cumsum([0, *(query_len for query_len, _ in sequences)]).astype(np.int32)
    lengths = np.array([length for _, length in sequences], np.int32)
    rows = np.arange(len(sequences), dtype=np.int32) + 7
    return planner(**changes).plan(offsets, lengths, rows)


def splits_of_rows(plan: AttentionPlan, group: int, wide_rows: int) -> dict[tuple[int, int], list]:
    """(split, partial row or -1) of each (token, head in group), as the kernels read the list."""
    found: dict[tuple[int, int], list] = {}
    for items, tile_rows in ((plan.narrow, 16), (plan.wide, wide_rows)):
        for query_begin, query_len, _, _, first_row, split_begin, split_end, partial in items.tolist():
            for row in range(first_row, min(first_row + tile_rows, query_len * group)):
                at = found.setdefault((query_begin + row // group, row % group), [])
                at += [
                    (split, partial if partial < 0 else partial + row - first_row)
                    for split in range(split_begin, split_end)
                ]
    return found


sequences = st.lists(
    st.integers(0, 40).flatmap(
        lambda query_len: st.tuples(st.just(query_len), st.integers(query_len, query_len + 2000))
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(
    sequences,
    st.sampled_from([1, 3, 4, 20]),
    st.sampled_from([None, 1, 300]),
    st.sampled_from([0, 64]),
    st.sampled_from([1, 40, 500]),
    st.sampled_from([0, 50, 10**6]),
)
def test_every_row_meets_its_splits_once(
    sequences: Sequences, group: int, window: int | None, wide_rows: int, num_workers: int, max_partials: int
) -> None:
    result = plan(
        sequences, group=group, window=window, wide_rows=wide_rows, num_workers=num_workers, max_partials=max_partials
    )
    found = splits_of_rows(result, group, wide_rows)
    merges = {(m[0], m[1]): [(s, m[2] + s * m[3]) for s in range(m[4])] for m in result.merges.tolist()}
    token = 0
    partials: list[int] = []
    for query_len, length in sequences:
        for position in range(length - query_len, length):
            for head in range(group):
                needed = set(range(max(0, position - (window or length) + 1) // SPLIT, position // SPLIT + 1))
                met = sorted(found.pop((token, head)))
                assert needed <= {split for split, _ in met}
                assert len({split for split, _ in met}) == len(met)
                if (token, head) in merges:
                    assert [partial for _, partial in met] == [p for _, p in merges.pop((token, head))]
                    partials += [partial for _, partial in met]
                else:
                    assert all(partial == -1 for _, partial in met)
            token += 1
    assert not found
    assert not merges
    assert sorted(partials) == list(range(result.num_partials))
    assert result.num_partials <= max_partials


def test_fields_and_types() -> None:
    result = plan([(1, 600)], num_workers=1000)
    assert result.narrow.tolist() == [[0, 1, 600, 7, 0, split, split + 1, split * 4] for split in range(3)]
    assert result.merges.tolist() == [[0, head, head, 4, 3] for head in range(4)]
    assert {array.dtype for array in (result.narrow, result.wide, result.merges)} == {np.dtype(np.int32)}
    assert result.wide.shape == (0, 8)


def test_long_tiles_come_first_and_enough_work_is_not_cut() -> None:
    result = plan([(1, 300), (1, 5000), (1, 1000)], num_workers=1)
    assert result.narrow[:, 2].tolist() == [5000, 1000, 300]
    assert not len(result.merges)


def test_one_long_sequence_is_cut_among_many_short_ones() -> None:
    result = plan([(1, 300)] * 500 + [(1, 131072)], num_workers=500)
    assert np.count_nonzero(result.narrow[:, 2] == 131072) == 131072 // SPLIT
    assert set(result.narrow[result.narrow[:, 2] == 300, 7]) == {-1}


def test_an_empty_step() -> None:
    result = plan([])
    assert [len(x) for x in (result.narrow, result.wide, result.merges)] == [0, 0, 0]
