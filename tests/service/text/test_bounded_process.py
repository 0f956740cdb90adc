from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from foreword.service.text.bounded_process import BoundedProcess, HelperFailed

SCRIPT = """
    import time
    from foreword.service.text.bounded_process import serve

    def answer(message):
        if "sleep" in message:
            time.sleep(60)
        if "exit" in message:
            raise SystemExit
        if "allocate" in message:
            try:
                bytearray(2 << 30)
            except MemoryError:
                return {"error": "no memory"}
        return {"echo": message}

    serve(answer, 1 << 30)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "helper.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def test_a_helper_that_is_late_is_killed_and_the_next_message_gets_a_new_one(script: str) -> None:
    helper = BoundedProcess(script, {"setup": 1}, time_limit_s=0.5)
    try:
        helper.start()
        with pytest.raises(HelperFailed, match=r"did not finish within 0\.5 s"):
            helper.ask({"sleep": True})
        assert helper.ask({"n": 1}) == {"echo": {"n": 1}}
        with pytest.raises(HelperFailed, match="ended its process"):
            helper.ask({"exit": True})
        assert helper.ask({"n": 2}) == {"echo": {"n": 2}}
    finally:
        helper.stop()


def test_memory_is_limited(script: str) -> None:
    helper = BoundedProcess(script, {}, time_limit_s=10)
    try:
        with pytest.raises(HelperFailed, match="failed: no memory"):
            helper.ask({"allocate": True})
    finally:
        helper.stop()
