from __future__ import annotations

import pytest

from foreword.gpu.guided.grammar import GrammarCompiler, GrammarVocabulary
from foreword.service.text.gbnf import GbnfError, gbnf_to_lark


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """Of a vocabulary of bytes, so that every output has one tokenization."""
    token_bytes = [bytes([i]) for i in range(255)]
    return GrammarCompiler(GrammarVocabulary(token_bytes, (), lambda text: list(text.encode())))


def is_sentence(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    compiler.check(grammar)
    matcher = compiler.matcher(grammar)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


RECURSION = '\nunused ::= "[" root "]" | "never"\n'

CASES = [
    ('root ::= "a" "b" | "ab" "c"', ["ab", "abc"], ["a", "abb", "c"]),
    ('root ::= "a" "b" | [a-z] "c"', ["ab", "ac", "xc"], ["xb", "aa"]),
    ("root ::= [a-z]+ [a-z]", ["ab", "abc"], ["a"]),
    ('root ::= ("red" | "red wine")', ["red", "red wine"], ["red w", ""]),
    ("root ::= item{2,3}\nitem ::= [0-9]+ ws\nws ::= [ \\t\\n]*", ["1 2", "1 2 3\n", "11"], ["1", ""]),
    ('root ::= "a"{2} "b"{1,} "c"{0,1}', ["aab", "aabbc"], ["ab", "aabcc"]),
    ('root ::=\n "a"  # first\n | "b"\n | ""', ["a", "b", ""], ["ab"]),
    ("root ::= .{2}", ["ab", "\n\n", "éa"], ["a", "abc"]),
    (r'root ::= [^"\\]* "\"" "\x41" "\u0042" "\U0001F600"', ['x"AB😀', '"AB😀'], ['x"A']),
    (r'root ::= [a-] "]" [\]\[^]', ["a]]", "-]["], ["b]]"]),
    ('root ::= "." "*" "(" "/" "<b>"', [".*(/<b>"], ["a"]),
    ('root ::= ("" | "x")+', ["", "xx"], ["y"]),
    ('root ::= ( # a comment\n "a"\n "b"\n)?', ["ab", ""], ["a"]),
    ('root ::= my-rule_2\nmy-rule_2 ::= "é"', ["é"], ["e"]),
]


@pytest.mark.parametrize(("source", "sentences", "others"), CASES)
@pytest.mark.parametrize("is_recursive", [False, True])
def test_the_language_stays_the_same(
    compiler: GrammarCompiler, source: str, sentences: list[str], others: list[str], is_recursive: bool
) -> None:
    """As one expression, and character by character as soon as some rule is recursive."""
    if is_recursive:
        source = source.replace("root ::=", "root ::= old | unused\nold ::=", 1) + RECURSION
    grammar = gbnf_to_lark(source)
    assert ("rule" in grammar) == is_recursive
    assert [text for text in sentences if not is_sentence(compiler, grammar, text)] == []
    assert [text for text in others if is_sentence(compiler, grammar, text)] == []


@pytest.mark.parametrize(
    ("source", "sentences", "others"),
    [
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "()"]),
        ('root ::= e\ne ::= e "+" t | t\nt ::= "1" | "(" e ")"', ["1", "1+1", "(1+1)+1"], ["+1", "1+"]),
        ('root ::= s\ns ::= "a" s "a" | ""', ["", "aa", "aaaa"], ["a", "aaa"]),
    ],
)
def test_recursion(compiler: GrammarCompiler, source: str, sentences: list[str], others: list[str]) -> None:
    grammar = gbnf_to_lark(source)
    assert [text for text in sentences if not is_sentence(compiler, grammar, text)] == []
    assert [text for text in others if is_sentence(compiler, grammar, text)] == []


def test_an_expression_that_would_explode_is_no_expression(compiler: GrammarCompiler) -> None:
    rules = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)]
    grammar = gbnf_to_lark("\n".join(["root ::= r0", *rules, 'r40 ::= "a"']))
    assert len(grammar) < 10_000
    assert is_sentence(compiler, gbnf_to_lark('root ::= a a\na ::= b b\nb ::= "x"'), "xxxx")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "there is no rule 'root'"),
        ('root ::= "a', "line 1: a literal or a character class does not end"),
        ('\nroot ::= "a" nowhere', "line 2: there is no rule 'nowhere'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ("root ::= []", "line 1: a character class is empty"),
        ("root ::= [b-a]", "line 1: the range 'b'-'a' is empty"),
        (r'root ::= "\q"', r"unknown escape '\\\\q'"),
        (r'root ::= "\ud800"', "is no character"),
        ('root ::= ("a"', r"expected '\)'"),
        ('root ::= "a"){2}', r"unexpected '\)'"),
        ('root = "a"', "expected '::='"),
        ('root ::= "a"{5,2}', "repetitions must be at most 1024 and not fall"),
        ('root ::= "a"{2000}', "repetitions must be at most 1024 and not fall"),
        ('root ::= "a"{x}', "expected a number of repetitions"),
        ("root ::= " + "(" * 100, "nested deeper than 64"),
        ("::=", "expected a rule's name"),
    ],
)
def test_mistakes_are_named(source: str, problem: str) -> None:
    with pytest.raises(GbnfError, match=problem):
        gbnf_to_lark(source)
