"""The CPU kernel of softmax and logsumexp, in phases.

A phase takes the kernel's `Extents`, then the row's `RowState`. In all of them (m, d) is the paper's pair: the maximum,
and the sum of the exponentials of the elements less the maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program

from ...device.arithmetic import exp_any, exp_nonpositive
from ...device.loops import in_parallel
from ..interface import cpu_program
from ..problems import RowProblem
from . import APART, FEW
from .extents import Extents

Phase = Callable[..., Any]

LOWEST, HIGHEST = T.min_value("float32"), T.max_value("float32")


def exponential(ext: Extents) -> Callable[[Any], Any]:
    """e to an element less the maximum, for vector loops."""
    return exp_any if ext.exceeds else exp_nonpositive


@T.meta_class
class RowState:
    """What the phases of a row share.

    Attributes
    ----------
    row
        The row's number.
    m, d
        The row's pair so far; m is 0 for the naive algorithm. In the end d is what results are made with.
    top, fold
        Per place in a vector: the maxima of the vectors gone through, and the steps of their reduction to `fold[0]`.
    part
        Per place in a vector: the sum of exponentials relative to m.
    base
        For each chunk the maximum to which its kept exponentials are relative; then their factor.
    kept
        Exponentials of the row, where the output cannot hold them.
    """

    def __init__(self, ext: Extents, row: Any) -> None:
        self.row = row
        self.m = T.sblock_alloc_buffer((1,), "float32")
        self.d = T.sblock_alloc_buffer((1,), "float32")
        self.top = T.sblock_alloc_buffer((ext.simd,), "float32")
        self.part = T.sblock_alloc_buffer((ext.simd,), "float64")
        self.fold = T.sblock_alloc_buffer((ext.simd,), "float32")
        self.base = T.sblock_alloc_buffer((ext.chunks if ext.kept else 1,), "float32")
        self.kept = T.sblock_alloc_buffer((max(ext.scratch, 1),), "float32")


# fmt: off
@phase
def vector_maximum(ext, /, s, X, first, count):
    """Reads: the row. Writes: `top`, `fold`. After: `fold[0]` is the maximum of vectors first to first + count."""
    simd = T.meta_var(ext.simd)
    for lane in T.vectorized(simd):
        s.top[lane] = LOWEST
    for u in range(count):
        for lane in T.vectorized(simd):
            s.top[lane] = T.max(s.top[lane], T.Cast("float32", X[s.row, (first + u) * simd + lane]))
    # By halving, in vectors; lanes past the half only repeat a comparison.
    for lane in T.vectorized(simd):
        s.fold[lane] = s.top[lane]
    for h in T.unroll(ext.halvings):
        for lane in T.vectorized(simd // 2):
            s.fold[lane] = T.max(s.fold[lane], s.fold[lane + (simd >> (h + 1))])


@phase
def tail_maximum(ext, /, s, X):
    """Reads: the elements that no vector covers. Writes: `m`. After: `m` covers them too."""
    for i in range(ext.vocab - ext.tail):
        s.m[0] = T.max(s.m[0], T.Cast("float32", X[s.row, ext.tail + i]))


@phase
def add_some(ext, /, s, X, first, count):
    """Add `count` vectors' exponentials to a sum of their own, and that to `part`."""
    for lane in T.vectorized(ext.simd):
        s.fold[lane] = T.float32(0)
    for u in range(count):
        for lane in T.vectorized(ext.simd):
            s.fold[lane] = s.fold[lane] + exponential(ext)(
                T.Cast("float32", X[s.row, (first + u) * ext.simd + lane]) - s.m[0])
    for lane in T.vectorized(ext.simd):
        s.part[lane] = s.part[lane] + T.Cast("float64", s.fold[lane])


@phase
def add_exponentials(ext, /, s, X, first, count):
    """Reads: the row, `m`. Writes: `part`; as scratch `fold`. After: `part` covers vectors first to first + count."""
    if ext.chunk <= APART:
        add_some(ext)(s, X, first, count)
    else:
        for n in range((count + (APART - 1)) // APART):
            add_some(ext)(s, X, first + n * APART, T.min(APART, count - n * APART))


@phase
def keep_exponentials(ext, /, s, X, Y, first, count):
    """Reads: the row, `m`. Writes: `part`; the output, or `kept`. After: both cover vectors first to first + count."""
    simd = T.meta_var(ext.simd)
    for lane in T.vectorized(simd):
        s.fold[lane] = T.float32(0)
    for u in range(count):
        for lane in T.vectorized(simd):
            s.top[lane] = exponential(ext)(T.Cast("float32", X[s.row, (first + u) * simd + lane]) - s.m[0])
        for lane in T.vectorized(simd):
            s.fold[lane] = s.fold[lane] + s.top[lane]
        if (ext.scratch > 0):
            for lane in T.vectorized(simd):
                s.kept[(first + u) * simd + lane] = s.top[lane]
        else:
            for lane in T.vectorized(simd):
                Y[s.row, (first + u) * simd + lane] = s.top[lane]
    for lane in T.vectorized(simd):
        s.part[lane] = s.part[lane] + T.Cast("float64", s.fold[lane])


@phase
def accumulate(ext, /, s, X, log, Y):
    """Reads: the row. Writes: `m`, `part`, `top`, `fold`. After: `m` is the row's, `part` covers all vectors.

    If exponentials are `kept`, and `log` is 0, also `base`, and what `keep_exponentials` writes.
    """
    of_vectors, of_tail = T.meta_var(vector_maximum(ext)), T.meta_var(tail_maximum(ext))
    added = T.meta_var(add_exponentials(ext))
    for lane in T.vectorized(ext.simd):
        s.part[lane] = T.float64(0)
    if ext.algorithm == "naive":
        s.m[0] = T.float32(0)
        added(s, X, 0, ext.vectors)
    elif ext.algorithm == "safe":
        of_vectors(s, X, 0, ext.vectors)
        s.m[0] = s.fold[0]
        of_tail(s, X)
        added(s, X, 0, ext.vectors)
    else:
        # The elements that no vector covers come first: their maximum needs no rescaling.
        s.m[0] = LOWEST
        of_tail(s, X)
        if not ext.softmax:
            s.m[0] = T.min(s.m[0], HIGHEST)
        for c in range(ext.chunks):
            of_vectors(s, X, c * ext.chunk, T.min(ext.chunk, ext.vectors - c * ext.chunk))
            if not ext.softmax:
                # Finite, so that plus infinity makes the sum infinite and not NaN.
                s.fold[0] = T.min(s.fold[0], HIGHEST)
            if s.fold[0] > s.m[0]:
                for lane in T.vectorized(ext.simd):
                    s.part[lane] = s.part[lane] * T.Cast("float64", T.exp(s.m[0] - s.fold[0]))
                s.m[0] = s.fold[0]
            if ext.kept:
                if log == 0:
                    s.base[c] = s.m[0]
                    keep_exponentials(ext)(s, X, Y, c * ext.chunk, T.min(ext.chunk, ext.vectors - c * ext.chunk))
                else:
                    added(s, X, c * ext.chunk, T.min(ext.chunk, ext.vectors - c * ext.chunk))
            else:
                added(s, X, c * ext.chunk, T.min(ext.chunk, ext.vectors - c * ext.chunk))


@phase
def join_lanes(ext, /, s, X):
    """Reads: the elements that no vector covers, `m`, `part`. Writes: `d`. After: (m, d) is the row's pair."""
    for i in range(ext.vocab - ext.tail):
        s.part[0] = s.part[0] + T.Cast("float64", T.exp(T.Cast("float32", X[s.row, ext.tail + i]) - s.m[0]))
    for lane in range(ext.simd - 1):
        s.part[0] = s.part[0] + s.part[lane + 1]
    s.d[0] = T.Cast("float32", s.part[0])


@phase
def scale_kept(ext, /, s, Y):
    """Turn the exponentials that `keep_exponentials` has kept, relative to each chunk's maximum, into probabilities.

    Reads: these, `base`, `m`, `d`. Writes: `base`, now the factor of each chunk; the probabilities of all vectors.
    """
    simd = T.meta_var(ext.simd)
    for c in range(ext.chunks):
        s.base[c] = T.exp(s.base[c] - s.m[0]) * s.d[0]
        for u in range(T.min(ext.chunk, ext.vectors - c * ext.chunk)):
            for lane in T.vectorized(simd):
                if (ext.scratch > 0):
                    Y[s.row, (c * ext.chunk + u) * simd + lane] = T.Cast(
                        ext.out_dtype, s.kept[(c * ext.chunk + u) * simd + lane] * s.base[c])
                else:
                    Y[s.row, (c * ext.chunk + u) * simd + lane] = (
                        Y[s.row, (c * ext.chunk + u) * simd + lane] * s.base[c])


@phase
def write(ext, /, s, X, log, Y):
    """Reads: the row, (m, d). Writes: its probabilities or their logarithms; `d`."""
    simd, tail, dtype = T.meta_var(ext.simd), T.meta_var(ext.tail), T.meta_var(ext.out_dtype)
    if log != 0:
        s.d[0] = T.log(s.d[0])
        for u in range(ext.vectors):
            for lane in T.vectorized(simd):
                Y[s.row, u * simd + lane] = T.Cast(
                    dtype, T.Cast("float32", X[s.row, u * simd + lane]) - s.m[0] - s.d[0])
        for i in range(ext.vocab - tail):
            Y[s.row, tail + i] = T.Cast(dtype, T.Cast("float32", X[s.row, tail + i]) - s.m[0] - s.d[0])
    else:
        s.d[0] = T.float32(1) / s.d[0]
        if ext.kept:
            scale_kept(ext)(s, Y)
        else:
            for u in range(ext.vectors):
                for lane in T.vectorized(simd):
                    Y[s.row, u * simd + lane] = T.Cast(
                        dtype, exponential(ext)(T.Cast("float32", X[s.row, u * simd + lane]) - s.m[0]) * s.d[0])
        for i in range(ext.vocab - tail):
            Y[s.row, tail + i] = T.Cast(
                dtype, T.exp(T.Cast("float32", X[s.row, tail + i]) - s.m[0]) * s.d[0])


def build(problem: RowProblem, decisions: Decisions) -> Program:
    ext = Extents.of(problem, decisions)
    accumulated, joined, written = accumulate(ext), join_lanes(ext), write(ext)

    few = max(1, FEW // ext.vocab)

    @T.inline
    def of_row(io, b):
        with T.sblock("row"):
            row = T.axis.spatial(io.batch, b)
            T.reads(io.logits[row, 0:ext.vocab])
            if ext.softmax:
                T.writes(io.probabilities[row, 0:ext.vocab])
                s = RowState(ext, row)
                accumulated(s, io.logits, io.log, io.probabilities)
                joined(s, io.logits)
                written(s, io.logits, io.log, io.probabilities)
            else:
                T.writes(io.values[row])
                s = RowState(ext, row)
                accumulated(s, io.logits, None, None)
                joined(s, io.logits)
                io.values[row] = s.m[0] + T.log(s.d[0])

    return cpu_program(problem, in_parallel(of_row, lambda io: io.batch, few))
# fmt: on
