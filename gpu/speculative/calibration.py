"""What steps of a device cost, measured before it serves, so that the first requests already get the right drafts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from foreword.scheduler.step import StepPlan

if TYPE_CHECKING:
    from foreword.gpu.runner import ModelRunner

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of the steps that are measured; between and beyond them the cost is estimated."""
REPEATS = 2
BUDGET_NS = 400_000_000
"""No step is begun after this time."""


def calibrate(runner: ModelRunner, budget_ns: int = BUDGET_NS) -> None:
    """Tell the controller of a runner what verifications of several sizes cost, small ones first.

    Each is run twice and the faster one counts. Nothing but blocks and a row that no request holds is written to.

    Args:
        runner: has run no plan yet.
        budget_ns: ends the measurement early.
    """
    if runner.speculator is None or runner.speculator.cost is None:
        return
    config = runner.config
    limit = min(config.max_num_batched_tokens, config.max_model_len, config.num_blocks * config.block_size)
    end_ns = time.perf_counter_ns() + budget_ns
    for num_tokens in (size for size in SIZES if size <= limit):
        plan = verification(num_tokens, config.block_size)
        durations: list[int] = []
        while len(durations) < REPEATS and time.perf_counter_ns() < end_ns:
            durations.append(runner.duration_of(plan))
        if len(durations) == REPEATS:
            runner.speculator.cost.observe(num_tokens, min(durations))


def verification(num_tokens: int, block_size: int) -> StepPlan:
    """One sequence without a request that checks `num_tokens - 1` drafts at the beginning of its context."""
    index = np.arange(num_tokens, dtype=np.int32)
    both = np.array([0, num_tokens], np.int32)
    blocks = np.arange(-(-num_tokens // block_size), dtype=np.int32)
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        step_id=0,
        rows=np.zeros(1, np.int32),
        generations=np.zeros(1, np.int32),
        query_offsets=both,
        context_lens=both[1:],
        token_ids=np.zeros(num_tokens, np.int32),
        positions=index,
        slot_mapping=index,
        logits_indices=index,
        logits_offsets=both,
        scored_indices=nothing,
        scored_token_ids=nothing,
        scored_offsets=np.zeros(2, np.int32),
        block_table_updates=np.stack([np.zeros_like(blocks), blocks, blocks], axis=1),
        admitted=(),
        output_offsets=np.zeros(1, np.int32),
        output_token_ids=nothing,
    )
