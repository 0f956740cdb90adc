"""Exact-match acceptance against a plain loop: the rule in NumPy, and the kernel on the SIMT checker."""

from __future__ import annotations

import numpy as np
import pytest
import simt
from acceptance_case import NO_TOKEN, AcceptanceCase, accept_kernel, assert_equal

from foreword.gpu.backends.acceptance import accept
from foreword.gpu.backends.sampling import Samples

ORDERS = [0, 1, 2]


@pytest.fixture(scope="module")
def kernel() -> simt.Kernel:
    return accept_kernel()


@pytest.mark.parametrize("seed", range(40))
def test_the_rule_in_numpy(seed: int) -> None:
    case = AcceptanceCase.random(seed, num_sequences=seed)
    assert_equal(accept(case.samples, case.input_ids, case.logits_offsets), case.reference())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(8))
def test_ragged_sequences(kernel: simt.Kernel, seed: int, order: int) -> None:
    case = AcceptanceCase.random(seed, num_sequences=1 + 5 * seed)
    assert_equal(case.run(kernel, order), case.reference())


@pytest.mark.parametrize("order", ORDERS)
def test_edges(kernel: simt.Kernel, order: int) -> None:
    case = AcceptanceCase.edges()
    assert_equal(case.run(kernel, order, num_warps=2), case.reference())
    assert_equal(accept(case.samples, case.input_ids, case.logits_offsets), case.reference())


@pytest.mark.parametrize("num_warps", [1, 2, 32])
def test_sequences_beyond_the_warps_of_the_block(kernel: simt.Kernel, num_warps: int) -> None:
    case = AcceptanceCase.random(0, num_sequences=70)
    assert_equal(case.run(kernel, 0, num_warps), case.reference())


@pytest.mark.parametrize("num_rows", [31, 32, 33, 64, 65, 100])
def test_runs_longer_than_a_warp(kernel: simt.Kernel, num_rows: int) -> None:
    """Every length of the run, ended by a wrong draft and by a failed row."""
    ids = np.arange(1, num_rows + 1, dtype=np.int32)
    for stop in {0, 30, 31, 32, num_rows - 2, num_rows - 1}:
        drafts = np.roll(ids, 1)
        if stop + 1 < num_rows:
            drafts[stop + 1] = NO_TOKEN
        for failing in (num_rows, stop):
            samples = Samples(ids, np.zeros(num_rows, np.float32), np.arange(num_rows) == failing)
            case = AcceptanceCase(samples, drafts, np.array([0, num_rows], np.int32))
            assert_equal(case.run(kernel, 0, 1), case.reference())


def test_a_step_without_rows(kernel: simt.Kernel) -> None:
    nothing = np.zeros(0, np.int32)
    samples = Samples(nothing, nothing.astype(np.float32), nothing.astype(np.bool_))
    for num_sequences in (0, 3):
        case = AcceptanceCase(samples, nothing, np.zeros(num_sequences + 1, np.int32))
        assert_equal(case.run(kernel, 0), case.reference())


def test_no_token_is_never_accepted(kernel: simt.Kernel) -> None:
    """Not even where the row that would draw it fails and leaves 0 behind."""
    samples = Samples(np.array([5, 0, 7], np.int32), np.zeros(3, np.float32), np.array([False, True, False]))
    case = AcceptanceCase(samples, np.array([9, NO_TOKEN, NO_TOKEN], np.int32), np.array([0, 1, 3], np.int32))
    for got in (case.run(kernel, 0), accept(case.samples, case.input_ids, case.logits_offsets)):
        assert got.offsets.tolist() == [0, 1, 1]
        assert got.failed.tolist() == [False, True]
