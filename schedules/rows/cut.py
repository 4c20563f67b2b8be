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


@dataclass(frozen=True)
class Extents:
    """What a kernel is generated from.

    Attributes
    ----------
    writes
        Whether the kernel writes a result for each element, as softmax does; else one value a row, as logsumexp.
    algorithm
        The paper's: "online", "safe" or "naive".
    dtype, vocab
        The logits' dtype and how many a row has.
    keep
        Where a row's elements stay until the normaliser is known.
    cluster
        Thread blocks that share a row, as one cluster.
    threads
        Threads of a block that share a row, or its part.
    rows
        Rows of a block; more than one only where a row has one warp.
    vectors
        Vectors that a thread has in registers at once.
    slices
        Parts of a thread block: 1, or one for each of its warps, which then is all that `threads` counts. Parts are
        numbered in the order of their columns, and the last one has the ragged elements at the row's end.
    written
        Whether vectors are loaded so that what a producer kernel wrote is seen (`device.overlap`).
    out_dtype
        The dtype of the results, where there is one for each element; the logits' if absent.
    tempered
        Whether each row has a temperature: exponents are multiplied by `RowState.factor`.
    """

    writes: bool
    algorithm: str
    dtype: str
    vocab: int
    keep: Keep
    cluster: int
    threads: int
    rows: int
    vectors: int
    slices: int = 1
    written: bool = False
    out_dtype: str = ""
    tempered: bool = False

    # ---- vectors -----------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return vector_width(self.dtype)

    @property
    def word(self) -> str:
        """The dtype of a vector's four words: one float32, or two elements of half precision."""
        return "float32" if self.dtype == "float32" and not self.written else "uint32"

    @property
    def stores(self) -> int:
        """Stores of 16 bytes that the results of a vector take."""
        return self.width // vector_width(self.out_dtype or self.dtype)

    @property
    def ragged(self) -> bool:
        """Whether rows have elements outside of their whole vectors."""
        return self.vocab % self.width != 0

    @property
    def fewest(self) -> int:
        """Whole vectors of a row before whose first one as many elements lie as can."""
        before = self.width - 1 if self.ragged else 0
        return max(0, self.vocab - before) // self.width

    # ---- parts -------------------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """Parts of a row."""
        return self.cluster * self.slices

    @property
    def part(self) -> int:
        """Whole vectors of a part, of the last one at most."""
        return ceildiv(self.vocab // self.width, self.parts)

    @property
    def part_fewest(self) -> int:
        """Whole vectors that every part has, wherever its row begins."""
        return max(0, self.fewest - (self.parts - 1) * self.part)

    @property
    def kept(self) -> int:
        """Vectors of a thread that keeps its share of the part."""
        return ceildiv(self.part, self.threads)

    @property
    def warps(self) -> int:
        """Warps of a block that share a row, or its part."""
        return self.threads // 32

    @property
    def pairs(self) -> int:
        """Pairs of (m, d) that are joined through shared memory: one from every warp of the row."""
        return self.parts * self.warps

    # ---- tiles -------------------------------------------------------------------------------------

    @property
    def tile(self) -> int:
        """Vectors of a tile."""
        return self.vectors * self.threads

    @property
    def full_tiles(self) -> int:
        """Tiles of a part that lie inside of it for every row; they are read without comparing indices."""
        return self.part_fewest // self.tile

    @property
    def other_tiles(self) -> int:
        """Tiles that follow these, of which some vectors may lie beyond the part."""
        return ceildiv(self.part, self.tile) - self.full_tiles

    @property
    def certain(self) -> int:
        """Vectors that every thread has for every row; used where a part is one tile, kept in registers."""
        return self.part_fewest // self.threads

    # ---- elements in registers ---------------------------------------------------------------------

    @property
    def in_place(self) -> bool:
        """Whether exponentials take the place of the logits in registers, so that each is computed once."""
        return self.keep == "registers" and self.dtype == "float32" and self.writes

    @property
    def fenced(self) -> bool:
        """Whether the compiler is kept from converting elements to float32 once for all of their uses.

        Two elements of half precision stay in one register; converted they would need two.
        """
        return self.keep == "registers" and self.dtype != "float32"

    @property
    def registers(self) -> int:
        """Registers that a thread needs which keeps its share of the part."""
        return 4 * self.kept + OVERHEAD[self.dtype] + (4 * (self.stores - 1) if self.writes else 0)

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
