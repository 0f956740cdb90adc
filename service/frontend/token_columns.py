"""What a generation returns of each token, as parallel arrays."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from foreword.scheduler.step import TokenScores


class TokenColumns:
    """Tokens and what was asked for of them. Columns are filled together or stay empty, and are cut together.

    Attributes:
        num_top: most probable tokens at each position.
        token_ids: `[N]`.
        logprobs: `[N]`.
        ranks: `[N]`.
        top_token_ids: `[N * num_top]` those of the first token, then of the second, ...
        top_logprobs: `[N * num_top]`.
    """

    __slots__ = ("logprobs", "num_top", "ranks", "token_ids", "top_logprobs", "top_token_ids")

    def __init__(self, num_top: int = 0) -> None:
        self.num_top = num_top
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.ranks = array("i")
        self.top_token_ids = array("i")
        self.top_logprobs = array("f")

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(
        self,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32] | None,
        scores: TokenScores | None,
        *,
        has_ranks: bool,
    ) -> None:
        """Add tokens.

        Args:
            token_ids: `[N]`.
            logprobs: `[N]`; `None` leaves the column alone.
            scores: of the tokens, with at least `num_top` most probable ones; `None` leaves their columns alone.
            has_ranks: take the ranks of the scores.
        """
        self.token_ids.frombytes(token_ids.tobytes())
        if logprobs is not None:
            self.logprobs.frombytes(logprobs.tobytes())
        if scores is None:
            return
        if has_ranks:
            self.ranks.frombytes(scores.ranks.tobytes())
        if self.num_top:
            shape = (len(token_ids), scores.num_top)
            self.top_token_ids.frombytes(scores.top_token_ids.reshape(shape)[:, : self.num_top].tobytes())
            self.top_logprobs.frombytes(scores.top_logprobs.reshape(shape)[:, : self.num_top].tobytes())

    def move(self, num_tokens: int, target: TokenColumns) -> None:
        """Move the first tokens behind those of another."""
        for name in ("token_ids", "logprobs", "ranks"):
            self._move(name, num_tokens, target)
        for name in ("top_token_ids", "top_logprobs"):
            self._move(name, num_tokens * self.num_top, target)

    def _move(self, name: str, count: int, target: TokenColumns) -> None:
        if column := getattr(self, name):
            getattr(target, name).extend(column[:count])
            del column[:count]
