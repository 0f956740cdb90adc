"""One generation per RPC."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from foreword.scheduler.errors import (
    ContextLengthExceeded,
    DeadlineInfeasible,
    EngineFault,
    EngineUnavailable,
    QueueFull,
)
from foreword.scheduler.request import SamplingParams
from foreword.scheduler.step import FinishReason
from foreword.service.config import ServerConfig
from foreword.service.tenants import cache_scope
from foreword.service.text.processor import TextProcessor
from foreword.v1 import chat_pb2, sampling_pb2, stopping_pb2, timing_pb2, tokens_pb2
from foreword.v1.generation_service_pb2 import (
    CANCEL_OUTCOME_ALREADY_FINISHED,
    CANCEL_OUTCOME_CANCELLED,
    CancelGenerationRequest,
)
from foreword.v1.generation_service_pb2_grpc import GenerationServiceStub

from .conftest import Harness
from .rpc import complete, failure_of, read_events, streamed, text_of, unary


async def test_stream_tells_start_deltas_and_finish(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(
        streamed(request_id="r1", prompt="hey", stopping={"max_output_token_count": 3})
    )
    [sequence] = await harness.engine.arrival()
    started = (await call.read()).events[0].started
    assert (started.request_id, started.model, started.prompt_token_count) == ("r1", "toy", 3)
    harness.engine.step({sequence: "ab"})
    delta = (await call.read()).events[0].output_delta
    assert (delta.text, list(delta.token_ids)) == ("ab", [97, 98])
    harness.engine.step({sequence: "c"}, FinishReason.LENGTH)
    events = (await call.read()).events
    assert [event.WhichOneof("event") for event in events] == ["output_delta", "output_finished", "finished"]
    assert events[1].output_finished.finish_reason == stopping_pb2.FINISH_REASON_LENGTH
    assert events[2].finished.usage.output_token_count == events[1].output_finished.output_token_count == 3
    assert await call.read() is grpc.aio.EOF
    trailers = dict(await call.trailing_metadata())
    assert trailers["foreword-request-id"] == "r1"
    assert trailers["foreword-output-tokens"] == "3"
    assert {f"foreword-{name}" for name in ("ttft-us", "queue-us", "prefill-us", "itl-p50-us", "itl-p99-us")} <= {
        *trailers
    }


async def test_tokens_that_come_while_a_message_is_written_go_out_as_one(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed())
    [sequence] = await harness.engine.arrival()
    for letter in "abcdef":
        harness.engine.step({sequence: letter})
    harness.engine.step({sequence: "g"}, FinishReason.LENGTH)
    messages = [response async for response in call]
    assert text_of([event for message in messages for event in message.events]) == "abcdefg"
    assert len(messages) <= 2


@pytest.mark.parametrize("steps", [["héllo 🌍 wörld"], ["hé", "llo ", "🌍", " wörld"], list("héllo 🌍 wörld")])
async def test_stream_and_unary_give_the_same_text(harness: Harness, steps: list[str]) -> None:
    call = harness.generation.StreamGenerateText(streamed())
    [sequence] = await harness.engine.arrival()
    data = "".join(steps).encode()
    for byte in data[:-1]:
        harness.engine.step({sequence: [byte]})
    harness.engine.step({sequence: [data[-1]]}, FinishReason.LENGTH)
    events = await read_events(call)
    response = await complete(harness, harness.generation.GenerateText(unary()), *steps)
    assert text_of(events) == response.outputs[0].content.text == "".join(steps)
    ids = [token_id for event in events for token_id in event.output_delta.token_ids]
    assert ids == list(response.outputs[0].content.token_ids) == list(data)
    assert response.finished.usage.output_token_count == len(data)


async def test_incomplete_character_at_the_end_becomes_a_replacement(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary())
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: [ord("a"), 0xF0, 0x9F]}, FinishReason.LENGTH)
    content = (await call).outputs[0].content
    assert (content.text, list(content.token_ids)) == ("a\ufffd", [97, 0xF0, 0x9F])


async def test_nothing_is_sent_before_admission(harness: Harness) -> None:
    harness.engine.gate.clear()
    call = harness.generation.StreamGenerateText(streamed())
    metadata = asyncio.ensure_future(call.initial_metadata())
    await harness.engine.arrival()
    await asyncio.wait([metadata], timeout=0.2)
    assert not metadata.done()
    harness.engine.refusal = QueueFull("the queue is full", max_num_waiting=2)
    harness.engine.gate.set()
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert failure.details["ErrorInfo"].metadata["max_waiting_sequence_count"] == "2"
    assert int(failure.trailers["grpc-retry-pushback-ms"]) > 0
    assert len(await metadata) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextLengthExceeded("too long", prompt_token_count=5), grpc.StatusCode.INVALID_ARGUMENT),
        (EngineUnavailable("gone"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_refusals_of_the_engine(harness: Harness, error: Any, code: grpc.StatusCode) -> None:
    harness.engine.refusal = error
    for call in (harness.generation.GenerateText(unary()), harness.generation.StreamGenerateText(streamed())):
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (code, error.reason)


async def test_effective_values_are_echoed(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(priority=3, stopping={"stop_strings": ["x"], "ignore_eos": True}))
    response = await complete(harness, call, "a")
    started, [request] = response.started, harness.engine.submitted
    assert started.sampling.temperature == request.sampling.temperature == 1.0
    assert (started.sampling.top_k, started.sampling.top_p, started.sampling.min_p) == (0, 1.0, 0.0)
    assert started.sampling.seed == request.sampling.seed
    assert started.stopping.max_output_token_count == request.stopping.max_output_tokens == 995
    assert list(started.stopping.stop_strings) == ["x"]
    assert request.stopping.eos_token_ids == ()
    assert started.output.return_token_ids
    assert started.output.timing_level == timing_pb2.TIMING_LEVEL_SUMMARY
    assert started.stopping.max_generation_duration.seconds == 600
    assert started.priority == request.priority == 3


async def test_sampling_reaches_the_scheduler_and_is_echoed(harness: Harness) -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 9,
        "min_p": 0.125,
        "typical_p": 0.25,
        "frequency_penalty": -1.5,
        "presence_penalty": 1.25,
        "repetition_penalty": 1.5,
        "seed": 4,
        "output_count": 1,
        "logit_bias": {7: -1.5, 2: 3.0},
        "allowed_token_ids": [7, 2, 3],
        "banned_token_ids": [3],
    }
    started = (await complete(harness, harness.generation.GenerateText(unary(sampling=sampling)), "a")).started
    assert started.sampling == sampling_pb2.SamplingConfig(**sampling)
    assert harness.engine.submitted[0].sampling == SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=9,
        min_p=0.125,
        typical_p=0.25,
        frequency_penalty=-1.5,
        presence_penalty=1.25,
        repetition_penalty=1.5,
        seed=4,
        logit_bias=((2, 3.0), (7, -1.5)),
        allowed_token_ids=(7, 2, 3),
        banned_token_ids=(3,),
    )


async def test_what_was_echoed_can_be_requested_again(harness: Harness) -> None:
    first = (await complete(harness, harness.generation.GenerateText(unary()), "a")).started
    again = unary(
        sampling=first.sampling,
        stopping=first.stopping,
        output=first.output,
        cache=first.cache,
        speculation=first.speculation,
        priority=first.priority,
    )
    second = (await complete(harness, harness.generation.GenerateText(again), "a")).started
    assert second.sampling == first.sampling
    assert second.stopping == first.stopping


@pytest.mark.parametrize(
    "cache",
    [{}, {"bypass_prefix_cache": True}, {"cache_salt": "é" * 64}, {"bypass_prefix_cache": True, "cache_salt": "s"}],
)
async def test_use_of_the_prefix_cache_reaches_the_scheduler(harness: Harness, cache: dict[str, Any]) -> None:
    started = (await complete(harness, harness.generation.GenerateText(unary(cache=cache)), "a")).started
    [request] = harness.engine.submitted
    assert started.HasField("cache")
    assert started.cache.bypass_prefix_cache == request.bypass_prefix_cache == cache.get("bypass_prefix_cache", False)
    assert started.cache.cache_salt == cache.get("cache_salt", "")
    assert request.cache_salt == cache_scope("", started.cache.cache_salt)


async def test_temperature_zero_is_not_unset(harness: Harness) -> None:
    response = await complete(harness, harness.generation.GenerateText(unary(sampling={"temperature": 0.0})), "a")
    assert response.started.sampling.HasField("temperature")
    assert response.started.sampling.temperature == harness.engine.submitted[0].sampling.temperature == 0.0


async def test_seeds_are_kept_or_picked(harness: Harness) -> None:
    for seed in (0, -5, 2**63 - 1):
        response = await complete(harness, harness.generation.GenerateText(unary(sampling={"seed": seed})), "a")
        assert response.started.sampling.seed == seed
    picked = {
        (await complete(harness, harness.generation.GenerateText(unary()), "a")).started.sampling.seed for _ in range(3)
    }
    assert len(picked) == 3
    assert [request.sampling.seed for request in harness.engine.submitted[:3]] == [0, -5, 2**63 - 1]


async def test_optional_arrays(harness: Harness) -> None:
    fields = {"logprobs": True, "return_token_bytes": True}
    content = (
        (await complete(harness, harness.generation.GenerateText(unary(output=fields)), "ab", "c")).outputs[0].content
    )
    assert list(content.logprobs) == [-0.5] * 3
    assert list(content.token_bytes) == [b"a", b"b", b"c"]
    fields = {"return_token_ids": False}
    response = await complete(harness, harness.generation.GenerateText(unary(output=fields)), "ab")
    assert (response.outputs[0].content.text, len(response.outputs[0].content.token_ids)) == ("ab", 0)
    assert response.finished.usage.output_token_count == 2


async def test_chat_goes_through_the_template(harness: Harness) -> None:
    chat = chat_pb2.ChatInput(
        messages=[{"role": "ROLE_SYSTEM", "content": "be brief"}, {"role": "ROLE_USER", "content": "<s>"}]
    )
    await complete(harness, harness.generation.GenerateText(unary(chat=chat)), "ab")
    [request] = harness.engine.submitted
    expected = [256, *b"system: be brief", 257, 256, *b"user: <s>", 257, 256, *b"assistant: "]
    assert list(request.prompt_token_ids) == expected


async def test_token_ids_are_used_as_they_are(harness: Harness) -> None:
    ids = tokens_pb2.TokenIds(ids=[256, 7, 299])
    await complete(harness, harness.generation.GenerateText(unary(prompt_token_ids=ids)), "ab")
    assert list(harness.engine.submitted[0].prompt_token_ids) == [256, 7, 299]


async def test_time_limit_finishes_with_ok(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(stopping={"max_generation_duration": Duration(seconds=2)}), timeout=50)
    response = await complete(harness, call, "ab", "c", finish=FinishReason.DEADLINE)
    [request] = harness.engine.submitted
    assert request.deadline_ns - request.arrival_ns == 2_000_000_000
    assert response.outputs[0].finished.finish_reason == stopping_pb2.FINISH_REASON_TIME_LIMIT
    assert response.finished.usage.output_token_count == 3


async def test_time_limit_that_is_over_before_the_first_step_finishes_with_ok(harness: Harness) -> None:
    harness.engine.refusal = DeadlineInfeasible("the deadline has passed")
    request = unary(stopping={"max_generation_duration": Duration(nanos=1)})
    response = await harness.generation.GenerateText(request, timeout=50)
    assert response.outputs[0].finished.finish_reason == stopping_pb2.FINISH_REASON_TIME_LIMIT
    assert response.finished.usage.output_token_count == 0
    events = await read_events(harness.generation.StreamGenerateText(streamed(stopping=request.spec.stopping)))
    assert [event.WhichOneof("event") for event in events] == ["started", "output_finished", "finished"]
    failure = await failure_of(harness.generation.GenerateText(unary(), timeout=50))
    assert (failure.code, failure.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_INFEASIBLE")


@pytest.mark.parametrize("phase", ["waiting", "running"])
async def test_time_limit_holds_although_the_engine_is_silent(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr("foreword.service.frontend.generation.DEADLINE_GRACE_S", 0.05)
    if phase == "waiting":
        harness.engine.gate.clear()
    stopping = {"max_generation_duration": Duration(nanos=100_000_000), "stop_strings": ["bc"]}
    call = harness.generation.GenerateText(unary(stopping=stopping))
    [sequence] = await harness.engine.arrival()
    if phase == "running":
        harness.engine.step({sequence: "ab"})
    response = await asyncio.wait_for(call, 5)
    assert response.outputs[0].finished.finish_reason == stopping_pb2.FINISH_REASON_TIME_LIMIT
    assert response.outputs[0].content.text == ("ab" if phase == "running" else "")
    assert set(harness.engine.forgotten) == {sequence.request.request_key}


async def test_rpc_deadline_holds_although_the_engine_is_silent(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC ends the call for the client; a stream that lives on would keep the generation without an end."""
    monkeypatch.setattr("foreword.service.frontend.generation.DEADLINE_GRACE_S", -29.9)
    call = harness.generation.StreamGenerateText(streamed(request_id="late"), timeout=30)
    [sequence] = await harness.engine.arrival()
    failure = await asyncio.wait_for(failure_of(call), 5)
    assert (failure.code, failure.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    assert set(harness.engine.forgotten) == {sequence.request.request_key}


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTEXT_LIMIT])
async def test_length_is_what_the_caller_asked_for_and_context_limit_what_there_was_room_for(
    harness: Harness, reason: FinishReason
) -> None:
    request = unary(stopping={"max_output_token_count": 2})
    response = await complete(harness, harness.generation.GenerateText(request), "ab", finish=reason)
    assert response.outputs[0].finished.finish_reason == stopping_pb2.FINISH_REASON_LENGTH
    response = await complete(harness, harness.generation.GenerateText(unary()), "ab", finish=reason)
    assert response.outputs[0].finished.finish_reason == stopping_pb2.FINISH_REASON_CONTEXT_LIMIT


async def test_rpc_deadline_reaches_the_scheduler(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(), timeout=30)
    [sequence] = await harness.engine.arrival()
    left_s = (sequence.request.deadline_ns - sequence.request.arrival_ns) / 1e9
    assert 25 < left_s < 31  # gRPC rounds up
    harness.engine.step({sequence: "ab"}, FinishReason.DEADLINE)
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")


async def test_passed_rpc_deadline_frees_the_sequence(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(), timeout=0.3)
    [sequence] = await harness.engine.arrival()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_events(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await harness.registry.wait_until_empty()
    assert sequence.request.request_key in harness.engine.forgotten


async def test_cancel_generation_is_idempotent(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(request_id="r1"))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "ab"})
    outcome = await harness.generation.CancelGeneration(CancelGenerationRequest(request_id="r1"))
    assert outcome.outcome == CANCEL_OUTCOME_CANCELLED
    events = await read_events(call)
    assert text_of(events) == "ab"
    assert events[-2].output_finished.finish_reason == stopping_pb2.FINISH_REASON_CANCELLED
    assert events[-1].finished.usage.output_token_count == 2
    await harness.registry.wait_until_empty()
    for _ in range(2):
        outcome = await harness.generation.CancelGeneration(CancelGenerationRequest(request_id="r1"))
        assert outcome.outcome == CANCEL_OUTCOME_ALREADY_FINISHED


async def test_cancel_of_unknown_generations(harness: Harness) -> None:
    failure = await failure_of(harness.generation.CancelGeneration(CancelGenerationRequest(request_id="r9")))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
    failure = await failure_of(harness.generation.CancelGeneration(CancelGenerationRequest()))
    assert failure.fields == ["request_id"]


async def test_cancel_while_waiting_for_admission(harness: Harness) -> None:
    harness.engine.gate.clear()
    call = harness.generation.GenerateText(unary(request_id="r1"))
    await harness.engine.arrival()
    await harness.generation.CancelGeneration(CancelGenerationRequest(request_id="r1"))
    harness.engine.gate.set()
    response = await call
    assert response.outputs[0].finished.finish_reason == stopping_pb2.FINISH_REASON_CANCELLED


async def test_cancel_while_the_prompt_is_tokenized(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def encode(_: object, text: str) -> np.ndarray[Any, Any]:
        begun.set()
        await go_on.wait()
        return np.zeros(3, np.int32)

    monkeypatch.setattr(TextProcessor, "encode", encode)
    call = harness.generation.StreamGenerateText(streamed(request_id="r1"))
    await begun.wait()
    await harness.generation.CancelGeneration(CancelGenerationRequest(request_id="r1"))
    go_on.set()
    events = await read_events(call)
    assert [event.WhichOneof("event") for event in events] == ["started", "output_finished", "finished"]
    assert events[1].output_finished.finish_reason == stopping_pb2.FINISH_REASON_CANCELLED
    assert harness.engine.submitted == []


async def test_cancel_inside_the_server_reaches_the_client(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def submit(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(harness.engine, "submit", submit)
    failure = await asyncio.wait_for(failure_of(harness.generation.GenerateText(unary())), 5)
    assert (failure.code, failure.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED")


async def test_request_ids_are_unique_while_active(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(request_id="r1"))
    await harness.engine.arrival()
    failure = await failure_of(harness.generation.GenerateText(unary(request_id="r1")))
    assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_ACTIVE")
    await complete(harness, call, "a")
    await complete(harness, harness.generation.GenerateText(unary(request_id="r1")), "a")
    keys = [request.request_key for request in harness.engine.submitted]
    assert len(set(keys)) == len(keys) == 2


@pytest.mark.parametrize("phase", ["admission", "queue", "prefill", "decode", "last message"])
async def test_disconnect_frees_everything(harness: Harness, phase: str) -> None:
    if phase == "admission":
        harness.engine.gate.clear()
    call = harness.generation.StreamGenerateText(streamed())
    [sequence] = await harness.engine.arrival()
    if phase != "admission":
        await call.read()
    if phase == "prefill":
        harness.engine.step({sequence: []})
    if phase == "decode":
        harness.engine.step({sequence: "abc"})
        await call.read()
    if phase == "last message":
        harness.engine.step({sequence: "abc"}, FinishReason.LENGTH)
    call.cancel()
    await asyncio.wait_for(harness.registry.wait_until_empty(), 5)
    assert harness.engine.sequences == {}
    assert (sequence.request.request_key in harness.engine.forgotten) == (phase != "last message")
    harness.engine.gate.set()
    assert (await complete(harness, harness.generation.GenerateText(unary()), "a")).outputs


async def test_disconnect_of_a_unary_call(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary())
    [sequence] = await harness.engine.arrival()
    call.cancel()
    await asyncio.wait_for(harness.registry.wait_until_empty(), 5)
    assert harness.engine.forgotten == [sequence.request.request_key]


async def test_engine_death_ends_streams_as_unavailable(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed())
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "ab"})
    harness.engine.fail(EngineUnavailable("engine process exited with code -9"))
    failure = await failure_of(call)
    assert (failure.code, failure.message) == (grpc.StatusCode.UNAVAILABLE, "engine process exited with code -9")
    assert failure.details["RetryInfo"].retry_delay.ToMilliseconds() == int(failure.trailers["grpc-retry-pushback-ms"])


async def test_no_engine_is_unavailable(harness: Harness) -> None:
    harness.engine.ready, harness.engine.info = False, None
    failure = await failure_of(harness.generation.GenerateText(unary()))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
    assert "loading" in failure.message


@pytest.mark.parametrize("finish", ["step fault", "not finite"])
async def test_engine_faults_are_internal(harness: Harness, finish: str) -> None:
    call = harness.generation.GenerateText(unary(request_id="r1"))
    [sequence] = await harness.engine.arrival()
    if finish == "step fault":
        harness.engine.fail(EngineFault("the step failed"))
    else:
        harness.engine.step({sequence: []}, FinishReason.FAILED)
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
    assert failure.details["ErrorInfo"].metadata["request_id"] == "r1"


@pytest.mark.parametrize("where", ["handler", "sink"])
async def test_unexpected_exceptions_are_redacted(
    harness: Harness, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret prompt")

    if where == "handler":
        monkeypatch.setattr(harness.engine, "submit", fail)
    call = harness.generation.GenerateText(unary(request_id="r1"))
    if where == "sink":
        [sequence] = await harness.engine.arrival()
        monkeypatch.setattr(sequence.sink, "_advance", fail)
        harness.engine.step({sequence: "a"})
        assert harness.engine.forgotten == [sequence.request.request_key]
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
    assert "secret" not in failure.message
    assert [(entry["log_level"], entry["exc_info"]) for entry in harness.logs if "exc_info" in entry] == [
        ("error", True)
    ]
    harness.logs.clear()
    assert failure.details["ErrorInfo"].metadata["request_id"] == "r1"


async def fill(harness: Harness, sequence: Any) -> int:
    """Generate for a client that does not read until the front end pauses the sequence."""
    sent = 0
    while not sequence.is_paused:
        harness.engine.step({sequence: "x" * 60})
        sent += 60
        assert sent < 10_000_000
        # a pause that lasts is due to the client, not to the time that a write takes
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_resumed(sequence), 0.2)
    return sent


async def _resumed(sequence: Any) -> None:
    while sequence.is_paused:
        await asyncio.sleep(0)


async def test_slow_reader_pauses_only_its_own_sequence(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(request_id="slow"))
    [slow] = await harness.engine.arrival()
    sent = await fill(harness, slow)
    assert slow.calls[-1] == "pause"
    other = harness.generation.GenerateText(unary(request_id="quick"))
    [_, quick] = await harness.engine.arrival(2)
    harness.engine.step({quick: "quick"}, FinishReason.LENGTH)
    assert (await other).outputs[0].content.text == "quick"
    received = 0
    while received < sent:
        received += sum(len(event.output_delta.text) for event in (await call.read()).events)
    assert slow.calls[-1] == "resume"
    harness.engine.step({slow: "z"}, FinishReason.LENGTH)
    events = await read_events(call)
    assert events[-1].finished.usage.output_token_count == sent + 1
    assert events[-1].finished.timing.blocked_duration_micros > 0


class TestStalledReader:
    @pytest.fixture
    def config(self) -> ServerConfig:
        return ServerConfig(listen_address="127.0.0.1:0", stream_buffer_tokens=64, stall_budget_s=0.5)

    async def test_is_aborted_after_the_stall_budget(self, harness: Harness) -> None:
        call = harness.generation.StreamGenerateText(streamed(request_id="slow"))
        [slow] = await harness.engine.arrival()
        await fill(harness, slow)
        await asyncio.wait_for(harness.registry.wait_until_empty(), 5)
        assert harness.engine.forgotten == [slow.request.request_key]
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "CLIENT_STALLED")
        assert harness.outcomes() == {"slow": "CLIENT_STALLED"}

    @pytest.mark.parametrize("is_over", [False, True])
    async def test_is_aborted_even_if_nothing_could_be_sent(self, harness: Harness, is_over: bool) -> None:
        """Without a window for data that nobody reads, not even the first message goes out."""
        options = [
            ("grpc.http2.lookahead_bytes", 0),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        async with grpc.aio.insecure_channel(harness.server.address, options) as channel:
            call = GenerationServiceStub(channel).StreamGenerateText(streamed(request_id="slow"))
            [slow] = await harness.engine.arrival()
            harness.engine.step({slow: "x"}, FinishReason.LENGTH if is_over else FinishReason.NONE)
            await asyncio.wait_for(harness.registry.wait_until_empty(), 5)
            failure = await asyncio.wait_for(failure_of(call), 5)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "CLIENT_STALLED")
        assert harness.outcomes() == {"slow": "CLIENT_STALLED"}


async def test_every_generation_is_logged_without_its_text(harness: Harness) -> None:
    await complete(harness, harness.generation.GenerateText(unary(request_id="r1", prompt="secret")), "word")
    await harness.registry.wait_until_empty()
    call = harness.generation.StreamGenerateText(streamed(request_id="r2"))
    await harness.engine.arrival()
    call.cancel()
    await harness.registry.wait_until_empty()
    await failure_of(harness.generation.GenerateText(unary(request_id="r3", prompt="secret" * 200)))
    ended = {entry["request_id"]: entry for entry in harness.logs if entry["event"] == "generation ended"}
    assert harness.outcomes() == {"r1": "CONTEXT_LIMIT", "r2": "CANCELLED", "r3": "CONTEXT_LENGTH_EXCEEDED"}
    assert (ended["r1"]["prompt_tokens"], ended["r1"]["output_tokens"]) == (6, 4)
    assert ended["r1"]["ttft_us"] > 0
    assert "secret" not in str(harness.logs)
    assert "word" not in str(harness.logs)


async def test_server_that_stops_while_a_prompt_is_tokenized(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def encode(_: object, text: str) -> np.ndarray[Any, Any]:
        begun.set()
        await go_on.wait()
        return np.zeros(3, np.int32)

    monkeypatch.setattr(TextProcessor, "encode", encode)
    call = harness.generation.GenerateText(unary())
    await begun.wait()
    harness.registry.fail_all(EngineUnavailable("the server is shutting down"))
    go_on.set()
    assert (await failure_of(call)).code is grpc.StatusCode.UNAVAILABLE
    assert harness.engine.submitted == []


async def test_many_generations_leave_nothing(harness: Harness) -> None:
    async def one(index: int) -> str:
        call = harness.generation.GenerateText(unary(prompt=f"{index}"))
        return str((await call).outputs[0].content.text)

    calls = [asyncio.ensure_future(one(index)) for index in range(64)]
    sequences = await harness.engine.arrival(64)
    for round_index in range(3):
        harness.engine.step(
            {each: bytes(each.request.prompt_token_ids.tolist()).decode() for each in sequences},
            FinishReason.LENGTH if round_index == 2 else FinishReason.NONE,
        )
    assert await asyncio.gather(*calls) == [f"{index}" * 3 for index in range(64)]
