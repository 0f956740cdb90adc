"""The CPU device: matrix products by PyTorch, everything between them by `cpu_kernels`.

Row independence of the products rests on the library, which sums in another order for some small numbers of rows, so
rows are padded to a number from which the order is always the same: in float32 to a multiple of 16, in bfloat16 to
two, and to enough multiplications for PyTorch to choose oneDNN. Where that is not enough (`rows_are_independent` tries
it when a model is loaded), products are computed in tiles of one size, which costs time and is always exact.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from foreword.gpu.backends import cpu_kernels
from foreword.gpu.backends.backend import Backend, Float32, KVCache, KVCacheShape, LinearWeight, RotaryTable
from foreword.gpu.backends.row_independence import rows_are_independent
from foreword.gpu.backends.sampling import Samples, SamplingBatch
from foreword.gpu.batch import Batch
from foreword.scheduler.errors import ConfigError
from foreword.scheduler.step import Int32Array, StepPlan, TokenScores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ONEDNN_MULTIPLICATIONS = 16**3
TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class CpuKVCache(KVCache[torch.Tensor]):
    """The cache with a description of every layer for the kernels, made once."""

    layers: tuple[cpu_kernels.PagedCache, ...]


class CpuBackend(Backend[torch.Tensor]):
    """PyTorch tensors on the CPU.

    Keys lie as `[num_layers, num_blocks, G, D, block_size]` in the cache, values as
    `[num_layers, num_blocks, G, block_size, D]`, so that a vector register takes one dimension of several
    keys, and several dimensions of one value.
    """

    device = "cpu"

    def __init__(self, dtype: str, num_threads: int, attention_kernel: str = cpu_kernels.ATTENTION_KERNELS[0]) -> None:
        """Set the number of threads of the process's parallel regions, PyTorch's and the kernels'.

        Args:
            dtype: one of `DTYPES`.
            num_threads: threads that compute.
            attention_kernel: one of `cpu_kernels.ATTENTION_KERNELS`; they differ in nothing but rounding.
        """
        if attention_kernel not in cpu_kernels.ATTENTION_KERNELS:
            known = ", ".join(cpu_kernels.ATTENTION_KERNELS)
            raise ValueError(f"attention_kernel must be one of {known}, got {attention_kernel!r}")
        torch.set_num_threads(num_threads)
        self.device_name = processor_name()
        self.dtype = dtype
        self._dtype = DTYPES[dtype]
        self._bf16 = dtype == "bfloat16"
        self._num_threads = num_threads
        self._attention_kernel = attention_kernel
        self._scratch = torch.empty(0)
        self.is_tiled = False

    def is_row_independent(self, layers: Iterable[tuple[int, int]], max_rows: int) -> bool:
        """Try whether the library's products of these layers `(out_features, in_features)` are row-independent here."""
        return all(
            rows_are_independent(
                lambda x, weight: self.linear(x, LinearWeight(weight, None)), *layer, max_rows, self._dtype
            )
            for layer in layers
        )

    def use_tiles(self) -> None:
        """Compute every product `TILE_ROWS` rows at a time from now on."""
        self.is_tiled = True

    def weight(self, values: Float32) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    def embedding_weight(self, table: Float32) -> torch.Tensor:
        return self._tensor(table)

    def linear_weight(self, weight: Float32, bias: Float32 | None = None) -> LinearWeight[torch.Tensor]:
        return LinearWeight(self._tensor(weight), None if bias is None else self._tensor(bias))

    def tied_linear_weight(self, table: torch.Tensor) -> LinearWeight[torch.Tensor]:
        return LinearWeight(table, None)

    def kv_cache(self, shape: KVCacheShape) -> KVCache[torch.Tensor]:
        lanes = cpu_kernels.VECTOR_LANES
        if shape.block_size % lanes:
            raise ConfigError(f"block_size: must be a multiple of {lanes} on the CPU device, got {shape.block_size}")
        if shape.head_dim % 2 or shape.head_dim > cpu_kernels.HEAD_DIM_LIMIT:
            raise ConfigError(
                f"head_dim: must be even and at most {cpu_kernels.HEAD_DIM_LIMIT} on the CPU device, "
                f"got {shape.head_dim}"
            )
        pages = (shape.num_layers, shape.num_blocks, shape.num_kv_heads)
        size = shape.num_layers * shape.num_blocks * shape.num_kv_heads * shape.head_dim * shape.block_size
        keys = torch.empty(size, dtype=self._dtype)
        values = torch.empty(size + cpu_kernels.WIDEST_LANES, dtype=self._dtype)[:size]
        layer_bytes = size // shape.num_layers * keys.element_size()
        return CpuKVCache(
            shape,
            keys.view(*pages, shape.head_dim, shape.block_size),
            values.view(*pages, shape.block_size, shape.head_dim),
            torch.zeros(shape.num_rows, shape.max_blocks_per_sequence, dtype=torch.int32),
            tuple(
                cpu_kernels.PagedCache(
                    keys.data_ptr() + layer * layer_bytes,
                    values.data_ptr() + layer * layer_bytes,
                    shape.block_size,
                    shape.num_kv_heads,
                    shape.head_dim,
                )
                for layer in range(shape.num_layers)
            ),
        )

    def upload(self, plan: StepPlan, cache: KVCache[torch.Tensor]) -> Batch[torch.Tensor]:
        rows, indices, blocks = plan.block_table_updates.T
        cache.block_table.numpy()[rows, indices] = blocks
        return Batch(
            token_ids=_copy(plan.token_ids),
            positions=_copy(plan.positions),
            token_rows=torch.from_numpy(np.repeat(plan.rows, np.diff(plan.query_offsets))),
            slot_mapping=_copy(plan.slot_mapping),
            logits_indices=_copy(plan.head_indices),
        )

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, table).float()

    def rms_norm(
        self, stream: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, width = stream.shape
        out = torch.empty(rows, width, dtype=self._dtype)
        cpu_kernels.rms_norm(
            stream.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            eps,
            self._bf16,
            self._num_threads,
        )
        return out

    def linear(self, x: torch.Tensor, weight: LinearWeight[torch.Tensor]) -> torch.Tensor:
        rows = x.shape[0]
        padded = self._padded_rows(rows, weight.weight)
        if rows != padded:
            x = F.pad(x, (0, 0, 0, padded - rows))
        if self.is_tiled and padded > TILE_ROWS:
            return torch.cat([F.linear(tile, weight.weight, weight.bias) for tile in torch.split(x, TILE_ROWS)])[:rows]
        return F.linear(x, weight.weight, weight.bias)[:rows]

    def _padded_rows(self, rows: int, weight: torch.Tensor) -> int:
        if self._bf16 and not self.is_tiled:
            return max(rows, 2, ONEDNN_MULTIPLICATIONS // weight.numel() + 1)
        return -(-rows // TILE_ROWS) * TILE_ROWS

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: RotaryTable[torch.Tensor],
        batch: Batch[torch.Tensor],
        cache: KVCache[torch.Tensor],
        layer: int,
    ) -> torch.Tensor:
        assert isinstance(cache, CpuKVCache)
        num_tokens, width = qkv.shape
        num_heads = width // cache.shape.head_dim - 2 * cache.shape.num_kv_heads
        cpu_kernels.rotate_and_store(
            qkv.data_ptr(),
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            cache.layers[layer],
            num_tokens,
            num_heads,
            self._bf16,
            self._num_threads,
        )
        return qkv[:, : num_heads * cache.shape.head_dim]

    def attention(
        self,
        queries: torch.Tensor,
        batch: Batch[torch.Tensor],
        cache: KVCache[torch.Tensor],
        layer: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        assert isinstance(cache, CpuKVCache)
        num_tokens, width = queries.shape
        out = torch.empty(num_tokens, width, dtype=self._dtype)
        cpu_kernels.attention(
            queries.data_ptr(),
            queries.stride(0),
            batch.positions.data_ptr(),
            batch.token_rows.data_ptr(),
            cache.block_table.data_ptr(),
            cache.shape.max_blocks_per_sequence,
            cache.layers[layer],
            out.data_ptr(),
            num_tokens,
            width // cache.shape.head_dim,
            scale,
            window or 0,
            self._bf16,
            self._attention_kernel,
            self._num_threads,
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=self._dtype)
        cpu_kernels.silu_and_mul(gate_up.data_ptr(), out.data_ptr(), rows, width, self._bf16, self._num_threads)
        return out

    def gather_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, indices)

    def sample(self, logits: torch.Tensor, params: SamplingBatch) -> Samples:
        rows, vocab = logits.shape
        samples = Samples(np.zeros(rows, np.int32), np.zeros(rows, np.float32), np.zeros(rows, np.bool_))
        padded = -(-vocab // cpu_kernels.NOISE_LANES) * cpu_kernels.NOISE_LANES
        scratch_size = self._num_threads * cpu_kernels.SAMPLING_SCRATCH_ROWS * padded
        if len(self._scratch) < scratch_size:
            self._scratch = torch.empty(scratch_size)
        cpu_kernels.sample(
            logits.data_ptr(),
            vocab,
            logits.dtype == torch.bfloat16,
            params,
            self._scratch.data_ptr(),
            samples,
            self._num_threads,
        )
        return samples

    def score(
        self, logits: torch.Tensor, rows: Int32Array, token_ids: Int32Array, num_top: int
    ) -> Callable[[], TokenScores]:
        scores = TokenScores(
            np.empty(len(rows), np.float32),
            np.empty(len(rows), np.int32),
            num_top,
            np.empty(len(rows) * num_top, np.int32),
            np.empty(len(rows) * num_top, np.float32),
        )
        is_bf16 = logits.dtype == torch.bfloat16
        cpu_kernels.score(logits.data_ptr(), logits.shape[1], is_bf16, rows, token_ids, scores, self._num_threads)
        return lambda: scores

    def _tensor(self, values: Float32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._dtype, copy=True)


def _copy(array: Int32Array) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def processor_name() -> str:
    """The processor as the operating system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
