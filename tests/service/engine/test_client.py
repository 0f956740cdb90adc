from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from engine_fakes import NO_LIMIT, VOCAB_SIZE, RecordingSink, expected_tokens, make_request
from engine_harness import EngineThread, until
from structlog.testing import capture_logs

from foreword.scheduler.errors import (
    ContextLengthExceeded,
    DeadlineInfeasible,
    DuplicateRequest,
    EngineUnavailable,
    ForewordError,
    InvalidField,
    QueueFull,
)
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.step import DraftState, FinishReason
from foreword.service.engine.client import EngineClient
from foreword.service.engine.codec import Codec
from foreword.service.engine.messages import FRONT_END_SHIFT, Message, StepHeader

Serve = Callable[..., EngineThread]
Connect = Callable[..., Awaitable[EngineClient]]


async def start(client: EngineClient, **fields: int) -> tuple[int, RecordingSink]:
    request_key, sink = client.new_request_key(), RecordingSink()
    await client.submit(make_request(request_key, **fields), sink)  # type: ignore[arg-type]
    return request_key, sink


async def idle(client: EngineClient, thread: EngineThread) -> None:
    """Until the engine has nothing to do and holds nothing."""
    await until(lambda: not thread.engine.has_work)
    load = thread.engine.load()
    assert (load.num_running, load.num_waiting, load.num_free_blocks) == (0, 0, load.num_blocks)
    await until(lambda: not client._sinks)


async def test_a_request_becomes_tokens(serve: Serve, connect: Connect) -> None:
    thread = serve()
    client = await connect(thread)
    assert client.ready
    assert client.info == thread.engine.info
    _, sink = await start(client, num_prompt_tokens=4, max_output_tokens=8)
    await until(lambda: sink.ended)
    assert sink.token_ids == expected_tokens(4, 8)
    assert sink.logprobs == [-0.5] * 8
    assert sink.finish_reason is FinishReason.LENGTH
    assert client.load == sink.headers[-1].load
    await idle(client, thread)


async def test_a_thousand_requests_at_once(serve: Serve, connect: Connect) -> None:
    thread = serve()
    client = await connect(thread)
    started = await asyncio.gather(
        *(start(client, num_prompt_tokens=1 + n % 9, max_output_tokens=1 + n % 5) for n in range(1000))
    )
    await until(lambda: all(sink.ended for _, sink in started))
    for n, (_, sink) in enumerate(started):
        assert sink.token_ids == expected_tokens(1 + n % 9, 1 + n % 5)
    await idle(client, thread)


async def test_request_keys_are_unique_and_tell_the_front_end() -> None:
    client = EngineClient(front_end=3)
    keys = [client.new_request_key() for _ in range(100)]
    assert len(set(keys)) == 100
    assert {key >> FRONT_END_SHIFT for key in keys} == {3}
    assert max(EngineClient(front_end=32767).new_request_key() for _ in range(9)) < 2**63


class OutputsSink:
    """A `RecordingSink` for each output of a request."""

    def __init__(self) -> None:
        self.outputs: defaultdict[int, RecordingSink] = defaultdict(RecordingSink)
        self.num_failures = 0

    def on_step(self, header: StepHeader, update: np.void, *news: Any) -> None:
        self.outputs[int(update["request_key"])].on_step(header, update, *news)

    def on_failure(self, error: ForewordError) -> None:
        self.num_failures += 1


async def test_outputs_of_a_request_share_a_sink(serve: Serve, connect: Connect) -> None:
    thread = serve()
    client = await connect(thread)
    key, sink = client.new_request_key(3), OutputsSink()
    assert client.new_request_key() == key + 3
    await client.submit(make_request(key, max_output_tokens=5, num_outputs=3), sink)
    await idle(client, thread)
    assert {key: output.token_ids for key, output in sink.outputs.items()} == dict.fromkeys(
        range(key, key + 3), expected_tokens(4, 5)
    )


async def test_outputs_are_refused_as_a_whole(serve: Serve, connect: Connect) -> None:
    thread = serve(max_num_waiting=2)
    client = await connect(thread)
    key = client.new_request_key(3)
    with pytest.raises(InvalidField) as refusal:
        await client.submit(make_request(key, num_outputs=3), OutputsSink())
    assert refusal.value.field == "sampling.output_count"
    await idle(client, thread)
    await client.submit(make_request(key, num_outputs=2), OutputsSink())  # its keys are free
    await idle(client, thread)


async def test_outputs_that_a_front_end_leaves_behind_are_cancelled(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.005)
    client = await connect(thread)
    key, sink = client.new_request_key(3), OutputsSink()
    await client.submit(make_request(key, num_outputs=3, max_output_tokens=NO_LIMIT), sink)
    await until(lambda: len(sink.outputs) == 3)
    with pytest.raises(DuplicateRequest):
        await client.submit(make_request(key + 2), RecordingSink())
    client.disconnect(EngineUnavailable("gone"))
    assert sink.num_failures == 3
    await until(lambda: not thread.engine.has_work)


async def test_refusals_are_raised_as_they_were(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.005, max_num_sequences=1, max_num_waiting=1)
    client = await connect(thread)
    with pytest.raises(ContextLengthExceeded) as too_long:
        await start(client, num_prompt_tokens=900, max_output_tokens=2000)
    assert too_long.value.metadata
    with pytest.raises(DeadlineInfeasible):
        await start(client, deadline_ns=time.monotonic_ns() - 1)
    prompt = np.array([VOCAB_SIZE], np.int32)
    with pytest.raises(InvalidField) as invalid:
        await client.submit(Request(client.new_request_key(), prompt, StoppingParams(1)), RecordingSink())
    assert invalid.value.field == "prompt_token_ids"
    running, sink = await start(client, max_output_tokens=NO_LIMIT)
    await until(lambda: sink.num_updates > 0)
    waiting, _ = await start(client)
    with pytest.raises(QueueFull):
        await start(client)
    with pytest.raises(DuplicateRequest):
        await client.submit(make_request(waiting), RecordingSink())
    client.cancel(running)
    client.cancel(waiting)
    await idle(client, thread)


async def test_cancel_while_waiting(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.005, max_num_sequences=1)
    client = await connect(thread)
    running, first = await start(client, max_output_tokens=NO_LIMIT)
    waiting, second = await start(client)
    client.cancel(waiting)
    await until(lambda: second.ended)
    assert second.finish_reason is FinishReason.CANCELLED
    assert second.token_ids == []
    client.cancel(running)
    await until(lambda: first.ended)
    await idle(client, thread)


async def test_cancel_during_prefill(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.005, max_num_batched_tokens=64)
    client = await connect(thread)
    key, sink = await start(client, num_prompt_tokens=900)
    await until(lambda: sink.num_updates > 0)
    client.cancel(key)
    await until(lambda: sink.ended)
    assert sink.finish_reason is FinishReason.CANCELLED
    assert sink.token_ids == []
    await idle(client, thread)


async def test_cancel_during_decode(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.002)
    client = await connect(thread)
    key, sink = await start(client, max_output_tokens=NO_LIMIT)
    await until(lambda: len(sink.token_ids) > 5)
    client.cancel(key)
    await until(lambda: sink.ended)
    assert sink.finish_reason is FinishReason.CANCELLED
    assert sink.token_ids == expected_tokens(4, len(sink.token_ids))
    assert len(sink.token_ids) < NO_LIMIT
    await idle(client, thread)


async def test_commands_for_a_sequence_that_has_ended_do_nothing(serve: Serve, connect: Connect) -> None:
    thread = serve()
    client = await connect(thread)
    key, sink = await start(client)
    await until(lambda: sink.ended)
    for command in (client.cancel, client.pause, client.resume, client.forget):
        command(key)
        command(12345)
    _, other = await start(client)
    await until(lambda: other.ended)
    await idle(client, thread)


async def test_a_caller_cancelled_while_it_submits_cancels_the_request(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.02)
    client = await connect(thread)
    sink = RecordingSink()
    submission = asyncio.create_task(client.submit(make_request(1, max_output_tokens=NO_LIMIT), sink))
    await asyncio.sleep(0)  # the request is on its way, the reply is not here
    submission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submission
    await until(lambda: thread.num_steps > 1)
    await idle(client, thread)
    assert sink.num_updates == 0
    assert not client._admissions


async def test_a_forgotten_sink_is_never_called_again(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.002)
    client = await connect(thread)
    key, sink = await start(client, max_output_tokens=NO_LIMIT)
    await until(lambda: sink.num_updates > 2)
    client.forget(key)
    num_updates = sink.num_updates
    await idle(client, thread)
    _, other = await start(client)
    await until(lambda: other.ended)
    assert sink.num_updates == num_updates


async def test_a_paused_generation_rests_until_it_is_resumed(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.001)
    client = await connect(thread)
    key, sink = await start(client, max_output_tokens=100)
    await until(lambda: sink.num_updates > 2)
    client.pause(key)
    _, other = await start(client)
    await until(lambda: other.ended)
    num_updates = sink.num_updates
    _, another = await start(client, max_output_tokens=20)
    await until(lambda: another.ended)
    assert sink.num_updates == num_updates < 100
    assert client.load.num_paused == 1
    client.resume(key)
    await until(lambda: sink.ended)
    assert sink.token_ids == expected_tokens(4, 100)


async def test_a_pause_shows_in_the_load_when_no_step_follows(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.001)
    client = await connect(thread)
    key, sink = await start(client, max_output_tokens=100)
    await until(lambda: sink.num_updates > 2)
    client.pause(key)
    await until(lambda: client.load.num_paused == 1)
    assert not sink.ended
    client.resume(key)
    await until(lambda: sink.ended)
    assert client.load.num_paused == 0


async def test_a_ping_leaves_what_the_last_step_said_of_drafts(serve: Serve, connect: Connect) -> None:
    client = await connect(serve())
    client.draft_state = DraftState.CACHE_PRESSURE
    num_received = client.num_received
    client.ping()
    await until(lambda: client.num_received > num_received)
    assert client.draft_state is DraftState.CACHE_PRESSURE


async def test_every_step_is_told_to_the_listener_first(serve: Serve, connect: Connect) -> None:
    client = await connect(serve())
    seen: list[tuple[int, int]] = []
    sink = RecordingSink()
    client.step_listener = lambda header: seen.append((header.step_id, sink.num_updates))
    await client.submit(make_request(client.new_request_key(), max_output_tokens=5), sink)
    await until(lambda: sink.ended)
    assert seen == [(header.step_id, index) for index, header in enumerate(sink.headers)]


async def test_news_that_arrive_just_before_a_command_are_not_missed(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.005)
    client = await connect(thread)
    key, sink = await start(client, max_output_tokens=4)
    time.sleep(0.2)  # all news arrive while the event loop is busy
    assert not sink.ended
    client.pause(key)
    await until(lambda: sink.ended, timeout_s=5)


async def test_a_deadline_ends_a_generation(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.001)
    client = await connect(thread)
    _, sink = await start(client, max_output_tokens=2000, deadline_ns=time.monotonic_ns() + 50_000_000)
    await until(lambda: sink.ended)
    assert sink.finish_reason is FinishReason.DEADLINE
    await idle(client, thread)


async def test_scores_reach_the_sequence_they_are_of(serve: Serve, connect: Connect) -> None:
    """Sinks check those of tokens; prompts of two front ends are scored in the same steps."""
    thread = serve(step_s=0.001, max_num_batched_tokens=16, max_num_sequences=8)
    clients = [await connect(thread, front_end) for front_end in (0, 1)]
    started = [
        (length, await start(client, num_prompt_tokens=length, want_prompt_logprobs=length % 5 > 0))
        for length in (1, 2, 10, 41, 23)
        for client in clients
    ]
    for length, (_, sink) in started:
        await until(lambda sink=sink: sink.ended)
        assert sink.scored_prompt_ids == (list(range(2, length + 1)) if length % 5 else [])


class FaultySink(RecordingSink):
    def on_step(self, *news: object) -> None:
        raise LookupError("a mistake")

    on_failure = on_step  # type: ignore[assignment]


async def test_a_sink_that_raises_is_dropped_and_others_go_on(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.001)
    client = await connect(thread)
    with capture_logs() as logs:
        await client.submit(make_request(client.new_request_key(), max_output_tokens=NO_LIMIT), FaultySink())
        _, sink = await start(client, max_output_tokens=20)
        await until(lambda: sink.ended)
    assert sink.token_ids == expected_tokens(4, 20)
    await idle(client, thread)
    assert [(entry["event"], entry["error"]) for entry in logs] == [("sink failed", "LookupError")]


async def test_a_sink_may_end_its_own_generation(serve: Serve, connect: Connect) -> None:
    thread = serve()
    client = await connect(thread)
    key = client.new_request_key()

    class StoppingSink(RecordingSink):
        def on_step(self, *news: object) -> None:
            super().on_step(*news)  # type: ignore[arg-type]
            if len(self.token_ids) == 3:
                client.forget(key)

    sink = StoppingSink()
    await client.submit(make_request(key, max_output_tokens=NO_LIMIT), sink)
    await until(lambda: len(sink.token_ids) == 3)
    await idle(client, thread)
    assert sink.token_ids == expected_tokens(4, 3)


async def test_without_an_engine_nothing_can_be_submitted() -> None:
    client = EngineClient()
    assert not client.ready
    assert client.info is None
    with pytest.raises(EngineUnavailable, match="loading"):
        await client.submit(make_request(1), RecordingSink())
    client.cancel(1)
    client.disconnect(EngineUnavailable("never connected"))


async def test_disconnecting_ends_everything(serve: Serve, connect: Connect) -> None:
    thread = serve(step_s=0.001)
    client = await connect(thread)
    _, sink = await start(client, max_output_tokens=NO_LIMIT)
    await client.submit(make_request(client.new_request_key(), max_output_tokens=NO_LIMIT), FaultySink())
    pending = RecordingSink()
    submission = asyncio.create_task(client.submit(make_request(client.new_request_key()), pending))
    await asyncio.sleep(0)
    client.disconnect(EngineUnavailable("the engine is gone"))
    assert isinstance(sink.error, EngineUnavailable)
    assert not client.ready
    assert client.load.num_blocks == 0
    outcome = (await asyncio.gather(submission, return_exceptions=True))[0]
    assert isinstance(outcome, EngineUnavailable) or isinstance(pending.error, EngineUnavailable)
    with pytest.raises(EngineUnavailable, match="the engine is gone"):
        await start(client)


async def test_what_is_not_a_message_for_it_is_dropped(serve: Serve, connect: Connect) -> None:
    thread = serve()
    client = await connect(thread)

    class SpoilingCodec(Codec):
        def encode(self, message: Message) -> list[bytes]:
            frames = super().encode(message)
            return [b"Nonsense"] if frames[0] == b"StepReport" else frames

    good, thread.loop._codec = thread.loop._codec, SpoilingCodec()
    with capture_logs() as logs:
        key, lost = await start(client, max_output_tokens=1)
        await until(lambda: len(logs) > 0)
    assert [entry["event"] for entry in logs] == ["malformed message dropped"]
    assert not lost.ended
    client.forget(key)
    thread.loop._codec = good
    _, sink = await start(client)
    await until(lambda: sink.ended)
