"""Attention on the CUDA device: plans the work of a step and launches the kernels that do it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from foreword.gpu.backends.attention_plan import NARROW_ROWS, AttentionPlanner
from foreword.gpu.backends.backend import KVCache
from foreword.gpu.backends.staging import StagingBuffer
from foreword.gpu.batch import Batch
from foreword.gpu.kernels.launcher import KernelLauncher
from foreword.gpu.kernels.table import MERGE_SPLITS, PAGED_ATTENTION, PAGED_ATTENTION_FMA, Kernel
from foreword.scheduler.step import Int32Array

BLOCK_SIZES = (16, 32)
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 16

_WIDE_WARPS = 4
_FMA_ROWS = 4  # of a tile on CUDA cores
_MERGE_WARPS = 2
_MAX_PARTIALS = 8192
_STAGING_BYTES = 1 << 20
_EVERY_KEY = 2**31 - 1
_LOG2_E = 1.4426950408889634
_SHARED_BYTES_PER_MULTIPROCESSOR = 227 * 1024


@dataclass(frozen=True, slots=True)
class CudaBatch(Batch[torch.Tensor]):
    """A batch and what the attention planner needs to know of it, on the host; see `StepPlan`.

    Attributes:
        query_offsets: `[B + 1]`.
        context_lens: `[B]`.
        rows: `[B]`.
        work: attention work of this batch that is on the device already.
    """

    query_offsets: Int32Array
    context_lens: Int32Array
    rows: Int32Array
    work: dict[Geometry, AttentionWork] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the work of a batch depends on besides the batch.

    Attributes:
        group: query heads of a KV head.
        num_kv_heads: G.
        head_dim: D.
        window: keys a token sees, itself included; None for all.
    """

    group: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """An `AttentionPlan` on the device.

    Attributes:
        narrow, wide, merges: int32, items.
        num_narrow, num_wide, num_merges: int32 `[1]`.
    """

    narrow: torch.Tensor
    wide: torch.Tensor
    merges: torch.Tensor
    num_narrow: torch.Tensor
    num_wide: torch.Tensor
    num_merges: torch.Tensor


class CudaAttention:
    """Attention in one compute dtype on one device, with the workspace for partial results."""

    def __init__(self, launcher: KernelLauncher, dtype: str, device: torch.device, num_multiprocessors: int) -> None:
        self._launcher = launcher
        self._dtype = dtype
        self._device = device
        self._num_multiprocessors = num_multiprocessors
        self._has_tensor_cores = dtype != "float32"
        self._staging: dict[Geometry, StagingBuffer] = {}
        self._partials: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        queries: torch.Tensor,
        batch: CudaBatch,
        cache: KVCache[torch.Tensor],
        layer: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See `Backend.attention`."""
        shape = cache.shape
        head_dim, num_kv_heads = shape.head_dim, shape.num_kv_heads
        group = queries.shape[1] // (head_dim * num_kv_heads)
        geometry = Geometry(group, num_kv_heads, head_dim, window)
        work = batch.work.get(geometry)
        if work is None:
            work = batch.work[geometry] = self.plan(batch, geometry)
        out = torch.empty_like(queries)
        partials = self._partials_of(num_kv_heads, head_dim)
        inputs = (queries, cache.keys[layer], cache.values[layer], cache.block_table)
        sizes = (num_kv_heads, group, shape.max_blocks_per_sequence, queries.shape[1], window or _EVERY_KEY)
        for is_wide, items, count in ((False, work.narrow, work.num_narrow), (True, work.wide, work.num_wide)):
            if not len(items):
                continue
            kernel, tile = self._kernel(is_wide)
            shared_bytes = self._shared_bytes(head_dim, is_wide)
            self._launcher.launch(
                kernel,
                (self._dtype, head_dim, shape.block_size, tile),
                (self._num_blocks(shared_bytes),),
                *(*inputs, items, count, out, *partials, *sizes, scale * _LOG2_E, 0.0),
                threads=32 * _WIDE_WARPS if is_wide else 32,
                shared_bytes=shared_bytes,
            )
        if len(work.merges):
            self._launcher.launch(
                MERGE_SPLITS,
                (self._dtype, head_dim, _MERGE_WARPS),
                (4 * self._num_multiprocessors,),
                *(*partials, work.merges, work.num_merges, out, num_kv_heads, group),
            )
        return out

    def plan(self, batch: CudaBatch, geometry: Geometry) -> AttentionWork:
        """Plan the attention of a batch and queue its upload; the same for all layers of one geometry."""
        planner = AttentionPlanner(
            group=geometry.group,
            num_kv_heads=geometry.num_kv_heads,
            window=geometry.window,
            wide_rows=16 * _WIDE_WARPS if self._has_tensor_cores else 0,
            num_workers=self._num_blocks(self._shared_bytes(geometry.head_dim, is_wide=False)),
            max_partials=_MAX_PARTIALS,
            narrow_rows=NARROW_ROWS if self._has_tensor_cores else _FMA_ROWS,
        )
        plan = planner.plan(batch.query_offsets, batch.context_lens, batch.rows)
        lists = (plan.narrow, plan.wide, plan.merges)
        counts = [np.array([len(items)], np.int32) for items in lists]
        if geometry not in self._staging:
            self._staging[geometry] = StagingBuffer(self._device, _STAGING_BYTES)
        return AttentionWork(*self._staging[geometry].upload(*lists, *counts))

    def _kernel(self, is_wide: bool) -> tuple[Kernel, int]:
        if self._has_tensor_cores:
            return PAGED_ATTENTION, _WIDE_WARPS if is_wide else 1
        return PAGED_ATTENTION_FMA, _FMA_ROWS

    def _shared_bytes(self, head_dim: int, is_wide: bool) -> int:
        """Size of `Shared` in the kernel's source."""
        if not self._has_tensor_cores:
            return 4 * 32 * (head_dim * 4 + 16) + _FMA_ROWS * (head_dim + 32) * 4
        warps = _WIDE_WARPS if is_wide else 1
        stage = 64 if is_wide and head_dim <= 128 else 32
        query_rows = 1 if head_dim <= 128 else 16 * warps
        return (4 * stage + query_rows) * 2 * (head_dim + 8) + warps * 16 * head_dim * 4

    def _num_blocks(self, shared_bytes: int) -> int:
        """Blocks that run at once: shared memory is what limits them."""
        return self._num_multiprocessors * max(1, _SHARED_BYTES_PER_MULTIPROCESSOR // (shared_bytes + 1024))

    def _partials_of(self, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = (num_kv_heads, head_dim)
        if key not in self._partials:
            out = torch.empty(_MAX_PARTIALS, num_kv_heads, head_dim, device=self._device)
            stats = torch.empty(_MAX_PARTIALS, num_kv_heads, 2, device=self._device)
            self._partials[key] = (out, stats)
        return self._partials[key]
