"""The keys of what reaches a block's bound, where any thread can look at any vector.

A thread that looks at its own vectors does so one element after another, as most warps have one such thread, and those
that have two make all others wait (`keys.put_reached`). Here threads list what they have, a step of vectors each, and
then all threads look at an element each of what is listed.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.loops import rolled
from ...device.selection import join_key, order, take_places
from ...device.words import value_in
from .keys import put_key, set_threshold, take_mark
from .row import load_vector
from .state import column_of
from .words import either, largest, reach


# fmt: off
@phase
def mark_steps(layout, /, s):
    """Set a bit for each step with an element that reaches the bound."""
    for i in T.unroll(layout.steps):
        s.marks[0] = s.marks[0] | reach(layout.dtype, s.step_peaks[i * layout.threads + s.t], s.pair[0], i)


@phase
def mark_limited(layout, /, s):
    """As `mark_steps`, but beyond the last column for equals only vectors with an element above the bound."""
    peak = T.alloc_local([1], "uint32")
    for u in rolled(layout.vectors):
        load_vector(layout)(s, u)
        peak[0] = largest(layout.dtype, [s.vector[w] for w in range(4)])
        s.marks[0] = s.marks[0] | T.Select(
            column_of(layout, s, u * layout.width) <= s.until[0],
            reach(layout.dtype, peak[0], s.pair[0], u // layout.step),
            reach(layout.dtype, peak[0], s.pair[0], u // layout.step, beyond=True))


@phase
def list_steps(layout, limited, /, s):
    """List the steps of a staged share that have elements which reach the bound.

    `limited`: of its equals those up to a column.

    Reads: `step_peaks`, `top`, `bound`; if `limited`, `staged`, `until`.
    Writes: `reached` and `listed`; scratch is `threshold`, `pair`, `marks`, `spot`, `vector`, `slot`.
    Barriers: none.
    After: if there is no room for all, the count exceeds it.
    """
    mark = T.meta_var(mark_limited(layout) if limited else mark_steps(layout))
    set_threshold(layout, s)
    # Written so that TVM's simplifier does not make "no less" of "not below": a NaN is not below, but not "no
    # less".
    if T.Select(s.top[0] < s.threshold[0], 0, 1) != 0:
        s.marks[0] = T.uint32(0)
        mark(s)
        s.marks[0] = either(s.marks[0])
        while s.marks[0] != T.uint32(0):
            take_mark(s.marks, s.spot)
            s.slot[0] = take_places(s.listing[0], T.int32(1))
            if s.slot[0] < layout.reached_room:
                s.reached[s.slot[0]] = s.spot[0] * layout.threads + s.t


@phase
def put_listed(layout, /, s):
    """Append the keys of what reaches the bound, and of its equals of those up to a column: each element of the steps
    that are listed is looked at by another thread.

    Reads: `reached`, `listed`; `staged`, `bound`, `until`.
    Writes: as `put_key`; scratch is `pivot`, `size`, `column`, `key`, `plain`, `bits`.
    Barriers: none; one has to come between `list_steps` and this.
    """
    threads = T.meta_var(layout.threads)
    width, per_word = T.meta_var(layout.width), T.meta_var(layout.per_word)
    lanes = T.meta_var(layout.step * width)
    vector = T.alloc_local([1], "int32")
    s.pivot[0] = join_key(s.bound[0], s.until[0])
    s.size[0] = T.min(s.listed[0], layout.reached_room)
    for i in rolled((s.size[0] * lanes - s.t + (layout.block_threads - 1)) // layout.block_threads):
        vector[0] = s.reached[(i * layout.block_threads + s.t) // lanes]
        # Which vector of the step has the element.
        vector[0] = (vector[0] // threads * layout.step + s.t % lanes // width) * threads + vector[0] % threads
        s.column[0] = s.start[0] + vector[0] * width + s.t % width
        order(
            value_in(layout.dtype, s.staged[vector[0] * 4 + s.t % width // per_word], s.t % per_word), s.plain, s.bits)
        s.key[0] = join_key(s.bits[0], s.column[0])
        if s.key[0] >= s.pivot[0]:
            put_key(layout)(s)
# fmt: on
