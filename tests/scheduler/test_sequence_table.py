"""What a request owns comes with it and goes with it."""

import gc
import sys
from collections.abc import Callable

import numpy as np

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.scheduler import Scheduler

Make = Callable[..., Request]


def test_requests_are_let_go_when_they_end(new_request: Make, step: Callable[..., tuple]) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8))
    request = new_request(0, 4, 1)
    before = sys.getrefcount(request)
    scheduler.add(request, 0)
    assert sys.getrefcount(request) > before
    step(scheduler)
    gc.collect()
    assert sys.getrefcount(request) == before


def test_a_prompt_is_copied(new_request: Make, step: Callable[..., tuple]) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8))
    request = new_request(1, 3, 1)
    scheduler.add(request, 0)
    request.prompt_token_ids[:] = 0
    assert step(scheduler)[0].token_ids.tolist() == [1000, 1001, 1002]


def test_a_prompt_need_not_be_contiguous(step: Callable[..., tuple]) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8))
    scheduler.add(Request(0, np.arange(10, dtype=np.int32)[::-3], StoppingParams(1)), 0)
    assert step(scheduler)[0].token_ids.tolist() == [9, 6, 3, 0]


def test_entries_are_used_again(new_request: Callable[..., Request], step: Callable[..., tuple]) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_num_sequences=1, max_num_waiting=1))
    for key in range(50):
        scheduler.add(new_request(key, 3, 1, deadline_ns=key + 10, priority=key), 0)
        plan, update = step(scheduler)
        assert plan.token_ids[0] == 1000 * key
        assert update.sequences["request_key"].tolist() == [key]
        assert update.sequences["num_steps"].tolist() == [1]
    assert scheduler.next_deadline_ns == 0
