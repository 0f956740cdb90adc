"""Several outputs from one prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foreword.scheduler.errors import DuplicateRequest, QueueFull
from foreword.scheduler.request import Request, SamplingParams
from foreword.scheduler.step import FinishReason, StepPlan, StepUpdate

LIMITS = {"num_blocks": 32, "block_size": 4, "max_num_sequences": 8, "max_num_batched_tokens": 16, "max_model_len": 64}


def run_all(scheduler: Any, step: Callable[..., tuple[StepPlan, StepUpdate]]) -> dict[int, list[int]]:
    """Run until nothing is left; the computed tokens of each step by sequence."""
    computed: dict[int, list[int]] = {}
    rows: dict[int, int] = {}
    while scheduler.has_work:
        plan, _ = step(scheduler)
        rows |= {row: request.request_key for row, request in plan.admitted}
        for b, row in enumerate(plan.rows.tolist()):
            computed.setdefault(rows[row], []).append(int(plan.query_offsets[b + 1] - plan.query_offsets[b]))
    return computed


@pytest.mark.parametrize("bypass_prefix_cache", [False, True])
@pytest.mark.parametrize("num_prompt", [1, 7, 8, 30])
def test_the_prompt_is_computed_once(
    new_scheduler: Any, new_request: Any, step: Any, num_prompt: int, bypass_prefix_cache: bool
) -> None:
    """The others compute the part of the last block alone, which is never shared: 1 to block_size tokens."""
    scheduler = new_scheduler(**LIMITS)
    scheduler.add(new_request(5, num_prompt, num_outputs=4, bypass_prefix_cache=bypass_prefix_cache), 1)
    computed = run_all(scheduler, step)
    assert sorted(computed) == [5, 6, 7, 8]
    assert sum(computed[5]) == num_prompt + 3
    rest = (num_prompt - 1) % 4 + 1
    for key in (6, 7, 8):
        assert computed[key] == [rest, 1, 1, 1]


def test_outputs_that_bypass_the_cache_leave_nothing_to_others(new_scheduler: Any, new_request: Any, step: Any) -> None:
    scheduler = new_scheduler(**LIMITS | {"max_num_batched_tokens": 64})
    prompt = new_request(0, 12, max_output=1)
    for key in (0, 10):
        bypassing = {"bypass_prefix_cache": True, "cache_salt": "x", "num_outputs": 2}
        scheduler.add(Request(key, prompt.prompt_token_ids, prompt.stopping, **bypassing), 1)
    assert run_all(scheduler, step) == {0: [12], 1: [4], 10: [12], 11: [4]}
    scheduler.add(Request(20, prompt.prompt_token_ids, prompt.stopping, cache_salt="x"), 1)
    assert run_all(scheduler, step) == {20: [12]}


def test_one_output_ends_and_the_others_go_on(new_scheduler: Any, new_request: Any, step: Any) -> None:
    scheduler = new_scheduler(**LIMITS)
    scheduler.add(new_request(0, 6, max_output=5, num_outputs=3, eos_token_ids=(9,)), 1)
    step(scheduler)
    step(scheduler, tokens={0: [9]})
    assert scheduler.load().num_running == 2
    assert not scheduler.cancel(0)
    assert scheduler.cancel(1)
    _, update = step(scheduler)
    assert update.sequences[["request_key", "finish_reason"]].tolist() == [(2, 0), (1, FinishReason.CANCELLED)]
    assert scheduler.load().num_running == 1


@pytest.mark.parametrize("cancelled", [[1], [3], [2, 1], [1, 2, 3], [0], [0, 2], [2, 0]])
def test_outputs_can_be_cancelled_before_the_prompt_is_computed(
    new_scheduler: Any, new_request: Any, step: Any, cancelled: list[int]
) -> None:
    scheduler = new_scheduler(**LIMITS)
    scheduler.add(new_request(0, 40, num_outputs=4), 1)
    step(scheduler)
    for key in cancelled:
        assert scheduler.cancel(key)
        scheduler.check_invariants()
    step(scheduler)
    scheduler.add(new_request(9, 3), 1)  # takes an entry that is free again
    finished = set()
    while scheduler.has_work:
        _, update = step(scheduler)
        ended = update.sequences[update.sequences["finish_reason"] == FinishReason.LENGTH]
        finished |= set(ended["request_key"].tolist())
    assert finished == {0, 1, 2, 3, 9} - set(cancelled)
    assert scheduler.load().num_free_blocks == LIMITS["num_blocks"]


def test_a_preempted_output_leaves_the_others_alone(new_scheduler: Any, new_request: Any, step: Any) -> None:
    scheduler = new_scheduler(**LIMITS | {"num_blocks": 6})
    scheduler.add(new_request(0, 8, max_output=12, num_outputs=2), 1)
    num_preemptions = {0: 0, 1: 0}
    while scheduler.has_work:
        _, update = step(scheduler, tokens={0: [100], 1: [101]})
        num_preemptions |= dict(update.sequences[["request_key", "num_preemptions"]].tolist())
    assert num_preemptions[0] == 0
    assert num_preemptions[1] > 0


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_outputs_take_turns_in_a_pool_that_holds_one_of_them(
    new_scheduler: Any, new_request: Any, step: Any, num_blocks: int
) -> None:
    scheduler = new_scheduler(**LIMITS | {"num_blocks": num_blocks})
    scheduler.add(new_request(0, 5, max_output=4, num_outputs=5), 1)
    assert sorted(run_all(scheduler, step)) == [0, 1, 2, 3, 4]


def test_all_outputs_count_against_the_bounds_of_the_queue(new_scheduler: Any, new_request: Any) -> None:
    scheduler = new_scheduler(**LIMITS, max_num_waiting=4, max_num_waiting_tokens=20)
    with pytest.raises(ValueError, match="outputs"):
        scheduler.add(new_request(0, 1, num_outputs=5), 1)
    with pytest.raises(ValueError, match="outputs"):
        scheduler.add(new_request(0, 1, num_outputs=0), 1)
    scheduler.add(new_request(0, 1, num_outputs=2), 1)
    with pytest.raises(DuplicateRequest):
        scheduler.add(new_request(1, 1), 1)
    with pytest.raises(QueueFull):
        scheduler.add(new_request(10, 1, num_outputs=3), 1)
    with pytest.raises(QueueFull):
        scheduler.add(new_request(10, 10, num_outputs=2), 1)
    assert scheduler.load().num_waiting == 2
    scheduler.add(new_request(10, 9, num_outputs=2), 1)
    assert scheduler.load().num_waiting_tokens == 20


def test_an_output_does_not_depend_on_how_many_there_are(new_request: Any) -> None:
    """Its key and its seed are its own; those of the first are the request's."""
    two, five = new_request(7, 3, num_outputs=2), new_request(7, 3, num_outputs=5)
    for index in range(2):
        assert two.output(index).request_key == five.output(index).request_key == 7 + index
        assert two.output(index).sampling == five.output(index).sampling
    alone = Request(7, two.prompt_token_ids, two.stopping, sampling=SamplingParams(seed=-3))
    assert alone.output(0) is alone
    many = Request(7, two.prompt_token_ids, two.stopping, sampling=SamplingParams(seed=-3), num_outputs=100)
    mask = (1 << 64) - 1
    assert many.output(0).sampling.seed == -3 & mask
    nearby = {(seed + many.output(i).sampling.seed + 3) & mask for i in range(100) for seed in range(-500, 500)}
    assert len(nearby) == 100 * 1000, "outputs of requests with nearby seeds share one"
