"""Softmax and logsumexp on a CPU: a thread a row, in vector loops over chunks of the row that stay in L1.

Algorithm 3 of Milakov & Gimelshein, with one rescaling a chunk instead of one an element: the chunk's maximum, then,
from L1, the sum of its exponentials. Those of softmax may be `kept`, relative to the maximum of then, in the output or,
if that is of half precision, in a float32 row of the thread's own: the second pass then multiplies, by a factor a
chunk, and takes no exponential, which is most of the work. It finds the row in L2 unless it is longer than that.
Algorithms 1 and 2 are here too, in whole passes, as the paper compares them.

Few elements are gone through by the calling thread: to wake the others takes longer than the work.

This module holds the decisions and `extents` a point's numbers; neither loads the compiler. `kernel` does, and is
imported when a program is built.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template
from tvm_sparse.operators.softmax.problem import Softmax

from ..problems import RowProblem, algorithm

# Elements between two looks at the maximum: a float32 chunk of 4096 is 16 KB of the 32 KB or more of L1.
CHUNK = (64, 256, 1024, 4096)
# Elements that a vector loop steps by; those beyond the register width are independent accumulators.
SIMD = (8, 16, 32, 64)
# Vectors whose exponentials are added up by themselves, before they go to a sum of the row: to that each is rounded.
APART = 256
# Elements that one thread goes through while others would wake up.
FEW = 16 * 1024


def space(problem: RowProblem, machine: Machine) -> Table:
    if algorithm(problem) != "online":
        return {"simd": SIMD}
    return {"chunk": CHUNK, "simd": SIMD, **({"kept": (0, 1)} if isinstance(problem, Softmax) else {})}


def default(problem: RowProblem, machine: Machine) -> Decisions:
    if algorithm(problem) != "online":
        return {"simd": 32}
    return {"chunk": 1024, "simd": 32, **({"kept": 1} if isinstance(problem, Softmax) else {})}


def build(problem: RowProblem, decisions: Decisions) -> Program:
    from . import kernel

    return kernel.build(problem, decisions)


softmax_rows, logsumexp_rows = (
    Template(
        name=f"{operator}_rows",
        version=4,
        operator=operator,
        kind="llvm",
        summary=f"a thread a row, vector loops, {passes}",
        space=space,
        default=default,
        program=build,
    )
    for operator, passes in (("softmax", "the paper's passes"), ("logsumexp", "one pass in chunks"))
)
