"""What ends an output, and what of it is kept."""

from __future__ import annotations

import grpc
import pytest

from foreword.scheduler.step import FinishReason
from foreword.v1 import stopping_pb2

from .conftest import EOS, Harness
from .rpc import streamed, text_of, unary


@pytest.mark.parametrize(("include_stop", "text"), [(False, "one "), (True, "one two")])
async def test_stop_string_ends_the_generation(harness: Harness, include_stop: bool, text: str) -> None:
    stopping = {"stop_strings": ["two"], "include_stop": include_stop}
    call = harness.generation.GenerateText(unary(stopping=stopping))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "one t"})
    harness.engine.step({sequence: "wo three"})
    response = await call
    output = response.outputs[0]
    assert (output.content.text, bytes(output.content.token_ids)) == (text, text.encode())
    assert output.finished.finish_reason == stopping_pb2.FINISH_REASON_STOP_STRING
    assert output.finished.stop_string == "two"
    assert response.finished.usage.output_token_count == len(text)
    assert harness.engine.forgotten == [sequence.request.request_key]


async def test_text_that_may_become_a_stop_string_is_held(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(stopping={"stop_strings": ["END"]}))
    [sequence] = await harness.engine.arrival()
    await call.read()
    harness.engine.step({sequence: "a E"})
    delta = (await call.read()).events[0].output_delta
    assert (delta.text, bytes(delta.token_ids)) == ("a ", b"a ")
    harness.engine.step({sequence: "x"}, FinishReason.LENGTH)
    assert text_of(list((await call.read()).events)) == "Ex"
    assert await call.read() is grpc.aio.EOF


async def test_stop_string_before_eos_in_one_step_wins(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(stopping={"stop_strings": ["b"]}))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: [*b"abc", EOS]}, FinishReason.EOS)
    output = (await call).outputs[0]
    assert (output.content.text, output.finished.finish_reason) == ("a", stopping_pb2.FINISH_REASON_STOP_STRING)


@pytest.mark.parametrize("include_stop", [False, True])
async def test_eos_is_part_of_the_output_only_when_asked_for(harness: Harness, include_stop: bool) -> None:
    call = harness.generation.GenerateText(unary(stopping={"include_stop": include_stop}))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "ab"})
    harness.engine.step({sequence: [EOS]}, FinishReason.EOS)
    response = await call
    output = response.outputs[0]
    assert output.content.text == "ab"
    assert list(output.content.token_ids) == [97, 98, *([EOS] if include_stop else [])]
    assert (output.finished.finish_reason, output.finished.stop_token_id) == (stopping_pb2.FINISH_REASON_EOS, EOS)
    assert response.finished.usage.output_token_count == 2 + include_stop


async def test_stop_token_drawn_first_leaves_an_empty_output(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(stopping={"stop_token_ids": [120]}, output={"logprobs": True}))
    [sequence] = await harness.engine.arrival()
    assert sequence.request.stopping.stop_token_ids == (120,)
    harness.engine.step({sequence: "x"}, FinishReason.STOP_TOKEN)
    response = await call
    assert response.outputs[0].finished.stop_token_id == 120
    assert list(response.outputs[0].content.token_ids) == []
    assert not response.finished.timing.HasField("first_token_duration_micros")
    assert response.finished.usage.output_token_count == 0
