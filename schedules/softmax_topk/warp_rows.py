"""Softmax + top-k on a GPU for short rows: a warp a row, the row in registers, and no barrier of a block.

A warp loads its row at once, 16 bytes a lane and load, and everything else is between its own lanes. The maximum is
known before the first exponential, so that nothing is rescaled and no row is read twice.

For k up to `COUNTED`: the k-th largest of the lanes' maxima is a threshold that k elements reach for sure, and few
others in any but unusual rows. These are read again, from the cache, and ranked by counting, every one against every
other.

For larger k all elements are counted in bins that are linear in the value, between the row's maximum and what k of
them reach for sure. A scan over the bins tells where each begins in the order, and in which one the k-th largest is.
What is not below that moves to its bin's place in shared memory, and is ranked among the few that share the bin.

Ties, outliers and infinities can make a bin crowded, or leave too many at the threshold. Then the k-th largest is found
by bisection of the values' bits between two that enclose it, which stops at the first threshold that few enough reach.
Of elements that equal it the first columns are taken. A bitonic sort puts the rest in order.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, ceildiv, powers

from ..device.thresholds import Rank

# Rows, and so warps, of a block.
ROWS = powers(1, 8)
MAX_VOCAB, MAX_K = 2048, 1024
# Up to here k of the lanes' maxima make a threshold; above, what reaches it is too much to rank by counting.
COUNTED = 16
# Room for what reaches that threshold.
COUNTED_ROOM = 128
# Survivors a lane up to which it is cheaper to look for them one by one than to look at every element again.
SPARSE = 0.16
# Threads that a multiprocessor is to hold, which bounds their registers to 64, 96 and 128, by how many of them hold
# elements of the row.
RESIDENT = ((32, 1024), (64, 640), (MAX_VOCAB, 512))
# Larger than any bin, and a float32 that has whole numbers for neighbours: adding it rounds to a bin.
MAGIC = 1 << 23
MAGIC_BITS = 0x4B000000

# Words of CUDA for accesses to bins, whose place `first + 4 * bin` is one instruction away from a bin.
COUNT_IN_BIN = """
__device__ __forceinline__ void count_in_bin(unsigned int first, unsigned int bin) {
  asm volatile("red.shared.add.u32 [%0], 1;" : : "r"(first + 4 * bin) : "memory");
}
"""
# What one instruction gives of a bin: its count before one is added, its count, and that of the bin before.
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


class Layout:
    """How a row lies in a warp's registers, and what it takes of shared memory; static extents."""

    def __init__(self, problem: Problem) -> None:
        from ..device.selection import CROWD

        vocab, k = problem.vocab, problem.k
        self.width = 16 // numpy_dtype(problem.dtype).itemsize  # elements of a vector
        # Rows that are no multiple of 16 bytes begin within a vector.
        self.aligned = vocab % self.width == 0
        row_vectors = ceildiv(vocab + (0 if self.aligned else self.width - 1), self.width)
        self.vectors = ceildiv(row_vectors, 32)  # of a lane
        self.held = self.vectors * self.width
        self.counted = k <= COUNTED
        self.rounded = max(1 << (k - 1).bit_length(), 64)
        # What passes ranking, and what a fallback leaves to be sorted.
        self.room = COUNTED_ROOM if self.counted else k + CROWD
        # Ranking reads keys two at a time.
        self.keys = max(ceildiv(self.room + 2, 4) * 4, self.rounded)
        self.bins = 0 if self.counted else max(128, min(2 * self.rounded, 512), self.rounded)
        # Words for the bins' counts, behind four: the last one says where the first bin begins.
        self.counts = self.bins + 4 if self.bins else 0
        self.bytes = 8 * self.keys + 4 * self.counts
        # At least k elements are no less than the least of the maxima of so many groups of each lane.
        parts = [g for g in range(ceildiv(k, 32), self.held + 1) if self.held % g == 0]
        self.groups = parts[0]
        # So many maxima are found side by side, four at least, for an instruction not to wait for the one before.
        self.tops = next(g for g in parts if g % self.groups == 0 and g >= min(4, self.held))


def space(problem: Problem, machine: Machine) -> Table:
    if problem.vocab > MAX_VOCAB:
        raise NotApplicable(f"vocab={problem.vocab} exceeds {MAX_VOCAB}: a warp would not hold the row in registers")
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: a warp alone would take long to rank them")
    return {"rows": ROWS, "overlap": (int(machine.has_clusters),)}


def default(problem: Problem, machine: Machine) -> Decisions:
    return {"rows": 4, "overlap": int(machine.has_clusters)}


def build(problem: Problem, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..device.arithmetic import LN_2, LOG2_E, is_nan
    from ..device.overlap import await_previous
    from ..device.selection import (
        CROWD,
        FULL_WARP,
        MINUS_INFINITY,
        PLUS_INFINITY,
        below,
        bits_value,
        device_functions,
        join_key,
        key_index,
        key_value,
        order,
        scan_lanes,
    )
    from ..device.words import fixed, load_words, per_word, read_element, value_in
    from .elements import write_given, written_element
    from .interface import gpu_program

    vocab, k, n, dtype = problem.vocab, problem.k, problem.ids, problem.dtype
    with_bias, early, rows = bool(problem.bias), bool(decisions["overlap"]), decisions["rows"]
    layout = Layout(problem)
    width, aligned, vectors, held = layout.width, layout.aligned, layout.vectors, layout.held
    room, rounded, bins, groups = layout.room, layout.rounded, layout.bins, layout.groups
    tops = layout.tops
    counted, parts = layout.counted, per_word(dtype)
    key_stride, count_stride = layout.keys, layout.counts
    sparse = k < SPARSE * vocab
    own_bins = bins // 32  # of a lane
    resident = max(next(most for elements, most in RESIDENT if held <= elements) // (32 * rows), 1)
    threads = 32 * rows
    sums = min(held, 4)  # side by side, too
    words = ceildiv(held, 32)  # of marks, one bit an element
    most = room if counted else rounded  # keys that a bisection may leave
    lowest = T.min_value("float32")
    maxima_of_warp = device_functions(32, k, place=Rank(k, 1, sure=True, most=0)).maxima_of_warp

    def column_of(lane, lead, e):
        """The column of element e of a lane."""
        return (e // width * 32 + lane) * width + e % width - lead

    def ragged(u):
        """Whether some lane's u-th vector may reach beyond the row's end."""
        return (u + 1) * 32 * width > vocab

    def folded(most, x, count, start=0, step=1):
        """The maximum, minimum or sum (`most`) of `count` elements of x from `start` on, `step` apart, as a tree."""
        if count == 1:
            return x[start]
        half = count // 2
        return most(folded(most, x, half, start, step), folded(most, x, count - half, start + half * step, step))

    def added(a, b):
        return a + b

    def total(value):
        return T.call_extern("int32", "__reduce_add_sync", T.uint32(FULL_WARP), value)

    def any_lane(condition):
        return T.cuda.any_sync(T.uint32(FULL_WARP), condition) != 0

    def count_in_bin(first, bin):
        return T.cuda.func_call("count_in_bin", first, bin, source_code=COUNT_IN_BIN, return_type="void")

    def of_bin(name, first, bin):
        return T.cuda.func_call(name, first, bin, source_code=OF_BIN[name], return_type="int32")

    # fmt: off
    @T.inline
    def load_row(io, row, lane, lead, left, raw, small, x):
        """A lane's elements, -inf for what is not of the row."""
        for u in T.unroll(vectors):
            if not ragged(u):
                load_words(16, raw, u * 4, small, io.logits.ptr_to([row, column_of(lane, lead, u * width)]))
            else:
                for w in T.unroll(4):
                    raw[u * 4 + w] = T.uint32(0)
                if column_of(lane, lead, u * width) < vocab and (
                    aligned or column_of(lane, lead, u * width) + width <= left
                ):
                    load_words(16, raw, u * 4, small, io.logits.ptr_to([row, column_of(lane, lead, u * width)]))
        for e in T.unroll(held):
            x[e] = value_in(dtype, raw[e // parts], e % parts)
        # A vector that reaches beyond the array's end, element by element.
        if not aligned and vectors * 32 * width > left:
            for e in T.unroll(held):
                if ragged(e // width):
                    if column_of(lane, lead, e) < vocab and column_of(lane, lead, e // width * width) + width > left:
                        x[e] = read_element(dtype, io.logits.ptr_to([row, column_of(lane, lead, e)]))
        if with_bias:
            for e in T.unroll(held):
                x[e] = x[e] + read_element(
                    "float32", io.bias.ptr_to([T.max(T.min(column_of(lane, lead, e), vocab - 1), 0)]))
        for e in T.unroll(held):
            if ragged(e // width):
                if column_of(lane, lead, e) >= vocab:
                    x[e] = -T.infinity("float32")
            if not aligned and e < width:
                if column_of(lane, lead, e) < 0:
                    x[e] = -T.infinity("float32")

    @T.inline
    def mark(x, gate, bits):
        """One bit for each element that is not below `gate`, as no NaN is."""
        for w in T.unroll(words):
            bits[w] = T.uint32(0)
        for e in T.unroll(held):
            bits[e // 32] = bits[e // 32] | T.Select(
                x[e] < gate[0], T.uint32(0), T.uint32(1) << T.Cast("uint32", e % 32))

    @T.inline
    def read_marked(io, row, lane, lead, w, bits, column, plain, ordered):
        """Take one bit off the w-th word: its column, and the order of its element, read again."""
        column[0] = 31 - T.clz(T.reinterpret("int32", bits[w]))
        bits[w] = bits[w] ^ (T.uint32(1) << T.Cast("uint32", column[0]))
        # From the lane's first element to this one: w * 32 elements of the lane on, then this many.
        column[0] = w * 1024 + column[0] * 32 - column[0] % width * 31
        plain[0] = read_element(dtype, io.logits.ptr_to([row, lane * width - lead + column[0]]))
        column[0] = column[0] + lane * width - lead
        if with_bias:
            plain[0] = plain[0] + read_element("float32", io.bias.ptr_to([column[0]]))
        order(plain[0], plain, ordered)

    @T.inline
    def push_marked(io, row, lane, lead, keys, key_base, bits, column, plain, ordered, lanes, size):
        """The keys of all elements that have their bit, in no order."""
        size[0] = 0
        for w in T.unroll(words):
            lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), bits[w] != T.uint32(0))
            while lanes[0] != T.uint32(0):
                if bits[w] != T.uint32(0):
                    read_marked(io, row, lane, lead, w, bits, column, plain, ordered)
                    keys[key_base + size[0] + below(lane, lanes[0])] = join_key(ordered[0], column[0])
                size[0] = size[0] + T.Cast("int32", T.popcount(lanes[0]))
                lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), bits[w] != T.uint32(0))

    @T.inline
    def write_key(at, rank, key, factor, reference, inverse, logarithm, log, power, plain):
        """One value and its index."""
        T.ptx.st.global_.s64(at[1] + T.Cast("uint64", rank * 8), T.Cast("int64", key_index(key)))
        T.ptx.fma.rn.f32(power[0], key_value(key), factor[0], T.float32(0) - reference[0])
        T.ptx.ex2.approx.ftz.f32(plain[0], power[0])
        T.ptx.st.global_.f32(
            at[0] + T.Cast("uint64", rank * 4),
            T.Select(log != 0, power[0] * T.float32(LN_2) - logarithm[0], plain[0] * inverse[0]))

    @T.inline
    def count_above(ordered_row, bound, count):
        """How many elements are above the one of these bits."""
        count[0] = 0
        for e in T.unroll(held):
            if ordered_row[e] > bound:
                count[0] = count[0] + 1
        count[0] = total(count[0])

    @T.inline
    def bisect(x, d, lower, upper, plain, ordered, ordered_row, count, equals):
        """Raise `lower` until at most `most` elements are above it, or fewer than k because it is the k-th largest.

        At least k elements are no less than `lower`, and fewer than k of those that are no NaN above `upper`. `equals`:
        how many of the elements that equal it are wanted.
        """
        middle = T.alloc_local([1], "uint32")
        reached = T.alloc_local([1], "int32")
        # As integers, because comparing floats takes the smallest for 0.
        for e in T.unroll(held):
            order(x[e], plain, ordered)
            ordered_row[e] = ordered[0]
        count[0] = 0
        if is_nan(d[0]):
            upper[0] = T.uint32(PLUS_INFINITY)
            count_above(ordered_row, upper[0], count)
        if count[0] >= k:
            lower[0] = T.uint32(FULL_WARP)
            equals[0] = k
        else:
            count_above(ordered_row, lower[0], count)
            equals[0] = k - count[0]
            if equals[0] <= 0:
                equals[0] = 0
                while count[0] > most and upper[0] - lower[0] > T.uint32(1):
                    middle[0] = lower[0] + ((upper[0] - lower[0]) >> T.uint32(1))
                    count_above(ordered_row, middle[0], reached)
                    if reached[0] >= k:
                        lower[0] = middle[0]
                        count[0] = reached[0]
                    else:
                        upper[0] = middle[0]
                if count[0] > most:
                    lower[0] = upper[0]
                    count_above(ordered_row, lower[0], count)
                    equals[0] = k - count[0]

    @T.inline
    def push_selected(io, row, lane, keys, key_base, lower, equals, plain, ordered, lanes, slot, size, above):
        """The keys of all elements above `lower`, and behind them of the first `equals` that equal it."""
        above[0] = 0
        size[0] = k - equals[0]
        i: T.int32 = 0
        while i * 32 < vocab and (equals[0] == 0 or size[0] < k or above[0] < k - equals[0]):
            ordered[0] = T.uint32(0)
            if i * 32 + lane < vocab:
                order(written_element(io, row, i * 32 + lane), plain, ordered)
            lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), ordered[0] > lower[0])
            if ordered[0] > lower[0]:
                keys[key_base + above[0] + below(lane, lanes[0])] = join_key(ordered[0], i * 32 + lane)
            above[0] = above[0] + T.Cast("int32", T.popcount(lanes[0]))
            lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), ordered[0] == lower[0])
            slot[0] = size[0] + below(lane, lanes[0])
            if ordered[0] == lower[0] and slot[0] < k:
                keys[key_base + slot[0]] = join_key(ordered[0], i * 32 + lane)
            size[0] = size[0] + T.Cast("int32", T.popcount(lanes[0]))
            i = i + 1
        size[0] = T.Select(equals[0] > 0, k, above[0])

    @T.inline
    def sort_keys(lane, keys, key_base):
        """Bitonic sort of `rounded` keys, the largest first."""
        for p in T.serial(rounded.bit_length() - 1):
            for q in T.serial(p + 1):
                for i in T.serial(rounded // 64):
                    # The pair's lower place: a 0 put in front of bit p - q of the pair's number.
                    low: T.int32 = (((i * 32 + lane) >> (p - q)) << (p - q + 1)) | (
                        (i * 32 + lane) & ((1 << (p - q)) - 1))
                    own: T.uint64 = keys[key_base + low]
                    other: T.uint64 = keys[key_base + low + (1 << (p - q))]
                    if (own < other) == ((low >> (p + 1)) & 1 == 0):
                        keys[key_base + low] = other
                        keys[key_base + low + (1 << (p - q))] = own
                T.cuda.warp_sync()

    @T.inline
    def pad_keys(lane, keys, key_base, size):
        """An even number of keys is read."""
        if lane < 2:
            keys[key_base + size[0] + lane] = T.uint64(0)

    @T.inline
    def count_larger(keys, warp, j, own, pair, rank):
        """Add to `rank` how many of the j-th two keys are larger."""
        for v in T.vectorized(2):
            pair[v] = keys[warp * key_stride + j * 2 + v]
        rank[0] = rank[0] + (
            T.Select(pair[0] > own[0], T.int32(1), T.int32(0)) + T.Select(pair[1] > own[0], T.int32(1), T.int32(0)))

    @T.inline
    def find_bin(x, high, fine, plain, bin):
        """The bin of a value, plus MAGIC_BITS: linear from `high` down, the last one for all below the range.

        Never larger for a larger element, whatever `high` and `fine` are: what is NaN here goes to bin 0.
        """
        T.ptx.sub.rn.f32(plain[0], high[0], x)
        T.ptx.fma.rn.f32(
            plain[0], T.call_extern("float32", "__saturatef", plain[0] * fine[0]), T.float32(bins - 1),
            T.float32(MAGIC))
        bin[0] = T.reinterpret("int32", plain[0])

    @T.inline
    def read_back(warp, counts, high):
        """What `high` is already, but unknown to the assembler: it would keep all bins, for which registers lack."""
        T.ptx.ld.volatile.shared.f32(high[0], counts.ptr_to([warp * count_stride]))

    @T.inline
    def least_finite(x, plain, ordered, least):
        """The order of the smallest element above minus infinity."""
        plain[0] = T.infinity("float32")
        for e in T.unroll(held):
            if x[e] > -T.infinity("float32"):
                plain[0] = T.min(plain[0], x[e])
        order(plain[0], plain, ordered)
        least[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), ordered[0])

    @T.inline
    def clear_bins(lane, warp, counts):
        for b in T.unroll(own_bins // 4):
            for v in T.vectorized(4):
                counts[warp * count_stride + (b * 32 + lane) * 4 + 4 + v] = 0
        if lane == 0:
            counts[warp * count_stride + 3] = 0

    @T.inline
    def load_counts(lane, warp, counts, b, own):
        T.ptx.ld.volatile.shared.v4.s32(
            own[0], own[1], own[2], own[3], counts.ptr_to([warp * count_stride + lane * own_bins + b * 4 + 4]))

    @T.inline
    def scan_bins(lane, warp, counts, own, cut, size, crowd, lanes, above, other):
        """Turn counts into where bins begin in the order, and find the bin of the k-th: `size` keys are up to its end.

        `crowd`: the most keys of one of these bins, in each lane's part.
        """
        size[0] = 0
        for b in T.unroll(own_bins // 4):
            load_counts(lane, warp, counts, b, own)
            size[0] = size[0] + folded(added, own, 4)
        above[0] = size[0]
        scan_lanes(lane, above, other)
        # The first lane whose last bin ends at the k-th or behind.
        lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), above[0] < k)
        cut[0] = T.Cast("int32", T.popcount(lanes[0])) * own_bins
        above[0] = above[0] - size[0]
        crowd[0] = 0
        # Loaded again, because registers are short here.
        for b in T.unroll(own_bins // 4):
            load_counts(lane, warp, counts, b, own)
            for v in T.unroll(4):
                size[0] = own[v]
                if above[0] < k:
                    crowd[0] = T.max(crowd[0], size[0])
                own[v] = above[0]
                above[0] = above[0] + size[0]
            for v in T.vectorized(4):
                counts[warp * count_stride + lane * own_bins + (b * 4 + 4) + v] = own[v]
        T.cuda.warp_sync()
        lanes[0] = T.cuda.ballot_sync(
            T.uint32(FULL_WARP), lane < own_bins and counts[
                warp * count_stride + 4 + cut[0] + T.min(lane, own_bins - 1)] < k)
        cut[0] = cut[0] + T.Cast("int32", T.popcount(lanes[0])) - 1
        size[0] = counts[warp * count_stride + 4 + T.min(cut[0] + 1, bins - 1)]
        T.cuda.warp_sync()

    @T.inline
    def body(io):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": resident})
        block = T.cta_id([(io.batch + (rows - 1)) // rows])
        t = T.thread_id([threads])
        pool = T.alloc_buffer([rows * layout.bytes // 8], "uint64", scope="shared.dyn")
        keys = T.decl_buffer([rows * key_stride], "uint64", data=pool.data, scope="shared.dyn")
        if not counted:
            counts = T.decl_buffer(
                [rows * count_stride], "int32", data=pool.data, elem_offset=2 * rows * key_stride, scope="shared.dyn")
            own_counts = T.alloc_local([4], "int32")
            first = T.alloc_local([1], "uint32")  # where the bin that is MAGIC_BITS above 0 would be
            places = T.alloc_local([4], "int32")
        raw = T.alloc_local([4 * vectors], "uint32")
        small = T.alloc_local([1], "uint16")
        x = T.alloc_local([held], "float32")
        ordered_row = T.alloc_local([held], "uint32")
        powers_of = T.alloc_local([sums], "float32")
        d = T.alloc_local([1], "float32")
        power = T.alloc_local([1], "float32")
        plain = T.alloc_local([1], "float32")
        factor = T.alloc_local([1], "float32")
        high = T.alloc_local([1], "float32")
        reference = T.alloc_local([1], "float32")
        gate = T.alloc_local([1], "float32")
        fine = T.alloc_local([1], "float32")
        summit = T.alloc_local([1], "float32")
        inverse = T.alloc_local([1], "float32")
        logarithm = T.alloc_local([1], "float32")
        maxima = T.alloc_local([tops], "float32")
        bits = T.alloc_local([words], "uint32")
        ordered = T.alloc_local([1], "uint32")
        called = T.alloc_local([1], "uint32")
        lower = T.alloc_local([1], "uint32")
        upper = T.alloc_local([1], "uint32")
        lanes = T.alloc_local([1], "uint32")
        column = T.alloc_local([1], "int32")
        size = T.alloc_local([1], "int32")
        slot = T.alloc_local([1], "int32")
        cut = T.alloc_local([1], "int32")
        bin = T.alloc_local([1], "int32")
        crowd = T.alloc_local([1], "int32")
        rank = T.alloc_local([1], "int32")
        equals = T.alloc_local([1], "int32")
        key = T.alloc_local([1], "uint64")
        pair = T.alloc_local([2], "uint64")
        settled = T.alloc_local([1], "int32")
        at = T.alloc_local([2], "uint64")  # where the row's values and indices go
        wanted = T.alloc_local([1], "int64")
        lane: T.int32 = t % 32
        warp: T.int32 = t // 32
        # Offsets into the logits pass 2^31.
        row: T.int64 = T.Cast("int64", block) * T.int64(rows) + T.Cast("int64", warp)
        # Elements of the row before in its first vector.
        lead: T.int32 = 0 if aligned else T.Cast("int32", (row * vocab) % width)
        # Elements from this row on to the array's end, or enough of them.
        left: T.int32 = T.Cast("int32", T.min(T.Cast("int64", io.batch) - row, T.int64(width + 1))) * vocab
        key_base: T.int32 = warp * key_stride
        factor[0] = io.scale * T.float32(LOG2_E)
        if not counted:
            clear_bins(lane, warp, counts)
            first[0] = fixed("u32", T.cuda.cvta_generic_to_shared(counts.ptr_to([warp * count_stride + 4])) - T.uint32(
                4 * MAGIC_BITS & FULL_WARP))
        if early:
            await_previous()
        if row >= T.Cast("int64", io.batch):
            T.thread_return()
        load_row(io, row, lane, lead, left, raw, small, x)
        for e in T.unroll(held):
            if e < tops:
                maxima[e] = x[e]
            else:
                T.ptx.max.f32(maxima[e % tops], maxima[e % tops], x[e])
        for e in T.unroll(tops - groups):
            T.ptx.max.f32(maxima[e % groups], maxima[e % groups], maxima[groups + e])
        high[0] = maxima[0]
        for g in T.unroll(groups - 1):
            T.ptx.max.f32(high[0], high[0], maxima[1 + g])
        order(high[0], plain, ordered)
        if counted:
            # A threshold that is no higher than the k-th largest.
            maxima_of_warp(lane, ordered, called, lower)
        else:
            called[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), ordered[0])
            if groups > 1:
                order(folded(T.min, maxima, groups), plain, ordered)
            lower[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), ordered[0])
            if lower[0] <= T.uint32(MINUS_INFINITY):
                least_finite(x, plain, ordered, lower)
        high[0] = bits_value(called[0])
        reference[0] = high[0] * factor[0]
        for e in T.unroll(held):
            # One rounding, so that the reference cancels in the quotient; and without the steps that exp2 takes for
            # subnormal results, which add nothing to a sum of about 1 or more.
            T.ptx.fma.rn.f32(power[0], x[e], factor[0], T.float32(0) - reference[0])
            T.ptx.ex2.approx.ftz.f32(power[0], power[0])
            if e < sums:
                powers_of[e] = power[0]
            else:
                powers_of[e % sums] = powers_of[e % sums] + power[0]
        d[0] = T.cuda.warp_sum(folded(added, powers_of, sums))
        T.ptx.rcp.approx.ftz.f32(inverse[0], d[0])
        logarithm[0] = T.float32(0)
        if io.log != 0:
            logarithm[0] = T.log(d[0])

        at[0] = fixed("u64", io.values.ptr_to([row, 0]))
        at[1] = fixed("u64", io.indices.ptr_to([row, 0]))
        settled[0] = 1
        if counted:
            gate[0] = T.max(bits_value(T.min(lower[0], T.uint32(PLUS_INFINITY))), lowest)
            mark(x, gate, bits)
            size[0] = 0
            for w in T.unroll(words):
                size[0] = size[0] + T.Cast("int32", T.popcount(bits[w]))
            size[0] = total(size[0])
            if size[0] < k or size[0] > room:
                settled[0] = 0
            else:
                push_marked(io, row, lane, lead, keys, key_base, bits, column, plain, ordered, lanes, size)
        else:
            gate[0] = bits_value(lower[0])
            fine[0] = T.float32(1 - 2 / bins) / (high[0] - gate[0])
            if lane == 0:
                counts[warp * count_stride] = T.reinterpret("int32", high[0])
            T.cuda.warp_sync()
            for e in T.unroll(held):
                find_bin(x[e], high, fine, plain, bin)
                T.evaluate(count_in_bin(first[0], bin[0]))
            T.cuda.warp_sync()
            scan_bins(lane, warp, counts, own_counts, cut, size, crowd, lanes, rank, slot)
            if any_lane(crowd[0] > CROWD) or size[0] > room or cut[0] == bins - 1 or (
                # So small a range that what is computed from it is lost below the smallest float32.
                fine[0] > T.float32(1e30)
            ):
                settled[0] = 0
            else:
                if sparse:
                    # Not above any element of the bins up to the cut; others are told apart one by one.
                    gate[0] = high[0] - (T.Cast("float32", cut[0]) + T.float32(0.75)) / (
                        fine[0] * T.float32(bins - 1))
                    mark(x, gate, bits)
                    for w in T.unroll(words):
                        while bits[w] != T.uint32(0):
                            read_marked(io, row, lane, lead, w, bits, column, plain, ordered)
                            find_bin(plain[0], high, fine, plain, bin)
                            slot[0] = of_bin("place_in_bin", first[0], bin[0])
                            if bin[0] <= cut[0] + MAGIC_BITS:
                                keys[key_base + slot[0]] = join_key(ordered[0], column[0])
                else:
                    read_back(warp, counts, high)
                    for u in T.unroll(held // 4):
                        for v in T.unroll(4):
                            find_bin(x[u * 4 + v], high, fine, plain, bin)
                            own_counts[v] = bin[0]
                            places[v] = of_bin("place_in_bin", first[0], bin[0])
                        for v in T.unroll(4):
                            order(x[u * 4 + v], plain, ordered)
                            if own_counts[v] <= cut[0] + MAGIC_BITS:
                                keys[key_base + places[v]] = join_key(ordered[0], column_of(lane, lead, u * 4 + v))

        if settled[0] == 0:
            if counted:
                lower[0] = T.max(lower[0], T.uint32(MINUS_INFINITY))
                upper[0] = called[0]
            else:
                # The k-th largest is in the bin at the cut.
                read_back(warp, counts, high)
                gate[0] = T.infinity("float32")
                summit[0] = -T.infinity("float32")
                for e in T.unroll(held):
                    find_bin(x[e], high, fine, plain, bin)
                    if bin[0] == cut[0] + MAGIC_BITS:
                        T.ptx.min.f32(gate[0], gate[0], x[e])
                        T.ptx.max.f32(summit[0], summit[0], x[e])
                order(gate[0], plain, ordered)
                lower[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), ordered[0])
                order(summit[0], plain, ordered)
                upper[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), ordered[0])
            bisect(x, d, lower, upper, plain, ordered, ordered_row, rank, equals)
            push_selected(io, row, lane, keys, key_base, lower, equals, plain, ordered, lanes, slot, size, cut)
            if not counted:
                for i in T.serial((rounded - size[0] - lane + 31) // 32):
                    keys[key_base + size[0] + i * 32 + lane] = T.uint64(0)
                T.cuda.warp_sync()
                # Elements that are all equal are in order already.
                if cut[0] > 0:
                    sort_keys(lane, keys, key_base)
                for i in T.serial((k - lane + 31) // 32):
                    write_key(
                        at, i * 32 + lane, keys[key_base + i * 32 + lane], factor, reference, inverse,
                        logarithm, io.log, power, plain)
        if counted:
            pad_keys(lane, keys, key_base, size)
            T.cuda.warp_sync()
            for i in T.serial((size[0] + 31) // 32):
                key[0] = keys[key_base + T.min(i * 32 + lane, size[0])]
                rank[0] = 0
                for j in T.serial((size[0] + 1) // 2):
                    count_larger(keys, warp, j, key, pair, rank)
                if i * 32 + lane < size[0] and rank[0] < k:
                    write_key(
                        at, rank[0], key[0], factor, reference, inverse, logarithm, io.log, power, plain)
        else:
            if settled[0] != 0:
                pad_keys(lane, keys, key_base, size)
                T.cuda.warp_sync()
                for i in T.serial((size[0] - lane + 31) // 32):
                    key[0] = keys[key_base + i * 32 + lane]
                    find_bin(key_value(key[0]), high, fine, plain, bin)
                    # A key of the bin before, which may be the first of a pair, is larger.
                    slot[0] = of_bin("start_of_bin", first[0], bin[0]) // 2
                    rank[0] = slot[0] * 2
                    cut[0] = (of_bin("end_of_bin", first[0], bin[0]) + 1) // 2
                    while True:
                        count_larger(keys, warp, slot[0], key, pair, rank)
                        slot[0] = slot[0] + 1
                        if slot[0] >= cut[0]:
                            break
                    if rank[0] < k:
                        write_key(
                            at, rank[0], key[0], factor, reference, inverse, logarithm, io.log, power, plain)
        if n > 0:
            for i in T.serial((n - lane + 31) // 32):
                T.ptx.ld.global_.s64(wanted[0], io.ids.ptr_to([row, i * 32 + lane]))
                column[0] = T.Cast("int32", T.max(T.min(wanted[0], T.int64(vocab - 1)), T.int64(0)))
                write_given(
                    io.given, row, i * 32 + lane, wanted[0], vocab,
                    (written_element(io, row, column[0]) * factor[0] - reference[0]) * T.float32(LN_2),
                    inverse[0], logarithm[0], io.log)
    # fmt: on
    return gpu_program(problem, body, overlapped=early)


warp_rows = Template(
    name="warp_rows",
    version=1,
    operator="softmax_topk",
    kind="cuda",
    summary="a warp a row, which its registers hold; survivors are ranked by counting or in bins",
    space=space,
    default=default,
    program=build,
    explicit_threads=True,
)
