"""One turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from foreword.v1 import chat_pb2

RoleName = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """Who says what.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        content: the text; may be empty.
    """

    role: RoleName
    content: str


def chat_input(messages: Sequence[Message], add_generation_prompt: bool = True) -> chat_pb2.ChatInput:
    """The conversation as the API takes it.

    Raises:
        ValueError: a role that does not exist, or a content that is not valid Unicode.
    """
    return chat_pb2.ChatInput(
        messages=[
            chat_pb2.ChatMessage(role=_role(message.role, index), content=_content(message.content, index))
            for index, message in enumerate(messages)
        ],
        add_generation_prompt=add_generation_prompt,
    )


def _role(name: str, index: int) -> chat_pb2.Role.ValueType:
    if name not in get_args(RoleName):
        raise ValueError(f"messages[{index}].role: {name!r} is not one of {', '.join(get_args(RoleName))}")
    return chat_pb2.Role.Value(f"ROLE_{name.upper()}")


def _content(text: str, index: int) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"messages[{index}].content: not valid Unicode: it has a surrogate") from None
    return text
