"""Layout of sparse recurrent weights for persistent kernels, made on the host.

A matrix `(gates * hidden, hidden)`, row `gate * hidden + unit` for a gate of a unit, is cut into rows of entries
(column, value). Two orders are free, and chosen here once for all time steps:

- *Units* lie in `slots`, the order in which kernels deal them out to thread blocks and lanes: `units[slot]` is the unit
  at a slot, and the rows of its gates lie side by side.
- *Entries* lie in a chosen order within their row. With L lanes a row, lane p % L takes position p, so that
  neighbouring positions are read from shared memory at once. A gather of 4 bytes a lane serves 32 lanes together, of 8
  bytes 16 and of 16 bytes 8, if their columns differ modulo 32, 16 or 8; those that agree cost a cycle each. `banks` is
  that number.

Zhu, Pool et al. 2018, "Sparse Persistent RNNs: Squeezing Large Recurrent Networks On-Chip", section 4.1 (bank-aware
weight layout) and Appendix A (Algorithm 1, here `greedy_order`). `bank_order` distributes columns by the number left in
each residue class, and comes close to the fewest cycles possible for a row.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..core.given import described
from ..core.problem import FLOATS, numpy_dtype

ORDERS = ("banks", "greedy", "columns")
UNITS = ("balanced", "plain")
# Column numbers that fit into the low half of a 32-bit word whose high half is a 16-bit value.
MOST_PACKED = 1 << 16
# Lanes of a warp.
WARP = 32
# Numbers of neighbouring positions that shared memory may serve at once.
BANKS = (1, 2, 4, 8, 16, 32)
# Neighbouring slots that hold units of similar work: as many as a warp handles at once with 8 lanes a unit.
NEIGHBOURS = 4


@dataclass(frozen=True, eq=False)
class RecurrentWeights:
    """Sparse recurrent weights `(gates * hidden, hidden)` in the layout of the kernels; made by `recurrent_weights`.

    Attributes
    ----------
    hidden, gates, dtype
        Number of units, rows per unit (RNN: 1, GRU: 3, LSTM: 4, in torch's order), and the dtype of the values.
    units
        `(hidden,)` int32: the unit at each slot, a permutation.
    row_start
        `(hidden * gates + 1,)` int32: the first entry of the row of (slot, gate) at `slot * gates + gate`.
    entries
        `(nonzeros, words)` int32, see `pack_entries`.
    order, banks
        Order of the entries, see `recurrent_weights`; "" where it is not known.
    placed
        Copies on other devices, kept by the calls.
    patterns
        What backward passes keep by device, see `operators.recurrent_backward.autograd`.
    """

    hidden: int
    gates: int
    dtype: str
    units: np.ndarray
    row_start: np.ndarray
    entries: np.ndarray
    order: str = ""
    banks: int = 8
    placed: dict[Any, Any] = field(default_factory=dict, repr=False)
    patterns: dict[Any, Any] = field(default_factory=dict, repr=False)
    _others: dict[int, RecurrentWeights] = field(default_factory=dict, repr=False)

    @property
    def held(self) -> tuple[np.ndarray, ...]:
        """The arrays in the order of the kernels' arguments.

        An empty array has no address and other strides: it is replaced by one entry that belongs to no row.
        """
        entries = self.entries if self.nonzeros else np.zeros((1, self.entries.shape[1]), np.int32)
        return self.units, self.row_start, entries

    @property
    def nonzeros(self) -> int:
        return len(self.entries)

    @property
    def density(self) -> float:
        return self.nonzeros / (self.gates * self.hidden**2)

    @functools.cached_property
    def longest(self) -> int:
        """Number of entries in the longest row."""
        return int(np.diff(self.row_start).max(initial=0))

    @property
    def columns(self) -> np.ndarray:
        """`(nonzeros,)` int64, the column of each entry."""
        return unpack_entries(self.entries, self.dtype)[0]

    @property
    def values(self) -> np.ndarray:
        """`(nonzeros,)` float32, the value of each entry."""
        return unpack_entries(self.entries, self.dtype)[1]

    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows and columns (int64) of the matrix, and values (float32), of each entry."""
        columns, values = unpack_entries(self.entries, self.dtype)
        return matrix_rows(self.units, self.row_start), columns, values

    def for_banks(self, banks: int) -> RecurrentWeights:
        """These weights with their entries ordered for `banks` banks, if they are ordered by banks; computed once and
        kept.
        """
        if self.order != "banks" or banks == self.banks:
            return self
        found = self._others.get(banks)
        if found is None:
            row, _, _ = _places(self.row_start)
            columns, values = unpack_entries(self.entries, self.dtype)
            ascending = np.argsort(row * self.hidden + columns)
            columns, values = columns[ascending], values[ascending]
            chosen = bank_order(self.row_start, columns, banks, self.gates)
            entries = pack_entries(columns[chosen], values[chosen], self.hidden, self.dtype)
            found = replace(self, entries=entries, banks=banks, placed={}, patterns={})
            self._others[banks] = found
        return found

    def laid_out_for(self, batch: int) -> RecurrentWeights:
        """These weights with their entries in the order that suits a batch."""
        return self.for_banks(banks_for(batch, self.dtype))

    def dense(self) -> np.ndarray:
        """The dense matrix `(gates * hidden, hidden)`, in its dtype."""
        rows, columns, values = self.coordinates()
        found = np.zeros((self.gates * self.hidden, self.hidden), numpy_dtype(self.dtype))
        found[rows, columns] = values.astype(found.dtype)
        return found

    def conflicts(self, lanes: int = WARP, banks: int = 8) -> Conflicts:
        """Cost of this layout's gathers, see `conflicts`."""
        return conflicts(self.row_start, self.columns, self.gates, lanes, banks)

    def __repr__(self) -> str:
        return (
            f"RecurrentWeights(hidden={self.hidden}, gates={self.gates}, dtype={self.dtype}, nonzeros={self.nonzeros},"
            f" density={self.density:.3g})"
        )


def recurrent_weights(
    matrix: Any,
    gates: int = 1,
    *,
    dtype: str | None = None,
    order: str = "banks",
    banks: int = 8,
    units: str = "balanced",
    neighbours: int = NEIGHBOURS,
) -> RecurrentWeights:
    """Lay out a sparse recurrent weight for the kernels.

    Parameters
    ----------
    matrix
        Shape `(gates * hidden, hidden)`, row `gate * hidden + unit`, gates in torch's order: a SciPy sparse matrix or
        array, a torch tensor of a sparse layout, or a dense array (NumPy, torch or DLPack on the host) whose nonzeros,
        including NaN, are kept. Duplicate entries are added; stored zeros are kept.
    gates
        Rows per unit: 1, 3 (GRU) or 4 (LSTM).
    dtype
        Dtype of the values: float32, float16 or bfloat16. None: that of the matrix, but float32 instead of float64.
    order
        Order of the entries of a row. "banks": columns of neighbours differ modulo `banks` wherever possible. "greedy":
        Algorithm 1 of the paper. "columns": ascending.
    banks
        Neighbouring positions that shared memory serves at once: 8, 16 or 32 for gathers of 16, 8 or 4 bytes.
    units
        "balanced": equal blocks of slots have nearly equal work, and neighbours are of similar lengths. "plain": in the
        order of the matrix.
    neighbours
        In a balanced order, the number of neighbouring slots that hold units of similar lengths.

    Raises
    ------
    TypeError
        If `matrix` is not an array.
    ValueError
        For another shape, dtype, or order; for indices outside of the matrix.

    Notes
    -----
    Source: Zhu, Pool et al. 2018, section 4.1 and Appendix A.
    """
    for name, value, known in (("order", order, ORDERS), ("units", units, UNITS)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    for name, number in (("gates", gates), ("neighbours", neighbours)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}: expected an integer of at least 1, got {number!r}")
    if banks not in BANKS:
        raise ValueError(f"banks: expected one of {', '.join(map(str, BANKS))}, got {banks!r}")
    rows, columns, values, hidden, dtype = matrix_entries(matrix, gates, dtype)
    return lay_out(rows, columns, values, hidden, gates, dtype, order, banks, units, neighbours)


def lay_out(
    rows: np.ndarray,
    columns: np.ndarray,
    values: np.ndarray,
    hidden: int,
    gates: int,
    dtype: str,
    order: str = "banks",
    banks: int = 8,
    units: str = "balanced",
    neighbours: int = NEIGHBOURS,
) -> RecurrentWeights:
    """As `recurrent_weights`, from rows, columns and values of the entries, which are not checked."""
    rows, columns = rows.astype(np.int64), columns.astype(np.int64)
    work = np.bincount(rows % hidden, minlength=hidden)
    dealt = balanced_units(work, neighbours) if units == "balanced" else np.arange(hidden)
    slot = np.empty(hidden, np.int64)
    slot[dealt] = np.arange(hidden)
    key = (slot[rows % hidden] * gates + rows // hidden) * hidden + columns
    if np.any(key[1:] <= key[:-1]):
        sort = np.argsort(key, kind="stable")
        key, values = key[sort], values[sort]
        first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
        if len(first) < len(key):
            key, values = key[first], np.add.reduceat(values.astype(np.float64), first)
    lengths = np.bincount(key // hidden, minlength=hidden * gates)
    row_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns = key % hidden
    if order != "columns":
        if order == "banks":
            chosen = bank_order(row_start, columns, banks, gates)
        else:
            chosen = greedy_order(row_start, columns, banks, gates)
        columns, values = columns[chosen], values[chosen]
    entries = pack_entries(columns, values, hidden, dtype)
    return RecurrentWeights(hidden, gates, dtype, dealt.astype(np.int32), row_start, entries, order, banks)


def banks_for(batch: int, dtype: str) -> int:
    """Number of neighbouring positions that shared memory serves at once, if one gather reads the states of as many
    sequences as fit into 16 bytes, at most `batch`.
    """
    size = numpy_dtype(dtype).itemsize
    together = min(16 // size, 1 << (batch - 1).bit_length())
    return 128 // max(4, together * size)


class Transposed(NamedTuple):
    """The layout of a weight's transpose, `(hidden, gates * hidden)`, for the backward pass: see `transposed_layout`.

    Attributes
    ----------
    units
        `(hidden,)` int32: the unit at each slot, a permutation.
    row_start
        `(hidden * parts + 1,)` int32: the first entry of the part of a slot's row at `slot * parts + part`.
    columns
        `(nonzeros,)` int64: rows of the weight, `gate * hidden + unit`.
    places
        `(nonzeros,)` int64: the entry of the weight that each entry is.
    """

    units: np.ndarray
    row_start: np.ndarray
    columns: np.ndarray
    places: np.ndarray


def transposed_layout(
    rows: np.ndarray, columns: np.ndarray, hidden: int, gates: int, banks: int, parts: int = 1
) -> Transposed:
    """Lay out the transpose of a weight with entries at these rows and columns, which are all different.

    Units are in balanced order. A row is cut into `parts`: 1, or `gates`, one for each gate. The entries of a part are
    in the order for `banks`, as in `recurrent_weights`.
    """
    rows, columns, width = rows.astype(np.int64), columns.astype(np.int64), gates * hidden
    dealt = balanced_units(np.bincount(columns, minlength=hidden))
    slot = np.empty(hidden, np.int64)
    slot[dealt] = np.arange(hidden)
    sort = np.argsort(slot[columns] * width + rows)
    lengths = np.bincount(slot[columns] * parts + rows * parts // width, minlength=hidden * parts)
    row_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    places = sort[bank_order(row_start, rows[sort], banks, parts)]
    return Transposed(dealt.astype(np.int32), row_start, rows[places], places)


# ---- entries -------------------------------------------------------------------------------------


def entry_words(hidden: int, dtype: str) -> int:
    """32-bit words of an entry: 1 if column and value have 16 bits each, else 2."""
    return 1 if numpy_dtype(dtype).itemsize == 2 and hidden <= MOST_PACKED else 2


def pack_entries(columns: np.ndarray, values: np.ndarray, hidden: int, dtype: str) -> np.ndarray:
    """Pack columns and values, rounded to `dtype`, into entries `(nonzeros, words)` int32.

    An entry of one word has the column in the low half and the value's bits in the high half. An entry of two words has
    the bits of the value as float32, then the column.
    """
    rounded = values.astype(numpy_dtype(dtype))
    if entry_words(hidden, dtype) == 1:
        word = columns.astype(np.uint32) | rounded.view(np.uint16).astype(np.uint32) << 16
        return word.view(np.int32)[:, None]
    return np.stack([rounded.astype(np.float32).view(np.int32), columns.astype(np.int32)], axis=1)


def unpack_entries(entries: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns (int64) and values (float32) of packed entries."""
    if entries.shape[1] == 1:
        word = np.ascontiguousarray(entries[:, 0]).view(np.uint32)
        values = (word >> 16).astype(np.uint16).view(numpy_dtype(dtype))
        return (word & 0xFFFF).astype(np.int64), values.astype(np.float32)
    bits, columns = np.ascontiguousarray(entries.T)
    return columns.astype(np.int64), bits.view(np.float32)


def matrix_rows(units: np.ndarray, row_start: np.ndarray) -> np.ndarray:
    """`(nonzeros,)` int64: the row `gate * hidden + unit` of the matrix that each entry is in."""
    hidden = len(units)
    gates = (len(row_start) - 1) // hidden
    rows = np.arange(gates) * hidden + units.astype(np.int64)[:, None]
    return np.repeat(rows.reshape(-1), np.diff(row_start))


def matrix_entries(
    matrix: Any, gates: int, dtype: str | None, name: str = "matrix"
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, str]:
    """Rows, columns, values, number of hidden units and kernel dtype of a matrix of any kind, given as the argument
    `name`.

    Raises as `recurrent_weights` does.
    """
    rows, columns, values, shape, own = _coordinates(matrix, name)
    if not own.startswith(("float", "bfloat", "int", "uint", "bool")):
        raise ValueError(f"{name}: expected numbers, got {own}")
    if len(shape) != 2 or shape[0] != gates * shape[1] or not shape[1]:
        raise ValueError(
            f"{name}: expected shape ({'' if gates == 1 else f'{gates} * '}hidden, hidden), gates={gates} rows for"
            f" each of at least one unit, got {shape}"
        )
    if dtype is None and own not in FLOATS:
        raise ValueError(
            f"{name}: expected a matrix of {', '.join(FLOATS)} or float64, got {own}; pass dtype='float32' to convert"
        )
    dtype = own if dtype is None else dtype
    if dtype not in FLOATS:
        raise ValueError(f"dtype: expected one of {', '.join(FLOATS)}, got {dtype!r}")
    for what, index, extent in (("row", rows, shape[0]), ("column", columns, shape[1])):
        outside = np.flatnonzero((index < 0) | (index >= extent))
        if len(outside):
            at = int(outside[0])
            raise ValueError(f"{name}: {what} {index[at]} of entry {at} is outside [0, {extent})")
    if max(len(values), shape[0] + 1) >= 2**31:
        raise ValueError(f"{name}: expected fewer than 2^31 entries and rows, got {len(values)} in {shape[0]} rows")
    return rows, columns, values, int(shape[1]), dtype


# A non-matrix gets empty rows, columns and values; its shape is refused below.
_NO_ENTRIES = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)


def _coordinates(matrix: Any, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...], str]:
    """Rows, columns, values, shape and dtype of a matrix of any kind, given as the argument `name`; float64 becomes
    float32.
    """
    torch = sys.modules.get("torch")
    own = ""
    if torch is not None and isinstance(matrix, torch.Tensor):
        if matrix.is_meta:
            raise TypeError(f"{name}: expected a tensor with data, got one on the meta device")
        own = str(matrix.dtype).removeprefix("torch.")
        matrix = matrix.detach().cpu()
        if matrix.dtype == torch.bfloat16:  # which NumPy does not know
            matrix = matrix.float()
        if matrix.layout is not torch.strided:
            if matrix.dim() != 2:
                return *_NO_ENTRIES, tuple(matrix.shape), _floating(own)
            found = matrix.to_sparse_coo().coalesce()
            rows, columns = found.indices().numpy()
            return rows, columns, found.values().numpy(), tuple(matrix.shape), _floating(own)
        matrix = matrix.numpy()
    elif hasattr(matrix, "tocoo"):
        coo = matrix.tocoo()
        return coo.row, coo.col, coo.data, tuple(coo.shape), _floating(coo.data.dtype.name)
    elif not isinstance(matrix, np.ndarray):
        if not hasattr(matrix, "__dlpack__"):
            raise TypeError(
                f"{name}: expected a SciPy sparse matrix, a torch tensor, a NumPy array or another DLPack array on the"
                f" host, got {described(matrix)}"
            )
        try:
            matrix = np.from_dlpack(matrix)
        except BufferError as error:
            raise TypeError(f"{name}: its library does not hand it over by DLPack: {error}") from None
    if isinstance(matrix, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got a masked array; use its filled(0)")
    own = _floating(own or matrix.dtype.name)
    if matrix.ndim != 2:
        return *_NO_ENTRIES, tuple(matrix.shape), own
    rows, columns = np.nonzero(matrix)
    return rows, columns, matrix[rows, columns], tuple(matrix.shape), own


def _floating(name: str) -> str:
    """The kernels' dtype for a matrix of dtype `name`; unsupported ones are returned unchanged and refused later."""
    return "float32" if name == "float64" else name


# ---- order of units ------------------------------------------------------------------------------


def balanced_units(work: np.ndarray, neighbours: int = NEIGHBOURS) -> np.ndarray:
    """The unit at each slot, int64, such that any equal ranges of slots have nearly equal work.

    Units are sorted by work and cut into runs of `neighbours`. The run with most work is paired with the one with
    least, the second with the second last, and so on. The pairs are placed by the bit-reversal permutation, in which
    every range holds pairs of all ranks.
    """
    ranked = np.argsort(-work, kind="stable")
    runs = len(ranked) // neighbours
    pairs = runs // 2
    bits = max(pairs - 1, 0).bit_length()
    places = _reversed_bits(np.arange(1 << bits), 1 << bits)
    places = places[places < pairs]
    order = np.stack([places, runs - 1 - places], axis=1).reshape(-1)
    order = np.concatenate([order, np.arange(pairs, runs - pairs)])
    whole = ranked[: runs * neighbours].reshape(runs, neighbours)[order]
    return np.concatenate([whole.reshape(-1), ranked[runs * neighbours :]])


# ---- order of entries ----------------------------------------------------------------------------


class _Rows:
    """Rows sorted by decreasing length, so that the rows with a position p come first."""

    def __init__(self, row_start: np.ndarray) -> None:
        lengths = np.diff(row_start).astype(np.int64)
        self.order = np.argsort(-lengths, kind="stable")
        self.lengths = lengths[self.order]
        self.starts = row_start[:-1].astype(np.int64)[self.order]
        longest = int(self.lengths[0]) if len(lengths) else 0
        # Number of rows that have a position p.
        self.having = np.searchsorted(-self.lengths, -np.arange(longest), side="left")


def _places(row_start: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each entry, as int64: its row, its position in the row, and the row's length."""
    lengths = np.diff(row_start).astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - np.repeat(row_start[:-1].astype(np.int64), lengths), lengths[row]


def _residues(row_start: np.ndarray, columns: np.ndarray, banks: int) -> np.ndarray:
    """Number of columns of each row in each residue class modulo `banks`: `(rows, banks)`."""
    row, rows = _places(row_start)[0], len(row_start) - 1
    return np.bincount(row * banks + columns % banks, minlength=rows * banks).reshape(-1, banks)


def _ranks(key: np.ndarray) -> np.ndarray:
    """For each element the number of equal keys before it."""
    order = np.argsort(key, kind="stable")
    begins = np.concatenate([[True], np.diff(key[order]) > 0])[: len(key)]
    places = np.arange(len(key))
    ranks = np.empty(len(key), np.int64)
    ranks[order] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return ranks


def bank_order(row_start: np.ndarray, columns: np.ndarray, banks: int, gates: int = 1) -> np.ndarray:
    """The entry to take at each position, int64, so that neighbours have different residues modulo `banks`.

    First, columns are assigned to windows of `banks` positions. A window with m columns of one residue takes m cycles.
    If W windows are left, and the fullest class has n columns, the next window takes at most m = ceil(n / W) columns of
    each class, those of the fullest class first. So overfull classes are served together, in windows that cost more
    than one cycle anyway.

    Then each column gets a position in its window. This matters where a row has fewer lanes than banks, since a warp
    then reads from rows of neighbouring slots at once. Residue r goes to position r xor (bits of slot % banks in
    reverse order), if it is free. Then, for every power of two L, the same L neighbouring positions of 32 / L
    neighbouring slots have 32 different residues.

    `columns` must ascend within a row; those of one class stay in this order.
    """
    rows = _Rows(row_start)
    left = _residues(row_start, columns, banks)[rows.order]
    taken, most = np.zeros_like(left), np.zeros(len(left), np.int64)
    chosen = np.empty(len(columns), np.int64)
    everyone = np.arange(len(left))
    much = 1 << 40
    for place, many in enumerate(rows.having):
        here, used = left[:many], taken[:many]
        if place % banks == 0:
            windows = -(-(rows.lengths[:many] - place) // banks)
            most[:many] = -(-here.max(axis=1) // windows)
            used[...] = 0
        score = (here << 8) - used - np.maximum(used - most[:many, None] + 1, 0) * much
        score[here == 0] = -(1 << 60)
        best = score.argmax(axis=1)
        here[everyone[:many], best] -= 1
        used[everyone[:many], best] += 1
        chosen[rows.starts[:many] + place] = best

    row, position, length = _places(row_start)
    begin = position // banks * banks
    window = row * (int(length.max(initial=0)) + 1) + begin
    wanted = begin + (chosen ^ _reversed_bits(row // gates % banks, banks))
    fits = (_ranks(window * banks + chosen) == 0) & (wanted < length)
    start = np.arange(len(columns)) - position
    residues = np.full(len(columns), -1)
    residues[(start + wanted)[fits]] = chosen[fits]
    # Both are sorted by window; a window has as many free positions as residues without one.
    residues[residues < 0] = chosen[~fits]

    entries = np.argsort(row * banks + columns % banks, kind="stable")
    found = np.empty(len(columns), np.int64)
    found[np.argsort(row * banks + residues, kind="stable")] = entries
    return found


def _reversed_bits(numbers: np.ndarray, extent: int) -> np.ndarray:
    """Numbers below a power of two with their bits in reverse order."""
    bits = extent.bit_length() - 1
    found = np.zeros_like(numbers)
    for bit in range(bits):
        found |= (numbers >> bit & 1) << (bits - 1 - bit)
    return found


def greedy_order(row_start: np.ndarray, columns: np.ndarray, banks: int, gates: int = 1) -> np.ndarray:
    """As `bank_order`, by Algorithm 1 of Zhu, Pool et al. 2018: columns of residue b go to positions of residue X + b,
    with X the row's slot, or to those of the next residue that has one left.

    X spreads the rows of a warp over the banks where a row has fewer lanes than there are banks: at 1,152 columns, 10 %
    and 8 banks with one lane a row, as in the paper's kernel, the penalty is 0.46, and 5.6 with X = 0. With 8 lanes a
    row and more X changes nothing.
    """
    rows = _Rows(row_start)
    next_place = ((rows.order // gates)[:, None] + np.arange(banks, dtype=np.int64)) % banks
    found = np.empty(len(columns), np.int64)
    for number, many in enumerate(rows.having):
        entry = rows.starts[:many] + number
        banked = (columns[entry][:, None] + np.arange(banks)) % banks
        places = np.take_along_axis(next_place[:many], banked, axis=1)
        first = (places < rows.lengths[:many, None]).argmax(axis=1)[:, None]
        place, bank = (np.take_along_axis(array, first, axis=1)[:, 0] for array in (places, banked))
        found[rows.starts[:many] + place] = entry
        next_place[np.arange(many), bank] += banks
    return found


class Conflicts(NamedTuple):
    """Cost of the gathers of a layout."""

    gathers: int  # each of as many lanes as shared memory serves at once without conflicts
    cycles: int  # sum over the gathers of the most different columns of one residue
    least: int  # fewest cycles in any order of entries, for each row by itself

    @property
    def penalty(self) -> float:
        """Cycles beyond one per gather: 0 without conflicts."""
        return (self.cycles - self.gathers) / max(1, self.gathers)


def conflicts(row_start: np.ndarray, columns: np.ndarray, gates: int, lanes: int, banks: int) -> Conflicts:
    """Cost of a warp's gathers from shared memory by these columns, with `lanes` neighbouring lanes a row.

    A warp holds the same gate of 32 / lanes neighbouring slots, and its lanes are served `banks` at a time. Lanes that
    read the same column share a cycle.
    """
    lengths = np.diff(row_start)
    row, position, _ = _places(row_start)
    slot, gate = row // gates, row % gates
    at_once = WARP // lanes
    lane = slot % at_once * lanes + position % lanes
    # Axes: warp and gate, gather, and lanes that are served together.
    longest = int(lengths.max(initial=0)) // lanes + 1
    gather = ((slot // at_once * gates + gate) * longest + position // lanes) * (
        WARP // min(banks, WARP)
    ) + lane // banks
    highest = int(columns.max(initial=0)) + 1
    asked = np.unique(gather * highest + columns)
    gather, asked = asked // highest, asked % highest % banks
    classes, times = np.unique(gather * banks + asked, return_counts=True)
    first = np.flatnonzero(np.concatenate([[True], np.diff(classes // banks) > 0])) if len(classes) else classes
    cycles = int(np.maximum.reduceat(times, first).sum()) if len(classes) else 0
    fullest = _residues(row_start, columns, banks).max(axis=1, initial=0)
    least = int(np.maximum(fullest, -(-lengths // banks)).sum())
    return Conflicts(len(first), cycles, least)
