"""Launches kernels of the table: compiles them when first used and checks every argument against their signature.

CUDA checks nothing: a wrong type, size or count reads other memory. What is checked here is host metadata, so nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from foreword.gpu.kernels.table import Kernel, Parameter, TemplateArgument

Argument = torch.Tensor | int | float | None
Grid = tuple[int, ...]

_DTYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Function(Protocol):
    """A compiled kernel."""

    def __call__(self, grid: Grid, threads: int, arguments: Sequence[object], shared_bytes: int) -> None:
        """Queue a launch. An argument is a NumPy scalar, or an integer of 64 bits that is an address."""


class Driver(Protocol):
    """What compiles and launches."""

    def compile(self, source: Path, expression: str) -> Function:
        """Compile one instantiation.

        Raises:
            DeviceError: the compiler refuses it, or the device is not there.
        """


class KernelLauncher:
    """Launches kernels through a driver on tensors of one device."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._functions: dict[tuple[str, tuple[TemplateArgument, ...]], Function] = {}

    def launch(
        self,
        kernel: Kernel,
        template: tuple[TemplateArgument, ...],
        grid: Grid,
        *arguments: Argument,
        threads: int | None = None,
        shared_bytes: int = 0,
    ) -> None:
        """Queue a kernel on the device's current stream; a grid without blocks is no launch.

        Args:
            kernel: of the table.
            template: arguments of the instantiation.
            grid: blocks along x, y, z.
            arguments: as the kernel's signature says.
            threads: of a block, where there is work for fewer than the kernel's own number.
            shared_bytes: dynamic shared memory of a block.

        Raises:
            TypeError: an argument has another type than the signature says, or there are too few or too many.
            ValueError: sizes that contradict each other, or an array that is not contiguous or on another device.
            DeviceError: the kernel cannot be compiled or launched.
        """
        values = self._check(kernel, template, arguments)
        if 0 in grid:
            return
        key = (kernel.name, template)
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._driver.compile(kernel.source, kernel.expression(template))
        function(grid, threads or kernel.threads, values, shared_bytes)

    def _check(
        self, kernel: Kernel, template: tuple[TemplateArgument, ...], arguments: tuple[Argument, ...]
    ) -> list[object]:
        if len(arguments) != len(kernel.parameters):
            raise TypeError(f"{kernel.name}: takes {len(kernel.parameters)} arguments, got {len(arguments)}")
        sizes = {"": 1}
        values: list[object] = []
        try:
            for parameter, argument in zip(kernel.parameters, arguments, strict=True):
                dtype = str(template[0]) if parameter.dtype == "T" else parameter.dtype
                if parameter.dimensions is None:
                    values.append(_scalar(parameter, dtype, argument, sizes))
                else:
                    values.append(self._address(parameter, dtype, argument, sizes))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{kernel.name}: {error}") from None
        return values

    def _address(self, parameter: Parameter, dtype: str, argument: Argument, sizes: dict[str, int]) -> int:
        if argument is None and parameter.is_optional:
            return 0
        if not isinstance(argument, torch.Tensor) or argument.dtype != _DTYPES[dtype]:
            given = argument.dtype if isinstance(argument, torch.Tensor) else type(argument).__name__
            raise TypeError(f"{parameter.name} must be a tensor of {dtype}, got {given}")
        if argument.device != self._device:
            raise ValueError(f"{parameter.name} must be on {self._device}, is on {argument.device}")
        if not argument.is_contiguous():
            raise ValueError(f"{parameter.name} must be contiguous")
        assert parameter.dimensions is not None
        if argument.ndim != len(parameter.dimensions):
            raise ValueError(f"{parameter.name} must have {len(parameter.dimensions)} dimensions, got {argument.ndim}")
        for size, dimension in zip(argument.shape, parameter.dimensions, strict=True):
            unit = size // dimension.factor
            if size % dimension.factor or sizes.setdefault(dimension.name, unit) != unit:
                wanted = dimension.factor * sizes.get(dimension.name, 1)
                raise ValueError(f"{parameter.name}: {dimension.name or 'a size'} is {size}, must be {wanted}")
        return argument.data_ptr()


def _scalar(parameter: Parameter, dtype: str, argument: Argument, sizes: dict[str, int]) -> object:
    if dtype == "float32":
        if not isinstance(argument, float):
            raise TypeError(f"{parameter.name} must be float, got {type(argument).__name__}")
        return np.float32(argument)
    if not isinstance(argument, int):
        raise TypeError(f"{parameter.name} must be int, got {type(argument).__name__}")
    limits = np.iinfo(dtype)
    if not limits.min <= argument <= limits.max:
        raise ValueError(f"{parameter.name} must fit {dtype}, is {argument}")
    if sizes.setdefault(parameter.name, argument) != argument:
        raise ValueError(f"{parameter.name} is {argument}, must be {sizes[parameter.name]}")
    return np.dtype(dtype).type(argument)
