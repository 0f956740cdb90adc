"""A model in a Hugging Face folder: config.json, safetensors, tokenizer.json.

Only data is read. Pickled weights and models that bring Python code of their own are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.gpu.checkpoint.checkpoint import ChatTemplate, Checkpoint
from foreword.gpu.checkpoint.safetensors_file import SafetensorsFile
from foreword.scheduler.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HuggingFaceCheckpoint(Checkpoint):
    """A folder as `save_pretrained` writes it."""

    def __init__(self, path: Path) -> None:
        """Read configuration and tensor directories.

        Raises:
            CheckpointError: a file is missing or damaged, or the model needs pickle or code of its own.
        """
        self.path = path
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: no config.json; a model is a GGUF file or a Hugging Face folder")
        config = self._json("config.json")
        self._tokenizer_config = self._optional_json("tokenizer_config.json")
        self._refuse_unsupported(config)
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise CheckpointError(f"{path / 'config.json'}: architectures must be a list with one name")
        self.architecture = architectures[0]
        self.config = config
        self.eos_token_ids = self._eos_token_ids()
        self.chat_template = self._chat_template()
        self._files = self._open_weights()

    def tensor_names(self) -> frozenset[str]:
        """Names as the files spell them."""
        return frozenset(self._files)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Read one tensor, as float32."""
        if name not in self._files:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        return self._files[name].read(name)

    def tokenizer_json(self) -> str:
        """The text of tokenizer.json."""
        if not (self.path / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{self.path}: no tokenizer.json; save the tokenizer with the transformers library to make one"
            )
        return self._text("tokenizer.json")

    def _refuse_unsupported(self, config: dict[str, Any]) -> None:
        for name, contents in (("config.json", config), ("tokenizer_config.json", self._tokenizer_config)):
            if contents.get("auto_map"):
                raise CheckpointError(f"{self.path / name}: auto_map asks for Python code of the model's own; refused")
        if config.get("quantization_config"):
            raise CheckpointError(f"{self.path / 'config.json'}: quantization_config is not supported; use a GGUF file")

    def _open_weights(self) -> dict[str, SafetensorsFile]:
        """Map each tensor's name to the file that holds it."""
        if (self.path / INDEX).is_file():
            return self._open_shards()
        if (self.path / WEIGHTS).is_file():
            file = SafetensorsFile(self.path / WEIGHTS)
            return dict.fromkeys(file.tensors, file)
        pickles = sorted(found.name for pattern in PICKLES for found in self.path.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{self.path}: weights are only there as pickle ({pickles[0]}), which can run code; "
                f"convert them to safetensors"
            )
        raise CheckpointError(f"{self.path}: neither {WEIGHTS} nor {INDEX}")

    def _open_shards(self) -> dict[str, SafetensorsFile]:
        weight_map = self._json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{self.path / INDEX}: weight_map is missing")
        shards: dict[str, SafetensorsFile] = {}
        for shard in set(map(str, weight_map.values())):
            if Path(shard).name != shard:
                raise CheckpointError(f"{self.path / INDEX}: shard {shard!r} is not a file of this folder")
            shards[shard] = SafetensorsFile(self.path / shard)
        for name, shard in weight_map.items():
            if name not in shards[str(shard)].tensors:
                raise CheckpointError(f"{self.path / str(shard)}: tensor {name!r} is missing")
        return {name: shards[str(shard)] for name, shard in weight_map.items()}

    def _eos_token_ids(self) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            value = self._optional_json(name).get("eos_token_id")
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
                raise CheckpointError(f"{self.path / name}: eos_token_id must be a token id or a list of them")
            return tuple(sorted(set(ids)))
        return ()

    def _chat_template(self) -> ChatTemplate | None:
        if (self.path / "chat_template.jinja").is_file():
            source: object = self._text("chat_template.jinja")
        else:
            source = self._optional_json("chat_template.json").get("chat_template")
            source = source or self._tokenizer_config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        return ChatTemplate(source, self._special_token("bos_token"), self._special_token("eos_token"))

    def _special_token(self, role: str) -> str:
        token = self._tokenizer_config.get(role) or self._optional_json("special_tokens_map.json").get(role)
        if isinstance(token, dict):
            token = token.get("content")
        return token if isinstance(token, str) else ""

    def _optional_json(self, name: str) -> dict[str, Any]:
        return self._json(name) if (self.path / name).is_file() else {}

    def _json(self, name: str) -> dict[str, Any]:
        try:
            contents = json.loads(self._text(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / name}: not valid JSON ({error})") from None
        if not isinstance(contents, dict):
            raise CheckpointError(f"{self.path / name}: not a JSON object")
        return contents

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_text("utf-8")
        except OSError as error:
            raise CheckpointError(f"{self.path / name}: {error.strerror or error}") from error
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path / name}: not UTF-8 text") from None
