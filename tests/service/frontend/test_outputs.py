"""Generations with several outputs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from foreword.scheduler.errors import EngineUnavailable, InvalidField
from foreword.scheduler.step import FinishReason
from foreword.v1 import generation_pb2, stopping_pb2
from foreword.v1.generation_service_pb2 import BidiGenerateTextRequest, CancelGenerationRequest, StartCommand

from .conftest import FakeSequence, Harness
from .rpc import failure_of, read_events, spec, streamed, unary

EOS = 257


def kinds_of(events: list[generation_pb2.GenerationEvent]) -> list[tuple[str | None, int]]:
    """What happened, and to which output."""
    return [
        (kind, getattr(event, kind).output_index if kind in ("output_delta", "output_finished") else -1)
        for event in events
        if (kind := event.WhichOneof("event"))
    ]


def texts_of(events: list[generation_pb2.GenerationEvent]) -> dict[int, str]:
    texts: dict[int, str] = defaultdict(str)
    for event in events:
        if event.HasField("output_delta"):
            texts[event.output_delta.output_index] += event.output_delta.text
    return texts


async def stream(harness: Harness, num_outputs: int = 3, **fields: Any) -> tuple[Any, list[FakeSequence]]:
    """A stream whose generation was announced, and the sequences of its outputs."""
    sampling = {"output_count": num_outputs, "seed": 5}
    call = harness.generation.StreamGenerateText(streamed(sampling=sampling, **fields))
    sequences = await harness.engine.arrival(num_outputs)
    started = (await call.read()).events[0].started
    assert (started.sampling.output_count, started.sampling.seed) == (num_outputs, 5)
    return call, sequences


async def test_outputs_grow_and_end_on_their_own(harness: Harness) -> None:
    call, [a, b, c] = await stream(harness)
    assert len(harness.engine.submitted) == 1
    harness.engine.step({a: "a"}, num_cached=3)
    assert kinds_of((await call.read()).events) == [("output_delta", 0)]
    harness.engine.step({a: "A", b: "b", c: "c"}, num_cached=3)
    response = await call.read()
    assert kinds_of(response.events) == [("output_delta", 0), ("output_delta", 1), ("output_delta", 2)]
    assert texts_of(response.events) == {0: "A", 1: "b", 2: "c"}
    harness.engine.step({b: [EOS]}, FinishReason.EOS)
    [ended] = (await call.read()).events
    assert ended.output_finished.output_index == 1
    assert ended.output_finished.finish_reason == stopping_pb2.FINISH_REASON_EOS
    assert ended.output_finished.output_token_count == 1
    harness.engine.step({c: "CC", a: "."}, FinishReason.LENGTH)
    events = await read_events(call)
    assert kinds_of(events[:-1]) == [
        ("output_delta", 0),
        ("output_delta", 2),
        ("output_finished", 0),
        ("output_finished", 2),
    ]
    assert [event.output_finished.output_token_count for event in events[2:4]] == [3, 3]
    usage = events[-1].finished.usage
    assert (usage.prompt_token_count, usage.cached_prompt_token_count, usage.output_token_count) == (5, 3, 7)
    timing = events[-1].finished.timing
    assert (timing.step_count, timing.prefill_chunk_count) == (4, 2)
    assert harness.outcomes().popitem()[1] == "CONTEXT_LIMIT,EOS"


async def test_unary_returns_all_outputs_by_index(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(sampling={"output_count": 3}, output={"logprobs": True}))
    [a, b, c] = await harness.engine.arrival(3)
    harness.engine.step({a: "one", b: "three"})
    harness.engine.step({c: [EOS]}, FinishReason.EOS)
    harness.engine.step({b: "!"}, FinishReason.LENGTH)
    assert not call.done()
    harness.engine.step({a: ""}, FinishReason.CANCELLED)
    response = await call
    assert [output.content.text for output in response.outputs] == ["one", "three!", ""]
    assert [len(output.content.logprobs) for output in response.outputs] == [3, 6, 0]
    assert [output.finished.output_index for output in response.outputs] == [0, 1, 2]
    assert response.finished.usage.output_token_count == 9


async def test_timing_is_kept_for_each_output(harness: Harness) -> None:
    call, [a, b] = await stream(harness, 2)
    harness.engine.step({a: "x"})
    await call.read()
    harness.engine.step({a: "x", b: "y"})
    await call.read()
    harness.engine.step({a: "x", b: "y"}, FinishReason.LENGTH)
    events = await read_events(call)
    one, two = (event.output_finished.timing for event in events if event.HasField("output_finished"))
    timing = events[-1].finished.timing
    assert one.first_token_offset_micros == timing.first_token_duration_micros < two.first_token_offset_micros
    assert one.last_token_offset_micros == two.last_token_offset_micros
    assert timing.decode_duration_micros == two.last_token_offset_micros - one.first_token_offset_micros
    gap = two.last_token_offset_micros - two.first_token_offset_micros
    assert abs(two.inter_token_latency.max_micros - gap) <= 1
    parts = (timing.tokenize_duration_micros, timing.queue_duration_micros, timing.prefill_duration_micros)
    assert sum(parts) + timing.delivery_duration_micros == timing.first_token_duration_micros


async def test_a_stop_string_ends_its_own_output(harness: Harness) -> None:
    call, [a, b] = await stream(harness, 2, stopping={"stop_strings": ["END"]})
    harness.engine.step({a: "xE", b: "yE"})
    harness.engine.step({a: "ND..", b: "nd"})
    assert harness.engine.forgotten == [a.request.request_key]
    harness.engine.step({b: "!"}, FinishReason.LENGTH)
    events = await read_events(call)
    assert texts_of(events) == {0: "x", 1: "yEnd!"}
    reasons = [event.output_finished.finish_reason for event in events if event.HasField("output_finished")]
    assert reasons == [stopping_pb2.FINISH_REASON_STOP_STRING, stopping_pb2.FINISH_REASON_CONTEXT_LIMIT]


async def test_cancel_ends_all_outputs(harness: Harness) -> None:
    call, [a, b, c] = await stream(harness, request_id="x")
    harness.engine.step({b: "b"}, FinishReason.LENGTH)
    await harness.generation.CancelGeneration(CancelGenerationRequest(request_id="x"))
    events = await read_events(call)
    reasons = {
        e.output_finished.output_index: e.output_finished.finish_reason for e in events if e.HasField("output_finished")
    }
    cancelled = stopping_pb2.FINISH_REASON_CANCELLED
    assert reasons == {0: cancelled, 1: stopping_pb2.FINISH_REASON_CONTEXT_LIMIT, 2: cancelled}
    assert harness.engine.cancelled == [a.request.request_key, c.request.request_key]


async def test_a_client_that_leaves_frees_all_outputs(harness: Harness) -> None:
    call, sequences = await stream(harness)
    harness.engine.step(dict.fromkeys(sequences, "x"))
    call.cancel()
    await asyncio.wait_for(harness.registry.wait_until_empty(), 5)
    assert set(harness.engine.forgotten) == {each.request.request_key for each in sequences}


async def test_the_time_limit_ends_all_outputs(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.service.frontend.generation.DEADLINE_GRACE_S", 0.05)
    stopping = {"max_generation_duration": Duration(nanos=100_000_000), "stop_strings": ["bc"]}
    call = harness.generation.GenerateText(unary(sampling={"output_count": 2}, stopping=stopping))
    [a, _] = await harness.engine.arrival(2)
    harness.engine.step({a: "ab"})
    response = await asyncio.wait_for(call, 5)
    assert [output.content.text for output in response.outputs] == ["ab", ""]
    limit = stopping_pb2.FINISH_REASON_TIME_LIMIT
    assert [output.finished.finish_reason for output in response.outputs] == [limit, limit]
    assert response.finished.usage.output_token_count == 2


@pytest.mark.parametrize("how", ["a row of NaN", "the engine dies", "the RPC's deadline"])
async def test_a_failure_fails_the_whole_generation_once(harness: Harness, how: str) -> None:
    call = harness.generation.StreamGenerateText(streamed(sampling={"output_count": 3}), timeout=20)
    sequences = await harness.engine.arrival(3)
    harness.engine.step(dict.fromkeys(sequences, "x"))
    match how:
        case "a row of NaN":
            harness.engine.step({sequences[1]: ""}, FinishReason.FAILED)
        case "the engine dies":
            harness.engine.fail(EngineUnavailable("the engine died"))
        case _:
            harness.engine.step({sequences[1]: ""}, FinishReason.DEADLINE)
    failure = await failure_of(call)
    assert failure.code is {
        "a row of NaN": grpc.StatusCode.INTERNAL,
        "the engine dies": grpc.StatusCode.UNAVAILABLE,
    }.get(how, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert harness.engine.sequences == {}
    assert len(harness.outcomes()) == 1


async def test_what_the_engine_refuses_is_refused_as_a_whole(harness: Harness) -> None:
    harness.engine.refusal = InvalidField("sampling.output_count", "must be 1 to 2")
    failure = await failure_of(harness.generation.GenerateText(unary(sampling={"output_count": 3})))
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["sampling.output_count"])


async def test_a_slow_reader_pauses_all_outputs(harness: Harness) -> None:
    call, sequences = await stream(harness, 2)
    harness.engine.step({sequences[1]: "x" * 65})  # the buffer holds 64 tokens; the writer takes them in the next turn
    assert [each.calls for each in sequences] == [["pause"], ["pause"]]
    assert len(texts_of((await call.read()).events)[1]) == 65
    assert [each.calls for each in sequences] == [["pause", "resume"], ["pause", "resume"]]
    harness.engine.step(dict.fromkeys(sequences, "z"), FinishReason.LENGTH)
    await read_events(call)


async def test_outputs_on_a_stream_of_many_generations(harness: Harness) -> None:
    call = harness.generation.BidiGenerateText()
    for request_id, count in (("two", 2), ("one", 1)):
        start = StartCommand(spec=spec(request_id=request_id, sampling={"output_count": count}))
        await call.write(BidiGenerateTextRequest(start=start))
    [a, b, c] = sorted(await harness.engine.arrival(3), key=lambda each: each.request.request_key)
    await call.done_writing()
    harness.engine.step({a: "a", b: "b", c: "c"})
    harness.engine.step({a: "A", c: "C"}, FinishReason.LENGTH)
    harness.engine.step({b: "B"}, FinishReason.LENGTH)
    events: dict[str, list[generation_pb2.GenerationEvent]] = defaultdict(list)
    while (response := await call.read()) is not grpc.aio.EOF:
        for event in response.events:
            events[event.request_id].append(event)
    assert texts_of(events["two"]) == {0: "aA", 1: "bB"}
    assert texts_of(events["one"]) == {0: "cC"}
    kinds = [kind for kind, _ in kinds_of(events["two"]) if kind != "output_delta"]
    assert kinds == ["started", "output_finished", "output_finished", "finished"]
