"""`EngineService`, but for its lookups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foreword.scheduler.step import DraftState, FinishReason, StepForecast
from foreword.service.config import ServerConfig
from foreword.service.engine.messages import StepHeader
from foreword.service.frontend.engine_responses import generation_message
from foreword.service.frontend.model import ServedModel
from foreword.service.frontend.step_feed import MAX_UNREAD_STEPS
from foreword.service.server import ENGINE_SERVICE, Server
from foreword.v1 import engine_pb2, engine_service_pb2, speculation_pb2
from foreword.v1.engine_service_pb2 import (
    DrainServerRequest,
    GetLoadRequest,
    ListGenerationsRequest,
    WatchLoadRequest,
    WatchStepsRequest,
)
from foreword.v1.engine_service_pb2_grpc import EngineServiceStub
from foreword.v1.model_service_pb2 import ListModelsRequest
from foreword.v1.model_service_pb2_grpc import ModelServiceStub

from .conftest import LOAD, FakeEngine, Harness
from .rpc import failure_of, read_events, streamed, unary


@pytest.fixture
def stub(harness: Harness) -> EngineServiceStub:
    return EngineServiceStub(harness.channel)


class TestWatchSteps:
    async def test_every_step_is_told(self, harness: Harness, stub: EngineServiceStub) -> None:
        watch = stub.WatchSteps(WatchStepsRequest())
        await watch.initial_metadata()
        call = harness.generation.GenerateText(unary())
        [sequence] = await harness.engine.arrival()
        before_ns = time.time_ns()
        harness.engine.step({sequence: "a"})
        message = await watch.read()
        assert message.dropped_step_count == 0
        [step] = message.steps
        assert (step.step_id, step.sequence_count, step.token_count) == (1, 1, 1)
        assert (step.step_duration_micros, step.verify_duration_micros) == (2000, 1500)
        assert abs(step.start_time.ToNanoseconds() - before_ns) < 1_000_000_000
        assert step.token_budget == 64
        assert step.load.free_block_count == LOAD.num_free_blocks
        harness.engine.step({sequence: "b"})
        assert [step.step_id for step in (await watch.read()).steps] == [2]
        harness.engine.step({sequence: "c"}, FinishReason.LENGTH)
        await call
        watch.cancel()

    async def test_how_drafts_fared_is_told(self, harness: Harness, stub: EngineServiceStub) -> None:
        watch = stub.WatchSteps(WatchStepsRequest())
        await watch.initial_metadata()
        header = StepHeader(1, 0, 2_000_000, 0, 1_500_000, 3, 9, LOAD, draft_state=DraftState.NO_GAIN)
        header = replace(header, drafted=(3, 2), accepted=(2,), emitted=(3, 2, 1), forecast=StepForecast(7000, 9000))
        harness.engine.step_listener(header)
        [step] = (await watch.read()).steps
        places = [
            (place.draft_token_count, place.accepted_draft_token_count, place.output_token_count)
            for place in step.draft_places
        ]
        assert places == [(3, 2, 3), (2, 0, 2), (0, 0, 1)]
        assert (step.predicted_verify_duration_micros, step.undrafted_duration_micros) == (7, 9)
        assert step.speculation_off_reason == speculation_pb2.SPECULATION_OFF_REASON_NO_GAIN
        watch.cancel()

    async def test_steps_are_collected(self, harness: Harness, stub: EngineServiceStub) -> None:
        watch = stub.WatchSteps(WatchStepsRequest(coalesce_duration=Duration(nanos=200_000_000)))
        await watch.initial_metadata()
        for _ in range(5):
            harness.engine.step({})
        assert [step.step_id for step in (await watch.read()).steps] == [1, 2, 3, 4, 5]
        watch.cancel()

    async def test_a_client_that_does_not_read_is_told_what_it_missed(
        self, harness: Harness, stub: EngineServiceStub
    ) -> None:
        """It holds nobody up, and what it gets and what it misses adds up."""
        lazy = stub.WatchSteps(WatchStepsRequest())
        await lazy.initial_metadata()
        [watcher] = harness.server.frontend.steps._watchers
        eager = stub.WatchSteps(WatchStepsRequest())
        await eager.initial_metadata()
        num_steps = num_seen = 0
        while watcher._num_dropped == 0:
            for _ in range(MAX_UNREAD_STEPS // 2):
                harness.engine.step({})
            num_steps += MAX_UNREAD_STEPS // 2
            while num_seen < num_steps:
                message = await asyncio.wait_for(eager.read(), 5)
                assert message.dropped_step_count == 0
                num_seen += len(message.steps)
        last_id, num_dropped = 0, 0
        while last_id < num_steps:
            message = await asyncio.wait_for(lazy.read(), 5)
            assert message.steps[0].step_id == last_id + 1 + message.dropped_step_count
            last_id = message.steps[-1].step_id
            num_dropped += message.dropped_step_count
        assert num_dropped > 0
        lazy.cancel()
        eager.cancel()

    async def test_the_servers_end_ends_it_well(self, harness: Harness, stub: EngineServiceStub) -> None:
        watches: list[Any] = [stub.WatchSteps(WatchStepsRequest()), stub.WatchLoad(WatchLoadRequest())]
        await watches[0].initial_metadata()
        await watches[1].read()
        await harness.server.stop()
        for watch in watches:
            assert await watch.read() is grpc.aio.EOF
            assert await watch.code() is grpc.StatusCode.OK


class TestWatchLoad:
    async def test_gauges_come_at_an_interval(self, harness: Harness, stub: EngineServiceStub) -> None:
        watch = stub.WatchLoad(WatchLoadRequest(interval=Duration(nanos=10_000_000)))
        messages = [await watch.read() for _ in range(3)]
        assert {message.load.running_sequence_count for message in messages} == {1}
        times = [message.read_time.ToNanoseconds() for message in messages]
        assert times[1] - times[0] >= 9_000_000
        assert times[2] - times[1] >= 9_000_000
        harness.engine.ready = False
        assert (await failure_of(watch)).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("WatchLoad", WatchLoadRequest(interval=Duration()), "interval"),
        ("WatchLoad", WatchLoadRequest(interval=Duration(seconds=61)), "interval"),
        ("WatchLoad", WatchLoadRequest(interval=Duration(nanos=2_000_000_000)), "interval"),
        ("WatchSteps", WatchStepsRequest(coalesce_duration=Duration(seconds=-1)), "coalesce_duration"),
        ("WatchSteps", WatchStepsRequest(coalesce_duration=Duration(seconds=11)), "coalesce_duration"),
        ("ListGenerations", ListGenerationsRequest(page_size=0), "page_size"),
        ("ListGenerations", ListGenerationsRequest(page_size=1001), "page_size"),
        ("ListGenerations", ListGenerationsRequest(page_token="1"), "page_token"),
        ("ListGenerations", ListGenerationsRequest(page_token="0"), "page_token"),
        ("ListGenerations", ListGenerationsRequest(page_token="-1"), "page_token"),
        ("ListGenerations", ListGenerationsRequest(page_token="x"), "page_token"),
        ("ListGenerations", ListGenerationsRequest(page_token="9" * 5000), "page_token"),
        ("DrainServer", DrainServerRequest(grace_duration=Duration(seconds=-1)), "grace_duration"),
        ("DrainServer", DrainServerRequest(grace_duration=Duration(seconds=31_536_001)), "grace_duration"),
    ],
)
async def test_bad_requests_name_the_field(stub: EngineServiceStub, method: str, request_: Any, field: str) -> None:
    failure = await failure_of(getattr(stub, method)(request_))
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])


class TestListGenerations:
    async def test_what_is_told_of_a_generation(self, harness: Harness, stub: EngineServiceStub) -> None:
        async def only() -> engine_pb2.GenerationInfo:
            [info] = (await stub.ListGenerations(ListGenerationsRequest())).generations
            return info

        assert not (await stub.ListGenerations(ListGenerationsRequest())).generations
        spec = {"request_id": "a", "priority": 3, "stopping": {"max_generation_duration": Duration(seconds=100)}}
        call = harness.generation.StreamGenerateText(streamed(prompt="secret", **spec))
        [sequence] = await harness.engine.arrival()
        info = await only()
        assert (info.request_id, info.model, info.priority) == ("a", "toy", 3)
        assert info.phase == engine_pb2.GENERATION_PHASE_QUEUED
        duration_ns = info.expire_time.ToNanoseconds() - info.receive_time.ToNanoseconds()
        assert abs(duration_ns - 100e9) < 1e9
        harness.engine.step({sequence: []}, num_prompt_computed=4)
        info = await only()
        assert info.phase == engine_pb2.GENERATION_PHASE_PREFILL
        assert (info.prompt_token_count, info.computed_prompt_token_count) == (6, 4)
        harness.engine.step({sequence: "xy"})
        info = await only()
        assert (info.phase, info.output_token_count) == (engine_pb2.GENERATION_PHASE_DECODE, 2)
        assert "secret" not in str(info)
        harness.engine.step({sequence: "x" * 200})
        [generation] = harness.registry
        assert generation_message(generation, "toy").phase == engine_pb2.GENERATION_PHASE_PAUSED
        harness.engine.step({sequence: "z"}, FinishReason.LENGTH)
        await read_events(call)
        assert not (await stub.ListGenerations(ListGenerationsRequest())).generations

    async def test_pages_hold_while_generations_come_and_go(self, harness: Harness, stub: EngineServiceStub) -> None:
        """Who is there all the time is on exactly one page."""
        calls = {}

        async def start(*names: str) -> None:
            for name in names:
                calls[name] = harness.generation.StreamGenerateText(streamed(request_id=name))
                await harness.engine.arrival(len(harness.engine.sequences) + 1)

        async def end(name: str) -> None:
            calls.pop(name).cancel()
            while name in {generation.settings.request_id for generation in harness.registry}:
                await asyncio.sleep(0)

        await start(*"abcdefg")
        token, pages = "", []
        for ending, beginning in (("b", "h"), ("d", "b"), ("g", "i"), ("a", "j"), ("c", "k")):
            page = await stub.ListGenerations(ListGenerationsRequest(page_size=2, page_token=token))
            pages.append([info.request_id for info in page.generations])
            token = page.next_page_token
            await end(ending)
            await start(beginning)
            if not token:
                break
        assert pages[0] == ["a", "b"]
        listed = [name for page in pages for name in page]
        assert len(listed) == len(set(listed)) + (listed.count("b") - 1)
        assert {"c", "e", "f"} <= set(listed)
        assert all(len(page) <= 2 for page in pages)
        for name in list(calls):
            await end(name)


class TestDrainServer:
    async def test_it_is_the_end_that_a_signal_begins(self, harness: Harness, stub: EngineServiceStub) -> None:
        health = health_pb2_grpc.HealthStub(harness.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="foreword.v1.GenerationService"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        asked: list[bool] = []
        harness.server.frontend.drain.on_request = lambda: asked.append(True)
        call = harness.generation.StreamGenerateText(streamed())
        [sequence] = await harness.engine.arrival()
        answer = await stub.DrainServer(DrainServerRequest())
        assert answer.active_generation_count == 1
        assert abs(answer.stop_time.ToNanoseconds() - time.time_ns() - 30e9) < 2e9
        assert asked == [True]
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        info = await stub.GetServerInfo(engine_service_pb2.GetServerInfoRequest())
        assert info.state == engine_service_pb2.SERVER_STATE_DRAINING
        failure = await failure_of(harness.generation.GenerateText(unary()))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
        assert failure.trailers["grpc-retry-pushback-ms"]
        drained = asyncio.create_task(harness.server.drain(3600))
        await asyncio.sleep(0)
        assert not drained.done()
        harness.engine.step({sequence: "xyz"}, FinishReason.LENGTH)
        assert (await read_events(call))[-1].finished.usage.output_token_count == 3
        await asyncio.wait_for(drained, 5)
        watch.cancel()

    async def test_a_later_call_only_shortens_the_grace(self, harness: Harness, stub: EngineServiceStub) -> None:
        call = harness.generation.StreamGenerateText(streamed())
        [sequence] = await harness.engine.arrival()
        stop_times = []
        for grace_s in (100, 50, 200):
            answer = await stub.DrainServer(DrainServerRequest(grace_duration=Duration(seconds=grace_s)))
            stop_times.append(answer.stop_time.ToNanoseconds() / 1e9)
        assert abs(stop_times[1] - (stop_times[0] - 50)) < 2
        assert abs(stop_times[2] - stop_times[1]) < 2
        drained = asyncio.create_task(harness.server.drain(3600))
        await stub.DrainServer(DrainServerRequest(grace_duration=Duration()))
        await asyncio.wait_for(drained, 5)
        await harness.server.stop()
        assert (await failure_of(call)).code is grpc.StatusCode.UNAVAILABLE
        assert harness.engine.forgotten == [sequence.request.request_key]


class TestChannelz:
    @pytest.fixture
    def config(self) -> ServerConfig:
        return ServerConfig(listen_address="127.0.0.1:0", channelz=True)

    async def test_grpc_tells_of_its_servers_where_it_may(self, harness: Harness) -> None:
        stub = channelz_pb2_grpc.ChannelzStub(harness.channel)
        servers = (await stub.GetServers(channelz_pb2.GetServersRequest())).server
        assert any(server.data.calls_started for server in servers)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetServer(channelz_pb2.GetServerRequest(server_id=1 << 40))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_channelz_is_off_unless_asked_for(harness: Harness) -> None:
    stub = channelz_pb2_grpc.ChannelzStub(harness.channel)
    code = await code_of(stub.GetServers(channelz_pb2.GetServersRequest()))
    assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.fixture
async def public(toy_model: ServedModel, request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """A server that others can reach, with or without an address for operators."""
    config = ServerConfig(listen_address="0.0.0.0:0", insecure=True, admin_listen_address=request.param)
    server = Server(config, FakeEngine(), toy_model)  # type: ignore[arg-type]
    await server.start()
    yield server
    await server.stop()


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def local(address: str) -> str:
    return f"127.0.0.1:{address.rpartition(':')[2]}"


@pytest.mark.parametrize("public", ["127.0.0.1:0", None], indirect=True)
async def test_operators_have_their_own_address(public: Server) -> None:
    async with grpc.aio.insecure_channel(local(public.address)) as channel:
        assert await code_of(EngineServiceStub(channel).GetLoad(GetLoadRequest())) is grpc.StatusCode.UNIMPLEMENTED
        assert await code_of(ModelServiceStub(channel).ListModels(ListModelsRequest())) is grpc.StatusCode.OK
    if public.admin_address != public.address:
        async with grpc.aio.insecure_channel(public.admin_address) as channel:
            assert await code_of(EngineServiceStub(channel).GetLoad(GetLoadRequest())) is grpc.StatusCode.OK
            models = ModelServiceStub(channel).ListModels(ListModelsRequest())
            assert await code_of(models) is grpc.StatusCode.UNIMPLEMENTED
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service=ENGINE_SERVICE))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
