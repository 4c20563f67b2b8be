"""What any crew does: the state of a search, its passes over a row, and the search itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ...device.arithmetic import LOG2_E
from ...device.selection import RADIX_BINS, RADIX_BITS, bits_value, order_bits
from ...device.state import named
from ..blocks import BEFORE, BIN, BINS, COUNT, COUNT_BEFORE, FOUND, MASS

# Elements that a CPU's thread loads at once; and those that each lane of a warp loads when the word's place is nearly
# known.
LOADS = 4
# How many of the lowest bits are equal in all float32 made of a dtype's elements.
ALIKE = {"float32": 0, "float16": 13, "bfloat16": 16}
# Where bins begin: those of slices, which are kept, and those of digits and columns.
SLICES, OTHERS = 0, BINS
# Slices per octave of probability. The last slice has all that is left.
OF_OCTAVE = 8
# How much wider than a slice its bounds are taken, as a share of its size: a few roundings of a float32.
SLOP = 2.0**-20


@dataclass(frozen=True)
class State:
    """The state of a search: in shared memory (on a CPU, the thread's), and in registers."""

    masses: tirx.Buffer  # shared: the mass of each bin
    counts: tirx.Buffer  # shared: words of each bin of digits
    found: tirx.Buffer  # shared: by `Crew.find`: the bin, the mass before it, its own, its words, those before it
    x: tirx.Buffer  # the element in hand, and such as were loaded
    top: tirx.Buffer  # the row's largest element
    best: tirx.Buffer  # its log-probability
    factor: tirx.Buffer  # scale * log2(e)
    least: tirx.Buffer  # the smallest exponential that min-p leaves
    power: tirx.Buffer  # an exponential
    slice: tirx.Buffer  # the slice in which the group lies
    wide: tirx.Buffer  # how many slices more the group may lie in
    lowest: tirx.Buffer  # the least element of the group, within its slice
    highest: tirx.Buffer
    low: tirx.Buffer  # order bits of the bounds
    high: tirx.Buffer
    unknown: tirx.Buffer  # how many bits of their difference are still unknown
    shift: tirx.Buffer  # where the digit in hand begins
    run: tirx.Buffer  # the slice of the thread's last element
    gathered: tirx.Buffer  # the mass of its last elements in that slice, which is still to be added
    part: tirx.Buffer  # the thread's part of the two further sums
    mass: tirx.Buffer
    other: tirx.Buffer  # scratch
    counting: tirx.Buffer  # whether a number of words is looked for, and not a mass
    need: tirx.Buffer  # the mass, or the number, that is to be reached
    above: tirx.Buffer  # the mass of all words before the group
    passed: tirx.Buffer  # how many words are before it, where words are counted
    left: tirx.Buffer  # the mass of all words that the filters leave
    rank: tirx.Buffer  # a number within the group; before a draw in the order of columns: how many of it are left
    free: tirx.Buffer  # whether no top_k bounds the row: the draw is in the order of columns
    sum: tirx.Buffer  # of exponentials
    tie: tirx.Buffer  # the exponential of the group's words
    goal: tirx.Buffer  # the sum that is to be passed
    reached: tirx.Buffer  # sums on the way there
    lane: tirx.Buffer  # scratch of scans
    scratch: tirx.Buffer
    guessed: tirx.Buffer  # whether top-p's bound was found in a bracket
    chosen: tirx.Buffer  # a slice of columns
    # ---- of a GPU's crew ----
    lows: Any = None  # shared: the low words of the masses, for each copy of each bin
    highs: Any = None  # shared: their high words
    scanned: Any = None  # shared: what is known of a row (`cuts`)
    tallies: Any = None  # shared: how many words each bin has, for each copy
    shown: Any = None  # shared: the block's masses of each bin, which the others read; of two histograms in turn
    shown_counts: Any = None  # shared: and how many words
    sums: Any = None  # shared: of each slice of columns, the sum of the exponentials of words before the group
    ties: Any = None  # shared: of each, how many of its words are of the group
    round_sums: Any = None  # shared: the same of each round of the chosen slice
    round_ties: Any = None
    stage: Any = None  # shared: the block's part of the row, where it is kept
    pair_m: Any = None  # shared: the maximum of each slice
    pair_d: Any = None  # shared: its sum of exponentials
    words: Any = None  # the logits as vectors
    r: Any = None  # the warp's slice of the row (`rows.state.RowState`)
    bits: Any = None  # of the bitmap, from the first column of each vector in hand on
    small: Any = None  # scratch for a load
    column: Any = None  # of the first element of the vectors in hand
    own: Any = None  # the thread's number among all that go through the row
    turn: Any = None  # which of the two histograms is the next
    added: Any = None  # scratch for atomics
    number: Any = None  # scratch; on a CPU the column that is found
    summed: Any = None  # whether `sums` are those of the words that are left; else all are left
    round: Any = None  # the round in which the word is
    list: Any = None  # shared: the words of each thread in a bracket
    listed: Any = None  # how many these are
    total: Any = None  # a sum of exponentials
    # ---- of a CPU's thread ----
    aim: Any = None  # the sum that is to be passed

    @classmethod
    def alloc(cls, shared: Callable[..., Any], local: Callable[..., Any], **more: Any) -> State:
        return named(
            cls(
                masses=shared((2 * BINS,), "uint64"),
                counts=shared((BINS,), "int32"),
                found=shared((len(FOUND),), "uint64"),
                x=local((1 + LOADS,), "float32"),
                top=local((1,), "float32"),
                best=local((1,), "float32"),
                factor=local((1,), "float32"),
                least=local((1,), "float32"),
                power=local((1,), "float32"),
                slice=local((1,), "int32"),
                wide=local((1,), "int32"),
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
                counting=local((1,), "int32"),
                need=local((1,), "uint64"),
                above=local((1,), "uint64"),
                passed=local((1,), "int32"),
                left=local((1,), "uint64"),
                rank=local((1,), "uint64"),
                free=local((1,), "int32"),
                sum=local((1,), "float32"),
                tie=local((1,), "float32"),
                goal=local((1,), "float32"),
                reached=local((3,), "float32"),
                lane=local((1,), "float32"),
                scratch=local((1,), "int32"),
                guessed=local((1,), "int32"),
                chosen=local((1,), "int32"),
                **more,
            )
        )


@dataclass(frozen=True)
class Crew:
    """The threads that go through a row together."""

    # How many elements a thread has in hand at once.
    elements: int
    # How many steps go through a row.
    steps: int
    # (io, row, column) -> an element.
    element: Callable[[Any, Any, Any], tirx.PrimExpr]
    # A phase (io, row, t, s, j): the elements of a thread's j-th step.
    load: Callable[..., Any]
    # (io, s, e): the e-th of these becomes `s.x[0]`; -inf if it is not of the row.
    take: Callable[..., Any]
    # (s, t, j, e) -> its column, if it is of the row.
    column: Callable[..., Any]
    # (s, x) -> that of an element, relative to the row's largest. Reads `top`, `factor`.
    exponential: Callable[[State, Any], tirx.PrimExpr]
    # Their barrier.
    meet: Callable[[], Any]
    # (s, t): nothing in any bin of digits; on a GPU all bins are empty after every `unite`.
    clear: Callable[..., Any]
    # (s, t, start, bin, mass): to the mass of a bin of those from `start` on; (s, t, bin): 1 to its number of words.
    add: Callable[..., Any]
    count: Callable[..., Any]
    # (s, t, i) -> the threads' `s.part[i]` to that sum.
    add_part: Callable[..., Any]
    # (s, t, start): what all threads have added is in `masses`, from `start` on, and in `counts`. Begins and ends with
    # a barrier.
    unite: Callable[..., Any]
    # (s, t, start): in which of the bins from `start` on, the last one first, a mass of `s.need` is reached; if
    # `s.counting`, a number of words. Reads `masses`, `counts`, `above`, `passed`, writes `found`.
    find: Callable[..., Any]
    # (io, row, t, s, first, last): the `s.rank`-th of the group's columns from `first` to `last` becomes the token.
    pick: Callable[..., Any]
    # (io, row, t, s, uniform): a word that is left becomes the token, in the order of columns. Left are words of at
    # least `s.least` that come before the group, and the first `s.rank` of it.
    draw: Callable[..., Any] | None = None
    # Whether the search draws where no top_k bounds the row; else it ends when what is left is known.
    draws: bool = True
    # Whether there is a faster way to top-p's bound, which may fail; and that: see `bracket.guess`.
    guesses: bool = False
    guess: Callable[..., Any] | None = None


def unit_bits(vocab: int) -> int:
    """The power of two that is the mass of the row's largest word; sums over a row then stay below 2^62."""
    return min(40, 62 - vocab.bit_length())


# fmt: off
@phase
def weigh(crew, vocab, /, s, x):
    """The mass of an element. Reads: `top`, `factor`. Writes: `power`, `mass`."""
    s.power[0] = crew.exponential(s, x)
    s.mass[0] = T.Cast("uint64", s.power[0] * T.float32(2.0 ** unit_bits(vocab)))


def slice_of(s: State, x: Any) -> tirx.PrimExpr:
    """The number of an element's slice, which never gets smaller from a larger element to a smaller one."""
    octaves = (s.top[0] - x) * s.factor[0]
    return T.Cast("int32", T.min(octaves * T.float32(OF_OCTAVE), T.float32(RADIX_BINS - 1)))


def lies_in(s: State, found: Any) -> tirx.PrimExpr:
    """Whether a slice is one that the group may lie in."""
    return T.And(found >= s.slice[0], found <= s.slice[0] + s.wide[0])


def agrees(s: State, x: Any) -> tirx.PrimExpr:
    """Whether an element may be one of the group, as far as the group is known."""
    # The slice is compared last: most elements are out of bounds, and it takes longer.
    return T.And(T.And(x >= s.lowest[0], x <= s.highest[0]), lies_in(s, slice_of(s, x)))


def is_before(s: State, x: Any) -> tirx.PrimExpr:
    """Whether an element comes before the group, by its value."""
    return T.Or(x > s.highest[0], T.And(x >= s.lowest[0], slice_of(s, x) < s.slice[0]))


@T.inline
def leave_all(s):
    """All words come before the group, which has none. Writes: the group, `rank`, `tie`."""
    s.highest[0] = -T.infinity("float32")
    s.lowest[0] = T.infinity("float32")
    s.slice[0] = 0
    s.wide[0] = 0
    s.rank[0] = T.uint64(0)
    s.tie[0] = T.float32(0)


def share(part: Any, whole: Any) -> tirx.PrimExpr:
    """A share of a mass, which is exact in float64."""
    return T.Cast("float64", part) * T.Cast("float64", whole)


def mass_share(top_p: Any, mass: Any) -> tirx.PrimExpr:
    """The mass that top_p asks for: at least 1."""
    return T.max(T.Cast("uint64", T.ceil(share(T.max(top_p, T.float32(0)), mass))), T.uint64(1))


def reaches(s: State, above: Any, passed: Any, mass: Any, count: Any) -> tirx.PrimExpr:
    """Whether `need` is reached within a bin of this mass and number of words, with `above` and `passed` before it."""
    before = T.Select(s.counting[0] != 0, passed, above)
    within = T.Select(s.counting[0] != 0, count, mass)
    return T.And(before < s.need[0], s.need[0] <= before + within)


def is_heavy(power: Any, vocab: int) -> tirx.PrimExpr:
    """Whether an element of this exponential has any mass."""
    return power >= T.float32(2.0 ** -unit_bits(vocab))


@phase
def pass_over_row(crew, see, /, io, row, t, s):
    """Calls see(io, row, t, s, j, e) for each element, which is `x`: the e-th of a thread's j-th step.
    """
    for j in T.serial(crew.steps, unroll=False):
        crew.load(io, row, t, s, j)
        for e in T.unroll(crew.elements):
            crew.take(io, s, e)
            see(io, row, t, s, j, e)


@phase
def see(crew, vocab, /, io, row, t, s, j, e):
    """Add the mass and the count of an element to its slice."""
    weigh(crew, vocab)(s, s.x[0])
    if s.mass[0] > T.uint64(0):
        s.part[0] = s.part[0] + s.mass[0]
        if s.power[0] >= s.least[0]:
            s.part[1] = s.part[1] + s.mass[0]
        s.slice[0] = slice_of(s, s.x[0])
        if s.counting[0] != 0:
            crew.count(s, t, RADIX_BINS - 1 - s.slice[0])
        # Masses of neighbours in one slice are added together first: otherwise rows of equal elements would wait
        # for one bin.
        if s.slice[0] != s.run[0]:
            if s.gathered[0] > T.uint64(0):
                crew.add(s, t, SLICES, RADIX_BINS - 1 - s.run[0], s.gathered)
            s.run[0] = s.slice[0]
            s.gathered[0] = s.mass[0]
        else:
            s.gathered[0] = s.gathered[0] + s.mass[0]


@phase
def count_slices(crew, vocab, /, io, row, t, s):
    """The masses of the row, of what min-p leaves of it, and of each slice; if `counting`, the words of each, too.

    Reads: the row, `top`, `factor`, `least`, `counting`.
    Writes: `masses` of slices, and of the two sums behind them; `counts`; scratch.
    Barriers: several; ends with one.
    """
    s.part[0] = T.uint64(0)
    s.part[1] = T.uint64(0)
    s.run[0] = 0
    s.gathered[0] = T.uint64(0)
    pass_over_row(crew, see(crew, vocab))(io, row, t, s)
    if s.gathered[0] > T.uint64(0):
        # Bins are searched from the last one on.
        crew.add(s, t, SLICES, RADIX_BINS - 1 - s.run[0], s.gathered)
    crew.add_part(s, t, 0)
    crew.add_part(s, t, 1)
    crew.unite(s, t, SLICES)


@T.inline
def bound_slice(s):
    """Bounds of a slice, or of some, somewhat too wide, as their elements are those that `slice_of` finds in them.

    Reads: `slice`, `wide`, `top`, `factor`. Writes: `low`, `high`, `lowest`, `highest`, `unknown`; scratch is `power`.
    """
    # The width of a slice.
    s.power[0] = T.float32(1) / (s.factor[0] * T.float32(OF_OCTAVE))
    s.highest[0] = s.top[0]
    if s.slice[0] > 0:
        s.highest[0] = T.min(
            s.top[0], s.top[0] - T.Cast("float32", s.slice[0]) * s.power[0]
            + (T.abs(s.top[0]) + T.Cast("float32", s.slice[0] + 2) * s.power[0]) * T.float32(SLOP))
    s.lowest[0] = T.min_value("float32")
    if s.slice[0] + s.wide[0] < RADIX_BINS - 1:
        s.lowest[0] = T.max(
            T.min_value("float32"), s.top[0] - T.Cast("float32", s.slice[0] + s.wide[0] + 1) * s.power[0]
            - (T.abs(s.top[0]) + T.Cast("float32", s.slice[0] + s.wide[0] + 2) * s.power[0]) * T.float32(SLOP))
    s.low[0] = order_bits(s.lowest[0])
    s.high[0] = order_bits(s.highest[0])
    # The number of leading zeros of 0 is undefined.
    s.unknown[0] = T.Select(
        s.high[0] == s.low[0], 0, 32 - T.Cast("int32", T.clz(T.reinterpret("int32", s.high[0] - s.low[0]))))


@T.inline
def take_digit(s):
    """Narrow the group by one more digit."""
    s.low[0] = s.low[0] + ((T.uint32(RADIX_BINS - 1) - T.Cast("uint32", s.found[BIN])) << s.shift[0])
    s.high[0] = s.low[0] + T.min(s.high[0] - s.low[0], (T.uint32(1) << s.shift[0]) - T.uint32(1))
    s.lowest[0] = bits_value(s.low[0])
    s.highest[0] = bits_value(s.high[0])
    s.unknown[0] = T.Cast("int32", s.shift[0])
    s.above[0] = s.found[BEFORE]
    s.passed[0] = T.Cast("int32", s.found[COUNT_BEFORE])


@phase
def add_to_digit(crew, vocab, /, s, t):
    """An element of the group, to the bin of its digit in hand. Reads: `x`, `low`, `shift`."""
    weigh(crew, vocab)(s, s.x[0])
    if s.mass[0] > T.uint64(0):
        s.run[0] = T.Cast("int32", T.min(
            (order_bits(s.x[0]) - s.low[0]) >> s.shift[0], T.uint32(RADIX_BINS - 1)))
        crew.add(s, t, OTHERS, s.run[0], s.mass)
        crew.count(s, t, s.run[0])


def narrow(crew: Crew, vocab: int, alike: int) -> Phase:
    """One digit after another, until the group is one word, or all of some value; the phase is (io, row, t, s).

    Reads, writes, barriers: as of `locate`.
    """
    added = add_to_digit(crew, vocab)

    @T.inline
    def see(io, row, t, s, j, e):
        if agrees(s, s.x[0]):
            added(s, t)

    pass_over = pass_over_row(crew, see)

    @T.inline
    def phase(io, row, t, s):
        for digit in T.serial(ceildiv(32, RADIX_BITS) + 1, unroll=False):
            # Words of slices are not counted: once in any case.
            # Where columns decide, the group's bounds alone tell its words: a slice's are too wide for one word.
            if digit == 0 or (s.unknown[0] > alike and (s.found[COUNT] > T.uint64(1) or s.free[0] != 0)):
                s.shift[0] = T.Cast("uint32", T.max(s.unknown[0] - RADIX_BITS, alike))
                crew.clear(s, t)
                pass_over(io, row, t, s)
                crew.unite(s, t, OTHERS)
                crew.find(s, t, OTHERS)
                crew.meet()
                take_digit(s)

    return phase


@T.inline
def begin_locating(crew, s):
    """Nothing before the group is known. Barriers: one, as `found` has been read."""
    s.above[0] = T.uint64(0)
    s.passed[0] = 0
    crew.meet()


@phase
def locate(crew, vocab, /, io, row, t, s):
    """The slice within which a mass of `need` is reached, or, if `counting`, so many words; (io, row, t, s).

    Reads: `top`, `factor`, `need`, `counting`, and what `count_slices` has written.
    Writes: `slice`, `wide`, `low`, `high`, `lowest`, `highest`, `above`, `passed`, `found`; scratch.
    Barriers: several; begins and ends with one.
    After: the group is all words of the slice: `narrow` makes it one word, or all of some value, and words of no mass.
    """
    begin_locating(crew, s)
    crew.find(s, t, SLICES)
    crew.meet()
    s.slice[0] = T.Cast("int32", s.found[BIN])
    s.wide[0] = 0
    s.above[0] = s.found[BEFORE]
    s.passed[0] = T.Cast("int32", s.found[COUNT_BEFORE])
    bound_slice(s)


def pick_of_group(crew: Crew, vocab: int) -> Phase:
    """The word of a group within which a mass of `need` is reached: of equals the one that is as many behind the first.

    A histogram over columns tells in which part of the row it is.

    Reads: the row, the group, `above`, `need`, `found`.
    Writes: the row's token and its log-probability; scratch.
    Barriers: several.
    """
    part = ceildiv(vocab, RADIX_BINS)

    @T.inline
    def see(io, row, t, s, j, e):
        # A word without mass is in no group, even where one more digit would be needed to tell it apart.
        if agrees(s, s.x[0]):
            if is_heavy(crew.exponential(s, s.x[0]), vocab):
                # Bins are searched from the last one on.
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


@phase
def draw_by_search(crew, problem, /, io, row, t, s, top_k, top_p, min_p, uniform):
    """A word of the whole row.

    `s` is the crew's state, with nothing in any bin; `top` is the row's best element, `best` its log-probability. Each
    filter leaves a prefix of the order, and so all of them the shortest.

    Without a top_k the word is drawn from that prefix in the order of columns, else in the order of words.

    Reads: the row. Writes: the row's token and its log-probability. Barriers: several.
    """
    vocab = T.meta_var(problem.vocab)
    alike = T.meta_var(ALIKE[problem.dtype] if problem.bias + problem.capped == 0 else 0)
    s.factor[0] = io.scale * T.float32(LOG2_E)
    s.least[0] = min_p
    s.free[0] = T.Select(top_k >= vocab, 1, 0)
    s.counting[0] = 1 - s.free[0]
    s.left[0] = T.uint64(0)
    s.rank[0] = T.uint64(0)
    s.guessed[0] = 0
    if crew.guesses:
        if s.free[0] != 0 and top_p < T.float32(1):
            crew.guess(io, row, t, s, top_p)
    if s.guessed[0] == 0 and (s.free[0] == 0 or top_p < T.float32(1)):
        count_slices(crew, vocab)(io, row, t, s)
        s.left[0] = s.masses[SLICES + RADIX_BINS + 1]
    if s.counting[0] != 0:
        for b in T.serial(RADIX_BINS, unroll=False):
            s.rank[0] = s.rank[0] + T.Cast("uint64", s.counts[b])
        # Words without mass are not counted: if no more than top_k words have mass, top-k removes nothing.
        if s.rank[0] <= T.Cast("uint64", top_k):
            s.counting[0] = 0
    # First how much top-k and top-p leave, where they have a say; then the word, if it is drawn in this order.
    for turn in T.serial(3, unroll=False):
        if ((turn == 2 and s.free[0] == 0) or (turn == 1 and top_p < T.float32(1))
                or (turn == 0 and s.counting[0] != 0)):
            if turn == 2:
                s.need[0] = T.Cast("uint64", share(uniform, s.left[0])) + T.uint64(1)
            elif turn == 0:
                s.need[0] = T.Cast("uint64", top_k)
            elif s.guessed[0] == 0:
                s.need[0] = mass_share(top_p, s.masses[SLICES + RADIX_BINS])
            if s.guessed[0] == 0:
                locate(crew, vocab)(io, row, t, s)
                narrow(crew, vocab, alike)(io, row, t, s)
            if turn < 2:
                # Up to the last word of the group that is left.
                s.mass[0] = T.truncdiv(s.found[MASS], s.found[COUNT])
                if turn == 0:
                    s.mass[0] = s.above[0] + (s.need[0] - T.Cast("uint64", s.passed[0])) * s.mass[0]
                    s.counting[0] = 0
                    # The mass of what is left replaces the row's mass, of which top-p takes a share.
                    if t == 0:
                        s.masses[SLICES + RADIX_BINS] = s.mass[0]
                    crew.meet()
                else:
                    s.rank[0] = T.truncdiv(s.need[0] - s.above[0] + s.mass[0] - T.uint64(1), s.mass[0])
                    s.tie[0] = T.Cast("float32", s.mass[0]) * T.float32(2.0 ** -unit_bits(vocab))
                    s.mass[0] = s.above[0] + s.rank[0] * s.mass[0]
                s.left[0] = T.min(s.left[0], s.mass[0])
    if s.free[0] != 0:
        if top_p >= T.float32(1):
            leave_all(s)
        else:
            # Within the group's bounds words of no mass are none of it.
            s.least[0] = T.max(s.least[0], T.float32(2.0 ** -unit_bits(vocab)))
        if crew.draws:
            crew.draw(io, row, t, s, uniform)
    else:
        pick_of_group(crew, vocab)(io, row, t, s)


@T.inline
def write_word(io, row, s, at, x):
    """Write the word in a column, with element x, as the one drawn."""
    io.tokens[row] = T.Cast("int32", at)
    io.logprobs[row] = s.best[0] + (x - s.top[0]) * io.scale
# fmt: on
