"""`foreword.v1.ModelService`."""

from __future__ import annotations

from typing import Any

from foreword.service.frontend.frontend import Frontend
from foreword.service.frontend.responses import model_message
from foreword.service.frontend.validation import check_supported
from foreword.v1 import model_pb2, model_service_pb2, model_service_pb2_grpc


class ModelService(model_service_pb2_grpc.ModelServiceServicer):
    """Tells what the server serves."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def ListModels(
        self, request: model_service_pb2.ListModelsRequest, context: Any
    ) -> model_service_pb2.ListModelsResponse:
        """All served models."""
        check_supported(request, ())
        return model_service_pb2.ListModelsResponse(models=[self._model()])

    async def GetModel(
        self, request: model_service_pb2.GetModelRequest, context: Any
    ) -> model_service_pb2.GetModelResponse:
        """One model."""
        check_supported(request, {"name"})
        self._frontend.model.check_name(request.name)
        return model_service_pb2.GetModelResponse(model=self._model())

    def _model(self) -> model_pb2.Model:
        state = model_pb2.ModelState.ValueType(self._frontend.state.value)
        engine = self._frontend.engine
        return model_message(self._frontend.model, engine.info, engine.draft_state, state)
