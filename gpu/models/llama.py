"""The Llama family: Llama 2 and 3, Mistral, SmolLM, TinyLlama."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from foreword.gpu.backends.backend import Backend, Float32, LinearWeight
from foreword.gpu.batch import A
from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.models.config import ModelConfig
from foreword.gpu.models.decoder import DecoderWeights, LayerWeights
from foreword.scheduler.errors import CheckpointError

WINDOWED = frozenset({"MistralForCausalLM"})
"""Architectures whose layers have the sliding window of their configuration."""


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """Hyper-parameters.

    Raises:
        CheckpointError: a value is missing, impossible, or asks for something that is not supported.
    """
    config = ModelConfig.from_checkpoint(checkpoint)
    # Configurations converted from Mistral's keep the key; only Mistral's own layers obey it.
    return config if config.architecture in WINDOWED else dataclasses.replace(config, sliding_window=None)


def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, backend: Backend[A], progress: Callable[[int, int], None]
) -> DecoderWeights[A]:
    """Read every tensor once and upload it.

    Args:
        checkpoint: where tensors come from.
        config: from `read_config`.
        backend: where they go.
        progress: called with (tensors loaded, tensors in all) after each.

    Raises:
        CheckpointError: a tensor is missing, damaged, of the wrong shape, or unknown to this family.
    """
    reader = _TensorReader(checkpoint, config, progress)
    embedding = backend.embedding_weight(reader.read("model.embed_tokens.weight"))
    layers = tuple(_load_layer(reader, f"model.layers.{i}", config, backend) for i in range(config.num_layers))
    final_norm = backend.weight(reader.read("model.norm.weight"))
    if config.tie_word_embeddings:
        head = backend.tied_linear_weight(embedding)
    else:
        head = backend.head_weight(reader.read("lm_head.weight"))
    return DecoderWeights(embedding, layers, final_norm, head, reader.num_parameters)


def _load_layer(reader: _TensorReader, layer: str, config: ModelConfig, backend: Backend[A]) -> LayerWeights[A]:
    def linear(part: str, names: tuple[str, ...], has_bias: bool) -> LinearWeight[A]:
        """Several projections of the same input as one product."""
        modules = [f"{layer}.{part}.{name}" for name in names]
        weight = np.concatenate([reader.read(f"{module}.weight") for module in modules])
        bias = np.concatenate([reader.read(f"{module}.bias") for module in modules]) if has_bias else None
        return backend.linear_weight(weight, bias)

    return LayerWeights(
        attention_norm=backend.weight(reader.read(f"{layer}.input_layernorm.weight")),
        qkv=linear("self_attn", ("q_proj", "k_proj", "v_proj"), config.attention_bias),
        attention_output=linear("self_attn", ("o_proj",), config.attention_bias),
        mlp_norm=backend.weight(reader.read(f"{layer}.post_attention_layernorm.weight")),
        gate_up=linear("mlp", ("gate_proj", "up_proj"), config.mlp_bias),
        down=linear("mlp", ("down_proj",), config.mlp_bias),
    )


class _TensorReader:
    """Reads the family's tensors, checks their shapes and counts."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, progress: Callable[[int, int], None]) -> None:
        self._checkpoint = checkpoint
        self._shapes = tensor_shapes(config)
        self._progress = progress
        self._num_read = 0
        self.num_parameters = 0
        derived = {name for name in checkpoint.tensor_names() if name.endswith(".rotary_emb.inv_freq")}
        if config.tie_word_embeddings:
            derived.add("lm_head.weight")
        if unknown := checkpoint.tensor_names() - self._shapes.keys() - derived:
            raise CheckpointError(
                f"{checkpoint.path}: {len(unknown)} tensors do not belong to {config.architecture} as configured, "
                f"the first is {min(unknown)}"
            )

    def read(self, name: str) -> Float32:
        tensor = self._checkpoint.tensor(name)
        if tensor.shape != self._shapes[name]:
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name} has shape {list(tensor.shape)}, "
                f"the configuration asks for {list(self._shapes[name])}"
            )
        self.num_parameters += tensor.size
        self._num_read += 1
        self._progress(self._num_read, len(self._shapes))
        return tensor


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of this family, by name."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (query, hidden, config.attention_bias),
        "self_attn.k_proj": (key, hidden, config.attention_bias),
        "self_attn.v_proj": (key, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query, config.attention_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for name, (out_features, in_features, has_bias) in projections.items():
            shapes[f"{layer}.{name}.weight"] = (out_features, in_features)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (out_features,)
    return shapes
