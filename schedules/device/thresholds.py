"""First thresholds for the k largest of a row, from a sample of it: which value to take, and how many reach it.

Without the compiler, because spaces depend on it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from scipy.special import bdtrc  # P(more than i of n succeed)

from tvm_sparse.core.template import ceildiv

# Warps whose floors are looked through one after another (see `Floor`).
MAX_FLOORS = 5
# How often a first threshold may turn out too high, and the row be read again.
MISS = 3e-5


class Rank(NamedTuple):
    """A place among the values of a block: the `warp`-th largest of the warps' `lane`-th largest, counted from 1."""

    lane: int
    warp: int
    sure: bool  # at least k elements are as large, whatever the data
    most: float  # elements of the sample that are as large, exceeded with probability MISS


FIRST = Rank(1, 1, sure=True, most=0)


class Floor(NamedTuple):
    """A threshold for rows in order: `lanes` neighbouring lanes of `warps` warps each reach it with all of a vector.

    So k elements do, whatever the data. The vectors that a warp loads at once are a run of the row: if that ascends or
    descends and the run is at its larger end, little more than k elements of the row are as large.
    """

    warps: int
    lanes: int


def floor_of_runs(k: int, width: int, lanes: int, warps: int) -> Floor | None:
    """The floor for vectors of `width` elements, of at most `lanes` lanes and `warps` warps; None if k takes more."""
    needed = ceildiv(k, lanes * width)
    return Floor(needed, ceildiv(k, needed * width)) if needed <= min(warps, MAX_FLOORS) else None


@cache
def first_threshold(k: int, share: float, warps: int) -> Rank | None:
    """Which of a sample's values to take for a threshold that k elements of the row reach; None if none is any good.

    The sample is `share` of the row, spread over `warps` warps, and a thread knows only its largest element. A value
    that at least k elements of the sample reach is sure; but for k of a whole row a smaller number of the sample
    suffices if the sample is like the rest. Of the k largest elements of a row in random order about k * share are in
    the sample; a place is good enough if with probability 1 - MISS it lies below them. Among the good ones the one that
    the fewest elements reach is best.
    """
    threads = 32 * warps

    def reached(elements: float, lane: int, warp: int) -> float:
        """Probability that `warp` of the warps have `lane` threads with one or more of the sample's `elements`."""
        return float(bdtrc(warp - 1, warps, bdtrc(lane - 1, 32, -math.expm1(-elements / threads))))

    def quantile(probability: float, lane: int, warp: int) -> float:
        """How many elements of the sample reach this place with that probability."""
        low, high = 0.0, 16.0 * threads
        while high - low > 0.5:
            middle = (low + high) / 2
            low, high = (middle, high) if reached(middle, lane, warp) < probability else (low, middle)
        return high

    best, fewest = None, 4.0 * threads
    for lane in range(1, 33):
        for warp in range(1, warps + 1):
            sure = lane * warp >= k
            if not sure and reached(k * share, lane, warp) > MISS:
                continue
            median = quantile(0.5, lane, warp)
            if median < fewest:
                best, fewest = Rank(lane, warp, sure, quantile(1 - MISS, lane, warp)), median
            break  # of these lanes, more warps are only more elements
    return best
