"""Attention on the CUDA device: plans the work of a step and launches the kernels that do it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from foreword.gpu.backends.attention_plan import AttentionPlanner
from foreword.gpu.backends.backend import KVCache
from foreword.gpu.backends.staging import StagingBuffer
from foreword.gpu.batch import Batch
from foreword.gpu.kernels.attention import AttentionLaunch, attention_launches
from foreword.gpu.kernels.launcher import KernelLauncher
from foreword.gpu.kernels.table import MERGE_SPLITS
from foreword.scheduler.step import Int32Array

BLOCK_SIZES = (16, 32)
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 16

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
            work = batch.work[geometry] = self.plan(batch, geometry, shape.block_size)
        out = torch.empty_like(queries)
        partials = self._partials_of(num_kv_heads, head_dim)
        inputs = (queries, cache.keys[layer], cache.values[layer], cache.block_table)
        sizes = (num_kv_heads, group, shape.max_blocks_per_sequence, queries.shape[1], window or _EVERY_KEY)
        narrow, wide = attention_launches(self._dtype, head_dim, shape.block_size)
        for launch, items, count in ((narrow, work.narrow, work.num_narrow), (wide, work.wide, work.num_wide)):
            if launch is None or not len(items):
                continue
            self._launcher.launch(
                launch.kernel,
                launch.template,
                (self._num_blocks(launch),),
                *(*inputs, items, count, out, *partials, *sizes, scale * _LOG2_E, 0.0),
                threads=launch.threads,
                shared_bytes=launch.shared_bytes,
            )
        if len(work.merges):
            self._launcher.launch(
                MERGE_SPLITS,
                (self._dtype, head_dim, _MERGE_WARPS),
                (4 * self._num_multiprocessors,),
                *(*partials, work.merges, work.num_merges, out, num_kv_heads, group),
            )
        return out

    def plan(self, batch: CudaBatch, geometry: Geometry, block_size: int) -> AttentionWork:
        """Plan the attention of a batch and queue its upload; the same for all layers of one geometry."""
        narrow, wide = attention_launches(self._dtype, geometry.head_dim, block_size)
        planner = AttentionPlanner(
            group=geometry.group,
            num_kv_heads=geometry.num_kv_heads,
            window=geometry.window,
            narrow_rows=narrow.rows,
            wide_rows=0 if wide is None else wide.rows,
            num_workers=self._num_blocks(narrow),
            max_partials=_MAX_PARTIALS,
        )
        plan = planner.plan(batch.query_offsets, batch.context_lens, batch.rows)
        lists = (plan.narrow, plan.wide, plan.merges)
        counts = [np.array([len(items)], np.int32) for items in lists]
        if geometry not in self._staging:
            self._staging[geometry] = StagingBuffer(self._device, _STAGING_BYTES)
        return AttentionWork(*self._staging[geometry].upload(*lists, *counts))

    def _num_blocks(self, launch: AttentionLaunch) -> int:
        """Blocks that run at once: shared memory is what limits them."""
        return self._num_multiprocessors * max(1, _SHARED_BYTES_PER_MULTIPROCESSOR // (launch.shared_bytes + 1024))

    def _partials_of(self, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = (num_kv_heads, head_dim)
        if key not in self._partials:
            out = torch.empty(_MAX_PARTIALS, num_kv_heads, head_dim, device=self._device)
            stats = torch.empty(_MAX_PARTIALS, num_kv_heads, 2, device=self._device)
            self._partials[key] = (out, stats)
        return self._partials[key]
