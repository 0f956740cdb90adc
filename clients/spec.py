"""From Python arguments to a `GenerationSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from numbers import Integral
from typing import Any, Literal, TypedDict, cast

from foreword.clients.message import Message, chat_input
from foreword.clients.request import build
from foreword.v1.cache_pb2 import CacheConfig
from foreword.v1.constraint_pb2 import Constraint
from foreword.v1.generation_pb2 import GenerationSpec
from foreword.v1.output_pb2 import OutputConfig
from foreword.v1.sampling_pb2 import SamplingConfig
from foreword.v1.speculation_pb2 import SpeculationConfig
from foreword.v1.stopping_pb2 import StoppingConfig

Prompt = str | Sequence[int] | Sequence[Message]
"""What the model continues: plain text, token ids, or a conversation for its chat template."""

TimingLevelName = Literal[
    "none", "summary", "step",
    "NONE", "SUMMARY", "STEP",
    "TIMING_LEVEL_NONE", "TIMING_LEVEL_SUMMARY", "TIMING_LEVEL_STEP",
]  # fmt: skip
"""A level by its short or its full name."""


class GenerationOptions(TypedDict, total=False):
    """Settings of a generation, by the names of their fields in the API, where each is described.

    One that is left out, or None, is unset: the server's default holds. A duration is a number of seconds or a
    `timedelta`.
    """

    request_id: str | None
    model: str | None
    priority: int | None
    constraint: Constraint | None
    cache: CacheConfig | None
    speculation: SpeculationConfig | None

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    output_count: int | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int] | None

    max_output_token_count: int | None
    min_output_token_count: int | None
    stop_strings: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    max_generation_duration: float | timedelta | None

    logprobs: bool | None
    ranks: bool | None
    top_logprob_count: int | None
    prompt_logprobs: bool | None
    return_token_ids: bool | None
    return_token_bytes: bool | None
    echo_prompt: bool | None
    prefill_progress: bool | None
    coalesce_token_count: int | None
    coalesce_duration: float | timedelta | None
    timing_level: TimingLevelName | None


_SECTIONS: dict[str, type[SamplingConfig | StoppingConfig | OutputConfig]] = {
    "sampling": SamplingConfig,
    "stopping": StoppingConfig,
    "output": OutputConfig,
}
_MESSAGES: dict[str, type[Constraint | CacheConfig | SpeculationConfig]] = {
    "constraint": Constraint,
    "cache": CacheConfig,
    "speculation": SpeculationConfig,
}
_SECTION_OF = {field.name: section for section, config in _SECTIONS.items() for field in config.DESCRIPTOR.fields}


def generation_spec(prompt: Prompt, options: GenerationOptions) -> GenerationSpec:
    """Put a prompt and its settings together.

    Raises:
        ValueError: an empty sequence as prompt, or a value that its field cannot hold; names the field.
        TypeError: an unknown setting, or a value of the wrong type; names the setting.
    """
    arguments: dict[str, Any] = _input(prompt)
    for name, value in options.items():
        if value is None:
            continue
        if name not in GenerationOptions.__annotations__:
            raise TypeError(f"{name!r} is not a setting of a generation; see foreword.clients.GenerationOptions")
        section = _SECTION_OF.get(name)
        (arguments.setdefault(section, {}) if section else arguments)[name] = _field_value(name, value)
    for section, config in _SECTIONS.items():
        if section in arguments:
            arguments[section] = build(config, **arguments[section])
    return build(GenerationSpec, **arguments)


def _input(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, bytes | bytearray) or not hasattr(prompt, "__len__"):
        raise _not_a_prompt(prompt)
    if not len(prompt):
        raise ValueError("prompt: an empty sequence, expected token ids or messages")
    kind = Message if isinstance(first := next(iter(prompt)), Message) else Integral
    for element in prompt if kind is Message else [first]:  # further ids are checked by their message
        if not isinstance(element, kind):
            raise _not_a_prompt(element)
    if kind is Message:
        return {"chat": chat_input(cast(Sequence[Message], prompt))}
    return {"prompt_token_ids": {"ids": prompt}}


def _not_a_prompt(found: object) -> TypeError:
    return TypeError(f"prompt: found {type(found).__name__}, expected a text, token ids or Messages")


def _field_value(name: str, value: Any) -> Any:
    """What goes into a field for a value that may be given in several ways."""
    if name == "timing_level":
        return _timing_level(value)
    if name.endswith("_duration"):
        return _duration(name, value)
    if (kind := _MESSAGES.get(name)) and not isinstance(value, kind | dict):
        raise TypeError(f"{name}: found {type(value).__name__}, expected a {kind.__name__}")
    if name == "stop_strings" and isinstance(value, str | bytes):
        raise TypeError(f'stop_strings: found {type(value).__name__}, expected a sequence of texts, such as ["END"]')
    return value


def _timing_level(value: Any) -> str:
    level = str(value).upper().removeprefix("TIMING_LEVEL_")
    if level not in ("NONE", "SUMMARY", "STEP"):
        raise ValueError(f"timing_level: {value!r} is not one of none, summary, step")
    return f"TIMING_LEVEL_{level}"


def _duration(name: str, value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    expected = "expected a number of seconds or a timedelta"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: found {type(value).__name__}, {expected}")
    try:
        return timedelta(seconds=value)
    except (ValueError, OverflowError):
        raise ValueError(f"{name}: {value!r} is out of range, {expected}") from None
