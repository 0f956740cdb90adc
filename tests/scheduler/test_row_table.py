"""Blocks and rows as the device sees them: its own block table, kept from the updates alone, must be right."""

from collections.abc import Callable

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
    for key in range(8):
        scheduler.add(new_request(key, min(3 + key, num_blocks * block_size - 4), 5), 0)
    known: dict[int, list[int]] = {}
    while scheduler.has_work:
        plan = scheduler.schedule(1)
        for row, index, block in plan.block_table_updates:
            block_tables[row, index] = block
        known |= {row: request.prompt_token_ids.tolist() for row, request in plan.admitted if row not in known}
        sequence_of = np.repeat(np.arange(plan.num_sequences), np.diff(plan.query_offsets))
        rows = plan.rows[sequence_of]
        expected = block_tables[rows, plan.positions // block_size] * block_size + plan.positions % block_size
        np.testing.assert_array_equal(plan.slot_mapping, expected)
        assert len(set(plan.slot_mapping.tolist())) == plan.num_tokens
        cache[plan.slot_mapping] = np.stack([plan.token_ids, plan.positions], axis=1)
        for row, context_len in zip(plan.rows, plan.context_lens, strict=True):
            positions = np.arange(context_len)
            slots = block_tables[row, positions // block_size] * block_size + positions % block_size
            np.testing.assert_array_equal(cache[slots, 1], positions)  # nobody has written over its context
        scheduler.apply(result_of(plan))
        scheduler.check_invariants()
    assert scheduler.load().num_free_blocks == num_blocks
