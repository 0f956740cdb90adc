from __future__ import annotations

import pytest

from foreword.service.engine.config import EngineConfig
from foreword.service.engine.control import (
    Event,
    Launch,
    LoadFailed,
    Loading,
    Ready,
    StepFailed,
    decode_event,
    decode_launch,
    encode_line,
)
from foreword.service.engine.messages import ErrorRecord


@pytest.mark.parametrize(
    "event",
    [
        Loading("weights", 3, 7),
        Ready(),
        LoadFailed(ErrorRecord("CHECKPOINT_ERROR", "two\nlines", {"path": "a\nb"})),
        StepFailed([1, 2**62], "step 3 failed: RuntimeError"),
    ],
)
def test_an_event_is_one_line(event: Event) -> None:
    line = encode_line(event)
    assert line.count(b"\n") == 1
    assert decode_event(line) == event


def test_a_launch_is_one_line() -> None:
    launch = Launch("package.module:function", EngineConfig("a\nmodel", max_model_len=7), "ipc:///tmp/engine", 123)
    line = encode_line(launch)
    assert line.count(b"\n") == 1
    assert decode_launch(line) == launch
