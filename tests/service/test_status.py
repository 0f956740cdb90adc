from __future__ import annotations

import inspect

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from foreword.scheduler import errors
from foreword.service import status


def unpack(found: status_pb2.Status) -> dict[str, object]:
    unpacked = {}
    for detail in found.details:
        name = detail.type_url.rpartition(".")[2]
        unpacked[name] = getattr(error_details_pb2, name)()
        assert detail.Unpack(unpacked[name])
    return unpacked


def test_every_domain_error_has_a_code_of_its_own() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ForewordError)]
    assert set(kinds) <= set(status._MAPPINGS)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidField("sampling.top_p", "bad"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.ContextLengthExceeded("x", prompt_token_count=9), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.QueueFull("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.DeadlineInfeasible("x"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.DuplicateRequest("x"), grpc.StatusCode.ALREADY_EXISTS),
        (errors.UnknownModel("x"), grpc.StatusCode.NOT_FOUND),
        (errors.UnknownRequest("x"), grpc.StatusCode.NOT_FOUND),
        (errors.ClientStalled("x"), grpc.StatusCode.ABORTED),
        (errors.EngineUnavailable("x"), grpc.StatusCode.UNAVAILABLE),
        (errors.EngineFault("x"), grpc.StatusCode.INTERNAL),
        (status.MethodUnimplemented("x"), grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_codes_and_error_info(error: errors.ForewordError, code: grpc.StatusCode) -> None:
    assert status.code_of(error) is code
    found = status.status_of(error)
    assert found.code == code.value[0]
    info = unpack(found)["ErrorInfo"]
    assert (info.reason, info.domain, dict(info.metadata)) == (error.reason, "foreword", error.metadata)


def test_field_violations_name_the_path() -> None:
    violation = unpack(status.status_of(errors.InvalidField("sampling.top_p", "too large")))["BadRequest"]
    assert violation.field_violations[0].field == "sampling.top_p"
    assert violation.field_violations[0].description == "too large"


@pytest.mark.parametrize("kind", [errors.QueueFull, errors.EngineUnavailable])
def test_retryable_errors_say_when(kind: type[errors.ForewordError]) -> None:
    error = kind("later")
    delay = unpack(status.status_of(error))["RetryInfo"].retry_delay
    assert dict(status.trailers_of(error))["grpc-retry-pushback-ms"] == str(delay.ToMilliseconds())
    assert delay.ToMilliseconds() > 0


def test_other_errors_do_not_ask_for_a_retry() -> None:
    assert "grpc-retry-pushback-ms" not in dict(status.trailers_of(errors.EngineFault("x")))


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidField("f" * 10_000, "💥" * 10_000),
        errors.QueueFull("é" * 10_000, **{f"k{i}": "v" * 1000 for i in range(100)}),
        errors.ContextLengthExceeded("x", **{"k" * 5000: "v"}),
        errors.EngineUnavailable("\ud800 lone surrogate"),
    ],
)
def test_details_stay_below_the_bound(error: errors.ForewordError) -> None:
    found = status.status_of(error)
    assert found.ByteSize() <= status.MAX_DETAILS_BYTES
    assert unpack(found)["ErrorInfo"].reason == error.reason


def test_metadata_speaks_the_language_of_the_api() -> None:
    error = errors.ContextLengthExceeded(
        "x", num_prompt_tokens=9, max_output_tokens=8, max_model_len=7, num_blocks=6, block_size=5
    )
    assert unpack(status.status_of(error))["ErrorInfo"].metadata == {  # type: ignore[attr-defined]
        "prompt_token_count": "9",
        "max_output_token_count": "8",
        "max_context_token_count": "7",
        "block_count": "6",
        "block_token_count": "5",
    }
    error = errors.QueueFull("x", max_num_waiting=2, max_num_waiting_tokens=3)
    assert unpack(status.status_of(error))["ErrorInfo"].metadata == {  # type: ignore[attr-defined]
        "max_waiting_sequence_count": "2",
        "max_waiting_token_count": "3",
    }


def test_metadata_tells_nothing_of_the_servers_clock() -> None:
    error = errors.DeadlineInfeasible("x", deadline_ns=123, now_ns=456)
    assert unpack(status.status_of(error))["ErrorInfo"].metadata == {}  # type: ignore[attr-defined]
