"""The space of `row_scan`, and the extents of its points. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Table, ceildiv
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

# Elements between two looks at the threshold: a float32 chunk of 1024 is 4 KB of the 32 KB or more of L1.
CHUNK = (64, 128, 256, 512, 1024)
# Elements a vector loop steps by; beyond the register width they are independent accumulators.
LANES = (8, 16, 32, 64)
# Elements that one thread can handle in the time in which others wake up.
FEW = 16 * 1024


extent = Derived["Extents", int]


@dataclass(frozen=True)
class Extents:
    """The extents of one point's function."""

    vocab: int
    k: int
    ids: int  # given columns of a row
    chunk: int  # elements of a chunk
    lanes: int  # elements of a vector

    # Whole vectors of a row. The elements after them are taken one by one.
    whole = extent(lambda e: e.vocab // e.lanes)
    # Vectors of a chunk.
    step = extent(lambda e: e.chunk // e.lanes)
    # Chunks of a row; the last one may be shorter.
    chunks = extent(lambda e: ceildiv(e.whole, e.step))


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    return {"chunk": CHUNK, "simd": LANES}


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    return {"chunk": 256, "simd": 16}
