"""What steps cost is known before the first request, and measuring it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foreword.gpu.runner import ModelRunner
from foreword.gpu.speculative.calibration import SIZES, calibrate
from foreword.gpu.speculative.controller import DraftController
from foreword.gpu.speculative.ngram_drafter import NgramDrafter
from foreword.gpu.speculative.speculator import Speculator
from foreword.scheduler.request import Request
from foreword.scheduler.step import StepPlan

PROMPT = [5, 9, 5, 9, 5, 9, 7]


@pytest.fixture
def runner(new_runner: Callable[..., ModelRunner]) -> ModelRunner:
    runner = new_runner()
    rows, vocab_size = runner.config.max_num_sequences, runner.vocab_size
    drafter = NgramDrafter(rows, runner.config.max_model_len, 4, vocab_size)
    controller = DraftController(rows, runner.config.max_num_batched_tokens, drafter.max_confidence)
    runner.speculator = Speculator(
        drafter, controller, max_num_sequences=rows, max_draft_tokens=4, vocab_size=vocab_size
    )
    return runner


def known(runner: ModelRunner, sizes: tuple[int, ...] = SIZES) -> list[float]:
    assert runner.speculator is not None
    assert runner.speculator.cost is not None
    return runner.speculator.cost.predict(np.array(sizes)).tolist()


def test_the_faster_of_two_steps_of_each_size_counts(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def duration_of(plan: StepPlan) -> int:
        seen.append(plan.num_tokens)
        return 1000 * plan.num_tokens + (500 if seen.count(plan.num_tokens) == 1 else 0)

    monkeypatch.setattr(runner, "duration_of", duration_of)
    calibrate(runner)
    assert seen == [size for size in SIZES for _ in range(2)]
    assert known(runner) == [1000.0 * size for size in SIZES]


def test_a_slow_device_is_measured_as_far_as_the_time_goes(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr("foreword.gpu.speculative.calibration.time.perf_counter_ns", lambda: next(clock))
    seen: list[int] = []
    monkeypatch.setattr(runner, "duration_of", lambda plan: seen.append(plan.num_tokens) or 1000)
    calibrate(runner, budget_ns=450)
    assert seen == [1, 1, 2, 2]
    assert known(runner, (1, 2)) == [1000.0, 1000.0]


def test_sizes_that_the_device_cannot_run_are_left_out(
    new_runner: Callable[..., ModelRunner], runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.config = replace(runner.config, num_blocks=1)
    seen: list[int] = []
    monkeypatch.setattr(runner, "duration_of", lambda plan: seen.append(plan.num_tokens) or 1000)
    calibrate(runner)
    assert max(seen) == 16
    calibrate(new_runner())  # no drafter, nothing to measure for


def test_measuring_changes_no_token(
    runner: ModelRunner,
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
) -> None:
    calibrate(runner)
    assert all(duration > 1000 for duration in known(runner))
    results = []
    for each in (runner, new_runner()):
        writer = plan_writer()
        request = new_request(PROMPT, temperature=0.8, seed=3, want_logprobs=True)
        result = each.execute(writer.plan([(0, PROMPT, 1)], [(0, request)]))
        again = each.execute(writer.plan([(0, result.token_ids.tolist(), 1)]))
        results.append((result.token_ids.tolist(), again.token_ids.tolist(), again.logprobs.tolist()))
    assert results[0] == results[1]
