"""The public call of stream compaction."""

from __future__ import annotations

from typing import Any

from tvm_sparse.core.problem import ProblemError
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.runtime import arrays, repeat
from tvm_sparse.runtime.calls import count, launch, machine_of, outputs_for
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Array, Number, Output, Signature

from .problem import Compaction

SIGNATURES = {
    "compaction": Signature(
        ("chosen", Array(("lists", "words"), ("int32",))),
        ("vocab", Number("int", 1, 2**31 - 1)),
        ("capacity", Number("int", 1, 2**31 - 1)),
        outputs=(Output("candidates"), Output("counts")),
        operator=False,
    )
}


def compaction(chosen: Any, vocab: int, capacity: int, *, out: Any = None) -> tuple[Any, Any]:
    """The words of bitmaps as lists of a fixed capacity, without sorting and without a round trip to the host.

    Parameters
    ----------
    chosen
        Shape `(lists, ceil(vocab / 32))`, int32: word j is in a list if bit j % 32 of its int32 at j // 32 is set; bits
        beyond `vocab` are ignored. A torch tensor on CPU or CUDA, a NumPy array, or another DLPack array.
    vocab
        The number of words.
    capacity
        Most words of a list.
    out
        A pair of int32 arrays to write into, `(lists, capacity)` and `(lists,)`, contiguous and on the same device.

    Returns
    -------
    candidates, counts
        `(lists, capacity)` int32: each list's words in ascending order, the first `capacity` of them, then -1.
        `(lists,)` int32: the number of words in each bitmap, including those without room: the overflow of a list is
        max(0, counts - capacity).

    Raises
    ------
    TypeError
        If `chosen` is not an array.
    ValueError
        For another shape, dtype or device, a `vocab` or `capacity` below 1, or an `out` that does not fit.

    Notes
    -----
    Source: Shi, Xu & Knight 2018, section 4.2.3.
    """
    outputs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    vocab, capacity = count("vocab", vocab), count("capacity", capacity)
    what = ("compaction", vocab, capacity)
    found = repeat.again(dispatcher.launchers, what, (chosen,), None if out is None else outputs)
    if found is not None:
        return found

    known = arrays.facts("chosen", chosen)
    if len(known.shape) != 2 or known.shape[1] != bitmap_words(vocab) or known.dtype != "int32":
        raise ValueError(
            f"chosen: expected shape (lists, {bitmap_words(vocab)}) and dtype int32 for vocab={vocab}, got"
            f" {known.shape} and {known.dtype}"
        )
    lists = known.shape[0]
    wanted = ("candidates", (lists, capacity), "int32"), ("counts", (lists,), "int32")
    results = tuple(outputs_for(out, wanted, chosen, known))
    SIGNATURES["compaction"].refuse_overlap(out, chosen=chosen)
    if lists:
        try:
            problem = Compaction(lists, vocab, capacity)
        except ProblemError as error:
            raise ValueError(f"chosen: {error}") from None
        ready = arrays.ready("chosen", chosen, known)
        launch(dispatcher, problem, machine_of("chosen", known), what, (ready,), results)
    return outputs if out is not None else tuple(arrays.returned(one, chosen) for one in results)
