"""Sets of words as bitmaps: bit j % 32 of the int32 at j // 32 is set if word j is in the set."""

from __future__ import annotations

import numpy as np

BITS = 32


def bitmap_words(size: int) -> int:
    """Number of int32 that hold `size` bits."""
    return -(-size // BITS)


def pack_bits(mask: np.ndarray) -> np.ndarray:
    """Pack `(..., size)` booleans into `(..., ceil(size / 32))` int32; bits beyond `size` are 0."""
    *outer, size = mask.shape
    padded = np.zeros((*outer, bitmap_words(size) * BITS), bool)
    padded[..., :size] = mask
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


def unpack_bits(bitmap: np.ndarray, size: int) -> np.ndarray:
    """Inverse of `pack_bits`; bits beyond `size` are ignored."""
    octets = np.ascontiguousarray(bitmap).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=size, bitorder="little").astype(bool)
