"""The space of `warp_gather`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, Launch, Table, ceildiv, powers
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup

from ..gathering import gathered
from ..vectors import WIDEST, load_widths

WARP = 32  # lanes
LANES = powers(4, WARP)
# Loads in flight a lane: 16 of 16 bytes take 64 registers. Between the powers of two are numbers that leave little for
# a last, partly filled batch of a round number of entries.
LOADS = (1, 2, 3, 4, 5, 7, 8, 10, 13, 16)
TILES = powers(1, 8)
# A row of up to LONG_ROW entries takes at most MAX_ROUNDS rounds, each of which waits for memory once. A longer row
# needs as many entries at once as LONG_ROW entries do.
LONG_ROW, MAX_ROUNDS = 512, 32
# Most thread blocks along the second axis of a grid.
MOST_TABLES = 65535
# Bytes that a lane has in flight up to which a thread block has several tiles by default, where there are more tiles
# than thread blocks that the multiprocessors hold at once: 6,597 rows of 1,426 columns, in loads of 8 bytes, took half
# as long on an H200 (`scripts/regret.py`); 53,248 rows of 20 entries, 128 columns wide in eight bits, 4 % less.
FEW_BYTES, FEW_STORED_BYTES, FEW_BYTES_TILES, RESIDENT_BLOCKS = 64, 80, 4, 32
# Loads of table rows that a lane has in flight by default, at most, unless a row is long.
MOST_USUAL = 8
# Entries of a short row, and warps of a multiprocessor that all wait for memory at the same time.
SHORT_ROW, WAITING_WARPS = 10, 8
# Entries of a row up to which also fewer warps than multiprocessors wait.
FEW_ENTRIES = 2


extent = Derived["Extents", int]
whether = Derived["Extents", bool]


@dataclass(frozen=True)
class Extents:
    """The sizes of one point's kernel."""

    width: int  # columns of the table
    dtype: str  # of the output, and of a table that is not stored in eight bits
    stored: str  # the dtype of a table in eight bits, whose rows have scales
    value: str  # dtype of the values
    index: str  # dtype of indptr and indices
    weighted: bool  # whether entries have values
    mode: str  # "sum", "mean" or "max"
    padded: bool  # whether entries of one id count as absent
    tables: int  # that are looked up, one after another in one array
    lanes: int  # lanes of a warp side by side along the columns of a tile
    vec: int  # elements of one load of a lane
    loads: int  # loads of table rows that a lane has in flight
    tiles: int  # tiles of a thread block
    overlap: int  # 0, 1, 2, as in vocabulary.py; 2 reads ids before the wait for the producer kernel
    prefetch: bool  # guessed rows are brought into the L2 cache before that wait

    @classmethod
    def of(cls, problem: NhotLookup, decisions: Decisions) -> Extents:
        return cls(
            width=problem.width,
            dtype=problem.dtype,
            stored=problem.stored,
            value=problem.value_dtype,
            index=problem.index,
            weighted=bool(problem.weighted),
            mode=problem.mode,
            padded=bool(problem.padded),
            tables=problem.tables,
            lanes=decisions["column_lanes"],
            vec=decisions["vec"],
            loads=decisions["loads"],
            tiles=decisions["tiles"],
            overlap=decisions["overlap"],
            prefetch=bool(decisions["prefetch"]),
        )

    # Whether entries have to be counted: a row's ends do not tell how many of them count.
    counts = whether(lambda e: e.padded and e.mode != "sum")
    # Whether rows of the table have scales.
    scaled = whether(lambda e: bool(e.stored))
    load_bytes = extent(lambda e: e.vec * (1 if e.scaled else numpy_dtype(e.dtype).itemsize))
    # Elements of the output that a lane stores at once: up to 16 bytes.
    stored_together = extent(lambda e: min(e.vec, WIDEST // numpy_dtype(e.dtype).itemsize))
    # Registers of 32 bits that a load fills.
    words = extent(lambda e: ceildiv(e.load_bytes, 4))
    # Groups of `lanes` lanes in a warp. Each group takes entries of its own, all of them the same columns.
    groups = extent(lambda e: WARP // e.lanes)
    # Entries whose table rows a warp has in flight at once.
    batch = extent(lambda e: e.groups * e.loads)
    tile_columns = extent(lambda e: e.lanes * e.vec)
    # Tiles of a row of the output.
    row_tiles = extent(lambda e: ceildiv(e.width, e.tile_columns))
    # Whether the last tile of a row has lanes without a column.
    ragged = whether(lambda e: e.width % e.tile_columns != 0)
    # Threads of a thread block: a warp for each tile.
    threads = extent(lambda e: WARP * e.tiles)
    # Whether ids are read before the wait for the producer kernel.
    reads_ahead = whether(lambda e: e.overlap == 2)


def space(problem: NhotLookup, machine: Machine) -> Table:
    return {
        "column_lanes": LANES,
        "vec": load_widths(problem),
        "loads": LOADS,
        "tiles": TILES,
        "overlap": (0, 1, 2) if machine.has_clusters else (0,),
        "prefetch": (0, 1) if machine.has_clusters else (0,),
    }


def most_lanes(problem: NhotLookup, vec: int) -> int:
    """The largest number of lanes of which more than half have a column."""
    return max(n for n in LANES if n == LANES[0] or n * vec < 2 * problem.width)


def allowed(problem: NhotLookup, machine: Machine, decisions: Decisions) -> str | None:
    e = Extents.of(problem, decisions)
    most = most_lanes(problem, e.vec)
    if e.reads_ahead and e.tables > 1:
        return "where a table begins is not read before the wait for the producer kernel"
    if e.prefetch and not e.reads_ahead:
        return "rows are prefetched by the ids that are read ahead"
    if e.lanes > most:
        return f"half of {e.lanes} lanes have no column of width={problem.width}"
    if e.batch > WARP:
        return f"{e.groups} groups of {e.loads} loads exceed the {WARP} ids that a warp holds"
    if e.batch > max(2 * problem.nonzeros, WARP // most):
        return f"{e.batch} entries at once are more than twice nonzeros={problem.nonzeros}"
    if e.batch * MAX_ROUNDS < min(problem.nonzeros, LONG_ROW):
        return f"{e.batch} entries at once leave a row of nonzeros={problem.nonzeros} waiting for memory"
    return None


def waits(problem: NhotLookup, machine: Machine) -> bool:
    """Whether short rows of a dense table are as many warps' work as a part of the GPU's: trips to memory are the time.

    On an H200 295 rows of five entries, 47 columns wide, took 1.07 us with guessed entries, and 1.37 us in
    `dealt_gather`; 12 of ten entries, 499 wide, 0.95 and 1.33 us; 792 of two entries, 91 wide, 2.6 and 1.4 us; two of
    one entry, 1763 wide, 0.8 and 1.2 us.
    """
    if not (machine.has_clusters and problem.plain and problem.nonzeros <= SHORT_ROW):
        return False
    columns = load_widths(problem)[0] * WARP
    least = machine.cores if problem.nonzeros > FEW_ENTRIES else 0
    return least <= problem.rows * ceildiv(problem.width, columns) <= WAITING_WARPS * machine.cores


def narrow_loads(problem: NhotLookup, machine: Machine) -> bool:
    """Whether lanes load 2 bytes at a time, of rows of few entries, and thread blocks have several tiles: 280 rows of
    five entries, 2029 columns wide in float16, took 5.0 us on an H200, and 7.8 us in `dealt_gather`; 1019 of ten
    entries, 297 wide, 1.3 times as long as there.
    """
    if problem.nonzeros > MOST_USUAL:
        return False
    vec = load_widths(problem)[0]
    tiles = problem.bags * ceildiv(problem.width, vec * WARP)
    return vec * numpy_dtype(problem.dtype).itemsize < 4 and tiles > RESIDENT_BLOCKS * machine.cores


def default(problem: NhotLookup, machine: Machine) -> Decisions:
    """As many loads at once as a row has entries, up to 8 in a lane; for rows so long that these would wait for memory
    more loads, or narrower tiles. Where a lane has few bytes in flight, thread blocks of several tiles: of thread
    blocks of one warp a multiprocessor holds half as many warps as it has room for. Where `waits`, entries are guessed.
    """
    vec = load_widths(problem)[0]
    widest = most_lanes(problem, vec)
    points = []
    for lanes in sorted((n for n in LANES if n <= widest), reverse=True):
        each = ceildiv(problem.nonzeros, WARP // lanes)
        usual = max(n for n in LOADS if n <= min(each, MOST_USUAL, lanes))
        points += [
            {"column_lanes": lanes, "vec": vec, "loads": loads, "tiles": 1, "overlap": 0, "prefetch": 0}
            for loads in (usual, *LOADS[LOADS.index(usual) + 1 :])
        ]
    found = next(point for point in points if allowed(problem, machine, point) is None)
    e = Extents.of(problem, found)
    if waits(problem, machine):
        at_once = {**found, "loads": min(n for n in LOADS if n >= problem.nonzeros), "overlap": 2, "prefetch": 1}
        return at_once if allowed(problem, machine, at_once) is None else found
    few_bytes = e.loads * e.load_bytes <= (FEW_STORED_BYTES if e.scaled else FEW_BYTES)
    several = few_bytes and problem.bags * e.row_tiles > RESIDENT_BLOCKS * machine.cores
    return {**found, "tiles": FEW_BYTES_TILES} if several else found


def launch(problem: NhotLookup, decisions: Decisions) -> Launch:
    return Launch(Extents.of(problem, decisions).threads)


def features(problem: NhotLookup, machine: Machine, decisions: Decisions) -> Features:
    e = Extents.of(problem, decisions)
    rounds = ceildiv(problem.nonzeros, e.batch)
    threads = problem.bags * e.row_tiles * WARP
    return {
        "blocks_each": ceildiv(problem.bags * e.row_tiles, e.tiles) / machine.cores,
        "threads_each": threads / machine.cores,
        "block_threads": e.threads,
        "rounds": rounds,
        "used": problem.nonzeros / (rounds * e.batch),
        "columns_used": e.width / (e.row_tiles * e.tile_columns),
        "load_bytes": e.load_bytes,
        "in_flight": e.loads * e.load_bytes,
        "sharing": e.groups,
        **gathered(problem, machine, rounds, threads, e.tile_columns),
    }
