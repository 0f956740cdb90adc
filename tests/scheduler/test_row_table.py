"""Blocks and rows as the device sees them: its own block table, kept from the updates alone, must be right."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.scheduler import Scheduler


@pytest.mark.parametrize("num_blocks", [7, 12, 100])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_slots_follow_from_block_table_updates(
    new_request: Callable, result_of: Callable, num_blocks: int, block_size: int
) -> None:
    config = SchedulerConfig(
        num_blocks=num_blocks, block_size=block_size, max_num_sequences=4, max_num_batched_tokens=7, max_model_len=64
    )
    scheduler = Scheduler(config)
    block_tables = np.full((config.max_num_sequences, config.max_blocks_per_sequence), -1)
    cache = np.full((num_blocks * block_size, 2), -1)  # (token, position) last written to each slot
    for key in range(24):  # three of each prompt, at once or one after the other: they find each other's blocks
        request = new_request(key // 3, min(3 + key // 3, num_blocks * block_size - 4), 5)
        scheduler.add(replace(request, request_key=key), 0)
    tokens: dict[int, list[int]] = {}
    keys: dict[int, int] = {}
    num_cached = 0
    while scheduler.has_work:
        plan = scheduler.schedule(1)
        for row, index, block in plan.block_table_updates:
            block_tables[row, index] = block
        for row, request in plan.admitted:
            keys[row] = request.request_key
            tokens.setdefault(request.request_key, request.prompt_token_ids.tolist())
        sequence_of = np.repeat(np.arange(plan.num_sequences), np.diff(plan.query_offsets))
        rows = plan.rows[sequence_of]
        expected = block_tables[rows, plan.positions // block_size] * block_size + plan.positions % block_size
        np.testing.assert_array_equal(plan.slot_mapping, expected)
        assert len(set(plan.slot_mapping.tolist())) == plan.num_tokens
        cache[plan.slot_mapping] = np.stack([plan.token_ids, plan.positions], axis=1)
        for row, context_len in zip(plan.rows, plan.context_lens, strict=True):
            positions = np.arange(context_len)
            slots = block_tables[row, positions // block_size] * block_size + positions % block_size
            # All of its context is there, whoever has computed it, and nobody has written over it.
            np.testing.assert_array_equal(cache[slots, 1], positions)
            assert cache[slots, 0].tolist() == tokens[keys[row]][:context_len]
        update = scheduler.apply(result_of(plan))
        for record in update.sequences:
            tokens[record["request_key"]] += [7] * record["num_tokens"]
            num_cached += record["num_cached"] * (record["finish_reason"] > 0)
        scheduler.check_invariants()
    assert scheduler.load().num_free_blocks == num_blocks
    assert num_cached > 0 or block_size == 16
