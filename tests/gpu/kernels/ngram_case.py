"""n-gram lookup on the SIMT checker, beside the drafter of the host: the same tokens go to both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import simt

from foreword.gpu.kernels.table import FOLDER, NGRAM_OBSERVE, NGRAM_PROPOSE
from foreword.gpu.speculative.drafter import Proposals
from foreword.gpu.speculative.ngram_drafter import NgramDrafter
from foreword.scheduler.request import Request, SamplingParams, StoppingParams

POISON = -559038737
VOCAB = 1000


class Histories:
    """Rows of tokens in the memory of the device."""

    def __init__(
        self,
        num_rows: int = 5,
        max_model_len: int = 400,
        max_draft_tokens: int = 6,
        *,
        num_warps: int = 1,
        order: int = 0,
        folder: Path = FOLDER,
    ) -> None:
        """Rows without tokens; what was never written is `POISON`."""
        self.tokens = np.full((num_rows, max_model_len), POISON, np.int32)
        self.lengths = np.zeros(num_rows, np.int32)
        self._max_draft_tokens = max_draft_tokens
        self._num_threads = 32 * num_warps
        self._order = order
        names = [NGRAM_OBSERVE.name, NGRAM_PROPOSE.name]
        module = simt.RawModule(path=folder / NGRAM_OBSERVE.file, options=[f"-I{folder}"], name_expressions=names)
        self._observe, self._propose = map(module.get_function, names)

    def observe(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray, offsets: np.ndarray) -> None:
        """The tokens `offsets[b]:offsets[b + 1]` stand in `rows[b]` from `positions[b]` on."""
        sizes = (np.int32(self.tokens.shape[1]), np.int32(VOCAB))
        arguments = (rows, positions, offsets, token_ids, self.tokens, self.lengths, *sizes)
        self._observe((len(rows),), (self._num_threads,), arguments, seed=self._order)

    def propose(self, rows: np.ndarray, limits: np.ndarray) -> Proposals:
        """As `Drafter.propose`; what the kernel need not write must stay poisoned."""
        drafts = np.full((len(rows), self._max_draft_tokens), POISON, np.int32)
        counts, confidences = np.full(len(rows), POISON, np.int32), np.full(len(rows), POISON, np.int32)
        sizes = (np.int32(self.tokens.shape[1]), np.int32(self._max_draft_tokens))
        arguments = (self.tokens, self.lengths, rows, limits, drafts, counts, confidences, *sizes)
        self._propose((len(rows),), (self._num_threads,), arguments, seed=self._order)
        is_draft = np.arange(self._max_draft_tokens) < counts[:, None]
        assert (drafts[~is_draft] == POISON).all()
        return Proposals(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), drafts[is_draft], confidences)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def request(prompt: np.ndarray, max_model_len: int) -> Request:
    """One that may fill its row."""
    stopping = StoppingParams(max_output_tokens=max_model_len)
    return Request(0, np.ascontiguousarray(prompt, np.int32), stopping, SamplingParams())


def assert_equal(got: Proposals, want: Proposals) -> None:
    """Every array."""
    for name in Proposals.__slots__:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name, strict=True)


def proposals_of(tokens: Sequence[int], limit: int, histories: Histories) -> tuple[list[int], int]:
    """Drafts and confidence behind these tokens in row 1, checked against the drafter of the host."""
    num_rows, max_model_len = histories.tokens.shape
    drafter = NgramDrafter(num_rows, max_model_len, 64, VOCAB)
    drafter.admit(1, request(int32(*tokens), max_model_len), int32())
    histories.lengths[1] = 0
    histories.observe(int32(1), int32(0), int32(*tokens), int32(0, len(tokens)))
    want, got = drafter.propose(int32(1), int32(limit)), histories.propose(int32(1), int32(limit))
    assert_equal(got, want)
    return got.token_ids.tolist(), int(got.confidences[0])


def check(folder: Path, seed: int) -> None:
    """Run the kernels of a folder beside the drafter: ragged tokens and limits, gaps, overlaps, unknown ids.

    Raises:
        AssertionError, simt.LaunchError: they are wrong.
    """
    for num_warps, alphabet, unknown in ((1, 1, 0.01), (2, 3, 0.1), (1, 4, 0.01), (1, 40, 0)):
        rng = np.random.default_rng(alphabet)
        histories = Histories(num_warps=num_warps, order=seed, folder=folder)
        num_rows, max_model_len = histories.tokens.shape
        drafter = NgramDrafter(num_rows, max_model_len, 6, VOCAB)
        for row in range(num_rows):
            prompt = rng.integers(0, alphabet, rng.integers(1, 300)).astype(np.int32)
            drafter.admit(row, request(prompt, max_model_len), int32())
            histories.observe(int32(row), int32(0), prompt, int32(0, len(prompt)))
        for _ in range(14):
            rows = rng.permutation(num_rows)[: rng.integers(1, num_rows + 1)].astype(np.int32)
            positions = np.maximum(0, histories.lengths[rows] + rng.choice([-4, 0, 0, 0, 2], len(rows)))
            offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 30, len(rows)))]).astype(np.int32)
            tokens = rng.integers(0, alphabet, offsets[-1])
            tokens[rng.random(len(tokens)) < unknown] = VOCAB
            step = (rows, positions.astype(np.int32), tokens.astype(np.int32))
            drafter.observe(*step, offsets[:-1], offsets[1:])
            histories.observe(*step, offsets)
            limits = rng.integers(-1, 9, len(rows)).astype(np.int32)
            assert_equal(histories.propose(rows, limits), drafter.propose(rows, limits))
        assert (histories.lengths > 300).any(), "rows fill up"
