from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.gpu.config import kv_cache_bytes_per_block
from foreword.gpu.models.config import ModelConfig
from foreword.gpu.models.registry import read_config
from foreword.scheduler.errors import CheckpointError, ConfigError
from foreword.scheduler.request import Request, SamplingParams, StoppingParams
from foreword.service.engine import builder
from foreword.service.engine.builder import build_engine, count_blocks
from foreword.service.engine.config import EngineConfig
from foreword.service.engine.engine import Engine

GIB = 1 << 30


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return read_config(open_checkpoint(default_model_path()))


def ignore(stage: str, done: int, total: int) -> None:
    pass


def test_given_memory_is_filled_with_blocks(model: ModelConfig) -> None:
    block = kv_cache_bytes_per_block(model, 16, "bfloat16")
    for size, num_blocks in ((block, 1), (2 * block - 1, 1), (100 * block, 100)):
        assert count_blocks(EngineConfig("m", dtype="bfloat16", kv_cache_bytes=size), model, 8192) == num_blocks
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        count_blocks(EngineConfig("m", dtype="bfloat16", kv_cache_bytes=block - 1), model, 8192)


def test_by_default_blocks_suffice_for_the_sequences_within_a_quarter_of_memory(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "machine_memory", lambda: 1024 * GIB)
    assert count_blocks(EngineConfig("m", dtype="bfloat16", max_num_sequences=64), model, 8192) == 64 * 1024 // 16
    assert count_blocks(EngineConfig("m", dtype="bfloat16", max_num_sequences=1), model, 8192) == 8192 // 16
    monkeypatch.setattr(builder, "machine_memory", lambda: GIB)
    quarter = GIB // 4 // kv_cache_bytes_per_block(model, 16, "bfloat16")
    assert count_blocks(EngineConfig("m", dtype="bfloat16", max_num_sequences=64), model, 8192) == quarter


def test_a_control_group_limits_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(builder, "_CGROUP_MEMORY_LIMIT", limit)
    whole = builder.machine_memory()
    assert whole > GIB // 4
    for text, memory in (("max\n", whole), ("1048576\n", 1 << 20), (str(1 << 60), whole)):
        limit.write_text(text)
        assert builder.machine_memory() == memory


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model_path": "/nowhere/at/all"}, CheckpointError, "/nowhere/at/all"),
        ({"device": "abacus"}, ConfigError, "device"),
        ({"dtype": "float8"}, ConfigError, "dtype"),
        ({"max_num_batched_tokens": 8}, ConfigError, "max_num_batched_tokens"),
        ({"block_size": 0}, ConfigError, "block_size"),
        ({"kv_cache_bytes": -1}, ConfigError, "kv_cache_memory"),
        ({"max_num_waiting": -1}, ConfigError, "max_num_waiting"),
        ({"max_num_sequences": -1}, ConfigError, "max_num_sequences"),
        ({"max_model_len": 1 << 20}, ConfigError, "max_model_len"),
        ({"speculation": "oracle"}, ConfigError, "speculation"),
        ({"max_draft_tokens": 0}, ConfigError, "max_draft_tokens"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings: dict[str, str], error: type[Exception], message: str) -> None:
    config = EngineConfig(**{"model_path": str(default_model_path()), **settings})  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        build_engine(config, ignore)


def generate(engine: Engine, requests: list[Request]) -> dict[int, list[int]]:
    token_ids: dict[int, list[int]] = {request.request_key: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while (report := engine.step()) is not None:
        begin = 0
        for update in report.sequences:
            end = begin + int(update["num_tokens"])
            token_ids[int(update["request_key"])] += report.token_ids[begin:end].tolist()
            begin = end
    return token_ids


def test_every_process_has_its_own_hash_key() -> None:
    keys = {builder._scheduler_config(EngineConfig("m"), 8, 64).hash_key for _ in range(3)}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {16}


@pytest.mark.parametrize(("device", "lookahead"), [("cpu", 0), ("cuda", 1)])
def test_plans_are_made_ahead_for_a_device_that_works_asynchronously(device: str, lookahead: int) -> None:
    assert builder._scheduler_config(EngineConfig("m", device=device), 8, 64).lookahead == lookahead


def test_the_default_model_generates_the_same_alone_and_in_company() -> None:
    progress: list[tuple[str, int, int]] = []
    config = EngineConfig(str(default_model_path()), num_threads=1, max_num_sequences=8, kv_cache_bytes=64 << 20)
    engine = build_engine(config, lambda *news: progress.append(news))
    assert progress[-1][1] == progress[-1][2] > 100
    assert engine.info.vocab_size == 49152
    assert engine.info.max_model_len == 8192
    assert (engine.info.drafter, engine.info.max_draft_tokens) == ("suffix", 6)
    off = dataclasses.replace(config, speculation="off")
    assert build_engine(off, ignore).info.drafter == ""

    def request(key: int, seed: int) -> Request:
        prompt = np.arange(1000, 1010 + seed, dtype=np.int32)
        return Request(key, prompt, StoppingParams(4), SamplingParams(temperature=0.8, seed=seed))

    together = generate(engine, [request(key, seed=key) for key in range(1, 4)])
    for key, token_ids in together.items():
        assert len(token_ids) == 4
        assert generate(engine, [request(10 + key, seed=key)]) == {10 + key: token_ids}
    assert engine.load().num_free_blocks == engine.info.num_blocks


def test_the_default_model_drafts_for_itself(model: ModelConfig) -> None:
    path = str(default_model_path())
    config = EngineConfig(path, num_threads=1, max_num_sequences=2, kv_cache_bytes=64 << 20, max_model_len=512)
    engine = build_engine(dataclasses.replace(config, speculation="draft-model", draft_model_path=path), ignore)
    assert engine.info.available_drafters == ("draft-model",)
    block = kv_cache_bytes_per_block(model, 16, engine.info.dtype)
    assert engine.info.num_blocks == (64 << 20) // (2 * block)
    prompt = np.arange(1000, 1020, dtype=np.int32)
    engine.submit(Request(1, prompt, StoppingParams(16), SamplingParams(temperature=0.8, seed=3)))
    num_drafted = num_accepted = 0
    while engine.has_work:
        report = engine.step()
        assert report is not None
        num_drafted += report.header.num_drafted
        num_accepted += report.header.num_accepted
    assert num_drafted == num_accepted > 8


@pytest.mark.parametrize(
    ("speculation", "path", "error", "message"),
    [
        ("draft-model", "", ConfigError, "draft_model: is needed"),
        ("auto", "some.gguf", ConfigError, "draft_model: .*of no use"),
        ("draft-model", "/nowhere/some.gguf", CheckpointError, "/nowhere/some.gguf: no such file"),
    ],
)
def test_a_draft_model_that_cannot_be_used_ends_the_start(
    speculation: str, path: str, error: type[Exception], message: str
) -> None:
    config = EngineConfig(str(default_model_path()), num_threads=1, speculation=speculation, draft_model_path=path)
    with pytest.raises(error, match=message):
        build_engine(config, ignore)
