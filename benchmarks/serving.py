"""Throughput, latency and cost of serving, measured through gRPC.

Starts `foreword serve` as a user would, in processes of its own, opens the given numbers of concurrent streams against
it and prints one JSON line per number. Every stream sends a different chat prompt and receives exactly the same number
of tokens (greedy, end token ignored), so that runs compare. Each number is run `--rounds` times; the median round, by
throughput, is printed.

    tokens_per_s       output tokens of all streams / time from first request to last token
    ttft_ms_*          client side: request sent -> first message with a token
    itl_ms_p50         client side: gap between messages / tokens in the message
    cpu_us_per_token   processor time of front end and engine (user and system) / output tokens
    engine_rss_mb      resident memory of the engine process after the run
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import grpc
from server_process import cpu_seconds, descendants, rss_mb, server

from foreword.v1 import (
    cache_pb2,
    chat_pb2,
    constraint_pb2,
    generation_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    sampling_pb2,
    stopping_pb2,
)

# fmt: off
TOPICS = (
    "how tides work", "the history of paper", "why bread rises", "how a bicycle stays upright", "what glass is",
    "how bees find flowers", "why the sky is blue", "how a piano sounds", "the life of a river", "how clocks work",
    "why leaves change colour", "how maps are drawn", "what makes a good story", "how ships float", "how chess works",
    "how cheese is made", "why we dream", "how a telescope works", "how wheels began", "how snow forms",
    "what a catalyst does", "how birds migrate", "the making of silk", "how locks work", "why metals rust",
    "how a seed becomes a tree", "what inflation means", "how bridges carry load", "how sound travels", "how ink dries",
    "why cats purr", "how a compass points north",
)
# fmt: on


@dataclass
class Stream:
    """What one stream saw, in seconds of the client's monotonic clock."""

    sent: float
    first: float
    last: float
    gaps: list[float]
    num_tokens: int


async def run_stream(
    stub: generation_service_pb2_grpc.GenerationServiceStub,
    topic: str,
    num_tokens: int,
    constraint: constraint_pb2.Constraint | None = None,
) -> Stream:
    """Stream one answer, whose form may be constrained to one that does not end before."""
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=f"Explain {topic} in detail.")
    spec = generation_pb2.GenerationSpec(
        chat=chat_pb2.ChatInput(messages=[message]),
        sampling=sampling_pb2.SamplingConfig(temperature=0.0),
        stopping=stopping_pb2.StoppingConfig(max_output_token_count=num_tokens, ignore_eos=True),
        cache=cache_pb2.CacheConfig(bypass_prefix_cache=True),  # rounds repeat prompts
        constraint=constraint,
    )
    sent = time.monotonic()
    first = last = 0.0
    gaps: list[float] = []
    received = 0
    async for response in stub.StreamGenerateText(generation_service_pb2.StreamGenerateTextRequest(spec=spec)):
        count = sum(len(event.output_delta.token_ids) for event in response.events)
        if not count:
            continue
        now = time.monotonic()
        if received:
            gaps.extend([(now - last) / count] * count)
        else:
            first = now
        last = now
        received += count
    if received != num_tokens:
        raise SystemExit(f"asked for {num_tokens} tokens, received {received}")
    return Stream(sent, first, last, gaps, received)


async def run_round(
    address: str, num_streams: int, num_tokens: int, constraint: constraint_pb2.Constraint | None = None
) -> list[Stream]:
    """Run the streams at once."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        topics = (TOPICS[index % len(TOPICS)] for index in range(num_streams))
        return list(await asyncio.gather(*(run_stream(stub, topic, num_tokens, constraint) for topic in topics)))


def measure(address: str, pid: int, num_streams: int, num_tokens: int) -> dict[str, float]:
    """One round as a row of the table."""
    processes = descendants(pid)
    cpu_before = cpu_seconds(processes)
    streams = asyncio.run(run_round(address, num_streams, num_tokens))
    cpu = cpu_seconds(processes) - cpu_before
    total = sum(stream.num_tokens for stream in streams)
    ttft = sorted(stream.first - stream.sent for stream in streams)
    gaps = [gap for stream in streams for gap in stream.gaps]
    wall = max(stream.last for stream in streams) - min(stream.sent for stream in streams)
    return {
        "streams": num_streams,
        "tokens_per_s": round(total / wall, 1),
        "ttft_ms_p50": round(statistics.median(ttft) * 1e3, 1),
        "ttft_ms_p99": round(ttft[min(len(ttft) - 1, int(len(ttft) * 0.99))] * 1e3, 1),
        "itl_ms_p50": round(statistics.median(gaps) * 1e3, 2),
        "cpu_us_per_token": round(cpu / total * 1e6, 1),
        "engine_rss_mb": round(max(rss_mb(process) for process in processes), 1),
    }


def main() -> None:
    """Print one JSON line per number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of every stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("serve", nargs="*", help="arguments for `foreword serve`, after --")
    options = parser.parse_args()
    with server(options.serve) as (address, pid):
        measure(address, pid, 1, 16)  # warm-up
        for num_streams in options.streams:
            rounds = [measure(address, pid, num_streams, options.tokens) for _ in range(options.rounds)]
            print(json.dumps(sorted(rounds, key=lambda row: row["tokens_per_s"])[len(rounds) // 2]), flush=True)


if __name__ == "__main__":
    main()
