"""From a step's plan and tokens to the drafts of the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from foreword.gpu.speculative.controller import DraftController
from foreword.gpu.speculative.ngram_drafter import NgramDrafter
from foreword.gpu.speculative.speculator import Speculator
from foreword.scheduler.request import Request
from foreword.scheduler.step import Drafts, DraftState

VOCAB = 100


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class RecordingController(DraftController):
    """Checks everything there is, and remembers what it was taught."""

    def __init__(self) -> None:
        super().__init__(8, 64, 5)
        self.lessons: list[tuple[int, int, int, int]] = []
        self.waits: list[bool] = []

    def learn(self, rows: Any, confidences: Any, trials: Any, successes: Any) -> None:
        self.lessons += zip(rows.tolist(), confidences.tolist(), trials.tolist(), successes.tolist(), strict=True)

    def choose(self, rows: Any, confidences: Any, limits: Any, has_prefill: bool) -> Any:
        self.waits.append(has_prefill)
        return limits.astype(np.int64)


@pytest.fixture
def controller() -> RecordingController:
    return RecordingController()


@pytest.fixture
def speculator(controller: RecordingController) -> Speculator:
    return Speculator(
        NgramDrafter(8, 256, 4, VOCAB), controller, max_num_sequences=8, max_draft_tokens=4, vocab_size=VOCAB
    )


def rows_of(drafts: Drafts | None) -> list[list[int]]:
    assert drafts is not None
    assert drafts.offsets.dtype == drafts.token_ids.dtype == np.int32
    return [part.tolist() for part in np.split(drafts.token_ids, drafts.offsets[1:-1])]


def test_drafts_stand_where_their_sequences_do(
    speculator: Speculator,
    controller: RecordingController,
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
) -> None:
    """An incomplete prompt, a failed sequence and one without a match have none."""
    prompts = ([1, 2, 3, 1], [9] * 6, [4, 5, 6, 7], [7, 8, 7, 8], [5, 5])
    admitted = [(row, new_request(prompt)) for row, prompt in enumerate(prompts)]
    work = [(0, prompts[0], 1), (1, prompts[1][:3], 0), (2, prompts[2], 1), (3, prompts[3], 1), (4, prompts[4], 1)]
    plan = plan_writer().plan(work, admitted)
    drafts = speculator.follow(plan, int32(0, 1, 1, 2, 2, 3), int32(2, 60, 5), 1000)
    assert rows_of(drafts) == [[3, 1, 2, 3], [], [], [], [5, 5, 5, 5]]
    assert controller.waits == [True]


def test_bounds_of_a_request_are_kept(
    speculator: Speculator, plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    """Its own number of drafts, and one less than it may still produce."""
    prompt = [1, 2, 1, 2]
    plan = plan_writer().plan(
        [(row, prompt, 1) for row in range(4)],
        [(row, new_request(prompt, max_output_tokens=length)) for row, length in enumerate((1, 2, 4, 40))],
    )
    drafts = speculator.follow(plan, int32(0, 1, 2, 3, 4), int32(1, 1, 1, 1), 1000)
    assert rows_of(drafts) == [[], [], [2, 1], [2, 1, 2, 1]]


def test_checked_and_unchecked_drafts_teach(
    speculator: Speculator,
    controller: RecordingController,
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
) -> None:
    writer, prompt = plan_writer(), [1, 2, 1]
    request = new_request(prompt)
    speculator.follow(writer.plan([(0, prompt, 1), (1, prompt, 1)], [(0, request), (1, request)]), int32(0, 1, 2),
                      int32(2, 2), 1000)  # fmt: skip
    assert controller.lessons == []
    # Row 0 had its drafts 1, 2, 1, 2 checked and two were right; of row 1's only the next token tells.
    plan = writer.plan([(0, [2, 1, 2, 1, 2], 5), (1, [2], 1)])
    speculator.follow(plan, int32(0, 3, 4), int32(1, 2, 50, 1), 1000)
    assert controller.lessons == [(0, 2, 3, 2), (1, 2, 1, 1)]


def test_only_steps_of_decoding_alone_tell_what_a_step_costs(
    speculator: Speculator,
    controller: RecordingController,
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
) -> None:
    writer = plan_writer()
    speculator.follow(writer.plan([(0, [1, 2, 3], 1)], [(0, new_request([1, 2, 3]))]), int32(0, 1), int32(4), 7000)
    assert controller.cost.predict(np.array([3])).tolist() == [1]
    speculator.follow(writer.plan([(0, [4], 1)]), int32(0, 1), int32(5), 7000)
    assert controller.cost.predict(np.array([1])).tolist() == [7000]


def test_what_a_resumed_sequence_computes_again_is_learned(
    speculator: Speculator, plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    """Its request has only the prompt; the output so far comes with the plan."""
    plan = plan_writer().plan([(0, [1, 2, 3, 50, 51, 52, 50], 1)], [(0, new_request([1, 2, 3]))])
    assert rows_of(speculator.follow(plan, int32(0, 1), int32(51), 1000)) == [[52, 50, 51, 52]]


def test_a_failure_ends_drafting(
    speculator: Speculator, plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    writer = plan_writer()
    plan = writer.plan([(0, [1, 2, 1], 1)], [(9, new_request([1]))])  # there is no row 9
    assert speculator.follow(plan, int32(0, 1), int32(2), 1000) is None
    assert speculator.state is DraftState.DRAFTER_FAILED
    assert speculator.follow(writer.plan([(0, [2], 1)]), int32(0, 1), int32(1), 1000) is None
