"""The kernels that work on rows, of every element type in three orders of threads, with poisoned memory."""

from __future__ import annotations

import pytest
import row_case

from foreword.gpu.kernels.table import FOLDER, TYPES


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_values(dtype: str, order: int) -> None:
    row_case.check(FOLDER, order, dtype)
