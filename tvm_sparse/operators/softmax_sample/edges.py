"""What inputs of sampling are at their edges: uniform numbers at bounds, any seeds, any filters, masks and padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .reference import BELOW_ONE

if TYPE_CHECKING:
    import numpy as np

# Uniform numbers at which kernels may round otherwise; multiples of an eighth are bounds of words that are equals.
BOUNDS = (0.0, BELOW_ONE, BELOW_ONE, 2.0**-24, *(i / 8 for i in range(1, 8)))
# Integers whose halves of 32 bits are at their bounds.
INTEGERS = (0, 1, -1, 2**32 - 1, 2**32, -(2**32), 2**31, 2**63 - 1, -(2**63))
# What padding is made of, where a dtype has it.
PADDING = -1e30


def at_bounds(rng: np.random.Generator, uniform: np.ndarray) -> np.ndarray:
    """Uniform numbers `(rows,)`, about half of them replaced by one of `BOUNDS`."""
    import numpy as np

    bounds = rng.choice(np.array(BOUNDS, np.float32), len(uniform))
    return np.where(rng.random(len(uniform)) < 0.5, bounds, uniform)


def any_integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """int64 numbers of either sign whose magnitudes are uniform in octaves, a quarter of them those of `INTEGERS`."""
    import numpy as np

    whole = rng.integers(-(2**63), 2**63 - 1, size=shape, dtype=np.int64) >> rng.integers(0, 64, size=shape)
    return np.where(rng.random(shape) < 0.25, rng.choice(np.array(INTEGERS, np.int64), shape), whole)


def numbers(rng: np.random.Generator, seeded: int, rows: int, plain: bool) -> list[Any]:
    """What a kernel is given for the uniform numbers of rows (`SoftmaxSample.seeded`): numbers, some of them at their
    bounds unless `plain`, or seeds and offsets of every magnitude.
    """
    import numpy as np

    if seeded == 0:
        uniform = rng.random(rows, dtype=np.float32)
        return [uniform if plain else at_bounds(rng, uniform)]
    if seeded == 1:
        return [any_integers(rng, (rows, 2))]
    first = int(any_integers(rng, (1,))[0])
    offsets = any_integers(rng, (rows if seeded == 3 else 1,))
    return [first, offsets if seeded == 3 else int(offsets[0])]


def any_filters(rng: np.random.Generator, rows: int, chosen: list[Any], k: int, vocab: int) -> list[np.ndarray]:
    """Temperature, top_k, top_p and min_p of each row: each the chosen one in half of the rows, whatever others are."""
    import numpy as np

    others = (
        np.array([0, 0.3, 1, 5, np.inf], np.float32),
        np.array([-1, 0, 1, 2, k, min(k + 1, vocab), (k + vocab) // 2, vocab - 1, vocab], np.int32),
        np.array([0.01, 0.3, 0.9, 1 - 2.0**-24, 1], np.float32),
        np.array([0, 1e-3, 0.2, 1], np.float32),
    )
    return [
        np.where(rng.random(rows) < 0.5, rng.choice(values, rows), one).astype(values.dtype)
        for one, values in zip(chosen, others, strict=True)
    ]


def mask_rows(rng: np.random.Generator, logits: np.ndarray) -> None:
    """Make some rows of `logits` such as grammars and padding leave them, in place.

    Of a row one to three words may be finite, as normal numbers, or all words may be at -1e30, at the dtype's least
    number, at either, or at one of these or a normal number.
    """
    import ml_dtypes
    import numpy as np

    rows, vocab = logits.shape
    least = float(ml_dtypes.finfo(logits.dtype).min)
    padding = max(PADDING, least)
    for row in range(rows):
        kind = int(rng.integers(10))
        if kind < 4:
            finite = rng.permutation(vocab)[: kind + 1 if kind < 3 else 2]
            logits[row] = -np.inf
            logits[row, finite] = rng.standard_normal(len(finite)) * (0 if kind == 3 else 1)
        elif kind < 6:
            logits[row] = (padding, least)[kind - 4]
        elif kind == 6:
            logits[row] = rng.choice([padding, least], vocab)
        elif kind == 7:
            logits[row] = np.where(
                rng.random(vocab) < 0.5, rng.choice([padding, least], vocab), rng.standard_normal(vocab)
            )


def sort_rows(rng: np.random.Generator, logits: np.ndarray) -> None:
    """Put a third of the rows of `logits` into ascending order, and a third into descending order, in place."""
    for row in range(len(logits)):
        kind = rng.integers(3)
        if kind:
            ordered = logits[row].copy()
            ordered.sort()
            logits[row] = ordered if kind == 1 else ordered[::-1]
