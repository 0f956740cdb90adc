from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreword.gpu import config
from foreword.gpu.config import DeviceConfig, kv_cache_bytes_per_block
from foreword.gpu.models.config import ModelConfig
from foreword.scheduler.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device", "tpu", "device: 'tpu' is unknown; use one of cpu, cuda"),
        ("dtype", "float8", "dtype: 'float8' is unknown; use one of bfloat16, float16, float32, int8"),
        ("dtype", "float16", "dtype: the cpu device does not compute in float16; use one of bfloat16, float32, int8"),
        ("num_blocks", 0, "num_blocks: must be at least 1, got 0"),
        ("num_threads", -1, "num_threads: must be at least 1, got -1"),
        ("max_model_len", 0, "max_model_len: must be at least 1, got 0"),
    ],
)
def test_errors_name_field_and_allowed_values(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceConfig(**({"num_blocks": 1} | {field: value}))


def test_blocks_per_sequence_round_up() -> None:
    assert DeviceConfig(num_blocks=1, block_size=16, max_model_len=33).max_blocks_per_sequence == 3
    assert DeviceConfig(num_blocks=1, block_size=16, max_model_len=32).max_blocks_per_sequence == 2


def test_block_bytes_equal_what_the_cache_takes(
    new_runner: Callable[..., Any], tiny_checkpoint: Callable[..., Any], dtype: str
) -> None:
    runner = new_runner(dtype)
    model = ModelConfig.from_checkpoint(tiny_checkpoint())
    taken = runner.cache.keys.nbytes + runner.cache.values.nbytes
    assert kv_cache_bytes_per_block(model, runner.config.block_size, dtype) * runner.config.num_blocks == taken


@pytest.mark.parametrize(
    ("quota", "num_threads"),
    [("max 100000", 8), ("50000 100000", 1), ("250000 100000", 3), ("9900000 100000", 8), ("", 8), (None, 8)],
)
def test_threads_follow_the_quota_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str | None, num_threads: int
) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(f"{quota}\n")
    monkeypatch.setattr(config, "CPU_QUOTA", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert config.available_cpus() == num_threads
