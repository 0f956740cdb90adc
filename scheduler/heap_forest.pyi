"""Pairing heaps with common nodes: each item is a member of at most one heap; a heap is known by its first item.

Push is O(1), remove O(log n) amortised (Fredman, Sedgewick, Sleator, Tarjan: The pairing heap, 1986); no allocation.
"""

class HeapForest:
    """Items `0 .. capacity - 1`, ordered in their heap by (major, minor), smallest first. An empty heap has root -1.

    Attributes:
        capacity: items there are.
        size: items in all heaps together.
    """

    capacity: int
    size: int

    def __init__(self, capacity: int) -> None: ...
    def push(self, root: int, item: int, major: int, minor: int) -> int:
        """Insert an item into the heap at `root` and return the heap's new root, its first item.

        Raises:
            ValueError: the item is in a heap, or not below the capacity.
        """

    def remove(self, root: int, item: int) -> int:
        """Take an item out of the heap at `root`, which has it if any heap has, and return the heap's new root."""

    def is_member(self, item: int) -> bool:
        """Whether an item is in a heap."""
