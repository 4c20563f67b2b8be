"""Random numbers of inputs. Those of large ones are drawn by all cores.

What is drawn depends on the generator alone, and not on how many cores take part: an array of more numbers than a part
has (`parts`) is drawn part by part, each from a generator of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import parts
from .problem import numpy_dtype

if TYPE_CHECKING:
    import numpy as np


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    """Numbers of a normal distribution of mean 0 and this standard deviation, in a floating dtype."""
    import numpy as np

    def draw(own: np.random.Generator, out: np.ndarray) -> None:
        drawn = own.standard_normal(len(out), dtype=np.float32)
        if scale != 1.0:
            drawn *= np.float32(scale)
        parts.round_into(drawn, out)

    return _drawn(rng, shape, dtype, draw)


def whole(rng: np.random.Generator, low: int, high: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Whole numbers from `low` to `high` - 1, all as likely, in a floating dtype that has them all exactly."""
    import numpy as np

    def draw(own: np.random.Generator, out: np.ndarray) -> None:
        parts.round_into(own.integers(low, high, size=len(out)).astype(np.float32), out)

    return _drawn(rng, shape, dtype, draw)


def _drawn(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    dtype: str,
    draw: Callable[[np.random.Generator, np.ndarray], None],
) -> np.ndarray:
    import numpy as np

    found = np.empty(math.prod(shape), numpy_dtype(dtype))
    if found.size <= parts.AT_ONCE:
        draw(rng, found)
        return found.reshape(shape)
    pieces = [found[at : at + parts.AT_ONCE] for at in range(0, found.size, parts.AT_ONCE)]
    parts.of_each(draw, rng.spawn(len(pieces)), pieces)
    return found.reshape(shape)
