"""Block verification on the SIMT checker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simt
from rejection_case import distribution, stream

from foreword.gpu.backends.rejection import reject_blocks
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

    @classmethod
    def saved(cls, count: int) -> BlockCase:
        """Sequences of two drafts. The second is never accepted, but often saves the first, whose ratio is 0.6.

        What follows then has the mass `max(0.6 p - q, 0)`: none at ids 1 to 8, where p is q and half as much again.
        """
        p, q = np.zeros((2, 3 * count, 16), np.float32)
        p[0::3, :2], q[0::3, 0] = (0.6, 0.4), 1
        p[1::3, 1:9], p[1::3, 9:], q[1::3, 1:9], q[1::3, 0] = 0.6 / 8, 0.4 / 7, 0.4 / 8, 0.6
        p[2::3], q[2::3] = 1 / 16, 1 / 16
        draft_ids = np.tile(np.array([0, 0, NO_TOKEN], np.int32), count)
        return cls(p, q, draft_ids, *stream(len(p)), np.arange(0, 3 * count + 1, 3, dtype=np.int32))

    def run(self, order: int = 0, folder: Path = FOLDER, num_warps: int = 2) -> tuple[np.ndarray, np.ndarray]:
        """Launch the kernels, or their copies in another folder: token ids and failures."""
        names = [WEIGH_BLOCKS.name, DRAW_BLOCKS.name]
        module = simt.RawModule(path=folder / WEIGH_BLOCKS.file, options=[f"-I{folder}"], name_expressions=names)
        stands, can_draw, token_ids, failed = (np.full(len(self.p), POISON, np.int32) for _ in range(4))
        grid, threads = (int(np.diff(self.offsets).max()) + 1, len(self.offsets) - 1), (32 * num_warps,)
        q = np.uint64(0) if self.q is None else self.q
        inputs = (self.p, q, self.draft_ids, self.offsets, self.seeds, self.positions, stands, can_draw)
        vocab = np.int32(self.p.shape[1])
        module.get_function(names[0])(grid, threads, (*inputs, vocab), seed=order)
        module.get_function(names[1])(grid, threads, (*inputs, token_ids, failed, vocab), seed=order)
        assert np.isin(failed, [0, 1]).all()
        return token_ids, failed == 1

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """The oracle's."""
        return reject_blocks(self.p, self.q, self.draft_ids, self.offsets, self.seeds, self.positions)


def check(folder: Path, seed: int) -> None:
    """Run the kernels of a folder on cases that together meet every branch.

    Raises:
        AssertionError, simt.LaunchError: they are wrong.
    """
    cases = [BlockCase.saved(40)]
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
            cases.append(case)
    for case in cases:
        for got, want in zip(case.run(seed, folder), case.reference(), strict=True):
            np.testing.assert_array_equal(got, want)
