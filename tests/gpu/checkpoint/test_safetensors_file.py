from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from foreword.gpu.checkpoint.safetensors_file import SafetensorsFile
from foreword.scheduler.errors import CheckpointError


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_reads_what_the_safetensors_package_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype),
        "scalar": torch.tensor(3.5).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
        "limits": torch.tensor([float("inf"), float("-inf"), 0.0, -0.0]).to(dtype),
    }
    save_file(tensors, tmp_path / "t.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "t.safetensors")
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        read = file.read(name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, tensor.float().numpy())


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    save_file({"t": torch.zeros(4, dtype=torch.int8)}, tmp_path / "t.safetensors")
    with pytest.raises(CheckpointError, match="tensor 't' is stored as I8; supported are F64, F32, F16, BF16"):
        SafetensorsFile(tmp_path / "t.safetensors").read("t")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"\x02\x00", "not a safetensors file"),
        (struct.pack("<Q", 1 << 62) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"{]", "not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not valid JSON"),
        (struct.pack("<Q", 50000) + b"[" * 50000, "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as raised:
        SafetensorsFile(path)
    assert str(path) in raised.value.message
    assert reason in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 17]}, "truncated or damaged"),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 4]}, "truncated or damaged"),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [-4, 12]}, "truncated or damaged"),
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 16]}, "does not take 16 bytes"),
        ({"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 16]}, "does not take 16 bytes"),
        ({"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}, "malformed"),
        ({"dtype": "F32", "shape": "22", "data_offsets": [0, 16]}, "malformed"),
        ({"dtype": "F32", "data_offsets": [0, 16]}, "malformed"),
        (7, "malformed"),
    ],
)
def test_directory_entries_are_checked(tmp_path: Path, entry: object, reason: str) -> None:
    path = write(tmp_path / "bad.safetensors", {"t": entry}, bytes(16))
    with pytest.raises(CheckpointError, match=reason):
        SafetensorsFile(path)


def test_no_damage_escapes(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, path, {"format": "pt"})
    original = path.read_bytes()
    header = 8 + struct.unpack("<Q", original[:8])[0]
    rng = random.Random(2)
    refused = 0
    for position in range(header):
        for _ in range(3):
            damaged = bytearray(original)
            damaged[position] ^= rng.randrange(1, 256)
            path.write_bytes(damaged)
            try:
                file = SafetensorsFile(path)
                for name in file.tensors:
                    file.read(name)
            except CheckpointError:
                refused += 1
    assert refused > header
    for size in range(len(original)):
        path.write_bytes(original[:size])
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)
