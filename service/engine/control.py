"""What a supervisor and its engine process tell each other about the process's life, as lines of JSON.

The socket that carries them is the process's lifeline: when the supervisor closes its end, or dies, the engine ends;
when the engine dies, the supervisor reads the end of the stream. The supervisor writes `Launch`; the engine answers
with `Loading` any number of times, then with `Ready` or `LoadFailed`, and says `StepFailed` before it dies of a step.
"""

from __future__ import annotations

import msgspec

from foreword.service.engine.config import EngineConfig
from foreword.service.engine.messages import ErrorRecord


class Launch(msgspec.Struct, frozen=True):
    """How to start.

    Attributes:
        factory: "module:function" that builds the engine, see `builder.build_engine`.
        config: its argument.
        address: ZeroMQ endpoint to serve at.
        start_ns: monotonic clock at the start of the process.
    """

    factory: str
    config: EngineConfig
    address: str
    start_ns: int


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress: `done` of `total` units of `stage`."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves at its address."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot be built."""

    error: ErrorRecord


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """A step raised an exception, which ends the process.

    Attributes:
        request_keys: sequences that were in the step.
        message: what failed, without any request's content.
    """

    request_keys: list[int]
    message: str


Event = Loading | Ready | LoadFailed | StepFailed

_encoder = msgspec.json.Encoder()
_launch_decoder = msgspec.json.Decoder(Launch)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode_line(message: Launch | Event) -> bytes:
    """One line, its end included."""
    return _encoder.encode(message) + b"\n"


def decode_launch(line: bytes) -> Launch:
    """Read the supervisor's only line."""
    return _launch_decoder.decode(line)


def decode_event(line: bytes) -> Event:
    """Read a line of the engine's."""
    return _event_decoder.decode(line)
