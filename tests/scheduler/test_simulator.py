"""Random workloads keep every promise. `make simulate SEEDS=100000` runs more of them; a failure names its seed."""

from __future__ import annotations

from collections import Counter

import pytest
from simulator import simulate

SEEDS_PER_TEST = 50


@pytest.mark.parametrize("first", range(0, 500, SEEDS_PER_TEST))
def test_simulations_keep_every_promise(first: int) -> None:
    counts: Counter[str] = Counter()
    assert simulate(first, SEEDS_PER_TEST, counts) == []
    rare = ("preemptions", "accepted drafts", "cached tokens", "DEADLINE", "CANCELLED", "EOS", "QueueFull")
    assert all(counts[name] for name in (*rare, "DeadlineInfeasible", "DuplicateRequest", "ContextLengthExceeded"))
