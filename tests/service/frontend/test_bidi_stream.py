"""Many generations on one stream."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import grpc
import pytest

from foreword.scheduler.errors import EngineUnavailable, QueueFull
from foreword.scheduler.step import FinishReason
from foreword.service.config import ServerConfig
from foreword.service.frontend import bidi_stream
from foreword.v1 import generation_pb2, stopping_pb2
from foreword.v1.generation_service_pb2 import BidiGenerateTextRequest, CancelCommand, StartCommand
from foreword.v1.generation_service_pb2 import BidiGenerateTextResponse as BidiResponse
from foreword.v1.generation_service_pb2_grpc import GenerationServiceStub

from .conftest import FakeSequence, Harness
from .rpc import decode, failure_of, spec

Events = dict[str, list[generation_pb2.GenerationEvent]]


def start(request_id: str, **fields: Any) -> BidiGenerateTextRequest:
    return BidiGenerateTextRequest(start=StartCommand(spec=spec(request_id=request_id, prompt=request_id, **fields)))


def cancel(request_id: str) -> BidiGenerateTextRequest:
    return BidiGenerateTextRequest(cancel=CancelCommand(request_id=request_id))


async def read_all(call: Any) -> Events:
    """All events up to the end of the stream, by generation."""
    events: Events = defaultdict(list)
    while (response := await call.read()) is not grpc.aio.EOF:
        assert response.events
        for event in response.events:
            events[event.request_id].append(event)
    return events


async def open_generations(harness: Harness, *request_ids: str, **fields: Any) -> tuple[Any, dict[str, FakeSequence]]:
    """A stream on which these generations have been admitted and announced."""
    call = harness.generation.BidiGenerateText()
    for request_id in request_ids:
        await call.write(start(request_id, **fields))
    sequences = await harness.engine.arrival(len(request_ids))
    announced = 0
    while announced < len(request_ids):
        announced += sum(event.HasField("started") for event in (await call.read()).events)
    return call, {bytes(each.request.prompt_token_ids.tolist()).decode(): each for each in sequences}


async def test_one_message_holds_one_step_of_all_generations(harness: Harness) -> None:
    call, sequences = await open_generations(harness, "a", "b", "c")
    for letter in "xy":
        harness.engine.step({sequences["a"]: letter, sequences["b"]: letter * 2, sequences["c"]: letter * 3})
        response = await call.read()
        news = {event.request_id: event.output_delta.text for event in response.events}
        assert news == {"a": letter, "b": letter * 2, "c": letter * 3}
    harness.engine.step(dict.fromkeys(sequences.values(), "z"), FinishReason.LENGTH)
    await call.done_writing()
    response = await call.read()
    kinds: dict[str, list[str | None]] = defaultdict(list)  # the order of generations in a message is not promised
    for event in response.events:
        kinds[event.request_id].append(event.WhichOneof("event"))
    assert kinds == {each: ["output_delta", "output_finished", "finished"] for each in "abc"}
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_half_close_lets_running_generations_end(harness: Harness) -> None:
    call, sequences = await open_generations(harness, "a")
    await call.done_writing()
    while any(task.get_name() == "bidi-reader" for task in asyncio.all_tasks()):
        await asyncio.sleep(0.001)
    for _ in range(10):  # turns of the loop in which the writer takes note
        await asyncio.sleep(0)
    harness.engine.step({sequences["a"]: "x"})
    assert (await call.read()).events[0].output_delta.text == "x"
    harness.engine.step({sequences["a"]: "y"}, FinishReason.LENGTH)
    events = (await read_all(call))["a"]
    assert events[-1].finished.usage.output_token_count == 2
    assert await call.code() is grpc.StatusCode.OK


async def test_half_close_without_generations_ends_the_stream(harness: Harness) -> None:
    call = harness.generation.BidiGenerateText()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_stream_stays_open_between_generations(harness: Harness) -> None:
    call, sequences = await open_generations(harness, "a")
    harness.engine.step({sequences["a"]: "x"}, FinishReason.LENGTH)
    assert (await call.read()).events[-1].HasField("finished")
    await call.write(start("a"))  # the id is free again
    [again] = await harness.engine.arrival()
    harness.engine.step({again: "y"}, FinishReason.LENGTH)
    await call.done_writing()
    assert (await read_all(call))["a"][0].HasField("started")


async def test_cancel_ends_one_generation_with_usage(harness: Harness) -> None:
    call, sequences = await open_generations(harness, "a", "b")
    harness.engine.step(dict.fromkeys(sequences.values(), "xy"))
    await call.read()
    await call.write(cancel("a"))
    events = (await call.read()).events
    assert {event.request_id for event in events} == {"a"}
    assert events[-2].output_finished.finish_reason == stopping_pb2.FINISH_REASON_CANCELLED
    assert events[-1].finished.usage.output_token_count == 2
    await call.write(cancel("a"))  # it has ended already: no answer
    await call.write(cancel("never"))
    refused = (await call.read()).events[0].refused
    assert refused.command_index == 4
    assert decode(refused.error).code is grpc.StatusCode.NOT_FOUND
    harness.engine.step({sequences["b"]: "z"}, FinishReason.LENGTH)
    await call.done_writing()
    assert (await read_all(call))["b"][-1].finished.usage.output_token_count == 3


@pytest.mark.parametrize(
    ("command", "code", "field"),
    [
        (BidiGenerateTextRequest(), grpc.StatusCode.INVALID_ARGUMENT, "command"),
        (BidiGenerateTextRequest(start=StartCommand()), grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        (BidiGenerateTextRequest(start=StartCommand(spec=spec())), grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        (start("b", sampling={"top_p": 7}), grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p"),
        (start("b", model="other"), grpc.StatusCode.NOT_FOUND, None),
        (start("a"), grpc.StatusCode.ALREADY_EXISTS, None),
        (BidiGenerateTextRequest(append_turn={"previous_request_id": "a"}), grpc.StatusCode.UNIMPLEMENTED, None),
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, None),
    ],
)
async def test_refused_commands_leave_the_stream_alone(
    harness: Harness, command: Any, code: grpc.StatusCode, field: str | None
) -> None:
    call = harness.channel.stream_stream(
        "/foreword.v1.GenerationService/BidiGenerateText",
        request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
        response_deserializer=BidiResponse.FromString,
    )()
    await call.write(start("a"))
    [sequence] = await harness.engine.arrival()
    assert (await call.read()).events[0].HasField("started")
    await call.write(command)
    refused = (await call.read()).events[0].refused
    failure = decode(refused.error)
    assert (refused.command_index, failure.code) == (1, code)
    if field:
        assert failure.fields == [field]
    harness.engine.step({sequence: "x"}, FinishReason.LENGTH)
    await call.done_writing()
    assert (await read_all(call))["a"][-1].HasField("finished")


async def test_start_that_the_engine_refuses(harness: Harness) -> None:
    harness.engine.refusal = QueueFull("the queue is full")
    call = harness.generation.BidiGenerateText()
    await call.write(start("a"))
    event = (await call.read()).events[0]
    assert (event.WhichOneof("event"), event.refused.command_index) == ("refused", 0)
    failure = decode(event.refused.error)
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "RetryInfo" in failure.details
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_generation_that_fails_ends_with_an_error(harness: Harness) -> None:
    call, sequences = await open_generations(harness, "a", "b")
    harness.engine.step({sequences["a"]: "x"})
    harness.engine.step({sequences["a"]: []}, FinishReason.FAILED)
    events = (await call.read()).events
    assert [event.WhichOneof("event") for event in events] == ["output_delta", "finished"]
    assert decode(events[-1].finished.error).code is grpc.StatusCode.INTERNAL
    assert events[-1].finished.usage.output_token_count == 1
    harness.engine.step({sequences["b"]: "z"}, FinishReason.LENGTH)
    await call.done_writing()
    assert not (await read_all(call))["b"][-1].finished.HasField("error")


async def test_engine_death_fails_all_generations_and_not_the_stream(harness: Harness) -> None:
    call, _ = await open_generations(harness, "a", "b")
    harness.engine.fail(EngineUnavailable("engine process exited with code -9"))
    await call.done_writing()
    events = await read_all(call)
    for request_id in "ab":
        assert decode(events[request_id][-1].finished.error).code is grpc.StatusCode.UNAVAILABLE
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("phase", ["admission", "decode"])
async def test_disconnect_frees_all_generations(harness: Harness, phase: str) -> None:
    if phase == "admission":
        harness.engine.gate.clear()
        call = harness.generation.BidiGenerateText()
        for request_id in "abc":
            await call.write(start(request_id))
        await harness.engine.arrival(3)
    else:
        call, sequences = await open_generations(harness, "a", "b", "c")
        harness.engine.step(dict.fromkeys(sequences.values(), "x"))
    call.cancel()
    await asyncio.wait_for(harness.registry.wait_until_empty(), 5)
    assert harness.engine.sequences == {}


async def test_deadline_of_the_stream_bounds_its_generations(harness: Harness) -> None:
    call = harness.generation.BidiGenerateText(timeout=30)
    await call.write(start("a"))
    [sequence] = await harness.engine.arrival()
    assert (sequence.request.deadline_ns - sequence.request.arrival_ns) / 1e9 < 31  # gRPC rounds up
    harness.engine.step({sequence: []}, FinishReason.LENGTH)
    await call.done_writing()
    await read_all(call)


async def test_more_starts_than_fit_on_their_way_to_admission(harness: Harness) -> None:
    count = bidi_stream.MAX_STARTING + 8
    harness.engine.gate.clear()
    call = harness.generation.BidiGenerateText()
    for index in range(count):
        await call.write(start(f"r{index}"))
    await call.done_writing()
    await harness.engine.arrival(bidi_stream.MAX_STARTING)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(harness.engine.sequences) == bidi_stream.MAX_STARTING
    harness.engine.gate.set()
    sequences = await harness.engine.arrival(count)
    harness.engine.step(dict.fromkeys(sequences, "x"), FinishReason.LENGTH)
    events = await read_all(call)
    assert len(events) == count
    assert all(each[-1].HasField("finished") for each in events.values())


async def test_large_news_are_split_over_messages(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bidi_stream, "MAX_COLLECTED_TOKENS", 10)
    call, sequences = await open_generations(harness, "a", "b", "c", "d")
    arrival = list(sequences)
    harness.engine.step(dict.fromkeys(sequences.values(), "x" * 6))
    responses = [await call.read(), await call.read()]
    assert [[event.request_id for event in response.events] for response in responses] == [arrival[:2], arrival[2:]]
    harness.engine.step(dict.fromkeys(sequences.values(), ""), FinishReason.LENGTH)
    await call.done_writing()
    await read_all(call)


class TestStalled:
    @pytest.fixture
    def config(self) -> ServerConfig:
        return ServerConfig(listen_address="127.0.0.1:0", stream_buffer_tokens=64, stall_budget_s=0.3)

    async def test_commands_are_read_while_writing_is_blocked(self, harness: Harness) -> None:
        call, sequences = await open_generations(harness, "a", "b")
        while not all(each.is_paused for each in sequences.values()):
            running = [each for each in sequences.values() if not each.is_paused]
            harness.engine.step(dict.fromkeys(running, "x" * 60))
            await asyncio.sleep(0)
        await call.write(cancel("a"))
        while sequences["a"].request.request_key not in harness.engine.cancelled:
            await asyncio.sleep(0.001)
        call.cancel()

    async def test_stream_that_is_not_read_is_aborted(self, harness: Harness) -> None:
        call, sequences = await open_generations(harness, "a")
        sequence = sequences["a"]
        while sequence.request.request_key not in harness.engine.forgotten:
            if not sequence.is_paused:
                harness.engine.step({sequence: "x" * 60})
            await asyncio.sleep(0)
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "CLIENT_STALLED")
        assert harness.outcomes() == {"a": "CLIENT_STALLED"}

    async def test_stream_whose_first_message_cannot_be_sent_is_aborted(self, harness: Harness) -> None:
        options = [
            ("grpc.http2.lookahead_bytes", 0),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        async with grpc.aio.insecure_channel(harness.server.address, options) as channel:
            call = GenerationServiceStub(channel).BidiGenerateText()
            await call.write(start("a"))
            await harness.engine.arrival()
            await asyncio.wait_for(harness.registry.wait_until_empty(), 5)
            failure = await asyncio.wait_for(failure_of(call), 5)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "CLIENT_STALLED")
        assert harness.outcomes() == {"a": "CLIENT_STALLED"}
