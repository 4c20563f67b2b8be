"""The row: into registers, its maxima, the sum of its exponentials, and elements that are looked for again."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.arithmetic import LN_2, tanh_on_gpu
from ...device.references import exact_factor, is_far, unit_of
from ...device.selection import FULL_WARP, MINUS_INFINITY, bits_value, maxima_of_lanes, maxima_of_warp, order
from ...device.thresholds import Rank
from ...device.words import load_element, load_words, per_word, value_in
from ..elements import cap_elements, capped, mask_vectors
from .space import WARP
from .state import added, column_of, folded, lanes_max, lanes_min, ragged


# fmt: off
@phase
def load_row(layout, /, io, at, s):
    """Load the row into registers.

    Reads: the row of the logits, the bias, and the bitmap.
    Writes: `x`.
    Barriers: none.
    After: `x` has the lane's elements, and minus infinity where there is none.
    """
    width, aligned = T.meta_var(layout.width), T.meta_var(layout.aligned)
    held = T.meta_var(layout.held)
    parts = T.meta_var(per_word(layout.dtype))
    for u in T.unroll(layout.vectors):
        if not ragged(layout, u):
            load_words(16, s.raw, u * 4, s.small, io.logits.ptr_to([at.row, column_of(layout, at, u * width)]))
        else:
            for w in T.unroll(4):
                s.raw[u * 4 + w] = T.uint32(0)
            if column_of(layout, at, u * width) < layout.vocab and (
                aligned or column_of(layout, at, u * width) + width <= at.left
            ):
                load_words(16, s.raw, u * 4, s.small, io.logits.ptr_to([at.row, column_of(layout, at, u * width)]))
    for e in T.unroll(held):
        s.x[e] = value_in(layout.dtype, s.raw[e // parts], e % parts)
    # A vector that reaches beyond the array's end is loaded element by element.
    if not aligned and layout.vectors * layout.lanes * width > at.left:
        for e in T.unroll(held):
            if ragged(layout, e // width):
                if column_of(layout, at, e) < layout.vocab and (
                    column_of(layout, at, e // width * width) + width > at.left
                ):
                    s.x[e] = load_element(layout.dtype, io.logits.ptr_to([at.row, column_of(layout, at, e)]))
    if layout.capped:
        cap_elements(held)(io, s.x)
    if layout.biased:
        for e in T.unroll(held):
            s.x[e] = s.x[e] + load_element(
                "float32", io.bias.ptr_to([T.max(T.min(column_of(layout, at, e), layout.vocab - 1), 0)]))
    if layout.masked:
        mask_vectors(layout.vocab, width, layout.vectors, aligned)(io, at.row, s.x, lambda e: column_of(layout, at, e))
    for e in T.unroll(held):
        if ragged(layout, e // width):
            if column_of(layout, at, e) >= layout.vocab:
                s.x[e] = -T.infinity("float32")
        if not aligned and e < width:
            if column_of(layout, at, e) < 0:
                s.x[e] = -T.infinity("float32")


@phase
def find_maxima(layout, /, io, at, s):
    """Each lane's own maxima.

    Reads: `x`.
    Writes: `maxima`, `top`.
    Barriers: none.
    After: `maxima[:groups]` are those of the lane's groups, `top` is the lane's own maximum. NaN are left out.
    """
    tops, groups = T.meta_var(layout.tops), T.meta_var(layout.groups)
    for e in T.unroll(layout.held):
        if e < tops:
            s.maxima[e] = s.x[e]
        else:
            T.ptx.max.f32(s.maxima[e % tops], s.maxima[e % tops], s.x[e])
    for e in T.unroll(tops - groups):
        T.ptx.max.f32(s.maxima[e % groups], s.maxima[e % groups], s.maxima[groups + e])
    s.top[0] = s.maxima[0]
    for g in T.unroll(groups - 1):
        T.ptx.max.f32(s.top[0], s.top[0], s.maxima[1 + g])


@phase
def bound_by_lanes(layout, /, io, at, s):
    """For small k: a threshold from the lanes' maxima.

    Reads: `top`.
    Writes: `top`, `top_bits`, `lower`.
    Barriers: none.
    After: `top` is the row's maximum, and `lower` the k-th largest of the lanes' maxima.
    """
    order(s.top[0], s.value, s.ordered)
    if layout.lanes == WARP:
        maxima_of_warp(Rank(layout.k, 1, sure=True, most=0))(at.lane, s.ordered, s.top_bits, s.lower)
    else:
        maxima_of_lanes(layout.lanes, layout.k)(at.lane, s.ordered, s.top_bits, s.lower)
    s.top[0] = bits_value(s.top_bits[0])


@phase
def least_finite(layout, /, s):
    """The order of the least element that is not minus infinity. Writes: `lower`."""
    s.value[0] = T.infinity("float32")
    for e in T.unroll(layout.held):
        if s.x[e] > -T.infinity("float32"):
            s.value[0] = T.min(s.value[0], s.x[e])
    order(s.value[0], s.value, s.ordered)
    s.lower[0] = lanes_min(s.ordered[0])


@phase
def bound_by_groups(layout, /, io, at, s):
    """For larger k: the range that bins divide, from the maxima of groups.

    Reads: `x`, `maxima`, `top`.
    Writes: `top`, `top_bits`, `lower`.
    Barriers: none.
    After: `top` is the row's maximum. `lower` is the least of all groups' maxima, which at least k elements reach; but
        if that is minus infinity, the row's least element above it.
    """
    order(s.top[0], s.value, s.ordered)
    s.top_bits[0] = lanes_max(s.ordered[0])
    if layout.groups > 1:
        order(folded(T.min, s.maxima, layout.groups), s.value, s.ordered)
    s.lower[0] = lanes_min(s.ordered[0])
    # Bins cannot divide a range that is infinite.
    if s.lower[0] <= T.uint32(MINUS_INFINITY):
        least_finite(layout)(s)
    s.top[0] = bits_value(s.top_bits[0])


@phase
def sum_exponentials(layout, /, io, at, s):
    """The sum of exponentials.

    Reads: `x`, `top`, `factor`.
    Writes: `reference`, `unit`, `d`, `inverse`, `logarithm`; `factor`, if the reference is far (`device.references`).
    Barriers: none.
    After: `d` is the sum of exp(scale * (x - top)), in all lanes.
    """
    sums = T.meta_var(layout.sums)
    s.reference[0] = s.top[0] * s.factor[0]
    s.unit[0] = T.float32(LN_2)
    if is_far(s.reference[0]):
        scale: T.float32 = s.factor[0] * T.float32(LN_2)
        s.factor[0] = exact_factor(s.top[0])
        s.unit[0] = unit_of(s.reference[0], s.factor[0], scale)
        s.reference[0] = s.top[0] * s.factor[0]
    for e in T.unroll(layout.held):
        # x * factor - reference with one rounding, so that the reference's own rounding cancels in the quotient.
        # `ex2.ftz` spares the steps for subnormal results, which add nothing to a sum of about 1 or more.
        T.ptx.fma.rn.f32(s.power[0], s.x[e], s.factor[0], T.float32(0) - s.reference[0])
        T.ptx.ex2.approx.ftz.f32(s.power[0], s.power[0])
        if e < sums:
            s.partial[e] = s.power[0]
        else:
            s.partial[e % sums] = s.partial[e % sums] + s.power[0]
    if layout.lanes == WARP:
        s.d[0] = T.cuda.warp_sum(folded(added, s.partial, sums))
    else:
        s.d[0] = folded(added, s.partial, sums)
        for j in T.unroll(layout.lanes.bit_length() - 1):
            s.d[0] = s.d[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.d[0], layout.lanes >> (j + 1), 32, 32)
    T.ptx.rcp.approx.ftz.f32(s.inverse[0], s.d[0])
    s.logarithm[0] = T.float32(0)
    if io.log != 0:
        s.logarithm[0] = T.log(s.d[0])


@phase
def mark_reached(layout, /, s):
    """A bit for each element that reaches the gate.

    Reads: `x`, `gate`. Writes: `marks`. After: a bit for each element that is not below `gate`, as no NaN is.
    """
    for w in T.unroll(layout.mark_words):
        s.marks[w] = T.uint32(0)
    for e in T.unroll(layout.held):
        s.marks[e // 32] = s.marks[e // 32] | T.Select(
            s.x[e] < s.gate[0], T.uint32(0), T.uint32(1) << T.Cast("uint32", e % 32))


@phase
def take_marked(layout, /, io, at, s, w):
    """Take one marked element, and clear its mark.

    Reads: the w-th word of `marks`, which is not 0, and the logits.
    Writes: that word; `column`, `value`, `ordered`.
    After: the word has lost one bit, and the registers have the element that it stood for. The element is read again,
        from the cache, because registers cannot be indexed at run time.
    """
    width = T.meta_var(layout.width)
    s.column[0] = 31 - T.clz(T.reinterpret("int32", s.marks[w]))
    s.marks[w] = s.marks[w] ^ (T.uint32(1) << T.Cast("uint32", s.column[0]))
    # Columns from the lane's element 0 to element w * 32 + i: `lanes` an element in whole vectors, 1 within a vector.
    s.column[0] = (w * 32 * layout.lanes + s.column[0] * layout.lanes) - s.column[0] % width * (layout.lanes - 1)
    s.value[0] = load_element(layout.dtype, io.logits.ptr_to([at.row, at.lane * width - at.lead + s.column[0]]))
    if layout.capped:
        s.value[0] = capped(io, s.value[0], tanh_on_gpu)
    s.column[0] = s.column[0] + at.lane * width - at.lead
    if layout.biased:
        s.value[0] = s.value[0] + load_element("float32", io.bias.ptr_to([s.column[0]]))
    order(s.value[0], s.value, s.ordered)
# fmt: on
