"""The import rules of ARCHITECTURE.md that import-linter cannot see: compiled modules, bare names, single readers.

Everything here reads source text, so it also covers `.pyx` and `.pxd` files.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("scheduler", "gpu", "service", "clients")
BOUNDARY = {"config", "errors", "request", "step"}
IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+(?:c?import)|c?import\s+([\w., ]+))", re.MULTILINE)


def sources(*folders: str, suffixes: tuple[str, ...] = (".py", ".pyx", ".pxd", ".pyi")) -> list[Path]:
    """Our source files below the folders."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]


def imported_modules(text: str) -> set[str]:
    """Dotted names that a source text imports or cimports."""
    names: set[str] = set()
    for match in IMPORT.finditer(text):
        if match[1]:
            names.add(match[1])
        else:
            names.update(part.split(" as ")[0].strip() for part in match[2].split(","))
    return names


def importers(pattern: str, *folders: str) -> set[str]:
    """Files below the folders that import a module matching the pattern, relative to the repository root."""
    wanted = re.compile(pattern)
    return {
        str(path.relative_to(ROOT))
        for path in sources(*folders)
        if any(wanted.fullmatch(name) for name in imported_modules(path.read_text()))
    }


def test_the_import_scanner_sees_every_form() -> None:
    lines = ["import torch, os as o", "from foreword.gpu import x", "cimport numpy", "from libc.stdint cimport int32_t"]
    text = "\n".join([*lines, "    import late"])
    assert imported_modules(text) == {"torch", "os", "foreword.gpu", "numpy", "libc.stdint", "late"}


def test_no_folder_is_imported_by_its_bare_name() -> None:
    assert importers(rf"({'|'.join(FOLDERS)})(\..*)?", *FOLDERS, "tests", "benchmarks") == set()


def test_scheduler_imports_nothing_of_ours() -> None:
    assert importers(r"foreword\.(gpu|service|clients|v1)(\..*)?", "scheduler") == set()


@pytest.mark.parametrize("module", ["time", "os", "logging", "structlog", "random", "socket", "torch"])
def test_scheduler_is_deterministic_and_silent(module: str) -> None:
    assert importers(module, "scheduler") == set()


def test_gpu_knows_only_the_boundary_modules() -> None:
    used = {
        name.split(".")[2]
        for path in sources("gpu")
        for name in imported_modules(path.read_text())
        if name.startswith("foreword.scheduler.")
    }
    assert used <= BOUNDARY
    assert importers(r"foreword\.(service|clients|v1)(\..*)?", "gpu") == set()


def test_torch_stands_only_in_gpu() -> None:
    assert importers(r"torch(\..*)?", "scheduler", "service", "clients") == set()
    assert importers(r"torch(\..*)?", "gpu")


def test_reading_a_checkpoint_needs_no_torch() -> None:
    assert importers(r"torch(\..*)?", "gpu/checkpoint") == set()


def test_cupy_stands_in_one_module() -> None:
    assert len(importers(r"cupy(\..*)?", *FOLDERS)) <= 1


def test_one_module_reads_arguments_and_environment() -> None:
    # `os.environ.setdefault` is not reading: it tells a library that has no other setting.
    reads = re.compile(r"\bos\.environ\b(?!\.setdefault)|\bos\.getenv\b|\bsys\.argv\b|\btomllib\.load")
    readers = {str(path.relative_to(ROOT)) for path in sources(*FOLDERS) if reads.search(path.read_text())}
    assert readers == {"service/config.py"}


def test_one_module_of_the_service_converts_messages() -> None:
    builders = importers(r"foreword\.v1\.?.*", "service")
    allowed = {path for path in builders if path.startswith("service/frontend/") or path == "service/server.py"}
    assert builders == allowed


def test_nothing_unpickles() -> None:
    assert importers(r"(pickle|dill|cloudpickle|joblib|shelve|marshal)(\..*)?", *FOLDERS) == set()
    remote_code = re.compile(r"trust_remote_code\s*=\s*True")
    assert not [path for path in sources(*FOLDERS) if remote_code.search(path.read_text())]
