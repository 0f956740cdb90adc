"""What followed the longest end of the sequence when it stood in the sequence, or in an earlier output, before."""

from foreword.gpu.speculative.drafter import Proposals
from foreword.scheduler.request import Request
from foreword.scheduler.step import Int32Array

class SuffixDrafter:
    """Continues the longest repetition there is, along the tokens that followed most often.

    (SuffixDecoding, Oliaro et al. 2024.) Each row keeps a suffix automaton of its prompt and output. Outputs that came
    to their end are learned by a second one, which requests of the same tenant and cache salt share and no others: how
    fast a request is tells what is in it. Requests that bypass the prefix cache neither read nor feed it. Of the two, a
    proposal continues the longer match; it ends where the counts say that it hardly survives, and goes on with itself
    at the end of the text, so that periodic text is continued. Confidence grows with the match length.

    Memory: about 130 bytes a token that prompt and output may have, allocated at admission and freed when the row is
    admitted again; for shared outputs up to 262,144 tokens, of which the scope used last keeps at least 32,768.
    """

    name: str
    names: tuple[str, ...]
    max_confidence: int

    def __init__(self, max_num_sequences: int, max_model_len: int, max_draft_tokens: int, vocab_size: int) -> None: ...
    @property
    def num_shared_tokens(self) -> int:
        """Tokens of earlier outputs that it knows, of all scopes."""

    def admit(self, row: int, request: Request, output_token_ids: Int32Array) -> None:
        """Forget what a row held; it (re)starts with the prompt of a request, and the output so far.

        Raises:
            IndexError: there is no such row.
        """

    def observe(
        self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array, starts: Int32Array, ends: Int32Array
    ) -> None:
        """Learn tokens that stand in rows: b's are `token_ids[starts[b]:ends[b]]`, from `positions[b]` on.

        Those at positions that are known already, and those behind a gap, change nothing.
        """

    def propose(self, rows: Int32Array, limits: Int32Array) -> Proposals:
        """Guess what follows the last token of each row, at most `limits[b]` tokens, in buffers used again.

        A row that is left out after it was proposed for has come to its end, or pauses: its output is shared.
        """
