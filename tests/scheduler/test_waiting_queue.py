"""Who is admitted next: priorities that age, and tenants that share by their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from foreword.scheduler.scheduler import Scheduler

New = Callable[..., Scheduler]
Make = Callable[..., object]


class Flood:
    """Tenants that keep some requests waiting each; counts the tokens that they get."""

    def __init__(self, scheduler: Scheduler, new_request: Make, step: Make) -> None:
        self.scheduler, self.new_request, self.step = scheduler, new_request, step
        self.tenant_of: dict[int, str] = {}
        self.num_tokens: Counter[str] = Counter()
        self.num_requests = 0

    def keep_waiting(self, tenant: str, num_requests: int, num_prompt: int, max_output: int, priority: int = 0) -> None:
        waiting = sum(owner == tenant for owner in self.tenant_of.values())
        for _ in range(num_requests - waiting):
            self.num_requests += 1
            self.scheduler.add(
                self.new_request(self.num_requests, num_prompt, max_output, tenant=tenant, priority=priority), 0
            )
            self.tenant_of[self.num_requests] = tenant

    def run_step(self, now_ns: int = 1) -> None:
        plan, update = self.step(self.scheduler, now_ns)
        for _, request in plan.admitted:
            self.num_tokens[request.tenant] += len(request.prompt_token_ids)
        for record in update.sequences:
            key = int(record["request_key"])
            self.num_tokens[self.tenant_of[key]] += int(record["num_tokens"])
            if record["finish_reason"]:
                del self.tenant_of[key]


@pytest.fixture
def new_flood(new_scheduler: New, new_request: Make, step: Make) -> Callable[..., Flood]:
    def build(**settings: object) -> Flood:
        limits = {"num_blocks": 64, "block_size": 4, "max_num_sequences": 4, "max_num_batched_tokens": 16} | settings
        return Flood(new_scheduler(**limits), new_request, step)

    return build


def test_a_tenant_that_floods_does_not_starve_another(new_flood: Callable[..., Flood]) -> None:
    flood = new_flood()
    for _ in range(150):
        flood.keep_waiting("flood", 40, 3, 4)
        flood.keep_waiting("small", 2, 3, 4)
        flood.run_step()
    share = flood.num_tokens["small"] / flood.num_tokens.total()
    assert 0.4 < share < 0.6


def test_tenants_share_by_their_weights(new_flood: Callable[..., Flood]) -> None:
    flood = new_flood(tenant_weights=(("heavy", 3),))
    for _ in range(200):
        flood.keep_waiting("heavy", 8, 2, 3)
        flood.keep_waiting("light", 8, 2, 3)
        flood.run_step()
    assert 2.7 < flood.num_tokens["heavy"] / flood.num_tokens["light"] < 3.3


def test_shares_count_tokens_and_not_requests(new_flood: Callable[..., Flood]) -> None:
    flood = new_flood()
    for _ in range(300):
        flood.keep_waiting("long", 4, 12, 12)
        flood.keep_waiting("short", 8, 1, 3)
        flood.run_step()
    assert 0.75 < flood.num_tokens["long"] / flood.num_tokens["short"] < 1.34


def test_idle_time_is_no_credit(new_flood: Callable[..., Flood]) -> None:
    flood = new_flood()
    for _ in range(100):
        flood.keep_waiting("steady", 8, 3, 4)
        flood.run_step()
    flood.num_tokens.clear()
    for _ in range(40):
        flood.keep_waiting("steady", 8, 3, 4)
        flood.keep_waiting("back", 8, 3, 4)
        flood.run_step()
    assert 0.4 < flood.num_tokens["back"] / flood.num_tokens.total() < 0.65


def test_a_lone_tenant_gets_everything_in_order_of_arrival(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=8, max_num_sequences=1)
    for key in range(5):
        scheduler.add(new_request(key, 1, 1, tenant="only"), 0)
    assert [step(scheduler)[1].sequences["request_key"][0] for _ in range(5)] == [0, 1, 2, 3, 4]


def test_a_tenant_that_waits_longer_than_its_share_goes_first(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=8, max_num_sequences=1)
    for key, tenant in enumerate("aaabbc"):
        scheduler.add(new_request(key, 1, 1, tenant=tenant), 0)
    assert [step(scheduler)[1].sequences["request_key"][0] for _ in range(6)] == [0, 3, 5, 1, 4, 2]


def test_priorities_go_before_shares(new_flood: Callable[..., Flood]) -> None:
    flood = new_flood()
    for _ in range(50):
        flood.keep_waiting("urgent", 8, 3, 4, priority=1)
        flood.keep_waiting("other", 8, 3, 4)
        flood.run_step()
    assert flood.num_tokens["other"] == 0


def test_a_priority_that_is_passed_over_gains_a_level_for_every_interval(
    new_scheduler: New, new_request: Make, step: Make
) -> None:
    scheduler = new_scheduler(num_blocks=8, max_num_sequences=1, priority_aging_ns=100)
    scheduler.add(new_request(0, 1, 1, priority=-1), 0)
    scheduler.add(new_request(1, 1, 1, priority=-1), 0)
    served = []
    for key in range(2, 12):
        scheduler.add(new_request(key, 1, 1, priority=1), 0)
        served.append(int(step(scheduler, 50 * (key - 1))[1].sequences["request_key"][0]))
    # At 200 it equals what waits, having waited longer, and the next of its kind starts to wait anew.
    assert served == [2, 3, 4, 0, 5, 6, 7, 1, 8, 9]


def test_time_that_goes_back_ages_nobody(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=8, max_num_sequences=1, priority_aging_ns=10)
    scheduler.add(new_request(0, 1, 1, priority=0), 1000)
    scheduler.add(new_request(1, 1, 1, priority=1), 0)
    assert step(scheduler, 5)[1].sequences["request_key"].tolist() == [1]


def test_more_tenants_than_are_remembered(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=8, max_num_sequences=2, max_num_waiting=3)
    for key in range(40):
        scheduler.add(new_request(key, 1, 1, tenant=f"tenant-{key}"), 0)
        step(scheduler)
    assert scheduler.load().num_running == 0
