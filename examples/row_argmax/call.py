"""The public call of row_argmax_logsumexp."""

from __future__ import annotations

from typing import Any

from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.calls import check_floats, machine_of, outputs_for, refuse_gradient
from tvm_sparse.runtime.dispatch import dispatcher

from .problem import RowArgmaxLogsumexp


def row_argmax_logsumexp(logits: Any, *, out: Any = None) -> tuple[Any, Any]:
    """log(sum_j exp(logits[b, j])), and the column of each row's largest element, in one read of the logits.

    Parameters
    ----------
    logits
        Shape `(batch, vocab)`, neither of them 0; float32, float16 or bfloat16. Copied first if it is not contiguous,
        or not aligned to 16 bytes on a GPU.
    out
        Two arrays to write into: `(batch,)` of float32 and of int64, contiguous, on the device of `logits`.

    Returns
    -------
    values, indices
        `(batch,)` float32 and int64. The value of a row is -inf where all of it is, +inf where it has +inf, and NaN
        where it has NaN. The first column of equal elements counts, and NaN is larger than any number.

    Raises
    ------
    TypeError
        If `logits` is no array or lies on another kind of device.
    ValueError
        For another rank or dtype, an empty array, or an `out` that does not fit.
    RuntimeError
        If `logits` requires a gradient.
    """
    known = arrays.facts("logits", logits)
    check_floats("logits", known, rank=2)
    refuse_gradient("logits", logits)
    batch, vocab = known.shape
    if not batch or not vocab:
        raise ValueError(f"logits: expected rows and columns, got shape {known.shape}")
    names = (("values", (batch,), "float32"), ("indices", (batch,), "int64"))
    results = outputs_for(out, names, logits, known)
    problem = RowArgmaxLogsumexp(batch, vocab, known.dtype)
    function = dispatcher.kernel(problem, machine_of("logits", known)).function
    function(arrays.argument(arrays.ready("logits", logits, known)), *map(arrays.argument, results))
    values, indices = out if out is not None else (arrays.returned(result, logits) for result in results)
    return values, indices
