"""When things happened to one generation."""

from __future__ import annotations

import math
import time
from array import array
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class InterTokenLatency:
    """Gaps between consecutive tokens as handed to gRPC, microseconds."""

    p50_us: int
    p99_us: int
    max_us: int


class Timeline:
    """Instants of one generation in nanoseconds of the monotonic clock; `None` until they come.

    Attributes:
        receive_ns: the request was received.
        receive_time_ns: the same by the wall clock.
        tokenize_ns: the prompt was checked and tokenized.
        compile_ns: the constraint was compiled; `None` without one.
        schedule_ns: the first step that computed the prompt was scheduled.
        sample_ns: the first token was known to the engine.
        first_token_ns: the first token was handed to gRPC, or could have been in a unary RPC.
        last_token_ns: the same for the last token up to now.
        blocked_ns: time in which it was paused because its client did not read.
    """

    __slots__ = (
        "_gaps_ns",
        "_num_tokens",
        "blocked_ns",
        "compile_ns",
        "first_token_ns",
        "last_token_ns",
        "receive_ns",
        "receive_time_ns",
        "sample_ns",
        "schedule_ns",
        "tokenize_ns",
    )

    def __init__(self) -> None:
        self.receive_ns = time.monotonic_ns()
        self.receive_time_ns = time.time_ns()
        self.tokenize_ns: int | None = None
        self.compile_ns: int | None = None
        self.schedule_ns: int | None = None
        self.sample_ns: int | None = None
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.blocked_ns = 0
        self._num_tokens = 0
        self._gaps_ns = array("q")

    def hand_over(self, num_tokens: int, now_ns: int) -> None:
        """Note that tokens went to gRPC together."""
        if not num_tokens:
            return
        if self.last_token_ns is None:
            self.first_token_ns = now_ns
        else:
            self._gaps_ns.append(now_ns - self.last_token_ns)
        self.last_token_ns = now_ns
        self._num_tokens += num_tokens

    def offset_us(self, instant_ns: int) -> int:
        """Whole microseconds since receipt. Durations are differences of offsets, so that they add up exactly."""
        return (instant_ns - self.receive_ns) // 1000

    def between_us(self, start_ns: int | None, end_ns: int | None) -> int | None:
        """Microseconds between two instants; `None` unless both have come."""
        if start_ns is None or end_ns is None:
            return None
        return self.offset_us(end_ns) - self.offset_us(start_ns)

    @property
    def ready_ns(self) -> int | None:
        """The request was ready for the engine: the prompt tokenized, its constraint compiled."""
        return self.tokenize_ns if self.compile_ns is None else self.compile_ns

    @property
    def decode_us(self) -> int:
        """From the first token to the last; 0 with fewer than two."""
        return self.between_us(self.first_token_ns, self.last_token_ns) or 0

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens after the first over the time they took; 0 when that is none."""
        return (self._num_tokens - 1) / (self.decode_us / 1e6) if self.decode_us else 0.0

    def inter_token_latency(self) -> InterTokenLatency | None:
        """Nearest-rank percentiles of the gaps; tokens handed over together have gaps of 0. `None` below two tokens."""
        num_gaps = self._num_tokens - 1
        if num_gaps < 1:
            return None
        gaps = np.sort(np.frombuffer(self._gaps_ns, np.int64)) // 1000
        num_zeros = num_gaps - len(gaps)

        def percentile(fraction: float) -> int:
            rank = math.ceil(fraction * num_gaps) - 1
            return int(gaps[rank - num_zeros]) if rank >= num_zeros else 0

        return InterTokenLatency(percentile(0.5), percentile(0.99), percentile(1.0))
