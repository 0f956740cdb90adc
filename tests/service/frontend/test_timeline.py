from __future__ import annotations

import itertools
import statistics

from hypothesis import given
from hypothesis import strategies as st

from foreword.service.frontend.timeline import InterTokenLatency, Timeline


def test_durations_add_up_to_the_microsecond() -> None:
    timeline = Timeline()
    start = timeline.receive_ns
    timeline.tokenize_ns, timeline.schedule_ns, timeline.sample_ns = start + 1999, start + 3999, start + 5001
    timeline.hand_over(1, start + 6999)
    instants = [start, timeline.tokenize_ns, timeline.schedule_ns, timeline.sample_ns, timeline.first_token_ns]
    parts = [timeline.between_us(a, b) for a, b in itertools.pairwise(instants)]
    assert parts == [1, 2, 2, 1]
    assert timeline.between_us(start, timeline.first_token_ns) == 6


def test_an_order_that_cannot_be_is_not_hidden() -> None:
    timeline = Timeline()
    assert timeline.between_us(timeline.receive_ns, timeline.receive_ns - 5000) == -5


def test_what_has_not_come_has_no_duration() -> None:
    timeline = Timeline()
    assert timeline.between_us(timeline.receive_ns, timeline.first_token_ns) is None
    assert timeline.inter_token_latency() is None
    timeline.hand_over(0, timeline.receive_ns + 1)
    assert timeline.first_token_ns is None
    timeline.hand_over(1, timeline.receive_ns + 1)
    assert timeline.inter_token_latency() is None
    assert (timeline.decode_us, timeline.output_tokens_per_second) == (0, 0.0)


def test_tokens_of_one_message_have_gaps_of_zero() -> None:
    timeline = Timeline()
    timeline.hand_over(3, timeline.receive_ns)
    timeline.hand_over(1, timeline.receive_ns + 4_000_000)
    assert timeline.inter_token_latency() == InterTokenLatency(0, 4000, 4000)
    assert timeline.output_tokens_per_second == 3 / 0.004


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 10**9)), min_size=2))
def test_latency_equals_the_plain_definition(hand_overs: list[tuple[int, int]]) -> None:
    timeline = Timeline()
    now, instants = timeline.receive_ns, []
    for num_tokens, gap in hand_overs:
        now += gap
        timeline.hand_over(num_tokens, now)
        instants += [now] * num_tokens
    gaps = sorted((b - a) // 1000 for a, b in itertools.pairwise(instants))
    found = timeline.inter_token_latency()
    assert found is not None
    assert found.p50_us == statistics.median_low(gaps)
    assert found.max_us == gaps[-1]
    assert found.p99_us == next(gap for i, gap in enumerate(gaps, 1) if i >= 0.99 * len(gaps))
