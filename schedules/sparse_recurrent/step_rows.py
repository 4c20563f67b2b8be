"""The sparse recurrent layer on a CPU, step by step: vectors run along the batch.

States are kept as `(hidden, batch)`, so that an entry's value meets `simd` sequences in one load. Of a row's entries
`depth` are in flight, each of which adds to a sum of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.phase import Phase
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from ..recurrent import step_rows as steps

# Sequences whose sums are held together, in one vector per gate: up to one register of AVX-512.
SIMD = powers(1, 16)
DEPTHS = powers(1, 8)


@dataclass(frozen=True)
class EntrySums:
    """How `recurrent.step_rows` goes through a weight of entries: a tile is the unit of one slot.

    The weight has `columns` and, for each slot, `gates` rows; `rows` is the access to it (`definition.Rows`).
    """

    columns: int
    gates: int
    rows: Any
    sequences: int
    depth: int
    units: int = 1

    def shape(self, padded: int) -> tuple[int, int]:
        return self.columns, padded

    def place(self, unit: Any, b: Any) -> tuple[Any, Any]:
        return unit, b

    def alloc(self) -> dict[str, Any]:
        from tvm.script import tirx as T

        return {"parts": T.sblock_alloc_buffer((self.depth * self.sequences,), "float32")}

    def sums(self, begin: int = 0, end: int | None = None) -> Phase:
        from tvm.script import tirx as T

        simd, depth, rows = self.sequences, self.depth, self.rows
        end = self.gates if end is None else end

        # fmt: off
        @T.inline
        def add(io, s, states, turn, slot, base, k, gate, entry):
            for v in T.vectorized(simd):
                s.parts[k * simd + v] = s.parts[k * simd + v] + rows.value(
                    io, slot, gate, entry) * states[turn, rows.column(io, slot, gate, entry), base + v]

        @T.inline
        def phase(io, s, states, turn, slot, base):
            for gate in range(begin, end):
                for v in T.vectorized(depth * simd):
                    s.parts[v] = T.float32(0)
                first = T.meta_var(rows.start(io, slot, gate))
                many = T.meta_var(rows.stop(io, slot, gate) - first)
                for n in range(many // depth):
                    for k in T.unroll(depth):
                        add(io, s, states, turn, slot, base, k, gate, first + n * depth + k)
                for n in range(many % depth):
                    add(io, s, states, turn, slot, base, 0, gate, first + many // depth * depth + n)
                for k in T.unroll(depth - 1):
                    for v in T.vectorized(simd):
                        s.parts[v] = s.parts[v] + s.parts[(k + 1) * simd + v]
                for v in T.vectorized(simd):
                    s.sums[gate * simd + v] = s.parts[v]
        # fmt: on
        return phase


def space(problem: SparseRecurrent, machine: Machine) -> Table:
    return {
        "chunk": steps.chunks(problem),
        "simd": tuple(s for s in SIMD if s < 2 * problem.batch),
        "depth": tuple(c for c in DEPTHS if c == 1 or c <= problem.row_entries),
    }


def default(problem: SparseRecurrent, machine: Machine) -> Decisions:
    table = space(problem, machine)
    return {"chunk": steps.default_chunk(problem), "simd": max(table["simd"]), "depth": min(2, max(table["depth"]))}


def program(problem: SparseRecurrent, decisions: Decisions) -> Program:
    weight = EntrySums(problem.hidden, problem.gates, problem.rows(), decisions["simd"], decisions["depth"])
    return steps.build(problem, decisions["chunk"], weight)


step_rows = Template(
    name="step_rows",
    version=3,
    operator="sparse_recurrent",
    kind="llvm",
    summary="step by step; threads share the units, vectors run along the batch",
    space=space,
    default=default,
    program=program,
)
