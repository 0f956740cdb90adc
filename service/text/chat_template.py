"""Turns a conversation into the prompt that a model's chat template makes of it.

What a message says must stay text, even where it spells a special token. Spellings in messages are broken up by marks
before the template sees them and the marks are removed afterwards, so a special token in the rendered text is the
template's own. A template may take a mark out, or join pieces to a spelling; therefore a conversation with anything
suspicious is rendered a second time, with messages that cannot contribute to a spelling. If that gives other special
tokens, the conversation is refused.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from foreword.gpu.checkpoint.checkpoint import ChatTemplate
from foreword.scheduler.errors import InvalidField
from foreword.service.text import template_process
from foreword.service.text.tokenizer import spelling_pattern

FIELD = "chat"
START_LIMIT_S = 30.0
MARKS = [chr(point) for point in range(0xFDD0, 0xFDF0)]  # noncharacters, which have no meaning in a text
ROLE = re.compile(r"\w{1,64}")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: "system", "user", "assistant", "tool", or what else the template knows.
        content: what is said.
    """

    role: str
    content: str


class ChatRenderer:
    """Renders conversations with one template, in a process that starts at the first one. Safe for concurrent use."""

    def __init__(self, template: ChatTemplate, special_tokens: Iterable[str], *, time_limit_s: float = 1.0) -> None:
        """Prepare to render.

        Args:
            template: the model's.
            special_tokens: texts that a message must not turn into tokens.
            time_limit_s: a conversation whose rendering takes longer is refused.
        """
        self._variables = {"bos_token": template.bos_token, "eos_token": template.eos_token}
        self._special_tokens = tuple(filter(None, special_tokens))
        self._spellings = spelling_pattern(self._special_tokens)
        self._spellings_in_any_case = spelling_pattern(self._special_tokens, re.IGNORECASE)
        self._beginnings = _characters(token[0] for token in self._special_tokens)
        self._edges = _characters(edge for token in self._special_tokens for edge in (token[0], token[-1]))
        self._process = _TemplateProcess(template.source, time_limit_s)

    def start(self) -> None:
        """Start the process now. A template that does not compile shows when a conversation is rendered."""
        with contextlib.suppress(InvalidField):
            self._process.start()

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[str]:
        """Render a conversation.

        Args:
            messages: oldest first, at least one.
            add_generation_prompt: end with the beginning of an assistant's turn.

        Returns:
            Plain text at even positions, texts of special tokens at odd ones; joined, they are the prompt.

        Raises:
            InvalidField: the template refuses the conversation, fails, or takes too long.
        """
        if not messages:
            raise InvalidField(FIELD, "must have at least one message")
        for i, message in enumerate(messages):
            if not ROLE.fullmatch(message.role):
                raise InvalidField(FIELD, f"messages[{i}].role must be a word")
        mark = next((mark for mark in MARKS if not any(mark in message.content for message in messages)), None)
        if mark is None:
            raise InvalidField(FIELD, "the messages use every noncharacter from U+FDD0 to U+FDEF")
        variants = [[self._broken_up(message.content, mark) for message in messages]]
        if any(self._is_suspicious(message.content) for message in messages):
            variants.append([self._incapable(message.content, mark) for message in messages])
        texts = self._process.render(
            [
                {
                    "messages": [
                        {"role": message.role, "content": content}
                        for message, content in zip(messages, contents, strict=True)
                    ],
                    "add_generation_prompt": add_generation_prompt,
                    **self._variables,
                }
                for contents in variants
            ]
        )
        rendered, *checks = [self._spellings.split(text) for text in texts]
        if any(check[1::2] != rendered[1::2] for check in checks):
            raise InvalidField(
                FIELD, "with these messages the chat template spells special tokens that are not its own"
            )
        return [piece.replace(mark, "") for piece in rendered]

    def close(self) -> None:
        """End the process."""
        self._process.stop()

    def _broken_up(self, content: str, mark: str) -> str:
        return self._spellings_in_any_case.sub(lambda match: "".join(c + mark for c in match[0]), content)

    def _incapable(self, content: str, mark: str) -> str:
        """A text in which no special token can begin or go on; an empty one stays so, as templates ask for that."""
        return mark + self._beginnings.sub(mark, content) if content.strip() else content

    def _is_suspicious(self, content: str) -> bool:
        """Whether a special token could begin or end in this text, or surround it."""
        if not content.strip():
            return False
        return bool(self._edges.search(content)) or any(content in token for token in self._special_tokens)


def _characters(characters: Iterable[str]) -> re.Pattern[str]:
    """Match any of these characters in either case."""
    escaped = "".join(map(re.escape, sorted(set(characters))))
    return re.compile(f"[{escaped}]" if escaped else "(?!)", re.IGNORECASE)


class _TemplateProcess:
    """The process that runs the template: started when needed, killed when it takes too long."""

    def __init__(self, source: str, time_limit_s: float) -> None:
        self._source = source
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._stream: BufferedRWPair | None = None

    def render(self, renderings: list[dict[str, Any]]) -> list[str]:
        """Render with each set of variables."""
        with self._lock:
            self._start()
            texts: list[str] = self._ask({"renderings": renderings}, self._time_limit_s)["texts"]
        return texts

    def start(self) -> None:
        with self._lock:
            self._start()

    def stop(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> None:
        if self._process is not None:
            return
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(template_process.__file__))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        self._stream = self._connection.makefile("rwb")
        try:
            self._ask({}, START_LIMIT_S)
            self._ask({"source": self._source}, self._time_limit_s)
        except InvalidField:
            self._stop()
            raise

    def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._connection is not None
        assert self._stream is not None
        deadline = time.monotonic() + limit_s
        answer = None
        try:
            self._connection.settimeout(limit_s)
            template_process.write_message(self._stream, message)
            self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            answer = template_process.read_message(self._stream)
        except OSError:
            pass  # the process is gone or late, told apart below
        finally:
            if answer is None:
                self._stop()
        if answer is None and time.monotonic() >= deadline:
            raise InvalidField(FIELD, f"the chat template did not finish within {limit_s:g} s")
        if answer is None:
            raise InvalidField(FIELD, "the chat template ended its process")
        if "error" in answer:
            raise InvalidField(FIELD, f"the chat template failed: {answer['error']}")
        return answer

    def _stop(self) -> None:
        for resource in (self._stream, self._connection):
            if resource is not None:
                with contextlib.suppress(OSError):  # what is still to be sent has no reader
                    resource.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = self._stream = None
