"""Deadlines that cannot be met, as far as the times of past steps tell, are refused at the door."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foreword.scheduler.errors import DeadlineInfeasible
from foreword.scheduler.scheduler import Scheduler

New = Callable[..., Scheduler]
Make = Callable[..., object]
MS = 1_000_000


@pytest.fixture
def busy(new_scheduler: New, new_request: Make, step: Make) -> Scheduler:
    """Computes a prompt of 100 tokens at 10 tokens in 5 ms, which 30 are left of at 35 ms; 40 more wait."""
    scheduler = new_scheduler(num_blocks=64, block_size=4, max_num_sequences=1, max_num_batched_tokens=10)
    scheduler.add(new_request(0, 100), 0)
    for now_ns in range(0, 35 * MS, 5 * MS):
        step(scheduler, now_ns)
    scheduler.schedule(35 * MS)
    scheduler.add(new_request(1, 40), 35 * MS)
    return scheduler


def test_a_deadline_before_the_first_token_is_refused_with_an_estimate(busy: Scheduler, new_request: Make) -> None:
    with pytest.raises(DeadlineInfeasible) as refusal:
        busy.add(new_request(2, 1, deadline_ns=70 * MS), 35 * MS)
    busy.add(new_request(2, 1, deadline_ns=70 * MS + 1), 35 * MS)
    if isinstance(busy, Scheduler):
        assert refusal.value.message == "the deadline is in 35 ms, but 70 tokens go before and take about 35 ms"
        assert refusal.value.metadata == {
            "deadline_ns": str(70 * MS),
            "now_ns": str(35 * MS),
            "num_tokens_before": "70",
            "estimated_wait_ns": str(35 * MS),
        }


def test_only_what_goes_before_for_certain_counts(busy: Scheduler, new_request: Make) -> None:
    with pytest.raises(DeadlineInfeasible):
        busy.add(new_request(2, 1, deadline_ns=55 * MS), 35 * MS)
    busy.add(new_request(2, 1, deadline_ns=55 * MS, tenant="other"), 35 * MS)
    busy.add(new_request(3, 1, deadline_ns=55 * MS, priority=1), 35 * MS)
    with pytest.raises(DeadlineInfeasible):
        busy.add(new_request(4, 1, deadline_ns=55 * MS, priority=-1), 35 * MS)
    with pytest.raises(DeadlineInfeasible):
        busy.add(new_request(5, 1, deadline_ns=50 * MS, tenant="other"), 35 * MS)


def test_nothing_is_refused_without_a_measurement(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=64, max_num_sequences=1, max_num_batched_tokens=10)
    scheduler.add(new_request(0, 4, 20), 0)
    for now_ns in range(0, 50 * MS, 5 * MS):
        step(scheduler, now_ns)  # steps of one token tell nothing about prompts
    scheduler.add(new_request(1, 500), 50 * MS)
    scheduler.add(new_request(2, 1, deadline_ns=50 * MS + 1), 50 * MS)


def test_idle_time_is_not_measured(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=64, max_num_sequences=1, max_num_batched_tokens=10)
    scheduler.add(new_request(0, 10, 1), 0)
    step(scheduler, 0)
    assert not scheduler.has_work
    scheduler.add(new_request(1, 10, 1), 1000 * MS)
    step(scheduler, 1000 * MS)
    scheduler.add(new_request(2, 500), 1000 * MS)
    scheduler.add(new_request(3, 1, deadline_ns=1000 * MS + 1), 1000 * MS)


def test_a_clock_that_stands_or_goes_back_measures_nothing(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=64, max_num_sequences=1, max_num_batched_tokens=10)
    scheduler.add(new_request(0, 100), 0)
    for now_ns in (9 * MS, 9 * MS, 1 * MS, 0):
        step(scheduler, now_ns)
    scheduler.add(new_request(1, 1, deadline_ns=9 * MS + 1), 0)


def test_slow_steps_are_forgotten(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=64, max_num_sequences=1, max_num_batched_tokens=10)
    scheduler.add(new_request(0, 1000, 1), 0)
    now_ns = 0
    for duration_ns in [100 * MS] + [MS] * 80:
        step(scheduler, now_ns)
        now_ns += duration_ns
    with pytest.raises(DeadlineInfeasible):  # 190 tokens at 0.1 ms each
        scheduler.add(new_request(1, 1, deadline_ns=now_ns + 18 * MS), now_ns)
    scheduler.add(new_request(1, 1, deadline_ns=now_ns + 21 * MS), now_ns)


def test_an_expired_request_never_starts(new_scheduler: New, new_request: Make, step: Make) -> None:
    scheduler = new_scheduler(num_blocks=64, max_num_sequences=1)
    scheduler.add(new_request(0, 4, 3), 0)
    step(scheduler, 1)
    scheduler.add(new_request(1, 4, deadline_ns=10), 1)
    step(scheduler, 2)
    step(scheduler, 3)
    plan, update = step(scheduler, 10)  # the row is free again, and the deadline is now
    assert plan.num_sequences == 0
    assert update.sequences["request_key"].tolist() == [1]
    assert update.sequences["first_scheduled_ns"].tolist() == [0]
