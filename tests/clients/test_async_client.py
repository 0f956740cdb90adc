from __future__ import annotations

import asyncio
import inspect
from typing import Any

import grpc
import pytest

from foreword.clients import AsyncClient, AsyncSession, Client, ForewordClientError, Message, Session
from foreword.clients.stream import AsyncGenerationStream, GenerationStream


async def ended(server: Any) -> str:
    return await asyncio.to_thread(server.ended.get, timeout=10)


@pytest.mark.parametrize(
    ("plain", "asynchronous"),
    [(Client, AsyncClient), (Session, AsyncSession), (GenerationStream, AsyncGenerationStream)],
)
def test_both_flavours_offer_the_same(plain: type, asynchronous: type) -> None:
    def parameters(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in vars(kind).items()
            if callable(method) and not name.startswith("_")
        }

    assert parameters(plain) == parameters(asynchronous)


async def test_generate(async_client: AsyncClient) -> None:
    assert (await async_client.generate("one two")).text == "one two "
    assert (await async_client.generate([Message("user", "hi")])).text == "hi "


async def test_stream_gives_the_text_of_generate(async_client: AsyncClient) -> None:
    stream = async_client.stream("one two three")
    assert [delta.text async for delta in stream] == ["one ", "two ", "three "]
    assert await stream.result() == await async_client.generate("one two three")


async def test_leaving_early_cancels(async_client: AsyncClient, server: Any) -> None:
    async with async_client.stream("endless") as stream:
        async for _ in stream:
            break
    assert await ended(server) == "cancelled"


async def test_reading_on_after_cancel(async_client: AsyncClient) -> None:
    stream = async_client.stream("endless")
    await anext(stream.events())
    stream.cancel()
    with pytest.raises(ForewordClientError) as caught:
        await stream.result()
    assert caught.value.code is grpc.StatusCode.CANCELLED


async def test_cancelling_the_reading_task_stays_a_cancel(async_client: AsyncClient, server: Any) -> None:
    reading = asyncio.Event()

    async def read() -> None:
        async for _ in async_client.stream("silent").events():
            reading.set()

    task = asyncio.create_task(read())
    await reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await ended(server) == "cancelled"


@pytest.mark.parametrize("method", ["generate", "stream"])
async def test_refusals_are_decoded(async_client: AsyncClient, method: str) -> None:
    with pytest.raises(ForewordClientError) as caught:
        await (async_client.generate("refused") if method == "generate" else async_client.stream("refused").result())
    assert caught.value.reason == "INVALID_FIELD"
    assert caught.value.field_violations[0].field == "sampling.top_p"
    assert caught.value.retry_delay_s == 1.5


async def test_the_timeout_is_the_deadline_of_the_call(async_client: AsyncClient) -> None:
    with pytest.raises(ForewordClientError) as caught:
        await async_client.stream("silent", timeout=0.2).result()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_unavailable_is_retried(async_client: AsyncClient, server: Any) -> None:
    server.num_unavailable = 2
    assert (await async_client.generate("one")).text == "one "
    assert server.num_attempts == 3


async def test_other_calls(async_client: AsyncClient) -> None:
    assert await async_client.cancel("active") is True
    assert await async_client.cancel("ended") is False
    assert list((await async_client.tokenize("ab")).token_ids) == [97, 98]
    assert (await async_client.detokenize([97, 98])).text == "ab"
    assert (await async_client.render_chat([Message("user", "a")])).text == "2:a|"
    assert [model.name for model in await async_client.models()] == ["a", "b"]
    assert (await async_client.model("b")).name == "b"
    assert (await async_client.server_info()).version == "1.2.3"
    assert (await async_client.load()).running_sequence_count == 3


async def test_many_generations_on_one_stream(async_client: AsyncClient, server: Any) -> None:
    prompts = [" ".join(f"w{i}" for i in range(5 + n)) for n in range(32)]
    async with async_client.session() as session:
        streams = [session.start(prompt) for prompt in prompts]
        generations = await asyncio.gather(*(stream.result() for stream in streams))
    assert [generation.text for generation in generations] == [prompt + " " for prompt in prompts]
    assert await ended(server) == "ok"


async def test_cancel_in_band(async_client: AsyncClient) -> None:
    async with async_client.session() as session:
        endless, other = session.start("endless"), session.start("one two")
        async for _ in endless:
            endless.cancel()
            break
        assert (await endless.result()).finish_reason == "CANCELLED"
        assert (await other.result()).text == "one two "


async def test_a_reader_that_gives_up_leaves_the_session_alone(async_client: AsyncClient) -> None:
    async with async_client.session() as session:
        silent = session.start("silent")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(silent.result(), 0.05)
        silent.cancel()
        assert (await session.start("one").result()).text == "one "


async def test_refused_and_failed_generations_fail_alone(async_client: AsyncClient) -> None:
    async with async_client.session() as session:
        refused, broken, other = session.start("refused"), session.start("broken"), session.start("one two three")
        with pytest.raises(ForewordClientError, match="above 1"):
            await refused.result()
        with pytest.raises(ForewordClientError) as caught:
            await broken.result()
        assert caught.value.reason == "ENGINE_ERROR"
        assert (await other.result()).text == "one two three "


async def test_a_broken_stream_fails_every_generation(async_client: AsyncClient) -> None:
    async with async_client.session() as session:
        streams = [session.start("silent"), session.start("abort")]
        results = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
    assert [result.reason for result in results if isinstance(result, ForewordClientError)] == [
        "ENGINE_UNAVAILABLE",
        "ENGINE_UNAVAILABLE",
    ]


async def test_leaving_the_session_ends_what_runs(async_client: AsyncClient, server: Any) -> None:
    async with async_client.session() as session:
        endless = session.start("endless")
        await anext(endless.events())
    assert await ended(server) == "cancelled"
    with pytest.raises(ForewordClientError) as caught:
        await endless.result()
    assert caught.value.code is grpc.StatusCode.CANCELLED


async def test_a_session_leaves_no_task_behind(async_client: AsyncClient) -> None:
    before = asyncio.all_tasks()
    async with async_client.session() as session:
        await session.start("one").result()
    left = [task for task in asyncio.all_tasks() - before if "_read" in repr(task)]
    assert not left


async def test_generations_carry_the_tenant(server: Any) -> None:
    async with AsyncClient(server.target, tenant="gold") as client:
        await client.generate("one")
        await client.stream("one").result()
        async with client.session() as session:
            await session.start("one").result()
    assert server.tenants == ["gold"] * 3
