"""Which attention kernels a model on a device uses, and what a launch of them needs."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.gpu.kernels.table import PAGED_ATTENTION, PAGED_ATTENTION_FMA, Kernel, TemplateArgument

_WIDE_WARPS = 4
_FMA_ROWS = 4
_STEP = 32  # kStep of attention.cuh


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """One attention kernel for tiles of one size.

    Attributes:
        kernel: of the table.
        template: its instantiation.
        threads: of a block.
        rows: of a tile.
        shared_bytes: dynamic shared memory of a block.
    """

    kernel: Kernel
    template: tuple[TemplateArgument, ...]
    threads: int
    rows: int
    shared_bytes: int


def attention_launches(dtype: str, head_dim: int, block_size: int) -> tuple[AttentionLaunch, AttentionLaunch | None]:
    """Return the launches of narrow and of wide tiles; float32 has no wide ones.

    Args:
        dtype: compute dtype: "float32", "bfloat16", "float16".
        head_dim: a multiple of 16.
        block_size: 16 or 32.
    """
    if dtype == "float32":
        template = (dtype, head_dim, block_size, _FMA_ROWS)
        shared_bytes = _stage_bytes(4 * head_dim, _STEP) + _FMA_ROWS * (head_dim + _STEP) * 4
        return AttentionLaunch(PAGED_ATTENTION_FMA, template, 32, _FMA_ROWS, shared_bytes), None
    narrow, wide = (
        AttentionLaunch(
            PAGED_ATTENTION,
            (dtype, head_dim, block_size, warps),
            32 * warps,
            16 * warps,
            _tensor_core_bytes(head_dim, warps),
        )
        for warps in (1, _WIDE_WARPS)
    )
    return narrow, wide


def _tensor_core_bytes(head_dim: int, warps: int) -> int:
    """sizeof(Shared) of paged_attention.cu."""
    is_resident = head_dim <= 128  # query fragments stay in registers
    stage = 2 * _STEP if warps > 1 and is_resident else _STEP
    query_rows = 1 if is_resident else 16 * warps
    return _stage_bytes(2 * head_dim, stage) + query_rows * (2 * head_dim + 16) + warps * 16 * head_dim * 4


def _stage_bytes(row_bytes: int, tokens: int) -> int:
    """Keys and values of two stages, rows padded by 16 bytes."""
    return 2 * 2 * tokens * (row_bytes + 16)
