"""Sizes of the first kernel of `registers`, `rings` and `warp_rings`, and what of them fits. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.machine import REGISTER_FILE, Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Launch, NotApplicable, ceildiv, powers
from tvm_sparse.operators.head_topk.problem import word_size

from ..best.sizes import STATIC_SHARED, VECTOR, TileSearchSizes, dynamic_shared, require_ranks, search_allowed
from ..words import OutputLayer, best_of, block_of, candidates_of, draws_one, lists_of, most_words, stored_of

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
    if e.reduce_warps > 1 and (e.reduce_warps - 1) * e.steps * 8 >= e.vectors:
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


class TileSizes(TileSearchSizes):
    """Sizes of the first kernels' tiles, those of `warpgroups` too: `tile_n` tokens by `tile_m` rows."""

    tile_m: int
    tiles: int  # of a thread block at a time

    @property
    def product_threads(self) -> int:
        """Threads of a block that multiply."""
        raise NotImplementedError

    @property
    def stride(self) -> int:
        """Tiles that all blocks have in hand together: from one tile of a warp or block to its next."""
        return self.blocks * self.tiles

    @property
    def word_groups(self) -> int:
        """Groups of eight tokens in a tile."""
        return self.tile_n // 8

    @property
    def row_groups(self) -> int:
        """Groups of eight rows of hidden states in a tile."""
        return self.tile_m // 8

    @property
    def sums_each(self) -> int:
        """Sums of a tile that a lane has."""
        return self.tile_m * self.tile_n // 32

    @property
    def pitch(self) -> int:
        """Floats from one row of a tile's sums to the next."""
        return self.tile_n + PAD


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
    stored
        The dtype of tokens in eight bits; empty of those in the dtype of the hidden states.
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
            vectors=problem.hidden * numpy_dtype(problem.dtype).itemsize // VECTOR,
            list_tiles=ceildiv(most_words(problem), decided["tile_n"]),
            **decided,
        )

    @property
    def steps(self) -> int:
        """Steps of a warp along a row; in a ring of parts of rows those of whole stages."""
        each = max(self.depth, 1) if self.stages else 1
        return ceildiv(self.vectors, 8 * self.reduce_warps * each) * each

    @property
    def product_threads(self) -> int:
        """Threads of a block of the first kernel."""
        return 32 * self.reduce_warps * self.tiles

    @property
    def words_second(self) -> bool:
        """Whether tokens are operand B of the product, and hidden states operand A; otherwise it is the other way. What
        a lane loads of a token is a fragment of B as it is, and half of two of A: so tokens of a ring are B where A has
        rows enough."""
        return self.tile_n == NARROW or (self.whole and self.dtype != "float32" and self.tile_m >= 16)

    @property
    def a_groups(self) -> int:
        """Groups of eight rows of operand A: two are a fragment."""
        return self.row_groups if self.words_second else self.word_groups

    @property
    def b_groups(self) -> int:
        """Groups of eight rows of operand B: each is a fragment."""
        return self.word_groups if self.words_second else self.row_groups

    @property
    def in_hand(self) -> int:
        """Steps of tokens in registers."""
        return 1 if self.stages else self.depth

    @property
    def whole(self) -> bool:
        """Whether a stage has whole rows."""
        return self.stages > 0 and not self.depth

    @property
    def rings(self) -> int:
        """Rings of a thread block: one, or one a warp."""
        return 1 if self.whole else self.product_threads // 32

    @property
    def stage_steps(self) -> int:
        """Steps of a warp in a stage."""
        return self.steps if self.whole else self.depth

    @property
    def parts(self) -> int:
        """Stages of a tile."""
        return self.steps // self.stage_steps

    @property
    def word_row(self) -> int:
        """Bytes of a token's row."""
        return self.hidden if self.stored else self.vectors * VECTOR

    @property
    def tile_bytes(self) -> int:
        return self.tile_n * self.word_row

    @property
    def prefetched(self) -> int:
        """Tiles that a warp, or those that share one, have brought into the L2 cache ahead."""
        return max(1, PREFETCHED // (self.stride * self.tile_bytes))

    @property
    def dealt_turns(self) -> int:
        """Tiles that each block or warp is given: all but the last of them, and those that are taken (`dynamic`)."""
        return max(self.dealt(self.list_tiles), 1)

    def dealt(self, tiles: Any) -> Any:
        """How many rounds of `tiles` tiles are dealt out, each round a tile for each thread block or warp."""
        return tiles * (100 - self.dynamic) // (100 * self.stride)

    @property
    def cached_turns(self) -> int:
        """How many of these stay in the L2 cache, of all blocks: as many as come nearest to `cached`."""
        return min(round(self.cached * 2**20 / (self.stride * self.tile_bytes)), self.dealt_turns - 1)

    @property
    def early(self) -> bool:
        """Whether tokens that are constant are read before the producer kernel has ended: those of a vocabulary, where
        they go to registers. A ring that is filled so early gains nothing on an H200: the wait takes longer by as much.
        """
        return self.overlap > 0 and not self.m and not self.stages

    @property
    def held(self) -> int:
        """Registers of a thread for tokens and hidden states in hand, and for sums."""
        states = self.held_steps * self.row_groups * 8
        split = 6 * self.row_groups + 12 if self.dtype == "float32" else 0
        operands = self.in_hand * self.tile_n + states + split + (4 * self.word_groups if self.stored else 0)
        return operands + self.sums_each + self.word_groups * 10 + 3 * self.pairs_each

    @property
    def pairs_each(self) -> int:
        """Scores of a tile that a thread of the first kernel finishes."""
        return ceildiv(self.tile_m * self.tile_n, self.product_threads) if self.reduce_warps > 1 else 1

    @property
    def parts_bytes(self) -> int:
        """Static shared memory of the first kernel: sums of all warps, twice, as one tile is finished while the next
        one's are written; or what each warp knows of its rows."""
        if self.reduce_warps == 1:
            return self.tiles * self.tile_m * 8
        return 2 * self.reduce_warps * self.tile_m * self.pitch * 4

    @property
    def register_steps(self) -> int:
        """Steps of a warp whose hidden states stay in registers: the first ones."""
        return ceildiv(self.steps, 2) if self.staged == BOTH else 0 if self.staged else self.steps

    @property
    def kept_steps(self) -> int:
        """Those whose hidden states are in shared memory."""
        return self.steps - self.register_steps

    @property
    def held_steps(self) -> int:
        """Those whose hidden states are in registers at a time."""
        return self.register_steps + (self.kept_steps > 0)

    @property
    def kept_vectors(self) -> int:
        """Vectors of a hidden state in shared memory."""
        return self.kept_steps * 8 * self.reduce_warps

    @property
    def padded_vectors(self) -> int:
        """Vectors of a row up to the last warp's last step."""
        return self.steps * 8 * self.reduce_warps

    @property
    def uneven(self) -> bool:
        """Whether that is beyond a row's end."""
        return self.padded_vectors != self.vectors

    @property
    def kept_pitch(self) -> int:
        """Vectors from one hidden state in shared memory to the next: 4 beyond a multiple of 8, so that the two rows
        that eight lanes read lie in different banks."""
        return (self.kept_vectors + 3) // 8 * 8 + 4

    @property
    def kept_rows(self) -> int:
        """Hidden states in shared memory. Beside a ring no row is there twice."""
        return min(self.tile_m, self.beam) if self.stages and self.beam else self.tile_m

    @property
    def ring_at(self) -> int:
        """Bytes of hidden states, after which the ring lies."""
        return self.kept_rows * self.kept_pitch * VECTOR if self.staged else 0

    @property
    def ring_pitch(self) -> int:
        """Bytes from one row of a stage to the next: half a cache line beyond whole ones, as `kept_pitch` is. Whole
        rows lie as they do in memory."""
        return self.word_row if self.whole else self.depth * STEP + STEP // 2

    @property
    def rows_apart(self) -> int:
        """How far apart rows of a stage are that eight lanes read together: 1, 2 or 4, so that they lie in different
        banks of shared memory, if any two do."""
        return next((rows for rows in (1, 2, 4) if self.ring_pitch * rows % STEP == STEP // 2), 1)

    @property
    def ring_bytes(self) -> int:
        return self.rings * self.stages * self.tile_n * self.ring_pitch

    @property
    def kept_bytes(self) -> int:
        """Dynamic shared memory of the first kernel: of hidden states, and of a ring."""
        return dynamic_shared(self.ring_at + (self.ring_bytes if self.stages else 0), self.parts_bytes)

    @property
    def barrier_bytes(self) -> int:
        """Static shared memory of a ring's barriers, and of the tiles that are taken."""
        return (12 if self.dynamic else 8) * self.stages * self.rings

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the first kernel with a ring."""
        return self.kept_bytes + self.parts_bytes + self.barrier_bytes
