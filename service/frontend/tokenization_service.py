"""`foreword.v1.TokenizationService`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from foreword.scheduler.errors import InvalidField
from foreword.service.frontend.frontend import Frontend
from foreword.service.frontend.requests import read_chat
from foreword.service.frontend.validation import MAX_MESSAGES, check_count, check_supported, check_token_ids
from foreword.service.text.tokenizer import TokenizedText
from foreword.v1 import tokenization_service_pb2, tokenization_service_pb2_grpc

_CHUNK = 16_384
"""Elements that go into or out of a message at once; the interpreter's lock is held meanwhile."""


class TokenizationService(tokenization_service_pb2_grpc.TokenizationServiceServicer):
    """Text to tokens and back. What grows with the text is done in threads, for texts may fill a message."""

    def __init__(self, frontend: Frontend) -> None:
        self._model = frontend.model
        self._max_answer_bytes = frontend.config.max_send_message_bytes

    async def Tokenize(
        self, request: tokenization_service_pb2.TokenizeRequest, context: Any
    ) -> tokenization_service_pb2.TokenizeResponse:
        """Split a text into tokens."""
        check_supported(
            request,
            {
                "model",
                "text",
                "add_special_tokens",
                "parse_special_tokens",
                "return_offsets",
                "return_token_bytes",
            },
        )
        self._model.check_name(request.model)
        tokenized = await self._model.text.tokenize(
            request.text,
            add_special_tokens=request.add_special_tokens,
            parse_special_tokens=request.parse_special_tokens,
        )
        return await asyncio.to_thread(self._tokenized, request, tokenized)

    async def Detokenize(
        self, request: tokenization_service_pb2.DetokenizeRequest, context: Any
    ) -> tokenization_service_pb2.DetokenizeResponse:
        """Join tokens to a text."""
        check_supported(request, {"model", "token_ids", "include_special_tokens", "return_token_bytes"})
        self._model.check_name(request.model)
        token_ids = await asyncio.to_thread(self._checked_ids, request.token_ids)
        text = await self._model.text.decode(token_ids, include_special_tokens=request.include_special_tokens)
        return await asyncio.to_thread(self._detokenized, request, token_ids, text)

    async def RenderChat(
        self, request: tokenization_service_pb2.RenderChatRequest, context: Any
    ) -> tokenization_service_pb2.RenderChatResponse:
        """Turn a conversation into a prompt."""
        check_count("chat.messages", len(request.chat.messages), MAX_MESSAGES)
        supported = {"model", "chat.messages.role", "chat.messages.content", "chat.add_generation_prompt"}
        check_supported(request, supported)
        self._model.check_name(request.model)
        if not request.HasField("chat"):
            raise InvalidField("chat", "is required")
        chat = read_chat(request.chat)
        rendered = await self._model.text.encode_chat(chat.messages, chat.add_generation_prompt)
        response = tokenization_service_pb2.RenderChatResponse(text=rendered.text)
        await asyncio.to_thread(_extend, response.token_ids, rendered.token_ids.tolist())
        self._check_size("chat.messages", response.ByteSize())
        return response

    def _tokenized(
        self, request: tokenization_service_pb2.TokenizeRequest, tokenized: TokenizedText
    ) -> tokenization_service_pb2.TokenizeResponse:
        least = len(tokenized.token_ids) * (1 + 2 * request.return_offsets + 2 * request.return_token_bytes)
        self._check_size("text", least)
        token_ids = tokenized.token_ids.tolist()
        response = tokenization_service_pb2.TokenizeResponse()
        _extend(response.token_ids, token_ids)
        if request.return_offsets:
            _extend(response.start_offsets, tokenized.offsets[:, 0].tolist())
            _extend(response.end_offsets, tokenized.offsets[:, 1].tolist())
        if request.return_token_bytes:
            response.token_bytes.extend(map(self._model.text.vocabulary.bytes_of, token_ids))
        self._check_size("text", response.ByteSize())
        return response

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        checked: list[int] = []
        size = self._model.text.vocabulary.size
        for start in range(0, len(token_ids), _CHUNK):
            chunk = token_ids[start : start + _CHUNK]
            check_token_ids("token_ids", np.array(chunk, np.int32), size, first_index=start)
            checked += chunk
        return checked

    def _detokenized(
        self, request: tokenization_service_pb2.DetokenizeRequest, token_ids: list[int], text: str
    ) -> tokenization_service_pb2.DetokenizeResponse:
        response = tokenization_service_pb2.DetokenizeResponse(text=text)
        if request.return_token_bytes:
            response.token_bytes.extend(map(self._model.text.vocabulary.bytes_of, token_ids))
        self._check_size("token_ids", response.ByteSize())
        return response

    def _check_size(self, path: str, size: int) -> None:
        """Refuse a request whose answer of at least so many bytes gRPC could not send."""
        if size > self._max_answer_bytes:
            raise InvalidField(
                path,
                f"the answer would have {size:,} bytes or more; this server sends up to "
                f"{self._max_answer_bytes:,} bytes",
            )


def _extend(field: Any, values: list[int]) -> None:
    for start in range(0, len(values), _CHUNK):
        field.extend(values[start : start + _CHUNK])
