"""The kernel of `beam_blocks`, a list of phases; those that are not here are those of `schedules.lsh`.

clear_counts, clear_bits, and load_always, what will be needed last

for each row of the thread block

    hash_rows       of several together, at the first of them
    count_row

combine, between two barriers of the cluster; write_share, fill_rest
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ...device.overlap import start_consumer, wait_for_producer, wait_then_start_consumer
from ...lsh.buckets import clear_counts
from ...lsh.compact import fill_rest, write_share
from ...lsh.extents import CompactExtents, HashExtents
from .phases import clear_bits, combine, count_row, hash_rows, load_always
from .space import BlockExtents
from .state import alloc_block_state


def kernel_body(h: HashExtents, e: BlockExtents, c: CompactExtents, overlap: int) -> Callable[..., Any]:
    """The kernel, as the body of `interface.gpu_program`."""
    clear, clear_bitmap, load = clear_counts(e), clear_bits(e), load_always(e)
    hashed, count, combined = hash_rows(h, e), count_row(e), combine(e)
    write, fill = write_share(c), fill_rest(c)

    # fmt: off
    @T.inline
    def count_rows(s, io, t):
        for n in T.serial((s.rows + (e.pack - 1)) // e.pack, unroll=False):
            for i in T.serial(T.min(s.rows - n * e.pack, e.pack), unroll=False):
                # The other rows' counts have been read.
                if n + i > 0:
                    T.cuda.cta_sync()
                    clear(s, t)
                for tile in T.serial((io.bands + (e.tile - 1)) // e.tile, unroll=False):
                    # Buckets of more bands than there is room for are found anew for each row.
                    if i == 0 or io.bands > e.tile:
                        hashed(s, io, n * e.pack, tile * e.tile, t)
                    T.cuda.cta_sync()
                    count(s, io, i, t)

    @T.inline
    def body(io):
        T.device_entry()
        if overlap == 2:
            start_consumer()
        s = T.meta_var(alloc_block_state(h, e, c))
        if e.peers > 1:
            block = T.cluster_id([io.lists])
            rank = T.cta_id_in_cluster([e.peers])
            s.list = block
            s.rank = rank
        else:
            block = T.cta_id([io.lists])
            s.list = block
            s.rank = 0
        t = T.thread_id([e.threads])
        clear(s, t)
        clear_bitmap(s, t)
        if overlap == 1:
            wait_then_start_consumer()
        if overlap == 2:
            wait_for_producer()
        load(s, io, t)
        s.rows = T.max(io.beam - s.rank + (e.peers - 1), 0) // e.peers
        count_rows(s, io, t)
        combined(s, io, t)
        write(s, io, s.list, s.rank, t)
        fill(s, io, s.list, s.rank, t)
    # fmt: on
    return body
