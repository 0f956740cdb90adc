"""Kernels under sanitizers, and planted defects; run by `make test-kernels-full`, too slow for `make test`.

As a program, `sanitized.py FAMILY FOLDER SEED` checks a family of kernels in a folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import acceptance_case
import attention_case
import pytest
import simt
from defects import ACCEPTANCE, ADDRESS, ATTENTION, PLAIN, SHUFFLED, THREAD, Defect

from foreword.gpu.kernels.table import FOLDER

LIBRARIES = {ADDRESS: ("libasan.so", "libubsan.so"), THREAD: ("libtsan.so",)}
CHECKS = {"attention": attention_case.check, "acceptance": acceptance_case.check}
DEFECTS = {"attention": ATTENTION, "acceptance": ACCEPTANCE}
MODES = (PLAIN, SHUFFLED, ADDRESS, THREAD)


def run(family: str, folder: Path, mode: str) -> subprocess.CompletedProcess[str]:
    """Check a family of kernels in a folder in a process of its own."""
    libraries = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in LIBRARIES.get(mode, ())
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(simt.__file__).parents[1]}",
        "SIMT_SANITIZE": mode if mode in LIBRARIES else "",
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "exitcode=66",
    }
    seed = "7" if mode == SHUFFLED else "0"
    command = [sys.executable, __file__, family, str(folder), seed]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the folder of kernels."""
    for path in [*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")]:
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", CHECKS)
def test_sound_kernels_pass(family: str, mode: str) -> None:
    process = run(family, FOLDER, mode)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(
    ("family", "defect", "mode"),
    [
        pytest.param(family, defect, mode, id=f"{defect.file}: {defect.name}-{mode}")
        for family, defects in DEFECTS.items()
        for defect in defects
        for mode in defect.noticed_by
    ],
)
def test_defects_are_noticed(family: str, defect: Defect, mode: str, copy: Path) -> None:
    defect.plant(copy)
    process = run(family, copy, mode)
    assert process.returncode != 0
    marks = ("AssertionError", "LaunchError", "Sanitizer", "runtime error")
    assert any(mark in process.stderr + process.stdout for mark in marks), process.stderr


if __name__ == "__main__":
    CHECKS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
