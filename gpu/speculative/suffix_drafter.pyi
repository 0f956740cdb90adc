"""What followed the longest end of the sequence when it stood in the sequence, or in an earlier output, before."""

from foreword.gpu.speculative.row_drafter import RowDrafter

class SuffixDrafter(RowDrafter):
    """Continues the longest repetition there is, along the tokens that followed most often.

    (SuffixDecoding, Oliaro et al. 2024.) Each row keeps a suffix automaton of its prompt and output. Outputs that came
    to their end are learned by a second one, which requests of the same tenant and cache salt share and no others: how
    fast a request is tells what is in it. Requests that bypass the prefix cache neither read nor feed it. Of the two, a
    proposal continues the longer match; it ends where the counts say that it hardly survives, and goes on with itself
    at the end of the text, so that periodic text is continued. Confidence grows with the match length. What stands
    behind a gap is not learned. A row that is left out after it was proposed for has come to its end, or pauses: its
    output is shared.

    Memory: about 130 bytes a token that prompt and output may have, allocated at admission and freed when the row is
    admitted again; for shared outputs up to 262,144 tokens, of which the scope used last keeps at least 32,768.
    """

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of earlier outputs that it knows, of all scopes."""
