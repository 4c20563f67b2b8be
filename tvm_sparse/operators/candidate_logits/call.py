"""The public call of the gathered product."""

from __future__ import annotations

from typing import Any

from tvm_sparse.operators.candidate_topk.call import Lists
from tvm_sparse.operators.head_topk.call import WHERE
from tvm_sparse.runtime import arrays, custom
from tvm_sparse.runtime.calls import facts_beside, machine_of, outputs_for
from tvm_sparse.runtime.dispatch import dispatcher

from .problem import CandidateLogits


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
        As `candidate_topk`.

    When not to use it: for the best candidates alone, which `candidate_topk` finds without writing the others.

    Source: Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", section 4.2.
    """
    if custom.transformed(hidden, embedding, candidates, counts, bias):
        options = {"counts": counts, "bias": bias, "validate": validate, "out": out}
        return custom.module_of("candidate_logits").candidate_logits(hidden, embedding, candidates, **options)
    given = Lists.of(hidden, embedding, candidates, counts, 1, validate)
    known, vocab = given.hidden, given.embedding.shape[0]
    extras = [] if bias is None else [facts_beside("bias", bias, (vocab,), "float32", known, WHERE)]
    rows = known.shape[0]
    [logits] = outputs_for(out, (("logits", (rows, given.m), "float32"),), hidden, known)
    if rows and not arrays.is_fake(hidden):
        problem = CandidateLogits(
            given.lists, given.beam, vocab, known.shape[1], given.m, known.dtype, int(bias is not None)
        )
        function = dispatcher.kernel(problem, machine_of("hidden", known)).function
        states, table, words, many = given.arguments(hidden, embedding, candidates, counts)
        function(
            states,
            table,
            words,
            arrays.argument(many),
            *(arrays.argument(arrays.ready(name, array, facts)) for name, facts, array in extras),
            arrays.argument(arrays.reshaped(logits, (given.lists, given.beam, given.m))),
        )
    return out if out is not None else arrays.returned(logits, hidden)
