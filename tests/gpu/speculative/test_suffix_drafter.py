"""Suffix drafting against its own definition, written with lists, and who shares outputs with whom."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from foreword.gpu.speculative.suffix_drafter import SuffixDrafter
from foreword.scheduler.request import Request

VOCAB = 1000
CLASSES = [0, 1, 2, 3, 4, 5, 5, 6, 6, 6, *[7] * 6, *[8] * 16, 9, 9]
"""Confidence of each match length."""


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NO_OUTPUT = int32()


def observe(drafter: SuffixDrafter, row: int, position: int, *tokens: int) -> None:
    drafter.observe(int32(row), int32(position), int32(*tokens), int32(0), int32(len(tokens)))


def propose(drafter: SuffixDrafter, row: int, limit: int) -> tuple[list[int], int]:
    proposals = drafter.propose(int32(row), int32(limit))
    return proposals.token_ids.tolist(), int(proposals.confidences[0])


def end(drafter: SuffixDrafter, *rows: int) -> None:
    """The rows take part in a step, but not in the next."""
    drafter.propose(int32(*rows), int32(*[0] * len(rows)))
    drafter.propose(int32(), int32())


def followers(tokens: list[int], context: list[int]) -> Counter[int]:
    """What follows a context wherever it stands, and how often."""
    ends = range(len(context), len(tokens))
    return Counter(tokens[end] for end in ends if tokens[end - len(context) : end] == context)


def repetition(tokens: list[int]) -> list[int]:
    """The longest end of the tokens that stands elsewhere in them too."""
    for length in range(len(tokens) - 1, 0, -1):
        if followers(tokens, tokens[-length:]):
            return tokens[-length:]
    return []


def check(tokens: list[int], drafts: list[int], limit: int) -> None:
    """Each draft is the most frequent follower of the match with the drafts before; no draft that pays is left out."""
    context, survival = repetition(tokens), 1.0
    for draft in [*drafts, None]:
        while context and not (counts := followers(tokens, context)):
            context = context[1:]
        if not context:
            break
        survival *= max(counts.values()) / counts.total()
        if draft is None:
            break
        assert survival >= 0.3
        assert counts[draft] == max(counts.values())
        context = [*context, draft]
    assert not context or survival < 0.3 or len(drafts) == limit


@pytest.fixture
def new_drafter() -> Callable[..., SuffixDrafter]:
    def build(rows: int = 4, max_model_len: int = 400, max_draft_tokens: int = 8) -> SuffixDrafter:
        return SuffixDrafter(rows, max_model_len, max_draft_tokens, VOCAB)

    return build


@pytest.mark.parametrize("seed", range(40))
def test_proposals_are_as_defined(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request], seed: int
) -> None:
    random = Random(seed)
    drafter = new_drafter()
    num_ids = random.choice([1, 2, 3, 5, 8])
    histories: dict[int, list[int]] = {}
    for row in range(4):
        histories[row] = [random.randrange(num_ids) for _ in range(random.randint(1, 30))]
        drafter.admit(row, new_request(histories[row], max_output_tokens=100), NO_OUTPUT)
    for _ in range(20):
        row = random.randrange(4)
        tokens = [random.randrange(num_ids) for _ in range(random.randint(1, 4))]
        observe(drafter, row, len(histories[row]), *tokens)
        histories[row] += tokens
        limits = [random.randint(0, 8) for _ in range(4)]
        proposals = drafter.propose(int32(0, 1, 2, 3), int32(*limits))
        parts = np.split(proposals.token_ids, proposals.offsets[1:-1])
        for row, (history, drafts, limit) in enumerate(zip(histories.values(), parts, limits, strict=True)):
            check(history, drafts.tolist(), limit)
            assert bool(proposals.confidences[row]) == bool(len(drafts))


@pytest.mark.parametrize(("length", "confidence"), list(enumerate(CLASSES))[1:])
def test_confidence_grows_with_the_match(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request], length: int, confidence: int
) -> None:
    drafter = new_drafter()
    tokens = list(range(10, 10 + length))
    drafter.admit(0, new_request([1, *tokens, 2, 3, *tokens]), NO_OUTPUT)
    assert propose(drafter, 0, 2) == ([2, 3], confidence)


def test_what_followed_most_often_is_proposed(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([1, 2, 8, 1, 2, 8, 9, 1, 2, 7, 1, 2]), NO_OUTPUT)
    assert propose(drafter, 0, 1) == ([8], 2)


def test_what_is_known_already_or_behind_a_gap_changes_nothing(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([1, 2, 3]), NO_OUTPUT)
    observe(drafter, 0, 0, 1, 2, 3, 1, 2)
    observe(drafter, 0, 1, 9, 9)
    observe(drafter, 0, 7, 9, 9)
    assert propose(drafter, 0, 3) == ([3, 1, 2], 2)


def test_a_row_given_to_another_request_has_forgotten(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([1, 2, 3, 1]), NO_OUTPUT)
    drafter.admit(0, new_request([1, 2]), NO_OUTPUT)
    assert propose(drafter, 0, 4) == ([], 0)
    assert propose(drafter, 2, 4) == ([], 0)  # a row that never held a request
    with pytest.raises(IndexError):
        drafter.admit(4, new_request([1]), NO_OUTPUT)


def test_ids_outside_the_vocabulary_are_never_proposed(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    for foreign in (VOCAB, -1):
        drafter.admit(0, new_request([1, 2, foreign, 1, 2]), NO_OUTPUT)
        assert foreign not in propose(drafter, 0, 4)[0]
        drafter.admit(0, new_request([1, 2, 3, foreign, 4, 1, 2]), NO_OUTPUT)
        assert propose(drafter, 0, 1) == ([3], 2)


def test_tokens_beyond_what_a_sequence_may_have_are_dropped(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter(max_model_len=6)
    drafter.admit(0, new_request([1, 2, 1], max_output_tokens=1), NO_OUTPUT)
    observe(drafter, 0, 3, 2, 1, 1, 1)
    assert propose(drafter, 0, 4) == ([1, 2, 1, 2], 2)
    observe(drafter, 0, 100, 2)
    assert propose(drafter, 0, 4) == ([1, 2, 1, 2], 2)


# Shared outputs


def test_an_output_is_shared_when_its_row_is_left_out(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    for row in (0, 1):
        drafter.admit(row, new_request([90, 91]), NO_OUTPUT)
    observe(drafter, 0, 2, 1, 2, 3, 4)
    drafter.propose(int32(0, 1), int32(4, 4))
    assert drafter.num_shared_tokens == 0
    drafter.propose(int32(1), int32(4))
    assert drafter.num_shared_tokens == 4
    observe(drafter, 1, 2, 1, 2)
    assert propose(drafter, 1, 4) == ([3, 4], 2)
    assert drafter.num_shared_tokens == 4  # once


def test_an_output_is_shared_when_its_row_is_given_away(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([90]), NO_OUTPUT)
    observe(drafter, 0, 1, 1, 2, 3, 4)
    drafter.admit(0, new_request([1, 2]), NO_OUTPUT)
    assert propose(drafter, 0, 4) == ([3, 4], 2)


def test_prompts_are_not_shared(new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request]) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([1, 2, 3, 4]), NO_OUTPUT)
    end(drafter, 0)
    drafter.admit(1, new_request([1, 2]), NO_OUTPUT)
    assert drafter.num_shared_tokens == 0
    assert propose(drafter, 1, 4) == ([], 0)


@pytest.mark.parametrize(
    ("writer", "reader", "shares"),
    [
        ({}, {}, True),
        ({"tenant": "a"}, {"tenant": "a"}, True),
        ({"tenant": "a"}, {"tenant": "b"}, False),
        ({"tenant": "a"}, {}, False),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
        ({"cache_salt": "a"}, {}, False),
        ({"tenant": "a", "cache_salt": "b"}, {"tenant": "b", "cache_salt": "a"}, False),
        ({"bypass_prefix_cache": True}, {}, False),
        ({}, {"bypass_prefix_cache": True}, False),
        ({"bypass_prefix_cache": True}, {"bypass_prefix_cache": True}, False),
    ],
)
def test_only_requests_of_the_same_tenant_and_salt_share(
    new_drafter: Callable[..., SuffixDrafter],
    new_request: Callable[..., Request],
    writer: dict[str, object],
    reader: dict[str, object],
    shares: bool,
) -> None:
    """How fast a request is tells what drafts it got."""
    drafter = new_drafter()
    drafter.admit(0, replace(new_request([90]), **writer), NO_OUTPUT)
    drafter.admit(1, replace(new_request([90, 1, 2]), **reader), NO_OUTPUT)
    observe(drafter, 0, 1, 1, 2, 3, 4)
    end(drafter, 0)
    observe(drafter, 1, 3, 3)
    assert propose(drafter, 1, 4) == (([4], 1) if shares else ([], 0))


def test_what_a_resumed_sequence_had_generated_is_known_and_not_shared_again(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([90]), NO_OUTPUT)
    observe(drafter, 0, 1, 1, 2, 3)
    drafter.propose(int32(0), int32(4))
    drafter.admit(2, new_request([90]), int32(1, 2, 3))
    observe(drafter, 2, 4, 1, 2)
    assert propose(drafter, 2, 1) == ([3], 2)
    end(drafter, 2)
    assert drafter.num_shared_tokens == 5


def test_the_longer_match_is_continued(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request]
) -> None:
    drafter = new_drafter()
    drafter.admit(0, new_request([90]), NO_OUTPUT)
    observe(drafter, 0, 1, 1, 2, 3, 50)
    end(drafter, 0)
    drafter.admit(1, new_request([2, 3, 60, 1, 2, 3]), NO_OUTPUT)
    assert propose(drafter, 1, 1) == ([50], 3)
    drafter.admit(1, new_request([1, 2, 3, 60, 1, 2, 3]), NO_OUTPUT)
    assert propose(drafter, 1, 1) == ([60], 3)


@pytest.mark.parametrize("seed", range(10))
def test_shared_matches_are_as_defined(
    new_drafter: Callable[..., SuffixDrafter], new_request: Callable[..., Request], seed: int
) -> None:
    """While other outputs come in: those split the states of matches that are being followed."""
    random = Random(seed)
    drafter = new_drafter(rows=2)
    shared: list[list[int]] = []
    current: list[int] = []
    matched = 0  # tokens at the end, followed one by one, that stand in a shared output
    drafter.admit(0, new_request([99], max_output_tokens=300), NO_OUTPUT)
    for _ in range(100):
        current.append(random.randrange(3))
        observe(drafter, 0, len(current), current[-1])
        matched = next(n for n in range(matched + 1, -1, -1) if not n or any(
            output[i : i + n] == current[-n:] for output in shared for i in range(len(output) - n + 1)
        ))  # fmt: skip
        own = len(repetition([99, *current]))
        counts = sum((followers(output, current[-matched:]) for output in shared if matched), Counter[int]())
        drafts, confidence = propose(drafter, 0, 1)
        if drafts:
            assert confidence == CLASSES[max(matched, own)]
        if drafts and matched > own and counts:
            assert counts[drafts[0]] == max(counts.values())
        if random.random() < 0.3:
            shared.append([random.randrange(3) for _ in range(random.randint(1, 8))])
            drafter.admit(1, new_request([99]), NO_OUTPUT)
            observe(drafter, 1, 1, *shared[-1])
            drafter.propose(int32(0, 1), int32(0, 0))
            drafter.propose(int32(0), int32(0))


def test_old_outputs_go_and_their_matches_with_them(new_request: Callable[..., Request]) -> None:
    drafter = SuffixDrafter(3, 40_000, 4, VOCAB)
    drafter.admit(2, new_request([90, 1, 2]), NO_OUTPUT)
    for token, num_tokens in ((3, 2), (4, 32_768), (5, 32_768)):
        drafter.admit(0, new_request([90], max_output_tokens=num_tokens + 2), NO_OUTPUT)
        observe(drafter, 0, 1, 1, 2, *[token] * (num_tokens - 2), token)
        end(drafter, 0)
        assert drafter.num_shared_tokens <= 65_536
        assert propose(drafter, 2, 1)[0] in ([], [3], [4], [5])
    observe(drafter, 2, 3, 3)
    assert propose(drafter, 2, 1) == ([], 0)
    observe(drafter, 2, 4, 5, 5)
    assert propose(drafter, 2, 2)[0] == [5, 5]


def test_scopes_are_bounded(new_request: Callable[..., Request]) -> None:
    drafter = SuffixDrafter(2, 300, 4, VOCAB)
    for tenant in range(1100):
        drafter.admit(0, replace(new_request([90], max_output_tokens=300), tenant=f"t{tenant}"), NO_OUTPUT)
        observe(drafter, 0, 1, *[tenant % VOCAB] * 200)
        end(drafter, 0)
    assert drafter.num_shared_tokens <= 262_144
    drafter.admit(0, replace(new_request([90]), tenant="t1099"), NO_OUTPUT)
    observe(drafter, 0, 1, 99)
    assert propose(drafter, 0, 1) == ([99], 1)


def test_memory_goes_with_the_row(new_request: Callable[..., Request]) -> None:
    drafter = SuffixDrafter(1, 100_000, 4, VOCAB)
    request = new_request(list(range(1000)) * 20, max_output_tokens=100)
    drafter.admit(0, request, NO_OUTPUT)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        drafter.admit(0, request, NO_OUTPUT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB; each takes about 2,600


@pytest.mark.parametrize("num_ids", [1, 3, 900])
def test_a_token_costs_the_same_however_long_the_sequence_is(new_request: Callable[..., Request], num_ids: int) -> None:
    """The bound is far above the measured cost."""
    drafter = SuffixDrafter(1, 200_000, 4, VOCAB)
    tokens = np.random.default_rng(0).integers(0, num_ids, 100_000)
    start = time.perf_counter()
    drafter.admit(0, new_request(tokens, max_output_tokens=1), NO_OUTPUT)
    assert (time.perf_counter() - start) / 100_000 < 5e-6
