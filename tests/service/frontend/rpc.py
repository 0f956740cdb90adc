"""Short ways to make requests and to read answers."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from foreword.scheduler.step import FinishReason
from foreword.v1 import generation_pb2, timing_pb2
from foreword.v1.generation_service_pb2 import GenerateTextRequest, StreamGenerateTextRequest

from .conftest import Harness


def spec(**fields: Any) -> generation_pb2.GenerationSpec:
    """A specification with a prompt, unless it has another input."""
    if not fields.keys() & {"prompt", "prompt_token_ids", "chat"}:
        fields["prompt"] = "hello"
    return generation_pb2.GenerationSpec(**fields)


def unary(**fields: Any) -> GenerateTextRequest:
    return GenerateTextRequest(spec=spec(**fields))


def streamed(**fields: Any) -> StreamGenerateTextRequest:
    return StreamGenerateTextRequest(spec=spec(**fields))


async def read_events(call: Any) -> list[generation_pb2.GenerationEvent]:
    """All events up to the end of a stream."""
    events: list[generation_pb2.GenerationEvent] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        events += response.events
    return events


def text_of(events: list[generation_pb2.GenerationEvent]) -> str:
    return "".join(event.output_delta.text for event in events)


class Failure:
    """The decoded status of an RPC."""

    def __init__(self, code: grpc.StatusCode, found: status_pb2.Status, trailers: dict[str, Any]) -> None:
        self.code = code
        self.message = found.message
        self.trailers = trailers
        self.details = {}
        for detail in found.details:
            name = detail.type_url.rpartition(".")[2]
            self.details[name] = getattr(error_details_pb2, name)()
            assert detail.Unpack(self.details[name])
        self.reason = self.details["ErrorInfo"].reason

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.details["BadRequest"].field_violations]


def decode(found: status_pb2.Status) -> Failure:
    """The failure that a status in a message describes."""
    code = next(code for code in grpc.StatusCode if code.value[0] == found.code)
    return Failure(code, found, {})


async def failure_of(call: Any) -> Failure:
    """Read a call to its end, which must be an error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read_events(call) if hasattr(call, "read") else call)
    trailers = dict(caught.value.trailing_metadata())
    found = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert found.code == caught.value.code().value[0]
    return Failure(caught.value.code(), found, trailers)


async def complete(harness: Harness, call: Any, *steps: str, finish: FinishReason = FinishReason.LENGTH) -> Any:
    """Let the engine answer with these steps; return the response of a unary call."""
    [sequence] = await harness.engine.arrival()
    for gained in steps[:-1]:
        harness.engine.step({sequence: gained})
    harness.engine.step({sequence: steps[-1]}, finish)
    return await call


def check_identity(timing: timing_pb2.GenerationTiming) -> None:
    """The time to the first token is the sum of its parts."""
    parts = (
        timing.tokenize_duration_micros
        + timing.constraint_compile_duration_micros
        + timing.queue_duration_micros
        + timing.prefill_duration_micros
        + timing.delivery_duration_micros
    )
    assert timing.first_token_duration_micros == parts > 0
