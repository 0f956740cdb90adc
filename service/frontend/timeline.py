"""When things happened to one generation and to each of its outputs."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class InterTokenLatency:
    """Gaps between consecutive tokens as handed to gRPC, microseconds."""

    p50_us: int
    p99_us: int
    max_us: int


class Delivery:
    """When the tokens of one output were handed to gRPC, or could have been in a unary RPC.

    Attributes:
        first_token_ns: the first token, by the monotonic clock; `None` until it comes.
        last_token_ns: the same for the last token up to now.
        num_tokens: up to now.
        gaps_ns: between consecutive hand-overs.
    """

    __slots__ = ("first_token_ns", "gaps_ns", "last_token_ns", "num_tokens")

    def __init__(self) -> None:
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.num_tokens = 0
        self.gaps_ns = array("q")

    def hand_over(self, num_tokens: int, now_ns: int) -> None:
        """Note that tokens went to gRPC together."""
        if not num_tokens:
            return
        if self.last_token_ns is None:
            self.first_token_ns = now_ns
        else:
            self.gaps_ns.append(now_ns - self.last_token_ns)
        self.last_token_ns = now_ns
        self.num_tokens += num_tokens


def inter_token_latency(deliveries: Sequence[Delivery]) -> InterTokenLatency | None:
    """Nearest-rank percentiles of the gaps within outputs; tokens handed over together have gaps of 0.

    `None` when no output has two tokens.
    """
    num_gaps = sum(max(0, delivery.num_tokens - 1) for delivery in deliveries)
    if num_gaps < 1:
        return None
    gaps = np.sort(np.concatenate([np.frombuffer(delivery.gaps_ns, np.int64) for delivery in deliveries])) // 1000
    num_zeros = num_gaps - len(gaps)

    def percentile(fraction: float) -> int:
        rank = math.ceil(fraction * num_gaps) - 1
        return int(gaps[rank - num_zeros]) if rank >= num_zeros else 0

    return InterTokenLatency(percentile(0.5), percentile(0.99), percentile(1.0))


class Timeline:
    """Instants of one generation in nanoseconds of the monotonic clock; `None` until they come.

    Attributes:
        receive_ns: the request was received.
        receive_time_ns: the same by the wall clock.
        tokenize_ns: the prompt was checked and tokenized.
        compile_ns: the constraint was compiled; `None` without one.
        schedule_ns: the first step that computed the prompt was scheduled.
        sample_ns: the first token was known to the engine.
        deliveries: of its outputs.
        blocked_ns: time in which it was paused because its client did not read.
    """

    __slots__ = (
        "blocked_ns",
        "compile_ns",
        "deliveries",
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
        self.deliveries: list[Delivery] = []
        self.blocked_ns = 0

    @property
    def first_token_ns(self) -> int | None:
        """The first token of all outputs was handed to gRPC."""
        instants = (delivery.first_token_ns for delivery in self.deliveries)
        return min((instant for instant in instants if instant is not None), default=None)

    @property
    def last_token_ns(self) -> int | None:
        """The last token of all outputs was handed to gRPC."""
        instants = (delivery.last_token_ns for delivery in self.deliveries)
        return max((instant for instant in instants if instant is not None), default=None)

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
        """Tokens after the first of each output over the time from the first to the last; 0 when that is none."""
        num_tokens = sum(max(0, delivery.num_tokens - 1) for delivery in self.deliveries)
        return num_tokens / (self.decode_us / 1e6) if self.decode_us else 0.0
