"""Winner-take-all hashing on the host: permutations, the codes of an embedding, and tables from codes to words.

Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", section 4.2. A *unit* is the index of
the largest of k columns (equation 5), a *band code* the concatenation of `units` such indices (equation 7), and a
vector has `bands` codes. A band lists the words of the vocabulary by their code: the words of one code, its *bucket*,
are contiguous in `words`. A bucket's begin and length are in one of two kinds of table:

``direct``
    `starts` `(bands, 2**bits + 1)`: the bucket of code c is `words[band, starts[band, c] : starts[band, c + 1]]`. It
    takes one read, and suits codes of few bits.
``cuckoo``
    `(bands, 2, slots, 4)`, entries (code, start, length, 0), code -1 where a slot is empty. A code is in one of two
    slots, so that a look-up takes at most two reads for any number of bits (Pagh & Rodler 2004).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..core import parts
from . import bitmap

KINDS = ("direct", "cuckoo")
# Most bits of a code: it is an int32, and the paper requires fewer than 31 (equation 7).
MOST_BITS = 30
# Limits from the dtypes: columns are int16, an index fits a byte, and hits have 16 bits.
MOST_HIDDEN, MOST_K, MOST_BANDS = 2**15 - 1, 256, 2**16 - 1
# Most bits of a code for a direct table: beyond, it is mostly empty, and 500 bands take more than 131 MB.
MOST_DIRECT_BITS = 16
# Slots in each of a cuckoo table's two halves, per bucket of the fullest band: two hash functions can place keys at a
# load of up to one half, and do so quickly at two fifths.
SLOTS_EACH = 1.25
# Multiplier of `slot_of`: 2^32 divided by the golden ratio, made odd.
MIX, MIX_SHIFT = 0x9E3779B1, 15
# Rounds of parallel eviction before a band with unplaced keys gets new hash functions, and the most times that it does.
MOST_ROUNDS, MOST_REHASHES = 64, 50
# Elements processed at once; for hashing, which reads them k times, as many as stay in a core's cache.
_AT_ONCE, _HASHED_AT_ONCE = 1 << 19, 1 << 16


class Tables(NamedTuple):
    """Tables made by `tables`, for the operators `lsh_lookup` and `lsh_candidates`.

    Attributes
    ----------
    words
        `(bands, vocab)` int32: the words of each band, sorted by their codes, then by their ids.
    table
        `(bands, 2**bits + 1)` int32 of bucket starts, or `(bands, 2, slots, 4)` int32; see the module's docstring.
    multipliers
        `(bands, 2)` int32, odd: the multipliers of each band's two hash functions; None for a direct table.
    rehashes
        Number of times that bands had to be built again with new hash functions.
    """

    words: np.ndarray
    table: np.ndarray
    multipliers: np.ndarray | None
    rehashes: int


def index_bits(k: int) -> int:
    """Bits of a unit, an index among k columns: ceil(log2(k))."""
    return (k - 1).bit_length()


def code_bits(k: int, units: int) -> int:
    """Bits of a band code."""
    return units * index_bits(k)


def check_parameters(hidden: int, k: int, units: int, bands: int) -> None:
    """Raise `ValueError`, with the numbers, for parameters that no hash can have."""
    for name, value, least in (("hidden", hidden, 1), ("k", k, 2), ("units", units, 1), ("bands", bands, 1)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    if hidden > MOST_HIDDEN:
        raise ValueError(f"hidden: columns are int16, so at most {MOST_HIDDEN} of them, got {hidden}")
    for name, value, most in (("k", k, MOST_K), ("bands", bands, MOST_BANDS)):
        if value > most:
            raise ValueError(f"{name}: expected at most {most}, got {value}")
    if k > hidden:
        raise ValueError(f"k: the place among k={k} different columns needs hidden >= k, got hidden={hidden}")
    if code_bits(k, units) > MOST_BITS:
        raise ValueError(
            f"units: a code of units={units} places among k={k} has {units} * {index_bits(k)} = {code_bits(k, units)}"
            f" bits; at most {MOST_BITS} fit"
        )


def permutations(hidden: int, k: int, units: int, bands: int, seed: int = 0) -> np.ndarray:
    """The first k columns of `bands * units` random permutations of `hidden` columns: `(bands, units, k)` int16.

    The first bands of a larger draw with the same seed are those of a smaller one.

    Raises
    ------
    ValueError
        For parameters out of range, or a code of more than 30 bits, with the numbers.
    """
    check_parameters(hidden, k, units, bands)
    rng = np.random.default_rng(seed)
    drawn = np.empty((bands * units, k), np.int16)
    step = max(1, _AT_ONCE // hidden)
    for start in range(0, len(drawn), step):
        part = drawn[start : start + step]
        part[...] = rng.random((len(part), hidden)).argsort(axis=1)[:, :k]
    return drawn.reshape(bands, units, k)


def hash_rows(rows: np.ndarray, permutations: np.ndarray) -> np.ndarray:
    """Band codes of every row of an embedding (equations 4 to 8): `(rows, bands)` int32.

    Among equal elements the first one counts. NaN counts as -inf.

    Parameters
    ----------
    rows
        `(rows, hidden)` of any float dtype, bfloat16 through ml_dtypes.
    permutations
        `(bands, units, k)` int16, of columns in [0, hidden).

    Raises
    ------
    ValueError
        For other shapes, codes of more than 30 bits, or columns out of range.
    """
    check_permutations(permutations, rows.shape[-1])
    bands, units, k = permutations.shape
    columns = permutations.reshape(bands * units, k).astype(np.intp)
    shifts = index_bits(k) * np.arange(units - 1, -1, -1, dtype=np.int32)
    # A band's codes side by side, as `tables` reads them.
    codes = np.empty((bands, len(rows)), np.int32)

    def hash_part(start: int, end: int) -> None:
        # Columns as rows, so that a gather copies contiguous runs.
        x = np.ascontiguousarray(rows[start:end].T, np.float32)
        np.copyto(x, -np.inf, where=np.isnan(x))
        best = x[columns[:, 0]]
        places, value, larger = np.zeros(best.shape, np.uint8), np.empty_like(best), np.empty(best.shape, bool)
        for j in range(1, k):
            np.take(x, columns[:, j], axis=0, out=value, mode="clip")
            np.greater(value, best, out=larger)
            np.maximum(best, value, out=best)
            np.maximum(places, larger.view(np.uint8) * np.uint8(j), out=places)
        shifted = places.reshape(bands, units, -1).astype(np.int32) << shifts[:, None]
        codes[:, start:end] = shifted.sum(axis=1)

    _in_parts(hash_part, len(rows), max(1, _HASHED_AT_ONCE // len(columns)))
    return codes.T


def _in_parts(function: Callable[[int, int], None], count: int, step: int) -> None:
    """Call a function with the begin and end of each `step` of `count`, on all cores if there are several."""
    if count <= step:
        function(0, count)
        return
    begins = range(0, count, step)
    parts.of_each(function, begins, [*begins[1:], count])


def check_permutations(permutations: np.ndarray, hidden: int) -> None:
    """Raise `ValueError` unless these are `(bands, units, k)` column numbers below `hidden`."""
    if permutations.ndim != 3 or permutations.dtype != np.int16:
        raise ValueError(
            f"permutations: expected shape (bands, units, k) and dtype int16, got {permutations.shape} and"
            f" {permutations.dtype}"
        )
    bands, units, k = permutations.shape
    check_parameters(hidden, k, units, bands)
    outside = np.argwhere((permutations < 0) | (permutations >= hidden))
    if len(outside):
        at = tuple(map(int, outside[0]))
        raise ValueError(f"permutations: permutations{list(at)}={permutations[at]} is outside [0, {hidden}) (hidden)")


def check_frequent(ids: np.ndarray, always: np.ndarray, vocab: int) -> None:
    """Raise `ValueError` unless `ids` are the words whose bits are set in the bitmap `always`, each once."""
    if len(outside := np.flatnonzero((ids < 0) | (ids >= vocab))):
        raise ValueError(f"ids: ids[{outside[0]}]={ids[outside[0]]} is outside [0, {vocab}) (vocab)")
    times = np.bincount(ids, minlength=vocab)
    wrong = np.flatnonzero(times != bitmap.unpack_bits(always, vocab))
    if len(wrong):
        raise ValueError(
            f"ids: expected each word of `always` once and no other; word {wrong[0]} stands {times[wrong[0]]} times"
        )


def tables(codes: np.ndarray, vocab: int, kind: str = "direct", *, bits: int | None = None, seed: int = 0) -> Tables:
    """Build the tables from codes to words, for all bands at once.

    Parameters
    ----------
    codes
        `(vocab, bands)` int32: the codes of every word, as `hash_rows` makes them.
    vocab
        The number of words.
    kind
        "direct" or "cuckoo"; see the module's docstring.
    bits
        Bits of a code: `code_bits(k, units)`. Required for a direct table, which has an entry for every code.
    seed
        Seed of a cuckoo table's hash functions.

    Raises
    ------
    ValueError
        For other shapes, codes out of range, more than 2**31 - 1 entries, a direct table of codes of more than
        16 bits, or hash functions that are not found.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if codes.ndim != 2 or codes.dtype != np.int32 or len(codes) != vocab or vocab < 1 or codes.shape[1] < 1:
        raise ValueError(f"codes: expected shape ({vocab}, bands) and dtype int32, got {codes.shape} and {codes.dtype}")
    if codes.size >= 2**31:
        raise ValueError(f"codes: {codes.shape[1]} bands of vocab={vocab} words are more than 2^31 - 1 entries")
    if kind == "direct" and (bits is None or not 1 <= bits <= MOST_DIRECT_BITS):
        raise ValueError(
            f"bits: a direct table needs the bits of a code, from 1 to {MOST_DIRECT_BITS}, got {bits}; longer codes"
            " need a cuckoo table"
        )
    least, most = int(codes.min()), int(codes.max())
    beyond = 1 << (MOST_BITS if bits is None else bits)
    if least < 0 or most >= beyond:
        raise ValueError(f"codes: expected codes in [0, {beyond}), got {least if least < 0 else most}")

    bands, step = codes.shape[1], max(1, _AT_ONCE // vocab)
    words = np.empty((bands, vocab), np.int32)
    if bits is not None and kind == "direct":
        starts = np.zeros((bands, (1 << bits) + 1), np.int32)

        def sort(begin: int, end: int) -> None:
            # NumPy sorts numbers of 16 bits by their digits.
            for band, own in enumerate(codes.T[begin:end].astype(np.uint16), begin):
                words[band] = np.argsort(own, kind="stable")
                np.cumsum(np.bincount(own, minlength=1 << bits), out=starts[band, 1:])

        _in_parts(sort, bands, step)
        return Tables(words, starts, None, 0)
    ordered = np.empty((bands, vocab), np.int32)
    for start in range(0, bands, step):
        # The code in the bits above the word's id: one sort orders by both.
        both = codes.T[start : start + step].astype(np.int64) << 32 | np.arange(vocab)
        both.sort(axis=1)
        words[start : start + step] = both & 0xFFFFFFFF
        ordered[start : start + step] = both >> 32
    return Tables(words, *_cuckoo(ordered, np.random.default_rng(seed)))


def slot_of(code: np.ndarray, multiplier: np.ndarray, slots: int) -> np.ndarray:
    """The slot of a code in a half of `slots`, in arithmetic modulo 2^32 (`>>` shifts zeros in):

        x = code * MIX;  x = x ^ (x >> 15);  slot = floor(x * multiplier mod 2^32 * slots / 2^32)

    Multiply-shift hashing, scaled to any number of slots. The first line is needed because codes that fill their range
    densely, as short ones do, would otherwise fall into evenly spaced slots by both functions, so that chains of
    evictions would form cycles.
    """
    low = np.uint64(0xFFFFFFFF)
    x = code.astype(np.uint64) * np.uint64(MIX) & low
    x = (x ^ x >> np.uint64(MIX_SHIFT)) * multiplier.view(np.uint32).astype(np.uint64) & low
    return (x * np.uint64(slots) >> np.uint64(32)).astype(np.int64)


def _cuckoo(ordered: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Entries and multipliers of all bands, and the number of rebuilds.

    Keys are placed in parallel rounds, as GPU builds do: of the keys that hash to one slot one gets it, its previous
    key is evicted, and all keys without a slot try their other slot in the next round.
    """
    bands, vocab = ordered.shape
    first = np.ones((bands, vocab), bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    band, start = np.nonzero(first)
    code = ordered[band, start]
    length = np.diff(np.append(start, vocab))
    length[length <= 0] += vocab  # a band's last bucket ends where the next band's first begins, at 0
    slots = int(np.ceil(SLOTS_EACH * np.bincount(band, minlength=bands).max())) + 1
    if bands * 2 * slots * 4 >= 2**31:
        raise ValueError(f"codes: a cuckoo table of {bands} bands with 2 * {slots} slots has more than 2^31 numbers")
    multipliers = _odd(rng, bands)

    owner = np.full(bands * 2 * slots, -1, np.int64)
    half = np.zeros(len(code), np.int64)
    waiting, rehashes = np.arange(len(code)), 0
    for _ in range(MOST_REHASHES + 1):
        for _ in range(MOST_ROUNDS):
            if not len(waiting):
                break
            at = (band[waiting] * 2 + half[waiting]) * slots + slot_of(
                code[waiting], multipliers[band[waiting], half[waiting]], slots
            )
            before = owner[at]
            owner[at] = waiting  # of several keys the last one written stays
            placed = owner[at] == waiting
            evicted = before[placed]
            waiting = np.concatenate([waiting[~placed], evicted[evicted >= 0]])
            half[waiting] ^= 1
        if not len(waiting):
            break
        again = np.unique(band[waiting])
        rehashes += len(again)
        multipliers[again] = _odd(rng, len(again))
        owner.reshape(bands, -1)[again] = -1
        waiting = np.flatnonzero(np.isin(band, again))
        half[waiting] = 0
    else:
        raise ValueError(f"codes: no hash functions found for {len(np.unique(band[waiting]))} of {bands} bands")

    entries = np.zeros((bands * 2 * slots, 4), np.int32)
    entries[:, 0] = -1
    taken = np.flatnonzero(owner >= 0)
    for column, values in enumerate((code, start, length)):
        entries[taken, column] = values[owner[taken]]
    return entries.reshape(bands, 2, slots, 4), multipliers.view(np.int32), rehashes


def _odd(rng: np.random.Generator, bands: int) -> np.ndarray:
    """Random odd multipliers for the two hash functions of some bands."""
    return rng.integers(1 << 31, size=(bands, 2)).astype(np.uint32) * np.uint32(2) + np.uint32(1)


def check_tables(words: np.ndarray, table: np.ndarray) -> None:
    """Raise `ValueError` unless all words are in [0, vocab) and all buckets lie within their band's words.

    Shapes and dtypes are assumed to be those of `tables`.
    """
    vocab = words.shape[1]
    if (words < 0).any() or (words >= vocab).any():
        raise ValueError(f"words: expected ids in [0, {vocab}), got {words.min()} to {words.max()}")
    if table.ndim == 2:
        if (table[:, 0] != 0).any() or (table[:, -1] != vocab).any() or (table[:, 1:] < table[:, :-1]).any():
            raise ValueError(f"table: bucket starts must begin at 0, never fall, and end at vocab={vocab}")
        return
    taken = table[..., 0] >= 0
    start, length = table[..., 1][taken].astype(np.int64), table[..., 2][taken].astype(np.int64)
    if (start < 0).any() or (length < 0).any() or (start + length > vocab).any():
        raise ValueError(f"table: entries (code, start, length, 0) must lie within the vocab={vocab} words of a band")


def check_codes(codes: np.ndarray, bits: int) -> None:
    """Raise `ValueError` unless all codes are in [0, 2^bits)."""
    outside = np.argwhere((codes < 0) | (codes >= 1 << bits))
    if len(outside):
        at = tuple(map(int, outside[0]))
        raise ValueError(f"codes: codes{list(at)}={codes[at]} is outside [0, {1 << bits}) (2^bits)")


def find_buckets(
    codes: np.ndarray, table: np.ndarray, multipliers: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Starts of the buckets of codes `(..., bands)` in their band's `words`, and their lengths, 0 for a code that no
    word has.
    """
    band = np.broadcast_to(np.arange(codes.shape[-1]), codes.shape)
    if table.ndim == 2:
        start = table[band, codes]
        return start, table[band, codes + 1] - start
    assert multipliers is not None  # a cuckoo table comes with them
    start, length = np.zeros_like(codes), np.zeros_like(codes)
    for half in range(2):
        entry = table[band, half, slot_of(codes, multipliers[band, half], table.shape[2])]
        found = entry[..., 0] == codes
        start, length = np.where(found, entry[..., 1], start), np.where(found, entry[..., 2], length)
    return start, length
