from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.service.text.detokenizer import IncrementalDetokenizer, TextDelta
from foreword.service.text.tokenizer import Tokenizer
from foreword.service.text.vocabulary import BYTE_ALPHABET, Vocabulary

SPELLING = {byte: character for character, byte in BYTE_ALPHABET.items()}
PIECES = [
    b"a", b"b", b"c", b"ab", b"bc", b"abc", b" ", b" a", b"ca b", b"\n",
    "é".encode(), "€".encode(), "€a".encode(), "😀".encode(), b"a\xe2", b"\x82", b"\xac", b"\xacb", b"\xe2\x82",
    b"\xf0", b"\x9f\x98", b"\x80", b"\xf0\x9f\x98", b"\xff", b"\xc3", b"\xa9c", b"\xed\xa0\x80", b"\xe0\x80",
]  # fmt: skip
SPECIAL = len(PIECES)


def byte_vocabulary(pieces: Sequence[bytes], *, strip: bool = False) -> Vocabulary:
    """A byte-level vocabulary with one special token after the pieces."""
    vocab = {"".join(SPELLING[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    special = {"id": len(pieces), "content": "<|end|>", "special": True}
    data = {"added_tokens": [special], "decoder": {"type": "ByteLevel"}, "model": {"vocab": vocab}}
    vocabulary = Vocabulary(data, len(pieces) + 1)
    vocabulary.strips_leading_space = strip
    return vocabulary


VOCABULARIES = {strip: byte_vocabulary(PIECES, strip=strip) for strip in (False, True)}


@dataclass(frozen=True)
class Outcome:
    text: str
    num_tokens: int
    matched_stop: str | None


def reference(
    vocabulary: Vocabulary,
    token_ids: Sequence[int],
    stop_strings: Sequence[str],
    include_stop: bool,
    min_output_tokens: int,
) -> Outcome:
    """The rules, one token at a time, everything looked at again each time."""
    data, spans = b"", []
    for number, token_id in enumerate(token_ids, 1):
        piece = b"" if vocabulary.is_special(token_id) else vocabulary.bytes_of(token_id)
        if vocabulary.strips_leading_space and piece and not any(begin < end for begin, end in spans) and not data:
            is_first = not any(vocabulary.bytes_of(i) for i in token_ids[: number - 1] if not vocabulary.is_special(i))
            piece = piece.removeprefix(b" ") if is_first else piece
        spans.append((len(data), len(data) + len(piece)))
        data += piece
        if number <= min_output_tokens:
            continue
        found = [
            (end, end - len(stop.encode()), stop)
            for end in range(len(data) - len(piece) + 1, len(data) + 1)
            for stop in stop_strings
            if data[:end].endswith(stop.encode())
        ]
        if found:
            end, begin, stop = min(found)
            cut = end if include_stop else begin
            contributing = [i for i, (b, e) in enumerate(spans, 1) if b < e and b < cut]
            return Outcome(data[:cut].decode(errors="replace"), max(contributing, default=0), stop)
    return Outcome(data.decode(errors="replace"), len(token_ids), None)


def split(token_ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    return [token_ids[begin:end] for begin, end in pairwise(bounds)]


def run(detokenizer: IncrementalDetokenizer, pushes: Sequence[Sequence[int]], **finish: Any) -> Outcome:
    deltas = []
    num_pushed = 0
    for push in pushes:
        deltas.append(detokenizer.push(push))
        num_pushed += len(push)
        if detokenizer.matched_stop is None:
            assert detokenizer.num_held_tokens == num_pushed - sum(delta.num_tokens for delta in deltas)
        assert all(delta.num_tokens or not delta.text for delta in deltas)
    deltas.append(detokenizer.finish(**finish))
    assert detokenizer.num_held_tokens == 0
    text = "".join(delta.text for delta in deltas)
    return Outcome(text, sum(delta.num_tokens for delta in deltas), detokenizer.matched_stop)


ids = st.lists(st.integers(0, SPECIAL), max_size=24)
cuts = st.lists(st.integers(0, 30), max_size=8)
stops = st.lists(st.text("abc €é😀\n", min_size=1, max_size=4), max_size=4, unique=True)


@settings(max_examples=1500, deadline=None)
@given(ids, cuts, stops, st.booleans(), st.integers(0, 6), st.booleans())
def test_any_split_gives_what_the_rules_say(
    token_ids: list[int], cuts: list[int], stop_strings: list[str], include_stop: bool, minimum: int, strip: bool
) -> None:
    vocabulary = VOCABULARIES[strip]
    expected = reference(vocabulary, token_ids, stop_strings, include_stop, minimum)
    for pushes in (split(token_ids, cuts), [[token_id] for token_id in token_ids], [token_ids]):
        detokenizer = IncrementalDetokenizer(
            vocabulary, tuple(stop_strings), include_stop=include_stop, min_output_tokens=minimum
        )
        assert run(detokenizer, pushes) == expected


@settings(max_examples=300, deadline=None)
@given(ids, cuts, st.integers(0, SPECIAL), st.booleans(), stops)
def test_dropping_the_stop_token(
    token_ids: list[int], cuts: list[int], last: int, include_stop: bool, stop_strings: list[str]
) -> None:
    vocabulary = VOCABULARIES[False]
    token_ids = [token_id for token_id in token_ids if token_id != last]
    before = reference(vocabulary, token_ids, stop_strings, include_stop, 0)
    for pushes in (split([*token_ids, last], cuts), [[token_id] for token_id in (*token_ids, last)]):
        detokenizer = IncrementalDetokenizer(
            vocabulary, tuple(stop_strings), include_stop=include_stop, stop_token_ids={last}
        )
        outcome = run(detokenizer, pushes, drop_last=True)
        if before.matched_stop is not None or not include_stop:
            assert outcome == before
        else:
            text = b"".join(vocabulary.bytes_of(i) for i in (*token_ids, last) if i != SPECIAL)
            assert outcome == Outcome(text.decode(errors="replace"), len(token_ids) + 1, None)


def pieces(*parts: bytes) -> tuple[Vocabulary, list[int]]:
    distinct = list(dict.fromkeys(parts))
    return byte_vocabulary(distinct), [distinct.index(part) for part in parts]


def test_tokens_come_with_their_text() -> None:
    vocabulary, (smile_1, smile_2, word) = pieces(b"\xf0\x9f", b"\x98\x80", b" ok")
    detokenizer = IncrementalDetokenizer(vocabulary)
    assert detokenizer.push([smile_1]) == TextDelta("", 0)
    assert detokenizer.num_held_tokens == 1
    assert detokenizer.push([smile_2]) == TextDelta("😀", 2)
    assert detokenizer.push([word]) == TextDelta(" ok", 1)
    assert detokenizer.finish() == TextDelta("", 0)


def test_incomplete_character_at_the_end() -> None:
    vocabulary, (begin,) = pieces(b"a\xf0\x9f")
    detokenizer = IncrementalDetokenizer(vocabulary)
    assert detokenizer.push([begin]) == TextDelta("", 0)
    assert detokenizer.finish() == TextDelta("a�", 1)


def test_possible_stop_string_is_held_and_then_released() -> None:
    vocabulary, token_ids = pieces(b"Hi", b" EN", b"D", b"!")
    detokenizer = IncrementalDetokenizer(vocabulary, ("END.",))
    assert detokenizer.push(token_ids[:1]) == TextDelta("Hi", 1)
    assert detokenizer.push(token_ids[1:2]) == TextDelta("", 0)
    assert detokenizer.push(token_ids[2:3]) == TextDelta("", 0)
    assert detokenizer.num_held_tokens == 2
    assert detokenizer.push(token_ids[3:]) == TextDelta(" END!", 3)
    assert detokenizer.matched_stop is None


def test_stop_string_across_tokens_and_inside_one() -> None:
    vocabulary, token_ids = pieces(b"Hi", b" EN", b"D.", b"more")
    detokenizer = IncrementalDetokenizer(vocabulary, ("END.",))
    assert detokenizer.push(token_ids) == TextDelta("Hi ", 2)
    assert detokenizer.matched_stop == "END."
    assert detokenizer.push([3]) == TextDelta("", 0)
    assert detokenizer.finish() == TextDelta("", 0)
    included = IncrementalDetokenizer(vocabulary, ("END.",), include_stop=True)
    assert included.push(token_ids) == TextDelta("Hi END.", 3)


def test_first_token_is_the_stop_string() -> None:
    vocabulary, token_ids = pieces(b"STOP", b"x")
    detokenizer = IncrementalDetokenizer(vocabulary, ("STOP",))
    assert detokenizer.push(token_ids) == TextDelta("", 0)
    assert detokenizer.matched_stop == "STOP"


def test_token_without_text_waits_for_text() -> None:
    vocabulary, (word, stop) = pieces(b"yes", b"STOP")
    special = 2
    detokenizer = IncrementalDetokenizer(vocabulary, ("STOP",))
    assert detokenizer.push([special]) == TextDelta("", 0)
    assert detokenizer.push([word, special]) == TextDelta("yes", 2)
    assert detokenizer.num_held_tokens == 1
    assert detokenizer.push([stop]) == TextDelta("", 0)
    assert detokenizer.matched_stop == "STOP"


def test_string_that_completes_first_wins_whatever_the_order() -> None:
    vocabulary, token_ids = pieces(b"a long one or a short")
    for stop_strings in (("long one or", "one"), ("one", "long one or")):
        detokenizer = IncrementalDetokenizer(vocabulary, stop_strings)
        assert detokenizer.push(token_ids) == TextDelta("a long ", 1)
        assert detokenizer.matched_stop == "one"


def test_longest_of_those_that_complete_together_wins() -> None:
    vocabulary, token_ids = pieces(b"one two three")
    for stop_strings in (("two", "e two"), ("e two", "two")):
        detokenizer = IncrementalDetokenizer(vocabulary, stop_strings)
        assert detokenizer.push(token_ids) == TextDelta("on", 1)
        assert detokenizer.matched_stop == "e two"


def test_stop_string_right_before_an_end_token_in_the_same_push() -> None:
    vocabulary, token_ids = pieces(b"yes", b"STOP")
    detokenizer = IncrementalDetokenizer(vocabulary, ("STOP",))
    assert detokenizer.push([*token_ids, 2]) == TextDelta("yes", 1)
    assert detokenizer.matched_stop == "STOP"
    assert detokenizer.finish(drop_last=True) == TextDelta("", 0)


def test_end_token_is_in_neither_text_nor_tokens() -> None:
    vocabulary, token_ids = pieces(b"yes", b" EN")
    detokenizer = IncrementalDetokenizer(vocabulary, ("END",))
    assert detokenizer.push([*token_ids, 2]) == TextDelta("yes", 1)
    assert detokenizer.finish(drop_last=True) == TextDelta(" EN", 1)
    kept = IncrementalDetokenizer(vocabulary, ("END",), include_stop=True)
    assert kept.push([*token_ids, 2]) == TextDelta("yes", 1)
    assert kept.finish(drop_last=True) == TextDelta(" EN", 2)


def test_stop_token_with_text_is_held_until_its_role_is_known() -> None:
    vocabulary, (word, dot) = pieces(b"yes", b".")
    detokenizer = IncrementalDetokenizer(vocabulary, stop_token_ids={dot})
    assert detokenizer.push([word, dot]) == TextDelta("yes", 1)
    assert detokenizer.num_held_tokens == 1
    assert detokenizer.finish(drop_last=True) == TextDelta("", 0)
    unnamed = IncrementalDetokenizer(vocabulary)
    unnamed.push([word, dot])
    with pytest.raises(ValueError, match="name it in stop_token_ids"):
        unnamed.finish(drop_last=True)


def test_nothing_to_drop() -> None:
    assert IncrementalDetokenizer(VOCABULARIES[False]).finish(drop_last=True) == TextDelta("", 0)


def test_default_model(default_tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(20):
        token_ids = [rng.randrange(49152) for _ in range(200)]
        detokenizer = IncrementalDetokenizer(default_tokenizer.vocabulary)
        assert run(detokenizer, [[i] for i in token_ids]) == Outcome(default_tokenizer.decode(token_ids), 200, None)


def test_sentencepiece_text_begins_without_its_space(sentencepiece_tokenizer: Tokenizer) -> None:
    for text in ("hello wé", " hello", "é"):
        token_ids = sentencepiece_tokenizer.encode(text).tolist()
        detokenizer = IncrementalDetokenizer(sentencepiece_tokenizer.vocabulary)
        assert run(detokenizer, [[1], *([i] for i in token_ids)]) == Outcome(text, len(token_ids) + 1, None)


@pytest.mark.parametrize(
    "parts",
    [
        [b"word "],  # released at once
        [b"\xac\xe2\x82"],  # every token ends inside a character
        [b"ab"],  # always inside a possible stop string
        [b""],  # nothing ever to release
    ],
)
def test_cost_per_token_does_not_grow(parts: list[bytes]) -> None:
    vocabulary = byte_vocabulary([*parts, b"x"])
    stop_strings = ("ab" * 30_000 + "!", *(f"stop {i}" for i in range(1000)))
    detokenizer = IncrementalDetokenizer(vocabulary, stop_strings)
    token = vocabulary.size - 1 if parts == [b""] else 0

    def seconds(count: int) -> float:
        begin = time.process_time()
        for _ in range(count):
            detokenizer.push([token])
        return time.process_time() - begin

    seconds(1000)
    early = min(seconds(1000) for _ in range(3))
    seconds(20_000)
    late = min(seconds(1000) for _ in range(3))
    assert late < 5 * early + 1e-3
