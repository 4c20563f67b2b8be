"""Schedules of the operators' stages: where each is computed, and which loops are threads.

The stages are those of `Softmax.stages`, which the last one, the output, consumes: `d` is the sum of exponentials, `m`
the maximum; of the online algorithm `md` is a pair for each of the parts into which a row is cut, one a thread, and
`m` and `d` join the parts by equation 4.
"""

from __future__ import annotations

import tvm
from tvm.s_tir import Schedule

from tvm_sparse.core.template import Decisions, Program

from ..problems import RowProblem, algorithm
from .space import WARP

REDUCTIONS = {"naive": ("d",), "safe": ("m", "d"), "online": ("md", "m", "d")}


def build_thread(problem: RowProblem, decisions: Decisions) -> Program:
    """One thread per row: every loop within the row is the thread's own."""
    schedule = Schedule(tvm.IRModule({"main": problem.stages(lanes=0)}))
    batch, *_ = schedule.get_loops(schedule.get_sblock(problem.outputs[0].name))
    block, thread = schedule.split(batch, [None, decisions["threads"]])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    # With one part a row there is nothing to join: the online algorithm is `md` alone.
    reductions = ("md",) if algorithm(problem) == "online" else REDUCTIONS[algorithm(problem)]
    # Consumers first: each stage goes to where its own consumer already is.
    for name in reversed(reductions):
        place(schedule, name, thread)
    return Program(schedule.mod)


def build_shared_row(problem: RowProblem, decisions: Decisions) -> Program:
    """One thread block per row or, with several rows in a block, one warp per row: reductions are across threads."""
    threads, rows = decisions.get("reduce_threads", WARP), decisions.get("rows", 1)
    schedule = Schedule(tvm.IRModule({"main": problem.stages(lanes=threads)}))
    batch, *columns = schedule.get_loops(schedule.get_sblock(problem.outputs[0].name))
    block, row = schedule.split(batch, [None, rows])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(row, "threadIdx.y")
    for name in reversed(REDUCTIONS[algorithm(problem)]):
        # Inside of the loops over blocks and rows. Online: a loop over parts, which is one over threads already, and in
        # `md` the thread's own over its part, unless that is one element. Else: one over the row's elements.
        loop = schedule.get_loops(place(schedule, name, row))[2]
        if algorithm(problem) != "online":
            _, loop = schedule.split(loop, [None, threads])
        schedule.bind(loop, "threadIdx.x")
    for column in columns:
        _, thread = schedule.split(column, [None, threads])
        schedule.bind(thread, "threadIdx.x")
    return Program(schedule.mod)


def place(schedule: Schedule, name: str, loop: tvm.s_tir.schedule.LoopRV) -> tvm.s_tir.schedule.SBlockRV:
    """Compute a stage under a loop, its results in registers; a reduction across threads leaves them in all of them."""
    block = schedule.get_sblock(name)
    schedule.compute_at(block, loop)
    for number in range(len(schedule.get(block).writes)):
        schedule.set_scope(block, number, "local")
    return block
