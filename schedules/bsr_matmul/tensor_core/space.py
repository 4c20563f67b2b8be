"""The space of `tensor_core`, and the extents that its kernel is built from. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.machine import REGISTER_FILE, Machine
from tvm_sparse.core.template import Decisions, Features, Launch, NotApplicable, Table, ceildiv, powers
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from ..features import features as product_features
from ..stored import refuse_turned

# Rows of the weight and of x of a warp's tile: from one fragment to what registers hold.
TILE_N = powers(8, 64)
TILE_M = powers(8, 128)
# Warps that share a tile, and warps on neighbouring tiles along m, which read the same blocks at the same time.
REDUCE_WARPS = powers(1, 16)
WARPS_M = powers(1, 4)
# Steps whose loads are in flight together.
DEPTH = powers(1, 8)
# Thread blocks that share a long row. 8 is the largest cluster that every GPU with clusters runs.
CLUSTER = powers(1, 8)
# Threads of a block: up to 512, so that each can have 128 registers.
MAX_WARPS = 16
# Rows of x of a tile up to which the weight may be loaded before the wait: with more, the launch is too small a part of
# the time.
MAX_AHEAD_M = 8
# Registers of a thread for sums and operands; with more the compiler spills. Found by compiling all points of the
# space.
MAX_HELD = 176
# Registers that a thread needs for addresses and counts.
BESIDES = 24
# Bytes of static shared memory of a thread block.
MAX_SHARED = 48 * 1024
# Thread blocks along the second axis of a grid, at most.
MAX_BLOCKS_Y = 65535
# Columns of a stored block that a lane loads at once, and columns of a step: four octets.
OCTET, STEP = 8, 32
# Floats between the rows of a tile in shared memory beyond its width: keeps lanes off each other's banks.
PAD = 4


def space(problem: BsrMatmul, machine: Machine) -> Table:
    refuse_turned(problem)
    if problem.dtype == "float32":
        raise NotApplicable("tensor cores would round float32 inputs to 10 bits")
    rows, cols = problem.block_shape
    if machine.capability < 80:
        raise NotApplicable(f"{machine.arch} has no tensor cores for m16n8k16")
    if rows % 8 or cols % OCTET:
        raise NotApplicable(f"blocks of {rows}x{cols} are no multiples of 8x8")
    return {
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * max(problem.m, 16)),
        "tile_n": tuple(tile for tile in TILE_N if rows % tile == 0),
        "reduce_warps": REDUCE_WARPS,
        "warps_m": WARPS_M,
        "depth": DEPTH,
        "cluster": CLUSTER if machine.has_clusters and problem.pattern == "skewed" else (1,),
        "overlap": (0, 1, 2) if machine.has_clusters else (0,),
    }


def allowed(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> str | None:
    tile_m, tile_n, warps_m = decisions["tile_m"], decisions["tile_n"], decisions["warps_m"]
    reduce_warps, depth, cluster = decisions["reduce_warps"], decisions["depth"], decisions["cluster"]
    if tile_m == 8 and tile_n % 16:
        return f"neither {tile_n} rows of the weight nor 8 of x fill the 16 of an instruction"
    warps = reduce_warps * warps_m
    if warps > MAX_WARPS:
        return f"{warps} warps a block exceed {MAX_WARPS}"
    if warps_m > 1 and tile_m * warps_m >= 2 * problem.m:
        return f"half of the {warps_m} tiles of {tile_m} rows lie beyond m={problem.m}"
    held = tile_m * tile_n // 32 + depth * ((tile_m + tile_n) // 2 + 2)
    if held > MAX_HELD:
        return f"{held} accumulators and operands exceed {MAX_HELD} registers"
    if reduce_warps > 1 and shared_bytes(decisions) > MAX_SHARED:
        return f"partial sums of {shared_bytes(decisions)} bytes exceed shared memory of {MAX_SHARED}"
    if decisions["overlap"] == 2 and problem.n // tile_n > MAX_BLOCKS_Y:
        return f"{problem.n // tile_n} tiles of n={problem.n} exceed an axis of the grid"
    if decisions["overlap"] == 2 and tile_m > MAX_AHEAD_M:
        return f"with tiles of {tile_m} rows of x the launch matters too little to load the weight ahead"
    steps = ceildiv(problem.k, STEP)
    if (held + BESIDES) * 32 * warps > REGISTER_FILE:
        return f"{held} accumulators and operands in each of {32 * warps} threads exceed the registers"
    if reduce_warps * depth > max(steps, 1):
        return f"a row has at most {steps} steps of {STEP} columns to share"
    if cluster > 1 and reduce_warps == 1:
        return "a row is shared by the warps of a thread block before it is by a cluster"
    if cluster > 1 and reduce_warps * depth * cluster >= 2 * steps:
        return f"half of {cluster} thread blocks have no part of a row of {problem.k} elements"
    return None


def shared_bytes(decisions: Decisions) -> int:
    """Bytes of shared memory: the tiles of partial sums of all warps, and what rank 0 of a cluster gets from the other
    ranks.
    """
    tile_m, tile_n, warps_m = decisions["tile_m"], decisions["tile_n"], decisions["warps_m"]
    parts = decisions["reduce_warps"] * warps_m * tile_m * (tile_n + PAD)
    return (parts + (decisions["cluster"] - 1) * warps_m * tile_m * tile_n) * 4


# Stored elements of a row of the weight that are enough for eight warps.
LONG = 2048


def default(problem: BsrMatmul, machine: Machine) -> Decisions:
    """The point that won in searches on an H200, by m, the number of rows of x.

    ======  =======================  ==================================================================
    m       tile (rows x words)      warps
    ======  =======================  ==================================================================
    to 8    8 x 16, or `of_one_strip`  8 or 16 share a tile's sum
    to 64   16 x 32                  8 share a tile's sum; 4 where m > 8, block rows have similar lengths and
                                     fewer than `LONG` stored elements
    more    32 x 32                  2 share a tile's sum, beside 2 on another tile along m
    ======  =======================  ==================================================================
    """
    table = space(problem, machine)
    tile_n = max(tile for tile in table["tile_n"] if tile <= 32)
    tile_m = max(tile for tile in table["tile_m"] if tile <= 32)
    warps: tuple[int, ...] = (2, 1)
    beside: tuple[int, ...] = (2, 1)
    depths: tuple[int, ...] = (2, 1)
    if problem.m <= 64:
        several = problem.m > 8 and problem.pattern != "skewed" and problem.k * (1 - problem.sparsity) < LONG
        tile_m, warps, beside = 16, ((4, 2, 1) if several else (8, 4, 2, 1)), (1,)
        if several:
            depths = (1, 2) if problem.m > 16 else (4, 2, 1) if tile_n == 32 else (2, 1)
    if problem.m <= 8 and tile_n % 16 == 0:
        tile_m, tile_n = 8, 16
    overlaps = (2, 1) if machine.has_clusters else (0,)
    tiles = [(tile_n, warp, side, depth, 1) for warp in warps for side in beside for depth in depths]
    if tile_m == 8:
        tiles = [*((*found[:2], 1, *found[2:]) for found in of_one_strip(problem, machine, table)), *tiles]
    choices = [
        {
            "tile_m": tile_m,
            "tile_n": wide,
            "reduce_warps": reduce_warps,
            "warps_m": warps_m,
            "depth": depth,
            "cluster": cluster,
            "overlap": overlap,
        }
        for wide, reduce_warps, warps_m, depth, cluster in tiles
        for overlap in overlaps
    ]
    return next(point for point in choices if allowed(problem, machine, point) is None)


def of_one_strip(problem: BsrMatmul, machine: Machine, table: Table) -> list[tuple[int, int, int, int]]:
    """`tile_n`, `reduce_warps`, `depth` and `cluster` for up to 8 rows of x, the best choice first.

    With at most 32 weight rows for each multiprocessor, 16 warps share a tile's sum, or, where lengths of block rows
    are skewed, the thread blocks of a cluster. With more, tiles of 32 weight rows are faster.
    """
    skewed, few = problem.pattern == "skewed", problem.n <= 32 * machine.cores
    if few:
        found = [(32, 8, 2, 8), (16, 8, 4, 4)] if skewed else [(16, 16, 2, 1), (16, 8, 2, 1)]
    else:
        found = [(16, 8, 2, 1)] if skewed else [(32, 8, 4, 1), (32, 4, 4, 1)]
    return [one for one in found if one[0] in table["tile_n"] and one[3] in table["cluster"]]


@dataclass(frozen=True)
class Extents:
    """What a kernel's phases know before it runs."""

    # Columns of a block of the weight.
    cols: int
    # Block columns of the weight: column ids are below it.
    block_cols: int
    # Units of work, `tile_n` rows of the weight each: in all, and of a block row.
    units: int
    slices: int
    # The decisions of these names.
    tile_m: int
    tile_n: int
    reduce_warps: int
    warps_m: int
    depth: int
    cluster: int
    overlap: int
    # The dtype of x, the weight and y.
    dtype: str
    # Octets in a row of a block.
    octets: int
    # Threads of a thread block, and those of them that share a tile.
    threads: int
    tile_threads: int
    # Octets from one step of a warp to its next: the warps of a tile take the steps of its row in turn.
    stride: int
    # Octets of a block row that a thread block has in flight at once: `depth` steps of each warp of a tile.
    chunk: int
    # Whether the weight is the instruction's operand A, and x operand B, or the other way round.
    weight_is_a: bool
    # Fragments of a tile: of 16 rows in operand A, of 8 in operand B.
    a_fragments: int
    b_fragments: int
    # Floats from one row of a tile in shared memory to the next.
    pitch: int
    # Pairs of neighbouring elements in a tile.
    pairs: int

    @classmethod
    def of(cls, problem: BsrMatmul, decisions: Decisions) -> Extents:
        rows, cols = problem.block_shape
        tile_m, tile_n, reduce_warps = decisions["tile_m"], decisions["tile_n"], decisions["reduce_warps"]
        weight_is_a = tile_m == 8
        a_rows, b_rows = (tile_n, tile_m) if weight_is_a else (tile_m, tile_n)
        return cls(
            **decisions,
            cols=cols,
            block_cols=problem.k // cols,
            units=problem.n // tile_n,
            slices=rows // tile_n,
            dtype=problem.dtype,
            octets=cols // OCTET,
            threads=32 * reduce_warps * decisions["warps_m"],
            tile_threads=32 * reduce_warps,
            stride=4 * reduce_warps,
            chunk=4 * reduce_warps * decisions["depth"],
            weight_is_a=weight_is_a,
            a_fragments=a_rows // 16,
            b_fragments=b_rows // 8,
            pitch=tile_n + PAD,
            pairs=tile_m * tile_n // 2,
        )


def launch(problem: BsrMatmul, decisions: Decisions) -> Launch:
    return Launch(Extents.of(problem, decisions).threads)


def features(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> Features:
    e = Extents.of(problem, decisions)
    warps_m = decisions["warps_m"]
    return product_features(
        problem,
        machine,
        tile_m=e.tile_m * warps_m,
        outputs=e.tile_m * warps_m * e.tile_n,
        threads=e.threads,
        blocks=e.units * ceildiv(problem.m, e.tile_m * warps_m) * e.cluster,
        work_each=e.octets,
        at_once=e.chunk,
        sharing=e.cluster,
        held=e.tile_m * e.tile_n // 32 + e.depth * (e.tile_m + e.tile_n) // 2,
    )
