from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from foreword.service.logs import configure_logging


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("grpc", "asyncio"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_both_libraries_log_json_with_the_request_id(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", json=True)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger("ours").info("started", count=3)
        logging.getLogger("theirs").warning("odd %s", "thing")
        structlog.get_logger("ours").debug("not shown")
    first, second = lines(capsys)
    assert (first["event"], first["count"], first["level"], first["logger"]) == ("started", 3, "info", "ours")
    assert (second["event"], second["level"], second["logger"]) == ("odd thing", "warning", "theirs")
    assert first["request_id"] == second["request_id"] == "r1"


def test_exceptions_lose_their_message(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", json=True)
    try:
        raise ValueError("secret prompt")
    except ValueError:
        structlog.get_logger("ours").error("failed", exc_info=True)
        logging.getLogger("theirs").exception("failed")
    text = capsys.readouterr().err
    assert "secret" not in text
    for line in map(json.loads, text.splitlines()):
        assert line["error_type"] == "ValueError"
        assert "test_logs.py" in line["error_frames"][0]


def test_console_format_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", json=False)
    structlog.get_logger("ours").warning("look", count=3)
    structlog.get_logger("ours").info("not shown")
    text = capsys.readouterr().err
    assert "look" in text
    assert "count=3" in text
    assert "not shown" not in text


@pytest.mark.parametrize("level", ["debug", "error"])
def test_other_libraries_tell_nothing_of_their_inner_life(capsys: pytest.CaptureFixture[str], level: str) -> None:
    configure_logging(level, json=True)
    for name in ("grpc", "grpc.aio", "asyncio"):
        logging.getLogger(name).debug("a message")
        logging.getLogger(name).warning("watch out")
    assert [line["event"] for line in lines(capsys)] == ["watch out"] * (3 if level == "debug" else 0)
