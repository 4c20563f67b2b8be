"""A bound that at least k elements reach, and in most rows few others: the k-th best of the tops of groups.

Elements are divided into groups, and the largest of a group is its top. k groups have a top that is no less than the
k-th best of all tops, so that k elements are.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ...device.loops import rolled
from ...device.selection import FULL_WARP, order
from ...device.words import value_in
from ...rows.best import find_kth, offer
from .keys import lowest_mark, mark_elements, mark_vectors, pick_vector, set_threshold
from .row import load_vector
from .state import column_of
from .words import HALF, LEAST, largest


# fmt: off
@T.inline
def find_top(layout, s):
    """Set `top` to the thread's largest element, from `pair`."""
    s.top[0] = value_in(layout.dtype, s.pair[0], 0)
    if layout.per_word == 2:
        T.ptx.max.NaN.f32(s.top[0], s.top[0], value_in(layout.dtype, s.pair[0], 1))


@phase
def find_tops(layout, /, s):
    """The largest element of each thread, and of each group of threads.

    Reads: `raw`, or, of a staged row, `pair`, the thread's largest elements; `tops`, which come as 0.
    Writes: `top`, `tops`; scratch is `pair`, `plain`, `bits`.
    Barriers: one, at the end.
    """
    # Where blocks have agreed on a bound, `top` is known.
    if not layout.agreed:
        if not layout.staged:
            s.pair[0] = largest(layout.dtype, [s.raw[w] for w in range(layout.words)])
        find_top(layout, s)
    order(s.top[0], s.plain, s.bits)
    offer(s, s.tops, s.t % layout.groups, s.bits[0])
    T.cuda.cta_sync()


@T.inline
def tell(s, top):
    """The k-th best top, and how many tops that equal it are among the k best."""
    s.kth[0] = top
    s.equals[0] = s.slot[0] - s.need[0]


@phase
def find_bound(layout, /, s, tops):
    """The k-th best of the tops.

    Reads: `tops`.
    Writes: `own`, `kth`, `equals`, `bound`; scratch is `need`, `slot`.
    Barriers: one, before the end.
    After: `bound` is the same in all threads, and above minus infinity.
    """
    find_kth(layout.groups, layout.warps, layout.k, tell)(s, tops)
    T.cuda.cta_sync()
    s.bound[0] = T.max(s.kth[0], T.uint32(LEAST[layout.dtype]))


@phase
def find_firsts(layout, /, s):
    """The first column of each group's top.

    Reads: `raw` or `staged`; `top`, `tops`; `firsts`, which come as the number of columns.
    Writes: `firsts`; scratch is `plain`, `bits`, `column`, `vector`.
    Barriers: one, at the end.
    After: a group whose top is NaN has the number of columns still.
    """
    order(s.top[0], s.plain, s.bits)
    if s.bits[0] == s.tops[s.t % layout.groups] and s.t < layout.threads:
        s.column[0] = layout.vocab
        for u in (rolled if layout.early else T.unroll)(layout.vectors):
            load_vector(layout)(s, u)
            for e in T.unroll(layout.width):
                if value_in(layout.dtype, s.vector[e // layout.per_word], e % layout.per_word) == s.top[0]:
                    s.column[0] = T.min(s.column[0], column_of(layout, s, u * layout.width + e))
        offer_first(s, s.firsts, s.t % layout.groups, s.column[0])
    T.cuda.cta_sync()


@phase
def find_first_reached(layout, /, s):
    """The first column of each group with an element that reaches the bound.

    The share is in registers.

    Reads: `raw`, `peaks`, `top`, `bound`; `firsts`, which come as the number of columns.
    Writes: `firsts`; scratch is `threshold`, `pair`, `marks`, `spot`, `vector`, `column`.
    Barriers: one, at the end.
    """
    place = T.alloc_local([1], "int32")
    elements = T.alloc_local([1], "uint32")
    both = T.alloc_local([1], "uint32")
    set_threshold(layout, s)
    s.column[0] = layout.vocab
    # Written so that TVM's simplifier does not make "no less" of "not below": a NaN is not below, but not "no
    # less".
    if T.Select(s.top[0] < s.threshold[0], 0, 1) != 0:
        mark_vectors(layout, s)
        lowest_mark(s.marks, s.spot)
        pick_vector(layout, s)
        mark_elements(layout, s, elements)
        both[0] = elements[0] | (elements[0] >> T.uint32(HALF))
        lowest_mark(both, place)
        # The first of a word's two elements, if it has a mark.
        s.column[0] = column_of(layout, s, s.spot[0] * layout.width + place[0] * layout.per_word + T.Select(
            (elements[0] >> T.Cast("uint32", place[0])) & T.uint32(1) == T.uint32(0), 1, 0))
    offer_first(s, s.firsts, s.t % layout.groups, s.column[0])
    T.cuda.cta_sync()


@phase
def bound_columns(layout, /, s):
    """Up to which column equals of the bound are wanted: the k-th first of the groups' first columns, so that k
    elements which reach the bound lie no further.

    Reads: `firsts`; `last`, which comes as the number of columns.
    Writes: `last`, `until`; scratch is `need`, `column`.
    Barriers: one, before the end.
    After: `until` is the number of columns if fewer groups than k have such an element.
    """
    for i in T.unroll(ceildiv(layout.groups, layout.block_warps)):
        s.column[0] = s.firsts[(i * layout.block_warps + s.t // 32) % layout.groups]
        s.need[0] = 0
        for j in T.unroll(layout.groups // 32):
            s.need[0] = s.need[0] + T.Cast("int32", T.popcount(T.cuda.ballot_sync(
                T.uint32(FULL_WARP), s.firsts[j * 32 + s.t % 32] < s.column[0])))
        if s.t % 32 == 0 and s.need[0] == layout.k - 1:
            s.last[0] = s.column[0]
    T.cuda.cta_sync()
    s.until[0] = s.last[0]


@T.inline
def offer_first(s, firsts, group, column):
    """Lower the first column of a group's top to this column."""
    T.evaluate(T.call_extern("int32", "atomicMin", firsts.ptr_to([group]), column))


@phase
def bound_equals(layout, /, s, tops, firsts):
    """Up to which column equals of the bound are wanted: where that of the k-th best top is, of equals the first ones
    being better.

    Reads: `tops`, `firsts`, `own`, which are the tops by lanes; `bound`, which has to be the k-th best top itself;
        `last`, which comes as the number of columns.
    Writes: `last`, `until`; scratch is `need`, `column`.
    Barriers: one, before the end.
    After: `until` is the number of columns if there is no such top, as of fewer than k above minus infinity, or of NaN.
    """
    groups, warps = T.meta_var(layout.groups), T.meta_var(layout.warps)
    first = T.alloc_local([1], "int32")
    # Warps look at some groups each, as for the bound.
    for i in T.unroll(ceildiv(groups, warps)):
        s.column[0] = firsts[(i * warps + s.t // 32) % groups]
        s.need[0] = 0
        for j in T.unroll(groups // 32):
            first[0] = firsts[j * 32 + s.t % 32]
            s.need[0] = s.need[0] + T.Cast("int32", T.popcount(T.cuda.ballot_sync(
                T.uint32(FULL_WARP),
                s.own[j] > s.bound[0] or (s.own[j] == s.bound[0] and first[0] < s.column[0]))))
        if s.t % 32 == 0 and s.need[0] == layout.k - 1 and tops[(i * warps + s.t // 32) % groups] == s.bound[0]:
            s.last[0] = s.column[0]
    T.cuda.cta_sync()
    s.until[0] = s.last[0]
# fmt: on
