from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foreword.gpu.speculative.controller import (
    MIN_LOAD,
    PROBE_INTERVAL,
    REST_AFTER,
    REST_INTERVAL,
    DraftController,
    StepCost,
    choose_lengths,
)
from foreword.scheduler.step import DraftState, StepForecast


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def new_controller(slope: float, base: float = 100.0) -> DraftController:
    """A step of T tokens takes base + slope * T microseconds."""
    controller = DraftController(64, 512, 5)
    for num_tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        controller.cost.observe(num_tokens, round((base + slope * num_tokens) * 1000))
    return controller


def taught(controller: DraftController, confidence: int, acceptance: float) -> DraftController:
    rows = np.arange(64, dtype=np.int32)
    for _ in range(60):
        trials = np.full(64, 100, np.int32)
        successes = np.full(64, round(100 * acceptance), np.int32)
        controller.learn(rows, np.full(64, confidence, np.int32), trials, successes)
    return controller


@pytest.mark.parametrize("seed", range(30))
def test_no_other_lengths_are_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    acceptance, limits = rng.uniform(0.05, 0.98, 3), rng.integers(0, 4, 3)
    limits[0] += 1
    costs = 10 + np.cumsum(rng.uniform(0, 6, limits.sum() + 1))
    owners, rates = choose_lengths(acceptance, limits, costs)

    def rate(lengths: tuple[int, ...]) -> float:
        expected = 3 + sum(a**j for a, n in zip(acceptance, lengths, strict=True) for j in range(1, n + 1))
        return float(expected / costs[sum(lengths)])

    best = max(product(*(range(limit + 1) for limit in limits)), key=rate)
    assert rates.max() == pytest.approx(rate(best))
    lengths = np.bincount(owners[: rates.argmax()], minlength=3)
    assert rate(tuple(lengths)) == pytest.approx(rate(best))
    assert (lengths <= limits).all()


def test_cost_never_falls_and_follows_what_was_seen() -> None:
    cost = StepCost(512)
    assert cost.predict(np.array([1, 9])).tolist() == [1, 1]
    cost.observe(1, 1000)
    alone = cost.predict(np.arange(1, 10))
    assert (np.diff(alone) > 0).all()
    cost.observe(4, 4000)
    cost.observe(8, 3000)  # noise
    cost.observe(64, 9000)
    times = cost.predict(np.arange(1, 513))
    assert (np.diff(times) >= 0).all()
    assert times[0] == pytest.approx(1000)
    assert times[3] == times[7] == pytest.approx(3500)
    for _ in range(100):
        cost.observe(64, 5000)
    assert cost.predict(np.array([64]))[0] == pytest.approx(5000, rel=0.01)


def test_one_slow_step_hardly_counts() -> None:
    cost = StepCost(512)
    cost.observe(1, 1000)
    cost.observe(1, 1_000_000)
    assert cost.predict(np.array([1]))[0] < 1200


def test_a_busy_machine_slows_steps_of_all_sizes() -> None:
    """Else the sizes that nobody runs meanwhile would look cheap, or dear, for as long as nobody runs them."""
    cost = StepCost(512)
    cost.observe(16, 1000)
    cost.observe(32, 1500)
    for _ in range(200):
        cost.observe(32, 3000)
    slow = cost.predict(np.array([16, 32]))
    assert slow[1] == pytest.approx(3000, rel=0.01)
    assert slow[0] > 1700


def test_while_it_drafts_it_learns_what_steps_without_drafts_cost() -> None:
    controller = taught(new_controller(slope=1.0), confidence=5, acceptance=0.95)
    drafted = [int(controller.choose(int32(0), int32(5), int32(6), False).sum()) for _ in range(3 * PROBE_INTERVAL)]
    assert drafted.count(0) == 3
    assert controller.state is DraftState.ACTIVE


def test_likely_drafts_are_checked_when_tokens_are_cheap() -> None:
    controller = taught(new_controller(slope=1.0), confidence=5, acceptance=0.95)
    assert controller.choose(int32(0), int32(5), int32(6), False).tolist() == [6]
    assert controller.state is DraftState.ACTIVE


def test_unlikely_drafts_are_not() -> None:
    controller = taught(new_controller(slope=10.0), confidence=2, acceptance=0.05)
    assert controller.choose(int32(0), int32(2), int32(6), False).tolist() == [0]
    assert controller.state is DraftState.NO_GAIN


def test_under_load_the_answer_becomes_none_by_itself() -> None:
    """From some batch size on a token costs about as much as a token gains."""
    controller = taught(new_controller(slope=30.0), confidence=4, acceptance=0.7)
    sums = []
    for num_rows in (1, 4, 16, 64):
        rows = np.arange(num_rows, dtype=np.int32)
        full = np.full(num_rows, 4, np.int32)
        sums.append(controller.choose(rows, full, full + 2, False).sum() / num_rows)
    assert sums[0] > 1
    assert sums == sorted(sums, reverse=True)
    assert sums[-1] == 0


def test_rows_get_what_they_are_worth() -> None:
    controller = new_controller(slope=8.0)
    for _ in range(30):
        controller.learn(int32(0, 1), int32(4, 4), int32(10, 10), int32(9, 3))
    lengths = controller.choose(int32(0, 1), int32(4, 4), int32(8, 8), False)
    assert lengths[0] > lengths[1]
    controller.admit(0)
    controller.admit(2)
    fresh = controller.choose(int32(0, 2), int32(4, 4), int32(8, 8), False)
    assert fresh[0] == fresh[1]


def test_prompts_go_first() -> None:
    controller = taught(new_controller(slope=1.0), confidence=5, acceptance=0.95)
    assert controller.choose(int32(0), int32(5), int32(6), True).tolist() == [0]
    assert controller.state is DraftState.PREFILL_PRESSURE


def test_a_small_gain_starts_nothing_but_keeps_it_going() -> None:
    # One draft of acceptance 0.5: gain 1.5 / (t(2) / t(1)).
    barely = taught(new_controller(slope=96.0, base=109.0), confidence=3, acceptance=0.5)
    assert barely.choose(int32(0), int32(3), int32(1), False).tolist() == [0]
    barely.state = DraftState.ACTIVE
    assert barely.choose(int32(0), int32(3), int32(1), False).tolist() == [1]


def test_probes_are_rare() -> None:
    controller = taught(new_controller(slope=100.0), confidence=2, acceptance=0.05)
    drafted = [int(controller.choose(int32(0), int32(2), int32(6), False).sum()) for _ in range(3 * PROBE_INTERVAL)]
    assert sum(n > 0 for n in drafted) == 3
    assert max(drafted) == 1
    assert controller.state is DraftState.NO_GAIN


def test_without_gain_drafts_of_many_rows_are_looked_for_rarely() -> None:
    controller = taught(new_controller(slope=100.0), confidence=2, acceptance=0.05)
    assert all(controller.looks(MIN_LOAD) for _ in range(REST_AFTER))
    assert sum(controller.looks(MIN_LOAD) for _ in range(10 * REST_INTERVAL)) == 10
    assert all(controller.looks(MIN_LOAD - 1) for _ in range(10))


def test_a_gain_ends_the_rest() -> None:
    controller = taught(new_controller(slope=1.0), confidence=5, acceptance=0.95)
    for _ in range(2 * REST_AFTER):
        controller.looks(MIN_LOAD)
    assert controller.choose(int32(0), int32(5), int32(6), False).sum()
    assert all(controller.looks(MIN_LOAD) for _ in range(REST_AFTER))


def test_nothing_to_check_leaves_the_state_alone() -> None:
    controller = taught(new_controller(slope=1.0), confidence=5, acceptance=0.95)
    controller.choose(int32(0), int32(5), int32(6), False)
    assert controller.choose(int32(0, 1), int32(0, 0), int32(0, 0), False).tolist() == [0, 0]
    assert controller.state is DraftState.ACTIVE


def test_a_forecast_compares_with_doing_the_same_without_drafts() -> None:
    """Two sequences check three drafts each and bring five tokens: without drafts, two and a half steps of two."""
    cost = StepCost(512)
    assert cost.forecast(2, 8, 5) == StepForecast()
    cost.observe(2, 1000)
    cost.observe(8, 1600)
    assert cost.forecast(2, 8, 5) == StepForecast(1600, 2500)
    assert cost.forecast(2, 2, 2) == StepForecast(1000, 0)
