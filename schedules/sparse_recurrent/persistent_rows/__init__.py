"""The sparse recurrent layer on a GPU in one launch: weights stay on chip, thread blocks exchange hidden states.

Zhu, Pool et al. 2018, "Sparse Persistent RNNs". All thread blocks are resident at the same time: the launch is a
cooperative one, which the runtime checks beforehand (`core.template.Resident`), and which fails in the place of waiting
for ever where they are not.

**Who does what.** Slots, the units in the order in which the host deals them out, go to `blocks` thread blocks in equal
parts, and in each to groups of `reduce_threads` neighbouring lanes. A group has all gates of a unit, so that nothing
but hidden states leaves it; cell states stay in its shared memory. A lane has every `reduce_threads`-th entry of a row.
The first `registers` of its entries stay in registers from beginning to end, and what is left is read anew in each
step, from the L2 cache if it fits there. So any pattern is right, and decisions say
which ones are fast.

**A step** is, for `pack` samples at a time,

1.  **Copy.** The states before the step, of all units, to shared memory: `[column][sample]`, 16 bytes a load.
2.  **Operate.** A lane gathers its entries' columns, each with one load of up to 16 bytes for all samples of the pack
    (the paper's wide loads). The order of a row's entries, which is the host's affair, decides over bank conflicts.
3.  **Reduce.** Lanes exchange halves of their samples until each has one, and add those.
4.  **Gates,** by the lanes that hold the sums; the state goes to the exchange at once.
5.  **Output,** of the step before: a share of the columns that were copied, so that neighbouring threads write
    neighbouring elements. Stores here and there, by who computed them, hold up the exchange in the L2 cache.

With `stages` of 2 copies alternate, so that one barrier of the thread block a step suffices. Of a batch of several
packs one is exchanged while others are computed.

**Exchange.** Thread blocks poll for the data themselves, Lamport's way: each step has a slot of its own, whose words
are a mark until the states are there (`recurrent.exchange`). It costs one store and one load through the L2 cache.
`barrier_rows`, for comparison, is the same kernel with a barrier of the grid after each step, and two slots in turn.

What a step needs beside states, the input projection, is loaded a step ahead.

With the reset before the product (`gru_reset_before`) a step has two halves: r and z from the states, then the
candidate from the states times r, which are exchanged in the same way, in a slot of their own.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, in_phases
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from ...recurrent.sizes import require_one_exchange
from . import space


def space_with_barrier(problem: SparseRecurrent, machine: Machine) -> Table:
    require_one_exchange(problem)
    return space.space(problem, machine)


def program_with_barrier(problem: SparseRecurrent, decisions: Decisions) -> Program:
    from .kernel import program

    return program(problem, decisions, polled=False)


persistent_rows = in_phases(
    space,
    name="persistent_rows",
    version=4,
    operator="sparse_recurrent",
    summary="all steps in one launch; weights stay on chip, blocks exchange states",
    cooperative=True,
)

barrier_rows = in_phases(
    space,
    name="barrier_rows",
    version=1,
    operator="sparse_recurrent",
    summary="as persistent_rows, with a barrier of the grid after each step (Zhu, Pool et al. 2018, table 1)",
    space=space_with_barrier,
    program=program_with_barrier,
    cooperative=True,
    comparison=True,
)
