"""N-hot lookup on a GPU: thread blocks get equal parts of the output, wherever rows begin and end.

With many entries a row the table's rows come from the L2 cache, and the time is that of the multiprocessor which has
most of them to read. A thread block a row is uneven: 200 rows on 132 multiprocessors take as long as 264 would, because
68 multiprocessors have two rows and the others wait for them.

**How the output is dealt out.** It is one list of vectors, each of up to 16 bytes of a row: what one thread loads at
once. Vectors are dealt out by sectors, the 32 bytes that memory and L2 cache transfer together, so no sector of a table
row is fetched for two thread blocks. Each of `blocks` thread blocks gets the same number of consecutive sectors, or
one more.

**How a thread block works.** For each of its vectors there are `reduce_threads` threads, each with a share of the row's
entries. A thread reads its own ids and values, several with a load, and has the table rows of its whole share in flight
(up to `space.MOST_LOADS`) before it adds the first. Neighbouring threads have neighbouring vectors and the same share:
a warp's loads of ids go to few addresses, and those of table rows to whole lines. No shuffle stands between ids and
rows. What the threads of a vector have is left in shared memory, and all threads of the block add it up, in a fixed
order.

**Where ids are guessed to be.** If a call has as many entries a row as the problem says, nnz = rows * `nonzeros`, its
rows mostly all have that number, and row r begins at entry r * `nonzeros`. Then ids are loaded from there at the same
time as the row starts, and the table rows of these ids are loaded before the row starts have come. That is safe: any
id in `indices` is a row of the table. If the row starts are what was guessed, the loaded rows are added. If not, and in
calls with another number of entries, the thread reads the entries of the row where they are, one by one.

**overlap** is programmatic dependent launch. With 1 the kernel waits for its producer kernel, and then lets its
consumer kernel start; with 2 it lets the consumer start before it waits. In both it reads nothing before the wait.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

dealt_gather = in_phases(
    space,
    name="dealt_gather",
    version=1,
    operator="nhot_lookup",
    summary="the output dealt out evenly, threads read their own entries, all of a share in flight",
)
