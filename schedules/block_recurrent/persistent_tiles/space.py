"""The space of `persistent_tiles`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Table, ceildiv, powers
from tvm_sparse.formats.block_recurrent import ROWS, tile_units
from tvm_sparse.operators.block_recurrent.problem import BlockRecurrent
from tvm_sparse.operators.sparse_recurrent.problem import EXCHANGES

from ...recurrent.sizes import LINE, WARP, WIDEST, register_limit, step_alone

TENSOR_CORES = 80  # the compute capability from which on tensor cores multiply bfloat16
# Groups that a warp multiplies in one round, a vector of each of two rows a lane: two instructions of a tensor core.
QUAD = 4
# Samples of one fragment of operand B, and the most samples of a pass: more would take too many registers for sums.
SAMPLES, MOST_SAMPLES = 8, 32
# Most passes of a step, and the most samples of one by default.
MOST_PASSES, USUAL_SAMPLES = 32, 16
THREADS = powers(64, 1024)
# Rounds of a tile that a warp has in registers.
REGISTERS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
# Tiles per thread block, as multiples of the fewest with which no multiprocessor has two blocks.
MULTIPLES = (1, 2, 3, 4)
# Registers that a thread needs beside weights, operands and sums (addresses, counts, the gates).
BESIDES = 44
SCHEDULED = 12  # for every so many registers the compiler takes one more, to have loads in flight
MOST_LOADS = 8  # 16-byte loads of hidden states that a thread has in flight while it copies them
MOST_DIRECT = 64  # words of hidden states in flight, where they come straight from the L2 cache
BATCHED = 2  # rounds whose operands are read at once, of those that are not in registers or whose states are copied
PAD = 4  # floats between samples of a tile's sums beyond its rows: keeps lanes off each other's banks
# Rounds of a warp in registers from which on the default has more warps share a tile.
ROUNDS = 4
# How many more groups than a typical tile has the default keeps on the chip: tiles are not equal.
MORE = 1.1


extent = Derived["Extents", int]
whether = Derived["Extents", bool]


@dataclass(frozen=True)
class Extents:
    """The sizes of one point's kernel. A *quad* is four groups of a tile, which a warp multiplies in a *round*."""

    batch: int
    hidden: int
    cell: str
    gates: int
    dtype: str
    ragged: bool
    resets: bool
    tiles: int
    across: int  # groups of a full tile
    blocks: int
    threads: int  # threads of a block
    registers: int  # rounds of a tile whose weights a warp has in registers
    stages: int  # 1: hidden states are copied to shared memory; 0: they come straight from the L2 cache
    passes: int  # parts of the batch, one after another in each step

    @classmethod
    def of(cls, problem: BlockRecurrent, decisions: Decisions) -> Extents:
        return cls(
            batch=problem.batch,
            hidden=problem.hidden,
            cell=problem.cell,
            gates=problem.gates,
            dtype=problem.dtype,
            ragged=bool(problem.ragged),
            resets=bool(problem.resets),
            tiles=problem.tiles,
            across=problem.across,
            blocks=decisions["blocks"],
            threads=decisions["threads"],
            registers=decisions["registers"],
            stages=decisions["stages"],
            passes=decisions["passes"],
        )

    # How tiles are dealt out.

    # Slots of the exchange in a step: see `RecurrentLayer.exchanges`.
    exchanges = extent(lambda e: EXCHANGES.get(e.cell, 1))
    warps = extent(lambda e: e.threads // WARP)
    # Tiles of a thread block, at most.
    most = extent(lambda e: ceildiv(e.tiles, e.blocks))
    tile_units = extent(lambda e: tile_units(e.gates))
    # Units of a thread block, at most.
    units = extent(lambda e: e.most * e.tile_units)
    # Samples of a pass; the last one may have fewer, and the missing ones have states of zero.
    samples = extent(lambda e: samples_of(e.batch, e.passes))
    # Items of a thread in a pass, at most; an item is a unit and a sample, which one thread finishes.
    items = extent(lambda e: ceildiv(e.units * e.samples, e.threads))
    # Fragments of operand B, which have eight samples each.
    fragments = extent(lambda e: ceildiv(e.samples, SAMPLES))

    # How hidden states lie, in the exchange: [sample][column], each sample a pack of its own.

    itemsize = extent(lambda e: numpy_dtype(e.dtype).itemsize)
    columns = extent(lambda e: e.hidden)
    pack = extent(lambda e: 1)
    packs = extent(lambda e: e.passes * e.samples)
    column_bytes = extent(lambda e: e.itemsize)
    # Units whose states leave in one store: a tile's, up to 16 bytes of them.
    at_once = extent(lambda e: min(e.tile_units, WIDEST // e.itemsize))
    # Bytes of one store into the exchange: the states of neighbouring units of a tile.
    sent_bytes = extent(lambda e: e.at_once * e.itemsize)
    # Vectors from one sample to the next: whole cache lines.
    pitch = extent(lambda e: ceildiv(e.across, LINE // WIDEST) * (LINE // WIDEST))
    # Vectors of the states of a pass.
    vectors = extent(lambda e: e.samples * e.pitch)
    # Vectors that a thread has in flight while it copies.
    loads = extent(lambda e: min(MOST_LOADS, ceildiv(e.vectors, e.threads)))

    # Shared memory.

    # Vectors from one sample in shared memory to the next: half a line beyond whole ones, so that the two samples that
    # eight lanes read of neighbouring groups lie in different banks.
    copy_pitch = extent(lambda e: e.pitch + LINE // WIDEST // 2)
    stage_bytes = extent(lambda e: e.samples * e.copy_pitch * WIDEST if e.stages else 0)
    # Buffers of sums: while one is read, others write to the next. With a copy of the states one suffices, since the
    # copy has a barrier.
    halves = extent(lambda e: 1 if e.stages else 2)
    # Floats from one sample of a warp's sums of a tile to the next.
    part_pitch = extent(lambda e: ROWS + PAD)
    # Floats of all warps' sums.
    parts = extent(lambda e: e.warps * e.most * e.fragments * SAMPLES * e.part_pitch)
    # Whether items carry a second value: the cell state of an LSTM, or z from a step's first exchange to the second
    # one.
    has_cell = whether(lambda e: e.cell == "lstm" or e.exchanges == 2)

    @property
    def kept(self) -> int:
        """Floats of states that threads keep for the other passes: hidden states, and the second values of items."""
        states = 1 + self.has_cell
        return states * self.passes * self.items * self.threads if self.passes > 1 else 0

    shared_bytes = extent(lambda e: e.stage_bytes + (e.halves * e.parts + e.kept) * 4)

    # Registers of a thread.

    # Rounds in registers, of all tiles.
    rounds = extent(lambda e: e.most * e.registers)
    # Vectors of hidden states, by eight samples, that a thread has in flight.
    fetched = extent(lambda e: BATCHED if e.stages else max(BATCHED, e.registers))

    @property
    def held(self) -> int:
        """Registers for weights, operands and sums, and for the items of a thread."""
        return (
            self.rounds * 9
            + self.most
            + self.fetched * self.fragments * 4
            + (self.fragments if self.resets else 0)
            + self.fragments * 5
            + (self.loads * 4 if self.stages else 0) // (1 if self.passes > 1 else 2)
            + self.items * (2 * self.gates + 6 + 2 * self.resets + self.ragged)
        )

    # Whether a thread has too few registers.
    spills = whether(lambda e: e.held + e.held // SCHEDULED + BESIDES > register_limit(e.threads))


def samples_of(batch: int, passes: int) -> int:
    """Samples of a pass: whole fragments if there are several passes."""
    return batch if passes == 1 else ceildiv(ceildiv(batch, passes), SAMPLES) * SAMPLES


def rounds_of(problem: BlockRecurrent, threads: int) -> int:
    """Rounds of a warp in a tile that is as full as a typical one, or somewhat fuller."""
    groups = min(problem.across, int(problem.typical_groups * MORE) + 1)
    return ceildiv(ceildiv(groups, QUAD), threads // WARP)


def likely_points(problem: BlockRecurrent, machine: Machine, table: Table) -> Iterator[Decisions]:
    """Points of the table, the best first.

    The fewest passes of at most 16 samples; the fewest tiles a block; enough warps that each has few rounds; weights in
    registers as far as these reach; no copy of the states where a block has one tile, and this needs less than half of
    them (as measured on an H200: 441 us instead of 650 with a dense weight, 395 instead of 445 with a tenth of it).
    """
    staged = problem.typical_groups * 2 >= problem.across
    wanted = [n for n in table["threads"] if rounds_of(problem, n) <= ROUNDS and 128 <= n <= 512]
    first = (wanted or [512])[0]

    def rank(point: tuple[int, ...]) -> tuple[float, ...]:
        threads, stages, registers = point
        rounds = rounds_of(problem, threads)
        return (
            -min(registers, rounds) / rounds,
            threads != first,
            abs(threads - 512),
            stages != staged,
            -registers,
        )

    passes = sorted(table["passes"], key=lambda n: (samples_of(problem.batch, n) > USUAL_SAMPLES, n))
    ranked = sorted(itertools.product(*(table[n] for n in ("threads", "stages", "registers"))), key=rank)
    for parts, blocks in itertools.product(passes, reversed(table["blocks"])):
        for threads, stages, registers in ranked:
            yield {
                "blocks": blocks, "threads": threads, "registers": registers, "stages": stages, "passes": parts
            }  # fmt: skip


def space(problem: BlockRecurrent, machine: Machine) -> Table:
    if machine.capability < TENSOR_CORES:
        raise NotApplicable(f"{machine.arch} has no tensor cores for bfloat16")
    if problem.dtype == "float32":
        raise NotApplicable("tensor cores multiply 16 bits: float32 takes a kernel a step")
    if problem.batch > MOST_SAMPLES * MOST_PASSES:
        raise NotApplicable(f"batch={problem.batch} takes more than {MOST_PASSES} passes of {MOST_SAMPLES} samples")
    passes = {ceildiv(problem.batch, samples) for samples in range(SAMPLES, MOST_SAMPLES + 1, SAMPLES)}
    least = ceildiv(problem.tiles, machine.cores)
    table = {
        "blocks": tuple(sorted({ceildiv(problem.tiles, least * n) for n in MULTIPLES})),
        "threads": THREADS,
        "registers": REGISTERS,
        "stages": (0, 1),
        "passes": tuple(sorted(n for n in {1, *passes} if n <= MOST_PASSES)),
    }
    if first_allowed(problem, machine, table) is None:
        raise NotApplicable(f"states and sums of hidden={problem.hidden} exceed the shared memory of a thread block")
    return table


def first_allowed(problem: BlockRecurrent, machine: Machine, table: Table) -> Decisions | None:
    possible = (p for p in likely_points(problem, machine, table) if allowed(problem, machine, p) is None)
    return next(possible, None)


def default(problem: BlockRecurrent, machine: Machine) -> Decisions:
    found = first_allowed(problem, machine, space(problem, machine))
    assert found is not None  # the space has made sure that there is one
    return found


def declines(problem: BlockRecurrent, machine: Machine) -> bool:
    """Whether there is nothing to exchange: a step of 656 units and two samples took 1.9 us in `step_tiles` on an H200,
    and 3.2 here.
    """
    return step_alone(problem)


def allowed(problem: BlockRecurrent, machine: Machine, decisions: Decisions) -> str | None:
    registers = decisions["registers"]
    rounds, limit = rounds_of(problem, decisions["threads"]), machine.block_shared_bytes
    if registers and REGISTERS[REGISTERS.index(registers) - 1] >= rounds:
        return f"{registers} rounds in registers are more than the {rounds} of a warp"
    if decisions["threads"] > THREADS[0] and decisions["threads"] // WARP // 2 >= ceildiv(problem.across, QUAD):
        return f"half of {decisions['threads'] // WARP} warps have no groups of {problem.across}"
    e = Extents.of(problem, decisions)
    if e.samples > MOST_SAMPLES:
        return f"sums of {e.samples} samples exceed the registers; at most {MOST_SAMPLES}"
    if not e.stages and e.most > 1:
        return f"{e.most} tiles of a thread block would read the same states from the L2 cache"
    if not e.stages and e.fetched * e.fragments * 4 > MOST_DIRECT:
        return f"{e.fetched * e.fragments} vectors in flight are too many registers"
    if e.spills:
        return f"{e.held} weights, operands and sums of each of {e.threads} threads exceed the registers"
    if e.shared_bytes > limit:
        return f"{e.shared_bytes} bytes exceed shared memory of {limit}"
    return None
