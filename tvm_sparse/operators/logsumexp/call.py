"""The public call of logsumexp."""

from __future__ import annotations

import math
from typing import Any

from tvm_sparse.core.problem import FLOATS
from tvm_sparse.runtime import arrays, custom, repeat, whole_vectors
from tvm_sparse.runtime.calls import by_parts, by_rows, fill, launch, logits_facts, machine_of, most_rows, outputs_for
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import ROWS, Array, Output, Signature

from .problem import LogSumExp

SIGNATURES = {
    "logsumexp": Signature(("logits", Array((ROWS, "vocab"), FLOATS, gradient=True)), outputs=(Output("values"),))
}


def logsumexp(logits: Any, out: Any = None) -> Any:
    """log(sum_j exp(logits[..., j])), the normaliser of softmax, in one read of the logits.

    values[b] = m_b + log(sum_j exp(logits[b, j] - m_b)),  m_b = max_j logits[b, j].

    Parameters
    ----------
    logits
        As for `softmax`.
    out
        `(batch,)` float32 array (`(...)` for logits `(..., vocab)`) to write into: contiguous, on the device of
        `logits`.

    Returns
    -------
    values
        `(batch,)` (or `(...)`) float32 for every dtype of `logits`: rounded to half precision, as by torch.logsumexp,
        it would be too inaccurate for computing log-probabilities. The value is -inf for an empty row and one with only
        -inf, +inf for a row with +inf, and NaN for a row with NaN, as in torch.logsumexp.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `softmax`.

    Notes
    -----
    The result is differentiable: dx = g * softmax(x), by the kernel of `softmax`.

    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", Algorithm 3, lines 1 to 6.
    """
    found = repeat.again(dispatcher.launchers, "logsumexp", (logits,), out)
    if found is not None:
        return found

    if custom.transformed(logits, differentiable=True):
        return custom.module_of("logsumexp").logsumexp(logits, out)
    known = logits_facts(logits)
    if len(known.shape) != 2:

        def call(rows: Any, given: Any) -> list[Any]:
            return [logsumexp(rows, given and given[0])]

        [result] = by_rows(call, logits, known, out, (("out", (), "float32"),))
        return out if out is not None else result
    batch, vocab = known.shape
    [result] = outputs_for(out, (("out", (batch,), "float32"),), logits, known)
    SIGNATURES["logsumexp"].refuse_overlap(out, logits=logits)
    if arrays.is_fake(logits):
        return result
    if batch and not vocab:
        fill(result, -math.inf)
    elif batch > (most := most_rows(vocab)):
        by_parts(lambda given, into: logsumexp(given[0], into[0]), batch, most, (logits,), (result,))
    elif batch and whole_vectors.wanted(known):
        logsumexp(whole_vectors.copies(logits, known)[0], result)
    elif batch:
        problem, ready = LogSumExp(batch, vocab, known.dtype), arrays.ready("logits", logits, known)
        launch(dispatcher, problem, machine_of("logits", known), "logsumexp", (ready,), (result,), single=True)
    return out if out is not None else arrays.returned(result, logits)
