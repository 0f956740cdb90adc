"""From Python arguments to a `GenerationSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict, cast

from foreword.clients.message import Message, chat_input
from foreword.v1.cache_pb2 import CacheConfig
from foreword.v1.constraint_pb2 import Constraint
from foreword.v1.generation_pb2 import GenerationSpec
from foreword.v1.output_pb2 import OutputConfig
from foreword.v1.sampling_pb2 import SamplingConfig
from foreword.v1.speculation_pb2 import SpeculationConfig
from foreword.v1.stopping_pb2 import StoppingConfig
from foreword.v1.tokens_pb2 import TokenIds

Prompt = str | Sequence[int] | Sequence[Message]
"""What the model continues: plain text, token ids, or a conversation for its chat template."""


class GenerationOptions(TypedDict, total=False):
    """Settings of a generation, by the names of their fields in the API, where each is described.

    One that is left out, or None, is unset: the server's default holds.
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
    max_generation_duration: timedelta | None

    logprobs: bool | None
    ranks: bool | None
    top_logprob_count: int | None
    prompt_logprobs: bool | None
    return_token_ids: bool | None
    return_token_bytes: bool | None
    echo_prompt: bool | None
    prefill_progress: bool | None
    coalesce_token_count: int | None
    coalesce_duration: timedelta | None
    timing_level: Literal["none", "summary", "step"] | None


_SECTION_OF = {
    field.name: section
    for section, config in (("sampling", SamplingConfig), ("stopping", StoppingConfig), ("output", OutputConfig))
    for field in config.DESCRIPTOR.fields
}


def generation_spec(prompt: Prompt, options: GenerationOptions) -> GenerationSpec:
    """Put a prompt and its settings together.

    Raises:
        ValueError: an empty sequence as prompt, or a value that its field cannot hold.
        TypeError: an unknown setting, or a value of the wrong type.
    """
    arguments: dict[str, Any] = _input(prompt)
    for name, value in options.items():
        if value is None:
            continue
        if name not in GenerationOptions.__annotations__:
            raise TypeError(f"{name!r} is not a setting of a generation; see foreword.clients.GenerationOptions")
        if name == "timing_level":
            value = f"TIMING_LEVEL_{str(value).upper()}"
        section = _SECTION_OF.get(name)
        (arguments.setdefault(section, {}) if section else arguments)[name] = value
    return GenerationSpec(**arguments)


def _input(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not len(prompt):
        raise ValueError("prompt: an empty sequence, expected token ids or messages")
    if isinstance(prompt[0], Message):
        return {"chat": chat_input(cast(Sequence[Message], prompt))}
    return {"prompt_token_ids": TokenIds(ids=cast(Sequence[int], prompt))}
