"""Which of several drafters a row follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from foreword.gpu.speculative.drafter import Proposals
from foreword.gpu.speculative.hybrid_drafter import HybridDrafter
from foreword.scheduler.request import Request
from foreword.scheduler.step import Int32Array


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NO_OUTPUT = int32()


class FixedDrafter:
    """Proposes the same tokens with the same confidence for every row."""

    max_confidence = 3

    def __init__(self, name: str, *token_ids: int, confidence: int = 1) -> None:
        self.name = name
        self.names = (name,)
        self.token_ids = token_ids
        self.confidence = confidence
        self.admitted: list[tuple[int, int]] = []
        self.observed: list[int] = []

    def admit(self, row: int, request: Request, output_token_ids: Int32Array) -> None:
        self.admitted.append((row, len(output_token_ids)))

    def observe(
        self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array, starts: Int32Array, ends: Int32Array
    ) -> None:
        self.observed += token_ids.tolist()

    def propose(self, rows: Int32Array, limits: Int32Array) -> Proposals:
        drafts = [self.token_ids[:limit] for limit in limits]
        offsets = np.cumsum([0] + [len(ids) for ids in drafts]).astype(np.int32)
        confidences = [self.confidence if ids else 0 for ids in drafts]
        return Proposals(offsets, int32(*(token for ids in drafts for token in ids)), int32(*confidences))


class Rows:
    """A hybrid drafter and how far its rows are."""

    def __init__(self, *drafters: FixedDrafter) -> None:
        self.hybrid = HybridDrafter(drafters, 4, 8)
        self.lengths: dict[int, int] = {}

    def admit(self, row: int, request: Request, output_token_ids: Int32Array = NO_OUTPUT) -> None:
        self.hybrid.admit(row, request, output_token_ids)
        self.lengths[row] = len(request.prompt_token_ids) + len(output_token_ids)

    def observe(self, row: int, *tokens: int) -> None:
        self.hybrid.observe(int32(row), int32(self.lengths[row]), int32(*tokens), int32(0), int32(len(tokens)))
        self.lengths[row] += len(tokens)

    def propose(self, row: int, limit: int = 8) -> tuple[list[int], str]:
        proposals = self.hybrid.propose(int32(row), int32(limit))
        assert proposals.drafters is not None
        return proposals.token_ids.tolist(), self.hybrid.names[proposals.drafters[0]]

    def confidence(self, row: int) -> int:
        return int(self.hybrid.propose(int32(row), int32(8)).confidences[0])


@pytest.fixture
def rows(new_request: Callable[..., Request]) -> Rows:
    rows = Rows(FixedDrafter("left", 1, 2, 3), FixedDrafter("right", 4, 5, 6))
    rows.admit(0, new_request([9]))
    return rows


def test_the_longer_guess_is_taken_while_both_are_as_good(new_request: Callable[..., Request]) -> None:
    rows = Rows(FixedDrafter("short", 1), FixedDrafter("long", 4, 5, 6), FixedDrafter("silent"))
    rows.admit(0, new_request([9]))
    assert rows.propose(0) == ([4, 5, 6], "long")
    assert rows.propose(0, 1)[1] == "short"  # equal: the first one
    assert rows.propose(0, 0)[0] == []


def test_who_was_right_is_followed_though_it_was_not_proposed(rows: Rows) -> None:
    assert rows.propose(0) == ([1, 2, 3], "left")
    rows.observe(0, 4)
    assert rows.propose(0) == ([4, 5, 6], "right")
    for _ in range(20):
        rows.propose(0)
        rows.observe(0, 1, 2, 3, 7)
    assert rows.propose(0) == ([1, 2, 3], "left")


def test_confidence_is_what_was_accepted(rows: Rows) -> None:
    for _ in range(40):
        rows.propose(0)
        rows.observe(0, 1, 2, 3, 7)
    assert rows.confidence(0) == 10
    for _ in range(60):
        rows.propose(0)
        rows.observe(0, 7)
    assert rows.confidence(0) == 1


def test_rows_learn_for_themselves_and_begin_with_what_all_know(
    rows: Rows, new_request: Callable[..., Request]
) -> None:
    rows.admit(1, new_request([9]))
    for _ in range(5):
        rows.propose(0)
        rows.observe(0, 4, 5, 6, 7)
    assert rows.propose(0)[1] == "right"
    assert rows.propose(1)[1] == "left"
    rows.admit(1, new_request([9]))
    assert rows.propose(1)[1] == "right"


def test_tokens_that_were_known_judge_nothing(rows: Rows) -> None:
    rows.observe(0, 8)
    rows.propose(0)
    rows.hybrid.observe(int32(0), int32(0), int32(9, 8), int32(0), int32(2))
    rows.hybrid.observe(int32(0), int32(0), int32(9, 8, 4), int32(0), int32(3))
    assert rows.propose(0) == ([4, 5, 6], "right")


def test_drafts_that_did_not_come_out_are_not_held_against_a_drafter(rows: Rows) -> None:
    """Of three drafts one was checked: what it would have said of the others nobody knows."""
    for _ in range(40):
        rows.propose(0)
        rows.observe(0, 1)
    assert rows.confidence(0) == 10


def test_a_request_names_its_drafter(rows: Rows, new_request: Callable[..., Request]) -> None:
    for row, (name, expected) in enumerate((("", "left"), ("right", "right"), ("left", "left"), ("hybrid", "left"))):
        rows.admit(row, replace(new_request([9]), drafter=name))
        assert rows.propose(row)[1] == expected
    proposals = rows.hybrid.propose(int32(3, 1), int32(2, 1))
    assert proposals.offsets.tolist() == [0, 2, 3]
    assert proposals.token_ids.tolist() == [1, 2, 4]


def test_every_drafter_sees_everything(new_request: Callable[..., Request]) -> None:
    drafters = FixedDrafter("left", 1), FixedDrafter("right", 2)
    rows = Rows(*drafters)
    rows.admit(3, new_request([9, 9]), int32(5))
    rows.observe(3, 6, 7)
    for drafter in drafters:
        assert drafter.admitted == [(3, 1)]
        assert drafter.observed == [6, 7]
