"""Prompt lookup against its own definition, written with lists."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from foreword.gpu.speculative.ngram_drafter import NgramDrafter
from foreword.scheduler.request import Request

VOCAB = 1000


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NO_OUTPUT = int32()


def observe(drafter: NgramDrafter, row: int, position: int, *tokens: int) -> None:
    drafter.observe(int32(row), int32(position), int32(*tokens), int32(0), int32(len(tokens)))


def propose(drafter: NgramDrafter, row: int, limit: int) -> tuple[list[int], int]:
    proposals = drafter.propose(int32(row), int32(limit))
    return proposals.token_ids.tolist(), int(proposals.confidences[0])


def expected(tokens: list[int | None], limit: int) -> tuple[list[int], int]:
    """The definition: longest suffix of 5 to 2 tokens that stood here before, most recent occurrence, continued."""
    for length in range(5, 1, -1):
        suffix = tokens[-length:]
        if len(tokens) <= length or None in suffix:
            continue
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                known, drafts = list(tokens), []
                while len(drafts) < limit and known[end + len(drafts)] is not None:
                    drafts.append(known[end + len(drafts)])
                    known.append(drafts[-1])
                return drafts, length if drafts else 0
    return [], 0


@pytest.fixture
def new_drafter() -> Callable[..., NgramDrafter]:
    def build(rows: int = 4, max_model_len: int = 400, max_draft_tokens: int = 8) -> NgramDrafter:
        return NgramDrafter(rows, max_model_len, max_draft_tokens, VOCAB)

    return build


@pytest.mark.parametrize("seed", range(40))
def test_proposals_are_as_defined(
    new_drafter: Callable[..., NgramDrafter], new_request: Callable[..., Request], seed: int
) -> None:
    random = Random(seed)
    drafter = new_drafter()
    num_ids = random.choice([1, 2, 3, 10, 50])
    histories: dict[int, list[int | None]] = {}
    for row in range(4):
        histories[row] = [random.randrange(num_ids) for _ in range(random.randint(1, 60))]
        drafter.admit(row, new_request(histories[row], max_output_tokens=200), NO_OUTPUT)
    for _ in range(40):
        row = random.randrange(4)
        tokens = [random.randrange(num_ids) for _ in range(random.randint(1, 4))]
        if random.random() < 0.05:
            histories[row] += [None] * random.randint(1, 3)
        observe(drafter, row, len(histories[row]), *tokens)
        histories[row] += tokens
        for row, history in histories.items():
            limit = random.randint(0, 8)
            assert propose(drafter, row, limit) == expected(history, limit)


def test_rows_are_proposed_for_together(
    new_drafter: Callable[..., NgramDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([1, 2, 3, 1, 2]), NO_OUTPUT)
    drafter.admit(1, new_request([1, 2, 3]), NO_OUTPUT)
    drafter.admit(3, new_request([7, 7, 7]), NO_OUTPUT)
    proposals = drafter.propose(int32(3, 1, 0), int32(2, 8, 100))
    assert proposals.offsets.tolist() == [0, 2, 2, 10]
    assert proposals.token_ids.tolist() == [7, 7, 3, 1, 2, 3, 1, 2, 3, 1]
    assert proposals.confidences.tolist() == [2, 0, 2]


def test_what_is_known_already_changes_nothing(
    new_drafter: Callable[..., NgramDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([1, 2, 3]), NO_OUTPUT)
    observe(drafter, 0, 0, 1, 2, 3, 1, 2)
    observe(drafter, 0, 1, 9, 9)
    assert propose(drafter, 0, 3) == ([3, 1, 2], 2)


def test_a_row_given_to_another_request_has_forgotten(
    new_drafter: Callable[..., NgramDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([1, 2, 3, 1]), NO_OUTPUT)
    drafter.admit(0, new_request([1, 2]), NO_OUTPUT)
    assert propose(drafter, 0, 4) == ([], 0)
    assert propose(drafter, 2, 4) == ([], 0)  # a row that never held a request
    with pytest.raises(IndexError):
        drafter.admit(4, new_request([1]), NO_OUTPUT)


def test_ids_outside_the_vocabulary_are_never_proposed(
    new_drafter: Callable[..., NgramDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([1, 2, VOCAB, 1, 2]), NO_OUTPUT)
    assert propose(drafter, 0, 4) == ([], 0)
    drafter.admit(0, new_request([1, 2, 3, -1, 1, 2]), NO_OUTPUT)
    assert propose(drafter, 0, 4) == ([3], 2)


def test_tokens_beyond_what_a_sequence_may_have_are_dropped(
    new_drafter: Callable[..., NgramDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter(max_model_len=6)
    drafter.admit(0, new_request([1, 2, 1], max_output_tokens=1), NO_OUTPUT)
    observe(drafter, 0, 3, 2, 1, 1, 1)
    assert propose(drafter, 0, 4) == ([1, 2, 1, 2], 2)
    observe(drafter, 0, 100, 2)
    assert propose(drafter, 0, 4) == ([1, 2, 1, 2], 2)


def test_memory_goes_with_the_row(new_request: Callable[..., Request]) -> None:
    drafter = NgramDrafter(1, 100_000, 4, VOCAB)
    request = new_request(list(range(1000)) * 20, max_output_tokens=100)
    drafter.admit(0, request, NO_OUTPUT)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        drafter.admit(0, request, NO_OUTPUT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB; each takes about 1,400


def test_a_token_costs_the_same_however_long_the_sequence_is(new_request: Callable[..., Request]) -> None:
    """All equal tokens are the worst case of a list of occurrences. The bound is far above the measured cost."""
    drafter = NgramDrafter(1, 200_000, 4, VOCAB)
    start = time.perf_counter()
    drafter.admit(0, new_request([7] * 100_000, max_output_tokens=1), NO_OUTPUT)
    assert (time.perf_counter() - start) / 100_000 < 5e-6
