"""A vocabulary of bytes and a few longer tokens, on which grammars are easy to check by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from foreword.gpu.guided.grammar import GrammarCompiler, GrammarVocabulary

EOS, TURN = 128, 129
WORDS = (b"ab", b"abc", b'{"', b'":', b"true")
VOCAB_SIZE = 131 + len(WORDS)


def encode(text: str) -> list[int]:
    """Tokens of an ASCII text, one for each character."""
    return list(text.encode())


@pytest.fixture(scope="session")
def vocabulary() -> GrammarVocabulary:
    token_bytes = [bytes([i]) for i in range(128)] + [b"<eos>", b"<turn>", b""] + list(WORDS)
    return GrammarVocabulary(token_bytes, {EOS, TURN}, encode)


@pytest.fixture
def compiler(vocabulary: GrammarVocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary)


@pytest.fixture(scope="session")
def ids() -> Callable[[str], Sequence[int]]:
    return encode
