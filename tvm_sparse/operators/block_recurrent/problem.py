"""A recurrent layer whose recurrent weight is in blocks, or dense, over all steps of a sequence.

The formulas are those of `sparse_recurrent.problem`; the weight is in tiles of 16 rows with groups of 8 columns, the
layout of `formats.block_recurrent`. All values of a group take part, including zeros: an infinite state times zero is
NaN, as in a dense product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core.problem import Argument, Cost, numpy_dtype
from tvm_sparse.operators.sparse_recurrent.problem import NORM, STATES, UNBOUNDED, RecurrentLayer, drawn_places

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx


@dataclass(frozen=True)
class BlockRecurrent(RecurrentLayer):
    """All `steps` of a layer of `hidden` units with a `cell`, for a `batch` of sequences, with a weight in tiles.

    `nonzeros` is the number of groups of 8 columns in a typical tile of 16 rows; hidden / 8 for a dense weight.
    `ragged` = 1: sequences have different lengths. `resets` = 1: states may be set to zero before any step.
    """

    operator: ClassVar[str] = "block_recurrent"
    counted: ClassVar[tuple[str, ...]] = ("groups",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("group_start", ("tiles + 1",), "int32", "First group of each tile of 16 rows."),
        Argument("groups", ("groups",), "int32", "First column / 8 of each group, ascending in a tile."),
        Argument(
            "weights",
            ("groups", 16, 8),
            "dtype",
            "Values by row of the tile and column of the group: rows are 16 units, or gate * 4 + one of 4 units; zero"
            " for rows and columns that there are not.",
        ),
        *STATES,
    )
    structures: ClassVar[tuple[str, ...]] = (
        "random", "ragged", "empty_rows", "one_long_row", "empty", "special",
    )  # fmt: skip
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    example: ClassVar[Mapping[str, Any]] = {
        "steps": 16, "batch": 2, "hidden": 256, "nonzeros": 32, "cell": "lstm", "dtype": "float16",
    }  # fmt: skip

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return cls.drawn_layer(rng, 8)

    @property
    def across(self) -> int:
        """Number of groups in a full tile."""
        return -(-self.hidden // 8)

    @property
    def tiles(self) -> int:
        from tvm_sparse.formats.block_recurrent import tiles_of

        return tiles_of(self.hidden, self.gates)

    @property
    def most_nonzeros(self) -> int:
        return self.across

    @property
    def typical_groups(self) -> int:
        """Number of groups in a typical tile."""
        return min(self.nonzeros, self.across)

    @property
    def row_entries(self) -> int:
        return self.typical_groups * 8

    def extent(self, name: str | int) -> int:
        """Extents beside those of any layer: tiles and groups."""
        if name == "tiles + 1":
            return self.tiles + 1
        if name == "groups":
            return self.tiles * self.typical_groups
        return super().extent(name)

    def definition(self) -> tirx.PrimFunc:
        """A loop over steps; in each, a sum of a row's values for each gate, unit and sequence."""
        from .definition import scan

        return scan(self)

    def rows(self) -> Any:
        from .definition import TileRows

        return TileRows(self)

    def coordinates(self, inputs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        from tvm_sparse.formats.block_recurrent import coordinates

        return coordinates(self.hidden, self.gates, *inputs[:3])

    def weight(self, rng: np.random.Generator, structure: str) -> list[np.ndarray]:
        """A weight in which each possible group of a tile exists with equal probability, `nonzeros` of them on average,
        and is full of values, except for these structures:

        `ragged`: tiles have between none and twice as many groups. `empty_rows`: every second tile is empty.
        `one_long_row`: one tile is full, the others have one group or none. `empty`: no groups. `special`: for cells
        with bounded states, one value is infinite.
        """
        import numpy as np

        from tvm_sparse.formats.block_recurrent import COLUMNS, ROWS, coordinates, lay_out_blocks

        counts, groups = drawn_places(rng, structure, self.tiles, self.across, self.typical_groups)
        start = np.concatenate([[0], np.cumsum(counts)])
        # Never near zero, so that a missing group is noticed.
        size = rng.uniform(0.5, 1.5, (len(groups), ROWS, COLUMNS)) * rng.choice(
            [-1.0, 1.0], (len(groups), ROWS, COLUMNS)
        )
        size *= np.repeat(NORM / np.sqrt(COLUMNS * np.maximum(counts, 1)), counts)[:, None, None]
        rows, columns, values = coordinates(self.hidden, self.gates, start, groups, size)
        if structure == "special" and len(values) and self.cell not in UNBOUNDED:
            values[rng.integers(len(values))] = np.inf
        found = lay_out_blocks(rows, columns, values, self.hidden, self.gates, self.dtype)
        return [found.group_start, found.groups, found.weights]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """The weight, read once, and `states_cost`."""
        groups = self.extent("groups") if inputs is None else len(inputs[1])
        rest = self.states_cost(groups * 16 * 8)
        own = groups * (4 + 16 * 8 * numpy_dtype(self.dtype).itemsize) + 4 * (self.tiles + 1)
        return Cost(rest.bytes + own, rest.operations)


PROBLEM = BlockRecurrent
