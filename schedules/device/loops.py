"""Loops whose extent the compiler does not know.

It unrolls them four times and more. That pays where iterations wait for memory, which are then in flight together.
Where a loop runs once, as most do that deal a few things out to all threads of a block, it only makes a kernel longer:
its instructions come from a cache, too, and a kernel that runs for some microseconds meets most of them once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

# Makes a loop over an extent.
Loop = Callable[[Any], Any]


def rolled(extent: Any) -> Any:
    """As `T.serial`, and the compiler is told not to unroll it."""
    return T.serial(extent, unroll=False)


def loop_of(unroll: int) -> Loop:
    """What makes the loops that mostly run once, by the decision `unroll`."""
    return T.serial if unroll else rolled
