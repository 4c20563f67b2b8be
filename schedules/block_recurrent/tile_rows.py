"""The block recurrent layer on a CPU, step by step: vectors run along the columns of a group.

States are kept as `(batch, hidden)`, so that a row's 8 values of a group meet 8 states in one load. For each of
`tile_n` rows of a tile and each of `tile_m` sequences there is a vector of sums over the tile's groups, whose elements
are added up in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.phase import Phase
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers
from tvm_sparse.formats.block_recurrent import COLUMNS, ROWS, tile_units
from tvm_sparse.operators.block_recurrent.problem import BlockRecurrent

from ..recurrent import step_rows as steps

# Vectors of sums that are held at the same time. AVX2 has 16 registers, AVX-512 has 32.
MOST_SUMS = 32


@dataclass(frozen=True)
class TileSums:
    """How `recurrent.step_rows` goes through a weight of tiles and groups."""

    problem: BlockRecurrent
    sequences: int
    rows: int  # rows of a tile that are summed at a time

    @property
    def units(self) -> int:
        return tile_units(self.problem.gates)

    def shape(self, padded: int) -> tuple[int, int]:
        return padded, self.problem.across * COLUMNS

    def place(self, unit: Any, b: Any) -> tuple[Any, Any]:
        return b, unit

    def alloc(self) -> dict[str, Any]:
        from tvm.script import tirx as T

        return {"parts": T.sblock_alloc_buffer((self.rows * self.sequences, COLUMNS), "float32")}

    def sums(self, begin: int = 0, end: int | None = None) -> Phase:
        from tvm.script import tirx as T

        from ..device.vectors import sum_elements

        at_once, several = self.rows, self.sequences
        # Rows of a tile that belong to units.
        first, last = begin * self.units, (self.problem.gates if end is None else end) * self.units

        # fmt: off
        @T.inline
        def phase(io, s, states, turn, tile, base):
            for r in range(first // at_once, last // at_once):
                for o in T.unroll(at_once * several):
                    for v in T.vectorized(COLUMNS):
                        s.parts[o, v] = T.float32(0)
                for n in range(io.group_start[tile + 1] - io.group_start[tile]):
                    group = T.meta_var(io.group_start[tile] + n)
                    for o in T.unroll(at_once * several):
                        for v in T.vectorized(COLUMNS):
                            s.parts[o, v] = s.parts[o, v] + T.Cast(
                                "float32", io.weights[group, r * at_once + o // several, v]
                            ) * states[turn, base + o % several, io.groups[group] * COLUMNS + v]
                for o in range(at_once * several):
                    sum_elements(s.parts, o, COLUMNS)
                    s.sums[r * at_once * several + o] = s.parts[o, 0]
        # fmt: on
        return phase


def space(problem: BlockRecurrent, machine: Machine) -> Table:
    return {
        "chunk": steps.chunks(problem),
        "tile_m": tuple(m for m in powers(1, 8) if m < 2 * problem.batch),
        "tile_n": powers(1, ROWS if problem.gates != 3 else 4),
    }


def default(problem: BlockRecurrent, machine: Machine) -> Decisions:
    return {
        "chunk": steps.default_chunk(problem),
        "tile_m": min(4, max(space(problem, machine)["tile_m"])),
        "tile_n": 4,
    }


def allowed(problem: BlockRecurrent, machine: Machine, decisions: Decisions) -> str | None:
    sums = decisions["tile_m"] * decisions["tile_n"]
    return f"{sums} sums at once exceed {MOST_SUMS}" if sums > MOST_SUMS else None


def program(problem: BlockRecurrent, decisions: Decisions) -> Program:
    return steps.build(problem, decisions["chunk"], TileSums(problem, decisions["tile_m"], decisions["tile_n"]))


tile_rows = Template(
    name="tile_rows",
    version=2,
    operator="block_recurrent",
    kind="llvm",
    summary="step by step; threads share the units, vectors run along the columns of a group",
    space=space,
    default=default,
    program=program,
    allowed=allowed,
)
