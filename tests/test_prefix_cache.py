"""A cached prefix saves time and changes nothing, through gRPC on the default model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from foreword.clients import AsyncClient, Generation, Message
from foreword.service.config import ServerConfig
from foreword.service.server import running_server
from foreword.v1.cache_pb2 import CacheConfig

BLOCK_SIZE = 16
TEXT = "The lighthouse keeper wrote down every ship that passed, its flag, its course and the weather. " * 6


@pytest_asyncio.fixture
async def client() -> AsyncIterator[AsyncClient]:
    # A prompt takes several steps, and a cached one starts in the middle of a chunk that an uncached one has.
    config = ServerConfig(
        listen_address="127.0.0.1:0",
        max_model_len=512,
        max_num_sequences=8,
        max_num_batched_tokens=50,
        log_level="error",
    )
    async with running_server(config) as server, AsyncClient(server.address) as client:
        yield client


async def generate(client: AsyncClient, prompt: str | list[Message], seed: int = 0, **cache: object) -> Generation:
    sampling = {"temperature": 0.9, "seed": seed} if seed else {"temperature": 0.0}
    return await client.generate(
        prompt, max_output_token_count=24, ignore_eos=True, logprobs=True, cache=CacheConfig(**cache), **sampling
    )


def num_cached(generation: Generation) -> int:
    return generation.usage.cached_prompt_token_count


def same(one: Generation, other: Generation) -> bool:
    """Bitwise equal tokens and log probabilities."""
    return list(one.token_ids) == list(other.token_ids) and list(one.logprobs) == list(other.logprobs)


async def test_a_cached_prompt_gives_the_same_tokens_and_logprobs(client: AsyncClient) -> None:
    for seed in (0, 5):
        cold = await generate(client, TEXT, seed, bypass_prefix_cache=True)
        assert num_cached(cold) == 0
        first = await generate(client, TEXT, seed, cache_salt=str(seed))
        assert num_cached(first) == 0
        second = await generate(client, TEXT, seed, cache_salt=str(seed))
        num_prompt = second.usage.prompt_token_count
        assert num_cached(second) == (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE > 64
        assert same(first, cold)
        assert same(second, cold)
        assert second.timing.prefill_chunk_count == 1 < first.timing.prefill_chunk_count
    load = await client.load()
    assert load.free_block_count == load.block_count
    assert load.cached_block_count > 0


async def test_eight_together_share_a_prefix_and_equal_each_alone(client: AsyncClient) -> None:
    prompts = [TEXT + f"Number {index} was" for index in range(8)]
    alone = [await generate(client, prompt, index, bypass_prefix_cache=True) for index, prompt in enumerate(prompts)]
    # All begin at once, with and without somebody before them whose blocks they find.
    for salt in ("cold", "warm", "warm"):
        if salt == "warm":
            await generate(client, TEXT, cache_salt=salt)
        together = await asyncio.gather(
            *(generate(client, prompt, index, cache_salt=salt) for index, prompt in enumerate(prompts))
        )
        assert all(map(same, together, alone))
        if salt == "warm":
            assert min(map(num_cached, together)) >= 64
    load = await client.load()
    assert load.free_block_count == load.block_count


async def test_the_next_turn_of_a_chat_finds_the_last_one(client: AsyncClient) -> None:
    chat = [Message("user", "Name a river."), Message("assistant", TEXT), Message("user", "And another one?")]
    first = await generate(client, chat[:1])
    chat[1] = Message("assistant", first.text)
    second = await generate(client, chat)
    assert num_cached(second) >= BLOCK_SIZE
    assert same(second, await generate(client, chat, bypass_prefix_cache=True))


async def test_callers_of_other_salts_find_nothing(client: AsyncClient) -> None:
    await generate(client, TEXT, cache_salt="a")
    for cache in ({}, {"cache_salt": "b"}, {"cache_salt": "a", "bypass_prefix_cache": True}):
        assert num_cached(await generate(client, TEXT, **cache)) == 0
    assert num_cached(await generate(client, TEXT, cache_salt="a")) > 64
