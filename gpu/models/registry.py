"""Which family implements an architecture. A family joins by one file beside this one and one line here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

from foreword.gpu.backends.backend import Backend
from foreword.gpu.batch import A
from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.models.config import ModelConfig
from foreword.gpu.models.decoder import DecoderWeights
from foreword.scheduler.errors import CheckpointError

FAMILIES = {
    "LlamaForCausalLM": "foreword.gpu.models.llama",
    "MistralForCausalLM": "foreword.gpu.models.llama",
}
"""Module of each architecture, imported when a checkpoint of it is opened."""


class Family(Protocol):
    """What a family's module offers."""

    def read_config(self, checkpoint: Checkpoint) -> ModelConfig:
        """Hyper-parameters of a checkpoint."""

    def load_weights(
        self, checkpoint: Checkpoint, config: ModelConfig, backend: Backend[A], progress: Callable[[int, int], None]
    ) -> DecoderWeights[A]:
        """Weights of a checkpoint, on a device."""


def family(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint.

    Raises:
        CheckpointError: the architecture is unknown.
    """
    module = FAMILIES.get(checkpoint.architecture)
    if module is None:
        raise CheckpointError(
            f"{checkpoint.path}: architecture '{checkpoint.architecture}' is not supported; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    return cast(Family, import_module(module))


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """Hyper-parameters of a checkpoint, without reading a tensor.

    Raises:
        CheckpointError: an unknown architecture, or a configuration that is not supported.
    """
    return family(checkpoint).read_config(checkpoint)
