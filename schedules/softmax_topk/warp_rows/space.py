"""The space of `warp_rows`, and the extents that follow from a point of it. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, NotApplicable, Table, ceildiv, powers
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

WARP = 32  # lanes
# Rows of a thread block, each with a warp.
ROWS = powers(1, 8)
# A lane holds MAX_VOCAB / 32 = 64 elements; more would not leave enough registers to work with.
MAX_VOCAB = 2048
# All keys are ranked by the 32 lanes of one warp.
MAX_K = 1024
# The largest k that takes its threshold from the lanes' maxima. There are only 32 of these: the nearer k is to 32, the
# more elements reach the k-th largest of them, too many in the end to compare each with all others.
COUNTED = 16
# Keys for which that way has room in shared memory.
COUNTED_ROOM = 128
# The most keys of one bin: a key is compared with all keys of its bin.
CROWD = 32
# As long as k is at most this share of the row, elements of the bins up to the cut are marked, and the marked ones
# taken one by one. For larger k it is cheaper to go through all elements once more.
SPARSE = 0.16
# How many threads a multiprocessor is to hold, by the most elements that a lane holds. That bounds a thread's registers
# to 64, 96 and 128.
RESIDENT = ((32, 1024), (64, 640), (MAX_VOCAB, 512))


@dataclass(frozen=True)
class Layout:
    """How the kernel of one point lays a row out over a warp's registers and over the warp's part of shared memory.

    A lane's elements are numbered from 0 to `held` - 1, vector after vector; `state.column_of` has their columns.
    """

    vocab: int
    k: int
    ids: int  # given columns of a row
    dtype: str  # of the logits
    biased: bool  # whether a bias is added
    masked: bool  # whether there are bitmaps of allowed columns
    capped: bool  # whether there is a soft cap
    rows: int  # rows, and warps, of a thread block
    overlapped: bool  # whether the kernel is started by programmatic dependent launch

    @classmethod
    def of(cls, problem: SoftmaxTopk, decisions: Decisions) -> Layout:
        return cls(
            vocab=problem.vocab,
            k=problem.k,
            ids=problem.ids,
            dtype=problem.dtype,
            biased=bool(problem.bias),
            masked=bool(problem.allowed),
            capped=bool(problem.capped),
            rows=decisions["rows"],
            overlapped=bool(decisions["overlap"]),
        )

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return WARP * self.rows

    @property
    def resident(self) -> int:
        """Thread blocks that should fit on a multiprocessor at the same time, which limits the
        registers of a thread.
        """
        return max(next(threads for held, threads in RESIDENT if self.held <= held) // self.threads, 1)

    # The row in registers.

    @property
    def width(self) -> int:
        """Elements of a 16-byte vector."""
        return 16 // numpy_dtype(self.dtype).itemsize

    @property
    def aligned(self) -> bool:
        """Whether every row begins with a vector; if not, a row's first vector also has the end of the row before."""
        return self.vocab % self.width == 0

    @property
    def vectors(self) -> int:
        """Vectors of a lane."""
        row_vectors = ceildiv(self.vocab + (0 if self.aligned else self.width - 1), self.width)
        return ceildiv(row_vectors, WARP)

    @property
    def held(self) -> int:
        """Elements of a lane, including places before or after the row, which hold minus infinity."""
        return self.vectors * self.width

    @property
    def mark_words(self) -> int:
        """Words of 32 bits that have one bit for each element of a lane."""
        return ceildiv(self.held, 32)

    @property
    def sums(self) -> int:
        """Partial sums that a lane keeps, so that an addition does not wait for the one before."""
        return min(self.held, 4)

    # How the k largest are found.

    @property
    def counted(self) -> bool:
        """Whether the threshold comes from the lanes' maxima, and keys are ranked by counting, without bins."""
        return self.k <= COUNTED

    @property
    def _parts(self) -> list[int]:
        """Numbers of equal groups into which a lane's elements can be divided, so that a warp has at least k groups."""
        return [g for g in range(ceildiv(self.k, WARP), self.held + 1) if self.held % g == 0]

    @property
    def groups(self) -> int:
        """Groups of a lane's elements whose maxima are looked at: at least k elements reach the least of all maxima."""
        return self._parts[0]

    @property
    def tops(self) -> int:
        """Maxima that are found side by side before they are joined to `groups`.

        At least four if there are as many elements, so that an instruction does not wait for the one before.
        """
        return next(g for g in self._parts if g % self.groups == 0 and g >= min(4, self.held))

    @property
    def bins(self) -> int:
        """Bins; a multiple of 128, because a lane scans four at a time. 0 if keys are ranked by counting."""
        return 0 if self.counted else max(128, min(2 * self.sorted_keys, 512), self.sorted_keys)

    @property
    def lane_bins(self) -> int:
        """Bins that a lane scans."""
        return self.bins // WARP

    @property
    def sparse(self) -> bool:
        """Whether elements up to the cut are few enough to be marked and then found one by one."""
        return self.k < SPARSE * self.vocab

    # Keys and counts in shared memory.

    @property
    def room(self) -> int:
        """Keys that there may be to rank."""
        return COUNTED_ROOM if self.counted else self.k + CROWD

    @property
    def sorted_keys(self) -> int:
        """Keys that the bitonic sort puts in order: a power of two, at least a pair for each lane."""
        return max(1 << (self.k - 1).bit_length(), 2 * WARP)

    @property
    def selected(self) -> int:
        """Keys that a bisection may leave."""
        return self.room if self.counted else self.sorted_keys

    @property
    def keys(self) -> int:
        """Places for keys. Ranking reads two at a time, and up to two after the last."""
        return max(ceildiv(self.room + 2, 4) * 4, self.sorted_keys)

    @property
    def counts(self) -> int:
        """Words for the bins' counts: four before the first bin's, of which the last says where the first bin begins.

        Four, so that vectors of counts stay aligned. The first of these words is free; see `bins.read_back`.
        """
        return self.bins + 4 if self.bins else 0

    @property
    def bytes(self) -> int:
        """Shared memory of a warp."""
        return 8 * self.keys + 4 * self.counts


# Words that a warp ranks as fast as a thread block.
MOST_OF_WARP = 32
# Words of a row that a warp ranks at once, whatever k.
SHORT = 512


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    if problem.vocab > MAX_VOCAB:
        raise NotApplicable(f"vocab={problem.vocab} exceeds {MAX_VOCAB}: a warp would not hold the row in registers")
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: a warp alone would take long to rank them")
    return {"rows": ROWS, "overlap": (int(machine.has_clusters),)}


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    return {"rows": 4, "overlap": int(machine.has_clusters)}


def declines(problem: SoftmaxTopk, machine: Machine) -> bool:
    """Whether each row may have a multiprocessor, which then ranks many words faster than a warp.

    On an H200 three rows of 1,431 words at k = 128, and 25 of 1,882 at 51, took 2.1 and 1.7 times as long by warps, but
    one of 143 words at 141 took 0.63 times as long (`scripts/regret.py`, seeds 1, 7 and 8).
    """
    return problem.batch_extent <= machine.cores and problem.k > MOST_OF_WARP and problem.vocab > SHORT


def features(problem: SoftmaxTopk, machine: Machine, decisions: Decisions) -> Features:
    layout = Layout.of(problem, decisions)
    each = ceildiv(problem.batch, layout.rows) / machine.cores
    return {
        "blocks_each": each,
        "waves": each / layout.resident,
        "threads_each": min(each, layout.resident) * layout.threads,
        "thread_vectors": layout.vectors,
        "k_share": problem.k / problem.vocab,
        "k_each": problem.k / WARP,
    }
