"""Writes a GGUF file as a Hugging Face folder in bfloat16, for systems that cannot compute with the file's own format.

Usage: `converted_model.py GGUF FOLDER`, in the environment of Transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers


def convert(gguf: Path, folder: Path) -> None:
    """Read a GGUF file and write the folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
