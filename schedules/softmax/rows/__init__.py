"""Softmax and logsumexp on a CPU: one thread per row, in vector loops over chunks of the row that stay in L1.

Algorithm 3 of Milakov & Gimelshein, with one rescaling per chunk instead of one per element: the chunk's maximum, then,
from L1, the sum of its exponentials. With `kept`, softmax keeps them, relative to the maximum known at the time, in the
output or, if that has half precision, in a float32 row of the thread's own. The second pass then multiplies each chunk
by a factor instead of computing exponentials, which are most of the work. It finds the row in the L2 cache unless the
row is larger. Algorithms 1 and 2 are here too, in whole passes, as the paper compares them.

The calling thread handles small inputs alone: waking other threads would take longer than the work.

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
# Vectors whose exponentials are added to a sum of their own first: each addition to the row's sum rounds.
APART = 256
# Elements that one thread can handle in the time in which others wake up.
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
