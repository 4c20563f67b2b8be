"""Philox4x32-10 in NumPy: uniform numbers from a seed and an offset, the same on every machine.

Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", table 2 (Philox4x32, 10 rounds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ROUNDS = 10
# Multipliers of the counter's words 0 and 2, and what a round adds to the key's words.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def first_words(seeds: np.ndarray, offsets: np.ndarray, rows: np.ndarray | int = 0) -> np.ndarray:
    """The first of the four uint32 of each counter (offset, row), under each seed as the key.

    `seeds` and `offsets` are int64, the low 32 bits of each the first word; `rows` is the counter's third word.
    """
    import numpy as np

    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    key = [np.asarray(seeds).astype(np.uint64) & low, np.asarray(seeds).astype(np.uint64) >> half]
    at = np.asarray(offsets).astype(np.uint64)
    c = [at & low, at >> half, np.zeros_like(at) + np.asarray(rows).astype(np.uint64), np.zeros_like(at)]
    for _ in range(ROUNDS):
        products = [np.uint64(m) * c[word] for m, word in zip(MULTIPLIERS, (0, 2), strict=True)]
        c = [
            (products[1] >> half) ^ c[1] ^ key[0],
            products[1] & low,
            (products[0] >> half) ^ c[3] ^ key[1],
            products[0] & low,
        ]
        key = [(word + np.uint64(step)) & low for word, step in zip(key, WEYL, strict=True)]
    return c[0].astype(np.uint32)


def uniforms(seeds: np.ndarray, offsets: np.ndarray, rows: np.ndarray | int = 0) -> np.ndarray:
    """Multiples of 2^-24 in [0, 1), as float32: the upper 24 bits of `first_words`."""
    import numpy as np

    return (first_words(seeds, offsets, rows) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
