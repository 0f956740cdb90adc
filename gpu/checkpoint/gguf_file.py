"""The GGUF container: a header of typed metadata, a directory of tensors, then their data.

The format is specified in ggml's `docs/gguf.md`; versions 2 and 3, little-endian, are read. Every length and offset is
checked against the file's size before it is used, so a damaged file is an error and never a crash.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from foreword.scheduler.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
JOINED_ROWS = 64
MAX_DIMENSIONS = 4

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

Scalar = bool | int | float | str
Value = Scalar | list[str] | npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor directory.

    Attributes:
        shape: row-major, slowest axis first (the file stores the reverse).
        storage: name of the ggml type, "Q4_1".
        offset: of the first byte, from the start of the file.
        num_bytes: size of the stored data.
    """

    shape: tuple[int, ...]
    storage: str
    offset: int
    num_bytes: int


class GgufFile:
    """Metadata and tensor directory of one GGUF file; tensor data is read when asked for.

    Attributes:
        path: the file.
        metadata: key -> scalar, list of strings, or NumPy array.
        tensors: name -> directory entry.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            CheckpointError: not a GGUF file, damaged, or truncated.
        """
        self.path = path
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._read_header(_Cursor(file, path))
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read and dequantise the tensor `name`, float32 in its `shape`.

        Raises:
            CheckpointError: the storage type is not supported, or the file can no longer be read.
        """
        tensor = self.tensors[name]
        if tensor.storage not in SUPPORTED_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {tensor.storage}; supported are {', '.join(SUPPORTED_TYPES)}"
            )
        try:
            data = np.fromfile(self.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror or error}") from error
        if data.size != tensor.num_bytes:
            raise CheckpointError(f"{self.path}: the file became shorter while tensor {name} was read")
        storage = GGMLQuantizationType[tensor.storage]
        num_rows = math.prod(tensor.shape[:-1])
        # The library takes 16 rows at a time, whose overhead shows when rows are short; it does not mind joined ones.
        rows = data.reshape(num_rows // math.gcd(num_rows, JOINED_ROWS), -1)
        with np.errstate(all="ignore"):  # garbage scales overflow; what they mean for a model shows in its output
            values = dequantize(rows, storage)
        return np.ascontiguousarray(values, np.float32).reshape(tensor.shape)

    def _read_header(self, cursor: _Cursor) -> None:
        if cursor.take(4) != MAGIC:
            raise cursor.error("not a GGUF file (no GGUF magic at its start)")
        version = cursor.integer("<I")
        if version & 0xFFFF == 0:
            raise cursor.error("a big-endian GGUF file; only little-endian ones are supported")
        if version not in VERSIONS:
            raise cursor.error(f"GGUF version {version}; supported are {', '.join(map(str, VERSIONS))}")
        num_tensors = cursor.count(min_item_bytes=24)
        num_pairs = cursor.count(min_item_bytes=13)
        for _ in range(num_pairs):
            key = cursor.string()
            if key in self.metadata:
                raise cursor.error(f"metadata key {key!r} appears twice")
            self.metadata[key] = cursor.value(key)
        directory = [self._read_entry(cursor) for _ in range(num_tensors)]
        self._place(directory, cursor)

    @staticmethod
    def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        num_dimensions = cursor.integer("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise cursor.error(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        shape = tuple(cursor.integer("<Q") for _ in range(num_dimensions))[::-1]
        return name, shape, cursor.integer("<I"), cursor.integer("<Q")

    def _place(self, directory: list[tuple[str, tuple[int, ...], int, int]], cursor: _Cursor) -> None:
        """Turn offsets relative to the data section into checked positions in the file."""
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise cursor.error(f"general.alignment is {alignment}; it must be a power of two")
        data_start = -(-cursor.position // alignment) * alignment
        for name, shape, type_number, offset in directory:
            if name in self.tensors:
                raise cursor.error(f"tensor {name!r} appears twice")
            try:
                storage = GGMLQuantizationType(type_number)
            except ValueError:
                raise cursor.error(f"tensor {name!r} has the unknown type {type_number}") from None
            block_size, block_bytes = GGML_QUANT_SIZES[storage]
            if 0 in shape or shape[-1] % block_size:
                raise cursor.error(f"tensor {name!r} of shape {list(shape)} cannot be stored as {storage.name}")
            num_bytes = math.prod(shape) // block_size * block_bytes
            start = data_start + offset
            if offset % alignment or start + num_bytes > cursor.size:
                raise cursor.error(
                    f"tensor {name!r} lies at bytes {start} to {start + num_bytes} of a file of {cursor.size} bytes "
                    f"(truncated or damaged)"
                )
            self.tensors[name] = GgufTensor(shape, storage.name, start, num_bytes)


class _Cursor:
    """Reads little-endian values in order and never past the end of the file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.size = path.stat().st_size
        self.position = 0

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {reason}")

    def take(self, num_bytes: int) -> bytes:
        data = self.file.read(num_bytes) if num_bytes <= self.size - self.position else b""
        if len(data) != num_bytes:
            raise self.error(f"the header ends at byte {self.size} (truncated or damaged)")
        self.position += num_bytes
        return data

    def integer(self, layout: str) -> int:
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def count(self, min_item_bytes: int) -> int:
        """Read a number of items, each of which takes at least `min_item_bytes` of what is left of the file."""
        count = self.integer("<Q")
        if count * min_item_bytes > self.size - self.position:
            raise self.error(f"the header announces {count} items, more than the file can hold (truncated or damaged)")
        return count

    def string(self) -> str:
        data = self.take(self.count(min_item_bytes=1))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.error(f"a string that ends at byte {self.position} is not UTF-8 (damaged)") from None

    def value(self, key: str) -> Value:
        kind = self.integer("<I")
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(key)
        scalar: bool | int | float = self.numbers(key, kind, 1)[0].item()
        return scalar

    def array(self, key: str) -> list[str] | npt.NDArray[np.generic]:
        kind = self.integer("<I")
        if kind == STRING:
            return [self.string() for _ in range(self.count(min_item_bytes=8))]
        return self.numbers(key, kind, self.count(min_item_bytes=1))

    def numbers(self, key: str, kind: int, count: int) -> npt.NDArray[np.generic]:
        if kind not in SCALARS:
            raise self.error(f"metadata {key!r} has the unsupported type {kind}")
        data = self.take(count * np.dtype(SCALARS[kind]).itemsize)
        return np.frombuffer(data, np.uint8).astype(np.bool_) if kind == BOOL else np.frombuffer(data, SCALARS[kind])
