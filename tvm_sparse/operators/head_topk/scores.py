"""Code shared by the problems of the output layer: inputs, the scores of words in float64, and a comparison of
rankings.

A score is the dot product of a hidden state and a word's row of the embedding, plus the word's bias if there is one.
Its float32 sum depends on the order of summation, so two words whose scores differ by less than the rounding error may
be in either order. If sums are exact, as for small integers, ties are in the order of the words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm_sparse.core import drawing, parts
from tvm_sparse.core.problem import Argument, Mismatch, ProblemError, compare, numpy_dtype
from tvm_sparse.core.rounding import aligned
from tvm_sparse.operators.softmax_topk.problem import CAPPED
from tvm_sparse.operators.softmax_topk.reference import soft_capped

if TYPE_CHECKING:
    import numpy as np

STRUCTURES = ("random", "ties", "masked", "special", "constant", "ascending", "peaked")
# Error of a float32 sum of products, relative to the product of the vectors' lengths: partial sums of a few thousand
# terms are rounded some hundred times, each time by a fraction of a value far below that product. Tensor cores
# truncate, and a float32 product consists of three tensor core products, with 21 bits each.
SUMMATION = 48 * 2.0**-24
# Elements of the embedding that are in float64 at a time.
AT_ONCE = 1 << 24


def embedded(
    rng: np.random.Generator, rows: int, vocab: int, hidden: int, structure: str, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states `(rows, hidden)` and an embedding `(vocab, hidden)` whose scores have the structure's distribution.

    `random`: scores with a standard deviation of 3. `ties`: small integers, whose sums are exact and often equal.
    `masked`: as random, with the mask in the bias. `special`: one hidden state of NaN, a NaN and infinities in the
    embedding. `constant`: all words equal. `ascending`: each word's scores above the previous one's. `peaked`: the best
    words are neighbours.
    """
    import numpy as np

    kind = numpy_dtype(dtype)
    states = rng.standard_normal((rows, hidden), dtype=np.float32)
    if structure == "ties":
        states = np.round(states)
        words = drawing.whole(rng, -1, 2, (vocab, hidden), dtype)
    elif structure in ("constant", "ascending"):
        # Sixteen steps of a word are exact in every dtype.
        states = np.abs(np.round(states * 2)) + 1
        step = np.zeros(vocab) if structure == "constant" else np.floor(np.arange(vocab) * (16 / vocab))
        words = np.zeros((vocab, hidden), kind)
        words[:, 0] = step / 8
    else:
        words = drawing.normal(rng, (vocab, hidden), dtype, 3 / math.sqrt(hidden))
        if structure == "peaked":
            first = int(rng.integers(vocab))
            best = words[first : first + 40]
            best[:] = best.astype(np.float32) + states[:1] * np.float32(4 / hidden)
        elif structure == "special":
            words.flat[rng.integers(words.size, size=2)] = [np.inf, np.nan]
            states[rng.integers(rows), rng.integers(hidden)] = np.nan
    return states.astype(kind), words


def word_bias(rng: np.random.Generator, vocab: int, structure: str) -> np.ndarray:
    """A bias `(vocab,)`: normal with a tenth at -inf, half integers for `ties`, nearly all at -inf for `masked`."""
    import numpy as np

    bias = rng.standard_normal(vocab, dtype=np.float32)
    if structure in ("ties", "constant", "ascending"):
        bias = np.round(bias)
    share = 0.97 if structure == "masked" else 0.1
    return np.where(rng.random(vocab) < share, np.float32(-np.inf), bias)


def scores(
    states: np.ndarray, words: np.ndarray, bias: np.ndarray | None = None, cap: float | None = None
) -> np.ndarray:
    """`states @ words.T + bias` in float64, for states `(rows, hidden)` and words `(words, hidden)`; the product after
    the soft cap, if there is one.
    """
    import numpy as np

    found = np.empty((len(states), len(words)))
    wide = states.astype(np.float64)
    step = max(1, AT_ONCE // max(1, words.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(words), step):
            found[:, start : start + step] = wide @ parts.float64_of(words[start : start + step]).T
        found = found if cap is None else soft_capped(found, cap)
        return found if bias is None else found + bias.astype(np.float64)


def rounding(
    states: np.ndarray, words: np.ndarray, bias: np.ndarray | None = None, cap: float | None = None
) -> np.ndarray:
    """Error bound of each state's scores: relative to the product of the lengths of the state and a word, to the soft
    cap, if there is one, and to the largest bias, whose addition is rounded once more.

    `words` are `(n, hidden)`, or `(rows, n, hidden)` if each state has different words, and the bias `(n,)` or `(rows,
    n)`.
    """
    import numpy as np

    slack = SUMMATION * (_lengths(states) * _lengths(words).max(axis=-1, initial=0.0) + 1e-6)
    slack = slack if cap is None else slack + CAPPED * cap
    if bias is None:
        return slack
    return slack + 2.0**-23 * np.abs(np.where(np.isfinite(bias), bias, 0)).max(axis=-1, initial=0.0)


def _lengths(vectors: np.ndarray) -> np.ndarray:
    import numpy as np

    flat = vectors.reshape(-1, vectors.shape[-1])
    squares = np.empty(len(flat))

    def add_squares(begin: int, end: int) -> None:
        wide = parts.float32_of(flat[begin:end])
        some = np.einsum("ih,ih->i", wide, wide)
        if not np.isfinite(some).all():
            wide[~np.isfinite(wide)] = 0
            some = np.einsum("ih,ih->i", wide, wide)
        squares[begin:end] = some

    parts.of_rows(flat, add_squares)
    return aligned(np.sqrt(squares), vectors.dtype).reshape(vectors.shape[:-1])


def compare_words(
    argument: Argument,
    states: np.ndarray,
    words: np.ndarray,
    bias: np.ndarray | None,
    found: np.ndarray,
    wanted: np.ndarray,
    cap: float | None = None,
) -> None:
    """Compare rankings `found` and `wanted` `(rows, k)` of words for `states` `(rows, hidden)`.

    At every rank the words' scores must agree within rounding, and in rows with exact sums and no soft cap the words
    too; no word may occur twice. A word of -1 must be -1 in both.

    Raises
    ------
    Mismatch
        Naming the first row and rank.
    """
    import numpy as np

    numbers = np.flatnonzero((found != wanted).any(axis=1))  # equal rows need no comparison
    if not len(numbers):
        return
    states, found, wanted = states[numbers], found[numbers], wanted[numbers]
    rows = [words[ids] for ids in (found, wanted)]  # -1 selects the last word, in both
    added = [bias[ids] for ids in (found, wanted)] if bias is not None else []
    theirs, ours = (pair_scores(states, *pair, cap) for pair in zip(rows, added or (None, None), strict=True))
    # Words that are in neither ranking do not matter.
    slack = rounding(states, np.concatenate(rows, axis=1), np.concatenate(added, axis=1) if added else None, cap)
    with np.errstate(invalid="ignore"):
        close = np.abs(theirs - ours) <= 2 * slack[:, None]
    close |= (theirs == ours) | (np.isnan(theirs) & np.isnan(ours))
    close &= (found >= 0) == (wanted >= 0)
    wrong = ~close
    if cap is None:
        wrong |= _exact(states, *rows, *added)[:, None] & (found != wanted)
    ordered = np.sort(found, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        row = int(np.argwhere(twice)[0][0])
        raise Mismatch(f"{argument.name}[{numbers[row]}] has {ordered[row, 1:][twice[row]][0]} twice")
    if wrong.any():
        row, rank = (int(i) for i in np.argwhere(wrong)[0])
        raise Mismatch(
            f"{argument.name}[{numbers[row]}, {rank}] is {found[row, rank]} with a score of {theirs[row, rank]:.9g},"
            f" expected {wanted[row, rank]} with {ours[row, rank]:.9g} ({np.count_nonzero(wrong)} words differ)"
        )


def _exact(states: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """States whose sums with words are exact in any order: all numbers are small multiples of 1/8.

    `others` `(rows, n, hidden)` or `(rows, n)` are the words and biases that are compared.
    """
    import numpy as np

    def small(array: np.ndarray) -> np.ndarray:
        wide = array.astype(np.float32)
        return np.isinf(wide) | ((np.abs(wide) < 64) & (wide * 8 == np.round(wide * 8)))

    with np.errstate(invalid="ignore"):
        rows: np.ndarray = np.asarray(small(states).all(axis=1))
        for array in others:
            rows &= small(array).reshape(len(rows), -1).all(axis=1)
    return rows


def compare_ranked(
    arguments: Sequence[Argument],
    expected: Sequence[np.ndarray],
    tolerance: Sequence[np.ndarray | None],
    outputs: Sequence[np.ndarray],
) -> None:
    """`compare` for all outputs but the indices."""
    some = [i for i, argument in enumerate(arguments) if argument.name != "indices"]
    compare(
        [arguments[i] for i in some],
        [expected[i] for i in some],
        [tolerance[i] for i in some],
        [outputs[i] for i in some],
    )


def require_extents(operator: str, rows: int, hidden: int, vocab: int, words: int) -> None:
    """Raise `ProblemError` for extents that kernels cannot count in 32 bits; `words` is the number in a row."""
    if vocab >= 2**31 or hidden >= 2**20:
        raise ProblemError(
            f"{operator}: vocab must be below 2^31 and hidden below 2^20, got vocab={vocab}, hidden={hidden}"
        )
    if rows * max(words, hidden) >= 2**31:
        raise ProblemError(
            f"{operator}: rows times words must be below 2^31, got {rows} rows of {words} words; calls compute more in"
            f" parts of up to {(2**31 - 1) // max(words, hidden)} rows"
        )


def pair_scores(states: np.ndarray, words: np.ndarray, bias: np.ndarray | None, cap: float | None = None) -> np.ndarray:
    """Scores in float64 of states `(rows, hidden)` with different words `(rows, n, hidden)` and biases `(rows, n)` for
    each.
    """
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        found = np.einsum("rh,rnh->rn", states.astype(np.float64), words.astype(np.float64))
        found = found if cap is None else soft_capped(found, cap)
        return found if bias is None else found + bias
