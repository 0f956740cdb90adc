"""The list of planted defects keeps up with the kernels; that each is noticed is for `make test-kernels-full`."""

from __future__ import annotations

import shutil
from pathlib import Path

import defects
import pytest

from foreword.gpu.kernels.table import FOLDER

ALL = [defect for value in vars(defects).values() if isinstance(value, tuple) for defect in value]
PLANTED = [defect for defect in ALL if isinstance(defect, defects.Defect)]


@pytest.mark.parametrize("defect", PLANTED, ids=lambda defect: f"{defect.file}: {defect.name}")
def test_a_defect_changes_its_kernel(defect: defects.Defect, tmp_path: Path) -> None:
    shutil.copy(FOLDER / defect.file, tmp_path)
    defect.plant(tmp_path)
    assert (tmp_path / defect.file).read_text() != (FOLDER / defect.file).read_text()
    assert defect.noticed_by
