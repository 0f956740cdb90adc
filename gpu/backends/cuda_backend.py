"""The CUDA device: matrix products by PyTorch, everything between them by the kernels of `gpu/kernels`.

The library chooses the order of summation of a product by its shape, so every product has the same number of rows,
`TILE_ROWS`: a row's result does not depend on how many others there are (ADR 14).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from foreword.gpu.backends.acceptance import AcceptedTokens
from foreword.gpu.backends.backend import Backend, Float32, KVCache, KVCacheShape, LinearWeight, RotaryTable
from foreword.gpu.backends.cuda_attention import (
    HEAD_DIM_MULTIPLE,
    MAX_HEAD_DIM,
    CudaAttention,
    CudaBatch,
)
from foreword.gpu.backends.cuda_graphs import StepGraphs, padded_size
from foreword.gpu.backends.cuda_sampling import CudaSampler, is_processed, wants_scores
from foreword.gpu.backends.row_independence import rows_are_independent
from foreword.gpu.backends.sampling import Samples, SamplingBatch
from foreword.gpu.backends.staging import StagingBuffer
from foreword.gpu.batch import Batch
from foreword.gpu.kernels.launcher import Argument, Driver, Grid, KernelLauncher
from foreword.gpu.kernels.table import (
    BLOCK_SIZES,
    EMBEDDING,
    RMS_NORM,
    ROTATE_AND_STORE,
    SILU_AND_MUL,
    Kernel,
)
from foreword.scheduler.errors import ConfigError, DeviceError
from foreword.scheduler.step import Int32Array, StepPlan, TokenScores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TILE_ROWS = 128
"""Few enough that the weights' memory traffic still decides the time of a product with one row."""
NO_SLOT = -1
_STAGING_BYTES = 1 << 20
_CHECKER_SHARED_BYTES = 228 * 1024  # as of compute capability 9.0


class CudaBackend(Backend[torch.Tensor]):
    """PyTorch tensors on an NVIDIA device.

    Keys and values lie as `[num_layers, num_blocks, G, block_size, D]` in the cache.
    """

    def __init__(self, dtype: str, driver: Driver, device: str = "cuda:0") -> None:
        """Compute in `dtype` on a device of PyTorch.

        Args:
            dtype: compute dtype.
            driver: compiles and launches the kernels on that device.
            device: "cuda:0"; "cpu" with a driver that runs kernels there.

        Raises:
            ConfigError: the device does not compute in this number format.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: must be one of {', '.join(sorted(DTYPES))} on the CUDA device, got '{dtype}'")
        self.device = device
        self.device_name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CUDA checker"
        self.dtype = dtype
        self._dtype = DTYPES[dtype]
        self._device = torch.device(device)
        self._launcher = KernelLauncher(driver, self._device)
        self._attention = CudaAttention(self._launcher, dtype, self._device, *self._multiprocessors())
        self._graphs = StepGraphs(driver, self._attention)
        self._step_inputs = StagingBuffer(self._device, _STAGING_BYTES)
        self._sampler = CudaSampler(self._launcher, dtype, self._device)
        self._last_tokens = torch.zeros(0, dtype=torch.int32, device=self._device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def _multiprocessors(self) -> tuple[int, int]:
        """How many there are, and bytes of shared memory of each."""
        if self._device.type == "cpu":
            return 1, _CHECKER_SHARED_BYTES
        properties = torch.cuda.get_device_properties(self._device)
        return properties.multi_processor_count, properties.shared_memory_per_multiprocessor

    def is_row_independent(self, layers: Iterable[tuple[int, int]], max_rows: int) -> bool:
        """Try whether products of these layers `(out_features, in_features)` are row-independent here."""
        return all(
            rows_are_independent(
                lambda x, weight: self.linear(x, LinearWeight(weight, None)),
                *layer,
                max_rows,
                self._dtype,
                self._device,
            )
            for layer in layers
        )

    def weight(self, values: Float32) -> torch.Tensor:
        return self._on_device(values, torch.float32)

    def embedding_weight(self, table: Float32) -> torch.Tensor:
        return self._on_device(table, self._dtype)

    def linear_weight(self, weight: Float32, bias: Float32 | None = None) -> LinearWeight[torch.Tensor]:
        return LinearWeight(
            self._on_device(weight, self._dtype), None if bias is None else self._on_device(bias, self._dtype)
        )

    def tied_linear_weight(self, table: torch.Tensor) -> LinearWeight[torch.Tensor]:
        return LinearWeight(table, None)

    def kv_cache(self, shape: KVCacheShape) -> KVCache[torch.Tensor]:
        if shape.block_size not in BLOCK_SIZES:
            choices = " or ".join(map(str, BLOCK_SIZES))
            raise ConfigError(f"block_size: must be {choices} on the CUDA device, got {shape.block_size}")
        if shape.head_dim % HEAD_DIM_MULTIPLE or shape.head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"head_dim: must be a multiple of {HEAD_DIM_MULTIPLE} and at most {MAX_HEAD_DIM} on the CUDA device, "
                f"got {shape.head_dim}"
            )
        size = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        try:
            keys = torch.empty(size, dtype=self._dtype, device=self._device)
            values = torch.empty(size, dtype=self._dtype, device=self._device)
            table = torch.zeros(shape.num_rows, shape.max_blocks_per_sequence, dtype=torch.int32, device=self._device)
            if shape.num_rows > len(self._last_tokens):
                self._last_tokens = torch.zeros(shape.num_rows, dtype=torch.int32, device=self._device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"kv_cache_memory: {shape.num_blocks} blocks do not fit the memory left on {self.device_name}"
            ) from error
        return KVCache(shape, keys, values, table)

    def upload(self, plan: StepPlan, cache: KVCache[torch.Tensor]) -> Batch[torch.Tensor]:
        num_tokens = plan.num_tokens
        padded_to = padded_size(num_tokens) if len(plan.head_indices) == num_tokens else 0
        padding = max(padded_to - num_tokens, 0)
        token_ids, positions, token_rows, slot_mapping, head_indices, updates = self._step_inputs.upload(
            np.pad(plan.token_ids, (0, padding)),
            np.pad(plan.positions, (0, padding)),
            np.pad(np.repeat(plan.rows, np.diff(plan.query_offsets)), (0, padding)),
            np.pad(plan.slot_mapping, (0, padding), constant_values=NO_SLOT),
            np.arange(padded_to, dtype=np.int32) if padded_to else plan.head_indices,
            np.ascontiguousarray(plan.block_table_updates.T),
        )
        if len(plan.block_table_updates):
            rows, indices, blocks = updates
            cache.block_table[rows, indices] = blocks
        return CudaBatch(
            token_ids=token_ids,
            positions=positions,
            token_rows=token_rows,
            slot_mapping=slot_mapping,
            logits_indices=head_indices,
            query_offsets=plan.query_offsets,
            context_lens=plan.context_lens,
            rows=plan.rows,
            padded_to=padded_to,
        )

    def compute(self, model: Callable[[Batch[torch.Tensor]], torch.Tensor], batch: Batch[torch.Tensor]) -> torch.Tensor:
        assert isinstance(batch, CudaBatch)

        def run(batch: Batch[torch.Tensor]) -> torch.Tensor:
            return self._with_known_tokens(model, batch)

        return self._graphs.run(run, batch) if batch.padded_to else run(batch)

    def _with_known_tokens(
        self, model: Callable[[Batch[torch.Tensor]], torch.Tensor], batch: Batch[torch.Tensor]
    ) -> torch.Tensor:
        """Run a model on a batch with what rows have drawn last in place of -1."""
        drawn_last = self._last_tokens.index_select(0, batch.token_rows)
        token_ids = torch.where(batch.token_ids < 0, drawn_last, batch.token_ids)
        return model(replace(batch, token_ids=token_ids))

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        rows, width = len(token_ids), table.shape[1]
        stream = torch.empty(rows, width, device=self._device)
        self._launch(EMBEDDING, (rows,), token_ids, table, stream, width)
        return stream

    def rms_norm(
        self, stream: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, width = stream.shape
        out = self._empty(rows, width)
        self._launch(RMS_NORM, (rows,), stream, delta, weight, out, width, eps)
        return out

    def linear(self, x: torch.Tensor, weight: LinearWeight[torch.Tensor]) -> torch.Tensor:
        rows = len(x)
        out = self._empty(rows + -rows % TILE_ROWS, len(weight.weight))
        tiles = torch.split(F.pad(x, (0, 0, 0, -rows % TILE_ROWS)), TILE_ROWS)
        for tile, out_tile in zip(tiles, torch.split(out, TILE_ROWS), strict=True):
            if weight.bias is None:
                torch.mm(tile, weight.weight.T, out=out_tile)
            else:
                torch.addmm(weight.bias, tile, weight.weight.T, out=out_tile)
        return out[:rows]

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: RotaryTable[torch.Tensor],
        batch: Batch[torch.Tensor],
        cache: KVCache[torch.Tensor],
        layer: int,
    ) -> torch.Tensor:
        num_tokens, width = qkv.shape
        shape = cache.shape
        num_heads = width // shape.head_dim - 2 * shape.num_kv_heads
        queries = self._empty(num_tokens, num_heads * shape.head_dim)
        self._launch(
            ROTATE_AND_STORE,
            (num_tokens,),
            qkv,
            rotary.cos,
            rotary.sin,
            batch.positions,
            batch.slot_mapping,
            queries,
            cache.keys[layer],
            cache.values[layer],
            num_heads,
            shape.num_kv_heads,
            shape.head_dim // 2,
            shape.block_size,
        )
        return queries

    def attention(
        self,
        queries: torch.Tensor,
        batch: Batch[torch.Tensor],
        cache: KVCache[torch.Tensor],
        layer: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        assert isinstance(batch, CudaBatch)
        return self._attention.attend(queries, batch, cache, layer, scale, window)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty(rows, width)
        self._launch(SILU_AND_MUL, (rows,), gate_up, out, width)
        return out

    def gather_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, indices)

    def sample(self, logits: torch.Tensor, params: SamplingBatch) -> Samples:
        return self._sampler.sample(logits, params)

    def sample_and_accept(
        self,
        logits: torch.Tensor,
        params: SamplingBatch,
        input_ids: Int32Array,
        logits_offsets: Int32Array,
        rows: Int32Array | None = None,
    ) -> Callable[[], AcceptedTokens]:
        draw = self._sampler.prepare(params, input_ids, logits_offsets, rows)
        return self._sampler.read(draw, self._sampler.draw(logits, draw, self._last_tokens))

    def compute_and_accept(
        self,
        model: Callable[[Batch[torch.Tensor]], torch.Tensor],
        batch: Batch[torch.Tensor],
        params: SamplingBatch,
        input_ids: Int32Array,
        logits_offsets: Int32Array,
        rows: Int32Array,
    ) -> Callable[[], AcceptedTokens]:
        assert isinstance(batch, CudaBatch)
        if not batch.padded_to or is_processed(params).any() or wants_scores(params).any():
            return super().compute_and_accept(model, batch, params, input_ids, logits_offsets, rows)
        draw = self._sampler.prepare(params, input_ids, logits_offsets, rows, room=batch.padded_to)

        def run(batch: Batch[torch.Tensor]) -> torch.Tensor:
            return self._sampler.draw(self._with_known_tokens(model, batch), draw, self._last_tokens)

        return self._sampler.read(draw, self._graphs.run(run, batch, draw.address))

    def score(
        self, logits: torch.Tensor, rows: Int32Array, token_ids: Int32Array, num_top: int
    ) -> Callable[[], TokenScores]:
        return self._sampler.score(logits, rows, token_ids, num_top)

    def _launch(self, kernel: Kernel, grid: Grid, *arguments: Argument, threads: int | None = None) -> None:
        self._launcher.launch(kernel, (self.dtype,), grid, *arguments, threads=threads)

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def _on_device(self, values: Float32, dtype: torch.dtype) -> torch.Tensor:
        try:
            weights = torch.from_numpy(np.ascontiguousarray(values)).to(self._device, dtype, copy=True)
            has_overflow = dtype == torch.float16 and not bool(torch.isfinite(weights).all())
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"the model's weights do not fit the memory of {self.device_name}") from error
        if has_overflow:
            raise ConfigError("dtype: float16 has no room for a weight of this model; use bfloat16 or float32")
        return weights
