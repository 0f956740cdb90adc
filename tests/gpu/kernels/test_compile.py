"""Every kernel file compiles for a real GPU and keeps within its limits; `make kernels` compiles everything."""

from __future__ import annotations

from itertools import product

import nvrtc
import pytest

from foreword.gpu.kernels.attention import attention_launches
from foreword.gpu.kernels.table import BLOCK_SIZES, HEAD_DIMS, KERNELS, PAGED_ATTENTION, PAGED_ATTENTION_WIDE, TYPES

STATIC_SHARED_LIMIT = 48 * 1024
DYNAMIC_SHARED_LIMIT = 227 * 1024  # of sm_90 and sm_100


def test_each_kernel_compiles_without_spills() -> None:
    instantiations = [(kernel, kernel.instantiations[0]) for kernel in KERNELS]
    wider = (PAGED_ATTENTION, PAGED_ATTENTION_WIDE)
    instantiations += [(kernel, ("bfloat16", 128, 16, kernel.threads // 32)) for kernel in wider]
    compiled = list(nvrtc.compile_kernels(instantiations, "sm_90"))
    assert len(compiled) == len(instantiations)
    for kernel in compiled:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.shared_bytes <= STATIC_SHARED_LIMIT, kernel


@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), list(product(TYPES, HEAD_DIMS, BLOCK_SIZES)))
def test_attention_is_in_the_table_and_fits_shared_memory(dtype: str, head_dim: int, block_size: int) -> None:
    for launch in attention_launches(dtype, head_dim, block_size):
        if launch is not None:
            assert launch.template in launch.kernel.instantiations
            assert launch.shared_bytes <= DYNAMIC_SHARED_LIMIT
