"""Rules of the scheduler, each on the real one and on the reference."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import (
    ContextLengthExceeded,
    DeadlineInfeasible,
    DuplicateRequest,
    QueueFull,
)
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import FinishReason, StepKind

New = Callable[..., Scheduler]
Make = Callable[..., object]


def ends(update: object) -> dict[int, FinishReason]:
    return {
        int(record["request_key"]): FinishReason(record["finish_reason"])
        for record in update.sequences
        if record["finish_reason"]
    }


def is_idle(scheduler: Scheduler) -> bool:
    load = scheduler.load()
    used = load.num_running, load.num_waiting, load.num_waiting_tokens, load.num_paused
    return used == (0, 0, 0, 0) and load.num_free_blocks == load.num_blocks and not scheduler.has_work


def test_an_idle_scheduler_plans_nothing(new_scheduler: New) -> None:
    scheduler = new_scheduler(num_blocks=1)
    assert not scheduler.has_work
    assert scheduler.next_deadline_ns == 0
    plan = scheduler.schedule(5)
    assert (plan.step_id, plan.num_sequences, plan.num_tokens, plan.admitted) == (1, 0, 0, ())
    assert plan.query_offsets.tolist() == plan.logits_offsets.tolist() == [0]
    update = scheduler.apply(None)
    assert (update.step_id, len(update.sequences), len(update.token_ids), len(update.logprobs)) == (1, 0, 0, 0)
    assert scheduler.schedule(5).step_id == 2


def test_a_pool_of_one_block_serves_one_request_after_the_other(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=1, block_size=4, max_num_sequences=3, max_model_len=64)
    for key in range(3):
        scheduler.add(new_request(key, 2, 3), 0)
    with pytest.raises(ContextLengthExceeded):
        scheduler.add(new_request(3, 2, 4), 0)
    finished = []
    for _ in range(9):
        plan, update = step(scheduler)
        assert plan.num_sequences == 1
        finished += ends(update)
    assert finished == [0, 1, 2]
    assert is_idle(scheduler)


@pytest.mark.parametrize("budget", [3, 5, 1000])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 19, 20, 21])  # around a block of 4 and a pool of 20
def test_prompts_around_the_borders_of_a_block_and_of_the_pool(
    new_scheduler: New, new_request: Make, step: Make, num_prompt: int, budget: int
) -> None:
    scheduler = new_scheduler(
        num_blocks=5, block_size=4, max_num_sequences=2, max_num_batched_tokens=budget, max_model_len=64
    )
    for max_output in (1, 2, 5):
        request = new_request(1, num_prompt, max_output)
        if num_prompt + max_output - 1 > 20:
            with pytest.raises(ContextLengthExceeded):
                scheduler.add(request, 0)
            continue
        scheduler.add(request, 0)
        seen, num_output = [], 0
        while scheduler.has_work:
            plan, update = step(scheduler)
            seen = seen or request.prompt_token_ids.tolist()[: update.sequences["num_cached"][0]]
            seen += plan.token_ids.tolist()
            num_output += len(update.token_ids)
            assert update.sequences["num_prompt_computed"][0] == min(len(seen), num_prompt)
        assert seen == [*request.prompt_token_ids.tolist(), *[7] * (max_output - 1)]
        assert num_output == max_output
        assert is_idle(scheduler)


def test_prompt_and_output_must_fit_the_context(new_scheduler: New, new_request: Make) -> None:
    scheduler = new_scheduler(num_blocks=100, max_model_len=10)
    for num_prompt, max_output in [(10, 1), (1, 10), (11, 1)]:
        with pytest.raises(ContextLengthExceeded):
            scheduler.add(new_request(0, num_prompt, max_output), 0)
    scheduler.add(new_request(0, 9, 1), 0)
    scheduler.add(new_request(1, 1, 9), 0)


def test_a_key_is_active_until_its_end_is_reported(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=4)
    request = new_request(5, 2)
    scheduler.add(request, 0)
    with pytest.raises(DuplicateRequest):
        scheduler.add(request, 0)
    assert scheduler.cancel(5)
    assert not scheduler.cancel(5)
    with pytest.raises(DuplicateRequest):
        scheduler.add(request, 0)
    step(scheduler)
    scheduler.add(request, 0)


def test_unknown_keys_are_not_active(new_scheduler: New) -> None:
    scheduler = new_scheduler(num_blocks=4)
    for key in (0, -1, 2**63 - 1, 2**80):
        assert not scheduler.cancel(key)
        assert not scheduler.pause(key)
        assert not scheduler.resume(key)


def test_the_queue_is_bounded_also_by_requests_that_ended_unreported(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=4, max_num_sequences=1, max_num_waiting=2)
    for key in range(2):
        scheduler.add(new_request(key, 1), 0)
    with pytest.raises(QueueFull):
        scheduler.add(new_request(9, 1), 0)
    scheduler.cancel(0)
    scheduler.add(new_request(2, 1), 0)
    scheduler.cancel(1)
    with pytest.raises(QueueFull):
        scheduler.add(new_request(9, 1), 0)
    step(scheduler)
    scheduler.add(new_request(9, 1), 0)
    assert scheduler.load().num_waiting == 1


def test_a_long_prompt_enters_an_empty_queue(new_scheduler: New, new_request: Make) -> None:
    scheduler = new_scheduler(num_blocks=100, max_num_waiting_tokens=10)
    scheduler.add(new_request(0, 50), 0)
    with pytest.raises(QueueFull):
        scheduler.add(new_request(1, 1), 0)
    scheduler.cancel(0)
    scheduler.add(new_request(2, 5), 0)
    scheduler.add(new_request(3, 5), 0)
    assert scheduler.load().num_waiting_tokens == 10


def test_deadlines_are_met_in_every_state(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=8, max_num_sequences=2)
    with pytest.raises(DeadlineInfeasible):
        scheduler.add(new_request(9, 1, deadline_ns=100), 100)
    with pytest.raises(DeadlineInfeasible):  # the clock went back, the deadline did not
        scheduler.add(new_request(9, 1, deadline_ns=99), 0)
    for key, deadline_ns in enumerate([300, 201, 200, 400]):  # running, paused, waiting, waiting and paused
        scheduler.add(new_request(key, 1, 50, deadline_ns=deadline_ns), 100)
    step(scheduler, 101)
    scheduler.pause(1)
    scheduler.pause(3)
    assert scheduler.next_deadline_ns == 200
    assert ends(step(scheduler, 199)[1]) == {}
    update = step(scheduler, 201)[1]
    assert list(ends(update)) == [2, 1]  # in the order of their deadlines
    assert scheduler.next_deadline_ns == 300
    assert not ends(step(scheduler, 150)[1])
    assert ends(step(scheduler, 1000)[1]) == dict.fromkeys([0, 3], FinishReason.DEADLINE)
    assert is_idle(scheduler)


def test_ten_thousand_cancels_in_any_order_leave_nothing_behind(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    num_requests = 10_000 if new_scheduler(num_blocks=1).__class__ is Scheduler else 300  # the reference is slow
    scheduler = new_scheduler(
        num_blocks=64, block_size=4, max_num_sequences=16, max_num_waiting=num_requests, max_num_waiting_tokens=1 << 30
    )
    random = Random(3)
    for key in range(num_requests):
        scheduler.add(new_request(key, random.randint(1, 20), priority=random.randint(-2, 2)), 0)
    keys = list(range(num_requests))
    random.shuffle(keys)
    reported = {}
    for i, key in enumerate(keys):
        if i % (num_requests // 100) == 0:
            reported |= ends(step(scheduler)[1])
        scheduler.cancel(key)
    reported |= ends(step(scheduler)[1])
    assert len(reported) == num_requests
    assert set(reported.values()) == {FinishReason.LENGTH, FinishReason.CANCELLED}
    assert is_idle(scheduler)


def test_the_result_of_a_cancelled_sequence_is_dropped(new_scheduler: New, new_request: Make, result_of: Make) -> None:
    scheduler = new_scheduler(num_blocks=8, block_size=2)
    for key in range(3):
        scheduler.add(new_request(key, 3), 0)
    plan = scheduler.schedule(1)
    result = result_of(plan, tokens={0: [10], 1: [11], 2: [12]})
    assert scheduler.cancel(1)
    assert scheduler.load().num_free_blocks == 2
    update = scheduler.apply(result)
    assert update.token_ids.tolist() == [10, 12]
    assert update.sequences["request_key"].tolist() == [0, 2, 1]
    assert update.sequences["step_kind"].tolist() == [StepKind.PREFILL, StepKind.PREFILL, StepKind.NONE]
    assert update.sequences["finish_reason"].tolist() == [0, 0, FinishReason.CANCELLED]
    assert scheduler.load().num_free_blocks == 4
    scheduler.check_invariants()


def test_a_new_holder_of_a_row_has_a_new_generation(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=4, max_num_sequences=1)
    for key in range(3):
        scheduler.add(new_request(key, 1, 1), 0)
    plans = []
    for _ in range(3):
        plan = step(scheduler)[0]
        plans.append((plan.rows.tolist(), plan.generations.tolist(), [r.request_key for _, r in plan.admitted]))
    assert plans == [([0], [1], [0]), ([0], [2], [1]), ([0], [3], [2])]


def test_counters_of_a_sequence(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=8, block_size=4, max_num_sequences=2, max_num_batched_tokens=4)
    scheduler.add(new_request(0, 9, 3), 1000)
    records = [step(scheduler, now)[1].sequences[0].copy() for now in (1010, 1020, 1030, 1040, 1050)]
    assert [r["first_scheduled_ns"] for r in records] == [1010] * 5
    assert [r["num_steps"] for r in records] == [1, 2, 3, 4, 5]
    assert [r["num_prefill_chunks"] for r in records] == [1, 2, 3, 3, 3]
    assert [r["num_prompt_computed"] for r in records] == [4, 8, 9, 9, 9]
    assert [r["num_tokens"] for r in records] == [0, 0, 1, 1, 1]
    assert [r["step_kind"] for r in records] == [StepKind.PREFILL] * 3 + [StepKind.DECODE] * 2
    assert [r["finish_reason"] for r in records] == [0, 0, 0, 0, FinishReason.LENGTH]


def test_a_higher_priority_waits_for_a_row_only(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=16, max_num_sequences=1)
    for key, priority in enumerate([0, 0, 3, 3, -100, 100]):
        scheduler.add(new_request(key, 1, 1, priority=priority), 0)
    served = [step(scheduler)[1].sequences["request_key"][0] for _ in range(6)]
    assert served == [5, 2, 3, 0, 1, 4]


def test_drafts_never_exceed_what_a_sequence_may_still_produce(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=8, block_size=4)
    scheduler.add(new_request(0, 2, 4), 0)
    step(scheduler, drafts={0: [1, 2, 3, 4, 5]})
    plan, update = step(scheduler, tokens={0: [1, 2, 3]})
    assert plan.num_tokens == 3
    assert update.sequences["num_accepted"][0] == 2
    assert ends(update) == {0: FinishReason.LENGTH}
    assert is_idle(scheduler)


def test_a_single_row_is_free_again_after_an_output_of_one_token(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=16, max_num_sequences=1)
    for key in range(3):
        scheduler.add(new_request(key, 3, 1), 0)
    assert [ends(step(scheduler)[1]) for _ in range(3)] == [{key: FinishReason.LENGTH} for key in range(3)]
    assert is_idle(scheduler)


def test_drafts_give_way_to_the_budget_and_to_other_sequences(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=4, block_size=2, max_num_sequences=3, max_num_batched_tokens=5)
    scheduler.add(new_request(0, 1, 6), 0)
    scheduler.add(new_request(1, 1, 6), 0)
    step(scheduler, drafts={0: [1, 2, 3, 4], 1: [1, 2, 3, 4]})
    # Each holds a block of two, two are free: one of them may be needed by the other.
    plan, _ = step(scheduler, drafts={0: [1, 2, 3, 4]})
    assert np.diff(plan.query_offsets).tolist() == [1, 1]
    assert scheduler.load().num_free_blocks == 2
    scheduler.cancel(1)
    plan, _ = step(scheduler)  # alone: its token takes one block, one more holds drafts besides the slot behind it
    assert np.diff(plan.query_offsets).tolist() == [4]


def test_a_pause_drops_the_drafts(new_scheduler: New, new_request: Make, result_of: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=8, block_size=4)
    scheduler.add(new_request(0, 1, 20), 0)
    step(scheduler, drafts={0: [1, 2]})
    scheduler.pause(0)
    scheduler.resume(0)
    plan = scheduler.schedule(1)
    assert plan.num_tokens == 1
    scheduler.pause(0)
    scheduler.apply(result_of(plan, drafts={0: [1, 2]}))
    scheduler.resume(0)
    assert step(scheduler, drafts={0: [1, 2]})[0].num_tokens == 1
    plan = scheduler.schedule(1)
    assert plan.num_tokens == 3
    scheduler.pause(0)  # the drafts under way are checked all the same
    assert scheduler.apply(result_of(plan, tokens={0: [1, 2, 3]})).sequences["num_accepted"].tolist() == [2]


def test_a_preemption_drops_the_drafts(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=4, block_size=2, max_num_sequences=2, max_num_batched_tokens=8)
    scheduler.add(new_request(0, 2, 5), 0)
    scheduler.add(new_request(1, 2, 5), 0)
    step(scheduler, drafts={0: [1], 1: [1]})
    records = []
    while scheduler.has_work:
        _, update = step(scheduler, drafts={0: [1]})
        records += list(update.sequences[update.sequences["request_key"] == 1].copy())
    resumed = next(record for record in records if record["num_preemptions"])
    assert (resumed["step_kind"], resumed["num_drafted"], resumed["num_tokens"]) == (StepKind.PREFILL, 0, 1)


def test_a_resumed_sequence_comes_with_its_output(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=4, block_size=2, max_num_sequences=2, max_num_batched_tokens=8)
    scheduler.add(new_request(0, 2, 5), 0)
    scheduler.add(new_request(1, 2, 5), 0)
    drawn: dict[int, list[int]] = {0: [], 1: []}
    resumed = 0
    for number in range(100, 200):
        if not scheduler.has_work:
            break
        plan, update = step(scheduler, tokens={0: [number]}, default=number)
        for a, (_, request) in enumerate(plan.admitted):
            output = plan.output_token_ids[plan.output_offsets[a] : plan.output_offsets[a + 1]]
            assert output.tolist() == drawn[request.request_key]
            resumed += len(output) > 0
        assert len(plan.output_offsets) == len(plan.admitted) + 1
        for key, token_id in zip(update.sequences["request_key"].tolist(), update.token_ids.tolist(), strict=True):
            drawn[key].append(token_id)
    assert resumed


def test_steps_alternate(new_scheduler: New, new_request: Make, result_of: Make) -> None:
    scheduler = new_scheduler(num_blocks=4)
    with pytest.raises(ValueError):  # noqa: PT011 - the reference words it differently
        scheduler.apply(None)
    scheduler.add(new_request(0, 1), 0)
    plan = scheduler.schedule(0)
    with pytest.raises(RuntimeError):
        scheduler.schedule(0)
    scheduler.apply(result_of(plan))
    with pytest.raises(ValueError):  # noqa: PT011
        scheduler.apply(result_of(plan))


def test_slots_must_be_int32() -> None:
    with pytest.raises(ValueError, match=r"num_blocks \* block_size must be at most 2147483647"):
        Scheduler(SchedulerConfig(num_blocks=1 << 27, block_size=16))


def test_plans_are_views_of_the_same_buffers(new_request: Make, step: Make) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8))
    scheduler.add(new_request(0, 3, 3), 0)
    first, first_update = step(scheduler)
    second, second_update = step(scheduler)
    assert np.shares_memory(first.token_ids, second.token_ids)
    assert np.shares_memory(first_update.sequences, second_update.sequences)
