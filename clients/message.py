"""One turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
        ValueError: a role that does not exist.
    """
    return chat_pb2.ChatInput(
        messages=[
            chat_pb2.ChatMessage(role=chat_pb2.Role.Value(f"ROLE_{message.role.upper()}"), content=message.content)
            for message in messages
        ],
        add_generation_prompt=add_generation_prompt,
    )
