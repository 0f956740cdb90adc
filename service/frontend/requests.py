"""Reads what callers ask for: from messages of `foreword.v1` to the service's own objects."""

from __future__ import annotations

import json
import secrets
from typing import Any

import numpy as np

from foreword.scheduler.errors import ContextLengthExceeded, InvalidField
from foreword.scheduler.request import AcceptanceRule, SamplingParams
from foreword.service.engine.messages import EngineInfo
from foreword.service.frontend import validation
from foreword.service.frontend.settings import Chat, GenerationSettings, Prompt, TimingLevel
from foreword.service.text.chat_template import ChatMessage
from foreword.service.text.constraint import Constraint
from foreword.v1 import (
    chat_pb2,
    constraint_pb2,
    generation_pb2,
    output_pb2,
    sampling_pb2,
    speculation_pb2,
    stopping_pb2,
    timing_pb2,
)

DEFAULT_SAMPLING = SamplingParams()
MAX_DRAFT_TOKENS = 16
MAX_TOP_LOGPROBS = 20
MAX_OUTPUTS = 16
COALESCE_S = 0.05
MAX_COALESCE_S = 1.0
MAX_CONSTRAINT_BYTES = {
    "json_schema": 65_536,
    "json_object": 0,
    "regex": 16_384,
    "grammar": 65_536,
    "choices": 65_536,
}

SUPPORTED_FIELDS = frozenset(
    {
        "request_id",
        "model",
        "prompt",
        "prompt_token_ids.ids",
        "chat.messages.role",
        "chat.messages.content",
        "chat.add_generation_prompt",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.top_k",
        "sampling.min_p",
        "sampling.typical_p",
        "sampling.frequency_penalty",
        "sampling.presence_penalty",
        "sampling.repetition_penalty",
        "sampling.logit_bias",
        "sampling.allowed_token_ids",
        "sampling.banned_token_ids",
        "sampling.seed",
        "sampling.output_count",
        "stopping.max_output_token_count",
        "stopping.min_output_token_count",
        "stopping.stop_strings",
        "stopping.stop_token_ids",
        "stopping.ignore_eos",
        "stopping.include_stop",
        "stopping.max_generation_duration",
        "output.logprobs",
        "output.ranks",
        "output.top_logprob_count",
        "output.prompt_logprobs",
        "output.echo_prompt",
        "output.return_token_ids",
        "output.return_token_bytes",
        "output.prefill_progress",
        "output.coalesce_token_count",
        "output.coalesce_duration",
        "output.timing_level",
        "cache.bypass_prefix_cache",
        "cache.cache_salt",
        "speculation.disabled",
        "speculation.draft_token_count",
        "speculation.drafter",
        "speculation.acceptance",
        "constraint.json_schema",
        "constraint.json_object",
        "constraint.regex",
        "constraint.grammar",
        "constraint.choices.choices",
        "priority",
    }
)
"""Fields of `GenerationSpec` that mean something to this server. All others are refused."""

_ROLES = {
    chat_pb2.ROLE_SYSTEM: "system",
    chat_pb2.ROLE_USER: "user",
    chat_pb2.ROLE_ASSISTANT: "assistant",
    chat_pb2.ROLE_TOOL: "tool",
}


def read_settings(
    spec: generation_pb2.GenerationSpec, info: EngineInfo, max_duration_ns: int, *, streamed: bool = True
) -> GenerationSettings:
    """Check a specification and fill in its defaults.

    Args:
        spec: from a caller.
        info: facts about the engine that is to generate.
        max_duration_ns: the server's own limit.
        streamed: the answer may come in parts.

    Raises:
        InvalidField: a field cannot be used.
        ContextLengthExceeded: more token ids than the context holds.
    """
    validation.check_count("chat.messages", len(spec.chat.messages), validation.MAX_MESSAGES)
    validation.check_supported(spec, SUPPORTED_FIELDS)
    if spec.HasField("request_id"):
        validation.check_request_id("request_id", spec.request_id)
    stopping, output = spec.stopping, spec.output
    max_tokens = stopping.max_output_token_count if stopping.HasField("max_output_token_count") else None
    if max_tokens is not None:
        validation.check_number("stopping.max_output_token_count", max_tokens, 1)
    min_tokens = stopping.min_output_token_count
    validation.check_number(
        "stopping.min_output_token_count", min_tokens, 0, (1 << 31) - 1 if max_tokens is None else max_tokens
    )
    validation.check_stop_strings("stopping.stop_strings", stopping.stop_strings)
    validation.check_count("stopping.stop_token_ids", len(stopping.stop_token_ids))
    validation.check_token_ids("stopping.stop_token_ids", np.array(stopping.stop_token_ids, np.int32), info.vocab_size)
    validation.check_number("output.top_logprob_count", output.top_logprob_count, 0, MAX_TOP_LOGPROBS)
    validation.check_number("priority", spec.priority, -100, 100)
    validation.check_cache_salt("cache.cache_salt", spec.cache.cache_salt)
    if not streamed and output.prefill_progress:
        raise InvalidField("output.prefill_progress", "must be unset in GenerateText, which answers once")
    coalesce_tokens, coalesce_duration_ns = _read_coalescing(output, streamed=streamed)
    max_draft_tokens = _read_max_draft_tokens(spec.speculation, info)
    return GenerationSettings(
        request_id=spec.request_id if spec.HasField("request_id") else secrets.token_hex(16),
        prompt=_read_prompt(spec, info),
        sampling=_read_sampling(spec.sampling, info),
        num_outputs=_read_num_outputs(spec.sampling),
        max_output_tokens=max_tokens,
        min_output_tokens=min_tokens,
        stop_strings=tuple(stopping.stop_strings),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        include_stop=stopping.include_stop,
        max_duration_ns=_read_max_duration(stopping, max_duration_ns),
        has_time_limit=stopping.HasField("max_generation_duration"),
        return_token_ids=output.return_token_ids if output.HasField("return_token_ids") else True,
        return_token_bytes=output.return_token_bytes,
        logprobs=output.logprobs,
        ranks=output.ranks,
        num_top_logprobs=output.top_logprob_count,
        prompt_logprobs=output.prompt_logprobs,
        echo_prompt=output.echo_prompt,
        prefill_progress=output.prefill_progress,
        coalesce_tokens=coalesce_tokens,
        coalesce_duration_ns=coalesce_duration_ns,
        timing_level=_read_timing_level(output.timing_level),
        priority=spec.priority,
        bypass_prefix_cache=spec.cache.bypass_prefix_cache,
        cache_salt=spec.cache.cache_salt,
        drafter=(spec.speculation.drafter or info.drafter) if max_draft_tokens else "",
        draft_sources=info.draft_sources,
        max_draft_tokens=max_draft_tokens,
        acceptance=_read_acceptance(spec.speculation.acceptance),
        constraint=_read_constraint(spec.constraint) if spec.HasField("constraint") else None,
    )


def read_chat(chat: chat_pb2.ChatInput, path: str = "chat") -> Chat:
    """Check a conversation.

    Raises:
        InvalidField: it has no turn, or one without a role.
    """
    if not chat.messages:
        raise InvalidField(f"{path}.messages", "is empty")
    for index, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            names = ", ".join(chat_pb2.Role.Name(role) for role in _ROLES)
            raise InvalidField(f"{path}.messages[{index}].role", f"must be one of {names}")
    messages = tuple(ChatMessage(_ROLES[message.role], message.content) for message in chat.messages)
    return Chat(messages, chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True)


def _read_prompt(spec: generation_pb2.GenerationSpec, info: EngineInfo) -> Prompt:
    kind = spec.WhichOneof("input")
    if kind is None:
        raise InvalidField("input", "is required: one of prompt, prompt_token_ids, chat")
    if kind == "chat":
        return read_chat(spec.chat)
    if kind == "prompt":
        if not spec.prompt:
            raise InvalidField("prompt", "is empty")
        return spec.prompt
    count = len(spec.prompt_token_ids.ids)
    if not count:
        raise InvalidField("prompt_token_ids.ids", "is empty")
    if count > info.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {count} tokens, the context {info.max_model_len}",
            prompt_token_count=count,
            max_context_token_count=info.max_model_len,
        )
    token_ids = np.array(spec.prompt_token_ids.ids, np.int32)
    validation.check_token_ids("prompt_token_ids.ids", token_ids, info.vocab_size)
    return token_ids


def _read_sampling(sampling: sampling_pb2.SamplingConfig, info: EngineInfo) -> SamplingParams:
    is_set = {field.name for field, _ in sampling.ListFields()}

    def given(name: str, default: Any) -> Any:
        return getattr(sampling, name) if name in is_set else default

    params = SamplingParams(
        temperature=given("temperature", DEFAULT_SAMPLING.temperature),
        top_k=given("top_k", DEFAULT_SAMPLING.top_k),
        top_p=given("top_p", DEFAULT_SAMPLING.top_p),
        min_p=given("min_p", DEFAULT_SAMPLING.min_p),
        typical_p=given("typical_p", DEFAULT_SAMPLING.typical_p),
        repetition_penalty=given("repetition_penalty", DEFAULT_SAMPLING.repetition_penalty),
        frequency_penalty=given("frequency_penalty", DEFAULT_SAMPLING.frequency_penalty),
        presence_penalty=given("presence_penalty", DEFAULT_SAMPLING.presence_penalty),
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        banned_token_ids=tuple(sampling.banned_token_ids),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
    )
    validation.check_number("sampling.temperature", params.temperature, 0)
    validation.check_number("sampling.top_k", params.top_k, 0)
    validation.check_number("sampling.top_p", params.top_p, 0, 1, above_low=True)
    validation.check_number("sampling.min_p", params.min_p, 0, 1)
    validation.check_number("sampling.typical_p", params.typical_p, 0, 1, above_low=True)
    validation.check_number("sampling.repetition_penalty", params.repetition_penalty, 0, 10, above_low=True)
    validation.check_number("sampling.frequency_penalty", params.frequency_penalty, -2, 2)
    validation.check_number("sampling.presence_penalty", params.presence_penalty, -2, 2)
    validation.check_count("sampling.logit_bias", len(params.logit_bias))
    for token_id, value in params.logit_bias:
        validation.check_number("sampling.logit_bias", token_id, 0, info.vocab_size - 1)
        validation.check_number(f"sampling.logit_bias[{token_id}]", value, -100, 100)
    for name in ("allowed_token_ids", "banned_token_ids"):
        token_ids = np.array(getattr(params, name), np.int32)
        validation.check_count(f"sampling.{name}", len(token_ids), validation.MAX_MASK_IDS)
        validation.check_token_ids(f"sampling.{name}", token_ids, info.vocab_size)
    if params.allowed_token_ids and set(params.allowed_token_ids) <= set(params.banned_token_ids):
        raise InvalidField("sampling.banned_token_ids", "must leave at least one of allowed_token_ids")
    return params


def _read_num_outputs(sampling: sampling_pb2.SamplingConfig) -> int:
    count = sampling.output_count if sampling.HasField("output_count") else 1
    validation.check_number("sampling.output_count", count, 1, MAX_OUTPUTS)
    return count


def _read_constraint(constraint: constraint_pb2.Constraint) -> Constraint:
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidField("constraint", f"must have one of {', '.join(MAX_CONSTRAINT_BYTES)}")
    if kind == "json_object":
        return Constraint(kind, "")
    path, limit = f"constraint.{kind}", MAX_CONSTRAINT_BYTES[kind]
    if kind != "choices":
        source = getattr(constraint, kind)
        validation.check_size(path, source, limit, is_empty_allowed=kind == "regex")
        return Constraint(kind, source)
    path, choices = f"{path}.choices", constraint.choices.choices
    validation.check_count(path, len(choices))
    if not choices:
        raise InvalidField(path, "is empty")
    for index, choice in enumerate(choices):
        validation.check_size(f"{path}[{index}]", choice, limit)
    validation.check_size(path, "".join(choices), limit)
    return Constraint(kind, json.dumps(list(choices)))


def _read_max_duration(stopping: stopping_pb2.StoppingConfig, limit_ns: int) -> int:
    if not stopping.HasField("max_generation_duration"):
        return limit_ns
    path, duration = "stopping.max_generation_duration", stopping.max_generation_duration
    if not (0 <= duration.nanos < 1_000_000_000 and (duration.seconds, duration.nanos) > (0, 0)):
        raise InvalidField(path, "must be a valid duration above 0")
    return min(duration.seconds * 1_000_000_000 + duration.nanos, limit_ns)


def _read_coalescing(output: output_pb2.OutputConfig, *, streamed: bool) -> tuple[int, int]:
    """Tokens that leave together, and the nanoseconds after which fewer do."""
    num_tokens = output.coalesce_token_count if output.HasField("coalesce_token_count") else 1
    validation.check_number("output.coalesce_token_count", num_tokens, 1)
    if num_tokens > 1 and not streamed:
        raise InvalidField("output.coalesce_token_count", "must be 1 or unset in GenerateText, which answers once")
    if not output.HasField("coalesce_duration"):
        return num_tokens, round(COALESCE_S * 1e9)
    path = "output.coalesce_duration"
    duration_s = validation.check_duration(path, output.coalesce_duration, 0, MAX_COALESCE_S, above_low=True)
    if num_tokens == 1:
        raise InvalidField(path, "must be unset unless coalesce_token_count is above 1")
    return num_tokens, round(duration_s * 1e9)


def _read_max_draft_tokens(speculation: speculation_pb2.SpeculationConfig, info: EngineInfo) -> int:
    """Drafts that a step may check: what the caller allows, within the server's own bound."""
    available = info.available_drafters
    if speculation.HasField("drafter") and speculation.drafter not in available:
        allowed = (
            f"must be one of {', '.join(available)}" if available else "must be unset: this server does not speculate"
        )
        raise InvalidField("speculation.drafter", f"{allowed}, got {speculation.drafter[:80]!r}")
    if not speculation.HasField("draft_token_count"):
        return 0 if speculation.disabled else info.max_draft_tokens
    count = speculation.draft_token_count
    validation.check_number("speculation.draft_token_count", count, 0, MAX_DRAFT_TOKENS)
    if speculation.disabled and count:
        raise InvalidField("speculation.draft_token_count", "must be 0 or unset when speculation is disabled")
    return min(count, info.max_draft_tokens)


def _read_acceptance(rule: int) -> AcceptanceRule:
    if rule == speculation_pb2.ACCEPTANCE_RULE_UNSPECIFIED:
        return AcceptanceRule.EXACT_MATCH
    try:
        return AcceptanceRule(rule)
    except ValueError:
        raise InvalidField(
            "speculation.acceptance", "must be one of " + ", ".join(speculation_pb2.AcceptanceRule.keys())
        ) from None


def _read_timing_level(level: int) -> TimingLevel:
    if level == timing_pb2.TIMING_LEVEL_UNSPECIFIED:
        return TimingLevel.SUMMARY
    try:
        return TimingLevel(level)
    except ValueError:
        raise InvalidField(
            "output.timing_level", "must be one of " + ", ".join(timing_pb2.TimingLevel.keys())
        ) from None
