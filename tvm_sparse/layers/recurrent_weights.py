"""The two forms in which a layer keeps recurrent weights, each with its operator.

*Entries*: every nonzero with its column, for gathers from shared memory (`sparse_recurrent`). *Blocks*: tiles of 16
rows in groups of 8 columns, for tensor cores (`block_recurrent`); a dense weight has all groups.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.problem import FLOATS, Problem, numpy_dtype
from ..formats.block_recurrent import (
    COLUMNS,
    ROWS,
    BlockRecurrentWeights,
    lay_out_blocks,
    tiles_of,
    value_places,
)
from ..formats.compressed import check_compressed
from ..formats.recurrent import (
    BANKS,
    ORDERS,
    RecurrentWeights,
    entry_words,
    lay_out,
    matrix_entries,
    pack_entries,
)
from ..operators.block_recurrent.call import block_recurrent
from ..operators.block_recurrent.call import problem_of as problem_of_blocks
from ..operators.sparse_recurrent.call import problem_of, sparse_recurrent

FORMS = ("auto", "entries", "blocks")
# Share of nonzeros among the values in the blocks above which blocks take fewer bytes than entries, since an entry
# takes twice the bytes of a value. Small weights are faster as blocks at lower shares: on an H200, 1792 units with 20 %
# in float16 take 435 us in blocks and 563 us as entries; at 10 % both are equal.
FULL_ENOUGH, FULL_ENOUGH_IF_FEW = 0.5, 0.15
FEW_BYTES = 8 * 2**20
# Names of the arrays of each form.
ARRAYS = {"entries": ("units", "row_start", "entries"), "blocks": ("group_start", "groups", "weights")}
Weights = RecurrentWeights | BlockRecurrentWeights


def form_of(weights: Weights) -> str:
    """The form of prepared weights: "entries" for single weights, "blocks" for blocks of them."""
    return "entries" if isinstance(weights, RecurrentWeights) else "blocks"


def prepared(matrix: Any, gates: int, dtype: str | None, form: str, order: str) -> Weights:
    """Prepare a matrix in a form; "auto" means blocks if these are full enough and values have 16 bits, as tensor cores
    require.

    Raises
    ------
    TypeError, ValueError
        As in `recurrent_weights`, and for an unknown form.
    """
    if form not in FORMS:
        raise ValueError(f"form: expected one of {', '.join(FORMS)}, got {form!r}")
    if order not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {order!r}")
    rows, columns, values, hidden, dtype = matrix_entries(matrix, gates, dtype, "weight_hh")
    if form == "blocks":
        return lay_out_blocks(rows, columns, values, hidden, gates, dtype)
    entries = lay_out(rows, columns, values, hidden, gates, dtype, order)
    if form == "entries" or numpy_dtype(dtype).itemsize != 2:
        return entries
    blocks = as_blocks(entries)
    enough = FULL_ENOUGH_IF_FEW if blocks.weights.nbytes <= FEW_BYTES else FULL_ENOUGH
    return blocks if entries.nonzeros > enough * blocks.weights.size else entries


def fits_as_blocks(weights: RecurrentWeights) -> bool:
    """Whether the weight takes no more than `FEW_BYTES` as blocks, all of which a random pattern fills."""
    values = tiles_of(weights.hidden, weights.gates) * ROWS * weights.hidden
    return values * numpy_dtype(weights.dtype).itemsize <= FEW_BYTES


def as_blocks(weights: RecurrentWeights) -> BlockRecurrentWeights:
    """The weight in blocks."""
    return lay_out_blocks(*weights.coordinates(), weights.hidden, weights.gates, weights.dtype)


def of_dtype(weights: Weights, dtype: str) -> Weights:
    """The weights in the same form and layout, and in another dtype."""
    if isinstance(weights, RecurrentWeights):
        entries = pack_entries(weights.columns, weights.values, weights.hidden, dtype)
        return replace(weights, dtype=dtype, entries=entries, placed={}, patterns={}, _others={})
    with np.errstate(over="ignore"):
        values = weights.weights.astype(numpy_dtype(dtype))
    return replace(weights, dtype=dtype, weights=values, placed={}, patterns={})


def with_values(weights: Weights, values: np.ndarray) -> Weights:
    """The weights in the same layout with other values, in the order of `coordinates()`."""
    if isinstance(weights, RecurrentWeights):
        entries = pack_entries(weights.columns, values, weights.hidden, weights.dtype)
        return replace(weights, entries=entries, placed={}, patterns={}, _others={})
    found = np.zeros_like(weights.weights)
    places = value_places(weights.hidden, weights.gates, weights.group_start, weights.groups)
    found.reshape(-1)[places] = values.astype(found.dtype)
    return replace(weights, weights=found, placed={}, patterns={})


def run(weights: Weights, x_projected: Any, *states: Any, values: Any = None, **given: Any) -> tuple[Any, ...]:
    """Run the form's operator: one launch.

    `values`: a torch tensor `(nonzeros,)` of the weights' dtype, values in the place of their own in the order of
    `coordinates()`, to which a gradient flows.
    """
    if values is not None:
        from ..operators.recurrent_backward.autograd import differentiable

        cell, beside = (
            given.pop("cell"),
            {name: given.pop(name) for name in ("hidden_bias", "limit", "lengths", "resets")},
        )
        assert given.pop("out") is None
        forward = functools.partial(run, cell=cell, out=None)
        x, h0, c0 = (x_projected, *states, None)[:3]
        return differentiable(forward, weights, x, h0, c0, *beside.values(), cell=cell, values=values)
    if isinstance(weights, RecurrentWeights):
        return sparse_recurrent(weights, x_projected, *states, **given)
    return block_recurrent(weights, x_projected, *states, **given)


def launch_problem(
    weights: Weights, steps: int, batch: int, cell: str, *, ragged: bool = False, resets: bool = False
) -> Problem:
    """The problem of a launch."""
    if isinstance(weights, RecurrentWeights):
        return problem_of(weights, steps, batch, cell, int(ragged), int(resets))
    return problem_of_blocks(weights, steps, batch, cell, int(ragged), int(resets))


# ---- files ---------------------------------------------------------------------------------------


def parts_of(weights: Weights) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and numbers from which `assembled` makes the weights."""
    form = form_of(weights)
    meta: dict[str, Any] = {"form": form, "hidden": weights.hidden, "dtype": weights.dtype}
    if isinstance(weights, RecurrentWeights):
        meta |= {"order": weights.order, "banks": weights.banks}
    return {name: getattr(weights, name) for name in ARRAYS[form]}, meta


def assembled(held: Mapping[str, np.ndarray], meta: Mapping[str, Any], gates: int) -> Weights:
    """Make weights from the result of `parts_of`, checked so that no kernel reads outside of their arrays.

    Raises
    ------
    KeyError, TypeError, ValueError
        If they are not valid.
    """
    form, hidden, dtype = meta["form"], meta["hidden"], meta["dtype"]
    if form not in ARRAYS or dtype not in FLOATS or not isinstance(hidden, int) or hidden < 1:
        raise ValueError(f"no weights: form {form!r}, hidden {hidden!r}, dtype {dtype!r}")
    arrays = [held[name] for name in ARRAYS[form]]
    for name, array in zip(ARRAYS[form], arrays, strict=True):
        wanted = numpy_dtype(dtype if name == "weights" else "int32")
        if array.dtype != wanted:
            raise ValueError(f"{name}: expected dtype {wanted}, got {array.dtype}")
    first, second, third = arrays
    if form == "blocks":
        if third.shape != (len(second), ROWS, COLUMNS):
            raise ValueError(f"weights: expected shape ({len(second)}, {ROWS}, {COLUMNS}), got {third.shape}")
        shape = tiles_of(hidden, gates), -(-hidden // COLUMNS)
        check_compressed(first, second, len(third), shape, item="tile", stored_in="group")
        return BlockRecurrentWeights(hidden, gates, dtype, first, second, third)
    order, banks, words = meta["order"], meta["banks"], entry_words(hidden, dtype)
    if order not in ("", *ORDERS) or banks not in BANKS:
        raise ValueError(f"no order of entries: {order!r} for {banks!r} banks")
    if third.ndim != 2 or third.shape[1] != words:
        raise ValueError(f"entries: expected {words} words each, got shape {third.shape}")
    if first.shape != (hidden,) or (np.sort(first) != np.arange(hidden)).any():
        raise ValueError(f"units: expected each of {hidden} units once")
    weights = RecurrentWeights(hidden, gates, dtype, first, second, third, order, banks)
    check_compressed(second, weights.columns, len(third), (hidden * gates, hidden), stored_in="entry")
    return weights
