"""The sparse recurrent layer in one cluster of thread blocks, which exchange states through distributed shared memory.

For layers whose weights fit into the registers and the shared memory of a few multiprocessors. Each cluster has one
pack of the batch's samples, by default one sample, and its own copy of the weights; clusters work side by side, as many
as the batch has packs. Nothing but inputs and outputs goes through the L2 cache. No cooperative launch is needed,
because the thread blocks of a cluster always run at the same time. `persistent_rows` says what a step does, and how
weights are kept. The phases are the same, except that states are exchanged in another way, and that cell states stay in
registers.

**Exchange.** Each thread block has two copies of the states of all units, and an mbarrier for each. While it reads one
copy, it writes its own units' new states to the other one; then it sends these to each other thread block, all at once,
with a bulk copy (`cp.async.bulk`) that tells the receiver's mbarrier how many bytes have come. When all have come, the
next step begins. There is no other barrier of the cluster: whoever sends states has all states of the step before, and
so a block that has the new states of all others knows that no block reads the copy any more which it writes next.

Of LSTMs and GRUs each warp sends its units' states by itself, as soon as it has them: 32 bits at a time, by
asynchronous stores (`st.async`) that tell the mbarrier the same. So no barrier of the thread block is in a step.

**Places.** So that a thread block's states can be sent by one copy, they lie in the order of slots, not of columns: a
*chunk* for each thread block, of equal size, a multiple of the 16 bytes that a bulk copy moves. Entries name columns.
Each thread block has a table of the places of columns, from which its entries are translated when they are loaded.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

cluster_rows = in_phases(
    space,
    name="cluster_rows",
    version=4,
    operator="sparse_recurrent",
    summary="a cluster of thread blocks a pack of samples, states exchanged through their shared memory",
)
