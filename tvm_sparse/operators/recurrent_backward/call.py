"""The call of the gradient, for `autograd`: it is no public function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.calls import launch, machine_of
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Signature

from ..sparse_recurrent.problem import entries_kept
from .problem import RecurrentBackward

SIGNATURES: dict[str, Signature] = {}


@dataclass(frozen=True)
class TransposedWeight:
    """A transposed weight on a device, in the layout of `formats.recurrent.transposed_layout`."""

    hidden: int
    gates: int
    dtype: str
    nonzeros: int
    units: Any
    row_start: Any
    entries: Any
    # Number of entries in the longest row; of rows that are cut into parts, of its longest part times their number.
    longest: int


def recurrent_backward(
    weight: TransposedWeight,
    kept: Any,
    before: Any,
    c0: Any,
    d_output: Any,
    d_h_n: Any,
    d_c_n: Any,
    *,
    cell: str,
    lengths: Any = None,
    resets: Any = None,
) -> tuple[Any, ...]:
    """The gradient of a recurrent layer's sums and first states, see `problem`.

    All arrays are torch tensors on one device, of the shapes and dtypes that `RecurrentBackward` declares; None for
    those that the cell lacks, and for absent lengths and resets (int32).

    Returns
    -------
    d_sums[, d_new], d_h0[, d_c0]
        As declared; d_new for "gru", d_c0 for "lstm".
    """
    steps, batch, _ = kept.shape
    problem = problem_of(weight, steps, batch, cell, int(lengths is not None), int(resets is not None))
    known = arrays.facts("kept", kept)
    given = (kept, before, c0, d_output, d_h_n, d_c_n, lengths, resets)
    ready = [None if one is None else arrays.ready("kept", one, arrays.facts("kept", one)) for one in given]
    results = [arrays.empty(shape, dtype, kept, known) for shape, dtype in problem.output_layouts()]
    what = ("recurrent_backward", cell, weight.nonzeros, weight.longest)
    arguments = (weight.units, weight.row_start, weight.entries, *ready)
    launch(dispatcher, problem, machine_of("kept", known), what, arguments, results)
    return tuple(results)


def problem_of(
    weight: TransposedWeight, steps: int, batch: int, cell: str, ragged: int = 0, resets: int = 0
) -> RecurrentBackward:
    """The problem of a call. Raises `ProblemError` if it is not valid."""
    nonzeros = entries_kept(weight.nonzeros, weight.hidden, weight.gates * weight.hidden, weight.longest)
    return RecurrentBackward(steps, batch, weight.hidden, nonzeros, cell, weight.dtype, ragged, resets)
