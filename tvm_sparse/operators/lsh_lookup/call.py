"""The public call of the look-up by band codes."""

from __future__ import annotations

from typing import Any

from tvm_sparse.core.problem import ProblemError
from tvm_sparse.formats import wta
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.runtime import arrays, repeat
from tvm_sparse.runtime.calls import count, launch, machine_of, outputs_for
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Array, Number, Output, Signature

from .arguments import MULTIPLIERS, TABLES, THRESHOLD, checked_tables
from .problem import LshLookup

SIGNATURES = {
    "lsh_lookup": Signature(
        ("codes", Array(("lists", "beam", "bands"), ("int32",))),
        *TABLES,
        THRESHOLD,
        MULTIPLIERS,
        ("validate", Number("bool")),
        outputs=(Output("chosen"),),
        operator=False,
    )
}


def lsh_lookup(
    codes: Any,
    words: Any,
    table: Any,
    always: Any,
    threshold: int,
    *,
    multipliers: Any = None,
    out: Any = None,
    validate: bool = False,
) -> Any:
    """The words that share at least `threshold` band codes with a row of a list's beam, as bitmaps.

    L[l, i, j] = number of bands w in which word j has the code codes[l, i, w]. Word j is chosen for list l if
    L[l, i, j] >= threshold for some i, or if its bit in `always` is set. Counts are exact.

    Parameters
    ----------
    codes
        Shape `(lists, beam, bands)`, int32, in [0, 2^bits) for a direct table, at least 0 for a cuckoo table: as
        `wta_hash` returns them. The rows of a list's beam share its words. A torch tensor on CPU or CUDA, a NumPy
        array, or another DLPack array.
    words, table, multipliers
        As `formats.wta.tables` builds them, on the same device: `(bands, vocab)` int32 words of each band by code;
        bucket starts `(bands, 2^bits + 1)` int32, or cuckoo entries `(bands, 2, slots, 4)` int32 with `multipliers`
        `(bands, 2)` int32.
    always
        Shape `(ceil(vocab / 32),)`, int32: bitmap of words that are always chosen; bits beyond `vocab` are ignored.
    threshold
        At least 1.
    out
        `(lists, ceil(vocab / 32))` int32 array to write into, contiguous and on the same device.
    validate
        Check the values in codes and tables, on any device; on a GPU this costs a synchronisation and a copy. Invalid
        values that are not checked cause reads and writes out of bounds.

    Returns
    -------
    chosen
        `(lists, ceil(vocab / 32))` int32: bit j % 32 of the int32 at j // 32 says whether word j is chosen.

    Raises
    ------
    TypeError
        If an argument is not an array.
    ValueError
        For other shapes, dtypes or devices, a threshold below 1, invalid codes or tables, or an `out` that does not
        fit; naming the argument.

    Notes
    -----
    When not to use it: for lists of words from hidden states, which `lsh_candidates` makes in one program.

    Source: Shi, Xu & Knight 2018, Algorithm 1, equations 9, 10 and 3.
    """
    threshold = count("threshold", threshold)
    if not validate:
        arguments = (codes, words, table, multipliers, always, threshold)
        found = repeat.again(dispatcher.launchers, "lsh_lookup", arguments, out)
        if found is not None:
            return found

    known = arrays.facts("codes", codes)
    if len(known.shape) != 3 or known.dtype != "int32" or 0 in known.shape[1:]:
        raise ValueError(
            f"codes: expected shape (lists, beam, bands) and dtype int32, got {known.shape} and {known.dtype}"
        )
    lists, beam, bands = known.shape
    tables = checked_tables(words, table, multipliers, always, threshold, known, "codes are", bands, validate)
    if validate:
        wta.check_codes(arrays.as_numpy(codes), tables.bits if tables.kind == "direct" else 31)
    [result] = outputs_for(out, (("out", (lists, bitmap_words(tables.vocab)), "int32"),), codes, known)
    SIGNATURES["lsh_lookup"].refuse_overlap(
        out, codes=codes, words=words, table=table, multipliers=multipliers, always=always
    )
    if lists:
        try:
            problem = LshLookup(lists, beam, tables.vocab, bands, tables.kind, tables.bits)
        except ProblemError as error:
            raise ValueError(f"codes: {error}") from None
        arguments = (arrays.ready("codes", codes, known), *tables.arguments)
        launch(dispatcher, problem, machine_of("codes", known), "lsh_lookup", arguments, (result,), single=True)
    return out if out is not None else arrays.returned(result, codes)
