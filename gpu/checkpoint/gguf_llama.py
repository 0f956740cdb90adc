"""Translates GGUF's `llama` architecture (Llama, Mistral, SmolLM, TinyLlama) to Hugging Face's names and layout.

Two things differ beyond spelling. GGUF pairs neighbouring rows of a head for RoPE where Hugging Face pairs row i with
row i + head_dim / 2, so the rows of the query and key projections are stored permuted. And Llama 3's RoPE scaling is
stored as its result, one factor per frequency, instead of as its parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.gpu.checkpoint.gguf_file import GgufFile, Value
from foreword.scheduler.errors import CheckpointError

ARCHITECTURE = "LlamaForCausalLM"

PLAIN_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
UNUSED_TENSORS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight|blk\.\d+\.rope_freqs\.weight")

# Metadata that would change the computation in a way this translation does not express, and the values that do not.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}

# What every published Llama 3.1 to 3.3 checkpoint uses; only the factor varies.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_CONTEXT = 8192


def huggingface_names(file: GgufFile) -> dict[str, str]:
    """Map each tensor's Hugging Face name to its name in the file.

    Raises:
        CheckpointError: the file has a tensor that the architecture does not know.
    """
    names = {}
    for name in file.tensors:
        match = LAYER_TENSOR.fullmatch(name)
        if name in PLAIN_NAMES:
            names[PLAIN_NAMES[name]] = name
        elif match and match[2] in LAYER_NAMES:
            names[f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"] = name
        elif not UNUSED_TENSORS.fullmatch(name):
            raise CheckpointError(f"{file.path}: tensor {name!r} is not part of the llama architecture")
    return names


def restore_row_order(name: str, tensor: npt.NDArray[np.float32], config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Undo the permutation of a query or key projection's rows; other tensors are returned as they are.

    Args:
        name: Hugging Face's.
        tensor: `[num_heads * head_dim, ...]`.
        config: as `huggingface_config` returns it.
    """
    if ".q_proj." in name:
        num_heads = config["num_attention_heads"]
    elif ".k_proj." in name:
        num_heads = config["num_key_value_heads"]
    else:
        return tensor
    pairs = tensor.reshape(num_heads, config["head_dim"] // 2, 2, *tensor.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)


def huggingface_config(file: GgufFile) -> dict[str, Any]:
    """Translate the metadata to `config.json`'s vocabulary.

    Raises:
        CheckpointError: a value is missing, has the wrong type, contradicts the tensors, or asks for a computation that
            the llama architecture of Hugging Face does not have.
    """
    metadata = _Metadata(file, "llama")
    for key, neutral in NEUTRAL_VALUES.items():
        value = metadata.optional(key)
        if value is not None and value not in neutral:
            raise CheckpointError(f"{file.path}: llama.{key} = {value} is not supported")
    hidden_size = metadata.count("embedding_length")
    num_heads = metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.count(key, head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: llama.{key} differs from the size of a head, {head_dim}")
    if head_dim % 2:
        raise CheckpointError(f"{file.path}: the size of a head, {head_dim}, is odd")
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.real("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "sliding_window": metadata.optional("attention.sliding_window") or None,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    config["rope_scaling"] = _rope_scaling(metadata, config)
    _check_shapes(file, config)
    return config


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    return embedding.shape[0]


def _check_shapes(file: GgufFile, config: dict[str, Any]) -> None:
    """Compare every tensor with what the hyper-parameters say, and find missing ones."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "output.weight": (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
        "attn_norm": (hidden,),
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "ffn_norm": (hidden,),
        "ffn_gate": (intermediate, hidden),
        "ffn_up": (intermediate, hidden),
        "ffn_down": (hidden, intermediate),
    }
    for name, tensor in file.tensors.items():
        match = LAYER_TENSOR.fullmatch(name)
        expected = shapes.get(match[2] if match else name)
        if match and match[3] == "bias" and expected:
            expected = expected[:1]
        if expected and tensor.shape != expected:
            raise CheckpointError(f"{file.path}: tensor {name!r} is {list(tensor.shape)}, expected {list(expected)}")
    _check_present(file, (f"blk.{i}.{part}.weight" for i in range(config["num_hidden_layers"]) for part in LAYER_NAMES))
    _check_present(file, ("output_norm.weight",))


def _check_present(file: GgufFile, names: Iterable[str]) -> None:
    for name in names:
        if name not in file.tensors:
            raise CheckpointError(f"{file.path}: tensor {name!r} is missing")


def _rope_scaling(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any] | None:
    file = metadata.file
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, config)
    kind = metadata.optional("rope.scaling.type")
    if kind is None and metadata.optional("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": metadata.real("rope.scale_linear")}
    if kind in (None, "none"):
        return None
    factor = metadata.real("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn_scaling(metadata, config, factor)
    raise CheckpointError(f"{file.path}: llama.rope.scaling.type = {kind!r}; supported are none, linear, yarn")


def _yarn_scaling(metadata: _Metadata, config: dict[str, Any], factor: float) -> dict[str, Any]:
    """YaRN (Peng et al. 2023); GGUF keeps the attention factor relative to the paper's `0.1 ln(factor) + 1`."""
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.count(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }
    for key in ("beta_fast", "beta_slow"):
        if metadata.optional(f"rope.scaling.yarn_{key}") is not None:
            scaling[key] = metadata.real(f"rope.scaling.yarn_{key}")
    for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        relative = metadata.real(key, 1.0)
        if relative != 1.0:
            scaling["attention_factor"] = relative * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """Recover Llama 3's parameters from its factors, and check that they give the same factors."""
    stored = file.read(ROPE_FACTORS).ravel()
    factor = float(stored.max())
    if np.all(stored == 1.0):
        return None
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    wavelengths = 2 * np.pi * config["rope_theta"] ** exponents
    span = LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR
    smooth = np.clip((LLAMA3_ORIGINAL_CONTEXT / wavelengths - LLAMA3_LOW_FREQ_FACTOR) / span, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: {ROPE_FACTORS} is not a Llama 3 scaling with low_freq_factor {LLAMA3_LOW_FREQ_FACTOR}, "
            f"high_freq_factor {LLAMA3_HIGH_FREQ_FACTOR} and original context {LLAMA3_ORIGINAL_CONTEXT}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_CONTEXT,
    }


class _Metadata:
    """Typed access to the keys of one architecture."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def optional(self, key: str) -> Value | None:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """Read a positive integer."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.file.path}: {self.architecture}.{key} must be a positive integer, is {value}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Read a positive number as the shortest decimal with the same float32, which is what the author wrote."""
        value = self._value(key, default)
        if not isinstance(value, float) or not 0.0 < value < math.inf:
            raise CheckpointError(f"{self.file.path}: {self.architecture}.{key} must be a positive number, is {value}")
        return float(str(np.float32(value)))

    def _value(self, key: str, default: Value | None) -> Value:
        value = self.optional(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.file.path}: {self.architecture}.{key} is missing")
        return value
