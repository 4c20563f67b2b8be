"""Large arrays part by part, by all cores: an embedding has hundreds of millions of numbers.

NumPy lets other threads run while it works on a part. The conversions of bfloat16 that come with it do not, so that
these are done here by its bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .problem import numpy_dtype

if TYPE_CHECKING:
    import numpy as np

# Numbers of a part: they and what becomes of them fit into a processor's last cache.
AT_ONCE = 1 << 20
MOST_THREADS = 16


def of_each(function: Callable[..., object], *arguments: Iterable[Any]) -> None:
    """Call a function with the arguments of each part, in threads, as `map` does. What one raises is raised."""
    from concurrent.futures import ThreadPoolExecutor  # who only calls kernels has no use for it

    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(function, *arguments):
            pass


def of_rows(array: np.ndarray, function: Callable[[int, int], object]) -> None:
    """Call a function with the begin and the end of all rows, or of each part of the rows of a large matrix."""
    if array.size <= AT_ONCE:
        function(0, len(array))
        return
    begins = range(0, len(array), max(1, AT_ONCE // array.shape[1]))
    of_each(function, begins, [*begins[1:], len(array)])


def float32_of(numbers: np.ndarray) -> np.ndarray:
    """Numbers of a floating dtype of 16 or 32 bits, exactly; a copy."""
    import numpy as np

    if numbers.dtype != numpy_dtype("bfloat16"):
        return numbers.astype(np.float32)
    bits = np.ascontiguousarray(numbers).view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def float64_of(numbers: np.ndarray) -> np.ndarray:
    """The same in float64, of a matrix; a copy."""
    import numpy as np

    found = np.empty(numbers.shape)

    def widen(begin: int, end: int) -> None:
        found[begin:end] = float32_of(numbers[begin:end])

    of_rows(numbers, widen)
    return found


def round_into(numbers: np.ndarray, out: np.ndarray) -> None:
    """Finite float32s to another floating dtype, to the nearest, and to the even one of two; both contiguous."""
    import numpy as np

    if out.dtype != numpy_dtype("bfloat16"):
        out[:] = numbers
        return
    bits = numbers.view(np.uint32)
    even = (bits >> 16) & 1
    even += 0x7FFF
    even += bits
    even >>= 16
    out.view(np.uint16)[:] = even
