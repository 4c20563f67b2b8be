"""The kernel of `bitmap_scan`, in the phases of `schedules.lsh.compact`."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.compaction.problem import Compaction
from tvm_sparse.operators.lsh_lookup.definition import valid_bits

from ...device.overlap import start_consumer, wait_for_producer, wait_then_start_consumer
from ...interface import gpu_program
from ...lsh.compact import fill_rest, read_bitmap, write_share
from ...lsh.state import alloc_state
from .space import extents


def program(problem: Compaction, decisions: Decisions) -> Program:
    """The program of a point. `overlap`: see the package's docstring."""
    e, overlap = extents(problem, decisions), decisions["overlap"]

    # fmt: off
    @T.inline
    def load(s, io, row, word, u):
        T.ptx.ld.global_.u32(s.held[u], io.chosen.ptr_to([row, word]))
        s.held[u] = s.held[u] & valid_bits(e.vocab, word)

    read, write, fill = read_bitmap(e, load), write_share(e), fill_rest(e)

    @T.inline
    def body(io):
        T.device_entry()
        if overlap == 2:
            start_consumer()
        row, share = T.cta_id([io.lists, e.shares])
        t = T.thread_id([e.threads])
        s = T.meta_var(alloc_state(compact=e))
        if overlap == 1:
            wait_then_start_consumer()
        if overlap == 2:
            wait_for_producer()
        read(s, io, row, share, t)
        write(s, io, row, share, t)
        fill(s, io, row, share, t)
    # fmt: on
    return gpu_program(problem, body, overlapped=overlap > 0)
