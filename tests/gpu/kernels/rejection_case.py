"""Rejection sampling on the SIMT checker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import simt

from foreword.gpu.backends.rejection import reject
from foreword.gpu.kernels.table import FOLDER, REJECT

NUM_WARPS = 2


def run_kernel(
    p: np.ndarray,
    q: np.ndarray | None,
    draft_ids: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
    order: int = 0,
    folder: Path = FOLDER,
) -> tuple[np.ndarray, np.ndarray]:
    """Launch the kernel, or its copy in another folder; arguments and results as of `reject`."""
    module = simt.RawModule(path=folder / REJECT.file, options=[f"-I{folder}"], name_expressions=[REJECT.name])
    token_ids, failed = np.full(len(p), -7, np.int32), np.full(len(p), -7, np.int32)
    arguments = (p, np.uint64(0) if q is None else q, draft_ids, seeds, positions, token_ids, failed)
    kernel = module.get_function(REJECT.name)
    kernel((len(p),), (32 * NUM_WARPS,), (*arguments, np.int32(p.shape[1])), seed=order)
    return token_ids, failed == 1


def distribution(seed: int, vocab_size: int, zeros: float = 0.2) -> np.ndarray:
    """Probabilities, this share of them 0."""
    rng = np.random.default_rng(seed)
    p = np.exp(1.5 * rng.standard_normal(vocab_size)) * (rng.random(vocab_size) >= zeros)
    return (p / p.sum()).astype(np.float32)


def stream(count: int) -> tuple[np.ndarray, np.ndarray]:
    """A seed and a position for each row."""
    index = np.arange(count)
    return (index * 0x9E37_79B9_7F4A).astype(np.uint64), (index % 7 + (index % 2 << 33)).astype(np.int64)


def check(folder: Path, seed: int) -> None:
    """Run the kernel of a folder against the oracle: right, wrong and no drafts, with and without q, and a bad row.

    Raises:
        AssertionError, simt.LaunchError: it is wrong.
    """
    count, vocab_size = 60, 131
    p = np.array([distribution(i, vocab_size) for i in range(count)])
    p[5, 130] = -0.5
    q = np.array([distribution(i + 100, vocab_size) for i in range(count)])
    drafts = np.random.default_rng(0).integers(-1, vocab_size + 1, count).astype(np.int32)
    drafts[::2] = p[::2].argmax(axis=1)
    drafts[-1] = vocab_size
    for proposal in (q, None):
        expected = reject(p, proposal, drafts, *stream(count))
        for got, want in zip(run_kernel(p, proposal, drafts, *stream(count), seed, folder), expected, strict=True):
            np.testing.assert_array_equal(got, want)
