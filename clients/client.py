"""The synchronous client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from foreword.clients.channel import channel_options, check_security, tenant_metadata
from foreword.clients.errors import decoded_errors
from foreword.clients.generation import Generation
from foreword.clients.message import Message, chat_input
from foreword.clients.request import build
from foreword.clients.session import Session
from foreword.clients.spec import GenerationOptions, Prompt, generation_spec
from foreword.clients.stream import GenerationStream
from foreword.v1.engine_pb2 import Load
from foreword.v1.engine_service_pb2 import GetLoadRequest, GetServerInfoRequest, GetServerInfoResponse
from foreword.v1.engine_service_pb2_grpc import EngineServiceStub
from foreword.v1.generation_pb2 import GenerationEvent
from foreword.v1.generation_service_pb2 import (
    CancelGenerationRequest,
    CancelOutcome,
    GenerateTextRequest,
    StreamGenerateTextRequest,
    StreamGenerateTextResponse,
)
from foreword.v1.generation_service_pb2_grpc import GenerationServiceStub
from foreword.v1.model_pb2 import Model
from foreword.v1.model_service_pb2 import GetModelRequest, ListModelsRequest
from foreword.v1.model_service_pb2_grpc import ModelServiceStub
from foreword.v1.tokenization_service_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    RenderChatRequest,
    RenderChatResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from foreword.v1.tokenization_service_pb2_grpc import TokenizationServiceStub

DEFAULT_TARGET = "127.0.0.1:50051"
LOOKUP_TIMEOUT_S = 10.0
"""Deadline of the calls that do not generate."""


class Client:
    """A connection to a Foreword server, for use from any thread.

        with Client() as client:
            print(client.generate("The capital of France is", max_output_token_count=8).text)
            print(client.generate([Message("user", "Hello!")]).text)

    Every call raises `ForewordClientError` when the server refuses it or fails, and `ValueError`, which names the
    field, for a value that cannot even be sent. `timeout` is the deadline of a call in
    seconds; None sets none.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        insecure: bool = False,
        tenant: str = "",
    ) -> None:
        """Connect to a server; the connection is made by the first call.

        Args:
            target: `host:port`, or any gRPC target.
            credentials: for TLS.
            insecure: allow an unencrypted connection to a target that is not loopback.
            tenant: whose generations these are; the server shares itself fairly between tenants.

        Raises:
            ValueError: neither credentials nor `insecure` for a target that is not loopback, or both; or `tenant` is
                not a name.
        """
        self._metadata = tenant_metadata(tenant)
        check_security(target, credentials is not None, insecure)
        options = channel_options(target)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
        self._generation = GenerationServiceStub(self._channel)
        self._tokenization = TokenizationServiceStub(self._channel)
        self._model = ModelServiceStub(self._channel)
        self._engine = EngineServiceStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Generation:
        """Generate, and return when all is done."""
        request = GenerateTextRequest(spec=generation_spec(prompt, options))
        with decoded_errors():
            return Generation.from_response(
                self._generation.GenerateText(request, timeout=timeout, metadata=self._metadata)
            )

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> GenerationStream:
        """Generate, and return what the outputs gain as it comes."""
        request = StreamGenerateTextRequest(spec=generation_spec(prompt, options))
        call = self._generation.StreamGenerateText(request, timeout=timeout, metadata=self._metadata)
        return GenerationStream(_events(call), call.cancel)

    def session(self, *, timeout: float | None = None) -> Session:
        """Open a stream for many generations."""
        return Session(self._generation, timeout, self._metadata)

    def cancel(self, request_id: str) -> bool:
        """End a generation, whichever client started it; False when it had ended before."""
        with decoded_errors():
            response = self._generation.CancelGeneration(
                CancelGenerationRequest(request_id=request_id), timeout=LOOKUP_TIMEOUT_S
            )
        return response.outcome == CancelOutcome.CANCEL_OUTCOME_CANCELLED

    def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special_tokens: bool = False,
        parse_special_tokens: bool = False,
        return_offsets: bool = False,
        return_token_bytes: bool = False,
    ) -> TokenizeResponse:
        """Split a text into tokens."""
        request = build(
            TokenizeRequest,
            model=model,
            text=text,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
            return_offsets=return_offsets,
            return_token_bytes=return_token_bytes,
        )
        with decoded_errors():
            return self._tokenization.Tokenize(request, timeout=LOOKUP_TIMEOUT_S)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        include_special_tokens: bool = False,
        return_token_bytes: bool = False,
    ) -> DetokenizeResponse:
        """Join tokens to a text."""
        request = build(
            DetokenizeRequest,
            model=model,
            token_ids=token_ids,
            include_special_tokens=include_special_tokens,
            return_token_bytes=return_token_bytes,
        )
        with decoded_errors():
            return self._tokenization.Detokenize(request, timeout=LOOKUP_TIMEOUT_S)

    def render_chat(
        self, messages: Sequence[Message], *, model: str = "", add_generation_prompt: bool = True
    ) -> RenderChatResponse:
        """Turn a conversation into the prompt that a generation would use."""
        request = build(RenderChatRequest, model=model, chat=chat_input(messages, add_generation_prompt))
        with decoded_errors():
            return self._tokenization.RenderChat(request, timeout=LOOKUP_TIMEOUT_S)

    def models(self) -> list[Model]:
        """All served models, the default one first."""
        with decoded_errors():
            return list(self._model.ListModels(ListModelsRequest(), timeout=LOOKUP_TIMEOUT_S).models)

    def model(self, name: str = "") -> Model:
        """One served model; the default one when no name is given."""
        with decoded_errors():
            return self._model.GetModel(GetModelRequest(name=name), timeout=LOOKUP_TIMEOUT_S).model

    def server_info(self) -> GetServerInfoResponse:
        """Version, state and fixed capacities of the server."""
        with decoded_errors():
            return self._engine.GetServerInfo(GetServerInfoRequest(), timeout=LOOKUP_TIMEOUT_S)

    def load(self) -> Load:
        """Gauges of the server's engine."""
        with decoded_errors():
            return self._engine.GetLoad(GetLoadRequest(), timeout=LOOKUP_TIMEOUT_S).load

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _events(responses: Iterator[StreamGenerateTextResponse]) -> Iterator[GenerationEvent]:
    with decoded_errors():
        for response in responses:
            yield from response.events
