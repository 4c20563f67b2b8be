"""Additions to a kernel of this operator: a scale of each row; and another operator's computation on a row's k best.

An operator that proceeds from the k best (`softmax_sample`) has kernels of its own: those of the templates here, with
an `Ending`. Their arguments have softmax_topk's names, and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.arguments import beside
from tvm_sparse.core.phase import phase
from tvm_sparse.core.problem import Problem
from tvm_sparse.operators.softmax_topk.definition import inverse

from ..device.words import load_element

# (arguments, row) -> the arguments as they are for this row, whose `scale` is its own.
Own = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Ending:
    """The places at which a kernel is added to."""

    # Called by a kernel where it may read what its producer kernel has written, and before it takes the first
    # exponential.
    own: Own
    # A phase (arguments, row, t, barrier, needed), called when a row's values and indices have been written by threads
    # that meet at `barrier`, of which t is the number; the first 32 are a warp. Values are log-probabilities. `needed`
    # is an integer in shared memory that says whether `search` is needed, or None if there is none. On a CPU there is
    # one thread, and no barrier: None.
    finish: Callable[..., Any]
    # A phase (arguments, row, t, part, pool) for all threads of all blocks that have the row, `part` being the block's
    # number in its cluster, or None. `pool` is dynamic shared memory of `pool_bytes` in each block, of which the kernel
    # needs nothing any more.
    search: Callable[..., Any] | None = None

    pool_bytes: int = 0


def argument_on_gpu(io: Any, name: str, row: Any) -> Any:
    """A float32 argument that is one number for all rows, or, where a plural is an argument, one for each row. It is
    loaded so that a producer kernel's writes are seen.
    """
    return load_element("float32", getattr(io, name + "s").ptr_to([row])) if io.problem.per_row else getattr(io, name)


def argument_on_cpu(io: Any, name: str, row: Any) -> Any:
    """The same by a plain load."""
    return getattr(io, name + "s")[row] if io.problem.per_row else getattr(io, name)


def own_on_gpu(io: Any, row: Any) -> Any:
    """The arguments with the row's inverse temperature."""
    scale, temperature = (T.alloc_local([1], "float32") for _ in range(2))
    T.buffer_store(temperature, argument_on_gpu(io, "temperature", row), [0])
    T.buffer_store(scale, inverse(temperature[0]), [0])
    return beside(io, {"scale": scale[0]})


def own_on_cpu(io: Any, row: Any) -> Any:
    """The same, within a block of TIR."""
    scale = T.sblock_alloc_buffer((1,), "float32")
    T.buffer_store(scale, inverse(argument_on_cpu(io, "temperature", row)), [0])
    return beside(io, {"scale": scale[0]})


def own_of(problem: Problem, ending: Ending | None = None, *, of_row: Own = own_on_gpu) -> Own | None:
    """The function with which a kernel has the scale of a row: that of its ending, if it has one; `of_row` where rows
    have temperatures; None where all rows have one scale.
    """
    return ending.own if ending is not None else of_row if problem.axes.get("per_row") else None


@phase
def end_of_block(ending, /, io, row, t, pool):
    """The part of an ending that a block which has a row alone executes.

    Reads, writes, barriers: as `Ending.finish` and `Ending.search`, and one barrier between them.
    """
    # fmt: off
    if ending.search is not None:
        needed = T.alloc_shared([1], "int32")
        ending.finish(io, row, t, T.cuda.cta_sync, needed)
        T.cuda.cta_sync()
        if needed[0] != 0:
            ending.search(io, row, t, 0, pool)
    else:
        ending.finish(io, row, t, T.cuda.cta_sync, None)
