"""Builds what operators get: from facts about the engine to messages of `foreword.v1`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import zip_longest

from foreword.scheduler.step import SchedulerLoad
from foreword.service.engine.messages import EngineInfo, StepHeader
from foreword.service.frontend.generation import Generation
from foreword.service.frontend.responses import duration, timestamp
from foreword.v1 import engine_pb2, speculation_pb2


def load_message(load: SchedulerLoad) -> engine_pb2.Load:
    """Gauges as a message."""
    return engine_pb2.Load(
        running_sequence_count=load.num_running,
        waiting_sequence_count=load.num_waiting,
        waiting_token_count=load.num_waiting_tokens,
        paused_sequence_count=load.num_paused,
        free_block_count=load.num_free_blocks,
        block_count=load.num_blocks,
        cached_block_count=load.num_cached_blocks,
    )


def engine_message(info: EngineInfo, model: str) -> engine_pb2.EngineInfo:
    """Facts about an engine as a message."""
    return engine_pb2.EngineInfo(
        device=info.device,
        device_name=info.device_name,
        dtype=info.dtype,
        model=model,
        max_context_token_count=info.max_model_len,
        max_sequence_count=info.max_num_sequences,
        max_step_token_count=info.max_num_batched_tokens,
        block_count=info.num_blocks,
        block_token_count=info.block_size,
        load_duration=duration(round(info.load_duration_s * 1e9)),
    )


def step_message(header: StepHeader, info: EngineInfo) -> engine_pb2.Step:
    """Facts about a step as a message.

    Args:
        header: of the step.
        info: of its engine.
    """
    return engine_pb2.Step(
        step_id=header.step_id,
        start_time=timestamp(wall_time_ns(header.start_ns)),
        step_duration_micros=(header.end_ns - header.start_ns) // 1000,
        schedule_duration_micros=header.schedule_duration_ns // 1000,
        draft_duration_micros=header.draft_duration_ns // 1000,
        verify_duration_micros=header.model_duration_ns // 1000,
        sequence_count=header.num_sequences,
        prefill_sequence_count=header.num_prefill_sequences,
        token_count=header.num_tokens,
        prefill_token_count=header.num_prefill_tokens,
        token_budget=info.max_num_batched_tokens,
        draft_token_count=header.num_drafted,
        accepted_draft_token_count=header.num_accepted,
        output_token_count=header.num_output_tokens,
        preempted_sequence_count=header.num_preempted,
        finished_sequence_count=header.num_finished,
        load=load_message(header.load),
        drafts=[
            engine_pb2.DraftCounts(
                drafter=info.draft_sources[counts.drafter],
                draft_token_count=counts.num_drafted,
                accepted_draft_token_count=counts.num_accepted,
            )
            for counts in header.drafts
        ],
        draft_places=_draft_places(header),
        predicted_verify_duration_micros=header.forecast.model_duration_ns // 1000,
        undrafted_duration_micros=header.forecast.undrafted_duration_ns // 1000,
        speculation_off_reason=speculation_pb2.SpeculationOffReason.ValueType(header.draft_state.value),
    )


def _draft_places(header: StepHeader) -> Iterator[engine_pb2.DraftPlace]:
    columns = zip_longest(header.drafted, header.accepted, header.emitted, fillvalue=0)
    for drafted, accepted, emitted in columns:
        yield engine_pb2.DraftPlace(
            draft_token_count=drafted, accepted_draft_token_count=accepted, output_token_count=emitted
        )


def generation_message(generation: Generation, model: str) -> engine_pb2.GenerationInfo:
    """A generation under way as a message, without its content."""
    counts, timeline = generation.counts, generation.timeline
    return engine_pb2.GenerationInfo(
        request_id=generation.settings.request_id,
        model=model,
        phase=_phase(generation),
        priority=generation.settings.priority,
        receive_time=timestamp(timeline.receive_time_ns),
        expire_time=timestamp(wall_time_ns(generation.deadline_ns)),
        prompt_token_count=counts.num_prompt,
        computed_prompt_token_count=counts.num_prompt_computed,
        output_token_count=counts.num_output,
        tenant=generation.tenant,
    )


def _phase(generation: Generation) -> engine_pb2.GenerationPhase.ValueType:
    if generation.is_paused:
        return engine_pb2.GENERATION_PHASE_PAUSED
    if generation.timeline.schedule_ns is None:
        return engine_pb2.GENERATION_PHASE_QUEUED
    if generation.counts.num_prompt_computed < generation.counts.num_prompt:
        return engine_pb2.GENERATION_PHASE_PREFILL
    return engine_pb2.GENERATION_PHASE_DECODE


def wall_time_ns(instant_ns: int) -> int:
    """An instant of the monotonic clock by the wall clock, as that stands now."""
    return instant_ns + time.time_ns() - time.monotonic_ns()
