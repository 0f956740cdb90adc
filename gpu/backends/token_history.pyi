"""What penalties count: the tokens that sequences have used."""

from foreword.gpu.backends.sampling import HistoryCounts
from foreword.scheduler.step import Int32Array

class TokenHistory:
    """Tokens of the rows whose requests have penalties; costs nothing for the others."""

    def __init__(self, max_num_sequences: int, vocab_size: int) -> None: ...
    def forget(self, row: int) -> None:
        """Stop following a row."""

    def follow(self, row: int, prompt: Int32Array, output: Int32Array, max_num_tokens: int) -> None:
        """Follow the sequence that (re)starts in a row.

        Args:
            row: of the scheduler.
            prompt: `[P]` ids of the vocabulary; empty when penalties do not concern the prompt.
            output: `[N]` what it generated before.
            max_num_tokens: prompt and output it can have.
        """

    def append(self, rows: Int32Array, offsets: Int32Array, token_ids: Int32Array) -> None:
        """Take the tokens that came out of a step.

        Args:
            rows: `[B]`.
            offsets: `[B + 1]` tokens of row b are `offsets[b]:offsets[b + 1]`.
            token_ids: `[N]`.
        """

    def counts_before(self, rows: Int32Array, offsets: Int32Array, token_ids: Int32Array) -> HistoryCounts:
        """Counts of what each position to be drawn follows.

        Args:
            rows: `[B]`.
            offsets: `[B + 1]` positions of row b are `offsets[b]:offsets[b + 1]`.
            token_ids: `[L]` tokens before each position: the first of a row is part of its history, the others are
                drafts, each of which counts for the positions behind it.
        """
