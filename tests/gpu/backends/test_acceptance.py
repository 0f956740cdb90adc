"""Which drawn tokens come out, by the contract of every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from simt.driver import CheckerDriver

from foreword.gpu.backends.acceptance import AcceptedTokens, accept
from foreword.gpu.backends.cpu_backend import CpuBackend
from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.backends.numpy_backend import NumpyBackend
from tests.gpu.backends.test_sampling import parameters

VOCAB = 64
FAILS = -2
Accept = Callable[..., AcceptedTokens]


def logits_of(token_ids: list[int]) -> np.ndarray:
    """Rows from which these tokens are drawn, or none can be."""
    logits = np.random.default_rng(0).standard_normal((len(token_ids), VOCAB)).astype(np.float32)
    for row, token_id in zip(logits, token_ids, strict=True):
        row[max(token_id, 0)] = np.nan if token_id == FAILS else 9
    return logits


@pytest.fixture(params=["numpy", "cpu", "cuda"])
def draw(request: pytest.FixtureRequest, checker: CheckerDriver) -> Accept:
    """Draw tokens by a device, given the tokens that their rows follow and the number of rows of each sequence."""

    def draw(token_ids: list[int], input_ids: list[int], lengths: list[int]) -> AcceptedTokens:
        logits, params = logits_of(token_ids), parameters(len(token_ids), want_logprob=True)
        steps = (params, np.array(input_ids, np.int32), np.cumsum([0, *lengths]).astype(np.int32))
        if request.param == "numpy":
            return NumpyBackend().sample_and_accept(logits, *steps)()
        cuda = CudaBackend("float32", checker, device="cpu")
        backend = CpuBackend("float32", num_threads=1) if request.param == "cpu" else cuda
        return backend.sample_and_accept(torch.from_numpy(logits), *steps)()

    return draw


def test_drafts_are_accepted_up_to_the_first_that_differs(draw: Accept) -> None:
    tokens = draw([1, 3, 3, 8, 5, 6, 7, 1], [9, 1, 2, 9, 9, 5, 6, 7], [3, 0, 1, 4])
    assert tokens.offsets.tolist() == [0, 2, 2, 3, 7]
    assert tokens.logits_rows.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert tokens.token_ids.tolist() == [1, 3, 8, 5, 6, 7, 1]
    assert not tokens.failed.any()
    expected = NumpyBackend().sample(logits_of([1, 3, 8, 5, 6, 7, 1]), parameters(7, want_logprob=True))
    assert (tokens.logprobs < 0).all()
    assert tokens.logprobs[0] == pytest.approx(expected.logprobs[0], abs=1e-5)


def test_an_equal_token_of_the_next_sequence_is_no_draft(draw: Accept) -> None:
    tokens = draw([4, 4, 4], [4, 4, 4], [1, 1, 1])
    assert tokens.offsets.tolist() == [0, 1, 2, 3]


def test_a_failure_takes_no_token_before_it(draw: Accept) -> None:
    """As without drafts: the tokens come out first, and the step that meets the failure again ends the sequence."""
    tokens = draw([1, FAILS, 5, 7, FAILS, 5, 6], [9, 1, 0, 5, 9, 0, 5], [4, 3])
    assert tokens.offsets.tolist() == [0, 1, 1]
    assert tokens.token_ids.tolist() == [1]
    assert tokens.failed.tolist() == [False, True]


def test_a_failure_behind_a_rejected_draft_does_not_matter(draw: Accept) -> None:
    tokens = draw([2, FAILS], [9, 1], [2])
    assert tokens.token_ids.tolist() == [2]
    assert tokens.failed.tolist() == [False]


def test_a_step_without_logits_gives_nothing(draw: Accept) -> None:
    tokens = draw([], [], [0, 0])
    assert tokens.offsets.tolist() == [0, 0, 0]
    assert tokens.failed.tolist() == [False, False]
    assert len(tokens.token_ids) == len(tokens.logprobs) == len(tokens.logits_rows) == 0


def test_drawing_and_accepting_together_is_one_after_the_other(checker: CheckerDriver) -> None:
    """All parameters of sampling in effect, ragged drafts of which half are right."""
    cuda, rng = CudaBackend("bfloat16", checker, device="cpu"), np.random.default_rng(3)
    lengths = np.array([1, 4, 0, 9, 17, 1])
    rows = int(lengths.sum())
    logits = torch.from_numpy(rng.standard_normal((rows, VOCAB)).astype(np.float32)).bfloat16()
    params = parameters(rows, temperature=0.8, top_p=0.9, seed=np.arange(rows), want_logprob=True)
    samples = cuda.sample(logits, params)
    input_ids = np.where(rng.random(rows) < 0.5, np.roll(samples.token_ids, 1), 5).astype(np.int32)
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    got, want = cuda.sample_and_accept(logits, params, input_ids, offsets)(), accept(samples, input_ids, offsets)
    for name in AcceptedTokens.__slots__:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), strict=True)


def test_scores_are_those_of_the_tokens_that_come_out(checker: CheckerDriver) -> None:
    """On the CUDA device every row that may come out is scored, before anybody knows which do."""
    logits = logits_of([1, 3, 3, 8, 5, 6, 7, FAILS])
    params = replace(parameters(8), want_scores=np.array([1, 1, 1, 0, 1, 1, 1, 1], np.bool_), num_top=2)
    steps = (params, np.array([9, 1, 2, 9, 9, 5, 0, 9], np.int32), np.array([0, 3, 4, 7, 8], np.int32))
    got = CudaBackend("float32", checker, device="cpu").sample_and_accept(torch.from_numpy(logits), *steps)()
    want = NumpyBackend().sample_and_accept(logits, *steps)()
    assert got.token_ids.tolist() == [1, 3, 8, 5, 6]
    assert got.scores is not None
    assert want.scores is not None
    assert got.scores.ranks.tolist() == want.scores.ranks.tolist() == [1, 1, 0, 1, 1]
    assert got.scores.top_token_ids.tolist() == want.scores.top_token_ids.tolist()
    np.testing.assert_allclose(got.scores.top_logprobs, want.scores.top_logprobs, atol=1e-5)
    np.testing.assert_allclose(got.scores.logprobs, want.scores.logprobs, atol=1e-5)
    unwanted = replace(params, want_scores=np.zeros(8, np.bool_))
    assert NumpyBackend().sample_and_accept(logits, unwanted, *steps[1:])().scores is None


def test_the_first_tokens_of_each_sequence(draw: Accept) -> None:
    tokens = draw([1, 2, 3, 4, 5, FAILS], [9, 1, 2, 9, 4, 9], [3, 2, 1])
    kept = tokens.first(np.array([2, 7, 0], np.int32))
    assert kept.offsets.tolist() == [0, 2, 4, 4]
    assert kept.token_ids.tolist() == [1, 2, 4, 5]
    assert kept.logits_rows.tolist() == [0, 1, 3, 4]
    assert kept.logprobs.tolist() == tokens.logprobs[[0, 1, 3, 4]].tolist()
    assert kept.failed.tolist() == [False, False, True]
    assert kept.first(np.zeros(3, np.int32)).offsets.tolist() == [0, 0, 0, 0]
