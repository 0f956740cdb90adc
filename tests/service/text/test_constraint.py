from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.scheduler.errors import InvalidField
from foreword.service.text import constraint as constraint_module
from foreword.service.text.constraint import Constraint, ConstraintCompiler


@pytest.fixture(scope="module")
def compiler(default_checkpoint: Checkpoint) -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(default_checkpoint.tokenizer_json(), default_checkpoint.config["vocab_size"])
    yield compiler
    compiler.close()


def refusal(compiler: ConstraintCompiler, kind: str, source: str) -> str:
    with pytest.raises(InvalidField) as caught:
        compiler.compile(Constraint(kind, source))
    field, message = str(caught.value).split(": ", 1)
    assert field == f"constraint.{kind}"
    return message


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        ("json_schema", "{", "Expecting property name"),
        ("json_schema", "17", "a JSON Schema is an object or a boolean"),
        ("json_schema", "false", "Unsatisfiable schema"),
        ("json_schema", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}', "Unimplemented keys"),
        ("json_schema", '{"type": "string", "format": "colour"}', "Unknown format: colour"),
        ("json_schema", '{"type": "string", "pattern": "(?=a)"}', "look-around"),
        ("json_schema", '{"$ref": "http://localhost/schema.json"}', "does not fetch"),
        ("json_schema", '{"$ref": "#"}', "without an end"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "Unsatisfiable schema"),
        ("regex", "(a", "unclosed group"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", r"[^\s\S]", "no output can have this form"),
        ("regex", "a\\", "a backslash at the end"),
        ("grammar", "root ::= root", "no output can have this form"),
        ("grammar", 'root ::= "a" nowhere', "there is no rule 'nowhere'"),
    ],
)
def test_what_cannot_be_followed_is_refused(compiler: ConstraintCompiler, kind: str, source: str, problem: str) -> None:
    message = refusal(compiler, kind, source)
    assert message.startswith("its compilation failed: ")
    assert problem in message
    assert "<state>" not in message


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


EXPLODING = {
    "$defs": {f"d{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 3}] * 3} for i in range(12)}
    | {"d12": {"anyOf": [{"type": "object", "properties": {"x": {"minimum": n}}} for n in range(8)]}},
    "$ref": "#/$defs/d0",
}

BOMBS = {
    "optional fields": ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(2500)}})),
    "nesting": ("json_schema", nested(6000)),
    "lists": ("json_schema", "[" * 65_536),
    "products": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(12)]}),
    ),
    "references": ("json_schema", json.dumps(EXPLODING)),
    "counts": ("regex", "((((a{1,999}b){1,999}c){1,999}d){1,999}e){1,999}"),
    "wide alternatives": ("regex", "|".join(f".{{0,99}}{i}.{{0,99}}" for i in range(900))),
    "parentheses": ("grammar", "root ::= " + "(" * 65_000),
    "doubling rules": (
        "grammar",
        "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(99)), 'r99 ::= "a"']),
    ),
    "ambiguity": ("grammar", "root ::= " + " ".join(["s"] * 500) + '\ns ::= s s | "a" | ""'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_within_bounded_time(compiler: ConstraintCompiler, name: str) -> None:
    """Refused, or found to be harmless: either way soon, and the next constraint compiles."""
    start_s = time.monotonic()
    with contextlib.suppress(InvalidField):
        compiler.compile(Constraint(*BOMBS[name]))
    assert time.monotonic() - start_s < 10  # a loaded machine; the limit is 1 s, a new process may follow
    assert compiler.compile(Constraint("regex", "a+")) == "start: /a+/"


def test_what_takes_too_long_is_killed(default_checkpoint: Checkpoint) -> None:
    vocab_size = default_checkpoint.config["vocab_size"]
    compiler = ConstraintCompiler(default_checkpoint.tokenizer_json(), vocab_size, time_limit_s=0.01)
    try:
        assert "did not finish within 0.01 s" in refusal(compiler, *BOMBS["optional fields"])
    finally:
        compiler.close()


def test_the_last_constraints_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    compiler = ConstraintCompiler("", 0)
    monkeypatch.setattr(
        compiler._process, "ask", lambda message: asked.append(message) or {"grammar": message["source"]}
    )
    monkeypatch.setattr(constraint_module, "MAX_CACHED", 2)
    for source in ("a", "b", "a", "c", "a", "b"):
        assert compiler.compile(Constraint("regex", source)) == source
    assert [message["source"] for message in asked] == ["a", "b", "c", "b"]
    assert compiler.compile(Constraint("grammar", "b")) == "b"
    assert len(asked) == 5
