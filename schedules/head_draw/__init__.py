"""Templates of draws from the exact output layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Launch, Program, Table, Template, ceildiv
from tvm_sparse.operators.head_draw.problem import HeadDraw

from ..output_layer.registers import registers
from ..output_layer.rings import rings
from ..output_layer.warp_rings import warp_rings
from ..output_layer.warpgroups import warpgroups

# Threads of a block, for any problem; and tokens of its slices, which a warp has a lane each for.
THREADS, SLICE = (128, 256, 512, 1024), 32
# Partial sums of a score, in vectors of a CPU.
SIMD = (4, 8, 16)


@dataclass(frozen=True)
class Extents:
    """What the kernels of `draw_slices` know before they run, as `output_layer.draw` reads it."""

    dtype: str
    hidden: int
    list_tiles: int
    threads: int
    overlap: int
    tile_n: int = SLICE
    dynamic: int = 0


def build(problem: HeadDraw, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..device.overlap import wait_then_start_consumer
    from ..device.region import device_region
    from ..interface import gpu_program
    from ..output_layer import draw
    from ..output_layer.scales import own_arguments
    from ..output_layer.tiles.product import store_slice

    e = Extents(problem.dtype, problem.hidden, ceildiv(problem.vocab, SLICE), **decisions)
    multiply, draw_token = draw.multiply_slice(e), draw.draw_token(problem, e)

    # fmt: off
    @T.inline
    def weigh(given):
        with device_region():
            tile, row = T.cta_id([(given.vocab + (SLICE - 1)) // SLICE, given.rows])
            t = T.thread_id([e.threads])
            s = T.meta_var(draw.State.alloc(e, row=row, t=t))
            if e.overlap > 0:
                wait_then_start_consumer()
            io = T.meta_var(own_arguments(given, row))
            s.tile[0] = tile
            multiply(io, s)
            if t < draw.WARP:
                draw.weigh_slice(s, io.scale * T.float32(draw.LOG2_E))
                if t == draw.WARP - 1:
                    store_slice(io.slices, row, tile, s.pair[0], s.other[0])

    @T.inline
    def body(io):
        weigh(io)
        draw_token(io)
    # fmt: on
    return gpu_program(problem, body, (draw.slices_of(e),), overlapped=e.overlap > 0)


def rows_program(problem: HeadDraw, decisions: Decisions) -> Program:
    import tvm

    from tvm_sparse.core.arguments import function

    body = problem.by_rows(decisions["simd"], parallel=True)
    main = function(problem, body, blocks=True, packed=True, index="int64")
    return Program(tvm.IRModule({"main": main}))


def space(problem: HeadDraw, machine: Machine) -> Table:
    return {"threads": THREADS, "overlap": (0, 1) if machine.has_clusters else (0,)}


draw_rows: Template[Any] = Template(
    name="draw_rows",
    version=1,
    operator="head_draw",
    kind="llvm",
    summary="cores take rows, whose scores are computed three times",
    space=lambda problem, machine: {"simd": SIMD},
    default=lambda problem, machine: {"simd": SIMD[-1]},
    program=rows_program,
)
draw_slices: Template[Any] = Template(
    name="draw_slices",
    version=1,
    operator="head_draw",
    kind="cuda",
    summary="a thread block a slice of words, then one a row: any hidden size",
    space=space,
    default=lambda problem, machine: {"threads": 128, "overlap": int(machine.has_clusters)},
    program=build,
    launch=lambda problem, decisions: Launch(decisions["threads"]),
    explicit_threads=True,
)
draw_warpgroups = warpgroups(name="draw_warpgroups", version=1, operator="head_draw")
draw_rings = rings(name="draw_rings", version=1, operator="head_draw")
draw_warp_rings = warp_rings(name="draw_warp_rings", version=1, operator="head_draw")
draw_registers = registers(name="draw_registers", version=1, operator="head_draw")

_CUDA = (draw_warpgroups, draw_rings, draw_warp_rings, draw_registers, draw_slices)
TEMPLATES: tuple[Template, ...] = (draw_rows, *_CUDA)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (draw_rows,), "cuda": _CUDA}
