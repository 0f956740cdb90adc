"""Who loses a row to whom, how often, and when nobody does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import ContextLengthExceeded
from foreword.scheduler.request import Request
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import FinishReason, StepPlan

New = Callable[..., Scheduler]
Make = Callable[..., object]


def admitted(plan: StepPlan) -> list[int]:
    """Keys of the sequences that a plan gives rows to."""
    return [request.request_key for _, request in plan.admitted]


def test_a_higher_priority_takes_the_row_of_the_newest_of_the_lowest(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=64, block_size=4, max_num_sequences=3, max_num_batched_tokens=16)
    for key, priority in ((0, 0), (1, 1), (2, 0)):
        scheduler.add(new_request(key, 3, 9, priority=priority), 0)
    step(scheduler)
    scheduler.add(new_request(3, 3, 2, priority=1), 0)
    plan, update = step(scheduler)
    assert admitted(plan) == [3]
    assert plan.num_preempted == 1
    assert sorted(update.sequences["request_key"].tolist()) == [0, 1, 3]
    plan, update = step(scheduler)  # 3 is done: 2 goes on where it was
    plan, update = step(scheduler)
    assert admitted(plan) == [2]
    assert plan.output_token_ids.tolist() == [7]


def test_an_equal_priority_takes_nothing(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=64, block_size=4, max_num_sequences=1, max_num_batched_tokens=16)
    scheduler.add(new_request(0, 3, 9), 0)
    step(scheduler)
    scheduler.add(new_request(1, 3, 9), 0)
    plan, _ = step(scheduler)
    assert (admitted(plan), plan.num_preempted) == ([], 0)


def test_several_of_a_higher_priority_are_admitted_in_one_step(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=64, block_size=4, max_num_sequences=3, max_num_batched_tokens=16)
    for key in range(3):
        scheduler.add(new_request(key, 3, 9), 0)
    step(scheduler)
    for key in range(3, 6):
        scheduler.add(new_request(key, 3, 9, priority=key), 0)
    plan, _ = step(scheduler)
    assert admitted(plan) == [5, 4, 3]
    assert plan.num_preempted == 3


def test_nobody_is_preempted_for_what_would_not_fit_anyway(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=8, block_size=4, max_num_sequences=4, max_num_batched_tokens=32)
    scheduler.add(new_request(0, 16, 4, priority=1), 0)
    scheduler.add(new_request(1, 4, 4), 0)
    step(scheduler)
    scheduler.add(new_request(2, 16, 2, priority=1), 0)  # 4 blocks: with all of 1 there are 4 free, 1 of them for 0
    plan, update = step(scheduler)
    assert plan.num_preempted == 0
    assert update.sequences["request_key"].tolist() == [0, 1]


def test_whom_an_older_victim_makes_unnecessary_is_spared(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=10, block_size=4, max_num_sequences=4, max_num_batched_tokens=40)
    scheduler.add(new_request(0, 20, 4), 0)  # 5 blocks, one more in the next step
    scheduler.add(new_request(1, 3, 9), 0)
    step(scheduler)
    scheduler.add(new_request(2, 19, 2, priority=1), 0)
    plan, update = step(scheduler)
    assert (admitted(plan), plan.num_preempted) == ([2], 1)
    assert sorted(update.sequences["request_key"].tolist()) == [1, 2]


def test_blocks_that_victims_share_are_free_when_all_are_gone(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=10, block_size=4, max_num_sequences=4, max_num_batched_tokens=40)
    scheduler.add(new_request(0, 17, 4, num_outputs=2), 0)  # 4 blocks in common
    step(scheduler)
    step(scheduler)
    scheduler.add(new_request(5, 32, 2, priority=1), 0)
    plan, _ = step(scheduler)
    assert (admitted(plan), plan.num_preempted) == ([5], 2)


def test_the_tokens_of_running_sequences_come_first(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=64, block_size=4, max_num_sequences=3, max_num_batched_tokens=12)
    scheduler.add(new_request(0, 14, 9, priority=2), 0)  # 2 tokens are left for the next step
    scheduler.add(new_request(1, 2, 9, priority=3), 0)
    step(scheduler)
    scheduler.add(new_request(2, 1, 9), 0)
    step(scheduler)
    scheduler.add(new_request(3, 30, 9, priority=1), 0)
    plan, update = step(scheduler)
    assert (admitted(plan), plan.num_preempted) == ([3], 1)
    tokens = dict(zip(update.sequences["request_key"].tolist(), np.diff(plan.query_offsets).tolist(), strict=True))
    assert tokens[0] == tokens[1] == 1
    assert 1 <= tokens[3] <= 10
    plan, _ = step(scheduler)
    assert admitted(plan) == []
    assert plan.num_prefill_tokens > 0


def test_a_flood_of_higher_priority_costs_a_sequence_few_preemptions(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    """It gets a row by ageing, and what it must have gained before it gives way doubles each time."""
    scheduler = new_scheduler(
        num_blocks=64, block_size=4, max_num_sequences=1, max_num_batched_tokens=64, priority_aging_ns=4
    )
    scheduler.add(new_request(0, 3, 40), 0)
    step(scheduler, 0)
    for now_ns in range(1, 2000):
        if scheduler.load().num_waiting < 2:
            scheduler.add(new_request(now_ns, 3, 2, priority=1), now_ns)
        _, update = step(scheduler, now_ns)
        record = update.sequences[update.sequences["request_key"] == 0]
        if len(record) and record["finish_reason"][0]:
            break
    assert record["finish_reason"][0] == FinishReason.LENGTH
    assert 3 <= record["num_preemptions"][0] <= 6


def overdue_setting(new_scheduler: New, new_request: Make, step: Make) -> Scheduler:
    """One tenant holds all four rows, another one waits."""
    scheduler = new_scheduler(
        num_blocks=64, block_size=4, max_num_sequences=4, max_num_batched_tokens=64, priority_aging_ns=100
    )
    for key in range(4):
        scheduler.add(new_request(key, 3, 200, tenant="flood"), 0)
    step(scheduler, 0)
    scheduler.add(new_request(4, 3, 200, tenant="flood"), 0)
    scheduler.add(new_request(5, 3, 200, tenant="small"), 0)
    scheduler.add(new_request(6, 3, 200, tenant="small"), 0)
    return scheduler


def test_a_tenant_without_a_row_gets_one_of_the_tenant_with_most(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = overdue_setting(new_scheduler, new_request, step)
    for now_ns in (1, 50, 99):  # the flood gets tokens, so the other tenant is next from the second step on
        assert step(scheduler, now_ns)[0].num_preempted == 0
    plan, update = step(scheduler, 100)
    assert (admitted(plan), plan.num_preempted) == ([5], 1)
    assert sorted(update.sequences["request_key"].tolist()) == [0, 1, 2, 5]
    for now_ns in range(101, 150):
        assert step(scheduler, 1000 * now_ns)[0].num_preempted == 0, "it has one"


def test_the_last_row_of_a_tenant_is_not_taken(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(
        num_blocks=64, block_size=4, max_num_sequences=2, max_num_batched_tokens=64, priority_aging_ns=100
    )
    for key in range(4):
        scheduler.add(new_request(key, 3, 60, tenant=str(key)), 0)
    for now_ns in range(0, 2000, 100):
        assert step(scheduler, now_ns)[0].num_preempted == 0


@pytest.mark.parametrize(("tenants", "loser"), [("bbaaa", 4), ("aabb", 3), ("hhhaa", 4)])
def test_the_newest_row_of_the_tenant_with_most_of_the_priority_is_taken(
    new_scheduler: New, new_request: Make, step: Make, tenants: str, loser: int
) -> None:
    scheduler = new_scheduler(
        num_blocks=64, block_size=4, max_num_sequences=len(tenants), max_num_batched_tokens=64, priority_aging_ns=100
    )
    for key, tenant in enumerate(tenants):
        scheduler.add(new_request(key, 3, 20, tenant=tenant, priority=int(tenant == "h")), 0)
    step(scheduler, 0)
    scheduler.add(new_request(len(tenants), 3, 20, tenant="small"), 0)
    step(scheduler, 1)
    plan, update = step(scheduler, 100)
    assert (admitted(plan), plan.num_preempted) == ([len(tenants)], 1)
    assert set(range(len(tenants) + 1)) - set(update.sequences["request_key"].tolist()) == {loser}


def test_a_tenant_keeps_a_row_even_where_both_would_make_room(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(
        num_blocks=16, block_size=4, max_num_sequences=4, max_num_batched_tokens=64, priority_aging_ns=100
    )
    for key in range(2):
        scheduler.add(new_request(key, 20, 20, tenant="flood"), 0)
    step(scheduler, 0)
    scheduler.add(new_request(2, 38, 2, tenant="small"), 0)  # 10 blocks: one of the others' rows makes 9 free
    for now_ns in (1, 100):
        plan, _ = step(scheduler, now_ns)
        assert (admitted(plan), plan.num_preempted) == ([], 0)


def test_a_row_is_taken_only_when_no_plan_is_open(new_scheduler: New, new_request: Make, result_of: Make) -> None:
    scheduler = new_scheduler(num_blocks=64, block_size=4, max_num_sequences=1, max_num_batched_tokens=64, lookahead=1)
    scheduler.add(new_request(0, 3, 40), 0)
    first = scheduler.schedule(0)
    scheduler.add(new_request(1, 3, 2, priority=1), 0)
    second = scheduler.schedule(0)
    assert (second.num_sequences, second.num_preempted) == (1, 0)
    scheduler.apply(result_of(first))
    assert not scheduler.can_schedule, "a third plan would be made while the second one is open"
    scheduler.apply(result_of(second))
    third = scheduler.schedule(0)
    assert (admitted(third), third.num_preempted) == ([1], 1)
    scheduler.apply(result_of(third))
    scheduler.check_invariants()


def test_a_cancelled_prompt_with_a_block_for_its_output_leaves_none_to_others(
    new_scheduler: New, new_request: Make, result_of: Make
) -> None:
    scheduler = new_scheduler(num_blocks=4, block_size=4, max_num_sequences=2, max_num_batched_tokens=16, lookahead=1)
    scheduler.add(new_request(0, 4, 8), 0)
    first = scheduler.schedule(0)
    second = scheduler.schedule(0)  # takes a second block, while the prompt needs one
    scheduler.cancel(0)
    scheduler.apply(result_of(first))
    scheduler.add(new_request(1, 8, 2), 0)  # 2 blocks are free, one of them kept for who holds a row
    assert admitted(scheduler.schedule(0)) == []
    scheduler.apply(result_of(second))
    scheduler.check_invariants()


def test_a_deadline_of_a_higher_priority_does_not_wait_for_running_prompts(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=64, block_size=4, max_num_sequences=4, max_num_batched_tokens=8)
    scheduler.add(new_request(0, 100, 4), 0)
    step(scheduler, 0)
    step(scheduler, 1000)  # 8 tokens take 1000 ns
    step(scheduler, 2000)
    scheduler.add(new_request(1, 3, 4, priority=1, deadline_ns=4000), 2000)
    assert admitted(step(scheduler, 2001)[0]) == [1]


def test_a_paused_prompt_that_lost_its_row_is_promised_no_blocks(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=16, block_size=4, max_num_sequences=3, max_num_batched_tokens=40)
    scheduler.add(new_request(0, 60, 2), 0)
    step(scheduler)
    scheduler.pause(0)  # it holds 10 blocks and lacks 5
    scheduler.add(new_request(1, 28, 2), 0)
    scheduler.add(new_request(2, 16, 2), 0)
    plan, _ = step(scheduler)
    assert (admitted(plan), plan.num_preempted) == ([1, 2], 1)


class Walk:
    """Random requests under pressure, each with blocks of its own, and what they hold by arithmetic alone.

    The budget covers everything, so that who held a row and is not planned has been preempted.
    """

    def __init__(self, seed: int, new_request: Make, result_of: Make) -> None:
        self.random = random = Random(seed)
        self.config = SchedulerConfig(
            num_blocks=random.randint(12, 40),
            block_size=random.randint(1, 4),
            max_num_sequences=random.randint(2, 8),
            max_num_batched_tokens=1000,
            max_model_len=60,
        )
        self.scheduler = Scheduler(self.config)
        self.new_request, self.result_of = new_request, result_of
        self.requests: dict[int, Request] = {}
        self.rows: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.num_tokens: dict[int, int] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def add(self, key: int) -> None:
        longest = min(20, self.config.num_blocks * self.config.block_size - 20)
        request = self.new_request(
            key,
            self.random.randint(1, max(1, longest)),
            self.random.randint(1, 18),
            priority=self.random.randint(0, 3),
            bypass_prefix_cache=True,
        )
        try:
            self.scheduler.add(request, 0)
        except ContextLengthExceeded:
            return
        self.requests[key] = request
        self.num_tokens[key] = len(request.prompt_token_ids)

    def step(self) -> tuple[int, int]:
        """Check one step; returns how many lost their row for a block and for a waiting request."""
        before = dict(self.held)
        plan = self.scheduler.schedule(0)
        keys = [self.key_of(plan, b) for b in range(plan.num_sequences)]
        self.held = {
            key: self.num_blocks_for(length) for key, length in zip(keys, plan.context_lens.tolist(), strict=True)
        }
        victims = [key for key in before if key not in self.held]
        new = admitted(plan)
        assert len(victims) == plan.num_preempted
        num_free = self.config.num_blocks - sum(self.held.values())
        assert num_free == self.scheduler.load().num_free_blocks
        if victims and not new:
            num_wanted = [self.num_blocks_for(self.num_tokens[key]) for key in victims]
            assert num_free < max(num_wanted), "one lost its row although there was room for it"
        if len(new) == 1:
            num_needed = self.num_blocks_for(self.num_tokens[new[0]])
            for spared in victims:
                others = [key for key in before if key not in victims or key == spared]
                num_left = self.config.num_blocks - sum(before[key] for key in others) - len(others)
                assert num_needed > num_left or len(others) == self.config.max_num_sequences, f"{spared} is in no way"
                assert self.requests[spared].priority < self.requests[new[0]].priority
        update = self.scheduler.apply(self.result_of(plan) if plan.num_sequences else None)
        for record in update.sequences:
            key = int(record["request_key"])
            self.num_tokens[key] += int(record["num_tokens"])
            if record["finish_reason"]:
                del self.held[key]
        return (0, len(victims)) if new else (len(victims), 0)

    def key_of(self, plan: StepPlan, b: int) -> int:
        self.rows |= {row: request.request_key for row, request in plan.admitted}
        return self.rows[int(plan.rows[b])]


def test_no_victim_is_unnecessary(new_request: Make, result_of: Make) -> None:
    num_for_blocks = num_for_waiting = 0
    for seed in range(60):
        walk = Walk(seed, new_request, result_of)
        for key in range(40):
            walk.add(key)
            a, b = walk.step()
            num_for_blocks += a
            num_for_waiting += b
    assert num_for_blocks > 50
    assert num_for_waiting > 50
