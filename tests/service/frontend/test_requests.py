"""Numbers at and beyond their limits: accepted as they are, or refused by name."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from foreword.scheduler.errors import InvalidField
from foreword.service.engine.messages import EngineInfo
from foreword.service.frontend.requests import read_settings
from foreword.service.frontend.settings import GenerationSettings
from foreword.v1 import generation_pb2

NAN, INF, HUGE = math.nan, math.inf, 3e38
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

INFO = EngineInfo(
    device="cpu",
    device_name="test",
    dtype="float32",
    architecture="Toy",
    vocab_size=300,
    num_parameters=1,
    max_model_len=1000,
    max_num_sequences=4,
    max_num_batched_tokens=64,
    block_size=16,
    num_blocks=100,
    load_duration_s=0.0,
)

GOOD: dict[str, list[Any]] = {
    "sampling.temperature": [0.0, 1e-45, 1.0, HUGE],
    "sampling.top_p": [1e-45, 0.5, 1.0],
    "sampling.top_k": [0, 1, INT_MAX],
    "sampling.min_p": [0.0, 1e-45, 1.0],
    "sampling.typical_p": [1e-45, 1.0],
    "sampling.frequency_penalty": [-2.0, 0.0, 2.0],
    "sampling.presence_penalty": [-2.0, 0.0, 2.0],
    "sampling.repetition_penalty": [1e-45, 1.0, 10.0],
    "sampling.seed": [-(2**63), -1, 0, 2**63 - 1],
    "stopping.max_output_token_count": [1, INT_MAX],
    "output.coalesce_token_count": [1, 2, INT_MAX],
    "priority": [-100, 0, 100],
}
BAD: dict[str, list[Any]] = {
    "sampling.temperature": [NAN, INF, -INF, -1e-45, -1.0, -HUGE],
    "sampling.top_p": [NAN, INF, -INF, 0.0, -0.5, 1.001, HUGE],
    "sampling.top_k": [-1, INT_MIN],
    "sampling.min_p": [NAN, INF, -INF, -0.1, 1.001, HUGE],
    "sampling.typical_p": [NAN, INF, -INF, 0.0, -0.5, 1.001, HUGE],
    "sampling.frequency_penalty": [NAN, INF, -INF, -2.001, 2.001, HUGE],
    "sampling.presence_penalty": [NAN, INF, -INF, -2.001, 2.001, HUGE],
    "sampling.repetition_penalty": [NAN, INF, -INF, 0.0, -1.0, 10.01, HUGE],
    "sampling.output_count": [0, -1, INT_MAX, INT_MIN],
    "stopping.max_output_token_count": [0, -1, INT_MIN],
    "stopping.min_output_token_count": [-1, INT_MIN],
    "output.coalesce_token_count": [0, -1, INT_MIN],
    "output.top_logprob_count": [-1, 21, INT_MAX, INT_MIN],
    "priority": [-101, 101, INT_MAX, INT_MIN],
}


def read(fields: dict[str, Any]) -> GenerationSettings:
    spec = generation_pb2.GenerationSpec(prompt="x")
    for path, value in fields.items():
        *parents, name = path.split(".")
        message: Any = spec
        for parent in parents:
            message = getattr(message, parent)
        setattr(message, name, value)
    return read_settings(spec, INFO, max_duration_ns=10**9)


@pytest.mark.parametrize("path", GOOD)
def test_values_up_to_the_limits_are_taken(path: str) -> None:
    for value in GOOD[path]:
        read({path: value})


@pytest.mark.parametrize("path", BAD)
def test_values_beyond_the_limits_are_refused_by_name(path: str) -> None:
    for value in BAD[path]:
        with pytest.raises(InvalidField) as refusal:
            read({path: value})
        assert refusal.value.field == path, value


@pytest.mark.parametrize("path", BAD)
def test_a_bad_value_is_refused_whatever_else_is_asked_for(path: str) -> None:
    for other, values in {**GOOD, **BAD}.items():
        if other == path:
            continue
        for value, bad in itertools.product(values, BAD[path]):
            with pytest.raises(InvalidField) as refusal:
                read({other: value, path: bad})
            allowed = {path, other} if value in BAD.get(other, []) else {path}
            assert refusal.value.field in allowed, (value, bad)
