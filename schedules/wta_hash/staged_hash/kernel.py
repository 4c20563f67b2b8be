"""The kernel of `staged_hash`, in the phases of `schedules.lsh.hashing`."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.wta_hash.problem import WtaHash

from ...device.overlap import start_consumer, wait_for_producer, wait_then_start_consumer
from ...interface import gpu_program
from ...lsh.hashing import code_of_places, find_places, load_first_columns, stage_row
from ...lsh.state import alloc_state
from .space import extents


def program(problem: WtaHash, decisions: Decisions) -> Program:
    """The program of a point. `overlap`: see the package's docstring."""
    h, overlap = extents(problem, decisions), decisions["overlap"]
    stage, load_first, find = stage_row(h), load_first_columns(h), find_places(h)
    each = h.threads // h.units  # bands of a thread block

    # fmt: off
    @T.inline
    def body(io):
        T.device_entry()
        if overlap == 2:
            start_consumer()
        # Bands along the second axis: no division at the start.
        row, tile = T.cta_id([io.batch, (io.bands + (each - 1)) // each])
        t = T.thread_id([h.threads])
        s = T.meta_var(alloc_state(hashing=h))
        if overlap == 1:
            wait_then_start_consumer()
        if overlap == 2:
            wait_for_producer()
        columns = T.decl_buffer((io.bands * h.units * h.k,), "int16", data=io.permutations.data)
        rows = T.decl_buffer((io.batch * h.hidden,), h.dtype, data=io.hidden.data)
        many: T.let = T.min(io.bands - tile * each, each)
        load_first(s, columns, tile * each * h.units, many * h.units, t)
        stage(s, rows, row * h.hidden, t)
        T.cuda.cta_sync()
        find(s, columns, tile * each * h.units, many * h.units, t)
        T.cuda.cta_sync()
        if t < many:
            io.codes[row, tile * each + t] = code_of_places(h, s, t)
    # fmt: on
    return gpu_program(problem, body, overlapped=overlap > 0)
