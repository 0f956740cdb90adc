from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from foreword.clients import GenerationOptions, Message
from foreword.clients.spec import generation_spec
from foreword.v1.cache_pb2 import CacheConfig
from foreword.v1.chat_pb2 import Role
from foreword.v1.constraint_pb2 import Constraint
from foreword.v1.generation_pb2 import GenerationSpec
from foreword.v1.output_pb2 import OutputConfig
from foreword.v1.sampling_pb2 import SamplingConfig
from foreword.v1.speculation_pb2 import SpeculationConfig
from foreword.v1.stopping_pb2 import StoppingConfig
from foreword.v1.timing_pb2 import TimingLevel

SECTIONS = {"sampling": SamplingConfig, "stopping": StoppingConfig, "output": OutputConfig}
INPUTS = {"prompt", "prompt_token_ids", "chat"}


def test_options_are_exactly_the_fields_of_the_api() -> None:
    fields = {field.name for field in GenerationSpec.DESCRIPTOR.fields} - INPUTS - set(SECTIONS)
    for config in SECTIONS.values():
        names = {field.name for field in config.DESCRIPTOR.fields}
        assert not names & fields, "a name in two sections would be ambiguous"
        fields |= names
    assert set(GenerationOptions.__annotations__) == fields


@pytest.mark.parametrize(
    ("name", "value", "section"),
    [
        ("temperature", 0.0, "sampling"),
        ("top_k", 0, "sampling"),
        ("seed", 0, "sampling"),
        ("logit_bias", {5: -1.5}, "sampling"),
        ("banned_token_ids", [1, 2], "sampling"),
        ("max_output_token_count", 3, "stopping"),
        ("stop_strings", ["a", "b"], "stopping"),
        ("ignore_eos", True, "stopping"),
        ("return_token_ids", False, "output"),
        ("coalesce_token_count", 2, "output"),
        ("request_id", "mine", None),
        ("model", "big", None),
        ("priority", 0, None),
        ("constraint", Constraint(regex="a+"), None),
        ("cache", CacheConfig(cache_salt="s"), None),
        ("speculation", SpeculationConfig(disabled=True), None),
    ],
)
def test_an_option_sets_its_field_and_no_other(name: str, value: Any, section: str | None) -> None:
    options: Any = {name: value}
    spec = generation_spec("hi", options)
    expected = GenerationSpec(prompt="hi", **({section: {name: value}} if section else options))
    assert spec == expected
    assert len(spec.ListFields()) == 2


def test_zero_is_set_and_none_is_unset() -> None:
    spec = generation_spec("hi", {"temperature": 0, "top_p": None, "priority": 0, "model": None})
    assert spec.sampling.HasField("temperature")
    assert not spec.sampling.HasField("top_p")
    assert spec.HasField("priority")
    assert generation_spec("hi", {"temperature": None}) == GenerationSpec(prompt="hi")


def test_durations_and_levels() -> None:
    spec = generation_spec("hi", {"max_generation_duration": timedelta(milliseconds=1500), "timing_level": "step"})
    assert spec.stopping.max_generation_duration.ToTimedelta() == timedelta(seconds=1.5)
    assert spec.output.timing_level == TimingLevel.TIMING_LEVEL_STEP


@pytest.mark.parametrize("level", ["step", "STEP", "TIMING_LEVEL_STEP"])
def test_a_timing_level_has_a_short_and_a_full_name(level: Any) -> None:
    assert generation_spec("hi", {"timing_level": level}).output.timing_level == TimingLevel.TIMING_LEVEL_STEP


@pytest.mark.parametrize("duration", [1.5, timedelta(seconds=1.5)])
@pytest.mark.parametrize(
    ("name", "section"), [("max_generation_duration", "stopping"), ("coalesce_duration", "output")]
)
def test_durations_are_seconds_or_timedeltas(name: str, section: str, duration: Any) -> None:
    options: Any = {name: duration}
    field = getattr(getattr(generation_spec("hi", options), section), name)
    assert field.ToTimedelta() == timedelta(seconds=1.5)


@pytest.mark.parametrize("token_ids", [[3, 0, 7], (3, 0, 7), np.array([3, 0, 7], np.int32)])
def test_token_ids_as_prompt(token_ids: Any) -> None:
    spec = generation_spec(token_ids, {})
    assert spec.WhichOneof("input") == "prompt_token_ids"
    assert list(spec.prompt_token_ids.ids) == [3, 0, 7]


def test_messages_as_prompt() -> None:
    spec = generation_spec([Message("system", "Be brief."), Message("user", "")], {})
    assert [(message.role, message.content) for message in spec.chat.messages] == [
        (Role.ROLE_SYSTEM, "Be brief."),
        (Role.ROLE_USER, ""),
    ]
    assert spec.chat.add_generation_prompt


def test_an_empty_text_is_sent_for_the_server_to_refuse() -> None:
    assert generation_spec("", {}).WhichOneof("input") == "prompt"


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, ValueError, "prompt: an empty sequence"),
        (b"hi", {}, TypeError, "prompt: .*bytes.* a text, token ids or Messages"),
        (7, {}, TypeError, "prompt: .*int.* a text, token ids or Messages"),
        (["hi"], {}, TypeError, "prompt: .*str.* a text, token ids or Messages"),
        ([{"role": "user", "content": "hi"}], {}, TypeError, "prompt: .*dict.* a text, token ids or Messages"),
        ([Message("user", "hi"), "hi"], {}, TypeError, "prompt: .*str.* a text, token ids or Messages"),
        (
            [Message("user", "hi"), Message("robot", "hi")],  # type: ignore[arg-type]
            {},
            ValueError,
            r"messages\[1\].role: 'robot' .* system, user, assistant, tool",
        ),
        ("a\udcff", {}, ValueError, "^prompt: not valid Unicode"),
        ([1, 2**31], {}, ValueError, "^prompt_token_ids: .*2147483648"),
        (
            [Message("user", "ok"), Message("user", "\udcff")],
            {},
            ValueError,
            r"^messages\[1\].content: not valid Unicode",
        ),
        ("hi", {"max_output_token_count": 99999999999}, ValueError, "^max_output_token_count: .*99999999999"),
        ("hi", {"seed": 1 << 80}, ValueError, "^seed: "),
        ("hi", {"model": "\udcff"}, ValueError, "^model: not valid Unicode"),
        ("hi", {"stop_strings": ["ok", "\udcff"]}, ValueError, "^stop_strings: not valid Unicode"),
        ("hi", {"stop_strings": "\n"}, TypeError, "stop_strings: .*sequence of texts"),
        ("hi", {"stop_strings": b"ab"}, TypeError, "stop_strings: .*sequence of texts"),
        ("hi", {"max_generation_duration": "1s"}, TypeError, "max_generation_duration: .*seconds .* timedelta"),
        ("hi", {"max_generation_duration": True}, TypeError, "max_generation_duration: .*seconds .* timedelta"),
        ("hi", {"coalesce_duration": math.nan}, ValueError, "coalesce_duration: nan .*seconds .* timedelta"),
        ("hi", {"coalesce_duration": 1e300}, ValueError, "coalesce_duration: 1e.300 .*seconds .* timedelta"),
        ("hi", {"temprature": 1}, TypeError, "'temprature' is not a setting"),
        ("hi", {"prompt": "other"}, TypeError, "'prompt' is not a setting"),
        ("hi", {"sampling": SamplingConfig()}, TypeError, "'sampling' is not a setting"),
        ("hi", {"timing_level": "loud"}, ValueError, "timing_level: 'loud' .* none, summary, step"),
        ("hi", {"timing_level": "unspecified"}, ValueError, "timing_level: .* none, summary, step"),
        ("hi", {"timing_level": 9}, ValueError, "timing_level: .* none, summary, step"),
        ("hi", {"top_k": 1 << 40}, ValueError, "out of range"),
        ("hi", {"top_k": "many"}, TypeError, "top_k: found str.*integer"),
        ("hi", {"temperature": "x", "top_k": 3}, TypeError, "temperature: found str"),
        ("hi", {"seed": "x"}, TypeError, "seed: found str"),
        ("hi", {"priority": "x"}, TypeError, "priority: found str"),
        ("hi", {"logprobs": "x"}, TypeError, "logprobs: found str"),
        ("hi", {"logit_bias": "x"}, (TypeError, ValueError), "logit_bias: "),
        ("hi", {"cache": "a"}, TypeError, "cache: found str, expected a CacheConfig"),
        ("hi", {"constraint": "x"}, TypeError, "constraint: found str, expected a Constraint"),
        ("hi", {"speculation": 1}, TypeError, "speculation: found int, expected a SpeculationConfig"),
    ],
)
def test_bad_arguments(prompt: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        generation_spec(prompt, options)
