"""Opens a model by what the path holds."""

from __future__ import annotations

from pathlib import Path

from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.checkpoint.gguf_checkpoint import GgufCheckpoint
from foreword.gpu.checkpoint.huggingface_checkpoint import HuggingFaceCheckpoint
from foreword.scheduler.errors import CheckpointError


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder.

    Raises:
        CheckpointError: nothing is there, or what is there is damaged or of a kind that cannot be loaded.
    """
    if path.is_dir():
        return HuggingFaceCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(path)
    if path.exists():
        raise CheckpointError(f"{path}: neither a file nor a folder")
    raise CheckpointError(f"{path}: no such file or folder; a model is a GGUF file or a Hugging Face folder")
