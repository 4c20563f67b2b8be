"""Which points the gates have: the values of each decision, the points that are left out, and the default one."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, NotApplicable, Table, powers
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ...device.pool import most_asked
from .layout import MAX_CLUSTER_SHARED, MAX_SHARED, Layout

# Threads of a block. A row of 10,240 or 25,000 elements is cut evenly by 5 or 7 warps.
THREADS = (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
# The fewest threads of a block that has a multiprocessor of its own.
ALONE = 256
# The fewest and the most threads of one that shares a multiprocessor, by default, and the 16-byte vectors of a row for
# each thread. On an H200 rows of 4,000 to 25,000 words of float32 then took 0.7 to 0.9 times as long as with 256.
CROWDED, VECTORS_EACH = (128, 320), 16
# Bytes of a row up to which a tile of 16-bit elements has two vectors a thread by default, rather than four of twice as
# many elements, if less than a share of these would be used; and bytes from which the default marks tiles. On an H200
# 1,903 rows of 5,828 words of float16 took 0.6 times as long with two, unmarked, and 4,096 rows of 8,192 words of
# bfloat16, of which four vectors leave no place idle, 1.35 times.
SMALL_BYTES, LEAST_USED, MARKED_BYTES = 1 << 15, 0.8, 100_000
# 16-byte vectors of a thread's tile: what is worked on at once.
VECTORS = (1, 2, 3, 4, 5, 6, 8)
# Tiles in shared memory: one that is worked on and others in flight. The memory's latency times its rate needs about
# 40 KB in flight on each multiprocessor. Three won nowhere where clusters share rows.
STAGES, CLUSTER_STAGES = (1, 2, 3), (1, 2)
# Blocks per row. Clusters of more than 8 are not portable; every Hopper GPU allows them.
CLUSTERS = powers(2, 16)
# Bytes of each block's share from which on the largest clusters are the default for few rows. On an H200 one row of
# 128,256 words of bfloat16 took 0.89 times as long as by clusters of 8, and one of 262,144 words 0.82 times.
LONG_SHARE = 15_000
# The buffers of a larger k would not fit into shared memory.
MAX_K = 2048
# Elements that a thread may hold in registers; one bit each in a word marks the survivors.
MAX_HELD = 32
# Tiles that a single warp may load, one after another.
MAX_TILES_ALONE = 8
# The least share of a tile's vectors that must lie in the row; idle vectors cost as much as others.
USED = 0.85
# The largest k for which so few elements survive that the default marks tiles and searches them later (`deferred`).
DEFERRED = 64
# Bytes: about what the L2 cache holds. Only with more logits than that do rows come from memory and gain by `prefetch`.
CACHED = 50 << 20


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    """The table of `threshold_gate`."""
    require(problem)
    size = problem.batch_extent * problem.vocab * numpy_dtype(problem.dtype).itemsize
    overlap: tuple[int, ...] = (1,)
    prefetch: tuple[int, ...] = (0,)
    if not machine.has_clusters:
        # Nor is there programmatic dependent launch.
        overlap = (0,)
    elif problem.batch_extent > machine.cores:
        overlap, prefetch = (0, 1), ((0, 1) if size > CACHED else (0,))
    table = {
        "threads": THREADS,
        "vectors": VECTORS,
        "stages": STAGES,
        "overlap": overlap,
        "prefetch": prefetch,
        "deferred": (0, 1),
        "unroll": (0, 1),
    }
    if first_allowed(problem, machine, guesses(problem, machine), allowed) is None:
        raise NotApplicable(f"the survivors of one row of {problem.vocab} would not fit into shared memory")
    return table


def require(problem: SoftmaxTopk) -> None:
    """Raise `NotApplicable` for what neither template does."""
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: the buffer would not fit into shared memory")


def cluster_space(problem: SoftmaxTopk, machine: Machine) -> Table:
    """The table of `cluster_gate`."""
    if not machine.has_clusters:
        raise NotApplicable(f"{machine.arch} has no thread block clusters")
    if problem.batch_extent > 2 * machine.cores:
        raise NotApplicable(f"a block a row fills {machine.cores} multiprocessors at batch {problem.batch_extent}")
    # More blocks than can run at the same time would only wait.
    clusters = tuple(c for c in machine.clusters(CLUSTERS) if problem.batch_extent * c <= max(2 * machine.cores, 2))
    require(problem)
    table = {
        "cluster": clusters or CLUSTERS[:1],
        "threads": THREADS,
        "vectors": VECTORS,
        "stages": CLUSTER_STAGES,
        "deferred": (0, 1),
        "unroll": (0, 1),
    }
    if first_allowed(problem, machine, cluster_guesses(table, problem, machine), cluster_allowed) is None:
        raise NotApplicable(f"vocab={problem.vocab} is too short to share")
    return table


def cluster_declines(problem: SoftmaxTopk, machine: Machine) -> bool:
    """Whether the smallest clusters leave no multiprocessor for each thread block: on an H200 139 rows took 1.5 to 2
    times as long by clusters of two."""
    return CLUSTERS[0] * problem.batch_extent > machine.cores


def allowed(problem: SoftmaxTopk, machine: Machine, decisions: Decisions) -> str | None:
    """Why a point of either table is left out; None if it is not."""
    if decisions.get("prefetch") and not decisions["overlap"]:
        return "rows are prefetched in launches that overlap the producer kernel only"
    layout = Layout.of(problem, decisions)
    tiling, pool = layout.tiling, layout.pool
    if pool.bytes > most_asked(machine, MAX_SHARED if tiling.cluster == 1 else MAX_CLUSTER_SHARED):
        return f"{pool.bytes} bytes of shared memory are more than a block should take"
    if tiling.held > MAX_HELD:
        return f"{tiling.held} elements in registers are more than {MAX_HELD}"
    if tiling.vectors > 1 and tiling.chunks < USED * tiling.tiles * tiling.warps * tiling.vectors:
        return f"of {tiling.warps * tiling.vectors} vectors a tile has only {tiling.slots} to load"
    if tiling.warps > 1 and tiling.chunks < tiling.warps:
        return f"of {tiling.warps} warps only {tiling.chunks} have a vector to load"
    if tiling.threads < ALONE <= 32 * tiling.chunks and problem.batch_extent <= machine.cores:
        return f"{tiling.threads} threads are too few for a block that has a multiprocessor of its own"
    if layout.deferred and tiling.tiles == 1:
        return "a thread's only tile is searched at once"
    if layout.deferred and not layout.first.gated:
        return f"without a first threshold, as for k={problem.k}, every tile would be searched again"
    if layout.deferred and tiling.tiles * tiling.threads > 1 << 16:
        return f"the number of a tile, one of {tiling.tiles * tiling.threads}, takes more than 16 bits"
    if tiling.stages > tiling.tiles:
        return f"there are only {tiling.tiles} tiles for {tiling.stages} stages"
    if tiling.threads == 32 and tiling.tiles > MAX_TILES_ALONE:
        return f"a warp alone would load {tiling.tiles} tiles, one after another"
    return None


def cluster_allowed(problem: SoftmaxTopk, machine: Machine, decisions: Decisions) -> str | None:
    """As `allowed`, for `cluster_gate`: each block of a cluster has a multiprocessor of its own."""
    if decisions["threads"] < ALONE:
        return f"{decisions['threads']} threads are too few for a block of a cluster"
    return allowed(problem, machine, decisions)


def guesses(problem: SoftmaxTopk, machine: Machine) -> list[Decisions]:
    """Points in the order in which they are likely to be good: large tiles, and thread blocks of 512 threads for rows
    that have a multiprocessor each. If there are more rows, a small thread block reads one in a few tiles.
    """
    crowded = problem.batch_extent > machine.cores
    itemsize = numpy_dtype(problem.dtype).itemsize
    size = problem.vocab * itemsize
    each = size / 16 / VECTORS_EACH
    marked = crowded and problem.k <= DEFERRED and size >= MARKED_BYTES
    overlap, wanted = int(machine.has_clusters), min(max(each, CROWDED[0]), CROWDED[1]) if crowded else 512
    threads = sorted(THREADS, key=lambda t: abs(log2(t / wanted)))
    tiles = size / (16 * 4 * threads[0])  # of four vectors a thread
    idle = crowded and itemsize == 2 and size <= SMALL_BYTES and tiles < LEAST_USED * ceil(tiles)
    return [
        {"threads": t, "vectors": v, "stages": s, "overlap": overlap, "prefetch": 0, "deferred": deferred, "unroll": 0}
        for v in ((2, 4, 1) if idle else (4, 2, 1))
        for t in threads
        for s in (2, 1)
        for deferred in ((1, 0) if marked else (0,))
    ]


def cluster_guesses(table: Table, problem: SoftmaxTopk, machine: Machine) -> list[Decisions]:
    """The most blocks a row that each have a multiprocessor of their own, then fewer, then more.

    Long rows are shared by the largest clusters, if all of them run at the same time.
    """
    points = [{name: point[name] for name in table if name != "cluster"} for point in guesses(problem, machine)]
    clusters = sorted((8, 4, 2), key=lambda c: (c * problem.batch_extent > machine.cores, -c))
    long = problem.vocab * numpy_dtype(problem.dtype).itemsize >= CLUSTERS[-1] * LONG_SHARE
    if long and problem.batch_extent <= machine.clusters_at_once(CLUSTERS[-1]):
        clusters.insert(0, CLUSTERS[-1])
    return [{"cluster": c, **point} for c in clusters if c in table["cluster"] for point in points]


def first_allowed(
    problem: SoftmaxTopk,
    machine: Machine,
    points: list[Decisions],
    rule: Callable[[SoftmaxTopk, Machine, Decisions], str | None],
) -> Decisions | None:
    """The first of these points that no rule leaves out."""
    return next((point for point in points if rule(problem, machine, point) is None), None)


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    """The best guess for `threshold_gate`."""
    point = first_allowed(problem, machine, guesses(problem, machine), allowed)
    assert point is not None, f"{problem}: the space would not apply"
    return point


def cluster_default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    """The best guess for `cluster_gate`."""
    points = cluster_guesses(cluster_space(problem, machine), problem, machine)
    point = first_allowed(problem, machine, points, cluster_allowed)
    assert point is not None, f"{problem}: the space would not apply"
    return point


def features(problem: SoftmaxTopk, machine: Machine, decisions: Decisions) -> Features:
    """What the time of a point of either template depends on."""
    tiling = Layout.of(problem, decisions).tiling
    each = problem.batch * tiling.cluster / machine.cores
    resident = min(each, 2048 // tiling.threads)
    return {
        "blocks_each": each,
        "waves": each / (2048 // tiling.threads),
        "threads_each": resident * tiling.threads,
        "thread_vectors": tiling.share / tiling.threads,
        "tiles": tiling.tiles,
        "used": tiling.chunks / (tiling.tiles * tiling.warps * tiling.vectors),
        "bytes_in_flight": resident * tiling.ring,
        "k_share": problem.k / problem.vocab,
        "k_each": problem.k / tiling.threads,
    }
