"""Parameters of an LSH head, checked, and the tables made by hashing an embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.given import integer
from ..core.problem import numpy_dtype
from ..formats import wta
from .codes import codes_of
from .libraries import library, to_host

# Names of the arrays of a `Hashing`.
HASHED = ("permutations", "words", "table", "multipliers")
PATHS = ("auto", "lsh", "exact")
# Most bits of a code for which direct tables are the default: 8 MB for 500 bands.
DIRECT_BITS = 12


@dataclass(frozen=True)
class Settings:
    """The numbers of an LSH head, checked for consistency.

    Attributes
    ----------
    vocab, hidden
        Shape of the embedding.
    k, units, bands
        K, u and W of the paper: a band's code consists of `units` indices, each that of the largest of `k` permuted
        elements.
    threshold
        Number of bands in which a candidate's code must agree with the row's; 0 makes every word a candidate.
    frequent
        Number of words that are always candidates.
    capacity
        Most words in a candidate list.
    table
        `"direct"`: the start of every code's bucket; `"cuckoo"`: a hash table over the codes that occur. "" if the
        threshold is 0, when nothing is looked up.
    """

    vocab: int
    hidden: int
    k: int
    units: int
    bands: int
    threshold: int
    frequent: int
    capacity: int
    table: str


def settings(
    vocab: int,
    hidden: int,
    *,
    k: Any,
    units: Any,
    bands: Any,
    threshold: Any,
    frequent: int,
    capacity: Any = None,
    table: str | None = None,
) -> Settings:
    """Settings from a caller's arguments; None means the default.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, with the numbers that do not fit.
    """
    k, units, bands = (integer(name, value) for name, value in (("k", k), ("units", units), ("bands", bands)))
    threshold = integer("threshold", threshold)
    if vocab < 1 or hidden < 1:
        raise ValueError(f"embedding: expected at least one word and one hidden unit, got shape ({vocab}, {hidden})")
    if vocab >= 2**31:
        raise ValueError(f"embedding: expected a vocab below 2^31, got {vocab}")
    if not 0 <= threshold <= bands:
        raise ValueError(f"threshold: expected 0 <= threshold <= bands ({bands}), got {threshold}")
    if threshold == 0:
        return Settings(vocab, hidden, k, units, bands, 0, vocab, vocab, "")
    wta.check_parameters(hidden, k, units, bands)
    if vocab * bands >= 2**31:
        raise ValueError(f"bands: {bands} bands of {vocab} words are {vocab * bands} entries; expected fewer than 2^31")
    capacity = default_capacity(vocab, frequent) if capacity is None else integer("capacity", capacity)
    if not max(1, frequent) <= capacity <= vocab:
        raise ValueError(
            f"capacity: expected between {max(1, frequent)} (the words that are candidates anyway) and the vocab"
            f" ({vocab}), got {capacity}"
        )
    bits = wta.code_bits(k, units)
    if table is None:
        table = "direct" if bits <= DIRECT_BITS else "cuckoo"
    if table not in wta.KINDS:
        raise ValueError(f"table: expected one of {', '.join(wta.KINDS)} or None, got {table!r}")
    if table == "direct" and bits > wta.MOST_DIRECT_BITS:
        raise ValueError(
            f"table: codes have {bits} bits (units={units}, k={k}), and a direct table at most"
            f" {wta.MOST_DIRECT_BITS}; expected a cuckoo table"
        )
    return Settings(vocab, hidden, k, units, bands, threshold, frequent, capacity, table)


def default_capacity(vocab: int, frequent: int) -> int:
    """A quarter of the vocabulary plus the words that are always candidates, rounded up to a multiple of 256.

    With more candidates the exact head is about as fast.
    """
    return min(vocab, -(-(frequent + vocab // 4) // 256) * 256)


def default_frequent(vocab: int) -> int:
    return vocab // 16


def frequent_ids(frequent: Any, vocab: int) -> np.ndarray:
    """The words that are always candidates, ascending, without duplicates: a number of first ones, or those of an
    array.

    Raises
    ------
    TypeError, ValueError
        If it is neither a count nor an array of ids, or an id is not a word.
    """
    if np.ndim(frequent) == 0:
        count = integer("frequent", frequent)
        if not 0 <= count <= vocab:
            raise ValueError(f"frequent: expected between 0 and the vocab ({vocab}), got {count}")
        return np.arange(count)
    ids = np.asarray(frequent)
    if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
        raise TypeError(f"frequent: expected a count or one dimension of integers, got {ids.dtype} of {ids.shape}")
    ids = np.unique(ids.astype(np.int64))
    if ids.size and not (0 <= ids[0] and ids[-1] < vocab):
        raise ValueError(f"frequent: expected ids in [0, {vocab}), got {int(ids[0] if ids[0] < 0 else ids[-1])}")
    return ids


@dataclass(frozen=True)
class Hashing:
    """Hash functions and the tables of an embedding, in the layout of `formats.wta`, in any library and on any device.

    Attributes
    ----------
    permutations
        `(bands, units, k)` int16 columns of the hidden state.
    words, table, multipliers
        As in `formats.wta.Tables`; `multipliers` is None for direct tables.
    rehashes
        Number of times that bands of cuckoo tables had to be built again with new hash functions.
    """

    permutations: Any
    words: Any
    table: Any
    multipliers: Any = None
    rehashes: int = 0

    def mapped(self, change: Callable[[Any], Any]) -> Hashing:
        """Apply a function to each array."""
        multipliers = None if self.multipliers is None else change(self.multipliers)
        return Hashing(change(self.permutations), change(self.words), change(self.table), multipliers, self.rehashes)

    def first(self, bands: int) -> Hashing:
        """The hashing of the first `bands` bands, as views without copies."""
        return self.mapped(lambda array: array[:bands])


def hash_words(embedding: Any, permutations: np.ndarray, table: str, seed: int) -> Hashing:
    """The tables of an embedding, built on the host from codes, which are computed where it lies, and placed there."""
    vocab = embedding.shape[0]
    bits = wta.code_bits(permutations.shape[2], permutations.shape[1])
    codes = to_host(codes_of(embedding, permutations)).T
    built = wta.tables(codes, vocab, table, bits=bits, seed=seed)
    move = library("embedding", embedding).from_host
    hashing = Hashing(permutations, built.words, built.table, built.multipliers, built.rehashes)
    return hashing.mapped(lambda array: move(array, embedding))


@dataclass(frozen=True)
class Measured:
    """Seconds of a step by both paths, on one architecture."""

    arch: str
    lsh: float
    exact: float


def check_hashing(chosen: Settings, hashing: Hashing) -> None:
    """Raise `ValueError` unless these NumPy arrays are valid tables for the settings, outside of
    which no kernel reads.
    """
    vocab, bands = chosen.vocab, chosen.bands
    wanted: Mapping[str, tuple[int, ...]] = {
        "permutations": (bands, chosen.units, chosen.k),
        "words": (bands, vocab),
        "table": (bands, (1 << wta.code_bits(chosen.k, chosen.units)) + 1),
    }
    if chosen.table == "cuckoo":
        slots = hashing.table.shape[2] if hashing.table is not None and hashing.table.ndim == 4 else 1
        wanted = {**wanted, "table": (bands, 2, slots, 4), "multipliers": (bands, 2)}
    for name, shape in wanted.items():
        array, dtype = getattr(hashing, name), "int16" if name == "permutations" else "int32"
        if array is None or array.shape != shape or array.dtype != numpy_dtype(dtype):
            raise ValueError(f"{name}: expected shape {shape} and dtype {dtype}")
    wta.check_permutations(hashing.permutations, chosen.hidden)
    wta.check_tables(hashing.words, hashing.table)
