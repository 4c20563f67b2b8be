"""A staged share whose warps keep the same pace, so that few exponentials are left when the last vector arrives.

As `staged`, but by *steps* of two vectors, and with three differences:

* The loop over steps is not unrolled. In straight-line code the assembler puts the waits first, and more than half of
  the exponentials after the last wait.
* All warps request a step before any requests the next one (`staged.stage_row`). Otherwise some warps have all their
  copies in flight before others have begun. The vectors of those come last, and each of them then has many
  exponentials to compute alone.
* A sum is relative to an element that few others exceed by much, not to the largest one so far. It seldom changes, so
  that it costs no exponentials, and an exponent is one fused multiply-add.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.loops import rolled
from ...device.words import value_in
from .agreement import agree, offer_top
from .row import load_staged
from .sums import LOWEST, add_partial, set_base, sum_of_partials, take_near_power, take_power, take_rest
from .words import NOTHING, larger, largest

# A power of two by which elements may exceed the reference of a sum, far less than float32 reaches.
REACH = 8


# fmt: off
@phase
def raise_reference(layout, /, s):
    """Make `plain` the reference of the thread's sum.

    Reads: `plain`, `factor`. Writes: `reference`, `base`, `rest`, `near`, `sum`; scratch is `power`. Barriers: none.
    """
    s.power[0] = (s.reference[0] - s.plain[0]) * s.factor[0] - s.rest[0]
    s.reference[0] = s.plain[0]
    set_base(s)
    T.ptx.ex2.approx.ftz.f32(s.power[0], s.power[0] + s.rest[0])
    s.sum[0] = s.sum[0] * s.power[0]


@phase
def weigh_step(layout, /, s, peak):
    """Add the exponentials of a step's vectors to the thread's sum. `peak` is a word that has their largest element.

    As Algorithm 3 of Milakov & Gimelshein 2018 (lines 4 to 6), but for whole vectors, and relative to an element that
    few others exceed by much: it changes seldom.

    Reads: `vector`, `factor`.
    Writes: `sum` and what it is relative to; scratch is `plain`, `power`, `partial`.
    Barriers: none.
    """
    dtype, per_word = T.meta_var(layout.dtype), T.meta_var(layout.per_word)
    s.plain[0] = value_in(dtype, peak, 0)
    if per_word == 2:
        s.plain[0] = T.max(s.plain[0], value_in(dtype, peak, 1))
    if (s.plain[0] - s.reference[0]) * s.factor[0] > T.float32(REACH):
        raise_reference(layout)(s)
    if s.near[0] != 0:
        for e in T.unroll(layout.step * layout.width):
            take_near_power(s, value_in(dtype, s.vector[e // per_word], e % per_word))
            add_partial(s, e)
    else:
        # Numbers of any size: where they are equal the difference is 0, and else minus infinity.
        for e in T.unroll(layout.step * layout.width):
            take_power(s, s.power, value_in(dtype, s.vector[e // per_word], e % per_word))
            add_partial(s, e)
    s.sum[0] = s.sum[0] + sum_of_partials(s)


@phase
def look(layout, /, s, peak):
    """Look at each step's vectors as they come."""
    for i in rolled(layout.steps):
        T.ptx.cp.async_.wait_group(layout.steps - 1)
        # An empty group, so that in every step the same number of groups has to be complete.
        T.ptx.cp.async_.commit_group()
        load_staged(layout)(s, i)
        peak[0] = largest(layout.dtype, [s.vector[w] for w in range(4 * layout.step)])
        s.step_peaks[i * layout.threads + s.t] = peak[0]
        s.pair[0] = larger(layout.dtype, s.pair[0], peak[0])
        weigh_step(layout)(s, peak[0])
        if i == layout.early_steps - 1:
            offer_top(layout)(s)


@phase
def take_steps(layout, /, s):
    """Look at the thread's vectors as they come; the warp that has none finds the early bound.

    Reads: `staged`, `factor`.
    Writes: `step_peaks`, `pair`, the largest elements of all, `sum`, `reference`; as `offer_top` and `agree`; scratch
        is `vector`, and as `weigh_step`.
    Barriers: as `offer_top` and `agree`.
    """
    peak = T.alloc_local([1], "uint32")
    s.pair[0] = T.uint32(NOTHING[layout.dtype])
    s.reference[0] = LOWEST
    s.rest[0] = T.float32(0)
    s.base[0] = T.float32(0)
    s.near[0] = 0
    s.sum[0] = T.float32(0)
    if s.t < layout.threads:
        look(layout)(s, peak)
    else:
        agree(layout)(s)
    take_rest(s)
# fmt: on
