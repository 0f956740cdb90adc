"""Which drawn tokens come out of a step: drafts are accepted while they equal the tokens drawn in their place.

The model draws its own token at every position of a verification, with the noise of that position (`sampling`). A
draft is accepted if it is that token, so what comes out is what would have come out without drafts. For drafts that are
points, such as those of an n-gram drafter, this accepts a draft x with probability p(x), as the rule of Leviathan et
al. (2023) and Chen et al. (2023) does.

The rows of a sequence come out up to and including the first whose token differs from its draft. A row that cannot be
sampled ends the run before it, as it would have without drafts: only a sequence whose first row fails has failed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.gpu.backends.sampling import Samples
from foreword.scheduler.step import BoolArray, Float32Array, Int32Array, TokenScores


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """The N tokens that come out of a step of B sequences. Host arrays.

    Attributes:
        offsets: `[B + 1]` tokens of sequence b are `offsets[b]:offsets[b + 1]`.
        logits_rows: `[N]` row of the step's logits that each was drawn from, ascending.
        token_ids: `[N]`.
        logprobs: `[N]`; 0 where not asked for.
        failed: `[B]` sequences whose first row cannot be sampled.
        scores: of the N tokens, zero where not asked for; None when none are.
    """

    offsets: Int32Array
    logits_rows: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array
    failed: BoolArray
    scores: TokenScores | None = None

    def first(self, counts: Int32Array) -> AcceptedTokens:
        """Keep the first `counts` `[B]` tokens of each sequence, or all where it has no more."""
        lengths = np.diff(self.offsets)
        kept = np.minimum(counts, lengths)
        index_in_sequence = np.arange(len(self.token_ids)) - np.repeat(self.offsets[:-1], lengths)
        is_kept = index_in_sequence < np.repeat(kept, lengths)
        return AcceptedTokens(
            np.concatenate([[0], np.cumsum(kept)]).astype(np.int32),
            self.logits_rows[is_kept],
            self.token_ids[is_kept],
            self.logprobs[is_kept],
            self.failed,
            self.scores and self.scores.take(is_kept),
        )


def accept(samples: Samples, input_ids: Int32Array, logits_offsets: Int32Array) -> AcceptedTokens:
    """Accept drafts by the rule above.

    Args:
        samples: drawn from L rows of logits.
        input_ids: `[L]` the token that each row follows: the draft checked by row i is `input_ids[i + 1]`, if both are
            of one sequence. An id that no token has, -1, is never accepted.
        logits_offsets: `[B + 1]` rows of sequence b are `logits_offsets[b]:logits_offsets[b + 1]`.
    """
    lengths = np.diff(logits_offsets)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    goes_on = np.zeros(len(input_ids), np.bool_)
    goes_on[:-1] = (samples.token_ids[:-1] == input_ids[1:]) & ~samples.failed[:-1]
    # Row i comes out when every row of its sequence before it goes on; of a sequence's last row it does not matter.
    stops_before: Int32Array = np.cumsum(~goes_on, dtype=np.int32) - ~goes_on
    is_accepted = (stops_before == stops_before[logits_offsets[:-1][owner]]) & ~samples.failed
    failed = np.zeros(len(lengths), np.bool_)
    failed[lengths > 0] = samples.failed[logits_offsets[:-1][lengths > 0]]
    logits_rows = np.flatnonzero(is_accepted).astype(np.int32)
    return AcceptedTokens(
        np.concatenate([[0], np.cumsum(is_accepted)])[logits_offsets].astype(np.int32),
        logits_rows,
        samples.token_ids[logits_rows],
        samples.logprobs[logits_rows],
        failed,
    )


def spread(scores: TokenScores, is_scored: BoolArray) -> TokenScores:
    """Scores of all tokens from those of some, zero for the others.

    Args:
        scores: of the tokens that are scored.
        is_scored: which those are.
    """
    if is_scored.all():
        return scores
    # An extra entry of zeros stands for the others.
    padded = TokenScores(
        np.append(scores.logprobs, np.float32(0)),
        np.append(scores.ranks, np.int32(0)),
        scores.num_top,
        np.append(scores.top_token_ids, np.zeros(scores.num_top, np.int32)),
        np.append(scores.top_logprobs, np.zeros(scores.num_top, np.float32)),
    )
    return padded.take(np.where(is_scored, np.cumsum(is_scored) - 1, len(scores.ranks)))
