"""The space of `dealt_gather`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, log2

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import MAX_THREADS, REGISTER_FILE, Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, Launch, NotApplicable, Table, ceildiv
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup

from ..gathering import gathered
from ..vectors import WIDEST, load_widths
from ..warp_gather.space import narrow_loads, waits

# Thread blocks per multiprocessor, at the problem's number of rows.
BLOCKS_EACH = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# Threads that share the entries of a vector: these divide round numbers of entries (10, 20, 50, 100) evenly.
REDUCE_THREADS = (1, 2, 4, 5, 8, 10, 16, 20, 25, 32)
# Loads of table rows that a thread has in flight: 20 of 16 bytes take 80 registers.
MOST_LOADS = 20
# Loads of a thread block by default, where there are many.
BLOCK_LOADS = 1600
SECTOR = 32  # bytes: the least that L2 cache and memory read or write
MAX_SHARED = 48 * 1024  # bytes of shared memory that any kernel may have
# Registers that a thread needs beside loads, values and sums (addresses, counts).
BESIDES = 24


extent = Derived["Extents", int]
whether = Derived["Extents", bool]


@dataclass(frozen=True)
class Extents:
    """The sizes of one point's kernel. A vector is what a load of a table row brings, up to 16 bytes."""

    rows: int  # of the output that the point is for; the kernel runs with any number
    width: int  # columns of the table
    nonzeros: int  # entries of a row at which the kernel is fast; it runs with any number
    dtype: str  # of table and output
    value: str  # dtype of the values
    index: str  # dtype of indptr and indices
    weighted: bool  # whether entries have values
    vec: int  # elements of a vector
    blocks: int  # thread blocks, at `rows`
    groups: int  # threads that share the entries of a vector
    overlap: int  # 0, 1, 2, as in vocabulary.py; nothing is read before the wait for the producer kernel

    @classmethod
    def of(cls, problem: NhotLookup, decisions: Decisions) -> Extents:
        return cls(
            rows=problem.rows,
            width=problem.width,
            nonzeros=problem.nonzeros,
            dtype=problem.dtype,
            value=problem.value_dtype,
            index=problem.index,
            weighted=bool(problem.weighted),
            vec=load_widths(problem)[0],
            blocks=decisions["blocks"],
            groups=decisions["reduce_threads"],
            overlap=decisions["overlap"],
        )

    # How the output is dealt out.

    itemsize = extent(lambda e: numpy_dtype(e.dtype).itemsize)
    # Vectors of a row.
    row_vectors = extent(lambda e: e.width // e.vec)

    @property
    def unit(self) -> int:
        """Vectors that go to one thread block together: those of a sector, if a row has whole sectors."""
        sector = SECTOR // (self.vec * self.itemsize)
        return sector if self.row_vectors % sector == 0 else 1

    row_units = extent(lambda e: e.row_vectors // e.unit)
    # Vectors of a thread block at most.
    slots = extent(lambda e: e.unit * ceildiv(e.rows * e.row_units, e.blocks))
    # Threads of a thread block, whole warps: `groups` for each slot.
    threads = extent(lambda e: ceildiv(e.slots * e.groups, 32) * 32)
    spare_threads = whether(lambda e: e.slots * e.groups != e.threads)

    # What one thread loads.

    # Registers of 32 bits that a vector fills.
    words = extent(lambda e: ceildiv(e.vec * e.itemsize, 4))
    # Entries whose table rows a thread has in flight at once.
    loads = extent(lambda e: min(ceildiv(e.nonzeros, e.groups), MOST_LOADS))
    # Whether all threads have `loads` of a row's `nonzeros` entries; else some have fewer.
    even_loads = whether(lambda e: e.loads * e.groups == e.nonzeros)

    @property
    def ids_together(self) -> int:
        """Ids of one load: as many as lie aligned wherever a thread's share of an even row begins."""
        most = WIDEST // numpy_dtype(self.index).itemsize
        return next(v for v in (4, 2, 1) if v <= most and self.nonzeros % v == 0 and self.loads % v == 0)

    # Registers of 32 bits that the values of one load of ids fill.
    value_words = extent(lambda e: ceildiv(e.ids_together * numpy_dtype(e.value).itemsize, 4))

    # How the threads' sums are added: floats in shared memory, (groups, quads, pitch, wide).

    # Floats of one access to shared memory.
    wide = extent(lambda e: min(e.vec, 4))
    # Accesses to shared memory for the sums of a vector.
    quads = extent(lambda e: e.vec // e.wide)

    @property
    def pitch(self) -> int:
        """From one quad of the slots to the next: the slots, and room that shifts the next quad by half of the banks.

        So neither the stores nor the loads of a warp meet a bank twice.
        """
        return self.slots if self.quads == 1 else (self.slots + 3) // 8 * 8 + 4

    # Floats in shared memory.
    partial_sums = extent(lambda e: e.groups * e.quads * e.pitch * e.wide)
    # Neighbouring elements that a thread adds over the groups, and stores together.
    summed_together = extent(lambda e: min(e.vec, 2))


def space(problem: NhotLookup, machine: Machine) -> Table:
    if not problem.plain:
        raise NotApplicable(f"it adds all entries of a dense table; `warp_gather` computes {problem.key}")
    units = problem.rows * Extents.of(problem, {"blocks": 1, "reduce_threads": 1, "overlap": 0}).row_units
    table = {
        "blocks": tuple(sorted({min(machine.cores * each, units) for each in BLOCKS_EACH})),
        "reduce_threads": REDUCE_THREADS,
        "overlap": (0, 1, 2) if machine.has_clusters else (0,),
    }
    # The point with the fewest registers and the least shared memory.
    if allowed(problem, machine, {"blocks": table["blocks"][-1], "reduce_threads": 1, "overlap": 0}) is not None:
        raise NotApplicable(f"{units} sectors of output are too many for {table['blocks'][-1]} blocks")
    return table


def allowed(problem: NhotLookup, machine: Machine, decisions: Decisions) -> str | None:
    e = Extents.of(problem, decisions)
    if e.threads > MAX_THREADS:
        return f"{e.slots} vectors of {e.groups} threads each exceed {MAX_THREADS} threads a block"
    held = e.loads * (e.words + e.weighted) + e.vec
    if (held + BESIDES) * e.threads > REGISTER_FILE:
        return f"{held} loads, values and sums in each of {e.threads} threads exceed the registers"
    if e.partial_sums * 4 > MAX_SHARED:
        return f"partial sums of {e.partial_sums * 4} bytes exceed shared memory of {MAX_SHARED}"
    if (e.groups - 1) * e.loads >= problem.nonzeros:
        return f"{e.groups} groups of {e.loads} entries leave one without any of nonzeros={problem.nonzeros}"
    return None


def default(problem: NhotLookup, machine: Machine) -> Decisions:
    """As few thread blocks, and then as many threads a vector, as there may be, in launches that overlap the producer
    kernel's.

    Where these are fewer threads than each has entries, thread blocks of `BLOCK_LOADS` loads, with about as many
    threads a vector as each has entries: on an H200 14 look-ups of 200,000 loads and more took 1.04 times their best
    time, and 1.15 times with few large thread blocks. Loads of 2 bytes keep the latter.
    """
    table, overlap = space(problem, machine), int(machine.has_clusters)

    def first(blocks: Sequence[int], most: int) -> Decisions | None:
        points = (
            {"blocks": n, "reduce_threads": threads, "overlap": overlap}
            for n in blocks
            for threads in REDUCE_THREADS[::-1]
            if threads <= most
        )
        return next((point for point in points if allowed(problem, machine, point) is None), None)

    point = first(table["blocks"], REDUCE_THREADS[-1])
    assert point is not None, f"{problem}: the space would not apply"
    e = Extents.of(problem, point)
    if e.groups**2 >= problem.nonzeros or e.vec * e.itemsize < 4:
        return point
    wanted = problem.rows * e.row_vectors * problem.nonzeros / BLOCK_LOADS
    return first(sorted(table["blocks"], key=lambda n: abs(log2(n / wanted))), isqrt(problem.nonzeros)) or point


def declines(problem: NhotLookup, machine: Machine) -> bool:
    return waits(problem, machine) or narrow_loads(problem, machine)


def launch(problem: NhotLookup, decisions: Decisions) -> Launch:
    return Launch(Extents.of(problem, decisions).threads)


def features(problem: NhotLookup, machine: Machine, decisions: Decisions) -> Features:
    e = Extents.of(problem, decisions)
    at_once = e.groups * e.loads
    rounds = ceildiv(e.nonzeros, at_once)
    return {
        "blocks_each": e.blocks / machine.cores,
        "threads_each": e.blocks * e.threads / machine.cores,
        "block_threads": e.threads,
        "rounds": rounds,
        "used": e.nonzeros / (rounds * at_once),
        "columns_used": e.slots * e.groups / e.threads,
        "load_bytes": e.vec * e.itemsize,
        "in_flight": e.loads * e.vec * e.itemsize,
        "sharing": e.groups,
        "balance": e.rows * e.row_vectors / (e.slots * e.blocks),
        **gathered(problem, machine, rounds, e.blocks * e.threads, problem.width),
    }
