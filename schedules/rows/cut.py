"""How rows are cut over thread blocks, threads and vectors, and what of registers that takes; loads no compiler.

How a row is divided among threads:

vector
    16 bytes at an address that is a multiple of 16: `width` elements. All memory is read and written by vectors.
whole vectors
    Those that lie inside of the row. Rows follow each other without gaps, so where `vocab` is no multiple of `width` a
    row begins anywhere in a vector, and how many whole vectors it has depends on where.
ragged elements
    Fewer than `width` at each end of such a row, in vectors that are shared with the neighbouring rows.
part
    The whole vectors of one thread block, where a cluster of blocks shares the row, or of one warp, where each warp has
    a slice of neighbouring columns; else all of them.
tile
    `vectors` vectors for each of a part's threads. Neighbouring threads read neighbouring vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import ceildiv

# Where a row's elements stay between the pass that finds the normaliser and the pass that writes the result.
Keep = Literal["registers", "shared", "nowhere"]

# Vectors that a thread takes from shared memory at once, where the row stays there.
STAGED_VECTORS = 4
# Registers of each of a multiprocessor's four schedulers, among which the warps are divided.
REGISTERS = 16384
# Registers that a thread needs besides the elements that it keeps; found by compiling the space.
OVERHEAD = {"float32": 28, "float16": 40, "bfloat16": 40}


extent = Derived["Extents", int]
whether = Derived["Extents", bool]


@dataclass(frozen=True)
class Extents:
    """What a kernel is generated from."""

    # Whether the kernel writes a result for each element, as softmax does; else one value a row, as logsumexp.
    writes: bool
    # The paper's: "online", "safe" or "naive".
    algorithm: str
    # The logits' dtype and how many a row has.
    dtype: str
    vocab: int
    # Where a row's elements stay until the normaliser is known.
    keep: Keep
    # Thread blocks that share a row, as one cluster.
    cluster: int
    # Threads of a block that share a row, or its part.
    threads: int
    # Rows of a block; more than one only where a row has one warp.
    rows: int
    # Vectors that a thread has in registers at once.
    vectors: int
    # Parts of a thread block: 1, or one for each of its warps, which then is all that `threads` counts. Parts are
    # numbered in the order of their columns, and the last one has the ragged elements at the row's end.
    slices: int = 1
    # Whether vectors are loaded so that what a producer kernel wrote is seen (`device.overlap`).
    written: bool = False
    # The dtype of the results, where there is one for each element; the logits' if absent.
    out_dtype: str = ""
    # Whether each row has a temperature: exponents are multiplied by `RowState.factor`.
    tempered: bool = False

    # ---- vectors -----------------------------------------------------------------------------------

    # Elements of a vector.
    width = extent(lambda e: vector_width(e.dtype))

    @property
    def word(self) -> str:
        """The dtype of a vector's four words: one float32, or two elements of half precision."""
        return "float32" if self.dtype == "float32" and not self.written else "uint32"

    # Stores of 16 bytes that the results of a vector take.
    stores = extent(lambda e: e.width // vector_width(e.out_dtype or e.dtype))
    # Whether rows have elements outside of their whole vectors.
    ragged = whether(lambda e: e.vocab % e.width != 0)

    @property
    def fewest(self) -> int:
        """Whole vectors of a row before whose first one as many elements lie as can."""
        before = self.width - 1 if self.ragged else 0
        return max(0, self.vocab - before) // self.width

    # ---- parts -------------------------------------------------------------------------------------

    # Parts of a row.
    parts = extent(lambda e: e.cluster * e.slices)
    # Whole vectors of a part, of the last one at most.
    part = extent(lambda e: ceildiv(e.vocab // e.width, e.parts))
    # Whole vectors that every part has, wherever its row begins.
    part_fewest = extent(lambda e: max(0, e.fewest - (e.parts - 1) * e.part))
    # Vectors of a thread that keeps its share of the part.
    kept = extent(lambda e: ceildiv(e.part, e.threads))
    # Warps of a block that share a row, or its part.
    warps = extent(lambda e: e.threads // 32)
    # Pairs of (m, d) that are joined through shared memory: one from every warp of the row.
    pairs = extent(lambda e: e.parts * e.warps)

    # ---- tiles -------------------------------------------------------------------------------------

    # Vectors of a tile.
    tile = extent(lambda e: e.vectors * e.threads)
    # Tiles of a part that lie inside of it for every row; they are read without comparing indices.
    full_tiles = extent(lambda e: e.part_fewest // e.tile)
    # Tiles that follow these, of which some vectors may lie beyond the part.
    other_tiles = extent(lambda e: ceildiv(e.part, e.tile) - e.full_tiles)
    # Vectors that every thread has for every row; used where a part is one tile, kept in registers.
    certain = extent(lambda e: e.part_fewest // e.threads)

    # ---- elements in registers ---------------------------------------------------------------------

    # Whether exponentials take the place of the logits in registers, so that each is computed once.
    in_place = whether(lambda e: e.keep == "registers" and e.dtype == "float32" and e.writes)

    @property
    def fenced(self) -> bool:
        """Whether the compiler is kept from converting elements to float32 once for all of their uses.

        Two elements of half precision stay in one register; converted they would need two.
        """
        return self.keep == "registers" and self.dtype != "float32"

    # Registers that a thread needs which keeps its share of the part.
    registers = extent(lambda e: 4 * e.kept + OVERHEAD[e.dtype] + (4 * (e.stores - 1) if e.writes else 0))

    def available(self, blocks: int) -> int:
        """Registers that a thread may have if `blocks` thread blocks are to share a multiprocessor."""
        warps = ceildiv(blocks * self.threads * self.rows, 4 * 32)
        return min(255, REGISTERS // (warps * 32) // 8 * 8)

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor has registers for."""
        most = min(32, 2048 // (self.threads * self.rows))
        return max((blocks for blocks in range(2, most + 1) if self.available(blocks) >= self.registers), default=1)


def vector_width(dtype: str) -> int:
    """Elements in 16 bytes."""
    return 16 // numpy_dtype(dtype).itemsize
