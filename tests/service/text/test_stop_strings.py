from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.service.text.stop_strings import StopStringMatcher

letters = st.text("abc€", min_size=1, max_size=6)


@given(st.lists(letters, min_size=1, max_size=6), st.text("abc€x", max_size=30))
def test_state_tells_matches_and_what_may_become_one(stop_strings: list[str], text: str) -> None:
    matcher = StopStringMatcher(stop_strings)
    patterns = [stop_string.encode() for stop_string in stop_strings]
    state, seen = 0, b""
    for byte in text.encode():
        state = matcher.step(state, byte)
        seen += bytes([byte])
        ending = [pattern for pattern in patterns if seen.endswith(pattern)]
        found = matcher.match[state]
        assert (patterns[found] if found >= 0 else None) == max(ending, key=len, default=None)
        proper_prefixes = {pattern[:n] for pattern in patterns for n in range(len(pattern))}
        assert matcher.held_bytes[state] == max(
            n for n in range(len(seen) + 1) if seen[len(seen) - n :] in proper_prefixes
        )


def test_size_is_linear_in_the_strings() -> None:
    stop_strings = [f"prefix that all share {i:05}" for i in range(10_000)]
    matcher = StopStringMatcher(stop_strings)
    assert len(matcher.match) < 22 + 12_000
    state = 0
    for byte in b"prefix that all share 0123" * 1000:
        state = matcher.step(state, byte)
    for byte in b"4":
        state = matcher.step(state, byte)
    assert stop_strings[matcher.match[state]] == "prefix that all share 01234"


def test_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStringMatcher(["a", ""])
