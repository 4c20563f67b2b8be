"""The space of `fused_step`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Table, ceildiv
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.lsh_topk.problem import LshTopk

from ...lsh.extents import SLICES, WARP, HashExtents
from ...recurrent.sizes import register_limit, shared_limit

MMA = 80  # compute capability from which tensor cores take all dtypes
OVERLAPS = 90  # and programmatic dependent launch is there
THREADS = (256, 384, 512, 640, 768)
LOADS = (2, 4, 8)
DEPTHS = (1, 2, 3, 4)
VECTOR = 16  # bytes of a load
CHUNK = 64  # bytes of a row that four lanes load together
PER_JOB = 8  # chunks that a warp multiplies in one go
TILE = 8  # words of a product: columns of an operand of tensor cores
FRAGMENT = 16  # rows of hidden states of one: rows of the other operand
MOST_TILE = 64  # frequent words whose sums a thread block has in shared memory at a time,
MOST_REST = 64  # or words that it has won
MOST_PARTS = 64 * 1024  # bytes of these sums
MOST_AHEAD = 3  # units whose columns a thread holds together
LISTED = 512  # words with hits enough that a thread block lists
SLOTS = 64  # places for keys of such words that each thread block has of its own
PER_CELL = 2  # words whose hits a word of memory counts
SEARCHERS = 512  # threads of a block of the second kernel
SURVIVORS = 2048  # keys that it ranks side by side
SMALL = 2048  # bytes of static shared memory beside that list, at most
BESIDES = 8  # registers of a thread beside words, hidden states and sums: with fewer the compiler spilled much


def group_rows(beam: int) -> int:
    """Rows of a group of lists."""
    return max(1, FRAGMENT // beam) * beam


@dataclass(frozen=True)
class Extents:
    """The sizes of one point's kernels.

    Lists are put together to *groups* of up to 16 rows, each of which has `blocks` thread blocks of its own: the first
    `group_rows` have a row each, the others words.
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
    loads: int  # words of buckets that a thread has in flight
    depth: int  # jobs of the product whose words a warp has in flight
    slices: int  # parts of the vocabulary whose hits a thread block counts one after another
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
            loads=decisions["loads"],
            depth=decisions["depth"],
            slices=decisions["slices"],
            overlap=decisions["overlap"],
        )

    # Who does what.

    @property
    def group_lists(self) -> int:
        """Lists of a group."""
        return max(1, FRAGMENT // self.beam)

    @property
    def group_rows(self) -> int:
        return group_rows(self.beam)

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
    def product_blocks(self) -> int:
        """Of a group, that multiply frequent words."""
        return self.blocks - self.group_rows

    @property
    def band_tile(self) -> int:
        """Bands that a thread block looks up in one go: a thread a band."""
        return min(self.bands, self.threads)

    @property
    def search_steps(self) -> int:
        """Halvings until one of those bands is left."""
        return (self.band_tile - 1).bit_length()

    @property
    def hashing(self) -> HashExtents:
        ahead = min(MOST_AHEAD, ceildiv(self.band_tile * self.units, self.threads))
        return HashExtents(self.hidden, self.k, self.units, self.dtype, self.threads, ahead=ahead)

    @property
    def slice(self) -> int:
        """Words of a slice, in whole vectors of counts."""
        return ceildiv(ceildiv(self.vocab, self.slices), 4 * PER_CELL) * 4 * PER_CELL

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
        each = ceildiv(ceildiv(self.frequent, self.product_blocks), TILE) * TILE
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
    def rest(self) -> int:
        """Words with hits enough that are multiplied at a time."""
        return max(TILE, min(MOST_REST, MOST_PARTS // (self.rows * self.parts * 4) // TILE * TILE))

    @property
    def sum_bytes(self) -> int:
        """Sums of the jobs of `tile` words, or of `rest` words."""
        return self.rows * max(self.tile, self.rest) * self.parts * 4

    @property
    def row_bytes(self) -> int:
        """A row as float32; `places` of units, `upto` and `offset` of bands."""
        return ceildiv(self.hidden, 4) * 16 + ceildiv(self.band_tile * (self.units + 2), 4) * 16

    @property
    def pool_bytes(self) -> int:
        """Hidden states; and either sums, or what it takes to look words up."""
        return self.state_bytes + max(self.sum_bytes, self.row_bytes + self.slice // PER_CELL * 4)

    @property
    def held(self) -> int:
        """Registers of a thread for words of jobs, for hidden states of two steps, and for sums."""
        return self.depth * PER_JOB * 4 + 2 * 8 * self.halves + self.chains * self.fragments * 4

    # Memory.

    @property
    def bitmap(self) -> int:
        """Those of a list's bitmap, in whole vectors."""
        return ceildiv(bitmap_words(self.vocab), 4) * 4

    # The second kernel.

    @property
    def slots(self) -> int:
        """Places of all thread blocks of a group that look words up, beside which there are some for each word."""
        return self.group_rows * SLOTS

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
    if group_rows(problem.beam) >= machine.cores:
        raise NotApplicable(f"a beam of {problem.beam} leaves none of {machine.cores} thread blocks for words")
    if problem.n > machine.cores:
        raise NotApplicable(f"n={problem.n} exceeds the {machine.cores} thread blocks that name a word each")


def most_blocks(problem: LshTopk, machine: Machine) -> int:
    """Thread blocks of a group: one a multiprocessor, if each has a row or a tile of frequent words. Each names its
    best word, so that there are n at least."""
    return min(machine.cores, max(group_rows(problem.beam) + ceildiv(problem.frequent, TILE), problem.n))


def space(problem: LshTopk, machine: Machine) -> Table:
    require(problem, machine)
    default(problem, machine)
    return {
        "blocks": (most_blocks(problem, machine),),
        "threads": THREADS,
        "loads": LOADS,
        "depth": DEPTHS,
        "slices": SLICES,
        "overlap": (0, 1, 2) if machine.capability >= OVERLAPS else (0,),
    }


def default(problem: LshTopk, machine: Machine) -> Decisions:
    require(problem, machine)
    # As measured on an H200: products of float32 take longer, and more registers, as those of larger beams do.
    wide, large = problem.dtype == "float32", problem.beam > FRAGMENT
    found = {
        "blocks": most_blocks(problem, machine),
        "threads": 384 if wide else 640,
        "loads": 8,
        "depth": 1 if wide or large else 2,
        "slices": 1,
        "overlap": 2 if machine.capability >= OVERLAPS else 0,
    }
    for slices in SLICES:
        reason = allowed(problem, machine, {**found, "slices": slices})
        if not reason:
            return {**found, "slices": slices}
    raise NotApplicable(reason)


def allowed(problem: LshTopk, machine: Machine, decisions: Decisions) -> str | None:
    e = Extents.of(problem, decisions)
    if e.held + BESIDES > register_limit(e.threads):
        return f"{e.held} words, states and sums of each of {e.threads} threads exceed the registers"
    limit = shared_limit(machine) - SMALL - LISTED * 12
    if e.pool_bytes > limit:
        return f"{e.pool_bytes} bytes exceed shared memory of {limit}"
    return None
