from __future__ import annotations

from foreword.clients import Message
from foreword.clients.generation import GenerationBuilder
from foreword.v1.generation_pb2 import (
    GenerationEvent,
    GenerationFinished,
    GenerationStarted,
    OutputDelta,
    OutputFinished,
    PromptDelta,
)
from foreword.v1.stopping_pb2 import FinishReason
from foreword.v1.timing_pb2 import StepTiming
from foreword.v1.usage_pb2 import Usage


def test_events_become_one_generation() -> None:
    builder = GenerationBuilder()
    for event in (
        GenerationEvent(started=GenerationStarted(request_id="r")),
        GenerationEvent(prompt_delta=PromptDelta(text="He", token_ids=[1], first_position=0)),
        GenerationEvent(prompt_delta=PromptDelta(text="llo", token_ids=[2], first_position=1)),
        GenerationEvent(output_delta=OutputDelta(output_index=1, text="b", token_ids=[20])),
        GenerationEvent(
            output_delta=OutputDelta(text="a", token_ids=[10], logprobs=[-1.0], step_timings=[StepTiming(step_id=4)])
        ),
        GenerationEvent(output_delta=OutputDelta(token_ids=[11], logprobs=[-2], step_timings=[StepTiming(step_id=5)])),
        GenerationEvent(output_delta=OutputDelta(output_index=1, text="B", token_ids=[21])),
        GenerationEvent(
            output_finished=OutputFinished(output_index=1, finish_reason=FinishReason.FINISH_REASON_LENGTH)
        ),
        GenerationEvent(output_delta=OutputDelta(text="A", token_ids=[12], logprobs=[-3.0])),
        GenerationEvent(output_finished=OutputFinished(finish_reason=FinishReason.FINISH_REASON_STOP_STRING)),
        GenerationEvent(finished=GenerationFinished(usage=Usage(output_token_count=5))),
    ):
        builder.add(event)
    generation = builder.build()
    assert generation.request_id == "r"
    assert generation.prompt == PromptDelta(text="Hello", token_ids=[1, 2])
    assert generation.text == "aA"
    assert list(generation.token_ids) == [10, 11, 12]
    assert list(generation.outputs[0].content.logprobs) == [-1, -2, -3]
    assert [timing.step_id for timing in generation.outputs[0].content.step_timings] == [4, 5]
    assert generation.finish_reason == "STOP_STRING"
    assert generation.message == Message("assistant", "aA")
    second = generation.outputs[1]
    assert (second.content.output_index, second.content.text, list(second.content.token_ids)) == (1, "bB", [20, 21])
    assert second.finished.finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert generation.usage.output_token_count == 5


def test_an_output_without_a_token() -> None:
    builder = GenerationBuilder()
    builder.add(GenerationEvent(output_finished=OutputFinished(finish_reason=FinishReason.FINISH_REASON_EOS)))
    builder.add(GenerationEvent(finished=GenerationFinished()))
    generation = builder.build()
    assert (generation.text, list(generation.token_ids), generation.finish_reason) == ("", [], "EOS")
