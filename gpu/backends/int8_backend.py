"""The CPU device with integer matrix products: weights in 4 or 8 bits, activations in 8, each in groups of 32.

A layer whose weights already lie on grids of 16 values, as in a Q4_0 or Q4_1 file, is kept in 4 bits and loses nothing;
any other is rounded to 8 bits. Activations are rounded inside the product, one scale for 32 values, so outliers spoil
only their own group. Everything between the products is bfloat16 as in `cpu_backend`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from foreword.gpu.backends import cpu_kernels
from foreword.gpu.backends.backend import Float32, LinearWeight
from foreword.gpu.backends.cpu_backend import CpuBackend


@dataclass(frozen=True, slots=True)
class Int8LinearWeight(LinearWeight[torch.Tensor]):
    """A linear layer in the integer kernels' form.

    Attributes:
        layer: describes the panels in `weight` to the kernels.
        out_dtype: of its products.
    """

    layer: cpu_kernels.Int8Weight
    out_dtype: torch.dtype


class Int8Backend(CpuBackend):
    """PyTorch tensors on the CPU, bfloat16 between the products and in the cache, float32 logits."""

    def __init__(self, num_threads: int, kernel: str = cpu_kernels.INT8_KERNELS[0]) -> None:
        """Choose the product kernel, one of `cpu_kernels.INT8_KERNELS`; they differ in nothing but rounding."""
        if kernel not in cpu_kernels.INT8_KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(cpu_kernels.INT8_KERNELS)}, got {kernel!r}")
        super().__init__("bfloat16", num_threads)
        self.dtype = "int8"
        self._kernel = kernel
        self._quantised = torch.empty(0, dtype=torch.uint8)

    def is_row_independent(self, layers: Iterable[tuple[int, int]], max_rows: int) -> bool:
        """True: the kernels compute every row by itself."""
        return True

    def linear_weight(self, weight: Float32, bias: Float32 | None = None) -> Int8LinearWeight:
        return self._packed(weight, bias, torch.bfloat16)

    def head_weight(self, weight: Float32) -> Int8LinearWeight:
        return self._packed(weight, None, torch.float32)

    def tied_linear_weight(self, table: torch.Tensor) -> Int8LinearWeight:
        return self.head_weight(table.float().numpy())

    def linear(self, x: torch.Tensor, weight: LinearWeight[torch.Tensor]) -> torch.Tensor:
        assert isinstance(weight, Int8LinearWeight)
        rows, layer, is_bf16 = x.shape[0], weight.layer, weight.out_dtype == torch.bfloat16
        out = torch.empty(rows, layer.out_features, dtype=weight.out_dtype)
        if self._quantised.numel() < rows * layer.row_bytes:
            self._quantised = torch.empty(rows * layer.row_bytes, dtype=torch.uint8)
        quantised, threads = self._quantised.data_ptr(), self._num_threads
        cpu_kernels.linear_int8(x.data_ptr(), layer, quantised, out.data_ptr(), rows, is_bf16, self._kernel, threads)
        return out

    def _packed(self, weight: Float32, bias: Float32 | None, out_dtype: torch.dtype) -> Int8LinearWeight:
        """The layer in 4 bits if they lose nothing, otherwise in 8."""
        matrix = np.ascontiguousarray(weight)
        offsets = None if bias is None else torch.tensor(bias, dtype=torch.float32)
        address = 0 if offsets is None else offsets.data_ptr()
        out_features, in_features = matrix.shape
        for bits in (4, 8):
            layer = cpu_kernels.Int8Weight(out_features, in_features, bits)
            panels = torch.empty(layer.num_bytes, dtype=torch.uint8)
            if layer.pack(matrix, address, panels.data_ptr(), self._num_threads):
                break
        return Int8LinearWeight(panels, offsets, layer, out_dtype)
