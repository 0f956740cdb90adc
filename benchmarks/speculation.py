"""What speculation gains, measured through gRPC on prompts of six kinds.

Starts `foreword serve` with speculation on its default. Every prompt of `benchmarks/prompts/<kind>.jsonl` runs with
drafts and with `speculation.disabled`, twice each, in alternating passes of the given number of concurrent streams,
so that both meet the same machine. A stream takes the next prompt as soon as it is free. Outputs must be equal, token
for token. Each pass has a cache salt of its own, so that none knows the answers of another. Prints one JSON line per
kind and number of streams:

    tokens_per_s            output tokens of all streams / time of the passes, with drafts
    ratio_to_off            the same divided by that without drafts
    mean_acceptance_length  output tokens per step that checked drafts: 1 + accepted / verifications
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from server_process import server

from foreword.v1 import (
    cache_pb2,
    chat_pb2,
    generation_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    sampling_pb2,
    speculation_pb2,
    stopping_pb2,
)

PROMPTS = Path(__file__).with_name("prompts")
KINDS = ("copy", "edit", "summarise", "json", "multi-turn", "chat")
ROLES = {"user": chat_pb2.ROLE_USER, "assistant": chat_pb2.ROLE_ASSISTANT}


@dataclass
class Totals:
    """Sums over passes."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_accepted: int = 0
    num_verifications: int = 0


def read_prompts(kind: str) -> list[chat_pb2.ChatInput]:
    """Conversations of a kind, in the order of the file."""
    lines = (PROMPTS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        chat_pb2.ChatInput(
            messages=[
                chat_pb2.ChatMessage(role=ROLES[turn["role"]], content=turn["content"]) for turn in json.loads(line)
            ]
        )
        for line in lines
    ]


async def generate(
    stub: generation_service_pb2_grpc.GenerationServiceStub,
    chat: chat_pb2.ChatInput,
    num_tokens: int,
    disabled: bool,
    salt: str,
) -> generation_service_pb2.GenerateTextResponse:
    """One greedy answer."""
    spec = generation_pb2.GenerationSpec(
        chat=chat,
        sampling=sampling_pb2.SamplingConfig(temperature=0.0),
        stopping=stopping_pb2.StoppingConfig(max_output_token_count=num_tokens),
        speculation=speculation_pb2.SpeculationConfig(disabled=disabled),
        cache=cache_pb2.CacheConfig(cache_salt=salt),
    )
    return await stub.GenerateText(generation_service_pb2.GenerateTextRequest(spec=spec))


async def run_pass(
    stub: generation_service_pb2_grpc.GenerationServiceStub,
    chats: list[chat_pb2.ChatInput],
    num_streams: int,
    num_tokens: int,
    disabled: bool,
    totals: Totals,
) -> list[list[int]]:
    """Answer all prompts, each stream taking the next one whenever it is free; returns their tokens."""
    waiting, salt = iter(enumerate(chats)), secrets.token_hex(8)
    tokens: list[list[int]] = [[] for _ in chats]

    async def serve() -> None:
        for index, chat in waiting:
            response = await generate(stub, chat, num_tokens, disabled, salt)
            tokens[index] = list(response.outputs[0].content.token_ids)
            totals.num_tokens += len(tokens[index])
            totals.num_accepted += response.finished.usage.accepted_draft_token_count
            totals.num_verifications += sum(response.finished.timing.acceptance_histogram)

    start = time.monotonic()
    await asyncio.gather(*(serve() for _ in range(num_streams)))
    totals.seconds += time.monotonic() - start
    return tokens


async def measure(address: str, kind: str, num_streams: int, num_tokens: int, num_prompts: int) -> dict[str, object]:
    """One row of the table."""
    chats = read_prompts(kind)
    num_prompts = max(num_prompts, 3 * num_streams)
    chats = (chats * -(-num_prompts // len(chats)))[:num_prompts]
    on, off = Totals(), Totals()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        outputs = [
            await run_pass(stub, chats, num_streams, num_tokens, disabled, off if disabled else on)
            for disabled in (False, True, True, False)
        ]
    if any(tokens != outputs[0] for tokens in outputs):
        raise SystemExit(f"{kind}: drafts changed the output")
    rate_on, rate_off = on.num_tokens / on.seconds, off.num_tokens / off.seconds
    return {
        "prompts": kind,
        "streams": num_streams,
        "tokens_per_s": round(rate_on, 1),
        "ratio_to_off": round(rate_on / rate_off, 3),
        "mean_acceptance_length": round(1 + on.num_accepted / max(on.num_verifications, 1), 2),
    }


def main() -> None:
    """Print one JSON line per kind and number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of every answer, at most")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each kind, at least three for every stream")
    parser.add_argument("serve", nargs="*", help="arguments for `foreword serve`, after --")
    options = parser.parse_args()
    with server(options.serve) as (address, _):
        asyncio.run(measure(address, "copy", 1, 32, 2))  # warm-up
        for num_streams in options.streams:
            for kind in options.kinds:
                row = asyncio.run(measure(address, kind, num_streams, options.tokens, options.prompts))
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
