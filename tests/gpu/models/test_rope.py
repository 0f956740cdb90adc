from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foreword.gpu.models.rope import RopeConfig, rotary_angles
from foreword.scheduler.errors import CheckpointError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-attention-factor": YARN | {"attention_factor": 1.25},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
}


@pytest.mark.parametrize("parameters", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("head_dim", [64, 80, 16])
def test_angles_equal_the_reference(
    parameters: dict[str, Any], head_dim: int, tiny_checkpoint: Callable[..., Any]
) -> None:
    parameters = parameters | {"rope_theta": 50000.0}
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=1024,
            rope_parameters=parameters,
        )
    )
    cos, sin = reference(torch.zeros(1), torch.arange(1024)[None])
    config = RopeConfig.from_config(tiny_checkpoint(rope_theta=None, rope_parameters=parameters))
    for actual, expected in zip(rotary_angles(config, head_dim, 1024), (cos, sin), strict=True):
        assert actual.shape == (1024, head_dim // 2)
        np.testing.assert_allclose(actual, expected[0, :, : head_dim // 2].numpy(), atol=3e-4)
        np.testing.assert_allclose(actual[:100], expected[0, :100, : head_dim // 2].numpy(), atol=3e-5)


def test_older_spelling_means_the_same(tiny_checkpoint: Callable[..., Any]) -> None:
    new = tiny_checkpoint(rope_theta=None, rope_parameters=LLAMA3 | {"rope_theta": 7.0})
    old = tiny_checkpoint(rope_theta=7.0, rope_scaling=LLAMA3)
    oldest = tiny_checkpoint(rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2})
    assert RopeConfig.from_config(new) == RopeConfig.from_config(old)
    assert RopeConfig.from_config(oldest) == RopeConfig(theta=7.0, kind="linear", factor=2)
    assert RopeConfig.from_config(tiny_checkpoint(rope_scaling=None)) == RopeConfig()


def test_the_older_key_wins_as_in_the_reference(tiny_checkpoint: Callable[..., Any]) -> None:
    both = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}}
    assert RopeConfig.from_config(tiny_checkpoint(**both)).factor == 4.0


def test_the_original_length_defaults_as_in_the_reference(tiny_checkpoint: Callable[..., Any]) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    given = tiny_checkpoint(rope_scaling=scaling, max_position_embeddings=512)
    assert RopeConfig.from_config(given).original_max_position_embeddings == 512
    named = tiny_checkpoint(rope_scaling=scaling, max_position_embeddings=512, original_max_position_embeddings=128)
    assert RopeConfig.from_config(named).original_max_position_embeddings == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "dynamic"}, "rope type 'dynamic' is not supported; supported are default, linear, llama3, yarn"),
        ({"rope_type": "linear"}, "factor missing for rope type 'linear'"),
        ({"rope_type": "llama3", "factor": 8}, "high_freq_factor, low_freq_factor missing"),
        (LLAMA3 | {"beta_fast": 1}, "beta_fast not supported with rope type 'llama3'"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number, is '2'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    changes: dict[str, Any], message: str, tiny_checkpoint: Callable[..., Any]
) -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.config["rope_scaling"] = changes
    with pytest.raises(CheckpointError, match=message):
        RopeConfig.from_config(checkpoint)
