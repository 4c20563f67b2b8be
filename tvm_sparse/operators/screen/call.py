"""The call of the screening step of `ScreenedHead`: it is no public function."""

from __future__ import annotations

from typing import Any

from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.runtime import arrays, repeat
from tvm_sparse.runtime.calls import launch, machine_of
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Signature

from .problem import Screen

SIGNATURES: dict[str, Signature] = {}


def screen(scores: Any, best: Any, norms: Any, bounds: Any, added: float) -> Any:
    """Bitmaps `(rows, ceil(vocab / 32))` int32 of the words that may be among the best, see `problem`.

    Parameters
    ----------
    scores, norms, bounds
        `(rows, vocab)`, `(rows, groups)` and `(groups, vocab)` float32, contiguous, with a row at least.
    best
        `(rows, k)` int64 words, which are not checked.
    added
        By how much less than the best reach is enough.
    """
    given, what = (scores, best, norms, bounds, added), ("screen",)
    if (found := repeat.again(dispatcher.launchers, what, given, None)) is not None:
        return found[0]
    known = arrays.facts("scores", scores)
    (rows, vocab), k, groups = known.shape, best.shape[1], norms.shape[1]
    chosen = arrays.empty((rows, bitmap_words(vocab)), "int32", scores, known)
    problem = Screen(rows, vocab, k, groups)
    launch(dispatcher, problem, machine_of("scores", known), what, given, (chosen,))
    return chosen
