"""What another operator adds to a kernel of this one: a scale of each row, and what is made of a row's k best.

An operator that proceeds from the k best (`softmax_sample`) has kernels of its own: those of the templates here, with
an `Ending`. Their arguments have softmax_topk's names, and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T


@dataclass(frozen=True)
class Ending:
    """The places at which a kernel is added to.

    Attributes
    ----------
    own
        (arguments, row) -> the arguments as they are for this row, whose `scale` is its own. A kernel calls it where it
        may read what its producer kernel has written, and before it takes the first exponential.
    finish
        A phase (arguments, row, t, barrier, needed), called when a row's values and indices have been written by
        threads that meet at `barrier`, of which t is the number; the first 32 are a warp. Values are log-probabilities.
        `needed` is an integer in shared memory that says whether `search` is needed, or None if there is none. On a CPU
        there is one thread, and no barrier: None.
    search
        A phase (arguments, row, t, part, pool) for all threads of all blocks that have the row, `part` being the
        block's number in its cluster, or None. `pool` is dynamic shared memory of `pool_bytes` in each block, of
        which the kernel needs nothing any more.
    """

    own: Callable[[Any, Any], Any]
    finish: Callable[..., Any]
    search: Callable[..., Any] | None = None
    pool_bytes: int = 0


def end_of_block(ending: Ending) -> Callable[..., Any]:
    """The part of an ending that a block which has a row alone executes; the phase is (io, row, t, pool).

    Reads, writes, barriers: as `Ending.finish` and `Ending.search`, and one barrier between them.
    """

    # fmt: off
    @T.inline
    def phase(io, row, t, pool):
        if ending.search is not None:
            needed = T.alloc_shared([1], "int32")
            ending.finish(io, row, t, T.cuda.cta_sync, needed)
            T.cuda.cta_sync()
            if needed[0] != 0:
                ending.search(io, row, t, 0, pool)
        else:
            ending.finish(io, row, t, T.cuda.cta_sync, None)
    # fmt: on

    return phase
