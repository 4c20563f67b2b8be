"""A word of a whole row, where the k best do not decide: weighted radix selection.

Words have *masses*: their exponentials, relative to the row's largest, as whole numbers in units of 2^-`unit_bits`.
Sums of these are exact in any order, so that atomics may add them, and a row gives the same word whatever the threads.
A word below one unit is never drawn.

The first word of the order up to which there is a mass of `need` is found by histograms of masses (`locate`): one over
*slices*, equal parts of the logarithmic scale of probability, so that atomics seldom meet, which is made once; and then
one for each digit of the order bits of the words in a slice. That is done once for top-p, where `need` is its share of
the row's mass, and once for the word, where it is the uniform number's share of what is left. A search ends with a
group of equal words, of which one more pass finds the right one by its column.

Phases are called with (io, row, t, s): as `Ending.finish`, with the state of the search. They are made for a *crew*:
the threads of a block, or the one of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from ..device.arithmetic import LN_2, LOG2_E, exp_nonpositive
from ..device.selection import FULL_WARP, RADIX_BINS, RADIX_BITS, below, order_bits, scan_lanes
from ..device.state import named
from ..softmax_topk.elements import element, written_element

# Elements that a thread loads before it uses the first.
LOADS = 4
# Bits of order bits that tell elements of a dtype apart: the others follow from these.
ORDER_BITS = {"float32": 32, "float16": 24, "bfloat16": 16}
# What `Crew.find` leaves in `State.found`; bins are counted from the last one on.
BIN, BEFORE, MASS, COUNT = range(4)
# Where bins begin: those of slices, which are kept, and those of digits and columns.
SLICES, OTHERS = 0, RADIX_BINS
# Slices of an octave of probability. The last of them all has what is left.
OF_OCTAVE = 8


@dataclass(frozen=True)
class State:
    """What a search has in shared memory (on a CPU in the thread's), and a thread in registers."""

    masses: tirx.Buffer  # shared: of each bin
    counts: tirx.Buffer  # shared: how many words each bin has
    found: tirx.Buffer  # shared: what `Crew.find` finds: the bin, the mass before it, its own, its words
    sums: tirx.Buffer  # shared: the row's mass, and that of the words that min-p leaves
    x: tirx.Buffer  # elements
    top: tirx.Buffer  # the row's largest
    best: tirx.Buffer  # its log-probability
    factor: tirx.Buffer  # scale * log2(e)
    least: tirx.Buffer  # the least exponential that min-p leaves
    power: tirx.Buffer  # an exponential
    bits: tirx.Buffer  # order bits
    slice: tirx.Buffer  # in which the group lies
    prefix: tirx.Buffer  # the digits of its order bits that are known
    mask: tirx.Buffer  # which bits these are
    part: tirx.Buffer  # the thread's part of the sums
    mass: tirx.Buffer
    other: tirx.Buffer  # scratch
    need: tirx.Buffer  # the mass that is to be reached
    above: tirx.Buffer  # the mass of the words before the group
    left: tirx.Buffer  # the mass of all that is left
    shift: tirx.Buffer  # of the digit in hand
    rank: tirx.Buffer  # a number within the group

    @classmethod
    def alloc(cls, shared: Callable[..., Any], local: Callable[..., Any]) -> State:
        return named(
            cls(
                masses=shared((2 * RADIX_BINS,), "uint64"),
                counts=shared((2 * RADIX_BINS,), "int32"),
                found=shared((4,), "uint64"),
                sums=shared((2,), "uint64"),
                x=local((LOADS,), "float32"),
                top=local((1,), "float32"),
                best=local((1,), "float32"),
                factor=local((1,), "float32"),
                least=local((1,), "float32"),
                power=local((1,), "float32"),
                bits=local((1,), "uint32"),
                slice=local((1,), "int32"),
                prefix=local((1,), "uint32"),
                mask=local((1,), "uint32"),
                part=local((2,), "uint64"),
                mass=local((1,), "uint64"),
                other=local((1,), "uint64"),
                need=local((1,), "uint64"),
                above=local((1,), "uint64"),
                left=local((1,), "uint64"),
                shift=local((1,), "uint32"),
                rank=local((1,), "uint64"),
            )
        )


@dataclass(frozen=True)
class Crew:
    """The threads that go through a row together.

    Attributes
    ----------
    threads
        How many they are.
    alloc
        () -> their `State`.
    element
        (io, row, column) -> an element.
    exponential
        (s, x) -> that of an element, relative to the row's largest. Reads `top`, `factor`.
    meet
        Their barrier.
    add, count
        (s, at) -> `s.mass` to a bin's mass; 1 to how many words it has.
    add_part
        (s, t, i) -> the threads' `s.part[i]` to `s.sums[i]`.
    find
        (s, t, start): in which of the bins from `start` on, the last one first, a mass of `s.need` is reached. Reads
        `masses`, `counts`, `above`, writes `found`.
    pick
        (io, row, t, s, first, last, matches): the `s.rank`-th of the columns from `first` to `last` that match becomes
        the token.
    """

    threads: int
    alloc: Callable[[], State]
    element: Callable[[Any, Any, Any], tirx.PrimExpr]
    exponential: Callable[[State, Any], tirx.PrimExpr]
    meet: Callable[[], Any]
    add: Callable[..., Any]
    count: Callable[..., Any]
    add_part: Callable[..., Any]
    find: Callable[..., Any]
    pick: Callable[..., Any]


def unit_bits(vocab: int) -> int:
    """The row's largest word has a mass of 2 to this power, so that sums over a row stay below 2^62."""
    return min(40, 62 - vocab.bit_length())


def column(crew: Crew, t: Any, j: Any, u: Any) -> tirx.PrimExpr:
    """The u-th column of a thread's j-th step."""
    return (j * LOADS + u) * crew.threads + t


# fmt: off
def load(crew: Crew, vocab: int) -> Callable[..., Any]:
    """The elements of a thread's j-th step; the phase is (io, row, t, s, j). Writes: `x`, -inf behind the row."""

    @T.inline
    def phase(io, row, t, s, j):
        for u in T.unroll(LOADS):
            s.x[u] = -T.infinity("float32")
            if column(crew, t, j, u) < vocab:
                s.x[u] = crew.element(io, row, column(crew, t, j, u))

    return phase


def weigh(crew: Crew, vocab: int) -> Callable[..., Any]:
    """The mass of an element; the phase is (s, x). Reads: `top`, `factor`. Writes: `power`, `mass`."""

    @T.inline
    def phase(s, x):
        s.power[0] = crew.exponential(s, x)
        s.mass[0] = T.Cast("uint64", s.power[0] * T.float32(2.0 ** unit_bits(vocab)))

    return phase


def slice_of(s: State, x: Any) -> tirx.PrimExpr:
    """The number of an element's slice, which does not fall from a larger element to a smaller one."""
    octaves = (s.top[0] - x) * s.factor[0]
    return T.Cast("int32", T.min(octaves * T.float32(OF_OCTAVE), T.float32(RADIX_BINS - 1)))


def agrees(s: State, x: Any) -> tirx.PrimExpr:
    """Whether an element agrees with what is known of the group."""
    return T.And(slice_of(s, x) == s.slice[0], (order_bits(x) ^ s.prefix[0]) & s.mask[0] == T.uint32(0))


def count_slices(crew: Crew, vocab: int) -> Callable[..., Any]:
    """The masses of the row, of what min-p leaves of it, and of each slice.

    Reads: the row, `top`, `factor`, `least`.
    Writes: `sums`; `masses` and `counts` of slices; scratch.
    Barriers: two.
    """
    loaded, weighed, steps = load(crew, vocab), weigh(crew, vocab), ceildiv(vocab, LOADS * crew.threads)
    cleared = clear(crew)

    @T.inline
    def phase(io, row, t, s):
        cleared(s, t, SLICES)
        if t == 0:
            s.sums[0] = T.uint64(0)
            s.sums[1] = T.uint64(0)
        crew.meet()
        s.part[0] = T.uint64(0)
        s.part[1] = T.uint64(0)
        for j in T.serial(steps):
            loaded(io, row, t, s, j)
            for u in T.unroll(LOADS):
                weighed(s, s.x[u])
                if s.mass[0] > T.uint64(0):
                    s.part[0] = s.part[0] + s.mass[0]
                    if s.power[0] >= s.least[0]:
                        s.part[1] = s.part[1] + s.mass[0]
                    # Bins are gone through from the last on.
                    s.slice[0] = slice_of(s, s.x[u])
                    crew.add(s, SLICES + (RADIX_BINS - 1) - s.slice[0])
                    crew.count(s, SLICES + (RADIX_BINS - 1) - s.slice[0])
        crew.add_part(s, t, 0)
        crew.add_part(s, t, 1)
        crew.meet()

    return phase


def clear(crew: Crew) -> Callable[..., Any]:
    """Empty bins from `start` on; the phase is (s, t, start). Barriers: none."""

    @T.inline
    def phase(s, t, start):
        for i in T.serial((RADIX_BINS - 1 - t + crew.threads) // crew.threads):
            s.masses[start + i * crew.threads + t] = T.uint64(0)
            s.counts[start + i * crew.threads + t] = 0

    return phase


@T.inline
def take_digit(s):
    """One digit more is known. Reads: `found`, `shift`. Writes: `prefix`, `mask`, `above`."""
    s.prefix[0] = s.prefix[0] | ((T.uint32(RADIX_BINS - 1) - T.Cast("uint32", s.found[BIN])) << s.shift[0])
    s.mask[0] = s.mask[0] | (T.uint32(RADIX_BINS - 1) << s.shift[0])
    s.above[0] = s.found[BEFORE]


def locate(crew: Crew, vocab: int, digits: int) -> Callable[..., Any]:
    """The group of equal words within which a mass of `need` is reached.

    Reads: the row, `top`, `factor`, `need`, and what `count_slices` has written.
    Writes: `slice`, `prefix`, `mask`, `above`; `found`: mass and number of the group's words; scratch.
    Barriers: several; begins and ends with one.
    After: the group (`agrees`) is one word, or all of some value, and words of no mass.
    """
    loaded, weighed, cleared = load(crew, vocab), weigh(crew, vocab), clear(crew)
    steps = ceildiv(vocab, LOADS * crew.threads)

    @T.inline
    def phase(io, row, t, s):
        s.prefix[0] = T.uint32(0)
        s.mask[0] = T.uint32(0)
        s.above[0] = T.uint64(0)
        # `found` has been read.
        crew.meet()
        crew.find(s, t, SLICES)
        crew.meet()
        s.slice[0] = T.Cast("int32", s.found[BIN])
        s.above[0] = s.found[BEFORE]
        for digit in T.serial(digits):
            if s.found[COUNT] > T.uint64(1):
                s.shift[0] = T.Cast("uint32", 32 - RADIX_BITS - digit * RADIX_BITS)
                cleared(s, t, OTHERS)
                crew.meet()
                for j in T.serial(steps):
                    loaded(io, row, t, s, j)
                    for u in T.unroll(LOADS):
                        if agrees(s, s.x[u]):
                            weighed(s, s.x[u])
                            if s.mass[0] > T.uint64(0):
                                s.bits[0] = (order_bits(s.x[u]) >> s.shift[0]) & T.uint32(RADIX_BINS - 1)
                                crew.add(s, OTHERS + T.Cast("int32", s.bits[0]))
                                crew.count(s, OTHERS + T.Cast("int32", s.bits[0]))
                crew.meet()
                crew.find(s, t, OTHERS)
                crew.meet()
                take_digit(s)

    return phase


def pick_of_group(crew: Crew, vocab: int) -> Callable[..., Any]:
    """The word of a group within which a mass of `need` is reached: of equals the one that is as many behind the first.

    A histogram over columns tells in which part of the row it is.

    Reads: the row, `slice`, `prefix`, `mask`, `above`, `need`, `found`.
    Writes: the row's token and its log-probability; scratch.
    Barriers: several.
    """
    loaded, cleared = load(crew, vocab), clear(crew)
    steps, part = ceildiv(vocab, LOADS * crew.threads), ceildiv(vocab, RADIX_BINS)

    def matches(s: State, x: Any) -> tirx.PrimExpr:
        # A word of no mass is of no group, even where a digit more would have been needed to tell it apart.
        heavy = crew.exponential(s, x) >= T.float32(2.0 ** -unit_bits(vocab))
        return T.And(agrees(s, x), heavy)

    @T.inline
    def phase(io, row, t, s):
        s.rank[0] = T.truncdiv(
            s.need[0] - s.above[0] - T.uint64(1), T.truncdiv(s.found[MASS], s.found[COUNT]))
        crew.meet()
        cleared(s, t, OTHERS)
        crew.meet()
        s.mass[0] = T.uint64(1)
        for j in T.serial(steps):
            loaded(io, row, t, s, j)
            for u in T.unroll(LOADS):
                if column(crew, t, j, u) < vocab and matches(s, s.x[u]):
                    # Bins are gone through from the last on.
                    crew.add(s, OTHERS + RADIX_BINS - 1 - column(crew, t, j, u) // part)
        crew.meet()
        s.need[0] = s.rank[0] + T.uint64(1)
        s.above[0] = T.uint64(0)
        crew.find(s, t, OTHERS)
        crew.meet()
        s.rank[0] = s.rank[0] - s.found[BEFORE]
        crew.pick(
            io, row, t, s, T.Cast("int32", s.found[BIN]) * part,
            T.min((T.Cast("int32", s.found[BIN]) + 1) * part, vocab), matches)

    return phase


def draw_by_search(crew: Crew, problem: SoftmaxSample) -> Callable[..., Any]:
    """A word of the whole row; the phase is (io, row, t, first, best, top_p, min_p, uniform).

    `first` and `best` are column and log-probability of the row's best word.

    Reads: the row.
    Writes: the row's token and its log-probability.
    Barriers: several.
    """
    vocab = problem.vocab
    digits = (32 if problem.bias else ORDER_BITS[problem.dtype]) // RADIX_BITS
    summed, located, picked = count_slices(crew, vocab), locate(crew, vocab, digits), pick_of_group(crew, vocab)

    def share(part: Any, whole: Any) -> tirx.PrimExpr:
        return T.Cast("float64", part) * T.Cast("float64", whole)

    @T.inline
    def phase(io, row, t, first, best, top_p, min_p, uniform):
        s = T.meta_var(crew.alloc())
        s.factor[0] = io.scale * T.float32(LOG2_E)
        s.top[0] = crew.element(io, row, first)
        s.best[0] = best
        s.least[0] = min_p
        summed(io, row, t, s)
        s.left[0] = s.sums[1]
        # First how much is left, if top-p has a say; then the word.
        for turn in T.serial(2):
            if turn == 1 or top_p < T.float32(1):
                if turn == 1:
                    s.need[0] = T.Cast("uint64", share(uniform, s.left[0])) + T.uint64(1)
                else:
                    s.need[0] = T.max(
                        T.Cast("uint64", T.ceil(share(T.max(top_p, T.float32(0)), s.sums[0]))), T.uint64(1))
                located(io, row, t, s)
                if turn == 0:
                    # Up to the last of the group's words that is left.
                    s.mass[0] = T.truncdiv(s.found[MASS], s.found[COUNT])
                    s.mass[0] = s.above[0] + T.truncdiv(
                        s.need[0] - s.above[0] + s.mass[0] - T.uint64(1), s.mass[0]) * s.mass[0]
                    s.left[0] = T.min(s.left[0], s.mass[0])
        picked(io, row, t, s)

    return phase


@T.inline
def write_word(io, row, s, at, x):
    """The word in a column, of element x, as what was drawn."""
    io.tokens[row] = T.Cast("int32", at)
    io.logprobs[row] = s.best[0] + (x - s.top[0]) * io.scale


# ---- a block -------------------------------------------------------------------------------------


@T.inline
def add_atomically(s, at):
    T.ptx.atom.shared.add.u64(s.other[0], s.masses.ptr_to([at]), s.mass[0])


@T.inline
def count_atomically(s, at):
    T.evaluate(T.cuda.atomic_add(s.counts.ptr_to([at]), T.int32(1)))


@T.inline
def add_part_of_warp(s, t, i):
    for h in T.unroll(5):
        s.part[i] = s.part[i] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.part[i], 1 << h, 32, 32)
    if t % 32 == 0:
        T.ptx.atom.shared.add.u64(s.other[0], s.sums.ptr_to([i]), s.part[i])


@T.inline
def find_by_warp(s, t, start):
    if t < 32:
        s.part[0] = T.uint64(0)
        for b in T.unroll(RADIX_BINS // 32):
            s.part[0] = s.part[0] + s.masses[start + RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
        s.part[1] = s.part[0]
        # An inclusive scan over the lanes, the last bins on lane 0.
        s.mass[0] = s.part[0]
        scan_lanes(t, s.mass, s.other)
        s.part[0] = s.above[0] + s.mass[0] - s.part[1]
        for b in T.unroll(RADIX_BINS // 32):
            s.mass[0] = s.masses[start + RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
            if s.part[0] < s.need[0] and s.need[0] <= s.part[0] + s.mass[0]:
                s.found[BIN] = T.Cast("uint64", t * (RADIX_BINS // 32) + b)
                s.found[BEFORE] = s.part[0]
                s.found[MASS] = s.mass[0]
                s.found[COUNT] = T.Cast("uint64", s.counts[start + RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)])
            s.part[0] = s.part[0] + s.mass[0]


@T.inline
def pick_by_warp(io, row, t, s, first, last, matches):
    if t < 32:
        lanes = T.alloc_local([1], "uint32")
        has = T.alloc_local([1], "int32")
        for i in T.serial((last - first + 31) // 32):
            has[0] = 0
            if first + i * 32 + t < last:
                s.x[0] = written_element(io, row, first + i * 32 + t)
                if matches(s, s.x[0]):
                    has[0] = 1
            lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), has[0] != 0)
            if has[0] != 0 and T.Cast("uint64", below(t, lanes[0])) == s.rank[0]:
                write_word(io, row, s, first + i * 32 + t, s.x[0])
            # Past the word that is wanted it is more than any column.
            s.rank[0] = s.rank[0] - T.Cast("uint64", T.popcount(lanes[0]))


def block(threads: int) -> Crew:
    """The threads of a block of a CUDA kernel."""
    return Crew(
        threads,
        lambda: State.alloc(T.alloc_shared, T.alloc_local),
        written_element,
        lambda s, x: T.exp2((x - s.top[0]) * s.factor[0]),
        T.cuda.cta_sync,
        add_atomically,
        count_atomically,
        add_part_of_warp,
        find_by_warp,
        pick_by_warp,
    )


# ---- a CPU's thread ------------------------------------------------------------------------------


@T.inline
def add_plainly(s, at):
    s.masses[at] = s.masses[at] + s.mass[0]


@T.inline
def count_plainly(s, at):
    s.counts[at] = s.counts[at] + 1


@T.inline
def add_own_part(s, t, i):
    s.sums[i] = s.part[i]


@T.inline
def find_by_thread(s, t, start):
    s.part[0] = s.above[0]
    for b in range(RADIX_BINS):
        s.mass[0] = s.masses[start + RADIX_BINS - 1 - b]
        if s.part[0] < s.need[0] and s.need[0] <= s.part[0] + s.mass[0]:
            s.found[BIN] = T.Cast("uint64", b)
            s.found[BEFORE] = s.part[0]
            s.found[MASS] = s.mass[0]
            s.found[COUNT] = T.Cast("uint64", s.counts[start + RADIX_BINS - 1 - b])
        s.part[0] = s.part[0] + s.mass[0]


@T.inline
def pick_by_thread(io, row, t, s, first, last, matches):
    for i in range(last - first):
        s.x[0] = element(io, row, first + i)
        if matches(s, s.x[0]):
            if s.rank[0] == T.uint64(0):
                write_word(io, row, s, first + i, s.x[0])
            s.rank[0] = s.rank[0] - T.uint64(1)
# fmt: on


def thread() -> Crew:
    """One thread, within a block of TensorIR."""
    return Crew(
        1,
        lambda: State.alloc(T.sblock_alloc_buffer, T.sblock_alloc_buffer),
        element,
        lambda s, x: exp_nonpositive((x - s.top[0]) * s.factor[0] * T.float32(LN_2)),
        lambda: None,
        add_plainly,
        count_plainly,
        add_own_part,
        find_by_thread,
        pick_by_thread,
    )
