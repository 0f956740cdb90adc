"""The acceptance kernel on the SIMT checker: ragged cases with poisoned memory, and the rule as a plain loop."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import simt

from foreword.gpu.backends.acceptance import AcceptedTokens
from foreword.gpu.backends.sampling import Samples
from foreword.gpu.kernels.table import ACCEPT, FOLDER

POISON = -559038737  # of integers; no token, row or offset
NO_TOKEN = -1


@dataclass
class AcceptanceCase:
    """Tokens drawn from the rows of a step's sequences, and the tokens that the rows follow."""

    samples: Samples
    input_ids: np.ndarray
    logits_offsets: np.ndarray

    @classmethod
    def random(cls, seed: int, num_sequences: int, max_drafts: int = 16) -> AcceptanceCase:
        """Ragged sequences of 0 to `max_drafts` + 1 rows: about three drafts in four are right, some are `NO_TOKEN`."""
        rng = np.random.default_rng(seed)
        lengths = rng.integers(0, max_drafts + 2, num_sequences)
        lengths[rng.random(num_sequences) < 0.3] = 1
        num_rows = int(lengths.sum())
        failed = rng.random(num_rows) < 0.08
        token_ids = np.where(failed, 0, rng.integers(0, 4, num_rows)).astype(np.int32)
        inputs = np.roll(token_ids, 1)  # every draft is right, and so is the first row's input for the sequence before
        wrong = rng.random(num_rows) < 0.25
        inputs[wrong] = rng.choice([NO_TOKEN, 0, 1, 2, 3], int(wrong.sum()))
        samples = Samples(token_ids, rng.standard_normal(num_rows).astype(np.float32), failed)
        return cls(samples, inputs.astype(np.int32), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    @classmethod
    def edges(cls) -> AcceptanceCase:
        """Nothing before a failed row, a run longer than a warp, nothing at the end."""
        lengths = [0, 1, 40, 0]
        ids = np.arange(41, dtype=np.int32)
        samples = Samples(ids, ids.astype(np.float32), ids == 0)
        return cls(samples, np.roll(ids, 1), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    @property
    def num_sequences(self) -> int:
        return len(self.logits_offsets) - 1

    def reference(self) -> AcceptedTokens:
        """One sequence and one row after the other."""
        offsets, rows = [0], []
        for start, end in zip(self.logits_offsets[:-1], self.logits_offsets[1:], strict=True):
            for i in range(start, end):
                if self.samples.failed[i]:
                    break
                rows.append(i)
                if i + 1 < end and self.samples.token_ids[i] != self.input_ids[i + 1]:
                    break
            offsets.append(len(rows))
        starts, has_rows = self.logits_offsets[:-1], np.diff(self.logits_offsets) > 0
        failed = [bool(some and self.samples.failed[i]) for i, some in zip(starts, has_rows, strict=True)]
        index = np.array(rows, np.int32)
        return AcceptedTokens(
            np.array(offsets, np.int32),
            index,
            self.samples.token_ids[index],
            self.samples.logprobs[index],
            np.array(failed, np.bool_),
        )

    def run(self, kernel: simt.Kernel, seed: int, num_warps: int = ACCEPT.threads // 32) -> AcceptedTokens:
        """Launch the kernel; what it need not write must stay poisoned."""
        num_rows, samples = len(self.input_ids), self.samples
        offsets, logits_rows, token_ids, logprobs, failed = (
            np.full(size, POISON, np.int32)
            for size in (self.num_sequences + 1, num_rows, num_rows, num_rows, self.num_sequences)
        )
        drawn = (samples.token_ids, samples.logprobs, samples.failed.astype(np.int32))
        outputs = (offsets, logits_rows, token_ids, logprobs.view(np.float32), failed)
        rows = np.arange(self.num_sequences, dtype=np.int32)[::-1].copy()
        last_tokens = np.full(self.num_sequences, POISON, np.int32)
        kept = (rows, last_tokens, np.int32(self.num_sequences))
        arguments = (*drawn, self.input_ids, self.logits_offsets, *outputs, *kept)
        kernel((1,), (32 * num_warps,), arguments, seed=seed)
        n = offsets[-1]
        last = [token_ids[end - 1] if start < end else POISON for start, end in pairwise(offsets.tolist())]
        assert last_tokens.tolist() == last[::-1]
        for output in (logits_rows, token_ids, logprobs):
            assert (output[n:] == POISON).all()
        assert np.isin(failed, [0, 1]).all()
        return AcceptedTokens(offsets, logits_rows[:n], token_ids[:n], logprobs[:n].view(np.float32), failed == 1)


def assert_equal(got: AcceptedTokens, want: AcceptedTokens) -> None:
    """Every array, bit for bit."""
    for name in AcceptedTokens.__slots__:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name, strict=True)


def accept_kernel(folder: Path = FOLDER) -> simt.Kernel:
    """Load the kernel, or its copy in another folder."""
    module = simt.RawModule(path=folder / ACCEPT.file, options=[f"-I{folder}"], name_expressions=[ACCEPT.name])
    return module.get_function(ACCEPT.name)


def check(folder: Path, seed: int) -> None:
    """Run the kernel of a folder on cases that together meet every branch.

    Raises:
        AssertionError, simt.LaunchError: it is wrong.
    """
    kernel = accept_kernel(folder)
    cases = [(AcceptanceCase.random(1, 9, max_drafts=5), 3), (AcceptanceCase.random(2, 40), 32)]
    for case, num_warps in [*cases, (AcceptanceCase.edges(), 2)]:
        assert_equal(case.run(kernel, seed, num_warps), case.reference())
