"""Limits that no scheduler can work within are refused by name."""

import pytest

from foreword.scheduler.config import SchedulerConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"priority_aging_ns": 0}, "priority_aging_ns must be at least 1, got 0"),
        ({"hash_key": bytes(8)}, "hash_key must have 16 bytes, has 8"),
        ({"max_num_batched_tokens": 63}, r"max_num_batched_tokens \(63\) must be at least max_num_sequences \(64\)"),
        ({"tenant_weights": (("a", 0),)}, "tenant_weights: 'a' must weigh 1 to 1000, got 0"),
        ({"tenant_weights": (("a", 1001),)}, "tenant_weights: 'a' must weigh 1 to 1000, got 1001"),
        ({"tenant_weights": (("a", 1), ("b", 2), ("a", 1))}, "tenant_weights must name each tenant once"),
    ],
)
def test_impossible_limits_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(8, **settings)


def test_weights_at_their_bounds() -> None:
    assert SchedulerConfig(8, tenant_weights=(("", 1), ("a", 1000))).tenant_weights[1] == ("a", 1000)
