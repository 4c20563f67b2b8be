"""Block-sparse matmul, a thread an output element or a tile of them (Gu 2020, sections 4.1 and 4.2).

The paper's per-element form launched thread blocks of one thread; here a thread block takes `threads` neighbouring
elements. The per-tile form gives each thread `tile_m` x `tile_n` neighbouring elements, one after another. Threads
share nothing but the caches. The per-element form asks nothing of the shape, and is the fallback where no other fits.
"""

from __future__ import annotations

from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Features, NotApplicable, Program, Table, Template, ceildiv, powers
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

# Threads of a thread block: whole warps.
THREADS = powers(32, 512)
# Rows of x, and rows of the weight, of a thread's tile.
TILES = powers(1, 8)


def element_space(problem: BsrMatmul, machine: Machine) -> Table:
    return {"threads": THREADS}


def tile_space(problem: BsrMatmul, machine: Machine) -> Table:
    from ..bsr_matmul.stored import refuse_turned

    refuse_turned(problem)
    if problem.n % THREADS[0]:
        raise NotApplicable(f"n={problem.n} does not divide among {THREADS[0]} threads")
    return {"threads": THREADS, "tile_m": TILES, "tile_n": TILES}


def tile_allowed(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> str | None:
    rows, _ = problem.block_shape
    tile_m, tile_n, threads = decisions["tile_m"], decisions["tile_n"], decisions["threads"]
    if tile_m * tile_n == 1:
        return "a tile of one element is the per-element template"
    if rows % tile_n:
        return f"tile_n={tile_n} does not divide the block's {rows} rows"
    if (problem.n // tile_n) % threads:
        return f"{threads} threads of {tile_n} do not divide n={problem.n}"
    return None


def tile_default(problem: BsrMatmul, machine: Machine) -> Decisions:
    """Two rows of x a thread, on as many threads as divide the columns."""
    return {"threads": max(t for t in THREADS[:3] if problem.n % t == 0), "tile_m": 2, "tile_n": 1}


def features(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> Features:
    """The features of both templates."""
    from ..bsr_matmul.features import features as product_features

    tile_m, tile_n, threads = decisions.get("tile_m", 1), decisions.get("tile_n", 1), decisions["threads"]
    sums = ceildiv(problem.m, tile_m) * (problem.n // tile_n)
    return product_features(
        problem,
        machine,
        tile_m=tile_m,
        outputs=tile_m * tile_n * threads,
        threads=threads,
        blocks=ceildiv(sums, threads),
        work_each=problem.block_shape[1],
        at_once=1,
        held=tile_m * tile_n,
    )


def thread_an_element(definition: Any, output: str, decisions: Decisions) -> Program:
    """The program of a definition in which each thread computes one element of the SBlock `output`."""
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": definition}))
    y, total = schedule.get_sblock(output), schedule.get_sblock("total_l1")

    # neighbouring elements on neighbouring threads, and each one's sum in a register
    block, thread = schedule.split(schedule.fuse(*schedule.get_loops(y)), [None, decisions["threads"]])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    schedule.compute_at(total, thread)
    schedule.set_scope(total, 0, "local")
    return Program(schedule.mod)


def element_build(problem: BsrMatmul, decisions: Decisions) -> Program:
    return thread_an_element(problem.definition(), "y", decisions)


def tile_build(problem: BsrMatmul, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    from .gu_reductions import definition

    func = definition(problem, decisions["tile_m"], decisions["tile_n"], threads=1, vec=1)
    schedule = Schedule(tvm.IRModule({"main": func}))
    part, total, y = (schedule.get_sblock(name) for name in ("part", "total", "y"))

    # neighbouring tiles on neighbouring threads; each sums alone
    i, j, _ = schedule.get_loops(part)
    block, thread = schedule.split(j, [None, decisions["threads"]])
    schedule.bind(i, "blockIdx.y")
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    schedule.set_scope(part, 0, "local")
    schedule.reverse_compute_at(total, thread)
    schedule.set_scope(total, 0, "local")
    schedule.reverse_compute_at(y, thread)
    return Program(schedule.mod)


per_element = Template(
    name="per_element",
    version=1,
    operator="bsr_matmul",
    kind="cuda",
    summary="a thread an output element (Gu 2020, 4.1)",
    space=element_space,
    default=lambda problem, machine: {"threads": 128},
    program=element_build,
    features=features,
)

per_tile = Template(
    name="per_tile",
    version=1,
    operator="bsr_matmul",
    kind="cuda",
    summary="a thread a tile of output elements (Gu 2020, 4.2)",
    space=tile_space,
    default=tile_default,
    program=tile_build,
    allowed=tile_allowed,
    features=features,
)
