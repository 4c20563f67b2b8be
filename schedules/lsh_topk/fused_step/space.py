"""The space of `fused_step`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import REGISTER_FILE, Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Table, ceildiv
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.lsh_topk.problem import LshTopk

from ...lsh.extents import WARP, CountExtents, HashExtents
from ...output_layer.best.sizes import dynamic_shared
from ...recurrent.sizes import MOST_REGISTERS, register_limit

MMA = 80  # the compute capability from which on tensor cores take all dtypes
OVERLAPS = 90  # the compute capability from which on there is programmatic dependent launch
THREADS = (128, 256, 512)
HASH_THREADS = (256, 384, 512, 1024)
WIDE_BEAM = 40  # beams above this leave no room for a thread block of the first kernel beside one of the product
NARROW = 256  # columns up to which hidden states of several lists are in shared memory by default
KEPT_ROWS = 24  # rows of a group up to which warps keep hidden states in registers by default
CLUSTERS = (1, 2, 3, 4, 5, 8)  # of thread blocks; more than 8 are not portable
SLICES = (1, 2, 4, 8)
ROW_GROUPS = (1, 2, 3)
BUCKET_LANES = (2, 4, 8)
LOADS = (1, 2, 4)
DEPTHS = (4, 8)
# The first kernel.
ALL = 224 * 1024  # bytes of shared memory for two thread blocks of a multiprocessor of compute capability 9.0
MOST_BESIDE = ALL // 2
ALL_FOR_TWO = 98 * 1024  # bytes from which on a thread block is given half of all
TILE_BANDS = 512  # bands that a thread block looks up together, at most
SPARE = 3  # further pieces of buckets that there is room for, per band
MOST_PART = 1 << 16  # words of a part, at most, since hits have 16 bits
SEGMENTS = 16  # segments of the hits that a thread block sends
SENT = 8192  # hits in all segments together
STRETCHES = 8  # groups of 64 words whose counts a warp compares at once
PER_VECTOR = 4  # words of a bucket that a thread loads together
AHEAD = 3  # units whose columns a thread holds at once
COPIES = 16 * 1024  # bytes for copies of the row in banks of their own
# The product.
VECTOR = 16  # bytes of a load
CHUNK = 64  # bytes of a row that four lanes load together
TILE = 16  # words of a product: rows of an operand of tensor cores
OCTET = 8  # hidden states of one: columns of the other operand
FEW_OCTETS = 2
GROUP = 16  # rows of lists that are multiplied together, at most
TILES = (16, 32, 48, 96)  # words whose sums a thread block has in shared memory at a time
LATE_WORDS = 4  # words beyond whole tiles that are left to the second part, at most
MOST_PARTS = 40 * 1024  # bytes of parts of scores, by default
WORDS_BESIDE = (48, 32, 16)  # words of a tile where the first kernel runs beside the product: the first that fits
ROW_LANES = (32, 16, 8, 4)  # lanes that finish a row of sums together
FINISHED = 4  # words that a lane finishes together
WORDS_EACH = 256  # words of the vocabulary per thread block, so that each gets a few that reach the threshold
BESIDES = 20  # registers of a thread beside words, hidden states and sums: with fewer the compiler spilled much
# The third kernel.
SEARCHERS = 512  # threads per block
SURVIVORS = 2048  # keys that it ranks side by side
MOST_KEYS = 16  # keys of frequent words that a thread loads before the bound is known, at most
MOST_OTHERS = 6  # the same, of words that reach the threshold
REACHED = 44  # words per row that reach the threshold, in the paper's settings
QUAD = 4  # keys that lie together
MERGE = 20 * 1024  # bytes of its static shared memory, at most
MERGE_APART = ALL // 2  # and of its dynamic shared memory, where its thread blocks are to have a multiprocessor each
FEW_ROWS = 16  # rows up to which its thread blocks are on different multiprocessors in any case
SMALL = 2048  # bytes of static shared memory of the other kernels, at most


extent = Derived["Extents", int]


@dataclass(frozen=True)
class Extents:
    """The sizes of one point's kernels.

    Lists are put together into *groups* of up to 16 rows, each multiplied by `blocks` thread blocks; or a list is cut
    into `row_groups` groups, which share `blocks` thread blocks.
    """

    beam: int
    hidden: int
    vocab: int
    n: int
    frequent: int  # the number for which the kernels are fast; they run with any. The same goes for `bands`
    bands: int
    k: int
    units: int
    cuckoo: bool
    dtype: str
    bias: bool
    blocks: int
    row_groups: int  # parts into which the product cuts a beam
    threads: int  # of a thread block of the product
    hash_threads: int  # of a thread block that hashes
    cluster: int  # thread blocks that hash one row
    slices: int  # slices of the vocabulary, each with a cluster that looks up its words
    bucket_lanes: int  # lanes that go through a bucket together
    loads: int  # vectors that each such lane has in flight
    depth: int  # chunks of a job of the product, all of them in flight
    staged: int  # 1: all hidden states are in shared memory; 0: each warp keeps its part of them in registers
    words: int  # words whose sums a thread block of the product has at a time, at most
    overlap: int
    beside: int
    late_words: int  # a thread block's frequent words beyond whole tiles that are left to the second part, at most
    apart: int

    @classmethod
    def of(cls, problem: LshTopk, decisions: Decisions) -> Extents:
        return cls(
            beam=problem.beam,
            hidden=problem.hidden,
            vocab=problem.vocab,
            n=problem.n,
            frequent=problem.frequent,
            bands=problem.bands,
            k=problem.k,
            units=problem.units,
            cuckoo=problem.table == "cuckoo",
            dtype=problem.dtype,
            bias=bool(problem.bias),
            **decisions,
        )

    # The first kernel: a cluster hashes a row. Each of its thread blocks hashes some bands, and counts hits of a part
    # of the vocabulary.

    @property
    def counting(self) -> CountExtents:
        bands = min(self.bands, TILE_BANDS * self.cluster)
        return CountExtents(
            self.vocab, self.cuckoo, self.hash_threads, self.cluster, self.slices, self.bucket_lanes, self.loads,
            exchange=0, finishers=1, bands=bands,
        )  # fmt: skip

    # Words of a piece of a bucket, where there is room for as many: what `bucket_lanes` lanes load together.
    piece = extent(lambda e: e.bucket_lanes * PER_VECTOR)
    # Further pieces of its buckets that a thread block has room for, beside the first of each.
    spare = extent(lambda e: SPARE * e.counting.tile)
    # Segments of the hits that a thread block sends another one; warps write to them in turn.
    segments = extent(lambda e: SEGMENTS // e.cluster)
    # Hits that one segment has room for.
    room = extent(lambda e: SENT // SEGMENTS)
    # Number of 32-bit words in the bitmap of a part.
    votes = extent(lambda e: e.counting.part // WARP)

    @property
    def hashing(self) -> HashExtents:
        ahead = min(AHEAD, ceildiv(self.places, self.hash_threads))
        copies = next(n for n in (16, 8, 4, 2, 1) if n == 1 or n * self.hidden * 4 <= COPIES)
        return HashExtents(self.hidden, self.k, self.units, self.dtype, self.hash_threads, ahead=ahead, copies=copies)

    # Units of the bands that a thread block hashes together.
    places = extent(lambda e: e.counting.tile * e.units)

    @property
    def hash_arrays(self) -> Mapping[str, int]:
        """Arrays in shared memory of a thread block, in 4-byte elements, in the order in which they lie."""
        return {
            "spans": 2 * (self.counting.tile + self.spare),
            "sent": SENT // 2 if self.cluster > 1 else 4,  # the row begins at a multiple of 16 bytes
            "cells": self.counting.cells,
            "row": self.hashing.row_words,
            "places": self.places,
            "votes": self.votes,
        }

    @property
    def hash_bytes(self) -> int:
        """Shared memory of a thread block.

        On a multiprocessor that runs the first kernel, the driver reserves shared memory for two of its thread blocks.
        A thread block of the second kernel fits beside one of the first (`beside`) if it needs no more than one of
        these, or if these two take all shared memory.
        """
        own = ceildiv(sum(self.hash_arrays.values()), 2) * 8
        return max(own, self.least_beside) if self.beside else own

    # Dynamic shared memory of a thread block of the third kernel. The kernel does not use it: it keeps a second thread
    # block off the multiprocessor.
    merge_bytes = extent(lambda e: MERGE_APART if e.apart else 0)

    # Registers. Where the kernels overlap, a multiprocessor needs enough for one thread block of each.

    # Thread blocks of the first kernel that a multiprocessor has registers for: as many as leave 56 or 64 per thread.
    hash_resident = extent(lambda e: ceildiv(1024, e.hash_threads) if e.overlap else 1)

    @property
    def left(self) -> int:
        """Registers per thread of the second kernel, beside one thread block of the first, or alone."""
        taken = self.hash_threads * register_limit(self.hash_resident * self.hash_threads) if self.beside else 0
        return min(MOST_REGISTERS, (REGISTER_FILE - taken) // self.threads // 8 * 8)

    # The product. A *job* is a tile of 16 words, times `depth` chunks of each of them.

    # Lists of a group; 1 where a list is cut into groups.
    group_lists = extent(lambda e: max(1, GROUP // e.beam) if e.row_groups == 1 else 1)
    # Rows of a group.
    rows = extent(lambda e: ceildiv(e.group_lists * e.beam, e.row_groups))
    # Thread blocks of a group.
    group_blocks = extent(lambda e: e.blocks // e.row_groups)
    # Octets that the rows of a group fill.
    octets = extent(lambda e: ceildiv(e.rows, OCTET))
    warps = extent(lambda e: e.threads // WARP)
    itemsize = extent(lambda e: numpy_dtype(e.dtype).itemsize)
    # 16-byte vectors of a row.
    vectors = extent(lambda e: e.hidden * e.itemsize // VECTOR)
    chunks = extent(lambda e: ceildiv(e.vectors * VECTOR, CHUNK))
    # Jobs per tile.
    parts = extent(lambda e: ceildiv(e.chunks, e.depth))
    # Vectors of a row up to the end of its last job.
    padded = extent(lambda e: e.parts * e.depth * (CHUNK // VECTOR))
    # Vectors from one hidden state to the next in shared memory. Eight of them start in different banks.
    pitch = extent(lambda e: e.padded if e.padded % 8 == 4 else e.padded + 4)

    @property
    def beyond(self) -> int:
        """Frequent words of a thread block beyond whole tiles, which it has in the second part."""
        each = ceildiv(self.frequent, self.group_blocks)
        return each % TILE if each > TILE and each % TILE <= self.late_words else 0

    # Frequent words of a thread block in the first part.
    each = extent(lambda e: ceildiv(e.frequent, e.group_blocks) - e.beyond)
    # Into how many tiles a thread block cuts these: as few as there is room for.
    tiles = extent(lambda e: ceildiv(e.each, e.words))
    # Words of the vocabulary in a tile.
    tile = extent(lambda e: ceildiv(ceildiv(e.each, e.tiles), TILE) * TILE)
    # Parts of a hidden state in shared memory: for float32 the higher one, which tf32 holds, and the rest.
    halves = extent(lambda e: 2 if e.dtype == "float32" else 1)
    # Chains of sums that do not wait for each other. With many octets, these alone are enough.
    chains = extent(lambda e: 2 if e.octets <= FEW_OCTETS else 1)
    # Sums of one chain: registers of a thread.
    chain = extent(lambda e: e.octets * 4)
    # Registers of a thread for the words of a job.
    hand = extent(lambda e: e.depth * 8)
    # Bytes of one part (`halves`) of all hidden states.
    half_bytes = extent(lambda e: e.rows * e.pitch * VECTOR)
    state_bytes = extent(lambda e: e.halves * e.half_bytes if e.staged else 0)
    # Registers of a thread for hidden states: of two steps, or of its warp's part.
    state_held = extent(lambda e: 2 * 4 * e.halves if e.staged else e.depth * e.octets * 4)
    # Sums from one row to the next: eight words of every second of eight rows have banks of their own.
    sum_pitch = extent(lambda e: e.tile + 4)
    # Sums of the jobs of `tile` words. Lanes read some beyond the last row.
    tile_bytes = extent(lambda e: (e.parts * e.rows * e.sum_pitch + WARP) * 4)
    # Lanes that finish a row: as many as let all warps take part at once.
    row_lanes = extent(lambda e: next((n for n in ROW_LANES if n * e.octets * OCTET <= e.threads), ROW_LANES[-1]))
    # How far apart the rows of a warp's lanes are, so that their sums are `row_lanes` banks apart: from one row to the
    # next it is four, or 20.
    rows_apart = extent(lambda e: e.row_lanes * OCTET // WARP)
    # Shared memory of a thread block; both begin at a multiple of 16.
    product_bytes = extent(lambda e: dynamic_shared(e.state_bytes + e.tile_bytes, SMALL))
    # The least shared memory that a thread block of the first kernel has to ask for, so that one of the second fits
    # beside it.
    least_beside = extent(lambda e: e.product_bytes if e.product_bytes <= MOST_BESIDE else ALL_FOR_TWO)
    # Registers of a thread for words of a job and operands made of them, for hidden states, and for sums.
    held = extent(lambda e: e.hand + 8 * e.halves + e.state_held + e.chains * e.chain)
    # Thread blocks of the second kernel per multiprocessor for which the compiler limits registers: two, where that is
    # enough for a thread, since one may take the place of a thread block of the first kernel.
    resident = extent(lambda e: 1 + (e.beside and e.held + BESIDES <= register_limit(2 * e.threads)))

    # Memory.

    # Number of 32-bit words in one list's bitmap, rounded up to whole 16-byte vectors.
    bitmap = extent(lambda e: ceildiv(bitmap_words(e.vocab), 4) * 4)
    # Words of a list that reach the threshold, of which a thread block stores keys, at most.
    reached_each = extent(lambda e: ceildiv(e.vocab, e.group_blocks * QUAD) * QUAD)
    # The same, of all thread blocks together.
    reached_most = extent(lambda e: e.group_blocks * e.reached_each)

    # The third kernel.

    # Groups of thread blocks whose largest keys one lane has; all lanes of a warp together have at least n.
    maxima = extent(lambda e: ceildiv(e.n, WARP))
    # Thread blocks per group.
    heads_each = extent(lambda e: ceildiv(e.group_blocks, e.maxima * WARP))

    @property
    def keys(self) -> int:
        """Keys of frequent words that a thread loads together; 0 if there are too many."""
        found = ceildiv(self.frequent, SEARCHERS)
        return found if found <= MOST_KEYS else 0

    @property
    def other_keys(self) -> int:
        """Keys of words that reach the threshold that a thread loads together with them."""
        quads = ceildiv(REACHED * self.beam, self.group_blocks * QUAD) * self.group_blocks
        return min(ceildiv(quads * QUAD, SEARCHERS), MOST_OTHERS)

    # Warps of a thread block.
    searchers = extent(lambda e: SEARCHERS // WARP)


def require(problem: LshTopk, machine: Machine) -> None:
    """Raise `NotApplicable` where no kernel of this template fits."""
    if machine.capability < MMA:
        raise NotApplicable("tensor cores for all dtypes need compute capability 8.0")
    size = problem.hidden * numpy_dtype(problem.dtype).itemsize
    if size % VECTOR:
        raise NotApplicable(f"rows of {size} bytes are no whole vectors of {VECTOR}")
    if problem.n > machine.cores:
        raise NotApplicable(f"n={problem.n} exceeds the {machine.cores} thread blocks that name a word each")


def most_blocks(problem: LshTopk, machine: Machine) -> int:
    """Thread blocks of a group: one a multiprocessor, if each then has some words. Each names its best word, so that
    there are n at least."""
    some = max(ceildiv(problem.frequent, TILE), ceildiv(problem.vocab, WORDS_EACH))
    return min(machine.cores, max(some, problem.n))


def fewer_blocks(problem: LshTopk, machine: Machine) -> list[int]:
    """Numbers of thread blocks, of all groups, that leave the first kernel a multiprocessor for each of its thread
    blocks, of which there are one or two per row: then neither kernel slows the other.
    """
    rows = problem.lists * problem.beam
    left = [machine.cores - each * rows for each in (1, 2)]
    return [blocks for blocks in left if machine.cores // 2 <= blocks < most_blocks(problem, machine)]


def has_room_apart(machine: Machine) -> bool:
    """Whether a thread block of the third kernel can have so much shared memory that no other one fits on its
    multiprocessor.
    """
    return machine.capability >= OVERLAPS and MERGE_APART + MERGE <= machine.block_shared_bytes - SMALL


def space(problem: LshTopk, machine: Machine) -> Table:
    require(problem, machine)
    default(problem, machine)
    return {
        "blocks": tuple(sorted({most_blocks(problem, machine), *fewer_blocks(problem, machine)})),
        "row_groups": ROW_GROUPS,
        "threads": THREADS,
        "hash_threads": HASH_THREADS,
        "cluster": CLUSTERS if machine.has_clusters else CLUSTERS[:1],
        "slices": SLICES,
        "bucket_lanes": BUCKET_LANES,
        "loads": LOADS,
        "depth": DEPTHS,
        "staged": (0, 1),
        "words": TILES,
        "overlap": (int(machine.capability >= OVERLAPS),),
        "beside": (0, 1) if machine.capability >= OVERLAPS else (0,),
        "late_words": (0, LATE_WORDS),
        "apart": (0, 1) if has_room_apart(machine) else (0,),
    }


def default(problem: LshTopk, machine: Machine) -> Decisions:
    """As many thread blocks of a row as leave each a multiprocessor, and a sixth of these to the second kernel alone;
    as few slices as have room; hidden states in registers, if these suffice; the rest as measured on an H200
    with beams of 12 to 48. For a wide beam the two kernels have multiprocessors of their own. In float32, where
    the product takes longest, its thread blocks have a multiprocessor to themselves."""
    require(problem, machine)
    wide = problem.beam > WIDE_BEAM
    rows = problem.lists * problem.beam
    clusters = [n for n in CLUSTERS if n == 1 or (machine.has_clusters and n <= problem.bands)]
    overlap = 1 if machine.capability >= OVERLAPS else 0
    separate = [
        {"staged": 0, "row_groups": 1, "words": TILES[-1], "beside": 0}
        | {"cluster": 1, "hash_threads": max(HASH_THREADS), "blocks": blocks}
        for blocks in fewer_blocks(problem, machine)[:1]
        if overlap and problem.lists == 1 and problem.beam > KEPT_ROWS
    ]
    reason: str | None = None
    for slices in SLICES:
        found = {
            "blocks": most_blocks(problem, machine),
            "row_groups": 2 if wide and most_blocks(problem, machine) // 2 >= problem.n else 1,
            "threads": 256,
            "hash_threads": 512,
            "cluster": max((n for n in clusters if n * slices * rows <= machine.cores * 10 // 11), default=1),
            "slices": slices,
            "bucket_lanes": 4,
            "loads": 2,
            "depth": DEPTHS[0],
            "staged": 1,
            "words": TILES[0],
            "overlap": overlap,
            "beside": 0,
            "late_words": 0,
            "apart": int(has_room_apart(machine) and problem.lists == 1 and rows > FEW_ROWS),
        }
        e = Extents.of(problem, found)
        words = max((n for n in TILES if n * e.rows * e.parts * 4 <= MOST_PARTS), default=TILES[0])
        few = (128,) if problem.lists > 1 else ()  # of several lists, each with little to do
        alone = [{"words": words, "beside": 0, "threads": threads} for threads in (*few, 512, 256)]
        together = [{"words": n, "beside": 1} for n in WORDS_BESIDE] if overlap else []
        groups = ceildiv(problem.beam, KEPT_ROWS)
        kept = [
            {"staged": 0, "row_groups": groups, "words": n, "beside": 1}
            for n in reversed(TILES)
            if overlap and groups in ROW_GROUPS
        ]
        # Several lists of few rows in 16 bits: smaller thread blocks, and narrow hidden states in shared memory.
        small = [one | {"threads": threads} for one in kept for threads in few if problem.beam <= FEW_ROWS]
        narrow = [one | {"staged": 1, "row_groups": 1} for one in small if problem.hidden <= NARROW]
        kept = [*narrow, *small, *kept]
        choices = [*alone, *together] if e.itemsize == 4 else [*separate, *kept, *together, *alone]
        for choice in choices:
            reason = allowed(problem, machine, found | choice)
            if not reason:
                return found | choice
    raise NotApplicable(reason or "")


def allowed(problem: LshTopk, machine: Machine, decisions: Decisions) -> str | None:
    e = Extents.of(problem, decisions)
    limit = machine.block_shared_bytes - SMALL
    if e.beside and not e.overlap:
        return "a kernel that does not overlap with the next has none beside it"
    if not e.staged and e.halves == 2:
        return "hidden states of float32 are split in shared memory"
    if not e.staged and e.warps % e.parts:
        return f"{e.warps} warps are no multiple of the {e.parts} parts of columns of which they keep hidden states"
    if e.row_groups > 1 and e.rows < GROUP:
        return f"{e.row_groups} groups of the beam's {e.beam} rows have fewer than {GROUP} each"
    if problem.n > e.group_blocks:
        return f"n={problem.n} exceeds the {e.group_blocks} thread blocks of a group, which name a word each"
    if e.apart and not e.overlap:
        return "thread blocks of a kernel that does not overlap with the one before come to multiprocessors in turn"
    if e.apart and not has_room_apart(machine):
        return f"{e.merge_bytes + MERGE} bytes of the last kernel exceed shared memory of {limit}"
    if e.late_words and (e.group_lists > 1 or not e.beyond):
        return "no frequent words of a thread block that are beyond whole tiles go to the second part"
    if e.cluster > 1 and e.counting.part > MOST_PART:
        return f"a part of {e.counting.part} words: hits are sent in 16 bits"
    if e.cluster > problem.bands:
        return f"{e.cluster} thread blocks have no bands each of bands={problem.bands}"
    if e.held + BESIDES > e.left:
        return f"{e.held} words, states and sums of each of {e.threads} threads exceed the registers"
    for what, size in (("counts and pieces", e.hash_bytes), ("hidden states and sums", e.product_bytes)):
        if size > limit:
            return f"{size} bytes of {what} exceed shared memory of {limit}"
    if e.beside and e.least_beside + e.product_bytes > ALL:
        return f"{e.product_bytes} bytes of hidden states and sums have no room beside the first kernel"
    return None
