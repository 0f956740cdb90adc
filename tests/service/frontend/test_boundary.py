"""What the log says of requests that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from foreword.scheduler.errors import InvalidField, QueueFull
from foreword.v1 import model_service_pb2
from foreword.v1.generation_service_pb2 import BidiGenerateTextRequest, CancelCommand, StartCommand
from foreword.v1.model_service_pb2_grpc import ModelServiceStub

from .conftest import Harness
from .rpc import failure_of, read_events, spec, streamed, unary

GENERATION = "/foreword.v1.GenerationService/"


def logged(harness: Harness) -> list[dict[str, Any]]:
    """The log, without what is timed or counted."""
    names = ("event", "log_level", "reason", "outcome", "field", "method", "command_index")
    return [{name: entry[name] for name in names if name in entry} for entry in harness.logs]


@pytest.mark.parametrize("rpc", ["GenerateText", "StreamGenerateText"])
async def test_a_bad_field_is_logged_once_without_its_value(harness: Harness, rpc: str) -> None:
    request = (unary if rpc == "GenerateText" else streamed)(prompt="secret", stopping={"stop_strings": ["secret", ""]})
    await failure_of(getattr(harness.generation, rpc)(request))
    assert logged(harness) == [
        {
            "event": "refused",
            "log_level": "info",
            "reason": "INVALID_FIELD",
            "field": "stopping.stop_strings[1]",
            "method": GENERATION + rpc,
        }
    ]
    assert "secret" not in str(harness.logs)


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (QueueFull("the queue is full"), {"outcome": "QUEUE_FULL"}),
        (InvalidField("prompt", "has no tokens"), {"outcome": "INVALID_FIELD", "field": "prompt"}),
    ],
)
async def test_a_generation_that_is_not_admitted_is_logged_once(
    harness: Harness, error: Any, facts: dict[str, str]
) -> None:
    harness.engine.refusal = error
    await failure_of(harness.generation.GenerateText(unary()))
    assert logged(harness) == [{"event": "generation ended", "log_level": "info"} | facts]


async def test_what_is_not_there_is_logged(harness: Harness) -> None:
    await failure_of(ModelServiceStub(harness.channel).GetModel(model_service_pb2.GetModelRequest(name="secret")))
    refused = {"event": "refused", "log_level": "info"}
    assert logged(harness) == [
        refused | {"reason": "MODEL_NOT_FOUND", "method": "/foreword.v1.ModelService/GetModel"},
    ]
    assert "secret" not in str(harness.logs)


async def test_refused_commands_of_a_stream_are_logged(harness: Harness) -> None:
    call = harness.generation.BidiGenerateText()
    bad = spec(request_id="a", prompt="secret", sampling={"top_p": 7})
    await call.write(BidiGenerateTextRequest(start=StartCommand(spec=bad)))
    await call.write(BidiGenerateTextRequest(cancel=CancelCommand(request_id="secret")))
    await call.done_writing()
    assert len(await read_events(call)) == 2
    refused = {"event": "refused", "log_level": "info"}
    assert logged(harness) == [
        refused | {"reason": "INVALID_FIELD", "field": "sampling.top_p", "command_index": 0},
        refused | {"reason": "REQUEST_NOT_FOUND", "command_index": 1},
    ]
    assert "secret" not in str(harness.logs)
