"""Every kernel file compiles for a real GPU and keeps within its limits; `make kernels` compiles everything."""

from __future__ import annotations

import pytest

from foreword.gpu.kernels.attention import attention_launches
from foreword.gpu.kernels.table import BLOCK_SIZES, HEAD_DIMS, KERNELS, PAGED_ATTENTION, PAGED_ATTENTION_WIDE, TYPES

nvrtc = pytest.importorskip("nvrtc", exc_type=ImportError)
STATIC_SHARED_LIMIT = 48 * 1024
DYNAMIC_SHARED_LIMIT = 227 * 1024  # of sm_90 and sm_100


def test_each_kernel_compiles_without_spills() -> None:
    instantiations = [(kernel, kernel.instantiations[0]) for kernel in KERNELS]
    instantiations += [(kernel, ("float16", 128, 32, kernel.threads // 32)) for kernel in ATTENTION]
    compiled = list(nvrtc.compile_kernels(instantiations, "sm_90"))
    assert len(compiled) == len(instantiations)
    for kernel in compiled:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.shared_bytes <= STATIC_SHARED_LIMIT, kernel


ATTENTION = (PAGED_ATTENTION, PAGED_ATTENTION_WIDE)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_attention_fits_shared_memory(dtype: str, head_dim: int, block_size: int) -> None:
    for launch in attention_launches(dtype, head_dim, block_size):
        if launch is not None:
            assert launch.template in launch.kernel.instantiations
            assert launch.shared_bytes <= DYNAMIC_SHARED_LIMIT
