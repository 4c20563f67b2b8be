"""Top-p's bound between two logits, so that few words are weighed one by one: by thread blocks, without a top_k.

1. One pass weighs all words of a large probability and one of `SAMPLE` others, by slices of probability. At most one
   word in `HEAVY` is that large, and no other one tells much. So, with the sum of the others' squares for the standard
   error, slices are known between which the bound lies.
2. One pass adds up what lies above these slices, and lists the words within, each thread its own (`Blocks.listed`).
3. Histograms of digits of the listed words find the bound. If it is not among them, or a list is too short, `guessed`
   is 0, and the whole row is searched.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ...device.selection import RADIX_BINS, RADIX_BITS
from ..blocks import BIN, COPIES, COUNT, Blocks
from .crew import (
    OTHERS,
    SLICES,
    Crew,
    add_to_digit,
    begin_locating,
    bound_slice,
    mass_share,
    pass_over_row,
    slice_of,
    take_digit,
    unit_bits,
)

# One of so many words that are not heavy is weighed.
SAMPLE = 8
# A heavy word has HEAVY times the mean probability.
HEAVY = 32
# How far the bracket reaches to both sides, in standard errors.
ERRORS = 3.5
# The row's mass in units of the sample, whose sums are modulo 2^32: a sum that overflows is a bound that is not found.
SAMPLE_BITS = 28


# fmt: off
@T.inline
def raise_to_power(s):
    """To `power`, the exponential of `x`; 0 below 2^-126, as without the steps that exp2 takes for such results."""
    T.ptx.ex2.approx.ftz.f32(s.power[0], (s.x[0] - s.top[0]) * s.factor[0])


@T.inline
def weigh(s, t, times):
    """Add the mass of an element, `times` times, to its slice."""
    raise_to_power(s)
    s.added[0] = T.Cast("uint32", s.power[0] * (s.goal[0] * times))
    if s.added[0] > T.uint32(0):
        s.part[0] = s.part[0] + T.Cast("uint64", s.added[0])
        T.evaluate(T.cuda.atomic_add(
            s.lows.ptr_to([(SLICES + RADIX_BINS - 1 - slice_of(s, s.x[0])) * COPIES + t % COPIES]), s.added[0]))


@T.inline
def see(io, row, t, s, j, e):
    """Weigh an element: every SAMPLE-th one of a vector for the others, too, where it is small."""
    if e % SAMPLE == 0:
        weigh(s, t, T.Select(s.x[0] >= s.lowest[0], T.float32(1), T.float32(SAMPLE)))
        if s.x[0] < s.lowest[0]:
            s.part[1] = s.part[1] + T.Cast("uint64", s.added[0]) * T.Cast("uint64", s.added[0])
    else:
        if s.x[0] >= s.lowest[0]:
            weigh(s, t, T.float32(1))


@phase
def weigh_sample(blocks, crew, /, io, row, t, s):
    """Masses of slices by a sample.

    Reads: the row, `top`, `factor`, `total`.
    Writes: `masses` of slices, and after them their sum and that of the squares of those that stand for others;
        scratch, `lowest` among it.
    Barriers: several; ends with one.
    """
    s.part[0] = T.uint64(0)
    s.part[1] = T.uint64(0)
    s.goal[0] = T.float32(2.0 ** SAMPLE_BITS) / s.total[0]
    # From here on words are heavy; some roundings more or less say the same.
    s.lowest[0] = s.top[0] + T.log2(s.total[0] * T.float32(HEAVY / blocks.problem.vocab)) / s.factor[0]
    pass_over_row(crew, see)(io, row, t, s)
    crew.add_part(s, t, 0)
    crew.add_part(s, t, 1)
    crew.unite(s, t, SLICES)


def list_words(blocks: Blocks, crew: Crew) -> Phase:
    """The words of a bracket, and the mass above it; the phase is (io, row, t, s).

    Reads: the row, `lowest`, `highest`: both within the bracket.
    Writes: `list`; `listed`: where the thread's next word would be, which are `threads` apart; `part`: the list is
        too short, and the thread's mass of words above the bracket.
    Barriers: none.
    """
    threads, most, vocab = blocks.threads, blocks.listed, blocks.problem.vocab

    def is_within(s: Any) -> Any:
        return T.And(T.Not(s.x[0] > s.highest[0]), s.x[0] >= s.lowest[0])

    @T.inline
    def see(io, row, t, s, j, e):
        raise_to_power(s)
        # Without nested branches, which take longer.
        s.sum[0] = s.sum[0] + T.Select(s.x[0] > s.highest[0], s.power[0], T.float32(0))
        if is_within(s) and s.listed[0] < most * threads:
            s.list[s.listed[0]] = s.x[0]
        s.listed[0] = s.listed[0] + T.Select(is_within(s), threads, 0)

    pass_over = pass_over_row(crew, see)

    @T.inline
    def phase(io, row, t, s):
        s.sum[0] = T.float32(0)
        s.listed[0] = t
        pass_over(io, row, t, s)
        s.part[0] = T.Select(s.listed[0] >= (most + 1) * threads, T.uint64(1), T.uint64(0))
        s.part[1] = T.Cast("uint64", s.sum[0] * T.float32(2.0 ** unit_bits(vocab)))

    return phase


@phase
def guess(blocks, crew, alike, /, io, row, t, s, top_p):
    """Top-p's bound by a bracket, and writes `guessed`.

    Reads: the row, `top`, `factor`, `total`: the sum of its exponentials, which is the row's mass here.
    Writes: as `locate` and `narrow`, `need`; scratch.
    Barriers: several; begins and ends with one.
    After: `guessed` is 1 and the group is one word, or all of some value; or it is 0, as the bound lies elsewhere.
    """
    begin_locating(crew, s)
    weigh_sample(blocks, crew)(io, row, t, s)
    s.guessed[0] = 0
    # The row's best word is heavy, or all others are sampled; but all of a sample may be masked.
    if s.masses[SLICES + RADIX_BINS] > T.uint64(0):
        # How much the share may be wrong by: its parts above and below the bound are wrong by their own.
        s.sum[0] = T.max(top_p, T.float32(0))
        s.left[0] = T.Cast("uint64", T.float32(ERRORS) * T.sqrt(
            s.sum[0] * (T.float32(1) - s.sum[0]) * T.Cast("float32", s.masses[SLICES + RADIX_BINS + 1])
        )) + T.uint64(1)
        s.need[0] = mass_share(top_p, s.masses[SLICES + RADIX_BINS])
        s.need[0] = T.Select(s.need[0] > s.left[0], s.need[0] - s.left[0], T.uint64(1))
        crew.find(s, t, SLICES)
        crew.meet()
        s.slice[0] = T.Cast("int32", s.found[BIN])
        s.need[0] = T.min(
            mass_share(top_p, s.masses[SLICES + RADIX_BINS]) + s.left[0], s.masses[SLICES + RADIX_BINS])
        crew.meet()
        crew.find(s, t, SLICES)
        crew.meet()
        s.wide[0] = T.Cast("int32", s.found[BIN]) - s.slice[0]
        bound_slice(s)
        list_words(blocks, crew)(io, row, t, s)
        s.slice[0] = 0
        s.wide[0] = RADIX_BINS
        for digit in T.serial(ceildiv(32, RADIX_BITS) + 1, unroll=False):
            if digit == 0 or (s.guessed[0] != 0 and s.unknown[0] > alike and s.found[COUNT] > T.uint64(1)):
                s.shift[0] = T.Cast("uint32", T.max(s.unknown[0] - RADIX_BITS, alike))
                for i in T.serial(T.min(s.listed[0] // blocks.threads, blocks.listed), unroll=False):
                    s.x[0] = s.list[i * blocks.threads + t]
                    if s.x[0] >= s.lowest[0] and s.x[0] <= s.highest[0]:
                        add_to_digit(crew, blocks.problem.vocab)(s, t)
                if digit == 0:
                    crew.add_part(s, t, 0)
                    crew.add_part(s, t, 1)
                    # It has been read.
                    if t == 0:
                        s.found[COUNT] = T.uint64(0)
                crew.unite(s, t, OTHERS)
                if digit == 0:
                    s.above[0] = s.masses[OTHERS + RADIX_BINS + 1]
                    s.need[0] = mass_share(top_p, s.total[0] * T.float32(2.0 ** unit_bits(blocks.problem.vocab)))
                crew.find(s, t, OTHERS)
                crew.meet()
                if s.found[COUNT] > T.uint64(0) and (digit > 0 or s.masses[OTHERS + RADIX_BINS] == T.uint64(0)):
                    s.guessed[0] = 1
                    take_digit(s)
# fmt: on
