"""The space of `persistent_rows`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Launch, NotApplicable, Table, ceildiv, powers
from tvm_sparse.operators.recurrent_backward.problem import RecurrentBackward
from tvm_sparse.operators.sparse_recurrent.problem import EXCHANGES, RecurrentLayer, SparseRecurrent, longest_random

from ...recurrent.sizes import LINE, WARP, WIDEST, register_limit, step_alone

WARP_MAXIMA = 80  # the compute capability from which on a warp finds a maximum in one instruction
# Thread blocks, as alternatives to one per multiprocessor. Fewer read the hidden state fewer times from the L2 cache;
# more share the weights.
BLOCKS = (8, 16, 32, 48, 64, 96, 128)
LEAST_UNITS = 4  # units of a thread block at least: fewer are not worth its copy of the hidden state
THREADS = (128, 256, 384, 512, 576, 640, 768, 1024)
# What the fastest points of nearly all shapes that were measured on an H200 have in common. Threads: few, since each
# further warp polls and waits; but for float32 with four samples a gather the least of the others that gives each group
# one unit where rows are long, and the last where states are wide.
USUAL_THREADS, MORE_THREADS = 256, (512, 576, 640)
# Whole warps for rows of so many entries, unless states are wide, and else no more entries of each lane than this: they
# are gathered in turn.
WHOLE_WARPS, MOST_ROUNDS = 110, 20
LANES = powers(4, WARP)
# Between the powers of two are numbers that leave little unused where rows have a round number of entries.
REGISTERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
# Registers that a thread needs beside weights, sums and what it has in flight (addresses, counts, the gates): with
# fewer the compiler spilled.
BESIDES = 8
# As few suffice for entries apart, which are used at once: to take them out of fewer registers costs more time, in each
# step, than the few words that may be spilled.
LEAST_BESIDES = 4
MOST_GAP = 8  # columns of a gap, at most
ADDRESSES = 2  # registers for the addresses of such a load, beside what it brings
MOST_LOADS = 12  # 16-byte loads of the hidden state that a thread has in flight
# Words that a thread gathers before it multiplies: enough to hide the latency of shared memory.
GATHERED = 32
BATCHED = 4  # entries that are not in registers which a lane reads at once

# For `cycles`, as fitted to an H200. Bytes that a multiprocessor reads in a cycle from its shared memory, and by how
# much bank conflicts prolong it; from the L2 cache, at most, and all multiprocessors together; multiplications.
SHARED_RATE, CONFLICTS, L2_EACH, L2_ALL, MULTIPLIERS = 128, 1.5, 56, 7000, 128
# Bytes that all multiprocessors together read in a cycle of entries that are not in registers: each lane waits for
# `BATCHED` of them at a time. Four layers of 3 to 24 MB beyond the registers took 700 to 1,200.
AGAIN = 950  # of entries of two words; others have not been timed
# Cycles until a batch of gathers, a shuffle and the gates are done; of a round of copying; of each thread that polls,
# and of each thread block that is waited for; and of a row that is not all on chip, for which the layer waits.
GATHER, SHUFFLE, GATES, ROUND, POLL, WAIT, REST = 45, 26, 150, 900, 0.8, 2, 400
BUSY = 8  # warps that keep shared memory busy


extent = Derived["Extents", int]
whether = Derived["Extents", bool]


@dataclass(frozen=True)
class Extents:
    """The sizes of one point's kernel. An *entry* is a nonzero weight; a *group* of lanes has whole units."""

    batch: int
    hidden: int
    nonzeros: int  # entries of a row at which the kernel is fast; it runs with any number
    cell: str
    gates: int
    dtype: str  # dtype of x, states and output
    words: int  # words of an entry: 1, with column and value in 16 bits each, or 2
    ragged: bool
    resets: bool
    blocks: int
    threads: int  # threads of a block
    lanes: int  # lanes of a group
    registers: int  # entries of a row that a lane has in registers
    pack: int  # samples side by side
    stages: int  # copies of a pack's hidden states in shared memory
    polled: bool  # whether thread blocks wait for the data themselves; else at a grid barrier

    @classmethod
    def of(cls, problem: SparseRecurrent, decisions: Decisions, polled: bool = True) -> Extents:
        return cls(
            batch=problem.batch,
            hidden=problem.hidden,
            nonzeros=problem.nonzeros,
            cell=problem.cell,
            gates=problem.gates,
            dtype=problem.dtype,
            words=problem.words,
            ragged=bool(problem.ragged),
            resets=bool(problem.resets),
            blocks=decisions["blocks"],
            threads=decisions["threads"],
            lanes=decisions["reduce_threads"],
            registers=decisions["registers"],
            pack=decisions["pack"],
            stages=decisions["stages"],
            polled=polled,
        )

    # How units are dealt out.

    # Groups of a thread block.
    groups = extent(lambda e: e.threads // e.lanes)
    # Units of a thread block, at most.
    most = extent(lambda e: ceildiv(e.hidden, e.blocks))
    # Units of a group, at most; it works on one after another.
    units = extent(lambda e: ceildiv(e.most, e.groups))
    # Rows of the weight of a group, at most.
    rows = extent(lambda e: e.units * e.gates)

    # How hidden states lie, in the exchange and in shared memory: [column][sample of the pack].

    itemsize = extent(lambda e: numpy_dtype(e.dtype).itemsize)
    # Packs of samples, of which the last may be filled with zeros.
    packs = extent(lambda e: ceildiv(e.batch, e.pack))
    # Packs that a thread block goes through in a step.
    packs_each = extent(lambda e: e.packs)
    # Lanes of a group that finish a sample: the first ones.
    finishing = extent(lambda e: e.pack)
    # The states of a column: what one gather brings.
    column_bytes = extent(lambda e: e.pack * e.itemsize)
    # Whether a copy of the states is in the order of slots, which the state's `where` tells; otherwise it is in that of
    # columns.
    by_slot = whether(lambda e: False)
    # Columns of the weight: the states of all units; and those of the `gap`.
    columns = extent(lambda e: e.hidden)

    @property
    def gap(self) -> tuple[int, int]:
        """Columns of zeros among the others, which no entry refers to: the first, and how many."""
        return 0, 0

    # The column that absent entries refer to, always zero: it follows the last one.
    absent = extent(lambda e: e.columns)
    # Bytes of one store into the exchange: a column's states.
    sent_bytes = extent(lambda e: e.column_bytes)
    column_words = extent(lambda e: ceildiv(e.column_bytes, 4))
    # 16-byte vectors of a pack's states. Absent entries refer to one more column, which is always zero.
    vectors = extent(lambda e: ceildiv((e.columns + 1) * e.column_bytes, WIDEST))
    # Vectors from one pack to the next in the exchange: whole cache lines.
    pitch = extent(lambda e: ceildiv(e.vectors, LINE // WIDEST) * (LINE // WIDEST))
    # Vectors that a thread has in flight while it copies: in every round as many.
    loads = extent(lambda e: ceildiv(e.vectors, e.threads * ceildiv(e.vectors, e.threads * MOST_LOADS)))

    # Shared memory.

    # Whether units carry a cell state, in float32.
    has_cell = whether(lambda e: e.cell == "lstm")
    # How often thread blocks exchange values in a step: see `RecurrentLayer.exchanges`.
    exchanges = extent(lambda e: EXCHANGES.get(e.cell, 1))
    # Whether units carry their own hidden state, too: where it may have to stay as it is, they need it.
    has_own = whether(lambda e: e.cell == "gru" or e.exchanges == 2 or e.ragged)
    # float32 values of the cell states, or of the own hidden states: one for each unit and sample of the thread block.
    carried_each = extent(lambda e: e.most * e.packs * e.pack)
    carried_bytes = extent(lambda e: 0 if e.packs_each == 1 else (e.has_cell + e.has_own) * e.carried_each * 4)
    stage_bytes = extent(lambda e: e.stages * e.vectors * WIDEST)
    shared_bytes = extent(lambda e: ceildiv(e.stage_bytes + e.carried_bytes, 8) * 8)

    # Registers of a thread.

    register_limit = extent(lambda e: register_limit(e.threads))

    @property
    def form(self) -> str:
        """How entries are in registers: "apart", place and value in a word each, as they are used, where there is room;
        else "joined", column and value in one word, or of float32 "paired", two columns in one."""
        return "apart" if self.held_in("apart") + LEAST_BESIDES <= self.register_limit else self.small_form

    @property
    def small_form(self) -> str:
        """The `form` of the fewest registers."""
        return "joined" if self.words == 1 else "paired" if self.columns >> 16 == 0 else "apart"

    # Registers for a row's entries.
    row_words = extent(lambda e: e.words_in(e.form))

    def words_in(self, form: str) -> int:
        """`row_words` of a form."""
        columns = {"apart": self.registers, "joined": 0, "paired": ceildiv(self.registers, 2)}
        return self.registers + columns[form]

    # Registers at least for weights, sums, what is in flight, and inputs of this step and the next.
    held = extent(lambda e: e.held_in(e.small_form))

    def held_in(self, form: str) -> int:
        """`held`, if entries in registers have this form."""
        each = self.words_in(form) + self.words + self.pack + 5 + self.resets
        return self.rows * each + max(self.loads * (4 + ADDRESSES), self.gathered * self.column_words)

    # Whether a thread has too few registers.
    spills = whether(lambda e: e.held + BESIDES > e.register_limit)
    # Entries that are gathered before they are multiplied, at most.
    gathered = extent(lambda e: max(GATHERED // e.column_words, BATCHED))

    @property
    def batches(self) -> tuple[tuple[int, int], ...]:
        """Batches of rounds that are gathered together: the first round, and how many. The last batches are smaller:
        rows of the usual length skip them.
        """
        found, first = [], 0
        while first < self.registers:
            left = self.registers - first
            count = self.gathered if left > self.gathered else min(left, max(self.gathered // 2, BATCHED))
            found.append((first, count))
            first += count
        return tuple(found)


# The extents of a point: `Extents.of`, or those of another kernel that is made of the same phases.
Sizes = Callable[[Any, Decisions], Extents]


def longest_row(problem: RecurrentLayer) -> int:
    """Entries that few rows of a random pattern exceed."""
    return longest_random(ceildiv(problem.nonzeros, problem.parts), problem.most_nonzeros // problem.parts)


def operate_cycles(e: Extents) -> float:
    """A guess of a multiprocessor's cycles for one step of one pack, beside the exchange.

    The largest of the gathers' time in shared memory, that of the multiplications and that of the instructions; what is
    read again from the L2 cache; and the latency of a thread's own way. A few warps do not keep shared memory busy.
    """
    row = min(e.nonzeros, e.columns)
    held = min(row, e.registers * e.lanes)
    rows, rounds, rate = e.most * e.gates, ceildiv(row, e.lanes), min(L2_EACH, L2_ALL / e.blocks)
    warps = min(e.threads // WARP, ceildiv(e.most * e.lanes, WARP))
    gathers = rows * row * max(e.column_bytes, 4) * CONFLICTS / SHARED_RATE
    products = rows * row * e.pack * (2 if e.itemsize == 2 else 1) / MULTIPLIERS
    issued = ceildiv(warps, 4) * e.rows * rounds * (e.pack + 3)
    again = rows * (row - held) * e.words * 4 / (AGAIN / e.blocks if e.words == 2 else rate)
    way: float = e.rows * ceildiv(rounds, e.gathered) * GATHER
    way += (e.lanes.bit_length() - 1) * (SHUFFLE + 4 * (e.rows - 1)) + GATES * (1 + e.units) / 2
    beyond = e.registers * e.lanes < longest_random(e.nonzeros, e.columns)
    return max(gathers * max(1, BUSY / warps), products, issued) + again + way + beyond * REST


def cycles(e: Extents) -> float:
    """A guess of the cycles of one step, good enough to tell the better of two points."""
    rate = min(L2_EACH, L2_ALL / e.blocks)
    rounds = ceildiv(e.vectors, e.threads * e.loads)
    copied = e.vectors * WIDEST / rate + rounds * ROUND + e.threads * POLL + e.blocks * WAIT
    return e.packs * (operate_cycles(e) + copied + (e.stages == 1) * SHUFFLE)


def likely_points(problem: RecurrentLayer, machine: Machine, pack: int, of: Sizes) -> Iterator[Decisions]:
    """Allowed points of `pack` samples a gather that may be the best: registers hold rows as far as they reach."""
    row, table = longest_row(problem), _table(problem, machine)
    for stages, blocks, threads, lanes in itertools.product(
        table["stages"], table["blocks"], table["threads"], table["reduce_threads"]
    ):
        point = {
            "blocks": blocks,
            "threads": threads,
            "reduce_threads": lanes,
            "registers": 0,
            "pack": pack,
            "stages": stages,
        }
        possible = reversed(REGISTERS[: enough(REGISTERS, row, lanes) + 1])
        more = ({**point, "registers": n} for n in possible)
        yield from itertools.islice((p for p in more if allowed(problem, machine, p, of) is None), 1)


@functools.lru_cache(maxsize=64)
def best_point(problem: RecurrentLayer, machine: Machine, of: Sizes) -> tuple[tuple[str, int], ...]:
    """Of the likely points with as many samples per gather as possible, the one that takes the fewest `cycles`.

    Only those count whose rows are on chip, if there are any, and of these only the `usual` ones, if there are any. Of
    others with entries of two words the time to read these again decides.

    Raises `NotApplicable` if there is none.
    """
    for pack in reversed(_table(problem, machine)["pack"]):
        found = list(likely_points(problem, machine, pack, of))
        if found:
            held = [point for point in found if reach(point) >= longest_row(problem)]
            if not held and of(problem, found[0]).words == 2:
                return tuple(min(found, key=lambda p: cycles(of(problem, p))).items())
            held = held or found
            known = [point for point in held if point["threads"] in (USUAL_THREADS, *MORE_THREADS)] or held
            best = [point for point in known if usual(problem, point, of)] or known
            return tuple(min(best, key=lambda p: cycles(of(problem, p))).items())
    raise NotApplicable(f"states of hidden={problem.hidden} exceed the shared memory of a thread block")


def reach(point: Decisions) -> int:
    """Entries of a row that are on chip."""
    return point["reduce_threads"] * point["registers"]


def declines(problem: RecurrentLayer, machine: Machine) -> bool:
    return step_alone(problem)


def usual(problem: RecurrentLayer, point: Decisions, of: Sizes) -> bool:
    """Whether a point has as many threads and lanes as the fastest points for similar shapes."""
    e = of(problem, point)
    wide = e.vectors > USUAL_THREADS * MOST_LOADS
    long = e.nonzeros >= WHOLE_WARPS and not wide
    threads = USUAL_THREADS
    if e.itemsize == 4 and e.column_bytes == WIDEST:
        if wide:
            threads = MORE_THREADS[-1]
        elif long and e.gates == 1:
            threads = next((n for n in MORE_THREADS if n >= e.most * e.lanes), MORE_THREADS[0])
    return e.threads == threads and (e.lanes == WARP if long else e.registers <= MOST_ROUNDS)


def packs_of(problem: RecurrentLayer) -> tuple[int, ...]:
    """How many samples may lie side by side: no more than a load brings, and no more than half of them in vain.

    Those of one sample may fill a word: stores of 2 bytes into the exchange are slow.
    """
    size = numpy_dtype(problem.dtype).itemsize
    return tuple(n for n in powers(1, WIDEST // size) if n < 2 * problem.batch or n * size == 4)


def _table(problem: RecurrentLayer, machine: Machine) -> Table:
    most = min(machine.cores, ceildiv(problem.hidden, LEAST_UNITS))
    return {
        "blocks": tuple(sorted({min(n, most) for n in (*BLOCKS, most)})),
        "threads": THREADS,
        "reduce_threads": LANES,
        "registers": REGISTERS,
        "pack": packs_of(problem),
        # Parts of rows have copies beside each other.
        "stages": (1, 2) if problem.parts == 1 else (2,),
    }


def require(problem: SparseRecurrent | RecurrentBackward, machine: Machine) -> None:
    """Raise `NotApplicable` for problems that this template does not support."""
    if machine.capability < WARP_MAXIMA:
        raise NotApplicable("maxima of a warp need compute capability 8.0")
    if problem.words == 1 and (problem.most_nonzeros + (MOST_GAP if problem.parts > 1 else 0)) >> 16:
        raise NotApplicable(f"16 bits have no number for absent entries beyond {problem.most_nonzeros} columns")


def space(problem: SparseRecurrent | RecurrentBackward, machine: Machine, of: Sizes = Extents.of) -> Table:
    require(problem, machine)
    best_point(problem, machine, of)
    return _table(problem, machine)


def launch(problem: RecurrentLayer, decisions: Decisions, of: Sizes = Extents.of) -> Launch:
    e = of(problem, decisions)
    return Launch(e.threads, e.shared_bytes)


def default(problem: RecurrentLayer, machine: Machine, of: Sizes = Extents.of) -> Decisions:
    return dict(best_point(problem, machine, of))


def allowed(problem: RecurrentLayer, machine: Machine, decisions: Decisions, of: Sizes = Extents.of) -> str | None:
    reason = refusal(longest_row(problem), decisions)
    return reason or too_much(of(problem, decisions), problem, machine)


def refusal(row: int, decisions: Decisions) -> str | None:
    """Why decisions do not suit rows of `row` entries, or None; without `Extents`, for there are many such points."""
    lanes, registers = decisions["reduce_threads"], decisions["registers"]
    if lanes > LANES[0] and lanes // 2 >= row:
        return f"half of {lanes} lanes have no entry of {row} in a row"
    if REGISTERS.index(registers) > enough(REGISTERS, row, lanes):
        return f"{registers} entries of each of {lanes} lanes are more than {row} of a row need"
    if lanes < decisions["pack"]:
        return f"{lanes} lanes cannot take {decisions['pack']} samples, one each"
    return None


def too_much(e: Extents, problem: RecurrentLayer, machine: Machine) -> str | None:
    """Why a point's kernel does not fit a multiprocessor, or leaves much of it unused, or None."""
    limit = machine.block_shared_bytes
    if e.column_bytes < 4 and e.packs_each > 1:
        return f"{e.pack} samples a gather leave half of a word unused"
    if e.most <= e.groups // 2 and e.threads > THREADS[0]:
        return f"half of {e.groups} groups have none of a thread block's {e.most} units"
    if e.spills:
        return f"{e.held} weights and sums of each of {e.threads} threads exceed the registers"
    if e.shared_bytes > limit:
        return f"{e.shared_bytes} bytes exceed shared memory of {limit}"
    return None


def enough(amounts: tuple[int, ...], row: int, lanes: int) -> int:
    """The place of the first of ascending amounts of entries a lane that hold a row, or of the last."""
    return next((i for i, n in enumerate(amounts) if n * lanes >= row), len(amounts) - 1)
