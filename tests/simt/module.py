"""`RawModule` and its kernels, with CuPy's interface, on the CPU."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simt import compiler

_KERNEL = re.compile(r"__global__\s+(?:void\s+)?(?:__launch_bounds__\([^)]*\)\s*)?(?:void\s+)?(\w+)\s*\(")
_DTYPE_KINDS = {"f": "f", "i": "iub", "p": "iu", "s": "V"}
_MAX_ARGUMENTS = 64
_STATIC_SHARED_LIMIT = 48 * 1024


class LaunchError(RuntimeError):
    """The checker stopped a launch: deadlock, divergent barrier, bad warp mask, ..."""


class RawModule:
    """A CUDA C++ file, compiled for the CPU when the first kernel is launched.

    Args:
        code: text of the file; or
        path: the file.
        options: of the compiler; only `-I` and `-D` count.
        name_expressions: kernels and instantiations to make callable; the plain kernels when omitted.
        filename: of `code`, for messages.
        sanitizers: "address", "undefined", "thread", comma-separated; the process must have been started with their
            libraries preloaded. Default: the environment's SIMT_SANITIZE.
    """

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] | None = None,
        filename: str = "kernel.cu",
        sanitizers: str | None = None,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("a module needs code or path")
        self._code = code if path is None else Path(path).read_text()
        self._filename = filename if path is None else Path(path).name
        self._names = list(name_expressions or _KERNEL.findall(self._code))
        self._options = [option for option in options if option.startswith(("-I", "-D"))]
        wanted = os.environ.get("SIMT_SANITIZE", "") if sanitizers is None else sanitizers
        self._sanitizers = [name for name in wanted.split(",") if name]
        self._library: ctypes.CDLL | None = None

    @property
    def library(self) -> ctypes.CDLL:
        """The shared object, built at first use."""
        if self._library is None:
            path = compiler.build(self._code, self._filename, self._names, self._options, self._sanitizers)
            library = ctypes.CDLL(str(path))
            library.simt_launch.restype = ctypes.c_char_p
            library.simt_add_shared.restype = None
            anchor = ctypes.addressof(ctypes.c_char.in_dll(library, "simt_anchor"))
            for line in path.with_suffix(".shared").read_text().splitlines():
                offset, size = map(int, line.split())
                library.simt_add_shared(ctypes.c_void_p(anchor + offset), ctypes.c_size_t(size))
            self._library = library
        return self._library

    def get_function(self, name: str) -> Kernel:
        """Return the kernel of a name expression.

        Raises:
            ValueError: the module was not made with it.
        """
        return Kernel(self, name, self._names.index(name))


class Kernel:
    """One kernel; call it as `kernel(grid, block, args, shared_mem=0)`.

    Arguments are NumPy arrays or addresses for pointers, NumPy scalars of the exact type for the rest; CuPy checks
    neither and would read the wrong bytes.

    Attributes:
        name: its name expression.
        max_dynamic_shared_size_bytes: limit of `shared_mem`; as on a GPU, more than 48 KB must be asked for.
    """

    def __init__(self, module: RawModule, name: str, index: int) -> None:
        self.name = name
        self.max_dynamic_shared_size_bytes = _STATIC_SHARED_LIMIT
        self._module = module
        self._index = index
        self._signature: list[tuple[int, str]] | None = None

    def signature(self) -> list[tuple[int, str]]:
        """Size in bytes and kind ('p' pointer, 'f' float, 'i' integer, 's' struct) of each parameter."""
        if self._signature is None:
            sizes = (ctypes.c_int * _MAX_ARGUMENTS)()
            kinds = ctypes.create_string_buffer(_MAX_ARGUMENTS)
            count = getattr(self._module.library, f"simt_signature_{self._index}")(sizes, kinds)
            self._signature = list(zip(sizes[:count], kinds.raw[:count].decode(), strict=True))
        return self._signature

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        seed: int | None = None,
    ) -> None:
        """Run the kernel to its end.

        Args:
            grid: blocks, up to three axes.
            block: threads, up to three axes.
            args: its arguments.
            shared_mem: bytes of dynamic shared memory.
            seed: order of threads and blocks; 0 is index order. Default: the environment's SIMT_SEED, or 0.

        Raises:
            TypeError: arguments that do not match the kernel's parameters.
            LaunchError: the launch is impossible, or the kernel cannot go on.
        """
        signature = self.signature()
        if len(signature) != len(args):
            raise TypeError(f"{self.name} takes {len(signature)} arguments, got {len(args)}")
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise LaunchError(f"{shared_mem} bytes of shared memory; set max_dynamic_shared_size_bytes first")
        cells = [self._cell(i, arg, *signature[i]) for i, arg in enumerate(args)]
        pointers = (ctypes.c_void_p * max(1, len(cells)))(*(ctypes.addressof(cell) for cell in cells))
        dims = [(ctypes.c_uint * 3)(*(*map(int, d), 1, 1)[:3]) for d in (grid, block)]
        library = self._module.library
        function = ctypes.cast(getattr(library, f"simt_call_{self._index}"), ctypes.c_void_p)
        order = int(os.environ.get("SIMT_SEED", "0")) if seed is None else seed
        error = library.simt_launch(function, pointers, *dims, ctypes.c_size_t(int(shared_mem)), ctypes.c_uint(order))
        if error is not None:
            raise LaunchError(error.decode())

    def _cell(self, index: int, arg: Any, size: int, kind: str) -> ctypes.Array[ctypes.c_char]:
        """An argument's bytes."""
        where = f"{self.name} argument {index}"
        if isinstance(arg, np.ndarray) and arg.ndim:
            if kind != "p":
                raise TypeError(f"{where}: array given for a {size}-byte scalar")
            if not arg.flags.c_contiguous:
                raise TypeError(f"{where}: array is not contiguous")
            arg = np.uint64(arg.ctypes.data)
        value = np.asarray(arg)
        raw = value.tobytes()
        if len(raw) != size or value.dtype.kind not in _DTYPE_KINDS[kind]:
            raise TypeError(f"{where}: {value.dtype} given, the kernel takes a {size}-byte '{kind}'")
        return ctypes.create_string_buffer(raw, len(raw))
