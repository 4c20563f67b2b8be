"""The space of `fused_step`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Table, ceildiv
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.lsh_topk.problem import LshTopk

from ...lsh.extents import BUCKET_LANES, WARP, CountExtents, HashExtents, Room
from ...recurrent.sizes import register_limit, shared_limit

MMA = 80  # compute capability from which tensor cores take all dtypes
OVERLAPS = 90  # and programmatic dependent launch is there
THREADS = (256, 384, 512, 640, 768)
HASH_WARPS = (2, 4, 8, 12, 16)
ROW_BLOCKS = (0, 1, 2, 4)
WIDE_BEAM = 32  # from which rows have thread blocks of their own by default
LOADS = (2, 4, 6)
DEPTHS = (1, 2, 3, 4)
VECTOR = 16  # bytes of a load
CHUNK = 64  # bytes of a row that four lanes load together
PER_JOB = 8  # chunks that a warp multiplies in one go
TILE = 8  # words of a product: columns of an operand of tensor cores
FRAGMENT = 16  # rows of hidden states of one: rows of the other operand
MOST_TILE = 64  # frequent words whose sums a thread block has in shared memory at a time,
REST = 32  # and others
MOST_PARTS = 64 * 1024  # bytes of the former
LISTED = 512  # words with hits enough that a thread block lists
SLOTS = 16  # places for keys of such words that each thread block has of its own,
ROW_SLOTS = 64  # and each of those of a row
AHEAD = 3  # units whose columns a thread of these holds,
COPIES = 16 * 1024  # and bytes of the row's copies in banks of their own
SEARCHERS = 512  # threads of a block of the second kernel
SURVIVORS = 2048  # keys that it ranks side by side
SMALL = 2048  # bytes of static shared memory beside that list, at most
BESIDES = 8  # registers of a thread beside words, hidden states and sums: with fewer the compiler spilled much


@dataclass(frozen=True)
class Extents:
    """The sizes of one point's kernels.

    Lists are put together to *groups* of up to 16 rows, each of which has `blocks` thread blocks of its own.
    """

    beam: int
    hidden: int
    vocab: int
    n: int
    frequent: int  # at which the kernels are fast; they run with any number. So `bands`
    bands: int
    k: int
    units: int
    cuckoo: bool
    dtype: str
    bias: bool
    blocks: int
    threads: int
    hash_warps: int  # of each thread block that hash and look up
    row_blocks: int  # thread blocks that do so instead, of each row
    loads: int  # words of buckets that a lane has in flight
    depth: int  # jobs of the product whose words a warp has in flight
    overlap: int

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
            blocks=decisions["blocks"],
            threads=decisions["threads"],
            hash_warps=decisions["hash_warps"],
            row_blocks=decisions["row_blocks"],
            loads=decisions["loads"],
            depth=decisions["depth"],
            overlap=decisions["overlap"],
        )

    # Who does what.

    @property
    def group_lists(self) -> int:
        """Lists of a group."""
        return max(1, FRAGMENT // self.beam)

    @property
    def group_rows(self) -> int:
        return self.group_lists * self.beam

    @property
    def fragments(self) -> int:
        """Of 16 rows, of a group."""
        return ceildiv(self.group_rows, FRAGMENT)

    @property
    def rows(self) -> int:
        """Rows of all fragments."""
        return self.fragments * FRAGMENT

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def product_warps(self) -> int:
        return self.warps if self.row_blocks else self.warps - self.hash_warps

    @property
    def counters(self) -> int:
        """Thread blocks of a group, the first ones, that hash and look up and have no frequent words."""
        return self.group_rows * self.row_blocks

    @property
    def multipliers(self) -> int:
        """Thread blocks of a group that have frequent words."""
        return self.blocks - self.counters

    @property
    def unit_bands(self) -> int:
        """Bands of one row that a warp looks up in one go: as many as spread a group's evenly over all of its warps."""
        warps, bands = self.blocks * self.hash_warps, self.group_rows * self.bands
        turns = ceildiv(bands, warps * (WARP // self.units))
        return ceildiv(bands, warps * turns)

    @property
    def search_steps(self) -> int:
        """Halvings until one of those bands is left."""
        return (self.unit_bands - 1).bit_length()

    @property
    def hashing(self) -> HashExtents:
        """A warp hashes a row on its own, or a thread block does."""
        if not self.row_blocks:
            return HashExtents(self.hidden, self.k, self.units, self.dtype, WARP)
        ahead = min(AHEAD, ceildiv(self.counting.tile * self.units, self.threads))
        copies = next(n for n in (16, 8, 4, 2, 1) if n == 1 or n * self.hidden * 4 <= COPIES)
        return HashExtents(self.hidden, self.k, self.units, self.dtype, self.threads, ahead=ahead, copies=copies)

    @property
    def counting(self) -> CountExtents:
        """Of the thread blocks of a row: as many lanes a bucket as it has words on average, and half as many again."""
        codes = self.k**self.units
        return CountExtents(
            vocab=self.vocab,
            cuckoo=self.cuckoo,
            threads=self.threads,
            cluster=self.row_blocks,
            slices=1,
            lanes=next((n for n in BUCKET_LANES if 2 * n * codes >= 3 * self.vocab), BUCKET_LANES[-1]),
            loads=self.loads,
            exchange=0,
            finishers=1,
            bands=self.bands,
        )

    # The product. A *job* is a tile of 8 words times 8 chunks of each of them.

    @property
    def itemsize(self) -> int:
        return numpy_dtype(self.dtype).itemsize

    @property
    def vectors(self) -> int:
        """16-byte vectors of a row."""
        return self.hidden * self.itemsize // VECTOR

    @property
    def chunks(self) -> int:
        return ceildiv(self.vectors * VECTOR, CHUNK)

    @property
    def parts(self) -> int:
        """Jobs of a tile."""
        return ceildiv(self.chunks, PER_JOB)

    @property
    def pitch(self) -> int:
        """Vectors from one hidden state to the next in shared memory. Eight of them start in different banks."""
        found = self.chunks * (CHUNK // VECTOR)
        return found if found % 8 == 4 else found + 4

    @property
    def tile(self) -> int:
        """Frequent words of a thread block at a time."""
        each = ceildiv(ceildiv(self.frequent, self.multipliers), TILE) * TILE
        room = MOST_PARTS // (self.rows * self.parts * 4) // TILE * TILE
        return max(TILE, min(each, room, MOST_TILE))

    # Shared memory of the first kernel, in bytes; each begins at a multiple of 16.

    @property
    def halves(self) -> int:
        """In which a hidden state is in shared memory: of float32 what tf32 holds, and the rest."""
        return 2 if self.dtype == "float32" else 1

    @property
    def chains(self) -> int:
        """Sums of a product that do not wait for each other."""
        return self.halves + 1

    @property
    def half_bytes(self) -> int:
        """Of either of all hidden states."""
        return self.rows * self.pitch * VECTOR

    @property
    def state_bytes(self) -> int:
        return self.halves * self.half_bytes

    @property
    def tile_bytes(self) -> int:
        """Sums of the jobs of `tile` words, and of `REST` words."""
        return self.rows * self.tile * self.parts * 4

    @property
    def rest_bytes(self) -> int:
        return self.rows * REST * self.parts * 4

    @property
    def hash_bytes(self) -> int:
        """Rows as float32, and places of units."""
        return self.hash_warps * (ceildiv(self.hidden, 4) * 16 + WARP * 4)

    @property
    def count_bytes(self) -> int:
        """Of thread blocks of a row: counts, the row and places of units."""
        return Room.of(self.hashing, self.counting).bytes

    @property
    def pool_bytes(self) -> int:
        """Thread blocks of a row count where others, and later they themselves, have sums."""
        sums = self.tile_bytes + self.rest_bytes
        if self.row_blocks:
            return self.state_bytes + max(sums, self.count_bytes)
        return self.state_bytes + sums + self.hash_bytes

    @property
    def held(self) -> int:
        """Registers of a thread for words of jobs, for hidden states of two steps, and for sums."""
        return self.depth * PER_JOB * 4 + 2 * 8 * self.halves + self.chains * self.fragments * 4

    # Memory.

    @property
    def cells(self) -> int:
        """Words of memory with hit counts of a row, two in each, in whole vectors."""
        return ceildiv(ceildiv(self.vocab, 2), 4) * 4

    @property
    def bitmap(self) -> int:
        """Those of a list's bitmap, in whole vectors."""
        return ceildiv(bitmap_words(self.vocab), 4) * 4

    # The second kernel.

    @property
    def own_slots(self) -> int:
        """Places of each thread block that looks words up."""
        return ROW_SLOTS if self.row_blocks else SLOTS

    @property
    def slots(self) -> int:
        """Places of all thread blocks of a group, beside which there are some for each word."""
        return (self.counters or self.blocks) * self.own_slots

    @property
    def maxima(self) -> int:
        """Largest keys of groups of thread blocks that a lane of each warp has: n at least, all lanes together."""
        return ceildiv(self.n, WARP)

    @property
    def heads_each(self) -> int:
        """Thread blocks of one such group."""
        return ceildiv(self.blocks, self.maxima * WARP)

    @property
    def searchers(self) -> int:
        """Warps of the second kernel."""
        return SEARCHERS // WARP


def require(problem: LshTopk, machine: Machine) -> None:
    """Raise `NotApplicable` for what no kernel of this kind does."""
    if machine.capability < MMA:
        raise NotApplicable("tensor cores for all dtypes need compute capability 8.0")
    size = problem.hidden * numpy_dtype(problem.dtype).itemsize
    if size % VECTOR:
        raise NotApplicable(f"rows of {size} bytes are no whole vectors of {VECTOR}")
    if problem.units > WARP:
        raise NotApplicable(f"{problem.units} units of a band exceed the {WARP} lanes of a warp")
    if problem.n > machine.cores:
        raise NotApplicable(f"n={problem.n} exceeds the {machine.cores} thread blocks that name a word each")


def most_blocks(problem: LshTopk, machine: Machine) -> int:
    """Thread blocks of a group: one a multiprocessor, if each then has a tile of frequent words or a warp's bands. Each
    names its best word, so that there are n at least."""
    lookups = ceildiv(max(FRAGMENT, problem.beam) * problem.bands * problem.units, WARP)
    return min(machine.cores, max(ceildiv(problem.frequent, TILE), ceildiv(lookups, HASH_WARPS[0]), problem.n))


def blocks_with_rows(problem: LshTopk, machine: Machine) -> int:
    """As many, and three beside them for each row, if there are multiprocessors; all of them in whole clusters."""
    rows = max(1, FRAGMENT // problem.beam) * problem.beam
    whole = ROW_BLOCKS[-1]
    return min(machine.cores, most_blocks(problem, machine) + 3 * rows) // whole * whole


def space(problem: LshTopk, machine: Machine) -> Table:
    require(problem, machine)
    default(problem, machine)
    return {
        "blocks": tuple(dict.fromkeys((most_blocks(problem, machine), blocks_with_rows(problem, machine)))),
        "threads": THREADS,
        "hash_warps": HASH_WARPS,
        "row_blocks": ROW_BLOCKS if machine.has_clusters else ROW_BLOCKS[:2],
        "loads": LOADS,
        "depth": DEPTHS,
        "overlap": (0, 1, 2) if machine.capability >= OVERLAPS else (0,),
    }


def default(problem: LshTopk, machine: Machine) -> Decisions:
    """As measured on an H200 with beams of 12 to 48."""
    require(problem, machine)
    overlap = 2 if machine.capability >= OVERLAPS else 0
    own = {"blocks": blocks_with_rows(problem, machine), "threads": 512, "hash_warps": HASH_WARPS[0], "row_blocks": 1,
           "loads": 6}  # fmt: skip
    # Products of float32 take longer, and more registers.
    wide = problem.dtype == "float32"
    shared = {"blocks": most_blocks(problem, machine), "threads": 384 if wide else 512, "hash_warps": 4 if wide else 12,
              "row_blocks": 0, "loads": 4}  # fmt: skip
    # Counts of many rows make more traffic than global atomics can do.
    for point in (own, shared) if problem.beam >= WIDE_BEAM else (shared,):
        for depth in (1,) if wide else (2, 1):
            found = {**point, "depth": depth, "overlap": overlap}
            reason = allowed(problem, machine, found)
            if not reason:
                return found
    raise NotApplicable(reason)


def allowed(problem: LshTopk, machine: Machine, decisions: Decisions) -> str | None:
    e = Extents.of(problem, decisions)
    limit = shared_limit(machine) - SMALL - LISTED * 12
    every = blocks_with_rows(problem, machine) if e.row_blocks else most_blocks(problem, machine)
    if e.blocks != every:
        return f"{e.blocks} thread blocks, where {every} have something to do"
    if e.row_blocks and e.hash_warps != HASH_WARPS[0]:
        return f"hash_warps={e.hash_warps} is the same as {HASH_WARPS[0]} where rows have thread blocks of their own"
    if e.row_blocks and (e.blocks % e.row_blocks or 4 * e.counters > 3 * e.blocks):
        return (
            f"{e.counters} thread blocks of rows, {e.row_blocks} each, leave {e.multipliers} of {e.blocks} for others"
        )
    if e.row_blocks > problem.bands:
        return f"{e.row_blocks} thread blocks have no bands each of bands={problem.bands}"
    if e.product_warps < 2:
        return f"{e.hash_warps} warps that hash leave {e.product_warps} of {e.warps} for the product"
    if e.held + BESIDES > register_limit(e.threads):
        return f"{e.held} words, states and sums of each of {e.threads} threads exceed the registers"
    if e.pool_bytes > limit:
        return f"{e.pool_bytes} bytes exceed shared memory of {limit}"
    return None
