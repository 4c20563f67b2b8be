"""The gradient of a recurrent layer whose recurrent weight is sparse, back over all steps of a sequence.

The layer is that of `sparse_recurrent.problem`. With L a loss, U the recurrent weight, s[t] = U h[t-1] (for the last
gate of a GRU U_n h[t-1] + b), d[t] = dL/ds[t], and * elementwise, every step from the last one back takes

    dh[t] = d_output[t] + (what passed h[t] by) + U^T d[t+1]          (for the last step d_h_n instead of the two)
    tanh  d = dh * (1 - h^2)
    relu  d = dh where h > 0 (a clipped relu's gradient is that of an output which is 0 where it reached the limit)
    lstm  dc = dc + dh * o * (1 - tanh(c[t])^2)
          d = (dc * g * i (1-i),  dc * c[t-1] * f (1-f),  dc * i * (1 - g^2),  dh * tanh(c[t]) * o (1-o));  dc = dc * f
    gru   dn = dh * (1-z) * (1 - n^2)
          d = (dn * s_n * r (1-r),  dh * (h[t-1] - n) * z (1-z),  dn * r);  dh * z passes h[t-1] by
    gru_reset_before, with s_n = U_n (r * h[t-1])
          dn = dh * (1-z) * (1 - n^2);  dq = U_n^T dn;  in dh above, U^T d[t+1] is that of r and z alone
          d = (dq * h[t-1] * r (1-r),  dh * (h[t-1] - n) * z (1-z),  dn);  dh * z + dq * r passes h[t-1] by

The gradient of the projected input is d; for the last gate of "gru" it is dn. The gradient of the weight, the sum of
d[t] h[t-1]^T over steps and sequences (d_n[t] (r * h[t-1])^T for U_n of "gru_reset_before"), needs nothing but d, and
is a dense product of the caller's.

Gates are computed again from the sums of the forward pass. Sums are float32; d is rounded to the dtype before it is
multiplied by U^T, as h is in the forward pass, and dc is carried in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core.problem import Argument, Cost, ProblemError, Settings, numpy_dtype
from tvm_sparse.operators.sparse_recurrent.problem import MARKS, RecurrentLayer, drawn_entries

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

# What a step keeps of each unit: its state, or the sums of its gates (for a GRU x_n and s_n by themselves).
KEPT = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 4, "gru_reset_before": 3}


@dataclass(frozen=True)
class RecurrentBackward(RecurrentLayer):
    """The gradient of all `steps` of a layer of `hidden` units with a `cell`, for a `batch` of sequences.

    `nonzeros` is the number of entries in a row of the transposed weight `(hidden, gates * hidden)`, rounded by
    `preferred`. `ragged` = 1: sequences have different lengths. `resets` = 1: states were set to zero before some
    steps.
    """

    operator: ClassVar[str] = "recurrent_backward"
    counted: ClassVar[tuple[str, ...]] = ("entries",)
    cells: ClassVar[tuple[str, ...]] = tuple(KEPT)
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("units", ("hidden",), "int32", "Unit at each slot, a permutation: kernels deal slots out in order."),
        Argument(
            "row_start",
            ("hidden * parts + 1",),
            "int32",
            "First entry of the transposed weight's row of a slot; with the reset before the product a row has a part"
            " for each gate, at slot * gates + gate.",
        ),
        Argument(
            "entries",
            ("entries", "words"),
            "int32",
            "Column and value, as for `sparse_recurrent`; the column is the weight's row `gate * hidden + unit`.",
        ),
        Argument(
            "kept",
            ("steps", "batch", "kept * hidden"),
            "dtype",
            "tanh, relu: the output. LSTM: x + U h of each gate. GRU: that of r and z, x_n, and U_n h + b; with the"
            " reset before the product that of r and z, and x_n + U_n (r h).",
        ),
        Argument("before", ("steps", "batch", "hidden"), "dtype", "State before each step.", when="mixed"),
        Argument("c0", ("batch", "hidden"), "dtype", "Cell state before the first step.", when="lstm"),
        Argument("d_output", ("steps", "batch", "hidden"), "dtype", "Gradient of the output."),
        Argument("d_h_n", ("batch", "hidden"), "dtype", "Gradient of the last state."),
        Argument("d_c_n", ("batch", "hidden"), "dtype", "Gradient of the last cell state.", when="lstm"),
        Argument("lengths", ("batch",), "int32", "Steps of each sequence.", when="ragged"),
        Argument("resets", ("steps", "batch"), "int32", "Nonzero: states were zero before the step.", when="resets"),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("d_sums", ("steps", "batch", "gates * hidden"), "dtype", "Gradient of U h; zero after the last step."),
        Argument("d_new", ("steps", "batch", "hidden"), "dtype", "Gradient of x_n.", when="gru"),
        Argument("d_h0", ("batch", "hidden"), "dtype", "Gradient of the state before the first step."),
        Argument("d_c0", ("batch", "hidden"), "dtype", "Gradient of the cell state before it.", when="lstm"),
    )
    structures: ClassVar[tuple[str, ...]] = (
        "random", "ragged", "empty_rows", "one_long_row", "empty", "special",
    )  # fmt: skip
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    example: ClassVar[Mapping[str, Any]] = {"steps": 16, "batch": 2, "hidden": 256, "nonzeros": 80, "cell": "lstm"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps * self.batch * self.kept * self.hidden >= 2**31:
            raise ProblemError(f"{self.operator}: kept must have fewer than 2^31 elements; cut the sequence up")

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return cls.drawn_layer(rng, 1)

    @property
    def kept(self) -> int:
        """Values that a step keeps of each unit."""
        return KEPT[self.cell]

    @property
    def parts(self) -> int:
        """Parts of a row of the transposed weight: one for each gate where these are multiplied at different times."""
        return self.gates if self.exchanges == 2 else 1

    @property
    def width(self) -> int:
        """Columns of the transposed weight."""
        return self.gates * self.hidden

    @property
    def scaled(self) -> tuple[str, ...]:
        """Gradients, of which every result is a linear function; in float16 they would not be in its range."""
        return () if self.dtype == "float16" else ("d_output", "d_h_n", "d_c_n")

    @property
    def words(self) -> int:
        """32-bit words of an entry."""
        from tvm_sparse.formats.recurrent import entry_words

        return entry_words(self.width, self.dtype)

    @property
    def most_nonzeros(self) -> int:
        return self.width

    @property
    def row_entries(self) -> int:
        return min(self.nonzeros, self.width)

    def extent(self, name: str | int) -> int:
        """Extents beside those of any layer: what is kept, `words`, and the number of entries."""
        if name == "words":
            return self.words
        known = {
            "hidden * parts + 1": self.hidden * self.parts + 1,
            "entries": self.hidden * self.row_entries,
            "kept * hidden": self.kept * self.hidden,
            "mixed": int(self.cell.startswith("gru")),
        }
        return known[name] if name in known else super().extent(name)

    def definition(self) -> tirx.PrimFunc:
        """A loop over steps from the last one back; in each, a sum of a row's entries for each unit and sequence."""
        from .definition import scan_back

        return scan_back(self)

    def rows(self) -> Any:
        from .definition import transposed_rows

        return transposed_rows(self)

    def coordinates(self, inputs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows and columns (int64) of the transposed weight `(hidden, gates * hidden)`, and values, of all entries."""
        from tvm_sparse.formats.recurrent import matrix_rows, unpack_entries

        units, row_start, entries = inputs[:3]
        return (matrix_rows(units, row_start) % self.hidden, *unpack_entries(entries, self.dtype))

    def weight(self, rng: np.random.Generator, structure: str) -> list[np.ndarray]:
        """A transposed weight with the structures of `SparseRecurrent.weight`, without infinite values."""
        from tvm_sparse.formats.recurrent import banks_for, pack_entries, transposed_layout

        units, rows, values = drawn_entries(rng, structure, self.hidden, self.width, self.row_entries, False)
        banks = banks_for(self.batch, self.dtype)
        found = transposed_layout(rows, units, self.hidden, self.gates, banks, self.parts)
        entries = pack_entries(found.columns, values[found.places], self.width, self.dtype)
        return [found.units, found.row_start, entries]

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """A weight from `weight`, sums and gradients. Structure `special`: NaN, infinities and -0.0 in the gradients of
        one sequence. Lengths and resets are drawn as for the forward pass.
        """
        import numpy as np

        structure, _ = self.chosen(structure, settings)
        hidden, steps, batch = self.hidden, self.steps, self.batch
        rng = np.random.default_rng([seed, batch, hidden, self.nonzeros, self.gates])
        weight, dtype = self.weight(rng, structure), numpy_dtype(self.dtype)

        def normal(size: float, *shape: int) -> np.ndarray:
            return (size * rng.standard_normal(shape, dtype=np.float32)).astype(dtype)

        kept = normal(0.9, steps, batch, self.kept * hidden)
        if self.cell == "tanh":
            kept = np.tanh(kept.astype(np.float32)).astype(dtype)
        elif self.cell == "relu":
            kept = np.maximum(kept, dtype.type(0))
        before = rng.uniform(-0.8, 0.8, (steps, batch, hidden)).astype(dtype)
        c0 = normal(0.7, batch, hidden)
        d_output, d_h_n, d_c_n = normal(1, steps, batch, hidden), normal(1, batch, hidden), normal(1, batch, hidden)
        if structure == "special":
            for value in (-0.0, np.inf, -np.inf, np.nan):
                for array in (d_output[:, -1], d_h_n[-1], d_c_n[-1]):
                    flat = array.reshape(-1)
                    flat[rng.integers(flat.size)] = value
        lengths = rng.integers(0, steps, batch, endpoint=True)
        lengths[rng.integers(batch)] = steps
        marks = MARKS[rng.integers(len(MARKS))]
        reset = np.where(rng.random((steps, batch)) < 0.2, rng.choice(marks, (steps, batch)), 0)
        given = [kept, before, c0, d_output, d_h_n, d_c_n, lengths.astype(np.int32), reset.astype(np.int32)]
        pairs = zip(self.inputs, [*weight, *given], strict=True)
        return [array for argument, array in pairs if self.has(argument)]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        from .reference import run

        return run(self, inputs)

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The effect of rounding errors on each element, propagated from step to step: see `reference.run`."""
        from .reference import run

        return list(run(self, inputs, errors=True))

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """Everything read or written once; a product and a sum for each entry and sequence of a step, and about 5
        operations for each of the values that it keeps.
        """
        nnz = self.extent("entries") if inputs is None else len(inputs[2])
        lstm, states = self.extent("lstm"), self.batch * self.hidden
        floats = self.steps * states * (self.kept + self.gates + 1 + self.extent("mixed") + self.extent("gru"))
        floats += states * (2 + 3 * lstm)
        words = nnz * self.words + self.hidden + self.hidden * self.parts + 1
        words += self.ragged * self.batch + self.resets * self.steps * self.batch
        each = 2 * nnz + 5 * self.hidden * (self.kept + lstm)
        return Cost(floats * numpy_dtype(self.dtype).itemsize + 4 * words, self.steps * self.batch * each)


PROBLEM = RecurrentBackward
