"""What each token id stands for, byte by byte."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from foreword.scheduler.errors import CheckpointError

METASPACE = "▁"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one-to-one spelling of bytes as printable characters (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    if BYTE_ALPHABET.keys() >= set(piece):
        return bytes(BYTE_ALPHABET[character] for character in piece)
    return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if match := BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(match[1])
    return piece.replace(METASPACE, " ").encode()


class Vocabulary:
    """Immutable; shared by every thread and every stream.

    Attributes:
        size: ids are below it; equal to the rows of the model's output head, some of which may have no token.
        special_tokens: text -> id of the tokens that mark structure (begin, end, turns) instead of text.
        markers: `special_tokens`, and those tokens that the chat template writes although the vocabulary calls them
            text; a message must not be able to spell any of them.
        max_token_bytes: of the longest token.
        strips_leading_space: the tokenizer puts a space before a text, so the first one of a decoded text goes.
    """

    def __init__(self, tokenizer: Mapping[str, Any], size: int, template: str = "") -> None:
        """Read the vocabulary of a parsed tokenizer.json.

        Args:
            tokenizer: as in the `tokenizers` library's format.
            size: rows of the model's output head.
            template: source of the chat template.

        Raises:
            CheckpointError: a decoder that is not supported, or an id outside the model's vocabulary.
        """
        added = tokenizer.get("added_tokens") or []
        spell, self.strips_leading_space = _decoder(tokenizer.get("decoder"))
        self.size = size
        self.special_tokens: Mapping[str, int] = {token["content"]: token["id"] for token in added if token["special"]}
        self.markers: Mapping[str, int] = self.special_tokens | {
            token["content"]: token["id"]
            for token in added
            if _is_marker(token["content"]) and token["content"] in template
        }
        self._special_ids = frozenset(self.special_tokens.values())
        self._bytes = [b""] * size
        for piece, token_id in _pieces(tokenizer["model"]["vocab"]):
            self._set(token_id, spell(piece), piece)
        for token in added:
            self._set(token["id"], token["content"].encode(), token["content"])
        self.max_token_bytes = max(map(len, self._bytes), default=0)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token: of a special token its spelling, of an id without a token none."""
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure and is no part of a text."""
        return token_id in self._special_ids

    def _set(self, token_id: int, data: bytes, piece: str) -> None:
        if not 0 <= token_id < self.size:
            raise CheckpointError(f"tokenizer: {piece!r} has the id {token_id}, the model has only {self.size} tokens")
        self._bytes[token_id] = data


def _is_marker(text: str) -> bool:
    """Whether an added token looks like structure (`<|turn|>`, `[INST]`), not like a word or white space."""
    return bool(re.search(r"[^\w\s]", text))


def _pieces(vocab: Mapping[str, int] | list[tuple[str, float]]) -> Iterable[tuple[str, int]]:
    """Pieces with their ids; a Unigram model lists them in the order of ids, with scores."""
    if isinstance(vocab, list):
        return ((piece, token_id) for token_id, (piece, _) in enumerate(vocab))
    return vocab.items()


def _decoder(decoder: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """How a piece becomes bytes, and whether the first space of a text goes."""
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level, False
    if kinds == {"Metaspace"}:
        return _sentencepiece, steps[0].get("prepend_scheme", "always") != "never"
    if "Replace" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replace = next(step for step in steps if step["type"] == "Replace")
        strips = [(step["content"], step["start"], step["stop"]) for step in steps if step["type"] == "Strip"]
        if replace["pattern"] == {"String": METASPACE} and replace["content"] == " " and strips in ([], [(" ", 1, 0)]):
            return _sentencepiece, bool(strips)
    raise CheckpointError(
        f"tokenizer: the decoder {' + '.join(sorted(kinds)) or 'none'} is not supported; "
        f"supported are byte-level and SentencePiece decoders"
    )
