"""How much of the machine other processes use, and how far the figures of rounds lie apart: what a time is worth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.25
# Interquartile range over median above which medians have no ratio: of 15 rounds a median is then known to about 10 %.
WIDE = 0.25
# Fewer rounds have no quartiles.
FEWEST_ROUNDS = 3
# Of the cores, in the mean: from here on times on a CPU are those of a busy machine.
BUSY = 0.25


@dataclass(frozen=True)
class Load:
    """Cores that other processes kept busy in the mean, of how many the machine has."""

    others: float
    cores: int

    @property
    def busy(self) -> bool:
        return self.others > BUSY * self.cores

    def __str__(self) -> str:
        return f"other processes kept {self.others:.1f} of {self.cores} cores busy"


def watch() -> Callable[[], Load | None]:
    """Start watching; what is returned gives the load since then, without what this process used itself.

    None where the system does not tell (no /proc/stat), or within one tick of its clock.
    """
    begun, own = _ticks(), time.process_time()

    def load() -> Load | None:
        ended = _ticks()
        if begun is None or ended is None or (total := ended[1] - begun[1]) <= 0:
            return None
        cores = ended[2]
        seconds = total / _ticks_a_second() / cores
        used = (ended[0] - begun[0]) / _ticks_a_second() - (time.process_time() - own)
        return Load(min(max(used / seconds, 0.0), float(cores)), cores)

    return load


def sampled(seconds: float = SAMPLE_SECONDS) -> Load | None:
    """The load of so many seconds, in which this process sleeps."""
    load = watch()
    time.sleep(seconds)
    return load()


def spread(seconds: Sequence[float]) -> float | None:
    """Interquartile range of the rounds' figures over their median; None of too few rounds."""
    if len(seconds) < FEWEST_ROUNDS:
        return None
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def comparable(*contenders: Sequence[float]) -> bool:
    """Whether medians of these contenders' rounds have a ratio: each has enough rounds, and none spreads widely."""
    return all((width := spread(seconds)) is not None and width <= WIDE for seconds in contenders)


def _ticks() -> tuple[int, int, int] | None:
    """Ticks of all cores in which something ran, all ticks, and the number of cores."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        ticks = [int(word) for word in lines[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    user, nice, system, idle, waiting, interrupts, soft, stolen = ticks
    busy = user + nice + system + interrupts + soft + stolen
    return busy, busy + idle + waiting, sum(line[:3] == "cpu" and line[3].isdigit() for line in lines)


def _ticks_a_second() -> int:
    import os

    return os.sysconf("SC_CLK_TCK")
