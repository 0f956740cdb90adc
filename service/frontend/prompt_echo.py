"""A generation's prompt on its way back to the caller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.scheduler.step import TokenScores
from foreword.service.frontend.response_size import fill_parts
from foreword.service.frontend.settings import GenerationSettings
from foreword.service.frontend.token_columns import TokenColumns
from foreword.service.text.detokenizer import IncrementalDetokenizer, TextDelta
from foreword.service.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of the prompt with their text.

    Attributes:
        first_position: of the first token in the prompt.
        text: empty unless it was asked for.
        tokens: what is returned of each. The first token of a prompt has no probability: its scores are NaN and 0.
    """

    first_position: int
    text: str
    tokens: TokenColumns


class PromptEcho:
    """Returns the prompt at once or, when its tokens are to be scored, as scores arrive."""

    def __init__(
        self,
        settings: GenerationSettings,
        vocabulary: Vocabulary,
        token_ids: npt.NDArray[np.int32],
        max_part_tokens: int | None = None,
    ) -> None:
        """Begin with nothing or with all of it.

        Args:
            settings: of the generation.
            vocabulary: spells tokens.
            token_ids: `[P]` the prompt.
            max_part_tokens: in one part; `None` for all of them.
        """
        self._settings = settings
        self._token_ids = token_ids
        self._num_pushed = 0
        self._num_taken = 0
        self._detokenizer = IncrementalDetokenizer(vocabulary) if settings.echo_prompt else None
        self._held = TokenColumns(settings.num_top_logprobs)
        self._released = TokenColumns(settings.num_top_logprobs)
        self._text: list[str] = []
        self._max_part_tokens = max_part_tokens or len(token_ids)
        self._full: list[PromptPart] = []
        if settings.prompt_logprobs:
            num_top = settings.num_top_logprobs
            nothing = np.zeros(num_top, np.int32), np.zeros(num_top, np.float32)
            self.push(TokenScores(np.full(1, np.nan, np.float32), np.zeros(1, np.int32), num_top, *nothing))
        else:
            self._push(len(token_ids), None)

    def push(self, scores: TokenScores) -> None:
        """Take the scores of the next tokens."""
        self._push(len(scores.ranks), scores)

    def take(self) -> list[PromptPart]:
        """What came since the last time, in as many parts as it needs."""
        if self._released:
            self._fill_part()
        parts, self._full = self._full, []
        return parts

    def _fill_part(self) -> None:
        part = PromptPart(self._num_taken, "".join(self._text), self._released)
        self._num_taken += len(part.tokens)
        self._text, self._released = [], TokenColumns(self._settings.num_top_logprobs)
        self._full.append(part)

    def _push(self, num_tokens: int, scores: TokenScores | None) -> None:
        token_ids = self._token_ids[self._num_pushed : self._num_pushed + num_tokens]
        logprobs = None if scores is None else scores.logprobs
        self._held.append(token_ids, logprobs, scores, has_ranks=self._settings.ranks)
        self._num_pushed += num_tokens
        start = 0
        while start < num_tokens:
            num_held = self._detokenizer.num_held_tokens if self._detokenizer else 0
            end = start + max(1, self._max_part_tokens - num_held)  # what is held is released with the piece
            piece = token_ids[start:end].tolist()
            self._release(self._detokenizer.push(piece) if self._detokenizer else TextDelta("", len(piece)))
            start = end
        if self._detokenizer and self._num_pushed == len(self._token_ids):
            self._release(self._detokenizer.finish())

    def _release(self, released: TextDelta) -> None:
        num_released = len(self._released)
        num_left = fill_parts(released.num_tokens, self._max_part_tokens, num_released, self._move, self._fill_part)
        self._text.append(released.text)
        self._move(num_left)

    def _move(self, num_tokens: int) -> None:
        self._held.move(num_tokens, self._released)
