"""Many generations on one bidirectional stream."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import grpc
import structlog

from foreword.scheduler.errors import ClientStalled, EngineFault, ForewordError, InvalidField, UnknownRequest
from foreword.service.frontend.boundary import Undecodable, log_refusal
from foreword.service.frontend.frontend import Frontend, rpc_deadline_ns, tenant_of
from foreword.service.frontend.generation import Generation
from foreword.service.frontend.registry import MAX_RECENT
from foreword.service.frontend.response_size import check_event_size
from foreword.service.frontend.responses import GenerationConverter, refusal
from foreword.service.frontend.timeline import Timeline
from foreword.service.frontend.validation import check_supported
from foreword.service.status import MalformedRequest, MethodUnimplemented, ResponseTooLarge, code_of
from foreword.v1 import generation_pb2, generation_service_pb2

_log = structlog.get_logger(__name__)

_METHOD = "foreword.v1.GenerationService/BidiGenerateText"

MAX_STARTING = 64
"""Generations of a stream that may be on their way to admission; reading waits for one of them before the next."""

MAX_COLLECTED_TOKENS = 8192
"""Tokens that are made into events at once; the event loop's other work waits meanwhile."""


class BidiStream:
    """Reads commands in one task and writes news in another, so that neither waits for the other.

    All sinks of a step are called within one turn of the event loop; the writer wakes after it and takes the news of
    all generations that have any, so that one message holds what one step brought.
    """

    def __init__(self, frontend: Frontend, context: Any) -> None:
        self._frontend = frontend
        self._context = context
        self._rpc_deadline_ns = rpc_deadline_ns(context)
        self._tenant = tenant_of(context)
        self._live: dict[Generation, GenerationConverter] = {}
        self._known: OrderedDict[str, None] = OrderedDict()
        self._starts: set[asyncio.Task[None]] = set()
        self._start_slots = asyncio.Semaphore(MAX_STARTING)
        self._fresh: dict[Generation, None] = {}
        self._announced: set[Generation] = set()
        self._refusals: list[generation_pb2.GenerationEvent] = []
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Serve until the client sends no more commands and all generations have ended."""
        reader = asyncio.create_task(self._read(), name="bidi-reader")
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            await self._write(reader)
        except ClientStalled as error:
            for generation in self._live:
                generation.abandon(error)
            raise
        finally:
            tasks = [reader, *self._starts]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for generation in self._live:
                self._frontend.close(generation)

    async def _read(self) -> None:
        index = 0
        while (command := await self._context.read()) is not grpc.aio.EOF:
            try:
                await self._carry_out(command, index)
            except ForewordError as error:
                log_refusal(error, command_index=index)
                self._refuse(index, error)
            index += 1

    async def _carry_out(self, command: Any, index: int) -> None:
        if isinstance(command, Undecodable):
            raise MalformedRequest("the command is not a message of the expected type")
        check_supported(command, {"start.spec", "cancel.request_id", "append_turn"})
        match command.WhichOneof("command"):
            case "start":
                await self._start_slots.acquire()
                self._open(command.start, index)
            case "cancel":
                self._cancel(command.cancel.request_id)
            case "append_turn":
                raise MethodUnimplemented("append_turn is not implemented by this server")
            case _:
                raise InvalidField("command", "is required: one of start, cancel")

    def _open(self, start: generation_service_pb2.StartCommand, index: int) -> None:
        """Register a generation at once, so that a later command finds it, and start it beside the reader."""
        try:
            if not start.spec.HasField("request_id"):
                raise InvalidField("request_id", "is required on a stream of many generations")
            generation = self._frontend.open(
                start.spec,
                Timeline(),
                self._note,
                streamed=True,
                rpc_deadline_ns=self._rpc_deadline_ns,
                tenant=self._tenant,
            )
        except BaseException:
            self._start_slots.release()
            raise
        self._live[generation] = self._frontend.converter(generation)
        self._known[generation.settings.request_id] = None
        if len(self._known) > MAX_RECENT:
            self._known.popitem(last=False)
        task = asyncio.create_task(self._start(generation, index))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)
        task.add_done_callback(lambda _: self._start_slots.release())

    async def _start(self, generation: Generation, index: int) -> None:
        try:
            await generation.start()
        except ForewordError as error:
            self._drop(generation)
            self._refuse(index, error)
        except Exception:
            _log.error("generation failed", request_id=generation.settings.request_id, exc_info=True)
            self._drop(generation)
            self._refuse(index, EngineFault("internal error; the server's log has the details"))
        else:
            self._note(generation)

    def _cancel(self, request_id: str) -> None:
        if request_id not in self._known:
            raise UnknownRequest(f"this stream has started no generation with request_id {request_id[:64]!r}")
        for generation in self._live:
            if generation.settings.request_id == request_id:
                generation.cancel()

    def _refuse(self, index: int, error: ForewordError) -> None:
        self._frontend.metrics.count_error(_METHOD, code_of(error))
        self._refusals.append(refusal(index, error))
        self._wake.set()

    def _note(self, generation: Generation) -> None:
        """Remember that a generation has news."""
        self._fresh[generation] = None
        self._wake.set()

    def _drop(self, generation: Generation) -> None:
        del self._live[generation]
        self._announced.discard(generation)
        self._fresh.pop(generation, None)
        self._frontend.close(generation)

    async def _write(self, reader: asyncio.Task[None]) -> None:
        has_begun = False
        while True:
            if events := self._collect():
                if not has_begun:
                    # apart from the first message: while a write of both is blocked, gRPC cannot send a status
                    await self._context.send_initial_metadata(())
                    has_begun = True
                await self._frontend.write(self._context, events, generation_service_pb2.BidiGenerateTextResponse)
                continue
            if reader.done() and (reader.exception() or not self._live):
                reader.result()
                return
            await self._wake.wait()
            self._wake.clear()

    def _collect(self) -> list[generation_pb2.GenerationEvent]:
        """Take refusals, and news of one generation after the other until the message is large enough."""
        collected, self._refusals = self._refusals, []
        num_tokens = 0
        while self._fresh and num_tokens < MAX_COLLECTED_TOKENS:
            generation = next(iter(self._fresh))
            del self._fresh[generation]
            if not generation.is_admitted:
                continue  # it is noted again once it is
            num_tokens += generation.num_waiting
            collected += self._news(generation)
        return collected

    def _news(self, generation: Generation) -> list[generation_pb2.GenerationEvent]:
        converter = self._live[generation]
        events = []
        if generation not in self._announced:
            self._announced.add(generation)
            events.append(generation_pb2.GenerationEvent(started=converter.started()))
        events = self._sendable(generation, events + converter.news())
        if generation.error is not None:
            events.append(converter.failure(generation.error))
            events[-1].request_id = generation.settings.request_id
        if generation.is_over:
            self._drop(generation)
        return events

    def _sendable(
        self, generation: Generation, events: list[generation_pb2.GenerationEvent]
    ) -> list[generation_pb2.GenerationEvent]:
        """The events with their `request_id`, up to one that no message can hold, which ends its generation alone."""
        for index, event in enumerate(events):
            event.request_id = generation.settings.request_id
            try:
                check_event_size(event, self._frontend.config.max_send_message_bytes)
            except ResponseTooLarge as error:
                generation.abandon(error)
                return events[:index]
        return events
