"""Fewer messages than steps, and progress before the first token."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from foreword.scheduler.errors import EngineUnavailable
from foreword.scheduler.step import FinishReason
from foreword.service.config import ServerConfig
from foreword.v1 import timing_pb2
from foreword.v1.generation_service_pb2 import BidiGenerateTextRequest, CancelGenerationRequest, StartCommand

from .conftest import Harness
from .rpc import failure_of, read_events, spec, streamed

SECOND = Duration(seconds=1)
LONG = {"coalesce_token_count": 4, "coalesce_duration": SECOND}


async def round_trip(harness: Harness) -> None:
    """Give the server the time of another call to send what it would send."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await harness.generation.CancelGeneration(CancelGenerationRequest(request_id="nobody"))


async def texts_of(call: Any) -> list[str]:
    """Of all deltas up to the end of a stream."""
    return [event.output_delta.text for event in await read_events(call) if event.HasField("output_delta")]


async def next_delta(call: Any) -> Any:
    """Read up to the message with the next delta, which must be its last event."""
    while not (response := await call.read()).events[-1].HasField("output_delta"):
        pass
    return response.events[-1].output_delta


async def test_tokens_leave_together_after_the_first_and_at_the_end(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(output=LONG))
    [sequence] = await harness.engine.arrival()
    for letter in "abcdefghijk":
        harness.engine.step({sequence: letter})
        await round_trip(harness)
    harness.engine.step({sequence: "l"}, FinishReason.LENGTH)
    assert await texts_of(call) == ["a", "bcde", "fghi", "jkl"]


async def test_a_step_with_more_tokens_leaves_whole(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(output=LONG))
    [sequence] = await harness.engine.arrival()
    for gained in ("ab", "cde", "fghijk"):
        harness.engine.step({sequence: gained})
        await round_trip(harness)
    harness.engine.step({sequence: "l"}, FinishReason.LENGTH)
    assert await texts_of(call) == ["ab", "cdefghijk", "l"]


async def test_nothing_waits_longer_than_the_duration(harness: Harness) -> None:
    output = {
        "coalesce_token_count": 1000,
        "coalesce_duration": Duration(nanos=20_000_000),
        "timing_level": timing_pb2.TIMING_LEVEL_STEP,
    }
    call = harness.generation.StreamGenerateText(streamed(output=output))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "a"})
    assert (await next_delta(call)).text == "a"
    harness.engine.step({sequence: "b"})
    harness.engine.step({sequence: "c"})
    delta = await next_delta(call)
    assert delta.text == "bc"
    waits = [timing.coalesce_duration_micros for timing in delta.step_timings]
    assert waits[0] >= 20_000
    assert waits[0] >= waits[1]
    harness.engine.step({sequence: "d"}, FinishReason.LENGTH)
    await read_events(call)


async def test_a_failure_takes_along_what_waits(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(output=LONG))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "a"})
    assert (await next_delta(call)).text == "a"
    harness.engine.step({sequence: "b"})
    harness.engine.fail(EngineUnavailable("the engine has died"))
    assert (await next_delta(call)).text == "b"
    assert (await failure_of(call)).code is grpc.StatusCode.UNAVAILABLE


class TestSmallBuffer:
    @pytest.fixture
    def config(self) -> ServerConfig:
        return ServerConfig(listen_address="127.0.0.1:0", stream_buffer_tokens=3)

    async def test_a_paused_generation_waits_for_no_tokens(self, harness: Harness) -> None:
        """It would get none."""
        output = {"coalesce_token_count": 100, "coalesce_duration": SECOND}
        call = harness.generation.StreamGenerateText(streamed(output=output))
        [sequence] = await harness.engine.arrival()
        for letter in "abcdefghi":
            harness.engine.step({sequence: letter})
            await round_trip(harness)
        assert sequence.calls == ["pause", "resume"] * 2
        harness.engine.step({sequence: "j"}, FinishReason.LENGTH)
        assert await texts_of(call) == ["a", "bcde", "fghi", "j"]


async def test_outputs_wait_apart_and_leave_in_their_own_deltas(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(output=LONG, sampling={"output_count": 2}))
    first, second = await harness.engine.arrival(2)
    harness.engine.step({first: "a", second: "A"})
    await round_trip(harness)
    for gained in ({first: "b"}, {first: "cde", second: "B"}, {second: "C"}):
        harness.engine.step(gained)
        await round_trip(harness)
    harness.engine.step({first: "f", second: "D"}, FinishReason.LENGTH)
    deltas = [event.output_delta for event in await read_events(call) if event.HasField("output_delta")]
    assert [(delta.output_index, delta.text) for delta in deltas] == [
        (0, "a"),
        (1, "A"),
        (0, "bcde"),
        (0, "f"),
        (1, "BCD"),
    ]


async def test_generations_of_a_stream_choose_for_themselves(harness: Harness) -> None:
    call = harness.generation.BidiGenerateText()
    for name, output in (("plain", {}), ("together", LONG)):
        command = StartCommand(spec=spec(request_id=name, output=output))
        await call.write(BidiGenerateTextRequest(start=command))
    plain, together = await harness.engine.arrival(2)
    for letter in "abcd":
        harness.engine.step({plain: letter, together: letter})
        await round_trip(harness)
    harness.engine.step({plain: "e", together: "e"}, FinishReason.LENGTH)
    await call.done_writing()
    events = await read_events(call)
    texts: dict[str, list[str]] = {"plain": [], "together": []}
    for event in events:
        if event.HasField("output_delta"):
            texts[event.request_id].append(event.output_delta.text)
    assert texts == {"plain": [*"abcde"], "together": ["a", "bcde"]}


@pytest.mark.parametrize(
    ("output", "path"),
    [
        ({"coalesce_token_count": 0}, "output.coalesce_token_count"),
        ({"coalesce_token_count": -1}, "output.coalesce_token_count"),
        ({"coalesce_duration": SECOND}, "output.coalesce_duration"),
        ({"coalesce_token_count": 1, "coalesce_duration": SECOND}, "output.coalesce_duration"),
        ({"coalesce_token_count": 2, "coalesce_duration": Duration()}, "output.coalesce_duration"),
        ({"coalesce_token_count": 2, "coalesce_duration": Duration(nanos=-1)}, "output.coalesce_duration"),
        ({"coalesce_token_count": 2, "coalesce_duration": Duration(nanos=2**31 - 1)}, "output.coalesce_duration"),
        ({"coalesce_token_count": 2, "coalesce_duration": Duration(seconds=1, nanos=1)}, "output.coalesce_duration"),
    ],
)
async def test_bad_settings_are_refused_by_name(harness: Harness, output: dict[str, Any], path: str) -> None:
    failure = await failure_of(harness.generation.StreamGenerateText(streamed(output=output)))
    assert failure.fields == [path]
    assert harness.engine.submitted == []


@pytest.mark.parametrize(
    ("output", "in_effect"),
    [({}, (1, False, 0)), ({"coalesce_token_count": 7}, (7, True, 50_000_000)), (LONG, (4, True, 10**9))],
)
async def test_settings_in_effect_are_echoed(
    harness: Harness, output: dict[str, Any], in_effect: tuple[int, bool, int]
) -> None:
    call = harness.generation.StreamGenerateText(streamed(output=output))
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: "a"}, FinishReason.LENGTH)
    echo = (await read_events(call))[0].started.output
    duration_ns = echo.coalesce_duration.ToNanoseconds()
    assert (echo.coalesce_token_count, echo.HasField("coalesce_duration"), duration_ns) == in_effect
    assert not echo.prefill_progress


async def test_progress_is_told_after_each_part_of_the_prompt(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed(prompt="0123456789", output={"prefill_progress": True}))
    [sequence] = await harness.engine.arrival()
    for num_computed in (4, 8, 6, 8):  # a preemption in between
        harness.engine.step({sequence: ""}, num_prompt_computed=num_computed, num_cached=3)
        await round_trip(harness)
    for gained in "ab":
        harness.engine.step({sequence: gained}, num_cached=3)
        await round_trip(harness)
    harness.engine.step({sequence: "c"}, FinishReason.LENGTH, num_cached=3)
    events = await read_events(call)
    assert events[0].started.output.prefill_progress
    told = [event.prefill_progress for event in events if event.HasField("prefill_progress")]
    assert [progress.computed_prompt_token_count for progress in told] == [4, 8, 10]
    assert {(progress.prompt_token_count, progress.cached_prompt_token_count) for progress in told} == {(10, 3)}
    offsets = [progress.offset_micros for progress in told]
    assert offsets == sorted(offsets)
    assert offsets[0] > 0
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds.index("output_delta") > max(i for i, kind in enumerate(kinds) if kind == "prefill_progress")


async def test_no_progress_is_told_unasked(harness: Harness) -> None:
    call = harness.generation.StreamGenerateText(streamed())
    [sequence] = await harness.engine.arrival()
    harness.engine.step({sequence: ""}, num_prompt_computed=2)
    await round_trip(harness)
    harness.engine.step({sequence: "a"}, FinishReason.LENGTH)
    assert not any(event.HasField("prefill_progress") for event in await read_events(call))
