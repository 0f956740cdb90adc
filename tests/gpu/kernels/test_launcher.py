"""What a launch refuses before it reaches a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreword.gpu.kernels.launcher import Grid, KernelLauncher
from foreword.gpu.kernels.table import KERNELS, Kernel

SCALE = Kernel(
    "scale",
    "scale.cu",
    64,
    ("x: float32[rows, width]", "gate_up: T[rows, 2*width]", "bias: T[width]?", "width: int32", "factor: float32"),
    (("float32",), ("bfloat16",)),
)


class Recorder:
    """A driver that notes what is compiled and launched."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.launches: list[tuple[Grid, int, Sequence[object], int]] = []

    def compile(self, source: Path, expression: str) -> Any:
        self.compiled.append(f"{source.name}: {expression}")
        return lambda *launch: self.launches.append(launch)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def launcher(recorder: Recorder) -> KernelLauncher:
    return KernelLauncher(recorder, torch.device("cpu"))


def arguments(**changes: Any) -> list[Any]:
    values = {
        "x": torch.zeros(3, 5),
        "gate_up": torch.zeros(3, 10, dtype=torch.bfloat16),
        "bias": torch.zeros(5, dtype=torch.bfloat16),
        "width": 5,
        "factor": 0.5,
    }
    return list((values | changes).values())


def test_a_launch_passes_addresses_and_exact_scalars(launcher: KernelLauncher, recorder: Recorder) -> None:
    given = arguments()
    launcher.launch(SCALE, ("bfloat16",), (3,), *given, shared_bytes=128)
    ((grid, threads, values, shared_bytes),) = recorder.launches
    assert (grid, threads, shared_bytes) == ((3,), 64, 128)
    assert values[:3] == [tensor.data_ptr() for tensor in given[:3]]
    assert [type(value) for value in values[3:]] == [np.int32, np.float32]


def test_a_kernel_is_compiled_once_when_it_is_first_launched(launcher: KernelLauncher, recorder: Recorder) -> None:
    assert recorder.compiled == []
    for _ in range(3):
        launcher.launch(SCALE, ("bfloat16",), (1,), *arguments())
    assert recorder.compiled == ["scale.cu: scale<__nv_bfloat16>"]


def test_an_empty_grid_is_no_launch(launcher: KernelLauncher, recorder: Recorder) -> None:
    launcher.launch(
        SCALE,
        ("bfloat16",),
        (0, 4),
        *arguments(x=torch.zeros(0, 5), gate_up=torch.zeros(0, 10, dtype=torch.bfloat16)),
    )
    assert recorder.launches == []


def test_an_optional_array_may_be_missing(launcher: KernelLauncher, recorder: Recorder) -> None:
    launcher.launch(SCALE, ("bfloat16",), (1,), *arguments(bias=None))
    assert recorder.launches[0][2][2] == 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(3, 5).double()}, TypeError, "scale: x must be a tensor of float32, got torch.float64"),
        ({"gate_up": torch.zeros(3, 10)}, TypeError, "gate_up must be a tensor of bfloat16"),
        ({"x": None}, TypeError, "x must be a tensor of float32, got NoneType"),
        ({"x": torch.zeros(3)}, ValueError, "x must have 2 dimensions, got 1"),
        ({"x": torch.zeros(5, 3).T}, ValueError, "x must be contiguous"),
        ({"gate_up": torch.zeros(3, 8, dtype=torch.bfloat16)}, ValueError, "gate_up: width is 8, must be 10"),
        ({"gate_up": torch.zeros(3, 11, dtype=torch.bfloat16)}, ValueError, "gate_up: width is 11, must be 10"),
        ({"gate_up": torch.zeros(4, 10, dtype=torch.bfloat16)}, ValueError, "gate_up: rows is 4, must be 3"),
        ({"width": 6}, ValueError, "width is 6, must be 5"),
        ({"width": 5.0}, TypeError, "width must be int, got float"),
        ({"factor": 1}, TypeError, "factor must be float, got int"),
        ({"x": torch.zeros(3, 5, device="meta")}, ValueError, "x must be on cpu, is on meta"),
        ({"more": 1}, TypeError, "scale: takes 5 arguments, got 6"),
    ],
)
def test_what_contradicts_the_signature_is_named(
    launcher: KernelLauncher, recorder: Recorder, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        launcher.launch(SCALE, ("bfloat16",), (1,), *arguments(**changes))
    assert recorder.launches == []


def test_an_integer_must_fit_its_parameter(launcher: KernelLauncher) -> None:
    kernel = Kernel("fill", "fill.cu", 32, ("count: int32",), ())
    with pytest.raises(ValueError, match="fill: count must fit int32, is 2147483648"):
        launcher.launch(kernel, (), (1,), 1 << 31)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_of_the_table_can_be_read(kernel: Kernel) -> None:
    assert kernel.source.exists()
    assert kernel.threads % 32 == 0
    assert len({parameter.name for parameter in kernel.parameters}) == len(kernel.signature)
    for template in kernel.instantiations:
        assert kernel.expression(template).startswith(f"{kernel.name}<" if template else kernel.name)


def test_a_signature_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="'x float32' is not a parameter"):
        _ = Kernel("k", "k.cu", 32, ("x float32",), ()).parameters
