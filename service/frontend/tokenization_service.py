"""`foreword.v1.TokenizationService`."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreword.scheduler.errors import InvalidField
from foreword.service.frontend.frontend import Frontend
from foreword.service.frontend.requests import read_chat
from foreword.service.frontend.validation import check_supported, check_token_ids
from foreword.v1 import tokenization_service_pb2, tokenization_service_pb2_grpc


class TokenizationService(tokenization_service_pb2_grpc.TokenizationServiceServicer):
    """Text to tokens and back."""

    def __init__(self, frontend: Frontend) -> None:
        self._model = frontend.model

    async def Tokenize(  # noqa: N802
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
            {},
        )
        self._model.check_name(request.model)
        tokenized = await self._model.text.tokenize(
            request.text,
            add_special_tokens=request.add_special_tokens,
            parse_special_tokens=request.parse_special_tokens,
        )
        response = tokenization_service_pb2.TokenizeResponse(token_ids=tokenized.token_ids)
        if request.return_offsets:
            response.start_offsets.extend(tokenized.offsets[:, 0])
            response.end_offsets.extend(tokenized.offsets[:, 1])
        if request.return_token_bytes:
            response.token_bytes.extend(map(self._model.text.vocabulary.bytes_of, response.token_ids))
        return response

    async def Detokenize(  # noqa: N802
        self, request: tokenization_service_pb2.DetokenizeRequest, context: Any
    ) -> tokenization_service_pb2.DetokenizeResponse:
        """Join tokens to a text."""
        check_supported(request, {"model", "token_ids", "include_special_tokens", "return_token_bytes"}, {})
        self._model.check_name(request.model)
        token_ids = np.array(request.token_ids, np.int32)
        check_token_ids("token_ids", token_ids, self._model.text.vocabulary.size)
        text = await self._model.text.decode(request.token_ids, include_special_tokens=request.include_special_tokens)
        response = tokenization_service_pb2.DetokenizeResponse(text=text)
        if request.return_token_bytes:
            response.token_bytes.extend(map(self._model.text.vocabulary.bytes_of, request.token_ids))
        return response

    async def RenderChat(  # noqa: N802
        self, request: tokenization_service_pb2.RenderChatRequest, context: Any
    ) -> tokenization_service_pb2.RenderChatResponse:
        """Turn a conversation into a prompt."""
        supported = {"model", "chat.messages.role", "chat.messages.content", "chat.add_generation_prompt"}
        check_supported(request, supported, {})
        self._model.check_name(request.model)
        if not request.HasField("chat"):
            raise InvalidField("chat", "is required")
        chat = read_chat(request.chat)
        rendered = await self._model.text.encode_chat(chat.messages, chat.add_generation_prompt)
        return tokenization_service_pb2.RenderChatResponse(text=rendered.text, token_ids=rendered.token_ids)
