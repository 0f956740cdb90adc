"""Prompt lookup: what followed the last few tokens when they stood in the sequence before."""

from foreword.gpu.speculative.drafter import Proposals
from foreword.scheduler.request import Request
from foreword.scheduler.step import Int32Array

class NgramDrafter:
    """Continues the most recent earlier occurrence of the longest suffix of 5 to 2 tokens.

    (Prompt lookup decoding, Saxena 2023.) Each row keeps its tokens and, for each match length, a hash table from the
    n-grams of the row to the position behind their last occurrence; a token costs one probe a length. A proposal that
    reaches the end of the sequence goes on with itself, so that periodic text is continued. Confidence is the match
    length. Memory: at most 68 bytes a token that prompt and output may have, allocated at admission and freed when the
    row is admitted again.
    """

    name: str
    names: tuple[str, ...]
    max_confidence: int

    def __init__(self, max_num_sequences: int, max_model_len: int, max_draft_tokens: int, vocab_size: int) -> None: ...
    def admit(self, row: int, request: Request, output_token_ids: Int32Array) -> None:
        """Forget what a row held; it (re)starts with the prompt of a request and the output so far.

        Raises:
            IndexError: there is no such row.
        """

    def observe(
        self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array, starts: Int32Array, ends: Int32Array
    ) -> None:
        """Learn tokens that stand in rows: b's are `token_ids[starts[b]:ends[b]]`, from `positions[b]` on.

        Those at positions that are known already change nothing. Positions that were never seen match nothing and are
        never proposed.
        """

    def propose(self, rows: Int32Array, limits: Int32Array) -> Proposals:
        """Guess what follows the last token of each row, at most `limits[b]` tokens, in buffers used again."""
