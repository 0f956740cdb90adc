"""A helper process for work on what strangers wrote: its memory is limited, and it is killed when it takes too long.

The helper is a script with a socket as its standard input. Each message is a 4-byte big-endian length and JSON, and
each is answered by one. The empty message is answered as soon as the process is up. An answer with `error` says what
went wrong.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

START_LIMIT_S = 30.0

Json = dict[str, Any]


class HelperFailed(Exception):
    """The helper gave no result; the text is a predicate, such as "did not finish within 1 s"."""


class BoundedProcess:
    """A helper: started when needed, killed when it takes too long. Safe for concurrent use, one message at a time."""

    def __init__(self, script: str, setup: Json, time_limit_s: float, setup_limit_s: float | None = None) -> None:
        """Prepare; the process starts at the first message, or by `start`.

        Args:
            script: file that calls `serve`.
            setup: first message to every new process.
            time_limit_s: for the answer to a message.
            setup_limit_s: for the answer to the setup, where that is not a stranger's; `None` for the same.
        """
        self._script = script
        self._setup = setup
        self._time_limit_s = time_limit_s
        self._setup_limit_s = time_limit_s if setup_limit_s is None else setup_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._stream: BufferedRWPair | None = None

    def start(self) -> None:
        """Start the process now.

        Raises:
            HelperFailed: it does not come up, or does not take the setup.
        """
        with self._lock:
            self._start()

    def ask(self, message: Json) -> Json:
        """Send a message and wait for its answer.

        Raises:
            HelperFailed: there is none in time, or it is an error.
        """
        with self._lock:
            self._start()
            return self._ask(message, self._time_limit_s)

    def stop(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        if self._process is not None:
            return
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", self._script], stdin=theirs.fileno(), stdout=subprocess.DEVNULL
            )
        self._stream = self._connection.makefile("rwb")
        try:
            self._ask({}, START_LIMIT_S)
            self._ask(self._setup, self._setup_limit_s)
        except HelperFailed:
            self._stop()
            raise

    def _ask(self, message: Json, limit_s: float) -> Json:
        assert self._connection is not None
        assert self._stream is not None
        deadline = time.monotonic() + limit_s
        answer = None
        try:
            self._connection.settimeout(limit_s)
            write_message(self._stream, message)
            self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            answer = read_message(self._stream)
        except OSError:
            pass  # the process is gone or late, told apart below
        finally:
            if answer is None:
                self._stop()
        if answer is None and time.monotonic() >= deadline:
            raise HelperFailed(f"did not finish within {limit_s:g} s")
        if answer is None:
            raise HelperFailed("ended its process")
        if "error" in answer:
            raise HelperFailed(f"failed: {answer['error']}")
        return answer

    def _stop(self) -> None:
        for end in (self._stream, self._connection):
            if end is not None:
                with contextlib.suppress(OSError):  # what is still to be sent has no reader
                    end.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = self._stream = None


def serve(answer: Callable[[Json], Json], max_memory_bytes: int) -> None:
    """Answer messages until the other side closes the socket; the main program of a helper.

    Args:
        answer: must not raise.
        max_memory_bytes: address space of the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the server's business
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    with socket.socket(fileno=sys.stdin.fileno()) as connection, connection.makefile("rwb") as stream:
        while (message := read_message(stream)) is not None:
            write_message(stream, answer(message))


def read_message(stream: BufferedRWPair) -> Json | None:
    """Read one message, None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    message: Json = json.loads(stream.read(struct.unpack(">I", header)[0]))
    return message


def write_message(stream: BufferedRWPair, message: Json) -> None:
    """Write one message."""
    body = json.dumps(message).encode()
    stream.write(struct.pack(">I", len(body)) + body)
    stream.flush()
