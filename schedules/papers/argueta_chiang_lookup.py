"""N-hot lookup on a GPU, a thread an output element (Argueta & Chiang 2019, Algorithm 2).

The paper's thread blocks cover 32 x 32 neighbouring elements; here one covers `threads` elements along the rows of the
output, so that a warp reads neighbouring columns of one row of the table. It asks nothing of the shape, and is what
runs without tuning.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, NotApplicable, Program, Table, Template, powers
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup

from .gu_elements import thread_an_element

THREADS = powers(32, 512)


def features(problem: NhotLookup, machine: Machine, decisions: Decisions) -> Features:
    each = problem.rows * problem.width / machine.cores
    itemsize = numpy_dtype(problem.dtype).itemsize
    return {
        "blocks_each": each / decisions["threads"],
        "threads_each": each,
        "block_threads": decisions["threads"],
        "rounds": problem.nonzeros,
        "used": 1.0,
        "columns_used": 1.0,
        "load_bytes": itemsize,
        "in_flight": itemsize,
        "sharing": 1,
    }


def build(problem: NhotLookup, decisions: Decisions) -> Program:
    return thread_an_element(problem.definition(), "out", decisions)


def space(problem: NhotLookup, machine: Machine) -> Table:
    if not problem.plain:
        raise NotApplicable(f"the paper adds all entries of a dense table, got {problem.key}")
    return {"threads": THREADS}


lookup_elements = Template(
    name="lookup_elements",
    version=1,
    operator="nhot_lookup",
    kind="cuda",
    summary="a thread an output element (Argueta & Chiang 2019, Algorithm 2)",
    space=space,
    default=lambda problem, machine: {"threads": 128},
    program=build,
    features=features,
)
