from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
from engine_fakes import NO_LIMIT, expected_tokens, make_request
from engine_harness import EngineThread
from structlog.testing import capture_logs

from foreword.scheduler.step import FinishReason
from foreword.service.engine.codec import Codec
from foreword.service.engine.engine import Engine
from foreword.service.engine.messages import (
    FRONT_END_SHIFT,
    Admitted,
    Cancel,
    Hello,
    Message,
    Pause,
    StepReport,
    Submit,
    Welcome,
    front_end_identity,
)

Serve = Callable[..., EngineThread]


class FrontEnd:
    """A front end that speaks to an engine by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, index: int) -> None:
        self.codec = Codec()
        self.first_key = index << FRONT_END_SHIFT
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.IDENTITY, front_end_identity(index))
        self.socket.set(zmq.RCVTIMEO, 10_000)
        self.socket.connect(address)
        self.say(Hello())
        assert isinstance(self.hear(), Welcome)

    def say(self, message: Message) -> None:
        self.socket.send_multipart(self.codec.encode(message))

    def hear(self) -> Message:
        return self.codec.decode(self.socket.recv_multipart())

    def submit(self, key: int, max_output_tokens: int = 8) -> int:
        self.say(Submit(make_request(self.first_key + key, max_output_tokens=max_output_tokens)))
        return self.first_key + key

    def hear_until_the_end(self, request_key: int) -> tuple[list[int], FinishReason]:
        """Tokens of one sequence; reports must name no sequence of another front end."""
        token_ids: list[int] = []
        while True:
            message = self.hear()
            if not isinstance(message, StepReport):
                continue
            begin = 0
            for update in message.sequences:
                end = begin + int(update["num_tokens"])
                assert int(update["request_key"]) >> FRONT_END_SHIFT == self.first_key >> FRONT_END_SHIFT
                if update["request_key"] == request_key:
                    token_ids += message.token_ids[begin:end].tolist()
                    if update["finish_reason"]:
                        return token_ids, FinishReason(int(update["finish_reason"]))
                begin = end
            assert begin == len(message.token_ids) == len(message.logprobs)


@contextmanager
def front_end(thread: EngineThread, index: int = 0) -> Iterator[FrontEnd]:
    context = zmq.Context()
    try:
        yield FrontEnd(context, thread.address, index)
    finally:
        context.destroy(linger=0)


def test_each_front_end_hears_of_its_own_sequences_only(serve: Serve) -> None:
    thread = serve()
    with front_end(thread, 0) as one, front_end(thread, 1) as two:
        keys = [(end, end.submit(key, max_output_tokens=5 + key)) for key in range(1, 20) for end in (one, two)]
        for end, key in keys:
            if key == end.first_key + 19:
                assert end.hear_until_the_end(key) == (expected_tokens(4, 24), FinishReason.LENGTH)


def test_a_front_end_hears_of_steps_without_its_sequences(serve: Serve) -> None:
    thread = serve()
    with front_end(thread, 0) as idle, front_end(thread, 1) as busy:
        assert busy.hear_until_the_end(busy.submit(1, max_output_tokens=5))[0] == expected_tokens(4, 5)
        reports = [idle.hear() for _ in range(5)]
    assert all(isinstance(report, StepReport) and not len(report.sequences) for report in reports)
    assert [report.header.num_output_tokens for report in reports] == [1] * 5  # type: ignore[union-attr]


def test_an_admission_comes_before_any_report(serve: Serve) -> None:
    with front_end(serve()) as end:
        key = end.submit(1)
        assert end.hear() == Admitted(key)
        assert isinstance(end.hear(), StepReport)


@pytest.mark.parametrize("frames", [[b""], [b"x"] * 5, [b"Cancel", b"\xc1"], [b"Admitted", b"\x81\xabrequest_key\x01"]])
def test_what_is_not_a_message_for_it_is_dropped(serve: Serve, frames: list[bytes]) -> None:
    with front_end(serve()) as end:
        end.socket.send_multipart(frames)
        key = end.submit(1)
        assert end.hear() == Admitted(key)


def test_a_stranger_is_ignored(serve: Serve) -> None:
    thread = serve()
    with front_end(thread) as end:
        stranger = end.socket.context.socket(zmq.DEALER)
        stranger.connect(thread.address)
        stranger.send_multipart(Codec().encode(Hello()))
        assert stranger.poll(100) == 0
        key = end.submit(1)
        assert end.hear() == Admitted(key)


def test_a_key_of_another_front_end_is_not_accepted(serve: Serve) -> None:
    thread = serve()
    with front_end(thread, 0) as one:
        one.say(Submit(make_request(1 << FRONT_END_SHIFT)))
        key = one.submit(1)
        assert one.hear() == Admitted(key)
        assert one.hear_until_the_end(key)[1] is FinishReason.LENGTH


def test_a_front_end_that_never_reads_holds_nobody_up(serve: Serve) -> None:
    thread = serve()
    with front_end(thread, 0) as lazy, front_end(thread, 1) as eager:
        for key in range(1, 33):
            lazy.submit(key, max_output_tokens=NO_LIMIT)
        key = eager.submit(1, max_output_tokens=NO_LIMIT)
        assert eager.hear_until_the_end(key) == (expected_tokens(4, NO_LIMIT), FinishReason.LENGTH)
        assert lazy.hear_until_the_end(lazy.first_key + 32)[0] == expected_tokens(4, NO_LIMIT)


def test_what_a_front_end_leaves_behind_is_cancelled(serve: Serve) -> None:
    thread = serve(step_s=0.002)
    with front_end(thread, 1) as staying:
        with front_end(thread, 0) as leaving:
            for key in range(1, 10):
                leaving.submit(key, max_output_tokens=NO_LIMIT)
            while not isinstance(leaving.hear(), StepReport):
                pass
        # Reports to the one that left fail, and so free its sequences, before this one has all its tokens.
        key = staying.submit(1, max_output_tokens=300)
        assert staying.hear_until_the_end(key)[1] is FinishReason.LENGTH
        staying.say(Hello())
        welcome = staying.hear()
        assert isinstance(welcome, Welcome)
        assert (welcome.load.num_running, welcome.load.num_waiting) == (0, 0)


def test_a_front_end_that_is_gone_is_no_news_at_the_usual_level(serve: Serve) -> None:
    """At every shutdown with generations under way there is one."""
    thread = serve(step_s=0.002)
    with capture_logs() as logs, front_end(thread, 1) as staying:
        with front_end(thread, 0) as leaving:
            leaving.submit(1, max_output_tokens=NO_LIMIT)
            while not isinstance(leaving.hear(), StepReport):
                pass
        assert staying.hear_until_the_end(staying.submit(1, max_output_tokens=300))[1] is FinishReason.LENGTH
        levels = [entry["log_level"] for entry in logs if entry["event"] == "front end is gone"]
    assert levels == ["debug"]


def test_paused_sequences_are_not_a_reason_to_stay_awake(serve: Serve) -> None:
    thread = serve(step_s=0.002, max_num_sequences=1)
    with front_end(thread) as end:
        first = end.submit(1, max_output_tokens=2000)
        while not isinstance(end.hear(), StepReport):
            pass
        end.say(Pause(first))
        second = end.submit(2)
        assert end.hear_until_the_end(second)[0] == expected_tokens(4, 8)
        before = thread.num_steps
        assert end.socket.poll(200) == 0
        assert thread.num_steps - before <= 1
        end.say(Cancel(first))
        assert end.hear_until_the_end(first)[1] is FinishReason.CANCELLED


def test_work_that_cannot_go_on_is_no_busy_wait(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "has_work", True)
    thread = serve()
    with front_end(thread) as end:
        before = thread.num_steps
        assert end.socket.poll(200) == 0
        assert 2 <= thread.num_steps - before <= 21


def test_an_idle_loop_sleeps(serve: Serve) -> None:
    thread = serve()
    with front_end(thread) as end:
        end.hear_until_the_end(end.submit(1))
        before = thread.num_steps
        assert end.socket.poll(200) == 0
        assert thread.num_steps - before <= 1


def test_a_deadline_wakes_an_idle_loop(serve: Serve) -> None:
    with front_end(serve(step_s=0.002)) as end:
        deadline_ns = time.monotonic_ns() + 100_000_000
        end.say(Submit(make_request(1, max_output_tokens=2000, deadline_ns=deadline_ns)))
        end.say(Pause(1))
        assert end.hear_until_the_end(1)[1] is FinishReason.DEADLINE
        assert 0 <= time.monotonic_ns() - deadline_ns < 1_000_000_000


def test_the_end_of_the_lifeline_ends_the_loop(serve: Serve) -> None:
    thread = serve()
    with front_end(thread) as end:
        end.submit(1, max_output_tokens=2000)
        thread._lifeline.shutdown(socket.SHUT_RDWR)
        thread._thread.join(timeout=10)
        assert not thread._thread.is_alive()
