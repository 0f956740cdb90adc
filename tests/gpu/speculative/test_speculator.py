"""From a step's plan and tokens to the drafts of the next."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foreword.gpu.config import DeviceConfig
from foreword.gpu.guided.guide import GuidedRows
from foreword.gpu.speculative.controller import DraftController
from foreword.gpu.speculative.ngram_drafter import NgramDrafter
from foreword.gpu.speculative.open import open_speculator
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
        self.rests = False

    def looks(self, num_rows: int) -> bool:
        return not self.rests

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


def test_nothing_is_proposed_nor_judged_while_the_controller_rests(
    speculator: Speculator,
    controller: RecordingController,
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
) -> None:
    writer, prompt = plan_writer(), [1, 2, 1]
    speculator.follow(writer.plan([(0, prompt, 1)], [(0, new_request(prompt))]), int32(0, 1), int32(2), 1000)
    controller.rests = True
    for last, token_id in ((2, 50), (50, 51), (51, 50)):
        assert speculator.follow(writer.plan([(0, [last], 1)]), int32(0, 1), int32(token_id), 1000) is None
        assert controller.lessons == [(0, 2, 1, 0)]  # of the last proposal before
    controller.rests = False
    drafts = speculator.follow(writer.plan([(0, [50], 1)]), int32(0, 1), int32(51), 1000)
    assert rows_of(drafts) == [[50, 51, 50, 51]]  # what came meanwhile is known


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


class ForcingRows(GuidedRows):
    """Grammars that leave one text to every row without a proposal that agrees: 30 and so on."""

    def __init__(self) -> None:
        pass

    def amend(self, rows: Any, limits: Any, offsets: Any, token_ids: Any) -> Any:
        assert len(rows) == len(limits) == len(offsets) - 1
        parts = [token_ids[start:end] for start, end in itertools.pairwise(offsets)]
        is_forced = np.array([not len(part) or part[0] == 60 for part in parts]) & (limits > 0)
        parts = [np.arange(30, 30 + limit) if is_forced[b] else parts[b] for b, limit in enumerate(limits)]
        return np.cumsum([0, *map(len, parts)]).astype(np.int32), np.concatenate(parts).astype(np.int32), is_forced


def test_drafts_of_grammars_have_a_name_and_a_confidence_of_their_own(
    speculator: Speculator,
    controller: RecordingController,
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
) -> None:
    """Row 0 repeats itself, row 1 repeats what its grammar forbids, row 2 has nothing to repeat."""
    writer, prompts = plan_writer(), ([1, 2, 1, 2], [60, 7, 60, 7], [4, 5, 6])
    work = [(row, prompt, 1) for row, prompt in enumerate(prompts)]
    plan = writer.plan(work, [(row, new_request(prompt)) for row, prompt in enumerate(prompts)])
    drafts = speculator.follow(plan, int32(0, 1, 2, 3), int32(1, 7, 8), 1000, ForcingRows())
    assert rows_of(drafts) == [[2, 1, 2, 1], [30, 31, 32, 33], [30, 31, 32, 33]]
    assert drafts is not None
    assert drafts.drafters is not None
    assert drafts.drafters.tolist() == [0, 1, 1]
    assert speculator.drafter_names == ("ngram",)
    plan = writer.plan([(0, [1], 1), (1, [7], 1), (2, [8, 30, 31, 32, 33], 5)])
    speculator.follow(plan, int32(0, 1, 2, 5), int32(2, 31, 30, 31, 9), 1000, ForcingRows())
    grammar = NgramDrafter(8, 256, 4, VOCAB).max_confidence + 1
    assert controller.lessons == [(0, 3, 1, 1), (1, grammar, 1, 0), (2, grammar, 3, 2)]


@pytest.mark.parametrize(("bounds", "length"), [({"max_draft_tokens": 0}, 0), ({"max_draft_tokens": 2}, 2), ({}, 4)])
def test_grammars_keep_to_the_bounds_of_a_request(
    speculator: Speculator,
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    bounds: dict[str, int],
    length: int,
) -> None:
    plan = plan_writer().plan([(0, [1, 2], 1)], [(0, replace(new_request([1, 2]), **bounds))])
    drafts = speculator.follow(plan, int32(0, 1), int32(3), 1000, ForcingRows())
    assert (drafts is None) if not length else (rows_of(drafts) == [list(range(30, 30 + length))])
    plan = plan_writer().plan([(0, [1, 2], 1)], [(0, new_request([1, 2], max_output_tokens=3))])
    assert rows_of(speculator.follow(plan, int32(0, 1), int32(3), 1000, ForcingRows())) == [[30]]


def test_the_controller_decides_about_grammars_too(
    plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    """While a token costs as much as a step, none is checked."""
    drafter = NgramDrafter(8, 256, 4, VOCAB)
    controller = DraftController(8, 64, drafter.max_confidence + 1)
    for num_tokens in (1, 2, 4, 8):
        controller.cost.observe(num_tokens, 1000 * num_tokens)
    speculator = Speculator(drafter, controller, max_num_sequences=8, max_draft_tokens=4, vocab_size=VOCAB)
    plan = plan_writer().plan([(0, [1, 2], 1)], [(0, new_request([1, 2]))])
    assert speculator.follow(plan, int32(0, 1), int32(3), 1000, ForcingRows()) is None
    assert speculator.state is DraftState.NO_GAIN


def test_the_controller_that_a_server_opens_knows_grammars(
    plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    config = DeviceConfig(num_blocks=64, max_num_sequences=8, max_model_len=256, speculation="auto")
    speculator = open_speculator(config, VOCAB)
    assert speculator is not None
    plan = plan_writer().plan([(0, [1, 2], 1)], [(0, new_request([1, 2]))])
    assert rows_of(speculator.follow(plan, int32(0, 1), int32(3), 1000, ForcingRows())) == [[30, 31, 32, 33, 34, 35]]
