from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
from io import BytesIO
from typing import Any, cast

import pytest

from foreword.service.text import template_process
from foreword.service.text.bounded_process import read_message, write_message
from foreword.service.text.template_process import TemplateServer, tojson


def test_messages_survive_the_wire() -> None:
    stream = cast("Any", BytesIO())
    message = {"texts": ["ü\n\x00", "\ud83d"], "n": 1}
    write_message(stream, message)
    stream.seek(0)
    assert read_message(stream) == message
    assert read_message(stream) is None


def test_answers() -> None:
    server = TemplateServer()
    assert server.answer({}) == {}
    assert server.answer({"source": "{{ a }}"}) == {}
    assert server.answer({"renderings": [{"a": 1}, {"a": 2}]}) == {"texts": ["1", "2"]}
    assert "error" in server.answer({"source": "{% if %}"})


@pytest.mark.parametrize("value", [{"b": [1, 2.5, None, True], "a": "<&>'ü😀\n"}, "x", [], {}])
@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"sort_keys": True}, {"separators": (",", ":")}])
@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_tojson_is_pythons(value: object, options: dict[str, Any], ensure_ascii: bool) -> None:
    expected = json.dumps(value, ensure_ascii=ensure_ascii, **options)
    assert tojson(value, ensure_ascii=ensure_ascii, **options) == expected


def test_tojson_leaves_marks_alone() -> None:
    assert tojson("\ufdd0ü", ensure_ascii=True) == '"\ufdd0\\u00fc"'


def test_memory_is_limited_in_the_process() -> None:
    script = textwrap.dedent(f"""
        import resource, runpy, socket, sys
        sys.stdin = socket.socketpair()[0].makefile("rb")  # its other end is closed at once
        runpy.run_path({template_process.__file__!r}, run_name="__main__")
        print(resource.getrlimit(resource.RLIMIT_AS)[0])
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert int(done.stdout) == template_process.MAX_MEMORY_BYTES
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != template_process.MAX_MEMORY_BYTES
