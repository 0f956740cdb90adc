"""One generation's life: from settings to tokens, text and a finish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import structlog

from foreword.scheduler.errors import (
    ContextLengthExceeded,
    DeadlineInfeasible,
    EngineFault,
    EngineUnavailable,
    ForewordError,
    InvalidField,
)
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.step import FinishReason, TokenScores
from foreword.service.engine.client import EngineClient
from foreword.service.engine.messages import StepHeader
from foreword.service.frontend.counts import Counts
from foreword.service.frontend.model import ServedModel
from foreword.service.frontend.output import Delta, Finish, Output, Record
from foreword.service.frontend.prefill_progress import PrefillProgress, Progress
from foreword.service.frontend.prompt_echo import PromptEcho, PromptPart
from foreword.service.frontend.response_size import (
    check_response_size,
    least_response_bytes,
    max_packed_bytes,
    max_part_tokens,
)
from foreword.service.frontend.settings import Chat, GenerationSettings
from foreword.service.frontend.timeline import Timeline
from foreword.service.frontend.validation import check_scored_prompt
from foreword.service.status import RpcDeadlineExceeded
from foreword.service.tenants import cache_scope
from foreword.service.text.constraint import Constraint

_log = structlog.get_logger(__name__)

DEADLINE_GRACE_S = 1.0
"""Time the engine gets to end a generation whose deadline has passed, before it is ended without the engine."""

_STOPS = (FinishReason.EOS, FinishReason.STOP_TOKEN)


class Generation:
    """Turns the records of its outputs' sequences into deltas for one caller, and says when it is over.

    A streamed generation is paused while more than `buffer_tokens` wait to be taken, and goes on once they are. One
    that is not streamed keeps everything for a single delta.

    Attributes:
        settings: what the caller asked for.
        tenant: whose it is; empty for nobody's in particular.
        timeline: when things happened.
        counts: tokens and steps.
        is_admitted: the scheduler took it.
        max_output_tokens: in effect; 0 until the prompt is tokenized.
        outputs: by their index.
        error: why the generation failed; `None` while it has not.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        model: ServedModel,
        engine: EngineClient,
        timeline: Timeline,
        notify: Callable[[Generation], None],
        *,
        buffer_tokens: int | None,
        max_response_bytes: int,
        rpc_deadline_ns: int | None = None,
        tenant: str = "",
    ) -> None:
        """Prepare; nothing happens before `start`.

        Args:
            settings: what to generate.
            model: served by `engine`.
            engine: computes it.
            timeline: begun at receipt.
            notify: called whenever there is something to take, and at the end.
            buffer_tokens: bound of a streamed generation; `None` for one that is not streamed.
            max_response_bytes: that a message may have.
            rpc_deadline_ns: monotonic clock at which the RPC ends, when it has a deadline.
            tenant: that the RPC names.
        """
        self.settings = settings
        self.tenant = tenant
        self.timeline = timeline
        self.counts = Counts()
        self.is_admitted = False
        self.max_output_tokens = 0
        self.error: ForewordError | None = None
        self._model = model
        self._engine = engine
        self._notify = notify
        self._buffer_tokens = buffer_tokens
        self._max_response_bytes = max_response_bytes
        self._max_part_tokens = None
        if buffer_tokens is not None:
            longest = model.text.vocabulary.max_token_bytes
            self._max_part_tokens = max_part_tokens(settings, longest, max_packed_bytes(max_response_bytes))
        self._rpc_deadline_ns = rpc_deadline_ns
        self._request_key = engine.new_request_key(settings.num_outputs)
        self._cancel_requested = False
        self._compilation: asyncio.Task[str] | None = None
        self._prompt: PromptEcho | None = None
        self._progress = PrefillProgress() if settings.prefill_progress else None
        self._paused_ns = 0
        self._watchdog: asyncio.TimerHandle | None = None
        self._eos_token_ids = () if settings.ignore_eos else model.eos_token_ids
        self.outputs = tuple(
            Output(
                index,
                self._request_key + index,
                settings,
                model.text.vocabulary,
                {*self._eos_token_ids, *settings.stop_token_ids},
                max_part_tokens=self._max_part_tokens,
                notify=lambda: notify(self),
            )
            for index in range(settings.num_outputs)
        )
        timeline.deliveries = [output.delivery for output in self.outputs]

    @property
    def is_over(self) -> bool:
        """True once it has finished or failed; what is left can still be taken."""
        return self.error is not None or self.has_finished

    @property
    def has_finished(self) -> bool:
        """True once all of its outputs have ended; false for good when it failed before."""
        return all(output.finish is not None for output in self.outputs)

    @property
    def num_waiting(self) -> int:
        """Tokens of a streamed generation that wait to be taken."""
        return sum(output.num_waiting for output in self.outputs)

    @property
    def outcomes(self) -> list[str]:
        """Why each output ended, for the log: `CANCELLED` also when its caller went away."""
        if self.error is not None:
            return [self.error.reason] * len(self.outputs)
        return [(output.finish or Finish(FinishReason.CANCELLED)).name for output in self.outputs]

    @property
    def is_paused(self) -> bool:
        """Not scheduled because its client does not read."""
        return self._paused_ns != 0

    @property
    def deadline_ns(self) -> int:
        """Monotonic clock at which it ends at the latest."""
        own_ns = self.timeline.receive_ns + self.settings.max_duration_ns
        return own_ns if self._rpc_deadline_ns is None else min(own_ns, self._rpc_deadline_ns)

    async def start(self) -> None:
        """Tokenize the prompt and hand it to the engine; returns when the scheduler has admitted it.

        Raises:
            InvalidField: the prompt or the constraint cannot be used.
            ResponseTooLarge: the answer would not fit one message.
            ContextLengthExceeded, QueueFull, DeadlineInfeasible, EngineUnavailable: it was not admitted.
        """
        try:
            prompt_token_ids = await self._tokenize()
            self.timeline.tokenize_ns = time.monotonic_ns()
            self.counts.num_prompt = len(prompt_token_ids)
            request = self._request(prompt_token_ids)
            if self.settings.echo_prompt or self.settings.prompt_logprobs:
                vocabulary = self._model.text.vocabulary
                self._prompt = PromptEcho(self.settings, vocabulary, prompt_token_ids, self._max_part_tokens)
            if self.settings.constraint is not None:
                request = await self._constrain(request, self.settings.constraint)
                self.timeline.compile_ns = time.monotonic_ns()
            if self.error is not None:
                raise self.error
            if self._cancel_requested:
                self._end_all(Finish(FinishReason.CANCELLED))
            elif not self.is_over:
                await self._submit(request)
            self.is_admitted = True
        except ForewordError as error:
            self.error = error
            raise

    def cancel(self) -> None:
        """End it early; it finishes with what there is. No effect once it is over."""
        self._cancel_requested = True
        if self._compilation is not None:
            self._compilation.cancel()
        if not self.is_over:
            for output in self._active_outputs:
                self._engine.cancel(output.request_key)

    def fail(self, error: ForewordError) -> None:
        """End it with an error, on the engine's side too. No effect once it is over."""
        if not self.is_over:
            self._forget()
            self.on_failure(error)

    def abandon(self, error: ForewordError) -> None:
        """End it with an error, also when it was over but its end did not reach the caller."""
        self.fail(error)
        self.error = error

    def close(self) -> None:
        """Free what it holds in the engine, when nobody waits for the rest."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        for output in self.outputs:
            output.coalescer.close()
        if not self.is_over:
            self._forget()

    def take(self) -> list[Delta]:
        """What the outputs gained since the last time, to be handed to gRPC now."""
        now_ns = time.monotonic_ns()
        due = [output for output in self.outputs if self._is_due(output)]
        if self._buffer_tokens is not None:
            for output in due:
                output.hand_over(now_ns)
            self._resume(now_ns)
        return [delta for output in due for delta in output.take()]

    def take_prompt(self) -> list[PromptPart]:
        """The prompt, or what came of it since the last time, if it is to be returned."""
        return self._prompt.take() if self._prompt else []

    def take_progress(self) -> Progress | None:
        """How far the prompt is computed, if that is wanted and has changed since the last time."""
        return self._progress.take() if self._progress else None

    def on_step(
        self,
        header: StepHeader,
        update: np.void,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        scores: TokenScores | None = None,
        prompt_scores: TokenScores | None = None,
    ) -> None:
        """Take one record with its tokens."""
        try:
            record = Record._make(update.item())
            if record.num_scored and prompt_scores is not None and self._prompt is not None:
                self._prompt.push(prompt_scores)
                self._notify(self)
            output = self.outputs[record.request_key - self._request_key]
            self._advance(output, header, record, token_ids, logprobs, scores)
        except Exception:
            _log.error("generation failed", request_id=self.settings.request_id, exc_info=True)
            self.fail(EngineFault("internal error; the server's log has the details"))

    def on_failure(self, error: ForewordError) -> None:
        """Take the news that the engine ended it. No effect once it is over: the engine says so for each output."""
        if self.is_over:
            return
        if isinstance(error, EngineFault):
            error = EngineFault(error.message, **{**error.metadata, "request_id": self.settings.request_id})
        self.error = error
        self._notify(self)

    async def _tokenize(self) -> npt.NDArray[np.int32]:
        prompt, text = self.settings.prompt, self._model.text
        if isinstance(prompt, str):
            token_ids = await text.encode(prompt)
        elif isinstance(prompt, Chat):
            token_ids = (await text.encode_chat(prompt.messages, prompt.add_generation_prompt)).token_ids
        else:
            token_ids = prompt
        if not len(token_ids):
            raise InvalidField("prompt", "has no tokens")
        return token_ids

    async def _constrain(self, request: Request, constraint: Constraint) -> Request:
        """Compile a constraint for a request, unless a cancel or the time limit comes first."""
        self._compilation = asyncio.create_task(self._model.text.compile_constraint(constraint, self.tenant))
        alarm = asyncio.get_running_loop().call_at(self.deadline_ns / 1e9, self._compilation.cancel)
        try:
            return replace(request, grammar=await self._compilation)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the call itself is cancelled
                raise
        finally:
            alarm.cancel()
            self._compilation = None
        if not self._cancel_requested:
            if self._is_rpc_deadline:
                raise RpcDeadlineExceeded("the deadline of the RPC has passed")
            self._end_all(Finish(FinishReason.DEADLINE))
        return request

    async def _submit(self, request: Request) -> None:
        """Hand it to the engine, and see to it that it ends even if the engine does not answer."""
        end_s = request.deadline_ns / 1e9 + DEADLINE_GRACE_S  # the loop's clock is the monotonic one
        self._watchdog = asyncio.get_running_loop().call_at(end_s, self._overrun)
        try:
            async with asyncio.timeout_at(end_s):
                await self._engine.submit(request, self)
        except TimeoutError:
            self._overrun()
            if self.error is not None:
                raise self.error from None
        except DeadlineInfeasible:
            if self._is_rpc_deadline:
                raise
            self._end_all(Finish(FinishReason.DEADLINE))

    def _request(self, prompt_token_ids: npt.NDArray[np.int32]) -> Request:
        settings = self.settings
        self.max_output_tokens = self._room_for_output(len(prompt_token_ids))
        if settings.min_output_tokens > self.max_output_tokens:
            raise InvalidField(
                "stopping.min_output_token_count",
                f"must be at most {self.max_output_tokens}, which is what the context leaves room for, "
                f"got {settings.min_output_tokens}",
            )
        if settings.prompt_logprobs:
            check_scored_prompt("output.prompt_logprobs", len(prompt_token_ids))
        if self._buffer_tokens is None:
            least = least_response_bytes(settings, len(prompt_token_ids), self.max_output_tokens)
            check_response_size(least, self._max_response_bytes, settings)
        return Request(
            request_key=self._request_key,
            prompt_token_ids=prompt_token_ids,
            stopping=StoppingParams(
                max_output_tokens=self.max_output_tokens,
                min_output_tokens=settings.min_output_tokens,
                eos_token_ids=self._eos_token_ids,
                stop_token_ids=settings.stop_token_ids,
            ),
            sampling=settings.sampling,
            arrival_ns=self.timeline.receive_ns,
            deadline_ns=self.deadline_ns,
            priority=settings.priority,
            tenant=self.tenant,
            cache_salt=cache_scope(self.tenant, settings.cache_salt),
            bypass_prefix_cache=settings.bypass_prefix_cache,
            want_logprobs=settings.logprobs,
            want_ranks=settings.ranks,
            num_top_logprobs=settings.num_top_logprobs,
            want_prompt_logprobs=settings.prompt_logprobs,
            max_draft_tokens=settings.max_draft_tokens,
            acceptance=settings.acceptance,
            drafter=settings.drafter,
            num_outputs=settings.num_outputs,
        )

    def _room_for_output(self, num_prompt: int) -> int:
        """What the caller asked for, or all there is room for."""
        if self.settings.max_output_tokens is not None:
            return self.settings.max_output_tokens
        info = self._engine.info
        if info is None:
            raise EngineUnavailable("the engine is loading")
        room = min(info.max_model_len, info.num_blocks * info.block_size) - num_prompt
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens and leaves no room for output in a context of "
                f"{info.max_model_len}",
                prompt_token_count=num_prompt,
                max_context_token_count=info.max_model_len,
            )
        return room

    def _advance(
        self,
        output: Output,
        header: StepHeader,
        record: Record,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        scores: TokenScores | None,
    ) -> None:
        now_ns = time.monotonic_ns()
        self._count(output, header, record)
        output.push(header, record, token_ids, logprobs, scores, now_ns)
        reason = FinishReason(record.finish_reason)
        if reason and output.matched_stop is None:
            output.flush(now_ns, drop_last=reason in _STOPS)
        self._count_output()
        if output.matched_stop is not None:
            if not reason:
                self._engine.forget(output.request_key)
            self._end(output, Finish(None, stop_string=output.matched_stop))
        elif reason:
            self._conclude(output, reason, int(token_ids[-1]) if reason in _STOPS else None)
        elif output.has_news:
            self._pause(now_ns)
            if self._is_due(output):
                self._notify(self)

    def _count(self, output: Output, header: StepHeader, record: Record) -> None:
        """Add what a record brings to what the last one of its output said."""
        timeline, counts = self.timeline, self.counts
        if timeline.schedule_ns is None and record.first_scheduled_ns:
            timeline.schedule_ns = record.first_scheduled_ns
        if timeline.sample_ns is None and record.num_tokens:
            timeline.sample_ns = header.end_ns
        if output.index == 0:  # the others find their prompt in the cache because this one computed it
            counts.num_prompt_computed = record.num_prompt_computed
            counts.num_cached = max(counts.num_cached, record.num_cached)
            if self._progress and self._progress.note(
                Progress(record.num_prompt_computed, counts.num_cached, header.end_ns)
            ):
                self._notify(self)
        counts.add(header, record, output.record)

    def _count_output(self) -> None:
        self.counts.num_output = sum(output.num_tokens for output in self.outputs)

    def _is_due(self, output: Output) -> bool:
        """Its tokens wait for no others."""
        return output.coalescer.is_due or output.finish is not None or self.is_paused or self.error is not None

    def _pause(self, now_ns: int) -> None:
        if self._buffer_tokens is not None and self.num_waiting > self._buffer_tokens and not self._paused_ns:
            for output in self._active_outputs:
                self._engine.pause(output.request_key)
            self._paused_ns = now_ns

    def _resume(self, now_ns: int) -> None:
        if self._paused_ns:
            self.timeline.blocked_ns += now_ns - self._paused_ns
            self._paused_ns = 0
            if self.error is None:
                for output in self._active_outputs:
                    self._engine.resume(output.request_key)

    def _forget(self) -> None:
        """Free what its outputs hold in the engine."""
        for output in self._active_outputs:
            self._engine.forget(output.request_key)

    @property
    def _active_outputs(self) -> list[Output]:
        return [output for output in self.outputs if output.finish is None]

    def _conclude(self, output: Output, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """Turn the scheduler's reason into a finish of the output or an error of the whole generation.

        A length is what the caller asked for; without one, what there is room for in the context.
        """
        if reason in (FinishReason.LENGTH, FinishReason.CONTEXT_LIMIT):
            has_length = self.settings.max_output_tokens is not None
            reason = FinishReason.LENGTH if has_length else FinishReason.CONTEXT_LIMIT
        if reason is FinishReason.FAILED:
            self.fail(EngineFault("the model gave no usable result for this generation"))
        elif reason is FinishReason.CONSTRAINT_STUCK and self.settings.constraint is not None:
            self.fail(
                InvalidField(
                    self.settings.constraint.path,
                    f"after {output.num_tokens} tokens it allows none that the other settings allow, "
                    "or has become too complex to be followed",
                )
            )
        elif reason is FinishReason.DEADLINE and self._is_rpc_deadline:
            self.fail(RpcDeadlineExceeded("the deadline of the RPC has passed"))
        else:
            self._end(output, Finish(reason, stop_token_id=stop_token_id))

    def _overrun(self) -> None:
        """End it, as its deadline has passed and the engine is silent. No effect once it is over."""
        if self.is_over:
            return
        self._forget()
        now_ns = time.monotonic_ns()
        for output in self._active_outputs:
            output.flush(now_ns)
            self._count_output()
            self._conclude(output, FinishReason.DEADLINE)

    @property
    def _is_rpc_deadline(self) -> bool:
        return self._rpc_deadline_ns == self.deadline_ns

    def _end_all(self, finish: Finish) -> None:
        for output in self.outputs:
            self._end(output, finish)

    def _end(self, output: Output, finish: Finish) -> None:
        output.finish = finish
        self._notify(self)
