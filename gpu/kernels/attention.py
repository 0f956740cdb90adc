"""Which attention kernels a model on a device uses, and what they need."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.gpu.kernels.table import (
    FMA_ROWS,
    PAGED_ATTENTION,
    PAGED_ATTENTION_FMA,
    PAGED_ATTENTION_WIDE,
    WIDE_WARPS,
    Kernel,
    TemplateArgument,
)

_STEP = 32  # kStep of attention.cuh


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """One attention kernel for tiles of some size.

    Attributes:
        kernel: of the table.
        template: its instantiation.
        rows: of a tile.
        shared_bytes: dynamic shared memory of a block.
    """

    kernel: Kernel
    template: tuple[TemplateArgument, ...]
    rows: int
    shared_bytes: int


def attention_launches(dtype: str, head_dim: int, block_size: int) -> tuple[AttentionLaunch, AttentionLaunch | None]:
    """Return the launches of narrow and of wide tiles; float32 has no wide ones.

    Args:
        dtype: compute dtype, of `TYPES`.
        head_dim: a multiple of 16.
        block_size: 16 or 32.
    """
    if dtype == "float32":
        return AttentionLaunch(
            PAGED_ATTENTION_FMA,
            (dtype, head_dim, block_size, FMA_ROWS),
            FMA_ROWS,
            _stages(4 * head_dim, _STEP) + FMA_ROWS * (head_dim + _STEP) * 4,
        ), None
    narrow, wide = (
        AttentionLaunch(kernel, (dtype, head_dim, block_size, warps), 16 * warps, _shared_bytes(head_dim, warps))
        for kernel, warps in ((PAGED_ATTENTION, 1), (PAGED_ATTENTION_WIDE, WIDE_WARPS))
    )
    return narrow, wide


def _shared_bytes(head_dim: int, warps: int) -> int:
    """sizeof(Shared) of paged_attention.cu."""
    resident = head_dim <= 128  # query fragments stay in registers
    stage = 2 * _STEP if warps > 1 and resident else _STEP
    query_rows = 1 if resident else 16 * warps
    return _stages(2 * head_dim, stage) + query_rows * (2 * head_dim + 16) + warps * 16 * head_dim * 4


def _stages(row_bytes: int, tokens: int) -> int:
    """Keys and values of two stages, rows padded by 16 bytes."""
    return 2 * 2 * tokens * (row_bytes + 16)
