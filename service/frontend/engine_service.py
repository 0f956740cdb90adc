"""`foreword.v1.EngineService`, as far as this server offers it."""

from __future__ import annotations

from typing import Any

from foreword.service.frontend.frontend import Frontend
from foreword.service.frontend.responses import engine_message, load_message, timestamp
from foreword.service.frontend.validation import check_supported
from foreword.service.version import installed_version
from foreword.v1 import engine_service_pb2, engine_service_pb2_grpc


class EngineService(engine_service_pb2_grpc.EngineServiceServicer):
    """Tells operators about the server. Methods that are not here are UNIMPLEMENTED."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def GetServerInfo(
        self, request: engine_service_pb2.GetServerInfoRequest, context: Any
    ) -> engine_service_pb2.GetServerInfoResponse:
        """Version, state and capacities."""
        check_supported(request, (), {})
        frontend = self._frontend
        info = frontend.engine.info if frontend.engine.ready else None
        return engine_service_pb2.GetServerInfoResponse(
            version=installed_version(),
            state=engine_service_pb2.ServerState.ValueType(frontend.state.value),
            start_time=timestamp(frontend.start_time_ns),
            engine=None if info is None else engine_message(info, frontend.model.name),
            max_waiting_sequence_count=frontend.config.max_num_waiting,
            max_receive_message_bytes=frontend.config.max_receive_message_bytes,
        )

    async def GetLoad(
        self, request: engine_service_pb2.GetLoadRequest, context: Any
    ) -> engine_service_pb2.GetLoadResponse:
        """Gauges at this moment."""
        check_supported(request, (), {})
        self._frontend.engine_info()
        return engine_service_pb2.GetLoadResponse(load=load_message(self._frontend.engine.load))
