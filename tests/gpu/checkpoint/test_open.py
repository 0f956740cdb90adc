from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.gpu.checkpoint.gguf_checkpoint import GgufCheckpoint
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.scheduler.errors import CheckpointError


def test_opens_gguf_by_content_whatever_its_name(tiny_gguf: Path) -> None:
    other = tiny_gguf.rename(tiny_gguf.with_name("model.weights"))
    assert isinstance(open_checkpoint(other), GgufCheckpoint)


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing: no such file or folder; a model is"):
        open_checkpoint(tmp_path / "nothing")


def test_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json; a model is a GGUF file or a Hugging Face folder"):
        open_checkpoint(tmp_path)


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x04pickle")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "model.bin")


def test_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe")


def test_reading_a_model_needs_neither_pytorch_nor_transformers(tiny_gguf: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from foreword.gpu.checkpoint.open import open_checkpoint\n"
        "checkpoint = open_checkpoint(Path(sys.argv[1])); checkpoint.tensor('model.norm.weight')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, tiny_gguf], check=True)
