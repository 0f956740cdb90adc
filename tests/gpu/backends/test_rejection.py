"""Rejection sampling over several steps of toy models: what comes out is distributed as the target's own sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from foreword.gpu.backends.acceptance import accept
from foreword.gpu.backends.rejection import reject, reject_blocks
from foreword.gpu.backends.sampling import Samples

VOCAB, LENGTH = 3, 4
START = 0


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Toy:
    """A target and a drafter that see the last token alone, and many sequences made by them."""

    def __init__(self, drafter_share: float, seed: int) -> None:
        """`drafter_share`: how much of the drafter's distribution is its own."""
        rng = np.random.default_rng(seed)
        weights = np.exp(1.2 * rng.standard_normal((2, VOCAB, VOCAB)))
        target, other = weights / weights.sum(axis=2, keepdims=True)
        self.target = target.astype(np.float32)
        self.drafter = ((1 - drafter_share) * target + drafter_share * other).astype(np.float32)
        self.rng = rng

    def propose(self, last: np.ndarray, count: int, is_point: bool) -> np.ndarray:
        """Drafts `[B, count]` behind these tokens."""
        drafts = np.zeros((len(last), count + 1), np.int32)
        drafts[:, 0] = last
        for i in range(count):
            q = self.drafter[drafts[:, i]]
            sampled = (q.cumsum(axis=1) < self.rng.random((len(last), 1)) * q.sum(axis=1, keepdims=True)).sum(axis=1)
            drafts[:, i + 1] = q.argmax(axis=1) if is_point else np.minimum(sampled, VOCAB - 1)
        return drafts[:, 1:]

    def run(self, rule: str, num_drafts: int, is_point: bool, count: int) -> tuple[np.ndarray, float]:
        """Sequences `[count, LENGTH]`, step by step, and the mean number of tokens that come out of a step."""
        outputs: list[list[int]] = [[] for _ in range(count)]
        lengths: list[int] = []
        while live := [i for i in range(count) if len(outputs[i]) < LENGTH]:
            last = int32(*[outputs[i][-1] if outputs[i] else START for i in live])
            drafts = self.propose(last, num_drafts, is_point)
            inputs = np.concatenate([last[:, None], drafts], axis=1).ravel()
            checked = np.pad(drafts, ((0, 0), (0, 1)), constant_values=-1).ravel()
            first = np.array([7 + len(outputs[i]) for i in live], np.int64)
            positions = (first[:, None] + np.arange(num_drafts + 1)).ravel()
            seeds = np.repeat(np.array(live, np.uint64) * np.uint64(0x9E37_79B9_7F4A), num_drafts + 1)
            offsets = (np.arange(len(live) + 1) * (num_drafts + 1)).astype(np.int32)
            p, q = self.target[inputs], None if is_point else self.drafter[inputs]
            if rule == "block":
                token_ids, failed = reject_blocks(p, q, checked, offsets, seeds, positions)
            else:
                token_ids, failed = reject(p, q, checked, seeds, positions)
            tokens = accept(Samples(token_ids, np.zeros(len(p), np.float32), failed), inputs, offsets)
            for i, start, end in zip(live, tokens.offsets[:-1], tokens.offsets[1:], strict=True):
                outputs[i] += tokens.token_ids[start:end].tolist()
                lengths.append(int(end - start))
        return np.array([output[:LENGTH] for output in outputs]), float(np.mean(lengths))

    def deviation(self, sequences: np.ndarray) -> float:
        """Chi-square of sequences against the target's distribution, in standard deviations above its mean."""
        cells = list(itertools.product(range(VOCAB), repeat=LENGTH))
        expected = np.array(
            [math.prod(float(self.target[a, b]) for a, b in itertools.pairwise((START, *cell))) for cell in cells]
        )
        expected *= len(sequences) / expected.sum()
        counts = np.bincount(np.ravel_multi_index(sequences.T, (VOCAB,) * LENGTH), minlength=len(cells))
        common = expected >= 5
        rest = expected[~common].sum()
        chi_square = ((counts[common] - expected[common]) ** 2 / expected[common]).sum()
        chi_square += (counts[~common].sum() - rest) ** 2 / max(rest, 1e-9)
        degrees = common.sum()
        return float((chi_square - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize(
    ("rule", "num_drafts", "is_point"),
    [("token", 2, False), ("block", 0, True), ("block", 2, True), ("block", 1, False), ("block", 3, False)],
)
def test_sequences_are_distributed_as_the_targets(rule: str, num_drafts: int, is_point: bool) -> None:
    """Also over the border between steps: nothing that a decision has seen decides again."""
    toy = Toy(drafter_share=0.9, seed=7)
    sequences, _ = toy.run(rule, num_drafts, is_point, count=1500)
    assert toy.deviation(sequences) < 3.5


def test_a_block_accepts_more_of_sampled_drafts_than_one_draft_after_the_other() -> None:
    means = {rule: Toy(0.5, seed=0).run(rule, 3, is_point=False, count=1000)[1] for rule in ("token", "block")}
    assert means["block"] > means["token"] + 0.05


def test_a_block_of_points_accepts_as_much_as_one_draft_after_the_other() -> None:
    """At least i with the product of the probabilities of the first i."""
    toy, count = Toy(0.5, seed=3), 1500
    drafts = toy.propose(int32(START), 3, is_point=True)
    inputs = np.append(int32(START), drafts[0])
    p = np.tile(toy.target[inputs], (count, 1))
    checked = np.tile(np.append(drafts[0], int32(-1)), count)
    offsets, seeds = (np.arange(count + 1) * 4).astype(np.int32), np.repeat(np.arange(count, dtype=np.uint64), 4)
    positions = np.tile(np.arange(4), count)
    kept = np.cumprod([toy.target[a, b] for a, b in itertools.pairwise(inputs.tolist())])
    for token_ids, failed in (
        reject_blocks(p, None, checked, offsets, seeds, positions),
        reject(p, None, checked, seeds, positions),
    ):
        tokens = accept(Samples(token_ids, np.zeros(len(p), np.float32), failed), np.tile(inputs, count), offsets)
        num_accepted = np.diff(tokens.offsets) - 1
        reached = [(num_accepted >= i).mean() for i in (1, 2, 3)]
        np.testing.assert_allclose(reached, kept, atol=0.04)


Blocks = Callable[..., tuple[np.ndarray, np.ndarray]]


@pytest.fixture
def blocks() -> Blocks:
    """Verify blocks of these lengths, each with a seed of its own."""

    def verify(p: np.ndarray, drafts: np.ndarray, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        seeds = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
        return reject_blocks(p, None, drafts, offsets, seeds, np.arange(len(p)))

    return verify


def sure(*ids: int) -> np.ndarray:
    """Rows that are certain of a token; -2 for one of NaN."""
    p = np.zeros((len(ids), 17), np.float32)
    for row, token_id in zip(p, ids, strict=True):
        row[max(token_id, 0)] = np.nan if token_id == -2 else 1
    return p


def test_what_is_certain_is_accepted_and_what_cannot_be_is_not(blocks: Blocks) -> None:
    token_ids, failed = blocks(sure(1, 2, 3, 4, 5), int32(1, 2, -1, 9, -1), [3, 2])
    assert token_ids.tolist() == [1, 2, 3, 4, 0]
    assert failed.tolist() == [False, False, False, False, True]


def test_blocks_of_different_lengths_and_places_without_a_draft(blocks: Blocks) -> None:
    """An id outside the vocabulary is no draft: a token is drawn in its place and ends the run."""
    ids = (6, 1, 2, 3, 4, 5, 1, 2)
    token_ids, failed = blocks(sure(*ids), int32(-1, 1, 17, 3, -1, -1, 1, -1), [1, 0, 4, 1, 2])
    assert token_ids.tolist() == [6, 1, 2, 0, 0, 5, 1, 2]
    assert failed.tolist() == [False, False, False, True, True, False, False, False]


def test_a_row_that_cannot_be_drawn_from_ends_its_block_before_it(blocks: Blocks) -> None:
    token_ids, failed = blocks(sure(1, -2, 3, -2, 2, 7), int32(1, 2, -1, 1, -1, -1), [3, 2, 1])
    assert token_ids.tolist() == [1, 0, 0, 0, 0, 7]
    assert failed.tolist() == [False, True, True, True, True, False]


def test_a_block_depends_on_nothing_beside_it(blocks: Blocks) -> None:
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.full(17, 0.3), 400).astype(np.float32)
    drafts = p.argmax(axis=1).astype(np.int32)
    drafts[3::4] = -1
    token_ids, failed = blocks(p, drafts, [4] * 100)
    seeds, positions = np.full(4, 40, np.uint64), np.arange(160, 164)
    alone = reject_blocks(p[160:164], None, drafts[160:164], int32(0, 4), seeds, positions)
    assert alone[0].tolist() == token_ids[160:164].tolist()
    assert alone[1].tolist() == failed[160:164].tolist()
    assert (p[~failed, token_ids[~failed]] > 0).all()
