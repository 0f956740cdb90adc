"""Free blocks and reference counts of the KV cache."""

from foreword.scheduler.prefix_cache import PrefixCache

class BlockPool:
    """Blocks `0 .. num_blocks - 1` of the KV cache; every block table that holds a block has one reference to it.

    A free block that is not cached goes first, the one freed last before the others, as it is the likeliest to be in a
    cache of the processor. Only then a free cached block is evicted, the one freed first before the others. Tables free
    their blocks from the end, so a block is evicted before those that it follows.

    Attributes:
        num_blocks: all blocks.
        num_free: blocks without a reference, cached ones included.
    """

    num_blocks: int
    num_free: int

    def __init__(self, cache: PrefixCache) -> None: ...
    def allocate(self) -> int:
        """A block with one reference, in no cache, or -1 when none is free."""

    def retain(self, block: int) -> int:
        """Add a reference to a block that is held or cached and return how many it has.

        Raises:
            ValueError: the block is free and not cached.
            IndexError: there is no such block.
        """

    def release(self, block: int) -> int:
        """Drop a reference of a held block and return how many are left; at 0 the block is free.

        Raises:
            ValueError: the block is free.
            IndexError: there is no such block.
        """

    def ref_count(self, block: int) -> int:
        """References of a block, 0 for a free one.

        Raises:
            IndexError: there is no such block.
        """
