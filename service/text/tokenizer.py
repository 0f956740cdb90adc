"""Text to tokens and back.

Text never spells a special token here. The library's own switch for that leaves gaps (a Unigram model may still produce
one), so special tokens are given secret names before the library sees them: no text contains a name, and a chat
template's own special tokens are put in by name.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from foreword.gpu.guided.grammar import GrammarVocabulary
from foreword.scheduler.errors import CheckpointError, InvalidField
from foreword.service.text.vocabulary import Vocabulary

Int32Array = npt.NDArray[np.int32]

NAME_EDGE = "\U0010fffe"  # a noncharacter, which no normaliser changes


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Tokens and where they stand.

    Attributes:
        token_ids: int32 `[N]`.
        offsets: int32 `[N, 2]`, begin and end of each token in the text, in bytes of UTF-8. Tokens that share a
            character all have that character's range; a token that was added to the text has an empty one.
    """

    token_ids: Int32Array
    offsets: Int32Array


class Tokenizer:
    """One tokenizer; use it from one thread at a time.

    Attributes:
        vocabulary: what the ids stand for.
    """

    def __init__(self, json_text: str, vocab_size: int, template: str = "") -> None:
        """Build from the text of a tokenizer.json.

        Args:
            json_text: in the `tokenizers` library's format.
            vocab_size: rows of the model's output head.
            template: source of the chat template, which tells more tokens that no text may spell.

        Raises:
            CheckpointError: damaged, or of a kind that is not supported.
        """
        try:
            data = json.loads(json_text)
            _drop_tokens_beyond(data, vocab_size)
            self.vocabulary = Vocabulary(data, vocab_size, template)
            self._names = _secret_names(self.vocabulary.markers)
            _rename_special_tokens(data, self._names)
            self._json = json.dumps(data, ensure_ascii=False)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"tokenizer: damaged ({type(error).__name__}: {error})") from error
        self._spellings = spelling_pattern(self.vocabulary.markers)
        self._load()

    def clone(self) -> Tokenizer:
        """Another one for another thread; the vocabulary is shared."""
        clone = Tokenizer.__new__(Tokenizer)
        clone.vocabulary = self.vocabulary
        clone._names = self._names
        clone._json = self._json
        clone._spellings = self._spellings
        clone._load()
        return clone

    def grammar_vocabulary(self) -> GrammarVocabulary:
        """The vocabulary for grammars that outputs follow."""
        size, is_special = self.vocabulary.size, self.vocabulary.is_special
        token_bytes = [self.vocabulary.bytes_of(token_id) for token_id in range(size)]
        special_ids = set(filter(is_special, range(size)))
        return GrammarVocabulary(token_bytes, special_ids, lambda text: self.encode(text).tolist())

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special_tokens: bool = False) -> Int32Array:
        """Split a text into tokens.

        Args:
            text: any text.
            add_special_tokens: add what the model expects around a text, such as a begin token.
            parse_special_tokens: text that spells a special token becomes that token; otherwise it stays text.

        Returns:
            int32 `[N]`.
        """
        pieces = self._spellings.split(text) if parse_special_tokens else [text]
        return self.encode_pieces(pieces, add_special_tokens=add_special_tokens)

    def encode_pieces(self, pieces: Sequence[str], *, add_special_tokens: bool = False) -> Int32Array:
        """Split a text that is given as plain text and special tokens in turn.

        Args:
            pieces: plain text at even positions, texts of special tokens at odd ones.
            add_special_tokens: as for `encode`.

        Returns:
            int32 `[N]`.
        """
        # The batch calls of the library release the GIL, the others do not.
        text = self._with_names(pieces)
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, np.int32)

    def tokenize(
        self, text: str, *, add_special_tokens: bool = False, parse_special_tokens: bool = False
    ) -> TokenizedText:
        """Split a text into tokens as `encode` does, and say where each one stands."""
        pieces = self._spellings.split(text) if parse_special_tokens else [text]
        [encoding] = self._tokenizer.encode_batch([self._with_names(pieces)], add_special_tokens=add_special_tokens)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return TokenizedText(np.array(encoding.ids, np.int32), self._byte_positions(pieces)[offsets])

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token: of a special token its spelling, of an id without a token none."""
        return self.vocabulary.bytes_of(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure and is no part of a text."""
        return self.vocabulary.is_special(token_id)

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self.vocabulary.size

    def decode(self, token_ids: Iterable[int], *, include_special_tokens: bool = False) -> str:
        """Join tokens to a text; bytes that are not UTF-8 become U+FFFD.

        Args:
            token_ids: any ids of the vocabulary.
            include_special_tokens: spell special tokens out; otherwise they are skipped.

        Raises:
            InvalidField: an id is outside the vocabulary.
        """
        vocabulary = self.vocabulary
        parts = []
        for token_id in token_ids:
            if not 0 <= token_id < vocabulary.size:
                raise InvalidField("token_ids", f"{token_id} is not a token; ids are 0 to {vocabulary.size - 1}")
            if include_special_tokens or not vocabulary.is_special(token_id):
                parts.append(vocabulary.bytes_of(token_id))
        data = b"".join(parts)
        return (data.removeprefix(b" ") if vocabulary.strips_leading_space else data).decode(errors="replace")

    def _load(self) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(self._json)
            self._tokenizer.encode("trial", add_special_tokens=True)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises nothing narrower than Exception, and its panics are wider
            raise CheckpointError(f"tokenizer: damaged ({error})") from error
        for text, name in self._names.items():
            if self._tokenizer.token_to_id(name) != self.vocabulary.markers[text]:
                raise CheckpointError(f"tokenizer: the special token {text!r} does not have the id it states")

    def _with_names(self, pieces: Sequence[str]) -> str:
        return "".join(self._names[piece] if i % 2 else piece for i, piece in enumerate(pieces))

    def _byte_positions(self, pieces: Sequence[str]) -> Int32Array:
        """Position in the text's UTF-8, for every position in the characters of `_with_names`."""
        widths: list[npt.NDArray[np.int32]] = [np.zeros(1, np.int32)]
        for i, piece in enumerate(pieces):
            if i % 2:
                name = np.zeros(len(self._names[piece]), np.int32)
                name[-1] = len(piece.encode())
                widths.append(name)
            else:
                points = np.frombuffer(piece.encode("utf-32-le"), np.uint32)
                widths.append(1 + (points >= 0x80).astype(np.int32) + (points >= 0x800) + (points >= 0x10000))
        return np.cumsum(np.concatenate(widths), dtype=np.int32)


def spelling_pattern(special_tokens: Iterable[str], flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """Match any special token's text, the longest one where several begin; matches are in group 1."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})", flags)


def _drop_tokens_beyond(data: dict[str, Any], vocab_size: int) -> None:
    """Forget added tokens without a row in the model, such as a padding token that was added for training."""
    data["added_tokens"] = [token for token in data.get("added_tokens") or [] if token["id"] < vocab_size]


def _secret_names(special_tokens: Mapping[str, int]) -> dict[str, str]:
    secret = secrets.token_hex(16)
    return {text: f"{NAME_EDGE}{secret}.{token_id}{NAME_EDGE}" for text, token_id in special_tokens.items()}


def _rename_special_tokens(data: dict[str, Any], names: Mapping[str, str]) -> None:
    """Give the special tokens of a parsed tokenizer.json other names, wherever text is looked up by name."""
    data["truncation"] = data["padding"] = None
    for token in data.get("added_tokens") or []:
        if token["content"] in names:
            # a name must be found as it is, wherever it stands
            token.update(content=names[token["content"]], normalized=False, single_word=False)
    model = data["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if merges := model.get("merges"):
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    for processor in _nested(data.get("post_processor"), "processors"):
        if "trim_offsets" in processor:
            processor["trim_offsets"] = False


def _nested(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    return [] if step is None else step.get(key, [step])
