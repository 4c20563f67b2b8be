"""A recurrent layer whose recurrent weight is sparse, over all steps of a sequence.

Zhu, Pool et al. 2018, "Sparse Persistent RNNs: Squeezing Large Recurrent Networks On-Chip". The input product, which
does not depend on the states, is computed beforehand for all steps. With U the recurrent weight, x[t] the projected
input of step t including the biases, * elementwise, and gates in torch's order:

    tanh, relu   h[t] = f(x[t] + U h[t-1])
    lstm         i, f, o = sigmoid, g = tanh of x[t] + U h[t-1];  c[t] = f * c[t-1] + i * g;  h[t] = o * tanh(c[t])
    gru          r, z = sigmoid(x[t] + U h[t-1]);  n = tanh(x_n[t] + r * (U_n h[t-1] + b));
                 h[t] = (1 - z) * n + z * h[t-1]
    clipped_relu
                 h[t] = min(max(x[t] + U h[t-1], 0), limit)
    gru_reset_before
                 r, z as in gru;  n = tanh(x_n[t] + U_n (r * h[t-1]));  h[t] = (1 - z) * n + z * h[t-1]

Sums and gates are float32. The state h that is carried from step to step is rounded to the dtype of the output, as is
r * h[t-1] before a product; c is carried in float32. The weight is in the layout of `formats.recurrent`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
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

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

# Rows of the recurrent weight for each unit.
GATES = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3, "clipped_relu": 1, "gru_reset_before": 3}

# Cells in whose step units need values of all others more than once: the state, then the state times the reset gate.
EXCHANGES = {"gru_reset_before": 2}
# Cells whose states an infinite weight makes infinite, or always the limit.
UNBOUNDED = ("relu", "clipped_relu")
# The 2-norm of a generated row of weights is at most 1.5 times this, so that the layer contracts: rounding errors decay
# in later steps instead of growing.
NORM = 0.45
# Values of `resets` that set states to zero: positive, negative, mixed.
MARKS = ((1, 2, 256, 2**31 - 1), (-1, -2, -256, -(2**31)), (1, -1, 2**30, -(2**31)))
# The arguments after the weight, for any layer.
STATES: tuple[Argument, ...] = (
    Argument("x_projected", ("steps", "batch", "gates * hidden"), "dtype", "Input product with its biases."),
    Argument("h0", ("batch", "hidden"), "dtype", "State before the first step."),
    Argument("c0", ("batch", "hidden"), "dtype", "Cell state before the first step.", when="lstm"),
    Argument("hidden_bias", ("hidden",), "dtype", "b in the sum that the reset gate scales.", when="gru"),
    Argument("limit", (), "float32", "Upper bound of states, above 0.", when="clipped_relu"),
    Argument("lengths", ("batch",), "int32", "Steps of each sequence.", when="ragged"),
    Argument("resets", ("steps", "batch"), "int32", "Nonzero: states are zero before the step.", when="resets"),
)


@dataclass(frozen=True)
class RecurrentLayer(Problem):
    """All `steps` of a layer of `hidden` units with a `cell`, for a `batch` of sequences, for any layout of the weight:
    an operator declares the weight's arguments, which come first, and how they are generated and read.

    `nonzeros` says how full the weight is. `ragged` = 1: sequences have different lengths. `resets` = 1: states may be
    set to zero before any step.
    """

    steps: int
    batch: int
    hidden: int
    nonzeros: int
    cell: str = "tanh"
    dtype: str = "float32"
    ragged: int = field(default=0, metadata=OPTIONAL)
    resets: int = field(default=0, metadata=OPTIONAL)

    batch_axis: ClassVar[str] = "steps"
    row_axes: ClassVar[tuple[str, ...]] = ("batch",)
    sequential: ClassVar[bool] = True
    data_axes: ClassVar[tuple[str, ...]] = ("nonzeros",)
    cells: ClassVar[tuple[str, ...]] = tuple(GATES)
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("output", ("steps", "batch", "hidden"), "dtype", "State after each step; zero after the last one."),
        Argument("h_n", ("batch", "hidden"), "dtype", "State after the last step of each sequence."),
        Argument("c_n", ("batch", "hidden"), "dtype", "Cell state after it.", when="lstm"),
    )
    peer_outputs: ClassVar[int | None] = 1
    source: ClassVar[str] = "Zhu, Pool et al. 2018"

    def __post_init__(self) -> None:
        require_positive(self, "steps", "batch", "hidden", "nonzeros")
        require_dtype(self)
        if self.cell not in self.cells:
            raise ProblemError(f"{self.operator}: cell must be one of {', '.join(self.cells)}, got {self.cell!r}")
        for name in ("ragged", "resets"):
            if self.axes[name] not in (0, 1):
                raise ProblemError(f"{self.operator}: {name} must be 0 or 1, got {self.axes[name]!r}")
        if self.steps * self.batch * self.gates * self.hidden >= 2**31:
            raise ProblemError(f"{self.operator}: x_projected must have fewer than 2^31 elements; cut the sequence up")

    @classmethod
    def drawn_layer(cls, rng: random.Random, units: int) -> dict[str, Any]:
        """`drawn_axes` of a layer whose weight is kept in groups of `units` columns."""
        hidden = distribution.whole(rng, 64, 2048)
        density = math.exp(rng.uniform(math.log(0.01), math.log(0.3)))
        return {
            "steps": distribution.whole(rng, 1, 512),
            "batch": distribution.whole(rng, 1, 64),
            "hidden": hidden,
            "nonzeros": max(1, round(density * hidden / units)),
            "cell": rng.choice(cls.cells),
            "dtype": distribution.dtype(rng),
            "ragged": distribution.flag(rng, 0.3),
            "resets": distribution.flag(rng, 0.2),
        }

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    @property
    def exchanges(self) -> int:
        """How often units need values of all others in a step."""
        return EXCHANGES.get(self.cell, 1)

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("x_projected", "h0", "c0", "hidden_bias")

    def extent(self, name: str | int) -> int:
        """Extents beside the axes: expressions in `gates`, and the cells on which arguments depend."""
        known = {
            "gates * hidden": self.gates * self.hidden,
            "lstm": int(self.cell == "lstm"),
            "gru": int(self.cell == "gru"),
            "clipped_relu": int(self.cell == "clipped_relu"),
        }
        return known[name] if name in known else super().extent(name)

    def distance(self, other: Problem) -> float | None:
        """Octaves of hidden and nonzeros, plus a little for steps, lengths and resets; None beyond `NEAR`.

        Decisions say how many weights a thread keeps, and for which samples. Those of another size work too, but a
        template's default, computed for this size, is faster: on an H200 by a factor of up to 7.
        """
        if not isinstance(other, type(self)) or (self.cell, self.dtype) != (other.cell, other.dtype):
            return None
        octaves = sum(abs(math.log2(a / b)) for a, b in ((self.hidden, other.hidden), (self.nonzeros, other.nonzeros)))
        if self.batch != other.batch or octaves > NEAR:
            return None
        steps = abs(math.log2(self.steps / other.steps))
        return octaves + 0.1 * steps + 0.1 * ((self.ragged != other.ragged) + (self.resets != other.resets))

    @property
    def parts(self) -> int:
        """Parts of a row, each of which is a row of kernels."""
        return 1

    @property
    @abstractmethod
    def row_entries(self) -> int:
        """Number of values in a typical row of the weight."""

    @property
    @abstractmethod
    def most_nonzeros(self) -> int:
        """`nonzeros` of a dense weight."""

    def as_called(self) -> Problem:
        """The problem with `nonzeros` rounded as in calls, at most those of a dense weight."""
        most = self.most_nonzeros
        return dataclasses.replace(
            self, nonzeros=most if self.nonzeros >= most else min(most, preferred(self.nonzeros, 1))
        )

    @abstractmethod
    def rows(self) -> Any:
        """The access of programs to the weight's rows: see `definition.Rows`. Loads the compiler."""

    @abstractmethod
    def coordinates(self, inputs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows and columns (int64) of the matrix `(gates * hidden, hidden)`, and values, of every weight with which
        kernels multiply.
        """

    @abstractmethod
    def weight(self, rng: np.random.Generator, structure: str) -> list[np.ndarray]:
        """The weight's arguments, for `generate`."""

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """A weight from `weight`, with inputs and states. Structure `special`: NaN, infinities and -0.0 in inputs and
        states of one sequence. Lengths are from 0 to the number of steps; a fifth of the steps reset the states.
        """
        import numpy as np

        structure, _ = self.chosen(structure, settings)
        hidden, count = self.hidden, self.gates * self.hidden
        rng = np.random.default_rng([seed, self.batch, hidden, self.nonzeros, self.gates])
        weight = self.weight(rng, structure)
        dtype = numpy_dtype(self.dtype)
        x = (0.7 * rng.standard_normal((self.steps, self.batch, count), dtype=np.float32)).astype(dtype)
        h0 = rng.uniform(-0.8, 0.8, (self.batch, hidden)).astype(dtype)
        c0 = (0.7 * rng.standard_normal((self.batch, hidden))).astype(dtype)
        bias = (0.3 * rng.standard_normal(hidden)).astype(dtype)
        if structure == "special":
            for value in (-0.0, np.inf, -np.inf):
                for array in (x[:, -1], h0[-1], c0[-1]):
                    flat = array.reshape(-1)
                    flat[rng.integers(flat.size)] = value
            x[self.steps // 2, -1, rng.integers(count)] = np.nan
        lengths = rng.integers(0, self.steps, self.batch, endpoint=True)
        lengths[rng.integers(self.batch)] = self.steps
        # Any nonzero value resets: marks of one sign, or of both.
        marks = MARKS[rng.integers(len(MARKS))]
        reset = np.where(rng.random((self.steps, self.batch)) < 0.2, rng.choice(marks, (self.steps, self.batch)), 0)
        limit = float(np.float32(rng.uniform(0.2, 1.0)))
        inputs = [*weight, x, h0, c0, bias, limit, lengths.astype(np.int32), reset.astype(np.int32)]
        return [array for argument, array in zip(self.inputs, inputs, strict=True) if self.has(argument)]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        from .reference import run

        return run(self, inputs)

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The effect of rounding errors on each element, propagated from step to step: see `reference.run`."""
        from .reference import run

        return list(run(self, inputs, errors=True))

    def states_cost(self, nnz: int) -> Cost:
        """Inputs and states, without the weight; a product and a sum for each of its `nnz` values and each sequence,
        and about 5 operations for an activation.
        """
        rows, states = self.gates * self.hidden, self.batch * self.hidden
        floats = self.steps * self.batch * rows + self.steps * states
        floats += 2 * states * (1 + self.extent("lstm")) + self.hidden * self.extent("gru")
        words = self.ragged * self.batch + self.resets * self.steps * self.batch
        each = 2 * nnz + 5 * self.hidden * (self.gates + self.extent("lstm"))
        return Cost(floats * numpy_dtype(self.dtype).itemsize + 4 * words, self.steps * self.batch * each)


# Octaves within which another layer's decisions suit: the next preferred number of entries, or as much in size.
NEAR = 0.35
# Preferred numbers: from 10 on those of Renard's series R10, from 100 on of R20, rounded; below 10 with a similar
# spacing, or all integers. Longer rows need a finer series, since they differ less, and rounding up would leave more
# registers unused.
SMALL = (1, 2, 3, 4, 5, 6, 8)
TENS = (10, 13, 16, 20, 25, 32, 40, 50, 63, 80)
HUNDREDS = (100, 112, 125, 140, 160, 180, 200, 224, 250, 280, 315, 355, 400, 450, 500, 560, 630, 710, 800, 900)
# A mean that exceeds a preferred number by less than this counts as that number, since patterns are random.
SLACK = 1.02
# Entries that the registers of a large GPU hold, about.
ON_CHIP = 4_000_000


def preferred(entries: int, rows: int) -> int:
    """The mean number of entries per row, rounded up to a preferred number: the `nonzeros` of calls.

    Kernels serve any number, but keep this many on the chip: with a smaller one, typical rows would not fit.
    """
    mean = entries / rows / SLACK
    return next(number for number in _preferred_numbers() if mean <= number)


def _preferred_numbers() -> Iterator[int]:
    larger = (number * 10**power for power in itertools.count() for number in HUNDREDS)
    return itertools.chain(SMALL, TENS, larger)


# Few rows of a random pattern exceed the mean by DEVIATIONS standard deviations, none by NOT_RANDOM and SOME entries.
DEVIATIONS, NOT_RANDOM, SOME = 4, 6, 2


def longest_random(entries: int, width: int, deviations: float = DEVIATIONS) -> int:
    """Number of entries that few rows of a random pattern exceed; rows have `width` columns, `entries` in the mean."""
    n = min(entries, width)
    return min(width, math.ceil(n + deviations * math.sqrt(n * (1 - n / width))))


def entries_kept(entries: int, rows: int, width: int, longest: int) -> int:
    """The `nonzeros` of a call, for a weight of `entries` entries in `rows` rows of `width` columns.

    For a random pattern that is `preferred`. Magnitude pruning leaves rows of very different lengths: then it is the
    number of a random pattern whose longest row has `longest` entries too, for in each step all units wait for the
    longest row, which has to be on the chip. Where the chip has no room for them, the mean decides.
    """
    typical = min(width, preferred(entries, rows))
    if longest <= longest_random(typical, width, NOT_RANDOM) + SOME:
        return typical
    larger = (n for n in _preferred_numbers() if n >= typical)
    found = min(width, next(n for n in larger if longest_random(min(n, width), width) >= longest))
    return found if rows * found <= ON_CHIP else typical


def rounded_limit(limit: Any, dtype: str) -> float:
    """A limit of states, checked and rounded to a dtype.

    Raises
    ------
    TypeError, ValueError
        If it is no number, or not above 0 and finite in the dtype.
    """
    import numpy as np

    try:
        if isinstance(limit, bool | str):
            raise TypeError
        with np.errstate(over="ignore"):
            number = float(numpy_dtype(dtype).type(float(limit)))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"limit: expected a number, got {type(limit).__name__}") from None
    if not 0 < number < math.inf:
        raise ValueError(f"limit: expected a number above 0 that {dtype} holds, got {limit!r}")
    return number


@dataclass(frozen=True)
class SparseRecurrent(RecurrentLayer):
    """All `steps` of a layer of `hidden` units with a `cell`, for a `batch` of sequences.

    `nonzeros` is the number of entries in a row of the weight, rounded by `preferred`. `ragged` = 1: sequences have
    different lengths. `resets` = 1: states may be set to zero before any step.
    """

    operator: ClassVar[str] = "sparse_recurrent"
    counted: ClassVar[tuple[str, ...]] = ("entries",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("units", ("hidden",), "int32", "Unit at each slot, a permutation: kernels deal slots out in order."),
        Argument(
            "row_start",
            ("hidden * gates + 1",),
            "int32",
            "First entry of the row of a slot and a gate, at slot * gates + gate.",
        ),
        Argument(
            "entries",
            ("entries", "words"),
            "int32",
            "Column and value. One word where both have 16 bits: column in the low half, value's bits in the high one;"
            " else two: the value as float32, the column in [0, hidden).",
        ),
        *STATES,
    )
    structures: ClassVar[tuple[str, ...]] = (
        "random", "ragged", "empty_rows", "one_long_row", "empty", "special",
    )  # fmt: skip
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    example: ClassVar[Mapping[str, Any]] = {"steps": 16, "batch": 2, "hidden": 256, "nonzeros": 20, "cell": "lstm"}

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return cls.drawn_layer(rng, 1)

    @property
    def words(self) -> int:
        """32-bit words of an entry."""
        from tvm_sparse.formats.recurrent import entry_words

        return entry_words(self.hidden, self.dtype)

    @property
    def most_nonzeros(self) -> int:
        return self.hidden

    @property
    def row_entries(self) -> int:
        return min(self.nonzeros, self.hidden)

    def extent(self, name: str | int) -> int:
        """Extents beside those of any layer: `words`, and numbers of rows and entries."""
        rows = self.gates * self.hidden
        if name == "words":
            return self.words
        known = {"hidden * gates + 1": rows + 1, "entries": rows * self.row_entries}
        return known[name] if name in known else super().extent(name)

    def definition(self) -> tirx.PrimFunc:
        """A loop over steps; in each, a sum of a row's entries for each gate, unit and sequence."""
        from .definition import scan

        return scan(self)

    def rows(self) -> Any:
        from .definition import EntryRows

        return EntryRows(self)

    def coordinates(self, inputs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        from tvm_sparse.formats.recurrent import matrix_rows, unpack_entries

        units, row_start, entries = inputs[:3]
        return (matrix_rows(units, row_start), *unpack_entries(entries, self.dtype))

    def weight(self, rng: np.random.Generator, structure: str) -> list[np.ndarray]:
        """A weight whose elements are nonzero with probability nonzeros / hidden, in the layout of calls, except for
        these structures:

        `ragged`: rows of none to twice as many, in ascending order, with units in their own order. `empty_rows`: every
        second row is empty. `one_long_row`: one row is full, the others have one entry or none. `empty`: no entries.
        `special`: for cells with bounded states, one weight is infinite.
        """

        from tvm_sparse.formats.recurrent import banks_for, lay_out

        hidden, gates = self.hidden, self.gates
        rows, columns, values = drawn_entries(
            rng, structure, gates * hidden, hidden, min(self.nonzeros, hidden), self.cell not in UNBOUNDED
        )
        order, units = ("columns", "plain") if structure == "ragged" else ("banks", "balanced")
        banks = banks_for(self.batch, self.dtype)
        weights = lay_out(rows, columns, values, hidden, gates, self.dtype, order, banks, units)
        return [weights.units, weights.row_start, weights.entries]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """The weight, read once, and `states_cost`."""
        nnz = self.extent("entries") if inputs is None else len(inputs[2])
        rest = self.states_cost(nnz)
        words = nnz * self.words + self.gates * self.hidden + 1 + self.hidden
        return Cost(rest.bytes + 4 * words, rest.operations)


def drawn_places(
    rng: np.random.Generator, structure: str, count: int, width: int, few: int
) -> tuple[np.ndarray, np.ndarray]:
    """How many places of each of `count` rows of `width` are taken, `few` in a typical one, and which, row by row."""
    import numpy as np

    if structure == "ragged":
        counts = np.minimum(rng.integers(0, 2 * few, count, endpoint=True), width)
    elif structure == "one_long_row":
        counts = rng.integers(0, 2, count)
        counts[count // 2] = width
    elif structure == "empty":
        counts = np.zeros(count, np.int64)
    else:
        counts = rng.binomial(width, few / width, count)
        if structure == "empty_rows":
            counts[::2] = 0
    drawn = [rng.choice(width, each, replace=False, shuffle=False) for each in counts]
    return counts, np.concatenate([np.zeros(0, np.int64), *drawn])


def drawn_entries(
    rng: np.random.Generator, structure: str, count: int, width: int, few: int, infinite: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and values of a weight `(count, width)` with `few` entries in a typical row, see
    `SparseRecurrent.weight`. `infinite`: whether `special` has an infinite value.
    """
    import numpy as np

    counts, columns = drawn_places(rng, structure, count, width, few)
    # Never near zero, so that a missing entry is noticed.
    values = rng.uniform(0.5, 1.5, len(columns)) * rng.choice([-1.0, 1.0], len(columns))
    values *= np.repeat(NORM / np.sqrt(np.maximum(counts, 1)), counts)
    if structure == "special" and len(values) and infinite:
        values[rng.integers(len(values))] = np.inf
    return np.repeat(np.arange(count), counts), columns, values


PROBLEM = SparseRecurrent
