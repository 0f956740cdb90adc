"""The examples of docs/api.md run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from foreword.clients import SERVICE_CONFIG

GUIDE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", blocks("python"))
def test_python_examples(example: str, threaded_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert '"127.0.0.1:50051"' in example
    exec(compile(example.replace("127.0.0.1:50051", threaded_server.target), "docs/api.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "EOS" in printed


def test_the_service_config_is_the_one_built_in() -> None:
    (block,) = blocks("json")
    assert json.loads(block) == SERVICE_CONFIG
