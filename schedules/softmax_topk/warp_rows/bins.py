"""Larger k: elements are counted in bins of equal width, become keys in their bins, and are ranked within these.

Bin 0 has the largest elements. The last bin has all elements below the range that the others divide.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...device.selection import FULL_WARP, bits_value, join_key, key_value, order, scan_lanes
from ...device.words import held_address
from .counting import count_larger, pad_keys
from .results import write_key
from .row import mark_reached, take_marked
from .space import CROWD, Layout
from .state import State, added, any_lane, column_of, count_lanes, folded, lanes_with

# 2^23: float32 numbers from here to 2^24 are whole. Adding it to a smaller number rounds that to a whole number, which
# is what the sum's bits exceed MAGIC_BITS by.
MAGIC = 1 << 23
MAGIC_BITS = 0x4B000000
# Beyond this the range is so small that what is computed from its inverse may be below the smallest normal float32.
MAX_FINE = 1e30

# Accesses to a bin's count, each one instruction after the address `first + 4 * bin`. `first` has the offset of
# MAGIC_BITS in it, so that the number which `find_bin` gives needs no subtraction.
COUNT_IN_BIN = """
__device__ __forceinline__ void count_in_bin(unsigned int first, unsigned int bin) {
  asm volatile("red.shared.add.u32 [%0], 1;" : : "r"(first + 4 * bin) : "memory");
}
"""
# A bin's count, returned while one is added to it; its count; and the count of the bin before.
OF_BIN = {
    name: f"""
__device__ __forceinline__ int {name}(unsigned int first, unsigned int bin) {{
  int count;
  asm volatile("{instruction};" : "=r"(count) : "r"(first + 4 * bin) : "memory");
  return count;
}}
"""
    for name, instruction in (
        ("place_in_bin", "atom.shared.add.u32 %0, [%1], 1"),
        ("end_of_bin", "ld.shared.u32 %0, [%1]"),
        ("start_of_bin", "ld.shared.u32 %0, [%1 + -4]"),
    )
}


def count_in_bin(s: State, bin: tirx.PrimExpr) -> tirx.PrimExpr:
    """Add 1 to the count of a bin, by its number plus MAGIC_BITS."""
    return T.cuda.func_call("count_in_bin", s.first[0], bin, source_code=COUNT_IN_BIN, return_type="void")


def of_bin(name: str, s: State, bin: tirx.PrimExpr) -> tirx.PrimExpr:
    """The result of a function of `OF_BIN` for a bin, given by the bin's number plus MAGIC_BITS."""
    return T.cuda.func_call(name, s.first[0], bin, source_code=OF_BIN[name], return_type="int32")


# fmt: off
@phase
def find_bin(layout, /, s, x):
    """The bin of a value.

    A larger x never gets a later bin, whatever `top` and `fine` are: each step of the computation is monotonic. An
    intermediate NaN (a difference of infinities) goes to bin 0.

    Reads: `top`, `fine`. Writes: `bin`, `value`. After: `bin` is the number of x's bin, plus MAGIC_BITS.
    """
    T.ptx.sub.rn.f32(s.value[0], s.top[0], x)
    T.ptx.fma.rn.f32(
        s.value[0], T.call_extern("float32", "__saturatef", s.value[0] * s.fine[0]),
        T.float32(layout.bins - 1), T.float32(MAGIC))
    s.bin[0] = T.reinterpret("int32", s.value[0])


@phase
def clear_bins(layout, /, io, at, s):
    """Empty bins.

    Writes: `counts`, `first`. Barriers: none. After: all counts are 0.
    """
    for b in T.unroll(layout.lane_bins // 4):
        for v in T.vectorized(4):
            s.counts[at.warp * layout.counts + (b * 32 + at.lane) * 4 + 4 + v] = 0
    if at.lane == 0:
        s.counts[at.warp * layout.counts + 3] = 0
    s.first[0] = held_address("u32", T.cuda.cvta_generic_to_shared(
        s.counts.ptr_to([at.warp * layout.counts + 4])) - T.uint32(4 * MAGIC_BITS & FULL_WARP))


@phase
def count_bins(layout, /, io, at, s):
    """How many elements each bin has.

    Reads: `x`, `top`, `lower`. Writes: `gate`, `fine`, `counts`. Barriers: one before counting, one after it. After:
    bins up to the last but one divide the values from `top` down to that of `lower`, and each has its count.
    """
    s.gate[0] = bits_value(s.lower[0])
    s.fine[0] = T.float32(1 - 2 / layout.bins) / (s.top[0] - s.gate[0])
    if at.lane == 0:
        s.counts[at.warp * layout.counts] = T.reinterpret("int32", s.top[0])
    T.cuda.warp_sync()
    for e in T.unroll(layout.held):
        find_bin(layout)(s, s.x[e])
        T.evaluate(count_in_bin(s, s.bin[0]))
    T.cuda.warp_sync()


@phase
def load_counts(layout, /, at, s, b):
    """Load four of a lane's counts."""
    T.ptx.ld.volatile.shared.v4.s32(
        s.own[0], s.own[1], s.own[2], s.own[3],
        s.counts.ptr_to([at.warp * layout.counts + at.lane * layout.lane_bins + b * 4 + 4]))


@phase
def scan_bins(layout, /, io, at, s):
    """From counts to places, and whether bins will do.

    Reads: `counts`, `fine`.
    Writes: `counts`, `cut`, `size`, `settled`.
    Barriers: two.
    After: a bin's count is how many elements the bins before it have. `cut` is the bin of the k-th largest, and `size`
        elements are in the bins up to it. `settled` if these are not too many to be ranked, in any of their bins.
    """
    lane_bins = T.meta_var(layout.lane_bins)
    above, other = T.meta_var(s.rank), T.meta_var(s.slot)  # elements in the bins before; scratch
    s.settled[0] = 1
    s.size[0] = 0
    for b in T.unroll(lane_bins // 4):
        load_counts(layout)(at, s, b)
        s.size[0] = s.size[0] + folded(added, s.own, 4)
    above[0] = s.size[0]
    scan_lanes(at.lane, above, other)
    # Lanes whose bins end before the k-th element; the cut is in the bins of the next one.
    s.lanes[0] = lanes_with(above[0] < layout.k)
    s.cut[0] = count_lanes(s.lanes[0]) * lane_bins
    above[0] = above[0] - s.size[0]
    s.crowd[0] = 0
    # Loaded again, because there are too few registers to keep them.
    for b in T.unroll(lane_bins // 4):
        load_counts(layout)(at, s, b)
        for v in T.unroll(4):
            s.size[0] = s.own[v]
            if above[0] < layout.k:
                s.crowd[0] = T.max(s.crowd[0], s.size[0])
            s.own[v] = above[0]
            above[0] = above[0] + s.size[0]
        for v in T.vectorized(4):
            s.counts[at.warp * layout.counts + at.lane * lane_bins + (b * 4 + 4) + v] = s.own[v]
    T.cuda.warp_sync()
    s.lanes[0] = lanes_with(
        at.lane < lane_bins and s.counts[
            at.warp * layout.counts + 4 + s.cut[0] + T.min(at.lane, lane_bins - 1)] < layout.k)
    s.cut[0] = s.cut[0] + count_lanes(s.lanes[0]) - 1
    s.size[0] = s.counts[at.warp * layout.counts + 4 + T.min(s.cut[0] + 1, layout.bins - 1)]
    T.cuda.warp_sync()
    if any_lane(s.crowd[0] > CROWD) or s.size[0] > layout.room or s.cut[0] == layout.bins - 1 or (
        s.fine[0] > T.float32(MAX_FINE)
    ):
        s.settled[0] = 0


@phase
def read_back(layout, /, at, s):
    """The maximum anew, so that bins are not kept in registers.

    `top` does not change, but the assembler does not know that. It would keep the bins of all elements since they were
    counted, and there are not enough registers for that; with a `top` that may be another one it finds them again.

    Reads: the free word of `counts`. Writes: `top`.
    """
    T.ptx.ld.volatile.shared.f32(s.top[0], s.counts.ptr_to([at.warp * layout.counts]))


@phase
def fill_bins(layout, /, io, at, s):
    """Write the keys of the bins up to the cut, each into its bin's range.

    Reads: `x`, `top`, `fine`, `cut`.
    Writes: `keys`, `counts`, `gate`, `marks`.
    Barriers: none.
    After: the keys of the bins up to the cut are there bin after bin, in no order within a bin. A bin's count is where
        its keys end.
    """
    find = T.meta_var(find_bin(layout))
    if layout.sparse:
        # A value a little below the cut's bin: all elements of that bin reach it. Elements of later bins that reach it,
        # too, are left out one by one.
        s.gate[0] = s.top[0] - (T.Cast("float32", s.cut[0]) + T.float32(0.75)) / (
            s.fine[0] * T.float32(layout.bins - 1))
        mark_reached(layout)(s)
        for w in T.unroll(layout.mark_words):
            while s.marks[w] != T.uint32(0):
                take_marked(layout)(io, at, s, w)
                find(s, s.value[0])
                s.slot[0] = of_bin("place_in_bin", s, s.bin[0])
                if s.bin[0] <= s.cut[0] + MAGIC_BITS:
                    s.keys[at.keys + s.slot[0]] = join_key(s.ordered[0], s.column[0])
    else:
        read_back(layout)(at, s)
        # Four at a time, so that the loads of their places overlap.
        for u in T.unroll(layout.held // 4):
            for v in T.unroll(4):
                find(s, s.x[u * 4 + v])
                s.own[v] = s.bin[0]
                s.places[v] = of_bin("place_in_bin", s, s.bin[0])
            for v in T.unroll(4):
                order(s.x[u * 4 + v], s.value, s.ordered)
                if s.own[v] <= s.cut[0] + MAGIC_BITS:
                    s.keys[at.keys + s.places[v]] = join_key(s.ordered[0], column_of(layout, at, u * 4 + v))


def rank_in_bins(layout: Layout) -> Phase:
    """Compare each key with the others of its bin, and write it by its rank.

    A key's rank is where its bin begins, plus how many keys of its bin are larger.

    Reads: `keys`, `size`, `counts`.
    Writes: two keys after the last, the values and indices.
    Barriers: one, at the start.
    """
    count, find = count_larger(layout), find_bin(layout)

    @T.inline
    def phase(io, at, s):
        pair, end = T.meta_var(s.slot), T.meta_var(s.cut)  # pairs of keys: the next one, and after the bin's last one
        pad_keys(at, s)
        T.cuda.warp_sync()
        for i in T.serial((s.size[0] - at.lane + 31) // 32):
            s.key[0] = s.keys[at.keys + i * 32 + at.lane]
            find(s, key_value(s.key[0]))
            # The first pair may begin with a key of the bin before. It is larger, and so is counted as one of those.
            pair[0] = of_bin("start_of_bin", s, s.bin[0]) // 2
            s.rank[0] = pair[0] * 2
            end[0] = (of_bin("end_of_bin", s, s.bin[0]) + 1) // 2
            while True:
                count(at, s, pair[0])
                pair[0] = pair[0] + 1
                if pair[0] >= end[0]:
                    break
            if s.rank[0] < layout.k:
                write_key(io, s, s.rank[0], s.key[0])

    return phase
# fmt: on
