"""The kernels that work on rows, in three orders of threads, with poisoned memory."""

from __future__ import annotations

import pytest
import row_case

from foreword.gpu.kernels.table import FOLDER


@pytest.mark.parametrize("order", [0, 1, 2])
def test_values(order: int) -> None:
    row_case.check(FOLDER, order)
