"""From errors of the domain to gRPC statuses with `google.rpc` details (AIP-193)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import grpc
from google.protobuf import duration_pb2, message
from google.rpc import error_details_pb2, status_pb2

from foreword.scheduler import errors

DOMAIN = "foreword"
MAX_DETAILS_BYTES = 4096
"""Peers drop trailers of more than 8 KiB; base64 makes a third more of these bytes."""

_MAX_TEXT = 400  # bytes of UTF-8; a status message may triple on the wire, where it is percent-encoded
_MAX_METADATA_ENTRIES = 16


class MethodUnimplemented(errors.ForewordError):
    """The RPC is part of the contract but not of this server."""

    reason = "METHOD_UNIMPLEMENTED"


class MalformedRequest(errors.ForewordError):
    """The bytes of the request are not a message of the expected type."""

    reason = "MALFORMED_REQUEST"


class RpcDeadlineExceeded(errors.ForewordError):
    """The deadline that the client gave the RPC has passed."""

    reason = "DEADLINE_EXCEEDED"


class RpcCancelled(errors.ForewordError):
    """The server gave the RPC up, or the client did."""

    reason = "CANCELLED"


class ResponseTooLarge(errors.ForewordError):
    """What was asked for does not fit one message."""

    reason = "RESPONSE_TOO_LARGE"


@dataclass(frozen=True, slots=True)
class _Mapping:
    """How a kind of error appears on the wire.

    Attributes:
        code: of the status.
        retry_delay_s: after which a client may try again; `None` where a retry needs another request.
        details: further messages for the status.
    """

    code: grpc.StatusCode
    retry_delay_s: float | None = None
    details: Callable[[errors.ForewordError], list[message.Message]] = lambda _: []


def _field_violations(error: errors.ForewordError) -> list[message.Message]:
    assert isinstance(error, errors.InvalidField)
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=_clip(error.field), description=_clip(error.description), reason=error.reason
    )
    return [error_details_pb2.BadRequest(field_violations=[violation])]


_METADATA_NAMES = {
    "num_prompt_tokens": "prompt_token_count",
    "max_output_tokens": "max_output_token_count",
    "max_model_len": "max_context_token_count",
    "num_blocks": "block_count",
    "block_size": "block_token_count",
    "max_num_waiting": "max_waiting_sequence_count",
    "max_num_waiting_tokens": "max_waiting_token_count",
}
"""The scheduler's names for what the API calls otherwise."""

_PRIVATE_METADATA = {"deadline_ns", "now_ns"}
"""Instants of this machine's monotonic clock, which mean nothing elsewhere."""

_Code = grpc.StatusCode
_MAPPINGS: dict[type[errors.ForewordError], _Mapping] = {
    errors.ForewordError: _Mapping(_Code.INTERNAL),
    errors.InvalidField: _Mapping(_Code.INVALID_ARGUMENT, details=_field_violations),
    errors.ContextLengthExceeded: _Mapping(_Code.INVALID_ARGUMENT),
    errors.QueueFull: _Mapping(_Code.RESOURCE_EXHAUSTED, retry_delay_s=1.0),
    errors.DeadlineInfeasible: _Mapping(_Code.DEADLINE_EXCEEDED),
    errors.DuplicateRequest: _Mapping(_Code.ALREADY_EXISTS),
    errors.UnknownRequest: _Mapping(_Code.NOT_FOUND),
    errors.UnknownModel: _Mapping(_Code.NOT_FOUND),
    errors.ClientStalled: _Mapping(_Code.ABORTED),
    errors.EngineUnavailable: _Mapping(_Code.UNAVAILABLE, retry_delay_s=0.5),
    errors.EngineFault: _Mapping(_Code.INTERNAL),
    errors.CheckpointError: _Mapping(_Code.INTERNAL),
    errors.ConfigError: _Mapping(_Code.INTERNAL),
    errors.DeviceError: _Mapping(_Code.INTERNAL),
    MethodUnimplemented: _Mapping(_Code.UNIMPLEMENTED),
    MalformedRequest: _Mapping(_Code.INVALID_ARGUMENT),
    RpcDeadlineExceeded: _Mapping(_Code.DEADLINE_EXCEEDED),
    RpcCancelled: _Mapping(_Code.CANCELLED),
    ResponseTooLarge: _Mapping(_Code.RESOURCE_EXHAUSTED),
}


def code_of(error: errors.ForewordError) -> grpc.StatusCode:
    """The gRPC code of an error."""
    return _mapping_of(error).code


def status_of(error: errors.ForewordError) -> status_pb2.Status:
    """Describe an error as `google.rpc.Status` of at most `MAX_DETAILS_BYTES`.

    Every status has an `ErrorInfo`; its metadata gives way first when the size would pass the bound.
    """
    mapping = _mapping_of(error)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    details: list[message.Message] = [info, *mapping.details(error)]
    if mapping.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(mapping.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    size = sum(detail.ByteSize() + 64 for detail in details) + len(_clip(error.message).encode())
    for key, value in _public_metadata(error)[:_MAX_METADATA_ENTRIES]:
        size += len(key.encode()) + len(_clip(value).encode()) + 16
        if size > MAX_DETAILS_BYTES:
            break
        info.metadata[key] = _clip(value)
    status = status_pb2.Status(code=mapping.code.value[0], message=_clip(error.message))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def trailers_of(error: errors.ForewordError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata that goes with an error: its status, and when to retry (gRFC A6)."""
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status_of(error).SerializeToString())]
    delay_s = _mapping_of(error).retry_delay_s
    if delay_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(round(delay_s * 1000))))
    return tuple(trailers)


async def abort(context: grpc.aio.ServicerContext, error: errors.ForewordError) -> NoReturn:  # type: ignore[type-arg]
    """End an RPC with the status of an error; Trailers-Only when nothing was sent before.

    Raises:
        grpc.aio.AbortError: always; it must reach gRPC unchanged.
    """
    await context.abort(code_of(error), _clip(error.message), trailers_of(error))


def _public_metadata(error: errors.ForewordError) -> list[tuple[str, str]]:
    """Facts about an error under the names of the API."""
    return [
        (_METADATA_NAMES.get(key, key), value) for key, value in error.metadata.items() if key not in _PRIVATE_METADATA
    ]


def _mapping_of(error: errors.ForewordError) -> _Mapping:
    return next(_MAPPINGS[kind] for kind in type(error).__mro__ if kind in _MAPPINGS)


def _clip(text: str) -> str:
    encoded = text.encode("utf-8", "replace")
    return encoded.decode() if len(encoded) <= _MAX_TEXT else encoded[:_MAX_TEXT].decode("utf-8", "ignore") + "…"
