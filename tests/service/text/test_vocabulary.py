from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from foreword.scheduler.errors import CheckpointError
from foreword.service.text.vocabulary import BYTE_ALPHABET, Vocabulary


def added(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    return {"id": token_id, "content": content, "special": special}


def test_byte_alphabet_is_the_librarys() -> None:
    assert sorted(BYTE_ALPHABET.values()) == list(range(256))
    assert set(BYTE_ALPHABET) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    for byte in range(0x80):
        spelling = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(byte))[0][0]
        assert BYTE_ALPHABET[spelling] == byte


def test_byte_level() -> None:
    vocabulary = Vocabulary(
        {
            "added_tokens": [added(3, "<|end|>", special=True), added(4, "ein Wort", special=False)],
            "decoder": {"type": "ByteLevel"},
            "model": {"vocab": {"Ġhi": 0, "Ã": 1, "日": 2}},
        },
        6,
    )
    assert [vocabulary.bytes_of(i) for i in range(6)] == [
        b" hi",
        b"\xc3",
        "日".encode(),
        b"<|end|>",
        b"ein Wort",
        b"",
    ]
    assert [vocabulary.is_special(i) for i in range(6)] == [False, False, False, True, False, False]
    assert vocabulary.special_tokens == {"<|end|>": 3}
    assert vocabulary.size == 6
    assert not vocabulary.strips_leading_space


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        ({"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP]}, True),
        ({"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]}, False),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}, True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}, False),
    ],
)
def test_sentencepiece(decoder: dict[str, Any], strips: bool) -> None:
    vocabulary = Vocabulary({"decoder": decoder, "model": {"vocab": {"▁a▁b": 0, "<0xFF>": 1, "<0xFG>": 2}}}, 3)
    assert [vocabulary.bytes_of(i) for i in range(3)] == [b" a b", b"\xff", b"<0xFG>"]
    assert vocabulary.strips_leading_space is strips


def test_unigram_vocabularies_are_lists() -> None:
    data = {"decoder": {"type": "Metaspace"}, "model": {"vocab": [["<unk>", 0.0], ["▁a", -1.5]]}}
    assert Vocabulary(data, 2).bytes_of(1) == b" a"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##"},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, STRIP]},
        {"type": "Sequence", "decoders": [REPLACE, {**STRIP, "start": 2}]},
        {"type": "Sequence", "decoders": [{**REPLACE, "content": "_"}]},
        {"type": "Sequence", "decoders": [STRIP]},
    ],
)
def test_other_decoders_are_refused(decoder: dict[str, Any] | None) -> None:
    with pytest.raises(CheckpointError, match=r"decoder .* is not supported"):
        Vocabulary({"decoder": decoder, "model": {"vocab": {}}}, 1)


@pytest.mark.parametrize("token_id", [-1, 2])
def test_ids_outside_the_model_are_refused(token_id: int) -> None:
    data = {"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": token_id}}}
    with pytest.raises(CheckpointError, match=f"'a' has the id {token_id}, the model has only 2 tokens"):
        Vocabulary(data, 2)
