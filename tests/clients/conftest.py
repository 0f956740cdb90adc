# ruff: noqa: N802  (the names of RPCs)
"""A server whose generations say the words of their prompts, one a step; some prompts ask for trouble."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from foreword.clients import AsyncClient, Client
from foreword.v1 import (
    engine_pb2,
    engine_service_pb2,
    engine_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_pb2,
    model_service_pb2,
    model_service_pb2_grpc,
    tokenization_service_pb2,
    tokenization_service_pb2_grpc,
)
from foreword.v1.generation_pb2 import (
    CommandRefused,
    GenerationEvent,
    GenerationFinished,
    GenerationSpec,
    GenerationStarted,
    Output,
    OutputDelta,
    OutputFinished,
)
from foreword.v1.stopping_pb2 import FinishReason
from foreword.v1.usage_pb2 import Usage


def refusal(code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT, reason: str = "INVALID_FIELD") -> Status:
    status = Status(code=code.value[0], message="sampling.top_p: above 1")
    details = (
        ErrorInfo(reason=reason, domain="foreword", metadata={"field": "sampling.top_p"}),
        BadRequest(field_violations=[BadRequest.FieldViolation(field="sampling.top_p", description="above 1")]),
        RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
    )
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(context: Any, status: Status, details: bytes | None = None) -> None:
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    trailers = (("grpc-status-details-bin", status.SerializeToString() if details is None else details),)
    await context.abort(code, status.message, trailers)


def words_of(spec: GenerationSpec) -> list[str]:
    match spec.WhichOneof("input"):
        case "chat":
            return spec.chat.messages[-1].content.split()
        case "prompt_token_ids":
            return [str(token_id) for token_id in spec.prompt_token_ids.ids]
        case _:
            return spec.prompt.split()


@dataclass
class Speaker:
    """One generation: says its words, then ends; "endless" never ends by itself, "silent" says nothing and waits."""

    spec: GenerationSpec
    said: int = 0
    cancelled: bool = False

    def started(self) -> GenerationStarted:
        return GenerationStarted(request_id=self.spec.request_id or "made", model=self.spec.model or "default")

    def next_events(self) -> list[GenerationEvent]:
        words = words_of(self.spec)
        endless = words[0] in ("endless", "silent")
        if not self.cancelled and (endless or self.said < len(words)):
            if words[0] == "silent":
                return []
            word = words[0] if endless else words[self.said]
            self.said += 1
            return [GenerationEvent(output_delta=OutputDelta(text=word + " ", token_ids=[len(word)]))]
        reason = FinishReason.FINISH_REASON_CANCELLED if self.cancelled else FinishReason.FINISH_REASON_EOS
        return [
            GenerationEvent(output_finished=OutputFinished(finish_reason=reason, output_token_count=self.said)),
            GenerationEvent(finished=GenerationFinished(usage=Usage(output_token_count=self.said))),
        ]


@dataclass
class FakeServer(
    generation_service_pb2_grpc.GenerationServiceServicer,
    tokenization_service_pb2_grpc.TokenizationServiceServicer,
    model_service_pb2_grpc.ModelServiceServicer,
    engine_service_pb2_grpc.EngineServiceServicer,
):
    """All services, and what was asked of them.

    Attributes:
        target: where it listens.
        specs: of all generations, in order.
        num_unavailable: calls that are still to be refused with UNAVAILABLE.
        ended: how each stream ended: "ok", "cancelled" or "aborted".
        num_attempts: unary generations that arrived, retries included.
        commands: of bidirectional streams.
        tenants: of all calls that generate, in order.
    """

    target: str = ""
    specs: list[GenerationSpec] = field(default_factory=list)
    num_unavailable: int = 0
    num_attempts: int = 0
    ended: Queue[str] = field(default_factory=Queue)
    commands: list[generation_service_pb2.BidiGenerateTextRequest] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)

    async def start(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        tokenization_service_pb2_grpc.add_TokenizationServiceServicer_to_server(self, server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(self, server)
        engine_service_pb2_grpc.add_EngineServiceServicer_to_server(self, server)
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        return server

    def _note_tenant(self, context: Any) -> None:
        self.tenants.append(dict(context.invocation_metadata()).get("foreword-tenant", ""))

    async def GenerateText(self, request: Any, context: Any) -> Any:
        self.num_attempts += 1
        self._note_tenant(context)
        self.specs.append(request.spec)
        if self.num_unavailable:
            self.num_unavailable -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "loading")
        match words_of(request.spec):
            case ["refused"]:
                await abort(context, refusal())
            case ["damaged"]:
                await abort(context, refusal(), details=b"\xff\xff")
            case ["bare"]:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
            case ["silent"]:
                await asyncio.Event().wait()
            case ["long"]:
                return generation_service_pb2.GenerateTextResponse(
                    outputs=[Output(content=OutputDelta(text="x" * 5_000_000))]
                )
        speaker = Speaker(request.spec)
        response = generation_service_pb2.GenerateTextResponse(started=speaker.started(), outputs=[Output()])
        output = response.outputs[0]
        while not response.HasField("finished"):
            for event in speaker.next_events():
                if event.HasField("output_delta"):
                    output.content.text += event.output_delta.text
                    output.content.token_ids.extend(event.output_delta.token_ids)
                elif event.HasField("output_finished"):
                    output.finished.CopyFrom(event.output_finished)
                else:
                    response.finished.CopyFrom(event.finished)
        return response

    async def StreamGenerateText(self, request: Any, context: Any) -> None:
        self._note_tenant(context)
        self.specs.append(request.spec)
        try:
            if words_of(request.spec) == ["refused"]:
                await abort(context, refusal())
            speaker = Speaker(request.spec)
            events = [GenerationEvent(started=speaker.started())]
            while True:
                await context.write(generation_service_pb2.StreamGenerateTextResponse(events=events))
                if events[-1].HasField("finished"):
                    break
                if words_of(request.spec)[0] == "broken" and speaker.said == 1:
                    await abort(context, refusal(grpc.StatusCode.INTERNAL, "ENGINE_ERROR"))
                events = speaker.next_events()
                if not events:
                    await asyncio.Event().wait()
            self.ended.put_nowait("ok")
        except asyncio.CancelledError:
            self.ended.put_nowait("cancelled")
            raise
        except grpc.aio.AbortError:
            self.ended.put_nowait("aborted")
            raise

    async def BidiGenerateText(self, request_iterator: AsyncIterator[Any], context: Any) -> None:
        self._note_tenant(context)
        speakers: dict[str, Speaker] = {}
        answers: list[GenerationEvent] = []
        news = asyncio.Event()
        half_closed = False

        async def read() -> None:
            nonlocal half_closed
            index = 0
            async for command in request_iterator:
                self.commands.append(command)
                self.obey(command, index, speakers, answers)
                index += 1
                news.set()
            half_closed = True
            news.set()

        reader = asyncio.create_task(read())
        try:
            while speakers or answers or not half_closed:
                events, answers[:] = answers[:], []
                for request_id, speaker in list(speakers.items()):
                    if words_of(speaker.spec)[0] == "abort":
                        await abort(context, refusal(grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE"))
                    for event in speaker.next_events():
                        event.request_id = request_id
                        if event.HasField("finished"):
                            del speakers[request_id]
                            if words_of(speaker.spec)[0] == "broken":
                                event.finished.error.CopyFrom(refusal(grpc.StatusCode.INTERNAL, "ENGINE_ERROR"))
                        events.append(event)
                if events:
                    await context.write(generation_service_pb2.BidiGenerateTextResponse(events=events))
                else:
                    await news.wait()
                    news.clear()
            self.ended.put_nowait("ok")
        except asyncio.CancelledError:
            self.ended.put_nowait("cancelled")
            raise
        finally:
            reader.cancel()

    def obey(self, command: Any, index: int, speakers: dict[str, Speaker], answers: list[GenerationEvent]) -> None:
        match command.WhichOneof("command"):
            case "start" if command.start.spec.prompt != "refused":
                spec = command.start.spec
                self.specs.append(spec)
                speakers[spec.request_id] = Speaker(spec)
                answers.append(GenerationEvent(request_id=spec.request_id, started=Speaker(spec).started()))
            case "cancel" if command.cancel.request_id in speakers:
                speakers[command.cancel.request_id].cancelled = True
            case "cancel":
                refused = CommandRefused(command_index=index, error=refusal(grpc.StatusCode.NOT_FOUND))
                answers.append(GenerationEvent(refused=refused))
            case _:
                answers.append(GenerationEvent(refused=CommandRefused(command_index=index, error=refusal())))

    async def CancelGeneration(self, request: Any, context: Any) -> Any:
        outcomes = generation_service_pb2.CancelOutcome
        if request.request_id == "unknown":
            await abort(context, refusal(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND"))
        return generation_service_pb2.CancelGenerationResponse(
            outcome=outcomes.CANCEL_OUTCOME_CANCELLED
            if request.request_id == "active"
            else outcomes.CANCEL_OUTCOME_ALREADY_FINISHED
        )

    async def Tokenize(self, request: Any, context: Any) -> Any:
        return tokenization_service_pb2.TokenizeResponse(
            token_ids=[ord(letter) for letter in request.text],
            start_offsets=range(len(request.text)) if request.return_offsets else (),
            token_bytes=[letter.encode() for letter in request.text] if request.return_token_bytes else (),
        )

    async def Detokenize(self, request: Any, context: Any) -> Any:
        return tokenization_service_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def RenderChat(self, request: Any, context: Any) -> Any:
        lines = [f"{message.role}:{message.content}" for message in request.chat.messages]
        return tokenization_service_pb2.RenderChatResponse(
            text="|".join(lines) + "|" * request.chat.add_generation_prompt, token_ids=[1]
        )

    async def ListModels(self, request: Any, context: Any) -> Any:
        return model_service_pb2.ListModelsResponse(models=[model_pb2.Model(name="a"), model_pb2.Model(name="b")])

    async def GetModel(self, request: Any, context: Any) -> Any:
        return model_service_pb2.GetModelResponse(model=model_pb2.Model(name=request.name or "a"))

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return engine_service_pb2.GetServerInfoResponse(version="1.2.3")

    async def GetLoad(self, request: Any, context: Any) -> Any:
        return engine_service_pb2.GetLoadResponse(load=engine_pb2.Load(running_sequence_count=3))


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    """For tests of the asyncio client: in their event loop."""
    fake = FakeServer()
    running = await fake.start()
    yield fake
    await running.stop(None)


@pytest.fixture
async def async_client(server: FakeServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.target) as client:
        yield client


@pytest.fixture
def threaded_server() -> Iterator[FakeServer]:
    """For tests of the synchronous client: in a thread of its own."""
    started = threading.Event()
    fakes: list[FakeServer] = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        fake, done = FakeServer(), asyncio.Event()
        running = await fake.start()
        fakes.append(fake)
        loops.append((asyncio.get_running_loop(), done))
        started.set()
        await done.wait()
        await running.stop(None)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert started.wait(30)
    yield fakes[0]
    loop, done = loops[0]
    loop.call_soon_threadsafe(done.set)
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def client(threaded_server: FakeServer) -> Iterator[Client]:
    with Client(threaded_server.target) as client:
        yield client
