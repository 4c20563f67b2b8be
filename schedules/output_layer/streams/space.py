"""The space of `streams`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Launch, NotApplicable, Table, ceildiv

from ..best.sizes import THREADS, VECTOR, SearchSizes, require_ranks, search_allowed
from ..tiles.sizes import require_whole_vectors
from ..words import OutputLayer, best_of, block_of, candidates_of, lists_of, most_words

WARP = 32
LANES = (8, 16, 32)  # lanes that share a word
VECTORS = (1, 2, 4, 8, 16)
TILE_N = (1, 2, 4, 8)
TILES = (2, 4, 8, 16)  # warps of a thread block of the first kernel
# Vectors that a thread has in hand. With more, registers leave room for too few warps.
LEAST_HELD, MOST_HELD = 2, 16
# Bytes of a hidden state that fit in static shared memory.
MOST_STATE = 40 * 1024
# Words of a list. Longer lists are read faster through `warp_rings`.
MOST_WORDS = 4096
# Bytes of a row up to which many small thread blocks with few words in hand read faster.
NARROW = 4096
# Bytes of a row up to which a warp has four words in turn there: with two, rows of 560 bytes took 1.3 times as long
# on an H200 (`scripts/regret.py`).
VERY_NARROW = 1024
# Words of a list up to which a search by few threads is faster.
FEW = 256
# Words of all lists up to which warps are few, so that each has many vectors of its wide rows in flight; up to which
# each word of wide rows has a warp; and beyond which a warp takes several narrow rows.
FEW_WARPS, MANY_WARPS, CROWDED = 2048, 16384, 1 << 20


def space(problem: OutputLayer, machine: Machine) -> Table:
    _, rows = lists_of(problem)
    row = problem.hidden * numpy_dtype(problem.dtype).itemsize
    if not candidates_of(problem) or rows > 1:
        raise NotApplicable("words are read for one row of hidden states: lists of one row each")
    require_whole_vectors(problem)
    if row > MOST_STATE // 2:
        raise NotApplicable(f"a hidden state of {row} bytes exceeds shared memory")
    require_ranks(problem)
    if most_words(problem) > MOST_WORDS:
        raise NotApplicable(f"lists of {most_words(problem)} words exceed {MOST_WORDS}")
    table = {
        "reduce_threads": LANES,
        "vectors": VECTORS,
        "tile_n": TILE_N,
        "tiles": TILES,
        "threads": THREADS if best_of(problem) else THREADS[:1],
        "overlap": (0, 1) if machine.has_clusters else (0,),
    }
    if next(_likely_points(problem, machine, table), None) is None:
        raise NotApplicable(f"no thread block has room for k={best_of(problem)} and hidden={problem.hidden}")
    return table


def allowed(problem: OutputLayer, machine: Machine, decisions: Decisions) -> str | None:
    e = Extents.of(problem, decisions)
    if e.held > MOST_HELD or e.held < min(LEAST_HELD, e.all_vectors):
        return f"{e.held} vectors in hand are not {LEAST_HELD} to {MOST_HELD}"
    if e.vectors >= 2 * ceildiv(e.row_vectors, e.reduce_threads) > 1:
        return (
            f"{e.vectors} vectors of each of {e.reduce_threads} lanes are twice the {e.row_vectors} of a row, or more"
        )
    if e.state_vectors * VECTOR > MOST_STATE:
        return f"a hidden state of {e.state_vectors * VECTOR} bytes exceeds shared memory"
    return search_allowed(e, machine)


def launch(problem: OutputLayer, decisions: Decisions) -> Launch:
    """The launch of the first kernel."""
    return Launch(WARP * decisions["tiles"])


def default(problem: OutputLayer, machine: Machine) -> Decisions:
    return next(_likely_points(problem, machine, space(problem, machine)))


def _likely_points(problem: OutputLayer, machine: Machine, table: Table) -> Iterator[Decisions]:
    """Points of a table, the best first: small thread blocks for narrow rows; for others one warp per word, with the
    fewer vectors in hand the more warps there are.
    """
    size, lists = problem.hidden * numpy_dtype(problem.dtype).itemsize, lists_of(problem)[0]
    narrow, words = size <= NARROW, lists * most_words(problem)
    all_lanes, all_vectors, tiles = ((16, 8, 32), (1, 2, 4), 2) if narrow else ((32, 16, 8), (4, 8, 2, 1), 8)
    tiles = 4 if size <= VERY_NARROW else tiles
    all_tiles_n = (4, 2, 1, 8) if narrow and words > CROWDED else (2, 1, 4, 8)
    all_threads = table["threads"]
    if most_words(problem) > FEW:
        all_threads = (512, 1024) if narrow or words <= MANY_WARPS else all_threads[::-1]
    if not narrow and words > MANY_WARPS:
        all_vectors, all_tiles_n = (1, 2, 4, 8), (8, 4, 2, 1)
    elif not narrow and words > FEW_WARPS:
        all_vectors, all_tiles_n, tiles = (2, 4, 1, 8), (1, 2, 4, 8), 4
    for tile_n, vectors, lanes, threads in itertools.product(all_tiles_n, all_vectors, all_lanes, all_threads):
        point = {
            "reduce_threads": lanes,
            "vectors": vectors,
            "tile_n": tile_n,
            "tiles": tiles,
            "threads": threads if best_of(problem) else table["threads"][0],
            "overlap": max(table["overlap"]),
        }
        if allowed(problem, machine, point) is None:
            yield point


extent = Derived["Extents", int]
whether = Derived["Extents", bool]


@dataclass(frozen=True)
class Extents(SearchSizes):
    """What the kernels know before they run."""

    # Dtype and columns of hidden states and words.
    dtype: str
    hidden: int
    # Words to find in a row (0 for `candidate_logits`, which finds none), and given words whose probabilities are
    # wanted.
    k: int
    ids: int
    # Candidates of a list, and words of a candidate.
    m: int
    block: int
    # The decisions of these names.
    reduce_threads: int
    vectors: int
    tile_n: int
    tiles: int
    threads: int
    overlap: int
    # 1: all scores are searched.
    direct: int = 1

    @classmethod
    def of(cls, problem: OutputLayer, decisions: Decisions) -> Extents:
        return cls(
            problem.dtype,
            problem.hidden,
            best_of(problem),
            getattr(problem, "ids", 0),
            candidates_of(problem),
            block_of(problem),
            **decisions,
        )

    # Words of a full list.
    words = extent(lambda e: e.m * e.block)
    # 16-byte vectors of a row.
    row_vectors = extent(lambda e: e.hidden * numpy_dtype(e.dtype).itemsize // VECTOR)
    # Vectors of a row that lanes have in hand together.
    step = extent(lambda e: e.reduce_threads * e.vectors)
    steps = extent(lambda e: ceildiv(e.row_vectors, e.step))
    # Vectors of a hidden state, with zeros up to the end of the last step.
    state_vectors = extent(lambda e: e.steps * e.step)
    # Whether the last step reaches beyond a row's end.
    uneven = whether(lambda e: e.state_vectors != e.row_vectors)
    # Vectors that a thread has in hand.
    held = extent(lambda e: e.vectors * e.tile_n)
    # A thread's part of a word.
    all_vectors = extent(lambda e: ceildiv(e.row_vectors, e.reduce_threads))
    # Threads of a block of the first kernel.
    product_threads = extent(lambda e: WARP * e.tiles)
    # Words of such a block.
    words_each = extent(lambda e: e.product_threads // e.reduce_threads * e.tile_n)
    # Thread blocks of the first kernel per list.
    parts = extent(lambda e: ceildiv(e.words, e.words_each))
    searched_words = extent(lambda e: e.words)
