"""Bootstrap intervals of means (Efron 1979), resampling the independent units: problems or seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
# Least number of values for an interval.
LEAST = 5


@dataclass(frozen=True)
class Interval:
    """An estimate and its bootstrap interval at `CONFIDENCE`."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" [{self.low:.2f}, {self.high:.2f}]" if self.low == self.low else "")

    def columns(self, name: str) -> dict[str, float]:
        """As columns of a table: `name`, `name_low`, `name_high`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def interval(values: np.ndarray, statistic: Callable[..., np.ndarray], seed: int = 0) -> Interval:
    """The percentile bootstrap interval of a statistic with an argument `axis`."""
    import numpy as np

    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(statistic(values[draws], axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(statistic(values, axis=0)), float(low), float(high))


def mean_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """The mean of values with its interval; NaN as bounds if there are fewer than `LEAST` values."""
    import numpy as np

    found = np.asarray(values, dtype=float)
    if len(found) < LEAST:
        return Interval(float(found.mean()) if len(found) else math.nan, math.nan, math.nan)
    return interval(found, np.mean)


def ratio_interval(logs: Sequence[float] | np.ndarray) -> Interval:
    """The geometric mean of ratios, given by their logarithms, with its interval."""
    found = mean_interval(logs)
    return Interval(*(math.exp(value) for value in (found.value, found.low, found.high)))
