from __future__ import annotations

import numpy as np
import pytest

from foreword.gpu.backends.noise import gumbel_noise, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox(np.array(counter, np.uint32).reshape(4, 1), key)
    assert tuple(words[:, 0].tolist()) == expected


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise(seed=5, position=9, vocab_size=200_000)
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
    below_zero = np.mean(noise < 0)
    assert abs(below_zero - np.exp(-1)) < 0.005


def test_noise_of_an_id_does_not_depend_on_the_vocabulary() -> None:
    np.testing.assert_array_equal(gumbel_noise(1, 2, 300)[:70], gumbel_noise(1, 2, 70))


def test_every_bit_of_seed_and_position_matters() -> None:
    draws = {(seed, 0): gumbel_noise(seed, 0, 64).tobytes() for seed in (0, 1, 1 << 32, 1 << 63)}
    draws |= {(0, position): gumbel_noise(0, position, 64).tobytes() for position in (1, 1 << 20, 1 << 33)}
    assert len(set(draws.values())) == len(draws)
