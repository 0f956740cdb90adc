"""The contract in plain NumPy: slow, obvious, and the oracle every other backend is tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.gpu.backends.backend import Backend, Float32, KVCache, KVCacheShape, LinearWeight, RotaryTable
from foreword.gpu.backends.noise import gumbel_noise
from foreword.gpu.backends.rejection import reject
from foreword.gpu.backends.sampling import GREEDY_TEMPERATURE, Samples, SamplingBatch
from foreword.gpu.batch import Batch
from foreword.scheduler.step import Int32Array, StepPlan, TokenScores

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


class NumpyBackend(Backend[Array]):
    """float32 arrays, float64 inside an operation, one sequence or token at a time."""

    device = "cpu"
    device_name = "NumPy"
    dtype = "float32"

    def weight(self, values: Float32) -> Array:
        return values.astype(np.float32)

    def embedding_weight(self, table: Float32) -> Array:
        return table.astype(np.float32)

    def linear_weight(self, weight: Float32, bias: Float32 | None = None) -> LinearWeight[Array]:
        return LinearWeight(weight.astype(np.float32), None if bias is None else bias.astype(np.float32))

    def tied_linear_weight(self, table: Array) -> LinearWeight[Array]:
        return LinearWeight(table, None)

    def kv_cache(self, shape: KVCacheShape) -> KVCache[Array]:
        slots = (shape.num_layers, shape.num_blocks * shape.block_size, shape.num_kv_heads, shape.head_dim)
        table = np.zeros((shape.num_rows, shape.max_blocks_per_sequence), np.int32)
        return KVCache(shape, np.empty(slots, np.float32), np.empty(slots, np.float32), table)

    def upload(self, plan: StepPlan, cache: KVCache[Array]) -> Batch[Array]:
        for row, index, block in plan.block_table_updates:
            cache.block_table[row, index] = block
        return Batch(
            token_ids=plan.token_ids.copy(),
            positions=plan.positions.copy(),
            token_rows=np.repeat(plan.rows, np.diff(plan.query_offsets)),
            slot_mapping=plan.slot_mapping.copy(),
            logits_indices=plan.head_indices.copy(),
        )

    def embedding(self, token_ids: Array, table: Array) -> Array:
        return table[token_ids]

    def rms_norm(self, stream: Array, weight: Array, eps: float, delta: Array | None = None) -> Array:
        if delta is not None:
            stream += delta
        x = stream.astype(np.float64)
        normed: Float64 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
        return normed.astype(np.float32)

    def linear(self, x: Array, weight: LinearWeight[Array]) -> Array:
        out_features = len(weight.weight)
        bias = np.zeros(out_features) if weight.bias is None else weight.bias
        matrix = weight.weight.astype(np.float64)
        rows = [matrix @ row + bias for row in x.astype(np.float64)]
        return np.array(rows, np.float32).reshape(len(x), out_features)

    def rotate_and_store(
        self, qkv: Array, rotary: RotaryTable[Array], batch: Batch[Array], cache: KVCache[Array], layer: int
    ) -> Array:
        shape = cache.shape
        heads = qkv.reshape(len(qkv), -1, shape.head_dim)
        num_heads = heads.shape[1] - 2 * shape.num_kv_heads
        cos = rotary.cos[batch.positions][:, None, :]
        sin = rotary.sin[batch.positions][:, None, :]
        first, second = np.split(heads[:, : num_heads + shape.num_kv_heads].astype(np.float64), 2, axis=-1)
        rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(np.float32)
        cache.keys[layer, batch.slot_mapping] = rotated[:, num_heads:]
        cache.values[layer, batch.slot_mapping] = heads[:, num_heads + shape.num_kv_heads :]
        return rotated[:, :num_heads].reshape(len(qkv), -1)

    def attention(
        self, queries: Array, batch: Batch[Array], cache: KVCache[Array], layer: int, scale: float, window: int | None
    ) -> Array:
        shape = cache.shape
        heads = queries.reshape(len(queries), -1, shape.head_dim).astype(np.float64)
        out = np.empty_like(heads, np.float32)
        group = heads.shape[1] // shape.num_kv_heads
        for token, (row, last) in enumerate(zip(batch.token_rows, batch.positions, strict=True)):
            first = 0 if window is None else max(0, last - window + 1)
            visible = np.arange(first, last + 1)
            slots = cache.block_table[row, visible // shape.block_size] * shape.block_size + visible % shape.block_size
            keys = np.repeat(cache.keys[layer, slots], group, axis=1).astype(np.float64)
            values = np.repeat(cache.values[layer, slots], group, axis=1).astype(np.float64)
            scores = np.einsum("hd,khd->hk", heads[token], keys) * scale
            out[token] = np.einsum("hk,khd->hd", softmax(scores), values)
        return out.reshape(len(queries), -1)

    def silu_and_mul(self, gate_up: Array) -> Array:
        gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
        gated: Float64 = gate / (1 + np.exp(-gate)) * up
        return gated.astype(np.float32)

    def gather_rows(self, x: Array, indices: Array) -> Array:
        return x[indices]

    def sample(self, logits: Array, params: SamplingBatch) -> Samples:
        rows = len(logits)
        samples = Samples(np.zeros(rows, np.int32), np.zeros(rows, np.float32), np.zeros(rows, np.bool_))
        for i, row in enumerate(logits.astype(np.float64)):
            if not (row < np.inf).all() or np.isneginf(processed := self._process(row, params, i)).all():
                samples.failed[i] = True
                continue
            samples.token_ids[i] = token = self._draw(processed, params, i)
            if params.want_logprob[i]:
                samples.logprobs[i] = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        return samples

    def score(self, logits: Array, rows: Int32Array, token_ids: Int32Array, num_top: int) -> Callable[[], TokenScores]:
        x = logits[rows].astype(np.float64)
        logprobs = x - x.max(axis=1, keepdims=True)
        logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
        mine = x[np.arange(len(rows)), token_ids][:, None]
        top = np.argsort(-x, axis=1, kind="stable")[:, :num_top].astype(np.int32)
        scores = TokenScores(
            logprobs[np.arange(len(rows)), token_ids].astype(np.float32),
            (1 + (x > mine).sum(axis=1)).astype(np.int32),
            num_top,
            top.ravel(),
            np.take_along_axis(logprobs, top, axis=1).astype(np.float32).ravel(),
        )
        return lambda: scores

    def _process(self, row: Float64, params: SamplingBatch, i: int) -> Float64:
        """Logits with bias, masks and penalties."""
        x = row.copy()
        biases, masks, history = params.biases, params.masks, params.history
        if (m := biases.index[i]) >= 0:
            part = slice(biases.offsets[m], biases.offsets[m + 1])
            x[biases.ids[part]] = x[biases.ids[part]].astype(np.float32) + biases.values[part]
        if masks.index[i] >= 0:
            every_id = np.arange(len(x))
            allowed = masks.words[masks.index[i]][every_id // 32] >> (every_id % 32).astype(np.uint32) & 1
            x[allowed == 0] = -np.inf
        masked = params.masked_ids[i, : params.num_masked[i]]
        x[masked[(masked >= 0) & (masked < len(x))]] = -np.inf
        if (m := history.index[i]) >= 0:
            part = slice(history.offsets[m], history.offsets[m + 1])
            ids, counts = history.ids[part], history.counts[part]
            repetition = float(params.repetition_penalty[i])
            y = np.where(x[ids] > 0, x[ids] / repetition, x[ids] * repetition)
            y = y - counts * float(params.frequency_penalty[i]) - (counts > 0) * float(params.presence_penalty[i])
            greatest = np.finfo(np.float32).max
            x[ids] = np.where(x[ids] > -np.inf, np.clip(y, -greatest, greatest).astype(np.float32), -np.inf)
        return x

    def _draw(self, x: Float64, params: SamplingBatch, i: int) -> int:
        temperature = float(params.temperature[i])
        if temperature < GREEDY_TEMPERATURE:
            return int(x.argmax())
        peak = x.max()
        kept = x > -np.inf
        if 0 < params.top_k[i] < kept.sum():
            kept &= x >= np.sort(x)[-params.top_k[i]]
        if params.top_p[i] < 1:
            mass = softmax(np.where(kept, x / temperature, -np.inf))
            for value in np.unique(x[kept])[::-1]:
                if mass[x >= value].sum() >= params.top_p[i]:
                    break
            kept &= x >= value
        if params.min_p[i] > 0:
            kept &= x >= peak + temperature * np.log(float(params.min_p[i]))
        if params.typical_p[i] < 1:
            mass = softmax(np.where(kept, x / temperature, -np.inf))
            # ln q and the scaled logit differ by a constant, as do their means, one of which is minus the entropy
            distance = np.abs(x / temperature - (mass[kept] * x[kept] / temperature).sum())
            for limit in np.unique(distance[kept]):
                if mass[kept & (distance <= limit)].sum() >= params.typical_p[i]:
                    break
            kept &= distance <= limit
        if params.by_rejection[i]:
            p = softmax(np.where(kept, x / temperature, -np.inf))
            row = slice(i, i + 1)
            token_ids, _ = reject(p[None], None, params.draft_ids[row], params.seed[row], params.position[row])
            return int(token_ids[0])
        noise = gumbel_noise(int(params.seed[i]), int(params.position[i]), len(x))
        return int(np.where(kept, (x - peak) / temperature + noise, -np.inf).argmax())


def softmax(x: Float64) -> Float64:
    """Softmax over the last axis."""
    weights: Float64 = np.exp(x - x.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights
