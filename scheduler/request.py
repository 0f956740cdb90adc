"""What a generation asks for, after text has become tokens and every default has been filled in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

MIN_PRIORITY, MAX_PRIORITY = -100, 100
_SEED_STRIDE = 0x9E37_79B9_7F4A_7C15
"""Between the seeds of two outputs: odd, so that every output has its own, and large, so that those of requests with
nearby seeds do not meet."""
_SEED_MASK = (1 << 64) - 1


class AcceptanceRule(IntEnum):
    """How drafts become output; the distribution is the model's in any case."""

    EXACT_MATCH = 1  # a draft that equals the token drawn in its place: the same tokens as without drafts
    REJECTION = 2  # rejection sampling, draft by draft
    BLOCK = 3  # rejection sampling of all drafts together


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from the model's distribution. All values are effective; none means "unset".

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches this; 1 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        typical_p: keep the tokens whose information is closest to the entropy, up to this mass; 1 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and output; 1 for none.
        frequency_penalty: subtracted from a token's logit for each time it is in the output; 0 for none.
        presence_penalty: subtracted once from the logit of each token of the output; 0 for none.
        logit_bias: what is added to the logits of some ids, each named once.
        allowed_token_ids: the only ids that can be drawn; empty for all.
        banned_token_ids: ids that cannot be drawn.
        seed: key of the counter-based generator; the token at a position is a pure function of logits, seed and
            position.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a sequence ends, as far as tokens tell. Stop strings are matched on text, by the service.

    Attributes:
        max_output_tokens: at least 1.
        min_output_tokens: neither `eos_token_ids` nor `stop_token_ids` can be drawn before this many tokens exist.
        eos_token_ids: the model's end tokens; empty when the request ignores them.
        stop_token_ids: further end tokens the request named.
    """

    max_output_tokens: int
    min_output_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, or several that go on from the same prompt.

    Attributes:
        request_key: identifies the sequence for its whole life; unique in the server, never the caller's id. Output i
            of several is a sequence with this key plus i.
        prompt_token_ids: int32 `[num_prompt_tokens]`, at least one.
        arrival_ns: monotonic clock at receipt, nanoseconds.
        deadline_ns: monotonic clock at which the sequence ends with `FinishReason.DEADLINE`; 0 for none.
        priority: a higher one is served first; -100 to 100.
        tenant: whose request it is; tenants share what is there in proportion to `SchedulerConfig.tenant_weights`.
        cache_salt: requests share cached blocks only with requests of the same salt.
        bypass_prefix_cache: neither reads nor feeds the prefix cache.
        want_logprobs: return the log probability of every chosen token.
        want_ranks: return the rank of every chosen token.
        want_prompt_logprobs: return scores of the prompt's tokens, which are all computed then; with several outputs
            those of the first.
        num_top_logprobs: return so many most probable tokens at every position of the output.
        max_draft_tokens: drafts that a step may check for the sequence, if the device proposes as many; 0 for none.
        acceptance: how drafts are accepted.
        drafter: who proposes them; empty for the device's choice.
        grammar: that the output follows, in the device's notation; empty for none.
        num_outputs: sequences, all from this prompt; at least 1.
    """

    request_key: int
    prompt_token_ids: npt.NDArray[np.int32]
    stopping: StoppingParams
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_ns: int = 0
    deadline_ns: int = 0
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    want_logprobs: bool = False
    want_ranks: bool = False
    want_prompt_logprobs: bool = False
    num_top_logprobs: int = 0
    max_draft_tokens: int = 16
    acceptance: AcceptanceRule = AcceptanceRule.EXACT_MATCH
    drafter: str = ""
    grammar: str = ""
    num_outputs: int = 1

    @property
    def needs_last_token(self) -> bool:
        """Whether the distribution of its next token depends on which one it drew last, beyond what the model computes.

        So it does under a grammar and under penalties. Under lookahead such a sequence waits for each result.
        """
        sampling = self.sampling
        is_penalised = sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty
        return bool(self.grammar) or bool(is_penalised)

    @property
    def output_keys(self) -> range:
        """Keys of its outputs."""
        return range(self.request_key, self.request_key + self.num_outputs)

    def output(self, index: int) -> Request:
        """The request of one output alone: with a key and a seed of its own, which do not depend on `num_outputs`.

        Outputs that bypass the prefix cache still share their prompt's blocks: under a salt that is no text, so that
        no caller can give it.
        """
        if self.num_outputs == 1:
            return self
        is_private = self.bypass_prefix_cache
        return replace(
            self,
            request_key=self.request_key + index,
            sampling=replace(self.sampling, seed=(self.sampling.seed + index * _SEED_STRIDE) & _SEED_MASK),
            cache_salt=f"\udcff{self.request_key}" if is_private else self.cache_salt,
            bypass_prefix_cache=False,
            want_prompt_logprobs=self.want_prompt_logprobs and index == 0,
            num_outputs=1,
        )
