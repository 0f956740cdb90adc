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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foreword.gpu.checkpoint.checkpoint import ChatTemplate
from foreword.scheduler.errors import InvalidField
from foreword.service.text import template_process
from foreword.service.text.bounded_process import BoundedProcess, HelperFailed
from foreword.service.text.tokenizer import spelling_pattern

FIELD = "chat"
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
        self._process = BoundedProcess(template_process.__file__, {"source": template.source}, time_limit_s)

    def start(self) -> None:
        """Start the process now. A template that does not compile shows when a conversation is rendered."""
        with contextlib.suppress(HelperFailed):
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
        renderings = [
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
        try:
            texts: list[str] = self._process.ask({"renderings": renderings})["texts"]
        except HelperFailed as failure:
            raise InvalidField(FIELD, f"the chat template {failure}") from None
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
