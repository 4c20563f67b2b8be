"""How a row is cut into vectors, and these among the blocks of a cluster. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.template import ceildiv

extent = Derived["Share", int]
whether = Derived["Share", bool]


@dataclass(frozen=True)
class Share:
    """What one block has of a row, in vectors of 16 bytes. Neighbouring blocks have neighbouring shares."""

    vocab: int
    itemsize: int  # bytes of an element
    threads: int
    cluster: int  # blocks that share a row

    # Warps of a block.
    warps = extent(lambda e: e.threads // 32)
    # Elements of a vector.
    width = extent(lambda e: 16 // e.itemsize)
    # Elements of a 32-bit word.
    per_word = extent(lambda e: 4 // e.itemsize)
    # Whether every row begins with a vector. If not, its first and last vector are shared with other rows.
    aligned = whether(lambda e: e.vocab % e.width == 0)
    # The most vectors that a row touches.
    row_vectors = extent(lambda e: ceildiv(e.vocab + (0 if e.aligned else e.width - 1), e.width))
    # Vectors of a block, 32 per warp: all blocks have as many, except the last ones, which may have fewer.
    share = extent(lambda e: ceildiv(ceildiv(e.row_vectors, e.cluster), 32) * 32)
