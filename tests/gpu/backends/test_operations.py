"""Every operation of the contract on every device against the NumPy oracle, and bit-equal whatever the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from simt.driver import CheckerDriver

from foreword.gpu.backends import cpu_kernels
from foreword.gpu.backends.backend import Backend, KVCacheShape, RotaryTable
from foreword.gpu.backends.cpu_backend import CpuBackend
from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.backends.numpy_backend import NumpyBackend
from foreword.gpu.models.rope import RopeConfig, rotary_angles
from foreword.scheduler.errors import ConfigError

TorchBackend = CpuBackend | CudaBackend
TOLERANCE = {"float32": 3e-5, "bfloat16": 2e-2, "int8": 2e-2}
NUM_TOKENS = 67


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def device(backend: TorchBackend, x: np.ndarray) -> torch.Tensor:
    return backend.embedding_weight(x)


def subsets(rows: int) -> list[np.ndarray]:
    """Batches that hold a row among different neighbours, at different places, aligned and not."""
    rng = np.random.default_rng(1)
    sizes = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64)
    return [rng.choice(rows, size, replace=False) for size in sizes]


def assert_row_independent(compute: Callable[[np.ndarray], torch.Tensor], rows: int) -> None:
    whole = compute(np.arange(rows))
    for subset in subsets(rows):
        assert torch.equal(compute(subset), whole[torch.from_numpy(subset)]), f"{len(subset)} rows"


def assert_close(backend: TorchBackend, actual: torch.Tensor, expected: np.ndarray) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual.float().numpy(), expected, atol=TOLERANCE[backend.dtype] * scale, rtol=0)


def test_backends_spell_the_contract_alike() -> None:
    operations = [name for name, member in vars(Backend).items() if getattr(member, "__isabstractmethod__", False)]
    assert len(operations) > 10
    for implementation in (NumpyBackend, CpuBackend, CudaBackend):
        for name in operations:
            contract = inspect.signature(getattr(Backend, name)).parameters.values()
            actual = inspect.signature(getattr(implementation, name)).parameters.values()
            assert [(p.name, p.default) for p in actual] == [(p.name, p.default) for p in contract], name


def test_embedding(backend: TorchBackend) -> None:
    table, ids = normal((50, 24)), np.array([49, 0, 7, 7], np.int32)
    stream = backend.embedding(torch.from_numpy(ids), device(backend, table))
    assert stream.dtype == torch.float32
    assert_close(backend, stream, table[ids])


@pytest.mark.parametrize("width", [24, 576, 1000])
@pytest.mark.parametrize("with_delta", [False, True])
def test_rms_norm(backend: TorchBackend, width: int, with_delta: bool) -> None:
    oracle = NumpyBackend()
    stream, weight = normal((NUM_TOKENS, width)), normal((width,), 1)
    delta = device(backend, normal((NUM_TOKENS, width), 2)) if with_delta else None
    expected_stream = stream.copy()
    expected = oracle.rms_norm(expected_stream, weight, 1e-5, None if delta is None else delta.float().numpy())

    actual_stream = torch.from_numpy(stream.copy())
    actual = backend.rms_norm(actual_stream, backend.weight(weight), 1e-5, delta)

    assert_close(backend, actual, expected)
    np.testing.assert_array_equal(actual_stream.numpy(), expected_stream)

    def compute(rows: np.ndarray) -> torch.Tensor:
        part = None if delta is None else delta[torch.from_numpy(rows)]
        return backend.rms_norm(torch.from_numpy(stream[rows]), backend.weight(weight), 1e-5, part)

    assert_row_independent(compute, NUM_TOKENS)


def test_nan_of_any_payload_stays_nan(backend: TorchBackend) -> None:
    stream = normal((1, 24))
    stream.view(np.uint32)[0, 3] = 0x7FFFFFFF  # rounding its bits to bfloat16 would carry into the sign
    assert torch.isnan(backend.rms_norm(torch.from_numpy(stream), backend.weight(np.ones(24, np.float32)), 1e-5)[0, 3])


LAYERS = [(960, 576), (576, 576), (3072, 576), (576, 1536), (50, 24), (256, 4096)]


def cancelling(rows: int, in_features: int, out_features: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and weights whose exact products are all zero, so that every result is the rounding of its summation.

    Another order of summation then changes nearly every bit; with plain random numbers it hides behind the rounding
    of the result.
    """
    order = np.random.default_rng(3).permutation(in_features)
    half, matrix = normal((rows, in_features // 2), 1), normal((out_features, in_features // 2), 2)
    return np.hstack([half, half])[:, order], np.hstack([matrix, -matrix])[:, order]


@pytest.mark.parametrize(("out_features", "in_features"), LAYERS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(backend: TorchBackend, out_features: int, in_features: int, with_bias: bool) -> None:
    x = device(backend, normal((NUM_TOKENS, in_features)))
    matrix = normal((out_features, in_features), 1)
    bias = normal((out_features,), 2) if with_bias else None
    expected = x.float().numpy() @ matrix.T + (0 if bias is None else bias)
    assert_close(backend, backend.linear(x, backend.linear_weight(matrix, bias)), expected)


@pytest.mark.parametrize(("out_features", "in_features"), LAYERS)
def test_linear_is_row_independent(backend: TorchBackend, out_features: int, in_features: int) -> None:
    values, matrix = cancelling(NUM_TOKENS, in_features, out_features)
    x, weight = device(backend, values), backend.linear_weight(matrix)
    assert_row_independent(lambda rows: backend.linear(x[torch.from_numpy(rows)], weight), NUM_TOKENS)


def test_linear_of_no_rows(backend: TorchBackend) -> None:
    assert backend.linear(device(backend, normal((0, 24))), backend.linear_weight(normal((50, 24)))).shape == (0, 50)


def test_linear_is_row_independent_up_to_a_whole_step(backend: TorchBackend) -> None:
    values, matrix = cancelling(512, 1536, 576)
    x, weight = device(backend, values), backend.linear_weight(matrix)
    whole = backend.linear(x, weight)
    for rows in (100, 128, 255, 384, 500):
        assert torch.equal(backend.linear(x[512 - rows :], weight), whole[512 - rows :]), rows


def test_the_output_head_is_row_independent(backend: TorchBackend) -> None:
    values, matrix = cancelling(33, 576, 49152)
    x, weight = device(backend, values), backend.linear_weight(matrix)
    whole = backend.linear(x, weight)
    for rows in (1, 2, 3, 16):
        assert torch.equal(backend.linear(x[:rows], weight), whole[:rows]), rows


@pytest.mark.parametrize("width", [24, 1536, 77])
def test_silu_and_mul(backend: TorchBackend, width: int) -> None:
    gate_up = device(backend, normal((NUM_TOKENS, 2 * width)) * 20)
    assert_close(backend, backend.silu_and_mul(gate_up), NumpyBackend().silu_and_mul(gate_up.float().numpy()))
    assert_row_independent(lambda rows: backend.silu_and_mul(gate_up[torch.from_numpy(rows)]), NUM_TOKENS)


def test_silu_of_extreme_values(backend: TorchBackend) -> None:
    gate_up = device(backend, np.array([[-1e30, -200.0, -88.0, 0.0, 88.0, 1e30] + [1.0] * 6], np.float32))
    actual = backend.silu_and_mul(gate_up).float().numpy()[0]
    np.testing.assert_allclose(actual[:4], [0.0, 0.0, 0.0, 0.0], atol=1e-6)
    np.testing.assert_array_equal(actual[4:], gate_up.float().numpy()[0, 4:6])


# Attention


SHAPES = [(9, 3, 64), (4, 4, 16), (6, 1, 100), (8, 1, 128), (5, 5, 256), (2, 1, 80)]


class Attention:
    """One layer of rotation, cache and attention on any backend."""

    def __init__(self, backend: Any, writer: Any, heads: tuple[int, int, int]) -> None:
        self.backend, self.writer = backend, writer
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        if isinstance(backend, CudaBackend) and self.head_dim % 16:
            pytest.skip("the CUDA device refuses this head size")
        size, max_blocks = writer.block_size, writer.max_model_len // writer.block_size
        shape = KVCacheShape(2, writer.num_blocks, size, self.num_kv_heads, self.head_dim, 8, max_blocks)
        self.cache = backend.kv_cache(shape)
        self.cache.keys[:] = float("nan")
        self.cache.values[:] = float("nan")
        self.cache.block_table[:] = writer.num_blocks - 1
        angles = rotary_angles(RopeConfig(), self.head_dim, writer.max_model_len)
        self.rotary = RotaryTable(*map(backend.weight, angles))

    def step(self, work: list[tuple[int, np.ndarray]], window: int | None = None) -> np.ndarray:
        """Run tokens given by their qkv values, `[tokens, (H + 2 G) * D]` for each row; returns `[T, H * D]`."""
        plan = self.writer.plan([(row, [0] * len(values), 0) for row, values in work])
        batch = self.backend.upload(plan, self.cache)
        qkv = self.backend.embedding_weight(np.concatenate([values for _, values in work]))
        queries = self.backend.rotate_and_store(qkv, self.rotary, batch, self.cache, 1)
        out = self.backend.attention(queries, batch, self.cache, 1, self.head_dim**-0.5, window)
        return out.float().numpy() if isinstance(out, torch.Tensor) else out

    def values(self, num_tokens: int, seed: int) -> np.ndarray:
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return normal((num_tokens, width), seed)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 20, 64])
def test_attention_of_chunks_and_decodes(
    backend: TorchBackend, plan_writer: Callable[..., Any], heads: tuple[int, int, int], window: int | None
) -> None:
    oracle, actual = Attention(NumpyBackend(), plan_writer(), heads), Attention(backend, plan_writer(), heads)
    steps = [[(0, 40), (3, 1), (5, 16)], [(3, 100), (0, 1)], [(5, 1), (0, 5), (3, 1)]]
    for number, step in enumerate(steps):
        work = [(row, device(backend, oracle.values(n, 10 * number + row)).float().numpy()) for row, n in step]
        expected, got = oracle.step(work, window), actual.step(work, window)
        np.testing.assert_allclose(got, expected, atol=2 * TOLERANCE[backend.dtype], rtol=0)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_attention_does_not_depend_on_chunks_or_neighbours(
    backend: TorchBackend, plan_writer: Callable[..., Any], heads: tuple[int, int, int], window: int | None
) -> None:
    whole = Attention(backend, plan_writer(), heads)
    values, other = whole.values(150, 1), whole.values(150, 2)
    expected = whole.step([(0, values)], window)

    chunked = Attention(backend, plan_writer(), heads)
    parts, start = [], 0
    for size in (1, 15, 16, 17, 64, 1, 36):
        chunk = values[start : start + size]
        neighbours = [(7, other[start : start + size]), (2, chunk)] if size > 1 else [(2, chunk)]
        parts.append(chunked.step(neighbours, window)[-size:])
        start += size
    np.testing.assert_array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_attention_kernels_of_older_processors(
    dtype: str, plan_writer: Callable[..., Any], heads: tuple[int, int, int], window: int | None
) -> None:
    """Those with fused multiplications are bit-equal; the one without is near, and its rows are independent too."""
    backends = [CpuBackend(dtype, 2, kernel) for kernel in cpu_kernels.ATTENTION_KERNELS]
    results = []
    for backend in backends:
        whole, chunked = (Attention(backend, plan_writer(), heads) for _ in range(2))
        values = whole.values(150, 1)
        result = whole.step([(0, values)], window)
        parts = [chunked.step([(2, part)], window) for part in np.split(values, [1, 16, 33, 97, 98])]
        np.testing.assert_array_equal(np.concatenate(parts), result)
        results.append(result)
    for kernel, result in zip(cpu_kernels.ATTENTION_KERNELS, results, strict=True):
        if kernel == "plain":
            np.testing.assert_allclose(result, results[0], atol=TOLERANCE[dtype], rtol=0)
        else:
            np.testing.assert_array_equal(result, results[0])


def test_an_unknown_attention_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_kernel must be one of .*plain, got 'fast'"):
        CpuBackend("float32", 1, "fast")


def test_blocks_that_the_widest_kernel_cannot_use_give_the_same_result(
    cpu: CpuBackend, plan_writer: Callable[..., Any]
) -> None:
    """Blocks of eight tokens are half a vector of that kernel, so another one takes over."""
    small = Attention(cpu, plan_writer(num_blocks=128, block_size=8), (6, 2, 24))
    large = Attention(cpu, plan_writer(), (6, 2, 24))
    values = large.values(150, 1)
    np.testing.assert_array_equal(small.step([(0, values)]), large.step([(0, values)]))


def test_keys_and_values_of_other_layers_stay(backend: TorchBackend, plan_writer: Callable[..., Any]) -> None:
    attention = Attention(backend, plan_writer(), (4, 2, 16))
    attention.step([(0, attention.values(40, 0))])
    assert torch.isnan(attention.cache.keys[0]).all()
    assert torch.isnan(attention.cache.values[0]).all()
    assert not torch.isnan(attention.cache.keys[1]).all()


def test_cache_shapes_the_cpu_cannot_use_are_refused(cpu: CpuBackend) -> None:
    with pytest.raises(ConfigError, match="block_size: must be a multiple of 8 on the CPU device, got 20"):
        cpu.kv_cache(KVCacheShape(1, 1, 20, 1, 16, 1, 1))
    with pytest.raises(ConfigError, match="head_dim: must be even and at most 256 on the CPU device, got 512"):
        cpu.kv_cache(KVCacheShape(1, 1, 16, 1, 512, 1, 1))


def test_cache_shapes_the_cuda_device_cannot_use_are_refused(checker: CheckerDriver) -> None:
    cuda = CudaBackend("bfloat16", checker, device="cpu")
    with pytest.raises(ConfigError, match="block_size: must be 16 or 32 on the CUDA device, got 64"):
        cuda.kv_cache(KVCacheShape(1, 1, 64, 1, 16, 1, 1))
    for head_dim in (100, 512):
        with pytest.raises(ConfigError, match="head_dim: must be a multiple of 16 and at most 256 on the CUDA device"):
            cuda.kv_cache(KVCacheShape(1, 1, 16, 1, head_dim, 1, 1))
