"""The space of `registers`. Loads no compiler."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from tvm_sparse.core.machine import REGISTER_FILE, Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Table, ceildiv, powers

from ..best.sizes import THREADS, VECTOR, most_shared, search_allowed
from ..tiles import sizes
from ..tiles.sizes import (
    BESIDES,
    BLOCKS_EACH,
    CACHE,
    MAX_SPLIT,
    MOST_TILES,
    TILE_N,
    WIDE,
    Extents,
    grid_sizes,
    is_large,
    no_room,
    product_allowed,
    require_tiles,
    tile_rows,
    word_bytes,
)
from ..words import OutputLayer, best_of, candidates_of, lists_of, most_words

# Warps that share the columns of a row; 1: each has tiles of its own.
REDUCE_WARPS = powers(1, 16)
# Steps in hand, which divide those of a row.
DEPTH = (1, 2, 3, 4)
# Loads that a thread has in flight: as many as hide the latency of memory with few warps.
MAX_LOADS = 16
# Tokens times steps in hand of a warp with a tile of its own and eight rows: from there on the compiler spills.
MAX_ALONE = 64
# Steps of a warp in 16 bits, all of which are written out; those of float32, with three products each, count twice.
# More take the compiler minutes.
MAX_STEPS = 128
# Registers of a thread for operands and sums.
MAX_HELD = 188
# Tokens of a short list.
SHORT = 8192
# Pairs (tokens, threads): the default for lists of up to `tokens` tokens is a search by `threads` threads.
SEARCHED = ((512, 256), (16384, 512))
# Rows of hidden states that are many, and bytes of a narrow one: 5956 rows of 64 columns in float32 took 0.67 times as
# long in tiles of 32 rows as in tiles of 16 on an H200, 613 of them 0.78 times.
MANY_ROWS, NARROW_ROW = 256, 512
# Warps of a multiprocessor that multiply tokens which the L2 cache holds.
RESIDENT_WARPS = 16


def extents(problem: OutputLayer, decisions: Decisions) -> Extents:
    """The sizes of one point. Warps that have tiles of their own are as many as there are registers for."""
    e = Extents.of(problem, decisions)
    if e.reduce_warps > 1:
        return e
    each = (e.held + BESIDES) * 32
    fit = [tiles for tiles in powers(1, MOST_TILES) if each * tiles <= REGISTER_FILE]
    return dataclasses.replace(e, tiles=max(fit, default=1))


def space(problem: OutputLayer, machine: Machine) -> Table:
    require_tiles(problem, machine)
    overlaps = (0, 1) if machine.has_clusters else (0,)
    table = {
        "tile_m": tile_rows(problem),
        "tile_n": TILE_N,
        "reduce_warps": REDUCE_WARPS,
        "depth": DEPTH,
        "staged": (0, 1),
        "blocks": grid_sizes(problem, machine),
        "threads": THREADS if best_of(problem) else THREADS[:1],
        # A product alone may be short enough that it is no gain.
        "overlap": overlaps[-1:] if best_of(problem) else overlaps,
        # Tokens that the L2 cache holds are to stay, and to take the place of what other kernels left there: lines that
        # leave first never do. A part of more tokens than that stays if it is not always the oldest one that leaves.
        "evict_first": (0, 1) if is_large(problem) else (0,),
        # Which tokens candidates are may be for the producer kernel to say.
        "prefetch": (0,) if candidates_of(problem) or not machine.has_clusters else (0, 1),
    }
    if next(likely_points(problem, machine, table), None) is None:
        raise no_room(problem)
    return table


def allowed(problem: OutputLayer, machine: Machine, decisions: Decisions) -> str | None:
    return refusal(extents(problem, decisions), machine)


def refusal(e: Extents, machine: Machine) -> str | None:
    """Why a point with these sizes is left out; None if it is not."""
    if e.steps * (2 if e.dtype == "float32" else 1) > MAX_STEPS:
        return f"{e.steps} steps written out in {e.dtype} take the compiler too long"
    if e.steps % e.depth:
        return f"{e.depth} steps in hand do not divide the {e.steps} of a row"
    if e.depth * (e.tile_n // 4) > MAX_LOADS:
        return f"{e.depth * (e.tile_n // 4)} loads in flight exceed {MAX_LOADS}"
    if e.reduce_warps == 1 and e.tile_m == 8 and e.depth * e.tile_n >= MAX_ALONE:
        return "the compiler spills to reach the 128 registers of a higher occupancy"
    if reason := product_allowed(e, MAX_HELD):
        return reason
    if e.kept_bytes + e.parts_bytes > (limit := most_shared(machine)):
        return f"{e.tile_m} hidden states of {e.kept_bytes} bytes exceed shared memory of {limit}"
    if reason := search_allowed(e, machine):
        return reason
    if e.staged == 0 and e.dtype == "float32" and e.steps * e.row_groups > MAX_SPLIT:
        return f"{e.steps * e.row_groups} vectors of hidden states, split for tf32, exceed {MAX_SPLIT} in registers"
    return None


def default(problem: OutputLayer, machine: Machine) -> Decisions:
    return next(likely_points(problem, machine, space(problem, machine)))


def few_wide_rows(problem: OutputLayer, machine: Machine, table: Table) -> Decisions:
    """The best point for up to eight wide rows of 16 bits, where whole rows find no room in a ring."""
    blocks = min(table["blocks"], key=lambda blocks: abs(blocks - machine.cores))
    point = {"tile_m": 8, "tile_n": 32, "reduce_warps": 8, "depth": 1, "staged": 0, "blocks": blocks}
    return point | {"threads": 1024, "overlap": 1, "evict_first": 0, "prefetch": 0}


def usual_threads(problem: OutputLayer, table: Table) -> tuple[int, ...]:
    """Threads of the search, the likely ones first: the more tokens the more."""
    wanted = next((threads for tokens, threads in SEARCHED if most_words(problem) <= tokens), THREADS[-1])
    return tuple(sorted(table["threads"], key=lambda threads: abs(math.log2(threads / wanted))))


def even(problem: OutputLayer) -> bool:
    """Whether each of eight warps that share a tile has a part of every row."""
    vectors, warps = problem.hidden * numpy_dtype(problem.dtype).itemsize // VECTOR, 8
    return (warps - 1) * ceildiv(vectors, 8 * warps) * 8 < vectors


def likely_points(problem: OutputLayer, machine: Machine, table: Table) -> Iterator[Decisions]:
    """Points of a table, the best first: all rows in a tile, if there is room, and eight warps that share it. With wide
    rows each warp has a tile of its own, unless registers hold all hidden states. If the L2 cache holds the tokens,
    they are read again by tiles of fewer rows, of which there are more.
    """
    (lists, rows), size = lists_of(problem), numpy_dtype(problem.dtype).itemsize
    wide, halves = problem.hidden * size > WIDE, size == 2
    if wide and halves and not candidates_of(problem) and rows <= 8 and is_large(problem) and machine.has_clusters:
        point = few_wide_rows(problem, machine, table)
        if allowed(problem, machine, point) is None:
            yield point
    shared = [(reduce_warps, 1, staged) for staged in (1, 0) for reduce_warps in (8, 16, 4, 2)]
    alone = [(1, tiles, 1) for tiles in reversed(powers(4, MOST_TILES))] + [(1, 1, 1)]
    in_registers = [(8, 1, 0), (4, 1, 0)]
    # Large tiles where there are many, with as many loads in flight.
    many = not wide and word_bytes(problem) > CACHE
    # For one short list of candidates of a beam, large tiles, which are few.
    listed = bool(candidates_of(problem))
    short = listed and lists == 1 and rows <= 16 and most_words(problem) <= SHORT and not wide
    cached = not (wide or many or short or is_large(problem))
    # Eight warps do not share each of these rows in equal parts: where tiles are many, fewer warps in more thread
    # blocks. Small tiles end sooner, and have as many loads in flight if a warp loads its whole part of a row at once.
    uneven = many and halves and not even(problem)
    # Lists of wide rows in float32: warps with tiles of their own would be few, and each has the hidden states again.
    split = wide and listed and not halves
    # Many narrow rows of float32 have few sums in flight: larger tiles, of which a multiprocessor has a thread block.
    many_narrow = cached and not halves and not listed and rows >= MANY_ROWS and problem.hidden * size <= NARROW_ROW
    kinds = in_registers if wide else shared
    depths = (1, 2, 3, 4) if many or short else (2, 4, 1, 3) if wide else (2, 1, 3, 4)
    if uneven:
        kinds, depths = shared[4:] + shared[:4], (3, 4, 2, 1)
    if cached:
        kinds = [kind for kind in shared[4:] + shared[:4] if halves or kind in shared[:4]]
        depths = (2, 1, 3, 4) if halves else (3, 2, 4, 1)
        if many_narrow:
            kinds, depths = alone + shared, (1, 2, 3, 4)
        elif rows > 16 and (halves or not listed):  # several tiles of rows: more thread blocks of fewer warps
            kinds.sort(key=lambda kind: kind[0])
    tiles_m = table["tile_m"][::-1]
    if (cached or split) and not many_narrow:
        # Where there are few tiles of tokens, tiles of eight rows are more.
        few = 8 if rows <= 16 and lists * ceildiv(most_words(problem), TILE_N[0]) < 2 * machine.cores else 16
        tiles_m = (*(tile for tile in tiles_m if tile <= few), *(tile for tile in tiles_m if tile > few))
    for tile_m in tiles_m:
        for tile_n, (reduce_warps, tiles, staged), depth, threads in itertools.product(
            table["tile_n"][:: -1 if (many or short) and not uneven else 1],
            shared if split else kinds[tile_m > 8 :] + alone + shared if wide else kinds + alone,
            depths,
            usual_threads(problem, table),
        ):
            each = 0 if tiles > 1 or short else 2 if wide and reduce_warps == 4 else 1
            blocks = table["blocks"][min(each, len(table["blocks"]) - 1)]
            if cached or uneven:
                each = 1 if many_narrow else max(n for n in BLOCKS_EACH if n == 1 or n * reduce_warps <= RESIDENT_WARPS)
                blocks = min(table["blocks"], key=lambda blocks: abs(blocks * lists - each * machine.cores))
            point = {
                "tile_m": tile_m,
                "tile_n": tile_n,
                "reduce_warps": reduce_warps,
                "depth": depth,
                "staged": staged,
                "blocks": blocks,
                "threads": threads,
                "overlap": max(table["overlap"]),
                "evict_first": 0 if uneven else max(table["evict_first"]),
                # Narrow tokens of 16 bits: thread blocks ask for no more ahead than the second kernel leaves time for.
                "prefetch": max(table["prefetch"]) if (many if halves else cached and rows <= 16) else 0,
            }
            e = extents(problem, point)
            if e.tiles == tiles and refusal(e, machine) is None:
                yield point


launch = sizes.launch(extents)
