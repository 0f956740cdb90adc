"""A model in one GGUF file."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from foreword.gpu.checkpoint import gguf_llama
from foreword.gpu.checkpoint.checkpoint import ChatTemplate, Checkpoint
from foreword.gpu.checkpoint.gguf_file import GgufFile
from foreword.gpu.checkpoint.gguf_tokenizer import GgufVocabulary
from foreword.scheduler.errors import CheckpointError

TRANSLATIONS: dict[str, ModuleType] = {"llama": gguf_llama}


class GgufCheckpoint(Checkpoint):
    """A GGUF file seen through Hugging Face's names, layout and vocabulary."""

    def __init__(self, path: Path) -> None:
        """Read the file's header.

        Raises:
            CheckpointError: damaged, incomplete, or of an architecture that is not supported.
        """
        self.path = path
        self._file = GgufFile(path)
        if self._file.metadata.get("split.count", 0) not in (0, 1):
            raise CheckpointError(f"{path}: one part of a split GGUF file; merge the parts into one file first")
        architecture = self._file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in TRANSLATIONS:
            raise CheckpointError(
                f"{path}: general.architecture is {architecture!r}; supported are {', '.join(sorted(TRANSLATIONS))}"
            )
        self._translation = TRANSLATIONS[architecture]
        self.architecture = self._translation.ARCHITECTURE
        self.config = self._translation.huggingface_config(self._file)
        self._names: dict[str, str] = self._translation.huggingface_names(self._file)
        self._vocabulary = GgufVocabulary(self._file)
        self.eos_token_ids = self._vocabulary.end_token_ids()
        template = self._file.metadata.get("tokenizer.chat_template")
        self.chat_template = (
            ChatTemplate(template, self._vocabulary.text_of("bos"), self._vocabulary.text_of("eos"))
            if isinstance(template, str)
            else None
        )

    def tensor_names(self) -> frozenset[str]:
        """Names in Hugging Face's spelling."""
        return frozenset(self._names)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Read one tensor, dequantised, rows of query and key projections in Hugging Face's order."""
        if name not in self._names:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        restored: npt.NDArray[np.float32] = self._translation.restore_row_order(
            name, self._file.read(self._names[name]), self.config
        )
        return restored

    def tokenizer_json(self) -> str:
        """The tokenizer, built from the vocabulary in the file."""
        return self._vocabulary.tokenizer_json()
