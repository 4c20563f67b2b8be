"""What every softmax_topk kernel does alike, on any machine: read an element, write a value.

An element is the float32 sum of a logit and its bias, if there is one; the order of elements is that of these sums, and
the temperature multiplies only what is exponentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..device.words import load_element


def element(io: Any, row: Any, column: Any) -> tirx.PrimExpr:
    """The element of a row and column. On a GPU the load may take the read-only path."""
    logit = T.Cast("float32", io.logits[row, column])
    return logit + T.Cast("float32", io.bias[column]) if io.problem.bias else logit


def written_element(io: Any, row: Any, column: Any) -> tirx.PrimExpr:
    """As `element`, by loads that see what a producer kernel has written: for kernels whose launch overlaps it."""
    logit = load_element(io.problem.dtype, io.logits.ptr_to([row, column]))
    return logit + load_element("float32", io.bias.ptr_to([column])) if io.problem.bias else logit


@T.inline
def write_value(V, row, i, exponent, inverse, logarithm, log):
    """Write to V[row, i] the probability of an element, e^exponent / d, or its logarithm.

    d is the sum of all elements' exponentials; `inverse` is 1 / d and `logarithm` ln(d).
    """
    V[row, i] = T.Select(log != 0, exponent - logarithm, T.exp(exponent) * inverse)


@T.inline
def write_given(G, row, i, column, vocab, exponent, inverse, logarithm, log):
    """As `write_value`, for the element in a given column; NaN if there is no such column.

    `exponent` is an expression that reads the element, and is not evaluated then.
    """
    if column >= T.int64(0) and column < T.int64(vocab):
        write_value(G, row, i, exponent, inverse, logarithm, log)
    else:
        G[row, i] = T.float32("nan")


# fmt: off
def write_wanted(vocab: int, ids: int, threads: int) -> Callable[..., Any]:
    """The last phase of a kernel whose thread blocks have a row each, called with (io, row, t, s). Barriers: none.

    Reads: `ids`, the row's elements in these columns, the row's maximum `s.top` and its sum of exponentials `s.d`.
    Writes: `given`.
    """

    @T.inline
    def phase(io, row, t, s):
        for i in T.serial((ids - t + (threads - 1)) // threads):
            write_given(
                io.given, row, i * threads + t, io.ids[row, i * threads + t], vocab,
                (element(io, row, io.ids[row, i * threads + t]) - s.top[0]) * io.scale,
                T.float32(1) / s.d[0], T.log(s.d[0]), io.log)

    return phase
# fmt: on
