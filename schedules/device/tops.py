"""The k-th best of the tops of groups: a bound that at least k elements reach, and in most cases few others.

Elements are divided into groups, and the largest of a group is its top. k groups have a top that is no less than the
k-th best of all tops, so that k elements are; where elements are in no order, about n ln(n / (n - k)) of n groups'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from .selection import FULL_WARP


# fmt: off
@T.inline
def offer(s, tops, group, ordered):
    """Raise a group's top to an order (`selection.order_bits`)."""
    T.evaluate(T.call_extern("uint32", "atomicMax", tops.ptr_to([group]), ordered))


def find_kth(groups: int, warps: int, k: int, tell: Callable[..., Any]) -> Callable[..., Any]:
    """Find the k-th best of `groups` tops. The phase is (s, tops).

    `tell`: (s, top), called in the lane that has the k-th best; there, `slot` tops are no less and `need` are better.
        Of equals several lanes do, with the same.

    Reads: `tops`. Writes: `own`, the tops by lanes; scratch is `need`, `slot`. Barriers: none; one has to come before
    other threads read what `tell` has written.
    """

    @T.inline
    def phase(s, tops):
        other = T.alloc_local([1], "uint32")
        for j in T.unroll(groups // 32):
            s.own[j] = tops[j * 32 + s.t % 32]
        # Each warp looks at some tops: is the top the k-th best, or one of equals among which that is?
        for i in T.unroll(ceildiv(groups, warps)):
            other[0] = tops[(i * warps + s.t // 32) % groups]
            s.need[0] = 0
            s.slot[0] = 0
            for j in T.unroll(groups // 32):
                s.need[0] = s.need[0] + T.Cast(
                    "int32", T.popcount(T.cuda.ballot_sync(T.uint32(FULL_WARP), s.own[j] > other[0])))
                s.slot[0] = s.slot[0] + T.Cast(
                    "int32", T.popcount(T.cuda.ballot_sync(T.uint32(FULL_WARP), s.own[j] >= other[0])))
            if s.t % 32 == 0 and s.need[0] < k and s.slot[0] >= k:
                tell(s, other[0])

    return phase
# fmt: on
