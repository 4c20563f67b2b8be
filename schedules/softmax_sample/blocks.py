"""The thread blocks that have a row while a word of it is drawn, and what they share. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.template import ceildiv
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from ..device.pool import asked
from ..rows.cut import Extents, Keep

# A histogram has bins for a digit, and two more: for the row's mass and for that of the words that min-p leaves.
RADIX_BINS = 256
BINS = RADIX_BINS + 2
# A thread block has so many copies of each bin, so that atomics of a warp's lanes seldom meet in one.
COPIES = 4
# What `Crew.find` leaves in `State.found`; bins are counted from the last one on.
BIN, BEFORE, MASS, COUNT, COUNT_BEFORE = FOUND = range(5)
# The share of its words that a thread has room to list, by how many standard deviations more, and the most bytes of a
# thread block's lists, which any GPU has beside the histograms.
LISTED_SHARE, LISTED_MORE, LISTED_BYTES = 0.13, 5, 64 * 1024
# Vectors that a thread loads at once, and of how many threads at most: more have too few registers.
VECTORS, MOST_THREADS = 2, 512
# Thread blocks that take tickets (`cuts`): bins of an octave of probability, and of a thread block's counts.
OF_OCTAVE, OCTAVES = 32, 32
# Most words of a row's list, and how many of them a thread has room for beside those of a step. At 256 threads that is
# as much shared memory as four thread blocks of a multiprocessor have.
LISTED, LISTED_BESIDE = 5632, 8


extent = Derived["Blocks", int]
whether = Derived["Blocks", bool]


@dataclass(frozen=True)
class Blocks:
    """The thread blocks that have a row, which lies over their warps in slices of neighbouring columns."""

    problem: SoftmaxSample
    threads: int  # of a block
    cluster: int  # blocks
    keep: Keep = "nowhere"  # where the row is between passes: in shared memory, or read again
    vectors: int = 0  # that a thread loads at once; 0: as many as its registers allow
    joined: bool = False  # whether pairs (m, d) of the slices are joined, too
    ticketed: bool = False  # whether they are no cluster, and the last one to finish its sums draws (`tickets`)
    overlap: bool = False  # whether such a kernel may start before the kernel before it has ended
    bins: int = 0  # 32-bit words of bins of such a thread block, and of its list (`cuts`)
    entries: int = 0

    @property
    def ext(self) -> Extents:
        """How the row is cut."""
        return Extents(
            writes=False,
            algorithm="online",
            dtype=self.problem.dtype,
            vocab=self.problem.vocab,
            keep=self.keep,
            cluster=self.cluster,
            threads=32,
            rows=1,
            vectors=self.vectors or (VECTORS if self.threads <= MOST_THREADS else 1),
            slices=self.threads // 32,
            written=True,
            tempered=True,
        )

    # Whether rows are searched for bounds of filters.
    searches = whether(lambda e: not e.ticketed)
    # Whether elements are not the logits as they are in memory.
    adjusted = whether(lambda e: bool(e.problem.bias or e.problem.allowed or e.problem.capped))
    # Whether a vector's bits of the bitmap are in one 32-bit word, which is loaded with it.
    has_bits = whether(lambda e: bool(e.problem.allowed) and not e.ext.ragged)
    # Tiles of a slice; one more step has the row's ragged elements.
    steps = extent(lambda e: e.ext.full_tiles + e.ext.other_tiles)
    # Loads of a slice in the order of columns: its tiles, between the ragged elements of both ends.
    rounds = extent(lambda e: e.steps + (2 if e.ext.ragged else 0))

    @property
    def bytes(self) -> int:
        """Bytes of shared memory, see `search_state`."""
        histograms = 8 * (2 * BINS + len(FOUND) + 2 * BINS) + 4 * ((3 + 3 * COPIES) * BINS)
        if self.ticketed:
            histograms = 8 * (2 * BINS + len(FOUND)) + 4 * (BINS + 1) + 4 * (self.bins + self.entries + 8)
        arrays = (16 if self.joined else 8) * (self.ext.parts + 1) + 8 * (self.rounds + 1)
        lists = 4 * self.threads * self.listed if self.searches and self.joined else 0
        return asked(ceildiv(self.staged + histograms + arrays + lists, 16) * 16)

    @property
    def listed(self) -> int:
        """Most words that a thread lists of a bracket around top-p's bound (`search.bracket`)."""
        own = (self.steps + (1 if self.ext.ragged else 0)) * self.ext.vectors * self.ext.width
        share = LISTED_SHARE * own
        return min(own, round(share + LISTED_MORE * share**0.5), LISTED_BYTES // (4 * self.threads))

    @property
    def counting(self) -> Blocks:
        """Thread blocks with tickets that also count words by probability."""
        return replace(self, bins=OF_OCTAVE * OCTAVES)

    @property
    def listing(self) -> Blocks:
        """Thread blocks with tickets that list words of a bracket."""
        own = self.threads * (self.ext.vectors * self.ext.width + LISTED_BESIDE)
        return replace(self, bins=max(2 * RADIX_BINS, self.ext.parts), entries=max(2 * LISTED, own))

    # Bytes of the row that a thread block keeps in shared memory.
    staged = extent(lambda e: 16 * e.ext.slices * e.ext.part if e.keep == "shared" else 0)
