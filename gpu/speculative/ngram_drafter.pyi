"""Prompt lookup: what followed the last few tokens when they stood in the sequence before."""

from foreword.gpu.speculative.row_drafter import RowDrafter

class NgramDrafter(RowDrafter):
    """Continues the most recent earlier occurrence of the longest suffix of 5 to 2 tokens.

    (Prompt lookup decoding, Saxena 2023.) Each row keeps its tokens and, for each match length, a hash table from the
    n-grams of the row to the position behind their last occurrence; a token costs one probe a length. A proposal that
    reaches the end of the sequence goes on with itself, so that periodic text is continued. Positions that were never
    seen match nothing and are never proposed. Confidence is the match length. Memory: at most 68 bytes a token that
    prompt and output may have, allocated at admission and freed when the row is admitted again.
    """
