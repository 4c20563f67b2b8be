"""What every softmax_topk kernel does alike, on any machine: read an element, write a value.

An element is the float32 sum of a logit and its bias, if there is one, or the logit after the soft cap, in float32; or
minus infinity where the row's bitmap does not allow its column. The order of elements is that of these numbers, and the
temperature multiplies only what is exponentiated.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.formats.bitmap import BITS
from tvm_sparse.operators.softmax_topk.definition import masked, soft_capped

from ..device.arithmetic import TANH_SMALL, fma_on_gpu, tanh_on_gpu, tanh_relative, tanh_small
from ..device.words import load_element, load_word


def element(io: Any, row: Any, column: Any, tanh: Any = tanh_on_gpu) -> tirx.PrimExpr:
    """The element of a row and column. On a GPU the load may take the read-only path."""
    x = capped(io, T.Cast("float32", io.logits[row, column]), tanh)
    x = x + T.Cast("float32", io.bias[column]) if io.problem.bias else x
    return masked(io.allowed, row, column, x) if io.problem.allowed else x


def element_on_cpu(io: Any, row: Any, column: Any) -> tirx.PrimExpr:
    """As `element`, from instructions that every SIMD unit has."""
    return element(io, row, column, tanh_relative)


def written_element(io: Any, row: Any, column: Any) -> tirx.PrimExpr:
    """As `element`, by loads that see what a producer kernel has written: for kernels whose launch overlaps it."""
    x = held_capped(io, load_element(io.problem.dtype, io.logits.ptr_to([row, column])))
    x = x + load_element("float32", io.bias.ptr_to([column])) if io.problem.bias else x
    return chosen(bits_from(io, row, column), 0, x) if io.problem.allowed else x


def capped(io: Any, x: tirx.PrimExpr, tanh: Any) -> tirx.PrimExpr:
    """A logit after the soft cap, if there is one. Equal wherever it is computed with the same `tanh`."""
    return soft_capped(x, x * (T.float32(1) / io.cap), io.cap, tanh) if io.problem.capped else x


def held_capped(io: Any, x: tirx.PrimExpr) -> tirx.PrimExpr:
    """The same on a GPU, of a logit that is loaded once: x may be an expression that loads it."""
    if not io.problem.capped:
        return x
    held = T.alloc_local([1], "float32")
    T.buffer_store(held, x, [0])
    return capped(io, held[0], tanh_on_gpu)


@phase
def cap_elements(number, /, io, x):
    """The soft cap of a thread's `number` logits, which `capped` makes of each.

    Few logits of a model are more than half of the cap: those of a thread mostly need the series alone, without a
    quotient and an exponential for each.

    Reads and writes: `x`. Barriers: none.
    """
    # fmt: off
    largest = T.alloc_local([1], "float32")
    largest[0] = T.abs(x[0])
    for e in T.unroll(number - 1):
        largest[0] = T.max(largest[0], T.abs(x[e + 1]))
    if largest[0] * (T.float32(1) / io.cap) < T.float32(TANH_SMALL):
        for e in T.unroll(number):
            x[e] = io.cap * tanh_small(x[e] * (T.float32(1) / io.cap), fma_on_gpu)
    else:
        for e in T.unroll(number):
            x[e] = capped(io, x[e], tanh_on_gpu)


def bits_from(io: Any, row: Any, column: Any) -> tirx.PrimExpr:
    """The bits of the row's bitmap from a column on, up to the end of its 32-bit word, as `written_element` loads."""
    word = load_word(io.allowed.ptr_to([row, column // BITS]))
    return word >> T.Cast("uint32", column % BITS)


def chosen(bits: Any, e: Any, x: Any) -> tirx.PrimExpr:
    """x, or minus infinity where the e-th of some bits is 0."""
    bit = bits >> T.Cast("uint32", e) & T.uint32(1)
    return T.Select(bit != T.uint32(0), x, -T.infinity("float32"))


@phase
def mask_vectors(vocab, width, vectors, aligned, /, io, row, x, column):
    """Minus infinity for elements that are not allowed.

    `column(e)` is the column of x[e], of `vectors` vectors of `width` neighbours. `aligned`: vectors begin at multiples
    of `width`, so that one word of the bitmap has all bits of a vector. Columns outside of the row get any element.

    Reads: `allowed`. Writes: `x`. Barriers: none.
    """
    bits = T.alloc_local([1], "uint32")
    for u in T.unroll(vectors):
        if aligned:
            bits[0] = bits_from(io, row, T.min(column(u * width), vocab - width))
            for v in T.unroll(width):
                x[u * width + v] = chosen(bits[0], v, x[u * width + v])
        else:
            for v in T.unroll(width):
                x[u * width + v] = chosen(
                    bits_from(io, row, T.max(T.min(column(u * width + v), vocab - 1), 0)), 0, x[u * width + v]
                )


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
@phase
def write_wanted(vocab, ids, threads, /, io, row, t, s):
    """The last phase of a kernel whose thread blocks have a row each. Barriers: none.

    Reads: `ids`, the row's elements in these columns, the row's maximum `s.top` and its sum of exponentials `s.d`.
    Writes: `given`.
    """
    for i in T.serial((ids - t + (threads - 1)) // threads):
        write_given(
            io.given, row, i * threads + t, io.ids[row, i * threads + t], vocab,
            (element(io, row, io.ids[row, i * threads + t]) - s.top[0]) * io.scale,
            T.float32(1) / s.d[0], T.log(s.d[0]), io.log)
# fmt: on
