"""Small models as GGUF files, written with the `gguf` package's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.gguf_checkpoint import GgufCheckpoint

TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Weights = dict[str, np.ndarray]
Edit = Callable[[gguf.GGUFWriter], None]


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def interleaved(name: str, tensor: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """The row order in which GGUF stores query and key projections."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, key in heads.items():
        if f".{part}." in name:
            halves = tensor.reshape(config[key], 2, config["head_dim"] // 2, *tensor.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    return tensor


def random_weights(config: Mapping[str, Any], *, tied: bool = True, biases: tuple[str, ...] = ()) -> Weights:
    rng = np.random.default_rng(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not tied:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    parts = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        for part, shape in parts.items():
            shapes[f"model.layers.{layer}.{part}.weight"] = shape
            if part in biases:
                shapes[f"model.layers.{layer}.{part}.bias"] = shape[:1]
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(0x21 + i) for i in range(size - 5)), "ab", "abc"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (size - 3)])
    writer.add_token_merges(["A B"] if size > 60 else [])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")


def write_llama(path: Path, weights: Weights | None = None, edit: Edit = lambda writer: None, **changes: Any) -> Path:
    """Write a llama GGUF file; `changes` override TINY or, by a key with a dot, add metadata."""
    config = TINY | {key: value for key, value in changes.items() if "." not in key}
    metadata = {key: value for key, value in changes.items() if "." in key}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    write_vocabulary(writer, config["vocab_size"])
    for name, tensor in (weights or random_weights(config)).items():
        writer.add_tensor(gguf_name(name), interleaved(name, tensor, config))
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "tiny.gguf")


@pytest.fixture
def make_llama(tmp_path: Path) -> Callable[..., Path]:
    def make(weights: Weights | None = None, edit: Edit = lambda writer: None, **changes: Any) -> Path:
        return write_llama(tmp_path / "tiny.gguf", weights, edit, **changes)

    return make


@pytest.fixture
def make_weights() -> Callable[..., Weights]:
    def make(*, tied: bool = True, biases: tuple[str, ...] = (), **changes: Any) -> Weights:
        return random_weights(TINY | changes, tied=tied, biases=biases)

    return make


@pytest.fixture(scope="session")
def default_checkpoint() -> GgufCheckpoint:
    return GgufCheckpoint(default_model_path())
