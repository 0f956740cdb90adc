"""A generation that is under way, as an iterator of what its outputs gain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Self

from foreword.clients.errors import ForewordClientError, broken_off
from foreword.clients.generation import Generation, GenerationBuilder
from foreword.v1.generation_pb2 import GenerationEvent, OutputDelta


class GenerationStream:
    """Iterates over the deltas (`delta.text`, `delta.token_ids`, ...) of one generation.

        with client.stream("Once upon a time") as stream:
            for delta in stream:
                print(delta.text, end="")
            print(stream.result().finish_reason)

    Leaving the `with` block early cancels the generation. Reading raises `ForewordClientError` when it fails.
    """

    def __init__(self, events: Iterator[GenerationEvent], cancel: Callable[[], object]) -> None:
        self._events = events
        self._cancel = cancel
        self._builder = GenerationBuilder()
        self._finished = False
        self._failure: ForewordClientError | None = None

    def events(self) -> Iterator[GenerationEvent]:
        """All events from here on, for what deltas do not show: settings in effect, progress, the prompt."""
        try:
            for event in self._events:
                self._builder.add(event)
                self._finished = self._finished or event.HasField("finished")
                yield event
        except ForewordClientError as error:
            self._failure = error
            raise

    def __iter__(self) -> Iterator[OutputDelta]:
        """The deltas from here on."""
        for event in self.events():
            if event.HasField("output_delta"):
                yield event.output_delta

    def result(self) -> Generation:
        """The whole generation; reads what has not been read."""
        for _ in self.events():
            pass
        if not self._finished:
            raise self._failure or broken_off()
        return self._builder.build()

    def cancel(self) -> None:
        """End the generation. In a session its last events still follow; otherwise reading on raises CANCELLED."""
        self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._finished:
            self._cancel()


class AsyncGenerationStream:
    """The same for asyncio.

    async with client.stream("Once upon a time") as stream:
        async for delta in stream:
            print(delta.text, end="")
        print((await stream.result()).finish_reason)
    """

    def __init__(self, events: AsyncIterator[GenerationEvent], cancel: Callable[[], object]) -> None:
        self._events = events
        self._cancel = cancel
        self._builder = GenerationBuilder()
        self._finished = False
        self._failure: ForewordClientError | None = None

    async def events(self) -> AsyncIterator[GenerationEvent]:
        """All events from here on, for what deltas do not show: settings in effect, progress, the prompt."""
        try:
            async for event in self._events:
                self._builder.add(event)
                self._finished = self._finished or event.HasField("finished")
                yield event
        except ForewordClientError as error:
            self._failure = error
            raise

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        """The deltas from here on."""
        async for event in self.events():
            if event.HasField("output_delta"):
                yield event.output_delta

    async def result(self) -> Generation:
        """The whole generation; reads what has not been read."""
        async for _ in self.events():
            pass
        if not self._finished:
            raise self._failure or broken_off()
        return self._builder.build()

    def cancel(self) -> None:
        """End the generation. In a session its last events still follow; otherwise reading on raises CANCELLED."""
        self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._finished:
            self._cancel()
