"""Several outputs of one prompt, through gRPC on the default model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from foreword.clients import AsyncClient, Generation
from foreword.service.config import ServerConfig
from foreword.service.server import running_server
from foreword.v1.cache_pb2 import CacheConfig
from foreword.v1.speculation_pb2 import SpeculationConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 30 * 2 * 3 * 64 * 2
"""Tokens, layers, keys and values, heads, head size, bytes of bfloat16: a block of the default model's KV cache."""
PROMPT = "one two three four, one two three five, " * 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    # Four outputs need 2 + 4 * 4 blocks: they preempt each other.
    config = ServerConfig(
        listen_address="127.0.0.1:0",
        max_model_len=160,
        max_num_sequences=8,
        max_num_batched_tokens=50,
        kv_cache_memory=8 * BLOCK_BYTES,
        speculation="ngram",
        log_level="error",
    )
    async with running_server(config) as server, AsyncClient(server.address) as client:
        yield client


def options(count: int | None = None, **cache: Any) -> dict[str, Any]:
    limits = {"max_output_token_count": 40, "ignore_eos": True, "logprobs": True}
    return limits | {"seed": 3, "temperature": 0.8, "output_count": count, "cache": CacheConfig(**cache)}


def contents(generation: Generation) -> list[tuple[str, list[int], list[float]]]:
    """What each output is, bit by bit."""
    return [
        (output.content.text, list(output.content.token_ids), list(output.content.logprobs))
        for output in generation.outputs
    ]


async def test_every_rpc_gives_the_same_outputs_however_many_there_are(client: AsyncClient) -> None:
    four = await client.generate(PROMPT, **options(4))
    expected = contents(four)
    assert len({text for text, _, _ in expected}) == 4
    assert [output.finished.output_token_count for output in four.outputs] == [40] * 4
    assert four.usage.prompt_token_count < four.usage.output_token_count == 160

    assert contents(await client.generate(PROMPT, **options())) == expected[:1]
    assert contents(await client.generate(PROMPT, **options(2))) == expected[:2]
    without = options(3) | {"speculation": SpeculationConfig(disabled=True)}
    plain = await client.generate(PROMPT, **without)
    assert contents(plain) == expected[:3]
    assert plain.usage.draft_token_count == 0 < four.usage.draft_token_count

    async with client.stream(PROMPT, **options(4)) as stream:
        indices = {delta.output_index async for delta in stream}
        assert indices == {0, 1, 2, 3}
        assert contents(await stream.result()) == expected

    async with client.session() as session:
        streams = [session.start(PROMPT, **options(count)) for count in (1, 4, 2)]
        results = await asyncio.gather(*(stream.result() for stream in streams))
        assert [contents(result) for result in results] == [expected[:1], expected, expected[:2]]
        assert sum(result.timing.preemption_count for result in results) > 0


async def test_the_prompt_is_computed_once(client: AsyncClient) -> None:
    """Also where the prefix cache is bypassed, whose outputs still share their own prompt."""
    for cache in ({"cache_salt": "of this test"}, {"bypass_prefix_cache": True}):
        generation = await client.generate(PROMPT, **options(2, **cache) | {"max_output_token_count": 1})
        assert generation.usage.cached_prompt_token_count == 0
        num_prompt = generation.usage.prompt_token_count
        assert generation.timing.prefill_chunk_count == -(-num_prompt // 50) + 1
        assert generation.usage.output_token_count == 2


async def test_outputs_have_their_own_timing(client: AsyncClient) -> None:
    generation = await client.generate(PROMPT, **options(2))
    one, two = (output.finished.timing for output in generation.outputs)
    assert generation.timing.first_token_duration_micros == one.first_token_offset_micros
    assert one.first_token_offset_micros < two.first_token_offset_micros
    assert one.HasField("inter_token_latency")
    assert two.HasField("inter_token_latency")
