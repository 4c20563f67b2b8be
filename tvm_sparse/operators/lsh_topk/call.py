"""The public call from hidden states to the best of their candidate words."""

from __future__ import annotations

from typing import Any

from tvm_sparse.core.problem import FLOATS, ProblemError
from tvm_sparse.formats import wta
from tvm_sparse.operators.head_topk.call import WHERE
from tvm_sparse.operators.lsh_lookup.arguments import (
    MULTIPLIERS,
    TABLES,
    THRESHOLD,
    checked_hashing,
    checked_states,
)
from tvm_sparse.runtime import arrays, repeat
from tvm_sparse.runtime.calls import (
    count,
    facts_beside,
    inverse_temperature,
    launch,
    machine_of,
    outputs_for,
    refuse_gradient,
    whole_number,
)
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Absent, Array, Number, Output, Signature

from .problem import LshTopk

SIGNATURES = {
    "lsh_topk": Signature(
        ("hidden", Array(("lists", "beam", "hidden"), FLOATS)),
        ("embedding", Array(("vocab", "hidden"))),
        ("permutations", Array(("bands", "units", "k"), ("int16",), below="hidden")),
        *TABLES,
        ("ids", Array(("frequent",), ("int32",), below="vocab")),
        THRESHOLD,
        ("n", Number("int", 1, "vocab")),
        MULTIPLIERS,
        ("log", Number("bool")),
        ("temperature", Number("float", 0.1, 3.0)),
        ("bias", Absent(), Array(("vocab",), ("float32",))),
        ("validate", Number("bool")),
        outputs=(Output("values"), Output("indices"), Output("normaliser"), Output("counts")),
        operator=False,
    )
}


def lsh_topk(
    hidden: Any,
    embedding: Any,
    permutations: Any,
    words: Any,
    table: Any,
    always: Any,
    ids: Any,
    threshold: int,
    n: int,
    *,
    multipliers: Any = None,
    log: bool = False,
    temperature: float = 1.0,
    bias: Any = None,
    out: Any = None,
    validate: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """The n most probable words among those that hidden states hash to and frequent ones: a step of an LSH head.

    It computes `candidate_topk(hidden, embedding, lsh_candidates(hidden, ...))` in one program without a list of
    candidates: frequent words are multiplied while hidden states are hashed and looked up, and other words as soon as
    they have enough hits. So there is no capacity, and no word is left out.

    Parameters
    ----------
    hidden
        Shape `(lists, beam, hidden)`; float32, float16 or bfloat16. Rows of a list's beam share its candidates. Sums
        are accumulated in float32; for hashing, NaN counts as -inf.
    embedding
        Shape `(vocab, hidden)`, one row for each word, of the dtype and on the device of `hidden`.
    permutations, words, table, multipliers, always, threshold, validate
        As for `lsh_candidates`.
    ids
        `(frequent,)` int32: the words whose bits are set in `always`, each once. At least one. These and `permutations`
        may be read while the producer kernel still runs, if that lets its consumer start early.
    n
        1 <= n <= vocab.
    log, temperature, bias
        As for `head_topk`.
    out
        Four arrays to write into, in the order of the results.

    Returns
    -------
    values
        `(lists, beam, n)` float32, descending; 0 (with `log` -inf) where a list has fewer than n words. On a GPU
        exponentials of words other than frequent ones are added in the order in which the words are found, so the last
        bits of values and normalisers may differ between calls.
    indices
        `(lists, beam, n)` int64 words; -1 where a list has fewer. Equal scores are in the order of the words.
    normaliser
        `(lists, beam)` float32: log(sum_w exp(s[r, w] / temperature)) over the candidates.
    counts
        `(lists,)` int32: number of candidates of each list.

    Raises
    ------
    TypeError
        If an argument is not an array, or a number has another type.
    ValueError
        For other shapes, dtypes or devices, a number out of range, tables for other codes, `ids` that do not match
        `always` (on the CPU, or with `validate`), or an `out` that does not fit; naming the argument.
    RuntimeError
        If an argument requires a gradient.

    Notes
    -----
    When not to use it: without frequent words, or if the candidates are needed: use `lsh_candidates` and
    `candidate_topk`.

    Source: Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", section 4.2 and figure 2.
    """
    scale = inverse_temperature(temperature)
    outputs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    threshold, n = count("threshold", threshold), whole_number("n", n)
    what = ("lsh_topk", n)
    if not validate:
        arguments = (
            *(hidden, embedding, permutations, words, table, multipliers, always, threshold, ids),
            *(scale, 1 if log else 0, bias),
        )
        found = repeat.again(dispatcher.launchers, what, arguments, None if out is None else outputs)
        if found is not None:
            return found

    known = checked_states(hidden)
    for name, array in (("hidden", hidden), ("embedding", embedding), ("bias", bias)):
        if array is not None:
            refuse_gradient(name, array)
    lists, beam, columns = known.shape
    matrix = facts_beside("embedding", embedding, (None, columns), known.dtype, known, WHERE)
    where, tables = checked_hashing(permutations, words, table, multipliers, always, threshold, known, WHERE, validate)
    bands, units, k = where[1].shape
    if tables.vocab != matrix[1].shape[0]:
        raise ValueError(f"words: expected those of the embedding's {matrix[1].shape[0]} words, got {tables.vocab}")
    frequent = facts_beside("ids", ids, (None,), "int32", known, WHERE)
    if not frequent[1].shape[0]:
        raise ValueError("ids: expected at least one word, got none; lsh_candidates needs none")
    if known.device == "cpu" or validate:
        wta.check_frequent(arrays.as_numpy(ids), arrays.as_numpy(always), tables.vocab)
    if not 1 <= n <= tables.vocab:
        raise ValueError(f"n: expected 1 <= n <= vocab ({tables.vocab}), got {n}")
    extra = None if bias is None else facts_beside("bias", bias, (tables.vocab,), "float32", known, WHERE)
    wanted = (
        ("values", (lists, beam, n), "float32"), ("indices", (lists, beam, n), "int64"),
        ("normaliser", (lists, beam), "float32"), ("counts", (lists,), "int32"),
    )  # fmt: skip
    results = tuple(outputs_for(out, wanted, hidden, known))
    SIGNATURES["lsh_topk"].refuse_overlap(
        out, hidden=hidden, embedding=embedding, permutations=permutations, words=words, table=table,
        multipliers=multipliers, always=always, ids=ids, bias=bias,
    )  # fmt: skip
    if lists:
        try:
            problem = LshTopk(
                lists, beam, columns, tables.vocab, frequent[1].shape[0], n, k, units, bands, tables.kind, known.dtype,
                int(bias is not None),
            )  # fmt: skip
        except ProblemError as error:
            raise ValueError(f"hidden: {error}") from None
        states, *rest, row = (
            None if one is None else arrays.ready(one[0], one[2], one[1])
            for one in (("hidden", known, hidden), matrix, where, frequent, extra)
        )
        arguments = (states, *rest[:2], *tables.arguments, rest[2], scale, 1 if log else 0, row)
        launch(dispatcher, problem, machine_of("hidden", known), what, arguments, results)
    return outputs if out is not None else tuple(arrays.returned(one, hidden) for one in results)  # type: ignore[return-value]
