"""What every kind of model file offers, whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja chat template as the model's author wrote it.

    Attributes:
        source: Jinja text.
        bos_token: text of the begin token, empty when the model has none.
        eos_token: text of the end token, empty when the model has none.
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""


class Checkpoint(ABC):
    """One model on disk. Opening reads metadata only; a tensor is read when it is asked for.

    Attributes:
        path: the GGUF file or the folder.
        architecture: key into the model registry, in Hugging Face's spelling ("LlamaForCausalLM").
        config: hyper-parameters in Hugging Face's `config.json` vocabulary (a GGUF file's are translated to it).
        eos_token_ids: tokens that end a generation, from the generation configuration or the vocabulary.
        chat_template: None when the file has none.
    """

    path: Path
    architecture: str
    config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None

    @abstractmethod
    def tensor_names(self) -> frozenset[str]:
        """Names in Hugging Face's spelling ("model.layers.0.self_attn.q_proj.weight")."""

    @abstractmethod
    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Read one tensor, dequantised, in Hugging Face's layout (a linear weight is `[out_features, in_features]`).

        Raises:
            CheckpointError: no such tensor, a damaged file, or a storage type that is not supported.
        """

    @abstractmethod
    def tokenizer_json(self) -> str:
        """The tokenizer in the `tokenizers` library's JSON format (a GGUF file's is built from its vocabulary)."""
