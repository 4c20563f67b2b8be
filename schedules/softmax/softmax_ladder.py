"""Softmax and logsumexp by schedule primitives alone, in the steps in which the paper's readers build them.

`thread`: a row to a thread, as the definition says it. `block`: the threads of a block share a row, and its reductions
are reductions across threads, through shared memory; `warp`: the same over 32 lanes, where they become shuffles. All
three algorithms are mapped alike; of the online one the parts of equation 4 (see `Softmax.stages`) are the threads'.
Every element is read as often as the algorithm says, one at a time: what `softmax_vectors` gains on these is wide
accesses and rows that are read once.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, powers
from tvm_sparse.operators.softmax.problem import Softmax

WARP = 32


def thread_space(problem: Problem, machine: Machine) -> Table:
    return {"threads": powers(32, 256)}


def block_space(problem: Problem, machine: Machine) -> Table:
    lanes = tuple(lanes for lanes in powers(64, 1024) if lanes <= min(problem.vocab, machine.max_threads))
    if not lanes:
        raise NotApplicable(f"a row of vocab={problem.vocab} has no work for 64 threads")
    return {"reduce_threads": lanes}


def warp_space(problem: Problem, machine: Machine) -> Table:
    if problem.vocab < WARP:
        raise NotApplicable(f"a row of vocab={problem.vocab} has no work for {WARP} threads")
    return {"rows": powers(1, 16)}


def thread_default(problem: Problem, machine: Machine) -> Decisions:
    return {"threads": 64}


def block_default(problem: Problem, machine: Machine) -> Decisions:
    return {"reduce_threads": max(lanes for lanes in block_space(problem, machine)["reduce_threads"] if lanes <= 256)}


def warp_default(problem: Problem, machine: Machine) -> Decisions:
    return {"rows": 4}


def reductions(problem: Problem) -> list[str]:
    """The stages before the last one."""
    algorithm = problem.algorithm if isinstance(problem, Softmax) else "online"
    return {"naive": ["d"], "safe": ["m", "d"], "online": ["md", "m", "d"]}[algorithm]


def build_thread(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": problem.stages(lanes=0)}))
    last = schedule.get_sblock(problem.outputs[0].name)
    b, *_ = schedule.get_loops(last)
    block, thread = schedule.split(b, [None, decisions["threads"]])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    # Consumers first: each stage goes to where its own consumer already is.
    for name in reversed(reductions(problem)):
        if name == "md" or "md" not in reductions(problem):
            place(schedule, name, thread)
    return Program(schedule.mod)


def build_lanes(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    lanes, rows = decisions.get("reduce_threads", WARP), decisions.get("rows", 1)
    schedule = Schedule(tvm.IRModule({"main": problem.stages(lanes)}))
    last = schedule.get_sblock(problem.outputs[0].name)
    b, *columns = schedule.get_loops(last)
    block, row = schedule.split(b, [None, rows])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(row, "threadIdx.y")
    for name in reversed(reductions(problem)):
        own = place(schedule, name, row)
        # Behind those of the rows comes the loop over lanes; of `md` the thread's own loop over its part is left, or
        # none if a part is one element.
        loop = schedule.get_loops(own)[2]
        if "md" not in reductions(problem):
            _, loop = schedule.split(loop, [None, lanes])
        schedule.bind(loop, "threadIdx.x")
    for column in columns:
        _, lane = schedule.split(column, [None, lanes])
        schedule.bind(lane, "threadIdx.x")
    return Program(schedule.mod)


def place(schedule, name: str, loop):
    """Compute a stage under a loop, its results in registers; a reduction across threads leaves them in all of them."""
    block = schedule.get_sblock(name)
    schedule.compute_at(block, loop)
    for number in range(len(schedule.get(block).writes)):
        schedule.set_scope(block, number, "local")
    return block


def _templates(operator: str) -> tuple[Template, Template, Template]:
    common = partial(Template, version=1, operator=operator, kind="cuda")
    return (
        common(
            name=f"{operator}_thread",
            summary="a row to a thread, element by element",
            space=thread_space,
            default=thread_default,
            program=build_thread,
        ),
        common(
            name=f"{operator}_block",
            summary="a row to a block, reduced across threads through shared memory",
            space=block_space,
            default=block_default,
            program=build_lanes,
        ),
        common(
            name=f"{operator}_warp",
            summary="a row to a warp, reduced by shuffles",
            space=warp_space,
            default=warp_default,
            program=build_lanes,
        ),
    )


softmax_thread, softmax_block, softmax_warp = _templates("softmax")
logsumexp_thread, logsumexp_block, logsumexp_warp = _templates("logsumexp")
