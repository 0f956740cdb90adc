"""All services but generation."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from foreword.scheduler.step import FinishReason
from foreword.service.config import ServerConfig
from foreword.service.frontend.engine_service import EngineService
from foreword.service.frontend.generation_service import GenerationService
from foreword.service.frontend.model_service import ModelService
from foreword.service.frontend.reflection import V1, V1ALPHA
from foreword.service.frontend.tokenization_service import TokenizationService
from foreword.service.listener import channel_options
from foreword.service.server import HEALTH_SERVICE, SERVICES
from foreword.service.text.vocabulary import Vocabulary
from foreword.v1 import engine_pb2, engine_service_pb2, model_pb2, model_service_pb2
from foreword.v1 import tokenization_service_pb2 as tokenization
from foreword.v1.engine_service_pb2_grpc import EngineServiceStub
from foreword.v1.model_service_pb2_grpc import ModelServiceStub
from foreword.v1.tokenization_service_pb2_grpc import TokenizationServiceStub

from .conftest import EOS, Harness
from .rpc import failure_of, streamed, unary

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_tokenize_and_detokenize(harness: Harness) -> None:
    stub = TokenizationServiceStub(harness.channel)
    request = tokenization.TokenizeRequest(model="toy", text="aé<s>", return_offsets=True, return_token_bytes=True)
    response = await stub.Tokenize(request)
    assert list(response.token_ids) == list("aé<s>".encode())
    assert list(zip(response.start_offsets, response.end_offsets, strict=True))[:4] == [(0, 1), (1, 3), (1, 3), (3, 4)]
    assert b"".join(response.token_bytes) == "aé<s>".encode()
    back = await stub.Detokenize(tokenization.DetokenizeRequest(token_ids=response.token_ids, return_token_bytes=True))
    assert back.text == "aé<s>"
    assert list(back.token_bytes) == list(response.token_bytes)

    plain = await stub.Tokenize(tokenization.TokenizeRequest(text="<s>", parse_special_tokens=True))
    assert list(plain.token_ids) == [256]
    assert not plain.start_offsets
    assert not plain.token_bytes
    back = await stub.Detokenize(tokenization.DetokenizeRequest(token_ids=[97, EOS], include_special_tokens=True))
    assert back.text == "a</s>"


async def test_tokenization_refuses_what_it_cannot_use(harness: Harness) -> None:
    stub = TokenizationServiceStub(harness.channel)
    failure = await failure_of(stub.Detokenize(tokenization.DetokenizeRequest(token_ids=[1, 300])))
    assert failure.fields == ["token_ids[1]"]
    failure = await failure_of(stub.Tokenize(tokenization.TokenizeRequest(model="other", text="x")))
    assert failure.code is grpc.StatusCode.NOT_FOUND
    assert (await failure_of(stub.RenderChat(tokenization.RenderChatRequest()))).fields == ["chat"]
    chat = {"messages": [{"content": "x"}]}
    failure = await failure_of(stub.RenderChat(tokenization.RenderChatRequest(chat=chat)))
    assert failure.fields == ["chat.messages[0].role"]
    request = tokenization.TokenizeRequest(text="x")
    request.MergeFromString(bytes([0xF8, 0x07, 1]))
    assert (await failure_of(stub.Tokenize(request))).fields == ["<127>"]


class TestLargeAnswers:
    @pytest.fixture
    def config(self) -> ServerConfig:
        return ServerConfig(listen_address="127.0.0.1:0", max_send_message_bytes=64 << 10)

    async def test_are_refused_by_the_name_of_what_made_them_large(self, harness: Harness) -> None:
        stub = TokenizationServiceStub(harness.channel)
        text = "x" * 30_000
        assert len((await stub.Tokenize(tokenization.TokenizeRequest(text=text))).token_ids) == 30_000
        calls = {
            "text": stub.Tokenize(tokenization.TokenizeRequest(text=text, return_offsets=True)),
            "token_ids": stub.Detokenize(tokenization.DetokenizeRequest(token_ids=[97] * 66_000)),
            "chat.messages": stub.RenderChat(
                tokenization.RenderChatRequest(chat={"messages": [{"role": "ROLE_USER", "content": "x" * 60_000}]})
            ),
        }
        for field, call in calls.items():
            failure = await failure_of(call)
            assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
            assert "65,536 bytes" in failure.message

    async def test_are_not_built_by_the_thread_of_the_event_loop(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads = set()

        def bytes_of(vocabulary: Vocabulary, token_id: int) -> bytes:
            threads.add(threading.get_ident())
            return b"x"

        monkeypatch.setattr(Vocabulary, "bytes_of", bytes_of)
        stub = TokenizationServiceStub(harness.channel)
        await stub.Tokenize(tokenization.TokenizeRequest(text="abc", return_token_bytes=True))
        await stub.Detokenize(tokenization.DetokenizeRequest(token_ids=[1, 2], return_token_bytes=True))
        assert threads
        assert threading.get_ident() not in threads

    async def test_conversations_of_too_many_messages(self, harness: Harness) -> None:
        stub = TokenizationServiceStub(harness.channel)
        request = tokenization.RenderChatRequest(chat={"messages": [{}] * 4097})
        assert (await failure_of(stub.RenderChat(request))).fields == ["chat.messages"]


async def test_render_chat(harness: Harness) -> None:
    stub = TokenizationServiceStub(harness.channel)
    chat = {"messages": [{"role": "ROLE_USER", "content": "hi"}], "add_generation_prompt": False}
    response = await stub.RenderChat(tokenization.RenderChatRequest(chat=chat))
    assert response.text == "<s>user: hi</s>"
    assert list(response.token_ids) == [256, *b"user: hi", EOS]


async def test_models(harness: Harness) -> None:
    stub = ModelServiceStub(harness.channel)
    [model] = (await stub.ListModels(model_service_pb2.ListModelsRequest())).models
    assert (model.name, model.state, model.vocabulary_size) == ("toy", model_pb2.MODEL_STATE_READY, 300)
    assert (model.is_default, model.has_chat_template, list(model.eos_token_ids)) == (True, True, [EOS])
    assert "sampling.top_p" in model.supported_fields.paths
    assert model.default_sampling.temperature == 1.0
    assert (await stub.GetModel(model_service_pb2.GetModelRequest())).model == model
    failure = await failure_of(stub.GetModel(model_service_pb2.GetModelRequest(name="other")))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    harness.engine.ready = False
    [model] = (await stub.ListModels(model_service_pb2.ListModelsRequest())).models
    assert model.state == model_pb2.MODEL_STATE_RESTARTING


async def test_server_info_and_load(harness: Harness) -> None:
    stub = EngineServiceStub(harness.channel)
    info = await stub.GetServerInfo(engine_service_pb2.GetServerInfoRequest())
    assert info.state == engine_service_pb2.SERVER_STATE_READY
    assert (info.engine.device, info.engine.block_count, info.engine.model) == ("cpu", 100, "toy")
    assert info.version
    assert info.max_receive_message_bytes == 4 << 20
    load = (await stub.GetLoad(engine_service_pb2.GetLoadRequest())).load
    assert load == engine_pb2.Load(
        running_sequence_count=1,
        waiting_sequence_count=2,
        waiting_token_count=30,
        free_block_count=90,
        block_count=100,
        cached_block_count=40,
    )
    harness.engine.ready, harness.engine.info = False, None
    info = await stub.GetServerInfo(engine_service_pb2.GetServerInfoRequest())
    assert info.state == engine_service_pb2.SERVER_STATE_LOADING
    assert not info.HasField("engine")
    failure = await failure_of(stub.GetLoad(engine_service_pb2.GetLoadRequest()))
    assert failure.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("servicer", [EngineService, GenerationService, ModelService, TokenizationService])
def test_every_method_of_the_contract_is_served(servicer: type) -> None:
    """As a coroutine, which is what the error boundary guards."""
    for name in vars(servicer.__base__):
        if not name.startswith("_"):
            assert inspect.iscoroutinefunction(vars(servicer).get(name)), name


async def test_health_of_the_server_and_of_its_services(harness: Harness) -> None:
    stub = health_pb2_grpc.HealthStub(harness.channel)
    for service in ("", *SERVICES):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_watch_follows_the_engine_and_the_drain(harness: Harness) -> None:
    stub = health_pb2_grpc.HealthStub(harness.channel)
    ready = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
    alive = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await ready.read()).status == SERVING
    assert (await alive.read()).status == SERVING
    for is_ready, status in ((False, NOT_SERVING), (True, SERVING)):
        harness.engine.ready = is_ready
        harness.server.note_engine(is_ready)
        assert (await ready.read()).status == status
    await harness.server.drain(1.0)
    assert (await ready.read()).status == NOT_SERVING
    assert (await alive.read()).status == NOT_SERVING
    ready.cancel()
    alive.cancel()


@pytest.mark.parametrize("package", [V1, V1ALPHA])
async def test_reflection(harness: Harness, package: str) -> None:
    method = harness.channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method()

    async def ask(**question: Any) -> Any:
        await call.write(reflection_pb2.ServerReflectionRequest(**question))
        return await call.read()

    listed = {service.name for service in (await ask(list_services="")).list_services_response.service}
    assert listed == {*SERVICES, HEALTH_SERVICE, f"{V1}.ServerReflection", f"{V1ALPHA}.ServerReflection"}
    for symbol in listed:
        answer = (await ask(file_containing_symbol=symbol)).file_descriptor_response
        files = [descriptor_pb2.FileDescriptorProto.FromString(data) for data in answer.file_descriptor_proto]
        names = {f"{file.package}.{service.name}" for file in files for service in file.service}
        assert symbol in names
        assert {each for file in files for each in file.dependency} <= {file.name for file in files}
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


def test_channel_options_are_known_to_the_library() -> None:
    with open(cygrpc.__file__, "rb") as library:
        known = library.read()
    assert ("grpc.so_reuseport", 0) in channel_options(ServerConfig())
    for name, _ in channel_options(ServerConfig()):
        assert name.encode() + b"\0" in known, name
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in known  # a spelling seen elsewhere


async def test_drain_refuses_new_generations_and_waits_for_old_ones(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary())
    [sequence] = await harness.engine.arrival()
    drain = asyncio.create_task(harness.server.drain(10.0))
    while not harness.registry.is_closed:
        await asyncio.sleep(0)
    failure = await failure_of(harness.generation.GenerateText(unary()))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE")
    assert not drain.done()
    harness.engine.step({sequence: "x"}, FinishReason.LENGTH)
    assert (await call).outputs[0].content.text == "x"
    await asyncio.wait_for(drain, 5)


class TestDrainDelay:
    @pytest.fixture
    def config(self) -> ServerConfig:
        return ServerConfig(listen_address="127.0.0.1:0", drain_delay_s=60.0)

    async def test_calls_are_served_until_load_balancers_know(self, harness: Harness) -> None:
        watch = health_pb2_grpc.HealthStub(harness.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        assert (await watch.read()).status == SERVING
        drain = asyncio.create_task(harness.server.drain(10.0))
        assert (await watch.read()).status == NOT_SERVING
        call = harness.generation.GenerateText(unary())
        [sequence] = await harness.engine.arrival()
        harness.engine.step({sequence: "x"}, FinishReason.LENGTH)
        assert (await call).outputs[0].content.text == "x"
        drain.cancel()
        watch.cancel()


async def test_generations_left_after_the_grace_end_as_unavailable(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed())
    [sequence] = await harness.engine.arrival()
    await harness.server.drain(0.05)
    await harness.server.stop()
    failure = await failure_of(call)
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert harness.engine.forgotten == [sequence.request.request_key]
