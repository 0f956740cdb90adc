"""Errors of a Foreword server, decoded from the status and its `google.rpc` details."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of the request that cannot be used.

    Attributes:
        field: path of the field, for example "sampling.temperature".
        description: what is wrong with it.
    """

    field: str
    description: str


class ForewordClientError(Exception):
    """A call or a generation failed.

    Attributes:
        code: the gRPC status code.
        message: what went wrong, for people.
        reason: stable name of the kind of error, for example "QUEUE_FULL"; empty when the server sent none.
        metadata: facts about this occurrence, by name.
        field_violations: the fields that cannot be used, when `code` is INVALID_ARGUMENT.
        retry_delay_s: how long to wait before trying again; None when the server did not say.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.field_violations = field_violations
        self.retry_delay_s = retry_delay_s

    @classmethod
    def from_status(cls, status: Status) -> ForewordClientError:
        """The error that a `google.rpc.Status` describes. Details of unknown or damaged kinds are skipped."""
        info, violations, retry_delay_s = ErrorInfo(), [], None
        for detail in status.details:
            try:
                if detail.Is(ErrorInfo.DESCRIPTOR):
                    detail.Unpack(info)
                elif detail.Is(BadRequest.DESCRIPTOR):
                    request = BadRequest.FromString(detail.value)
                    violations += [FieldViolation(each.field, each.description) for each in request.field_violations]
                elif detail.Is(RetryInfo.DESCRIPTOR):
                    delay = RetryInfo.FromString(detail.value).retry_delay
                    retry_delay_s = delay.seconds + delay.nanos / 1e9
            except DecodeError:
                continue
        return cls(
            _CODES.get(status.code, grpc.StatusCode.UNKNOWN),
            status.message,
            reason=info.reason,
            metadata=info.metadata,
            field_violations=tuple(violations),
            retry_delay_s=retry_delay_s,
        )

    @classmethod
    def from_rpc_error(cls, error: Any) -> ForewordClientError:
        """The error that a failed RPC describes: a `grpc.RpcError` of a call, or a `grpc.aio.AioRpcError`."""
        status = Status()
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                try:
                    status = Status.FromString(value)
                except DecodeError:
                    continue
        status.code = error.code().value[0]
        status.message = error.details() or ""
        return cls.from_status(status)


def broken_off() -> ForewordClientError:
    """The server ended a stream, without an error, while a generation was under way."""
    return ForewordClientError(grpc.StatusCode.UNAVAILABLE, "the stream ended before the generation did")


@contextmanager
def decoded_errors() -> Iterator[None]:
    """Raises `ForewordClientError` in place of gRPC's own exceptions."""
    try:
        yield
    except grpc.RpcError as error:
        raise ForewordClientError.from_rpc_error(error) from error
