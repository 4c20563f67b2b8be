"""The words of decisions: one name, one meaning, in every template.

Records, the command line and studies of schedule spaces show decisions under these names. A test sees that templates
use no other ones; an operator of another package declares its own words with its templates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from tvm_sparse.core.candidate import Candidate

DECISIONS: Mapping[str, str] = {
    # How the work is divided.
    "threads": "Threads of a thread block.",
    "blocks": "Thread blocks of the grid, each with an equal share of the output.",
    "dynamic": "Percent of the tiles that thread blocks take when they are ready. 0: each has an equal share of all.",
    "cluster": (
        "Thread blocks of a cluster that share one row, or one list, joined over distributed shared memory; for a"
        " product with blocks, those that share rows of x, or the rows over which a block is summed."
    ),
    "slices": (
        "Parts of the vocabulary, each with thread blocks of its own, which go through all buckets looked up, or all"
        " words that are edited."
    ),
    "row_groups": "Parts into which a beam's rows are cut, each with thread blocks of its own, which read all words.",
    "rows": "Rows of the output (or dot products) of a thread block, each with threads of its own.",
    "tiles": "Tiles of the output of a thread block, each with warps of its own.",
    "tile_m": "Rows of x that a tile of the product covers; of a sum over these rows, those of a step.",
    "tile_n": "Rows of the weight that a tile of the product covers.",
    "tile_k": "Columns of a block row's blocks that a thread block computes.",
    "warps_m": "Warps of a thread block on neighbouring tiles along m, which read the same blocks of the weight.",
    "lanes": "Lanes of a warp that share a row: all of them, or half, so that the warp has two rows at the same time.",
    "column_lanes": "Lanes of a warp side by side along the columns of a tile; others take other entries.",
    "bucket_lanes": "Lanes of a warp that go through one bucket of a hash table together.",
    "hash_threads": "Threads of a thread block of the kernel that hashes and looks words up.",
    "tickets": (
        "Thread blocks that share a row without a filter, and do not wait for each other: the last one draws. 0: a"
        " cluster does that."
    ),
    "finishers": "Thread blocks that do a list's last step, after all of its thread blocks: 1, or those of a cluster.",
    # How sums are shared.
    "exchange": (
        "What thread blocks that count hits send each other. 0: hits, to the block that counts the word; 1: where the"
        " buckets are, so that each block goes through all of them."
    ),
    "reduce_threads": "Threads that share one sum, and combine their parts at the end.",
    "reduce_warps": "Warps that share the sums of one tile, and combine their parts through shared memory.",
    # Loads and copies in flight.
    "vec": "Elements of one load.",
    "vectors": "16-byte vectors that a thread loads, and then works on, together.",
    "loads": "Loads that a thread issues before it uses the first of them.",
    "depth": "Steps of a sum whose loads are in flight together; 0: one load brings a tile of whole rows.",
    "panel": "Columns of x that are brought together, for all block rows of the weight that have a block in them.",
    "producers": "Warps of a thread block that take turns to copy the operands of a step to shared memory.",
    "stages": (
        "Tiles, or parts of tiles, in shared memory: one is in use while the others are being copied. 0: operands are"
        " not copied to shared memory."
    ),
    "registers": (
        "Entries of a row of the weight that a thread keeps in registers for all steps of a recurrent layer. With a"
        " weight in tiles: vectors, each of two rows of a tile."
    ),
    "words": "Words of an output layer whose sums a thread block has in shared memory at a time, at most.",
    "late_words": (
        "Frequent words beyond whole tiles, at most, that a thread block multiplies later, together with the words that"
        " were looked up, rather than in a tile of their own."
    ),
    "passes": (
        "Parts of a recurrent layer's batch, one after another in each step: states of one are exchanged between thread"
        " blocks while the others are computed."
    ),
    "pack": "Samples of a batch, or rows of a beam, side by side in memory, so that one load serves them all.",
    "staged": (
        "Where the data that are used more than once (the operand of all tiles, or a row) are kept. 1: in shared"
        " memory; 0: in registers, or nowhere: they are read again; 2: half in each."
    ),
    # Work done ahead of its time.
    "row_bound": (
        "1: the thread blocks of a row agree on one lower bound of its k best, in a warp more than they have otherwise;"
        " of a staged row, while its last part is being copied. 0: each block has a bound of its own."
    ),
    "overlap": (
        "Programmatic dependent launch. 0: none. 1: the kernel waits for its producer kernel, then lets its consumer"
        " kernel start. 2: it lets the consumer start at once, and reads what the template says before it waits."
    ),
    "apart": "1: a kernel takes so much shared memory that no two of its thread blocks share a multiprocessor.",
    "beside": "1: a kernel takes so much shared memory that the one after it, which overlaps, finds room beside it.",
    "evict_first": "1: a large operand that is read once leaves the L2 cache before what is read again.",
    "cached": "With evict_first: MB of the operand that are read as usual, and so stay in the cache for the next call.",
    "prefetch": "Data are brought into a cache before they are loaded, this many tiles ahead, or 1. 0: they are not.",
    # Which way is taken.
    "unroll": (
        "1: the compiler may unroll loops whose extent it does not know. 0: it may not unroll those that usually run"
        " once, so that there are fewer instructions to fetch."
    ),
    "gated": "1: after the first tiles, a row's scores are written only where the tile reaches a bound; 0: all are.",
    "deferred": "1: a tile with survivors is copied, and searched once the row is read; 0: it is searched at once.",
    "skip": "1: an element below the least of the k best so far is skipped, which the paper does not do.",
    "kept": "1: exponentials are kept, and scaled in the end; 0: they are computed again.",
    # CPU.
    "chunk": "Elements of a row that a CPU thread works on at a time.",
    "alone": "Rows up to which a CPU's calling thread does all the work; 0: other threads always take part.",
    "simd": "Elements of one SIMD vector of the CPU.",
    "dots": "1: an instruction multiplies pairs of bfloat16 numbers, and adds both products to a float32 sum.",
}

# Decisions that had another name in earlier records: by template, the new names and values of an old one. A removed
# decision has no new name, at the value that means the present program: {"stages": {1: {}}}. Other values stay.
_EARLY = {0: {"overlap": 0}, 1: {"overlap": 1}, 2: {"overlap": 2}}
_GATE_EARLY = {
    0: {"overlap": 0, "prefetch": 0},
    1: {"overlap": 1, "prefetch": 0},
    2: {"overlap": 1, "prefetch": 1},
}
_GATHER_EARLY = {
    0: {"overlap": 0, "prefetch": 0},
    1: {"overlap": 1, "prefetch": 0},
    2: {"overlap": 2, "prefetch": 0},
    3: {"overlap": 2, "prefetch": 1},
}
# Removed: the value that means the present program.
_ZERO: Mapping[int, Mapping[str, int]] = {0: {}}
_ONE: Mapping[int, Mapping[str, int]] = {1: {}}
_CLUSTERS = {"overlap": _ONE, "prefetch": _ZERO, "bound": _ZERO}
RENAMED: Mapping[str, Mapping[str, str | Mapping[int, Mapping[str, int]]]] = {
    "threshold_gate": {"early": _GATE_EARLY},
    "cluster_gate": {"split": "cluster", "early": _ONE, **_CLUSTERS},
    "sample_cluster": _CLUSTERS,
    "warp_rows": {"early": _EARLY},
    "head_warpgroups": {"overlap": {2: {}}},
    "held_rows": {"early_bound": "row_bound", "overlap": _ONE},
    "warp_gather": {
        "lanes": "column_lanes",
        "split": _ONE,
        "reduce_warps": _ONE,
        "guess": _ONE,
        "early": _GATHER_EARLY,
    },
    "persistent_rows": {"shared": _ZERO, "exchange": _ONE},
    "cluster_rows": {"shared": _ZERO},
    "persistent_tiles": {"shared": _ZERO, "exchange": _ONE},
    "dealt_gather": {"groups": "reduce_threads", "early": _EARLY},
    "tensor_core": {"split": "reduce_warps", "spread": "cluster", "early": _EARLY},
    "staged_x": {"spread": "cluster", "early": _EARLY},
    **dict.fromkeys(("softmax_held", "softmax_staged", "softmax_streamed", "logsumexp_streamed"), {"split": "cluster"}),
    **dict.fromkeys(("cross_thread", "warp_shuffle", "over_blocks"), {"lanes": "reduce_threads"}),
    **dict.fromkeys(("row_scan", "block_rows", "softmax_rows", "logsumexp_rows"), {"lanes": "simd"}),
}

# Decisions that were added later, at the values that mean the earlier programs: by template, after the decisions that
# it had.
ADDED: Mapping[str, Mapping[str, int]] = {
    "block_warpgroups": {"producers": 1},
    "fused_step": {"late_words": 0, "apart": 0},
    "held_rows": {"staged": 0, "row_bound": 0},
    "persistent_tiles": {"passes": 1},
    "sample_slices": {"tickets": 0, "overlap": 0},
    "warp_rows": {"lanes": 32},
    **dict.fromkeys(("threshold_gate", "cluster_gate", "sample_gate", "sample_cluster"), {"unroll": 1}),
}


@dataclasses.dataclass(frozen=True)
class Heir:
    """A template that has taken over some points of another one, with the same programs."""

    # Its name, and the version at which it did.
    template: str
    version: int
    # Decisions that it has not, at the values at which its points mean the same.
    dropped: Mapping[str, int]
    # Values of other decisions that its points have, where it has not all.
    values: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def takes(self, decisions: Mapping[str, int]) -> bool:
        """Whether a point is one of its own."""
        return all(decisions[name] == value for name, value in self.dropped.items()) and all(
            decisions[name] in values for name, values in self.values.items()
        )


def _registers(name: str) -> tuple[Heir, ...]:
    """Tiles of warps of their own are as many as registers have room for: 16, or fewer where 16 were not allowed."""
    dropped = {"stages": 0, "direct": 0, "dynamic": 0, "cached": 0}
    return (
        Heir(name, 1, {**dropped, "tiles": 1}, {"reduce_warps": (2, 4, 8, 16)}),
        Heir(name, 1, {**dropped, "tiles": 16}),
    )


def _lists(name: str, direct: int) -> Heir:
    shape = {"tile_m": 8, "tile_n": 16, "reduce_warps": 1, "staged": 1, "overlap": 1, "evict_first": 0, "prefetch": 0}
    return Heir(name, 1, {**shape, "direct": direct, "dynamic": 0, "cached": 0}, {"stages": (2, 3)})


_SHARED = {"reduce_warps": 8, "tiles": 1, "overlap": 1, "direct": 0}
# Templates that were divided: by name and last version, those that have their points now.
DIVIDED: Mapping[tuple[str, int], tuple[Heir, ...]] = {
    ("head_tiles", 9): (
        *_registers("head_registers"),
        Heir("head_rings", 1, {**_SHARED, "depth": 0, "stages": 2}),
        Heir("head_warp_rings", 1, {**_SHARED, "dynamic": 0}, {"stages": (2, 3), "depth": (2, 3, 4, 5)}),
    ),
    ("candidate_tiles", 3): (*_registers("candidate_registers"), _lists("candidate_warp_rings", 1)),
    ("candidate_tiles_product", 1): (
        *_registers("candidate_registers_product"),
        _lists("candidate_warp_rings_product", 0),
    ),
}


def present(candidate: Candidate) -> Candidate:
    """A candidate as records hold it, with the template that has its point now, and decisions under their present names
    (`renamed`)."""
    decisions = renamed(candidate.template, candidate.decisions)
    for heir in DIVIDED.get((candidate.template, candidate.version), ()):
        if heir.takes(dict(decisions)):
            left = tuple((name, value) for name, value in decisions if name not in heir.dropped)
            return Candidate(heir.template, heir.version, left)
    return dataclasses.replace(candidate, decisions=decisions)


def renamed(template: str, decisions: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Decisions of a record under the names that they have now, with those that were added later. Present names stay as
    they are.
    """
    rules, found = RENAMED.get(template, {}), []
    for name, value in decisions:
        rule = rules.get(name, name)
        found += [(rule, value)] if isinstance(rule, str) else list(rule.get(value, {name: value}).items())
    known = {name for name, _ in found}
    return tuple(found + [(name, value) for name, value in ADDED.get(template, {}).items() if name not in known])
