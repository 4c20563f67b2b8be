"""How a row is cut into vectors, and these among the blocks of a cluster. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tvm_sparse.core.template import ceildiv


@dataclass(frozen=True)
class Share:
    """What one block has of a row, in vectors of 16 bytes. Neighbouring blocks have neighbouring shares."""

    vocab: int
    itemsize: int  # bytes of an element
    threads: int
    cluster: int  # blocks that share a row

    @cached_property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // 32

    @cached_property
    def width(self) -> int:
        """Elements of a vector."""
        return 16 // self.itemsize

    @cached_property
    def per_word(self) -> int:
        """Elements of a 32-bit word."""
        return 4 // self.itemsize

    @cached_property
    def aligned(self) -> bool:
        """Whether every row begins with a vector. If not, its first and last vector are shared with other rows."""
        return self.vocab % self.width == 0

    @cached_property
    def row_vectors(self) -> int:
        """The most vectors that a row touches."""
        return ceildiv(self.vocab + (0 if self.aligned else self.width - 1), self.width)

    @cached_property
    def share(self) -> int:
        """Vectors of a block, 32 per warp: all blocks have as many, except the last ones, which may have fewer."""
        return ceildiv(ceildiv(self.row_vectors, self.cluster), 32) * 32
