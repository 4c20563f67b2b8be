"""N-hot lookup on a GPU: warps gather rows of the table in wide loads, several at a time.

A row of the output is cut into tiles of `column_lanes` x `vec` columns, and a tile is the work of a warp. One coalesced
load brings 32 ids (and values) into its lanes; shuffles hand them out, and each lane issues `loads` loads of table rows
before it adds the first. If a tile is narrower than a warp, 32 / `column_lanes` groups of lanes take different entries,
and shuffles add what the groups have. One-hot rows take the same way, with one group.

**Guessed entries.** With few entries a row the time is that of three trips to memory, each of which depends on the one
before: row start, ids, table rows. Most minibatches have the same number of entries in every row, namely nnz / rows.
Then a row starts at row * (nnz / rows), and its ids can be loaded from there at the same time as the row starts. Those
tell whether the guess was right. If it was not, the ids are loaded again from where they are. A wrong guess costs a
trip; it never changes a result, and it reads nothing outside of `indices`.

**Bags.** Entries of padding are loaded like others, mostly from the cache, and take no part in sums. For a mean, or a
maximum, which is 0 for no entry, the lanes count the entries of their windows beside them. A table in eight bits
becomes float16 in registers, two numbers at a time, and each load of a row has one of its scale. With several tables a
warp reads where its own begins while it reads ids, and finds its place in the output, where tables stand side by side.

**overlap** is programmatic dependent launch: the kernel may start while its producer kernel (the one before it in the
stream) still runs. With 1 it waits for the producer before it reads anything. With 2 the ids are read before the wait,
which makes them guesses as well, for the producer may be about to write them:

1. before the wait, ids are read from where they are guessed to be, and clamped to rows of the table;
2. with **prefetch**, those rows are brought into the L2 cache, a hint that leaves the producer free to write them;
3. after the wait, those rows are loaded into registers at once, and beside them row starts, ids and values anew;
4. if row starts and ids are what they were taken to be, for all lanes of the warp, the rows count, and one trip to
   memory was left; if not, they are dropped, and the warp begins as if there had been no guess.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

warp_gather = in_phases(
    space,
    name="warp_gather",
    version=5,
    operator="nhot_lookup",
    summary="a warp a tile of a row, several wide loads in flight a lane",
)
