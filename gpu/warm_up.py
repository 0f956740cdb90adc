"""Steps of every kind that the CUDA device compiles, plans or records, before the first request comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from foreword.gpu.backends.cuda_graphs import SIZES
from foreword.gpu.runner import ModelRunner
from foreword.scheduler.errors import ConfigError, DeviceError
from foreword.scheduler.request import Request, SamplingParams, StoppingParams
from foreword.scheduler.step import Int32Array, StepPlan


def warm_up(runner: ModelRunner) -> None:
    """Compute the greatest step there can be, and one of each recorded size.

    What they leave in the cache belongs to no sequence. So kernels are compiled and workspaces allocated now, and what
    does not work shows before the server is ready.

    Args:
        runner: new, without a speculator: what it would learn from these steps is not true.

    Raises:
        ConfigError: the memory does not suffice for a step; the message names the settings.
        DeviceError: a kernel cannot be compiled, or the device failed.
    """
    config = runner.config
    longest = min(config.max_num_batched_tokens, config.max_model_len, config.num_blocks * config.block_size)
    prompt, stopping = np.zeros(longest, np.int32), StoppingParams(1)
    plain = Request(0, prompt, stopping)
    # A bias and scores need the other kernels of sampling, which stay outside of what is recorded.
    demanding = Request(0, prompt, stopping, SamplingParams(logit_bias=((0, 1.0),)), num_top_logprobs=1)
    try:
        for request in (demanding, plain):
            runner.execute(_step(config.block_size, [longest], ((0, request),)))
            for size in sorted({min(size, config.max_num_sequences) for size in SIZES}):
                runner.execute(_step(config.block_size, [1] * size))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"kv_cache_memory: {config.num_blocks} blocks leave too little memory on {runner.device_name} for a step "
            f"of {longest} tokens; lower kv_cache_memory or max_num_batched_tokens"
        ) from error
    except RuntimeError as error:
        raise DeviceError(f"{runner.device_name} failed in the first step: {error}") from error


def _step(block_size: int, lengths: list[int], admitted: tuple[tuple[int, Request], ...] = ()) -> StepPlan:
    """A step of sequences that begin with it, row b with `lengths[b]` tokens; all share the first blocks."""
    num_sequences, ends = len(lengths), np.cumsum([0, *lengths])
    positions = np.concatenate([np.arange(length) for length in lengths])
    entries = [(row, index, index) for row, length in enumerate(lengths) for index in range(-(-length // block_size))]
    nothing = _int32([])
    return StepPlan(
        step_id=0,
        rows=_int32(range(num_sequences)),
        generations=_int32([0] * num_sequences),
        query_offsets=_int32(ends),
        context_lens=_int32(lengths),
        token_ids=_int32([0] * len(positions)),
        positions=_int32(positions),
        slot_mapping=_int32(positions),
        logits_indices=_int32(ends[1:] - 1),
        logits_offsets=_int32(range(num_sequences + 1)),
        scored_indices=nothing,
        scored_token_ids=nothing,
        scored_offsets=_int32([0] * (num_sequences + 1)),
        block_table_updates=_int32(entries),
        admitted=admitted,
        output_offsets=_int32([0] * (len(admitted) + 1)),
        output_token_ids=nothing,
    )


def _int32(values: Any) -> Int32Array:
    return np.asarray(values, np.int32)
