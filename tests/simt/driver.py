"""The checker as the launch layer's driver: grids, arguments and shared memory of every launch are tried for real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foreword.gpu.kernels.launcher import Function, Grid
from simt.module import Kernel, RawModule


class CheckerDriver:
    """Runs kernels on tensors of the CPU."""

    def __init__(self, seed: int = 0) -> None:
        """Run threads and blocks in an order of this seed; 0 is index order."""
        self._seed = seed

    def compile(self, source: Path, expression: str) -> Function:
        """See `foreword.gpu.kernels.launcher.Driver`."""
        module = RawModule(path=source, options=(f"-I{source.parent}",), name_expressions=[expression])
        return _Function(module.get_function(expression), self._seed)


class _Function:
    def __init__(self, kernel: Kernel, seed: int) -> None:
        self._kernel = kernel
        self._seed = seed

    def __call__(self, grid: Grid, threads: int, arguments: Sequence[object], shared_bytes: int) -> None:
        self._kernel.max_dynamic_shared_size_bytes = max(shared_bytes, self._kernel.max_dynamic_shared_size_bytes)
        self._kernel(grid, (threads,), arguments, shared_mem=shared_bytes, seed=self._seed)
