"""The public call of the recurrent layer with a weight in blocks."""

from __future__ import annotations

from typing import Any

from tvm_sparse.formats.block_recurrent import BlockRecurrentWeights, block_recurrent_weights
from tvm_sparse.operators.sparse_recurrent.call import run_layer, signature
from tvm_sparse.runtime.dispatch import dispatcher

from ..sparse_recurrent.problem import preferred
from .problem import BlockRecurrent

__all__ = ["BlockRecurrentWeights", "block_recurrent", "block_recurrent_weights"]

SIGNATURES = {"block_recurrent": signature("BlockRecurrentWeights")}


def block_recurrent(
    weights: BlockRecurrentWeights,
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
    """All steps of a recurrent layer with a recurrent weight U in blocks, or dense, for tensor cores.

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
        U, `(gates * hidden, hidden)`, made once by `block_recurrent_weights`. It is copied to the device of
        `x_projected` at the first call there, and kept.
    x_projected, h0, c0, cell, hidden_bias, limit, lengths, resets, out, validate
        As in `sparse_recurrent`.

    Returns
    -------
    output, h_n[, c_n]
        `(steps, batch, hidden)` and `(batch, hidden)` of the weights' dtype: the state after each step, and the states
        after the last step of each sequence; c_n for "lstm" alone.

    Raises
    ------
    TypeError
        If `weights` is not a `BlockRecurrentWeights`, or another argument is not an array.
    ValueError
        As in `sparse_recurrent`.
    RuntimeError
        As in `sparse_recurrent`.

    Notes
    -----
    Gradients are those of `sparse_recurrent`, by kernels that take the weight as entries.

    Sums, gates and c are float32; h is rounded to the dtype after each step. NaN propagates, and an infinity times a
    zero of a group is NaN, as in a dense product.

    When not to use it: with scattered nonzeros, for which `sparse_recurrent` reads less; on a GPU with float32, or with
    batches of more than 1,024, which need one kernel launch for each step, and "gru_reset_before" two.

    Source: Zhu, Pool et al. 2018, "Sparse Persistent RNNs: Squeezing Large Recurrent Networks On-Chip"; dense: Diamos
    et al. 2016, "Persistent RNNs: Stashing Recurrent Weights On-Chip".
    """
    if not isinstance(weights, BlockRecurrentWeights):
        raise TypeError(
            f"weights: expected BlockRecurrentWeights, got {type(weights).__name__}; make them by"
            " block_recurrent_weights(matrix)"
        )
    what = ("block_recurrent", cell, len(weights.groups))
    states = x_projected, h0, c0, hidden_bias, limit, lengths, resets
    return run_layer(dispatcher, what, problem_of, weights, *states, cell=cell, out=out, validate=validate)


def problem_of(
    weights: BlockRecurrentWeights, steps: int, batch: int, cell: str, ragged: int = 0, resets: int = 0
) -> BlockRecurrent:
    """The problem of a call. Raises `ProblemError` if it is not valid."""
    problem = BlockRecurrent(steps, batch, weights.hidden, 1, cell, weights.dtype, ragged, resets)
    full, found = problem.across, len(weights.groups)
    # A dense weight has a problem of its own, since its kernel keeps more in registers than for a nearly dense one.
    nonzeros = full if found == full * problem.tiles else min(full, preferred(found, problem.tiles))
    return BlockRecurrent(steps, batch, weights.hidden, nonzeros, cell, weights.dtype, ragged, resets)
