"""How long the parts of a generation took."""

from __future__ import annotations

import grpc

from foreword.scheduler.step import FinishReason
from foreword.v1 import timing_pb2

from .conftest import Harness
from .rpc import check_identity, complete, read_events, streamed, unary


async def test_first_token_duration_is_the_sum_of_its_parts(harness: Harness) -> None:
    response = await complete(harness, harness.generation.GenerateText(unary()), "", "", "a", "b", "c")
    timing = response.finished.timing
    check_identity(timing)
    assert timing.total_duration_micros >= timing.first_token_duration_micros + timing.decode_duration_micros
    assert (timing.step_count, timing.device) == (5, "cpu")
    assert timing.inter_token_latency.max_micros >= timing.inter_token_latency.p50_micros > 0

    call = harness.generation.StreamGenerateText(streamed())
    [sequence] = await harness.engine.arrival()
    await call.read()
    harness.engine.step({sequence: "a"})
    await call.read()
    harness.engine.step({sequence: "bcd"}, FinishReason.LENGTH)
    events = await read_events(call)
    timing = events[-1].finished.timing
    check_identity(timing)
    assert timing.total_duration_micros >= timing.first_token_duration_micros + timing.decode_duration_micros
    latency = events[-2].output_finished.timing.inter_token_latency
    assert (latency.p50_micros, latency.p99_micros) == (0, latency.max_micros)
    trailers = dict(await call.trailing_metadata())
    assert int(trailers["foreword-ttft-us"]) == events[-1].finished.timing.first_token_duration_micros


async def test_timing_levels(harness: Harness) -> None:
    none = await complete(harness, harness.generation.GenerateText(unary(output={"timing_level": 1})), "a")
    assert not none.finished.HasField("timing")
    assert not none.outputs[0].finished.HasField("timing")
    assert not none.outputs[0].content.step_timings

    call = harness.generation.StreamGenerateText(streamed(output={"timing_level": 3}))
    [sequence] = await harness.engine.arrival()
    await call.read()
    harness.engine.step({sequence: [ord("a"), 0xC3]}, num_drafted=3, num_accepted=1)
    first = (await call.read()).events[0].output_delta
    harness.engine.step({sequence: [0xA9, ord("b")]}, FinishReason.LENGTH)
    second, _, last = (await call.read()).events
    second = second.output_delta
    assert await call.read() is grpc.aio.EOF
    assert [(step.step_id, step.token_count) for step in first.step_timings] == [(2, 1)]
    assert [(step.step_id, step.token_count) for step in second.step_timings] == [(2, 1), (3, 2)]
    step = first.step_timings[0]
    assert (step.step_kind, step.draft_token_count, step.accepted_draft_token_count) == (
        timing_pb2.STEP_KIND_PREFILL,
        3,
        1,
    )
    assert (step.step_duration_micros, step.verify_duration_micros) == (2000, 1500)
    assert step.emit_offset_micros >= step.sample_offset_micros > 0
    timing = last.finished.timing
    known = timing.tokenize_duration_micros + timing.queue_duration_micros + timing.prefill_duration_micros
    assert known == step.sample_offset_micros
    assert list(timing.acceptance_histogram) == [0, 1]
    assert (last.finished.usage.draft_token_count, last.finished.usage.accepted_draft_token_count) == (3, 1)
    assert (step.hold_duration_micros, second.step_timings[0].hold_duration_micros > 0) == (0, True)
    assert second.step_timings[1].hold_duration_micros == 0
