"""Several drafters, of which each row follows the one that is expected to be right for longest."""

from collections.abc import Sequence

from foreword.gpu.speculative.drafter import Drafter, Proposals
from foreword.scheduler.request import Request
from foreword.scheduler.step import Int32Array

class HybridDrafter:
    """Lets every drafter guess and proposes, for each row, the guess of greatest expected accepted length.

    All guesses are judged by the tokens that come out, those that were not proposed too: from that it learns for each
    row, drafter and confidence how probable it is that a draft is accepted when those before it were. With probability
    p, n drafts are expected to bring p + p^2 + ... + p^n tokens. A row starts with what all rows together have shown.
    A row whose request names a drafter follows that one. Confidence is p, in tenths.
    """

    name: str
    names: tuple[str, ...]
    max_confidence: int

    def __init__(self, drafters: Sequence[Drafter], max_num_sequences: int, max_draft_tokens: int) -> None: ...
    def admit(self, row: int, request: Request, output_token_ids: Int32Array) -> None:
        """Forget what a row held; it (re)starts with the prompt of a request and the output so far.

        Raises:
            IndexError: there is no such row.
        """

    def observe(
        self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array, starts: Int32Array, ends: Int32Array
    ) -> None:
        """Learn tokens that stand in rows: b's are `token_ids[starts[b]:ends[b]]`, from `positions[b]` on."""

    def propose(self, rows: Int32Array, limits: Int32Array) -> Proposals:
        """Guess what follows the last token of each row, at most `limits[b]` tokens, in buffers used again."""
