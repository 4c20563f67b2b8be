"""First thresholds for the k largest of a row, from a sample of it: which value to take, and how many reach it.

Without the compiler, because spaces depend on it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from tvm_sparse.core.template import ceildiv

# Warps whose floors are compared one after another, at most (see `Floor`).
MAX_FLOORS = 5
# The probability that a first threshold turns out too high, so that the row is read again.
MISS = 3e-5
# Terms of a sum that are less than this share of it are left out: a double has no more digits.
EPSILON = 1e-18


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


def more_than(least: int, n: int, p: float) -> float:
    """The probability that more than `least` of `n` succeed, each with probability `p`: the upper tail of a binomial.

    Each term of the sum is computed from the one before, beginning at that end of the tail where terms that matter do
    not underflow.
    """
    q, total = 1 - p, 0.0
    if p < 0.5:
        term = math.comb(n, least + 1) * p ** (least + 1) * q ** (n - least - 1)
        for j in range(least + 1, n + 1):
            total += term
            term *= (n - j) * p / ((j + 1) * q)
            if term < EPSILON * total:
                break
    else:
        term = p**n
        for j in range(n, least, -1):
            total += term
            term *= j * q / ((n - j + 1) * p)
            if term < EPSILON * total:
                break
    return total


@cache
def first_threshold(k: int, share: float, warps: int) -> Rank | None:
    """Which of a sample's values to take for a threshold that k elements of the row reach; None if no value is good
    enough.

    The sample is `share` of the row, spread over `warps` warps, and a thread knows only its largest element. A value
    that at least k elements of the sample reach is sure; but for k of a whole row a smaller number of the sample
    suffices if the sample is like the rest. In random order about k * share of a row's k largest elements are in
    the sample; a place is good enough if with probability 1 - MISS it lies below them. Among the good ones the one that
    the fewest elements reach is best.
    """
    threads = 32 * warps

    def of_lanes(elements: float, lane: int) -> float:
        """Probability that a warp has `lane` threads with one or more of the sample's `elements`."""
        return more_than(lane - 1, 32, -math.expm1(-elements / threads))

    def quantile(probability: float, lane: int, warp: int) -> float:
        """How many elements of the sample reach this place with that probability."""
        low, high = 0.0, 16.0 * threads
        while high - low > 0.5:
            middle = (low + high) / 2
            reached = more_than(warp - 1, warps, of_lanes(middle, lane))
            low, high = (middle, high) if reached < probability else (low, middle)
        return high

    best, fewest = None, 4.0 * threads
    for lane in range(1, 33):
        likely = of_lanes(k * share, lane)
        for warp in range(1, warps + 1):
            sure = lane * warp >= k
            # Too high if `warp` warps have `lane` of those k largest elements that are in the sample.
            if not sure and more_than(warp - 1, warps, likely) > MISS:
                continue
            median = quantile(0.5, lane, warp)
            if median < fewest:
                best, fewest = Rank(lane, warp, sure, quantile(1 - MISS, lane, warp)), median
            break  # with these lanes, more warps only let more elements pass
    return best
