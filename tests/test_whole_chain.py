"""The promise of the whole chain: who else is served never changes what a caller gets.

Runs the server with its engine process on the default model and talks to it through gRPC.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from foreword.clients import AsyncClient, Constraint, ForewordClientError, Generation, Message
from foreword.service.config import ServerConfig
from foreword.service.server import running_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 32
BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 2
"""Tokens, layers, keys and values, heads, head size, bytes of bfloat16: a block of the default model's KV cache."""

CONSTRAINTS = (
    Constraint(regex="[A-Z][a-z]+( [a-z]+){3,40}[.]"),
    Constraint(json_schema='{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'),
    Constraint(grammar='root ::= item+\nitem ::= "- " [a-z]+ ("(" item ")")? "\\n"'),
)
SUBJECTS = ("rivers", "paper", "bread", "bees", "glass", "clocks", "maps", "ships")


def request(index: int) -> tuple[list[Message] | str, dict[str, Any]]:
    """One of 32 requests that differ in length, prompt, sampling, stop strings and what is returned."""
    subject = SUBJECTS[index % len(SUBJECTS)]
    text = f"Tell me about {subject}. " * (1 + index % 5)
    options: dict[str, Any] = {"max_output_token_count": 64 if index < 8 else 8, "ignore_eos": index < 8}
    options |= {"logprobs": index % 2 == 0}
    if index % 3:
        options |= {"temperature": 0.7 + index % 4 / 5, "seed": index, "top_k": 40 * (index % 2), "top_p": 0.95}
    else:
        options |= {"temperature": 0.0}
    if index % 4 == 1 and index > 8:
        options |= {"stop_strings": [" the", ". "]}
    if index % 5 == 2:
        options |= {"constraint": CONSTRAINTS[index % 3]}
    return (text if index % 2 else [Message("user", text)]), options


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    # Small enough that prompts are cut into chunks and sequences are preempted when all run at once.
    config = ServerConfig(
        listen_address="127.0.0.1:0",
        max_model_len=256,
        max_num_sequences=32,
        max_num_batched_tokens=48,
        kv_cache_memory=20 * BLOCK_BYTES,
        log_level="error",
    )
    async with running_server(config) as server, AsyncClient(server.address) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(client: AsyncClient) -> list[Generation]:
    """Each request by itself, unary."""
    results = []
    for index in range(NUM_STREAMS):
        prompt, options = request(index)
        results.append(await client.generate(prompt, **options))
    return results


def same(one: Generation, other: Generation) -> bool:
    """Bitwise equal: ids, text, log probabilities, finish."""
    return (
        list(one.token_ids) == list(other.token_ids)
        and one.text == other.text
        and list(one.logprobs) == list(other.logprobs)
        and one.finish_reason == other.finish_reason
        and one.usage.output_token_count == other.usage.output_token_count
    )


async def test_32_concurrent_streams_equal_each_alone(client: AsyncClient, alone: list[Generation]) -> None:
    streams = [client.stream(prompt, **options) for prompt, options in map(request, range(NUM_STREAMS))]

    async def collect(stream: Any) -> tuple[str, list[int], Generation]:
        text, token_ids = "", []
        async for delta in stream:
            text += delta.text
            token_ids.extend(delta.token_ids)
        return text, token_ids, await stream.result()

    together = await asyncio.gather(*map(collect, streams))
    for (text, token_ids, result), single in zip(together, alone, strict=True):
        assert same(result, single)
        assert text == result.text
        assert token_ids == list(result.token_ids)
    assert sum(result.timing.preemption_count for _, _, result in together) > 0
    assert any(result.timing.prefill_chunk_count > 1 for _, _, result in together)


async def test_32_generations_of_one_session_equal_each_alone(client: AsyncClient, alone: list[Generation]) -> None:
    async with client.session() as session:
        streams = [session.start(prompt, **options) for prompt, options in map(request, range(NUM_STREAMS))]
        together = await asyncio.gather(*(stream.result() for stream in streams))
    assert all(same(result, single) for result, single in zip(together, alone, strict=True))


async def test_cancelled_neighbours_change_nothing(client: AsyncClient, alone: list[Generation]) -> None:
    async def abandon(index: int) -> None:
        prompt, options = request(index)
        async with client.stream(prompt, **options | {"max_output_token_count": 64, "ignore_eos": True}) as stream:
            await anext(aiter(stream))

    prompt, options = request(3)
    kept, *_ = await asyncio.gather(client.generate(prompt, **options), *map(abandon, range(8, 24)))
    assert same(kept, alone[3])
    load = await client.load()
    for _ in range(100):
        if load.running_sequence_count == load.waiting_sequence_count == 0:
            break
        load = await client.load()
    assert load.free_block_count == load.block_count


async def test_constraints_that_explode_change_nothing_for_others(client: AsyncClient, alone: list[Generation]) -> None:
    bombs = [
        Constraint(json_schema=json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(2000 + n)}}))
        for n in range(3)
    ]

    async def refused(constraint: Constraint) -> str:
        with pytest.raises(ForewordClientError) as caught:
            await client.generate("x", constraint=constraint)
        return str(caught.value)

    prompt, options = request(2)
    kept, *messages = await asyncio.gather(client.generate(prompt, **options), *map(refused, bombs))
    assert same(kept, alone[2])
    assert all("constraint.json_schema" in message for message in messages)


async def test_text_is_the_decoding_of_the_ids(client: AsyncClient, alone: list[Generation]) -> None:
    for index, result in enumerate(alone):
        if "stop_strings" not in request(index)[1]:
            assert (await client.detokenize(result.token_ids)).text == result.text


async def test_first_token_duration_is_the_sum_of_its_parts(alone: list[Generation]) -> None:
    for result in alone:
        timing = result.timing
        parts = (
            timing.tokenize_duration_micros,
            timing.constraint_compile_duration_micros,
            timing.queue_duration_micros,
            timing.prefill_duration_micros,
            timing.delivery_duration_micros,
        )
        assert min(parts) >= 0
        assert abs(sum(parts) - timing.first_token_duration_micros) <= 1000
        assert timing.first_token_duration_micros > 0
