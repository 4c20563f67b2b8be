"""A share in shared memory: its vectors are looked at as they come, exponentials included, and again where needed.

Loads into registers are waited for by scoreboards, of which there are six: most exponentials come when all is read. Of
asynchronous copies each is a group, whose end a thread awaits before it looks at the vector. No other thread does.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.words import value_in
from .row import load_vector
from .state import column_of
from .sums import LOWEST, add_partial, sum_of_partials, take_power
from .words import NOTHING, larger, largest

VECTOR = 16  # bytes
# The number of the barrier by which threads with vectors issue their copies in the order of steps.
PACE = 1


# fmt: off
@phase
def copy(layout, /, s, u):
    """Have the thread's u-th vector copied to shared memory."""
    T.ptx.cp.async_.cg.shared.global_(
        s.staged.ptr_to([(u * layout.threads + s.t) * 4]),
        s.io.logits.ptr_to([s.row[0], column_of(layout, s, u * layout.width)]), VECTOR)


@phase
def stage_row(layout, /, s):
    """Have the thread's vectors copied. The phase is (s), of the threads that have some.

    Reads: `row`, `start`, `mine`.
    Writes: `staged`, asynchronously: minus infinity beyond this block's share.
    Barriers: none, as a thread reads only what it had copied itself; but with an early bound one of these threads
        between the steps (see `paced`).
    After: a group of copies for each step is in flight.
    """
    for u in T.unroll(layout.vectors):
        if u < layout.inner:
            copy(layout)(s, u)
        else:
            if u * layout.threads + s.t < s.mine[0]:
                copy(layout)(s, u)
            else:
                for w in T.unroll(4):
                    s.staged[(u * layout.threads + s.t) * 4 + w] = T.uint32(NOTHING[layout.dtype])
        if u % layout.step == layout.step - 1:
            T.ptx.cp.async_.commit_group()
            if layout.early:
                if u < layout.vectors - 1:
                    T.ptx.bar.sync(T.uint32(PACE), T.uint32(layout.threads))


@phase
def weigh_vector(layout, /, s, peak):
    """Add the exponentials of a vector to the thread's sum (Milakov & Gimelshein 2018, Algorithm 3, lines 4 to 6, by
    vectors). `peak` is a word that has the vector's largest element.

    Reads: `vector`, `factor`. Writes: `sum`, `reference`; scratch is `plain`, `power`, `partial`. Barriers: none.
    """
    s.plain[0] = s.reference[0]
    for part in T.unroll(layout.per_word):
        s.reference[0] = T.max(s.reference[0], value_in(layout.dtype, peak, part))
    # The sum so far, relative to the new reference.
    take_power(s, s.power, s.plain[0])
    s.sum[0] = s.sum[0] * s.power[0]
    for e in T.unroll(layout.width):
        take_power(s, s.power, value_in(layout.dtype, s.vector[e // layout.per_word], e % layout.per_word))
        add_partial(s, e)
    s.sum[0] = s.sum[0] + sum_of_partials(s)


@phase
def take_row(layout, /, s):
    """Look at the thread's vectors as they come.

    Reads: `staged`, `factor`.
    Writes: `peaks`, `pair`, the largest elements of all, `sum`, `reference`; scratch is `vector`, and as
        `weigh_vector`.
    Barriers: none.
    """
    s.pair[0] = T.uint32(NOTHING[layout.dtype])
    s.reference[0] = LOWEST
    s.sum[0] = T.float32(0)
    for u in T.unroll(layout.vectors):
        T.ptx.cp.async_.wait_group(layout.vectors - 1 - u)
        load_vector(layout)(s, u)
        s.peaks[u] = largest(layout.dtype, [s.vector[w] for w in range(4)])
        s.pair[0] = larger(layout.dtype, s.pair[0], s.peaks[u])
        weigh_vector(layout)(s, s.peaks[u])
# fmt: on
