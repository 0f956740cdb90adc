"""The kernels that work on rows on the SIMT checker, in NumPy alone so that sanitizers have nothing else to watch.

Oracles compute in float32 from the values that the element type holds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import simt
from attention_case import from_bits, poisoned, to_bits

from foreword.gpu.backends.numpy_backend import NumpyBackend
from foreword.gpu.backends.sampling import HistoryCounts, LogitBiases, SamplingBatch, TokenMasks
from foreword.gpu.kernels import table
from foreword.gpu.kernels.table import Kernel

ROWS, VOCAB, THREADS = 6, 201, 96


PRECISION = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def poison(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def values(x: np.ndarray) -> np.ndarray:
    """The float32 values of an array of the device."""
    return from_bits(x).astype(np.float32)


class Launcher:
    """Runs instantiations for one element type, threads in an order by a seed."""

    def __init__(self, folder: Path, seed: int, dtype: str) -> None:
        self.dtype = dtype
        self._folder = folder
        self._seed = seed

    def __call__(self, kernel: Kernel, blocks: int, threads: int, *arguments: Any) -> None:
        name = kernel.expression((self.dtype,))
        options = [f"-I{self._folder}"]
        module = simt.RawModule(path=self._folder / kernel.file, options=options, name_expressions=[name])
        exact = [np.int32(value) if isinstance(value, int) else value for value in arguments]
        module.get_function(name)((blocks,), (threads,), exact, seed=self._seed)

    def array(self, x: np.ndarray) -> np.ndarray:
        """Rounded to the element type."""
        return to_bits(x, self.dtype)

    def poison(self, *shape: int) -> np.ndarray:
        """NaN, in the element type."""
        return poisoned(shape, self.dtype)

    def assert_close(self, got: np.ndarray, want: np.ndarray, factor: float = 1) -> None:
        """Equal up to the precision of the element type."""
        limit = factor * PRECISION[self.dtype]
        np.testing.assert_allclose(values(got), want, rtol=limit, atol=limit)


def check(folder: Path, seed: int, dtype: str = "float32") -> None:
    """Compare the kernels of a folder with the oracle, threads in an order by the seed.

    Raises:
        AssertionError: a value differs.
        simt.LaunchError: a kernel cannot go on.
    """
    launch = Launcher(folder, seed, dtype)
    check_elementwise(launch)
    check_rotation(launch)
    check_sampling(launch)
    check_truncation(launch)
    check_padding(launch)
    check_scores(launch)


def check_elementwise(launch: Launcher) -> None:
    """Embedding, norm with a residual, gated activation."""
    oracle, width = NumpyBackend(), 77
    ids, embedding, stream = np.array([4, 0, 4], np.int32), launch.array(normal(5, width)), poison(3, width)
    launch(table.EMBEDDING, 3, 64, ids, embedding, stream, width)
    np.testing.assert_array_equal(stream, values(embedding)[ids])

    delta, weight, out = launch.array(normal(3, width) * 2), normal(width), launch.poison(3, width)
    expected_stream = stream.copy()
    expected = oracle.rms_norm(expected_stream, weight, 1e-5, values(delta))
    launch(table.RMS_NORM, 3, 64, stream, delta, weight, out, width, np.float32(1e-5))
    np.testing.assert_array_equal(stream, expected_stream)
    launch.assert_close(out, expected)

    gate_up, gated = launch.array(normal(4, 2 * width) * 9), launch.poison(4, width)
    launch(table.SILU_AND_MUL, 4, 64, gate_up, gated, width)
    launch.assert_close(gated, oracle.silu_and_mul(values(gate_up)))
    launch(table.GELU_AND_MUL, 4, 64, gate_up, gated, width)
    gate, up = np.split(from_bits(gate_up), 2, axis=1)
    gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    launch.assert_close(gated, gelu * up, factor=10)


def check_rotation(launch: Launcher) -> None:
    """Three heads over one KV head; the last token is padding, and nothing but the slots of the others changes."""
    half, heads, blocks, block_size = 8, 3, 3, 4
    qkv = launch.array(normal(3, (heads + 2) * 2 * half))
    positions, slots = np.array([2, 9, 0], np.int32), np.array([1, 11, -1], np.int32)
    angles = normal(10, half)
    cos, sin = np.cos(angles), np.sin(angles)
    queries = launch.poison(3, heads * 2 * half)
    caches = [launch.poison(1 + blocks, 1, block_size, 2 * half) for _ in range(2)]
    keys, stored = (cache[1:] for cache in caches)
    sizes = (heads, 1, half, block_size)
    launch(table.ROTATE_AND_STORE, 3, 64, qkv, cos, sin, positions, slots, queries, keys, stored, *sizes)
    split = values(qkv).reshape(3, heads + 2, 2, half)
    c, s = cos[positions][:, None], sin[positions][:, None]
    first, second = split[:, :, 0] * c - split[:, :, 1] * s, split[:, :, 1] * c + split[:, :, 0] * s
    rotated = np.concatenate([first, second], axis=2)
    launch.assert_close(queries.reshape(3, heads, -1), rotated[:, :heads])
    flat_keys, flat_values = keys.reshape(-1, 2 * half), stored.reshape(-1, 2 * half)
    launch.assert_close(flat_keys[slots[:2]], rotated[:2, heads])
    np.testing.assert_array_equal(values(flat_values[slots[:2]]), split[:2, heads + 1].reshape(2, -1))
    for cache in caches:
        rows = cache.reshape(-1, 2 * half)
        assert np.isnan(values(np.delete(rows, block_size + slots[:2], axis=0))).all()


def parameters() -> SamplingBatch:
    """Six rows: greedy, plain, truncated in each way, and with everything that changes logits."""
    with_lists = np.array([-1, -1, -1, 0, 0, -1], np.int32)
    words = np.full((2, (VOCAB + 31) // 32), 0x55555555, np.uint32)
    return SamplingBatch(
        temperature=np.array([0, 1, 0.7, 1.5, 0, 0.9], np.float32),
        top_k=np.array([0, 0, 40, 0, 0, 9], np.int32),
        top_p=np.array([1, 1, 0.9, 0.8, 1, 1], np.float32),
        min_p=np.array([0, 0, 0.01, 0, 0, 0], np.float32),
        typical_p=np.array([1, 1, 1, 1, 1, 0.7], np.float32),
        repetition_penalty=np.full(ROWS, 1.3, np.float32),
        frequency_penalty=np.full(ROWS, 0.2, np.float32),
        presence_penalty=np.full(ROWS, 3, np.float32),
        seed=np.arange(ROWS, dtype=np.uint64) << np.uint64(33),
        position=np.arange(ROWS, dtype=np.int64) + (1 << 20),
        biases=LogitBiases(
            np.array([0, 3], np.int32), np.array([1, 50, 200], np.int32), np.array([4, -3, 2], np.float32), with_lists
        ),
        masks=TokenMasks(words, np.array([-1, -1, -1, 1, -1, -1], np.int32)),
        history=HistoryCounts(
            np.array([0, 4], np.int32), np.array([0, 7, 50, 66], np.int32), np.array([0, 2, 1, 5], np.int32), with_lists
        ),
        masked_ids=np.array([[66, 3]] * ROWS, np.int32),  # the first has a penalty, too
        num_masked=np.array([0, 0, 0, 2, 1, 0], np.int32),
        by_rejection=np.array([True, False, True, True, False, True]),
        draft_ids=np.array([5, 7, 171, 122, -1, 2 * VOCAB], np.int32),  # the third is rejected, the fourth accepted
        want_logprob=np.ones(ROWS, np.bool_),
    )


def check_sampling(launch: Launcher) -> None:
    """Tokens, log probabilities and failures; a row that holds NaN, of either sign, fails alone."""
    logits = normal(ROWS + 1, VOCAB)[:ROWS] * 3
    logits[4, 0] = 12  # of the prompt, and the best as long as presence does not count
    by_rejection = parameters()
    exact = replace(by_rejection, by_rejection=np.zeros(ROWS, np.bool_))
    cases = [(by_rejection, False), (exact, True)]
    cases[1:1] = [(replace(exact, seed=exact.seed + np.uint64(i)), False) for i in range(24)]
    for params, damaged in cases:
        if damaged:
            logits[2, 77] = -np.float32(np.nan)  # ranks below every number
        given = launch.array(logits)
        expected = NumpyBackend().sample(values(given), params)
        row, index = np.array([3, 4], np.int32), np.array([-1, -1, -1, 0, 1, -1], np.int32)
        processed = poison(2, VOCAB)
        launch(
            table.PROCESS, 2, THREADS, given, row, params.masks.index, params.masks.words,
            params.biases.index, params.biases.offsets, params.biases.ids, params.biases.values,
            params.masked_ids, params.num_masked,
            params.history.index, params.history.offsets, params.history.ids, params.history.counts,
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
            processed, VOCAB, params.masks.words.shape[1], 2,
        )  # fmt: skip
        token_ids, logprobs, failed = np.full(ROWS, -7, np.int32), poison(ROWS), np.full(ROWS, -7, np.int32)
        launch(
            table.SAMPLE, ROWS, THREADS, given, processed, index, params.temperature, params.top_k, params.top_p,
            params.min_p, params.typical_p, params.seed, params.position, params.by_rejection.view(np.uint8),
            params.draft_ids, params.want_logprob.view(np.uint8),
            token_ids, logprobs, failed, VOCAB,
        )  # fmt: skip
        np.testing.assert_array_equal(token_ids, expected.token_ids)
        np.testing.assert_allclose(logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(failed, expected.failed)


def check_truncation(launch: Launcher) -> None:
    """The best id alone by top-k; and many ids by top-p, whose masses are small and add up to that of the best."""
    params, vocab, nowhere = parameters(), 20_000, np.full(ROWS, -1, np.int32)
    logits = np.full((ROWS, vocab), -10.5, np.float32)
    logits[:, 7] = 0
    logits[:3, [7, 9]] = 8, 7.95
    params = replace(
        params,
        temperature=np.ones(ROWS, np.float32),
        top_k=np.array([1, 1, 1, 0, 0, 0], np.int32),
        top_p=np.array([1, 1, 1, 0.9, 0.9, 0.9], np.float32),
        min_p=np.zeros(ROWS, np.float32),
        typical_p=np.ones(ROWS, np.float32),
        by_rejection=np.zeros(ROWS, np.bool_),
        biases=replace(params.biases, index=nowhere),
        masks=replace(params.masks, index=nowhere),
        history=replace(params.history, index=nowhere),
        num_masked=np.zeros(ROWS, np.int32),
    )
    given = launch.array(logits)
    for i in range(4):
        params = replace(params, seed=params.seed + np.uint64(i))
        token_ids, logprobs, failed = np.full(ROWS, -7, np.int32), poison(ROWS), np.full(ROWS, -7, np.int32)
        launch(
            table.SAMPLE, ROWS, THREADS, given, poison(1, vocab), nowhere, params.temperature, params.top_k,
            params.top_p, params.min_p, params.typical_p, params.seed, params.position,
            params.by_rejection.view(np.uint8), params.draft_ids, params.want_logprob.view(np.uint8),
            token_ids, logprobs, failed, vocab,
        )  # fmt: skip
        np.testing.assert_array_equal(token_ids, NumpyBackend().sample(values(given), params).token_ids)


def check_padding(launch: Launcher) -> None:
    """Rows of a recorded step that the batch does not have: nothing of them is read, and their results are 0."""
    params, logits = parameters(), launch.poison(ROWS, VOCAB)
    nowhere, processed = np.full(ROWS, -1, np.int32), poison(2, VOCAB)
    index = np.full(ROWS, 1 << 20, np.int32)  # of masks and lists, none of which are there
    masks, biases, history = params.masks, params.biases, params.history
    launch(
        table.PROCESS, 2, THREADS, logits, nowhere, index, masks.words,
        index, biases.offsets, biases.ids, biases.values, params.masked_ids, params.num_masked,
        index, history.offsets, history.ids, history.counts,
        params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
        processed, VOCAB, masks.words.shape[1], 2,
    )  # fmt: skip
    assert np.isnan(processed).all()
    token_ids, logprobs, failed = np.full(ROWS, -7, np.int32), poison(ROWS), np.full(ROWS, -7, np.int32)
    launch(
        table.SAMPLE, ROWS, THREADS, logits, processed, nowhere, params.temperature, params.top_k, params.top_p,
        params.min_p, params.typical_p, params.seed, np.full(ROWS, -1),
        params.by_rejection.view(np.uint8), params.draft_ids, params.want_logprob.view(np.uint8),
        token_ids, logprobs, failed, VOCAB,
    )  # fmt: skip
    for result in (token_ids, logprobs, failed):
        assert not result.any()


def check_scores(launch: Launcher) -> None:
    logits = normal(3, VOCAB)
    logits[1, [5, 9]] = 7.0
    given = launch.array(logits)
    rows, token_ids, num_top = np.array([2, 1, 1], np.int32), np.array([200, 9, 0], np.int32), 4
    expected = NumpyBackend().score(values(given), rows, token_ids, num_top)()
    logprobs, ranks = poison(3), np.full(3, -7, np.int32)
    top_ids, top_logprobs = np.full((3, num_top), -7, np.int32), poison(3, num_top)
    launch(table.SCORE, 3, THREADS, given, rows, token_ids, logprobs, ranks, top_ids, top_logprobs, VOCAB, num_top)
    np.testing.assert_array_equal(ranks, expected.ranks)
    np.testing.assert_array_equal(top_ids.ravel(), expected.top_token_ids)
    np.testing.assert_allclose(logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(top_logprobs.ravel(), expected.top_logprobs, rtol=1e-5, atol=1e-5)
