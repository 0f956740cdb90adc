"""Finds stop strings in a stream of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStringMatcher:
    """Aho-Corasick automaton (Aho & Corasick 1975) over the UTF-8 of all stop strings.

    Built once per request in time and memory linear in the strings' total length; a byte of the stream costs amortised
    constant time however many strings there are. State 0 is the root; a state is a prefix of some stop string, and
    after each byte the automaton is in the longest one that the stream ends with.

    Attributes:
        held_bytes: per state, how many of the last bytes may be the beginning of a match that is yet to complete.
        match: per state, which stop string ends here (the longest, if several do), -1 for none.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Build the automaton.

        Args:
            stop_strings: none of them empty.
        """
        self._next: dict[int, int] = {}  # state * 256 + byte -> state
        self._fallback = [0]  # the longest proper suffix that is a state, too
        self.held_bytes = [0]
        self.match = [-1]
        children: list[list[tuple[int, int]]] = [[]]
        for index, stop_string in enumerate(stop_strings):
            if not stop_string:
                raise ValueError("a stop string must not be empty")
            state = 0
            for byte in stop_string.encode():
                child = self._next.get(state << 8 | byte)
                if child is None:
                    child = len(children)
                    self._next[state << 8 | byte] = child
                    children[state].append((byte, child))
                    children.append([])
                    self._fallback.append(0)
                    self.held_bytes.append(0)
                    self.match.append(-1)
                state = child
            if self.match[state] < 0:
                self.match[state] = index
        self._link(children)

    def step(self, state: int, byte: int) -> int:
        """The state after one more byte."""
        successors = self._next
        while (successor := successors.get(state << 8 | byte)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return successor

    def _link(self, children: list[list[tuple[int, int]]]) -> None:
        """Fill in fallbacks, breadth first, so that a state's shorter suffixes are complete before it."""
        queue = deque((child, 0, byte, 1) for byte, child in children[0])
        while queue:
            state, parent, byte, depth = queue.popleft()
            fallback = self.step(self._fallback[parent], byte) if parent else 0
            self._fallback[state] = fallback
            self.held_bytes[state] = depth if children[state] else self.held_bytes[fallback]
            if self.match[state] < 0:
                self.match[state] = self.match[fallback]
            queue.extend((child, state, edge, depth + 1) for edge, child in children[state])
