"""Block verification on the SIMT checker, and its rule as a plain loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simt
from rejection_case import distribution, stream

from foreword.gpu.backends.numpy_backend import philox
from foreword.gpu.backends.rejection import ACCEPTANCE, reject
from foreword.gpu.kernels.table import DRAW_BLOCKS, FOLDER, WEIGH_BLOCKS

POISON = -7
NO_TOKEN = -1


@dataclass
class BlockCase:
    """Drafts of ragged sequences: `offsets[b]:offsets[b + 1]` are rows of sequence b, the last without a draft."""

    p: np.ndarray
    q: np.ndarray | None
    draft_ids: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    offsets: np.ndarray

    @classmethod
    def random(cls, lengths: list[int], vocab_size: int, *, with_q: bool, seed: int = 0, far: float = 0.4) -> BlockCase:
        """Sequences with so many drafts, drawn from a proposal that is `far` from the model."""
        rng = np.random.default_rng(seed)
        offsets = np.concatenate([[0], np.cumsum(np.array(lengths) + 1)]).astype(np.int32)
        p = np.array([distribution(1000 * seed + i, vocab_size) for i in range(offsets[-1])])
        other = np.array([distribution(1000 * seed + i + 500, vocab_size) for i in range(len(p))])
        q = ((1 - far) * p + far * other).astype(np.float32)
        draft_ids = np.array([rng.choice(vocab_size, p=x / x.astype(np.float64).sum()) for x in q], np.int32)
        if not with_q:
            draft_ids[:] = np.where(rng.random(len(p)) < 0.8, p.argmax(axis=1), draft_ids)
        draft_ids[offsets[1:] - 1] = NO_TOKEN
        return cls(p, q if with_q else None, draft_ids, *stream(len(p)), offsets)

    def proposal(self, row: int) -> np.ndarray:
        """float64 `[V]` of a row."""
        return (np.arange(self.p.shape[1]) == self.draft_ids[row]) * 1.0 if self.q is None else self.q[row] * 1.0

    def has_draft(self, row: int) -> bool:
        return 0 <= self.draft_ids[row] < self.p.shape[1]

    def run(self, order: int = 0, folder: Path = FOLDER, num_warps: int = 2) -> tuple[np.ndarray, np.ndarray]:
        """Launch the kernels, or their copies in another folder: token ids and failures."""
        names = [WEIGH_BLOCKS.name, DRAW_BLOCKS.name]
        module = simt.RawModule(path=folder / WEIGH_BLOCKS.file, options=[f"-I{folder}"], name_expressions=names)
        is_end, failed, token_ids = (np.full(len(self.p), POISON, np.int32) for _ in range(3))
        grid, threads = (int(np.diff(self.offsets).max()) + 1, len(self.offsets) - 1), (32 * num_warps,)
        q = np.uint64(0) if self.q is None else self.q
        inputs = (self.p, q, self.draft_ids, self.seeds, self.positions, self.offsets, is_end, failed)
        vocab = np.int32(self.p.shape[1])
        module.get_function(names[0])(grid, threads, (*inputs, vocab), seed=order)
        module.get_function(names[1])(grid, threads, (*inputs, token_ids, vocab), seed=order)
        assert np.isin(failed, [0, 1]).all()
        return token_ids, failed == 1

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """The rule, one row after the other, in float64."""
        failed = ~((self.p >= 0) & (self.p < np.inf)).all(axis=1) | ~(self.p > 0).any(axis=1)
        token_ids = np.zeros(len(self.p), np.int32)
        for first, end in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            last, weight_of_last = self._last(first, end, failed)
            token_ids[first:last] = self.draft_ids[first:last]
            for row in range(last, end):
                weights = self.p[row].astype(np.float64)
                if row == last and self.has_draft(row) and not failed[row]:
                    residual = np.maximum(weight_of_last * weights - self.proposal(row), 0)
                    weights = residual if residual.any() else weights
                token_ids[row] = 0 if failed[row] else self._draw(row, weights)
        return token_ids, failed

    def _last(self, first: int, end: int, failed: np.ndarray) -> tuple[int, float]:
        """The row at which the accepted block ends, and the block's weight."""
        weight, last, weight_of_last = 1.0, first, 1.0
        for row in range(first, end):
            goes_on = self.has_draft(row) and not failed[row]
            p, q = self.p[row].astype(np.float64), self.proposal(row)
            if row > first:
                share = np.maximum(weight * p - q, 0).sum() if goes_on else weight
                total = share + (1 - weight) if goes_on else 1.0
                if self._uniform(row - 1) * total < share:
                    last, weight_of_last = row, weight
            if not goes_on:
                break
            mass, bound = weight * p[self.draft_ids[row]], q[self.draft_ids[row]]
            weight = mass / bound if mass < bound else float(mass > 0)
        return last, weight_of_last

    def _uniform(self, row: int) -> float:
        """The number that decides about the draft of a row, as `reject` takes it."""
        seed, position = int(self.seeds[row]), int(self.positions[row])
        counter = np.array([[0], [position & 0xFFFF_FFFF], [position >> 32], [ACCEPTANCE]], np.uint32)
        return float(philox(counter, (seed & 0xFFFF_FFFF, seed >> 32))[0, 0] >> np.uint32(8)) / 2**24

    def _draw(self, row: int, weights: np.ndarray) -> int:
        """As `reject` draws where there is no draft."""
        no_draft = np.full(1, NO_TOKEN, np.int32)
        token_ids, _ = reject(
            weights[None].astype(np.float32), None, no_draft, self.seeds[[row]], self.positions[[row]]
        )
        return int(token_ids[0])


def check(folder: Path, seed: int) -> None:
    """Run the kernels of a folder on cases that together meet every branch.

    Raises:
        AssertionError, simt.LaunchError: they are wrong.
    """
    lengths = [0, 3, 1, 40, 5, 0, 6, 2, 33, 4, 4]
    for with_q in (True, False):
        for vocab_size, far, more in ((17, 0.7, 60), (131, 0.3, 0)):
            case = BlockCase.random([*lengths, *[4] * more], vocab_size, with_q=with_q, far=far)
            long, damaged, without, impossible = case.offsets[[3, 6, 9, 10]]
            for agreed in (slice(long, long + 36), slice(damaged, damaged + 6)):
                case.draft_ids[agreed] = case.p[agreed].argmax(axis=1)
                if case.q is not None:
                    case.q[agreed] = case.p[agreed]
            case.p[damaged + 2, case.p[damaged + 2].argmin()] = -0.5
            case.draft_ids[without + 1] = vocab_size
            if case.q is not None:
                case.q[impossible, case.draft_ids[impossible]] = 0
            for got, want in zip(case.run(seed, folder), case.reference(), strict=True):
                np.testing.assert_array_equal(got, want)
