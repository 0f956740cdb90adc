"""How many drafts the next step checks, so that the most tokens a second come out of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.scheduler.step import DraftState, Int32Array, StepForecast

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MIN_GAIN = 1.03
"""Drafting starts when it is expected to be this much faster, and goes on while it is faster at all."""
PROBE_INTERVAL = 100
"""One in so many steps that could draft does the opposite of what seems best, to learn what that costs now."""
MIN_LOAD, REST_AFTER, REST_INTERVAL = 4, 32, 4
"""With so many rows, after so many steps without gain, drafts are looked for at one step in so many only."""

_ROW_MEMORY = 8
_SERVER_MEMORY = 128
_FIRST_ACCEPTANCE = (0.2, 0.8)
_ACCEPTANCE_RANGE = (0.01, 0.98)
_SPEED_WEIGHT, _SIZE_WEIGHT = 0.2, 0.05
_MAX_SURPRISE = 2.0


def choose_lengths(acceptance: FloatArray, limits: IntArray, costs: FloatArray) -> tuple[IntArray, FloatArray]:
    """Rank the drafts of all rows by the probability that they are kept; find what each number of them pays.

    Draft j of a row survives with probability `acceptance ** j`, which falls within a row: the n best drafts are
    prefixes of proposals, and for a cost that depends on their number alone no other choice of n is better.

    Args:
        acceptance: `[B]` in (0, 1): probability that a draft is accepted, given that those before it were.
        limits: `[B]` drafts there are; their sum is D.
        costs: `[D + 1]` time of a step with n drafts.

    Returns:
        owners `[D]`, the rows of the drafts, best first; rates `[D + 1]`, expected tokens per unit of time with the n
        best.
    """
    depth = int(limits.max())
    depths = np.arange(1, depth + 1)
    survival = np.where(depths <= limits[:, None], acceptance[:, None] ** depths, -1.0)
    ranked = np.argsort(-survival, axis=None, kind="stable")[: limits.sum()]
    expected = np.concatenate([[0.0], np.cumsum(survival.ravel()[ranked])]) + len(limits)
    return ranked // depth, expected / costs


class StepCost:
    """Time of a step as a function of its tokens, learned from the steps that were run; it never falls."""

    def __init__(self, max_num_tokens: int) -> None:
        fine, coarse = np.arange(1, 17), [16 * 2 ** (i / 4) for i in range(1, 60)]
        sizes = np.unique(np.concatenate([fine, np.round(coarse), [max_num_tokens]]))
        self._sizes = sizes[sizes <= max_num_tokens]
        self._times = np.zeros(len(self._sizes))

    def observe(self, num_tokens: int, duration_ns: int) -> None:
        """Take the time of a step.

        A step that takes longer than expected says most of all that the device is slower now, for steps of every size:
        a load that comes and goes must not look like a price of the sizes that were run meanwhile.
        """
        index = int(np.abs(self._sizes - num_tokens).argmin())
        known = self._times[index]
        if known:
            surprise = min(max(duration_ns / float(known), 1 / _MAX_SURPRISE), _MAX_SURPRISE)
            self._times *= surprise**_SPEED_WEIGHT
            self._times[index] *= surprise**_SIZE_WEIGHT
        else:
            self._times[index] = duration_ns

    def predict(self, sizes: IntArray) -> FloatArray:
        """Time of steps of so many tokens; 1 for all while no step is known.

        Between sizes that were seen it is linear. Beyond them it goes on with their mean slope; while only one size was
        seen, tokens are taken to cost as much as they would if a step of none cost as much as eight tokens.
        """
        seen = np.flatnonzero(self._times)
        if not len(seen):
            return np.ones(len(sizes))
        x, y = self._sizes[seen], self._times[seen]
        y = (np.maximum.accumulate(y) + np.minimum.accumulate(y[::-1])[::-1]) / 2
        slope = (y[-1] - y[0]) / (x[-1] - x[0]) if len(seen) > 1 else y[0] / (x[0] + 8)
        inside: FloatArray = np.interp(sizes, x, y)
        inside += slope * np.maximum(sizes - x[-1], 0) - slope * np.maximum(x[0] - sizes, 0)
        times: FloatArray = np.maximum(inside, y[0] * 0.01)
        return times

    def forecast(self, num_sequences: int, num_tokens: int, num_new: int) -> StepForecast:
        """What is expected of a step that only generates, and of doing without drafts what it did.

        Args:
            num_sequences: B.
            num_tokens: T, drafts included.
            num_new: tokens that came out of it: as many as of `num_new / B` steps without drafts.
        """
        if not self._times.any():
            return StepForecast()
        plain, step = self.predict(np.array([num_sequences, num_tokens]))
        undrafted = plain * num_new / num_sequences if num_tokens > num_sequences else 0
        return StepForecast(round(step), round(undrafted))


class DraftController:
    """Decides about drafts from what steps cost and how often drafts were right.

    Acceptance is learned for each row and confidence; a row starts with what all rows together have shown. Proposals
    that were not checked teach as well, for the token that came out tells whether the first draft was right.

    Attributes:
        cost: of a step.
        state: whether it drafts, and why not.
    """

    def __init__(self, max_num_sequences: int, max_num_tokens: int, max_confidence: int) -> None:
        self.cost = StepCost(max_num_tokens)
        self.state = DraftState.NO_GAIN
        self._typical = np.linspace(*_FIRST_ACCEPTANCE, max_confidence + 1)
        self._acceptance = np.tile(self._typical, (max_num_sequences, 1))
        self._num_alike = 0
        self._num_idle = 0

    def looks(self, num_rows: int) -> bool:
        """Whether to look for drafts of so many rows; those that nobody looks for cost no time."""
        self._num_idle += 1
        return num_rows < MIN_LOAD or self._num_idle <= REST_AFTER or self._num_idle % REST_INTERVAL == 0

    def admit(self, row: int) -> None:
        """Forget what is known about a row."""
        self._acceptance[row] = self._typical

    def learn(self, rows: Int32Array, confidences: Int32Array, trials: Int32Array, successes: Int32Array) -> None:
        """Take how proposals fared: of `trials` drafts (at least 1) whose predecessors were right, `successes` were."""
        kept = (1 - 1 / _ROW_MEMORY) ** trials
        self._acceptance[rows, confidences] *= kept
        self._acceptance[rows, confidences] += (1 - kept) * successes / trials
        size = len(self._typical)
        all_trials, all_successes = (np.bincount(confidences, n, size) for n in (trials, successes))
        kept = (1 - 1 / _SERVER_MEMORY) ** all_trials
        self._typical = kept * self._typical + (1 - kept) * all_successes / np.maximum(all_trials, 1)

    def choose(self, rows: Int32Array, confidences: Int32Array, limits: Int32Array, has_prefill: bool) -> IntArray:
        """Draft lengths `[B]` of the rows that decode next.

        Args:
            rows: `[B]`.
            confidences: `[B]` of their proposals.
            limits: `[B]` lengths of their proposals.
            has_prefill: prompts are computed in the next step.
        """
        nothing: IntArray = np.zeros(len(rows), np.int64)
        num_drafts = int(limits.sum())
        if not num_drafts:
            return nothing
        if has_prefill:
            self.state = DraftState.PREFILL_PRESSURE
            return nothing
        acceptance = np.clip(self._acceptance[rows, confidences], *_ACCEPTANCE_RANGE)
        costs = self.cost.predict(len(rows) + np.arange(num_drafts + 1))
        owners, rates = choose_lengths(acceptance, limits.astype(np.int64), costs)
        best = 1 + int(rates[1:].argmax())
        gain = rates[best] / rates[0]
        pays = gain > (1.0 if self.state is DraftState.ACTIVE else MIN_GAIN)
        state = DraftState.ACTIVE if pays else DraftState.NO_GAIN
        self._num_alike = self._num_alike + 1 if state is self.state else 1
        self.state = state
        if state is DraftState.ACTIVE:
            self._num_idle = 0
        if self._num_alike == PROBE_INTERVAL:
            self._num_alike = 0
            pays = not pays
        return np.bincount(owners[:best], minlength=len(rows)) if pays else nothing
