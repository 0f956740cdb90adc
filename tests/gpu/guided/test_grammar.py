from __future__ import annotations

import numpy as np
import pytest

from foreword.gpu.guided import grammar as grammar_module
from foreword.gpu.guided.grammar import GrammarCompiler, GrammarError, GrammarVocabulary


@pytest.mark.parametrize("size", [300, 319, 320, 321])
def test_special_tokens_and_bytes_that_no_text_has_are_never_allowed(size: int) -> None:
    """Vocabularies of all sizes around a whole number of mask words, with a token of the library's own mark."""
    token_bytes = [bytes([i]) for i in range(256)] + [b"<s>"] + [b"ab"] * (size - 257)
    vocabulary = GrammarVocabulary(token_bytes, {256}, lambda text: list(text.encode()))
    matcher = GrammarCompiler(vocabulary).matcher(r"start: /[a-z<>](.|\n)*/")
    words = np.zeros(vocabulary.num_words, np.uint32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    allowed = set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
    assert allowed == {*range(ord("a"), ord("z") + 1), ord("<"), ord(">"), *range(257, size)}
    matcher.consume_token(ord("a"))
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[[255, 256]].any()
    assert bits[size]  # behind the vocabulary: the grammar may end


def test_the_grammars_read_last_are_kept(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_CACHED_GRAMMARS", 2)
    read: list[str] = []
    compile_one = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda grammar: read.append(grammar) or compile_one(grammar))
    a, b, c = "start: /a/", "start: /b/", "start: /c/"
    for grammar in (a, b, a, c, a, b):
        assert compiler.matcher(grammar).consume_token(ord(grammar[-2]))
    assert read == [a, b, c, b]
    compiler.forget(a)
    compiler.matcher(a)
    assert read == [a, b, c, b, a]


def test_matchers_of_one_grammar_move_apart(compiler: GrammarCompiler) -> None:
    one, other = compiler.matcher("start: /ab*/"), compiler.matcher("start: /ab*/")
    assert one.consume_token(ord("a"))
    assert one.is_accepting()
    assert not other.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: /(a/", "unclosed group"),
        ("start: nothing", 'unknown name: "nothing"'),
        (r"start: /[^\s\S]/", "no output can have this form"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_told_and_not_shown(
    compiler: GrammarCompiler, grammar: str, reason: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.check(grammar)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert grammar not in str(caught.value)
    assert compiler.matcher(grammar).is_error()
