"""The recurrence of gradients in NumPy, and bounds on the errors of a kernel's rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.rounding import ROUNDING, SMALLEST
from tvm_sparse.operators.sparse_recurrent.reference import ACTIVATION, DEVIATIONS, Rows, off_rounded, unit_of


class Noisy(NamedTuple):
    """Values, and the variances of their errors."""

    value: np.ndarray
    off: np.ndarray

    def times(self, other: Noisy) -> Noisy:
        off = _finite(self.value) ** 2 * other.off + _finite(other.value) ** 2 * self.off
        return Noisy(self.value * other.value, off + (2.0**-23 * _finite(self.value * other.value)) ** 2)

    def plus(self, other: Noisy) -> Noisy:
        found = self.value + other.value
        return Noisy(found, self.off + other.off + (2.0**-23 * _finite(found)) ** 2)

    def less(self, other: Noisy) -> Noisy:
        return self.plus(Noisy(-other.value, other.off))

    def where(self, mask: np.ndarray, other: Noisy) -> Noisy:
        """These where the mask is true, others elsewhere."""
        return Noisy(np.where(mask, self.value, other.value), np.where(mask, self.off, other.off))


def run(problem: Any, inputs: Sequence[Any], errors: bool = False) -> list[np.ndarray]:
    """The outputs in float64, with d rounded to the dtype after every step; or, with `errors`, the allowed error of
    each of their elements.

    Errors are propagated as in `sparse_recurrent.reference.run`: to first order, as variances.
    """
    given = dict(zip((argument.name for argument in problem.kernel_inputs), inputs, strict=True))
    rows = Rows(problem.hidden, problem.width, *problem.coordinates(inputs))
    steps, batch, hidden, gates, cell = problem.steps, problem.batch, problem.hidden, problem.gates, problem.cell
    zeros = Noisy(np.zeros((batch, hidden)), np.zeros((batch, hidden)))
    kept = given["kept"].astype(np.float64).reshape(steps, batch, problem.kept, hidden)
    lengths = given.get("lengths", np.full(batch, steps))
    lives = (np.arange(steps)[:, None] < lengths)[:, :, None]
    begins = (given["resets"] != 0)[:, :, None] & lives if problem.resets else np.zeros_like(lives)

    def exactly(array: np.ndarray) -> Noisy:
        return Noisy(array.astype(np.float64), np.zeros(array.shape))

    d_sums, d_new = (np.zeros((steps, batch, gates * hidden)) for _ in range(2))
    off_sums, off_new = np.zeros_like(d_sums), np.zeros_like(d_sums)
    with np.errstate(all="ignore"):
        cells = _cells(problem, kept, exactly(given["c0"]), lives, begins) if cell == "lstm" else [zeros] * steps
        passed, dc = exactly(given["d_h_n"]), exactly(given["d_c_n"]) if cell == "lstm" else zeros
        d, off_d = np.zeros((batch, gates * hidden)), np.zeros((batch, gates * hidden))
        for t in reversed(range(-1, steps)):
            if t + 1 < steps:
                if problem.exchanges == 2:  # the last gate's has reached the state through r * h
                    d[:, 2 * hidden :] = off_d[:, 2 * hidden :] = 0
                passed = _added(rows, passed, Noisy(d, off_d))
                passed, dc = zeros.where(begins[t + 1], passed), zeros.where(begins[t + 1], dc)
            if t < 0:
                break
            live = lives[t]
            dh = passed.plus(exactly(given["d_output"][t]))
            before = exactly(given["before"][t]) if "before" in given else zeros
            found, fresh, own, new_dc = _through(problem, kept[t], dh, dc, cells[t], before)
            if problem.exchanges == 2:
                parts = [zeros, zeros, _rounded(problem, found[2]).where(live, zeros)]
                dq = _added(rows, zeros, Noisy(*(np.concatenate(both, 1) for both in zip(*parts, strict=True))))
                reset = _sigmoid(problem, kept[t][:, 0])
                found[0], own = dq.times(before).times(_slope(reset)), own.plus(dq.times(reset))
            d = np.stack([np.where(live, one.value, 0.0) for one in found], 1).reshape(batch, -1)
            exact = np.stack([np.where(live, one.off, 0.0) for one in found], 1).reshape(batch, -1)
            d, off_d = _rounded(problem, Noisy(d, exact))
            off_sums[t] = DEVIATIONS * np.sqrt(exact) + unit_of(problem, d)
            off_d = np.where(np.repeat(live, gates * hidden, 1), off_d, 0.0)
            d_sums[t] = d
            d_new[t, :, :hidden] = np.where(live, fresh.value, 0.0)
            off_new[t, :, :hidden] = _allowed(problem, fresh)
            passed, dc = own.where(live, passed), new_dc.where(live, dc)
    results = [passed.value, dc.value]
    if errors:
        d_sums, d_new, results = off_sums, off_new, [_allowed(problem, passed), _allowed(problem, dc)]
    return [
        d_sums,
        *([d_new[:, :, :hidden]] if cell == "gru" else []),
        results[0],
        *([results[1]] if cell == "lstm" else []),
    ]


def _added(rows: Rows, passed: Noisy, d: Noisy) -> Noisy:
    """`passed` and the products of the transposed weight's rows with gradients `(batch, gates * hidden)`."""
    size = rows.times(rows.absolute, np.abs(_finite(d.value))) + np.abs(_finite(passed.value))
    off = rows.times(rows.squares, d.off) + (rows.roundings + 2) * (2.0**-24 * size) ** 2
    return Noisy(passed.value + rows.times(rows.values, d.value), passed.off + off)


def _rounded(problem: Any, exact: Noisy) -> Noisy:
    """Values rounded to the problem's dtype."""
    value = exact.value.astype(numpy_dtype(problem.dtype)).astype(np.float64)
    return Noisy(value, off_rounded(exact.off, unit_of(problem, value)))


def _allowed(problem: Any, found: Noisy) -> np.ndarray:
    unit = ROUNDING[problem.dtype] * np.abs(_finite(found.value)) + SMALLEST[problem.dtype]
    return DEVIATIONS * np.sqrt(found.off) + unit


def _finite(array: np.ndarray) -> np.ndarray:
    """Replace non-finite values, which have no rounding error, by 0."""
    return np.where(np.isfinite(array), array, 0.0)


def _activation(problem: Any, value: np.ndarray, slope: np.ndarray, off: np.ndarray | float = 0.0) -> Noisy:
    """An activation with this slope, of a sum whose error has the variance `off`."""
    return Noisy(value, _finite(slope) ** 2 * off + ACTIVATION[problem.dtype] ** 2)


def _sigmoid(problem: Any, x: np.ndarray) -> Noisy:
    value = 1 / (1 + np.exp(-x))
    return _activation(problem, value, value * (1 - value))


def _tanh(problem: Any, x: Noisy) -> Noisy:
    value = np.tanh(x.value)
    return _activation(problem, value, 1 - value**2, x.off)


def _slope(value: Noisy) -> Noisy:
    """y (1 - y), the derivative of a sigmoid y."""
    y = value.value
    return Noisy(y * (1 - y), _finite(1 - 2 * y) ** 2 * value.off)


def _flatness(value: Noisy) -> Noisy:
    """1 - y^2, the derivative of a tanh y."""
    y = value.value
    return Noisy(1 - y**2, 4 * _finite(y) ** 2 * value.off + 2.0**-46)


def _exact(x: np.ndarray) -> Noisy:
    return Noisy(x, np.zeros_like(x))


def _lstm(problem: Any, kept: np.ndarray, c: Noisy) -> tuple[Noisy, ...]:
    """The gates i, f, g, o of a step, and the cell state after it."""
    i, f, o = (_sigmoid(problem, kept[:, gate]) for gate in (0, 1, 3))
    g = _tanh(problem, _exact(kept[:, 2]))
    return i, f, g, o, f.times(c).plus(i.times(g))


def _cells(problem: Any, kept: np.ndarray, c: Noisy, lives: np.ndarray, begins: np.ndarray) -> list[Noisy]:
    """The cell state before each step, zeros where the step began a sequence."""
    found = []
    for t in range(len(kept)):
        c = _exact(np.zeros_like(c.value)).where(begins[t], c)
        found.append(c)
        c = _lstm(problem, kept[t], c)[4].where(lives[t], c)
    return found


def _through(
    problem: Any, kept: np.ndarray, dh: Noisy, dc: Noisy, c: Noisy, before: Noisy
) -> tuple[list[Noisy], Noisy, Noisy, Noisy]:
    """The gradients of one step: d of each gate, dn, the part of dh that reaches h[t-1] without U, and dc before it."""
    none = Noisy(np.zeros_like(dh.value), np.zeros_like(dh.value))
    if problem.cell == "tanh":
        return [dh.times(_flatness(_exact(kept[:, 0])))], none, none, none
    if problem.cell == "relu":
        return [none.where(kept[:, 0] <= 0, dh)], none, none, none
    if problem.cell == "lstm":
        i, f, g, o, after = _lstm(problem, kept, c)
        flat = _tanh(problem, after)
        dc = dc.plus(dh.times(o).times(_flatness(flat)))
        found = [
            dc.times(g).times(_slope(i)),
            dc.times(c).times(_slope(f)),
            dc.times(i).times(_flatness(g)),
            dh.times(flat).times(_slope(o)),
        ]
        return found, none, none, dc.times(f)
    r, z, sum_n = _sigmoid(problem, kept[:, 0]), _sigmoid(problem, kept[:, 1]), _exact(kept[:, 2])
    s = none if problem.exchanges == 2 else _exact(kept[:, 3])
    n = _tanh(problem, sum_n if problem.exchanges == 2 else sum_n.plus(r.times(s)))
    dn = dh.times(_exact(np.ones_like(z.value)).less(z)).times(_flatness(n))
    dz = dh.times(before.less(n)).times(_slope(z))
    if problem.exchanges == 2:  # d of r follows the product with dn
        return [none, dz, dn], none, dh.times(z), none
    return [dn.times(s).times(_slope(r)), dz, dn.times(r)], dn, dh.times(z), none
