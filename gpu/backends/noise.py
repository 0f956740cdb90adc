"""Random words of a seed and a position, and the noise made of them: the oracle of what the kernels draw with.

Nothing is remembered between draws. What a word is used for, its purpose, is part of the counter, so that no decision
depends on the word of another one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SAMPLING, ACCEPTANCE, RESIDUAL, BLOCK_ACCEPTANCE = range(4)
"""Purposes: the token of a position; whether its draft is accepted; the token in place of a draft; whether drafts that
are judged together are accepted."""

Float64 = npt.NDArray[np.float64]
UInt32 = npt.NDArray[np.uint32]


def philox(counter: UInt32, key: tuple[int, int]) -> UInt32:
    """Philox4x32-10 (Salmon et al., 2011).

    Args:
        counter: `[4, N]`.
        key: two 32-bit words.

    Returns:
        `[4, N]` random words.
    """
    c0, c1, c2, c3 = counter.astype(np.uint64)
    key0, key1 = key
    low = np.uint64(0xFFFF_FFFF)
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(key0),
            product1 & low,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(key1),
            product0 & low,
        )
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFF_FFFF, (key1 + 0xBB67AE85) & 0xFFFF_FFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def uniforms(seed: int, position: int, purpose: int, count: int) -> Float64:
    """`[count]` in [0, 1): the upper 24 bits of the first word of each counter."""
    fractions: Float64 = (_words(seed, position, purpose, count)[0] >> np.uint32(8)).astype(np.float64) / 2**24
    return fractions


def exponentials(seed: int, position: int, purpose: int, vocab_size: int) -> Float64:
    """`[V]` an exponential variable for every id, -ln u with the u of `sampling`."""
    groups = -(-vocab_size // 64)
    words = _words(seed, position, purpose, groups * 16)
    by_id = words.reshape(4, groups, 16).transpose(1, 0, 2).reshape(-1)[:vocab_size]
    variables: Float64 = -np.log((2 * (by_id >> np.uint32(9)).astype(np.float64) + 1) / 2**24)
    return variables


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Float64:
    """`[V]` noise of every id at a position; see `sampling`."""
    noise: Float64 = -np.log(exponentials(seed, position, SAMPLING, vocab_size))
    return noise


def _words(seed: int, position: int, purpose: int, num_counters: int) -> UInt32:
    counter = np.zeros((4, num_counters), np.uint32)
    counter[0] = np.arange(num_counters)
    counter[1], counter[2], counter[3] = position & 0xFFFF_FFFF, position >> 32, purpose
    return philox(counter, (seed & 0xFFFF_FFFF, seed >> 32))
