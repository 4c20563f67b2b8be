"""A word of a whole row, where the k best do not decide: weighted radix selection.

Words have *masses*: their exponentials, relative to the row's largest, as whole numbers in units of 2^-`unit_bits`.
Sums of these are exact in any order, so that atomics may add them, and a row gives the same word whatever the threads.
A word below one unit is never drawn.

The first word of the order up to which there is a mass of `need` is found by histograms of masses (`locate`): one over
*slices*, equal parts of the logarithmic scale of probability, so that atomics seldom meet, which is made once; and then
histograms of the words in a slice, over digits of their order bits, counted from the lowest that the slice may have.
For most slices one or two digits tell all words apart. That is done once for top-p, where `need` is its share of the
row's mass, and once for the word, where it is the uniform number's share of what is left. A search ends with a group of
equal words, of which one more pass finds the right one by its column.

Each histogram takes a pass over the row, from the L2 cache. The blocks of a cluster share it (`block`): each has the
bins of its own part of the row, and after a barrier of the cluster every block adds up those of all of them and draws
the same conclusions, so that a pass takes one barrier.

Phases are called with (io, row, t, s): as `Ending.finish`, with the state of the search. They are made for a *crew*:
the threads of a block or of a cluster, or the one of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import ceildiv
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from ..device.arithmetic import LN_2, LOG2_E, exp_nonpositive
from ..device.cluster import cluster_barrier, peer_load
from ..device.pool import asked
from ..device.selection import FULL_WARP, RADIX_BINS, RADIX_BITS, bits_value, order_bits, scan_lanes
from ..device.state import named
from ..device.words import load_element, load_words, value_at
from ..softmax_topk.elements import element, written_element

# Elements that a CPU's thread loads at once, or a warp's lanes each when the word's place is nearly known.
LOADS = 4
# Bytes of what a GPU's thread loads at once, and how many of these are on their way.
VECTOR, RING = 16, 4
# Of float32s that were made of a dtype's elements so many of the lowest bits are all alike.
ALIKE = {"float32": 0, "float16": 13, "bfloat16": 16}
# What `Crew.find` leaves in `State.found`; bins are counted from the last one on.
BIN, BEFORE, MASS, COUNT = range(4)
# A histogram has two more bins, for the row's mass and for that of the words that min-p leaves.
BINS = RADIX_BINS + 2
# Where bins begin: those of slices, which are kept, and those of digits and columns.
SLICES, OTHERS = 0, BINS
# Slices of an octave of probability. The last of them all has what is left.
OF_OCTAVE = 8
# The share of their size by which bounds of a slice are taken too wide: some roundings of a float32.
SLOP = 2.0**-20
# A block has so many copies of each bin, so that atomics of a warp's lanes seldom meet in one.
COPIES = 4

mass_of = peer_load("mass_of", "unsigned long long", "uint64")
count_of = peer_load("count_of", "int", "int32")


@dataclass(frozen=True)
class State:
    """What a search has in shared memory (on a CPU in the thread's), and a thread in registers."""

    masses: tirx.Buffer  # shared: of each bin
    counts: tirx.Buffer  # shared: how many words each bin of digits has
    found: tirx.Buffer  # shared: what `Crew.find` finds: the bin, the mass before it, its own, its words
    x: tirx.Buffer  # the element in hand, and such as were loaded
    top: tirx.Buffer  # the row's largest
    best: tirx.Buffer  # its log-probability
    factor: tirx.Buffer  # scale * log2(e)
    least: tirx.Buffer  # the least exponential that min-p leaves
    power: tirx.Buffer  # an exponential
    slice: tirx.Buffer  # in which the group lies
    lowest: tirx.Buffer  # the group's bounds, both within it
    highest: tirx.Buffer
    low: tirx.Buffer  # order bits of these
    high: tirx.Buffer
    unknown: tirx.Buffer  # how many bits of their difference are not known
    shift: tirx.Buffer  # of the digit in hand
    run: tirx.Buffer  # the slice of the thread's last element
    gathered: tirx.Buffer  # the mass of its last elements in that slice, which is still to be added
    part: tirx.Buffer  # the thread's part of the two sums
    mass: tirx.Buffer
    other: tirx.Buffer  # scratch
    need: tirx.Buffer  # the mass that is to be reached
    above: tirx.Buffer  # the mass of the words before the group
    left: tirx.Buffer  # the mass of all that is left
    rank: tirx.Buffer  # a number within the group
    # ---- of a GPU's crew ----
    lows: Any = None  # shared: the low words of the masses of each copy of each bin
    highs: Any = None  # shared: their high words
    tallies: Any = None  # shared: how many words it has
    shown: Any = None  # shared: the block's masses of each bin, which the others read; of two histograms in turn
    shown_counts: Any = None  # shared: and how many words
    ring: Any = None  # shared: each thread's vectors that are on their way
    raw: Any = None  # words of the vector in hand
    small: Any = None  # scratch of a load
    column: Any = None  # of its first element
    ahead: Any = None  # of the first element of the vector that is to be loaded
    own: Any = None  # the thread's number, of all that go through the row
    head: Any = None  # elements of the row before the first that begins a vector
    turn: Any = None  # which of the two histograms is the next
    added: Any = None  # scratch of atomics
    number: Any = None  # scratch

    @classmethod
    def alloc(cls, shared: Callable[..., Any], local: Callable[..., Any], **more: Any) -> State:
        return named(
            cls(
                masses=shared((2 * BINS,), "uint64"),
                counts=shared((BINS,), "int32"),
                found=shared((4,), "uint64"),
                x=local((1 + LOADS,), "float32"),
                top=local((1,), "float32"),
                best=local((1,), "float32"),
                factor=local((1,), "float32"),
                least=local((1,), "float32"),
                power=local((1,), "float32"),
                slice=local((1,), "int32"),
                lowest=local((1,), "float32"),
                highest=local((1,), "float32"),
                low=local((1,), "uint32"),
                high=local((1,), "uint32"),
                unknown=local((1,), "int32"),
                shift=local((1,), "uint32"),
                run=local((1,), "int32"),
                gathered=local((1,), "uint64"),
                part=local((2,), "uint64"),
                mass=local((1,), "uint64"),
                other=local((1,), "uint64"),
                need=local((1,), "uint64"),
                above=local((1,), "uint64"),
                left=local((1,), "uint64"),
                rank=local((1,), "uint64"),
                **more,
            )
        )


@dataclass(frozen=True)
class Crew:
    """The threads that go through a row together.

    Attributes
    ----------
    elements
        Of a step: how many elements a thread has in hand at once.
    steps
        How many steps go through a row.
    element
        (io, row, column) -> an element.
    begin
        A phase (io, row, t, s), before the first step of a pass.
    load
        A phase (io, row, t, s, j): the elements of a thread's j-th step.
    take
        (io, s, e): the e-th of these becomes `s.x[0]`; -inf if it is not of the row.
    column
        (s, t, j, e) -> its column, if it is of the row.
    exponential
        (s, x) -> that of an element, relative to the row's largest. Reads `top`, `factor`.
    meet
        Their barrier.
    clear
        (s, t): nothing in any bin of digits; on a GPU all bins are empty after every `unite`.
    add, count
        (s, t, start, bin, mass): to the mass of a bin of those from `start` on; (s, t, bin): 1 to its number of words.
    add_part
        (s, t, i) -> the threads' `s.part[i]` to that sum.
    unite
        (s, t, start): what all threads have added is in `masses`, from `start` on, and in `counts`. Begins and ends
        with a barrier.
    find
        (s, t, start): in which of the bins from `start` on, the last one first, a mass of `s.need` is reached. Reads
        `masses`, `counts`, `above`, writes `found`.
    pick
        (io, row, t, s, first, last): the `s.rank`-th of the group's columns from `first` to `last` becomes the token.
    """

    elements: int
    steps: int
    element: Callable[[Any, Any, Any], tirx.PrimExpr]
    begin: Callable[..., Any]
    load: Callable[..., Any]
    take: Callable[..., Any]
    column: Callable[..., Any]
    exponential: Callable[[State, Any], tirx.PrimExpr]
    meet: Callable[[], Any]
    clear: Callable[..., Any]
    add: Callable[..., Any]
    count: Callable[..., Any]
    add_part: Callable[..., Any]
    unite: Callable[..., Any]
    find: Callable[..., Any]
    pick: Callable[..., Any]


def unit_bits(vocab: int) -> int:
    """The row's largest word has a mass of 2 to this power, so that sums over a row stay below 2^62."""
    return min(40, 62 - vocab.bit_length())


# fmt: off
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
    # The slice last: most elements are out of bounds, and it takes longer.
    return T.And(T.And(x >= s.lowest[0], x <= s.highest[0]), slice_of(s, x) == s.slice[0])


def is_heavy(power: Any, vocab: int) -> tirx.PrimExpr:
    """Whether an element of this exponential has any mass."""
    return power >= T.float32(2.0 ** -unit_bits(vocab))


def pass_over_row(crew: Crew, see: Callable[..., Any]) -> Callable[..., Any]:
    """Calls see(io, row, t, s, j, e) for each element, which is `x`: the e-th of a thread's j-th step.

    The phase is (io, row, t, s).
    """

    @T.inline
    def phase(io, row, t, s):
        crew.begin(io, row, t, s)
        for j in T.serial(crew.steps, unroll=False):
            crew.load(io, row, t, s, j)
            for e in T.unroll(crew.elements):
                crew.take(io, s, e)
                see(io, row, t, s, j, e)

    return phase


def count_slices(crew: Crew, vocab: int) -> Callable[..., Any]:
    """The masses of the row, of what min-p leaves of it, and of each slice.

    Reads: the row, `top`, `factor`, `least`.
    Writes: `masses` of slices, and of the two sums behind them; scratch.
    Barriers: several; ends with one.
    """
    weighed = weigh(crew, vocab)

    @T.inline
    def see(io, row, t, s, j, e):
        weighed(s, s.x[0])
        if s.mass[0] > T.uint64(0):
            s.part[0] = s.part[0] + s.mass[0]
            if s.power[0] >= s.least[0]:
                s.part[1] = s.part[1] + s.mass[0]
            s.slice[0] = slice_of(s, s.x[0])
            # Neighbours of one slice are added at once: rows of equals would else be waiting for one bin.
            if s.slice[0] != s.run[0]:
                if s.gathered[0] > T.uint64(0):
                    crew.add(s, t, SLICES, RADIX_BINS - 1 - s.run[0], s.gathered)
                s.run[0] = s.slice[0]
                s.gathered[0] = s.mass[0]
            else:
                s.gathered[0] = s.gathered[0] + s.mass[0]

    pass_over = pass_over_row(crew, see)

    @T.inline
    def phase(io, row, t, s):
        s.part[0] = T.uint64(0)
        s.part[1] = T.uint64(0)
        s.run[0] = 0
        s.gathered[0] = T.uint64(0)
        pass_over(io, row, t, s)
        if s.gathered[0] > T.uint64(0):
            # Bins are gone through from the last on.
            crew.add(s, t, SLICES, RADIX_BINS - 1 - s.run[0], s.gathered)
        crew.add_part(s, t, 0)
        crew.add_part(s, t, 1)
        crew.unite(s, t, SLICES)

    return phase


@T.inline
def bound_slice(s):
    """Bounds of a slice, somewhat too wide, as its elements are those that `slice_of` finds in it.

    Reads: `slice`, `top`, `factor`.
    Writes: `low`, `high`, `lowest`, `highest`, `unknown`; scratch is `power`.
    """
    # The width of a slice.
    s.power[0] = T.float32(1) / (s.factor[0] * T.float32(OF_OCTAVE))
    s.highest[0] = s.top[0]
    if s.slice[0] > 0:
        s.highest[0] = T.min(
            s.top[0], s.top[0] - T.Cast("float32", s.slice[0]) * s.power[0]
            + (T.abs(s.top[0]) + T.Cast("float32", s.slice[0] + 2) * s.power[0]) * T.float32(SLOP))
    s.lowest[0] = T.min_value("float32")
    if s.slice[0] < RADIX_BINS - 1:
        s.lowest[0] = T.max(
            T.min_value("float32"), s.top[0] - T.Cast("float32", s.slice[0] + 1) * s.power[0]
            - (T.abs(s.top[0]) + T.Cast("float32", s.slice[0] + 2) * s.power[0]) * T.float32(SLOP))
    s.low[0] = order_bits(s.lowest[0])
    s.high[0] = order_bits(s.highest[0])
    # Of 0 leading zeros are not defined.
    s.unknown[0] = T.Select(
        s.high[0] == s.low[0], 0, 32 - T.Cast("int32", T.clz(T.reinterpret("int32", s.high[0] - s.low[0]))))


@T.inline
def take_digit(s):
    """One digit more is known.

    Reads: `found`, `shift`.
    Writes: `low`, `high`, `lowest`, `highest`, `unknown`, `above`.
    """
    s.low[0] = s.low[0] + ((T.uint32(RADIX_BINS - 1) - T.Cast("uint32", s.found[BIN])) << s.shift[0])
    s.high[0] = s.low[0] + T.min(s.high[0] - s.low[0], (T.uint32(1) << s.shift[0]) - T.uint32(1))
    s.lowest[0] = bits_value(s.low[0])
    s.highest[0] = bits_value(s.high[0])
    s.unknown[0] = T.Cast("int32", s.shift[0])
    s.above[0] = s.found[BEFORE]


def locate(crew: Crew, vocab: int, alike: int) -> Callable[..., Any]:
    """The group of equal words within which a mass of `need` is reached.

    Reads: the row, `top`, `factor`, `need`, and what `count_slices` has written.
    Writes: `slice`, `low`, `high`, `lowest`, `highest`, `above`; `found`: the group's mass and words; scratch.
    Barriers: several; begins and ends with one.
    After: the group (`agrees`) is one word, or all of some value, and words of no mass.
    """
    weighed = weigh(crew, vocab)

    @T.inline
    def see(io, row, t, s, j, e):
        if agrees(s, s.x[0]):
            weighed(s, s.x[0])
            if s.mass[0] > T.uint64(0):
                s.run[0] = T.Cast("int32", T.min(
                    (order_bits(s.x[0]) - s.low[0]) >> s.shift[0], T.uint32(RADIX_BINS - 1)))
                crew.add(s, t, OTHERS, s.run[0], s.mass)
                crew.count(s, t, s.run[0])

    pass_over = pass_over_row(crew, see)

    @T.inline
    def phase(io, row, t, s):
        s.above[0] = T.uint64(0)
        # `found` has been read.
        crew.meet()
        crew.find(s, t, SLICES)
        crew.meet()
        s.slice[0] = T.Cast("int32", s.found[BIN])
        s.above[0] = s.found[BEFORE]
        bound_slice(s)
        for digit in T.serial(ceildiv(32, RADIX_BITS), unroll=False):
            # Words of slices are not counted: once in any case.
            if digit == 0 or (s.unknown[0] > alike and s.found[COUNT] > T.uint64(1)):
                s.shift[0] = T.Cast("uint32", T.max(s.unknown[0] - RADIX_BITS, alike))
                crew.clear(s, t)
                pass_over(io, row, t, s)
                crew.unite(s, t, OTHERS)
                crew.find(s, t, OTHERS)
                crew.meet()
                take_digit(s)

    return phase


def pick_of_group(crew: Crew, vocab: int) -> Callable[..., Any]:
    """The word of a group within which a mass of `need` is reached: of equals the one that is as many behind the first.

    A histogram over columns tells in which part of the row it is.

    Reads: the row, the group, `above`, `need`, `found`.
    Writes: the row's token and its log-probability; scratch.
    Barriers: several.
    """
    part = ceildiv(vocab, RADIX_BINS)

    @T.inline
    def see(io, row, t, s, j, e):
        # A word of no mass is of no group, even where a digit more would have been needed to tell it apart.
        if agrees(s, s.x[0]):
            if is_heavy(crew.exponential(s, s.x[0]), vocab):
                # Bins are gone through from the last on.
                crew.add(s, t, OTHERS, RADIX_BINS - 1 - crew.column(s, t, j, e) // part, s.mass)

    pass_over = pass_over_row(crew, see)

    @T.inline
    def phase(io, row, t, s):
        s.rank[0] = T.truncdiv(
            s.need[0] - s.above[0] - T.uint64(1), T.truncdiv(s.found[MASS], s.found[COUNT]))
        crew.clear(s, t)
        s.mass[0] = T.uint64(1)
        pass_over(io, row, t, s)
        crew.unite(s, t, OTHERS)
        s.need[0] = s.rank[0] + T.uint64(1)
        s.above[0] = T.uint64(0)
        crew.find(s, t, OTHERS)
        crew.meet()
        s.rank[0] = s.rank[0] - s.found[BEFORE]
        crew.pick(
            io, row, t, s, T.Cast("int32", s.found[BIN]) * part,
            T.min((T.Cast("int32", s.found[BIN]) + 1) * part, vocab))

    return phase


def draw_by_search(crew: Crew, problem: SoftmaxSample) -> Callable[..., Any]:
    """A word of the whole row; the phase is (io, row, t, s, first, best, top_p, min_p, uniform).

    `s` is the crew's state, with nothing in any bin, and `first` and `best` are column and log-probability of the row's
    best word.

    Reads: the row.
    Writes: the row's token and its log-probability.
    Barriers: several.
    """
    vocab = problem.vocab
    alike = 0 if problem.bias else ALIKE[problem.dtype]
    summed, located, picked = count_slices(crew, vocab), locate(crew, vocab, alike), pick_of_group(crew, vocab)

    def share(part: Any, whole: Any) -> tirx.PrimExpr:
        return T.Cast("float64", part) * T.Cast("float64", whole)

    @T.inline
    def phase(io, row, t, s, first, best, top_p, min_p, uniform):
        s.factor[0] = io.scale * T.float32(LOG2_E)
        s.top[0] = crew.element(io, row, first)
        s.best[0] = best
        s.least[0] = min_p
        summed(io, row, t, s)
        s.left[0] = s.masses[SLICES + RADIX_BINS + 1]
        # First how much is left, if top-p has a say; then the word.
        for turn in T.serial(2, unroll=False):
            if turn == 1 or top_p < T.float32(1):
                if turn == 1:
                    s.need[0] = T.Cast("uint64", share(uniform, s.left[0])) + T.uint64(1)
                else:
                    s.need[0] = T.max(
                        T.Cast("uint64", T.ceil(
                            share(T.max(top_p, T.float32(0)), s.masses[SLICES + RADIX_BINS]))), T.uint64(1))
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


# ---- a GPU's block or cluster --------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The blocks that have a row, and how it lies over their threads: in vectors of 16 bytes, in turn.

    The elements before the row's first whole vector and behind its last are loaded one by one, in a step of their own.
    """

    problem: SoftmaxSample
    threads: int  # of a block
    cluster: int  # blocks

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return VECTOR // numpy_dtype(self.problem.dtype).itemsize

    @property
    def per_word(self) -> int:
        """Elements of a word."""
        return self.width // 4

    @property
    def aligned(self) -> bool:
        """Whether every row begins and ends with a whole vector."""
        return self.problem.vocab % self.width == 0

    @property
    def vector_steps(self) -> int:
        """Steps in which vectors are loaded."""
        return ceildiv(self.problem.vocab // self.width, self.threads * self.cluster)

    @property
    def bytes(self) -> int:
        """Of shared memory, see `search_state`."""
        histograms = 8 * (2 * BINS + 4 + 2 * BINS) + 4 * ((3 + 3 * COPIES) * BINS)
        return asked(VECTOR * RING * self.threads + ceildiv(histograms, VECTOR) * VECTOR)


def search_state(blocks: Blocks, pool: Any) -> State:
    """The state of a search, whose shared buffers are in `pool`, which nothing else needs any more."""
    taken = [0]

    def shared(shape: tuple[int, ...], dtype: str) -> tirx.Buffer:
        size = int(dtype[-2:]) // 8
        buffer = T.decl_buffer(shape, dtype, data=pool, elem_offset=taken[0] // size, scope="shared.dyn")
        taken[0] += ceildiv(shape[0] * size, 8) * 8
        return buffer

    more: dict[str, Any] = {
        "ring": shared((RING * blocks.threads * 4,), "uint32"),
        "lows": shared((COPIES * BINS,), "uint32"),
        "highs": shared((COPIES * BINS,), "uint32"),
        "tallies": shared((COPIES * BINS,), "uint32"),
    }
    if blocks.cluster > 1:
        more |= {"shown": shared((2 * BINS,), "uint64"), "shown_counts": shared((2 * BINS,), "int32")}
    registers = {"small": "uint16", "added": "uint32"}
    registers |= dict.fromkeys(("column", "ahead", "own", "head", "turn", "number"), "int32")
    more |= {name: T.alloc_local((1,), dtype) for name, dtype in registers.items()}
    more |= {"raw": T.alloc_local((4,), "uint32")}
    return State.alloc(shared, T.alloc_local, **more)


def begin_search(blocks: Blocks) -> Callable[..., Any]:
    """Before the first pass; the phase is (row, t, s, part), `part` being the number of the block in its cluster.

    Writes: `own`, `head`, `turn`; empty bins.
    Barriers: one, at the end.
    """
    threads, width, vocab, words = blocks.threads, blocks.width, blocks.problem.vocab, COPIES * BINS

    @T.inline
    def phase(row, t, s, part):
        s.own[0] = part * threads + t
        s.head[0] = 0
        if not blocks.aligned:
            s.head[0] = T.min(T.Cast("int32", T.truncmod(
                width - T.truncmod(row * T.int64(vocab), T.int64(width)), T.int64(width))), vocab)
        s.turn[0] = 0
        for i in T.serial((words - 1 - t + threads) // threads):
            s.lows[i * threads + t] = T.uint32(0)
            s.highs[i * threads + t] = T.uint32(0)
            s.tallies[i * threads + t] = T.uint32(0)
        T.cuda.cta_sync()

    return phase


def start_vector(blocks: Blocks) -> Callable[..., Any]:
    """Have a thread's j-th vector copied to its ring; the phase is (io, row, t, s, j).

    Writes: `ring`, asynchronously; `ahead`.
    After: one more group of copies is on its way, an empty one if there is no such vector.
    """
    own, threads, width, vocab = blocks.threads, blocks.threads * blocks.cluster, blocks.width, blocks.problem.vocab

    @T.inline
    def phase(io, row, t, s, j):
        s.ahead[0] = s.head[0] + (j * threads + s.own[0]) * width
        if s.ahead[0] + width <= vocab:
            T.ptx.cp.async_.cg.shared.global_(
                s.ring.ptr_to([(j % RING * own + t) * 4]), io.logits.ptr_to([row, s.ahead[0]]), VECTOR)
        T.ptx.cp.async_.commit_group()

    return phase


def start_vectors(blocks: Blocks) -> Callable[..., Any]:
    """Have the first vectors of a thread copied; the phase is (io, row, t, s)."""
    start = start_vector(blocks)

    @T.inline
    def phase(io, row, t, s):
        for j in T.unroll(RING):
            start(io, row, t, s, j)

    return phase


def load_vector(blocks: Blocks) -> Callable[..., Any]:
    """The vector of a thread's j-th step, once it has arrived; the phase is (io, row, t, s, j).

    Reads: `ring`.
    Writes: `column`, `raw`; `ring`, asynchronously; scratch is `small`.
    """
    own, threads, width, vocab = blocks.threads, blocks.threads * blocks.cluster, blocks.width, blocks.problem.vocab
    dtype, per_word, start = blocks.problem.dtype, blocks.per_word, start_vector(blocks)
    nothing = {"float32": 0xFF800000, "float16": 0xFC00FC00, "bfloat16": 0xFF80FF80}[dtype]  # -inf

    @T.inline
    def phase(io, row, t, s, j):
        s.column[0] = s.head[0] + (j * threads + s.own[0]) * width
        T.ptx.cp.async_.wait_group(RING - 1)
        for w in T.unroll(4):
            s.raw[w] = T.uint32(nothing)
        if s.column[0] + width <= vocab:
            for w in T.vectorized(4):
                s.raw[w] = s.ring[(j % RING * own + t) * 4 + w]
        if not blocks.aligned:
            if j == blocks.vector_steps and s.own[0] < 2 * width:
                # One element before the first vector, or one behind the last.
                s.column[0] = s.own[0]
                if s.own[0] >= s.head[0]:
                    s.column[0] = s.own[0] + (vocab - s.head[0]) // width * width
                if s.column[0] < vocab:
                    load_words(4 // per_word, s.raw, 0, s.small, io.logits.ptr_to([row, s.column[0]]))
                    if per_word > 1:
                        s.raw[0] = s.raw[0] | T.uint32(nothing & 0xFFFF0000)
        start(io, row, t, s, j + RING)

    return phase


def take_of_vector(blocks: Blocks) -> Callable[..., Any]:
    """The e-th element of a step; the phase is (io, s, e). Reads: `raw`, `column`, the bias. Writes: `x`."""
    dtype, last = blocks.problem.dtype, blocks.problem.vocab - 1
    biased = bool(blocks.problem.bias)

    @T.inline
    def phase(io, s, e):
        s.x[0] = value_at(dtype, s.raw, 0, e)
        if biased:
            s.x[0] = s.x[0] + load_element(
                "float32", io.bias.ptr_to([T.min(s.column[0] + e, last)]))

    return phase


@T.inline
def add_atomically(s, t, start, at, mass):
    """In two words, as shared memory has no atomic sum of 64 bits: that is a loop."""
    s.added[0] = T.cuda.atomic_add(s.lows.ptr_to([at * COPIES + t % COPIES]), T.Cast("uint32", mass[0]))
    # The high word, and what is carried.
    s.added[0] = T.Cast("uint32", (mass[0] >> T.uint64(32)) + (
        (T.Cast("uint64", s.added[0]) + (mass[0] & T.uint64(0xFFFFFFFF))) >> T.uint64(32)))
    if s.added[0] != T.uint32(0):
        T.evaluate(T.cuda.atomic_add(s.highs.ptr_to([at * COPIES + t % COPIES]), s.added[0]))


@T.inline
def count_atomically(s, t, at):
    T.evaluate(T.cuda.atomic_add(s.tallies.ptr_to([at * COPIES + t % COPIES]), T.uint32(1)))


@T.inline
def add_part_of_warp(s, t, i):
    s.mass[0] = s.part[i]
    for h in T.unroll(5):
        s.mass[0] = s.mass[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.mass[0], 1 << h, 32, 32)
    if t % 32 == 0:
        add_atomically(s, t, SLICES, RADIX_BINS + i, s.mass)


def unite_blocks(blocks: Blocks) -> Callable[..., Any]:
    """What the threads of all blocks have added; the phase is (s, t, start).

    Reads: `lows`, `highs`, `tallies`, which are empty afterwards; `turn`.
    Writes: `masses` from `start` on, `counts`; `turn`; `shown` and `shown_counts`, which the others read until they
        come to the next barrier of the cluster: so there are two of each.
    Barriers: two, and one of the cluster.
    """
    threads, cluster = blocks.threads, blocks.cluster

    @T.inline
    def phase(s, t, start):
        T.cuda.cta_sync()
        for i in T.serial((BINS - 1 - t + threads) // threads):
            s.mass[0] = T.uint64(0)
            s.number[0] = 0
            for c in T.unroll(COPIES):
                s.mass[0] = s.mass[0] + T.Cast("uint64", s.lows[(i * threads + t) * COPIES + c]) + (
                    T.Cast("uint64", s.highs[(i * threads + t) * COPIES + c]) << T.uint64(32))
                s.number[0] = s.number[0] + T.Cast("int32", s.tallies[(i * threads + t) * COPIES + c])
            for c in T.unroll(COPIES):
                s.lows[(i * threads + t) * COPIES + c] = T.uint32(0)
                s.highs[(i * threads + t) * COPIES + c] = T.uint32(0)
                s.tallies[(i * threads + t) * COPIES + c] = T.uint32(0)
            if cluster > 1:
                s.shown[s.turn[0] * BINS + i * threads + t] = s.mass[0]
                s.shown_counts[s.turn[0] * BINS + i * threads + t] = s.number[0]
            else:
                s.masses[start + i * threads + t] = s.mass[0]
                s.counts[i * threads + t] = s.number[0]
        if cluster > 1:
            cluster_barrier()
            for i in T.serial((BINS - 1 - t + threads) // threads):
                s.mass[0] = T.uint64(0)
                s.number[0] = 0
                for r in T.unroll(cluster):
                    s.mass[0] = s.mass[0] + mass_of(s.shown.ptr_to([s.turn[0] * BINS + i * threads + t]), r)
                    s.number[0] = s.number[0] + count_of(
                        s.shown_counts.ptr_to([s.turn[0] * BINS + i * threads + t]), r)
                s.masses[start + i * threads + t] = s.mass[0]
                s.counts[i * threads + t] = s.number[0]
            s.turn[0] = 1 - s.turn[0]
        T.cuda.cta_sync()

    return phase


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
                s.found[COUNT] = T.Cast("uint64", s.counts[RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)])
            s.part[0] = s.part[0] + s.mass[0]


def pick_by_warp(blocks: Blocks) -> Callable[..., Any]:
    """By the first warp of the first block: a lane has neighbours, counts them, and the right one finds it in them."""
    vocab = blocks.problem.vocab
    piece = ceildiv(ceildiv(vocab, RADIX_BINS), 32)

    @T.inline
    def phase(io, row, t, s, first, last):
        if s.own[0] < 32:
            wanted = T.alloc_local([1], "int32")
            before = T.alloc_local([1], "int32")
            wanted[0] = -1
            for turn in T.serial(2, unroll=False):
                s.number[0] = 0
                for i in T.serial(ceildiv(piece, LOADS)):
                    for u in T.unroll(LOADS):
                        s.x[1 + u] = -T.infinity("float32")
                        if i * LOADS + u < piece and first + t * piece + i * LOADS + u < last:
                            s.x[1 + u] = written_element(io, row, first + t * piece + i * LOADS + u)
                    for u in T.unroll(LOADS):
                        if agrees(s, s.x[1 + u]):
                            if is_heavy(exponential_on_gpu(s, s.x[1 + u]), vocab):
                                if s.number[0] == wanted[0]:
                                    write_word(io, row, s, first + t * piece + i * LOADS + u, s.x[1 + u])
                                s.number[0] = s.number[0] + 1
                if turn == 0:
                    before[0] = s.number[0]
                    scan_lanes(t, before, wanted)
                    # Of another lane's it is none: below 0, or more than there are.
                    wanted[0] = T.Cast("int32", s.rank[0]) - (before[0] - s.number[0])

    return phase


def exponential_on_gpu(s: State, x: Any) -> tirx.PrimExpr:
    return T.exp2((x - s.top[0]) * s.factor[0])


def crew_of(blocks: Blocks) -> Crew:
    """The threads of a block or a cluster of a CUDA kernel."""
    return Crew(
        elements=blocks.width,
        steps=blocks.vector_steps + (0 if blocks.aligned else 1),
        element=written_element,
        begin=start_vectors(blocks),
        load=load_vector(blocks),
        take=take_of_vector(blocks),
        column=lambda s, t, j, e: s.column[0] + e,
        exponential=exponential_on_gpu,
        meet=T.cuda.cta_sync,
        clear=lambda s, t: None,
        add=add_atomically,
        count=count_atomically,
        add_part=add_part_of_warp,
        unite=unite_blocks(blocks),
        find=find_by_warp,
        pick=pick_by_warp(blocks),
    )


def search_by_blocks(blocks: Blocks) -> Callable[..., Any]:
    """The search of all threads of a row; the phase is (io, row, t, part, pool, first, best, top_p, min_p, uniform).

    Barriers: several; the last one is the cluster's, as no block may end while others read what it has found.
    """
    begin, search = begin_search(blocks), draw_by_search(crew_of(blocks), blocks.problem)

    @T.inline
    def phase(io, row, t, part, pool, first, best, top_p, min_p, uniform):
        s = T.meta_var(search_state(blocks, pool))
        begin(row, t, s, part)
        search(io, row, t, s, first, best, top_p, min_p, uniform)
        if blocks.cluster > 1:
            cluster_barrier()

    return phase


# ---- a CPU's thread ------------------------------------------------------------------------------


def load_elements(vocab: int) -> Callable[..., Any]:
    """The elements of the j-th step, -inf behind the row. Writes: `x`, but for its first, which is the one in hand."""

    @T.inline
    def phase(io, row, t, s, j):
        for u in T.unroll(LOADS):
            s.x[1 + u] = -T.infinity("float32")
            if j * LOADS + u < vocab:
                s.x[1 + u] = element(io, row, j * LOADS + u)

    return phase


@T.inline
def take_element(io, s, e):
    s.x[0] = s.x[1 + e]


@T.inline
def clear_bins(s, t):
    for b in range(BINS):
        s.masses[OTHERS + b] = T.uint64(0)
        s.counts[b] = 0


@T.inline
def clear_slices(s):
    for b in range(BINS):
        s.masses[SLICES + b] = T.uint64(0)


@T.inline
def add_plainly(s, t, start, at, mass):
    s.masses[start + at] = s.masses[start + at] + mass[0]


@T.inline
def count_plainly(s, t, at):
    s.counts[at] = s.counts[at] + 1


@T.inline
def add_own_part(s, t, i):
    s.masses[SLICES + RADIX_BINS + i] = s.part[i]


@T.inline
def find_by_thread(s, t, start):
    s.part[0] = s.above[0]
    for b in range(RADIX_BINS):
        s.mass[0] = s.masses[start + RADIX_BINS - 1 - b]
        if s.part[0] < s.need[0] and s.need[0] <= s.part[0] + s.mass[0]:
            s.found[BIN] = T.Cast("uint64", b)
            s.found[BEFORE] = s.part[0]
            s.found[MASS] = s.mass[0]
            s.found[COUNT] = T.Cast("uint64", s.counts[RADIX_BINS - 1 - b])
        s.part[0] = s.part[0] + s.mass[0]


def pick_by_thread(vocab: int) -> Callable[..., Any]:
    """One after another."""

    @T.inline
    def phase(io, row, t, s, first, last):
        for i in range(last - first):
            s.x[0] = element(io, row, first + i)
            if agrees(s, s.x[0]):
                if is_heavy(exponential_on_cpu(s, s.x[0]), vocab):
                    if s.rank[0] == T.uint64(0):
                        write_word(io, row, s, first + i, s.x[0])
                    s.rank[0] = s.rank[0] - T.uint64(1)

    return phase


def search_by_thread(problem: SoftmaxSample) -> Callable[..., Any]:
    """The search of a CPU's thread; the phase is (io, row, first, best, top_p, min_p, uniform)."""
    vocab = problem.vocab
    crew = Crew(
        elements=LOADS,
        steps=ceildiv(vocab, LOADS),
        element=element,
        begin=lambda io, row, t, s: None,
        load=load_elements(vocab),
        take=take_element,
        column=lambda s, t, j, e: j * LOADS + e,
        exponential=exponential_on_cpu,
        meet=lambda: None,
        clear=clear_bins,
        add=add_plainly,
        count=count_plainly,
        add_part=add_own_part,
        unite=lambda s, t, start: None,
        find=find_by_thread,
        pick=pick_by_thread(vocab),
    )
    search = draw_by_search(crew, problem)

    @T.inline
    def phase(io, row, first, best, top_p, min_p, uniform):
        s = T.meta_var(State.alloc(T.sblock_alloc_buffer, T.sblock_alloc_buffer))
        clear_slices(s)
        search(io, row, 0, s, first, best, top_p, min_p, uniform)

    return phase
# fmt: on


def exponential_on_cpu(s: State, x: Any) -> tirx.PrimExpr:
    return exp_nonpositive((x - s.top[0]) * s.factor[0] * T.float32(LN_2))
