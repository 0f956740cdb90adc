"""Builds what callers get: from the service's own objects to messages of `foreword.v1`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp

from foreword.scheduler.errors import ForewordError
from foreword.scheduler.request import SamplingParams
from foreword.scheduler.step import DraftState, FinishReason
from foreword.service import status
from foreword.service.engine.messages import EngineInfo
from foreword.service.frontend.generation import Generation
from foreword.service.frontend.model import ServedModel
from foreword.service.frontend.output import Delta, Output
from foreword.service.frontend.prefill_progress import Progress
from foreword.service.frontend.prompt_echo import PromptPart
from foreword.service.frontend.requests import DEFAULT_SAMPLING, SUPPORTED_FIELDS
from foreword.service.frontend.settings import TimingLevel
from foreword.service.frontend.steps import StepShare
from foreword.service.frontend.timeline import Delivery, Timeline, inter_token_latency
from foreword.service.frontend.token_columns import TokenColumns
from foreword.v1 import (
    cache_pb2,
    generation_pb2,
    generation_service_pb2,
    model_pb2,
    output_pb2,
    sampling_pb2,
    speculation_pb2,
    stopping_pb2,
    timing_pb2,
    tokens_pb2,
    usage_pb2,
)

_FINISH_REASONS = {
    None: stopping_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.EOS: stopping_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: stopping_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.LENGTH: stopping_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_LIMIT: stopping_pb2.FINISH_REASON_CONTEXT_LIMIT,
    FinishReason.DEADLINE: stopping_pb2.FINISH_REASON_TIME_LIMIT,
    FinishReason.CANCELLED: stopping_pb2.FINISH_REASON_CANCELLED,
    FinishReason.CONSTRAINT_COMPLETE: stopping_pb2.FINISH_REASON_CONSTRAINT_COMPLETE,
}

_DRAFT_STATE_DETAILS = {
    DraftState.ACTIVE: "",
    DraftState.NO_DRAFTER: "the engine has no drafter yet",
    DraftState.DISABLED: "the server runs with speculation off",
    DraftState.DRAFTER_FAILED: "the drafter failed; the server's log has the details",
    DraftState.NO_GAIN: "nothing to propose, or checking it would take longer than it is expected to save",
    DraftState.CACHE_PRESSURE: "the KV cache is nearly full",
    DraftState.PREFILL_PRESSURE: "prompts wait for the time that drafts would take",
}


def timestamp(wall_ns: int) -> Timestamp:
    """A point of the wall clock, in nanoseconds since the epoch, as a message."""
    message = Timestamp()
    message.FromNanoseconds(wall_ns)
    return message


def duration(duration_ns: int) -> Duration:
    """A length of time, in nanoseconds, as a message."""
    message = Duration()
    message.FromNanoseconds(duration_ns)
    return message


class GenerationConverter:
    """Builds the messages about one generation."""

    def __init__(self, generation: Generation, model: ServedModel, device: str) -> None:
        self._generation = generation
        self._settings = generation.settings
        self._model = model
        self._device = device
        self._reported: set[int] = set()

    def started(self) -> generation_pb2.GenerationStarted:
        """What is in effect."""
        settings, timeline = self._settings, self._generation.timeline
        return generation_pb2.GenerationStarted(
            request_id=settings.request_id,
            model=self._model.name,
            sampling=_sampling(settings.sampling, settings.num_outputs),
            stopping=stopping_pb2.StoppingConfig(
                max_output_token_count=self._generation.max_output_tokens,
                min_output_token_count=settings.min_output_tokens,
                stop_strings=settings.stop_strings,
                stop_token_ids=settings.stop_token_ids,
                ignore_eos=settings.ignore_eos,
                include_stop=settings.include_stop,
                max_generation_duration=duration(settings.max_duration_ns),
            ),
            output=output_pb2.OutputConfig(
                logprobs=settings.logprobs,
                ranks=settings.ranks,
                top_logprob_count=settings.num_top_logprobs,
                prompt_logprobs=settings.prompt_logprobs,
                echo_prompt=settings.echo_prompt,
                return_token_ids=settings.return_token_ids,
                return_token_bytes=settings.return_token_bytes,
                prefill_progress=settings.prefill_progress,
                coalesce_token_count=settings.coalesce_tokens,
                coalesce_duration=(duration(settings.coalesce_duration_ns) if settings.coalesce_tokens > 1 else None),
                timing_level=timing_pb2.TimingLevel.ValueType(settings.timing_level.value),
            ),
            cache=cache_pb2.CacheConfig(
                bypass_prefix_cache=settings.bypass_prefix_cache, cache_salt=settings.cache_salt
            ),
            speculation=speculation_pb2.SpeculationConfig(
                disabled=not settings.max_draft_tokens,
                draft_token_count=settings.max_draft_tokens,
                drafter=settings.drafter or None,
                acceptance=speculation_pb2.AcceptanceRule.ValueType(settings.acceptance.value),
            ),
            priority=settings.priority,
            prompt_token_count=self._generation.counts.num_prompt,
            receive_time=timestamp(timeline.receive_time_ns),
        )

    def news(self) -> list[generation_pb2.GenerationEvent]:
        """Take what came since the last time, as events, once with how each output and the generation ended."""
        generation = self._generation
        events = []
        if progress := generation.take_progress():
            events.append(generation_pb2.GenerationEvent(prefill_progress=self._prefill_progress(progress)))
        parts = generation.take_prompt()
        events += [generation_pb2.GenerationEvent(prompt_delta=self._prompt_delta(part)) for part in parts]
        events += [generation_pb2.GenerationEvent(output_delta=self._delta(delta)) for delta in generation.take()]
        for output in generation.outputs:
            if output.finish is not None and output.index not in self._reported:
                self._reported.add(output.index)
                finished = self._output_finished(output)
                events.append(generation_pb2.GenerationEvent(output_finished=finished))
        if generation.has_finished:
            events.append(generation_pb2.GenerationEvent(finished=self._finished()))
        return events

    def failure(self, error: ForewordError) -> generation_pb2.GenerationEvent:
        """The last event of a generation that failed, for a stream that lives on."""
        finished = self._finished()
        finished.error.CopyFrom(status.status_of(error))
        return generation_pb2.GenerationEvent(finished=finished)

    def response(self) -> generation_service_pb2.GenerateTextResponse:
        """Everything in one message, once the generation has finished."""
        prompt = next(iter(self._generation.take_prompt()), None)  # of a unary call it is one
        contents = {delta.output_index: self._delta(delta) for delta in self._generation.take()}
        outputs = [
            generation_pb2.Output(content=contents.get(output.index), finished=self._output_finished(output))
            for output in self._generation.outputs
        ]
        return generation_service_pb2.GenerateTextResponse(
            started=self.started(),
            prompt=None if prompt is None else self._prompt_delta(prompt),
            outputs=outputs,
            finished=self._finished(),
        )

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """The summary as ASCII metadata; entries whose moment never came are left out."""
        timeline, counts = self._generation.timeline, self._generation.counts
        latency = inter_token_latency(timeline.deliveries)
        summary = {
            "request-id": self._settings.request_id,
            "ttft-us": timeline.between_us(timeline.receive_ns, timeline.first_token_ns),
            "queue-us": timeline.between_us(timeline.ready_ns, timeline.schedule_ns),
            "prefill-us": timeline.between_us(timeline.schedule_ns, timeline.sample_ns),
            "prompt-tokens": counts.num_prompt,
            "cached-prompt-tokens": counts.num_cached,
            "output-tokens": counts.num_output,
            "tokens-per-second": f"{timeline.output_tokens_per_second:.2f}",
            "itl-p50-us": latency and latency.p50_us,
            "itl-p99-us": latency and latency.p99_us,
        }
        return tuple((f"foreword-{key}", str(value)) for key, value in summary.items() if value is not None)

    def _prefill_progress(self, progress: Progress) -> generation_pb2.PrefillProgress:
        return generation_pb2.PrefillProgress(
            prompt_token_count=self._generation.counts.num_prompt,
            computed_prompt_token_count=progress.num_computed,
            cached_prompt_token_count=progress.num_cached,
            offset_micros=self._generation.timeline.offset_us(progress.instant_ns),
        )

    def _prompt_delta(self, part: PromptPart) -> generation_pb2.PromptDelta:
        tokens = part.tokens
        top_logprobs = self._top_logprobs(tokens)
        if part.first_position == 0 and top_logprobs:
            top_logprobs[0].Clear()
        return generation_pb2.PromptDelta(
            first_position=part.first_position,
            text=part.text,
            token_ids=tokens.token_ids if self._settings.return_token_ids else (),
            logprobs=tokens.logprobs,
            ranks=tokens.ranks,
            top_logprobs=top_logprobs,
            token_bytes=self._token_bytes(tokens.token_ids),
        )

    def _top_logprobs(self, tokens: TokenColumns) -> list[tokens_pb2.TopLogprobs]:
        num_top = tokens.num_top
        return [
            tokens_pb2.TopLogprobs(
                token_ids=tokens.top_token_ids[start : start + num_top],
                logprobs=tokens.top_logprobs[start : start + num_top],
                token_bytes=self._token_bytes(tokens.top_token_ids[start : start + num_top]),
            )
            for start in range(0, len(tokens.top_token_ids), num_top or 1)
        ]

    def _token_bytes(self, token_ids: Iterable[int]) -> Iterable[bytes]:
        return map(self._model.text.vocabulary.bytes_of, token_ids) if self._settings.return_token_bytes else ()

    def _delta(self, delta: Delta) -> generation_pb2.OutputDelta:
        tokens, timeline = delta.tokens, self._generation.timeline
        return generation_pb2.OutputDelta(
            output_index=delta.output_index,
            text=delta.text,
            token_ids=tokens.token_ids if self._settings.return_token_ids else (),
            logprobs=tokens.logprobs,
            ranks=tokens.ranks,
            top_logprobs=self._top_logprobs(tokens),
            token_bytes=self._token_bytes(tokens.token_ids),
            step_timings=[_step_timing(step, timeline, self._settings.draft_sources) for step in delta.steps],
        )

    def _output_finished(self, output: Output) -> generation_pb2.OutputFinished:
        finish = output.finish
        assert finish is not None
        message = generation_pb2.OutputFinished(
            output_index=output.index,
            finish_reason=_FINISH_REASONS[finish.reason],
            output_token_count=output.num_tokens,
            timing=_output_timing(output.delivery, self._generation.timeline) if self._has_timing else None,
        )
        if finish.stop_string is not None:
            message.stop_string = finish.stop_string
        if finish.stop_token_id is not None:
            message.stop_token_id = finish.stop_token_id
        return message

    def _finished(self) -> generation_pb2.GenerationFinished:
        counts = self._generation.counts
        return generation_pb2.GenerationFinished(
            usage=usage_pb2.Usage(
                prompt_token_count=counts.num_prompt,
                cached_prompt_token_count=counts.num_cached,
                output_token_count=counts.num_output,
                draft_token_count=counts.num_drafted,
                accepted_draft_token_count=counts.num_accepted,
            ),
            timing=self._timing() if self._has_timing else None,
        )

    @property
    def _has_timing(self) -> bool:
        return self._settings.timing_level >= TimingLevel.SUMMARY

    def _timing(self) -> timing_pb2.GenerationTiming:
        timeline, counts = self._generation.timeline, self._generation.counts
        between = timeline.between_us
        has_token = timeline.first_token_ns is not None
        return timing_pb2.GenerationTiming(
            receive_time=timestamp(timeline.receive_time_ns),
            tokenize_duration_micros=between(timeline.receive_ns, timeline.tokenize_ns) or 0,
            constraint_compile_duration_micros=between(timeline.tokenize_ns, timeline.compile_ns) or 0,
            queue_duration_micros=between(timeline.ready_ns, timeline.schedule_ns),
            prefill_duration_micros=between(timeline.schedule_ns, timeline.sample_ns),
            delivery_duration_micros=between(timeline.sample_ns, timeline.first_token_ns) if has_token else None,
            first_token_duration_micros=between(timeline.receive_ns, timeline.first_token_ns),
            decode_duration_micros=timeline.decode_us,
            total_duration_micros=timeline.offset_us(time.monotonic_ns()),
            inter_token_latency=_inter_token_latency(timeline.deliveries),
            output_tokens_per_second=timeline.output_tokens_per_second,
            blocked_duration_micros=timeline.blocked_ns // 1000,
            prefill_chunk_count=counts.num_prefill_chunks,
            preemption_count=counts.num_preemptions,
            recomputed_token_count=counts.num_recomputed,
            step_count=counts.num_steps,
            acceptance_histogram=_acceptance_histogram(self._generation.counts.verifications),
            device=self._device,
        )


def model_message(
    model: ServedModel, info: EngineInfo | None, draft_state: DraftState, state: model_pb2.ModelState.ValueType
) -> model_pb2.Model:
    """A served model as a message; what only the engine knows is left out while there is none."""
    message = model_pb2.Model(
        name=model.name,
        is_default=True,
        state=state,
        architecture=model.architecture,
        eos_token_ids=model.eos_token_ids,
        has_chat_template=model.has_chat_template,
        default_sampling=_sampling(DEFAULT_SAMPLING, with_seed=False),
        supported_fields=FieldMask(paths=sorted(SUPPORTED_FIELDS)),
        speculation=_speculation_status(info, draft_state),
    )
    if info is not None:
        message.dtype = info.dtype
        message.parameter_count = info.num_parameters
        message.vocabulary_size = info.vocab_size
        message.max_context_token_count = info.max_model_len
    return message


def _speculation_status(info: EngineInfo | None, draft_state: DraftState) -> speculation_pb2.SpeculationStatus:
    drafter = "" if info is None else info.drafter
    return speculation_pb2.SpeculationStatus(
        active=draft_state is DraftState.ACTIVE,
        drafter="" if draft_state is DraftState.DRAFTER_FAILED else drafter,
        available_drafters=() if info is None else info.available_drafters,
        off_reason=speculation_pb2.SpeculationOffReason.ValueType(draft_state.value),
        detail=_DRAFT_STATE_DETAILS[draft_state],
    )


def refusal(command_index: int, error: ForewordError) -> generation_pb2.GenerationEvent:
    """The answer to a command of a stream that is not carried out."""
    refused = generation_pb2.CommandRefused(command_index=command_index, error=status.status_of(error))
    return generation_pb2.GenerationEvent(refused=refused)


def _sampling(params: SamplingParams, num_outputs: int = 1, *, with_seed: bool = True) -> sampling_pb2.SamplingConfig:
    return sampling_pb2.SamplingConfig(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        typical_p=params.typical_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed if with_seed else None,
        output_count=num_outputs,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
    )


def _acceptance_histogram(verifications: Counter[tuple[int, int, int]]) -> list[int]:
    """Element k counts the verifications that accepted k drafts."""
    histogram = [0] * (1 + max((num_accepted for _, _, num_accepted in verifications), default=-1))
    for (_, _, num_accepted), count in verifications.items():
        histogram[num_accepted] += count
    return histogram


def _step_timing(step: StepShare, timeline: Timeline, draft_sources: Sequence[str]) -> timing_pb2.StepTiming:
    header = step.header
    return timing_pb2.StepTiming(
        step_id=header.step_id,
        step_kind=timing_pb2.StepKind.ValueType(step.kind),
        token_count=step.num_tokens,
        sample_offset_micros=timeline.offset_us(header.end_ns),
        emit_offset_micros=timeline.offset_us(step.emit_ns),
        step_duration_micros=(header.end_ns - header.start_ns) // 1000,
        draft_duration_micros=header.draft_duration_ns // 1000,
        verify_duration_micros=header.model_duration_ns // 1000,
        step_sequence_count=header.num_sequences,
        step_token_count=header.num_tokens,
        draft_token_count=step.num_drafted,
        accepted_draft_token_count=step.num_accepted,
        hold_duration_micros=step.hold_ns // 1000,
        coalesce_duration_micros=(step.emit_ns - step.release_ns) // 1000,
        drafter=draft_sources[step.drafter] if step.num_drafted else "",
    )


def _inter_token_latency(deliveries: Sequence[Delivery]) -> timing_pb2.InterTokenLatency | None:
    latency = inter_token_latency(deliveries)
    if latency is None:
        return None
    return timing_pb2.InterTokenLatency(p50_micros=latency.p50_us, p99_micros=latency.p99_us, max_micros=latency.max_us)


def _output_timing(delivery: Delivery, timeline: Timeline) -> timing_pb2.OutputTiming:
    return timing_pb2.OutputTiming(
        first_token_offset_micros=timeline.between_us(timeline.receive_ns, delivery.first_token_ns),
        last_token_offset_micros=timeline.between_us(timeline.receive_ns, delivery.last_token_ns),
        inter_token_latency=_inter_token_latency([delivery]),
    )
