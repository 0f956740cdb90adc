"""Every instantiation of the table, on every architecture and on the checker; run by `make test-kernels-full`."""

from __future__ import annotations

from itertools import product

import nvrtc
import pytest
from attention_case import LIMIT, AttentionCase, attention_kernels, relative_error

from foreword.gpu.kernels.table import BLOCK_SIZES, HEAD_DIMS, KERNELS, TYPES

STATIC_SHARED_LIMIT = 48 * 1024


@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
def test_nothing_spills(architecture: str) -> None:
    instantiations = [(kernel, template) for kernel in KERNELS for template in kernel.instantiations]
    compiled = list(nvrtc.compile_kernels(instantiations, architecture))
    assert len(compiled) == len(instantiations)
    assert [kernel for kernel in compiled if kernel.spilled_bytes or kernel.shared_bytes > STATIC_SHARED_LIMIT] == []


@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), list(product(TYPES, HEAD_DIMS, BLOCK_SIZES)))
def test_attention(dtype: str, head_dim: int, block_size: int) -> None:
    kernels = attention_kernels(dtype, head_dim, block_size)
    for changes in ({}, {"window": 50}, {"soft_cap": 5.0, "gain": 4.0}):
        case = AttentionCase((1, 3, 20), (290, 3, 77), dtype, head_dim, block_size, group=3, **changes)
        assert relative_error(case.run(kernels, seed=1), case.reference()) < LIMIT[dtype], changes
