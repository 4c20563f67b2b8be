"""The public call from hidden states to candidate words."""

from __future__ import annotations

from typing import Any

from tvm_sparse.core.problem import FLOATS, ProblemError
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
    launch,
    machine_of,
    outputs_for,
    refuse_gradient,
)
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Array, Number, Output, Signature

from .problem import LshCandidates

SIGNATURES = {
    "lsh_candidates": Signature(
        ("hidden", Array(("lists", "beam", "hidden"), FLOATS)),
        ("permutations", Array(("bands", "units", "k"), ("int16",), below="hidden")),
        *TABLES,
        THRESHOLD,
        ("capacity", Number("int", 1, 2**31 - 1)),
        MULTIPLIERS,
        ("validate", Number("bool")),
        outputs=(Output("candidates"), Output("counts")),
        operator=False,
    )
}


def lsh_candidates(
    hidden: Any,
    permutations: Any,
    words: Any,
    table: Any,
    always: Any,
    threshold: int,
    capacity: int,
    *,
    multipliers: Any = None,
    out: Any = None,
    validate: bool = False,
) -> tuple[Any, Any]:
    """The words whose hash resembles that of a hidden state, as lists on the device, without a host round trip.

    `compaction(lsh_lookup(wta_hash(hidden), ...))` in one program: a word is a candidate of a list if it shares at
    least `threshold` band codes with one row of the list's beam, or if its bit in `always` is set.

    Parameters
    ----------
    hidden
        Shape `(lists, beam, hidden)`; float32, float16 or bfloat16. The rows of a list's beam share its candidates:
        `(1, beam, hidden)` for one list of all rows, `(rows, 1, hidden)` for one list per row. A torch tensor on CPU or
        CUDA, a NumPy array, or another DLPack array. NaN counts as -inf.
    permutations
        Shape `(bands, units, k)`, int16, columns in [0, hidden): those with which the words were hashed.
    words, table, multipliers, always, threshold, validate
        As for `lsh_lookup`; a direct table has 2^(units * ceil(log2(k))) + 1 starts for each band.
    capacity
        Most words of a list.
    out
        A pair of int32 arrays to write into, `(lists, capacity)` and `(lists,)`, contiguous and on the same device.

    Returns
    -------
    candidates, counts
        `(lists, capacity)` int32: each list's words in ascending order, the first `capacity` of them, then -1.
        `(lists,)` int32: the number of candidates of each list, including those without room: the overflow of a list is
        max(0, counts - capacity).

    Raises
    ------
    TypeError
        If an argument is not an array.
    ValueError
        For other shapes, dtypes or devices, a threshold or capacity below 1, codes of more than 30 bits, tables for
        other codes, or an `out` that does not fit; naming the argument.
    RuntimeError
        If `hidden` requires a gradient.

    Notes
    -----
    Source: Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", section 4.2.
    """
    outputs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    threshold, capacity = count("threshold", threshold), count("capacity", capacity)
    what = ("lsh_candidates", capacity)
    if not validate:
        arguments = (hidden, permutations, words, table, multipliers, always, threshold)
        found = repeat.again(dispatcher.launchers, what, arguments, None if out is None else outputs)
        if found is not None:
            return found

    known = checked_states(hidden)
    refuse_gradient("hidden", hidden)
    lists, beam, columns = known.shape
    where, tables = checked_hashing(
        permutations, words, table, multipliers, always, threshold, known, "hidden is", validate
    )
    bands, units, k = where[1].shape
    wanted = ("candidates", (lists, capacity), "int32"), ("counts", (lists,), "int32")
    results = tuple(outputs_for(out, wanted, hidden, known))
    SIGNATURES["lsh_candidates"].refuse_overlap(
        out, hidden=hidden, permutations=permutations, words=words, table=table, multipliers=multipliers, always=always
    )
    if lists:
        try:
            problem = LshCandidates(
                lists, beam, columns, tables.vocab, k, units, bands, tables.kind, capacity, known.dtype
            )
        except ProblemError as error:
            raise ValueError(f"hidden: {error}") from None
        ready = arrays.ready("hidden", hidden, known), arrays.ready(where[0], where[2], where[1])
        launch(dispatcher, problem, machine_of("hidden", known), what, (*ready, *tables.arguments), results)
    return outputs if out is not None else tuple(arrays.returned(one, hidden) for one in results)
