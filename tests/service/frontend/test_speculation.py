"""What callers may say about speculation, and what they are told."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import pytest

from foreword.scheduler.request import AcceptanceRule
from foreword.scheduler.step import DraftState, FinishReason
from foreword.v1 import generation_service_pb2, model_service_pb2, speculation_pb2, timing_pb2
from foreword.v1.model_service_pb2_grpc import ModelServiceStub

Harness = Any


@pytest.fixture
def speculating(harness: Harness) -> Harness:
    """A server whose engine drafts."""
    harness.engine.info = dataclasses.replace(
        harness.engine.info, drafter="ngram", drafters=("ngram",), max_draft_tokens=6
    )
    harness.engine.draft_state = DraftState.NO_GAIN
    return harness


async def started(harness: Harness, **speculation: object) -> tuple[speculation_pb2.SpeculationConfig, int]:
    """The echo, and the bound that reached the engine."""
    request = generation_service_pb2.GenerateTextRequest(spec={"prompt": "a", "speculation": speculation})
    call = harness.generation.GenerateText(request)
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "b"}, FinishReason.LENGTH)
    return (await call).started.speculation, sequence.request.max_draft_tokens


@pytest.mark.parametrize(
    ("speculation", "bound"),
    [
        ({}, 6),
        ({"draft_token_count": 4}, 4),
        ({"draft_token_count": 16}, 6),
        ({"draft_token_count": 0}, 0),
        ({"disabled": True}, 0),
        ({"disabled": True, "draft_token_count": 0}, 0),
        ({"drafter": "ngram", "acceptance": speculation_pb2.ACCEPTANCE_RULE_EXACT_MATCH}, 6),
    ],
)
async def test_the_bound_in_effect_is_echoed(speculating: Harness, speculation: dict[str, object], bound: int) -> None:
    echo, in_engine = await started(speculating, **speculation)
    assert in_engine == bound
    assert echo == speculation_pb2.SpeculationConfig(
        disabled=bound == 0,
        draft_token_count=bound,
        drafter="ngram" if bound else None,
        acceptance=speculation_pb2.ACCEPTANCE_RULE_EXACT_MATCH,
    )
    again = {field.name: value for field, value in echo.ListFields()}
    assert await started(speculating, **again) == (echo, bound)


@pytest.mark.parametrize(
    ("rule", "effective"),
    [
        (speculation_pb2.ACCEPTANCE_RULE_UNSPECIFIED, AcceptanceRule.EXACT_MATCH),
        (speculation_pb2.ACCEPTANCE_RULE_EXACT_MATCH, AcceptanceRule.EXACT_MATCH),
        (speculation_pb2.ACCEPTANCE_RULE_REJECTION, AcceptanceRule.REJECTION),
        (speculation_pb2.ACCEPTANCE_RULE_BLOCK, AcceptanceRule.BLOCK),
    ],
)
async def test_the_acceptance_rule_reaches_the_engine_and_is_echoed(
    speculating: Harness, rule: int, effective: AcceptanceRule
) -> None:
    spec = {"prompt": "a", "speculation": {"acceptance": rule}}
    call = speculating.generation.GenerateText(generation_service_pb2.GenerateTextRequest(spec=spec))
    [sequence] = await speculating.engine.arrival()
    speculating.engine.step({sequence: "b"}, FinishReason.LENGTH)
    assert (await call).started.speculation.acceptance == effective
    assert sequence.request.acceptance is effective


async def test_a_server_that_does_not_speculate_says_so(harness: Harness) -> None:
    echo, in_engine = await started(harness, draft_token_count=4)
    assert (echo.disabled, echo.draft_token_count, echo.drafter, in_engine) == (True, 0, "", 0)
    status = await status_of(harness)
    assert (status.active, status.drafter, list(status.available_drafters)) == (False, "", [])
    assert status.off_reason == speculation_pb2.SPECULATION_OFF_REASON_DISABLED
    assert status.detail


@pytest.mark.parametrize("state", DraftState)
async def test_the_model_tells_its_state(speculating: Harness, state: DraftState) -> None:
    speculating.engine.draft_state = state
    status = await status_of(speculating)
    name = "UNSPECIFIED" if state is DraftState.ACTIVE else state.name
    assert speculation_pb2.SpeculationOffReason.Name(status.off_reason) == f"SPECULATION_OFF_REASON_{name}"
    assert status.active == (state is DraftState.ACTIVE)
    assert bool(status.detail) == (state is not DraftState.ACTIVE)
    assert list(status.available_drafters) == ["ngram"]


@pytest.fixture
def choosing(speculating: Harness) -> Harness:
    """A server whose drafter chooses among two."""
    info = dataclasses.replace(speculating.engine.info, drafter="hybrid", drafters=("ngram", "suffix"))
    speculating.engine.info = info
    return speculating


@pytest.mark.parametrize("name", ["hybrid", "ngram", "suffix", None])
async def test_a_request_names_its_drafter(choosing: Harness, name: str | None) -> None:
    call = harness_call(choosing, {} if name is None else {"drafter": name})
    [sequence] = await choosing.engine.arrival()
    assert sequence.request.drafter == (name or "hybrid")
    choosing.engine.step({sequence: "b"}, FinishReason.LENGTH)
    assert (await call).started.speculation.drafter == (name or "hybrid")
    assert list((await status_of(choosing)).available_drafters) == ["hybrid", "ngram", "suffix"]


@pytest.mark.parametrize("name", ["oracle", "grammar"])
async def test_an_unknown_drafter_is_refused_with_those_there_are(choosing: Harness, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness_call(choosing, {"drafter": name})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "speculation.drafter" in str(caught.value.details())
    assert "hybrid, ngram, suffix" in str(caught.value.details())


async def test_each_step_names_who_drafted(choosing: Harness) -> None:
    call = harness_call(choosing, {}, stream=True)
    [sequence] = await choosing.engine.arrival()
    for text, drafter, num_drafted in (("b", 0, 0), ("cde", 1, 2), ("fg", 0, 1), ("ij", 2, 1), ("h", 0, 0)):
        finish = FinishReason.LENGTH if text == "h" else FinishReason.NONE
        counts = {"drafter": drafter, "num_drafted": num_drafted, "num_accepted": num_drafted}
        choosing.engine.step({sequence: text}, finish, **counts)
    events = [event async for response in call for event in response.events]
    steps = [step for event in events for step in event.output_delta.step_timings]
    assert [step.drafter for step in steps] == ["", "suffix", "ngram", "grammar", ""]
    [finished] = [event.finished for event in events if event.HasField("finished")]
    assert list(finished.timing.acceptance_histogram) == [0, 2, 1]


def harness_call(harness: Harness, speculation: dict[str, object], *, stream: bool = False) -> Any:
    spec = {"prompt": "a", "speculation": speculation, "output": {"timing_level": timing_pb2.TIMING_LEVEL_STEP}}
    if stream:
        return harness.generation.StreamGenerateText(generation_service_pb2.StreamGenerateTextRequest(spec=spec))
    return harness.generation.GenerateText(generation_service_pb2.GenerateTextRequest(spec=spec))


async def status_of(harness: Harness) -> speculation_pb2.SpeculationStatus:
    response = await ModelServiceStub(harness.channel).GetModel(model_service_pb2.GetModelRequest())
    return response.model.speculation
