from __future__ import annotations

import io
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from foreword.service import cli
from foreword.service.version import installed_version
from foreword.v1.engine_service_pb2 import GetServerInfoResponse, ServerState
from foreword.v1.engine_service_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from foreword.v1.generation_pb2 import GenerationEvent, GenerationFinished, GenerationSpec, OutputDelta
from foreword.v1.generation_service_pb2 import StreamGenerateTextResponse
from foreword.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from foreword.v1.model_pb2 import Model, ModelState
from foreword.v1.model_service_pb2 import ListModelsResponse
from foreword.v1.model_service_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from foreword.v1.sampling_pb2 import SamplingConfig


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("grpc", "asyncio"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    structlog.reset_defaults()


@dataclass
class FakeServer(
    GenerationServiceServicer,
    ModelServiceServicer,
    EngineServiceServicer,
):
    """Answers every prompt with one word.

    Attributes:
        target: where it listens.
        states: reported one by one; READY when there are no more.
        model: that it lists.
        specs: of all generations.
    """

    target: str = ""
    states: list[ServerState.ValueType] = field(default_factory=list)
    model: Model = field(
        default_factory=lambda: Model(name="big", state=ModelState.MODEL_STATE_LOADING, architecture="X")
    )
    specs: list[GenerationSpec] = field(default_factory=list)

    def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        state = self.states.pop(0) if self.states else ServerState.SERVER_STATE_READY
        return GetServerInfoResponse(state=state)

    def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        return ListModelsResponse(models=[self.model])

    def StreamGenerateText(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.specs.append(request.spec)
        yield StreamGenerateTextResponse(
            events=[
                GenerationEvent(output_delta=OutputDelta(text="upon")),
                GenerationEvent(finished=GenerationFinished()),
            ]
        )


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    server = grpc.server(ThreadPoolExecutor(2))
    add_GenerationServiceServicer_to_server(fake, server)
    add_ModelServiceServicer_to_server(fake, server)
    add_EngineServiceServicer_to_server(fake, server)
    fake.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    server.stop(None).wait()


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
        (["sreve"], "serve"),
        (["serve", "--modl", "x"], "did you mean --model?"),
        (["demo", "--srve"], "did you mean --serve?"),
        (["serve", "--dtype", "float8"], "bfloat16"),
        (["serve", "--listen-address", "0.0.0.0:1"], "--insecure"),
        (["serve", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["serve", "--device", "cuda"], "auto, cpu"),
        (["generate", "x", "--temperature", "warm"], "--temperature"),
        (["generate", "x", "--max-output-tokens", "99999999999"], "--max-output-tokens"),
        (["generate", "x", "--seed", "9999999999999999999999"], "--seed"),
        (["generate", "x", "--seed", "9" * 5000], "--seed"),
        (["generate", "x", "--top-k", "-3000000000"], "--top-k"),
        (["generate", "\udcff\udcfe"], "prompt: not UTF-8"),
        (["generate", "x", "--stop", "\udcff"], "--stop: not UTF-8"),
        (["chat", "--system", "\udcff"], "--system: not UTF-8"),
        (["chat", "--model", "\udcff"], "--model: not UTF-8"),
        (["generate", "x", "--target", "example.org:1"], "example.org:1"),
        (["generate", "x", "--target", "foo"], "HOST:PORT"),
        (["generate", "x", "--target", "localhost", "--insecure"], "HOST:PORT"),
        (["generate", "x", "--target", "foo:1"], "--tls-ca FILE"),
        (["generate", "x", "--target", "foo:1"], "--insecure"),
        (["generate", "x", "--tls-ca", "x.pem", "--insecure"], "exclude each other"),
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


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-model-len", "2147483647"], "max_model_len: 2147483647 is more than"),
        (["--block-size", "12"], "block_size: must be a multiple of 8"),
    ],
)
def test_settings_that_the_model_or_device_cannot_have_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert part in fails_in_one_line(capsys, ["serve", "--listen-address", "127.0.0.1:0", *arguments])


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_busy_port_is_one_line_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], taken_port: int, command: str
) -> None:
    address = f"127.0.0.1:{taken_port}"
    message = fails_in_one_line(capsys, [command, "--listen-address", address, "--model", "/nowhere.gguf"])
    assert message == f"foreword: {address} is in use; choose another with --listen-address"


@pytest.mark.parametrize("command", [["models"], ["generate", "x"], ["chat"]])
def test_missing_server_is_one_line(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        message = fails_in_one_line(capsys, [*command, "--target", target])
    assert message == f"foreword: cannot reach {target}; is `foreword serve` running?"


def test_a_loading_engine_is_waited_for(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_server.states += [ServerState.SERVER_STATE_LOADING, ServerState.SERVER_STATE_RESTARTING]
    waits: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    assert cli.main(["generate", "Once", "--target", fake_server.target]) == 0
    captured = capsys.readouterr()
    assert captured.out == "upon\n"
    assert captured.err == "The engine is loading; waiting up to 60 s.\n"
    assert len(waits) == 2


def test_an_engine_that_never_loads_is_given_up(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_server.states += [ServerState.SERVER_STATE_LOADING] * 1000
    now = [0.0]
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 20))
    monkeypatch.setattr(cli.time, "monotonic", lambda: now[0])
    assert cli.main(["generate", "Once", "--target", fake_server.target]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "foreword: the engine is still loading after 60 s"


def test_models_shows_only_what_is_known(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--target", fake_server.target]) == 0
    fake_server.model = Model(
        name="big", state="MODEL_STATE_READY", dtype="float32", parameter_count=2_000_000, max_context_token_count=99
    )
    assert cli.main(["models", "--target", fake_server.target]) == 0
    assert capsys.readouterr().out == "big\tloading\tX\nbig\tready\tfloat32\t2 M parameters\tcontext 99\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"temperature": 0.2, "top_p": 0.9}),
        (["--seed", "7"], {"temperature": 0.2, "top_p": 0.9, "seed": 7}),
        (["--temperature", "1"], {"temperature": 1.0}),
        (["--top-p", "0.5"], {"top_p": 0.5}),
    ],
)
def test_chat_samples_cautiously_unless_told_otherwise(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: dict[str, float]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert cli.main(["chat", "--target", fake_server.target, *flags]) == 0
    assert fake_server.specs[0].sampling == SamplingConfig(**expected)


def test_generate_shows_several_outputs_by_number(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "Once upon", "--n", "2", "--target", fake_server.target]) == 0
    assert fake_server.specs[0].sampling == SamplingConfig(output_count=2)
    assert capsys.readouterr().out.splitlines()[0].startswith("[0] upon")


def test_generate_leaves_sampling_to_the_server(fake_server: FakeServer) -> None:
    assert cli.main(["generate", "x", "--target", fake_server.target]) == 0
    assert fake_server.specs[0].sampling == SamplingConfig()


@pytest.mark.parametrize("arguments", [["models"], ["generate", "x"], ["models", "--help"], ["--version"]])
def test_a_reader_that_leaves_early_ends_quietly(fake_server: FakeServer, arguments: list[str]) -> None:
    target = [] if arguments == ["--version"] else ["--target", fake_server.target]
    command = [sys.executable, "-c", "import sys; from foreword.service.cli import main; sys.exit(main())"]
    command += [*arguments, *target]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # without a buffer argparse itself swallows the error
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: foreword" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"foreword {installed_version()}\n"


@pytest.mark.parametrize("name", ["serve", "demo"])
def test_help_shows_one_setting_in_its_three_forms(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    shown = capsys.readouterr().out
    for form in ("--max-model-len 4096", "FOREWORD_MAX_MODEL_LEN=4096", "max_model_len = 4096"):
        assert form in shown


@pytest.mark.parametrize(
    ("program", "address", "expected"),
    [
        (".venv/bin/foreword", "127.0.0.1:50051", ".venv/bin/foreword chat"),
        (".venv/bin/foreword", "127.0.0.1:7", ".venv/bin/foreword chat --target 127.0.0.1:7"),
        ("-c", "127.0.0.1:50051", "foreword chat"),
    ],
)
def test_the_next_command_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, program: str, address: str, expected: str
) -> None:
    monkeypatch.setattr("sys.argv", [program, "demo"])
    assert cli.chat_command(address) == expected


def test_help_of_chat_names_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["chat", "--help"])
    assert "temperature 0.2 and top-p 0.9" in " ".join(capsys.readouterr().out.split())


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
