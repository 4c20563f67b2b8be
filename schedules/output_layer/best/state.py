"""What the phases of the kernel that finds the best share: its buffers and registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ...device.selection import FULL_WARP
from ...device.state import Buffers, local, pooled, shared
from ..words import at_row
from .sizes import TileSearchSizes

LOWEST = T.min_value("float32")
COUNT = 4  # bytes of a counter


@dataclass
class State(Buffers):
    """What the phases share.

    Attributes
    ----------
    index, row, t
        The list, the row of its beam, and the thread.
    words
        Tokens of the list.
    m, d, top
        Maximum and sum of exponentials: a thread's, then the row's.
    whole, rest
        With `whole_sums` a thread's base and sum, and others; an exponential.
    best
        A thread's best key, or another one.
    bits, peak, value, pair, place, rank, near, wanted
        Registers for what is loaded and counted.
    bound
        Shared: the least key that counts, of tiles and of tokens.
    count, counters
        Shared: how many keys reached it; and a register with its address (see `selection.counter_address`).
    maxima
        Shared: the best key of each group of threads.
    chosen
        Shared: the best tiles, in order, where more reached the bound than are looked through.
    reached
        Shared: keys of the tokens that reached it.
    pairs
        Shared: each warp's maximum and sum of exponentials, or of `whole_sums` the latter.
    peak, own, need, slot, pivot
        Registers, for `by_bits`: the largest ordered bits of a thread's tiles; `tops` by lanes; what `find_kth` and
        `rank_at_once` count, and a key.
    tops
        Shared, for `by_bits`: the largest ordered bits of each group of threads.
    largest
        Shared, with `whole_sums` where tiles are not found by bits: ordered bits of the row's largest score.
    keys, held
        Pool: keys that reached the bound, and ordered bits of all that is searched.
    """

    index: Any
    row: Any
    t: Any
    words: Any = local("int32")
    m: Any = local("float32")
    d: Any = local("float32")
    whole: Any = local("float64", 4, when=lambda e: e.whole_sums)
    rest: Any = local("float32", when=lambda e: e.whole_sums)
    top: Any = local("float32")
    best: Any = local("uint64")
    bits: Any = local("uint32", lambda e: e.loads)
    peak: Any = local("uint32", when=lambda e: e.by_bits)
    own: Any = local("uint32", lambda e: e.tile_groups // 32, when=lambda e: e.by_bits)
    need: Any = local("int32", when=lambda e: e.by_bits)
    slot: Any = local("int32", when=lambda e: e.by_bits)
    pivot: Any = local("uint64", when=lambda e: e.by_bits)
    value: Any = local("float32")
    pair: Any = local("float32", 2)
    place: Any = local("int32")
    rank: Any = local("int32")
    near: Any = local("int32")
    wanted: Any = local("int64")
    bound: Any = shared("uint64", 2)
    count: Any = shared("int32", 2)
    counters: Any = local("uint32")
    maxima: Any = shared("uint64", lambda e: e.groups)
    chosen: Any = shared("int32", lambda e: e.k)
    reached: Any = shared("uint64", lambda e: e.most_near, when=lambda e: not e.direct)
    tops: Any = shared("uint32", lambda e: e.tile_groups, when=lambda e: e.by_bits)
    largest: Any = shared("uint32", when=lambda e: e.tells_largest)
    pairs: Any = shared(lambda e: e.sum_dtype, 64)
    keys: Any = pooled("uint64", lambda e: e.searched, 0)
    held: Any = pooled("uint32", lambda e: e.searched, lambda e: 2 * e.searched)

    @classmethod
    def of_row(cls, e: TileSearchSizes, io: Any, flat: Any, t: Any) -> State:
        """The state of one row of all lists. A division would stand between the wait and the first load: tiles that
        are taken as thread blocks come to them are of one list."""
        index, row = (0, flat) if e.dynamic else (flat // io.beam, flat % io.beam)
        return cls.alloc(e, e.pool_bytes, index=index, row=row, t=t)


def score_at(io: Any, s: State, position: Any) -> Any:
    """Where the score of a token of the list is, by its position."""
    return io.scores.ptr_to(at_row(io, s.index, s.row, position))


# fmt: off
@T.inline
def add_pair(maxima, i, sums, j, largest, sum, top, factor):
    """The online sum: `maxima[i]` = the larger of itself and `largest`, and `sums[j]` = its exponentials and the
    `sum` of others relative to that. Scratch is `top[0]`."""
    top[0] = T.max(maxima[i], largest)
    sums[j] = sums[j] * T.exp2((maxima[i] - top[0]) * factor) + sum * T.exp2((largest - top[0]) * factor)
    maxima[i] = top[0]


@T.inline
def sum_lanes(sums, at):
    """`sums[at]` = its sum over the lanes of a warp."""
    for b in T.unroll(5):
        sums[at] = sums[at] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), sums[at], 1 << b, 32, 32)
# fmt: on
