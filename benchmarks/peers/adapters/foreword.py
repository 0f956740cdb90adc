"""`foreword serve`, spoken to through gRPC as it streams."""

from __future__ import annotations

import importlib.metadata
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import grpc

from benchmarks.peers.adapters import worker
from benchmarks.server_process import server
from foreword.v1 import (
    cache_pb2,
    generation_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    sampling_pb2,
    stopping_pb2,
    tokens_pb2,
)

KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
"""Layers, keys and values, heads, head size, bytes of bfloat16 of the default model."""


def specification(prompt: list[int], num_tokens: int, request_id: str | None = None) -> generation_pb2.GenerationSpec:
    """What to generate for a prompt of a job."""
    return generation_pb2.GenerationSpec(
        request_id=request_id,
        prompt_token_ids=tokens_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingConfig(temperature=0.0),
        stopping=stopping_pb2.StoppingConfig(max_output_token_count=num_tokens, ignore_eos=True),
        cache=cache_pb2.CacheConfig(bypass_prefix_cache=True),
    )


def generate(
    stub: generation_service_pb2_grpc.GenerationServiceStub, prompt: list[int], num_tokens: int
) -> Iterator[int]:
    """Stream an answer; yields numbers of tokens."""
    request = generation_service_pb2.StreamGenerateTextRequest(spec=specification(prompt, num_tokens))
    for response in stub.StreamGenerateText(request):
        yield sum(len(event.output_delta.token_ids) for event in response.events)


def run(stub: generation_service_pb2_grpc.GenerationServiceStub, job: worker.Job) -> list[worker.Answer]:
    """Do a job: answers one after the other on calls of their own, several at a time on one call for all of them."""
    if job.concurrency == 1:
        return worker.run_streams(partial(generate, stub), job)
    return Multiplexed(job).run(stub)


class Multiplexed:
    """A job on one stream of many generations, whose messages hold what an engine step brought to all of them."""

    def __init__(self, job: worker.Job) -> None:
        """Prepare; nothing is sent before `run`."""
        self._job = job
        self._begin = time.perf_counter()
        self._answers = [worker.Answer(start=due) for due in job.due_s]
        self._free = threading.Semaphore(job.concurrency)

    def run(self, stub: generation_service_pb2_grpc.GenerationServiceStub) -> list[worker.Answer]:
        """Send all prompts and read all answers.

        Raises:
            worker.Refused: the server did not take a prompt, or did not end its answer.
        """
        call = stub.BidiGenerateText(self._commands())
        for response in call:
            now = time.perf_counter() - self._begin
            for event in response.events:
                match event.WhichOneof("event"):
                    case "output_delta":
                        answer = self._answers[int(event.request_id)]
                        answer.receive(len(event.output_delta.token_ids), now)
                    case "refused":
                        call.cancel()
                        raise worker.Refused(event.refused.error.message)
                    case "finished":
                        self._free.release()
        return self._answers

    def _commands(self) -> Iterator[generation_service_pb2.BidiGenerateTextRequest]:
        """Runs in a thread of gRPC's: a command for each prompt, once it is due and another one has ended."""
        for index, prompt in enumerate(self._job.prompts):
            self._free.acquire()
            due = self._job.due_s[index]
            time.sleep(max(due - (time.perf_counter() - self._begin), 0.0))
            self._answers[index].start = due or time.perf_counter() - self._begin
            spec = specification(prompt, self._job.num_tokens, str(index))
            yield generation_service_pb2.BidiGenerateTextRequest(start=generation_service_pb2.StartCommand(spec=spec))


@contextmanager
def open_system(settings: worker.Settings) -> Iterator[tuple[worker.Ready, worker.Run]]:
    """Run the server."""
    arguments = ["--model", settings.model, "--threads", str(settings.num_threads)]
    arguments += ["--kv-cache-memory", str(settings.num_kv_tokens * KV_BYTES_PER_TOKEN)]
    arguments += ["--speculation", "auto" if settings.speculates else "off"]
    begin = time.monotonic()
    with server(arguments) as (address, pid), grpc.insecure_channel(address) as channel:
        ready = worker.Ready(importlib.metadata.version("foreword"), time.monotonic() - begin, [pid])
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        yield ready, partial(run, stub)


if __name__ == "__main__":
    worker.main(open_system)
