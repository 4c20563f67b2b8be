"""The public call of the sparse recurrent layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tvm_sparse.core.problem import FLOATS, ProblemError
from tvm_sparse.formats.recurrent import RecurrentWeights, recurrent_weights
from tvm_sparse.runtime import arrays, repeat
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import (
    check_floats,
    facts_beside,
    launch,
    machine_of,
    outputs_for,
    refuse_gradient,
)
from tvm_sparse.runtime.dispatch import Dispatcher, dispatcher
from tvm_sparse.runtime.signature import Absent, Array, Number, Output, Signature, Structure, Text

from .problem import GATES, RecurrentLayer, SparseRecurrent, entries_kept, rounded_limit

if TYPE_CHECKING:
    import numpy as np

__all__ = ["RecurrentWeights", "recurrent_weights", "sparse_recurrent"]

# For messages about the device of an argument.
WHERE = "x_projected is"


def signature(weights: str) -> Signature:
    """The signature of a recurrent layer whose weights have this type."""
    state = Array(("batch", "hidden"), gradient=True)
    return Signature(
        ("weights", Structure((weights,))),
        ("x_projected", Array(("steps", "batch", "rows"), FLOATS, gradient=True)),
        ("h0", state),
        ("c0", Absent(), state),
        ("cell", Text(tuple(GATES))),
        ("hidden_bias", Absent(), Array(("hidden",), gradient=True)),
        ("limit", Absent(), Number("float", 0.2, 2)),
        ("lengths", Absent(), Array(("batch",), ("int32", "int64"), below="steps + 1")),
        ("resets", Absent(), Array(("steps", "batch"), ("int32", "bool"), below=2)),
        ("validate", Number("bool")),
        outputs=(Output("output"), Output("h_n"), Output("c_n", asked="c0")),
        operator=False,
    )


SIGNATURE = signature("RecurrentWeights")
SIGNATURES = {"sparse_recurrent": SIGNATURE}


def sparse_recurrent(
    weights: RecurrentWeights,
    x_projected: Any,
    h0: Any,
    c0: Any = None,
    *,
    cell: str,
    hidden_bias: Any = None,
    limit: float | None = None,
    lengths: Any = None,
    resets: Any = None,
    out: Any = None,
    validate: bool = False,
) -> tuple[Any, ...]:
    """All steps of a recurrent layer with a sparse recurrent weight U; the input product is computed beforehand.

        tanh, relu   h[t] = f(x[t] + U h[t-1])
        lstm         i, f, o = sigmoid, g = tanh of x[t] + U h[t-1];  c[t] = f c[t-1] + i g;  h[t] = o tanh(c[t])
        gru          r, z = sigmoid(x[t] + U h[t-1]);  n = tanh(x_n[t] + r (U_n h[t-1] + b));
                     h[t] = (1 - z) n + z h[t-1]
        clipped_relu
                     h[t] = min(max(x[t] + U h[t-1], 0), limit)
        gru_reset_before
                     r, z as in gru;  n = tanh(x_n[t] + U_n (r h[t-1]));  h[t] = (1 - z) n + z h[t-1]

    Parameters
    ----------
    weights
        U, `(gates * hidden, hidden)`, made once by `recurrent_weights`. It is copied to the device of `x_projected` at
        the first call there, and kept.
    x_projected
        Shape `(steps, batch, gates * hidden)`, of the weights' dtype: the input product with its biases, gates in
        torch's order (i, f, g, o; r, z, n), for "gru" all biases except the hidden one of n. A torch tensor on CPU or
        CUDA, a NumPy array, or another DLPack array, as are all further arguments.
    h0, c0
        `(batch, hidden)`, the states before the first step; c0 for "lstm" alone.
    cell
        "tanh", "relu", "clipped_relu", "lstm", "gru" (PyTorch's, Keras's `reset_after=True`) or "gru_reset_before"
        (Keras's `reset_after=False`, ONNX's `linear_before_reset=0`; both have their gates in the order z, r, n).
    hidden_bias
        `(hidden,)`, b of "gru"; None: zeros.
    limit
        A number above 0, for "clipped_relu" alone; rounded to the weights' dtype.
    lengths
        `(batch,)` int32 or int64: the steps of each sequence, in [0, steps]. After a sequence's end its output is 0,
        and its states do not change.
    resets
        `(steps, batch)`, bool or int32: where it is nonzero, the states are set to zero before the step, to begin
        another sequence.
    out
        The arrays to write into, in the order of the results: contiguous, on the same device, not overlapping with
        inputs.
    validate
        Also check lengths on a GPU, which costs a synchronisation; on the host they are always checked. Lengths that
        are not checked are clamped to [0, steps].

    Returns
    -------
    output, h_n[, c_n]
        `(steps, batch, hidden)` and `(batch, hidden)` of the weights' dtype: the state after each step, and the states
        after the last step of each sequence; c_n for "lstm" alone.

    Raises
    ------
    TypeError
        If `weights` is not a `RecurrentWeights`, or another argument is not an array.
    ValueError
        For another cell, gates that do not match it, shapes, dtypes or devices that do not fit, lengths outside of [0,
        steps], an argument that the cell lacks, or an `x_projected` of 2^31 elements or more.
    RuntimeError
        If a gradient is wanted and there is `out`, or an array that is no torch tensor.

    Notes
    -----
    If a torch tensor requires a gradient, results have the gradients of x_projected, h0, c0 and hidden_bias
    (`recurrent_backward`); the weights are constants.

    Sums, gates and c are float32; h is rounded to the dtype after each step. A NaN or infinity in a state affects the
    units with a stored weight for it; in a dense layer it affects all. r h is rounded to the dtype, as h is; a state
    that reaches the limit passes no gradient.

    A step of "gru_reset_before" has two products, one after the other, between which units exchange r h: on a GPU it
    takes about twice as long as that of "gru".

    When not to use it: with weights that are not sparse, or batches of hundreds, for which one dense product per step
    is faster; if a step's input depends on the previous output, as in text generation, which needs one call per step.

    Source: Zhu, Pool et al. 2018, "Sparse Persistent RNNs: Squeezing Large Recurrent Networks On-Chip".
    """
    if not isinstance(weights, RecurrentWeights):
        raise TypeError(
            f"weights: expected RecurrentWeights, got {type(weights).__name__}; make them by recurrent_weights(matrix)"
        )
    what = ("sparse_recurrent", cell, weights.nonzeros, weights.longest)
    states = x_projected, h0, c0, hidden_bias, limit, lengths, resets
    return run_layer(dispatcher, what, problem_of, weights, *states, cell=cell, out=out, validate=validate)


class LayerWeights(Protocol):
    """The weights' properties that a call needs, for any layout."""

    @property
    def hidden(self) -> int: ...

    @property
    def gates(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def held(self) -> tuple[np.ndarray, ...]: ...

    @property
    def placed(self) -> dict[Any, Any]: ...

    def laid_out_for(self, batch: int) -> LayerWeights: ...


Weights = TypeVar("Weights", bound=LayerWeights)


def run_layer(
    dispatcher: Dispatcher,
    what: tuple[Any, ...],
    problem_of: Callable[[Weights, int, int, str, int, int], RecurrentLayer],
    weights: Weights,
    x_projected: Any,
    h0: Any,
    c0: Any,
    hidden_bias: Any,
    limit: Any,
    lengths: Any,
    resets: Any,
    *,
    cell: str,
    out: Any,
    validate: bool,
) -> tuple[Any, ...]:
    """A call of a recurrent layer; `what` names the operator and the properties of the weights on which its problem
    depends. The other arguments are `sparse_recurrent`'s.
    """
    limit = _checked_limit(limit, cell, weights)
    given = x_projected, h0, c0, hidden_bias, limit, lengths, resets
    outputs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    # Lengths on the host are checked at every call.
    if not validate and arrays.is_torch(x_projected) and x_projected.dim() == 3 and not arrays.traced():
        placed = weights.laid_out_for(x_projected.shape[1]).placed.get(x_projected.device)
        if placed is not None and (lengths is None or x_projected.is_cuda):
            found = repeat.again(dispatcher.launchers, what, (*placed, *given), None if out is None else outputs)
            if found is not None:
                return found
    if with_gradient(*given[:4]):
        if out is not None:
            raise RuntimeError("out: a gradient is wanted, and none goes through `out`; call it without")
        from ..recurrent_backward.autograd import differentiable

        def run(
            weights: Weights, *states: Any, hidden_bias: Any, limit: Any, lengths: Any, resets: Any
        ) -> tuple[Any, ...]:
            x, h0, c0 = (*states, None)[:3]
            beside = hidden_bias, limit, lengths, resets
            return run_layer(
                dispatcher, what, problem_of, weights, x, h0, c0, *beside, cell=cell, out=None, validate=validate
            )

        return differentiable(run, weights, *given, cell=cell)

    known, states = _checked(weights, x_projected, h0, c0, cell, hidden_bias)
    steps, batch, _ = known.shape
    extras = _checked_extras(known, lengths, resets, validate)
    wanted: list[tuple[str, tuple[int, ...], str]] = [("output", (steps, batch, weights.hidden), known.dtype)]
    wanted += [(name, (batch, weights.hidden), known.dtype) for name in ("h_n", "c_n")[: 1 + (cell == "lstm")]]
    results = tuple(outputs_for(out, tuple(wanted), x_projected, known))
    read = {"x_projected": x_projected, "h0": h0, "c0": c0, "hidden_bias": hidden_bias}
    read |= {"lengths": lengths, "resets": resets, "weights": _arrays_of(weights, x_projected, batch)}
    SIGNATURE.refuse_overlap(out, **read)
    if not steps:
        for result, (_, _, state) in zip(results[1:], states, strict=False):
            _copy(result, state)
    elif batch:
        try:
            problem = problem_of(weights, steps, batch, cell, int(lengths is not None), int(resets is not None))
        except ProblemError as error:
            raise ValueError(f"x_projected: {error}") from None
        bias = None if cell != "gru" else _bias(hidden_bias, weights.hidden, x_projected, known)
        before = ("x_projected", known, x_projected), *(*states, None)[:2], bias
        ready = [
            [None if one is None else arrays.ready(one[0], one[2], one[1]) for one in some] for some in (before, extras)
        ]
        arguments = (*_placed(weights.laid_out_for(batch), x_projected, known), *ready[0], limit, *ready[1])
        kept = lengths is None or known.device != "cpu" or None
        launch(dispatcher, problem, machine_of("x_projected", known), what, arguments, results, kept=kept)
    return outputs if out is not None else tuple(arrays.returned(one, x_projected) for one in results)


def with_gradient(*given: Any) -> bool:
    """Whether these arrays (or None) are torch tensors of which one requires a gradient."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    tensors = [array for array in given if array is not None]
    return all(map(arrays.is_torch, tensors)) and any(tensor.requires_grad for tensor in tensors)


def problem_of(
    weights: RecurrentWeights, steps: int, batch: int, cell: str, ragged: int = 0, resets: int = 0
) -> SparseRecurrent:
    """The problem of a call. Raises `ProblemError` if it is not valid."""
    nonzeros = entries_kept(weights.nonzeros, weights.gates * weights.hidden, weights.hidden, weights.longest)
    return SparseRecurrent(steps, batch, weights.hidden, nonzeros, cell, weights.dtype, ragged, resets)


def input_facts(weights: LayerWeights, x_projected: Any) -> Facts:
    """Facts of the argument `x_projected`, checked."""
    known = arrays.facts("x_projected", x_projected)
    check_floats("x_projected", known, rank=3)
    refuse_gradient("x_projected", x_projected)
    rows = weights.gates * weights.hidden
    if known.shape[2] != rows or known.dtype != weights.dtype:
        raise ValueError(
            f"x_projected: expected shape (steps, batch, {rows}) and dtype {weights.dtype}, as the weights have, got"
            f" {known.shape} and {known.dtype}"
        )
    return known


def _checked_limit(limit: Any, cell: str, weights: LayerWeights) -> float | None:
    """The limit of a cell, rounded to the weights' dtype."""
    if cell != "clipped_relu":
        if limit is not None:
            raise ValueError(f"limit: expected None for cell={cell!r}")
        return None
    return rounded_limit(limit, weights.dtype)


Beside = tuple[str, Facts, Any]


def _checked(
    weights: LayerWeights, x_projected: Any, h0: Any, c0: Any, cell: str, hidden_bias: Any
) -> tuple[Facts, list[Beside]]:
    """Facts of the projected input, and the states of the cell, checked."""
    if cell not in GATES:
        raise ValueError(f"cell: expected one of {', '.join(GATES)}, got {cell!r}")
    if weights.gates != GATES[cell]:
        raise ValueError(f"weights: expected {GATES[cell]} gates for cell={cell!r}, got {weights.gates}")
    known = input_facts(weights, x_projected)
    if (c0 is None) == (cell == "lstm"):
        raise ValueError(f"c0: expected {'a state' if cell == 'lstm' else 'None'} for cell={cell!r}")
    if hidden_bias is not None and cell != "gru":
        raise ValueError(f"hidden_bias: expected None for cell={cell!r}, whose biases are all in x_projected")
    shape = (known.shape[1], weights.hidden)
    states = [facts_beside("h0", h0, shape, known.dtype, known, WHERE)]
    if c0 is not None:
        states.append(facts_beside("c0", c0, shape, known.dtype, known, WHERE))
    return known, states


def _checked_extras(known: Facts, lengths: Any, resets: Any, validate: bool) -> list[Beside | None]:
    """Lengths and resets as int32, checked; None for absent ones."""
    steps, batch, _ = known.shape
    found: list[Beside | None] = [None, None]
    if lengths is not None:
        theirs = arrays.facts("lengths", lengths)
        if theirs.shape != (batch,) or theirs.dtype not in ("int32", "int64"):
            raise ValueError(
                f"lengths: expected shape ({batch},) and dtype int32 or int64, got {theirs.shape} and {theirs.dtype}"
            )
        if theirs.device == "cpu" or validate:
            values = arrays.as_numpy(lengths)
            outside = (values < 0) | (values > steps)
            if outside.any():
                at = int(outside.argmax())
                raise ValueError(f"lengths: expected values in [0, {steps}], got {values[at]} for sequence {at}")
        found[0] = facts_beside("lengths", _as_int32("lengths", lengths, theirs), (batch,), "int32", known, WHERE)
    if resets is not None:
        theirs = arrays.facts("resets", resets)
        if theirs.shape != (steps, batch) or theirs.dtype not in ("bool", "int32"):
            raise ValueError(
                f"resets: expected shape ({steps}, {batch}) and dtype bool or int32, got {theirs.shape} and"
                f" {theirs.dtype}"
            )
        found[1] = facts_beside("resets", _as_int32("resets", resets, theirs), (steps, batch), "int32", known, WHERE)
    return found


def _as_int32(name: str, array: Any, known: Facts) -> Any:
    return array if known.dtype == "int32" else arrays.converted(name, array, "int32")


def _bias(hidden_bias: Any, hidden: int, like: Any, known: Facts) -> Beside:
    """The hidden bias of a GRU, zeros if there is none."""
    if hidden_bias is None:
        hidden_bias = arrays.full((hidden,), 0, known.dtype, like, known)
    return facts_beside("hidden_bias", hidden_bias, (hidden,), known.dtype, known, WHERE)


def _placed(weights: LayerWeights, like: Any, known: Facts) -> tuple[Any, ...]:
    """The weights' arrays prepared for a kernel on the device of the facts; cached in the weights."""
    place = like.device if arrays.is_torch(like) else (known.device, known.index)
    found = weights.placed.get(place)
    if found is None:
        held = weights.held
        torch = sys.modules.get("torch")
        if torch is not None:
            device = f"cuda:{known.index}" if known.device == "cuda" else "cpu"
            found = tuple(_tensor(array).to(device) for array in held)
        elif known.device == "cpu":
            found = tuple(map(arrays.argument, held))
        else:
            raise TypeError("weights: PyTorch copies them to a GPU; import torch")
        weights.placed[place] = found
    return found


def _arrays_of(weights: LayerWeights, like: Any, batch: int) -> tuple[Any, ...]:
    """The weights' arrays on the projected input's device, if they have been placed there."""
    arranged = weights.laid_out_for(batch)
    return tuple(arranged.placed.get(like.device, ())) if arrays.is_torch(like) else arranged.held


def _tensor(array: np.ndarray) -> Any:
    """A NumPy array as a tensor. torch does not know NumPy's bfloat16, but accepts the same bits as integers."""
    torch = sys.modules["torch"]
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _copy(into: Any, state: Any) -> None:
    if arrays.is_torch(into):
        into.copy_(state)
    else:
        into[...] = arrays.as_numpy(state)
