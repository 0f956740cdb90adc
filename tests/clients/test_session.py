from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import grpc
import pytest

from foreword.clients import Client, ForewordClientError, Message


def test_many_generations_on_one_stream(client: Client, threaded_server: Any) -> None:
    with client.session() as session:
        first = session.start("one two three", request_id="a", temperature=0)
        second = session.start([Message("user", "four five")])
        third = session.start([6])
        assert [delta.text for delta in second] == ["four ", "five "]
        assert first.result().text == "one two three "
        assert third.result().text == "6 "
        assert second.result().finish_reason == "EOS"
    assert threaded_server.ended.get(timeout=10) == "ok"
    ids = [spec.request_id for spec in threaded_server.specs]
    assert ids[0] == "a"
    assert len(set(ids)) == 3
    assert all(ids)


def test_cancel_in_band(client: Client, threaded_server: Any) -> None:
    with client.session() as session:
        endless = session.start("endless")
        other = session.start("one two")
        next(iter(endless))
        endless.cancel()
        generation = endless.result()
        assert generation.finish_reason == "CANCELLED"
        assert generation.usage.output_token_count == len(generation.token_ids) >= 1
        assert other.result().text == "one two "
    assert threaded_server.ended.get(timeout=10) == "ok"


def test_a_silent_generation_can_be_cancelled(client: Client) -> None:
    with client.session() as session:
        silent = session.start("silent")
        silent.cancel()
        assert silent.result().text == ""


def test_leaving_one_generation_early_cancels_only_it(client: Client, threaded_server: Any) -> None:
    with client.session() as session:
        with session.start("endless", request_id="e") as endless:
            next(iter(endless))
        assert session.start("one").result().text == "one "
    kinds = [command.WhichOneof("command") for command in threaded_server.commands]
    assert kinds == ["start", "cancel", "start"]
    assert threaded_server.commands[1].cancel.request_id == "e"


def test_a_generation_read_to_its_end_is_not_cancelled(client: Client, threaded_server: Any) -> None:
    with client.session() as session, session.start("one") as stream:
        stream.result()
    assert [command.WhichOneof("command") for command in threaded_server.commands] == ["start"]


def test_a_refused_start_fails_alone(client: Client) -> None:
    with client.session() as session:
        refused = session.start("refused")
        other = session.start("one two")
        with pytest.raises(ForewordClientError) as caught:
            refused.result()
        assert caught.value.field_violations[0].field == "sampling.top_p"
        assert other.result().text == "one two "


def test_a_refused_cancel_does_not_touch_a_later_generation_of_the_same_name(client: Client) -> None:
    with client.session() as session:
        refused = session.start("refused", request_id="x")
        refused.cancel()
        with pytest.raises(ForewordClientError):
            refused.result()
        assert session.start("one", request_id="x").result().text == "one "


def test_a_failed_generation_fails_alone(client: Client) -> None:
    with client.session() as session:
        broken = session.start("broken off")
        other = session.start("one two three four")
        assert [delta.text for delta in islice(broken, 2)] == ["broken ", "off "]
        for _ in range(2):
            with pytest.raises(ForewordClientError) as caught:
                broken.result()
            assert caught.value.reason == "ENGINE_ERROR"
        assert other.result().text == "one two three four "


def test_a_broken_stream_fails_every_generation(client: Client) -> None:
    with client.session() as session:
        silent, aborted = session.start("silent"), session.start("abort")
        for stream in (aborted, silent):
            with pytest.raises(ForewordClientError) as caught:
                stream.result()
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert caught.value.reason == "ENGINE_UNAVAILABLE"


def test_two_generations_of_one_name_at_once(client: Client) -> None:
    with client.session() as session:
        first = session.start("endless", request_id="x")
        with pytest.raises(ValueError, match="'x' is under way"):
            session.start("one", request_id="x")
        first.cancel()
        first.result()
        assert session.start("one", request_id="x").result().text == "one "


def test_leaving_the_session_ends_what_runs(client: Client, threaded_server: Any) -> None:
    with client.session() as session:
        next(iter(session.start("endless")))
    assert threaded_server.ended.get(timeout=10) == "cancelled"


def test_append_turn(client: Client, threaded_server: Any) -> None:
    with client.session() as session:
        session.start("one", request_id="a").result()
        appended = session.append_turn("a", [Message("user", "two")], request_id="b", temperature=0)
        with pytest.raises(ForewordClientError):
            appended.result()
    command = threaded_server.commands[1].append_turn
    assert command.previous_request_id == "a"
    assert (command.spec.request_id, command.spec.chat.messages[0].content) == ("b", "two")
    assert command.spec.sampling.HasField("temperature")


def test_generations_read_from_many_threads(client: Client) -> None:
    prompts = [" ".join(f"w{i}" for i in range(5 + n)) for n in range(16)]
    with client.session() as session, ThreadPoolExecutor(16) as pool:
        streams = [session.start(prompt) for prompt in prompts]
        texts = list(pool.map(lambda stream: stream.result().text, streams))
    assert texts == [prompt + " " for prompt in prompts]


def test_the_deadline_of_a_session(client: Client) -> None:
    with client.session(timeout=0.2) as session, pytest.raises(ForewordClientError) as caught:
        session.start("silent").result()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
