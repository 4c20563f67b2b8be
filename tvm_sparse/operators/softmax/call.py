"""The public calls of softmax."""

from __future__ import annotations

from typing import Any

from tvm_sparse.core.problem import FLOATS
from tvm_sparse.runtime import arrays, custom, repeat, whole_vectors
from tvm_sparse.runtime.calls import by_parts, by_rows, launch, logits_facts, machine_of, most_rows, outputs_for
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import ROWS, Absent, Array, Output, Signature, Text

from .problem import ALGORITHMS, Softmax

_LOGITS = ("logits", Array((ROWS, "vocab"), FLOATS, gradient=True))
_DTYPE = ("dtype", Absent(), Text(("float32",)))
SIGNATURES = {
    "softmax": Signature(_LOGITS, ("algorithm", Text(ALGORITHMS)), _DTYPE, outputs=(Output("probabilities"),)),
    "log_softmax": Signature(_LOGITS, _DTYPE, outputs=(Output("probabilities"),)),
}


def softmax(logits: Any, *, algorithm: str = "online", dtype: Any = None, out: Any = None) -> Any:
    """softmax(logits, -1), each logit read from memory once where a row fits into a GPU's registers.

    probabilities[b, i] = exp(logits[b, i] - m_b) / sum_j exp(logits[b, j] - m_b),  m_b = max_j logits[b, j].

    Parameters
    ----------
    logits
        Shape `(batch, vocab)`, or `(..., vocab)` with any number of dimensions before; float32, float16 or bfloat16,
        accumulated in float32. `vocab` below 2^31. Arrays that are not contiguous, or not aligned to 16 bytes on a GPU,
        are copied first.
    algorithm
        `"online"` (Algorithm 3 of the paper), `"safe"` (2) or `"naive"` (1). The others exist for comparison: they read
        a row more often, and the naive one omits m_b, so that logits above 88 give infinities and NaN, and rows
        entirely below -87 give NaN.
    dtype
        The dtype of the result: that of `logits`, or float32 for logits of any dtype, as `torch.float32` or
        `"float32"`. Logits are read in their own dtype, without a copy in float32.
    out
        Array to write into: contiguous, of the shape and device of `logits` and the dtype of the result. It must not
        overlap with it.

    Returns
    -------
    probabilities
        An array with the shape of `logits`. Values below 1.2e-38 may be 0. A row with NaN or +inf, or with
        nothing above -inf, is NaN, as in torch.softmax. (With the naive algorithm +inf gives NaN, and the rest of its
        row 0.)

    Raises
    ------
    TypeError
        If `logits` is not an array, or is on an unsupported device.
    ValueError
        For a 0-d array, another dtype of logits or result, vocab of 2^31 or more, an unknown algorithm, or an `out`
        that does not fit.
    RuntimeError
        If `out` requires a gradient, or `logits` has a forward-mode tangent.

    Notes
    -----
    The result is differentiable: dx = p * (g - sum_i g_i p_i), by PyTorch's kernel.

    When not to use it: if only the k largest entries are needed; `softmax_topk` writes nothing else.

    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", Algorithms 1 to 3.
    """
    return distribution(logits, algorithm, 0, dtype, out)


def log_softmax(logits: Any, out: Any = None, *, dtype: Any = None) -> Any:
    """log(softmax(logits, -1)), with the same accuracy for small and large probabilities.

    logprobs[b, i] = logits[b, i] - m_b - log(sum_j exp(logits[b, j] - m_b)),  m_b = max_j logits[b, j].

    Arguments, result and errors are those of `softmax`, whose kernel it runs. Near 0 and far from it a log-probability
    in 16 bits keeps two or three digits: `dtype=torch.float32` keeps six.
    """
    return distribution(logits, "online", 1, dtype, out)


def distribution(logits: Any, algorithm: str, log: int, dtype: Any = None, out: Any = None) -> Any:
    """`softmax`, or with `log` `log_softmax`."""
    dtype = dtype if dtype is None or dtype == "float32" else arrays.dtype_name(dtype)
    what = ("softmax", algorithm, dtype)
    if type(algorithm) is str:
        found = repeat.again(dispatcher.launchers, what, (logits, 1 if log else 0), out)
        if found is not None:
            return found

    if custom.transformed(logits, differentiable=True):
        operator = custom.module_of("softmax")
        if log:
            return operator.log_softmax(logits, out, dtype=dtype)
        return operator.softmax(logits, algorithm=algorithm, dtype=dtype, out=out)
    known = logits_facts(logits)
    if dtype not in (None, "float32", known.dtype):
        own = "" if known.dtype == "float32" else f", or {known.dtype} as the logits have"
        raise ValueError(f"dtype: expected float32{own}, got {dtype}")
    written = dtype or known.dtype
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if len(known.shape) != 2:

        def call(rows: Any, given: Any) -> list[Any]:
            return [distribution(rows, algorithm, log, dtype, given and given[0])]

        [result] = by_rows(call, logits, known, out, (("out", known.shape[-1:], written),))
        return out if out is not None else result
    [result] = outputs_for(out, (("out", known.shape, written),), logits, known)
    SIGNATURES["log_softmax"].refuse_overlap(out, logits=logits)
    batch, vocab = known.shape
    if arrays.is_fake(logits):
        return result
    most = most_rows(vocab)
    if batch > most:
        call_parts = lambda given, into: distribution(given[0], algorithm, log, dtype, into[0])  # noqa: E731
        by_parts(call_parts, batch, most, (logits,), (result,))
    elif batch and whole_vectors.wanted(known):
        wide = distribution(whole_vectors.copies(logits, known)[0], algorithm, log, dtype)
        result[...] = wide[:, :vocab]
    elif batch and vocab:
        problem = Softmax(batch, vocab, algorithm, known.dtype, written if written != known.dtype else "")
        arguments = (arrays.ready("logits", logits, known), 1 if log else 0)
        launch(dispatcher, problem, machine_of("logits", known), what, arguments, (result,), single=True)
    return out if out is not None else arrays.returned(result, logits)
