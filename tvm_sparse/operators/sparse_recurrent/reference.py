"""The recurrence in NumPy, and bounds on the errors of a kernel's rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.rounding import ROUNDING, SMALLEST

# Standard deviation of the errors of tanh and sigmoid: six times this covers the rounding of an exponential and a
# quotient in float32, and in 16 bits the error of the GPU's tanh.approx, 2^-11.
ACTIVATION = {"float32": 2.0**-23, "float16": 2.0**-13, "bfloat16": 2.0**-13}
# Allowed error of an element, in standard deviations of the sum of independent rounding errors: among 10^7 elements
# none exceeds it.
DEVIATIONS = 6
# Density above which a dense product is faster.
DENSE = 0.2


class Rows:
    """The weight for sums over its entries alone, so that an absent entry does not make NaN of an infinity."""

    def __init__(self, count: int, hidden: int, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        entries = (values.astype(np.float64), (rows, columns))
        self.values = scipy.sparse.coo_array(entries, shape=(count, hidden)).tocsr()
        finite = np.where(np.isfinite(self.values.data), self.values.data, 0.0)
        self.absolute, self.squares = self.like(np.abs(finite)), self.like(finite**2)
        self.roundings = np.diff(self.values.indptr).astype(np.float64)
        self.dense: dict[int, np.ndarray] = {}

    def like(self, data: np.ndarray) -> scipy.sparse.csr_array:
        return scipy.sparse.csr_array((data, self.values.indices, self.values.indptr), shape=self.values.shape)

    def times(self, weight: scipy.sparse.csr_array, states: np.ndarray) -> np.ndarray:
        """Sums `(batch, gates * hidden)` of `values`, `absolute` or `squares` for states `(batch, hidden)`."""
        full = weight.nnz > DENSE * weight.shape[0] * weight.shape[1]
        if full and np.isfinite(states).all() and np.isfinite(weight.data).all():
            if id(weight) not in self.dense:
                self.dense[id(weight)] = weight.toarray()
            return states @ self.dense[id(weight)].T
        return np.ascontiguousarray((weight @ states.T).T)


def run(problem: Any, inputs: Sequence[Any], errors: bool = False) -> list[np.ndarray]:
    """The outputs in float64, with h rounded to the dtype after every step; or, with `errors`, the allowed error of
    each of their elements.

    Errors are propagated to first order, as variances, since those of the terms of a sum are independent. A sum adds
    float32 rounding errors, which grow like the square root of their number; an activation adds its own (`ACTIVATION`).
    Rounding h to the dtype turns a small difference d into a whole unit u in the last place with probability d / u, a
    variance of d * u; it is bounded below so that one such unit is within the tolerance of all values computed from h.
    An element may deviate by `DEVIATIONS` standard deviations, plus the unit by which its own rounding may differ.
    """
    given = dict(zip((argument.name for argument in problem.kernel_inputs), inputs, strict=True))
    rows = Rows(problem.gates * problem.hidden, problem.hidden, *problem.coordinates(inputs))
    steps, batch, hidden, gates, cell = problem.steps, problem.batch, problem.hidden, problem.gates, problem.cell
    dtype = numpy_dtype(problem.dtype)
    h = given["h0"].astype(np.float64)
    c = given["c0"].astype(np.float64) if cell == "lstm" else np.zeros_like(h)
    bias = given["hidden_bias"].astype(np.float64) if cell == "gru" else np.zeros(hidden)
    lengths = given.get("lengths", np.full(batch, steps))
    output = np.zeros((steps, batch, hidden))
    off_h, off_c, off_output = (
        np.zeros_like(h),
        np.zeros_like(h),
        np.zeros_like(output),
    )  # variances; of h after rounding
    off_last = np.zeros_like(h)
    with np.errstate(all="ignore"):
        for t in range(steps):
            lives = (t < lengths)[:, None]
            if problem.resets:
                begins = (given["resets"][t] != 0)[:, None] & lives
                h, c, off_h, off_c = (np.where(begins, 0.0, array) for array in (h, c, off_h, off_c))
            x = given["x_projected"][t].astype(np.float64).reshape(batch, gates, hidden)
            sums = rows.times(rows.values, h).reshape(batch, gates, hidden)
            reset = scaled = None
            if problem.exchanges == 2:
                reset = _sigmoid(x[:, 0] + sums[:, 0])
                scaled = (reset * h).astype(dtype).astype(np.float64)
                sums[:, 2] = rows.times(rows.values, scaled).reshape(x.shape)[:, 2]
            new_h, new_c, local = _cell(cell, x, sums, h, c, bias)
            if cell == "clipped_relu":
                new_h = np.where(new_h > given["limit"], given["limit"], new_h)
            rounded = new_h.astype(dtype).astype(np.float64)
            if errors:
                size = np.abs(_finite(x)) + (np.abs(bias) if cell == "gru" else 0.0)
                off = _off_sums(rows, size, h, off_h)
                if reset is not None and scaled is not None:
                    off_reset = _finite(reset * (1 - reset)) ** 2 * off[:, 0] + ACTIVATION[problem.dtype] ** 2
                    off_scaled = _finite(reset) ** 2 * off_h + _finite(h) ** 2 * off_reset
                    off_scaled = off_rounded(off_scaled, unit_of(problem, scaled))
                    off[:, 2] = _off_sums(rows, size, scaled, off_scaled)[:, 2]
                before, new_off_c = _carried(problem, local, off, off_h, off_c, new_h, new_c)
                unit = unit_of(problem, rounded)
                new_off_h = off_rounded(before, unit)
                off_output[t] = np.where(lives, DEVIATIONS * np.sqrt(before) + unit, 0.0)
                off_last = np.where(lives, off_output[t], off_last)
                off_h, off_c = np.where(lives, new_off_h, off_h), np.where(lives, new_off_c, off_c)
            output[t] = np.where(lives, rounded, 0.0)
            h, c = np.where(lives, rounded, h), np.where(lives, new_c, c)
        if not errors:
            return [output, h, *([c] if cell == "lstm" else [])]
        last_c = DEVIATIONS * np.sqrt(off_c) + ROUNDING[problem.dtype] * np.abs(_finite(c)) + SMALLEST[problem.dtype]
        return [off_output, off_last, *([last_c] if cell == "lstm" else [])]


def _off_sums(rows: Rows, size: np.ndarray, states: np.ndarray, off: np.ndarray) -> np.ndarray:
    """Variances of the sums `(batch, gates, hidden)` of terms of size `size` and the products with states, whose own
    variances are `off`.
    """
    size = size + rows.times(rows.absolute, np.abs(_finite(states))).reshape(size.shape)
    return (
        rows.times(rows.squares, off).reshape(size.shape)
        + (rows.roundings.reshape(size.shape[1:]) + 2) * (2.0**-24 * size) ** 2
    )


def unit_of(problem: Any, rounded: np.ndarray) -> np.ndarray:
    """A unit in the last place of values in the problem's dtype."""
    return 2 * (ROUNDING[problem.dtype] * np.abs(_finite(rounded)) + SMALLEST[problem.dtype])


def off_rounded(off: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """The variance after values of the variance `off` are rounded to this unit."""
    return off + np.maximum(np.sqrt(off) * unit, (unit / DEVIATIONS) ** 2)


def _finite(array: np.ndarray) -> np.ndarray:
    """Replace non-finite values, which have no rounding error, by 0."""
    return np.where(np.isfinite(array), array, 0.0)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _cell(
    cell: str, x: np.ndarray, sums: np.ndarray, h: np.ndarray, c: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """The new states before rounding, and the intermediate values from which they were computed."""
    a = (x + sums).swapaxes(0, 1)
    if cell == "tanh":
        return np.tanh(a[0]), c, {}
    if cell in ("relu", "clipped_relu"):
        return np.where(a[0] < 0, 0.0, a[0]), c, {}
    if cell == "lstm":
        i, f, o = (_sigmoid(a[gate]) for gate in (0, 1, 3))
        g = np.tanh(a[2])
        new = f * c + i * g
        return o * np.tanh(new), new, {"i": i, "f": f, "g": g, "o": o, "c": c, "d": np.tanh(new)}
    r, z = _sigmoid(a[0]), _sigmoid(a[1])
    if cell == "gru_reset_before":
        n = np.tanh(a[2])
        return (1 - z) * n + z * h, c, {"z": z, "n": n, "h": h}
    scaled = sums[:, 2] + bias
    n = np.tanh(x[:, 2] + r * scaled)
    return (1 - z) * n + z * h, c, {"r": r, "z": z, "n": n, "s": scaled, "h": h}


def _carried(
    problem: Any,
    local: dict[str, np.ndarray],
    off: np.ndarray,
    off_h: np.ndarray,
    off_c: np.ndarray,
    new_h: np.ndarray,
    new_c: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Variances of the new states, from those of the sums `(batch, gates, hidden)` and of the previous states."""
    own = ACTIVATION[problem.dtype] ** 2

    def sigmoid(value: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return _finite(value * (1 - value)) ** 2 * variance + own

    def tanh(value: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return _finite(1 - value**2) ** 2 * variance + own

    def product(one: np.ndarray, off_one: np.ndarray, other: np.ndarray, off_other: np.ndarray) -> np.ndarray:
        return _finite(one) ** 2 * off_other + _finite(other) ** 2 * off_one

    if problem.cell == "tanh":
        return tanh(new_h, off[:, 0]), off_c
    if problem.cell in ("relu", "clipped_relu"):
        return off[:, 0], off_c
    if problem.cell == "lstm":
        i, f, g, o, d = (local[name] for name in "ifgod")
        off_i, off_f, off_o = (sigmoid(local[name], off[:, gate]) for name, gate in (("i", 0), ("f", 1), ("o", 3)))
        new = product(f, off_f, local["c"], off_c) + product(i, off_i, g, tanh(g, off[:, 2]))
        new += (2.0**-23 * _finite(new_c)) ** 2
        return product(o, off_o, d, tanh(d, new)), new
    z, n = local["z"], local["n"]
    off_z, off_sum = sigmoid(z, off[:, 1]), off[:, 2]
    if problem.cell == "gru":
        off_sum = product(local["r"], sigmoid(local["r"], off[:, 0]), local["s"], off_sum)
    off_n = tanh(n, off_sum)
    mixed = product(1 - z, off_z, n, off_n) + product(z, off_z, local["h"], off_h)
    return mixed + (2.0**-23 * _finite(new_h)) ** 2, off_c
