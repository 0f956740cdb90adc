"""Turns a stream of tokens into a stream of text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from codecs import utf_8_decode
from collections.abc import Collection, Sequence
from typing import NamedTuple

from foreword.service.text.stop_strings import StopStringMatcher
from foreword.service.text.vocabulary import Vocabulary


class TextDelta(NamedTuple):
    """Text that is final, and the tokens that made it.

    Attributes:
        text: to be appended to what was released before.
        num_tokens: tokens released with it, counted from the first one that was pushed and not yet released.
    """

    text: str
    num_tokens: int


NOTHING = TextDelta("", 0)


class IncrementalDetokenizer:
    """Releases tokens together with their text, as soon as both are final.

    A token is held back while its bytes end inside a UTF-8 character, while its text may be part of a stop string, and
    while it has no bytes and nothing follows it. The concatenated text is the decoding of all tokens up to the stop; it
    does not depend on how the tokens were spread over pushes, and nothing is decoded twice.

    Attributes:
        matched_stop: the stop string that ended the text, None so far.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop_strings: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_output_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """Start an empty text.

        Args:
            vocabulary: what the ids stand for.
            stop_strings: the one that completes first ends the text (of several that end at the same byte, the
                longest).
            include_stop: the text ends after the stop string or stop token instead of before it.
            min_output_tokens: stop strings that complete within this many tokens are ignored.
            stop_token_ids: end tokens of this generation. One that is the last of a push is held until the next call
                tells whether it ended the generation.
        """
        self._vocabulary = vocabulary
        self._stop_strings = stop_strings
        self._matcher = StopStringMatcher(stop_strings) if stop_strings else None
        self._include_stop = include_stop
        self._min_output_tokens = min_output_tokens
        self._stop_token_ids = stop_token_ids
        self._state = 0
        self._held = bytearray()  # bytes of the held tokens
        self._start = 0  # position of the first held byte in the whole text
        self._ends: list[int] = []  # positions at which the held tokens end
        self._boundaries: list[int] = []  # those of them that are the end of a character
        self._last: int | None = None  # a stop token that came last
        self._num_tokens = 0  # pushed so far, without `_last`
        self._at_start = vocabulary.strips_leading_space
        self.matched_stop: str | None = None

    @property
    def num_held_tokens(self) -> int:
        """Tokens that were pushed and not yet released; none once a stop string has matched."""
        return len(self._ends) + (self._last is not None)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens and release what has become final. After a matched stop nothing is taken any more."""
        if self.matched_stop is not None:
            return NOTHING
        for token_id in token_ids:
            if self._last is not None:
                last, self._last = self._last, None
                if stop := self._append(last):
                    return self._release_before(*stop)
            if token_id in self._stop_token_ids:
                self._last = token_id
            elif stop := self._append(token_id):
                return self._release_before(*stop)
        return self._release()

    def finish(self, *, drop_last: bool = False) -> TextDelta:
        """End the text and release everything; a character that stayed incomplete becomes U+FFFD.

        Args:
            drop_last: the last token ended the generation: unless `include_stop`, it is no part of text or tokens.

        Raises:
            ValueError: the last token is to be dropped but was released, as it was not in `stop_token_ids`.
        """
        if self.matched_stop is not None:
            return NOTHING
        if drop_last and not self._include_stop:
            self._drop_last()
        elif self._last is not None:
            last, self._last = self._last, None
            if (stop := self._append(last)) and not drop_last:
                return self._release_before(*stop)
        return self._take(self._start + len(self._held), len(self._ends))

    def _append(self, token_id: int) -> tuple[int, int, int] | None:
        """Add one token; if it completes a stop string, return its index, begin and end in the text."""
        data = b"" if self._vocabulary.is_special(token_id) else self._vocabulary.bytes_of(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        begin = self._start + len(self._held)
        self._held += data
        self._ends.append(begin + len(data))
        self._num_tokens += 1
        if data and self._ends_with_character():
            # tokens without bytes wait: whether they belong to the text shows when more of it follows
            self._boundaries.append(begin + len(data))
        if self._matcher is None:
            return None
        step, match = self._matcher.step, self._matcher.match
        state = self._state
        for end, byte in enumerate(data, begin + 1):
            state = step(state, byte)
            if match[state] >= 0 and self._num_tokens > self._min_output_tokens:
                return match[state], end - len(self._stop_strings[match[state]].encode()), end
        self._state = state
        return None

    def _ends_with_character(self) -> bool:
        """Whether the held bytes do not end inside a character; bytes that cannot become one count as one."""
        tail = self._held[-3:]
        for i in reversed(range(len(tail))):
            if tail[i] >= 0xC0:  # only a lead byte within reach can begin a character that is not over
                return utf_8_decode(tail[i:], "replace", False)[1] > 0
        return True

    def _release(self) -> TextDelta:
        """Release the longest run of held tokens whose text is final."""
        limit = self._start + len(self._held) - (self._matcher.held_bytes[self._state] if self._matcher else 0)
        num_boundaries = bisect_right(self._boundaries, limit)
        if num_boundaries == 0:
            return NOTHING
        end = self._boundaries[num_boundaries - 1]
        del self._boundaries[:num_boundaries]
        return self._take(end, bisect_left(self._ends, end) + 1)

    def _release_before(self, index: int, begin: int, end: int) -> TextDelta:
        """Release the text up to the stop string, with the tokens that have bytes in it; forget the rest."""
        self.matched_stop = self._stop_strings[index]
        cut = end if self._include_stop else begin
        delta = self._take(cut, bisect_left(self._ends, cut) + 1 if cut > self._start else 0)
        self._ends.clear()
        return delta

    def _take(self, end: int, num_tokens: int) -> TextDelta:
        num_bytes = end - self._start
        text = self._held[:num_bytes].decode(errors="replace")
        del self._held[:num_bytes]
        del self._ends[:num_tokens]
        self._start = end
        return TextDelta(text, num_tokens)

    def _drop_last(self) -> None:
        if self._last is not None:
            self._last = None
        elif self._ends:
            self._ends.pop()
            del self._held[self._ends[-1] - self._start if self._ends else 0 :]
        elif self._num_tokens:
            raise ValueError("the last token has been released already; name it in stop_token_ids")
