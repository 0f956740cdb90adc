from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.gguf_file import SUPPORTED_TYPES, GgufFile
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.scheduler.errors import CheckpointError


def half(data: bytes) -> float:
    return float(np.frombuffer(data, np.float16)[0])


def q4_0(block: bytes) -> list[float]:
    d, q = half(block[:2]), block[2:]
    return [d * ((b & 15) - 8) for b in q] + [d * ((b >> 4) - 8) for b in q]


def q4_1(block: bytes) -> list[float]:
    d, m, q = half(block[:2]), half(block[2:4]), block[4:]
    return [d * (b & 15) + m for b in q] + [d * (b >> 4) + m for b in q]


def q8_0(block: bytes) -> list[float]:
    return [half(block[:2]) * q for q in struct.unpack("32b", block[2:])]


def k_scale(scales: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return scales[j + 4] & 15 | scales[j - 4] >> 6 << 4, scales[j + 4] >> 4 | scales[j] >> 6 << 4


def q45_k(block: bytes, high: bytes, low: bytes) -> list[float]:
    d, dmin, scales = half(block[:2]), half(block[2:4]), block[4:16]
    values = []
    for j in range(8):
        scale, minimum = k_scale(scales, j)
        for i in range(32):
            nibble = low[j // 2 * 32 + i] >> 4 * (j % 2) & 15
            values.append(d * scale * (nibble + 16 * (high[i] >> j & 1)) - dmin * minimum)
    return values


def q4_k(block: bytes) -> list[float]:
    return q45_k(block, bytes(32), block[16:])


def q5_k(block: bytes) -> list[float]:
    return q45_k(block, block[16:48], block[48:])


def q6_k(block: bytes) -> list[float]:
    ql, qh, scales, d = block[:128], block[128:192], struct.unpack("16b", block[192:208]), half(block[208:])
    values = []
    for i in range(256):
        n, r = divmod(i, 128)
        quarter, column = divmod(r, 32)
        low = ql[64 * n + r % 64] >> (4 if quarter > 1 else 0) & 15
        high = qh[32 * n + column] >> 2 * quarter & 3
        values.append(d * scales[8 * n + r // 16] * ((low | high << 4) - 32))
    return values


def bf16(block: bytes) -> list[float]:
    return [struct.unpack("<f", bytes(2) + block)[0]]


DECODERS: dict[str, Callable[[bytes], list[float]]] = {
    "F32": lambda block: [struct.unpack("<f", block)[0]],
    "F16": lambda block: [half(block)],
    "BF16": bf16,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "F16": [0]}


def random_blocks(storage: str, num_blocks: int) -> np.ndarray:
    """Random bytes, with scales that are ordinary numbers."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[storage]]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), np.uint8)
    if storage in ("F32", "BF16"):
        numbers = rng.standard_normal(num_blocks).astype("<f4").view(np.uint8).reshape(num_blocks, 4)
        blocks = numbers if storage == "F32" else np.ascontiguousarray(numbers[:, 2:])
    for at in HALVES.get(storage, []):
        blocks[:, at : at + 2] = rng.standard_normal(num_blocks).astype("<f2").view(np.uint8).reshape(num_blocks, 2)
    return blocks


def write_tensor(path: Path, storage: str, rows: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", np.zeros((3, 7), np.float32))
    writer.add_tensor("t", rows, raw_dtype=gguf.GGMLQuantizationType[storage])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_supported_type_has_a_decoder() -> None:
    assert set(DECODERS) == set(SUPPORTED_TYPES)


@pytest.mark.parametrize("storage", SUPPORTED_TYPES)
def test_dequantises_as_the_format_says(tmp_path: Path, storage: str) -> None:
    blocks = random_blocks(storage, 40)
    rows = blocks.reshape(20, -1)
    if storage in ("F32", "F16"):
        rows = rows.view(np.float32 if storage == "F32" else np.float16)
    write_tensor(tmp_path / "t.gguf", storage, rows)
    file = GgufFile(tmp_path / "t.gguf")
    expected = [DECODERS[storage](block.tobytes()) for block in blocks]
    tensor = file.read("t")
    assert tensor.dtype == np.float32
    assert tensor.shape == file.tensors["t"].shape == (20, 2 * len(expected[0]))
    np.testing.assert_allclose(tensor.ravel(), np.concatenate(expected), rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(file.read("a"), 0)


def test_reads_metadata_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("text", "héllo")
    writer.add_array("words", ["a", "", "ü"])
    writer.add_array("numbers", [1.5, 2.5])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GgufFile(tmp_path / "m.gguf").metadata
    assert metadata["u8"] == 200
    assert metadata["i8"] == -3
    assert metadata["u16"] == 60000
    assert metadata["i16"] == -30000
    assert metadata["u32"] == 4_000_000_000
    assert metadata["i32"] == -2_000_000_000
    assert metadata["u64"] == 1 << 63
    assert metadata["i64"] == -(1 << 62)
    assert metadata["f32"] == 0.5
    assert metadata["f64"] == 1e300
    assert metadata["yes"] is True
    assert metadata["text"] == "héllo"
    assert metadata["words"] == ["a", "", "ü"]
    assert metadata["numbers"].tolist() == [1.5, 2.5]
    assert metadata["flags"].tolist() == [True, False]


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    write_tensor(tmp_path / "t.gguf", "Q2_K", np.zeros((2, 84), np.uint8))
    with pytest.raises(CheckpointError, match=r"t\.gguf: tensor t is stored as Q2_K; supported are F32"):
        GgufFile(tmp_path / "t.gguf").read("t")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"GG", "truncated"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "announces"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "announces"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(64), "announces"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 62) + bytes(64), "announces"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(64), "unsupported type 9"),
        (b"GGUF" + struct.pack("<IQQQ2sIQ", 3, 0, 1, 2, b"\xff\xfe", 10, 1) + bytes(64), "not UTF-8"),
        (b"GGUF" + 2 * b"" + struct.pack("<IQQ", 3, 0, 2) + 2 * struct.pack("<Q1sIQ", 1, b"k", 10, 1), "twice"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as raised:
        GgufFile(path)
    assert str(path) in raised.value.message
    assert reason in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("shape", "storage", "offset", "reason"),
    [
        ((33,), 2, 0, r"tensor 't' of shape \[33\] cannot be stored as Q4_0"),
        ((0,), 0, 0, r"tensor 't' of shape \[0\] cannot be stored as F32"),
        ((1,), 0, 4, "lies at bytes"),
        ((1 << 62, 1 << 62), 0, 0, "lies at bytes"),
        ((1,), 0, 1 << 63, "lies at bytes"),
        ((1,), 5, 0, "unknown type 5"),
        ((1, 1, 1, 1, 1), 0, 0, "5 dimensions"),
        ((), 0, 0, "0 dimensions"),
    ],
)
def test_directory_entries_are_checked(
    tmp_path: Path, shape: tuple[int, ...], storage: int, offset: int, reason: str
) -> None:
    entry = struct.pack(f"<Q1sI{len(shape)}QIQ", 1, b"t", len(shape), *shape, storage, offset)
    (tmp_path / "t.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + bytes(200))
    with pytest.raises(CheckpointError, match=reason):
        GgufFile(tmp_path / "t.gguf")


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_real_file_truncated_in_its_header(tmp_path: Path, fraction: float) -> None:
    file = GgufFile(default_model_path())
    data_start = min(tensor.offset for tensor in file.tensors.values())
    with default_model_path().open("rb") as source:
        header = source.read(data_start)
    (tmp_path / "cut.gguf").write_bytes(header[: int(len(header) * fraction)])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(tmp_path / "cut.gguf")


@pytest.mark.parametrize("missing", [1, 32, 1 << 20, 90 << 20])
def test_real_file_truncated_in_its_data(tmp_path: Path, missing: int) -> None:
    data_start = min(tensor.offset for tensor in GgufFile(default_model_path()).tensors.values())
    with default_model_path().open("rb") as source:
        (tmp_path / "cut.gguf").write_bytes(source.read(data_start))
    os.truncate(tmp_path / "cut.gguf", default_model_path().stat().st_size - missing)
    with pytest.raises(CheckpointError, match=r"tensor '.*' lies at bytes \d+ to \d+ of a file of \d+ bytes"):
        open_checkpoint(tmp_path / "cut.gguf")


def test_file_that_shrinks_after_opening(tiny_gguf: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf)
    os.truncate(tiny_gguf, 1000)
    with pytest.raises(CheckpointError, match="became shorter"):
        checkpoint.tensor("model.norm.weight")


def use_everything(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.tensor_names():
        checkpoint.tensor(name)
    checkpoint.tokenizer_json()


def test_no_damage_to_the_header_escapes(tiny_gguf: Path) -> None:
    original = tiny_gguf.read_bytes()
    header = min(tensor.offset for tensor in GgufFile(tiny_gguf).tensors.values())
    rng = random.Random(5)
    messages = []
    for position in range(header):
        damaged = bytearray(original)
        damaged[position] ^= rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 255])
        tiny_gguf.write_bytes(damaged)
        try:
            use_everything(tiny_gguf)
        except CheckpointError as error:
            messages.append(error.message)
    assert len(messages) > 200
    assert all(message.startswith(f"{tiny_gguf}: ") for message in messages)


def test_no_truncation_escapes(tiny_gguf: Path) -> None:
    original = tiny_gguf.read_bytes()
    for size in range(0, len(original), 37):
        tiny_gguf.write_bytes(original[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            use_everything(tiny_gguf)
