"""The recurrence with a weight in tiles, in TVMScript.

This module loads the compiler: it is imported when a definition is built.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.arguments import function
from tvm_sparse.formats.block_recurrent import COLUMNS, tile_units
from tvm_sparse.operators.sparse_recurrent.definition import recurrence


class TileRows:
    """`sparse_recurrent.definition.Rows` of a weight in tiles: an entry is a group's number * 8 plus a column in the
    group.
    """

    def __init__(self, problem: Any) -> None:
        self.problem = problem
        self.units = tile_units(problem.gates)

    def unit(self, io: Any, slot: Any) -> Any:
        return slot

    def start(self, io: Any, slot: Any, gate: Any) -> Any:
        return self._first(io, slot // self.units) * COLUMNS

    def stop(self, io: Any, slot: Any, gate: Any) -> Any:
        """The end of a row's entries. Columns beyond the matrix, which only the last group can
        have, are not entries.
        """
        tile = slot // self.units
        first, behind = self._first(io, tile), self._first(io, tile + 1)
        lacking = -self.problem.hidden % COLUMNS
        if not lacking:
            return behind * COLUMNS
        last = T.if_then_else(first < behind, io.groups[T.max(behind - 1, 0)], -1)
        return behind * COLUMNS - T.if_then_else(last == self.problem.across - 1, lacking, 0)

    def column(self, io: Any, slot: Any, gate: Any, entry: Any) -> Any:
        return io.groups[entry // COLUMNS] * COLUMNS + entry % COLUMNS

    def value(self, io: Any, slot: Any, gate: Any, entry: Any) -> Any:
        row = slot % self.units if self.problem.gates == 1 else gate * self.units + slot % self.units
        return T.Cast("float32", io.weights[entry // COLUMNS, row, entry % COLUMNS])

    def _first(self, io: Any, tile: Any) -> Any:
        return io.group_start[T.min(tile, self.problem.tiles)]


def scan(problem: Any) -> tirx.PrimFunc:
    """The definition of the operator."""
    return function(problem, recurrence(problem), blocks=True, packed=True)
