"""Attention kernels on the SIMT checker: cases with poisoned memory, launches from a plan, a float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simt

from foreword.gpu.backends.attention_plan import AttentionPlan, AttentionPlanner
from foreword.gpu.kernels.attention import AttentionLaunch, attention_launches
from foreword.gpu.kernels.table import FOLDER, MERGE_SPLITS

LOG2E = 1.4426950408889634
POISON = {"float32": 0x7FC0DEAD, "float16": 0x7E01, "bfloat16": 0x7FC1}  # NaN
NUM_BLOCKS = 2  # of the grid, so that work goes round


def to_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 as an array of the device's element type; bfloat16 as uint16, rounded to nearest even."""
    if dtype != "bfloat16":
        return x.astype(np.float16 if dtype == "float16" else np.float32)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(x: np.ndarray) -> np.ndarray:
    """The values of `to_bits`, exactly, as float64."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """NaN in every element."""
    bits = np.full(shape, POISON[dtype], np.uint32 if dtype == "float32" else np.uint16)
    return bits if dtype == "bfloat16" else bits.view(np.float32 if dtype == "float32" else np.float16)


@dataclass
class AttentionCase:
    """Sequences in a paged cache. Memory that no sequence owns is NaN, table entries past a sequence's end are stale.

    Attributes:
        query_lens, context_lens: tokens in the step and in the cache, per sequence.
        window: as of `AttentionPlanner`.
        gain: factor on the queries; large ones overflow a softmax without a running maximum.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    dtype: str = "bfloat16"
    head_dim: int = 64
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 4
    window: int | None = None
    soft_cap: float = 0.0
    gain: float = 1.0
    seed: int = 0
    q: np.ndarray = field(init=False)
    keys: np.ndarray = field(init=False)
    values: np.ndarray = field(init=False)
    block_table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        block, heads, dim = self.block_size, self.num_kv_heads, self.head_dim
        used = [-(-length // block) for length in self.context_lens]
        num_blocks = sum(used) + 2
        self.block_table = rng.integers(-(2**31), 2**31 - 1, (len(used), max(used, default=0) + 2), np.int32)
        cache = np.full((2, num_blocks, heads, block, dim), np.nan, np.float32)
        free = iter(rng.permutation(num_blocks))
        for sequence, length in enumerate(self.context_lens):
            for index in range(used[sequence]):
                self.block_table[sequence, index] = at = next(free)
                tokens = min(block, length - index * block)
                cache[:, at, :, :tokens] = rng.standard_normal((2, heads, tokens, dim))
        self.keys, self.values = to_bits(cache, self.dtype)
        width = (self.group + 2) * heads * dim  # queries are the first columns of q, k, v
        self.q = to_bits(self.gain * rng.standard_normal((sum(self.query_lens), width)).astype(np.float32), self.dtype)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def planner(self, **changes: Any) -> AttentionPlanner:
        narrow, wide = attention_launches(self.dtype, self.head_dim, self.block_size)
        fields = {"narrow_rows": narrow.rows, "wide_rows": wide.rows if wide else 0}
        fields |= {"num_workers": 8, "max_partials": 4096} | changes
        return AttentionPlanner(self.group, self.num_kv_heads, self.window, **fields)

    def plan(self, **changes: Any) -> AttentionPlan:
        offsets = np.cumsum([0, *self.query_lens]).astype(np.int32)
        rows = np.arange(len(self.query_lens), dtype=np.int32)
        return self.planner(**changes).plan(offsets, np.asarray(self.context_lens, np.int32), rows)

    def reference(self) -> np.ndarray:
        """float64 `[T, heads, head_dim]`."""
        q, keys, values = from_bits(self.q), from_bits(self.keys), from_bits(self.values)
        heads, dim = self.num_kv_heads * self.group, self.head_dim
        out = np.zeros((len(q), heads, dim))
        token = 0
        for sequence, (query_len, length) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            table = self.block_table[sequence, : -(-length // self.block_size)]
            k, v = (
                x[table].transpose(1, 0, 2, 3).reshape(self.num_kv_heads, -1, dim)[:, :length] for x in (keys, values)
            )
            for position in range(length - query_len, length):
                first = 0 if self.window is None else max(0, position - self.window + 1)
                for head in range(heads):
                    query = q[token, head * dim : (head + 1) * dim]
                    scores = k[head // self.group, first : position + 1] @ query * self.scale
                    if self.soft_cap:
                        scores = self.soft_cap * np.tanh(scores / self.soft_cap)
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights / weights.sum() @ v[head // self.group, first : position + 1]
                token += 1
        return out

    def run(self, kernels: AttentionKernels, plan: AttentionPlan | None = None, seed: int = 0) -> np.ndarray:
        """Compute on the checker: `[T, heads, head_dim]` in the element type; bfloat16 as uint16."""
        plan = self.plan() if plan is None else plan
        heads, dim = self.num_kv_heads, self.head_dim
        out = poisoned((len(self.q), heads * self.group, dim), self.dtype)
        partial_out = poisoned((max(1, plan.num_partials), heads, dim), "float32")
        partial_stats = poisoned((max(1, plan.num_partials), heads, 2), "float32")
        window = np.int32(2**31 - 1 if self.window is None else self.window)
        scale = np.float32(self.scale * LOG2E)
        cache = (self.q, self.keys, self.values, self.block_table)
        shape = (np.int32(heads), np.int32(self.group), np.int32(self.block_table.shape[1]), np.int32(self.q.shape[1]))
        for items, kernel in ((plan.narrow, kernels.narrow), (plan.wide, kernels.wide)):
            if kernel is None:
                assert not len(items)
                continue
            args = (*cache, items, count(items), out, partial_out, partial_stats, *shape, window, scale)
            kernel((*args, np.float32(self.soft_cap)), seed)
        args = (partial_out, partial_stats, plan.merges, count(plan.merges), out, np.int32(heads), np.int32(self.group))
        kernels.merge(args, seed)
        return out


def count(items: np.ndarray) -> np.ndarray:
    return np.array([len(items)], np.int32)


@dataclass
class Launch:
    """A kernel with its grid, block and shared memory."""

    kernel: simt.Kernel
    num_threads: int
    shared_bytes: int

    def __call__(self, args: tuple[Any, ...], seed: int) -> None:
        self.kernel.max_dynamic_shared_size_bytes = max(self.shared_bytes, 48 * 1024)
        self.kernel((NUM_BLOCKS,), (self.num_threads,), args, shared_mem=self.shared_bytes, seed=seed)


@dataclass
class AttentionKernels:
    """The kernels of one element type, head size and block size; on CUDA cores there are no wide tiles."""

    narrow: Launch
    wide: Launch | None
    merge: Launch


def attention_kernels(dtype: str, head_dim: int, block_size: int, folder: Path = FOLDER) -> AttentionKernels:
    """Load the kernels that a model would use, or their copies in another folder."""
    narrow, wide = attention_launches(dtype, head_dim, block_size)
    merge = AttentionLaunch(MERGE_SPLITS, (dtype, head_dim, MERGE_SPLITS.threads // 32), 1, 0)
    return AttentionKernels(load(narrow, folder), wide and load(wide, folder), load(merge, folder))


def load(launch: AttentionLaunch, folder: Path) -> Launch:
    """One instantiation on the checker."""
    name = launch.kernel.expression(launch.template)
    module = simt.RawModule(path=folder / launch.kernel.file, options=[f"-I{folder}"], name_expressions=[name])
    return Launch(module.get_function(name), launch.kernel.threads, launch.shared_bytes)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    got = from_bits(got)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want)) if np.isfinite(got).all() else np.inf


LIMIT = {"bfloat16": 5e-3, "float16": 8e-4, "float32": 2e-6}
"""Of `relative_error`."""


def check(folder: Path, seed: int) -> None:
    """Run the kernels of a folder on cases that together meet every branch.

    Raises:
        AssertionError, simt.LaunchError: they are wrong.
    """
    for dtype, head_dim in (("bfloat16", 64), ("float16", 256), ("float32", 80)):
        kernels = attention_kernels(dtype, head_dim, 16, folder)
        for changes in ({}, {"window": 70}, {"soft_cap": 3.0, "gain": 60.0}):
            case = AttentionCase((1, 3, 24, 0), (600, 35, 290, 0), dtype, head_dim, group=3, num_kv_heads=1, **changes)
            want = case.reference()
            for plan in (case.plan(), case.plan(max_partials=0)):
                error = relative_error(case.run(kernels, plan, seed), want)
                assert error < LIMIT[dtype], f"{dtype} {changes}: relative error {error:.1e}"
