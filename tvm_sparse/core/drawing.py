"""Random numbers of large inputs, drawn by all cores.

An embedding has hundreds of millions of numbers, which one core draws and rounds in ten seconds, for each of the
structures that a candidate is verified on. What is drawn depends on the generator alone, and not on how many cores take
part: an array above `AT_ONCE` numbers is drawn in parts of so many, each from a generator of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from .problem import numpy_dtype

if TYPE_CHECKING:
    import numpy as np

# Numbers that are drawn at a time: their float32s and what becomes of them fit into a processor's last cache.
AT_ONCE = 1 << 20
MOST_THREADS = 16


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    """Numbers of a normal distribution of mean 0 and this standard deviation, in a floating dtype."""
    import numpy as np

    def part(own: np.random.Generator, out: np.ndarray) -> None:
        drawn = own.standard_normal(len(out), dtype=np.float32)
        if scale != 1.0:
            drawn *= np.float32(scale)
        _round(drawn, out)

    return _drawn(rng, shape, dtype, part)


def whole(rng: np.random.Generator, low: int, high: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Whole numbers from `low` to `high` - 1, all as likely, in a floating dtype that has them all exactly."""
    import numpy as np

    def part(own: np.random.Generator, out: np.ndarray) -> None:
        _round(own.integers(low, high, size=len(out)).astype(np.float32), out)

    return _drawn(rng, shape, dtype, part)


def _drawn(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    dtype: str,
    part: Callable[[np.random.Generator, np.ndarray], None],
) -> np.ndarray:
    import numpy as np

    found = np.empty(math.prod(shape), numpy_dtype(dtype))
    if found.size <= AT_ONCE:
        part(rng, found)
        return found.reshape(shape)
    from concurrent.futures import ThreadPoolExecutor  # who only calls kernels has no use for it

    parts = [found[at : at + AT_ONCE] for at in range(0, found.size, AT_ONCE)]
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(part, rng.spawn(len(parts)), parts):
            pass  # an error is raised here
    return found.reshape(shape)


def _round(numbers: np.ndarray, out: np.ndarray) -> None:
    """Finite float32s to another floating dtype, to the nearest, and to the even one of two."""
    import numpy as np

    if out.dtype != numpy_dtype("bfloat16"):
        out[:] = numbers
        return
    # Its own conversion is left to one thread at a time.
    bits = numbers.view(np.uint32)
    even = (bits >> 16) & 1
    even += 0x7FFF
    even += bits
    even >>= 16
    out.view(np.uint16)[:] = even
