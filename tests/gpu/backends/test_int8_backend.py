"""Integer products: what quantisation costs, what it must not lose, and that every kernel does the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foreword.gpu.backends import cpu_kernels
from foreword.gpu.backends.int8_backend import Int8Backend

OUT, IN = 70, 100


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).bfloat16()


def on_grid(scale_sign: float, offset: float, levels: int) -> np.ndarray:
    """Weights offset + scale * code in groups of 32, scale and offset in half precision, all codes in use."""
    rng = np.random.default_rng(4)
    codes = rng.permuted(np.tile(np.arange(32) % levels, (OUT * 3, 1)), axis=1)
    scale = (rng.uniform(0.01, 0.1, (OUT * 3, 1)) * scale_sign).astype(np.float16).astype(np.float32)
    offsets = (offset * scale).astype(np.float16).astype(np.float32)
    return (offsets + scale * codes).astype(np.float32).reshape(OUT, 96)


@pytest.fixture(params=cpu_kernels.INT8_KERNELS)
def backend(request: pytest.FixtureRequest) -> Int8Backend:
    return Int8Backend(num_threads=2, kernel=request.param)


def bits(backend: Int8Backend, weight: np.ndarray) -> float:
    return backend.linear_weight(weight).layer.num_bytes * 8 / weight.size


@pytest.mark.parametrize(
    "weight",
    [on_grid(1, -7.3, 16), on_grid(1, -8, 16), on_grid(-1, -8, 16), np.zeros((OUT, 96), np.float32)],
    ids=["Q4_1", "Q4_0", "Q4_0 with negative scale", "zeros"],
)
def test_weights_on_grids_of_16_take_4_bits_and_lose_nothing(backend: Int8Backend, weight: np.ndarray) -> None:
    assert bits(backend, weight) < bits(backend, normal(OUT, 96)) - 3
    x = tensor(np.tile(np.eye(96, dtype=np.float32), (2, 1))[:, :96])  # ones and zeros are quantised without loss
    product = backend.linear(x, backend.head_weight(weight)).numpy()
    np.testing.assert_allclose(product[:96].T, weight, atol=3e-6, rtol=0)


def test_a_single_weight_off_the_grid_asks_for_8_bits(backend: Int8Backend) -> None:
    weight = on_grid(1, -7.3, 16)
    weight[-1, -1] += 0.003
    product = backend.linear(tensor(np.eye(96, dtype=np.float32)), backend.head_weight(weight)).numpy()
    np.testing.assert_allclose(product.T, weight, atol=np.abs(weight).max() / 250, rtol=0)
    assert bits(backend, weight) > 8


def test_weights_of_8_bits_lose_nothing(backend: Int8Backend) -> None:
    scale = np.random.default_rng(5).uniform(0.01, 0.1, (OUT * 3, 1)).astype(np.float16).astype(np.float32)
    codes = np.random.default_rng(6).integers(-127, 128, (OUT * 3, 32))
    codes[:, 5] = 127
    weight = (scale * codes).astype(np.float32).reshape(OUT, 96)
    product = backend.linear(tensor(np.eye(96, dtype=np.float32)), backend.head_weight(weight)).numpy()
    np.testing.assert_allclose(product.T, weight, atol=5e-5, rtol=0)


@pytest.mark.parametrize("in_features", [1, 31, 32, 33, IN, 576])
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 12, 13, 100])
def test_product_is_near_the_exact_one(backend: Int8Backend, in_features: int, rows: int) -> None:
    weight, x, bias = normal(OUT, in_features), tensor(normal(rows, in_features, seed=1)), normal(OUT, seed=2)
    exact = x.float().numpy() @ weight.T + bias
    actual = backend.linear(x, backend.linear_weight(weight, bias))
    assert actual.dtype == torch.bfloat16
    np.testing.assert_allclose(actual.float().numpy(), exact, atol=0.04 * np.sqrt(in_features), rtol=0.01)


def test_an_outlier_spoils_only_its_own_group(backend: Int8Backend) -> None:
    x = normal(1, 96)
    x[0, 40] = 1e4
    weight = np.eye(96, dtype=np.float32)
    product = backend.linear(tensor(x), backend.head_weight(weight))[0].numpy()
    np.testing.assert_allclose(np.delete(product, np.s_[32:64]), np.delete(x[0], np.s_[32:64]), atol=0.03, rtol=0.01)


def test_inputs_of_one_sign_use_all_codes(backend: Int8Backend) -> None:
    x = tensor(1000 + np.arange(96, dtype=np.float32)[None] * 4)
    product = backend.linear(x, backend.head_weight(np.eye(96, dtype=np.float32)))[0].numpy()
    np.testing.assert_allclose(product, x[0].float().numpy(), atol=1)  # a range of 124 in 256 steps, not of 1,124


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_row_alone(backend: Int8Backend, value: float) -> None:
    x, weight = normal(7, IN), backend.linear_weight(normal(OUT, IN))
    clean = backend.linear(tensor(x), weight)
    x[3, 99] = value
    product = backend.linear(tensor(x), weight)
    assert not torch.isfinite(product[3]).any()
    assert torch.equal(product[[0, 1, 2, 4, 5, 6]], clean[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e9])
def test_weights_that_cannot_be_represented_show_in_their_output(backend: Int8Backend, value: float) -> None:
    weight = normal(OUT, IN)
    weight[5, 7] = value
    product = backend.linear(tensor(normal(3, IN)), backend.linear_weight(weight))
    assert torch.isnan(product[:, 5]).all()
    assert torch.isfinite(product[:, [4, 6]]).all()


@pytest.mark.parametrize("scale", [1e-7, 1e-5, 1e3])
def test_small_and_large_weights(backend: Int8Backend, scale: float) -> None:
    weight = normal(OUT, 96) * np.float32(scale)
    product = backend.linear(tensor(np.eye(96, dtype=np.float32)), backend.head_weight(weight)).numpy()
    np.testing.assert_allclose(product.T, weight, atol=np.abs(weight).max() / 250 + 4e-8, rtol=0)


def test_kernels_agree() -> None:
    x, weight = tensor(normal(37, 576)), normal(200, 576)
    products = [
        backend.linear(x, backend.head_weight(weight))
        for backend in (Int8Backend(num_threads=2, kernel=kernel) for kernel in cpu_kernels.INT8_KERNELS)
    ]
    for kernel, product in zip(cpu_kernels.INT8_KERNELS, products, strict=True):
        if kernel == "plain":  # which does not fuse multiplications and additions on every processor
            torch.testing.assert_close(product, products[0], atol=1e-3, rtol=1e-5)
        else:
            assert torch.equal(product, products[0]), kernel


@pytest.mark.parametrize("levels", [16, 256])
def test_extreme_codes_do_not_saturate(backend: Int8Backend, levels: int) -> None:
    """All weights and all inputs at the ends of their ranges, where sums of products are largest."""
    weight = np.ones((OUT, 64), np.float32)
    if levels == 256:
        weight -= (np.arange(64) % 3 / 256).astype(np.float32)
    weight[:, ::32] = 0.0
    assert (bits(backend, weight) > 8) == (levels == 256)
    x = np.full((4, 64), -1.0, np.float32)
    x[1::2] = 1.0
    x[:, 1::32] *= -1
    product = backend.linear(tensor(x), backend.head_weight(weight)).numpy()
    np.testing.assert_allclose(product, x @ weight.T, rtol=0.01)


def test_rows_of_every_kernel_are_independent(backend: Int8Backend) -> None:
    x, weight = tensor(normal(103, 576)), backend.head_weight(normal(97, 576))
    whole = backend.linear(x, weight)
    for first, last in [(0, 1), (1, 3), (2, 5), (3, 7), (4, 9), (5, 11), (90, 103), (7, 103)]:
        assert torch.equal(backend.linear(x[first:last], weight), whole[first:last]), (first, last)


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernel must be one of .*plain"):
        Int8Backend(num_threads=1, kernel="fast")
