"""Free stack and reference counts of the blocks of the KV cache."""

class BlockPool:
    """Blocks `0 .. num_blocks - 1`; the block freed last is given out first, as it is the likeliest to be in a cache.

    Attributes:
        num_blocks: all blocks.
        num_free: blocks without a reference.
    """

    num_blocks: int
    num_free: int

    def __init__(self, num_blocks: int) -> None: ...
    def allocate(self) -> int:
        """A block with one reference, or -1 when none is free."""

    def retain(self, block: int) -> int:
        """Add a reference to a held block and return how many it has.

        Raises:
            ValueError: the block is free.
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
