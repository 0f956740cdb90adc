"""Where a run of accepted tokens ends a sequence."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from foreword.scheduler.step import FinishReason, StepKind, StepUpdate

EOS, STOP, OTHER = 2, 3, 9


def verify(
    new_scheduler: Callable,
    new_request: Callable,
    step: Callable,
    result_of: Callable,
    run: list[int],
    num_drafts: int,
    **request: object,
) -> StepUpdate:
    """The update of a verification that follows a prompt of three and one drawn token."""
    scheduler = new_scheduler(num_blocks=16, block_size=4, max_model_len=40)
    scheduler.add(new_request(0, 3, eos_token_ids=(EOS, 1), stop_token_ids=(STOP, EOS), **request), 0)
    step(scheduler, drafts={0: [OTHER] * num_drafts})
    plan = scheduler.schedule(1)
    return scheduler.apply(result_of(plan, tokens={0: run[: len(plan.logits_indices)]}))


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize(("token", "reason"), [(EOS, FinishReason.EOS), (STOP, FinishReason.STOP_TOKEN)])
def test_the_first_end_token_of_a_run_cuts_it(
    new_scheduler: Callable,
    new_request: Callable,
    step: Callable,
    result_of: Callable,
    position: int,
    token: int,
    reason: FinishReason,
) -> None:
    run = [OTHER] * position + [token] + [STOP if token == EOS else EOS] * (4 - position)
    update = verify(new_scheduler, new_request, step, result_of, run, 4, max_output=20)
    record = update.sequences[0]
    assert update.token_ids.tolist() == run[: position + 1]
    assert update.logprobs.tolist() == [-float(i) for i in run[: position + 1]]
    assert record["finish_reason"] == reason
    assert record["step_kind"] == StepKind.VERIFY
    assert record["num_drafted"] == 4
    assert record["num_accepted"] == min(position + 1, 4)


@pytest.mark.parametrize("max_output", range(2, 8))
@pytest.mark.parametrize("num_drafts", range(6))
def test_the_length_limit_cuts_a_run(
    new_scheduler: Callable,
    new_request: Callable,
    step: Callable,
    result_of: Callable,
    max_output: int,
    num_drafts: int,
) -> None:
    update = verify(new_scheduler, new_request, step, result_of, [OTHER] * 6, num_drafts, max_output=max_output)
    num_kept = min(num_drafts + 1, max_output - 1)
    assert len(update.token_ids) == num_kept
    reason = FinishReason.LENGTH if num_kept == max_output - 1 else FinishReason.NONE
    assert update.sequences["finish_reason"][0] == reason


@pytest.mark.parametrize("min_output", range(7))
def test_end_tokens_before_the_minimum_are_ordinary(
    new_scheduler: Callable, new_request: Callable, step: Callable, result_of: Callable, min_output: int
) -> None:
    update = verify(
        new_scheduler, new_request, step, result_of, [EOS] * 5, 4, max_output=20, min_output_tokens=min_output
    )
    # One token is there. The next may end it once `min_output` tokens are there before it.
    num_kept = max(1, min_output)
    assert len(update.token_ids) == min(5, num_kept)
    assert update.sequences["finish_reason"][0] == (FinishReason.EOS if num_kept <= 5 else FinishReason.NONE)


@pytest.mark.parametrize("kind", ["eos_token_ids", "stop_token_ids"])
def test_an_end_token_may_have_the_id_0(
    new_scheduler: Callable, new_request: Callable, step: Callable, kind: str
) -> None:
    scheduler = new_scheduler(num_blocks=16, block_size=4, max_model_len=40)
    scheduler.add(new_request(0, 3, 20, **{kind: (0,)}), 0)
    step(scheduler, drafts={0: [OTHER, 0]})
    update = step(scheduler, tokens={0: [OTHER, 0, OTHER]})[1]
    reason = FinishReason.EOS if kind == "eos_token_ids" else FinishReason.STOP_TOKEN
    assert (update.token_ids.tolist(), update.sequences["finish_reason"].tolist()) == ([OTHER, 0], [reason])


def test_an_end_token_at_the_limit_is_an_end_token(
    new_scheduler: Callable, new_request: Callable, step: Callable, result_of: Callable
) -> None:
    update = verify(new_scheduler, new_request, step, result_of, [OTHER, EOS], 1, max_output=3)
    assert update.sequences["finish_reason"][0] == FinishReason.EOS


def test_the_context_is_full(new_scheduler: Callable, new_request: Callable, step: Callable) -> None:
    scheduler = new_scheduler(num_blocks=16, block_size=4, max_model_len=8)
    scheduler.add(new_request(0, 6, 2), 0)
    scheduler.add(new_request(1, 5, 2), 0)
    step(scheduler)
    update = step(scheduler)[1]
    assert update.sequences["finish_reason"].tolist() == [FinishReason.CONTEXT_LIMIT, FinishReason.LENGTH]


def test_rejected_drafts_are_computed_again(new_scheduler: Callable, new_request: Callable, step: Callable) -> None:
    scheduler = new_scheduler(num_blocks=16, block_size=4, max_model_len=40)
    scheduler.add(new_request(0, 3, 20), 0)
    step(scheduler, drafts={0: [20, 21, 22]})
    plan, update = step(scheduler, tokens={0: [20, 30]})
    assert plan.token_ids.tolist() == [7, 20, 21, 22]
    assert update.sequences["num_accepted"][0] == 1
    plan, _ = step(scheduler)
    assert (plan.positions.tolist(), plan.token_ids.tolist()) == ([5], [30])
    assert plan.context_lens.tolist() == [6]


def test_a_failed_sequence_ends_alone(new_scheduler: Callable, new_request: Callable, step: Callable) -> None:
    scheduler = new_scheduler(num_blocks=16, block_size=4)
    for key in range(3):
        scheduler.add(new_request(key, 3, 20), 0)
    update = step(scheduler, failed=(1,))[1]
    assert update.sequences["finish_reason"].tolist() == [0, FinishReason.FAILED, 0]
    assert update.sequences["num_tokens"].tolist() == [1, 0, 1]
    assert np.array_equal(step(scheduler)[0].rows, [0, 2])


@pytest.mark.parametrize(
    ("run", "max_output", "reason"),
    [
        ([OTHER, OTHER], 20, FinishReason.CONSTRAINT_COMPLETE),
        ([OTHER, OTHER], 3, FinishReason.CONSTRAINT_COMPLETE),  # the last token there is room for as well
        ([OTHER, EOS], 20, FinishReason.EOS),
        ([OTHER, STOP], 20, FinishReason.STOP_TOKEN),
        ([STOP, OTHER], 20, FinishReason.STOP_TOKEN),
    ],
)
def test_token_order_decides_between_a_constraint_and_other_ends(
    new_scheduler: Callable,
    new_request: Callable,
    step: Callable,
    run: list[int],
    max_output: int,
    reason: FinishReason,
) -> None:
    scheduler = new_scheduler(num_blocks=16, block_size=4, max_model_len=40)
    scheduler.add(new_request(0, 3, max_output, eos_token_ids=(EOS,), stop_token_ids=(STOP,)), 0)
    step(scheduler, drafts={0: [OTHER]})
    reasons = {0: FinishReason.CONSTRAINT_COMPLETE}
    update = step(scheduler, tokens={0: run}, constraint_reasons=reasons)[1]
    assert update.sequences["finish_reason"].tolist() == [reason]
    assert update.sequences["num_tokens"].tolist() == [1 if run[0] == STOP else 2]


@pytest.mark.parametrize("reason", [FinishReason.CONSTRAINT_STUCK, FinishReason.CONSTRAINT_COMPLETE])
def test_a_constraint_can_be_why_no_token_came_out(
    new_scheduler: Callable, new_request: Callable, step: Callable, reason: FinishReason
) -> None:
    scheduler = new_scheduler(num_blocks=16, block_size=4)
    for key in range(2):
        scheduler.add(new_request(key, 3, 20), 0)
    update = step(scheduler, failed=(1,), constraint_reasons={1: reason})[1]
    assert update.sequences["finish_reason"].tolist() == [0, reason]
    assert update.sequences["num_tokens"].tolist() == [1, 0]
    assert np.array_equal(step(scheduler)[0].rows, [0])


def test_constraint_reasons_have_an_entry_for_each_sequence(
    new_scheduler: Callable, new_request: Callable, result_of: Callable
) -> None:
    scheduler = new_scheduler(num_blocks=16, block_size=4)
    scheduler.add(new_request(0, 3, 20), 0)
    result = result_of(scheduler.schedule(1))
    with pytest.raises(ValueError):  # noqa: PT011 - the reference's message is its own
        scheduler.apply(dataclasses.replace(result, constraint_reasons=np.zeros(2, np.int32)))
