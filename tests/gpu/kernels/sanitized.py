"""Kernels under sanitizers, and planted defects; run by `make test-kernels-full`, too slow for `make test`.

As a program, `sanitized.py FOLDER SEED CASE` checks the kernels of a folder by a case of `CASES`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import acceptance_case
import attention_case
import block_case
import ngram_case
import pytest
import rejection_case
import row_case
import simt
from defects import ACCEPTANCE, ADDRESS, ATTENTION, BLOCK, NGRAM, PLAIN, REJECTION, ROW, SHUFFLED, THREAD, Defect

from foreword.gpu.kernels.table import FOLDER

LIBRARIES = {ADDRESS: ("libasan.so", "libubsan.so"), THREAD: ("libtsan.so",)}
MODES = (PLAIN, SHUFFLED, ADDRESS, THREAD)
CASES = {
    "attention": attention_case.check,
    "row": row_case.check,
    "acceptance": acceptance_case.check,
    "rejection": rejection_case.check,
    "block": block_case.check,
    "ngram": ngram_case.check,
}


def run(folder: Path, mode: str, case: str) -> subprocess.CompletedProcess[str]:
    """Check the kernels of a folder in a process of their own."""
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
    return subprocess.run(
        [sys.executable, __file__, str(folder), seed, case],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the folder of kernels."""
    for path in [*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")]:
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_sound_kernels_pass(mode: str, case: str) -> None:
    process = run(FOLDER, mode, case)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(
    ("case", "defect", "mode"),
    [
        pytest.param(case, defect, mode, id=f"{defect.file}: {defect.name}-{mode}")
        for case, defects in (
            ("attention", ATTENTION),
            ("row", ROW),
            ("acceptance", ACCEPTANCE),
            ("rejection", REJECTION),
            ("block", BLOCK),
            ("ngram", NGRAM),
        )
        for defect in defects
        for mode in defect.noticed_by
    ],
)
def test_defects_are_noticed(case: str, defect: Defect, mode: str, copy: Path) -> None:
    defect.plant(copy)
    process = run(copy, mode, case)
    assert process.returncode != 0
    marks = ("AssertionError", "LaunchError", "Sanitizer", "runtime error")
    assert any(mark in process.stderr + process.stdout for mark in marks), process.stderr


if __name__ == "__main__":
    CASES[sys.argv[3]](Path(sys.argv[1]), int(sys.argv[2]))
