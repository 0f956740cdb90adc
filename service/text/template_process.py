"""A process that renders one chat template, run as a script with a socket as its standard input.

A template is a program that came with a model. The sandbox keeps it away from Python; a process of its own bounds what
a sandbox cannot: memory by a limit of the operating system, and time by being killed (see `bounded_process`).

A message with `source` sets the template, one with `renderings` asks for their texts.
"""

from __future__ import annotations

import json
import re
from datetime import datetime

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foreword.service.text.bounded_process import Json, serve

MAX_MEMORY_BYTES = 512 << 20
MAX_TEXT_LENGTH = 8 << 20


class GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    """Let a template refuse its input."""
    raise jinja2.TemplateError(message)


def strftime_now(layout: str) -> str:
    """The local time."""
    return datetime.now().strftime(layout)


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes. The noncharacters U+FDD0 to U+FDEF, which may be marks, are never escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        text = re.sub(r"[^\x00-\x7f\ufdd0-\ufdef]", lambda match: json.dumps(match[0])[1:-1], text)
    return text


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template with what templates on the Hugging Face Hub expect to find."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def render(template: jinja2.Template, variables: Json) -> str:
    """Render once; the text's length is bounded while it grows."""
    parts, length = [], 0
    for part in template.generate(tools=None, documents=None, **variables):
        parts.append(part)
        length += len(part)
        if length > MAX_TEXT_LENGTH:
            raise jinja2.TemplateError(f"its text is longer than {MAX_TEXT_LENGTH} characters")
    return "".join(parts)


class TemplateServer:
    """Answers messages with the template it was given last."""

    def __init__(self) -> None:
        self._template = jinja2.Template("")

    def answer(self, message: Json) -> Json:
        """Do what a message asks for; whatever the template's code raises becomes an answer."""
        try:
            if "source" in message:
                self._template = compile_template(message["source"])
            if "renderings" in message:
                return {"texts": [render(self._template, variables) for variables in message["renderings"]]}
        except MemoryError:
            return {"error": "it took too much memory"}
        except RecursionError:
            return {"error": "it recursed too deeply"}
        except Exception as error:  # template code can raise anything
            return {"error": str(error) or type(error).__name__}
        return {}


def main() -> None:
    """Serve until the other side closes the socket."""
    serve(TemplateServer().answer, MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
