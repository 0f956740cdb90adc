"""What comes out of a verification is distributed as the rules say, enumerated run by run, with every acceptance rule,
number of drafts and several combinations of processors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from foreword.gpu.backends.acceptance import AcceptedTokens
from foreword.gpu.backends.cpu_backend import CpuBackend
from foreword.gpu.backends.sampling import SamplingBatch
from foreword.gpu.backends.sampling_state import SamplingState
from foreword.scheduler.request import AcceptanceRule, Request, SamplingParams, StoppingParams
from tests.gpu.backends.test_sampling_distribution import (
    EOS,
    LOGITS,
    MIN_OUTPUT,
    OUTPUT,
    PROCESSORS,
    PROMPT,
    VOCAB,
    probabilities,
)

SEQUENCES, MOST_DRAFTS = 1200, 5
ROWS = [LOGITS[7 * i :] + LOGITS[: 7 * i] for i in range(MOST_DRAFTS + 1)]
COMBINATIONS = [
    (),
    ("bias", "allowed"),
    ("penalties",),
    ("temperature", "top_k"),
    ("top_p", "penalties"),
    ("min_p", "temperature"),
    ("typical_p", "bias"),
    tuple(PROCESSORS),
]


def sampling(names: tuple[str, ...]) -> SamplingParams:
    return SamplingParams(**{name: value for used in names for name, value in PROCESSORS[used].items()})


def runs(params: SamplingParams, drafts: list[int]) -> dict[tuple[int, int], float]:
    """Probability of each number of accepted drafts and the token behind them."""
    expected, reached = {}, 1.0
    for i in range(len(drafts) + 1):
        p = probabilities(params, OUTPUT + drafts[:i], ROWS[i])
        draft = drafts[i] if i < len(drafts) else None
        expected |= {(i, token): reached * share for token, share in p.items() if token != draft}
        reached *= p.get(draft, 0.0) if draft is not None else 0.0
    return expected


def likely_drafts(params: SamplingParams, count: int) -> list[int]:
    """The most probable token at each place, but the second at the third."""
    drafts: list[int] = []
    for i in range(count):
        p = probabilities(params, OUTPUT + drafts, ROWS[i])
        drafts.append(sorted(p, key=lambda token: -p[token])[min(1 if i == 2 else 0, len(p) - 1)])
    return drafts


def verify(
    writer: Any, params: SamplingParams, rule: AcceptanceRule, drafts: list[int], logits: list[list[float]]
) -> AcceptedTokens:
    """Check the same drafts behind the same output for many seeds."""
    state, num_rows = SamplingState(1, VOCAB), len(drafts) + 1
    stopping = StoppingParams(100, MIN_OUTPUT, EOS)
    request = Request(0, np.array(PROMPT, np.int32), stopping, params, acceptance=rule)
    state.admit(0, request, np.array(OUTPUT, np.int32))
    plan = writer.plan([(0, PROMPT + OUTPUT + drafts, num_rows)])
    one = state.select(plan)
    tables = {
        name: replace(table, index=np.tile(table.index, SEQUENCES))
        for name in ("biases", "masks", "history")
        for table in [getattr(one, name)]
    }
    arrays = {
        field.name: np.tile(value, (SEQUENCES, *[1] * (value.ndim - 1)))
        for field in fields(one)
        if field.name not in {*tables, "num_top"}
        for value in [getattr(one, field.name)]
    }
    seeds = np.random.default_rng(len(drafts)).integers(0, 1 << 63, SEQUENCES, np.uint64)
    batch = SamplingBatch(**tables, **arrays | {"seed": np.repeat(seeds, num_rows)})
    input_ids = np.tile(plan.token_ids[plan.logits_indices], SEQUENCES)
    offsets = (np.arange(SEQUENCES + 1) * num_rows).astype(np.int32)
    backend = CpuBackend("float32", num_threads=2)
    return backend.sample_and_accept(torch.tensor(logits * SEQUENCES), batch, input_ids, offsets)()


@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("names", COMBINATIONS)
def test_runs_follow_the_enumerated_distribution(
    plan_writer: Callable[..., Any], names: tuple[str, ...], rule: AcceptanceRule
) -> None:
    params = sampling(names)
    for num_drafts in range(MOST_DRAFTS + 1):
        drafts = likely_drafts(params, num_drafts)
        tokens = verify(plan_writer(), params, rule, drafts, ROWS[: num_drafts + 1])
        assert not tokens.failed.any()
        expected, lengths = runs(params, drafts), np.diff(tokens.offsets)
        last = tokens.token_ids[tokens.offsets[1:] - 1]
        counts = dict.fromkeys(expected, 0)
        for length, token in zip(lengths.tolist(), last.tolist(), strict=True):
            counts[length - 1, token] += 1  # a run that is not possible is no key
        common = [(counts[run], p * SEQUENCES) for run, p in expected.items() if p * SEQUENCES >= 5]
        rest = SEQUENCES - sum(mean for _, mean in common)
        chi_square = sum((seen - mean) ** 2 / mean for seen, mean in common)
        if rest >= 1:
            chi_square += (SEQUENCES - sum(seen for seen, _ in common) - rest) ** 2 / rest
        degrees = max(len(common) - (rest < 1), 1)
        assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 3, (names, num_drafts, chi_square, degrees)


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_drafts_that_cannot_be_drawn_are_never_accepted(plan_writer: Callable[..., Any], rule: AcceptanceRule) -> None:
    params = SamplingParams(banned_token_ids=(4,))
    for draft in (4, EOS[0], VOCAB, -1):
        tokens = verify(plan_writer(), params, rule, [draft], ROWS[:2])
        assert (np.diff(tokens.offsets) == 1).all()
        assert set(tokens.token_ids.tolist()) <= set(range(VOCAB)) - {4, *EOS}


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_greedy_drafts_are_compared(plan_writer: Callable[..., Any], rule: AcceptanceRule) -> None:
    params = SamplingParams(temperature=0.0)
    right = [max(set(range(VOCAB)) - {*EOS}, key=row.__getitem__) for row in ROWS]
    tokens = verify(plan_writer(), params, rule, [*right[:3], right[3] + 1], ROWS[:5])
    assert (np.diff(tokens.offsets) == 4).all()
    assert tokens.token_ids[:4].tolist() == right[:4]


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_one_token_left_is_always_accepted(plan_writer: Callable[..., Any], rule: AcceptanceRule) -> None:
    """Probability 1 is accepted for every random number there is, and leaves nothing to draw instead."""
    tokens = verify(plan_writer(), SamplingParams(allowed_token_ids=(6,)), rule, [6, 6], ROWS[:3])
    assert (tokens.token_ids == 6).all()
    assert (np.diff(tokens.offsets) == 3).all()
