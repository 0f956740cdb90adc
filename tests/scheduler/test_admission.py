"""Values that a request cannot have, whoever sends it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import ForewordError
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.scheduler import Scheduler


@pytest.mark.parametrize(
    ("prompt", "stopping", "priority", "message"),
    [
        (np.zeros(0, np.int32), StoppingParams(1), 0, "at least one token"),
        (np.array([3, -1], np.int32), StoppingParams(1), 0, r"prompt_token_ids\[1\] must not be negative, got -1"),
        (np.array([3], np.int64), StoppingParams(1), 0, "one-dimensional int32"),
        (np.array([3], ">i4"), StoppingParams(1), 0, "one-dimensional int32"),
        (np.zeros((1, 1), np.int32), StoppingParams(1), 0, "one-dimensional int32"),
        ([1, 2], StoppingParams(1), 0, "must be an array, got list"),
        (np.ones(1, np.int32), StoppingParams(0), 0, "max_output_tokens must be at least 1, got 0"),
        (np.ones(1, np.int32), StoppingParams(1, -1), 0, "min_output_tokens must not be negative, got -1"),
        (np.ones(1, np.int32), StoppingParams(1, 0, (-1,)), 0, "eos_token_ids .* got -1"),
        (np.ones(1, np.int32), StoppingParams(1, 0, (), (2**31,)), 0, "stop_token_ids .* got 2147483648"),
        (np.ones(1, np.int32), StoppingParams(1), 101, "priority must be -100 to 100, got 101"),
        (np.ones(1, np.int32), StoppingParams(1), -101, "priority must be -100 to 100, got -101"),
    ],
)
def test_impossible_values_are_named(prompt: np.ndarray, stopping: StoppingParams, priority: int, message: str) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8))
    with pytest.raises(ValueError, match=message):
        scheduler.add(Request(0, prompt, stopping, priority=priority), 0)
    assert not scheduler.has_work
    scheduler.check_invariants()


def test_a_tenant_is_a_string() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8))
    with pytest.raises(ValueError, match="tenant must be a string, got int"):
        scheduler.add(Request(0, np.ones(1, np.int32), StoppingParams(1), tenant=7), 0)  # type: ignore[arg-type]
    scheduler.check_invariants()


@pytest.mark.parametrize(("field", "value"), [("request_key", -1), ("request_key", 2**63), ("deadline_ns", 2**63)])
def test_keys_and_deadlines_are_int64(field: str, value: int) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8))
    request = replace(Request(0, np.ones(1, np.int32), StoppingParams(1)), **{field: value})
    with pytest.raises(ValueError, match=f"{field} must be int64 and not negative, got {value}"):
        scheduler.add(request, 0)
    scheduler.check_invariants()


def test_refusals_carry_their_limits(new_request: Callable[..., Request]) -> None:
    scheduler = Scheduler(
        SchedulerConfig(2, block_size=4, max_model_len=10, max_num_waiting=2, max_num_waiting_tokens=5)
    )
    refusals = []

    def refuse(request: object) -> None:
        with pytest.raises(ForewordError) as error:
            scheduler.add(request, 50)
        refusals.append((error.value.reason, error.value.metadata))

    refuse(new_request(0, 9, 2))
    refuse(new_request(0, 5, 5))
    refuse(new_request(0, 5, 3, deadline_ns=50))
    scheduler.add(new_request(0, 4, 3), 0)
    refuse(new_request(0, 1, 1))
    refuse(new_request(1, 2, 1))
    scheduler.add(new_request(1, 1, 1), 0)
    refuse(new_request(2, 1, 1))
    assert refusals == [
        ("CONTEXT_LENGTH_EXCEEDED", {"num_prompt_tokens": "9", "max_output_tokens": "2", "max_model_len": "10"}),
        (
            "CONTEXT_LENGTH_EXCEEDED",
            {"num_prompt_tokens": "5", "max_output_tokens": "5", "num_blocks": "2", "block_size": "4"},
        ),
        ("DEADLINE_INFEASIBLE", {"deadline_ns": "50", "now_ns": "50"}),
        ("REQUEST_ID_ACTIVE", {"request_key": "0"}),
        ("QUEUE_FULL", {"max_num_waiting_tokens": "5"}),
        ("QUEUE_FULL", {"max_num_waiting": "2"}),
    ]
