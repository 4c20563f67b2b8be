"""Lists of candidate words, as the problems of the gathered product generate and read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tvm_sparse.core.problem import numpy_dtype

if TYPE_CHECKING:
    import numpy as np

# Words of the vocabulary with which kernels are verified: programs read their number at run time.
FEW_WORDS = 3001


def draw(rng: np.random.Generator, lists: int, m: int, units: int, structure: str) -> tuple[np.ndarray, np.ndarray]:
    """Candidates `(lists, m)` below `units`, and their counts `(lists,)`.

    Candidates are distinct in a list and ascending. All count, at most `units`, except with `few`: lists then have no
    candidate, one, a few, or as many as fit or more, and the positions beyond the count hold no candidate.
    """
    import numpy as np

    candidates = np.empty((lists, m), np.int32)
    for row in candidates:
        some = rng.choice(units, size=min(m, units), replace=False)
        row[:] = np.resize(np.sort(some), m)
    most = min(m, units)
    counts = np.full(lists, most, np.int32)
    if structure == "few":
        full = [m, m + 5] if most == m else [most]
        counts = rng.choice(np.array([0, 1, min(most, 3), most // 2, *full], np.int32), size=lists)
        counts[rng.integers(lists)] = min(most, 2)
        beyond = np.arange(m) >= counts[:, None]
        candidates[beyond] = rng.choice(np.array([-1, 2**31 - 1], np.int32), size=int(beyond.sum()))
    return candidates, counts


def of_lists(candidates: np.ndarray, counts: np.ndarray, block: int) -> Iterator[np.ndarray]:
    """The words of each list; a candidate c stands for `block` words from c * block on."""
    import numpy as np

    for row, count in zip(candidates, counts, strict=True):
        first = row[: max(0, min(int(count), len(row)))].astype(np.int64) * block
        yield (first[:, None] + np.arange(block)).reshape(-1)


def work(
    lists: int, beam: int, hidden: int, words: int, vocab: int, dtype: str, inputs: Sequence[Any] | None
) -> tuple[int, int]:
    """Bytes that must be read, and number of products. A word in several lists is read once; `inputs` tell which these
    are.
    """
    import numpy as np

    size = numpy_dtype(dtype).itemsize
    if inputs is None:
        total = lists * words
        # The expected number of distinct words in randomly drawn lists.
        distinct = round(vocab * (1 - (1 - min(1.0, words / vocab)) ** lists))
    else:
        candidates, counts = inputs[2:4]
        each = list(of_lists(candidates, counts, words // candidates.shape[1]))
        total, distinct = sum(map(len, each)), len(np.unique(np.concatenate(each)))
    return (lists * beam + distinct) * hidden * size + total * 4, total * beam * hidden
