"""Loops whose extent the compiler does not know; on a CPU, loops that threads share.

CUDA's compiler unrolls such loops four times and more. That pays where iterations wait for memory, whose loads are then
in flight together. Many loops run only once, such as those that divide a few things among all threads of a block.
Unrolling these only makes a kernel longer, and instructions have to be fetched, too: a kernel that runs for some
microseconds executes most of them once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

# Makes a loop over an extent.
Loop = Callable[[Any], Any]


def rolled(extent: Any) -> Any:
    """As `T.serial`, and the compiler is told not to unroll it."""
    return T.serial(extent, unroll=False)


@phase
def in_parallel(work, extent, few, /, io):
    """The body (io) of a CPU kernel that calls work(io, i) for each i below extent(io), divided among threads. No more
    than `few` are left to the calling thread, because waking others would take longer.
    """
    if extent(io) <= few:
        for i in range(extent(io)):
            work(io, i)
    else:
        for i in T.parallel(extent(io)):
            work(io, i)


def loop_of(unroll: int) -> Loop:
    """What makes the loops that usually run once, by the decision `unroll`."""
    return T.serial if unroll else rolled
