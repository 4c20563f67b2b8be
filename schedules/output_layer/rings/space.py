"""The space of `rings`. Loads no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Table
from tvm_sparse.operators.head_draw.problem import HeadDraw
from tvm_sparse.operators.head_topk.problem import word_size

from ..best.sizes import SEARCH_REGISTERS, THREADS
from ..tiles import sizes
from ..tiles.sizes import (
    CACHED,
    MAX_SPLIT,
    MEDIUM,
    NARROW,
    STEP,
    TILE_N,
    WIDE,
    Extents,
    grid_sizes,
    is_large,
    likely_cached,
    no_room,
    require_bulk_copies,
    require_octets,
    require_tiles,
    ring_allowed,
    tile_rows,
    word_bytes,
)
from ..warp_rings import space as warp_rings
from ..words import OutputLayer, candidates_of, lists_of, most_words, stored_of

# Stages of the ring: more were never faster with 16-bit numbers. With 8-bit ones the number of stages is a decision:
# while warps convert a tile, which takes them longer, loads of other tiles are in flight.
STAGES, EIGHT_BIT_STAGES = 2, (2, 3, 4)
# Tiles of each of two thread blocks of a multiprocessor that are few.
FEW_TILES = 4
# Percent of the tiles that thread blocks take as they come to them; the others are dealt out.
DYNAMIC = (0, 12, 25, 6)
LIKELY_DYNAMIC = 12


def extents(problem: OutputLayer, decisions: Decisions) -> Extents:
    """The sizes of one point."""
    return Extents.of(problem, {"stages": STAGES, **decisions})


def space(problem: OutputLayer, machine: Machine) -> Table:
    if candidates_of(problem):
        raise NotApplicable("tokens of candidates do not follow each other")
    require_tiles(problem, machine, eight_bits=True)
    require_bulk_copies(machine)
    halves, stored = numpy_dtype(problem.dtype).itemsize == 2, stored_of(problem)
    require_octets(problem)
    # For no more than eight rows a fragment has twice as many, which leaves room for more of each token.
    tile_m = tile_rows(problem, 16 if halves and is_large(problem) else 8)
    table = {
        "tile_m": tile_m,
        "tile_n": (TILE_N[0],) + (NARROW,) * (halves and max(tile_m) > 8),
        "staged": (0, 1),
        "blocks": grid_sizes(problem, machine),
        "threads": THREADS[1:],
        # Tokens that the L2 cache holds are to stay.
        "evict_first": (int(is_large(problem)),),
        "prefetch": (0, 1),
        "dynamic": DYNAMIC,
        "cached": CACHED if is_large(problem) else (0,),
    }
    if stored:
        table["stages"] = EIGHT_BIT_STAGES
    if next(_points(problem, machine, table), None) is None:
        raise no_room(problem)
    return table


def allowed(problem: OutputLayer, machine: Machine, decisions: Decisions) -> str | None:
    e = extents(problem, decisions)
    if e.tile_n == NARROW and e.tile_m == 8:
        return "eight tokens are an operand beside 16 rows"
    if e.dtype == "float32" and (1 if e.staged else e.steps) * e.row_groups > MAX_SPLIT:
        return f"{e.steps} steps of {e.tile_m} hidden states, split for tf32, exceed {MAX_SPLIT} vectors in registers"
    return ring_allowed(e, machine)


def default(problem: OutputLayer, machine: Machine) -> Decisions:
    return next(_points(problem, machine, space(problem, machine)))


def declines(problem: OutputLayer, machine: Machine) -> bool:
    """Whether another template is likely to be faster: of those with tensor cores only `warp_rings` reads eight bits,
    too, of long rows.
    """
    if next(likely_points(problem, machine, space(problem, machine)), None) is not None:
        return False
    try:
        return not stored_of(problem) or not warp_rings.declines(problem, machine)
    except NotApplicable:
        return False


def likely_points(problem: OutputLayer, machine: Machine, table: Table) -> Iterator[Decisions]:
    """Points of a table that are likely to be the best of all templates', the best first."""
    rows, halves = lists_of(problem)[1], numpy_dtype(problem.dtype).itemsize == 2
    if stored_of(problem):
        rows = min(rows, 16)  # at a time
    row, large = problem.hidden * word_size(problem), is_large(problem)
    wide, aligned = row > WIDE, row % STEP == 0
    if rows > 16 or not large and (wide or word_bytes(problem) < MEDIUM):
        return
    # Registers are as fast where rows end as cache lines do, unless a part of a large vocabulary stays cached.
    if not (halves if wide else halves or not aligned if large else halves and not aligned):
        return
    once, twice = (min(table["blocks"], key=lambda blocks: abs(blocks - n * machine.cores)) for n in (1, 2))
    point = {"tile_m": 8 if rows <= 8 else 16, "tile_n": TILE_N[0], "staged": 0, "blocks": once if wide else twice}
    point |= {"threads": 1024, "evict_first": int(large), "prefetch": 1, "dynamic": LIKELY_DYNAMIC * large}
    point["cached"] = likely_cached(problem) if large else 0
    if not wide:
        # With few tiles a thread, few threads find room beside the first kernel's.
        many = most_words(problem) > TILE_N[0] * THREADS[1] * min(SEARCH_REGISTERS)
        point["threads"] = THREADS[2] if large and many else THREADS[1]
        # With few tiles a thread block, two of a multiprocessor load hidden states for little: a draw at
        # (7, 12345, 1920) took 20.3 us with them, 13.8 with one and more threads that search.
        few = most_words(problem) < FEW_TILES * TILE_N[0] * 2 * machine.cores
        if large and few and isinstance(problem, HeadDraw):
            point |= {"blocks": once, "threads": THREADS[-1]}
        if not halves:
            point |= {"staged": 1, "blocks": once, "prefetch": 0, "dynamic": 0}
    choices = [point]
    if "stages" in table:
        point["stages"] = STAGES
        # Two thread blocks of a multiprocessor with two tiles each exceed its shared memory: one, with a third tile.
        # At (1, 128256, 4096) int8 takes 122 us with all tiles dealt out and 144 with 12 % taken as thread blocks come
        # to them, float8_e4m3fn 156 and 117.
        if large and 2 * STAGES * TILE_N[0] * row > machine.block_shared_bytes:
            point["blocks"] = once
            if rows <= 8:
                dealt = {"dynamic": 0} if stored_of(problem) == "int8" else {}
                choices.insert(0, point | dealt | {"stages": STAGES + 1})
    # There may be room for two tiles of eight tokens of wide rows, beside a fragment that has more rows than there are.
    if wide:
        choices.append(point | {"tile_m": 16, "tile_n": NARROW})
    for choice in choices:
        if allowed(problem, machine, choice) is None:
            yield choice


def _points(problem: OutputLayer, machine: Machine, table: Table) -> Iterator[Decisions]:
    """The likely points of a table, then others: all rows in a tile, if there is room."""
    yield from likely_points(problem, machine, table)
    ways = itertools.product(reversed(table["tile_m"]), table["tile_n"], table["staged"], table["threads"][::-1])
    for tile_m, tile_n, staged, threads in ways:
        point = {"tile_m": tile_m, "tile_n": tile_n, "staged": staged, "blocks": table["blocks"][0]}
        point |= {"threads": threads, "evict_first": table["evict_first"][0], "prefetch": 0, "dynamic": 0, "cached": 0}
        point |= {"stages": STAGES} if "stages" in table else {}
        if allowed(problem, machine, point) is None:
            yield point


launch = sizes.launch(extents)
