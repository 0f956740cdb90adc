"""What the engine and its front ends say to each other.

Front end -> engine: hello, submit, cancel, pause, resume. Engine -> front end: one welcome per hello, one admission
reply per submit, and one `StepReport` per step, however many sequences and tokens the step touched, none included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foreword.scheduler.errors import ForewordError, InvalidField
from foreword.scheduler.request import Request
from foreword.scheduler.step import DraftState, SchedulerLoad, StepForecast, TokenScores

FRONT_END_SHIFT = 48
"""A request key holds the index of its front end above this bit, and that front end's own counter below."""
_IDENTITY_PREFIX = b"front-end-"


class MalformedMessage(Exception):
    """What arrived is not a message, or not one for its receiver."""


def front_end_identity(front_end: int) -> bytes:
    """ZeroMQ identity of a front end, by its index."""
    return _IDENTITY_PREFIX + str(front_end).encode()


def front_end_index(identity: bytes) -> int:
    """Index of the front end with this ZeroMQ identity.

    Raises:
        MalformedMessage: no front end has it.
    """
    index = identity.removeprefix(_IDENTITY_PREFIX)
    if not index.isdigit():
        raise MalformedMessage("the sender is not a front end")
    return int(index)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that hold while an engine lives.

    Attributes:
        device: "cpu" or "cuda:0".
        device_name: as the operating system or driver calls it.
        dtype: number format, "int8", "bfloat16", "float16" or "float32".
        architecture: "LlamaForCausalLM".
        vocab_size: rows of the output head; a token id is below it.
        num_parameters: weights of the model.
        max_model_len: tokens (prompt and output) a sequence may have.
        max_num_sequences: sequences that run at once.
        max_num_batched_tokens: token budget of a step.
        block_size: tokens per KV cache block.
        num_blocks: blocks of the KV cache.
        load_duration_s: from start of the process to ready.
        drafter: name of the drafter; empty when speculation is off.
        drafters: names of those that it chooses among, or its own.
        max_draft_tokens: drafts of a sequence that a step checks at most.
    """

    device: str
    device_name: str
    dtype: str
    architecture: str
    vocab_size: int
    num_parameters: int
    max_model_len: int
    max_num_sequences: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    load_duration_s: float
    drafter: str = ""
    drafters: tuple[str, ...] = ("",)
    max_draft_tokens: int = 0

    @property
    def available_drafters(self) -> tuple[str, ...]:
        """Names that a request may give."""
        return tuple(dict.fromkeys((self.drafter, *self.drafters))) if self.drafter else ()

    @property
    def draft_sources(self) -> tuple[str, ...]:
        """Names of all that drafts come from; `SEQUENCE_UPDATE` refers to them by index."""
        return (*self.drafters, "grammar")


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """A `ForewordError` on its way to another process.

    Attributes:
        reason: names the class of the error.
        message: for people.
        metadata: for machines.
    """

    reason: str
    message: str
    metadata: dict[str, str]

    @classmethod
    def of(cls, error: ForewordError) -> ErrorRecord:
        """The record of an error."""
        return cls(error.reason, error.message, error.metadata)

    def to_error(self) -> ForewordError:
        """The error again, of the class it had; `ForewordError` itself when no class has this reason."""
        if self.reason == InvalidField.reason:
            field = self.metadata["field"]
            return InvalidField(field, self.message.removeprefix(f"{field}: "))
        for error_class in ForewordError.__subclasses__():
            if error_class.reason == self.reason:
                return error_class(self.message, **self.metadata)
        return ForewordError(self.message, **self.metadata)


@dataclass(frozen=True, slots=True)
class Hello:
    """A front end is there; answered with `Welcome`."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The engine takes requests.

    Attributes:
        info: facts about the engine.
        load: gauges at this moment.
    """

    info: EngineInfo
    load: SchedulerLoad


@dataclass(frozen=True, slots=True)
class Submit:
    """Generate a sequence; answered at once with `Admitted` or `Refused`, before any `StepReport` that names it."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a sequence; a key that is not active is ignored."""

    request_key: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop scheduling a sequence until `Resume`; a key that is not active is ignored."""

    request_key: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Schedule a paused sequence again; a key that is not active is ignored."""

    request_key: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The scheduler took the request."""

    request_key: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The scheduler did not take the request."""

    request_key: int
    error: ErrorRecord


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts of one drafter that a step checked.

    Attributes:
        drafter: index in `EngineInfo.draft_sources`.
        num_drafted: draft tokens checked.
        num_accepted: of those, accepted and kept.
    """

    drafter: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class StepHeader:
    """Facts about one step, the same for all of its sequences.

    Attributes:
        step_id: counts from 1.
        start_ns: monotonic clock before `schedule`.
        end_ns: monotonic clock when the step's tokens were known to the engine.
        draft_duration_ns: time spent proposing drafts.
        model_duration_ns: time spent in the target model and sampling.
        num_sequences: sequences in the batch.
        num_tokens: tokens in the batch.
        load: gauges after the step.
        draft_state: whether drafts are proposed after the step, and why not.
        schedule_duration_ns: time spent deciding what to compute.
        num_prefill_sequences: of the sequences, those whose prompt was computed.
        num_prefill_tokens: of the tokens, those of prompts.
        num_drafted: draft tokens checked.
        num_accepted: of those, accepted and kept.
        drafted: sequences that had a draft checked at each place of a draft, from the first place on.
        accepted: of those, sequences whose draft was accepted and kept.
        emitted: of the sequences that had drafts checked, those that a token came out of at each place.
        forecast: what the device expected of the step.
        num_output_tokens: tokens that came out.
        num_preempted: sequences that lost their blocks to others.
        num_finished: sequences that ended.
        drafts: the drafts checked, of each drafter that has any.
    """

    step_id: int
    start_ns: int
    end_ns: int
    draft_duration_ns: int
    model_duration_ns: int
    num_sequences: int
    num_tokens: int
    load: SchedulerLoad
    draft_state: DraftState = DraftState.DISABLED
    schedule_duration_ns: int = 0
    num_prefill_sequences: int = 0
    num_prefill_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()
    forecast: StepForecast = field(default_factory=StepForecast)
    num_output_tokens: int = 0
    num_preempted: int = 0
    num_finished: int = 0
    drafts: tuple[DraftCounts, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step's news for one front end.

    Attributes:
        header: facts about the step.
        sequences: `[U]` of dtype `scheduler.step.SEQUENCE_UPDATE`.
        token_ids: `[N]` int32, `num_tokens` of each sequence in order.
        logprobs: `[N]` float32.
        scores: of the N tokens, zero where the request did not ask; None when none did.
        prompt_scores: of prompt tokens, `num_scored` of each sequence in order; None when there are none.
    """

    header: StepHeader
    sequences: npt.NDArray[np.void]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None


Message = Hello | Welcome | Submit | Cancel | Pause | Resume | Admitted | Refused | StepReport


class GenerationSink(Protocol):
    """Takes the news of the sequences of one request, on the event loop's thread. Must not block and must not raise."""

    def on_step(
        self,
        header: StepHeader,
        update: np.void,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        scores: TokenScores | None = None,
        prompt_scores: TokenScores | None = None,
    ) -> None:
        """Take one record of dtype `SEQUENCE_UPDATE` with its tokens; a sequence's last one has a `finish_reason`.

        Args:
            header: facts about the step.
            update: the record.
            token_ids: its tokens.
            logprobs: of its tokens.
            scores: of its tokens, when any sequence of the step asked for scores.
            prompt_scores: of its prompt tokens, `num_scored` of them; None for none.
        """

    def on_failure(self, error: ForewordError) -> None:
        """A sequence ended without a last update: the engine failed. Called for each that had not ended."""
