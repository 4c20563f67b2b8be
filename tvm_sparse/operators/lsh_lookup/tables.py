"""Code shared by problems with hash tables: axes, arguments, and words with hits of some hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tvm_sparse.core.problem import Argument, Problem, ProblemError
from tvm_sparse.formats import bitmap, wta

if TYPE_CHECKING:
    import numpy as np

# Extents of arguments that follow from axes.
BITMAP, STARTS = "ceil(vocab / 32)", "2^bits + 1"
WORDS = Argument("words", ("bands", "vocab"), "int32", "Words of each band, in the order of their codes, then ids.")
STARTS_TABLE = Argument("starts", ("bands", STARTS), "int32", "Where the bucket of each code begins.", when="direct")
CUCKOO_TABLE = Argument(
    "entries", ("bands", 2, "slots", 4), "int32", "(code, start, length, 0); code -1: empty.", when="cuckoo"
)
MULTIPLIERS = Argument("multipliers", ("bands", 2), "int32", "Of the two hash functions of each band.", when="cuckoo")
ALWAYS = Argument("always", (BITMAP,), "int32", "Bitmap of words that are candidates anyway.")
THRESHOLD = Argument("threshold", (), "int32", "Hits that make a word a candidate, at least 1.")
TABLES = (WORDS, STARTS_TABLE, CUCKOO_TABLE, MULTIPLIERS, ALWAYS, THRESHOLD)

STRUCTURES = ("random", "skewed", "unseen", "every", "nothing")
# A usual threshold; every word with a hit; more hits than a byte counts.
SETTINGS = ({"threshold": 6}, {"threshold": 1}, {"threshold": 260})
# Number of words that resemble a hidden state, of those that resemble it closely, and most hits of the others: in real
# embeddings hardly any word has more, and apart from accidental equality of codes buckets have few words.
NEAR, NEAREST, FEW_HITS = 64, 4, 16
# Bands, and rows of a beam, of a problem that is cheap to check.
FEW_BANDS, FEW_ROWS = 48, 3
# Share of the bands in which a row has a long bucket, the possible shares of all words in it, and their probabilities.
# They are those of tables of 40,000 normal embeddings with k=16 and units=3: most buckets have 10 words, but 80 if two
# units share a column, and 850 if two pairs of them do.
CROWDED, SHARES, ODDS = 0.02, (1 / 500, 1 / 47), (0.97, 0.03)


def draw_threshold(rng: np.random.Generator, bands: int) -> dict[str, float]:
    """A threshold: a few hits, any number up to the bands, or one that a byte cannot count."""
    return {"threshold": int(rng.choice([1, 2, 6, int(rng.integers(1, bands + 2)), 260]))}


def require_tables(problem: Problem, bits: int) -> None:
    """Raise `ProblemError` for a table that is not valid."""
    name, axes = problem.operator, problem.axes
    if axes["table"] not in wta.KINDS:
        raise ProblemError(f"{name}: table must be one of {', '.join(wta.KINDS)}, got {axes['table']!r}")
    most = wta.MOST_DIRECT_BITS if axes["table"] == "direct" else wta.MOST_BITS
    if not 1 <= bits <= most:
        raise ProblemError(f"{name}: codes for a {axes['table']} table must have 1 to {most} bits, got {bits}")
    if axes["bands"] > wta.MOST_BANDS:
        raise ProblemError(f"{name}: bands must be at most {wta.MOST_BANDS}, got {axes['bands']}")
    if max(axes["bands"], axes["lists"] * axes["beam"]) * max(axes["vocab"], axes["bands"]) >= 2**31:
        raise ProblemError(f"{name}: arrays and hit counts must have fewer than 2^31 elements")


def table_extent(problem: Problem, bits: int, name: str | int) -> int | None:
    """The extents of `Problem.extent` that follow from the axes; None for another name."""
    found = {
        "rows": problem.axes["lists"] * problem.axes["beam"],
        BITMAP: bitmap.bitmap_words(problem.axes["vocab"]),
        STARTS: (1 << bits) + 1,
        "direct": int(problem.axes["table"] == "direct"),
        "cuckoo": int(problem.axes["table"] == "cuckoo"),
    }
    return found.get(name) if isinstance(name, str) else None


def word_codes(
    rng: np.random.Generator,
    structure: str,
    rows: np.ndarray,
    vocab: int,
    draw: Callable[[tuple[int, ...]], np.ndarray],
) -> np.ndarray:
    """Codes of words `(vocab, bands)`, some of which match the codes `rows` `(rows, bands)`.

    `draw(shape)` draws codes. `random`: words have random codes, except that for each row `NEAR` words have its code in
    some of the bands (`NEAREST` of them in up to all bands, the others in up to about `FEW_HITS`), and that each row
    has a few long buckets, as in bands in which two units share a column. `skewed`: in each band up to half of all
    words have the code of one row. `unseen`: no word has the code of a row, if there are other codes. `every`: all
    words have the codes of the first row.
    """
    import numpy as np

    bands = rows.shape[1]
    codes = draw((vocab, bands))
    if structure == "every":
        codes[:] = rows[0]
    elif structure in ("unseen", "nothing"):
        for band in range(bands):
            for _ in range(64):
                seen = np.flatnonzero(np.isin(codes[:, band], rows[:, band]))
                if not len(seen):
                    break
                codes[seen, band] = draw((len(seen),))
    elif structure == "skewed":
        popular = rows[rng.integers(len(rows), size=bands), np.arange(bands)]
        codes = np.where(rng.random(codes.shape, np.float32) < 0.5 * rng.random(bands), popular, codes)
    else:
        for row in rows:
            crowded = np.flatnonzero(rng.random(bands) < CROWDED)
            shares = rng.choice(SHARES, len(crowded), p=ODDS)
            codes[:, crowded] = np.where(rng.random((vocab, len(crowded))) < shares, row[crowded], codes[:, crowded])
            near = rng.permutation(vocab)[: min(NEAR, max(1, vocab // 8))]
            share = rng.random((len(near), 1))
            share[NEAREST:] *= min(1, FEW_HITS / bands)
            codes[near] = np.where(rng.random((len(near), bands)) < share, row, codes[near])
    return codes.astype(np.int32)


def make_tables(
    problem: Problem, rng: np.random.Generator, structure: str, codes: np.ndarray, bits: int, threshold: float
) -> list[Any]:
    """The inputs `TABLES` of a problem, for words with these codes.

    Words that are always chosen are the first ones and some others, except with `nothing`. Bits beyond the vocabulary
    are set.
    """
    import numpy as np

    vocab, kind = problem.axes["vocab"], problem.axes["table"]
    built = wta.tables(codes, vocab, kind, bits=bits, seed=int(rng.integers(1 << 31)))
    chosen = (np.arange(vocab) < max(1, vocab // 64)) | (rng.random(vocab) < 0.01)
    always = bitmap.pack_bits(chosen & (structure != "nothing"))
    if vocab % bitmap.BITS:
        always[-1] |= np.int32(-1 << vocab % bitmap.BITS)
    multipliers = [] if built.multipliers is None else [built.multipliers]
    return [built.words, built.table, *multipliers, always, int(threshold)]


def count_hits(codes: np.ndarray, tables: Sequence[Any], vocab: int) -> np.ndarray:
    """Equation 9: the number of band codes that each word shares with each row, `(rows, vocab)`; `codes` is `(rows,
    bands)`.
    """
    import numpy as np

    words, table, *multipliers, _, _ = tables
    starts, lengths = wta.find_buckets(codes, table, *multipliers)
    hits = np.zeros((len(codes), vocab), np.int64)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        spans = [words[band, s : s + n] for band, (s, n) in enumerate(zip(start, length, strict=True))]
        hits[row] = np.bincount(np.concatenate(spans), minlength=vocab)
    return hits


def choose_words(codes: np.ndarray, tables: Sequence[Any], vocab: int) -> np.ndarray:
    """Equations 10 and 3: the words of each list, `(lists, vocab)` booleans; `codes` is `(lists, beam, bands)`."""
    import numpy as np

    always, threshold = tables[-2:]
    lists, beam, bands = codes.shape
    reached = np.zeros((lists, vocab), bool)
    for row in range(lists):
        reached[row] = (count_hits(codes[row], tables, vocab) >= threshold).any(axis=0)
    return reached | bitmap.unpack_bits(always, vocab)


def bucket_bytes(vocab: int, rows: int, bands: int, codes: int, table: str) -> int:
    """Bytes of the table entries and buckets that rows look up, if words are spread evenly over `codes` codes."""
    return rows * bands * ((8 if table == "direct" else 16) + 4 * vocab // codes)
