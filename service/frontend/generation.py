"""One generation's life: from settings to tokens, text and a finish."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

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
from foreword.scheduler.step import SEQUENCE_UPDATE, FinishReason
from foreword.service.engine.client import EngineClient
from foreword.service.engine.messages import StepHeader
from foreword.service.frontend.model import ServedModel
from foreword.service.frontend.settings import Chat, GenerationSettings, TimingLevel
from foreword.service.frontend.steps import StepLedger, StepShare
from foreword.service.frontend.timeline import Timeline
from foreword.service.status import RpcDeadlineExceeded
from foreword.service.text.detokenizer import IncrementalDetokenizer, TextDelta

_log = structlog.get_logger(__name__)

DEADLINE_GRACE_S = 1.0
"""Time the engine gets to end a generation whose deadline has passed, before it is ended without the engine."""

_STOPS = (FinishReason.EOS, FinishReason.STOP_TOKEN)


class _Update(NamedTuple):
    """A record of `SEQUENCE_UPDATE` as Python numbers."""

    request_key: int
    first_scheduled_ns: int
    num_tokens: int
    num_prompt_computed: int
    num_cached: int
    num_drafted: int
    num_accepted: int
    num_steps: int
    num_prefill_chunks: int
    num_preemptions: int
    num_recomputed: int
    step_kind: int
    finish_reason: int


assert _Update._fields == SEQUENCE_UPDATE.names


@dataclass(slots=True)
class Counts:
    """Tokens and steps of a generation up to now."""

    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """How an output ended.

    Attributes:
        reason: why; `None` for a stop string.
        stop_string: the one that matched.
        stop_token_id: the end or stop token that was drawn.
    """

    reason: FinishReason | None
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What an output gained. `token_ids` and `logprobs` are parallel; `steps` is empty below `TimingLevel.STEP`."""

    text: str
    token_ids: array[int]
    logprobs: array[float]
    steps: list[StepShare]


class Generation:
    """Turns one sequence's records into deltas for one caller, and says when it is over.

    A streamed generation is paused while more than `buffer_tokens` wait to be taken, and goes on once they are. One
    that is not streamed keeps everything for a single delta.

    Attributes:
        settings: what the caller asked for.
        timeline: when things happened.
        counts: tokens and steps.
        is_admitted: the scheduler took it.
        max_output_tokens: in effect; 0 until the prompt is tokenized.
        acceptance: element k counts the verifications that accepted k drafts.
        finish: how the output ended; `None` while it goes on or when it failed.
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
        rpc_deadline_ns: int | None = None,
    ) -> None:
        """Prepare; nothing happens before `start`.

        Args:
            settings: what to generate.
            model: served by `engine`.
            engine: computes it.
            timeline: begun at receipt.
            notify: called whenever there is something to take, and at the end.
            buffer_tokens: bound of a streamed generation; `None` for one that is not streamed.
            rpc_deadline_ns: monotonic clock at which the RPC ends, when it has a deadline.
        """
        self.settings = settings
        self.timeline = timeline
        self.counts = Counts()
        self.is_admitted = False
        self.max_output_tokens = 0
        self.acceptance: list[int] = []
        self.finish: Finish | None = None
        self.error: ForewordError | None = None
        self._model = model
        self._engine = engine
        self._notify = notify
        self._buffer_tokens = buffer_tokens
        self._rpc_deadline_ns = rpc_deadline_ns
        self._request_key = engine.new_request_key()
        self._cancel_requested = False
        self._paused_ns = 0
        self._watchdog: asyncio.TimerHandle | None = None
        self._eos_token_ids = () if settings.ignore_eos else model.eos_token_ids
        self._detokenizer = IncrementalDetokenizer(
            model.text.vocabulary,
            settings.stop_strings,
            include_stop=settings.include_stop,
            min_output_tokens=settings.min_output_tokens,
            stop_token_ids={*self._eos_token_ids, *settings.stop_token_ids},
        )
        self._held_ids, self._held_logprobs = array("i"), array("f")
        self._text: list[str] = []
        self._ids, self._logprobs = array("i"), array("f")
        self._num_waiting = 0
        self._ledger = StepLedger() if settings.timing_level is TimingLevel.STEP else None

    @property
    def is_over(self) -> bool:
        """True once it has finished or failed; what is left can still be taken."""
        return self.finish is not None or self.error is not None

    @property
    def num_waiting(self) -> int:
        """Tokens of a streamed generation that wait to be taken."""
        return self._num_waiting

    @property
    def outcome(self) -> str:
        """One word for the log: why it ended, `CANCELLED` also when its caller went away."""
        if self.error is not None:
            return self.error.reason
        if self.finish is None:
            return FinishReason.CANCELLED.name
        return "STOP_STRING" if self.finish.reason is None else self.finish.reason.name

    async def start(self) -> None:
        """Tokenize the prompt and hand it to the engine; returns when the scheduler has admitted it.

        Raises:
            InvalidField: the prompt or the constraint cannot be used.
            ContextLengthExceeded, QueueFull, DeadlineInfeasible, EngineUnavailable: it was not admitted.
        """
        try:
            prompt_token_ids = await self._tokenize()
            self.timeline.tokenize_ns = time.monotonic_ns()
            self.counts.num_prompt = len(prompt_token_ids)
            request = self._request(prompt_token_ids)
            if self.settings.constraint is not None:
                grammar = await self._model.text.compile_constraint(self.settings.constraint)
                request = replace(request, grammar=grammar)
                self.timeline.compile_ns = time.monotonic_ns()
            if self.error is not None:
                raise self.error
            if self._cancel_requested:
                self._end(Finish(FinishReason.CANCELLED))
            else:
                await self._submit(request)
            self.is_admitted = True
        except ForewordError as error:
            self.error = error
            raise

    def cancel(self) -> None:
        """End it early; it finishes with what there is. No effect once it is over."""
        self._cancel_requested = True
        if not self.is_over:
            self._engine.cancel(self._request_key)

    def fail(self, error: ForewordError) -> None:
        """End it with an error, on the engine's side too. No effect once it is over."""
        if not self.is_over:
            self._engine.forget(self._request_key)
            self.on_failure(error)

    def abandon(self, error: ForewordError) -> None:
        """End it with an error, also when it was over but its end did not reach the caller."""
        self.fail(error)
        self.error = error

    def close(self) -> None:
        """Free what it holds in the engine, when nobody waits for the rest."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        if not self.is_over:
            self._engine.forget(self._request_key)

    def take(self) -> Delta | None:
        """What came since the last time, to be handed to gRPC now; `None` when nothing did."""
        now_ns = time.monotonic_ns()
        if self._buffer_tokens is not None:
            self._hand_over(now_ns)
            self._resume(now_ns)
        if not (self._text or self._ids):
            return None
        steps = self._ledger.take() if self._ledger else []
        delta = Delta("".join(self._text), self._ids, self._logprobs, steps)
        self._text, self._ids, self._logprobs = [], array("i"), array("f")
        return delta

    def on_step(
        self, header: StepHeader, update: np.void, token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]
    ) -> None:
        """Take one record with its tokens."""
        try:
            self._advance(header, _Update._make(update.item()), token_ids, logprobs)
        except Exception:
            _log.error("generation failed", request_id=self.settings.request_id, exc_info=True)
            self.fail(EngineFault("internal error; the server's log has the details"))

    def on_failure(self, error: ForewordError) -> None:
        """Take the news that the engine ended it."""
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
            self._end(Finish(FinishReason.DEADLINE))

    def _request(self, prompt_token_ids: npt.NDArray[np.int32]) -> Request:
        settings = self.settings
        self.max_output_tokens = self._room_for_output(len(prompt_token_ids))
        if settings.min_output_tokens > self.max_output_tokens:
            raise InvalidField(
                "stopping.min_output_token_count",
                f"must be at most {self.max_output_tokens}, which is what the context leaves room for, "
                f"got {settings.min_output_tokens}",
            )
        deadline_ns = self.timeline.receive_ns + settings.max_duration_ns
        if self._rpc_deadline_ns is not None:
            deadline_ns = min(deadline_ns, self._rpc_deadline_ns)
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
            deadline_ns=deadline_ns,
            priority=settings.priority,
            cache_salt=settings.cache_salt,
            bypass_prefix_cache=settings.bypass_prefix_cache,
            want_logprobs=settings.logprobs,
            max_draft_tokens=settings.max_draft_tokens,
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
        header: StepHeader,
        update: _Update,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
    ) -> None:
        now_ns = time.monotonic_ns()
        self._count(header, update)
        reason = FinishReason(update.finish_reason)
        if update.num_tokens:
            ids = token_ids.tolist()
            self._held_ids.extend(ids)
            if self.settings.logprobs:
                self._held_logprobs.frombytes(logprobs.tobytes())
            if self._ledger:
                self._ledger.add(header, update.step_kind, update.num_drafted, update.num_accepted, len(ids), now_ns)
            self._release(self._detokenizer.push(ids), now_ns)
        if self._detokenizer.matched_stop is not None:
            if not reason:
                self._engine.forget(self._request_key)
            self._end(Finish(None, stop_string=self._detokenizer.matched_stop))
        elif reason:
            self._release(self._detokenizer.finish(drop_last=reason in _STOPS), now_ns)
            self._conclude(reason, int(token_ids[-1]) if reason in _STOPS else None)
        elif self._num_waiting or self._text:
            self._pause(now_ns)
            self._notify(self)

    def _count(self, header: StepHeader, update: _Update) -> None:
        timeline, counts = self.timeline, self.counts
        if timeline.schedule_ns is None and update.first_scheduled_ns:
            timeline.schedule_ns = update.first_scheduled_ns
        if timeline.sample_ns is None and update.num_tokens:
            timeline.sample_ns = header.end_ns
        counts.num_cached = max(counts.num_cached, update.num_cached)
        counts.num_drafted += update.num_drafted
        counts.num_accepted += update.num_accepted
        counts.num_steps = update.num_steps
        counts.num_prefill_chunks = update.num_prefill_chunks
        counts.num_preemptions = update.num_preemptions
        counts.num_recomputed = update.num_recomputed
        if update.num_drafted:
            self.acceptance.extend([0] * (update.num_accepted + 1 - len(self.acceptance)))
            self.acceptance[update.num_accepted] += 1

    def _release(self, released: TextDelta, now_ns: int) -> None:
        """Move tokens and their text from what is held back to what waits to be taken."""
        num_tokens = released.num_tokens
        if released.text:
            self._text.append(released.text)
        if not num_tokens:
            return
        self._ids.extend(self._held_ids[:num_tokens])
        del self._held_ids[:num_tokens]
        self._logprobs.extend(self._held_logprobs[:num_tokens])
        del self._held_logprobs[:num_tokens]
        self.counts.num_output += num_tokens
        self._num_waiting += num_tokens
        if self._ledger:
            self._ledger.release(num_tokens, now_ns)
        if self._buffer_tokens is None:
            self._hand_over(now_ns)

    def _hand_over(self, now_ns: int) -> None:
        self.timeline.hand_over(self._num_waiting, now_ns)
        self._num_waiting = 0
        if self._ledger:
            self._ledger.hand_over(now_ns)

    def _pause(self, now_ns: int) -> None:
        if self._buffer_tokens is not None and self._num_waiting > self._buffer_tokens and not self._paused_ns:
            self._engine.pause(self._request_key)
            self._paused_ns = now_ns

    def _resume(self, now_ns: int) -> None:
        if self._paused_ns:
            self.timeline.blocked_ns += now_ns - self._paused_ns
            self._paused_ns = 0
            if not self.is_over:
                self._engine.resume(self._request_key)

    def _conclude(self, reason: FinishReason, stop_token_id: int | None) -> None:
        """Turn the scheduler's reason into a finish or an error.

        A length is what the caller asked for; without one, what there is room for in the context.
        """
        if reason in (FinishReason.LENGTH, FinishReason.CONTEXT_LIMIT):
            has_length = self.settings.max_output_tokens is not None
            reason = FinishReason.LENGTH if has_length else FinishReason.CONTEXT_LIMIT
        if reason is FinishReason.FAILED:
            self.on_failure(EngineFault("the model gave no usable result for this generation"))
        elif reason is FinishReason.CONSTRAINT_STUCK and self.settings.constraint is not None:
            self.on_failure(
                InvalidField(
                    self.settings.constraint.path,
                    f"after {self.counts.num_output} tokens it allows none that the other settings allow, "
                    "or has become too complex to be followed",
                )
            )
        elif reason is FinishReason.DEADLINE and self._is_rpc_deadline:
            self.on_failure(RpcDeadlineExceeded("the deadline of the RPC has passed"))
        else:
            self._end(Finish(reason, stop_token_id=stop_token_id))

    def _overrun(self) -> None:
        """End it, as its deadline has passed and the engine is silent. No effect once it is over."""
        if not self.is_over:
            self._engine.forget(self._request_key)
            self._release(self._detokenizer.finish(), time.monotonic_ns())
            self._conclude(FinishReason.DEADLINE, None)

    @property
    def _is_rpc_deadline(self) -> bool:
        own_ns = self.timeline.receive_ns + self.settings.max_duration_ns
        return self._rpc_deadline_ns is not None and self._rpc_deadline_ns <= own_ns

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        self._notify(self)
