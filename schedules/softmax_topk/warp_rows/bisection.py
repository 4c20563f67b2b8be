"""Where a threshold or bins leave too many: the k-th largest is found by halving an interval that encloses it."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.arithmetic import is_nan
from ...device.selection import FULL_WARP, MINUS_INFINITY, PLUS_INFINITY, below, join_key, lanes_sum, order
from ..elements import written_element
from .bins import MAGIC_BITS, find_bin, read_back
from .results import write_key
from .state import count_lanes, lanes_max, lanes_min, lanes_with


# fmt: off
@phase
def enclose_by_lanes(layout, /, io, at, s):
    """For small k: the interval to begin with.

    Reads: `lower`, `top_bits`.
    Writes: `lower`, `upper`.
    Barriers: none.
    After: the interval from `lower` to `upper` encloses the k-th largest, unless that is a NaN.
    """
    s.lower[0] = T.max(s.lower[0], T.uint32(MINUS_INFINITY))
    s.upper[0] = s.top_bits[0]


@phase
def enclose_by_bin(layout, /, io, at, s):
    """For larger k: the interval to begin with is the bin at the cut.

    Reads: `x`, `cut`, `fine`, `top`.
    Writes: `lower`, `upper`.
    Barriers: none.
    After: `lower` and `upper` are the least and the largest element of the bin at the cut, which has the k-th largest.
    """
    least, largest = T.meta_var(s.gate), T.meta_var(s.high)
    read_back(layout)(at, s)
    least[0] = T.infinity("float32")
    largest[0] = -T.infinity("float32")
    for e in T.unroll(layout.held):
        find_bin(layout)(s, s.x[e])
        if s.bin[0] == s.cut[0] + MAGIC_BITS:
            T.ptx.min.f32(least[0], least[0], s.x[e])
            T.ptx.max.f32(largest[0], largest[0], s.x[e])
    order(least[0], s.value, s.ordered)
    s.lower[0] = lanes_min(s.ordered[0])
    order(largest[0], s.value, s.ordered)
    s.upper[0] = lanes_max(s.ordered[0])


@phase
def count_above(layout, /, s, bound, count):
    """How many elements of the row are above a bound, in all lanes."""
    count[0] = 0
    for e in T.unroll(layout.held):
        if s.ordered_row[e] > bound:
            count[0] = count[0] + 1
    count[0] = lanes_sum(count[0])


@phase
def bisect(layout, /, io, at, s):
    """Halve the interval until few enough elements are above its lower end.

    Before: at least k elements are no less than `lower`, and fewer than k that are no NaN are above `upper`.
    Reads: `x`, `d`, `lower`, `upper`.
    Writes: `lower`, `upper`, `equals`.
    Barriers: none.
    After: at most `selected` elements are above `lower`. If these are fewer than k, `lower` is the k-th largest, and
        `equals` of the elements that equal it complete the k; else `equals` is 0.
    """
    k = T.meta_var(layout.k)
    above = T.meta_var(s.rank)  # how many elements are above `lower`
    middle = T.alloc_local([1], "uint32")
    reached = T.alloc_local([1], "int32")
    # Compared as integers, because comparisons of floats take subnormal numbers for 0.
    for e in T.unroll(layout.held):
        order(s.x[e], s.value, s.ordered)
        s.ordered_row[e] = s.ordered[0]
    above[0] = 0
    # A NaN makes the sum NaN (so does an infinity, which does no harm here).
    if is_nan(s.d[0]):
        s.upper[0] = T.uint32(PLUS_INFINITY)
        count_above(layout)(s, s.upper[0], above)
    if above[0] >= k:
        # All of the k largest are NaN.
        s.lower[0] = T.uint32(FULL_WARP)
        s.equals[0] = k
    else:
        count_above(layout)(s, s.lower[0], above)
        s.equals[0] = k - above[0]
        if s.equals[0] <= 0:
            s.equals[0] = 0
            while above[0] > layout.selected and s.upper[0] - s.lower[0] > T.uint32(1):
                middle[0] = s.lower[0] + ((s.upper[0] - s.lower[0]) >> T.uint32(1))
                count_above(layout)(s, middle[0], reached)
                if reached[0] >= k:
                    s.lower[0] = middle[0]
                    above[0] = reached[0]
                else:
                    s.upper[0] = middle[0]
            if above[0] > layout.selected:
                s.lower[0] = s.upper[0]
                count_above(layout)(s, s.lower[0], above)
                s.equals[0] = k - above[0]


@phase
def collect_selected(layout, /, io, at, s):
    """Collect the keys of the elements that the bisection has selected.

    Reads: the logits again, `lower`, `equals`.
    Writes: `keys`, `size`, `cut`.
    Barriers: none.
    After: `keys` has those of all elements above `lower`, of which there are `cut`, and after them those of the first
        `equals` that equal it, by their columns.
    """
    k = T.meta_var(layout.k)
    above = T.meta_var(s.cut)
    above[0] = 0
    s.size[0] = k - s.equals[0]
    i: T.int32 = 0
    while i * 32 < layout.vocab and (s.equals[0] == 0 or s.size[0] < k or above[0] < k - s.equals[0]):
        s.ordered[0] = T.uint32(0)
        if i * 32 + at.lane < layout.vocab:
            order(written_element(io, at.row, i * 32 + at.lane), s.value, s.ordered)
        s.lanes[0] = lanes_with(s.ordered[0] > s.lower[0])
        if s.ordered[0] > s.lower[0]:
            s.keys[at.keys + above[0] + below(at.lane, s.lanes[0])] = join_key(s.ordered[0], i * 32 + at.lane)
        above[0] = above[0] + count_lanes(s.lanes[0])
        s.lanes[0] = lanes_with(s.ordered[0] == s.lower[0])
        s.slot[0] = s.size[0] + below(at.lane, s.lanes[0])
        if s.ordered[0] == s.lower[0] and s.slot[0] < k:
            s.keys[at.keys + s.slot[0]] = join_key(s.ordered[0], i * 32 + at.lane)
        s.size[0] = s.size[0] + count_lanes(s.lanes[0])
        i = i + 1
    s.size[0] = T.Select(s.equals[0] > 0, k, above[0])


@phase
def bitonic_sort(layout, /, at, s):
    """Sort the keys in descending order."""
    for p in T.serial(layout.sorted_keys.bit_length() - 1):
        for q in T.serial(p + 1):
            for i in T.serial(layout.sorted_keys // 64):
                # The lower place of the pair: the pair's number with a 0 inserted before bit p - q.
                low: T.int32 = (((i * 32 + at.lane) >> (p - q)) << (p - q + 1)) | (
                    (i * 32 + at.lane) & ((1 << (p - q)) - 1))
                own: T.uint64 = s.keys[at.keys + low]
                other: T.uint64 = s.keys[at.keys + low + (1 << (p - q))]
                if (own < other) == ((low >> (p + 1)) & 1 == 0):
                    s.keys[at.keys + low] = other
                    s.keys[at.keys + low + (1 << (p - q))] = own
            T.cuda.warp_sync()


@phase
def sort_keys(layout, /, io, at, s):
    """Sort the keys, for larger k.

    Reads: `keys`, `size`, `cut`.
    Writes: `keys`.
    Barriers: one, and one for each step of the sort.
    After: `keys` are in descending order, with zeros after the last.
    """
    for i in T.serial((layout.sorted_keys - s.size[0] - at.lane + 31) // 32):
        s.keys[at.keys + s.size[0] + i * 32 + at.lane] = T.uint64(0)
    T.cuda.warp_sync()
    # The keys of elements that are all equal are already in order.
    if s.cut[0] > 0:
        bitonic_sort(layout)(at, s)


@phase
def write_sorted(layout, /, io, at, s):
    """Write the first k keys to the outputs.

    Reads: the first k of `keys`. Writes: the values and indices. Barriers: none.
    """
    for i in T.serial((layout.k - at.lane + 31) // 32):
        write_key(io, s, i * 32 + at.lane, s.keys[at.keys + i * 32 + at.lane])
# fmt: on
