"""Translates context-free grammars from GBNF, the notation of llama.cpp, into the Lark dialect of the grammar library.

The library splits an output into terminals and prefers longer ones, which would lose sentences of a grammar whose
literals are prefixes of each other. A grammar without recursion therefore becomes a single terminal, a regular
expression, which is also what the library follows fastest. In any other every terminal is a single character.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64
MAX_REPETITIONS = 1024
MAX_EXPRESSION_LENGTH = 65_536

_BLANKS = re.compile(r"(?:[ \t]|#[^\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_COUNTS = re.compile(r"\{[ \t]*(\d{1,6})[ \t]*(?:(,)[ \t]*(\d{1,6})?[ \t]*)?\}")
_REFERENCE = re.compile(r"<([A-Za-z0-9_-]+)>")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_ANY = r"/[\x{0}-\x{10ffff}]/"


class GbnfError(ValueError):
    """A grammar that cannot be read; the text says in which line and why."""


def gbnf_to_lark(source: str) -> str:
    """Translate a grammar.

    Args:
        source: rules `name ::= ...`, the start symbol is `root`.

    Returns:
        The same language in Lark notation, with the start symbol `start`.

    Raises:
        GbnfError: a mistake in the notation, a rule that is missing or defined twice, or nesting deeper than 64.
    """
    return _Translator(source).translate()


class _Translator:
    def __init__(self, source: str) -> None:
        self._source = source
        self._position = 0
        self._rules: dict[str, str] = {}
        self._references: dict[str, int] = {}  # names that occur, and where first

    def translate(self) -> str:
        self._skip(_BLANK_LINES)
        while self._position < len(self._source):
            name = self._take(_NAME, "a rule's name")[0]
            if name in self._rules:
                raise self._error(f"the rule {name!r} is defined twice")
            self._skip(_BLANKS)
            self._expect("::=")
            self._skip(_BLANK_LINES)
            self._rules[name] = self._alternatives(0)
            self._skip(_BLANKS)
            if self._position < len(self._source) and self._peek() not in "\r\n":
                raise self._error(f"unexpected {self._peek()!r}")
            self._skip(_BLANK_LINES)
        if "root" not in self._rules:
            raise GbnfError("there is no rule 'root'")
        for name, position in self._references.items():
            if name not in self._rules:
                self._position = position
                raise self._error(f"there is no rule {name!r}")
        expressions = self._expressions()
        if expression := expressions.get("root"):
            return f"start: /{expression}/\n"
        numbers = {name: f"rule{i}" for i, name in enumerate(self._rules)}
        lines = [f"{numbers[name]}: {body}" for name, body in self._rules.items()]
        named = _REFERENCE.sub(lambda match: numbers[match[1]], "\n".join(lines))
        return f"start: {numbers['root']}\n{named}\n"

    def _expressions(self) -> dict[str, str]:
        """Regular expressions of the rules that are neither recursive nor too long."""
        expressions: dict[str, str] = {}
        while True:
            ready = [
                name
                for name, body in self._rules.items()
                if name not in expressions and expressions.keys() >= set(_REFERENCE.findall(body))
            ]
            for name in ready:
                plain = self._rules[name].replace('""', "(?:)").replace(" ", "").replace("/", "")
                plain = re.sub(r"\((?!\?)", "(?:", plain)
                expression = _REFERENCE.sub(lambda match: f"(?:{expressions[match[1]]})", plain)
                if len(expression) <= MAX_EXPRESSION_LENGTH:
                    expressions[name] = expression
            if not expressions.keys() & set(ready):
                return expressions

    def _alternatives(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH}")
        choices = [self._sequence(depth)]
        while True:
            end = self._position
            self._skip(_BLANK_LINES)
            if self._peek() != "|":
                self._position = end  # a line break there ends the rule
                return " | ".join(choices)
            self._position += 1
            self._skip(_BLANK_LINES)
            choices.append(self._sequence(depth))

    def _sequence(self, depth: int) -> str:
        items: list[str] = []
        while True:
            self._skip(_BLANK_LINES if depth else _BLANKS)
            symbol = self._peek()
            if symbol == '"':
                items.append(self._literal())
            elif symbol == "[":
                items.append(self._character_class())
            elif symbol == ".":
                self._position += 1
                items.append(_ANY)
            elif symbol == "(":
                self._position += 1
                items.append(f"({self._alternatives(depth + 1)})")
                self._skip(_BLANK_LINES)
                self._expect(")")
            elif symbol and _NAME.match(symbol):
                name = self._take(_NAME, "a name")[0]
                self._references.setdefault(name, self._position - len(name))
                items.append(f"<{name}>")
            else:
                return " ".join(items) or '""'
            items[-1] += self._repetition()

    def _repetition(self) -> str:
        self._skip(_BLANKS)
        symbol = self._peek()
        if symbol in ("*", "+", "?"):
            self._position += 1
            return symbol
        if symbol != "{":
            return ""
        low, comma, high = self._take(_COUNTS, "a number of repetitions").groups()
        counts = [int(count) for count in (low, high) if count]
        if max(counts) > MAX_REPETITIONS or counts != sorted(counts):
            raise self._error(f"repetitions must be at most {MAX_REPETITIONS} and not fall")
        return f"{{{low}{comma or ''}{high or ''}}}"

    def _literal(self) -> str:
        self._expect('"')
        characters = []
        while self._peek() != '"':
            characters.append(_one_of([(self._character(), None)]))
        self._position += 1
        return f"({' '.join(characters)})" if characters else '""'

    def _character_class(self) -> str:
        self._expect("[")
        negated = self._peek() == "^"
        self._position += negated
        ranges: list[tuple[str, str | None]] = []
        while self._peek() != "]":
            first = self._character()
            last = None
            if self._peek() == "-" and self._source[self._position + 1 : self._position + 2] != "]":
                self._position += 1
                last = self._character()
                if last < first:
                    raise self._error(f"the range {first!r}-{last!r} is empty")
            ranges.append((first, last))
        self._position += 1
        if not ranges:
            raise self._error("a character class is empty")
        return _one_of(ranges, negated)

    def _character(self) -> str:
        symbol = self._peek()
        if not symbol or symbol == "\n":
            raise self._error("a literal or a character class does not end")
        if symbol != "\\":
            self._position += 1
            return symbol
        match = self._take(_ESCAPE, "an escape")
        if match[4]:
            if match[4] not in _PLAIN_ESCAPES:
                raise self._error(f"unknown escape {match[0]!r}")
            return _PLAIN_ESCAPES[match[4]]
        point = int(match[1] or match[2] or match[3], 16)
        if point > 0x10FFFF or 0xD800 <= point < 0xE000:
            raise self._error(f"{match[0]} is no character")
        return chr(point)

    def _peek(self) -> str:
        return self._source[self._position : self._position + 1]

    def _skip(self, blanks: re.Pattern[str]) -> None:
        match = blanks.match(self._source, self._position)
        assert match is not None
        self._position = match.end()

    def _take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = pattern.match(self._source, self._position)
        if match is None:
            raise self._error(f"expected {what}")
        self._position = match.end()
        return match

    def _expect(self, text: str) -> None:
        if not self._source.startswith(text, self._position):
            raise self._error(f"expected {text!r}")
        self._position += len(text)

    def _error(self, problem: str) -> GbnfError:
        line = self._source.count("\n", 0, self._position) + 1
        return GbnfError(f"line {line}: {problem}")


def _one_of(ranges: list[tuple[str, str | None]], negated: bool = False) -> str:
    """A terminal that matches one character."""
    parts = (_point(first) + (f"-{_point(last)}" if last else "") for first, last in ranges)
    return f"/[{'^' if negated else ''}{''.join(parts)}]/"


def _point(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
