"""Recurrent weights in tiles for tensor cores, made on the host.

A matrix `(gates * hidden, hidden)`, row `gate * hidden + unit` for a gate of a unit, is cut into *tiles* of 16 rows,
the number that one tensor core instruction multiplies. In a layer with one gate a tile has 16 units; in a layer with
several it has 4 units with all their gates, at row `gate * 4 + unit` of the tile, so that all sums of a unit are in one
tile. A GRU's tiles have four rows of zeros. A tile has a list of *groups* of 8 neighbouring columns; groups in which
all of its 16 rows are zero are left out. So a matrix in weight blocks of 16 (or, for one gate, multiples of 16) gets no
additional zeros; a dense one has all groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.problem import numpy_dtype
from .recurrent import matrix_entries

# Rows of a tile, and columns of a group.
ROWS, COLUMNS = 16, 8


def tile_units(gates: int) -> int:
    """Units in a tile of a layer with this many gates."""
    return ROWS if gates == 1 else ROWS // 4


def tiles_of(hidden: int, gates: int) -> int:
    """Number of tiles of a weight."""
    return -(-hidden // tile_units(gates))


@dataclass(frozen=True, eq=False)
class BlockRecurrentWeights:
    """Recurrent weights `(gates * hidden, hidden)` in tiles; made by `block_recurrent_weights`.

    Attributes
    ----------
    hidden, gates, dtype
        Number of units, rows per unit (RNN: 1, GRU: 3, LSTM: 4, in torch's order), and the dtype of the values.
    group_start
        `(tiles + 1,)` int32: the first group of each tile.
    groups
        `(groups,)` int32: a group's column / 8, ascending in each tile.
    weights
        `(groups, 16, 8)`: values of the tile's rows in the group's columns; zeros beyond the last unit and column.
    placed
        Copies on other devices, kept by the calls.
    patterns
        What backward passes keep by device, see `operators.recurrent_backward.autograd`.
    """

    hidden: int
    gates: int
    dtype: str
    group_start: np.ndarray
    groups: np.ndarray
    weights: np.ndarray
    placed: dict[Any, Any] = field(default_factory=dict, repr=False)
    patterns: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def held(self) -> tuple[np.ndarray, ...]:
        """The arrays in the order of the kernels' arguments.

        An empty array has no address and other strides: it is replaced by one group that belongs to no tile.
        """
        if len(self.groups):
            return self.group_start, self.groups, self.weights
        return self.group_start, np.zeros(1, np.int32), np.zeros((1, ROWS, COLUMNS), self.weights.dtype)

    def laid_out_for(self, batch: int) -> BlockRecurrentWeights:
        """These weights unchanged: their layout is the same for every batch."""
        return self

    @property
    def density(self) -> float:
        """Share of all groups that are kept."""
        return len(self.groups) / (tiles_of(self.hidden, self.gates) * -(-self.hidden // COLUMNS))

    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows and columns (int64) of the matrix, and values (float32), of all kept elements."""
        return coordinates(self.hidden, self.gates, self.group_start, self.groups, self.weights)

    def dense(self) -> np.ndarray:
        """The dense matrix `(gates * hidden, hidden)`, in its dtype."""
        rows, columns, values = self.coordinates()
        found = np.zeros((self.gates * self.hidden, self.hidden), numpy_dtype(self.dtype))
        found[rows, columns] = values.astype(found.dtype)
        return found

    def __repr__(self) -> str:
        return (
            f"BlockRecurrentWeights(hidden={self.hidden}, gates={self.gates}, dtype={self.dtype},"
            f" groups={len(self.groups)}, density={self.density:.3g})"
        )


def block_recurrent_weights(matrix: Any, gates: int = 1, *, dtype: str | None = None) -> BlockRecurrentWeights:
    """Lay out a recurrent weight, block-sparse or dense, for tensor cores.

    Parameters
    ----------
    matrix
        Shape `(gates * hidden, hidden)`, row `gate * hidden + unit`, gates in torch's order: a SciPy sparse matrix
        (BSR) or array, a torch tensor of a sparse layout (`torch.sparse_bsr`), or a dense array (NumPy, torch or DLPack
        on the host) whose nonzeros, including NaN, are kept. Duplicate entries are added; stored blocks of zeros are
        kept.
    gates
        Rows per unit: 1, 3 (GRU) or 4 (LSTM).
    dtype
        Dtype of the values: float32, float16 or bfloat16. None: that of the matrix, but float32 instead of float64.

    Raises
    ------
    TypeError
        If `matrix` is not an array.
    ValueError
        For another shape, dtype or number of gates; for indices outside of the matrix.

    Notes
    -----
    When not to use it: where nonzeros are scattered, each of which takes 16 * 8 values here; `recurrent_weights` is for
    those. A NaN or infinity of the states is multiplied by all that is kept, zeros among it, as in a dense product.
    """
    if gates not in (1, 3, 4):
        raise ValueError(f"gates: expected 1, 3 or 4, got {gates!r}")
    rows, columns, values, hidden, dtype = matrix_entries(matrix, gates, dtype)
    return lay_out_blocks(rows, columns, values, hidden, gates, dtype)


def lay_out_blocks(
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray, hidden: int, gates: int, dtype: str
) -> BlockRecurrentWeights:
    """As `block_recurrent_weights`, from rows, columns and values of the entries, which are not checked."""
    rows, columns = rows.astype(np.int64), columns.astype(np.int64)
    units, across, count = tile_units(gates), -(-hidden // COLUMNS), tiles_of(hidden, gates)
    tile = rows % hidden // units
    within = rows % hidden if gates == 1 else rows // hidden * units + rows % hidden % units
    kept, which = np.unique(tile * across + columns // COLUMNS, return_inverse=True)
    if len(kept) * ROWS * COLUMNS >= 2**31:
        raise ValueError(f"matrix: expected fewer than 2^31 values in groups, got {len(kept)} groups of 16 * 8")
    place = (which.reshape(-1) * ROWS + within % ROWS) * COLUMNS + columns % COLUMNS
    found = np.bincount(place, values, len(kept) * ROWS * COLUMNS).reshape(-1, ROWS, COLUMNS)
    group_start = np.searchsorted(kept, np.arange(count + 1) * across).astype(np.int32)
    with np.errstate(over="ignore"):
        held = found.astype(numpy_dtype(dtype))
    return BlockRecurrentWeights(hidden, gates, dtype, group_start, (kept % across).astype(np.int32), held)


def coordinates(
    hidden: int, gates: int, group_start: np.ndarray, groups: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows and columns (int64) of the matrix, and values (float32), of all elements in the groups."""
    rows, columns, inside = _elements(hidden, gates, group_start, groups)
    return rows[inside], columns[inside], weights[inside].astype(np.float32)


def value_places(hidden: int, gates: int, group_start: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The places of these elements in the flattened array of the groups, int64, in the order of `coordinates`."""
    return np.flatnonzero(_elements(hidden, gates, group_start, groups)[2])


def _elements(
    hidden: int, gates: int, group_start: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows and columns of all places `(groups, 16, 8)`, and whether they are in the matrix."""
    units, row = tile_units(gates), np.arange(ROWS)
    tile = np.repeat(np.arange(len(group_start) - 1), np.diff(group_start))
    unit = tile[:, None] * units + row % units
    gate = np.broadcast_to(row // units if gates > 1 else 0 * row, unit.shape)
    column = groups.astype(np.int64)[:, None] * COLUMNS + np.arange(COLUMNS)
    shape = len(groups), ROWS, COLUMNS
    inside = ((unit < hidden) & (gate < gates))[:, :, None] & (column < hidden)[:, None, :]
    rows = np.broadcast_to((gate * hidden + unit)[:, :, None], shape)
    return rows, np.broadcast_to(column[:, None, :], shape), inside
