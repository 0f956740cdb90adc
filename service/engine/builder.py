"""Builds the engine of a configuration: checkpoint, device, scheduler."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.gpu.config import DeviceConfig, available_cpus, kv_cache_bytes_per_block
from foreword.gpu.device import cuda_cache_memory, find_device
from foreword.gpu.models.config import ModelConfig
from foreword.gpu.models.registry import read_config
from foreword.gpu.runner import best_dtype, load_runner
from foreword.gpu.speculative.calibration import calibrate
from foreword.gpu.speculative.draft_model import DraftModel
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import ConfigError
from foreword.scheduler.scheduler import Scheduler
from foreword.service.engine.config import EngineConfig
from foreword.service.engine.engine import Engine
from foreword.service.engine.messages import EngineInfo
from foreword.service.text.tokenizer import Tokenizer

_DEFAULT_MAX_MODEL_LEN = 8192
_DEFAULT_TOKENS_PER_SEQUENCE = 1024
_DEFAULT_MEMORY_SHARE = 4
_CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def build_engine(config: EngineConfig, progress: Callable[[str, int, int], None]) -> Engine:
    """Load the model and make the engine ready to step.

    Args:
        config: what to build.
        progress: called with ("weights", tensors loaded, tensors in all).

    Raises:
        CheckpointError: the model cannot be read or is not supported.
        ConfigError: a setting cannot be used, with this model or at all.
        DeviceError: the device failed.
    """
    start_ns = time.monotonic_ns()
    checkpoint = open_checkpoint(Path(config.model_path))
    model = read_config(checkpoint)
    num_threads = config.num_threads or available_cpus()
    config = dataclasses.replace(config, device=find_device(config.device))
    if config.dtype == "auto" and config.device == "cuda":
        config = dataclasses.replace(config, dtype="bfloat16")
    elif config.dtype == "auto":
        config = dataclasses.replace(config, dtype=best_dtype(model, num_threads, config.max_num_batched_tokens))
    max_model_len = config.max_model_len or min(model.max_position_embeddings, _DEFAULT_MAX_MODEL_LEN)
    device_config = DeviceConfig(
        num_blocks=1,
        device=config.device,
        dtype=config.dtype,
        num_threads=num_threads,
        block_size=config.block_size,
        max_num_sequences=config.max_num_sequences,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        speculation=config.speculation,
        max_draft_tokens=config.max_draft_tokens,
    )
    draft_model = _open_draft_model(config)
    num_blocks = count_blocks(
        config, model, max_model_len, read_config(draft_model.checkpoint) if draft_model else None
    )
    scheduler = Scheduler(_scheduler_config(config, num_blocks, max_model_len))
    runner = load_runner(
        dataclasses.replace(device_config, num_blocks=num_blocks),
        checkpoint,
        lambda done, total: progress("weights", done, total),
        Tokenizer(checkpoint.tokenizer_json(), model.vocab_size).grammar_vocabulary(),
        draft_model,
    )
    calibrate(runner)
    info = EngineInfo(
        device=runner.device,
        device_name=runner.device_name,
        dtype=runner.dtype,
        architecture=runner.architecture,
        vocab_size=runner.vocab_size,
        num_parameters=runner.num_parameters,
        max_model_len=max_model_len,
        max_num_sequences=config.max_num_sequences,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        drafter="" if runner.speculator is None else runner.speculator.drafter_name,
        drafters=("",) if runner.speculator is None else runner.speculator.drafter_names,
        max_draft_tokens=0 if runner.speculator is None else config.max_draft_tokens,
        load_duration_s=(time.monotonic_ns() - start_ns) / 1e9,
    )
    return Engine(scheduler, runner, info)


def _open_draft_model(config: EngineConfig) -> DraftModel | None:
    wants_one = config.speculation == "draft-model"
    if wants_one != bool(config.draft_model_path):
        raise ConfigError("draft_model: is needed with speculation 'draft-model', and of no use without")
    if not wants_one:
        return None
    checkpoint = open_checkpoint(Path(config.draft_model_path))
    vocab_size = read_config(checkpoint).vocab_size
    return DraftModel(checkpoint, Tokenizer(checkpoint.tokenizer_json(), vocab_size).grammar_vocabulary())


def count_blocks(
    config: EngineConfig, model: ModelConfig, max_model_len: int, draft_model: ModelConfig | None = None
) -> int:
    """Blocks of the KV cache that `config` asks for or, by its defaults, that the machine can give.

    Raises:
        ConfigError: not even one block fits.
    """
    is_cuda = config.device == "cuda"
    limit = config.kv_cache_bytes
    if not limit:
        limit = cuda_cache_memory(model, config.dtype) if is_cuda else machine_memory() // _DEFAULT_MEMORY_SHARE
    models = [model] if draft_model is None else [model, draft_model]
    affordable = limit // sum(kv_cache_bytes_per_block(each, config.block_size, config.dtype) for each in models)
    if affordable < 1:
        raise ConfigError(f"kv_cache_memory: {limit} bytes do not hold one block of {config.block_size} tokens")
    if config.kv_cache_bytes or is_cuda:
        return affordable
    tokens = max(config.max_num_sequences * _DEFAULT_TOKENS_PER_SEQUENCE, max_model_len)
    return min(affordable, -(-tokens // config.block_size))


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's if that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _CGROUP_MEMORY_LIMIT.exists() and (limit := _CGROUP_MEMORY_LIMIT.read_text().strip()) != "max":
        return min(memory, int(limit))
    return memory


def _scheduler_config(config: EngineConfig, num_blocks: int, max_model_len: int) -> SchedulerConfig:
    try:
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_sequences=config.max_num_sequences,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_num_waiting=config.max_num_waiting,
            max_num_waiting_tokens=config.max_num_waiting_tokens,
            tenant_weights=config.tenant_weights,
            lookahead=int(config.device == "cuda"),
            hash_key=secrets.token_bytes(16),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
