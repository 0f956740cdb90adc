"""Requests that are refused, by the name of what is wrong with them."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from foreword.v1 import chat_pb2, generation_pb2
from foreword.v1.generation_service_pb2 import GenerateTextRequest

from .conftest import Harness
from .rpc import complete, failure_of, streamed, unary

TOO_LONG = "x" * 1025
BAD_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt_token_ids": {}}, "prompt_token_ids.ids"),
    ({"prompt_token_ids": {"ids": [1, 2, 300]}}, "prompt_token_ids.ids[2]"),
    ({"prompt_token_ids": {"ids": [-1]}}, "prompt_token_ids.ids[0]"),
    ({"chat": {}}, "chat.messages"),
    ({"chat": {"messages": [{"role": "ROLE_USER"}, {"content": "x"}]}}, "chat.messages[1].role"),
    ({"chat": {"messages": [{"role": 99, "content": "x"}]}}, "chat.messages[0].role"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "x" * 65}, "request_id"),
    ({"request_id": "sn\u00f6"}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"sampling": {"temperature": math.nan}}, "sampling.temperature"),
    ({"sampling": {"temperature": math.inf}}, "sampling.temperature"),
    ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ({"sampling": {"top_p": 1.1}}, "sampling.top_p"),
    ({"sampling": {"top_p": math.nan}}, "sampling.top_p"),
    ({"sampling": {"top_k": -1}}, "sampling.top_k"),
    ({"sampling": {"min_p": -math.inf}}, "sampling.min_p"),
    ({"sampling": {"min_p": 2.0}}, "sampling.min_p"),
    ({"stopping": {"max_output_token_count": 0}}, "stopping.max_output_token_count"),
    ({"stopping": {"max_output_token_count": -1}}, "stopping.max_output_token_count"),
    ({"stopping": {"min_output_token_count": -1}}, "stopping.min_output_token_count"),
    ({"stopping": {"max_output_token_count": 2, "min_output_token_count": 3}}, "stopping.min_output_token_count"),
    ({"stopping": {"stop_strings": ["ok", ""]}}, "stopping.stop_strings[1]"),
    ({"stopping": {"stop_strings": [TOO_LONG]}}, "stopping.stop_strings[0]"),
    ({"stopping": {"stop_strings": ["x"] * 1025}}, "stopping.stop_strings"),
    ({"stopping": {"stop_strings": ["x" * 1024] * 17}}, "stopping.stop_strings"),
    ({"chat": {"messages": [{"role": "ROLE_USER"}] * 4097}}, "chat.messages"),
    ({"stopping": {"stop_token_ids": [300]}}, "stopping.stop_token_ids[0]"),
    ({"stopping": {"stop_token_ids": [1] * 1025}}, "stopping.stop_token_ids"),
    ({"stopping": {"max_generation_duration": Duration()}}, "stopping.max_generation_duration"),
    ({"stopping": {"max_generation_duration": Duration(seconds=-1)}}, "stopping.max_generation_duration"),
    ({"stopping": {"max_generation_duration": Duration(seconds=1, nanos=-1)}}, "stopping.max_generation_duration"),
    ({"output": {"timing_level": 17}}, "output.timing_level"),
    ({"priority": 101}, "priority"),
    ({"priority": -101}, "priority"),
    ({"sampling": {"output_count": 0}}, "sampling.output_count"),
    ({"sampling": {"output_count": 17}}, "sampling.output_count"),
    ({"sampling": {"output_count": -1}}, "sampling.output_count"),
    ({"sampling": {"allowed_token_ids": [5, 300]}}, "sampling.allowed_token_ids[1]"),
    ({"sampling": {"allowed_token_ids": [1] * 16_385}}, "sampling.allowed_token_ids"),
    ({"sampling": {"banned_token_ids": [-1]}}, "sampling.banned_token_ids[0]"),
    ({"sampling": {"banned_token_ids": [2**31 - 1]}}, "sampling.banned_token_ids[0]"),
    ({"sampling": {"allowed_token_ids": [1, 2], "banned_token_ids": [2, 3, 1]}}, "sampling.banned_token_ids"),
    ({"sampling": {"frequency_penalty": 2.5}}, "sampling.frequency_penalty"),
    ({"sampling": {"logit_bias": {-1: 2.0}}}, "sampling.logit_bias"),
    ({"sampling": {"logit_bias": {300: 2.0}}}, "sampling.logit_bias"),
    ({"sampling": {"logit_bias": {2**31 - 1: 2.0}}}, "sampling.logit_bias"),
    ({"sampling": {"logit_bias": {1: 2.0, 7: math.nan}}}, "sampling.logit_bias[7]"),
    ({"sampling": {"logit_bias": {7: -100.5}}}, "sampling.logit_bias[7]"),
    ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 0.0)}}, "sampling.logit_bias"),
    ({"output": {"top_logprob_count": 21}}, "output.top_logprob_count"),
    ({"output": {"prefill_progress": True}}, "output.prefill_progress"),
    ({"output": {"coalesce_token_count": 2}}, "output.coalesce_token_count"),
    ({"output": {"coalesce_duration": Duration(nanos=1)}}, "output.coalesce_duration"),
    ({"constraint": {}}, "constraint"),
    ({"constraint": {"regex": "a" * 16_385}}, "constraint.regex"),
    ({"constraint": {"json_schema": ""}}, "constraint.json_schema"),
    ({"constraint": {"json_schema": " " * 65_537}}, "constraint.json_schema"),
    ({"constraint": {"grammar": ""}}, "constraint.grammar"),
    ({"constraint": {"grammar": "#" * 65_537}}, "constraint.grammar"),
    ({"constraint": {"choices": {}}}, "constraint.choices.choices"),
    ({"constraint": {"choices": {"choices": ["a", ""]}}}, "constraint.choices.choices[1]"),
    ({"constraint": {"choices": {"choices": ["a"] * 1025}}}, "constraint.choices.choices"),
    ({"constraint": {"choices": {"choices": ["a" * 40_000, "b" * 40_000]}}}, "constraint.choices.choices"),
    ({"constraint": {"regex": "(a"}}, "constraint.regex"),
    ({"constraint": {"regex": r"[^\s\S]"}}, "constraint.regex"),
    ({"constraint": {"json_schema": "{"}}, "constraint.json_schema"),
    ({"constraint": {"json_schema": '{"not": {}}'}}, "constraint.json_schema"),
    ({"constraint": {"grammar": 'root ::= root "a"'}}, "constraint.grammar"),
    ({"cache": {"cache_salt": "é" * 64 + "x"}}, "cache.cache_salt"),
    ({"speculation": {"draft_token_count": 17}}, "speculation.draft_token_count"),
    ({"speculation": {"draft_token_count": -1}}, "speculation.draft_token_count"),
    ({"speculation": {"draft_token_count": 2**31 - 1}}, "speculation.draft_token_count"),
    ({"speculation": {"draft_token_count": 1, "disabled": True}}, "speculation.draft_token_count"),
    ({"speculation": {"drafter": "oracle"}}, "speculation.drafter"),
    ({"speculation": {"drafter": "ngram"}}, "speculation.drafter"),
    ({"speculation": {"drafter": ""}}, "speculation.drafter"),
    ({"speculation": {"acceptance": -1}}, "speculation.acceptance"),
    ({"speculation": {"acceptance": 77}}, "speculation.acceptance"),
]


@pytest.mark.parametrize(("fields", "path"), BAD_SPECS, ids=[f"{path}-{n}" for n, (_, path) in enumerate(BAD_SPECS)])
async def test_bad_fields_are_refused_by_name(harness: Harness, fields: dict[str, Any], path: str) -> None:
    failure = await failure_of(harness.generation.GenerateText(unary(**fields)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.fields == [path]
    assert failure.message.startswith(path)
    assert harness.engine.submitted == []


async def test_too_many_messages_are_refused_before_any_is_looked_at(harness: Harness) -> None:
    messages = [chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER), *[chat_pb2.ChatMessage()] * 4096]
    messages[1].MergeFromString(bytes([0xF8, 0x07, 1]))  # field 127, varint
    failure = await failure_of(harness.generation.GenerateText(unary(chat={"messages": messages})))
    assert failure.fields == ["chat.messages"]
    assert "4,096" in failure.message


async def test_more_token_ids_than_the_context_are_refused_before_any_is_looked_at(harness: Harness) -> None:
    call = harness.generation.GenerateText(unary(prompt_token_ids={"ids": [-1] * 1001}))
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    metadata = failure.details["ErrorInfo"].metadata
    assert dict(metadata) == {"prompt_token_count": "1001", "max_context_token_count": "1000"}


async def test_minimum_above_the_maximum_in_effect(harness: Harness) -> None:
    stopping = {"min_output_token_count": 996}
    failure = await failure_of(harness.generation.GenerateText(unary(stopping=stopping)))
    assert failure.fields == ["stopping.min_output_token_count"]
    assert "995" in failure.message
    stopping = {"min_output_token_count": 995}
    assert (await complete(harness, harness.generation.GenerateText(unary(stopping=stopping)), "a")).outputs


async def test_missing_inputs_are_refused(harness: Harness) -> None:
    request = GenerateTextRequest(spec=generation_pb2.GenerationSpec(model="toy"))
    assert (await failure_of(harness.generation.GenerateText(request))).fields == ["input"]
    assert (await failure_of(harness.generation.GenerateText(GenerateTextRequest()))).fields == ["spec"]


async def test_unknown_fields_are_refused(harness: Harness) -> None:
    request = unary(chat=chat_pb2.ChatInput(messages=[{"role": "ROLE_USER", "content": "x"}]))
    request.spec.chat.messages[0].MergeFromString(bytes([0xF8, 0x07, 1]))  # field 127, varint
    failure = await failure_of(harness.generation.GenerateText(request))
    assert failure.fields == ["chat.messages[0].<127>"]
    request = unary()
    request.MergeFromString(bytes([0xF8, 0x07, 1]))
    assert (await failure_of(harness.generation.GenerateText(request))).fields == ["<127>"]


async def test_unknown_model(harness: Harness) -> None:
    failure = await failure_of(harness.generation.GenerateText(unary(model="gpt-17")))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert "toy" in failure.message


async def test_prompt_that_fills_the_context(harness: Harness) -> None:
    failure = await failure_of(harness.generation.GenerateText(unary(prompt="x" * 1000)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    assert failure.details["ErrorInfo"].metadata["prompt_token_count"] == "1000"


async def test_large_message_is_refused_and_the_server_goes_on(harness: Harness) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness.generation.GenerateText(unary(prompt="x" * (5 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness.generation.StreamGenerateText(streamed(prompt="x" * (5 << 20))).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await complete(harness, harness.generation.GenerateText(unary()), "a")).outputs


async def test_garbage_is_a_malformed_request(harness: Harness) -> None:
    call = harness.channel.unary_unary("/foreword.v1.GenerationService/GenerateText")(b"\xff\xff\xff")
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")
