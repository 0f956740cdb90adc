from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foreword.gpu.models.config import ModelConfig
from foreword.scheduler.errors import CheckpointError


def test_defaults_of_the_format(tiny_checkpoint: Callable[..., Any]) -> None:
    checkpoint = tiny_checkpoint(hidden_size=96)
    for key in ("head_dim", "num_key_value_heads", "tie_word_embeddings", "rms_norm_eps"):
        del checkpoint.config[key]
    config = ModelConfig.from_checkpoint(checkpoint)
    assert config.head_dim == 16
    assert config.num_kv_heads == config.num_heads == 6
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert config.sliding_window is None
    del checkpoint.config["max_position_embeddings"]
    assert ModelConfig.from_checkpoint(checkpoint).max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("layer_types", "expected"),
    [(None, 64), (["sliding_attention"] * 2, 64), (["full_attention"] * 2, None)],
)
def test_sliding_window(layer_types: Any, expected: int | None, tiny_checkpoint: Callable[..., Any]) -> None:
    checkpoint = tiny_checkpoint(sliding_window=64, layer_types=layer_types)
    assert ModelConfig.from_checkpoint(checkpoint).sliding_window == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; supported is 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types: one kind of layer is supported"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be a positive integer, is 0"),
        ({"vocab_size": None}, "vocab_size: is missing"),
        ({"vocab_size": True}, "vocab_size: must be a positive integer, is True"),
        ({"hidden_size": "576"}, "hidden_size: must be a positive integer, is '576'"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: 4 does not divide 6 query heads"),
        ({"head_dim": 15}, "head_dim: must be even, is 15"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: must be a positive number, is nan"),
        ({"attention_bias": "yes"}, "attention_bias: must be true or false, is 'yes'"),
        ({"sliding_window": -1}, "sliding_window: must be a positive integer, is -1"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    changes: dict[str, Any], message: str, tiny_checkpoint: Callable[..., Any]
) -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.config.update(changes)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_checkpoint(checkpoint)
