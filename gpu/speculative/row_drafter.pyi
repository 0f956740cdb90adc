"""What drafters have in common that keep the tokens of each row to themselves."""

from foreword.gpu.speculative.drafter import Proposals
from foreword.scheduler.request import Request
from foreword.scheduler.step import Int32Array

class RowDrafter:
    """Follows the tokens of every row, each in memory of its own, and guesses how they go on; see `Drafter`."""

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

        Those at positions that are known already change nothing.
        """

    def propose(self, rows: Int32Array, limits: Int32Array) -> Proposals:
        """Guess what follows the last token of each row, at most `limits[b]` tokens, in buffers used again."""
