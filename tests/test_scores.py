"""Scores of the default model through gRPC: the same whether a token was drawn or given, cached or computed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from foreword.clients import AsyncClient, Generation
from foreword.service.config import ServerConfig
from foreword.service.server import running_server

TEXT = "The lighthouse keeper wrote down every ship that passed, its flag, its course and the weather. " * 5
WANTED = {"logprobs": True, "ranks": True, "top_logprob_count": 4}


@pytest_asyncio.fixture
async def client() -> AsyncIterator[AsyncClient]:
    config = ServerConfig(
        listen_address="127.0.0.1:0",
        max_model_len=512,
        max_num_sequences=8,
        max_num_batched_tokens=50,
        log_level="error",
    )
    async with running_server(config) as server, AsyncClient(server.address) as client:
        yield client


def rows(delta: object) -> list[tuple[float, int, list[int], list[float]]]:
    """Scores of each token of a delta."""
    top = [(list(each.token_ids), list(each.logprobs)) for each in delta.top_logprobs]
    return [(p, r, ids, logprobs) for p, r, (ids, logprobs) in zip(delta.logprobs, delta.ranks, top, strict=True)]


async def scored(client: AsyncClient, prompt: str | list[int], **fields: object) -> Generation:
    return await client.generate(prompt, prompt_logprobs=True, echo_prompt=True, ignore_eos=True, **WANTED, **fields)


async def test_scores_are_the_same_for_drawn_and_given_tokens(client: AsyncClient) -> None:
    first = await scored(client, TEXT, max_output_token_count=20, temperature=0.8, seed=3, frequency_penalty=0.5)
    assert first.prompt.text == TEXT
    prompt_ids, output = list(first.prompt.token_ids), first.outputs[0].content
    assert len(prompt_ids) == first.usage.prompt_token_count > 64
    again = await scored(client, [*prompt_ids, *output.token_ids], max_output_token_count=1)
    assert rows(again.prompt)[1 : len(prompt_ids)] == rows(first.prompt)[1:]
    assert rows(again.prompt)[len(prompt_ids) :] == rows(output)
    for logprob, rank, top_ids, top_logprobs in rows(output):
        assert top_logprobs == sorted(top_logprobs, reverse=True)
        assert (rank <= 4) == (logprob in top_logprobs)
        assert len(set(top_ids)) == 4


async def test_the_prefix_cache_takes_no_score_away(client: AsyncClient) -> None:
    cold = await scored(client, TEXT, max_output_token_count=4, temperature=0)
    warm = await client.generate(TEXT, max_output_token_count=4, temperature=0)
    assert warm.usage.cached_prompt_token_count > 64
    again = await scored(client, TEXT, max_output_token_count=4, temperature=0, output_count=2)
    assert rows(again.prompt)[1:] == rows(cold.prompt)[1:]
    assert [list(output.content.token_ids) for output in again.outputs] == [list(cold.token_ids)] * 2


async def test_asking_for_scores_changes_no_token(client: AsyncClient) -> None:
    settings = {"max_output_token_count": 16, "temperature": 1.0, "seed": 11, "repetition_penalty": 1.2}
    plain = await client.generate(TEXT, ignore_eos=True, **settings)
    assert list((await scored(client, TEXT, **settings)).token_ids) == list(plain.token_ids)
