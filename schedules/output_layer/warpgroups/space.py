"""The space of the template made by `warpgroups`, and the extents its kernels are built from. Loads no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Launch, NotApplicable, Table, ceildiv
from tvm_sparse.operators.head_draw.problem import HeadDraw
from tvm_sparse.operators.head_topk.problem import SIXTEEN

from ..best.sizes import MAX_TILES_EACH, THREADS, VECTOR, dynamic_shared, require_ranks, search_allowed
from ..tiles.sizes import MAX_BLOCKS_Y, STEP, TileSizes, is_large, require_whole_vectors
from ..words import ExactHead, OutputLayer, best_of, draws_one, lists_of, most_words

# Rows of a tile: columns of operand B.
TILE_M = (32, 64, 128, 16, 8)
# Bytes of a row up to which `rings` has sixteen whole hidden states in registers. Wider rows are read in parts by
# `warp_rings`, which takes 236 us at (10, 64640, 7168), 218 us here; at (1, 64640, 7168) both take the same time.
WHOLE_BYTES = 11 * 1024
# Words of a tile: one or two fragments of operand A.
TILE_N = (16, 32)
# Warps of a block that multiply: whole warpgroups of four.
TILES = (4, 8, 12)
# Cache lines of a part of a row, of which a copy of 32 vectors brings whole rows or whole parts; and a warp's stages.
DEPTH, STAGES = (2, 1, 4), (2, 3, 4, 6)
# Parts of the hidden states that shared memory has.
HELD_PARTS = 3
# Thread blocks of the first kernel for each multiprocessor.
BLOCKS_EACH = (1, 2)
# Registers of a thread beside operands and sums.
BESIDES = 52
# The most tiles by whose largest scores a bound is found, for each lane of a warp, which has a register for each.
FIRST_EACH = 32
# Rows that are no more than few, and the cache lines of a wide row.
FEW_ROWS, MANY_LINES = 8, 16
# The cache lines of a narrow row, and the least rows of the small tiles that many of them have.
NARROW_LINES, SMALL_TILE = 2, 32
# A bound is found only if thread blocks multiply more tiles than this, one after the other.
LEAST_ROUNDS = 3
# Registers of a thread of the search kernel, by tiles of a thread, as in `best.sizes`. With 512 threads of 32 or 48
# registers it finds room beside the product kernel.
SEARCH_REGISTERS = {6: 32, 20: 48, MAX_TILES_EACH: 96}


def space(problem: OutputLayer, machine: Machine) -> Table:
    if not isinstance(problem, ExactHead):
        raise NotApplicable("words of candidates do not follow each other")
    if not machine.has_warpgroups:
        raise NotApplicable(f"{machine.arch} has no products of warpgroups (wgmma)")
    if (size := numpy_dtype(problem.dtype).itemsize) != 2:
        raise NotApplicable(f"{problem.dtype} is not of 16 bits")
    require_whole_vectors(problem)
    require_ranks(problem)
    if problem.batch <= SIXTEEN and problem.hidden * size <= WHOLE_BYTES:
        raise NotApplicable(
            f"head_rings holds whole rows of {problem.hidden} columns, and a tensor core's fragment all {problem.batch}"
        )
    if ceildiv(problem.batch, max(TILE_M)) > MAX_BLOCKS_Y:
        raise NotApplicable(f"{problem.batch} rows exceed an axis of the grid")
    most = ceildiv(most_words(problem), min(TILE_N))
    table = {
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * max(problem.batch, min(TILE_M))),
        "tile_n": TILE_N,
        "tiles": TILES,
        "depth": DEPTH,
        "stages": STAGES,
        "blocks": tuple(dict.fromkeys(min(most, machine.cores * n) for n in BLOCKS_EACH)),
        "threads": THREADS,
        "evict_first": (0, 1) if is_large(problem) else (0,),
        # Who asks for the probabilities of some words may ask for any, and needs all scores; a draw needs none.
        "gated": (0,) if isinstance(problem, HeadDraw) or problem.ids else (0, 1),
    }
    if next(likely_points(problem, machine, table), None) is None:
        raise NotApplicable(
            f"the scores of {most_words(problem)} words exceed the shared memory in which they are searched"
        )
    return table


def allowed(problem: OutputLayer, machine: Machine, decisions: Decisions) -> str | None:
    e = Extents.of(problem, decisions)
    if e.depth >= 2 * ceildiv(e.vectors, 8):
        return f"a part of {e.depth} cache lines is twice a row of {e.vectors} vectors, or more"
    if not machine.blocks_at_once(e.block_threads, e.held + BESIDES, 0):
        return f"{e.held} operands and sums in each of {e.block_threads} threads exceed the registers"
    if not machine.blocks_at_once(e.block_threads, 1, e.shared_bytes):
        return f"hidden states, rings and scores of {e.shared_bytes} bytes exceed a multiprocessor's shared memory"
    if e.gated and e.list_tiles <= e.stride:
        return f"thread blocks have all {e.list_tiles} tiles in hand at first: no bound would be found in time"
    if e.gated and e.k > e.first_tiles:
        return f"the largest scores of {e.first_tiles} tiles are no bound for the {e.k} best words"
    return search_allowed(e, machine)


def launch(problem: OutputLayer, decisions: Decisions) -> Launch:
    """The launch of the product kernel."""
    e = Extents.of(problem, decisions)
    return Launch(e.block_threads, e.pool_of_product)


def default(problem: OutputLayer, machine: Machine) -> Decisions:
    return next(likely_points(problem, machine, space(problem, machine)))


def few_tiles(problem: OutputLayer, machine: Machine) -> bool:
    """Whether one warpgroup of each multiprocessor has all tiles of the vocabulary at once."""
    return ceildiv(most_words(problem), TILE_N[0]) <= TILES[0] * machine.cores


def declines(problem: OutputLayer, machine: Machine) -> bool:
    """Whether another template is likely to be faster: for few rows of few words, warps that share each word's row.

    At (3, 4081, 8128) a draw took 37.8 us with warpgroups, 24.7 us by `warp_rings` and 27.7 us by `registers`.
    """
    return lists_of(problem)[1] <= FEW_ROWS and few_tiles(problem, machine)


def likely_points(problem: OutputLayer, machine: Machine, table: Table) -> Iterator[Decisions]:
    """Points of a table, the best first: all rows in a tile, and as many words as registers have room for. Few tiles go
    to as many thread blocks as there are, which have more bytes of wide rows in flight.

    Narrow hidden states, whose scores take longer than their products, have small tiles where these are at most two
    large ones, and the L2 cache has the words: 169 rows of 53,477 words of 128 columns took 39 us on an H200 with tiles
    of 32 rows, 51 with 64 and 69 with 128.

    Vocabularies whose scores such points have no room to search have any point that has.
    """
    rows, largest = lists_of(problem)[1], max(table["tile_m"])
    few, wide = few_tiles(problem, machine), problem.hidden * 2 >= MANY_LINES * STEP
    narrow = largest < rows <= 2 * largest and problem.hidden * 2 <= NARROW_LINES * STEP
    narrow = narrow and not few and not is_large(problem)
    fitting = sorted(tile for tile in table["tile_m"] if tile >= (SMALL_TILE if narrow else rows))
    enough = fitting or [largest]
    tiles, threads_of = (TILES[0], (256, 512, 1024)) if few else (8, (1024, 512) if narrow else (512, 1024))
    # Words per tile, depth and stages.
    shapes = [(16, 4, 4)] * (few and wide) + [(16, 1, 3)] * (few and not wide) + [(16, 1, 2)] * narrow
    shapes += [(16, 2, 3), (16, 2, 2), (16, 1, 2)]
    ways = itertools.product(enough, shapes, threads_of, table["gated"][::-1])
    for tile_m, (tile_n, depth, stages), threads, gated in ways:
        point = {"tile_m": tile_m, "tile_n": tile_n, "tiles": tiles, "depth": depth, "stages": stages}
        point |= {
            "blocks": table["blocks"][0],
            "threads": threads,
            "evict_first": max(table["evict_first"]),
            "gated": gated,
        }
        e = Extents.of(problem, point)
        # With few rounds of tiles, most tiles are among the first ones.
        if gated and e.list_tiles <= LEAST_ROUNDS * e.stride:
            continue
        # Where a thread has more tiles than registers, they are searched in another way.
        if threads < max(table["threads"]) and not (e.by_bits or e.draws):
            continue
        if allowed(problem, machine, point) is None:
            yield point
    for values in itertools.product(*table.values()):
        point = dict(zip(table, values, strict=True))
        if allowed(problem, machine, point) is None:
            yield point


extent = Derived["Extents", int]
whether = Derived["Extents", bool]


@dataclass(frozen=True)
class Extents(TileSizes):
    """What the kernels know before they run."""

    # Dtype and columns of hidden states and words.
    dtype: str
    hidden: int
    # Words to find in a row, and given words whose probabilities are wanted.
    k: int
    ids: int
    # The decisions of these names.
    tile_m: int
    tile_n: int
    tiles: int
    depth: int
    stages: int
    blocks: int
    threads: int
    evict_first: int
    gated: int
    # 16-byte vectors of a row.
    vectors: int
    # Tiles of the vocabulary.
    list_tiles: int
    # Whether a token is drawn: then sums of tiles are written, and no scores.
    draws: bool

    # All words of the vocabulary are in one list, and its tiles are dealt out beforehand.
    m, block, direct, dynamic = 0, 1, 0, 0
    # Each kernel starts beside the one before.
    overlap = 1

    @classmethod
    def of(cls, problem: OutputLayer, decisions: Decisions) -> Extents:
        return cls(
            problem.dtype,
            problem.hidden,
            best_of(problem),
            getattr(problem, "ids", 0),
            **decisions,
            vectors=problem.hidden * numpy_dtype(problem.dtype).itemsize // VECTOR,
            list_tiles=ceildiv(most_words(problem), decisions["tile_n"]),
            draws=draws_one(problem),
        )

    # Threads of a block of the first kernel that multiply.
    product_threads = extent(lambda e: 32 * e.tiles)
    # All threads of a block: with those of the producer warp, and of the warp that finds a bound.
    block_threads = extent(lambda e: e.product_threads + 32 * (1 + e.gated))
    # Tiles by whose largest scores a bound is found: some of those that all blocks have in hand at first.
    first_tiles = extent(lambda e: min(e.stride, e.list_tiles, 32 * FIRST_EACH))

    @property
    def search_registers(self) -> Mapping[int, int]:
        return SEARCH_REGISTERS

    # Groups of these tiles per lane: 4k groups in all lanes, or one for each tile if there are fewer tiles.
    groups_each = extent(lambda e: min(ceildiv(e.first_tiles, 32), ceildiv(4 * e.k, 32)))
    # Words per row in the workspace: ordered bits of the tiles' largest scores, followed by those of the bound, in
    # whole vectors.
    tops_pitch = extent(lambda e: ceildiv(e.list_tiles + 1, 4) * 4 if e.gated else e.list_tiles)
    # Turns in which the lanes of a warp have a row each.
    turns = extent(lambda e: ceildiv(e.tile_m, 32))
    # Steps of words, a cache line each, in registers.
    in_hand = extent(lambda e: min(e.depth, 2))
    # Registers of a thread for words in hand, and for sums.
    held = extent(lambda e: e.in_hand * e.tile_n + e.sums_each)
    # 16-byte vectors of a row's part.
    part_vectors = extent(lambda e: e.depth * STEP // VECTOR)
    # Parts of a row.
    parts = extent(lambda e: ceildiv(e.vectors, e.part_vectors))
    # Whether the last part reaches beyond a row's end.
    uneven = whether(lambda e: e.parts * e.part_vectors != e.vectors)
    # Bytes of a part of all hidden states.
    held_part_bytes = extent(lambda e: e.tile_m * e.depth * STEP)
    # Bytes of a stage of a warp's ring: a part of its words.
    stage_bytes = extent(lambda e: e.tile_n * e.depth * STEP)
    # Bytes of hidden states in shared memory, after which the rings begin.
    ring_at = extent(lambda e: HELD_PARTS * e.held_part_bytes)
    # Bytes of hidden states and rings, after which scores are passed on.
    passed_at = extent(lambda e: e.ring_at + e.tiles * e.stages * e.stage_bytes)
    # Bytes of the scores of 32 rows, of each warp.
    passed_bytes = extent(lambda e: e.tiles * 32 * e.pitch * 4)
    # Bytes of all these, after which there is one more word with `gated`.
    said_at = extent(lambda e: e.passed_at + e.passed_bytes)
    # Dynamic shared memory of the first kernel.
    pool_of_product = extent(lambda e: dynamic_shared(e.said_at + 16 * e.gated, 0))
    # Shared memory of the first kernel: dynamic, and two mbarriers per part.
    shared_bytes = extent(lambda e: e.pool_of_product + 16 * HELD_PARTS)
