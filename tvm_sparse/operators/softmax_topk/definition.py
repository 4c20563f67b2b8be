"""Algorithm 4 of Milakov & Gimelshein 2018 in TVMScript, one score at a time: the last part of every definition with a
top-k.

This module loads the compiler: it is imported when a definition is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.formats.bitmap import BITS

from .reference import GREEDY, LEAST_SCALE


@dataclass(frozen=True)
class Best:
    """The state of one row, in a block (`T.sblock`): the pair (m, d), and the k best scores so far."""

    x: tirx.Buffer  # the current score
    m: tirx.Buffer  # the largest score
    d: tirx.Buffer  # the sum of exponentials
    u: tirx.Buffer  # the best scores, in order
    p: tirx.Buffer  # their names
    slot: tirx.Buffer  # the rank at which the current score belongs

    @classmethod
    def alloc(cls, k: int) -> Best:
        return cls(
            x=T.sblock_alloc_buffer((1,), "float32"),
            m=T.sblock_alloc_buffer((1,), "float32"),
            d=T.sblock_alloc_buffer((1,), "float32"),
            u=T.sblock_alloc_buffer((k + 1,), "float32"),
            p=T.sblock_alloc_buffer((k + 1,), "int64"),
            slot=T.sblock_alloc_buffer((1,), "int32"),
        )


def is_nan(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Whether a float32 is NaN, tested by its bits, since the simplifier folds x != x to false."""
    return (T.reinterpret("int32", x) & 0x7FFFFFFF) > 0x7F800000


def is_greedy(temperature: tirx.PrimExpr) -> tirx.PrimExpr:
    """Whether a row's temperature asks for the best word, as one that is no number does, too."""
    return T.Select(temperature >= T.float32(GREEDY), 0, 1) != 0


def inverse(temperature: tirx.PrimExpr) -> tirx.PrimExpr:
    """The factor of a row's scores."""
    scale = T.max(T.float32(1) / temperature, T.float32(LEAST_SCALE))
    return T.Select(is_greedy(temperature), T.float32(1), scale)


def soft_capped(x: tirx.PrimExpr, quotient: tirx.PrimExpr, cap: Any, tanh: Any = T.tanh) -> tirx.PrimExpr:
    """`cap * tanh(x / cap)` of a float32 x, whose `quotient` is x / cap: between -cap and cap; -inf stays, as a masked
    column does.
    """
    return T.Select(x == -T.infinity("float32"), x, cap * tanh(quotient))


def masked(bitmap: tirx.Buffer, row: tirx.PrimExpr, column: tirx.PrimExpr, x: tirx.PrimExpr) -> tirx.PrimExpr:
    """x, or minus infinity where the row's bitmap `(rows, ceil(vocab / 32))` int32 does not allow the column."""
    bits = T.reinterpret("uint32", bitmap[row, column // BITS])
    bit = bits >> T.Cast("uint32", column % BITS) & T.uint32(1)
    return T.Select(bit != T.uint32(0), x, -T.infinity("float32"))


# fmt: off
@T.inline
def begin(s):
    """Start a row without scores. Writes: `m`, `d`."""
    s.m[0] = T.min_value("float32")
    s.d[0] = T.float32(0)


def take(k: int) -> Callable[..., Any]:
    """Add a score; the phase is (s, scale, j, name): `x` is the j-th score of the row, with index `name`.

    Writes: `m`, `d`, and `u` and `p`, with NaN first as in torch.topk, and equal scores in the order of their addition.
    """

    @T.inline
    def phase(s, scale, j, name):
        if s.x[0] > s.m[0]:
            s.d[0] = s.d[0] * T.exp((s.m[0] - s.x[0]) * scale)
            s.m[0] = s.x[0]
        s.d[0] = s.d[0] + T.exp((s.x[0] - s.m[0]) * scale)
        s.slot[0] = T.min(T.Cast("int32", j), k)
        while s.slot[0] > 0 and (
            s.u[s.slot[0] - 1] < s.x[0] or (is_nan(s.x[0]) and not is_nan(s.u[s.slot[0] - 1]))
        ):
            s.u[s.slot[0]] = s.u[s.slot[0] - 1]
            s.p[s.slot[0]] = s.p[s.slot[0] - 1]
            s.slot[0] = s.slot[0] - 1
        s.u[s.slot[0]] = s.x[0]
        s.p[s.slot[0]] = T.Cast("int64", name)

    return phase


@T.inline
def write(values, at, s, x, scale, log):
    """Write the probability of a score x, or its logarithm, at the indices `at` of `values`. Reads: `m`, `d`."""
    if log != 0:
        T.buffer_store(values, (x - s.m[0]) * scale - T.log(s.d[0]), at)
    else:
        T.buffer_store(values, T.exp((x - s.m[0]) * scale) / s.d[0], at)
# fmt: on
