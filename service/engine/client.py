"""A front end's side of the channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import numpy as np
import structlog
import zmq

from foreword.scheduler.errors import DuplicateRequest, EngineUnavailable, ForewordError
from foreword.scheduler.request import Request
from foreword.scheduler.step import DraftState, SchedulerLoad
from foreword.service.engine.codec import Codec
from foreword.service.engine.messages import (
    FRONT_END_SHIFT,
    Admitted,
    Cancel,
    EngineInfo,
    GenerationSink,
    Hello,
    MalformedMessage,
    Message,
    Pause,
    Refused,
    Resume,
    StepHeader,
    StepReport,
    Submit,
    Welcome,
    front_end_identity,
)

_WELCOME_TIMEOUT_S = 30.0

logger = structlog.get_logger("foreword.engine")


class EngineClient:
    """Hands requests to the engine process and its news to sinks; all methods belong to the event loop's thread.

    One client outlives many engines: a supervisor connects it to each and disconnects it when that one ends.

    Attributes:
        info: facts about the engine; None while none has been ready yet.
        ready: True while an engine takes requests.
        load: latest gauges; zero while no engine is ready.
        num_received: messages from engines up to now.
        draft_state: whether drafts are proposed at present, and why not.
        step_listener: called with the facts about each step, before the sinks; must neither block nor raise.
    """

    def __init__(self, front_end: int = 0) -> None:
        """Start without an engine.

        Args:
            front_end: index of this front end, unique among those of an engine.
        """
        self.info: EngineInfo | None = None
        self.ready = False
        self.load = _NO_LOAD
        self.num_received = 0
        self.draft_state = DraftState.NO_DRAFTER
        self.step_listener: Callable[[StepHeader], None] = lambda header: None
        self._front_end = front_end
        self._next_key = 1
        self._codec = Codec()
        self._sinks: dict[int, GenerationSink] = {}
        self._admissions: dict[int, asyncio.Future[None]] = {}
        self._welcome: asyncio.Future[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._unavailable = "the engine is loading"

    def new_request_key(self, num_outputs: int = 1) -> int:
        """A key that no request of this server had, followed by one for each further output."""
        request_key = self._front_end << FRONT_END_SHIFT | self._next_key
        self._next_key += num_outputs
        return request_key

    async def connect(self, address: str) -> None:
        """Meet an engine that serves at a ZeroMQ endpoint; `ready` once this returns.

        Raises:
            EngineUnavailable: it does not answer.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, front_end_identity(self._front_end))
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.connect(address)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._receive)
        self._welcome = loop.create_future()
        try:
            self._send(Hello())
            async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                await self._welcome
        except BaseException as error:
            failure = EngineUnavailable(f"no answer from the engine within {_WELCOME_TIMEOUT_S:.0f} s")
            self.disconnect(failure)
            if isinstance(error, TimeoutError):
                raise failure from None
            raise

    def disconnect(self, error: ForewordError) -> None:
        """Take what has arrived, then end every generation with `error`; later submits fail with its message."""
        if self._context is None or self._socket is None:
            return
        self._receive()
        self.ready = False
        self.load = _NO_LOAD
        self._unavailable = error.message
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()
        self._socket = self._context = None
        self.fail({*self._sinks, *self._admissions}, error)

    def fail(self, request_keys: Iterable[int], error: ForewordError) -> None:
        """End generations without a last update."""
        for request_key in request_keys:
            admission = self._admissions.get(request_key)
            sink = self._sinks.pop(request_key, None)
            if admission is not None and not admission.done():
                admission.set_exception(error)
            elif sink is not None:
                try:
                    sink.on_failure(error)
                except Exception as fault:
                    self._log_fault(request_key, fault)

    async def submit(self, request: Request, sink: GenerationSink) -> None:
        """Hand over a request; returns once the scheduler has admitted it.

        The sink takes the news of all outputs, and may be called before the caller runs again. If the caller is
        cancelled while it waits, so is the request.

        Raises:
            ContextLengthExceeded, QueueFull, DeadlineInfeasible, DuplicateRequest, InvalidField: the engine refused.
            EngineUnavailable: no engine is ready.
            EngineFault: the engine failed; it may have admitted the request before.
        """
        if not self.ready:
            raise EngineUnavailable(self._unavailable)
        request_key = request.request_key
        if not self._sinks.keys().isdisjoint(request.output_keys):
            raise DuplicateRequest(f"request key {request_key} is active")
        admission = asyncio.get_running_loop().create_future()
        self._send(Submit(request))
        self._sinks |= dict.fromkeys(request.output_keys, sink)
        self._admissions[request_key] = admission
        try:
            await admission
        except asyncio.CancelledError:
            for key in request.output_keys:
                self.forget(key)
            raise
        except ForewordError:
            for key in request.output_keys:
                self._sinks.pop(key, None)
            raise
        finally:
            del self._admissions[request_key]

    def cancel(self, request_key: int) -> None:
        """End a generation; its sink gets a last update with `FinishReason.CANCELLED`. No-op for an unknown key."""
        self._send_about(request_key, Cancel(request_key))

    def pause(self, request_key: int) -> None:
        """Stop scheduling a generation until `resume`. No-op for an unknown key."""
        self._send_about(request_key, Pause(request_key))
        self.ping()  # where no step follows, the answer alone tells of the pause

    def resume(self, request_key: int) -> None:
        """Undo `pause`. No-op for an unknown key."""
        self._send_about(request_key, Resume(request_key))

    def forget(self, request_key: int) -> None:
        """Cancel a generation and never call its sink again. No-op for an unknown key."""
        self.cancel(request_key)
        self._sinks.pop(request_key, None)

    def ping(self) -> None:
        """Make the engine say something; it answers between two steps."""
        if self.ready:
            self._send(Hello())

    def _send_about(self, request_key: int, message: Message) -> None:
        if request_key in self._sinks:
            self._send(message)

    def _send(self, message: Message) -> None:
        """Queue a message; there is no high-water mark, so this does not block."""
        if self._socket is None:
            return
        self._socket.send_multipart(self._codec.encode(message), zmq.NOBLOCK)
        # ZeroMQ's descriptor signals a change of state once; sending may have consumed the signal of an arrival.
        asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        """Handle every message that has arrived."""
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.num_received += 1
            try:
                self._handle(self._codec.decode(frames))
            except MalformedMessage as error:
                logger.warning("malformed message dropped", error=str(error))

    def _handle(self, message: Message) -> None:
        match message:
            case StepReport():
                self._dispatch(message)
            case Admitted(request_key):
                admission = self._admissions.get(request_key)
                if admission is not None and not admission.done():
                    admission.set_result(None)
            case Refused(request_key, error):
                admission = self._admissions.get(request_key)
                if admission is not None and not admission.done():
                    admission.set_exception(error.to_error())
            case Welcome(info, load):
                if not self.ready:
                    self.draft_state = DraftState.NO_GAIN if info.drafter else DraftState.DISABLED
                self.info, self.load, self.ready = info, load, True
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_result(None)
            case _:
                raise MalformedMessage(f"{type(message).__name__} is not for a front end")

    def _dispatch(self, report: StepReport) -> None:
        """Give each sequence's news to its sink; news of sequences that were forgotten are dropped."""
        self.load = report.header.load
        self.draft_state = report.header.draft_state
        self.step_listener(report.header)
        sequences = report.sequences
        scores, prompt_scores = report.scores, report.prompt_scores
        begin = prompt_begin = 0
        for index, (request_key, end, prompt_end, finish_reason) in enumerate(
            zip(
                sequences["request_key"].tolist(),
                np.cumsum(sequences["num_tokens"]).tolist(),
                np.cumsum(sequences["num_scored"]).tolist(),
                sequences["finish_reason"].tolist(),
                strict=True,
            )
        ):
            sink = self._sinks.pop(request_key, None) if finish_reason else self._sinks.get(request_key)
            if sink is not None:
                try:
                    sink.on_step(
                        report.header,
                        sequences[index],
                        report.token_ids[begin:end],
                        report.logprobs[begin:end],
                        scores and scores.take(slice(begin, end)),
                        prompt_scores and prompt_scores.take(slice(prompt_begin, prompt_end)),
                    )
                except Exception as fault:
                    self._log_fault(request_key, fault)
                    self.forget(request_key)
            begin, prompt_begin = end, prompt_end

    def _log_fault(self, request_key: int, fault: Exception) -> None:
        logger.error("sink failed", request_key=request_key, error=type(fault).__name__)


_NO_LOAD = SchedulerLoad(
    num_running=0,
    num_waiting=0,
    num_waiting_tokens=0,
    num_paused=0,
    num_free_blocks=0,
    num_cached_blocks=0,
    num_blocks=0,
)
