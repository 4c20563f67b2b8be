"""Hash tables as arguments of public calls: their checks, and the axes that follow from them."""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm_sparse.core.problem import FLOATS
from tvm_sparse.formats import wta
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import facts_beside
from tvm_sparse.runtime.signature import Absent, Array, Number, Structure

# Arguments of every function that looks words up.
TABLES: tuple[Any, ...] = (
    ("words", Array(("bands", "vocab"), ("int32",), below="vocab")),
    ("table", Structure(("direct", "cuckoo"))),
    ("always", Array(("ceil(vocab / 32)",), ("int32",))),
)
THRESHOLD: tuple[Any, ...] = ("threshold", Number("int", 1, "bands"))
MULTIPLIERS: tuple[Any, ...] = ("multipliers", Absent(), Array(("bands", 2), ("int32",)))


class HashTables(NamedTuple):
    """Checked hash tables."""

    vocab: int
    kind: str  # "direct" or "cuckoo"
    bits: int  # of a code; for a cuckoo table the most that a code may have
    arguments: tuple[Any, ...]  # for the kernel, from `words` to `threshold`; None for absent multipliers


def checked_states(hidden: Any) -> Facts:
    """Check the hidden states `(lists, beam, hidden)` of a call.

    Raises
    ------
    ValueError
        Naming the argument.
    """
    known = arrays.facts("hidden", hidden)
    if len(known.shape) != 3 or known.dtype not in FLOATS or 0 in known.shape[1:]:
        raise ValueError(
            f"hidden: expected shape (lists, beam, hidden) and dtype {', '.join(FLOATS)}, got {known.shape} and"
            f" {known.dtype}"
        )
    return known


def checked_hashing(
    permutations: Any,
    words: Any,
    table: Any,
    multipliers: Any,
    always: Any,
    threshold: Any,
    hidden: Facts,
    where: str,
    validate: bool,
) -> tuple[tuple[str, Facts, Any], HashTables]:
    """Check the permutations for hashing hidden states, as `facts_beside` does, and tables for their codes.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """
    beside = facts_beside("permutations", permutations, (None, None, None), "int16", hidden, where)
    bands, units, k = beside[1].shape
    if hidden.device == "cpu" or validate:
        wta.check_permutations(arrays.as_numpy(permutations), hidden.shape[2])
    tables = checked_tables(words, table, multipliers, always, threshold, hidden, where, bands, validate)
    if tables.kind == "direct" and tables.bits != wta.code_bits(k, units):
        raise ValueError(
            f"table: expected 2^{wta.code_bits(k, units)} + 1 bucket starts a band, for codes of units={units} places"
            f" among k={k}, got 2^{tables.bits} + 1"
        )
    return beside, tables


def checked_tables(
    words: Any,
    table: Any,
    multipliers: Any,
    always: Any,
    threshold: Any,
    first: Facts,
    where: str,
    bands: int,
    validate: bool,
) -> HashTables:
    """Check the tables of a call whose first array is `first`, for codes of `bands` bands.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """
    found = facts_beside("words", words, (bands, None), "int32", first, where)
    given: list[tuple[str, Facts, Any] | None] = [found]
    vocab = found[1].shape[1]
    if vocab < 1:
        raise ValueError("words: expected at least one word, got none")
    rank = len(arrays.facts("table", table).shape)
    if rank == 2:
        starts = facts_beside("table", table, (bands, None), "int32", first, where)
        given.append(starts)
        size = starts[1].shape[1] - 1
        if size < 2 or size & (size - 1):
            raise ValueError(f"table: expected 2^bits + 1 bucket starts a band, got {size + 1}")
        if multipliers is not None:
            raise ValueError("multipliers: expected none with a direct table, whose starts have 2 dimensions")
        kind, bits = "direct", size.bit_length() - 1
        given.append(None)
    elif rank == 4:
        given.append(facts_beside("table", table, (bands, 2, None, 4), "int32", first, where))
        if multipliers is None:
            raise ValueError("multipliers: expected those of the cuckoo table, shape (bands, 2), got None")
        given.append(facts_beside("multipliers", multipliers, (bands, 2), "int32", first, where))
        kind, bits = "cuckoo", wta.MOST_BITS
    else:
        raise ValueError(
            f"table: expected 2 dimensions (bands, 2^bits + 1) of a direct table, or 4 (bands, 2, slots, 4) of a cuckoo"
            f" table, got {rank}"
        )
    given.append(facts_beside("always", always, (bitmap_words(vocab),), "int32", first, where))
    if validate:
        wta.check_tables(arrays.as_numpy(words), arrays.as_numpy(table))
    ready = [None if one is None else arrays.ready(one[0], one[2], one[1]) for one in given]
    return HashTables(vocab, kind, bits, (*ready, threshold))
