"""The engine's side of the channel: takes messages between steps, publishes what each step brought."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import structlog
import zmq

from foreword.scheduler.errors import ForewordError
from foreword.scheduler.request import Request
from foreword.service.engine.codec import Codec
from foreword.service.engine.engine import Engine
from foreword.service.engine.messages import (
    FRONT_END_SHIFT,
    Admitted,
    Cancel,
    ErrorRecord,
    Hello,
    MalformedMessage,
    Message,
    Pause,
    Refused,
    Resume,
    StepReport,
    Submit,
    Welcome,
    front_end_identity,
    front_end_index,
)

_BLOCKED_RETRY_MS = 10

logger = structlog.get_logger("foreword.engine")


class EngineLoop:
    """Steps an engine for the front ends that are connected to an address, until its lifeline ends.

    The loop never waits for a front end. Messages queue without a high-water mark, for a lost message would be lost
    tokens; what can queue is bounded by the work the scheduler admitted. A front end that is gone is noticed by the
    next send to it, and its sequences are cancelled.
    """

    def __init__(self, engine: Engine, address: str, lifeline: int) -> None:
        """Bind.

        Args:
            engine: to be stepped.
            address: ZeroMQ endpoint.
            lifeline: file descriptor that becomes readable when the loop is to end.
        """
        self._engine = engine
        self._codec = Codec()
        self._lifeline = lifeline
        self._active: dict[int, set[int]] = {}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self._router.set(zmq.SNDHWM, 0)
        self._router.set(zmq.RCVHWM, 0)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(lifeline, zmq.POLLIN)

    def run(self) -> None:
        """Serve until the lifeline ends.

        Raises:
            StepFault: a step raised an exception.
        """
        timeout_ms: int | None = 0
        while True:
            ready = dict(self._poller.poll(timeout_ms))
            if self._lifeline in ready:
                return
            if self._router in ready:
                self._drain_inbox()
            report = self._engine.step()
            if report is None:
                timeout_ms = self._patience_ms()
            else:
                timeout_ms = 0
                self._publish(report)

    def close(self) -> None:
        """Close the socket; what has not been received yet is lost."""
        self._router.close()
        self._context.term()

    def _patience_ms(self) -> int | None:
        """How long to wait for a message when there is nothing to do; None for ever."""
        if self._engine.has_work:
            return _BLOCKED_RETRY_MS
        deadline_ns = self._engine.next_deadline_ns
        if not deadline_ns:
            return None
        return max(0, -((time.monotonic_ns() - deadline_ns) // 1_000_000))

    def _drain_inbox(self) -> None:
        with suppress(zmq.Again):
            while True:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
                try:
                    self._handle(front_end_index(identity), self._codec.decode(frames))
                except MalformedMessage as error:
                    logger.warning("malformed message dropped", identity=identity.hex(), error=str(error))

    def _handle(self, front_end: int, message: Message) -> None:
        match message:
            case Submit(request):
                self._submit(front_end, request)
            case Cancel(request_key):
                self._engine.cancel(request_key)
            case Pause(request_key):
                self._engine.pause(request_key)
            case Resume(request_key):
                self._engine.resume(request_key)
            case Hello():
                self._send(front_end, Welcome(self._engine.info, self._engine.load()))
            case _:
                raise MalformedMessage(f"{type(message).__name__} is not for the engine")

    def _submit(self, front_end: int, request: Request) -> None:
        if request.request_key >> FRONT_END_SHIFT != front_end:
            raise MalformedMessage(f"request key {request.request_key} belongs to another front end")
        try:
            self._engine.submit(request)
        except ForewordError as error:
            self._send(front_end, Refused(request.request_key, ErrorRecord.of(error)))
            return
        self._active.setdefault(front_end, set()).update(request.output_keys)
        self._send(front_end, Admitted(request.request_key))

    def _publish(self, report: StepReport) -> None:
        """Send each front end its own sequences."""
        front_ends = report.sequences["request_key"] >> FRONT_END_SHIFT
        for front_end in sorted(set(front_ends.tolist())):
            mine = front_ends == front_end
            own = report if mine.all() else _select(report, mine)
            ended = own.sequences["request_key"][own.sequences["finish_reason"] != 0]
            self._active.get(front_end, set()).difference_update(ended.tolist())
            self._send(front_end, own)

    def _send(self, front_end: int, message: Message) -> None:
        try:
            self._router.send_multipart([front_end_identity(front_end), *self._codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._abandon(front_end)

    def _abandon(self, front_end: int) -> None:
        """Cancel what a front end left behind."""
        request_keys = self._active.pop(front_end, set())
        if not request_keys:
            return
        logger.debug("front end is gone", front_end=front_end, num_sequences=len(request_keys))
        for request_key in request_keys:
            self._engine.cancel(request_key)


def _select(report: StepReport, mine: npt.NDArray[np.bool_]) -> StepReport:
    """The part of a report that concerns some of its sequences."""
    tokens = np.repeat(mine, report.sequences["num_tokens"])
    prompt_tokens = np.repeat(mine, report.sequences["num_scored"])
    return StepReport(
        report.header,
        report.sequences[mine],
        report.token_ids[tokens],
        report.logprobs[tokens],
        report.scores and report.scores.take(tokens),
        report.prompt_scores and report.prompt_scores.take(prompt_tokens),
    )
