"""The sparse recurrent layer in one cluster of thread blocks, which exchange states through distributed shared memory.

For layers whose weights fit into the registers and the shared memory of a few multiprocessors. Thread blocks of a
cluster store states right into each other's shared memory, in 2 copies of which one is read while the other is written,
and meet at the cluster's barrier once a step: neither goes through the L2 cache. No cooperative launch is needed,
because the thread blocks of a cluster always run at the same time.

Each cluster has one pack of the batch's samples, and its own copy of the weights. What a step does, and how weights are
kept, is told by `persistent_rows`, whose phases these are, but for two: as many lanes of a group compute the same gates
as there are thread blocks to send the states to, or as the group has; and cell states stay in registers. What goes to
global memory is stored while the barrier is waited for.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from .space import ClusterExtents, allowed, default, space


def build(problem: SparseRecurrent, decisions: Decisions) -> Program:
    from ..interface import gpu_program
    from .kernel import kernel_body

    return gpu_program(problem, kernel_body(ClusterExtents.of(problem, decisions)))


cluster_rows = Template(
    name="cluster_rows",
    version=1,
    operator="sparse_recurrent",
    kind="cuda",
    summary="a cluster of thread blocks a pack of samples, states exchanged through their shared memory",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
