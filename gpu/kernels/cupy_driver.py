"""CuPy as the driver: compiles with NVRTC and launches on PyTorch's current stream.

The only module that imports CuPy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import torch

from foreword.gpu.kernels.launcher import Function, Grid
from foreword.scheduler.errors import DeviceError

_STATIC_SHARED_BYTES = 48 * 1024
"""More dynamic shared memory than this must be asked for."""


class CupyDriver:
    """Kernels of one NVIDIA device; compiled code is kept in CuPy's cache (`CUPY_CACHE_DIR`) between runs."""

    def __init__(self) -> None:
        """Find the compiler.

        Raises:
            DeviceError: NVRTC is not there.
        """
        self._pool: Any = None
        try:
            cupy.cuda.nvrtc.getVersion()
        except RuntimeError as error:
            raise DeviceError(f"NVRTC, which compiles kernels, cannot be loaded: {error}") from error

    def compile(self, source: Path, expression: str) -> Function:
        """See `Driver`."""
        options = ("-std=c++17", f"-I{source.parent}")
        # CuPy's cache does not look into included files: their digest makes a changed header another source.
        code = f"{source.read_text()}\n// {_headers_digest(source.parent)}\n"
        try:
            module = cupy.RawModule(code=code, options=options, name_expressions=[expression])
            return _CupyFunction(module.get_function(expression), expression)
        except cupy.cuda.compiler.CompileException as error:
            lines = str(error).splitlines()
            first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
            raise DeviceError(f"kernel {expression} cannot be compiled: {first}") from error
        except RuntimeError as error:  # of CUDA's driver, its run-time library, or NVRTC
            raise DeviceError(f"kernel {expression} cannot be loaded: {error}") from error

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See `Driver`; recordings share memory, so the next one run overwrites the result of the last."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class _CupyFunction:
    def __init__(self, kernel: cupy.RawKernel, expression: str) -> None:
        self._kernel = kernel
        self._function = kernel.kernel
        self._expression = expression
        self._granted_bytes = _STATIC_SHARED_BYTES

    def __call__(self, grid: Grid, threads: int, arguments: Sequence[object], shared_bytes: int) -> None:
        try:
            if shared_bytes > self._granted_bytes:
                self._kernel.max_dynamic_shared_size_bytes = shared_bytes
                self._granted_bytes = shared_bytes
            stream = _cupy_stream(torch.cuda.current_stream())
            self._function(grid, (threads,), tuple(arguments), shared_bytes, stream)
        except RuntimeError as error:
            raise DeviceError(f"kernel {self._expression} cannot be launched: {error}") from error


@cache
def _headers_digest(folder: Path) -> str:
    texts = [path.read_bytes() for path in sorted(folder.glob("*.cuh"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()


@cache
def _cupy_stream(stream: torch.cuda.Stream) -> cupy.cuda.Stream:
    return cupy.cuda.Stream.from_external(stream)
