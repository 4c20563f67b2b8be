"""The space of `warp_rows`, and the extents that follow from a point of it. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, NotApplicable, Table, ceildiv, powers
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

WARP = 32  # lanes
# Rows of a thread block, each with a warp.
ROWS = powers(1, 8)
# Lanes of a warp that share a row.
LANES = (32, 16)
# Rows for each multiprocessor from which on warps have two rows at the same time by default, by the most elements that
# a lane then has, of 16 and more. On an H200 with two 20,000 rows of 256 words of float32 took 0.81 times as long, but
# 6,000 of them 1.11 times; 20,000 rows of 512 words of bfloat16 took 0.85 times as long, and so did 3,000 of 500 words
# of float16.
PAIRED = ((16, 100), (32, 20))
# Thread blocks that a multiprocessor runs at once.
MOST_BLOCKS = 32
# Words up to which ranking takes all warps as long.
FEW_RANKED = 8
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


extent = Derived["Layout", int]
whether = Derived["Layout", bool]


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
    lanes: int  # of a warp that share a row
    first_key: int = 0  # where the keys of the thread block's first row are

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
            lanes=decisions.get("lanes", WARP),
        )

    # Threads of a thread block.
    threads = extent(lambda e: e.lanes * e.rows)

    # The row in registers.

    # Elements of a 16-byte vector.
    width = extent(lambda e: 16 // numpy_dtype(e.dtype).itemsize)
    # Whether every row begins with a vector; if not, a row's first vector also has the end of the row before.
    aligned = whether(lambda e: e.vocab % e.width == 0)

    @property
    def vectors(self) -> int:
        """Vectors of a lane."""
        row_vectors = ceildiv(self.vocab + (0 if self.aligned else self.width - 1), self.width)
        return ceildiv(row_vectors, self.lanes)

    # Elements of a lane, including places before or after the row, which hold minus infinity.
    held = extent(lambda e: e.vectors * e.width)
    # Thread blocks that should fit on a multiprocessor at the same time, which limits the registers of a thread.
    resident = extent(lambda e: max(next(threads for held, threads in RESIDENT if e.held <= held) // e.threads, 1))
    # Rows that a warp has at the same time.
    warp_rows = extent(lambda e: WARP // e.lanes)
    # Words of 32 bits that have one bit for each element of a lane.
    mark_words = extent(lambda e: ceildiv(e.held, 32))
    # Partial sums that a lane keeps, so that an addition does not wait for the one before.
    sums = extent(lambda e: min(e.held, 4))

    # How the k largest are found.

    # Whether the threshold comes from the lanes' maxima, and keys are ranked by counting, without bins.
    counted = whether(lambda e: e.k <= COUNTED)

    @property
    def _parts(self) -> list[int]:
        """Numbers of equal groups into which a lane's elements can be divided, so that a row has at least k groups."""
        return [g for g in range(ceildiv(self.k, self.lanes), self.held + 1) if self.held % g == 0]

    # Groups of a lane's elements whose maxima are looked at: at least k elements reach the least of all maxima.
    groups = extent(lambda e: e._parts[0])

    @property
    def tops(self) -> int:
        """Maxima that are found side by side before they are joined to `groups`.

        At least four if there are as many elements, so that an instruction does not wait for the one before.
        """
        return next(g for g in self._parts if g % self.groups == 0 and g >= min(4, self.held))

    # Whether elements up to the cut are few enough to be marked and then found one by one.
    sparse = whether(lambda e: e.k < SPARSE * e.vocab)

    # Keys and counts in shared memory.

    # Keys that there may be to rank.
    room = extent(lambda e: COUNTED_ROOM // e.warp_rows if e.counted else e.k + CROWD)
    # Keys that the bitonic sort puts in order: a power of two, at least a pair for each lane.
    sorted_keys = extent(lambda e: max(1 << (e.k - 1).bit_length(), 2 * WARP))
    # Bins; a multiple of 128, because a lane scans four at a time. 0 if keys are ranked by counting.
    bins = extent(lambda e: 0 if e.counted else max(128, min(2 * e.sorted_keys, 512), e.sorted_keys))
    # Bins that a lane scans.
    lane_bins = extent(lambda e: e.bins // WARP)
    # Keys that a bisection may leave.
    selected = extent(lambda e: e.room if e.counted else e.sorted_keys)
    # Places for keys. Ranking reads two at a time, and up to two after the last.
    keys = extent(lambda e: max(ceildiv(e.room + 2, 4) * 4, e.sorted_keys))

    @property
    def counts(self) -> int:
        """Words for the bins' counts: four before the first bin's, of which the last says where the first bin begins.

        Four, so that vectors of counts stay aligned. The first of these words is free; see `bins.read_back`.
        """
        return self.bins + 4 if self.bins else 0

    @property
    def alone(self) -> Layout:
        """How a warp lays a row out that it has alone, after it has had several: with other places for keys."""
        return replace(self, lanes=WARP, rows=self.rows // self.warp_rows, first_key=self.rows * self.keys)

    # Keys of a thread block.
    all_keys = extent(lambda e: e.rows * e.keys + (0 if e.lanes == WARP else e.alone.rows * e.alone.keys))
    # Shared memory of a thread block.
    bytes = extent(lambda e: 8 * e.all_keys + 4 * e.rows * e.counts)


# Words that a warp ranks as fast as a thread block.
MOST_OF_WARP = 32
# Words of a row that a warp ranks at once, whatever k.
SHORT = 512


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    if problem.vocab > MAX_VOCAB:
        raise NotApplicable(f"vocab={problem.vocab} exceeds {MAX_VOCAB}: a warp would not hold the row in registers")
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: a warp alone would take long to rank them")
    return {"rows": ROWS, "overlap": (int(machine.has_clusters),), "lanes": LANES}


def allowed(problem: SoftmaxTopk, machine: Machine, decisions: Decisions) -> str | None:
    """Why a point is left out; None if it is not."""
    layout = Layout.of(problem, decisions)
    if layout.lanes == WARP:
        return None
    if problem.k > layout.lanes // 2:
        return f"k={problem.k} of the maxima of {layout.lanes} lanes would leave too many words above the least of them"
    if layout.mark_words > 1:
        return f"{layout.held} words of a row in a lane's registers are more than 32"
    if layout.rows < layout.warp_rows:
        return f"a warp has {layout.warp_rows} rows, and a thread block {layout.rows}"
    return None


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    """Few rows a thread block, and one where many words are ranked of so few rows that each has a place at once: warps
    take different times for that, and a thread block ends with its last one.

    On an H200 20,000 rows of 256 words of float32 at k = 16 took 25.0, 14.5 and 14.1 microseconds with one, two and
    four rows a thread block, and at k = 50 25.0, 17.5 and 18.0.
    """
    alone = problem.k > FEW_RANKED and problem.batch_extent <= MOST_BLOCKS * machine.cores
    point = {"rows": 1 if alone else 4 if problem.k <= COUNTED else 2, "overlap": int(machine.has_clusters)}
    paired = {**point, "lanes": WARP // 2}
    if allowed(problem, machine, paired) is None:
        held = Layout.of(problem, paired).held
        enough = next(rows for most, rows in PAIRED if held <= most)
        if held >= PAIRED[0][0] and problem.batch_extent >= enough * machine.cores:
            return paired
    return {**point, "lanes": WARP}


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
