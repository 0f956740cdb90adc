"""`foreword.v1.GenerationService`."""

from __future__ import annotations

import asyncio
from typing import Any

from foreword.scheduler.errors import InvalidField
from foreword.service.frontend.bidi_stream import BidiStream
from foreword.service.frontend.frontend import Frontend
from foreword.service.frontend.response_size import check_response_size
from foreword.service.frontend.validation import check_request_id, check_supported
from foreword.v1 import generation_pb2, generation_service_pb2, generation_service_pb2_grpc


# Handlers that write are coroutines, so that a cancel reaches them at once; the generated types know only generators.
class GenerationService(generation_service_pb2_grpc.GenerationServiceServicer):
    """Generates text, one or many at a time."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def GenerateText(
        self, request: generation_service_pb2.GenerateTextRequest, context: Any
    ) -> generation_service_pb2.GenerateTextResponse:
        """Answer once, when the generation has ended."""
        over = asyncio.Event()
        with self._frontend.generation(
            _spec_of(request),
            lambda generation: over.set() if generation.is_over else None,
            context,
            streamed=False,
        ) as (generation, converter):
            await generation.start()
            await over.wait()
            if generation.error is not None:
                raise generation.error
            response = converter.response()
            limit = self._frontend.config.max_send_message_bytes
            check_response_size(response.ByteSize(), limit, generation.settings)
            context.set_trailing_metadata(converter.trailers())
            return response

    async def StreamGenerateText(  # type: ignore[override]
        self, request: generation_service_pb2.StreamGenerateTextRequest, context: Any
    ) -> None:
        """Send what has come whenever the client takes more."""
        wake = asyncio.Event()
        with self._frontend.generation(
            _spec_of(request),
            lambda _: wake.set(),
            context,
            streamed=True,
        ) as (generation, converter):
            await generation.start()
            # apart from the first message: while a write of both is blocked, gRPC cannot send a status
            await context.send_initial_metadata(())
            events = [generation_pb2.GenerationEvent(started=converter.started())]
            is_last = False
            while not is_last:
                is_last = generation.is_over
                events += converter.news()
                if events:
                    await self._frontend.write(context, events, generation_service_pb2.StreamGenerateTextResponse)
                    events = []
                if not is_last:
                    await wake.wait()
                    wake.clear()
            if generation.error is not None:
                raise generation.error
            context.set_trailing_metadata(converter.trailers())

    async def BidiGenerateText(  # type: ignore[override]
        self, request_iterator: Any, context: Any
    ) -> None:
        """Run many generations on one stream."""
        await BidiStream(self._frontend, context).run()

    async def CancelGeneration(
        self, request: generation_service_pb2.CancelGenerationRequest, context: Any
    ) -> generation_service_pb2.CancelGenerationResponse:
        """End a generation that any RPC started."""
        check_supported(request, {"request_id"})
        check_request_id("request_id", request.request_id)
        was_active = self._frontend.registry.cancel(request.request_id)
        return generation_service_pb2.CancelGenerationResponse(
            outcome=generation_service_pb2.CANCEL_OUTCOME_CANCELLED
            if was_active
            else generation_service_pb2.CANCEL_OUTCOME_ALREADY_FINISHED
        )


def _spec_of(
    request: generation_service_pb2.GenerateTextRequest | generation_service_pb2.StreamGenerateTextRequest,
) -> generation_pb2.GenerationSpec:
    check_supported(request, {"spec"})
    if not request.HasField("spec"):
        raise InvalidField("spec", "is required")
    return request.spec
