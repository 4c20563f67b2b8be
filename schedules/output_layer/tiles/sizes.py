"""Sizes of the first kernel of `registers`, `rings` and `warp_rings`, and what of them fits. Loads no compiler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import REGISTER_FILE, Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Launch, NotApplicable, ceildiv, powers
from tvm_sparse.operators.head_topk.problem import word_size

from ..best.sizes import STATIC_SHARED, VECTOR, TileSearchSizes, dynamic_shared, require_ranks, search_allowed
from ..words import (
    OutputLayer,
    best_of,
    block_of,
    candidates_of,
    draws_one,
    groups_of,
    lists_of,
    most_words,
    stored_of,
    writes_scores,
)

# Vectors of hidden states that a thread holds if they are float32: the compiler also holds their parts.
MAX_SPLIT = 4
# Rows of hidden states of a tile: fragments of operand B, or of A beside eight tokens.
TILE_M = powers(8, 64)
# Tokens of a tile: one or two fragments of operand A; or one of operand B, in rings. So many lanes of a warp find a
# tile's largest score.
TILE_N, NARROW = (16, 32), 8
# Hidden states in shared memory and in registers, half of a warp's columns in each: of rows too long for either.
BOTH = 2
# Thread blocks of the first kernel for each multiprocessor, those of all lists together.
BLOCKS_EACH = (1, 2, 3, 4, 6)
# Thread blocks along the second axis of a grid.
MAX_BLOCKS_Y = 65535
# Bytes of a row above which shared memory has room for one block of a multiprocessor: a barrier would stop all of it.
WIDE = 4096
# Bytes of tokens above which the L2 cache of no machine holds them; from which on one of 50 MB does not keep all of
# them from call to call; and from which on rings have a default of their own.
CACHE, LARGE, MEDIUM = 48 * 2**20, 40 * 2**20, 16 * 2**20
# Registers of a thread for operands and sums, at most, in kernels with a ring; and those beside, in all kernels.
MAX_RING_HELD, BESIDES = 204, 40
# Bytes of tokens that all thread blocks together have brought into the L2 cache ahead: what memory brings while the
# second kernel of the call before runs.
PREFETCHED = 12 * 2**20
# MB of a vocabulary that stay in the L2 cache for the next call, as they are read as usual and all other tokens leave
# it first (scripts/probes/cached_words.cu), to whole rounds of all thread blocks.
CACHED = (0, 16, 24, 32, 8)
# Bytes of the part of a row that a warp multiplies in one step: a cache line.
STEP = 128
# Columns of a step, in 16 bits, and groups of columns whose scales a lane has in hand: those of the next one are loaded
# while one is multiplied.
STEP_COLUMNS, GROUPS_IN_HAND = STEP // 2, 2
# Floats between the rows of a tile's sums in shared memory beyond its tokens: keeps lanes off each other's banks.
PAD = 4
# Tiles that a thread block has in hand, at most, where each has a warp of its own.
MOST_TILES = 16


def word_bytes(problem: OutputLayer) -> int:
    """Bytes of all tokens of a list."""
    return most_words(problem) * problem.hidden * word_size(problem)


def is_large(problem: OutputLayer) -> bool:
    """Whether it reads a vocabulary, not candidates, of which the L2 cache keeps a part at most."""
    return not candidates_of(problem) and word_bytes(problem) > LARGE


def require_whole_vectors(problem: OutputLayer, eight_bits: bool = False) -> None:
    """NotApplicable unless rows start where loads of 16 bytes may, and for an embedding in eight bits unless the
    template takes `eight_bits`."""
    if (stored := stored_of(problem)) and not eight_bits:
        raise NotApplicable(f"multiplies no embedding in {stored}")
    if problem.hidden * word_size(problem) % VECTOR:
        dtype = stored or problem.dtype
        raise NotApplicable(f"rows of {problem.hidden} elements of {dtype} do not start on {VECTOR} bytes")


def require_tiles(problem: OutputLayer, machine: Machine, eight_bits: bool = False) -> None:
    """NotApplicable for what no template with tiles does; `eight_bits` as for `require_whole_vectors`."""
    if machine.capability < 80:
        raise NotApplicable(f"{machine.arch} has no tensor cores for bfloat16 and tf32")
    require_whole_vectors(problem, eight_bits)
    require_ranks(problem)
    lists, rows = lists_of(problem)
    if lists * ceildiv(rows, min(TILE_M)) > MAX_BLOCKS_Y:
        raise NotApplicable(f"{lists} lists of {rows} rows exceed an axis of the grid")


def require_bulk_copies(machine: Machine) -> None:
    """NotApplicable unless rings can be filled."""
    if not machine.has_clusters:
        raise NotApplicable(f"{machine.arch} has no bulk copies, which fill rings")


def require_octets(problem: OutputLayer) -> None:
    """NotApplicable for an embedding in eight bits, or scores of all words, that rings do not fit."""
    stored, groups = stored_of(problem), groups_of(problem)
    if stored and numpy_dtype(problem.dtype).itemsize != 2:
        raise NotApplicable(f"multiplies {stored} with hidden states of 16 bits")
    if groups and problem.hidden // groups % STEP_COLUMNS:
        raise NotApplicable(f"groups of {problem.hidden // groups} columns are no whole steps of {STEP_COLUMNS}")
    if writes_scores(problem) and problem.vocab % max(TILE_N):
        raise NotApplicable(f"rows of scores of {problem.vocab} words are no whole tiles of {max(TILE_N)}")


def no_room(problem: OutputLayer) -> NotApplicable:
    """The error of a template none of whose points fits."""
    return NotApplicable(
        f"hidden={problem.hidden} and lists of {most_words(problem)} tokens exceed registers or shared memory"
    )


def tile_rows(problem: OutputLayer, least: int = min(TILE_M)) -> tuple[int, ...]:
    """Rows that a tile may have: the fewest that cover all of a list's, taken to be `least` or more, and fewer."""
    rows = max(lists_of(problem)[1], least)
    return tuple(tile for tile in TILE_M if tile < 2 * rows)


def grid_sizes(problem: OutputLayer, machine: Machine) -> tuple[int, ...]:
    """Thread blocks of a list."""
    most, lists = ceildiv(most_words(problem), min(TILE_N)), lists_of(problem)[0]
    return tuple(sorted({min(most, max(1, machine.cores * n // lists)) for n in BLOCKS_EACH}))


def likely_cached(problem: OutputLayer) -> int:
    """MB that the L2 cache of a machine with rings, of 50 MB and more, keeps of a large vocabulary: less of one that
    sends more through it."""
    times = word_bytes(problem) / CACHE
    return 32 if times < 1.25 else 24 if times < 2 else 16


def product_allowed(e: Extents, most_held: int) -> str | None:
    """Why the first kernel has no such point; `most_held`: registers of a thread for operands and sums."""
    if e.prefetch and not e.overlap:
        return "tokens are brought into the L2 cache ahead while the producer kernel runs, with which this one overlaps"
    if e.prefetch and e.prefetched * e.stride * e.tile_bytes > CACHE:
        return "the first tiles of all warps exceed the L2 cache"
    if e.cached and not e.evict_first:
        return "tokens stay in the L2 cache where all others leave it first"
    # In rings of parts of rows in eight bits the last warps may have none: of 7,168 columns, in stages of 512.
    idle = e.stored != "" and not e.whole
    if e.reduce_warps > 1 and (e.reduce_warps - 1) * e.steps * 8 >= e.vectors and not idle:
        return f"the last of {e.reduce_warps} warps has no part of a row of {e.vectors} vectors"
    if e.held > most_held or (e.held + BESIDES) * e.product_threads > REGISTER_FILE:
        return f"{e.held} operands and sums in each of {e.product_threads} threads exceed the registers"
    if e.parts_bytes + e.barrier_bytes > STATIC_SHARED:
        return f"sums and barriers of {e.parts_bytes + e.barrier_bytes} bytes exceed shared memory of {STATIC_SHARED}"
    return None


def ring_allowed(e: Extents, machine: Machine) -> str | None:
    """Why no kernels with a ring have such a point."""
    if reason := product_allowed(e, MAX_RING_HELD):
        return reason
    if not machine.blocks_at_once(e.product_threads, 1, e.shared_bytes):
        return f"hidden states, a ring and sums of {e.shared_bytes} bytes exceed a multiprocessor's shared memory"
    return search_allowed(e, machine)


def launch(extents: Any) -> Any:
    """`Template.launch` of the first kernel, whose sizes are `extents(problem, decisions)`."""

    def of_product(problem: OutputLayer, decisions: Decisions) -> Launch:
        e = extents(problem, decisions)
        return Launch(e.product_threads, e.kept_bytes)

    return of_product


tile_sizes_extent = Derived["TileSizes", int]


class TileSizes(TileSearchSizes):
    """Sizes of the first kernels' tiles, those of `warpgroups` too: `tile_n` tokens by `tile_m` rows."""

    tile_m: int
    tiles: int  # of a thread block at a time

    @property
    def product_threads(self) -> int:
        """Threads of a block that multiply."""
        raise NotImplementedError

    # Tiles that all blocks have in hand together: from one tile of a warp or block to its next.
    stride = tile_sizes_extent(lambda e: e.blocks * e.tiles)
    # Groups of eight tokens in a tile.
    word_groups = tile_sizes_extent(lambda e: e.tile_n // 8)
    # Groups of eight rows of hidden states in a tile.
    row_groups = tile_sizes_extent(lambda e: e.tile_m // 8)
    # Sums of a tile that a lane has.
    sums_each = tile_sizes_extent(lambda e: e.tile_m * e.tile_n // 32)
    # Floats from one row of a tile's sums to the next.
    pitch = tile_sizes_extent(lambda e: e.tile_n + PAD)


extents_extent = Derived["Extents", int]
extents_whether = Derived["Extents", bool]


@dataclass(frozen=True, kw_only=True)
class Extents(TileSizes):
    """What the kernels know before they run.

    A template gives what it decides; the others stay at what they are here.

    Attributes
    ----------
    dtype, hidden
        The dtype and the columns of hidden states and tokens.
    k, ids
        Tokens to be found in a row, and tokens whose probabilities are wanted. `candidate_logits` finds none: 0.
    m
        Candidates of a list; 0 of the exact head.
    block
        Tokens of a candidate.
    beam
        Rows of a list; 0 of the exact head, whose batch may be any.
    draws
        Whether a token is drawn: then the first kernel writes sums of tiles, and no scores.
    stored, scale_groups
        The dtype of tokens in eight bits; empty of those in the dtype of the hidden states. Scales of a token, each of
        a group of columns; 0: it has one.
    vectors
        16-byte vectors of a hidden state.
    list_tiles
        Tiles of a list that is full.
    tile_m, tile_n, reduce_warps, tiles, depth, staged, blocks, threads, overlap, evict_first, prefetch, stages, direct,
    dynamic, cached
        As `schedules.vocabulary` has the decisions of these names.
    """

    dtype: str
    hidden: int
    k: int
    ids: int
    m: int
    block: int
    beam: int
    vectors: int
    list_tiles: int
    tile_m: int
    tile_n: int
    blocks: int
    threads: int
    reduce_warps: int = 8
    tiles: int = 1
    depth: int = 0
    staged: int = 0
    overlap: int = 1
    evict_first: int = 0
    prefetch: int = 0
    stages: int = 0
    direct: int = 0
    dynamic: int = 0
    cached: int = 0
    draws: bool = False
    stored: str = ""
    scale_groups: int = 0

    @classmethod
    def of(cls, problem: OutputLayer, decided: Decisions) -> Extents:
        """The sizes for a problem where these are not what they are by default."""
        return cls(
            dtype=problem.dtype,
            hidden=problem.hidden,
            k=best_of(problem),
            ids=getattr(problem, "ids", 0),
            m=candidates_of(problem),
            block=block_of(problem),
            beam=lists_of(problem)[1] if candidates_of(problem) else 0,
            draws=draws_one(problem),
            stored=stored_of(problem),
            scale_groups=groups_of(problem),
            vectors=problem.hidden * numpy_dtype(problem.dtype).itemsize // VECTOR,
            list_tiles=ceildiv(most_words(problem), decided["tile_n"]),
            **decided,
        )

    @property
    def steps(self) -> int:
        """Steps of a warp along a row; in a ring of parts of rows those of whole stages."""
        each = max(self.line_steps * self.depth, 1) if self.stages else 1
        return ceildiv(self.vectors, 8 * self.reduce_warps * each) * each

    # Threads of a block of the first kernel.
    product_threads = extents_extent(lambda e: 32 * e.reduce_warps * e.tiles)

    @property
    def words_second(self) -> bool:
        """Whether tokens are operand B of the product, and hidden states operand A; otherwise it is the other way. What
        a lane loads of a token is a fragment of B as it is, and half of two of A: so tokens of a ring are B where A has
        rows enough."""
        return self.tile_n == NARROW or (self.whole and self.dtype != "float32" and self.tile_m >= 16)

    # Groups of eight rows of operand A: two are a fragment.
    a_groups = extents_extent(lambda e: e.row_groups if e.words_second else e.word_groups)
    # Groups of eight rows of operand B: each is a fragment.
    b_groups = extents_extent(lambda e: e.word_groups if e.words_second else e.row_groups)
    # Steps of a cache line of a token's row.
    line_steps = extents_extent(lambda e: 2 if e.stored else 1)
    # Columns that share a scale, where a row has several; steps after which a warp's sums are multiplied by one; and
    # scales of a step that a lane has in hand, of the tokens of its sums.
    group_columns = extents_extent(lambda e: e.hidden // max(e.scale_groups, 1))
    group_steps = extents_extent(
        lambda e: math.gcd(e.group_columns // STEP_COLUMNS, e.steps) if e.scale_groups else e.steps
    )
    scales_each = extents_extent(lambda e: e.word_groups * 2 if e.words_second else e.word_groups)
    # Steps of tokens in registers.
    in_hand = extents_extent(lambda e: 1 if e.stages else e.depth)
    # Whether a stage has whole rows.
    whole = extents_whether(lambda e: e.stages > 0 and not e.depth)
    # Rings of a thread block: one, or one a warp.
    rings = extents_extent(lambda e: 1 if e.whole else e.product_threads // 32)
    # Steps of a warp in a stage.
    stage_steps = extents_extent(lambda e: e.steps if e.whole else e.line_steps * e.depth)
    # Stages of a tile.
    parts = extents_extent(lambda e: e.steps // e.stage_steps)
    # Bytes of a token's row.
    word_row = extents_extent(lambda e: e.hidden if e.stored else e.vectors * VECTOR)
    tile_bytes = extents_extent(lambda e: e.tile_n * e.word_row)
    # Tiles that a warp, or those that share one, have brought into the L2 cache ahead.
    prefetched = extents_extent(lambda e: max(1, PREFETCHED // (e.stride * e.tile_bytes)))
    # Tiles that each block or warp is given: all but the last of them, and those that are taken (`dynamic`).
    dealt_turns = extents_extent(lambda e: max(e.dealt(e.list_tiles), 1))

    def dealt(self, tiles: Any) -> Any:
        """How many rounds of `tiles` tiles are dealt out, each round a tile for each thread block or warp."""
        return tiles * (100 - self.dynamic) // (100 * self.stride)

    # How many of these stay in the L2 cache, of all blocks: as many as come nearest to `cached`.
    cached_turns = extents_extent(lambda e: min(round(e.cached * 2**20 / (e.stride * e.tile_bytes)), e.dealt_turns - 1))
    # Whether tokens that are constant are read before the producer kernel has ended: those of a vocabulary, where they
    # go to registers. A ring that is filled so early gains nothing on an H200: the wait takes longer by as much.
    early = extents_whether(lambda e: e.overlap > 0 and not e.m and not e.stages)

    @property
    def held(self) -> int:
        """Registers of a thread for tokens and hidden states in hand, and for sums."""
        states = self.held_steps * self.row_groups * 8
        split = 6 * self.row_groups + 12 if self.dtype == "float32" else 0
        operands = self.in_hand * self.tile_n + states + split + (4 * self.word_groups if self.stored else 0)
        operands += self.sums_each + GROUPS_IN_HAND * self.scales_each if self.scale_groups else 0
        return operands + self.sums_each + self.word_groups * 10 + 3 * self.pairs_each

    # Scores of a tile that a thread of the first kernel finishes.
    pairs_each = extents_extent(lambda e: ceildiv(e.tile_m * e.tile_n, e.product_threads) if e.reduce_warps > 1 else 1)

    @property
    def parts_bytes(self) -> int:
        """Static shared memory of the first kernel: sums of all warps, twice, as one tile is finished while the next
        one's are written; or what each warp knows of its rows."""
        if self.reduce_warps == 1:
            return self.tiles * self.tile_m * 8
        return 2 * self.reduce_warps * self.tile_m * self.pitch * 4

    # Steps of a warp whose hidden states stay in registers: the first ones.
    register_steps = extents_extent(lambda e: ceildiv(e.steps, 2) if e.staged == BOTH else 0 if e.staged else e.steps)
    # Those whose hidden states are in shared memory.
    kept_steps = extents_extent(lambda e: e.steps - e.register_steps)
    # Those whose hidden states are in registers at a time.
    held_steps = extents_extent(lambda e: e.register_steps + (e.kept_steps > 0))
    # Vectors of a hidden state in shared memory.
    kept_vectors = extents_extent(lambda e: e.kept_steps * 8 * e.reduce_warps)
    # Vectors of a row up to the last warp's last step.
    padded_vectors = extents_extent(lambda e: e.steps * 8 * e.reduce_warps)
    # Whether that is beyond a row's end.
    uneven = extents_whether(lambda e: e.padded_vectors != e.vectors)
    # Vectors from one hidden state in shared memory to the next: 4 beyond a multiple of 8, so that the two rows that
    # eight lanes read lie in different banks.
    kept_pitch = extents_extent(lambda e: (e.kept_vectors + 3) // 8 * 8 + 4)
    # Hidden states in shared memory. Beside a ring no row is there twice.
    kept_rows = extents_extent(lambda e: min(e.tile_m, e.beam) if e.stages and e.beam else e.tile_m)
    # Bytes of hidden states, after which the ring lies.
    ring_at = extents_extent(lambda e: e.kept_rows * e.kept_pitch * VECTOR if e.staged else 0)
    # Bytes from one row of a stage to the next: half a cache line beyond whole ones, as `kept_pitch` is. Whole rows lie
    # as they do in memory.
    ring_pitch = extents_extent(lambda e: e.word_row if e.whole else e.depth * STEP + STEP // 2)

    @property
    def rows_apart(self) -> int:
        """How far apart rows of a stage are that eight lanes read together: 1, 2 or 4, so that they lie in different
        banks of shared memory, if any two do."""
        return next((rows for rows in (1, 2, 4) if self.ring_pitch * rows % STEP == STEP // 2), 1)

    ring_bytes = extents_extent(lambda e: e.rings * e.stages * e.tile_n * e.ring_pitch)
    # Dynamic shared memory of the first kernel: of hidden states, and of a ring.
    kept_bytes = extents_extent(lambda e: dynamic_shared(e.ring_at + (e.ring_bytes if e.stages else 0), e.parts_bytes))
    # Static shared memory of a ring's barriers, and of the tiles that are taken.
    barrier_bytes = extents_extent(lambda e: (12 if e.dynamic else 8) * e.stages * e.rings)
    # Shared memory of the first kernel with a ring.
    shared_bytes = extents_extent(lambda e: e.kept_bytes + e.parts_bytes + e.barrier_bytes)
