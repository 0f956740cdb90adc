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

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 16

_MERGE_BLOCKS = 4  # of a multiprocessor
_MAX_PARTIALS = 8192
_LEAST_ROOM = 64
_STAGING_BYTES = 1 << 20
_EVERY_KEY = 2**31 - 1
_LOG2_E = 1.4426950408889634
_SHARED_BYTES_RESERVED = 1024  # of each block, by the system


@dataclass(frozen=True, slots=True)
class CudaBatch(Batch[torch.Tensor]):
    """A batch and what the attention planner needs to know of it, on the host; see `StepPlan`.

    Attributes:
        query_offsets: `[B + 1]`.
        context_lens: `[B]`.
        rows: `[B]`.
        padded_to: tokens that the device's arrays have room for, when they have more than the batch has: the rest is
            padding, whose results are arbitrary. 0 for exactly as many.
        work: attention work of this batch that is on the device already.
    """

    query_offsets: Int32Array
    context_lens: Int32Array
    rows: Int32Array
    padded_to: int = 0
    work: dict[Geometry, AttentionWork] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the work of a batch depends on besides the batch.

    Attributes:
        group: query heads of a KV head.
        num_kv_heads: G.
        head_dim: D.
        block_size: tokens per block of the cache.
        window: keys a token sees, itself included; None for all.
    """

    group: int
    num_kv_heads: int
    head_dim: int
    block_size: int
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

    def __init__(
        self,
        launcher: KernelLauncher,
        dtype: str,
        device: torch.device,
        num_multiprocessors: int,
        shared_bytes: int,
    ) -> None:
        """Set up for a device.

        Args:
            launcher: of its kernels.
            dtype: compute dtype.
            device: of PyTorch.
            num_multiprocessors: that it has.
            shared_bytes: shared memory of each.
        """
        self._launcher = launcher
        self._dtype = dtype
        self._device = device
        self._num_multiprocessors = num_multiprocessors
        self._shared_bytes = shared_bytes
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
        group = queries.shape[1] // (shape.head_dim * shape.num_kv_heads)
        geometry = Geometry(group, shape.num_kv_heads, shape.head_dim, shape.block_size, window)
        work = batch.work.get(geometry)
        if work is None:
            work = batch.work[geometry] = self.plan(batch, geometry)
        out = torch.empty_like(queries)
        partials = self._partials_of(shape.num_kv_heads, shape.head_dim)
        inputs = (queries, cache.keys[layer], cache.values[layer], cache.block_table)
        sizes = (shape.num_kv_heads, group, shape.max_blocks_per_sequence, queries.shape[1], window or _EVERY_KEY)
        for launch, items, count in zip(
            self._launches(geometry), (work.narrow, work.wide), (work.num_narrow, work.num_wide), strict=True
        ):
            if launch is not None and len(items):
                self._launcher.launch(
                    launch.kernel,
                    launch.template,
                    (self._num_blocks(launch),),
                    *(*inputs, items, count, out, *partials, *sizes, scale * _LOG2_E, 0.0),
                    shared_bytes=launch.shared_bytes,
                )
        if len(work.merges):
            self._launcher.launch(
                MERGE_SPLITS,
                (self._dtype, shape.head_dim, MERGE_SPLITS.threads // 32),
                (_MERGE_BLOCKS * self._num_multiprocessors,),
                *(*partials, work.merges, work.num_merges, out, shape.num_kv_heads, group),
            )
        return out

    def plan(self, batch: CudaBatch, geometry: Geometry) -> AttentionWork:
        """Plan the attention of a batch and queue its upload; the same for all layers of one geometry."""
        narrow, wide = self._launches(geometry)
        planner = AttentionPlanner(
            group=geometry.group,
            num_kv_heads=geometry.num_kv_heads,
            window=geometry.window,
            wide_rows=0 if wide is None else wide.rows,
            num_workers=self._num_blocks(narrow),
            max_partials=_MAX_PARTIALS,
            narrow_rows=narrow.rows,
        )
        plan = planner.plan(batch.query_offsets, batch.context_lens, batch.rows)
        lists = [plan.narrow, plan.wide, plan.merges]
        counts = [np.array([len(items)], np.int32) for items in lists]
        if batch.padded_to:
            lists = [_with_room(items) for items in lists]
        if geometry not in self._staging:
            self._staging[geometry] = StagingBuffer(self._device, _STAGING_BYTES)
        return AttentionWork(*self._staging[geometry].upload(*lists, *counts))

    def _launches(self, geometry: Geometry) -> tuple[AttentionLaunch, AttentionLaunch | None]:
        narrow, wide = attention_launches(self._dtype, geometry.head_dim, geometry.block_size)
        return narrow, None if wide is None or not self._num_resident(wide) else wide

    def _num_blocks(self, launch: AttentionLaunch) -> int:
        """Blocks that run at once: shared memory is what limits them."""
        return self._num_multiprocessors * max(1, self._num_resident(launch))

    def _num_resident(self, launch: AttentionLaunch) -> int:
        """Blocks that run at once on a multiprocessor; 0 if not even one fits."""
        return self._shared_bytes // (launch.shared_bytes + _SHARED_BYTES_RESERVED)

    def _partials_of(self, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = (num_kv_heads, head_dim)
        if key not in self._partials:
            out = torch.empty(_MAX_PARTIALS, num_kv_heads, head_dim, device=self._device)
            stats = torch.empty(_MAX_PARTIALS, num_kv_heads, 2, device=self._device)
            self._partials[key] = (out, stats)
        return self._partials[key]


def _with_room(items: Int32Array) -> Int32Array:
    """Items, and zeros up to one of few lengths, so that recordings serve many batches."""
    if not len(items):
        return items
    length = max(_LEAST_ROOM, 1 << (len(items) - 1).bit_length())
    return np.pad(items, ((0, length - len(items)), (0, 0)))
