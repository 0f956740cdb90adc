"""Answers larger than a message: split on streams, refused by name in unary calls."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from foreword.scheduler.step import FinishReason
from foreword.service.config import ServerConfig
from foreword.service.frontend import response_size
from foreword.service.frontend.requests import read_settings
from foreword.service.frontend.response_size import least_response_bytes, packed
from foreword.v1 import generation_pb2, timing_pb2
from foreword.v1.generation_service_pb2 import BidiGenerateTextRequest, StartCommand

from .conftest import INFO, SPECIAL_TOKENS, Harness
from .rpc import decode, failure_of, spec, streamed, unary

KIB = 1024
EVERYTHING = {
    "logprobs": True,
    "ranks": True,
    "top_logprob_count": 3,
    "return_token_bytes": True,
    "timing_level": timing_pb2.TIMING_LEVEL_STEP,
}
TEXT = "h\u00e9llo w\u00f6rld " * 60


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(listen_address="127.0.0.1:0", max_send_message_bytes=64 * KIB, stream_buffer_tokens=8192)


def events(sizes: list[int]) -> list[generation_pb2.GenerationEvent]:
    return [generation_pb2.GenerationEvent(request_id="x" * size) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [([], []), ([10], [1]), ([10, 10, 10], [3]), ([40, 40, 40], [2, 1]), ([90, 5, 90, 300, 5], [2, 1, 1, 1])],
)
def test_events_are_packed_in_order_up_to_the_limit(sizes: list[int], lengths: list[int]) -> None:
    packs = list(packed(events(sizes), 120))
    assert [len(pack) for pack in packs] == lengths
    assert [event for pack in packs for event in pack] == events(sizes)


async def test_a_scored_prompt_is_split_over_messages(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_size, "MAX_PACKED_BYTES", 4 * KIB)
    call = harness.generation.StreamGenerateText(
        streamed(prompt=TEXT, output=EVERYTHING | {"prompt_logprobs": True, "echo_prompt": True})
    )
    [sequence] = await harness.engine.arrival()
    ids = sequence.request.prompt_token_ids.tolist()
    harness.engine.step({sequence: "x"}, num_scored=len(ids) - 1)
    harness.engine.step({sequence: "y"}, FinishReason.LENGTH)
    messages = [message async for message in call]
    assert max(message.ByteSize() for message in messages) <= 4 * KIB
    parts = [event.prompt_delta for each in messages for event in each.events if event.HasField("prompt_delta")]
    assert len(parts) > 5
    assert "".join(part.text for part in parts) == TEXT
    assert [token_id for part in parts for token_id in part.token_ids] == ids
    assert [rank for part in parts for rank in part.ranks] == [0, *(token_id + 1 for token_id in ids[1:])]
    assert [part.first_position for part in parts] == [sum(len(p.ranks) for p in parts[:i]) for i in range(len(parts))]


async def test_tokens_without_bytes_that_were_held_are_split_too(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is released before their text is known to go on."""
    monkeypatch.setattr(response_size, "MAX_PACKED_BYTES", 4 * KIB)
    output = EVERYTHING | {"prompt_logprobs": True, "echo_prompt": True}
    ids = [SPECIAL_TOKENS["<s>"]] * 500
    call = harness.generation.StreamGenerateText(streamed(prompt_token_ids={"ids": ids}, output=output))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: ""}, num_scored=len(ids) - 1)
    for _ in range(0, 300, 50):
        harness.engine.step({sequence: [SPECIAL_TOKENS["<s>"]] * 50})
    harness.engine.step({sequence: "y"}, FinishReason.LENGTH)
    messages = [message async for message in call]
    assert max(message.ByteSize() for message in messages) <= 4 * KIB
    parts = [event.prompt_delta for each in messages for event in each.events if event.HasField("prompt_delta")]
    assert sum(len(part.token_ids) for part in parts) == 500
    deltas = [event.output_delta for each in messages for event in each.events if event.HasField("output_delta")]
    assert sum(len(delta.token_ids) for delta in deltas) == 301
    assert [delta.text for delta in deltas if delta.text] == [deltas[-1].text] == ["y"]
    for delta in deltas:
        assert sum(step.token_count for step in delta.step_timings) == len(delta.token_ids)


async def test_what_waited_for_the_client_is_split_over_messages(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_size, "MAX_PACKED_BYTES", 4 * KIB)
    call = harness.generation.BidiGenerateText()
    await call.write(BidiGenerateTextRequest(start=StartCommand(spec=spec(request_id="r", output=EVERYTHING))))
    [sequence] = await harness.engine.arrival()
    data = TEXT.encode()
    for start in range(0, len(data), 5):
        harness.engine.step({sequence: list(data[start : start + 5])})
    harness.engine.step({sequence: "!"}, FinishReason.LENGTH)
    await call.done_writing()
    messages = [message async for message in call]
    assert max(message.ByteSize() for message in messages) <= 4 * KIB
    deltas = [event.output_delta for each in messages for event in each.events if event.HasField("output_delta")]
    assert len(deltas) > 5
    assert "".join(delta.text for delta in deltas) == TEXT + "!"
    assert [token_id for delta in deltas for token_id in delta.token_ids] == [*data, ord("!")]
    for delta in deltas:
        assert sum(step.token_count for step in delta.step_timings) == len(delta.token_ids)
        assert all(0 < step.sample_offset_micros <= step.emit_offset_micros for step in delta.step_timings)


async def test_a_unary_answer_that_grew_too_large_is_an_error(harness: Harness) -> None:
    call = harness.generation.GenerateText(
        unary(
            request_id="big", output=EVERYTHING, sampling={"output_count": 3}, stopping={"max_output_token_count": 900}
        )
    )
    sequences = await harness.engine.arrival(3)
    harness.engine.step(dict.fromkeys(sequences, "x" * 900), FinishReason.LENGTH)
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESPONSE_TOO_LARGE")
    metadata = failure.details["ErrorInfo"].metadata
    assert metadata["field"] == "output.top_logprob_count"
    assert metadata["max_send_message_bytes"] == str(64 * KIB)
    assert int(metadata["message_bytes"]) > 64 * KIB
    assert harness.outcomes() == {"big": "RESPONSE_TOO_LARGE"}
    errors = harness.server.frontend.metrics._errors
    assert errors == {("foreword.v1.GenerationService/GenerateText", "RESOURCE_EXHAUSTED"): 1}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stopping": {"min_output_token_count": 900, "max_output_token_count": 900}}, "output.top_logprob_count"),
        ({"stopping": {"ignore_eos": True, "max_output_token_count": 900}}, "output.top_logprob_count"),
    ],
)
async def test_a_unary_answer_that_will_be_too_large_is_refused_before_the_work(
    harness: Harness, fields: dict[str, Any], field: str
) -> None:
    output = {"top_logprob_count": 20}
    failure = await failure_of(harness.generation.GenerateText(unary(output=output, **fields)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESPONSE_TOO_LARGE")
    assert failure.details["ErrorInfo"].metadata["field"] == field
    assert harness.engine.submitted == []
    call = harness.generation.StreamGenerateText(streamed(output=output, **fields))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: ""}, FinishReason.CANCELLED)
    assert len([message async for message in call]) > 0


async def test_a_unary_answer_that_its_time_limit_may_keep_small_is_not_refused(harness: Harness) -> None:
    stopping = {"ignore_eos": True, "max_output_token_count": 900, "max_generation_duration": {"seconds": 5}}
    call = harness.generation.GenerateText(unary(output={"top_logprob_count": 20}, stopping=stopping))
    [sequence] = await asyncio.wait_for(harness.engine.arrival(), 5)
    harness.engine.step({sequence: "x"}, FinishReason.DEADLINE)
    assert (await call).outputs[0].content.text == "x"


async def test_a_stream_with_an_event_too_large_for_a_message_ends_with_a_reason(harness: Harness) -> None:
    """What is in effect is echoed in one event."""
    allowed = {"allowed_token_ids": [299] * 16_384, "banned_token_ids": [298] * 16_384}
    call = harness.generation.StreamGenerateText(streamed(sampling=allowed))
    await harness.engine.arrival()
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESPONSE_TOO_LARGE")


async def test_an_event_too_large_for_a_message_ends_its_generation_and_not_the_bidi_stream(harness: Harness) -> None:
    allowed = {"allowed_token_ids": [299] * 16_384, "banned_token_ids": [298] * 16_384}
    call = harness.generation.BidiGenerateText()
    await call.write(BidiGenerateTextRequest(start=StartCommand(spec=spec(request_id="small"))))
    [small] = await harness.engine.arrival()
    await call.write(BidiGenerateTextRequest(start=StartCommand(spec=spec(request_id="big", sampling=allowed))))
    await harness.engine.arrival(2)
    await call.done_writing()
    seen = []
    async for message in call:
        seen += [(event.request_id, event) for event in message.events]
        if message.events[-1].request_id == "big":
            harness.engine.step({small: "x"}, FinishReason.LENGTH)
    [ended] = [event for request_id, event in seen if request_id == "big"]
    failure = decode(ended.finished.error)
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESPONSE_TOO_LARGE")
    last = [event for request_id, event in seen if request_id == "small"][-1]
    assert last.HasField("finished")
    assert not last.finished.HasField("error")
    assert await call.code() is grpc.StatusCode.OK
    assert harness.engine.sequences == {}


@pytest.mark.parametrize("echoes", [False, True])
@pytest.mark.parametrize("count", [1, 2])
async def test_the_least_size_is_no_more_than_the_size(harness: Harness, echoes: bool, count: int) -> None:
    request = unary(
        output=EVERYTHING | {"prompt_logprobs": echoes, "echo_prompt": echoes},
        sampling={"output_count": count},
        stopping={"ignore_eos": True, "max_output_token_count": 50},
    )
    call = harness.generation.GenerateText(request)
    sequences = await harness.engine.arrival(count)
    if echoes:
        harness.engine.step({sequences[0]: ""}, num_scored=4)
    harness.engine.step(dict.fromkeys(sequences, "x" * 50), FinishReason.LENGTH)
    least = least_response_bytes(read_settings(request.spec, INFO, 10**9, streamed=False), 5, 50)
    size = (await call).ByteSize()
    assert size / 2 < least < size
