"""Rotary position embedding and the ways it is stretched to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.scheduler.errors import CheckpointError

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

DEFAULT_THETA = 10000.0
ORIGINAL_LENGTH = "original_max_position_embeddings"

PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH),
    "yarn": ("factor", ORIGINAL_LENGTH),
}
"""The supported kinds and the parameters each must have."""

OPTIONAL_PARAMETERS = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
IGNORED_PARAMETERS = ("rope_theta", "rope_type", "type", "finetuned")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles.

    Attributes:
        theta: base of the wavelengths.
        kind: a key of `PARAMETERS`.
        factor: how much longer the context became.
        original_max_position_embeddings: context length before that.
        low_freq_factor: llama3: wavelengths above original length / this are stretched by `factor`.
        high_freq_factor: llama3: wavelengths below original length / this are left alone.
        attention_factor: yarn: scales cos and sin; None for the paper's 0.1 ln(factor) + 1.
        beta_fast: yarn: rotations over the original length from which a dimension is left alone.
        beta_slow: yarn: rotations over the original length up to which a dimension is stretched by `factor`.
        mscale: yarn: with `mscale_all_dim`, replaces the paper's attention factor by a ratio.
        mscale_all_dim: yarn: see `mscale`.
        truncate: yarn: the bounds between the two are whole dimensions.
    """

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @classmethod
    def from_config(cls, checkpoint: Checkpoint) -> RopeConfig:
        """Read the pair `rope_theta` and `rope_scaling`, or the newer `rope_parameters`, which yields to it.

        Raises:
            CheckpointError: a kind or parameter that is not supported, or a parameter that is missing.
        """
        config = checkpoint.config
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given: dict[str, Any] = dict(config.get(key) or {})
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in PARAMETERS:
            raise CheckpointError(
                f"{checkpoint.path}: {key}: rope type '{kind}' is not supported; supported are {', '.join(PARAMETERS)}"
            )
        if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise CheckpointError(f"{checkpoint.path}: {key}: partial_rotary_factor must be 1")
        given.pop("partial_rotary_factor", None)
        parameters = {
            name: value for name, value in given.items() if name not in IGNORED_PARAMETERS and value is not None
        }
        if ORIGINAL_LENGTH in PARAMETERS[kind] and ORIGINAL_LENGTH not in parameters:
            fallback = config.get(ORIGINAL_LENGTH) or config.get("max_position_embeddings")
            parameters |= {} if fallback is None else {ORIGINAL_LENGTH: fallback}
        allowed = PARAMETERS[kind] + OPTIONAL_PARAMETERS.get(kind, ())
        if kind != "default" and (unknown := sorted(set(parameters) - set(allowed))):
            raise CheckpointError(
                f"{checkpoint.path}: {key}: {', '.join(unknown)} not supported with rope type '{kind}'"
            )
        if missing := sorted(set(PARAMETERS[kind]) - set(parameters)):
            raise CheckpointError(f"{checkpoint.path}: {key}: {', '.join(missing)} missing for rope type '{kind}'")
        for name, value in parameters.items():
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise CheckpointError(f"{checkpoint.path}: {key}: {name} must be a number, is {value!r}")
        theta = given.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
        return cls(theta=float(theta), kind=kind, **{name: parameters[name] for name in allowed if name in parameters})


def rotary_angles(config: RopeConfig, head_dim: int, max_model_len: int) -> tuple[Float32, Float32]:
    """Cos and sin, each `[max_model_len, head_dim / 2]`, of every position and pair, attention factor included."""
    frequencies = inverse_frequencies(config, head_dim).astype(np.float32)
    # The product is rounded to float32 because models are trained with it rounded so.
    angles = np.outer(np.arange(max_model_len, dtype=np.float32), frequencies).astype(np.float64)
    scale = attention_factor(config)
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Float64:
    """Radians per position of each pair, `[head_dim / 2]`."""
    plain: Float64 = config.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        return _yarn(config, plain, head_dim)
    return plain


def attention_factor(config: RopeConfig) -> float:
    """Factor on cos and sin: 1, except for YaRN."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _yarn_scale(config.factor, config.mscale) / _yarn_scale(config.factor, config.mscale_all_dim)
    return _yarn_scale(config.factor, 1.0)


def _llama3(config: RopeConfig, plain: Float64) -> Float64:
    """Llama 3.1: long wavelengths stretched, short ones kept, a linear blend between."""
    rotations = config.original_max_position_embeddings * plain / (2 * math.pi)
    blend = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = np.clip(blend, 0.0, 1.0)
    stretched: Float64 = plain * (kept + (1 - kept) / config.factor)
    return stretched


def _yarn(config: RopeConfig, plain: Float64, head_dim: int) -> Float64:
    """YaRN (Peng et al., 2023): the blend is linear in the dimension."""

    def dimension(rotations: float) -> float:
        wavelength_ratio = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength_ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    stretch = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    stretched: Float64 = plain * (1 - stretch + stretch / config.factor)
    return stretched


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
