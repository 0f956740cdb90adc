"""Whether the library's matrix products give a row the same bits whatever rows are beside it.

Libraries block a product by its shape and by what the processor can do, so the answer is a property of the machine. It
is found by trying: the terms of every product here cancel exactly, so that a result is nothing but the rounding of its
summation, and another order of summation changes nearly every bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

NUM_ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 32, 33, 64, 100, 128, 256, 384)
MAX_WORK = 1 << 31
"""Multiplications of one trial; a wide layer is tried with fewer rows."""


def rows_are_independent(
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    out_features: int,
    in_features: int,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> bool:
    """Compare rows at the beginning and at the end of batches of many sizes with the same rows of the largest.

    Args:
        linear: x `[rows, in_features]`, weight `[out_features, in_features]` -> `[rows, out_features]`.
        out_features: of the layer to try.
        in_features: of the layer to try.
        max_rows: most rows that occur.
        dtype: of x and weight.
        device: of x and weight; the CPU by default.
    """
    max_rows = max(2, min(max_rows, MAX_WORK // (out_features * in_features)))
    x, weight = (values.to(device) for values in _cancelling(max_rows, out_features, in_features, dtype))
    whole = linear(x, weight)
    return all(
        torch.equal(linear(x[:rows].contiguous(), weight), whole[:rows])
        and torch.equal(linear(x[-rows:].contiguous(), weight), whole[-rows:])
        for rows in NUM_ROWS
        if rows < max_rows
    )


def _cancelling(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and weights whose exact products are zero; few weight rows are drawn and repeated, which costs less."""
    generator = torch.Generator().manual_seed(3)
    half, odd = in_features // 2, in_features % 2
    order = torch.randperm(in_features, generator=generator)
    x = torch.randn(num_rows, half, generator=generator).to(dtype)
    base = torch.randn(min(out_features, 64), half, generator=generator).to(dtype)
    x = torch.hstack([x, x, torch.zeros(num_rows, odd, dtype=dtype)])[:, order]
    base = torch.hstack([base, -base, torch.zeros(len(base), odd, dtype=dtype)])[:, order]
    return x, base.repeat(-(-out_features // len(base)), 1)[:out_features].contiguous()
