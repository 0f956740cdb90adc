"""Many generations on one bidirectional stream, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from foreword.clients.errors import ForewordClientError, broken_off
from foreword.clients.session import Inbox, Inboxes, is_last, raise_failure, session_spec
from foreword.clients.spec import GenerationOptions, Prompt
from foreword.clients.stream import AsyncGenerationStream
from foreword.v1.generation_pb2 import GenerationEvent
from foreword.v1.generation_service_pb2 import AppendTurnCommand, BidiGenerateTextRequest, CancelCommand, StartCommand

if TYPE_CHECKING:
    from foreword.v1.generation_service_pb2_grpc import GenerationServiceAsyncStub  # exists in the stubs only


class AsyncSession:
    """Many generations on one stream; made by `AsyncClient.session`.

        async with client.session() as session:
            streams = [session.start(prompt) for prompt in prompts]
            texts = [(await stream.result()).text for stream in streams]

    Messages are read as they come; events that nobody has read yet wait in memory. Leaving the `async with` block ends
    what is still under way.
    """

    def __init__(
        self, stub: GenerationServiceAsyncStub, timeout: float | None, metadata: tuple[tuple[str, str], ...]
    ) -> None:
        self._commands: asyncio.Queue[BidiGenerateTextRequest | None] = asyncio.Queue()
        self._inboxes = Inboxes()
        self._news = asyncio.Event()
        self._failure: ForewordClientError | None = None
        self._call = stub.BidiGenerateText(self._requests(), timeout=timeout, metadata=metadata)
        self._reader = asyncio.create_task(self._read())

    def start(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> AsyncGenerationStream:
        """Start a generation; a request id is made when none is given.

        Raises:
            ValueError: a generation with this request id is under way in this session.
        """
        spec = session_spec(prompt, options)
        return self._open(spec.request_id, BidiGenerateTextRequest(start=StartCommand(spec=spec)))

    def append_turn(
        self, previous_request_id: str, prompt: Prompt, **options: Unpack[GenerationOptions]
    ) -> AsyncGenerationStream:
        """Start a generation that continues a finished one of this session with what `prompt` adds."""
        spec = session_spec(prompt, options)
        command = AppendTurnCommand(previous_request_id=previous_request_id, spec=spec)
        return self._open(spec.request_id, BidiGenerateTextRequest(append_turn=command))

    def _open(self, request_id: str, command: BidiGenerateTextRequest) -> AsyncGenerationStream:
        inbox = self._inboxes.open(request_id)
        self._commands.put_nowait(command)
        return AsyncGenerationStream(self._events(inbox), partial(self._cancel, request_id))

    def _cancel(self, request_id: str) -> None:
        self._inboxes.count_command()
        self._commands.put_nowait(BidiGenerateTextRequest(cancel=CancelCommand(request_id=request_id)))

    async def _requests(self) -> AsyncIterator[BidiGenerateTextRequest]:
        while (command := await self._commands.get()) is not None:
            yield command

    async def _read(self) -> None:
        failure = broken_off()
        try:
            async for response in self._call:
                self._inboxes.sort(response)
                self._wake()
        except grpc.RpcError as error:
            failure = ForewordClientError.from_rpc_error(error)
        except asyncio.CancelledError:
            failure = ForewordClientError(grpc.StatusCode.CANCELLED, "the session was closed")
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        """Let every reader look into its inbox: one message has news for most of them."""
        self._news.set()
        self._news = asyncio.Event()

    async def _events(self, inbox: Inbox) -> AsyncIterator[GenerationEvent]:
        while True:
            while not inbox.events:
                if self._failure is not None:
                    raise self._failure
                await self._news.wait()
            event = inbox.events.popleft()
            raise_failure(event)
            yield event
            if is_last(event):
                return

    async def close(self) -> None:
        """End the stream and what is still under way on it."""
        self._commands.put_nowait(None)
        if len(self._inboxes):
            self._call.cancel()
        await self._reader

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
