"""Hyper-parameters of a decoder, read from a checkpoint's configuration and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.models.rope import RopeConfig
from foreword.scheduler.errors import CheckpointError

DEFAULT_MAX_POSITION_EMBEDDINGS = 2048  # Llama 1's, which files without the key rely on


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyper-parameters of a decoder.

    Attributes:
        architecture: key into the model registry.
        vocab_size: rows of the embedding and of the output head.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the feed-forward part.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: size of a head; even.
        max_position_embeddings: positions the model was made for.
        rms_norm_eps: added to the mean square.
        rope: rotary position embedding.
        sliding_window: keys a token attends to, itself included; None for all.
        attention_bias: query, key, value and output projections have biases.
        mlp_bias: gate, up and down projections have biases.
        tie_word_embeddings: the output head is the embedding table.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def linear_layers(self) -> frozenset[tuple[int, int]]:
        """The different `(out_features, in_features)` of all matrix products."""
        attention_size = self.num_heads * self.head_dim
        return frozenset(
            {
                (attention_size + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
                (self.hidden_size, attention_size),
                (2 * self.intermediate_size, self.hidden_size),
                (self.hidden_size, self.intermediate_size),
                (self.vocab_size, self.hidden_size),
            }
        )

    @property
    def num_weights(self) -> int:
        """Values of all matrices, the embedding table included."""
        attention_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * attention_size + 2 * kv_size + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelConfig:
        """Read the hyper-parameters that decoders share in Hugging Face's vocabulary.

        Raises:
            CheckpointError: a value is missing, impossible, or asks for something that is not supported.
        """
        values = _Values(checkpoint)
        values.require("hidden_act", ("silu", "swish"))
        if values.optional("quantization_config") is not None:
            raise values.error("quantization_config", "quantised tensors are not supported in this format")
        hidden_size = values.count("hidden_size")
        num_heads = values.count("num_attention_heads")
        num_kv_heads = values.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise values.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} query heads")
        head_dim = values.count("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise values.error("head_dim", f"must be even, is {head_dim}")
        return cls(
            architecture=checkpoint.architecture,
            vocab_size=values.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=values.count("intermediate_size"),
            num_layers=values.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=values.count("max_position_embeddings", DEFAULT_MAX_POSITION_EMBEDDINGS),
            rms_norm_eps=values.positive("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_config(checkpoint),
            sliding_window=_sliding_window(values),
            attention_bias=values.flag("attention_bias"),
            mlp_bias=values.flag("mlp_bias"),
            tie_word_embeddings=values.flag("tie_word_embeddings"),
        )


def _sliding_window(values: _Values) -> int | None:
    kinds = set(values.optional("layer_types") or ())
    if kinds - {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise values.error("layer_types", f"one kind of layer is supported, has {', '.join(sorted(map(str, kinds)))}")
    if values.optional("sliding_window") is None or kinds == {"full_attention"}:
        return None
    return values.count("sliding_window")


class _Values:
    """Typed access to a checkpoint's configuration."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._path = checkpoint.path
        self._config: Mapping[str, Any] = checkpoint.config

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {key}: {problem}", field=key)

    def optional(self, key: str) -> Any:
        return self._config.get(key)

    def require(self, key: str, names: tuple[str, ...]) -> None:
        """Refuse all but one thing, which has these names and is meant when the key is missing."""
        value = self._config.get(key, names[0])
        if value not in names:
            raise self.error(key, f"'{value}' is not supported; supported is '{names[0]}'")

    def count(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"must be a positive integer, is {value!r}")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, f"must be a positive number, is {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._value(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {value!r}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value
