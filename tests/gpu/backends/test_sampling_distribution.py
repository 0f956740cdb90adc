"""Every combination of processors draws from the distribution that its rules describe, enumerated id by id."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from foreword.gpu.backends.cpu_backend import CpuBackend
from foreword.gpu.backends.sampling import SamplingBatch
from foreword.gpu.backends.sampling_state import SamplingState
from foreword.scheduler.request import Request, SamplingParams, StoppingParams

VOCAB, DRAWS = 23, 1500
LOGITS = [round(2 * math.sin(7.0 * i), 3) for i in range(VOCAB)]
PROMPT, OUTPUT = [3, 17, 17, 5], [5, 9, 9, 9, 20]
MIN_OUTPUT, EOS = 9, (11,)
PROCESSORS = {
    "bias": {"logit_bias": ((2, 1.5), (9, 2.0), (17, -3.0))},
    "allowed": {"allowed_token_ids": tuple(range(20)), "banned_token_ids": (4, 13)},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": -0.5},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.85},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.8},
}


def probabilities(
    params: SamplingParams, output: Sequence[int] = OUTPUT, row: Sequence[float] = LOGITS
) -> dict[int, float]:
    """What remains possible, and how probable it is, by the words of the protocol."""
    logits = dict(enumerate(row))
    for token, value in params.logit_bias:
        logits[token] += value
    allowed = set(params.allowed_token_ids or range(VOCAB)) - set(params.banned_token_ids)
    allowed -= set(EOS if len(output) < MIN_OUTPUT else ())
    logits = {token: x for token, x in logits.items() if token in allowed}
    for token in logits:
        if token in [*PROMPT, *output]:
            logits[token] *= params.repetition_penalty ** (-1 if logits[token] > 0 else 1)
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty * (token in output)
    kept = normalised({token: x / params.temperature for token, x in logits.items()})
    by_probability = sorted(kept, key=lambda token: -kept[token])
    if params.top_k:
        kept = normalised_part(kept, by_probability[: params.top_k])
    kept = normalised_part(kept, smallest(kept, sorted(kept, key=lambda t: -kept[t]), params.top_p))
    kept = normalised_part(kept, [t for t in kept if kept[t] >= params.min_p * max(kept.values())])
    entropy = -sum(p * math.log(p) for p in kept.values())
    by_typicality = sorted(kept, key=lambda t: abs(-math.log(kept[t]) - entropy))
    return normalised_part(kept, smallest(kept, by_typicality, params.typical_p))


def normalised(scaled: dict[int, float]) -> dict[int, float]:
    total = sum(math.exp(x) for x in scaled.values())
    return {token: math.exp(x) / total for token, x in scaled.items()}


def normalised_part(kept: dict[int, float], tokens: list[int]) -> dict[int, float]:
    total = sum(kept[token] for token in tokens)
    return {token: kept[token] / total for token in tokens}


def smallest(kept: dict[int, float], order: list[int], mass: float) -> list[int]:
    """The first of the order that reach a mass together."""
    if mass == 1:
        return order
    reached = itertools.accumulate(kept[token] for token in order)
    return order[: 1 + next(i for i, total in enumerate(reached) if total >= mass)]


@pytest.mark.parametrize("first", [(), ("bias",), ("penalties",), ("bias", "allowed", "penalties"), ("allowed",)])
def test_draws_follow_the_enumerated_distribution(plan_writer: Callable[..., Any], first: tuple[str, ...]) -> None:
    backend = CpuBackend("float32", num_threads=2)
    last = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    for use in itertools.product((False, True), repeat=len(last)):
        names = [*first, *itertools.compress(last, use)]
        values = {name: value for processor in names for name, value in PROCESSORS[processor].items()}
        expected = probabilities(SamplingParams(**values))
        tokens = draw(backend, plan_writer(), SamplingParams(seed=len(names) * 1000 + sum(map(len, names)), **values))
        counts = np.bincount(tokens, minlength=VOCAB)
        assert set(np.flatnonzero(counts)) <= set(expected), names
        cells = [(counts[token], p * DRAWS) for token, p in expected.items() if p * DRAWS >= 5]
        chi_square = sum((seen - mean) ** 2 / mean for seen, mean in cells)
        # mean and deviation of the distribution of chi-square: 5 deviations are exceeded with probability 1e-4
        degrees = max(len(cells) - 1, 1)
        assert chi_square < degrees + 5 * math.sqrt(2 * degrees) + 3, (names, chi_square, degrees)


def draw(backend: CpuBackend, writer: Any, params: SamplingParams) -> np.ndarray:
    """Draw once at each of many positions, with the same history."""
    state = SamplingState(1, VOCAB)
    stopping = StoppingParams(DRAWS + MIN_OUTPUT + 1, MIN_OUTPUT, EOS)
    state.admit(0, Request(0, np.array(PROMPT, np.int32), stopping, params), np.array(OUTPUT, np.int32))
    known = PROMPT + OUTPUT
    one = state.select(writer.plan([(0, known, 1)]))
    tables = {
        name: replace(table, index=np.repeat(table.index, DRAWS))
        for name in ("biases", "masks", "history")
        for table in [getattr(one, name)]
    }
    arrays = {
        field.name: np.repeat(getattr(one, field.name), DRAWS, axis=0)
        for field in fields(one)
        if field.name not in {*tables, "num_top"}
    }
    batch = SamplingBatch(**tables, **arrays | {"position": len(known) + np.arange(DRAWS)})
    return backend.sample(torch.tensor([LOGITS] * DRAWS), batch).token_ids
