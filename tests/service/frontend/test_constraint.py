"""Outputs that must have a form."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from foreword.scheduler.step import FinishReason
from foreword.service.text.constraint import Constraint
from foreword.service.text.processor import TextProcessor
from foreword.v1 import stopping_pb2
from foreword.v1.generation_service_pb2 import CancelGenerationRequest

from .conftest import Harness
from .rpc import check_identity, failure_of, read_events, streamed, unary


async def test_a_constraint_reaches_the_engine_as_a_grammar_and_its_end_is_told(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(constraint={"choices": {"choices": ["yes", "no"]}}))
    [sequence] = await harness.engine.arrival()
    assert sequence.request.grammar == "start: /yes|no/"
    harness.engine.step({sequence: ""})
    harness.engine.step({sequence: "no"}, FinishReason.CONSTRAINT_COMPLETE)
    response = await call
    [output] = response.outputs
    assert output.content.text == "no"
    assert output.finished.finish_reason == stopping_pb2.FINISH_REASON_CONSTRAINT_COMPLETE
    assert response.finished.timing.constraint_compile_duration_micros > 0
    check_identity(response.finished.timing)


async def test_a_constraint_that_gets_stuck_is_named(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(constraint={"regex": "a{3}"}))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "aa"})
    harness.engine.step({sequence: ""}, FinishReason.CONSTRAINT_STUCK)
    failure = await failure_of(call)
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT
    assert failure.fields == ["constraint.regex"]
    assert "after 2 tokens" in failure.message


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a constraint is being compiled, which never ends."""
    begun = asyncio.Event()

    async def compile_constraint(_: object, constraint: Constraint, tenant: str) -> str:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(TextProcessor, "compile_constraint", compile_constraint)
    return begun


async def test_a_cancel_does_not_wait_for_a_compilation(harness: Harness, compilation: asyncio.Event) -> None:
    call = harness.generation.StreamGenerateText(streamed(request_id="r1", constraint={"regex": "a{3}"}))
    await compilation.wait()
    await harness.generation.CancelGeneration(CancelGenerationRequest(request_id="r1"))
    events = await asyncio.wait_for(read_events(call), 5)
    assert [event.WhichOneof("event") for event in events] == ["started", "output_finished", "finished"]
    assert events[1].output_finished.finish_reason == stopping_pb2.FINISH_REASON_CANCELLED
    assert harness.engine.submitted == []


async def test_the_time_limit_holds_during_a_compilation(harness: Harness, compilation: asyncio.Event) -> None:
    stopping = {"max_generation_duration": Duration(nanos=100_000_000)}
    call = harness.generation.GenerateText(unary(stopping=stopping, constraint={"regex": "a{3}"}), timeout=50)
    response = await asyncio.wait_for(call, 5)
    assert response.outputs[0].finished.finish_reason == stopping_pb2.FINISH_REASON_TIME_LIMIT
    assert harness.engine.submitted == []
