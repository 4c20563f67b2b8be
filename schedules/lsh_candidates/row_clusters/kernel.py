"""The kernel of `row_clusters`, in the phases of `schedules.lsh`."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.template import Decisions, Program, Workspace
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates

from ...device.cluster import cluster_arrive
from ...device.overlap import start_consumer, wait_for_producer, wait_then_start_consumer
from ...interface import gpu_program
from ...lsh.buckets import clear_counts
from ...lsh.compact import fill_rest, read_bitmap, write_share
from ...lsh.hashing import code_of_places, find_places, load_first_columns, stage_row
from ...lsh.rows import (
    Place,
    announce_read,
    clear_workspace,
    count_row,
    load_reached,
    locate,
    set_bits_and_leave,
)
from ...lsh.state import alloc_state
from .space import extents


def program(problem: LshCandidates, decisions: Decisions) -> Program:
    """The program of a point. `overlap`: see the package's docstring."""
    (h, e, c), overlap = extents(problem, decisions), decisions["overlap"]
    place, clear, stage = locate(e), clear_counts(e), stage_row(h)
    load_first, find = load_first_columns(h), find_places(h)
    leave, load, release = set_bits_and_leave(e), load_reached(e.vocab), clear_workspace(e)
    read, write, fill = read_bitmap(c, load), write_share(c), fill_rest(c)

    # fmt: off
    @T.inline
    def hash_bands(s, at, io, t):
        columns = T.decl_buffer((io.bands * h.units * h.k,), "int16", data=io.permutations.data)
        if s.begin > at.first:
            load_first(s, columns, s.begin * h.units, s.many * h.units, t)
        find(s, columns, s.begin * h.units, s.many * h.units, t)

    count = count_row(e, hash_bands, lambda s, i: code_of_places(h, s, i))

    @T.inline
    def body(io):
        T.device_entry()
        if overlap == 2:
            start_consumer()
        s = T.meta_var(alloc_state(h, e, c))
        at = T.meta_var(Place.alloc())
        place(s, at, io)
        t = T.thread_id([e.threads])
        clear(s, t)
        if e.cluster > 1:
            cluster_arrive()
        if overlap == 1:
            wait_then_start_consumer()
        if overlap == 2:
            wait_for_producer()
        columns = T.decl_buffer((io.bands * h.units * h.k,), "int16", data=io.permutations.data)
        load_first(s, columns, at.first * h.units, T.min(at.count, e.tile) * h.units, t)
        rows = T.decl_buffer((io.lists * io.beam * h.hidden,), h.dtype, data=io.hidden.data)
        stage(s, rows, at.row * h.hidden, t)
        T.cuda.cta_sync()
        count(s, at, io, t)
        leave(s, at, io, t)
        read(s, io, at.list, at.rank, t)
        announce_read(e.finishers)
        write(s, io, at.list, at.rank, t)
        fill(s, io, at.list, at.rank, t)
        release(s, at, io, t)
    # fmt: on
    # Each list's bitmap, followed by its ticket.
    own = Workspace("workspace", ("lists", e.bitmap + 1), "int32")
    return gpu_program(problem, body, (own,), overlapped=overlap > 0)
