"""Text work for an event loop, done in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.scheduler.errors import CheckpointError, InvalidField
from foreword.service.text.chat_template import FIELD, ChatMessage, ChatRenderer
from foreword.service.text.constraint import Constraint, ConstraintCompiler
from foreword.service.text.fair_executor import FairExecutor
from foreword.service.text.tokenizer import Int32Array, TokenizedText, Tokenizer
from foreword.service.text.vocabulary import Vocabulary

Result = TypeVar("Result")

MAX_WAITING_CONSTRAINTS = 64
"""Constraints of one tenant that wait to be compiled; more are refused."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as a prompt.

    Attributes:
        text: special tokens are spelled out, as are those that a message only spells.
        token_ids: int32 `[N]`.
    """

    text: str
    token_ids: Int32Array


class TextProcessor:
    """Tokenizers of one model, one for each thread, its chat template and its constraints.

    Attributes:
        vocabulary: what the ids stand for; shared by all detokenizers.
    """

    def __init__(self, checkpoint: Checkpoint, *, num_threads: int = 2) -> None:
        """Read the vocabulary; threads, their tokenizers and the processes start when needed, or by `start`.

        Args:
            checkpoint: where the tokenizer, the vocabulary's size and the chat template come from.
            num_threads: texts that are worked on at once.

        Raises:
            CheckpointError: the tokenizer is damaged or of a kind that is not supported.
        """
        vocab_size = checkpoint.config.get("vocab_size")
        if not isinstance(vocab_size, int):
            raise CheckpointError(f"{checkpoint.path}: vocab_size must be an integer, is {vocab_size!r}")
        chat_template = checkpoint.chat_template
        self._prototype = Tokenizer(
            checkpoint.tokenizer_json(), vocab_size, chat_template.source if chat_template else ""
        )
        self.vocabulary: Vocabulary = self._prototype.vocabulary
        self._constraints = ConstraintCompiler(checkpoint.tokenizer_json(), vocab_size)
        self._constraint_executor = FairExecutor("constraint", MAX_WAITING_CONSTRAINTS)
        self._renderer = ChatRenderer(chat_template, self.vocabulary.markers) if chat_template else None
        self._num_threads = num_threads
        self._thread = threading.local()
        self._executor = ThreadPoolExecutor(num_threads, "text", initializer=self._load_tokenizer)

    async def start(self) -> None:
        """Start everything now, so that the first request need not wait for it."""
        barrier = threading.Barrier(self._num_threads)  # holds each thread, so that the pool starts another one
        await asyncio.gather(*(self._run(barrier.wait) for _ in range(self._num_threads)))
        await asyncio.wrap_future(self._constraint_executor.submit("", self._constraints.start))
        if self._renderer is not None:
            await self._run(self._renderer.start)

    async def encode(self, text: str) -> Int32Array:
        """Tokens of a prompt: with what the model expects around a text, and no special token spelled by the text."""
        return await self._run(lambda: self._tokenizer.encode(text, add_special_tokens=True))

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = False, parse_special_tokens: bool = False
    ) -> TokenizedText:
        """Tokens of a text and where each one stands; see `Tokenizer.tokenize`."""
        return await self._run(
            lambda: self._tokenizer.tokenize(
                text, add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens
            )
        )

    async def decode(self, token_ids: Sequence[int], *, include_special_tokens: bool = False) -> str:
        """Text of tokens; see `Tokenizer.decode`."""
        return await self._run(lambda: self._tokenizer.decode(token_ids, include_special_tokens=include_special_tokens))

    async def encode_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> RenderedChat:
        """Turn a conversation into a prompt with the model's chat template.

        Args:
            messages: oldest first.
            add_generation_prompt: end with the beginning of an assistant's turn.

        Raises:
            InvalidField: the model has no chat template, or it refuses the conversation, fails, or takes too long.
        """
        return await self._run(lambda: self._render(messages, add_generation_prompt))

    async def compile_constraint(self, constraint: Constraint, tenant: str = "") -> str:
        """The grammar of a constraint; see `ConstraintCompiler.compile`. One that is not known waits for others.

        Raises:
            QueueFull: too many constraints of the tenant wait.
        """
        grammar = self._constraints.known(constraint)
        if grammar is not None:
            return grammar
        work = self._constraint_executor.submit(tenant, lambda: self._constraints.compile(constraint))
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """End the threads and the processes; work that has not begun is cancelled."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._constraint_executor.close()
        self._constraints.close()
        if self._renderer is not None:
            self._renderer.close()

    def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> RenderedChat:
        if self._renderer is None:
            raise InvalidField(FIELD, "the model has no chat template")
        pieces = self._renderer.render(messages, add_generation_prompt=add_generation_prompt)
        return RenderedChat("".join(pieces), self._tokenizer.encode_pieces(pieces))

    def _load_tokenizer(self) -> None:
        self._thread.tokenizer = self._prototype.clone()

    @property
    def _tokenizer(self) -> Tokenizer:
        """The calling thread's own."""
        tokenizer: Tokenizer = self._thread.tokenizer
        return tokenizer

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
