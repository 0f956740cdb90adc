"""Every kernel file compiles for a real GPU and keeps within its limits; `make kernels` compiles everything."""

from __future__ import annotations

from itertools import product

import nvrtc
import pytest

from foreword.gpu.kernels.attention import attention_launches
from foreword.gpu.kernels.table import (
    BLOCK_SIZES,
    HEAD_DIMS,
    KERNELS,
    PAGED_ATTENTION,
    PAGED_ATTENTION_FMA,
    PAGED_ATTENTION_WIDE,
    SHARED_BYTES,
    TYPES,
)

STATIC_SHARED_LIMIT = 48 * 1024


def test_each_kernel_compiles_without_spills() -> None:
    """In its first instantiation, and attention in its largest; whole_table.py compiles all for every architecture."""
    instantiations = [(kernel, kernel.instantiations[0]) for kernel in KERNELS]
    largest = (PAGED_ATTENTION, PAGED_ATTENTION_WIDE, PAGED_ATTENTION_FMA)
    instantiations += [(kernel, kernel.instantiations[-1]) for kernel in largest]
    instantiations += [(kernel, ("bfloat16", 128, 16, kernel.threads // 32)) for kernel in largest[:2]]
    compiled = list(nvrtc.compile_kernels(instantiations, "sm_90"))
    assert len(compiled) == len(instantiations)
    for kernel in compiled:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.shared_bytes <= STATIC_SHARED_LIMIT, kernel


@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), list(product(TYPES, HEAD_DIMS, BLOCK_SIZES)))
def test_attention_is_in_the_table_and_fits_every_architecture(dtype: str, head_dim: int, block_size: int) -> None:
    for launch in attention_launches(dtype, head_dim, block_size):
        if launch is not None:
            assert launch.template in launch.kernel.instantiations
            assert launch.shared_bytes <= min(SHARED_BYTES.values())
