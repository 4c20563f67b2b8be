"""Look-up on a GPU, lanes sharing buckets as in Figure 4: a cluster of thread blocks a row, counts in shared memory.

Lanes of a warp go through a bucket together, so that none waits for another one's longer bucket (see
`schedules.lsh.buckets`). Thread blocks of a cluster share the bands of a row and the words of a slice of the
vocabulary; `exchange` says what they send each other. The cluster that comes last for its list copies the list's
bitmap, which all have set bits of in a workspace, together with the words that are chosen anyway.

With `overlap` 1 the kernel waits for its producer kernel, and then lets its consumer kernel start; with 2 it lets the
consumer start before it waits. In both nothing is read before the wait.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

from ...lsh.spaces import count_extents
from .space import allowed, default, space


def build(problem: LshLookup, decisions: Decisions) -> Program:
    from .kernel import program

    return program(problem, count_extents(problem, decisions), decisions["overlap"])


shared_counts = Template(
    name="shared_counts",
    version=1,
    operator="lsh_lookup",
    kind="cuda",
    summary="a cluster of blocks a row, lanes share buckets, counts in shared memory (Figure 4, optimised)",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
