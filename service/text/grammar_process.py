"""A process that turns constraints into grammars that outputs can follow, run with limits (see `bounded_process`).

A constraint is a program that came with a request: a short one can stand for a grammar of any size. What this process
has compiled within its limits, the engine compiles within them too.

The message with `tokenizer` and `vocab_size` sets the model, one with `kind` and `source` asks for a grammar.
"""

from __future__ import annotations

import json
import re
import time

from llguidance import LLMatcher, regex_to_lark

from foreword.gpu.guided.grammar import GrammarCompiler, GrammarError
from foreword.service.text.bounded_process import Json, serve
from foreword.service.text.finite_schema import FiniteSchema
from foreword.service.text.gbnf import GbnfError, gbnf_to_lark
from foreword.service.text.tokenizer import Tokenizer

MAX_MEMORY_BYTES = 1 << 30
MAX_COMPILE_S = 0.1
"""Processor time of one compilation, for which the engine's other sequences wait when a grammar is new."""

WHITESPACE = r" |\n {0,32}"
"""Between the parts of a JSON text. With more, a model can go on for ever without breaking the form."""


class GrammarServer:
    """Answers messages with the tokenizer it was given last."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None

    def answer(self, message: Json) -> Json:
        """Do what a message asks for; what is wrong with a constraint becomes an answer."""
        try:
            if "tokenizer" in message:
                tokenizer = Tokenizer(message["tokenizer"], message["vocab_size"])
                self._compiler = GrammarCompiler(tokenizer.grammar_vocabulary())
            if "kind" in message:
                return {"grammar": self._compile(message["kind"], message["source"])}
        except MemoryError:
            return {"error": "it takes too much memory"}
        except RecursionError:
            return {"error": "it is nested too deeply"}
        except (GbnfError, GrammarError, ValueError) as error:
            return {"error": str(error)}
        return {}

    def _compile(self, kind: str, source: str) -> str:
        assert self._compiler is not None
        start_s = time.process_time()
        grammar = grammar_of(kind, source)
        self._compiler.check(grammar)
        self._compiler.forget(grammar)
        if time.process_time() - start_s > MAX_COMPILE_S:
            raise GrammarError(f"it takes more than {MAX_COMPILE_S:g} s to compile")
        return grammar


def grammar_of(kind: str, source: str) -> str:
    """The grammar of a constraint, in the notation of the grammar library.

    Args:
        kind: field of `foreword.v1.Constraint`.
        source: its text, of `choices` a JSON list.

    Raises:
        ValueError: it cannot be read.
    """
    if kind == "json_schema":
        return _json_grammar(json.loads(source))
    if kind == "json_object":
        return _json_grammar({"type": "object"})
    if kind == "regex":
        if (len(source) - len(source.rstrip("\\"))) % 2:  # the library takes it for a backslash
            raise ValueError("a backslash at the end")
        return f"start: /{regex_to_lark(source, 'dws')}/"  # classes such as \\d are of ASCII, as in RE2
    if kind == "grammar":
        return gbnf_to_lark(source)
    assert kind == "choices"
    return f"start: /{'|'.join(map(_literal, json.loads(source)))}/"


def _json_grammar(schema: object) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError("a JSON Schema is an object or a boolean")
    if not FiniteSchema(schema).has_instance:
        raise ValueError("no output can have this form: every value would contain another one without an end")
    # Not lenient: keywords that the library does not implement are refused instead of ignored.
    return LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": False, "whitespace_pattern": WHITESPACE})


def _literal(text: str) -> str:
    """A regular expression that matches a text alone."""
    return re.sub(r"[^A-Za-z0-9]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def main() -> None:
    """Serve until the other side closes the socket."""
    serve(GrammarServer().answer, MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
