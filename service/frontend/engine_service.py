"""`foreword.v1.EngineService`."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from foreword.scheduler.errors import InvalidField
from foreword.service.config import YEAR_S
from foreword.service.frontend.engine_responses import (
    engine_message,
    generation_message,
    load_message,
    step_message,
)
from foreword.service.frontend.frontend import Frontend
from foreword.service.frontend.responses import timestamp
from foreword.service.frontend.validation import check_duration, check_number, check_supported
from foreword.service.version import installed_version
from foreword.v1 import engine_service_pb2, engine_service_pb2_grpc

DEFAULT_LOAD_INTERVAL_S = 1.0
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


# Handlers that write are coroutines, so that a cancel reaches them at once; the generated types know only generators.
class EngineService(engine_service_pb2_grpc.EngineServiceServicer):
    """Tells operators about the server, and ends its work when they ask for it."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def GetServerInfo(
        self, request: engine_service_pb2.GetServerInfoRequest, context: Any
    ) -> engine_service_pb2.GetServerInfoResponse:
        """Version, state and capacities."""
        check_supported(request, ())
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
        check_supported(request, ())
        self._frontend.engine_info()
        return engine_service_pb2.GetLoadResponse(load=load_message(self._frontend.engine.load))

    async def WatchLoad(  # type: ignore[override]
        self, request: engine_service_pb2.WatchLoadRequest, context: Any
    ) -> None:
        """Send the gauges at an interval."""
        check_supported(request, {"interval"})
        interval_s = DEFAULT_LOAD_INTERVAL_S
        if request.HasField("interval"):
            interval_s = check_duration("interval", request.interval, 0.01, 60.0)
        closed = self._frontend.steps.closed
        while not closed.is_set():
            self._frontend.engine_info()
            response = engine_service_pb2.WatchLoadResponse(
                read_time=timestamp(time.time_ns()), load=load_message(self._frontend.engine.load)
            )
            await context.write(response)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await closed.wait()

    async def WatchSteps(  # type: ignore[override]
        self, request: engine_service_pb2.WatchStepsRequest, context: Any
    ) -> None:
        """Send steps whenever the client takes more."""
        check_supported(request, {"coalesce_duration"})
        coalesce_s = 0.0
        if request.HasField("coalesce_duration"):
            coalesce_s = check_duration("coalesce_duration", request.coalesce_duration, 0.0, 10.0)
        with self._frontend.steps.watch() as watcher:
            await context.send_initial_metadata(())  # tells the client that steps are being watched
            while await watcher.wait(coalesce_s):
                headers, num_dropped = watcher.take()
                info = self._frontend.engine.info
                assert info is not None, "there was a step"
                steps = [step_message(header, info) for header in headers]
                await context.write(engine_service_pb2.WatchStepsResponse(steps=steps, dropped_step_count=num_dropped))

    async def ListGenerations(
        self, request: engine_service_pb2.ListGenerationsRequest, context: Any
    ) -> engine_service_pb2.ListGenerationsResponse:
        """Answer with a part of the generations under way."""
        check_supported(request, {"page_size", "page_token"})
        page_size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE_SIZE
        check_number("page_size", page_size, 1, MAX_PAGE_SIZE)
        try:
            generations, mark = self._frontend.registry.page(_mark_of(request.page_token), page_size)
        except ValueError:
            raise InvalidField("page_token", "must be empty or the next_page_token of a previous page") from None
        name = self._frontend.model.name
        return engine_service_pb2.ListGenerationsResponse(
            generations=[generation_message(generation, name) for generation in generations],
            next_page_token=str(mark) if mark else "",
        )

    async def DrainServer(
        self, request: engine_service_pb2.DrainServerRequest, context: Any
    ) -> engine_service_pb2.DrainServerResponse:
        """Begin what SIGTERM begins, and answer at once."""
        check_supported(request, {"grace_duration"})
        frontend = self._frontend
        grace_s = frontend.config.drain_grace_s
        if request.HasField("grace_duration"):
            grace_s = check_duration("grace_duration", request.grace_duration, 0.0, YEAR_S)
        frontend.drain.request(grace_s)
        stop_time_ns = time.time_ns() + round(frontend.drain.remaining_s * 1e9)
        return engine_service_pb2.DrainServerResponse(
            active_generation_count=len(frontend.registry), stop_time=timestamp(stop_time_ns)
        )


def _mark_of(page_token: str) -> int:
    """The mark behind a page token.

    Raises:
        ValueError: no page ends with such a token.
    """
    mark = int(page_token or "0")
    if (page_token and str(mark) != page_token) or mark < bool(page_token):
        raise ValueError(page_token)
    return mark
