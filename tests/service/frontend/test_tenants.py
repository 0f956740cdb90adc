"""How a call's tenant reaches the scheduler and the prefix cache."""

from __future__ import annotations

import grpc
import pytest

from foreword.scheduler.step import FinishReason
from foreword.v1.engine_service_pb2 import ListGenerationsRequest
from foreword.v1.engine_service_pb2_grpc import EngineServiceStub
from foreword.v1.generation_service_pb2 import BidiGenerateTextRequest, StartCommand

from .conftest import Harness
from .rpc import failure_of, read_events, spec, streamed, unary


@pytest.mark.parametrize("metadata", [(), (("foreword-tenant", ""),), (("foreword-tenant", "gold"),)])
async def test_every_rpc_hands_on_its_tenant(harness: Harness, metadata: tuple[tuple[str, str], ...]) -> None:
    tenant = dict(metadata).get("foreword-tenant", "")
    single = harness.generation.GenerateText(unary(request_id="1"), metadata=metadata)
    stream = harness.generation.StreamGenerateText(
        streamed(request_id="2", cache={"cache_salt": "s"}), metadata=metadata
    )
    bidi = harness.generation.BidiGenerateText(metadata=metadata)
    await bidi.write(BidiGenerateTextRequest(start=StartCommand(spec=spec(request_id="3"))))
    await bidi.done_writing()
    sequences = await harness.engine.arrival(3)
    assert [sequence.request.tenant for sequence in sequences] == [tenant] * 3
    listed = (await EngineServiceStub(harness.channel).ListGenerations(ListGenerationsRequest())).generations
    assert [info.tenant for info in listed] == [tenant] * 3
    scopes = {sequence.request.cache_salt for sequence in sequences}
    assert len(scopes) == 2
    assert ("" in scopes) is (tenant == "")
    harness.engine.step(dict.fromkeys(sequences, "x"), FinishReason.LENGTH)
    await single
    await read_events(bidi)
    events = await read_events(stream)
    assert events[0].started.cache.cache_salt == "s"
    assert {entry["tenant"] for entry in harness.logs if entry["event"] == "generation ended"} == {tenant}


@pytest.mark.parametrize(
    "metadata",
    [
        (("foreword-tenant", "two words"),),
        (("foreword-tenant", "x" * 65),),
        (("foreword-tenant", "a"), ("foreword-tenant", "b")),
    ],
)
@pytest.mark.parametrize("rpc", ["GenerateText", "StreamGenerateText", "BidiGenerateText"])
async def test_bad_tenants_are_refused_by_name(
    harness: Harness, rpc: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    requests = {"GenerateText": [unary()], "StreamGenerateText": [streamed()], "BidiGenerateText": []}
    failure = await failure_of(getattr(harness.generation, rpc)(*requests[rpc], metadata=metadata))
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["foreword-tenant"])
    assert harness.engine.submitted == []
