"""Static sizes of the kernels of locality sensitive hashing, and which points fit. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import ceildiv
from tvm_sparse.formats.bitmap import BITS, bitmap_words
from tvm_sparse.formats.wta import index_bits

WARP = 32
BANKS = 32  # of shared memory
WIDEST = 16  # bytes of the widest load that a thread can issue
THREADS = (128, 256, 384, 512, 768, 1024)
CLUSTERS = (1, 2, 4, 8)  # of thread blocks; more than 8 are not portable
SLICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUCKET_LANES = (4, 8, 16, 32)
LOADS = (1, 2, 4, 8)
# Bytes of dynamic shared memory that a thread block has at most, and bytes left for static buffers.
MOST_SHARED, STATIC_SHARED = 200 * 1024, 3 * 1024
WARP_SUMS = 80  # the compute capability from which on a warp adds integers in one instruction
# Columns of a permutation that a thread has in registers at a time, and vectors of the row that it loads together.
MOST_COLUMNS, MOST_VECTORS = 16, 4
MOST_LOADS = 4  # of words of a bitmap, that a thread has in flight
# Bands whose codes are in shared memory at a time, all thread blocks of a cluster together.
MOST_BANDS = 4096
# Words that one cell of shared memory counts the hits of: 16 bits each, and there are fewer than 2^16 bands.
PER_CELL = 2
# Words whose cells a warp compares with the threshold at a time.
PER_WARP = WARP * PER_CELL
# Slices into which the vocabulary is cut for the threads of a CPU.
CPU_SLICES = (1, 2, 4, 8, 16, 32)


def cpu_chunk(vocab: int, slices: int) -> int:
    """Words of the vocabulary in a slice for a thread of a CPU: a multiple of the bits of the bitmap's 32-bit words."""
    return ceildiv(ceildiv(vocab, slices), BITS) * BITS


def cpu_chunks(vocab: int) -> tuple[int, ...]:
    """The words that a slice of the vocabulary may have."""
    return tuple(sorted({cpu_chunk(vocab, slices) for slices in CPU_SLICES}))


def cpu_chunk_each(vocab: int, lists: int, machine: Machine) -> int:
    """Words of a slice of the vocabulary where all lists together have about as many slices as the CPU has cores."""
    return cpu_chunk(vocab, max(n for n in CPU_SLICES if n == 1 or n * lists <= machine.cores))


hash_extents_extent = Derived["HashExtents", int]


@dataclass(frozen=True)
class HashExtents:
    """How a thread block hashes a row: a thread finds the places of `ahead` units at a time."""

    hidden: int
    k: int
    units: int
    dtype: str
    threads: int  # of the thread block
    ahead: int = 1  # units whose columns a thread holds together
    copies: int = 1  # of a row in shared memory, each in banks of its own; a power of two

    # Bits of the place of a unit.
    bits = hash_extents_extent(lambda e: index_bits(e.k))

    @property
    def vec(self) -> int:
        """Elements of one load of the row: the fewest with which no thread has more than one load, or the widest."""
        most = WIDEST // numpy_dtype(self.dtype).itemsize
        fitting = [v for v in (1, 2, 4, 8) if v <= most and self.hidden % v == 0]
        return next((v for v in fitting if self.hidden // v <= self.threads), fitting[-1])

    vector_bytes = hash_extents_extent(lambda e: e.vec * numpy_dtype(e.dtype).itemsize)
    # Registers of 32 bits that such a load fills.
    vector_words = hash_extents_extent(lambda e: ceildiv(e.vector_bytes, 4))
    # Loads that a thread has in flight.
    vectors = hash_extents_extent(lambda e: min(MOST_VECTORS, ceildiv(e.hidden // e.vec, e.threads)))
    # 32-bit words of shared memory that the row and its copies take.
    row_words = hash_extents_extent(lambda e: e.hidden * e.copies)
    # Bytes of one load of a unit's columns, which are int16.
    column_bytes = hash_extents_extent(lambda e: next(size for size in (16, 8, 4, 2) if 2 * e.k % size == 0))

    @property
    def column_loads(self) -> int:
        """Loads of columns that a thread holds at a time; they divide the unit's columns evenly."""
        every = 2 * self.k // self.column_bytes
        return max(n for n in range(1, every + 1) if every % n == 0 and n * self.column_bytes <= 2 * MOST_COLUMNS)

    # Registers of 32 bits that one load of columns fills.
    column_words = hash_extents_extent(lambda e: ceildiv(e.column_bytes, 4))
    # Columns that a thread holds at a time.
    held = hash_extents_extent(lambda e: e.column_loads * e.column_bytes // 2)


count_extents_extent = Derived["CountExtents", int]


@dataclass(frozen=True)
class CountExtents:
    """How thread blocks count the hits of a row.

    The vocabulary is divided into `slices * cluster` *parts* of `part` words. For each row and slice there is a cluster
    of thread blocks, each of which counts the words of one part and looks up its share of the bands.
    """

    vocab: int
    cuckoo: bool
    threads: int
    cluster: int
    slices: int
    lanes: int  # of a warp that go through a bucket together
    loads: int  # buckets that these lanes have in flight
    exchange: int  # 0: hits go to the thread block that counts the word; 1: buckets go to all thread blocks
    finishers: int  # thread blocks that finish a list: 1, or all of a cluster
    bands: int  # at which the kernel is fast; it runs with any number

    warps = count_extents_extent(lambda e: e.threads // WARP)
    # Groups of `lanes` lanes in a thread block.
    groups = count_extents_extent(lambda e: e.threads // e.lanes)
    # Words of the vocabulary in a part: a multiple of what a warp compares at a time.
    part = count_extents_extent(lambda e: PER_WARP * ceildiv(e.vocab, PER_WARP * e.slices * e.cluster))
    # Number of 32-bit words of shared memory with the hits of a part.
    cells = count_extents_extent(lambda e: e.part // PER_CELL)
    # Number of 32-bit words in the bitmap of the vocabulary.
    bitmap = count_extents_extent(lambda e: bitmap_words(e.vocab))
    # Bands of a thread block's share whose codes are in shared memory at a time.
    tile = count_extents_extent(lambda e: ceildiv(min(e.bands, MOST_BANDS), e.cluster))
    # Buckets that thread blocks tell each other of at a time.
    spans = count_extents_extent(lambda e: e.tile * e.cluster if e.exchange else 0)


compact_extents_extent = Derived["CompactExtents", int]


@dataclass(frozen=True)
class CompactExtents:
    """How thread blocks compact a bitmap: each reads all of it, and writes the words of its share."""

    vocab: int
    threads: int
    shares: int

    warps = compact_extents_extent(lambda e: e.threads // WARP)
    # Number of 32-bit words in the bitmap.
    bitmap = compact_extents_extent(lambda e: bitmap_words(e.vocab))
    # Number of the bitmap's 32-bit words that a thread loads together.
    loads = compact_extents_extent(lambda e: min(MOST_LOADS, ceildiv(e.bitmap, e.threads)))
    # Number of the bitmap's 32-bit words in a share; the last one may have fewer.
    share = compact_extents_extent(lambda e: ceildiv(e.bitmap, e.shares))

    @property
    def item(self) -> int:
        """Bits that a thread takes at a time: fewer where there are threads enough."""
        return next(bits for bits in (8, 16, BITS) if self.share * BITS <= self.threads * bits or bits == BITS)

    # Pieces of `item` bits in a share.
    items = compact_extents_extent(lambda e: e.share * BITS // e.item)


def shared_limit(machine: Machine) -> int:
    """Bytes of dynamic shared memory that a thread block may take."""
    return min(MOST_SHARED, machine.block_shared_bytes - STATIC_SHARED)


@dataclass(frozen=True)
class Room:
    """Elements of the arrays in dynamic shared memory, in the order in which they lie; see `state` for what they are.

    Spans have 8 bytes each, the others 4.
    """

    spans: int = 0
    cells: int = 0
    row: int = 0
    places: int = 0
    codes: int = 0
    bitmap: int = 0

    @classmethod
    def of(
        cls,
        hashing: HashExtents | None = None,
        count: CountExtents | None = None,
        compact: CompactExtents | None = None,
    ) -> Room:
        """The arrays of a kernel that hashes, counts, or does both. A kernel that counts without hashing reads its
        codes.
        """
        units = 0 if not hashing else count.tile * hashing.units if count else hashing.threads
        return cls(
            spans=count.spans if count else 0,
            cells=count.cells if count else 0,
            row=hashing.row_words if hashing else 0,
            places=units,
            codes=count.tile if count and not hashing else 0,
            bitmap=compact.bitmap if compact else 0,
        )

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, a multiple of 8."""
        words = self.cells + self.row + self.places + self.codes + self.bitmap
        return 8 * (self.spans + ceildiv(words, 2))

    def at(self, name: str) -> int:
        """Where an array begins, in elements of its own size."""
        place = 0
        for other, size in vars(self).items():
            if other == name:
                return place // (8 if name == "spans" else 4)
            place += size * (8 if other == "spans" else 4)
        raise KeyError(name)
