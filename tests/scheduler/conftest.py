"""What the scheduler's tests share: both schedulers, and results of a device that answers as told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.reference import ReferenceScheduler
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import Drafts, StepPlan, StepResult, StepUpdate

sys.path.insert(0, str(Path(__file__).parent))  # for simulator and fake_device

AnyScheduler = Scheduler | ReferenceScheduler


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected plans of tests/golden")


@pytest.fixture(params=[Scheduler, ReferenceScheduler], ids=["cython", "reference"])
def new_scheduler(request: pytest.FixtureRequest) -> Callable[..., AnyScheduler]:
    """Build a scheduler from settings of `SchedulerConfig`; every test runs on both."""

    def build(**settings: int) -> AnyScheduler:
        return request.param(SchedulerConfig(**settings))

    return build


def build_request(key: int, num_prompt: int, max_output: int = 4, **fields: object) -> Request:
    stopping = {
        name: fields.pop(name) for name in ("min_output_tokens", "eos_token_ids", "stop_token_ids") if name in fields
    }
    prompt = np.arange(1000 * key, 1000 * key + num_prompt, dtype=np.int32)
    return Request(key, prompt, StoppingParams(max_output, **stopping), **fields)  # type: ignore[arg-type]


def build_result(
    plan: StepPlan,
    tokens: Mapping[int, list[int]] | None = None,
    failed: tuple[int, ...] = (),
    default: int = 7,
    drafts: Mapping[int, list[int]] | None = None,
) -> StepResult:
    """Answer a plan: the tokens of some sequences (by index in the plan), a default one for all others that owe one.

    `drafts` proposes tokens for the next step, by index in the plan as well.
    """
    owes = np.diff(plan.logits_offsets) > 0
    rows = [
        [] if b in failed else (tokens or {}).get(b, [default] if owes[b] else []) for b in range(plan.num_sequences)
    ]
    token_ids = np.array([token for row in rows for token in row], np.int32)
    return StepResult(
        step_id=plan.step_id,
        token_offsets=np.cumsum([0] + [len(row) for row in rows]).astype(np.int32),
        token_ids=token_ids,
        logprobs=-token_ids.astype(np.float32),
        failed=np.isin(np.arange(plan.num_sequences), failed),
        drafts=None if drafts is None else build_drafts([drafts.get(b, []) for b in range(plan.num_sequences)]),
    )


def build_drafts(rows: list[list[int]]) -> Drafts:
    """Drafts of each sequence of a plan."""
    offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
    return Drafts(offsets, np.array([token for row in rows for token in row], np.int32))


def run_step(scheduler: AnyScheduler, now_ns: int = 1, **answer: object) -> tuple[StepPlan, StepUpdate]:
    """One schedule and apply, with invariants checked before and after; the plan is copied by its fields' use."""
    plan = scheduler.schedule(now_ns)
    scheduler.check_invariants()
    update = scheduler.apply(build_result(plan, **answer))  # type: ignore[arg-type]
    scheduler.check_invariants()
    return plan, update


@pytest.fixture
def new_request() -> Callable[..., Request]:
    return build_request


@pytest.fixture
def result_of() -> Callable[..., StepResult]:
    return build_result


@pytest.fixture
def step() -> Callable[..., tuple[StepPlan, StepUpdate]]:
    return run_step
