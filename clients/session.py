"""Many generations on one bidirectional stream."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Lock
from types import TracebackType
from typing import Self, Unpack

import grpc

from foreword.clients.errors import ForewordClientError, broken_off, decoded_errors
from foreword.clients.spec import GenerationOptions, Prompt, generation_spec
from foreword.clients.stream import GenerationStream
from foreword.v1.generation_pb2 import GenerationEvent, GenerationSpec
from foreword.v1.generation_service_pb2 import (
    AppendTurnCommand,
    BidiGenerateTextRequest,
    BidiGenerateTextResponse,
    CancelCommand,
    StartCommand,
)
from foreword.v1.generation_service_pb2_grpc import GenerationServiceStub


@dataclass(slots=True)
class Inbox:
    """Events of one generation that have not been read.

    Attributes:
        command_index: which command of the session started the generation.
        events: oldest first.
    """

    command_index: int
    events: deque[GenerationEvent] = field(default_factory=deque)


def session_spec(prompt: Prompt, options: GenerationOptions) -> GenerationSpec:
    """A spec with the request id that a session's events are matched by."""
    spec = generation_spec(prompt, options)
    if not spec.HasField("request_id"):
        spec.request_id = uuid.uuid4().hex
    return spec


class Inboxes:
    """Sorts the events of a session's messages by generation."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}
        self._request_ids: dict[int, str] = {}
        self._num_commands = 0

    def __len__(self) -> int:
        """Generations under way."""
        return len(self._inboxes)

    def open(self, request_id: str) -> Inbox:
        """An inbox for a generation whose start is the next command.

        Raises:
            ValueError: a generation with this request id is under way in this session.
        """
        if request_id in self._inboxes:
            raise ValueError(f"request_id {request_id!r} is under way in this session")
        inbox = self._inboxes[request_id] = Inbox(self._num_commands)
        self._request_ids[self._num_commands] = request_id
        self.count_command()
        return inbox

    def count_command(self) -> None:
        """Take note that a command is sent."""
        self._num_commands += 1

    def sort(self, response: BidiGenerateTextResponse) -> None:
        """Put each event into its inbox, and forget the inboxes of generations that ended."""
        for event in response.events:
            if event.HasField("refused"):
                # A refused cancel has no generation: it came too late.
                request_id = self._request_ids.get(event.refused.command_index, "")
            else:
                request_id = event.request_id
            inbox = self._inboxes.get(request_id)
            if inbox is None:
                continue
            inbox.events.append(event)
            if is_last(event):
                del self._inboxes[request_id], self._request_ids[inbox.command_index]


def is_last(event: GenerationEvent) -> bool:
    """Whether nothing follows for this generation."""
    return event.HasField("finished") or event.HasField("refused")


def raise_failure(event: GenerationEvent) -> None:
    """Raise `ForewordClientError` when the event ends its generation with an error."""
    if event.HasField("refused"):
        raise ForewordClientError.from_status(event.refused.error)
    if event.HasField("finished") and event.finished.HasField("error"):
        raise ForewordClientError.from_status(event.finished.error)


class Session:
    """Many generations on one stream; made by `Client.session`.

        with client.session() as session:
            streams = [session.start(prompt) for prompt in prompts]
            texts = [stream.result().text for stream in streams]

    Nothing is read ahead: whoever reads a generation reads for all of them, and events of the others wait in memory.
    Generations may be read from different threads. Leaving the `with` block ends what is still under way.
    """

    def __init__(
        self, stub: GenerationServiceStub, timeout: float | None, metadata: tuple[tuple[str, str], ...]
    ) -> None:
        self._commands: SimpleQueue[BidiGenerateTextRequest | None] = SimpleQueue()
        self._inboxes = Inboxes()
        self._sending = Lock()
        self._reading = Lock()
        self._call = stub.BidiGenerateText(iter(self._commands.get, None), timeout=timeout, metadata=metadata)

    def start(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> GenerationStream:
        """Start a generation; a request id is made when none is given.

        Raises:
            ValueError: a generation with this request id is under way in this session.
        """
        spec = session_spec(prompt, options)
        return self._open(spec.request_id, BidiGenerateTextRequest(start=StartCommand(spec=spec)))

    def append_turn(
        self, previous_request_id: str, prompt: Prompt, **options: Unpack[GenerationOptions]
    ) -> GenerationStream:
        """Start a generation that continues a finished one of this session with what `prompt` adds."""
        spec = session_spec(prompt, options)
        command = AppendTurnCommand(previous_request_id=previous_request_id, spec=spec)
        return self._open(spec.request_id, BidiGenerateTextRequest(append_turn=command))

    def _open(self, request_id: str, command: BidiGenerateTextRequest) -> GenerationStream:
        with self._sending:
            inbox = self._inboxes.open(request_id)
            self._commands.put(command)
        return GenerationStream(self._events(inbox), partial(self._cancel, request_id))

    def _cancel(self, request_id: str) -> None:
        with self._sending:
            self._inboxes.count_command()
            self._commands.put(BidiGenerateTextRequest(cancel=CancelCommand(request_id=request_id)))

    def _events(self, inbox: Inbox) -> Iterator[GenerationEvent]:
        while True:
            while not inbox.events:
                self._read_for(inbox)
            event = inbox.events.popleft()
            raise_failure(event)
            yield event
            if is_last(event):
                return

    def _read_for(self, inbox: Inbox) -> None:
        """Read one message, unless another thread has meanwhile read what the inbox waits for."""
        with self._reading:
            if inbox.events:
                return
            with decoded_errors():
                response = next(self._call, None)
            if response is None:
                raise broken_off()
            self._inboxes.sort(response)

    def close(self) -> None:
        """End the stream and what is still under way on it."""
        self._commands.put(None)
        if len(self._inboxes):
            self._call.cancel()
        with suppress(grpc.RpcError):
            for _ in self._call:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
