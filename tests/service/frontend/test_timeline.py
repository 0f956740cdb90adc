from __future__ import annotations

import itertools
import statistics

from hypothesis import given
from hypothesis import strategies as st

from foreword.service.frontend.timeline import Delivery, InterTokenLatency, Timeline, inter_token_latency


def timeline_of(num_outputs: int = 1) -> tuple[Timeline, list[Delivery]]:
    timeline = Timeline()
    timeline.deliveries = [Delivery() for _ in range(num_outputs)]
    return timeline, timeline.deliveries


def test_durations_add_up_to_the_microsecond() -> None:
    timeline, [delivery] = timeline_of()
    start = timeline.receive_ns
    timeline.tokenize_ns, timeline.schedule_ns, timeline.sample_ns = start + 1999, start + 3999, start + 5001
    delivery.hand_over(1, start + 6999)
    instants = [start, timeline.tokenize_ns, timeline.schedule_ns, timeline.sample_ns, timeline.first_token_ns]
    parts = [timeline.between_us(a, b) for a, b in itertools.pairwise(instants)]
    assert parts == [1, 2, 2, 1]
    assert timeline.between_us(start, timeline.first_token_ns) == 6


def test_an_order_that_cannot_be_is_not_hidden() -> None:
    timeline = Timeline()
    assert timeline.between_us(timeline.receive_ns, timeline.receive_ns - 5000) == -5


def test_what_has_not_come_has_no_duration() -> None:
    timeline, [delivery] = timeline_of()
    assert timeline.between_us(timeline.receive_ns, timeline.first_token_ns) is None
    assert inter_token_latency([delivery]) is None
    delivery.hand_over(0, timeline.receive_ns + 1)
    assert timeline.first_token_ns is None
    delivery.hand_over(1, timeline.receive_ns + 1)
    assert inter_token_latency([delivery]) is None
    assert (timeline.decode_us, timeline.output_tokens_per_second) == (0, 0.0)


def test_tokens_of_one_message_have_gaps_of_zero() -> None:
    timeline, [delivery] = timeline_of()
    delivery.hand_over(3, timeline.receive_ns)
    delivery.hand_over(1, timeline.receive_ns + 4_000_000)
    assert inter_token_latency([delivery]) == InterTokenLatency(0, 4000, 4000)
    assert timeline.output_tokens_per_second == 3 / 0.004


def test_gaps_are_those_within_outputs() -> None:
    """Two outputs with gaps of 10 and 30 ms; the 5 ms between their first tokens are no gap."""
    timeline, [one, two] = timeline_of(2)
    start = timeline.receive_ns
    one.hand_over(1, start)
    two.hand_over(1, start + 5_000_000)
    assert inter_token_latency(timeline.deliveries) is None
    one.hand_over(1, start + 10_000_000)
    two.hand_over(1, start + 35_000_000)
    assert inter_token_latency(timeline.deliveries) == InterTokenLatency(10_000, 30_000, 30_000)
    assert inter_token_latency([two]) == InterTokenLatency(30_000, 30_000, 30_000)
    assert (timeline.first_token_ns, timeline.last_token_ns) == (start, start + 35_000_000)
    assert timeline.decode_us == 35_000
    assert timeline.output_tokens_per_second == 2 / 0.035


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 10**9)), min_size=2))
def test_latency_equals_the_plain_definition(hand_overs: list[tuple[int, int]]) -> None:
    delivery = Delivery()
    now, instants = 0, []
    for num_tokens, gap in hand_overs:
        now += gap
        delivery.hand_over(num_tokens, now)
        instants += [now] * num_tokens
    gaps = sorted((b - a) // 1000 for a, b in itertools.pairwise(instants))
    found = inter_token_latency([delivery])
    assert found is not None
    assert found.p50_us == statistics.median_low(gaps)
    assert found.max_us == gaps[-1]
    assert found.p99_us == next(gap for i, gap in enumerate(gaps, 1) if i >= 0.99 * len(gaps))
