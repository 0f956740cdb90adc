"""`foreword serve`, spoken to through gRPC as it streams."""

from __future__ import annotations

import importlib.metadata
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


def generate(
    stub: generation_service_pb2_grpc.GenerationServiceStub, prompt: list[int], num_tokens: int
) -> Iterator[int]:
    """Stream an answer; yields numbers of tokens."""
    spec = generation_pb2.GenerationSpec(
        prompt_token_ids=tokens_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingConfig(temperature=0.0),
        stopping=stopping_pb2.StoppingConfig(max_output_token_count=num_tokens, ignore_eos=True),
        cache=cache_pb2.CacheConfig(bypass_prefix_cache=True),
    )
    for response in stub.StreamGenerateText(generation_service_pb2.StreamGenerateTextRequest(spec=spec)):
        yield sum(len(event.output_delta.token_ids) for event in response.events)


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
        yield ready, partial(worker.run_streams, partial(generate, stub))


if __name__ == "__main__":
    worker.main(open_system)
