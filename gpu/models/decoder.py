"""The decoder, written once for every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic

from foreword.gpu.backends.backend import Backend, KVCache, LinearWeight, RotaryTable
from foreword.gpu.batch import A, Batch
from foreword.gpu.models.config import ModelConfig
from foreword.gpu.models.rope import rotary_angles


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[A]):
    """Weights of one layer; E hidden size, H query heads, G KV heads, D head size, F intermediate size.

    Attributes:
        attention_norm: `[E]`.
        qkv: E -> (H + 2 G) * D: query heads, key heads, value heads.
        attention_output: H * D -> E.
        mlp_norm: `[E]`.
        gate_up: E -> 2 F: gate, then up.
        down: F -> E.
    """

    attention_norm: A
    qkv: LinearWeight[A]
    attention_output: LinearWeight[A]
    mlp_norm: A
    gate_up: LinearWeight[A]
    down: LinearWeight[A]


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[A]):
    """Weights of a decoder.

    Attributes:
        embedding: `[V, E]`.
        layers: in order.
        final_norm: `[E]`.
        head: E -> V.
        num_parameters: values in the checkpoint's tensors.
    """

    embedding: A
    layers: tuple[LayerWeights[A], ...]
    final_norm: A
    head: LinearWeight[A]
    num_parameters: int


class Decoder(Generic[A]):
    """A pre-norm transformer decoder with rotary positions, grouped-query attention and a gated feed-forward part."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights[A], backend: Backend[A], max_model_len: int
    ) -> None:
        cos, sin = rotary_angles(config.rope, config.head_dim, max_model_len)
        self.config = config
        self.weights = weights
        self.backend = backend
        self._rotary = RotaryTable(backend.weight(cos), backend.weight(sin))
        self._scale = 1.0 / math.sqrt(config.head_dim)

    def logits(self, batch: Batch[A], cache: KVCache[A]) -> A:
        """Compute a step: fill the cache for its tokens and return logits `[L, V]` of the positions that need them."""
        backend, layers, eps = self.backend, self.weights.layers, self.config.rms_norm_eps
        stream = backend.embedding(batch.token_ids, self.weights.embedding)
        x = backend.rms_norm(stream, layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in layers[1:]] + [self.weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            mixed = self._attention(index, layer, x, batch, cache)
            x = backend.rms_norm(stream, layer.mlp_norm, eps, mixed)
            gated = backend.silu_and_mul(backend.linear(x, layer.gate_up))
            x = backend.rms_norm(stream, next_norm, eps, backend.linear(gated, layer.down))
        return backend.linear(backend.gather_rows(x, batch.logits_indices), self.weights.head)

    def _attention(self, index: int, layer: LayerWeights[A], x: A, batch: Batch[A], cache: KVCache[A]) -> A:
        backend, window = self.backend, self.config.sliding_window
        qkv = backend.linear(x, layer.qkv)
        queries = backend.rotate_and_store(qkv, self._rotary, batch, cache, index)
        attended = backend.attention(queries, batch, cache, index, self._scale, window)
        return backend.linear(attended, layer.attention_output)
