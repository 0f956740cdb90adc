"""A result that does not answer the plan is refused before anything changes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import Drafts, StepResult


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture
def opened(new_request: Callable, result_of: Callable) -> tuple[Scheduler, StepResult]:
    """A plan of a decoding sequence with a draft and of two complete prompts; and its right result."""
    config = SchedulerConfig(num_blocks=16, block_size=4, max_num_sequences=3, max_num_batched_tokens=9)
    scheduler = Scheduler(config)
    scheduler.add(new_request(0, 3, 10), 0)
    scheduler.apply(result_of(scheduler.schedule(1), drafts={0: [5]}))
    scheduler.add(new_request(1, 2, 10), 0)
    scheduler.add(new_request(2, 3, 10), 0)
    plan = scheduler.schedule(1)
    assert plan.logits_offsets.tolist() == [0, 2, 3, 4]
    return scheduler, result_of(plan, tokens={0: [5, 6]}, drafts={0: [8, 9], 1: [4]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_id": 1}, "result.step_id must be 2, got 1"),
        ({"token_offsets": i32(0, 2, 3)}, "result.token_offsets must have 4 entries, got 3"),
        ({"token_offsets": i32(0, 2, 3, 4, 4)}, "result.token_offsets must have 4 entries, got 5"),
        ({"token_offsets": np.array([0, 2, 3, 4])}, "result.token_offsets must be .* int32"),
        ({"token_offsets": [0, 2, 3, 4]}, "result.token_offsets must be an array of int32, got list"),
        ({"token_offsets": i32(1, 2, 3, 4)}, "must go from 0 to 4"),
        ({"token_offsets": i32(0, 2, 3, 5)}, "must go from 0 to 4"),
        ({"token_offsets": i32(0, 3, 4, 4)}, "sequence 0 of the plan may have 1 to 2 tokens, got 3"),
        ({"token_offsets": i32(0, 0, 3, 4)}, "sequence 0 of the plan may have 1 to 2 tokens, got 0"),
        ({"token_offsets": i32(0, 2, 2, 4)}, "sequence 1 of the plan may have 1 to 1 tokens, got 0"),
        ({"token_offsets": i32(0, 2, 1, 4)}, "sequence 1 of the plan may have 1 to 1 tokens, got -1"),
        ({"token_offsets": i32(0, 1, 2, 4)}, "sequence 2 of the plan may have 1 to 1 tokens, got 2"),
        ({"token_ids": i32(5, -1, 7, 7)}, r"result.token_ids\[1\] must not be negative, got -1"),
        ({"token_ids": i32(5, 6, 7, 7).astype(">i4")}, "result.token_ids must be a contiguous"),
        ({"token_ids": i32(5, 6)}, "result.logprobs must have 2 entries, got 4"),
        ({"token_ids": i32(5, 0, 6, 0, 7, 0, 7, 0)[::2]}, "result.token_ids must be a contiguous"),
        ({"logprobs": np.zeros(4)}, "result.logprobs must be .* float32"),
        ({"failed": np.zeros(2, np.bool_)}, "result.failed must have 3 entries, got 2"),
        ({"failed": np.array([True, False, False])}, "sequence 0 of the plan may have no token, got 2"),
        ({"failed": np.zeros(3, np.int8)}, "result.failed must be .* bool"),
        ({"drafts": Drafts(i32(0, 2, 3), i32(8, 9, 4))}, "result.drafts.offsets must have 4 entries, got 3"),
        ({"drafts": Drafts(np.array([0, 2, 3, 3]), i32(8, 9, 4))}, "result.drafts.offsets must be .* int32"),
        ({"drafts": Drafts(i32(1, 2, 3, 3), i32(8, 9, 4))}, "result.drafts.offsets must go from 0 to 3"),
        ({"drafts": Drafts(i32(0, 2, 3, 4), i32(8, 9, 4))}, "result.drafts.offsets must go from 0 to 3"),
        ({"drafts": Drafts(i32(0, 4, 3, 3), i32(8, 9, 4))}, "result.drafts.offsets must not fall, .* sequence 1"),
        ({"drafts": Drafts(i32(0, 2, 3, 3), i32(8, -1, 4))}, r"result.drafts.token_ids\[1\] must not be negative"),
        ({"drafts": Drafts(i32(0, 2, 3, 3), np.zeros(3))}, "result.drafts.token_ids must be .* int32"),
    ],
)
def test_a_wrong_result_changes_nothing(opened: tuple[Scheduler, StepResult], change: dict, message: str) -> None:
    scheduler, result = opened
    with pytest.raises(ValueError, match=message):
        scheduler.apply(replace(result, **change))
    scheduler.check_invariants()
    update = scheduler.apply(result)
    assert update.token_ids.tolist() == [5, 6, 7, 7]
    assert update.logprobs.tolist() == [-5.0, -6.0, -7.0, -7.0]
    plan = scheduler.schedule(1)
    assert np.diff(plan.logits_offsets).tolist() == [3, 2, 1]
    assert plan.token_ids.tolist() == [6, 8, 9, 7, 4, 7]


def test_a_chunk_of_a_prompt_has_neither_tokens_nor_drafts(new_request: Callable, result_of: Callable) -> None:
    config = SchedulerConfig(num_blocks=16, block_size=4, max_num_sequences=2, max_num_batched_tokens=6)
    scheduler = Scheduler(config)
    scheduler.add(new_request(0, 9, 10), 0)
    result = result_of(scheduler.schedule(1))
    with pytest.raises(ValueError, match="sequence 0 of the plan may have no token, got 1"):
        scheduler.apply(replace(result, token_offsets=i32(0, 1), token_ids=i32(5), logprobs=np.zeros(1, np.float32)))
    with pytest.raises(ValueError, match=r"result\.drafts: sequence 0 of the plan has no token"):
        scheduler.apply(replace(result, drafts=Drafts(i32(0, 1), i32(5))))
    assert len(scheduler.apply(result).token_ids) == 0


def test_a_plan_with_sequences_needs_a_result(opened: tuple[Scheduler, StepResult]) -> None:
    scheduler, _ = opened
    with pytest.raises(ValueError, match="plan 2 has 3 sequences and needs a result"):
        scheduler.apply(None)
    with pytest.raises(ValueError, match="must be a StepResult or None, got dict"):
        scheduler.apply({})


def test_an_empty_result_answers_an_empty_plan(result_of: Callable) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=1))
    assert len(scheduler.apply(result_of(scheduler.schedule(0))).sequences) == 0
