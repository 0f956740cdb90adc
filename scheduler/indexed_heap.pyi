"""Binary heap with a position per item: push, pop and remove in O(log n), no allocation."""

class IndexedHeap:
    """Items `0 .. capacity - 1`, each at most once, ordered by (major, minor), smallest first.

    Attributes:
        capacity: items it can hold.
        size: items it holds.
    """

    capacity: int
    size: int

    def __init__(self, capacity: int) -> None: ...
    def push(self, item: int, major: int, minor: int) -> int:
        """Insert an item.

        Raises:
            ValueError: it is a member, or not below the capacity.
        """

    def pop(self) -> int:
        """Take the first item out; -1 when empty."""

    def remove(self, item: int) -> bool:
        """Take an item out wherever it is; False when it is not a member."""

    def top_major(self) -> int:
        """Major key of the first item; 0 when empty."""
