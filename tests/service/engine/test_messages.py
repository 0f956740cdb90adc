from __future__ import annotations

import pytest

from foreword.scheduler import errors
from foreword.scheduler.errors import ForewordError, InvalidField
from foreword.service.engine.messages import ErrorRecord, MalformedMessage, front_end_identity, front_end_index

ERRORS = [
    InvalidField("sampling.top_p", "must be in (0, 1]"),
    *(kind("what is wrong", limit=7) for kind in ForewordError.__subclasses__() if kind is not InvalidField),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_after_its_journey(error: ForewordError) -> None:
    other = ErrorRecord.of(error).to_error()
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_an_unknown_reason_becomes_the_base_error() -> None:
    error = ErrorRecord("NEVER_HEARD", "what", {"a": "b"}).to_error()
    assert type(error) is ForewordError
    assert (error.message, error.metadata) == ("what", {"a": "b"})


def test_reasons_are_unique() -> None:
    kinds = ForewordError.__subclasses__()
    assert len({kind.reason for kind in kinds}) == len(kinds) > 10
    assert errors.CheckpointError in kinds


@pytest.mark.parametrize("front_end", [0, 1, 32767])
def test_a_front_end_is_known_by_its_identity(front_end: int) -> None:
    assert front_end_index(front_end_identity(front_end)) == front_end


@pytest.mark.parametrize("identity", [b"", b"\x00k\x8bEg", b"front-end-", b"front-end--1", b"front-end-1x"])
def test_a_stranger_is_not_a_front_end(identity: bytes) -> None:
    with pytest.raises(MalformedMessage):
        front_end_index(identity)
