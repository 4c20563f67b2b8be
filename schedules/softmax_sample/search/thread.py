"""A CPU's thread as the crew of a search."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from ...device.arithmetic import LN_2, exp_nonpositive
from ...device.selection import RADIX_BINS
from ...softmax_topk.elements import element_on_cpu as element
from ..blocks import BEFORE, BIN, BINS, COUNT, COUNT_BEFORE, MASS
from .crew import LOADS, OTHERS, SLICES, Crew, State, agrees, draw_by_search, is_before, is_heavy, reaches, write_word


# fmt: off
@phase
def load_elements(vocab, /, io, row, t, s, j):
    """Load the elements of the j-th step, -inf past the end of the row. Writes: `x`, except its first element, which is
    the one in hand.
    """
    for u in T.unroll(LOADS):
        s.x[1 + u] = -T.infinity("float32")
        if j * LOADS + u < vocab:
            s.x[1 + u] = element(io, row, j * LOADS + u)


@T.inline
def take_element(io, s, e):
    """`x` is the next element of the vector in hand."""
    s.x[0] = s.x[1 + e]


@T.inline
def clear_bins(s, t):
    """Set masses and counts of the bins to 0."""
    for b in range(BINS):
        s.masses[OTHERS + b] = T.uint64(0)
        s.counts[b] = 0


@T.inline
def clear_slices(s):
    """Set masses and counts of the slices to 0."""
    for b in range(BINS):
        s.masses[SLICES + b] = T.uint64(0)
        s.counts[b] = 0


@T.inline
def add_plainly(s, t, start, at, mass):
    """Add a mass to a bin."""
    s.masses[start + at] = s.masses[start + at] + mass[0]


@T.inline
def count_plainly(s, t, at):
    """Count an element of a bin."""
    s.counts[at] = s.counts[at] + 1


@T.inline
def add_own_part(s, t, i):
    """The i-th total is the thread's own."""
    s.masses[SLICES + RADIX_BINS + i] = s.part[i]


@T.inline
def find_by_thread(s, t, start):
    """Find the bin in which the goal is reached, bin by bin."""
    s.part[0] = s.above[0]
    s.part[1] = T.Cast("uint64", s.passed[0])
    for b in range(RADIX_BINS):
        s.mass[0] = s.masses[start + RADIX_BINS - 1 - b]
        s.other[0] = T.Cast("uint64", s.counts[RADIX_BINS - 1 - b])
        if reaches(s, s.part[0], s.part[1], s.mass[0], s.other[0]):
            s.found[BIN] = T.Cast("uint64", b)
            s.found[BEFORE] = s.part[0]
            s.found[MASS] = s.mass[0]
            s.found[COUNT] = s.other[0]
            s.found[COUNT_BEFORE] = s.part[1]
        s.part[0] = s.part[0] + s.mass[0]
        s.part[1] = s.part[1] + s.other[0]


@phase
def pick_by_thread(vocab, /, io, row, t, s, first, last):
    """Find the word by looking at one element after another."""
    for i in range(last - first):
        s.x[0] = element(io, row, first + i)
        if agrees(s, s.x[0]):
            if is_heavy(exponential_on_cpu(s, s.x[0]), vocab):
                if s.rank[0] == T.uint64(0):
                    write_word(io, row, s, first + i, s.x[0])
                s.rank[0] = s.rank[0] - T.uint64(1)


@phase
def draw_by_thread(vocab, /, io, row, t, s, uniform):
    """Column after column: once for the sum of all that is left, and once up to the word."""
    s.chosen[0] = 0
    for turn in range(2):
        s.part[0] = s.rank[0]  # how many of the group are left
        s.total[0] = T.float64(0)
        s.number[0] = -1
        for i in range(vocab):
            if s.number[0] < 0:
                s.x[0] = element(io, row, i)
                s.power[0] = exponential_on_cpu(s, s.x[0])
                if s.power[0] < s.least[0]:
                    s.power[0] = T.float32(0)
                elif not is_before(s, s.x[0]):
                    if s.part[0] > T.uint64(0) and agrees(s, s.x[0]) and is_heavy(s.power[0], vocab):
                        s.part[0] = s.part[0] - T.uint64(1)
                    else:
                        s.power[0] = T.float32(0)
                if s.power[0] > T.float32(0):
                    s.total[0] = s.total[0] + T.Cast("float64", s.power[0])
                    s.chosen[0] = i
                    if turn == 1 and s.total[0] > s.aim[0]:
                        s.number[0] = i
        s.aim[0] = T.Cast("float64", uniform) * s.total[0]
    s.x[0] = element(io, row, s.chosen[0])
    write_word(io, row, s, s.chosen[0], s.x[0])


def search_by_thread(problem: SoftmaxSample) -> Phase:
    """The search of a CPU's thread; the phase is (io, row, first, best, top_k, top_p, min_p, uniform)."""
    vocab = problem.vocab
    crew = Crew(
        elements=LOADS,
        steps=ceildiv(vocab, LOADS),
        element=element,
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
        draw=draw_by_thread(vocab),
    )
    search = draw_by_search(crew, problem)

    @T.inline
    def phase(io, row, first, best, top_k, top_p, min_p, uniform):
        s = T.meta_var(State.alloc(
            T.sblock_alloc_buffer, T.sblock_alloc_buffer, number=T.sblock_alloc_buffer((1,), "int32"),
            total=T.sblock_alloc_buffer((1,), "float64"), aim=T.sblock_alloc_buffer((1,), "float64")))
        clear_slices(s)
        s.top[0] = element(io, row, first)
        s.best[0] = best
        search(io, row, 0, s, top_k, top_p, min_p, uniform)

    return phase
# fmt: on


def exponential_on_cpu(s: State, x: Any) -> tirx.PrimExpr:
    return exp_nonpositive((x - s.top[0]) * s.factor[0] * T.float32(LN_2))
