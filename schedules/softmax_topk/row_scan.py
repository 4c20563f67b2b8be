"""Softmax + top-k on a CPU: one pass over the row in chunks that stay in the L1 cache, a heap behind a threshold.

A thread has a row, and takes it in chunks. Of each chunk it finds the maximum (a vector loop), rescales the running sum
if that is a new maximum of the row, and adds the chunk's exponentials (a second vector loop, now from L1): Algorithm 3
of Milakov & Gimelshein with one rescaling a chunk instead of one an element. The k best elements so far are in a binary
heap of keys. Only of chunks whose maximum exceeds the least of these are elements looked at one by one. Nothing else
touches the row, so main memory is read once, and the cost hardly grows with k.

Elements that no vector covers, at the row's end, follow one by one. A row with a NaN is gone through once more for the
heap, as a NaN passes no comparison but comes first in the order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, ceildiv
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

# Elements between two looks at the threshold: a float32 chunk of 1024 is 4 KB of the 32 KB or more of L1.
CHUNK = (64, 128, 256, 512, 1024)
# Elements a vector loop steps by; beyond the register width they are independent accumulators.
LANES = (8, 16, 32, 64)


@dataclass(frozen=True)
class Extents:
    """The extents of one point's function."""

    vocab: int
    k: int
    ids: int  # given columns of a row
    chunk: int  # elements
    lanes: int  # of a vector

    @property
    def whole(self) -> int:
        """Vectors of a row. The elements behind them are taken one by one."""
        return self.vocab // self.lanes

    @property
    def step(self) -> int:
        """Vectors of a chunk."""
        return self.chunk // self.lanes

    @property
    def chunks(self) -> int:
        """Chunks of a row; the last one may be shorter."""
        return ceildiv(self.whole, self.step)


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    return {"chunk": CHUNK, "simd": LANES}


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    return {"chunk": 256, "simd": 16}


def build(problem: SoftmaxTopk, decisions: Decisions) -> Program:
    from .interface import cpu_program
    from .row_scan_kernel import function

    extents = Extents(problem.vocab, problem.k, problem.ids, decisions["chunk"], decisions["simd"])
    return cpu_program(problem, function(extents))


row_scan = Template(
    name="row_scan",
    version=2,
    operator="softmax_topk",
    kind="llvm",
    summary="a thread a row, one pass in chunks, a heap behind a threshold",
    space=space,
    default=default,
    program=build,
)
