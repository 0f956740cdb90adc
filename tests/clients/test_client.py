from __future__ import annotations

import gc
from typing import Any

import grpc
import pytest

from foreword.clients import Client, FieldViolation, ForewordClientError, Generation, GenerationStream, Message
from foreword.v1.generation_pb2 import GenerationEvent, GenerationSpec, GenerationStarted


def generate(client: Client, method: str, prompt: str, timeout: float | None = None) -> Generation:
    if method == "generate":
        return client.generate(prompt, timeout=timeout)
    return client.stream(prompt, timeout=timeout).result()


def test_generate(client: Client, threaded_server: Any) -> None:
    generation = client.generate("one two three", temperature=0, max_output_token_count=8, request_id="mine")
    assert generation.text == "one two three "
    assert list(generation.token_ids) == [3, 3, 5]
    assert generation.finish_reason == "EOS"
    assert generation.usage.output_token_count == 3
    assert generation.request_id == "mine"
    expected = GenerationSpec(request_id="mine", prompt="one two three")
    expected.sampling.temperature = 0
    expected.stopping.max_output_token_count = 8
    assert threaded_server.specs == [expected]


def test_generate_from_tokens_and_messages(client: Client) -> None:
    assert client.generate([7, 8]).text == "7 8 "
    reply = client.generate([Message("system", "Be brief."), Message("user", "good day")])
    assert reply.message == Message("assistant", "good day ")


def test_stream_gives_the_text_of_generate(client: Client) -> None:
    stream = client.stream("one two three")
    assert [delta.text for delta in stream] == ["one ", "two ", "three "]
    generation = stream.result()
    assert generation == client.generate("one two three")


def test_result_reads_what_was_not_read(client: Client) -> None:
    with client.stream("one two three") as stream:
        assert next(iter(stream)).text == "one "
        assert stream.result().text == "one two three "


def test_events(client: Client) -> None:
    with client.stream("one") as stream:
        kinds = [event.WhichOneof("event") for event in stream.events()]
    assert kinds == ["started", "output_delta", "output_finished", "finished"]


def test_leaving_early_cancels(client: Client, threaded_server: Any) -> None:
    with client.stream("endless") as stream:
        next(iter(stream))
    assert threaded_server.ended.get(timeout=10) == "cancelled"


def test_a_stream_read_to_its_end_is_not_cancelled(client: Client, threaded_server: Any) -> None:
    with client.stream("one") as stream:
        list(stream)
    assert threaded_server.ended.get(timeout=10) == "ok"


def test_reading_on_after_cancel(client: Client) -> None:
    stream = client.stream("endless")
    next(iter(stream))
    stream.cancel()
    with pytest.raises(ForewordClientError) as caught:
        stream.result()
    assert caught.value.code is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_refusals_are_decoded(client: Client, method: str) -> None:
    with pytest.raises(ForewordClientError) as caught:
        generate(client, method, "refused")
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.message == "sampling.top_p: above 1"
    assert error.reason == "INVALID_FIELD"
    assert error.metadata == {"field": "sampling.top_p"}
    assert error.field_violations == (FieldViolation("sampling.top_p", "above 1"),)
    assert error.retry_delay_s == 1.5
    assert isinstance(error.__cause__, grpc.RpcError)


def test_damaged_details_leave_code_and_message(client: Client) -> None:
    with pytest.raises(ForewordClientError) as caught:
        client.generate("damaged")
    assert (caught.value.code, caught.value.message) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.top_p: above 1",
    )
    assert caught.value.reason == ""


def test_no_details(client: Client) -> None:
    with pytest.raises(ForewordClientError, match="NOT_FOUND: no such model"):
        client.generate("bare")


def test_a_failure_after_the_first_tokens(client: Client) -> None:
    stream = client.stream("broken off here")
    deltas = iter(stream)
    assert next(deltas).text == "broken "
    with pytest.raises(ForewordClientError) as caught:
        next(deltas)
    assert caught.value.reason == "ENGINE_ERROR"
    with pytest.raises(ForewordClientError) as again:
        stream.result()
    assert again.value is caught.value


def test_a_stream_that_ends_too_early_is_no_result() -> None:
    stream = GenerationStream(iter([GenerationEvent(started=GenerationStarted())]), lambda: None)
    with pytest.raises(ForewordClientError, match="ended before the generation did"):
        stream.result()


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_the_timeout_is_the_deadline_of_the_call(client: Client, method: str) -> None:
    with pytest.raises(ForewordClientError) as caught:
        generate(client, method, "silent", timeout=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_unavailable_is_retried(client: Client, threaded_server: Any) -> None:
    threaded_server.num_unavailable = 2
    assert client.generate("one").text == "one "
    assert threaded_server.num_attempts == 3


def test_nothing_else_is_retried(client: Client, threaded_server: Any) -> None:
    for prompt in ("refused", "bare"):
        with pytest.raises(ForewordClientError):
            client.generate(prompt)
    assert threaded_server.num_attempts == 2


def test_a_long_answer(client: Client) -> None:
    assert len(client.generate("long").text) == 5_000_000


def test_cancel(client: Client) -> None:
    assert client.cancel("active") is True
    assert client.cancel("ended") is False
    with pytest.raises(ForewordClientError) as caught:
        client.cancel("unknown")
    assert caught.value.reason == "REQUEST_NOT_FOUND"


def test_tokenization(client: Client) -> None:
    response = client.tokenize("hé", return_offsets=True, return_token_bytes=True)
    assert list(response.token_ids) == [104, 233]
    assert list(response.start_offsets) == [0, 1]
    assert list(response.token_bytes) == [b"h", "é".encode()]
    assert not client.tokenize("hé").token_bytes
    assert client.detokenize(response.token_ids).text == "hé"
    messages = [Message("user", "a"), Message("tool", "b")]
    assert client.render_chat(messages).text == "2:a|4:b|"
    assert client.render_chat(messages, add_generation_prompt=False).text == "2:a|4:b"


def test_lookups(client: Client) -> None:
    assert [model.name for model in client.models()] == ["a", "b"]
    assert client.model().name == "a"
    assert client.model("b").name == "b"
    assert client.server_info().version == "1.2.3"
    assert client.load().running_sequence_count == 3


def test_a_proxy_is_not_asked_about_loopback(threaded_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Client(threaded_server.target) as client:
        assert client.load().running_sequence_count == 3


def test_nothing_listens() -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(ForewordClientError) as caught:
        client.generate("hi", timeout=5)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    gc.collect()


def test_generations_carry_the_tenant(threaded_server: Any) -> None:
    for tenant in ("gold", ""):
        with Client(threaded_server.target, tenant=tenant) as client:
            client.generate("one")
            client.stream("one").result()
            with client.session() as session:
                session.start("one").result()
    assert threaded_server.tenants == ["gold"] * 3 + [""] * 3
    with pytest.raises(ValueError, match="tenant must be"):
        Client(threaded_server.target, tenant="two words")
