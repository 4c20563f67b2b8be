"""Work on large arrays part by part on all cores: an embedding has hundreds of millions of numbers.

NumPy releases the GIL while it works on a part. ml_dtypes' conversions of bfloat16 do not, so they are done here on the
bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .problem import numpy_dtype

if TYPE_CHECKING:
    import numpy as np

# Numbers in a part: with the intermediate arrays they fit into a processor's last-level cache.
AT_ONCE = 1 << 20
MOST_THREADS = 16


def of_each(function: Callable[..., object], *arguments: Iterable[Any]) -> None:
    """Call a function with the arguments of each part, in threads, as `map` does. An exception of one call
    is raised.
    """
    from concurrent.futures import ThreadPoolExecutor  # not needed by those who only call kernels

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
    """Convert numbers of a floating dtype of 16 or 32 bits to float32, exactly; a copy."""
    import numpy as np

    if numbers.dtype != numpy_dtype("bfloat16"):
        return numbers.astype(np.float32)
    bits = np.ascontiguousarray(numbers).view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def float64_of(numbers: np.ndarray) -> np.ndarray:
    """Convert a matrix of a floating dtype of 16 or 32 bits to float64, exactly; a copy."""
    import numpy as np

    found = np.empty(numbers.shape)

    def widen(begin: int, end: int) -> None:
        found[begin:end] = float32_of(numbers[begin:end])

    of_rows(numbers, widen)
    return found


def round_into(numbers: np.ndarray, out: np.ndarray) -> None:
    """Round finite float32 numbers to another floating dtype, to nearest even, into `out`; both contiguous."""
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
