"""Grammars in the form in which the device follows them, token by token, with the library `llguidance`.

The library reads a grammar in microseconds to milliseconds and finds the tokens that may come next when it is asked,
with a parser after Earley (1970) over a lexer of regular expression derivatives (Brzozowski 1964), walking a trie of
the vocabulary. Every mask has a budget, so that no grammar can hold up a step for long.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

LIMITS = LLParserLimits(max_items_in_row=1000, step_max_items=10_000, verbose_errors=False)
"""Below the library's own, which allow masks that take a tenth of a second."""

MAX_CACHED_GRAMMARS = 64


class GrammarError(Exception):
    """A grammar that cannot be followed; the text says why and never holds the grammar."""


class GrammarVocabulary:
    """The tokens of a model as grammars see them: bytes, and one end that stands for all end tokens.

    Attributes:
        size: ids are below it.
        num_words: of a token mask that has room for the end.
    """

    eos_token_id = None  # the library then adds the end behind the vocabulary
    bos_token_id = None

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Collection[int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """Index a vocabulary.

        Args:
            token_bytes: of each id.
            special_ids: tokens that are no text, which no grammar allows.
            encode: the tokenizer's own way to write a text, without special tokens; used where a grammar leaves only
                one text.
        """
        self.size = len(token_bytes)
        self.num_words = self.size // 32 + 1
        # 0xFF marks special tokens for the library; no text has a token that begins with it.
        self.tokens = [b"" if data.startswith(b"\xff") else data for data in token_bytes]
        self.special_token_ids = sorted(special_ids)
        self._encode = encode
        self.tokenizer = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text, for the library."""
        return list(self._encode(text.decode()))


class GrammarCompiler:
    """Makes matchers for grammars; those read last are kept. Belongs to one thread."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._prototypes: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of the output, or one in its error state if `check` would refuse the grammar.

        Args:
            grammar: in the library's notation, Lark or JSON.
        """
        prototype = self._prototypes.pop(grammar, None) or self._compile(grammar)
        self._prototypes[grammar] = prototype
        if len(self._prototypes) > MAX_CACHED_GRAMMARS:
            self._prototypes.popitem(last=False)
        return prototype.deep_copy()

    def matcher_of_its_own(self, grammar: str) -> LLMatcher:
        """The same, sharing nothing with any other matcher."""
        return self._compile(grammar)

    def forget(self, grammar: str) -> None:
        """Read a grammar anew the next time.

        What matchers of a grammar find out about it they share, and so do they share what exceeds its budget.
        """
        self._prototypes.pop(grammar, None)

    def check(self, grammar: str) -> None:
        """Find out whether outputs can follow a grammar.

        Raises:
            GrammarError: none can, or it cannot be read or is too complex.
        """
        matcher = self.matcher(grammar)
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds most of what is too complex, and the grammars that allow nothing
        return matcher


def _reason(error: str) -> str:
    """The part of a message of the library that is for callers."""
    if error.startswith("NoExtension"):
        return "no output can have this form"
    if match := re.search(r"^error: (.*)", error, re.MULTILINE):  # of a regular expression, below a picture of it
        return match[1]
    return re.sub(r"^at \d+\(\d+\): ", "", error.split("\n")[0])
