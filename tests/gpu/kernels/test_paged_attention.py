"""Attention kernels on the SIMT checker: values, independence of rows, and what must never be read."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from attention_case import (
    LIMIT,
    AttentionCase,
    AttentionKernels,
    attention_kernels,
    from_bits,
    relative_error,
)

BF16, F16, F32 = "bfloat16", "float16", "float32"
ORDERS = [0, 1, 2]
# Each head size with both kernels, each block size with each element type; whole_table.py tries all of them.
INSTANTIATIONS = [(BF16, 64, 16), (F16, 128, 32), (BF16, 80, 32), (F16, 96, 16), (BF16, 256, 16), (F16, 16, 16)]
INSTANTIATIONS += [(F32, 16, 16), (F32, 64, 16), (F32, 80, 32), (F32, 96, 32), (F32, 128, 16), (F32, 256, 32)]
SHAPES = {
    "decode, verify and prompt chunks": {"query_lens": (1, 5, 40, 1), "context_lens": (300, 5, 600, 1)},
    "a sequence without tokens": {"query_lens": (0, 1, 0), "context_lens": (0, 17, 0)},
    "one head a group": {"query_lens": (1, 9), "context_lens": (270, 33), "group": 1},
    "groups that do not divide a tile": {"query_lens": (7, 30), "context_lens": (260, 64), "group": 3},
    "more heads than a tile has rows": {
        "query_lens": (1, 2),
        "context_lens": (40, 257),
        "group": 20,
        "num_kv_heads": 1,
    },
    "sliding window": {"query_lens": (1, 30, 5), "context_lens": (700, 400, 9), "window": 100},
    "window of one": {"query_lens": (1, 3), "context_lens": (513, 3), "window": 1},
    "soft cap": {"query_lens": (2, 20), "context_lens": (300, 20), "soft_cap": 5.0, "gain": 4.0},
    "large scores": {"query_lens": (2, 20), "context_lens": (300, 20), "gain": 60.0},
    "borders of blocks and splits": {"query_lens": (1,) * 6, "context_lens": (15, 16, 255, 256, 257, 512)},
}


@cache
def kernels(dtype: str, head_dim: int, block_size: int) -> AttentionKernels:
    return attention_kernels(dtype, head_dim, block_size)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_values(dtype: str, shape: str, order: int) -> None:
    case = AttentionCase(**SHAPES[shape], dtype=dtype)
    out = case.run(kernels(case.dtype, case.head_dim, case.block_size), seed=order)
    assert relative_error(out, case.reference()) < LIMIT[case.dtype]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), INSTANTIATIONS)
def test_values_of_every_instantiation(dtype: str, head_dim: int, block_size: int, order: int) -> None:
    case = AttentionCase((1, 3, 20), (290, 3, 77), dtype, head_dim, block_size, num_kv_heads=2, group=2)
    out = case.run(kernels(dtype, head_dim, block_size), seed=order)
    assert relative_error(out, case.reference()) < LIMIT[dtype]


def test_an_empty_batch_writes_nothing() -> None:
    case = AttentionCase((), ())
    assert case.run(kernels(BF16, 64, 16)).shape == (0, 8, 64)


@pytest.mark.parametrize("context_len", [1, 2, 4096, 131_072])
def test_context_lengths(context_len: int) -> None:
    case = AttentionCase((1,), (context_len,), num_kv_heads=1, group=2)
    out = case.run(kernels(BF16, 64, 16))
    assert relative_error(out, case.reference()) < LIMIT[BF16]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("group", [*range(1, 10), 16])
def test_groups(group: int, dtype: str) -> None:
    case = AttentionCase((1, 4, 35), (300, 4, 70), dtype, num_kv_heads=1, group=group)
    assert relative_error(case.run(kernels(dtype, 64, 16)), case.reference()) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("stale", [-1, -(2**31), 2**31 - 1])
def test_stale_block_ids_behind_a_sequence_are_not_read(stale: int, dtype: str) -> None:
    """They would be addresses outside of the cache."""
    case = AttentionCase((1, 3, 0), (16, 290, 0), dtype)
    used = -(-np.array(case.context_lens) // case.block_size)
    case.block_table[np.arange(case.block_table.shape[1]) >= used[:, None]] = stale
    assert relative_error(case.run(kernels(dtype, 64, 16)), case.reference()) < LIMIT[dtype]


def test_a_failed_sequence_stays_visible_and_alone() -> None:
    case = AttentionCase((1, 1), (300, 300))
    case.q[0, :64] = 0x7FC0  # NaN in one head
    out = from_bits(case.run(kernels(BF16, 64, 16)))
    assert np.isnan(out[0, 0]).all()
    assert np.isfinite(out[0, 1:]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("changes", [{"window": None}, {"window": 300}, {"soft_cap": 3.0}])
def test_the_bits_of_a_row_do_not_depend_on_the_plan(changes: dict[str, object]) -> None:
    """Cut or whole, narrow or wide, longest first or alone: the same bits."""
    case = AttentionCase((1, 6, 45), (900, 270, 1100), group=3, **changes)
    run = kernels(BF16, 64, 16)
    want = case.run(run, case.plan())
    for fields in (
        {"max_partials": 0},
        {"max_partials": 200},
        {"wide_rows": 0},
        {"num_workers": 1},
        {"num_workers": 10**6},
    ):
        plan = case.plan(**fields)
        np.testing.assert_array_equal(case.run(run, plan), want, err_msg=str(fields))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_bits_of_a_row_do_not_depend_on_chunks_and_batch(dtype: str) -> None:
    """The rows of a prompt chunk equal those of the same tokens decoded one by one, in any company."""
    whole = AttentionCase((40,), (301,), dtype, seed=5)
    run = kernels(dtype, 64, 16)
    want = whole.run(run)
    for begin, end in ((0, 1), (3, 4), (7, 12), (20, 40)):
        part = AttentionCase((40,), (301,), dtype, seed=5)
        part.query_lens, part.context_lens, part.q = (end - begin,), (301 - 40 + end,), whole.q[begin:end].copy()
        np.testing.assert_array_equal(part.run(run), want[begin:end])
    batch = AttentionCase((40,), (301,), dtype, seed=5)
    batch.query_lens, batch.context_lens = (2, 40, 1), (9, 301, 264)
    batch.block_table = np.repeat(batch.block_table, 3, axis=0)
    batch.q = np.concatenate([whole.q[:2], whole.q, whole.q[2:3]])
    out = batch.run(run)
    np.testing.assert_array_equal(out[2:42], want)
    np.testing.assert_array_equal(out[42], want[2])
