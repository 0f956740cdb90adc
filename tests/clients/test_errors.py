from __future__ import annotations

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, DebugInfo, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from foreword.clients import FieldViolation, ForewordClientError


def packed(*details: object) -> list[AnyMessage]:
    messages = []
    for detail in details:
        message = AnyMessage()
        message.Pack(detail)  # type: ignore[arg-type]
        messages.append(message)
    return messages


def test_details_become_attributes() -> None:
    status = Status(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
        message="queue full",
        details=packed(
            DebugInfo(detail="of no use"),
            ErrorInfo(reason="QUEUE_FULL", domain="foreword", metadata={"limit": "8"}),
            BadRequest(
                field_violations=[
                    BadRequest.FieldViolation(field="a.b", description="bad"),
                    BadRequest.FieldViolation(field="c", description="worse"),
                ]
            ),
            RetryInfo(retry_delay=Duration(seconds=2, nanos=250_000_000)),
        ),
    )
    error = ForewordClientError.from_status(status)
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.message == "queue full"
    assert str(error) == "RESOURCE_EXHAUSTED: queue full"
    assert error.reason == "QUEUE_FULL"
    assert error.metadata == {"limit": "8"}
    assert error.field_violations == (FieldViolation("a.b", "bad"), FieldViolation("c", "worse"))
    assert error.retry_delay_s == 2.25


def test_no_details() -> None:
    error = ForewordClientError.from_status(Status(code=5, message="none"))
    assert (error.code, error.reason, error.metadata, error.field_violations) == (
        grpc.StatusCode.NOT_FOUND,
        "",
        {},
        (),
    )
    assert error.retry_delay_s is None


@pytest.mark.parametrize("kind", [ErrorInfo, BadRequest, RetryInfo])
def test_damaged_details_are_skipped(kind: type[ErrorInfo]) -> None:
    damaged = AnyMessage(type_url=f"type.googleapis.com/{kind.DESCRIPTOR.full_name}", value=b"\xff\xff\xff")
    other = packed(ErrorInfo(reason="KEPT"))
    error = ForewordClientError.from_status(Status(code=3, message="m", details=[damaged, *other]))
    assert error.reason == "KEPT"


def test_a_code_that_grpc_does_not_know() -> None:
    assert ForewordClientError.from_status(Status(code=99)).code is grpc.StatusCode.UNKNOWN
