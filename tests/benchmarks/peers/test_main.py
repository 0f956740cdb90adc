"""The command line, and turns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers.environments import RECIPES, SetupFailed, fingerprint, python_of


def test_streams_are_for_decode_cases_only() -> None:
    options = peers.parse(["--cases", "decode-chat", "prefill-512", "--streams", "4", "16"])

    assert [tuple(cell) for cell in peers.cells(options)] == [
        ("decode-chat", 4),
        ("decode-chat", 16),
        ("prefill-512", 1),
    ]


def test_an_unknown_system_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parse(["--systems", "openvinoo"])

    assert "'openvinoo'" in capsys.readouterr().err


def test_another_system_begins_each_round() -> None:
    assert [peers.turns(["a", "b", "c"], index)[0] for index in range(4)] == ["a", "b", "c", "a"]
    assert sorted(peers.turns(["a", "b", "c"], 2)) == ["a", "b", "c"]


def test_a_peer_that_cannot_be_set_up_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/false")

    with pytest.raises(SetupFailed, match=r"openvino cannot be set up: .*status 1.*openvino\.setup\.log"):
        python_of("openvino", tmp_path)

    assert not list(tmp_path.glob("openvino/complete-*"))


def test_an_environment_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamp = tmp_path / "vllm" / f"complete-{fingerprint(RECIPES['vllm'])}"
    stamp.parent.mkdir()
    stamp.touch()

    assert python_of("vllm", tmp_path) == tmp_path / "vllm" / "bin" / "python"
    assert capsys.readouterr().err == ""
