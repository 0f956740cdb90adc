from __future__ import annotations

import math

import numpy as np
import pytest

from foreword.service.frontend.model import ServedModel
from foreword.service.frontend.prompt_echo import PromptEcho, PromptPart
from foreword.service.frontend.requests import read_settings
from foreword.v1 import generation_pb2

from .conftest import INFO, scores_of

TEXT = "ab\u00e9d"
IDS = np.array(list(TEXT.encode()), np.int32)


@pytest.fixture
def echo(toy_model: ServedModel) -> PromptEcho:
    spec = generation_pb2.GenerationSpec(
        prompt=TEXT, output={"prompt_logprobs": True, "echo_prompt": True, "ranks": True, "top_logprob_count": 2}
    )
    return PromptEcho(read_settings(spec, INFO, 10**9), toy_model.text.vocabulary, IDS)


def columns(parts: list[PromptPart]) -> tuple[int, str, list[int], list[int], list[int]]:
    [part] = parts
    tokens = part.tokens
    return part.first_position, part.text, list(tokens.token_ids), list(tokens.ranks), list(tokens.top_token_ids)


def test_parts_follow_each_other_and_end_with_a_character(echo: PromptEcho) -> None:
    first = echo.take()
    assert columns(first) == (0, "a", [97], [0], [0, 0])
    assert math.isnan(first[0].tokens.logprobs[0])
    assert echo.take() == []
    echo.push(scores_of([98, IDS[2]]))
    assert columns(echo.take()) == (1, "b", [98], [99], [98, 97])
    echo.push(scores_of([IDS[3]]))
    assert columns(echo.take())[:2] == (2, "\u00e9")
    echo.push(scores_of([100]))
    assert columns(echo.take()) == (4, "d", [100], [101], [100, 99])


def test_a_character_that_the_prompt_leaves_incomplete_is_replaced(toy_model: ServedModel) -> None:
    spec = generation_pb2.GenerationSpec(prompt="x", output={"echo_prompt": True})
    settings = read_settings(spec, INFO, 10**9)
    assert columns(PromptEcho(settings, toy_model.text.vocabulary, IDS[:3]).take()) == (
        0,
        "ab\ufffd",
        [97, 98, 195],
        [],
        [],
    )


def test_a_long_prompt_comes_in_parts_of_whole_characters(toy_model: ServedModel) -> None:
    spec = generation_pb2.GenerationSpec(prompt="x", output={"echo_prompt": True, "ranks": True})
    ids = np.array(list((TEXT * 5).encode()), np.int32)
    echo = PromptEcho(read_settings(spec, INFO, 10**9), toy_model.text.vocabulary, ids, max_part_tokens=4)
    parts = echo.take()
    assert [part.first_position for part in parts] == np.cumsum(
        [0, *(len(part.tokens) for part in parts[:-1])]
    ).tolist()
    assert max(len(part.tokens) for part in parts) <= 4
    assert len(parts) > 5
    assert "".join(part.text for part in parts) == TEXT * 5
    for part in parts:
        assert bytes(part.tokens.token_ids.tolist()).decode() == part.text


def test_scores_of_one_step_come_in_parts(toy_model: ServedModel) -> None:
    spec = generation_pb2.GenerationSpec(prompt="x", output={"prompt_logprobs": True, "ranks": True})
    ids = np.arange(60, 90, dtype=np.int32)
    echo = PromptEcho(read_settings(spec, INFO, 10**9), toy_model.text.vocabulary, ids, max_part_tokens=7)
    echo.push(scores_of(ids[1:].tolist()))
    parts = echo.take()
    assert [len(part.tokens) for part in parts] == [1, 7, 7, 7, 7, 1]
    assert [rank for part in parts for rank in part.tokens.ranks] == [0, *(ids[1:] + 1).tolist()]
