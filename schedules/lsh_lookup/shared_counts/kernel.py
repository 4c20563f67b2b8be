"""The kernel of `shared_counts`, in the phases of `schedules.lsh`."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.template import Decisions, Program, Workspace
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

from ...device.cluster import cluster_arrive
from ...device.overlap import start_consumer, wait_for_producer, wait_then_start_consumer
from ...interface import gpu_program
from ...lsh.buckets import clear_counts
from ...lsh.rows import Place, copy_reached, count_row, locate, set_bits_and_leave
from ...lsh.spaces import count_extents
from ...lsh.state import alloc_state


def program(problem: LshLookup, decisions: Decisions) -> Program:
    """The program of a point. `overlap`: see the package's docstring."""
    e, overlap = count_extents(problem, decisions), decisions["overlap"]
    place, clear, leave, copy = locate(e), clear_counts(e), set_bits_and_leave(e), copy_reached(e)

    # fmt: off
    @T.inline
    def read_codes(s, at, io, t):
        s.at = t
        while s.at < s.many:
            T.ptx.ld.global_.s32(s.code[0], io.codes.ptr_to([at.list, at.row % io.beam, s.begin + s.at]))
            s.codes[s.at] = s.code[0]
            s.at = s.at + e.threads

    count = count_row(e, read_codes, lambda s, i: s.codes[i])

    @T.inline
    def body(io):
        T.device_entry()
        if overlap == 2:
            start_consumer()
        s = T.meta_var(alloc_state(count=e))
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
        count(s, at, io, t)
        leave(s, at, io, t)
        copy(s, at, io, t)
    # fmt: on
    own = Workspace("workspace", ("lists", e.bitmap + 1), "int32")
    return gpu_program(problem, body, (own,), overlapped=overlap > 0)
