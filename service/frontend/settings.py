"""What one generation does, after validation and with every default filled in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from foreword.scheduler.request import AcceptanceRule, SamplingParams
from foreword.service.text.chat_template import ChatMessage
from foreword.service.text.constraint import Constraint


class TimingLevel(IntEnum):
    """How much timing a generation returns; numbers as in `foreword.v1.TimingLevel`."""

    NONE = 1
    SUMMARY = 2
    STEP = 3


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to continue."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True


Prompt = str | npt.NDArray[np.int32] | Chat


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """One generation as its caller asked for it.

    Attributes:
        request_id: the caller's, or made here.
        prompt: text, token ids or a conversation.
        sampling: in effect.
        num_outputs: independent outputs.
        max_output_tokens: `None` for as many as there is room for.
        min_output_tokens: neither stop tokens nor stop strings end the output before this many.
        stop_strings: end the output where they complete.
        stop_token_ids: end the output when drawn.
        ignore_eos: the model's end tokens do not end the output.
        include_stop: the stop is part of the output.
        max_duration_ns: from receipt to the end.
        has_time_limit: the caller set it.
        return_token_ids: return ids next to the text.
        return_token_bytes: return each token's bytes.
        logprobs: return each token's log probability.
        ranks: return each token's rank.
        num_top_logprobs: return so many most probable tokens at each position.
        prompt_logprobs: return what is returned of output tokens of the prompt's tokens too.
        echo_prompt: return the prompt.
        prefill_progress: tell how far the prompt is computed.
        coalesce_tokens: so many tokens of an output leave together; 1 for as they come.
        coalesce_duration_ns: fewer leave once the first of them has waited so long.
        timing_level: how much timing to return.
        priority: a higher one is served first.
        bypass_prefix_cache: neither read nor feed the prefix cache.
        cache_salt: share cached prefixes only with generations of the same salt.
        drafter: in use; empty for none.
        draft_sources: names that records of sequences refer to by index.
        max_draft_tokens: drafts that a step may check; 0 for none.
        acceptance: how drafts are accepted.
        constraint: form of the output; `None` for any.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    num_outputs: int
    max_output_tokens: int | None
    min_output_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop: bool
    max_duration_ns: int
    has_time_limit: bool
    return_token_ids: bool
    return_token_bytes: bool
    logprobs: bool
    ranks: bool
    num_top_logprobs: int
    prompt_logprobs: bool
    echo_prompt: bool
    prefill_progress: bool
    coalesce_tokens: int
    coalesce_duration_ns: int
    timing_level: TimingLevel
    priority: int
    bypass_prefix_cache: bool
    cache_salt: str
    drafter: str
    draft_sources: tuple[str, ...]
    max_draft_tokens: int
    acceptance: AcceptanceRule
    constraint: Constraint | None
