"""The family against the reference implementation, on random weights of every variant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from foreword.gpu.backends.numpy_backend import NumpyBackend
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.models.decoder import Decoder
from foreword.gpu.models.registry import family
from foreword.gpu.runner import ModelRunner, load_runner
from foreword.scheduler.errors import CheckpointError, ConfigError

SIZES = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head": {"num_key_value_heads": 6},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head-size": {"head_dim": 40},
    "odd-sizes": {"hidden_size": 52, "intermediate_size": 77, "head_dim": 10, "num_attention_heads": 4},
    "rope-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "rope-llama3": {"rope_parameters": LLAMA3},
    "rope-yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "sliding-window": {"architecture": "mistral", "sliding_window": 20},
    "leftover-window": {"sliding_window": 20, "use_sliding_window": False},
    "activation-alias": {"hidden_act": "swish"},
}


def reference_model(folder: Path, changes: dict[str, Any]) -> torch.nn.Module:
    """Write a random checkpoint and return the reference's model of it."""
    torch.manual_seed(0)
    model: Any
    if changes.get("architecture") == "mistral":
        config = {name: value for name, value in (SIZES | changes).items() if name != "architecture"}
        model = MistralForCausalLM(MistralConfig(**config, attn_implementation="eager"))
    else:
        model = LlamaForCausalLM(LlamaConfig(**(SIZES | changes), attn_implementation="eager"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    return model.eval()


def device_logits(runner: ModelRunner, writer: Any, chunks: list[list[int]]) -> np.ndarray:
    """Logits of every position of one sequence that arrives in chunks."""
    logits = []
    for chunk in chunks:
        batch = runner.decoder.backend.upload(writer.plan([(0, chunk, len(chunk))]), runner.cache)
        logits.append(torch.as_tensor(runner.decoder.logits(batch, runner.cache)).float().numpy())
    return np.concatenate(logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference(variant: str, tmp_path: Path, plan_writer: Callable[..., Any]) -> None:
    reference = reference_model(tmp_path, VARIANTS[variant])
    checkpoint = open_checkpoint(tmp_path)
    config = DeviceConfig(num_blocks=64, dtype="float32", num_threads=1, max_num_sequences=8, max_model_len=256)
    runner = load_runner(config, checkpoint)
    tokens = np.random.default_rng(0).integers(0, 131, 150).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()

    chunks = [tokens[:70], tokens[70:71], tokens[71:150]]
    np.testing.assert_allclose(device_logits(runner, plan_writer(), chunks), expected, atol=2e-4, rtol=1e-4)
    assert np.abs(expected).max() > 1  # the comparison compares something
    assert runner.num_parameters == sum(parameter.numel() for parameter in reference.parameters())

    model, oracle = family(checkpoint), NumpyBackend()
    model_config = model.read_config(checkpoint)
    weights = model.load_weights(checkpoint, model_config, oracle, lambda loaded, total: None)
    on_oracle = ModelRunner(config, Decoder(model_config, weights, oracle, config.max_model_len))
    np.testing.assert_allclose(device_logits(on_oracle, plan_writer(), chunks), expected, atol=2e-4, rtol=1e-4)


def test_bfloat16_stays_near_float32(new_runner: Callable[..., ModelRunner], plan_writer: Callable[..., Any]) -> None:
    tokens = np.random.default_rng(0).integers(0, 131, 100).tolist()
    exact = device_logits(new_runner("float32"), plan_writer(), [tokens])
    rounded = device_logits(new_runner("bfloat16"), plan_writer(), [tokens])
    assert np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()


def test_progress_counts_every_tensor(tiny_checkpoint: Callable[..., Any]) -> None:
    checkpoint, calls = tiny_checkpoint(tie_word_embeddings=False), []
    config = DeviceConfig(num_blocks=4, num_threads=1, max_model_len=64)
    load_runner(config, checkpoint, lambda loaded, total: calls.append((loaded, total)))
    total = len(checkpoint.tensors)
    assert calls == [(i + 1, total) for i in range(total)]


def load(checkpoint: Any, max_model_len: int = 64) -> ModelRunner:
    return load_runner(DeviceConfig(num_blocks=4, num_threads=1, max_model_len=max_model_len), checkpoint)


def test_a_tensor_of_another_shape_is_refused(tiny_checkpoint: Callable[..., Any]) -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((72, 47), np.float32)
    message = r"model\.layers\.1\.mlp\.up_proj\.weight has shape \[72, 47\], the configuration asks for \[72, 48\]"
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight"])
def test_a_tensor_that_would_be_ignored_is_refused(extra: str, tiny_checkpoint: Callable[..., Any]) -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.tensors[extra] = np.zeros(96, np.float32)
    with pytest.raises(CheckpointError, match=rf"1 tensors do not belong to LlamaForCausalLM .* {extra}"):
        load(checkpoint)


def test_derived_tensors_are_not_needed(tiny_checkpoint: Callable[..., Any]) -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"]
    load(checkpoint)


def test_a_length_beyond_the_models_positions_is_refused(tiny_checkpoint: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: must be at most 512, .* got 513"):
        load(tiny_checkpoint(), max_model_len=513)
