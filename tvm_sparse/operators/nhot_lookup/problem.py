"""N-hot lookup: C = A B with A sparse, a few nonzeros a row, and B a dense table of row vectors.

Argueta & Chiang 2019, "Accelerating Sparse Matrix Operations in Neural Networks on Graphics Processing Units",
section 4.1. A is in compressed sparse row (CSR) format:

    indptr   (rows + 1,)   row r holds entries indptr[r] .. indptr[r + 1] - 1
    indices  (nnz,)        the column of each entry, in [0, vocab): the row of B that it looks up
    values   (nnz,)        the value of each entry; absent if all are 1

With one entry per row this is an embedding, with several it is the sum or weighted sum of an embedding bag. The mean
and the elementwise maximum of the selected rows are its other modes; entries of one column may be left out. Several
tables, one after another in one array, are looked up as one: each has as many rows of A, the first table's first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution, drawing
from tvm_sparse.core.problem import (
    OPTIONAL,
    Argument,
    Cost,
    Problem,
    ProblemError,
    Settings,
    numpy_dtype,
    require_dtype,
    require_positive,
)
from tvm_sparse.core.rounding import ROUNDING, SMALLEST
from tvm_sparse.formats.quantized import STORED, as_float32, stored_scales, stored_values, word_number

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

INDEX = ("int32", "int64")
# What becomes of the table rows that a row selects.
MODES = ("sum", "mean", "max")

# Error of a float32 sum relative to the sum of absolute products: rounding errors of terms added in any order grow like
# the square root of their number; 64 half-units leave a wide margin at 16,384 terms.
MOST_ROUNDINGS = 64
# Rows of a table that is cheap to make and to check.
FEW = 4096
FEW_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class NhotLookup(Problem):
    """`out = a @ table` for a sparse `a` `(rows, vocab)` in CSR format and a dense table `(vocab, width)`.

    `nonzeros` is the number of entries in a typical row. `weighted` is 1 if entries have values, and 0 if all values
    are 1; `index` is the dtype of indptr and indices. `value` is "float32" for float32 values with a table of 16 bits;
    "" means that values have the table's dtype. `mode` is "sum", "mean" or "max", the latter two only without values.
    `padded` is 1 if a call names a column whose entries count as absent. `stored` is the dtype of a table in eight bits
    whose rows have scales: row w is `scales[w] * table[w]`. `dtype` is then that of the result.

    With several `tables`, `vocab` counts the rows of all of them, `a` has `tables * rows` rows (bags), and columns of a
    bag count from the first row of its table; its result is in row `bag % rows` of the output, from column
    `bag // rows * width` on.
    """

    rows: int
    vocab: int
    width: int
    nonzeros: int
    dtype: str = "float32"
    weighted: int = field(default=0, metadata=OPTIONAL)
    index: str = field(default="int32", metadata=OPTIONAL)
    value: str = field(default="", metadata=OPTIONAL)
    mode: str = field(default="sum", metadata=OPTIONAL)
    padded: int = field(default=0, metadata=OPTIONAL)
    stored: str = field(default="", metadata=OPTIONAL)
    tables: int = field(default=1, metadata=OPTIONAL)

    operator: ClassVar[str] = "nhot_lookup"
    batch_axis: ClassVar[str] = "rows"
    typical_rows: ClassVar[Mapping[str, Any]] = {"nonzeros": 16}
    # Programs read at run time how many rows the table has, and how many of them a row of `a` selects.
    data_axes: ClassVar[tuple[str, ...]] = ("vocab", "nonzeros")
    added_axes: ClassVar[tuple[str, ...]] = ("mode", "padded", "stored", "tables")
    counted: ClassVar[tuple[str, ...]] = ("nnz",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("indptr", ("rows + 1",), "index", "First entry of each row; the last one is nnz.", when="single"),
        Argument(
            "offsets", ("rows * tables + 1",), "index", "First entry of each bag, table by table.", when="several"
        ),
        Argument("indices", ("nnz",), "index", "Column of each entry, in [0, vocab)."),
        Argument("values", ("nnz",), "dtype or float32", "Value of each entry.", when="weighted"),
        Argument("table", ("vocab", "width"), "dtype", "Dense rows that are looked up; as uint8 if `stored`."),
        Argument("scales", ("vocab",), "float32", "What each row of the table is multiplied by.", when="stored"),
        Argument("first_rows", ("tables",), "int32", "First row of each table.", when="several"),
        Argument("padding", (), "int64", "Column whose entries count as absent; of none if negative.", when="padded"),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("out", ("rows", "columns"), "dtype", "Sums, means or maxima of table rows."),
    )
    structures: ClassVar[tuple[str, ...]] = (
        "random", "ragged", "empty_rows", "duplicates", "one_long_row", "one_hot", "zipf", "special",
    )  # fmt: skip
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    example: ClassVar[Mapping[str, Any]] = {"rows": 100, "vocab": 10240, "width": 512, "nonzeros": 10}
    source: ClassVar[str] = "Argueta & Chiang 2019, Algorithm 2"

    def __post_init__(self) -> None:
        require_positive(self, "rows", "vocab", "width", "nonzeros", "tables")
        require_dtype(self)
        for name in ("rows", "vocab", "width"):
            if self.axes[name] >= 2**31:
                raise ProblemError(f"nhot_lookup: {name} must be below 2^31, got {self.axes[name]}")
        if self.weighted not in (0, 1):
            raise ProblemError(f"nhot_lookup: weighted must be 0 or 1 (entries with values), got {self.weighted!r}")
        if self.mode not in MODES or (self.weighted and self.mode != "sum"):
            raise ProblemError(
                f"nhot_lookup: mode must be one of {', '.join(MODES)}, and sum with weighted=1, got {self.mode!r} with"
                f" weighted={self.weighted}"
            )
        if self.stored and self.stored not in STORED:
            raise ProblemError(f"nhot_lookup: stored must be empty or one of {', '.join(STORED)}, got {self.stored!r}")
        if self.tables > self.vocab or self.rows * self.tables >= 2**31:
            raise ProblemError(
                f"nhot_lookup: tables must be at most vocab, and rows * tables below 2^31, got {self.tables} tables of"
                f" vocab={self.vocab} and rows={self.rows}"
            )
        if self.padded not in (0, 1):
            raise ProblemError(f"nhot_lookup: padded must be 0 or 1, got {self.padded!r}")
        if self.index not in INDEX:
            raise ProblemError(f"nhot_lookup: index must be one of {', '.join(INDEX)}, got {self.index!r}")
        if self.value not in ("", "float32") or (self.value and (not self.weighted or self.dtype == "float32")):
            raise ProblemError(
                f"nhot_lookup: value must be '' (as the table), or float32 with weighted=1 and a table of 16 bits, got"
                f" {self.value!r} with weighted={self.weighted} and dtype={self.dtype}"
            )

    @property
    def plain(self) -> bool:
        """Whether it is a sum of all entries, of one table of floating numbers, as the paper has it."""
        return self.mode == "sum" and not self.padded and not self.stored and self.tables == 1

    @property
    def bags(self) -> int:
        """Rows of the sparse matrix."""
        return self.rows * self.tables

    def extent(self, name: str | int) -> int:
        known = {"single": self.tables == 1, "several": self.tables > 1, "columns": self.tables * self.width}
        return int(known[str(name)]) if name in known else super().extent(name)

    @property
    def table_dtype(self) -> str:
        """The dtype of the table's elements, as kernels have it."""
        return "uint8" if self.stored else self.dtype

    @property
    def value_dtype(self) -> str:
        """The dtype of the values."""
        return self.value or self.dtype

    def dtype_of(self, argument: Argument) -> str:
        known = {"values": self.value_dtype, "table": self.table_dtype}
        return known.get(argument.name) or super().dtype_of(argument)

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "rows": distribution.batch(rng),
            "vocab": distribution.whole(rng, 1000, 1_000_000),
            "width": distribution.whole(rng, 16, 4096),
            "nonzeros": distribution.whole(rng, 1, 200),
            "dtype": distribution.dtype(rng),
            "weighted": distribution.flag(rng, 0.5),
            "index": rng.choice(INDEX),
        }

    def distance(self, other: Problem) -> float | None:
        """Octaves of rows, width and nonzeros, and a step for each property that adds a load or makes it wider."""
        if not isinstance(other, NhotLookup) or (self.dtype, self.plain) != (other.dtype, other.plain):
            return None
        mine, theirs = ((p.rows, p.width, p.nonzeros) for p in (self, other))
        octaves = sum(abs(math.log2(a / b)) for a, b in zip(mine, theirs, strict=True))
        octaves += 0.25 * abs(math.log2(self.tables / other.tables))
        unlike = 0.25 * sum(
            self.axes[name] != other.axes[name] for name in ("index", "value", "mode", "padded", "stored")
        )
        return octaves + 0.5 * (self.weighted != other.weighted) + unlike

    def as_called(self) -> Problem:
        """The problem with `nonzeros` rounded as in calls, see `typical`."""
        return dataclasses.replace(self, nonzeros=typical(self.nonzeros * self.rows, self.rows))

    def smaller(self, extent: int) -> Problem:
        """The problem with a table of a few thousand rows, since a larger one takes most of the memory of a case."""
        return dataclasses.replace(self, rows=extent, vocab=min(self.vocab, max(FEW, self.tables)))

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("values", "scales" if self.stored else "table")

    def redrawn(self, rng: np.random.Generator) -> Problem:
        """The problem with fewer table rows, half to twice as many nonzeros, and occasionally only one."""
        vocab = int(min(self.vocab, max(3, FEW_ELEMENTS // self.width)) * rng.uniform(0.3, 1) + 1)
        vocab = max(vocab, self.tables)
        nonzeros = max(1, round(self.nonzeros * 2 ** rng.uniform(-1, 1)) if rng.random() < 0.8 else 1)
        return dataclasses.replace(self, vocab=min(self.vocab, vocab), nonzeros=nonzeros)

    def definition(self) -> tirx.PrimFunc:
        """Algorithm 2: one sum, mean or maximum for each output element, over the entries of its row.

        The extent of the reduction depends on the data. It is at least 1, because a reduction of extent 0 would leave
        its output uninitialised; a guard makes the single step of an empty row add nothing.
        """
        from tvm import te, tirx

        rows, nnz, vocab = (tirx.Var(name, "int64") for name in ("rows", "nnz", "vocab"))
        width, columns = tirx.const(self.width, "int64"), tirx.const(self.tables * self.width, "int64")
        bags = rows if self.tables == 1 else rows * tirx.const(self.tables, "int64")
        indptr = te.placeholder((bags + 1,), self.index, name="indptr")
        indices = te.placeholder((nnz,), self.index, name="indices")
        values = te.placeholder((nnz,), self.value_dtype, name="values")
        table = te.placeholder((vocab, width), self.table_dtype, name="table")
        scales = te.placeholder((vocab,), "float32", name="scales")
        first_rows = te.placeholder((tirx.const(self.tables, "int64"),), "int32", name="first_rows")
        padding = tirx.Var("padding", "int64")
        nothing = tirx.const(-math.inf if self.mode == "max" else 0, "float32")

        def entries(i):
            """The axis of a row's entries, the place of one in `indices`, and whether it counts."""
            start, stop = indptr[i].astype("int64"), indptr[i + 1].astype("int64")
            e = te.reduce_axis((tirx.const(0, "int64"), tirx.max(tirx.const(1, "int64"), stop - start)), name="e")
            if not self.padded:
                return e, start + e, stop > start
            other = tirx.if_then_else(stop > start, indices[start + e].astype("int64") != padding, False)
            return e, start + e, other

        def larger(x, y):
            """The larger one, or NaN if one is."""
            return tirx.Select(tirx.any(y > x, tirx.isnan(y)), y, x)

        def bag(i, j):
            """The row of the sparse matrix of an output element."""
            return i if self.tables == 1 else j // width * rows + i

        def product(i, j):
            e, place, counts = entries(bag(i, j))
            column = indices[place].astype("int64")
            if self.tables > 1:
                column = first_rows[j // width].astype("int64") + column
            term = word_number(self.stored, table[column, j if self.tables == 1 else j % width])
            if self.stored:
                term = scales[column] * term
            if self.weighted:
                term = values[place].astype("float32") * term
            reduce = te.sum if self.mode != "max" else te.comm_reducer(larger, lambda _: nothing, name="largest")
            return reduce(tirx.if_then_else(counts, term, nothing), axis=[e])

        def counted(i):
            e, _, counts = entries(i)
            return te.sum(tirx.if_then_else(counts, tirx.const(1, "int64"), tirx.const(0, "int64")), axis=[e])

        total = te.compute((rows, columns), product, name="total")
        count = te.compute((bags,), counted, name="count") if self.mode != "sum" else None

        def result(i, j):
            found = total[i, j]
            if self.mode == "mean":
                found = found / tirx.max(count[bag(i, j)], tirx.const(1, "int64")).astype("float32")
            elif self.mode == "max":
                found = tirx.if_then_else(count[bag(i, j)] > 0, found, tirx.const(0, "float32"))
            return found.astype(self.dtype)

        out = te.compute((rows, columns), result, name="out")
        known = {
            "indptr": indptr,
            "offsets": indptr,
            "first_rows": first_rows,
            "indices": indices,
            "values": values,
            "table": table,
            "scales": scales,
        }
        arguments = [{**known, "padding": padding}[argument.name] for argument in self.kernel_inputs]
        return te.create_prim_func([*arguments, out]).with_attr("global_symbol", "main")

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Standard normal table and values; each row has `nonzeros` different columns in ascending order, except for
        these structures:

        `ragged`: none to twice as many. `empty_rows`: every second row is empty. `duplicates`: half as many different
        columns, each repeated, in random order. `one_long_row`: one row has about as many entries as all rows together
        otherwise have; the others have one or none. `one_hot`: one per row. `zipf`: columns by Zipf's law, so that few
        rows of the table are selected most of the time. `special`: ragged, with NaN and infinities in table and values.

        The padding is the column of one of the entries, one in eight of which have it.
        """
        import numpy as np

        structure, _ = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.rows, self.vocab, self.width, self.nonzeros])
        counts = np.full(self.bags, min(self.nonzeros, self.vocab))
        if structure in ("ragged", "special"):
            counts = rng.integers(0, 2 * counts, endpoint=True)
        elif structure == "empty_rows":
            counts[::2] = 0
        elif structure == "one_hot":
            counts[:] = 1
        elif structure == "one_long_row":
            counts[:] = rng.integers(0, 2, self.bags)
            counts[self.bags // 2] = min(self.bags * self.nonzeros, 10_000)
        indptr = np.concatenate([[0], np.cumsum(counts)])
        if structure in ("random", "empty_rows", "one_hot"):
            drawn = [np.sort(rng.choice(self.vocab, count, replace=False, shuffle=False)) for count in counts]
            indices = np.concatenate(drawn)
        elif structure == "duplicates":
            few = [rng.integers(self.vocab, size=max(1, count // 2)) for count in counts]
            drawn = [rng.choice(some, count) for some, count in zip(few, counts, strict=True)]
            indices = np.concatenate(drawn)
        elif structure == "zipf":
            weights = 1 / np.arange(1, self.vocab + 1)
            indices = rng.choice(rng.permutation(self.vocab), indptr[-1], p=weights / weights.sum())
        else:
            indices = rng.integers(self.vocab, size=indptr[-1])
        values = rng.standard_normal(len(indices), dtype=np.float32)
        table = drawing.normal(rng, (self.vocab, self.width), self.dtype)
        if structure == "special" and len(indices):
            # In selected rows, in some columns of several of them.
            for value in (np.nan, np.inf, -np.inf):
                table[rng.choice(indices, 2), rng.integers(self.width, size=2)] = value
            values[rng.integers(len(values), size=2)] = [np.inf, np.nan]
        first_rows = self._first_rows(rng)
        if self.tables > 1:
            sizes = np.diff([*first_rows, self.vocab])
            indices = indices % np.repeat(np.repeat(sizes, self.rows), counts)
        padding = [int(rng.choice(indices)) if len(indices) else 0] if self.padded else []
        if padding and self.tables == 1:
            indices[rng.random(len(indices)) < 0.125] = padding[0]
        dtype = numpy_dtype(self.value_dtype)
        structured = [indptr.astype(self.index), indices.astype(self.index)]
        held = self._in_eight_bits(table) if self.stored else [table]
        several = [first_rows] if self.tables > 1 else []
        return [*structured, *([values.astype(dtype)] if self.weighted else []), *held, *several, *padding]

    def _first_rows(self, rng: np.random.Generator) -> np.ndarray:
        """Where tables of unlike sizes begin."""
        import numpy as np

        if self.tables == 1:
            return np.zeros(1, np.int32)
        inner = rng.choice(self.vocab - 1, self.tables - 1, replace=False) + 1
        return np.concatenate([[0], np.sort(inner)]).astype(np.int32)

    def _in_eight_bits(self, table: np.ndarray) -> list[np.ndarray]:
        """Bytes and scales of a table, whose infinities and NaN become 0."""
        import numpy as np

        wide = np.nan_to_num(as_float32(table), nan=0, posinf=0, neginf=0)
        scales = stored_scales(wide, self.stored, self.width)
        return [stored_values(wide, scales, self.stored).view(np.uint8), scales[:, 0]]

    def named(self, inputs: Sequence[Any]) -> SimpleNamespace:
        """The inputs by name; None for those that the problem does not have."""
        given = {argument.name: one for argument, one in zip(self.kernel_inputs, inputs, strict=True)}
        found = {argument.name: given.get(argument.name) for argument in self.inputs}
        return SimpleNamespace(**{**found, "indptr": inputs[0]})

    def batched(self, argument: Argument) -> bool:
        """True for all arrays of the sparse matrix, though none has `rows` as its first axis."""
        return argument.name in ("indptr", "offsets", "indices", "values", "out")

    def sample(self, inputs: Sequence[Any], rows: np.ndarray) -> list[Any]:
        """The rows of `a`, concatenated; the other inputs unchanged."""
        import numpy as np

        indptr, held = inputs[0], (len(inputs[0]) - 1) // self.tables
        rows = (np.arange(self.tables)[:, None] * held + rows).reshape(-1)
        counts = np.diff(indptr)[rows]
        starts = np.concatenate([[0], np.cumsum(counts)])
        taken = np.repeat(indptr[rows] - starts[:-1], counts) + np.arange(starts[-1])
        pairs = zip(self.kernel_inputs[1:], inputs[1:], strict=True)
        return [starts.astype(indptr.dtype), *(one[taken] if self.batched(spec) else one for spec, one in pairs)]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        return [self._looked_up(inputs)]

    def _looked_up(self, inputs: Sequence[Any], absolute: bool = False) -> np.ndarray:
        """The result in float64, or that of absolute values."""
        import numpy as np

        given = self.named(inputs)
        table = given.table.view(numpy_dtype(self.stored)) if self.stored else given.table
        bags = len(given.indptr) - 1
        out = np.zeros((bags, self.width))
        with np.errstate(invalid="ignore"):
            for row, (start, stop) in enumerate(zip(given.indptr, given.indptr[1:], strict=False)):
                places = np.arange(start, stop)
                if self.padded:
                    places = places[given.indices[places] != given.padding]
                chosen = given.indices[places].astype(np.int64)
                if self.tables > 1:
                    chosen += given.first_rows[row * self.tables // bags]
                terms = table[chosen].astype(np.float64)
                if self.stored:
                    terms *= given.scales[chosen, None].astype(np.float64)
                if self.weighted:
                    terms *= given.values[places, None].astype(np.float64)
                terms = np.abs(terms) if absolute else terms
                if self.mode == "max":
                    out[row] = terms.max(axis=0) if len(terms) else 0
                else:
                    out[row] = terms.sum(axis=0) / (max(1, len(terms)) if self.mode == "mean" else 1)
        return self._beside(out)

    def _beside(self, of_bags: np.ndarray) -> np.ndarray:
        """Rows of bags `(bags, n)` as `(rows, tables * n)`, those of one row's tables side by side."""
        several = of_bags.reshape(self.tables, -1, of_bags.shape[1])
        return several.swapaxes(0, 1).reshape(several.shape[1], -1)

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The rounding error, relative to the sum, or mean, of absolute products; a maximum is only rounded.

        A scale is a factor more, and so a rounding more.
        """
        import numpy as np

        rounded = ROUNDING[self.dtype] * np.abs(expected[0]) + SMALLEST[self.dtype]
        if self.stored:
            rounded += 2.0**-24 * np.abs(expected[0])
        if self.mode == "max":
            return [rounded]
        more = (self.mode == "mean") + 2 * bool(self.stored)
        roundings = np.minimum(np.diff(inputs[0]), MOST_ROUNDINGS)[:, None] + more
        roundings = self._beside(roundings.repeat(self.width, axis=1)) if self.tables > 1 else roundings
        with np.errstate(invalid="ignore"):
            return [roundings * 2.0**-24 * self._looked_up(inputs, absolute=True) + rounded]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """Each selected row of the table counts once, however often it is selected."""
        if inputs is None:
            each = min(self.nonzeros, self.vocab)
            nnz, distinct = self.bags * each, self.vocab * (1 - (1 - each / self.vocab) ** self.bags)
        else:
            import numpy as np

            nnz, columns = len(inputs[1]), np.asarray(inputs[1]).astype(np.int64)
            if self.tables > 1:
                columns = columns + np.repeat(np.repeat(self.named(inputs).first_rows, self.rows), np.diff(inputs[0]))
            distinct = len(np.unique(columns))
        itemsize, index = numpy_dtype(self.dtype).itemsize, numpy_dtype(self.index).itemsize
        row = self.width * numpy_dtype(self.table_dtype).itemsize + 4 * bool(self.stored)
        value = self.weighted * numpy_dtype(self.value_dtype).itemsize
        dense = round(distinct) * row + self.bags * self.width * itemsize
        return Cost(
            dense + nnz * (index + value) + (self.bags + 1) * index,
            (1 + self.weighted) * nnz * self.width,
        )


def typical(nnz: int, rows: int) -> int:
    """The mean number of nonzeros per row, rounded to the nearest of 1, 2, 5, 10, 20, 50, ...: the `nonzeros` of calls.

    Kernels serve any number; rounding keeps the number of different problems in a process small.
    """
    mean, step = nnz / rows, 1
    while True:
        # The borders are the geometric means.
        for factor, square in ((1, 2), (2, 10), (5, 50)):
            if mean * mean <= square * step * step:
                return factor * step
        step *= 10


PROBLEM = NhotLookup
