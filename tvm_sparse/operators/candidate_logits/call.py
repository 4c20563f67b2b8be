"""The public call of the gathered product."""

from __future__ import annotations

from typing import Any

from tvm_sparse.operators.candidate_topk.call import BIAS, CANDIDATES, COUNTS, Lists
from tvm_sparse.operators.head_topk.call import WHERE
from tvm_sparse.runtime import arrays, custom
from tvm_sparse.runtime.calls import launch, machine_of, outputs_for
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Number, Output, Signature

from .problem import CandidateLogits

SIGNATURES = {
    "candidate_logits": Signature(*CANDIDATES, COUNTS, BIAS, ("validate", Number("bool")), outputs=(Output("logits"),))
}
_SIGNATURE = SIGNATURES["candidate_logits"]


def candidate_logits(
    hidden: Any,
    embedding: Any,
    candidates: Any,
    *,
    counts: Any = None,
    bias: Any = None,
    validate: bool = False,
    out: Any = None,
) -> Any:
    """hidden @ embedding[candidates].T + bias[candidates], without a copy of the candidates' rows.

    logits[r, i] = sum_h hidden[r, h] * embedding[c_i, h] + bias[c_i],  c the candidates of row r.

    Parameters
    ----------
    hidden, embedding, candidates, counts, bias, validate
        As for `candidate_topk`.
    out
        `(rows, m)` float32 array to write into.

    Returns
    -------
    logits
        `(rows, m)` float32, in the order of the candidates; -inf beyond a list's count.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `candidate_topk`.

    Notes
    -----
    When not to use it: if only the best candidates are needed, which `candidate_topk` finds without writing the others.

    Source: Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", section 4.2.
    """
    if custom.transformed(hidden, embedding, candidates, counts, bias):
        options = {"counts": counts, "bias": bias, "validate": validate, "out": out}
        return custom.module_of("candidate_logits").candidate_logits(hidden, embedding, candidates, **options)
    given = Lists.of(hidden, embedding, candidates, counts, 1, validate)
    known, vocab = given.hidden, given.embedding.shape[0]
    extra = None if bias is None else _SIGNATURE.beside("bias", bias, known, WHERE, vocab=vocab)
    rows = known.shape[0]
    [logits] = outputs_for(out, (("logits", (rows, given.m), "float32"),), hidden, known)
    _SIGNATURE.refuse_overlap(out, hidden=hidden, embedding=embedding, candidates=candidates, counts=counts, bias=bias)
    row = None if extra is None or arrays.is_fake(hidden) else arrays.ready(extra[0], extra[2], extra[1])
    most = given.most_rows()
    if not arrays.is_fake(hidden) and rows > most:

        def some(states: Any, words: Any, many: Any, into: list[Any]) -> Any:
            return candidate_logits(states, embedding, words, counts=many, bias=row, out=into[0])

        given.by_parts(some, most, hidden, candidates, counts, (logits,))
    elif rows and not arrays.is_fake(hidden):
        problem = CandidateLogits(
            given.lists, given.beam, vocab, known.shape[1], given.m, known.dtype, int(bias is not None)
        )
        states, table, words, many = given.arguments(hidden, embedding, candidates, counts)
        written = arrays.reshaped(logits, (given.lists, given.beam, given.m))
        arguments = (states, table, words, many, row)
        launch(dispatcher, problem, machine_of("hidden", known), None, arguments, (written,), kept=None)
    return out if out is not None else arrays.returned(logits, hidden)
