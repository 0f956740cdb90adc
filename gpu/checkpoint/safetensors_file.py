"""The safetensors container: a length, a JSON directory, then tensor data.

Read here instead of with the `safetensors` package because that one hands out bfloat16 only through PyTorch.
Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header size, header, buffer).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreword.scheduler.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SUPPORTED_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """One entry of the directory.

    Attributes:
        shape: row-major.
        storage: safetensors' name of the type, "BF16".
        offset: of the first byte, from the start of the file.
        num_bytes: size of the stored data.
    """

    shape: tuple[int, ...]
    storage: str
    offset: int
    num_bytes: int


class SafetensorsFile:
    """The directory of one file; tensor data is read when asked for.

    Attributes:
        path: the file.
        tensors: name -> directory entry.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the directory.

        Raises:
            CheckpointError: not a safetensors file, damaged, or truncated.
        """
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
                    raise self._error("not a safetensors file (truncated or damaged)")
                header = json.loads(file.read(header_bytes))
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        except (ValueError, RecursionError):
            raise self._error("its header is not valid JSON (damaged)") from None
        if not isinstance(header, dict):
            raise self._error("its header is not a JSON object (damaged)")
        data_start = 8 + header_bytes
        self.tensors = {
            name: self._entry(name, entry, data_start, size - data_start)
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read the tensor `name` as float32 in its `shape`.

        Raises:
            CheckpointError: the storage type is not supported, or the file can no longer be read.
        """
        tensor = self.tensors[name]
        if tensor.storage not in SUPPORTED_TYPES:
            raise self._error(
                f"tensor {name!r} is stored as {tensor.storage}; supported are {', '.join(SUPPORTED_TYPES)}"
            )
        dtype = np.dtype(SUPPORTED_TYPES[tensor.storage])
        try:
            data = np.fromfile(self.path, dtype, tensor.num_bytes // dtype.itemsize, offset=tensor.offset)
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        if data.nbytes != tensor.num_bytes:
            raise self._error(f"the file became shorter while tensor {name!r} was read")
        if tensor.storage == "BF16":  # the upper half of a float32
            return (data.astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
        with np.errstate(over="ignore"):
            return data.astype(np.float32, copy=False).reshape(tensor.shape)

    def _entry(self, name: str, entry: object, data_start: int, data_bytes: int) -> SafetensorsTensor:
        match entry:
            case {"dtype": str(storage), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
                isinstance(extent, int) and extent >= 0 for extent in shape
            ):
                pass
            case _:
                raise self._error(f"tensor {name!r} has a malformed directory entry (damaged)")
        if not 0 <= begin <= end <= data_bytes:
            raise self._error(
                f"tensor {name!r} lies at bytes {begin} to {end} of {data_bytes} bytes of data (truncated or damaged)"
            )
        dtype = SUPPORTED_TYPES.get(storage)
        if dtype and math.prod(shape) * np.dtype(dtype).itemsize != end - begin:
            raise self._error(
                f"tensor {name!r} of shape {shape} as {storage} does not take {end - begin} bytes (damaged)"
            )
        return SafetensorsTensor(tuple(shape), storage, data_start + begin, end - begin)

    def _error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {reason}")
