"""The model that a server serves, as its front end sees it."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.scheduler.errors import UnknownModel
from foreword.service.text.processor import TextProcessor


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts and tools that are there before the engine is.

    Attributes:
        name: that requests use.
        architecture: in Hugging Face's spelling.
        text: between text and tokens.
        eos_token_ids: end an output.
        has_chat_template: conversations can be rendered.
    """

    name: str
    architecture: str
    text: TextProcessor
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool

    def check_name(self, name: str) -> None:
        """Accept this model's name, or none.

        Raises:
            UnknownModel: it is another name.
        """
        if name not in ("", self.name):
            raise UnknownModel(f"there is no model {name[:80]!r}; this server has {self.name!r}", model=self.name)
