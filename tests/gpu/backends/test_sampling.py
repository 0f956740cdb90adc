"""The rule that makes tokens of logits, on the oracle and on the CPU device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from simt.driver import CheckerDriver

from foreword.gpu.backends.cpu_backend import CpuBackend
from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.backends.int8_backend import Int8Backend
from foreword.gpu.backends.numpy_backend import NumpyBackend
from foreword.gpu.backends.sampling import HistoryCounts, LogitBiases, Samples, SamplingBatch, TokenMasks
from foreword.gpu.backends.sampling_state import mask_words

NAN, INF = float("nan"), float("inf")
Sample = Callable[..., Samples]


def parameters(rows: int, **changes: Any) -> SamplingBatch:
    """Greedy rows without limits, changed by keyword (a scalar holds for all rows).

    `biases` and `history` are for all rows: what is added to the logits of ids, how often ids are in the output.
    """
    values: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": 0,
        "position": 0,
        "by_rejection": False,
        "draft_ids": -1,
        "want_logprob": True,
    } | changes
    masks = values.pop("masks", TokenMasks(np.zeros((0, 1), np.uint32), np.full(rows, -1, np.int32)))
    biases, history = values.pop("biases", {}), values.pop("history", {})
    masked = [list(ids) for ids in values.pop("masked_ids", [[]] * rows)]
    masked_ids = np.zeros((rows, max([1, *map(len, masked)])), np.int32)
    for row, ids in enumerate(masked):
        masked_ids[row, : len(ids)] = ids
    dtypes = {
        "temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.float32,
        "min_p": np.float32,
        "typical_p": np.float32,
        "repetition_penalty": np.float32,
        "frequency_penalty": np.float32,
        "presence_penalty": np.float32,
        "seed": np.uint64,
        "position": np.int64,
        "by_rejection": np.bool_,
        "draft_ids": np.int32,
        "want_logprob": np.bool_,
    }
    arrays = {name: np.broadcast_to(values[name], rows).astype(dtype) for name, dtype in dtypes.items()}
    return SamplingBatch(
        biases=LogitBiases(*table(biases, np.float32), np.zeros(rows, np.int32)),
        masks=masks,
        history=HistoryCounts(*table(history, np.int32), np.zeros(rows, np.int32)),
        masked_ids=masked_ids,
        num_masked=np.array([len(m) for m in masked], np.int32),
        **arrays,
    )


def table(entries: dict[int, float], dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One list of ids and values, with the offsets of a table that holds nothing else."""
    offsets = np.array([0, len(entries)], np.int32)
    return offsets, np.array(list(entries), np.int32), np.array(list(entries.values()), dtype)


def open_backend(device: str, dtype: str, checker: CheckerDriver) -> CpuBackend | CudaBackend:
    return CpuBackend(dtype, num_threads=2) if device == "cpu" else CudaBackend(dtype, checker, device="cpu")


@pytest.fixture(params=["numpy", "cpu float32", "cpu bfloat16", "cuda float32", "cuda bfloat16"])
def sample(request: pytest.FixtureRequest, checker: CheckerDriver) -> Sample:
    """Sample rows of logits; keywords are those of `parameters`. bfloat16 rounds the logits first."""
    device, _, dtype = request.param.partition(" ")
    if device == "numpy":
        return lambda logits, **changes: NumpyBackend().sample(
            np.asarray(logits, np.float32), parameters(len(logits), **changes)
        )
    backend = open_backend(device, dtype, checker)
    return lambda logits, **changes: backend.sample(
        torch.tensor(np.asarray(logits, np.float32)).to(getattr(torch, dtype)), parameters(len(logits), **changes)
    )


def normal(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    logits = np.random.default_rng(seed).standard_normal((rows, vocab)).astype(np.float32) * scale
    return torch.from_numpy(logits).bfloat16().float().numpy()  # exact in every dtype, and full of ties


# Greedy


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 63, 64, 65, 1000])
def test_greedy_takes_the_greatest(sample: Sample, vocab: int) -> None:
    logits = normal(4, vocab)
    np.testing.assert_array_equal(sample(logits).token_ids, logits.argmax(axis=1))


def test_greedy_takes_the_lowest_id_of_equals(sample: Sample) -> None:
    logits = np.zeros((3, 200), np.float32)
    logits[1, [190, 33, 77]] = 2.0
    logits[2, [199, 16]] = 2.0
    np.testing.assert_array_equal(sample(logits).token_ids, [0, 33, 16])


def test_temperature_below_1e_5_is_greedy(sample: Sample) -> None:
    logits = normal(1, 500)
    for seed in range(20):
        assert sample(logits, temperature=0.99e-5, seed=seed).token_ids[0] == logits.argmax()


def test_the_last_id_of_the_vocabulary_can_win(sample: Sample) -> None:
    logits = np.full((1, 65), -5.0, np.float32)
    logits[0, 64] = 5.0
    assert sample(logits).token_ids[0] == 64
    assert sample(logits, temperature=0.1).token_ids[0] == 64


# Masks and rows that fail


def test_masked_ids_cannot_be_drawn(sample: Sample) -> None:
    logits = np.array([[9.0, 8.0, 7.0, 0.0]] * 2, np.float32)
    masks = [[0, 1], []]
    assert sample(logits, masked_ids=masks).token_ids.tolist() == [2, 0]
    drawn = {sample(logits, masked_ids=masks, temperature=2.0, seed=s).token_ids[0] for s in range(100)}
    assert drawn == {2, 3}


def test_masked_ids_outside_the_vocabulary_have_no_effect(sample: Sample) -> None:
    assert sample([[1.0, 2.0]], masked_ids=[[-1, 2, 1 << 30]]).token_ids[0] == 1


@pytest.mark.parametrize("vocab", [5, 31, 32, 33, 64, 65, 1000])
def test_a_token_mask_leaves_what_it_allows(sample: Sample, vocab: int) -> None:
    logits = normal(4, vocab)
    allowed = [sorted({0, vocab - 1, vocab // 2}), [vocab - 1], list(range(0, vocab, 3))]
    masks = TokenMasks(
        np.stack([mask_words(tuple(ids), (), vocab) for ids in allowed]), np.array([2, -1, 0, 1], np.int32)
    )
    choices = [allowed[2], range(vocab), allowed[0], allowed[1]]
    best = [max(ids, key=lambda i: (logits[row, i], -i)) for row, ids in enumerate(choices)]
    assert sample(logits, masks=masks).token_ids.tolist() == best
    for seed in range(30):
        drawn = sample(logits, masks=masks, temperature=5.0, seed=seed).token_ids.tolist()
        assert all(token in ids for token, ids in zip(drawn, choices, strict=True))


def test_bits_behind_the_vocabulary_have_no_effect(sample: Sample) -> None:
    masks = TokenMasks(np.full((1, 2), 0xFFFF_FFFE, np.uint32), np.zeros(50, np.int32))
    logits = np.full((50, 40), -9.0, np.float32)
    logits[:, 0] = 9.0
    drawn = sample(logits, masks=masks, temperature=1.0, seed=np.arange(50)).token_ids
    assert ((drawn > 0) & (drawn < 40)).all()


def test_a_mask_that_allows_nothing_fails_its_row_alone(sample: Sample) -> None:
    logits = normal(3, 70)
    words = np.stack([np.zeros(3, np.uint32), mask_words((5, 6), (), 70)])
    masks = TokenMasks(words, np.array([0, 1, 1], np.int32))
    samples = sample(logits, masks=masks, masked_ids=[[], [], [5, 6]])
    assert samples.failed.tolist() == [True, False, True]
    assert samples.token_ids[1] in (5, 6)


def test_a_masked_nan_fails_whatever_masked_it(sample: Sample) -> None:
    masks = TokenMasks(mask_words((1,), (), 2)[None], np.zeros(1, np.int32))
    assert sample([[NAN, 1.0]], masks=masks).failed[0]


def test_rows_that_cannot_be_sampled_fail_alone(sample: Sample) -> None:
    logits = normal(6, 100)
    logits[1, 99] = NAN
    logits[2, 0] = INF
    logits[3] = -INF
    logits[4, :50] = -INF
    for temperature in (0.0, 1.0):
        samples = sample(logits, temperature=temperature, masked_ids=[[], [], [], [], [], range(100)])
        assert samples.failed.tolist() == [False, True, True, True, False, True]
        assert samples.token_ids[4] >= 50
        alone = sample(logits[:1], temperature=temperature)
        assert samples.token_ids[0] == alone.token_ids[0]
        assert samples.logprobs[0] == alone.logprobs[0]
        assert not samples.token_ids[samples.failed].any()
        assert not samples.logprobs[samples.failed].any()


def test_a_masked_nan_still_fails(sample: Sample) -> None:
    assert sample([[NAN, 1.0]], masked_ids=[[0]]).failed[0]


# Bias and penalties


def test_bias_is_added_to_logits(sample: Sample) -> None:
    logits = np.array([[1.0, 2.0, 3.0, -4.0]], np.float32)
    assert sample(logits, biases={3: 8.0}).token_ids[0] == 3
    assert sample(logits, biases={0: 2.5, 2: -100.0}).token_ids[0] == 0
    assert sample(logits, biases={0: 100.0}, masked_ids=[[0]]).token_ids[0] == 2
    samples = sample(logits, biases={3: 100.0})
    assert samples.logprobs[0] == pytest.approx(-4 - np.log(np.exp(logits[0]).sum()), abs=1e-5)


def test_bias_cannot_bring_back_what_the_model_excludes(sample: Sample) -> None:
    assert sample([[-INF, 1.0]], biases={0: 100.0}).token_ids[0] == 1
    assert sample([[-INF, -INF]], biases={0: 100.0}).failed[0]


def test_repetition_penalty_lowers_logits_of_either_sign(sample: Sample) -> None:
    """Dividing a negative logit would raise its probability."""
    logits = [[2.0, 1.5, -1.0, -1.5]]
    assert sample(logits, history={0: 0}, repetition_penalty=2.0).token_ids[0] == 1
    masked = [[0, 1]]
    assert sample(logits, history={2: 0}, repetition_penalty=2.0, masked_ids=masked).token_ids[0] == 3
    assert sample(logits, history={3: 0}, repetition_penalty=0.5, masked_ids=masked).token_ids[0] == 3


def test_frequency_counts_and_presence_does_not(sample: Sample) -> None:
    logits = [[3.0, 2.0, 1.0]]
    assert sample(logits, history={0: 1, 1: 1}, frequency_penalty=1.25).token_ids[0] == 0
    assert sample(logits, history={0: 2, 1: 1}, frequency_penalty=1.25).token_ids[0] == 2
    assert sample(logits, history={0: 9, 1: 1}, presence_penalty=0.75).token_ids[0] == 0
    assert sample(logits, history={0: 1, 1: 1}, presence_penalty=2.0).token_ids[0] == 0
    assert sample(logits, history={0: 1}, presence_penalty=1.25).token_ids[0] == 1
    assert sample(logits, history={2: 4}, frequency_penalty=-1.0).token_ids[0] == 2


def test_the_prompt_counts_for_repetition_only(sample: Sample) -> None:
    logits = [[3.0, 2.5]]
    assert sample(logits, history={0: 0}, frequency_penalty=2.0, presence_penalty=2.0).token_ids[0] == 0
    assert sample(logits, history={0: 0}, repetition_penalty=1.5).token_ids[0] == 1


def test_penalties_follow_bias_and_masks(sample: Sample) -> None:
    # 1 + 4 = 5 is halved to 2.5; were the penalty first, 0.5 + 4 = 4.5 would win
    assert sample([[1.0, 3.0]], biases={0: 4.0}, history={0: 1}, repetition_penalty=2.0).token_ids[0] == 1
    samples = sample([[1.0, -3.0]], history={0: 3}, frequency_penalty=-2.0, masked_ids=[[0]])
    assert samples.token_ids[0] == 1


def test_penalties_keep_logits_finite(sample: Sample) -> None:
    for repetition in (1e-38, 10.0):
        logits = [[1e38, 5e37, -1e38, -INF]]
        samples = sample(
            logits, history={0: 1, 1: 1, 2: 1, 3: 1}, repetition_penalty=repetition, temperature=[1.0], top_p=0.9
        )
        assert not samples.failed[0]
        assert samples.token_ids[0] in (0, 1)


# Log probabilities


def test_logprob_is_of_the_models_distribution(sample: Sample) -> None:
    logits = normal(3, 777)
    samples = sample(logits, temperature=0.5, top_k=3, masked_ids=[[], [int(logits[1].argmax())], []])
    reference = torch.log_softmax(torch.tensor(logits).double(), dim=1).numpy()
    np.testing.assert_allclose(samples.logprobs, reference[range(3), samples.token_ids], atol=2e-6, rtol=1e-6)


def test_logprob_is_stable_for_great_logits(sample: Sample) -> None:
    samples = sample([[30000.0, 30000.0, -30000.0]])
    assert samples.logprobs[0] == pytest.approx(-np.log(2), abs=1e-6)


def test_logprob_is_zero_unless_asked_for(sample: Sample) -> None:
    assert sample(normal(2, 50), want_logprob=[True, False]).logprobs[1] == 0


# Truncation


def drawn_ids(sample: Sample, logits: list[float], draws: int = 400, **changes: Any) -> set[int]:
    return set(sample([logits] * draws, seed=np.arange(draws), **({"temperature": 1.0} | changes)).token_ids.tolist())


def test_top_k(sample: Sample) -> None:
    assert drawn_ids(sample, [1.0, 0.5, 0.75, 0.25], top_k=2) == {0, 2}
    assert drawn_ids(sample, [1.0, 0.5, 0.75, 0.25], top_k=0) == {0, 1, 2, 3}
    assert drawn_ids(sample, [1.0, 0.5, 0.75, 0.25], top_k=100) == {0, 1, 2, 3}


def test_top_k_keeps_equals_together(sample: Sample) -> None:
    assert drawn_ids(sample, [1.0, 0.5, 0.5, 0.25, 0.5], top_k=2) == {0, 1, 2, 4}
    assert drawn_ids(sample, [0.0, -0.0, -1.0], top_k=1) == {0, 1}


def test_top_p(sample: Sample) -> None:
    # masses 0.466, 0.282, 0.172, 0.080
    logits = [1.75, 1.25, 0.75, -0.015625]
    assert drawn_ids(sample, logits, top_p=0.4) == {0}
    assert drawn_ids(sample, logits, top_p=0.7) == {0, 1}
    assert drawn_ids(sample, logits, top_p=0.8) == {0, 1, 2}
    assert drawn_ids(sample, logits, top_p=0.99) == {0, 1, 2, 3}
    assert drawn_ids(sample, logits, top_p=0.0) == {0}


def test_top_p_keeps_equals_together(sample: Sample) -> None:
    assert drawn_ids(sample, [1.0, 1.0, 1.0, -4.0], top_p=0.1) == {0, 1, 2}


def test_top_p_works_on_what_top_k_kept(sample: Sample) -> None:
    logits = [1.0, 0.5, -0.5, 0.0]  # two have mass 0.73 of all, 0.81 of the first three; one 0.46 of all, 0.62 of two
    assert drawn_ids(sample, logits, top_p=0.8) == {0, 1, 3}
    assert drawn_ids(sample, logits, top_k=3, top_p=0.8) == {0, 1}
    assert drawn_ids(sample, logits, top_p=0.6) == {0, 1}
    assert drawn_ids(sample, logits, top_k=2, top_p=0.6) == {0}


def test_top_p_follows_the_temperature(sample: Sample) -> None:
    assert drawn_ids(sample, [2.0, 1.0, 0.0], top_p=0.9, temperature=0.25) == {0}
    assert drawn_ids(sample, [2.0, 1.0, 0.0], top_p=0.9, temperature=8.0) == {0, 1, 2}


def test_min_p(sample: Sample) -> None:
    logits = [2.0, 1.5, 1.0, -3.0]
    assert drawn_ids(sample, logits, min_p=0.5) == {0, 1}
    assert drawn_ids(sample, logits, min_p=0.3) == {0, 1, 2}
    assert drawn_ids(sample, logits, min_p=1.0) == {0}
    assert drawn_ids(sample, logits, min_p=0.5, temperature=2.0) == {0, 1, 2}


def test_truncation_tells_close_logits_apart(sample: Sample) -> None:
    """All but one within a sixteenth of each other, where a coarse search cannot."""
    logits = [1.0] + [(i * 7 % 40) / 1024 for i in range(40)]
    order = sorted(range(41), key=lambda i: -logits[i])
    assert drawn_ids(sample, logits, top_k=6) == set(order[:6])
    # masses of 0.063 and, each of the others, 0.023 to 0.024
    assert drawn_ids(sample, logits, top_p=0.2) == set(order[:7])
    # of ten: 0.22 and 0.085 to 0.087
    assert drawn_ids(sample, logits, top_k=10, top_p=0.55) == set(order[:5])


def test_typical_p(sample: Sample) -> None:
    # masses 0.5, 0.25, 0.125, 0.0625, 0.0625; information 1 to 4 bits, entropy 1.875 bits: id 1 is nearest, then 0, 2
    logits = [np.log(0.5), np.log(0.25), np.log(0.125), np.log(0.0625), np.log(0.0625)]
    logits = [round(x * 64) / 64 for x in logits]
    assert drawn_ids(sample, logits, typical_p=0.2) == {1}
    assert drawn_ids(sample, logits, typical_p=0.7) == {0, 1}
    assert drawn_ids(sample, logits, typical_p=0.8) == {0, 1, 2}
    assert drawn_ids(sample, logits, typical_p=0.9) == {0, 1, 2, 3, 4}
    assert drawn_ids(sample, logits, typical_p=1.0) == {0, 1, 2, 3, 4}


def test_typical_p_works_on_what_the_others_kept(sample: Sample) -> None:
    # of three ids with masses 4/7, 2/7, 1/7 and an entropy of 1.38 bits the first, of 0.81 bits, and the second, of
    # 1.81 bits, are nearest in turn: which one shows that the entropy is that of the three
    logits = [2.0, 1.3125, 0.625, -0.0625, -0.0625]
    assert drawn_ids(sample, logits, typical_p=0.2) == {1}
    assert drawn_ids(sample, logits, typical_p=0.2, top_k=2) == {0}


def test_truncation_ignores_what_cannot_be_drawn(sample: Sample) -> None:
    assert drawn_ids(sample, [-INF, 1.0, -INF, 0.5, 0.25], top_k=4) == {1, 3, 4}
    assert drawn_ids(sample, [-INF, 1.0, -INF, 0.5, 0.25], top_p=0.999) == {1, 3, 4}


# Drawing


def test_draws_follow_the_distribution(sample: Sample) -> None:
    vocab, draws = 40, 20_000
    logits = normal(1, vocab, seed=3, scale=1.0)
    for name, positions, seeds in (("positions", np.arange(draws), 7), ("seeds", 3, np.arange(draws))):
        tokens = sample(np.repeat(logits, draws, axis=0), temperature=1.5, seed=seeds, position=positions).token_ids
        expected = torch.softmax(torch.tensor(logits[0]).double() / 1.5, dim=0).numpy() * draws
        chi_square = ((np.bincount(tokens, minlength=vocab) - expected) ** 2 / expected).sum()
        assert chi_square < 80, name  # 39 degrees of freedom: exceeded with probability 1e-4


def test_a_token_depends_on_its_row_alone(sample: Sample) -> None:
    rows = 33
    changes = {
        "temperature": np.tile([0.0, 0.7, 1.3], 11),
        "top_k": np.tile([0, 5, 50], 11),
        "top_p": np.tile([1.0, 0.9, 0.3], 11),
        "seed": np.arange(rows),
        "position": np.arange(rows) * 1000,
    }
    logits = normal(rows, 3000)
    whole = sample(logits, **changes)
    for i in range(rows):
        alone = sample(logits[i : i + 1], **{name: values[i] for name, values in changes.items()})
        assert alone.token_ids[0] == whole.token_ids[i]
        assert alone.logprobs[0] == whole.logprobs[i]


def test_extreme_parameters_still_give_an_id_of_the_vocabulary(sample: Sample) -> None:
    logits = np.concatenate([normal(1, 70, scale=1e30), normal(1, 70), np.full((1, 70), 3e38, np.float32)])
    for temperature in (1.1e-5, 1e-3, 1e6, 3e38):
        for truncation in ({}, {"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 0.999999, "top_k": 69}):
            samples = sample(logits, temperature=temperature, **truncation)
            assert not samples.failed.any()
            assert ((samples.token_ids >= 0) & (samples.token_ids < 70)).all()


@pytest.mark.parametrize(
    ("device", "vocab"),
    [("cpu", 50), ("cpu", 64), ("cpu", 5000), ("cpu", 49152), ("cuda", 50), ("cuda", 64), ("cuda", 2500)],
)
def test_every_device_draws_what_the_oracle_draws(device: str, vocab: int, checker: CheckerDriver) -> None:
    rng, rows = np.random.default_rng(vocab), 12
    changes = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.0], rows),
        "top_k": rng.choice([0, 1, 20, 40], rows),
        "top_p": rng.choice([1.0, 0.95, 0.5, 0.05], rows),
        "min_p": rng.choice([0.0, 0.05, 0.3], rows),
        "typical_p": rng.choice([1.0, 0.9, 0.5], rows),
        "repetition_penalty": rng.choice([1.0, 1.3, 0.7], rows),
        "frequency_penalty": rng.choice([0.0, 0.3, -0.2], rows),
        "presence_penalty": rng.choice([0.0, 1.1], rows),
        "biases": {int(i): float(v) for i, v in zip(rng.integers(0, vocab, 9), rng.normal(0, 5, 9), strict=True)},
        "history": dict(zip(rng.permutation(vocab)[:40].tolist(), rng.integers(0, 5, 40).tolist(), strict=True)),
        "seed": rng.integers(0, 2**63, rows) * 2 + 1,
        "position": rng.integers(0, 2**31, rows),
        "masked_ids": [rng.integers(0, vocab, 3) for _ in range(rows)],
    }
    for scale in (0.01, 3.0, 30.0):
        logits = normal(rows, vocab, scale=scale)
        expected = NumpyBackend().sample(logits, parameters(rows, **changes))
        for dtype in ("float32", "bfloat16"):
            backend = open_backend(device, dtype, checker)
            x = torch.from_numpy(logits).to(getattr(torch, dtype))
            actual = backend.sample(x, parameters(rows, **changes))
            np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
            np.testing.assert_allclose(actual.logprobs, expected.logprobs, atol=1e-5, rtol=1e-6)


# Scores


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("vocab", [3, 8, 63, 64, 1000])
@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_scores_are_those_of_the_oracle(vocab: int, num_top: int, device: str, checker: CheckerDriver) -> None:
    logits = normal(6, vocab)
    logits[1] = 0.5
    logits[2, ::2] = -INF
    rows = np.array([5, 0, 1, 1, 2], np.int32)
    token_ids = np.array([0, vocab - 1, vocab // 2, 0, 1], np.int32)
    expected = NumpyBackend().score(logits, rows, token_ids, num_top)()
    for dtype in ("float32", "bfloat16"):
        backend = open_backend(device, dtype, checker)
        actual = backend.score(torch.from_numpy(logits).to(getattr(torch, dtype)), rows, token_ids, num_top)()
        for name in ("ranks", "top_token_ids"):
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
        for name in ("logprobs", "top_logprobs"):
            np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_rank_counts_more_probable_tokens(device: str, checker: CheckerDriver) -> None:
    backend = open_backend(device, "float32", checker)
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, -INF]])
    scores = backend.score(logits.expand(5, 5).contiguous(), int32(range(5)), int32(range(5)), 3)()
    assert scores.ranks.tolist() == [4, 1, 3, 1, 5]
    assert scores.top_token_ids.reshape(5, 3).tolist() == [[1, 3, 2]] * 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_score_equals_the_logprob_that_came_with_the_draw(device: str, dtype: str, checker: CheckerDriver) -> None:
    """Of the model's own distribution, whatever changed the draw."""
    backend = open_backend(device, dtype, checker)
    logits = torch.from_numpy(normal(20, 777)).to(getattr(torch, dtype))
    drawn = backend.sample(logits, parameters(20, temperature=3.0, seed=np.arange(20), biases={3: 20.0}))
    scores = backend.score(logits, int32(range(20)), drawn.token_ids, 2)()
    assert scores.logprobs.tolist() == drawn.logprobs.tolist()
    best = scores.ranks == 1
    assert scores.top_logprobs[::2][best].tolist() == drawn.logprobs[best].tolist()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nan_makes_scores_nan_and_no_id_outside_of_the_vocabulary(device: str, checker: CheckerDriver) -> None:
    logits = normal(3, 40)
    logits[1, 7] = NAN
    logits[2] = NAN
    scores = open_backend(device, "float32", checker).score(
        torch.from_numpy(logits), int32([0, 1, 2]), int32([1, 2, 3]), 20
    )()
    assert np.isnan(scores.logprobs).tolist() == [False, True, True]
    assert np.isnan(scores.top_logprobs[20:]).all()
    for ids in scores.top_token_ids.reshape(3, 20):
        assert len(set(ids.tolist())) == 20
        assert ((ids >= 0) & (ids < 40)).all()


def int32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def test_logits_of_integer_products_keep_differences_that_bfloat16_rounds_away() -> None:
    backend = Int8Backend(num_threads=2)
    weight = np.zeros((64, 32), np.float32)
    weight[:, 0] = 20.0
    weight[9, 0] += 20 / 127
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 1
    logits = backend.linear(x, backend.head_weight(weight))
    assert logits.dtype == torch.float32
    samples = backend.sample(logits, parameters(1, want_logprob=True))
    assert samples.token_ids.tolist() == [9]
    scores = backend.score(logits, int32([0]), samples.token_ids, 2)()
    assert scores.ranks.tolist() == [1]
    assert scores.logprobs.tolist() == samples.logprobs.tolist()
