"""Random numbers for inputs, and their magnitudes. All cores take part in drawing large arrays.

The numbers depend on the generator alone, not on the number of cores: an array larger than one part (`parts`) is drawn
part by part, each from a generator of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import parts
from .problem import Problem, numpy_dtype

if TYPE_CHECKING:
    import numpy as np


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    """Numbers of a normal distribution with mean 0 and standard deviation `scale`, in a floating dtype."""
    import numpy as np

    def draw(own: np.random.Generator, out: np.ndarray) -> None:
        drawn = own.standard_normal(len(out), dtype=np.float32)
        if scale != 1.0:
            drawn *= np.float32(scale)
        parts.round_into(drawn, out)

    return _drawn(rng, shape, dtype, draw)


def whole(rng: np.random.Generator, low: int, high: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Whole numbers from `low` to `high` - 1 with equal probability, in a floating dtype that represents all of them
    exactly.
    """
    import numpy as np

    def draw(own: np.random.Generator, out: np.ndarray) -> None:
        parts.round_into(own.integers(low, high, size=len(out)).astype(np.float32), out)

    return _drawn(rng, shape, dtype, draw)


# Ranges, as powers of ten: factors below 1, factors above 1, and numbers that are added to inputs.
POWERS, SHIFTS = ((-8.0, 0.0), (0.0, 4.0)), (0.0, 4.0)
# Probabilities that inputs stay as generated, become subnormal, and have a number added.
AS_GENERATED, SUBNORMAL, SHIFTED = 0.4, 0.12, 0.5


def magnified(
    problem: Problem, inputs: Sequence[Any], rng: np.random.Generator, kind: str = "llvm"
) -> tuple[list[Any], tuple[str, ...]]:
    """Inputs with random magnitudes (`Problem.scaled`, `Problem.shifted`), and a description of each change.

    Each input is multiplied by a number between 1e-8 and 1e4, or by one that makes it subnormal, and may have a number
    between -1e4 and 1e4 added. NaN and infinities stay, and finite numbers stay finite. `kind` is the machine's:
    kernels on GPUs flush float32 subnormals to 0, so none are drawn for them.
    """
    import ml_dtypes
    import numpy as np

    found, said = list(inputs), []
    if rng.random() < AS_GENERATED:
        return found, ()
    for place, argument in enumerate(problem.kernel_inputs):
        name = argument.name
        if name not in problem.scaled and name not in problem.shifted:
            continue
        dtype = found[place].dtype
        limits = ml_dtypes.finfo(dtype)
        factor, added = 1.0, 0.0
        if name in problem.scaled:
            factor = 10 ** rng.uniform(*POWERS[rng.integers(len(POWERS))])
            if name in problem.shifted and rng.random() < SUBNORMAL and (kind == "llvm" or dtype == np.float16):
                factor = float(limits.smallest_normal) / 8
        if name in problem.shifted and rng.random() < SHIFTED:
            factor, added = max(1.0, factor) if rng.random() < 0.5 else 1.0, 10 ** rng.uniform(*SHIFTS)
            added *= rng.choice([-1.0, 1.0])
        wide = found[place].astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            moved = np.clip(wide * np.float32(factor) + np.float32(added), float(limits.min), float(limits.max))
        found[place] = np.where(np.isfinite(wide), moved, wide).astype(dtype)
        said.append(f"{name} x {factor:.2g}{f' {added:+.3g}' if added else ''}")
    return found, tuple(said)


def temperature(rng: np.random.Generator) -> float:
    """1, or a random number between 0.05 and 20, rounded to float32."""
    import numpy as np

    return 1.0 if rng.random() < 0.25 else float(np.float32(10 ** rng.uniform(-1.3, 1.3)))


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
