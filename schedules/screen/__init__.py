"""Templates of the screening step of a screened head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.phase import Phase
from tvm_sparse.core.template import Decisions, Launch, Program, Table, Template, ceildiv, powers
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.screen.problem import Screen

WARP = 32
# Rows that a thread block screens with the bounds of its words in registers.
ROWS = 16
THREADS = powers(128, 1024)
# 32-bit words of a bitmap that a warp fills, or, on a CPU, that are filled before a core takes other ones.
WORDS, CHUNK = 2, (64, 256, 1024)


@dataclass(frozen=True)
class Extents:
    """Static extents of the kernel."""

    vocab: int
    k: int
    groups: int
    threads: int

    @property
    def warps(self) -> int:
        return self.threads // WARP


def space(problem: Screen, machine: Machine) -> Table:
    return {"threads": THREADS, "overlap": (0, 1) if machine.has_clusters else (0,)}


def default(problem: Screen, machine: Machine) -> Decisions:
    return {"threads": 256, "overlap": int(machine.has_clusters)}


# fmt: off
def find_reached(e: Extents) -> Phase:
    """Find what the best words of each row reach. Reads: all inputs. Writes: `norms`, `reached`. Barriers: one, of the
    thread block, at the end. The phase is (io, s, top, t); `top` is the first row."""
    from tvm.script import tirx as T

    from ..device.selection import FULL_WARP


    @T.inline
    def phase(io, s, top, t):
        for n in T.serial(ceildiv(ROWS, e.warps)):
            own = T.meta_var(n * e.warps + t // WARP)
            row = T.meta_var(top + own)
            if own < ROWS and row < io.rows:
                for i in T.serial((e.groups - (t % WARP) + (WARP - 1)) // WARP):
                    s.norms[own * e.groups + i * WARP + (t % WARP)] = io.norms[row, i * WARP + (t % WARP)]
                s.low[0] = T.float32("inf")
                for i in T.serial((e.k - (t % WARP) + (WARP - 1)) // WARP):
                    s.best[0] = T.Cast("int32", io.best[row, i * WARP + (t % WARP)])
                    s.error[0] = T.float32(0)
                    for g in T.serial(e.groups):
                        s.error[0] = s.error[0] + io.norms[row, g] * io.bounds[g, s.best[0]]
                    s.error[0] = io.scores[row, s.best[0]] - s.error[0]
                    # NaN is less than nothing here.
                    s.low[0] = T.min(s.low[0], T.Select(
                        s.error[0] >= T.min_value("float32"), s.error[0], T.float32("-inf")))
                for b in T.unroll(5):
                    s.low[0] = T.min(
                        s.low[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.low[0], 1 << b, WARP, WARP))
                if (t % WARP) == 0:
                    s.reached[own] = s.low[0] - io.added
        T.cuda.cta_sync()

    return phase


def fill_bitmap(e: Extents) -> Phase:
    """Screen the words of a warp. Reads: `norms`, `reached`, scores and bounds. Writes: the bitmap. Barriers: none, but
    all lanes of a warp take part. The phase is (io, s, top, first, t); `first` is the warp's first bitmap word."""
    from tvm.script import tirx as T

    from ..device.selection import FULL_WARP

    @T.inline
    def phase(io, s, top, first, t):
        for n in T.unroll(WORDS):
            word = T.meta_var((first + n) * WARP + t % WARP)
            if (first + n) * WARP < e.vocab:
                for g in T.unroll(e.groups):
                    s.bounds[g] = io.bounds[g, T.min(word, e.vocab - 1)]
                for r in T.serial(T.min(io.rows - top, ROWS)):
                    s.error[0] = io.scores[top + r, T.min(word, e.vocab - 1)]
                    for g in T.unroll(e.groups):
                        s.error[0] = s.error[0] + s.norms[r * e.groups + g] * s.bounds[g]
                    s.left[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), T.And(
                        word < e.vocab, T.Select(s.error[0] < s.reached[r], T.int32(0), T.int32(1)) != 0))
                    if t % WARP == 0:
                        io.chosen[top + r, first + n] = T.reinterpret("int32", s.left[0])

    return phase


def build(problem: Screen, decisions: Decisions) -> Program:
    from types import SimpleNamespace

    from tvm.script import tirx as T

    from ..device.overlap import wait_then_start_consumer
    from ..device.state import named
    from ..interface import gpu_program

    e = Extents(problem.vocab, problem.k, problem.groups, decisions["threads"])
    overlap, blocks = bool(decisions["overlap"]), ceildiv(bitmap_words(problem.vocab), e.warps * WORDS)
    find, fill = find_reached(e), fill_bitmap(e)

    def state() -> Any:
        return named(SimpleNamespace(
            norms=T.alloc_shared([ROWS * e.groups], "float32"), reached=T.alloc_shared([ROWS], "float32"),
            bounds=T.alloc_local([e.groups], "float32"), error=T.alloc_local([1], "float32"),
            low=T.alloc_local([1], "float32"), best=T.alloc_local([1], "int32"), left=T.alloc_local([1], "uint32")))

    @T.inline
    def body(io):
        T.device_entry()
        block, strip = T.cta_id([blocks, (io.rows + (ROWS - 1)) // ROWS])
        t = T.thread_id([e.threads])
        s = T.meta_var(state())
        if overlap:
            wait_then_start_consumer()
        find(io, s, strip * ROWS, t)
        fill(io, s, strip * ROWS, (block * e.warps + t // WARP) * WORDS, t)

    return gpu_program(problem, body, overlapped=overlap)
# fmt: on


def launch(problem: Screen, decisions: Decisions) -> Launch:
    return Launch(decisions["threads"])


def rows_program(problem: Screen, decisions: Decisions) -> Program:
    import tvm

    return Program(tvm.IRModule({"main": problem.by_slices(decisions["chunk"], parallel=True)}))


screen_words = Template(
    name="screen_words",
    version=1,
    operator="screen",
    kind="cuda",
    summary="a lane a word, its bounds in registers for sixteen rows",
    space=space,
    default=default,
    program=build,
    launch=launch,
    explicit_threads=True,
)
screen_slices = Template(
    name="screen_slices",
    version=1,
    operator="screen",
    kind="llvm",
    summary="threads take slices of rows",
    space=lambda problem, machine: {"chunk": CHUNK},
    default=lambda problem, machine: {"chunk": CHUNK[1]},
    program=rows_program,
)
TEMPLATES: tuple[Template, ...] = (screen_slices, screen_words)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (screen_slices,), "cuda": (screen_words,)}
