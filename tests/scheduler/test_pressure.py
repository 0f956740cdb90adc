"""What gives way to what: drafts to prompts, lower ranks to higher ones, and nobody for ever."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import DraftState, StepKind, StepPlan

New = Callable[..., Scheduler]
Make = Callable[..., object]


def num_drafts(plan: StepPlan) -> list[int]:
    """Drafts of each sequence of a plan."""
    return np.maximum(np.diff(plan.logits_offsets) - 1, 0).tolist()


def test_drafts_leave_the_budget_to_waiting_prompts(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=32, block_size=4, max_num_sequences=3, max_num_batched_tokens=10)
    scheduler.add(new_request(0, 1, 30), 0)
    step(scheduler, drafts={0: [1, 2, 3, 4]})
    scheduler.add(new_request(1, 7, 2), 0)
    plan, update = step(scheduler, drafts={0: [1, 2, 3, 4]})
    assert np.diff(plan.query_offsets).tolist() == [3, 7]
    assert num_drafts(plan) == [2, 0]
    assert update.draft_state is DraftState.ACTIVE
    scheduler.add(new_request(2, 9, 2), 0)
    plan, update = step(scheduler)
    assert num_drafts(plan)[0] == 0
    assert update.draft_state is DraftState.PREFILL_PRESSURE


def test_drafts_leave_the_budget_to_unfinished_prompts(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=32, block_size=4, max_num_sequences=2, max_num_batched_tokens=8)
    scheduler.add(new_request(0, 1, 30), 0)
    step(scheduler)
    scheduler.add(new_request(1, 18, 2), 0)
    assert step(scheduler, drafts={0: [1, 2, 3, 4, 5]})[0].num_tokens == 8
    plan, update = step(scheduler, drafts={0: [1, 2, 3, 4, 5]})  # 11 are left
    assert np.diff(plan.query_offsets).tolist() == [1, 7]
    assert update.draft_state is DraftState.PREFILL_PRESSURE
    plan, update = step(scheduler)  # 4 are left, and one for each running sequence
    assert np.diff(plan.query_offsets).tolist() == [3, 4]
    assert update.draft_state is DraftState.ACTIVE


def test_drafts_leave_the_blocks_to_unfinished_prompts(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=16, block_size=2, max_num_sequences=2, max_num_batched_tokens=20)
    scheduler.add(new_request(0, 1, 30), 0)
    step(scheduler)
    scheduler.add(new_request(1, 24, 2), 0)
    assert np.diff(step(scheduler, drafts={0: list(range(8))})[0].query_offsets).tolist() == [1, 19]
    plan, update = step(scheduler)  # 5 blocks are free: one for each sequence, 2 for the prompt, one for drafts
    assert np.diff(plan.query_offsets).tolist() == [4, 5]
    assert update.draft_state is DraftState.ACTIVE


def test_drafts_leave_the_blocks_to_waiting_prompts(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=10, block_size=2, max_num_sequences=2, max_num_batched_tokens=40)
    scheduler.add(new_request(0, 1, 15), 0)
    step(scheduler, drafts={0: list(range(8))})
    scheduler.add(new_request(1, 14, 2), 0)
    plan, update = step(scheduler)
    assert np.diff(plan.query_offsets).tolist() == [1, 14]
    assert update.draft_state is DraftState.CACHE_PRESSURE


def test_prompts_that_find_no_row_cost_no_drafts(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=32, block_size=4, max_num_sequences=1, max_num_batched_tokens=8)
    scheduler.add(new_request(0, 1, 30), 0)
    scheduler.add(new_request(1, 30, 2), 0)
    step(scheduler, drafts={0: [1, 2, 3]})
    assert num_drafts(step(scheduler)[0]) == [3]


def test_a_step_tells_that_others_may_need_the_blocks_of_drafts(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=3, block_size=2, max_num_sequences=2, max_num_batched_tokens=8)
    for key in range(2):
        scheduler.add(new_request(key, 1, 4), 0)
    step(scheduler, drafts={0: [1], 1: [1]})
    plan, update = step(scheduler)
    assert num_drafts(plan) == [0, 0]
    assert update.draft_state is DraftState.CACHE_PRESSURE


def test_a_higher_priority_is_not_held_up_by_a_running_prompt(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=64, block_size=4, max_num_sequences=3, max_num_batched_tokens=10)
    scheduler.add(new_request(0, 100, 2), 0)
    scheduler.add(new_request(1, 100, 2), 0)
    step(scheduler)
    scheduler.add(new_request(2, 12, 2, priority=1), 0)
    plan, update = step(scheduler)
    assert update.sequences["request_key"].tolist() == [2]
    assert plan.num_tokens == 10
    plan, update = step(scheduler)
    assert update.sequences["request_key"].tolist() == [2, 0]
    assert np.diff(plan.query_offsets).tolist() == [2, 8]
    assert update.sequences["step_kind"].tolist() == [StepKind.PREFILL, StepKind.PREFILL]
    scheduler.add(new_request(3, 5, 2), 0)  # of no higher rank: waits for the budget
    assert step(scheduler)[1].sequences["request_key"].tolist() == [2, 0]


def test_a_higher_priority_takes_the_blocks_of_a_running_prompt(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=10, block_size=4, max_num_sequences=3, max_num_batched_tokens=8)
    scheduler.add(new_request(0, 24, 2), 0)
    step(scheduler)
    scheduler.add(new_request(1, 20, 2, priority=1), 0)  # 5 of the 8 free blocks; the prompt needs 4 of them
    plan, update = step(scheduler)
    assert update.sequences["request_key"].tolist() == [1]
    assert plan.num_preempted == 1


def test_a_request_that_pauses_whenever_it_would_fit_is_admitted(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=8, block_size=4, max_num_sequences=8, max_num_batched_tokens=40)
    scheduler.add(new_request(1, 3, 3), 0)
    step(scheduler)
    scheduler.add(new_request(0, 29, 2), 0)
    admitted: list[int] = []
    for key in range(2, 40):
        if scheduler.load().num_running == 0:
            scheduler.pause(0)
        scheduler.add(new_request(key, 1, 3), 0)
        plan, update = step(scheduler)
        admitted += [request.request_key for _, request in plan.admitted]
        if 0 in admitted:
            break
        scheduler.resume(0)
    assert 0 in admitted
    assert len(admitted) < 12
    assert update.token_ids.tolist() == [7], "it has its first token, and pauses now"
    assert scheduler.load().num_paused == 1
    while 0 not in update.sequences["request_key"][update.sequences["finish_reason"] > 0]:
        scheduler.resume(0)
        plan, update = step(scheduler)


def test_what_is_admitted_while_a_request_is_paused_has_overtaken_it(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=8, block_size=4, max_num_sequences=8, max_num_batched_tokens=40)
    scheduler.add(new_request(0, 29, 2), 0)
    scheduler.pause(0)
    for key in range(1, 5):
        scheduler.add(new_request(key, 1, 8), 0)
    assert len(step(scheduler)[0].admitted) == 4
    scheduler.resume(0)
    scheduler.add(new_request(5, 1, 8), 0)
    assert step(scheduler)[0].admitted == (), "four have passed it while it was paused"


def test_a_request_that_flaps_is_not_overtaken_for_ever(new_scheduler: New, new_request: Make, step: Make) -> None:
    """Whenever it has a row, its client stops to read for a moment, which costs it the row before it gains a token."""
    scheduler = new_scheduler(num_blocks=8, block_size=4, max_num_sequences=8, max_num_batched_tokens=16)
    scheduler.add(new_request(0, 29, 1), 0)
    keys = iter(range(1, 100))
    num_passed = []
    for _ in range(3):
        passed: list[int] = []
        while 0 not in (admitted := [request.request_key for _, request in step(scheduler)[0].admitted]):
            passed += admitted
            scheduler.add(new_request(next(keys), 1, 3), 0)
        num_passed.append(len(passed))
        scheduler.pause(0)
        while scheduler.has_work:
            step(scheduler)
        scheduler.add(new_request(next(keys), 17, 3), 0)
        assert step(scheduler)[0].num_sequences == 1
        scheduler.resume(0)
    assert num_passed == [0, 3, 0], "one was admitted while it was paused"
