"""The CuPy driver against a stand-in for CuPy: neither CuPy, 300 MB with what it needs, nor a GPU is at hand here.

The stand-in has the shape of CuPy 14.2: names, exceptions, types of arguments, a stream of another library and the
compiler's options were tried on the package itself, which goes without a GPU up to the first call of the driver.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreword.scheduler.errors import DeviceError

STREAM = object()


class CompileException(Exception):
    pass


class FakeCupy(SimpleNamespace):
    """Notes modules that are compiled and launches; raises what `failure` and `launch_failure` hold."""

    def __init__(self) -> None:
        compiler = SimpleNamespace(CompileException=CompileException)
        stream = SimpleNamespace(from_external=lambda stream: ("cupy", stream))
        nvrtc = SimpleNamespace(getVersion=self.nvrtc_version)
        super().__init__(cuda=SimpleNamespace(compiler=compiler, nvrtc=nvrtc, Stream=stream), RawKernel=object)
        self.nvrtc_failure: Exception | None = None
        self.modules: list[dict[str, Any]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.launch_failure: Exception | None = None

    def nvrtc_version(self) -> tuple[int, int]:
        if self.nvrtc_failure is not None:
            raise self.nvrtc_failure
        return 13, 0

    def RawModule(self, **arguments: Any) -> Any:  # noqa: N802
        self.modules.append(arguments)
        return SimpleNamespace(get_function=self.get_function)

    def get_function(self, name: str) -> Any:
        if self.failure is not None:
            raise self.failure
        self.kernel = SimpleNamespace(kernel=self.launch)
        return self.kernel

    def launch(self, *arguments: Any) -> None:
        if self.launch_failure is not None:
            raise self.launch_failure
        self.launches.append(arguments)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.delitem(sys.modules, "foreword.gpu.kernels.cupy_driver", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: STREAM)
    yield fake
    sys.modules.pop("foreword.gpu.kernels.cupy_driver")


@pytest.fixture
def compile_scale(cupy: FakeCupy, tmp_path: Path) -> Callable[[], Any]:
    from foreword.gpu.kernels.cupy_driver import CupyDriver

    (tmp_path / "scale.cu").write_text("template <typename T> __global__ void scale(T* x) {}")
    (tmp_path / "shared.cuh").write_text("#pragma once")
    return lambda: CupyDriver().compile(tmp_path / "scale.cu", "scale<float>")


def test_a_kernel_is_compiled_with_its_folder_and_launched_on_the_stream_of_torch(
    cupy: FakeCupy, compile_scale: Callable[[], Any], tmp_path: Path
) -> None:
    compile_scale()((7, 2), 64, [1, 2], 100)
    (module,) = cupy.modules
    assert module["options"] == ("-std=c++17", f"-I{tmp_path}")
    assert module["name_expressions"] == ["scale<float>"]
    assert cupy.launches == [((7, 2), (64,), (1, 2), 100, ("cupy", STREAM))]
    assert not hasattr(cupy.kernel, "max_dynamic_shared_size_bytes")


def test_shared_memory_beyond_48_kib_is_asked_for(cupy: FakeCupy, compile_scale: Callable[[], Any]) -> None:
    function = compile_scale()
    function((1,), 32, [], 48 * 1024 + 1)
    assert cupy.kernel.max_dynamic_shared_size_bytes == 48 * 1024 + 1


def test_a_changed_header_is_another_source(cupy: FakeCupy, compile_scale: Callable[[], Any], tmp_path: Path) -> None:
    """CuPy's cache of compiled code looks at the source alone, not at what it includes."""
    from foreword.gpu.kernels import cupy_driver

    compile_scale()
    (tmp_path / "shared.cuh").write_text("#pragma once\n#define MORE")
    cupy_driver._headers_digest.cache_clear()
    compile_scale()
    first, second = (module["code"] for module in cupy.modules)
    assert first != second


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            CompileException("In file\nscale.cu(1): error: name 'x' is unknown\n1 error"),
            r"scale<float> cannot be compiled: scale.cu\(1\): error: name 'x' is unknown$",
        ),
        (RuntimeError("cudaErrorInsufficientDriver"), "scale<float> cannot be loaded: cudaErrorInsufficientDriver"),
    ],
)
def test_what_cannot_be_compiled_or_loaded_is_an_error_of_the_device(
    cupy: FakeCupy, compile_scale: Callable[[], Any], failure: Exception, message: str
) -> None:
    cupy.failure = failure
    with pytest.raises(DeviceError, match=message):
        compile_scale()


def test_a_machine_without_the_compiler_says_so_at_the_start(cupy: FakeCupy) -> None:
    from foreword.gpu.kernels.cupy_driver import CupyDriver

    cupy.nvrtc_failure = RuntimeError('Failure finding "libnvrtc.so.13"')
    with pytest.raises(DeviceError, match=r'NVRTC, which compiles kernels, cannot be loaded: .* "libnvrtc\.so\.13"'):
        CupyDriver()


def test_a_failed_launch_is_an_error_of_the_device(cupy: FakeCupy, compile_scale: Callable[[], Any]) -> None:
    function = compile_scale()
    cupy.launch_failure = RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceError, match="scale<float> cannot be launched: CUDA_ERROR_ILLEGAL_ADDRESS"):
        function((1,), 32, [], 0)
