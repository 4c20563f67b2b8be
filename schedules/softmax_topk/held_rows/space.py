"""The space of `held_rows`, and the extents that follow from a point of it. Loads no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import MAX_THREADS, REGISTER_FILE, Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, Launch, NotApplicable, Table, ceildiv
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ...device.pool import RESERVED, SHARED, STATIC, asked, most_asked
from ..share import Share

THREADS = (128, 256, 384, 448, 512, 576, 640, 672, 768, 896)
# Blocks per row. Clusters of more than 8 are not portable; every Hopper GPU allows them. As many clusters of 8 blocks
# as of 7 run at the same time.
CLUSTERS = (1, 2, 3, 4, 5, 6, 8, 16)
# Groups of a block's threads, by the largest k for which there are as many. About 3/2 as many elements as k reach the
# k-th best of their tops. For k up to 100, which would take 128 groups, the gates are faster.
GROUPS = {24: 32, 50: 64}
MAX_K = max(GROUPS)
# The largest k of an early bound: with more groups it is found too late.
EARLY_K = min(GROUPS)
# Registers that a thread needs beside the row: where registers hold the row, where shared memory does, and to agree on
# a bound. The row takes no more than 16 vectors, each of which has a bit in half a word (`words.HALF`).
WORKING = 32
STAGED_WORKING = 40
LATE_WORKING = 48
MAX_WORDS = 64
# Defaults: the share's size in elements beyond which it is staged; and vectors per thread where registers hold it.
LARGE = 1 << 15
FEW = 4
# The fewest and the most threads of a block that shares a row with others, by default.
LATE = (256, 640)
# Threads of a multiprocessor, and bytes of shared memory that a block may ask for.
THREADS_MOST, MAX_SHARED = 2048, 200 * 1024
# Threads that share the ranking of one key, and keys up to which this way is taken: of more the best are selected
# first.
RANKERS = 8
RANKED = 512


extent = Derived["Layout", int]
whether = Derived["Layout", bool]


@dataclass(frozen=True)
class Layout(Share):
    """How a row lies over the blocks of a cluster, their threads and registers. A vector is 16 bytes of the row.

    Blocks have neighbouring shares of it, and of a share all threads take a vector, then the next one each.
    """

    k: int
    ids: int  # given columns of a row
    dtype: str
    staged: bool  # whether shared memory holds the row, and not registers
    agreed: bool  # whether the blocks of a row agree on one bound
    capped: bool  # whether there is a soft cap

    @classmethod
    def of(cls, problem: SoftmaxTopk, decisions: Decisions) -> Layout:
        return cls(
            vocab=problem.vocab,
            itemsize=numpy_dtype(problem.dtype).itemsize,
            threads=decisions["threads"],
            cluster=decisions["cluster"],
            k=problem.k,
            ids=problem.ids,
            dtype=problem.dtype,
            staged=bool(decisions["staged"]),
            agreed=bool(decisions["row_bound"]),
            capped=bool(problem.capped),
        )

    # The row in registers, or in shared memory.

    # Whether blocks agree on a bound while the last vectors of their shares are being copied.
    early = whether(lambda e: e.agreed and e.staged)
    # Whether blocks agree on a bound once all of the row has arrived.
    late = whether(lambda e: e.agreed and not e.staged)
    # Vectors of a thread.
    vectors = extent(lambda e: ceildiv(e.share, e.threads))
    # Vectors that a thread looks at together: two, if there are several such steps.
    step = extent(lambda e: 2 if e.early and e.vectors % 2 == 0 and e.vectors >= 4 else 1)
    steps = extent(lambda e: e.vectors // e.step)

    @cached_property
    def inner(self) -> int:
        """Steps, of these vectors, that every thread of every block has, in rows that begin with a vector."""
        least = max(min(self.share, self.row_vectors - self.share * (self.cluster - 1)), 0)
        return least // self.threads if self.aligned else 0

    # 32-bit words of a row in a thread's registers.
    words = extent(lambda e: 0 if e.staged else 4 * e.vectors)

    @cached_property
    def resident(self) -> int:
        """Blocks that should fit on a multiprocessor at the same time, which limits the registers of a thread."""
        threads = self.block_threads
        working = STAGED_WORKING if self.staged else LATE_WORKING if self.late else WORKING
        by_registers = REGISTER_FILE // (threads * (self.words + working))
        return max(min(by_registers, THREADS_MOST // threads, SHARED // (self.bytes + STATIC + RESERVED)), 1)

    # Keys.

    # Groups of threads, of whose largest elements the k-th best is the bound.
    groups = extent(lambda e: next(groups for most, groups in GROUPS.items() if e.k <= most))
    # Threads of a block: a warp more, which has no vectors, agrees with other blocks on a bound.
    block_threads = extent(lambda e: e.threads + 32 * e.agreed)
    # Threads that prepare shared memory: those of the additional warp, or of the block.
    preparers = extent(lambda e: 32 if e.agreed else e.threads)
    block_warps = extent(lambda e: e.block_threads // 32)
    # Steps after which tops are offered: all but those that pass while blocks agree.
    early_steps = extent(lambda e: max(e.steps - (3 if e.steps > 4 else 2), 1))
    # Groups of the tops that blocks tell each other. Early ones are more, as fewer elements of part of a row reach the
    # k-th best.
    row_groups = extent(lambda e: 2 * e.groups if e.early else e.groups)

    @cached_property
    def room(self) -> int:
        """Keys that a block may find: a few more than in most rows, and those of a row in order.

        There k neighbouring lanes have the best groups, each with a vector of elements that reach the bound; and where
        equals are among them twice as many.
        """
        return ceildiv(max(2 * self.k * self.width, 3 * self.groups), 32) * 32

    # Steps that may have elements which reach the bound: of a row in order k, and where equals are among them twice as
    # many.
    reached_room = extent(lambda e: 3 * e.groups)
    # Keys of a row that are ranked in one step: seldom are there more.
    at_once = extent(lambda e: 2 * e.groups)
    # Threads that share the ranking of a key in that step.
    rankers = extent(lambda e: min(1 << ((e.threads // e.at_once).bit_length() - 1), RANKERS))
    # How many sums each block, the first one included, sends the first one where blocks agree on a bound: one, of which
    # the warp more has the time to add it up, or those of its warps. 0: the others send one at the end.
    senders = extent(lambda e: 1 if e.late else e.warps if e.early and e.cluster > 1 else 0)
    # Sums of exponentials that the first block adds up: of all blocks, and of its own warps; or as many as `senders`
    # send.
    entries = extent(lambda e: e.cluster * e.senders if e.senders else e.cluster + e.block_warps)

    # Dynamic shared memory; offsets are in keys.

    # Keys of the row, from all blocks.
    capacity = extent(lambda e: max(e.cluster * e.room, e.at_once))
    # Keys that a selection keeps.
    kept = extent(lambda e: ceildiv(e.k, 32) * 32)
    # Where a block of a cluster puts the keys that it finds. A block alone finds those of the row.
    at_found = extent(lambda e: e.capacity + e.kept if e.cluster > 1 else 0)
    # Where the first block receives the keys of all.
    at_united = extent(lambda e: e.at_found + e.room)
    # Bytes of all keys.
    keys_bytes = extent(lambda e: 8 * (e.at_united + e.capacity if e.cluster > 1 else e.capacity + e.kept))
    # Where a staged share is, in words: at a multiple of a vector.
    at_staged = extent(lambda e: ceildiv(e.keys_bytes, 16) * 4)
    # Where the largest elements of its steps are in shared memory, in 32-bit words.
    at_peaks = extent(lambda e: e.at_staged + 4 * e.vectors * e.threads)
    # Where the tops of all blocks are in shared memory, in 32-bit words.
    at_row_tops = extent(lambda e: e.at_peaks + e.steps * e.threads if e.early else e.at_staged)
    # Where the sums of threads are in shared memory, in 32-bit words.
    at_thread_sums = extent(lambda e: e.at_row_tops + e.cluster * e.row_groups)

    @cached_property
    def bytes(self) -> int:
        """Bytes of dynamic shared memory."""
        if self.agreed:
            return asked(4 * (self.at_thread_sums + self.threads * self.late))
        return asked(4 * self.at_staged + 16 * self.vectors * self.threads if self.staged else self.keys_bytes)


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    if not machine.has_clusters:
        raise NotApplicable(f"{machine.arch} has no thread block clusters")
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: too much of a block's share would reach its bound")
    if problem.bias:
        raise NotApplicable("sums with a bias would not fit into the registers that hold the logits")
    if problem.capped and problem.dtype != "float32":
        raise NotApplicable("logits stay in registers in 16 bits, which a soft cap would round")
    if problem.allowed:
        raise NotApplicable("logits stay in registers as they come, without the bitmap that says which are allowed")
    if next(points(problem, machine), None) is None:
        rows = f"{problem.batch_extent} rows of {problem.vocab}"
        raise NotApplicable(f"registers and memory of {machine.cores} multiprocessors do not hold {rows} at once")
    clusters = machine.clusters(CLUSTERS)
    return {"cluster": clusters, "threads": THREADS, "staged": (0, 1), "row_bound": (0, 1)}


def points(problem: SoftmaxTopk, machine: Machine) -> Iterator[Decisions]:
    """All points of the space."""
    for cluster, threads, staged, agreed in itertools.product(machine.clusters(CLUSTERS), THREADS, (0, 1), (0, 1)):
        point = {"cluster": cluster, "threads": threads, "staged": staged, "row_bound": agreed}
        if allowed(problem, machine, point) is None:
            yield point


def allowed(problem: SoftmaxTopk, machine: Machine, decisions: Decisions) -> str | None:
    """The reason why a point is left out, or None."""
    layout = Layout.of(problem, decisions)
    if layout.staged and problem.capped:
        return "logits in shared memory stay as they come, without the soft cap"
    most = min(REGISTER_FILE // layout.threads - WORKING, MAX_WORDS)
    if layout.words > most:
        return f"{layout.words} words of a row in a thread's registers are more than {most}"
    if layout.staged and not layout.aligned:
        return f"rows of {problem.vocab} elements of {problem.dtype} do not begin with a vector: they are not staged"
    if layout.staged and not 1 < layout.vectors <= MAX_WORDS // 4:
        return f"{layout.vectors} vectors of a thread are not staged: from 2 to {MAX_WORDS // 4} are"
    if layout.threads > layout.share and layout.threads > THREADS[0]:
        return f"of {layout.threads} threads only {layout.share} have a vector"
    if layout.share * (layout.cluster - 1) >= layout.row_vectors:
        return f"of {layout.cluster} blocks the last would have nothing"
    if layout.cluster * problem.batch_extent > layout.resident * machine.cores:
        # Many rows are better streamed, as the gates do: one row is read while the one before is ranked.
        return f"{layout.cluster * problem.batch_extent} blocks are more than run at once"
    if layout.threads < layout.at_once:
        return f"{layout.threads} threads are too few to rank {layout.at_once} keys at once"
    if layout.late and layout.cluster == 1:
        return "the bound of a row in the registers of one block is the block's own"
    if layout.early and problem.k > EARLY_K:
        return f"k={problem.k} exceeds {EARLY_K}: too much of the row would reach an early bound"
    if layout.early and layout.cluster * problem.batch_extent > machine.cores:
        return f"{layout.cluster * problem.batch_extent} blocks with an early bound have no multiprocessor each"
    if layout.block_threads > MAX_THREADS:
        return f"{layout.threads} threads and a warp are more than {MAX_THREADS}"
    if layout.bytes > (limit := most_asked(machine, MAX_SHARED)):
        return f"{layout.bytes} bytes of shared memory are more than {limit}"
    return None


def launch(problem: SoftmaxTopk, decisions: Decisions) -> Launch:
    layout = Layout.of(problem, decisions)
    return Launch(layout.block_threads, layout.bytes)


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    """The most blocks a row that all run at once, each with a multiprocessor of its own.

    A large share is staged, so that its many exponentials need not wait for all of it. It gets an early bound where
    that is known to be faster, of few k and whole steps of two vectors. Other blocks of a cluster agree on a bound too,
    and have few vectors a thread.
    """

    def badly_held(layout: Layout) -> int:
        if layout.share * layout.width <= LARGE:
            return int(layout.staged or layout.late != (layout.cluster > 1))
        if layout.early:
            return 0 if layout.vectors % 2 == 0 else 2
        return 1 if layout.staged else 2

    def badness(point: Decisions) -> tuple[bool, int, int, int]:
        layout = Layout.of(problem, point)
        cluster = layout.cluster
        crowded = cluster > 1 and problem.batch_extent > machine.clusters_at_once(cluster)
        threads = min(max(layout.share // FEW, LATE[0]), LATE[1]) if layout.late else 512
        return (crowded, cluster if crowded else -cluster, badly_held(layout), abs(layout.threads - threads))

    space(problem, machine)  # raises `NotApplicable` if the template does not apply
    return min(points(problem, machine), key=badness)


def features(problem: SoftmaxTopk, machine: Machine, decisions: Decisions) -> Features:
    """What the time of a point depends on."""
    layout = Layout.of(problem, decisions)
    each = problem.batch * layout.cluster / machine.cores
    resident = min(each, layout.resident)
    return {
        "blocks_each": each,
        "waves": each / layout.resident,
        "threads_each": resident * layout.threads,
        "thread_vectors": layout.vectors,
        "bytes_in_flight": resident * layout.threads * layout.vectors * 16,
        "k_share": problem.k / problem.vocab,
        "k_each": problem.k / layout.threads,
        "row_bound": float(layout.agreed),
        "clusters_each": problem.batch / max(machine.clusters_at_once(layout.cluster), 1),
    }
