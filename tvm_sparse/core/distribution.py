"""Problems drawn at random, as users may have them, by which look-up is judged (`scripts/regret.py`).

Each operator declares its distribution beside its axes, as `Problem.drawn_axes`. Draws depend on the generator alone.
Sizes are log-uniform: as many problems between 1 and 2 rows as between 32,768 and 65,536.
"""

from __future__ import annotations

import math
import random

from .problem import FLOATS, Problem, ProblemError, numpy_dtype

# Bounds of a drawn problem, so that a study of many problems ends and fits every GPU: bytes of its arrays (an operator
# may allow more, `Problem.most_drawn_bytes`), operations, and elements of its outputs, which are compared with a
# reference on the host for every candidate.
MOST_OPERATIONS = 2 * 10**10
MOST_OUTPUTS = 1 << 25
# Draws until one is within the bounds. For every operator here a tenth or more of the draws are.
MOST_TRIES = 1000


def problem(operator: type[Problem], rng: random.Random) -> Problem:
    """A problem drawn from an operator's distribution, within the bounds, as a call would look it up.

    Raises
    ------
    ProblemError
        If the operator declares no distribution, or none of the draws is within the bounds.
    """
    for _ in range(MOST_TRIES):
        axes = operator.drawn_axes(rng)
        try:
            found = operator(**axes).as_called()
            outputs = sum(math.prod(shape) for shape, _ in found.output_layouts())
            if (
                array_bytes(found) <= operator.most_drawn_bytes
                and found.cost().operations <= MOST_OPERATIONS
                and outputs <= MOST_OUTPUTS
            ):
                return found
        except ProblemError:  # arrays beyond what kernels count
            continue
    raise ProblemError(f"{operator.operator}: nothing that was drawn is within the bounds of a study")


def array_bytes(found: Problem) -> int:
    """Bytes of a call's arrays: of those whose extents follow from the axes, or, where this is more, the compulsory
    bytes.
    """
    total = 0
    for argument in (*found.kernel_inputs, *found.kernel_outputs):
        try:
            elements = math.prod(map(found.extent, argument.shape))
        except KeyError:  # depends on the data
            continue
        total += elements * numpy_dtype(found.dtype_of(argument)).itemsize
    return max(total, found.cost().bytes)


def whole(rng: random.Random, low: int, high: int, multiple: int = 1) -> int:
    """A log-uniform whole number from `low` to `high`, rounded to a multiple of `multiple`, which divides both."""
    number = math.exp(rng.uniform(math.log(low), math.log(high)))
    return min(high, max(low, multiple * round(number / multiple)))


def flag(rng: random.Random, probability: float) -> int:
    """1 with this probability, else 0."""
    return int(rng.random() < probability)


def dtype(rng: random.Random) -> str:
    """One of the three dtypes, with equal probability."""
    return rng.choice(FLOATS)


def batch(rng: random.Random) -> int:
    """A log-uniform number of rows, from that of a single user to that of a long prompt."""
    return whole(rng, 1, 1 << 16)


def vocab(rng: random.Random) -> int:
    """A log-uniform number of columns of logits, from a tagger's to those of the largest language models and
    recommenders.
    """
    return whole(rng, 100, 1_000_000)
