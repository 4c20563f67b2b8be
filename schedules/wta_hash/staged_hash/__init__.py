"""Winner-take-all hashing on a GPU: the row in shared memory, one thread per unit.

A thread block takes a row, and as many bands as it has threads for their units. Threads load the columns of their unit,
in 16-byte loads where k allows, while the row is copied to shared memory. One of its threads combines the places of
a band's units into the band's code.

**overlap** is programmatic dependent launch. With 1 the kernel waits for its producer kernel, and then lets its
consumer kernel start; with 2 it lets the consumer start before it waits. In both it reads nothing before the wait.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.wta_hash.problem import WtaHash

from .space import allowed, default, extents, space


def build(problem: WtaHash, decisions: Decisions) -> Program:
    from .kernel import program

    return program(problem, extents(problem, decisions), decisions["overlap"])


staged_hash = Template(
    name="staged_hash",
    version=1,
    operator="wta_hash",
    kind="cuda",
    summary="rows in shared memory, a thread a unit",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
