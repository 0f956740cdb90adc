from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.integrations.gguf.dequant import dequantize
from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.gguf_checkpoint import GgufCheckpoint
from foreword.scheduler.errors import CheckpointError

Make = Callable[..., Any]

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
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


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.weight"
    return f"{GGUF_NAMES[stem]}.weight"


def test_default_model_is_read_as_transformers_reads_it(default_checkpoint: GgufCheckpoint) -> None:
    header = GgufHeader.from_file(str(default_model_path()))
    stored = load_gguf_state_dict(header)
    undo_permutation = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    assert len(stored) == len(default_checkpoint.tensor_names()) == 272
    for name in default_checkpoint.tensor_names():
        if name.startswith("model.layers.") and name.split(".")[2] not in ("0", "13", "29"):
            continue
        info = stored[gguf_name(name)]
        data = info[...]
        tensor = data if info.ggml_type == 0 else dequantize(data.reshape(-1), info.ggml_type)
        actual = default_checkpoint.tensor(name)
        expected = undo_permutation.process(tensor.numpy().reshape(actual.shape), gguf_name(name)).weights
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7, err_msg=name)


def test_default_model_has_its_published_configuration(default_checkpoint: GgufCheckpoint) -> None:
    assert default_checkpoint.architecture == "LlamaForCausalLM"
    published = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    assert published.items() <= dict(default_checkpoint.config).items()


def test_default_model_facts(default_checkpoint: GgufCheckpoint) -> None:
    assert default_checkpoint.eos_token_ids == (2,)
    assert default_checkpoint.chat_template is not None
    assert "<|im_start|>" in default_checkpoint.chat_template.source
    assert default_checkpoint.chat_template.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("tied", "biases", "changes"),
    [
        (True, (), {}),
        (False, (), {"num_key_value_heads": 4}),
        (True, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), {"head_dim": 16}),
        (False, ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), {"num_key_value_heads": 1}),
    ],
)
def test_tensors_come_back_as_they_were(
    make_llama: Make, make_weights: Make, tied: bool, biases: tuple[str, ...], changes: dict[str, Any]
) -> None:
    weights = make_weights(tied=tied, biases=biases, **changes)
    checkpoint = GgufCheckpoint(make_llama(weights, **changes))
    assert checkpoint.tensor_names() == set(weights)
    for name, expected in weights.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), expected, err_msg=name)
    assert checkpoint.config["tie_word_embeddings"] is tied
    assert checkpoint.config["attention_bias"] is ("self_attn.q_proj" in biases)
    assert checkpoint.config["mlp_bias"] is ("mlp.gate_proj" in biases)


def inverse_frequencies(config: dict[str, Any]) -> tuple[np.ndarray, float]:
    """What transformers computes from a configuration."""
    parsed = LlamaConfig(**copy.deepcopy(config))
    kind = parsed.rope_parameters["rope_type"]
    if kind == "default":
        exponents = np.arange(0, parsed.head_dim, 2) / parsed.head_dim
        return parsed.rope_parameters["rope_theta"] ** -exponents, 1.0
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](parsed, "cpu")
    return frequencies.numpy(), attention_factor


def test_no_rope_scaling(tiny_gguf: Path) -> None:
    assert GgufCheckpoint(tiny_gguf).config["rope_scaling"] is None


def test_linear_rope_scaling(make_llama: Make) -> None:
    path = make_llama(**{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    scaled, _ = inverse_frequencies(GgufCheckpoint(path).config)
    np.testing.assert_allclose(scaled, 10_000.0 ** -(np.arange(0, 8, 2) / 8) / 4, rtol=1e-6)


def test_linear_rope_scaling_in_the_old_spelling(make_llama: Make) -> None:
    path = make_llama(**{"llama.rope.scale_linear": 2.0})
    assert GgufCheckpoint(path).config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_yarn_rope_scaling(make_llama: Make) -> None:
    path = make_llama(
        **{
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
        }
    )
    config = GgufCheckpoint(path).config
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
    }
    _, attention_factor = inverse_frequencies(config)
    assert attention_factor == pytest.approx(0.1 * np.log(4) + 1)


def test_yarn_attention_factor_is_relative_to_the_papers(make_llama: Make) -> None:
    path = make_llama(
        **{
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.attn_factor": 0.5,
        }
    )
    _, attention_factor = inverse_frequencies(GgufCheckpoint(path).config)
    assert attention_factor == pytest.approx(0.5 * (0.1 * np.log(8) + 1))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling(make_llama: Make, factor: float) -> None:
    base = {"rope_theta": 500_000.0, "head_dim": 64, "max_position_embeddings": 131_072}
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected, _ = inverse_frequencies({**base, "rope_scaling": scaling})
    factors = inverse_frequencies(base)[0] / expected

    def add_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))

    path = make_llama(None, add_factors, head_dim=64, **{"llama.rope.freq_base": 500_000.0})
    config = GgufCheckpoint(path).config
    assert config["rope_scaling"] == scaling
    np.testing.assert_allclose(inverse_frequencies(config)[0], expected, rtol=1e-6)


def test_other_rope_factors_are_refused(make_llama: Make) -> None:
    def add_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array([1.0, 2.0, 3.0, 4.0], np.float32))

    with pytest.raises(CheckpointError, match="not a Llama 3 scaling"):
        GgufCheckpoint(make_llama(None, add_factors))


def test_sliding_window(make_llama: Make) -> None:
    assert GgufCheckpoint(make_llama(**{"llama.attention.sliding_window": 64})).config["sliding_window"] == 64


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count differs"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length differs"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "supported are none, linear, yarn"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"llama.rope.freq_base": float("nan")}, "must be a positive number"),
        ({"split.count": 2}, "one part of a split GGUF file"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(make_llama: Make, changes: dict[str, Any], reason: str) -> None:
    path = make_llama(**changes)
    with pytest.raises(CheckpointError) as raised:
        GgufCheckpoint(path)
    assert reason in raised.value.message
    assert str(path) in raised.value.message


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'mamba'; supported are llama"):
        GgufCheckpoint(tmp_path / "other.gguf")


def test_missing_tensor_is_found_when_opening(make_llama: Make, make_weights: Make) -> None:
    weights = make_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.1\.ffn_up\.weight' is missing"):
        GgufCheckpoint(make_llama(weights))


def test_tensor_of_another_shape_is_found_when_opening(make_llama: Make, make_weights: Make) -> None:
    weights = make_weights()
    weights["model.layers.0.self_attn.v_proj.weight"] = np.zeros((32, 32), np.float32)
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.attn_v\.weight' is \[32, 32\], expected \[16, 32\]"):
        GgufCheckpoint(make_llama(weights))


def test_unknown_tensor_is_refused(make_llama: Make) -> None:
    def add_tensor(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((8, 32), np.float32))

    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_gate_inp\.weight' is not part of the llama architecture"):
        GgufCheckpoint(make_llama(None, add_tensor))


def test_unknown_name_is_refused(tiny_gguf: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor 'blk"):
        GgufCheckpoint(tiny_gguf).tensor("blk.0.attn_q.weight")
