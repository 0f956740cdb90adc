from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from foreword.service import cli


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def fails_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Run a command that must fail; return its message."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("loading: ")]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("foreword: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "COMMAND"),
        (["sreve"], "serve"),
        (["serve", "--modl", "x"], "did you mean --model?"),
        (["demo", "--srve"], "did you mean --serve?"),
        (["serve", "--dtype", "float8"], "bfloat16"),
        (["serve", "--listen-address", "0.0.0.0:1"], "--insecure"),
        (["serve", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["serve", "--device", "cuda"], "auto, cpu"),
        (["generate", "x", "--temperature", "warm"], "--temperature"),
        (["generate", "x", "--target", "example.org:1"], "example.org"),
        (["models", "--tls-ca", "/nowhere.pem"], "/nowhere.pem"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    assert part in fails_in_one_line(capsys, arguments)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "no such file"),
        (b"", "model.gguf"),
        (b"GGUF\x03\x00\x00\x00", "model.gguf"),
        (b"not a model", "model.gguf"),
    ],
)
def test_bad_model_files_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, part: str
) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    assert part in fails_in_one_line(capsys, ["serve", "--model", str(path), "--listen-address", "127.0.0.1:0"])


def test_busy_port_is_one_line(capsys: pytest.CaptureFixture[str], taken_port: int) -> None:
    message = fails_in_one_line(capsys, ["serve", "--listen-address", f"127.0.0.1:{taken_port}"])
    assert f"127.0.0.1:{taken_port}" in message


def test_missing_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        assert "UNAVAILABLE" in fails_in_one_line(capsys, ["models", "--target", target])


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in ("serve", "demo", "generate", "chat", "models"))]
)
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert "usage: foreword" in capsys.readouterr().out


def test_importing_the_command_line_does_not_load_a_device() -> None:
    check = "import sys, foreword.service.cli, foreword.service.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
