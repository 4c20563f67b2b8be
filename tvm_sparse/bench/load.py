"""Load by other processes and spread of rounds, which tell how reliable a measured time is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.25
# Interquartile range over median above which ratios of medians are not reported: with 15 rounds such a median is known
# to about 10 %.
WIDE = 0.25
# Least rounds for quartiles.
FEWEST_ROUNDS = 3
# Share of the cores in use by others, on average, from which times on a CPU count as those of a busy machine.
BUSY = 0.25


@dataclass(frozen=True)
class Load:
    """Number of cores that other processes kept busy on average, and of the machine's cores."""

    others: float
    cores: int

    @property
    def busy(self) -> bool:
        return self.others > BUSY * self.cores

    def __str__(self) -> str:
        return f"other processes kept {self.others:.1f} of {self.cores} cores busy"


def watch() -> Callable[[], Load | None]:
    """Start watching; the returned function gives the load since then, without this process's own.

    It returns None if the system does not report it (no /proc/stat), or within one tick of its clock.
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
    """The load during `seconds`, in which this process sleeps."""
    load = watch()
    time.sleep(seconds)
    return load()


def spread(seconds: Sequence[float]) -> float | None:
    """Interquartile range of the rounds' times over their median; None for too few rounds."""
    if len(seconds) < FEWEST_ROUNDS:
        return None
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def comparable(*contenders: Sequence[float]) -> bool:
    """Whether ratios of these contenders' medians are meaningful: each has enough rounds with a small spread."""
    return all((width := spread(seconds)) is not None and width <= WIDE for seconds in contenders)


def _ticks() -> tuple[int, int, int] | None:
    """Busy ticks of all cores, all ticks, and the number of cores; None if the system does not report them."""
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
