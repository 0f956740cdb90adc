"""Jobs on a server of ours: one call for each answer, or one for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from google.rpc import status_pb2

from benchmarks.peers.adapters.foreword import run
from benchmarks.peers.adapters.worker import Job, Refused
from foreword.v1 import generation_pb2
from foreword.v1.generation_service_pb2 import BidiGenerateTextRequest, BidiGenerateTextResponse


class Responses:
    """A call that reads commands as fast as they come, as gRPC does, and answers each in two messages."""

    def __init__(self, commands: Iterator[BidiGenerateTextRequest], concurrency: int) -> None:
        self.concurrency = concurrency
        self.is_cancelled = False
        self._arrived: SimpleQueue[generation_pb2.GenerationSpec | None] = SimpleQueue()
        self._reader = Thread(target=self._read, args=(commands,), daemon=True)
        self._reader.start()

    def _read(self, commands: Iterator[BidiGenerateTextRequest]) -> None:
        for command in commands:
            self._arrived.put(command.start.spec)
        self._arrived.put(None)

    def __iter__(self) -> Iterator[BidiGenerateTextResponse]:
        while specs := self.take():
            self._reader.join(0.05)  # a command too many would come by now
            for is_last in (False, True):
                yield BidiGenerateTextResponse(events=[e for spec in specs for e in self.events(spec, is_last)])

    def take(self) -> list[generation_pb2.GenerationSpec]:
        """As many as may run at a time, or what is left."""
        specs = list(itertools.islice(iter(self._arrived.get, None), self.concurrency))
        if len(specs) < self.concurrency:
            self._arrived.put(None)
        return specs

    def events(self, spec: generation_pb2.GenerationSpec, is_last: bool) -> Iterator[generation_pb2.GenerationEvent]:
        count = spec.stopping.max_output_token_count
        tokens = [5] * (count - 1 if is_last else 1)
        delta = generation_pb2.OutputDelta(token_ids=tokens)
        yield generation_pb2.GenerationEvent(request_id=spec.request_id, output_delta=delta)
        if is_last:
            finished = generation_pb2.GenerationFinished()
            yield generation_pb2.GenerationEvent(request_id=spec.request_id, finished=finished)

    def cancel(self) -> None:
        self.is_cancelled = True


class Server:
    """Makes the responses of each call and keeps them."""

    def __init__(self, responses: type[Responses], concurrency: int) -> None:
        self.calls: list[Responses] = []
        self.stub: Any = SimpleNamespace(BidiGenerateText=self._begin)
        self._responses = responses
        self._concurrency = concurrency

    def _begin(self, commands: Iterator[BidiGenerateTextRequest]) -> Responses:
        self.calls.append(self._responses(commands, self._concurrency))
        return self.calls[-1]


def job(concurrency: int) -> Job:
    return Job([[1, 2]] * 5, num_tokens=3, concurrency=concurrency, due_s=[0.0] * 5)


def test_several_answers_at_a_time_share_one_call() -> None:
    server = Server(Responses, 2)

    answers = run(server.stub, job(2))

    assert len(server.calls) == 1
    assert [answer.num_tokens for answer in answers] == [3] * 5
    assert all(0 < answer.start <= answer.first <= answer.last for answer in answers)
    assert answers[2].start >= answers[1].last  # no third one beside two


def test_a_prompt_that_the_server_does_not_take_refuses_the_job() -> None:
    class Refusals(Responses):
        def __iter__(self) -> Iterator[BidiGenerateTextResponse]:
            refusal = generation_pb2.CommandRefused(error=status_pb2.Status(message="too long"))
            yield BidiGenerateTextResponse(events=[generation_pb2.GenerationEvent(refused=refusal)])

    server = Server(Refusals, 2)

    with pytest.raises(Refused, match="too long"):
        run(server.stub, job(2))
    assert server.calls[0].is_cancelled
