from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from foreword.gpu.models.registry import FAMILIES, family, read_config
from foreword.scheduler.errors import CheckpointError


def test_unknown_architecture_names_the_known_ones(tiny_checkpoint: Callable[..., Any]) -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.architecture = "MambaForCausalLM"
    with pytest.raises(CheckpointError, match="'MambaForCausalLM' is not supported; supported are LlamaForCausalLM, M"):
        family(checkpoint)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_can_be_imported(architecture: str, tiny_checkpoint: Callable[..., Any]) -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.architecture = architecture
    assert read_config(checkpoint).architecture == architecture


def test_sizing_a_cache_needs_no_torch() -> None:
    """The service reads a model's configuration in processes that never compute."""
    code = (
        "import sys, foreword.gpu.config, foreword.gpu.runner, foreword.gpu.models.llama, "
        "foreword.gpu.backends.numpy_backend; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
