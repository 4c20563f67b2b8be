"""Philox4x32-10 in NumPy: uniform numbers from a seed and an offset, the same on every machine.

Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", table 2 (Philox4x32, 10 rounds).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ROUNDS = 10
# Multipliers of the counter's words 0 and 2, and what a round adds to the key's words.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Sequence[np.ndarray], key: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The four words of each counter under a key; all words are uint64 arrays of numbers below 2^32."""
    import numpy as np

    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c, k = list(counter), list(key)
    for _ in range(ROUNDS):
        products = [np.uint64(m) * c[word] for m, word in zip(MULTIPLIERS, (0, 2), strict=True)]
        c = [
            (products[1] >> half) ^ c[1] ^ k[0],
            products[1] & low,
            (products[0] >> half) ^ c[3] ^ k[1],
            products[0] & low,
        ]
        k = [(word + np.uint64(step)) & low for word, step in zip(k, WEYL, strict=True)]
    return c


def uniforms(seeds: np.ndarray, offsets: np.ndarray, rows: np.ndarray | int = 0) -> np.ndarray:
    """Multiples of 2^-24 in [0, 1), as float32: the upper 24 bits of the first word of each counter.

    `seeds` and `offsets` are int64, and `rows` below 2^32. A counter's words are the low and the high half of the
    offset, the row, and 0; a key's are those of the seed.
    """
    import numpy as np

    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    key, at = (np.asarray(given).astype(np.uint64) for given in (seeds, offsets))
    row = np.zeros_like(at) + np.asarray(rows).astype(np.uint64)
    first = philox([at & low, at >> half, row, np.zeros_like(row)], [key & low, key >> half])[0]
    return (first >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
