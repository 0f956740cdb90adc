"""One output of a generation: its sequence's records become text, and it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.scheduler.step import SEQUENCE_UPDATE, FinishReason, TokenScores
from foreword.service.engine.messages import StepHeader
from foreword.service.frontend.coalescer import Coalescer
from foreword.service.frontend.response_size import fill_parts
from foreword.service.frontend.settings import GenerationSettings, TimingLevel
from foreword.service.frontend.steps import StepLedger, StepShare
from foreword.service.frontend.timeline import Delivery
from foreword.service.frontend.token_columns import TokenColumns
from foreword.service.text.detokenizer import IncrementalDetokenizer, TextDelta
from foreword.service.text.vocabulary import Vocabulary


class Record(NamedTuple):
    """A record of `SEQUENCE_UPDATE` as Python numbers."""

    request_key: int = 0
    first_scheduled_ns: int = 0
    num_tokens: int = 0
    num_prompt_computed: int = 0
    num_scored: int = 0
    num_cached: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    step_kind: int = 0
    finish_reason: int = 0
    drafter: int = 0


assert Record._fields == SEQUENCE_UPDATE.names


@dataclass(frozen=True, slots=True)
class Finish:
    """How an output ended.

    Attributes:
        reason: why; `None` for a stop string.
        stop_string: the one that matched.
        stop_token_id: the end or stop token that was drawn.
    """

    reason: FinishReason | None
    stop_string: str | None = None
    stop_token_id: int | None = None

    @property
    def name(self) -> str:
        """One word for the log."""
        return "STOP_STRING" if self.reason is None else self.reason.name


@dataclass(frozen=True, slots=True)
class Delta:
    """What an output gained. `steps` is empty below `TimingLevel.STEP`."""

    output_index: int
    text: str
    tokens: TokenColumns
    steps: list[StepShare]


class Output:
    """Turns one sequence's records into deltas.

    Attributes:
        index: among the outputs of its generation.
        request_key: of its sequence.
        record: the last one taken.
        delivery: when its tokens were handed to gRPC.
        coalescer: says when they are.
        num_tokens: tokens that are no longer held back, up to now.
        num_waiting: of those, tokens that were not handed over yet.
        finish: how it ended; `None` while it goes on or when the generation failed.
    """

    def __init__(
        self,
        index: int,
        request_key: int,
        settings: GenerationSettings,
        vocabulary: Vocabulary,
        end_token_ids: Collection[int],
        *,
        max_part_tokens: int | None,
        notify: Callable[[], None],
    ) -> None:
        """Begin without a token.

        Args:
            index: among the outputs of its generation.
            request_key: of its sequence.
            settings: of its generation.
            vocabulary: spells tokens.
            end_token_ids: end and stop tokens that end it.
            max_part_tokens: a streamed output's tokens wait for `hand_over`, and no more than these go into one delta;
                `None` for tokens that count as handed over at once, in one delta.
            notify: called when tokens have waited for others long enough.
        """
        self.index = index
        self.request_key = request_key
        self.record = Record()
        self.delivery = Delivery()
        self.coalescer = Coalescer(settings.coalesce_tokens, settings.coalesce_duration_ns / 1e9, notify)
        self.num_tokens = 0
        self.num_waiting = 0
        self.finish: Finish | None = None
        self._max_part_tokens = max_part_tokens
        self._has_logprobs = settings.logprobs
        self._has_ranks = settings.ranks
        self._num_top = settings.num_top_logprobs
        self._detokenizer = IncrementalDetokenizer(
            vocabulary,
            settings.stop_strings,
            include_stop=settings.include_stop,
            min_output_tokens=settings.min_output_tokens,
            stop_token_ids=set(end_token_ids),
        )
        self._held = TokenColumns(self._num_top)
        self._text: list[str] = []
        self._released = TokenColumns(self._num_top)
        self._full: list[Delta] = []
        self._ledger = StepLedger() if settings.timing_level is TimingLevel.STEP else None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that has completed."""
        return self._detokenizer.matched_stop

    @property
    def has_news(self) -> bool:
        """There is something to take."""
        return bool(self.num_waiting or self._text)

    def push(
        self,
        header: StepHeader,
        record: Record,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        scores: TokenScores | None,
        now_ns: int,
    ) -> None:
        """Take one record with its tokens, and release those that are complete characters and part of no stop."""
        self.record = record
        if not record.num_tokens:
            return
        ids = token_ids.tolist()
        self._held.append(token_ids, logprobs if self._has_logprobs else None, scores, has_ranks=self._has_ranks)
        if self._ledger:
            kind, drafter = record.step_kind, record.drafter
            self._ledger.add(header, kind, record.num_drafted, record.num_accepted, len(ids), now_ns, drafter)
        self._release(self._detokenizer.push(ids), now_ns)

    def flush(self, now_ns: int, *, drop_last: bool = False) -> None:
        """Release what is held back, without its last token if that is a stop to be left out."""
        self._release(self._detokenizer.finish(drop_last=drop_last), now_ns)

    def hand_over(self, now_ns: int) -> None:
        """Note that what waits goes to gRPC now."""
        if self.num_waiting:
            self.coalescer.restart()
        self.delivery.hand_over(self.num_waiting, now_ns)
        self.num_waiting = 0
        for delta in self._full:
            for step in delta.steps:
                step.emit_ns = now_ns
        if self._ledger:
            self._ledger.hand_over(now_ns)

    def take(self) -> list[Delta]:
        """What was released since the last time, in as many deltas as it needs."""
        if self._text or self._released:
            self._fill_delta()
        deltas, self._full = self._full, []
        return deltas

    def _fill_delta(self) -> None:
        steps = self._ledger.take() if self._ledger else []
        self._full.append(Delta(self.index, "".join(self._text), self._released, steps))
        self._text, self._released = [], TokenColumns(self._num_top)

    def _release(self, released: TextDelta, now_ns: int) -> None:
        """Move tokens and their text from what is held back to what waits to be taken."""
        num_tokens = released.num_tokens
        limit = self._max_part_tokens
        if limit is not None:
            move = partial(self._move, now_ns=now_ns)
            num_tokens = fill_parts(num_tokens, limit, len(self._released), move, self._fill_delta)
        if released.text:
            self._text.append(released.text)
        if not num_tokens:
            return
        self._move(num_tokens, now_ns)
        if limit is None:
            self.hand_over(now_ns)
        else:
            self.coalescer.add(self.num_waiting)

    def _move(self, num_tokens: int, now_ns: int) -> None:
        self._held.move(num_tokens, self._released)
        self.num_tokens += num_tokens
        self.num_waiting += num_tokens
        if self._ledger:
            self._ledger.release(num_tokens, now_ns)
