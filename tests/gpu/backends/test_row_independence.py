from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from foreword.gpu.backends.cpu_backend import CpuBackend
from foreword.gpu.backends.row_independence import rows_are_independent

LAYERS = [(960, 576), (3072, 576), (576, 1536), (50, 25)]


def test_a_product_that_depends_on_the_number_of_rows_is_found() -> None:
    def reversed_in_small_batches(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x.flip(1), weight.flip(1)) if len(x) < 7 else F.linear(x, weight)

    assert not rows_are_independent(reversed_in_small_batches, 96, 576, 64, torch.float32)


def test_a_product_that_depends_on_the_place_in_the_batch_is_found() -> None:
    def last_rows_reversed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.vstack([F.linear(x[:8], weight), F.linear(x[8:].flip(1), weight.flip(1))])

    assert not rows_are_independent(last_rows_reversed, 96, 576, 64, torch.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_equal_the_plain_product_and_are_row_independent(dtype: str) -> None:
    backend = CpuBackend(dtype, 2)
    x, weight = torch.randn(37, 64).to(backend._dtype), backend.linear_weight(torch.randn(48, 64).numpy())
    plain = backend.linear(x, weight)
    backend.use_tiles()
    torch.testing.assert_close(backend.linear(x, weight), plain)
    assert backend.linear(x[:0], weight).shape == (0, 48)
    assert backend.is_row_independent(LAYERS, 128)


def test_a_processor_without_bfloat16_instructions_gets_exact_products() -> None:
    """oneDNN can be told to do without newer instructions, as on an older processor."""
    code = (
        "from foreword.gpu.backends.cpu_backend import CpuBackend\n"
        f"backend = CpuBackend('bfloat16', 2); layers = {LAYERS}\n"
        "if not backend.is_row_independent(layers, 128):\n"
        "    backend.use_tiles()\n"
        "assert backend.is_row_independent(layers, 128)\n"
        "assert CpuBackend('float32', 2).is_row_independent(layers, 128)\n"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
