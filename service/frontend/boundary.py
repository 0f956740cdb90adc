"""The one place where what a handler raises becomes the status of an RPC."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from foreword.scheduler.errors import EngineFault, ForewordError, InvalidField
from foreword.service import status

_log = structlog.get_logger(__name__)

Behavior = Callable[[Any, Any], Awaitable[Any]]


class Undecodable:
    """Stands for a request whose bytes are not a message."""


class ErrorBoundary(grpc.aio.ServerInterceptor):
    """Wraps every coroutine handler of the server.

    Errors of the domain become their status. Anything unexpected is logged and becomes INTERNAL without its message. A
    request that cannot be parsed is answered here.
    """

    def __init__(self, count_error: Callable[[str, grpc.StatusCode], None]) -> None:
        """Guard; each error is told to `count_error` with the method it ends."""
        self._count_error = count_error

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replace the method's behaviour by a guarded one."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        sides = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if is_streaming else "unary" for is_streaming in sides)
        behavior = getattr(handler, kind)
        if inspect.isasyncgenfunction(behavior):
            return handler  # the stock reflection service; it raises nothing of its own
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        behavior = self._guarded(behavior, handler_call_details.method)
        return make(behavior, _decoder(handler.request_deserializer), handler.response_serializer)

    def _guarded(self, behavior: Behavior, method: str) -> Behavior:
        async def guarded(request: Any, context: Any) -> Any:
            try:
                if isinstance(request, Undecodable):
                    raise status.MalformedRequest("the request is not a message of the expected type")
                return await behavior(request, context)
            except (grpc.aio.AbortError, grpc.aio.InternalError):
                raise  # gRPC's own: the status is sent, or the connection is gone
            except asyncio.CancelledError:
                # When the client is gone this goes nowhere; without it a client that is not gone would wait for ever.
                error: ForewordError = status.RpcCancelled("the call was cancelled")
            except ForewordError as raised:
                error = raised
                if "request_id" not in structlog.contextvars.get_contextvars():
                    log_refusal(error, method=method)
            except Exception:
                request_id = structlog.contextvars.get_contextvars().get("request_id", "")
                _log.error("handler failed", exc_info=True)
                error = EngineFault("internal error; the server's log has the details", request_id=request_id)
            self._count_error(method, status.code_of(error))
            return await status.abort(context, error)

        return guarded


def log_refusal(error: ForewordError, **where: object) -> None:
    """Log what is turned down before a generation was opened for it; later errors are logged as how that one ended."""
    _log.info("refused", reason=error.reason, **field_of(error), **where)


def field_of(error: ForewordError | None) -> dict[str, str]:
    """The field that an error is about, as a fact for the log; its value may be what a caller wrote."""
    return {"field": error.field} if isinstance(error, InvalidField) else {}


def _decoder(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_mark(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return Undecodable()

    return decode_or_mark
