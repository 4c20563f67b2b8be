"""What another operator adds to a kernel of this one: a scale of each row, and what is made of a row's k best.

An operator that goes on from the k best (`softmax_sample`) has kernels of its own: those of the templates here, with an
`Ending`. Their arguments have the names of `interface.Arguments`, and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ending:
    """The two places at which a kernel is added to.

    Attributes
    ----------
    own
        (arguments, row) -> the arguments as they are for this row, whose `scale` is its own. A kernel calls it where it
        may read what its producer kernel has written, and before it takes the first exponential.
    finish
        A phase (arguments, row, t, barrier), called when a row's values and indices have been written by threads that
        meet at `barrier`, of which t is the number; the first 32 are a warp. Values are log-probabilities. On a CPU
        there is one thread, and no barrier: None.
    """

    own: Callable[[Any, Any], Any]
    finish: Callable[..., Any]
