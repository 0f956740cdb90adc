"""The kernels that work on rows, of every element type in three orders of threads, with poisoned memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import row_case

from foreword.gpu.backends.numpy_backend import NumpyBackend
from foreword.gpu.backends.sampling import HistoryCounts, LogitBiases, SamplingBatch, TokenMasks
from foreword.gpu.kernels import table
from foreword.gpu.kernels.table import FOLDER, TYPES


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_values(dtype: str, order: int) -> None:
    row_case.check(FOLDER, order, dtype)


def unprocessed(temperature: float) -> SamplingBatch:
    """Rows that nothing is done to."""
    params, nothing = row_case.parameters(), np.full(row_case.ROWS, -1, np.int32)
    return replace(
        params,
        temperature=np.full(row_case.ROWS, temperature, np.float32),
        biases=LogitBiases(params.biases.offsets, params.biases.ids, params.biases.values, nothing),
        masks=TokenMasks(params.masks.words, nothing),
        history=HistoryCounts(params.history.offsets, params.history.ids, params.history.counts, nothing),
        num_masked=np.zeros(row_case.ROWS, np.int32),
        by_rejection=np.zeros(row_case.ROWS, np.bool_),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [1, 31, 33, 129])
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_with_little_to_draw_from(dtype: str, vocab: int, temperature: float) -> None:
    """All equal, one-hot, one finite; NaN, +inf and -inf alone fail, each by itself."""
    logits = np.zeros((row_case.ROWS, vocab), np.float32)
    logits[1, vocab // 2] = 30000.0
    logits[2], logits[2, -1] = -np.inf, -30000.0
    logits[3, -1], logits[4, 0], logits[5] = np.nan, np.inf, -np.inf
    launch, params = row_case.Launcher(FOLDER, 1, dtype), unprocessed(temperature)
    given, nowhere = launch.array(logits), np.full(row_case.ROWS, -1, np.int32)
    token_ids, logprobs, failed = nowhere * 7, row_case.poison(row_case.ROWS), nowhere * 7
    launch(
        table.SAMPLE, row_case.ROWS, 64, given, row_case.poison(1, vocab), nowhere, params.temperature, params.top_k,
        params.top_p, params.min_p, params.typical_p, params.seed, params.position, params.by_rejection.view(np.uint8),
        params.draft_ids, params.want_logprob.view(np.uint8), token_ids, logprobs, failed, vocab,
    )  # fmt: skip
    assert failed.tolist() == [0, 0, 0, 1, 1, 1]
    expected = NumpyBackend().sample(row_case.values(given), params)
    np.testing.assert_array_equal(token_ids, expected.token_ids)
    np.testing.assert_allclose(logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    assert token_ids[1:3].tolist() == [vocab // 2, vocab - 1]
    assert token_ids[0] == 0 or temperature > 0
