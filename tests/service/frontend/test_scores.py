"""Ranks, most probable tokens and the prompt, as callers get them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from foreword.scheduler.step import FinishReason
from foreword.v1 import generation_pb2

from .conftest import EOS, Harness
from .rpc import failure_of, read_events, streamed, unary

EVERYTHING = {
    "logprobs": True,
    "ranks": True,
    "top_logprob_count": 2,
    "prompt_logprobs": True,
    "echo_prompt": True,
    "return_token_bytes": True,
}


def top(delta: Any) -> list[tuple[list[int], list[float], list[bytes]]]:
    return [(list(each.token_ids), list(each.logprobs), list(each.token_bytes)) for each in delta.top_logprobs]


async def test_scores_come_with_their_tokens(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(output={"ranks": True, "top_logprob_count": 2}))
    [sequence] = await harness.engine.arrival()
    assert (sequence.request.want_ranks, sequence.request.num_top_logprobs) == (True, 2)
    assert not sequence.request.want_prompt_logprobs
    harness.engine.step({sequence: "ab"})
    harness.engine.step({sequence: "c"}, FinishReason.LENGTH)
    [delta] = [event.output_delta for event in await read_events(call) if event.HasField("output_delta")]
    assert list(delta.token_ids) == [97, 98, 99]
    assert list(delta.ranks) == [98, 99, 100]
    assert top(delta) == [([i, i - 1], [-i, 1 - i], []) for i in (97, 98, 99)]
    assert not delta.logprobs


@pytest.mark.parametrize("wanted", [{}, {"ranks": True}, {"top_logprob_count": 3}, {"logprobs": True}])
async def test_columns_are_as_long_as_the_tokens_or_empty(harness: Harness, wanted: dict[str, Any]) -> None:
    call = harness.generation.StreamGenerateText(streamed(output=wanted))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "abc"})
    harness.engine.step({sequence: [EOS]}, FinishReason.EOS)
    delta = next(event.output_delta for event in await read_events(call) if event.HasField("output_delta"))
    assert len(delta.token_ids) == 3
    assert len(delta.ranks) == (3 if "ranks" in wanted else 0)
    assert [len(each.token_ids) for each in delta.top_logprobs] == ([3] * 3 if "top_logprob_count" in wanted else [])
    assert len(delta.logprobs) == (3 if "logprobs" in wanted else 0)


async def test_a_stop_string_cuts_text_and_columns_at_the_same_token(harness: Harness) -> None:
    spec = {"output": EVERYTHING, "stopping": {"stop_strings": ["lo"]}}
    call = harness.generation.StreamGenerateText(streamed(**spec))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "hel"})
    harness.engine.step({sequence: "lo world"})
    deltas = [event.output_delta for event in await read_events(call) if event.HasField("output_delta")]
    assert "".join(delta.text for delta in deltas) == "hel"
    for name in ("token_ids", "logprobs", "ranks", "top_logprobs", "token_bytes"):
        assert sum(len(getattr(delta, name)) for delta in deltas) == 3, name
    assert [rank for delta in deltas for rank in delta.ranks] == [ord(char) + 1 for char in "hel"]


async def test_a_first_token_that_is_the_stop_leaves_nothing(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(output=EVERYTHING | {"prompt_logprobs": False, "echo_prompt": False}))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: [EOS]}, FinishReason.EOS)
    response = await call
    [output] = response.outputs
    assert not output.content.token_ids
    assert not output.content.ranks
    assert output.finished.output_token_count == 0
    assert not response.HasField("prompt")


async def test_the_prompt_is_echoed_before_the_output(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(prompt="h\u00e9llo", output={"echo_prompt": True}))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "x"}, FinishReason.LENGTH)
    events = await read_events(call)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", "prompt_delta", "output_delta", "output_finished", "finished"]
    prompt = events[1].prompt_delta
    assert (prompt.first_position, prompt.text) == (0, "h\u00e9llo")
    assert list(prompt.token_ids) == sequence.request.prompt_token_ids.tolist()
    assert not prompt.logprobs
    assert not prompt.top_logprobs
    assert events[0].started.output.echo_prompt


async def test_a_scored_prompt_comes_in_parts(harness: Harness) -> None:
    """Each part has its own text; what ends inside a character waits for the rest of it."""
    call = harness.generation.StreamGenerateText(streamed(prompt="ab\u00e9d", output=EVERYTHING))
    [sequence] = await harness.engine.arrival()
    ids = sequence.request.prompt_token_ids.tolist()
    assert sequence.request.want_prompt_logprobs
    for count in (2, len(ids) - 3):
        harness.engine.step({sequence: "" if count == 2 else "x"}, num_scored=count)
        await asyncio.sleep(0)
    harness.engine.step({sequence: "y"}, FinishReason.LENGTH)
    parts = [event.prompt_delta for event in await read_events(call) if event.HasField("prompt_delta")]
    assert "".join(part.text for part in parts) == "abéd"
    position = 0
    for part in parts:
        assert part.first_position == position
        lengths = [len(getattr(part, name)) for name in ("logprobs", "ranks", "top_logprobs", "token_bytes")]
        assert lengths == [len(part.token_ids)] * 4
        assert b"".join(part.token_bytes).decode() == part.text
        position += len(part.token_ids)
    whole = [
        entry for part in parts for entry in zip(part.token_ids, part.logprobs, part.ranks, top(part), strict=True)
    ]
    assert [entry[0] for entry in whole] == ids
    assert math.isnan(whole[0][1])
    assert whole[0][2:] == (0, ([], [], []))
    for token_id, logprob, rank, (top_ids, top_logprobs, top_bytes) in whole[1:]:
        assert (logprob, rank) == (-token_id, token_id + 1)
        assert (top_ids, top_logprobs) == ([token_id, token_id - 1], [-token_id, 1 - token_id])
        assert len(top_bytes) == 2


async def test_a_unary_answer_holds_the_whole_prompt(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(output=EVERYTHING))
    [sequence] = await harness.engine.arrival()
    ids = sequence.request.prompt_token_ids.tolist()
    harness.engine.step({sequence: ""}, num_scored=1)
    harness.engine.step({sequence: "x"}, num_scored=len(ids) - 2)
    harness.engine.step({sequence: "y"}, FinishReason.LENGTH)
    prompt = (await call).prompt
    assert list(prompt.token_ids) == ids
    assert list(prompt.ranks) == [0, *(token_id + 1 for token_id in ids[1:])]
    assert len(prompt.top_logprobs) == len(ids)


async def test_output_settings_are_echoed(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(output=EVERYTHING))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "x"}, FinishReason.LENGTH)
    output = (await call).started.output
    assert {name: getattr(output, name) for name in EVERYTHING} == EVERYTHING


async def test_a_prompt_too_long_to_be_scored_is_refused(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.service.frontend.validation.MAX_SCORED_PROMPT", 3)
    prompt = generation_pb2.GenerationSpec(output={"prompt_logprobs": True})
    prompt.prompt_token_ids.ids[:] = [1, 2, 3, 4]
    failure = await failure_of(
        harness.generation.GenerateText(unary(prompt_token_ids=prompt.prompt_token_ids, output=prompt.output))
    )
    assert failure.fields == ["output.prompt_logprobs"]
    assert harness.engine.submitted == []
