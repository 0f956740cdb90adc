from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreword.gpu import device
from foreword.gpu.device import cuda_cache_memory, find_device, open_cuda_backend
from foreword.gpu.models.config import ModelConfig
from foreword.gpu.models.llama import tensor_shapes
from foreword.scheduler.errors import ConfigError, DeviceError


@pytest.fixture
def cuda_machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine whose CUDA device can be used."""
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old Card")
    return monkeypatch


def test_the_best_device_is_found(cuda_machine: pytest.MonkeyPatch) -> None:
    assert [find_device(wanted) for wanted in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        (device, "find_spec", lambda name: None, r"CuPy is not installed; install foreword\[cuda12\] or .*\[cuda13\]"),
        (torch.version, "cuda", None, "the installed PyTorch is built without CUDA"),
        (torch.cuda, "is_available", lambda: False, "there is no NVIDIA driver, or no device that it knows"),
        (torch.cuda, "get_device_capability", lambda: (7, 5), "compute capability 8.0 is needed, Old Card has 7.5"),
    ],
)
def test_an_absent_cuda_device_is_refused_in_one_line_and_passed_over_by_auto(
    cuda_machine: pytest.MonkeyPatch, place: Any, name: str, value: Any, message: str
) -> None:
    cuda_machine.setattr(place, name, value)
    with pytest.raises(ConfigError, match=f"device: 'cuda' cannot be used here: {message}") as error:
        find_device("cuda")
    assert "\n" not in error.value.message
    assert find_device("auto") == "cpu"


def driver_too_old(*arguments: Any) -> None:
    raise RuntimeError("The NVIDIA driver on your system is too old.\nUpdate it.")


def test_a_driver_that_does_not_start_is_named(cuda_machine: pytest.MonkeyPatch) -> None:
    cuda_machine.setattr(torch.cuda, "get_device_capability", driver_too_old)
    with pytest.raises(ConfigError, match=r"the device does not start: The NVIDIA driver .* too old\.$"):
        find_device("cuda")
    assert find_device("auto") == "cpu"
    cuda_machine.setattr(torch.cuda, "mem_get_info", driver_too_old)
    with pytest.raises(DeviceError, match=r"the CUDA device does not start: The NVIDIA driver .* too old\.$"):
        cuda_cache_memory(None, "bfloat16")  # type: ignore[arg-type]


def test_a_cupy_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "foreword.gpu.kernels.cupy_driver", raising=False)
    with pytest.raises(ConfigError, match=r"device: 'cuda' cannot be used here: CuPy cannot be imported: .*cupy"):
        open_cuda_backend("bfloat16")


def test_a_device_that_does_not_open_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foreword.gpu.kernels.cupy_driver", SimpleNamespace(CupyDriver=driver_too_old))
    with pytest.raises(DeviceError, match=r"the CUDA device does not start: The NVIDIA driver .* too old\.$"):
        open_cuda_backend("bfloat16")


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="device: 'tpu' is unknown; use one of auto, cpu, cuda"):
        find_device("tpu")


@pytest.mark.parametrize("tied", [True, False])
def test_the_cache_gets_most_of_what_the_weights_leave(
    tiny_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    model = ModelConfig.from_checkpoint(tiny_checkpoint(tie_word_embeddings=tied))
    matrices = [shape for shape in tensor_shapes(model).values() if len(shape) == 2]
    weights = 2 * sum(rows * columns for rows, columns in matrices)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (weights + 1000, 1 << 40))
    assert cuda_cache_memory(model, "bfloat16") == 900
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (weights - 1, 1 << 40))
    assert cuda_cache_memory(model, "bfloat16") == 0
