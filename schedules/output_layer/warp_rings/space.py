"""The space of `warp_rings`. Loads no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Table, ceildiv
from tvm_sparse.operators.head_topk.problem import word_size

from ..best.sizes import MAX_DIRECT, THREADS, VECTOR
from ..registers.space import allowed as allowed_in_registers
from ..registers.space import few_wide_rows
from ..tiles import sizes
from ..tiles.sizes import (
    BOTH,
    CACHED,
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
)
from ..words import OutputLayer, best_of, candidates_of, lists_of, most_words, stored_of

# Tiles of a thread block, each with a warp of its own. Rings fill shared memory, so that not all are powers of two.
TILES = (4, 6, 8, 10, 12)
# Cache lines of a row's part, of lists and of vocabularies; and stages: more were never faster.
DEPTH, WIDE_DEPTH, STAGES = (1, 2, 3, 4, 5, 8), (2, 3, 4, 5), (2, 3)
# Points that are likely to be good for up to eight rows and for more: `tile_n`, `depth`, `staged` and `stages`.
LIKELY_FEW = ((16, 4, 0, 3), (16, 3, 0, 3), (16, 2, BOTH, 3), (16, 2, BOTH, 2))
LIKELY_MANY = ((16, 2, 0, 3), (16, 2, 0, 2), (NARROW, 4, BOTH, 2), (16, 2, BOTH, 2))
# Tokens of a list from which on it is likely to be faster.
SHORTEST = 512


def extents(problem: OutputLayer, decisions: Decisions) -> Extents:
    """The sizes of one point. All scores of a short list are searched at once."""
    if not candidates_of(problem):
        return Extents.of(problem, decisions)
    direct = best_of(problem) > 0 and most_words(problem) <= MAX_DIRECT
    constant = {"tile_m": 8, "tile_n": TILE_N[0], "reduce_warps": 1, "staged": 1, "direct": int(direct)}
    return Extents.of(problem, {**decisions, **constant})


def space(problem: OutputLayer, machine: Machine) -> Table:
    require_tiles(problem, machine, eight_bits=True)
    require_bulk_copies(machine)
    require_octets(problem)
    threads = THREADS if best_of(problem) else THREADS[:1]
    if candidates_of(problem):
        if lists_of(problem)[1] > 1:
            raise NotApplicable("warps have tiles of their own for one row of hidden states: lists of one row each")
        table = {"tiles": TILES, "depth": DEPTH, "blocks": grid_sizes(problem, machine)}
        table |= {"threads": threads, "stages": STAGES}
    else:
        if numpy_dtype(problem.dtype).itemsize != 2 or problem.hidden * word_size(problem) <= WIDE:
            dtype = stored_of(problem) or problem.dtype
            raise NotApplicable(f"rows of {problem.hidden} {dtype} have room in `rings` or `registers`")
        tile_m = tile_rows(problem, 16 if is_large(problem) else 8)
        table = {
            "tile_m": tile_m,
            "tile_n": (TILE_N[0],) + (NARROW,) * (max(tile_m) > 8),
            "depth": WIDE_DEPTH,
            "staged": (0,) + (BOTH,) * (max(tile_m) > 8),
            "blocks": grid_sizes(problem, machine),
            "threads": threads[1:],
            "evict_first": (0, 1) if is_large(problem) else (0,),
            "prefetch": (0, 1),
            "stages": STAGES,
            "cached": CACHED if is_large(problem) else (0,),
        }
    if next(_points(problem, machine, table), None) is None:
        raise no_room(problem)
    return table


def allowed(problem: OutputLayer, machine: Machine, decisions: Decisions) -> str | None:
    e = extents(problem, decisions)
    if e.tile_n == NARROW and (e.tile_m == 8 or e.staged != BOTH):
        return "eight tokens are an operand beside 16 rows, with hidden states in two places"
    if e.depth >= 2 * ceildiv(e.word_row, STEP * e.reduce_warps):
        return f"a stage of {e.depth} cache lines is twice what a warp has of a row of {e.word_row} bytes, or more"
    return ring_allowed(e, machine)


def default(problem: OutputLayer, machine: Machine) -> Decisions:
    return next(_points(problem, machine, space(problem, machine)))


def declines(problem: OutputLayer, machine: Machine) -> bool:
    """Whether another template is likely to be faster."""
    table = space(problem, machine)
    point = next(likely_points(problem, machine, table), None)
    if point is None or point.get("staged") != BOTH or lists_of(problem)[1] > 8 or stored_of(problem):
        return point is None
    return allowed_in_registers(problem, machine, few_wide_rows(problem, machine, table)) is None


def likely_points(problem: OutputLayer, machine: Machine, table: Table) -> Iterator[Decisions]:
    """Points of a table that are likely to be the best of all templates', the best first; all are of 16 bits."""
    if numpy_dtype(problem.dtype).itemsize != 2:
        return
    blocks = min(table["blocks"], key=lambda blocks: abs(blocks - machine.cores // lists_of(problem)[0]))
    for point in _likely_lists(problem, table) if candidates_of(problem) else _likely_vocabularies(problem):
        point = {name: point.get(name, blocks) for name in table}
        if allowed(problem, machine, point) is None:
            yield point


def _likely_lists(problem: OutputLayer, table: Table) -> Iterator[Decisions]:
    """Without `blocks`, of which a multiprocessor has one: stages of a kilobyte a token, or of half as much."""
    if most_words(problem) >= SHORTEST:
        stages = ((8, 2), (4, 3), (4, 2))
        for depth, count in stages if problem.hidden * 2 > WIDE else stages[::-1]:
            yield {"tiles": 6, "depth": depth, "stages": count, "threads": max(table["threads"])}


def _likely_vocabularies(problem: OutputLayer) -> Iterator[Decisions]:
    """Without `blocks`, of which a multiprocessor has one: large vocabularies of rows that are too wide for `rings`."""
    rows = lists_of(problem)[1]
    if stored_of(problem):
        rows = min(rows, 16)  # at a time
    if rows > 16 or not is_large(problem):
        return
    for tile_n, depth, staged, stages in LIKELY_FEW if rows <= 8 else LIKELY_MANY:
        early = rows <= 8 or staged == BOTH
        point = {"tile_m": 8 if rows <= 8 else 16, "tile_n": tile_n, "depth": depth, "staged": staged}
        point |= {"stages": stages, "threads": THREADS[-1 if early else 1], "evict_first": int(early)}
        point["prefetch"] = int(early and (rows > 8 or staged != BOTH))
        point["cached"] = likely_cached(problem) if early else 0
        # Stages of one part more than a row has would be half empty.
        if early or ceildiv(problem.hidden * word_size(problem), VECTOR * 64) % depth == 0:
            yield point


def _points(problem: OutputLayer, machine: Machine, table: Table) -> Iterator[Decisions]:
    """The likely points of a table, then others: all rows in a tile, if there is room, and little else."""
    yield from likely_points(problem, machine, table)
    names = [name for name in ("tiles", "tile_m", "tile_n", "staged", "depth", "stages", "threads") if name in table]
    least = {name: values[0] for name, values in table.items()}
    order = {**table, **({"tile_m": table["tile_m"][::-1]} if "tile_m" in table else {})}
    for values in itertools.product(*(order[name] for name in names)):
        if allowed(problem, machine, point := {**least, **dict(zip(names, values, strict=True))}) is None:
            yield point


launch = sizes.launch(extents)
