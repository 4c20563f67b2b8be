"""The function of `row_scan`, in phases.

A phase is called with (io, row, s), and a chunk's number where it is about one: the function's arguments, the thread's
row and what it keeps of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ...device.arithmetic import exp_nonpositive, is_nan
from ...device.loops import in_parallel
from ...device.state import named
from ..elements import element_on_cpu as element
from ..elements import write_given, write_value
from ..ending import Ending, Own, own_of, own_on_cpu
from ..interface import cpu_program
from .keys import heap_key, index_of, value_of
from .space import FEW, Extents


@dataclass(frozen=True)
class State:
    """What a thread keeps of its row."""

    top: tirx.Buffer  # a chunk's largest element of each lane, then its sum of exponentials
    part: tirx.Buffer  # each lane's sum of exponentials, one term per chunk: float64, as float32 would round each time
    m: tirx.Buffer  # the largest element so far
    d: tirx.Buffer  # the sum of exponentials
    tau: tirx.Buffer  # the k-th largest element so far
    heap: tirx.Buffer  # the keys of the k best so far, the least one first
    key: tirx.Buffer  # the key that is inserted into the heap
    node: tirx.Buffer  # the node at which the heap has a hole
    child: tirx.Buffer  # the lesser of the hole's children
    fold: tirx.Buffer  # scratch: fold[0] becomes the chunk's maximum
    j: tirx.Buffer  # a column

    @classmethod
    def alloc(cls, extents: Extents) -> State:
        return named(
            cls(
                top=T.sblock_alloc_buffer((extents.lanes,), "float32"),
                part=T.sblock_alloc_buffer((extents.lanes,), "float64"),
                m=T.sblock_alloc_buffer((1,), "float32"),
                d=T.sblock_alloc_buffer((1,), "float32"),
                tau=T.sblock_alloc_buffer((1,), "float32"),
                heap=T.sblock_alloc_buffer((extents.k,), "int64"),
                key=T.sblock_alloc_buffer((1,), "int64"),
                node=T.sblock_alloc_buffer((1,), "int32"),
                child=T.sblock_alloc_buffer((1,), "int32"),
                fold=T.sblock_alloc_buffer((extents.lanes,), "float32"),
                j=T.sblock_alloc_buffer((1,), "int32"),
            )
        )


def function(extents: Extents, own: Own | None = None, ending: Ending | None = None) -> Phase:
    """The function's body, over the operator's arguments (see `interface.cpu_program`); `own` as `ending.own_of`."""
    own = own or (lambda io, row: io)
    begin, take_maxima, rescale = begin_row(extents), chunk_maximum(extents), rescale_sums(extents)
    offer_chunk, add_chunk, finish = offer_from_chunk(extents), add_exponentials(extents), finish_row(extents)
    start_over, sort, write = refill_heap(extents), sort_heap(extents), write_outputs(extents)

    few = max(1, FEW // extents.vocab)

    # fmt: off
    @T.inline
    def take(io, b):
        with T.sblock("row"):
            row = T.axis.spatial(io.batch, b)
            T.reads(io.logits[row, 0:extents.vocab])
            T.writes(io.values[row, 0:extents.k], io.indices[row, 0:extents.k])
            s = T.meta_var(State.alloc(extents))
            of_row = T.meta_var(own(io, row))
            begin(of_row, row, s)
            for c in range(extents.chunks):
                take_maxima(of_row, row, s, c)
                if s.fold[0] > s.m[0]:
                    rescale(of_row, row, s)
                if s.fold[0] > s.tau[0]:
                    offer_chunk(of_row, row, s, c)
                add_chunk(of_row, row, s, c)
            finish(of_row, row, s)
            # A NaN makes the sum NaN. So does an infinity; its row is then put in order twice, with the same result.
            if is_nan(s.d[0]):
                start_over(of_row, row, s)
            sort(of_row, row, s)
            write(of_row, row, s)
            if ending is not None:
                ending.finish(of_row, row, 0, None, None)
    # fmt: on
    return in_parallel(take, lambda io: io.batch, few)


def vectors_of(extents: Extents, c: Any) -> tirx.PrimExpr:
    """Vectors of chunk c: the last one has what is left."""
    return T.min(extents.step, extents.whole - c * extents.step)


# fmt: off
@T.inline
def sift_down(s, size):
    """Insert a key into the heap.

    Reads: `key`, `node`. Writes: `heap`: the key sinks from the hole at the node of the min-heap of this size.
    """
    s.child[0] = s.node[0] * 2 + 1
    while s.child[0] < size:
        if s.child[0] + 1 < size:
            if s.heap[s.child[0] + 1] < s.heap[s.child[0]]:
                s.child[0] = s.child[0] + 1
        if s.heap[s.child[0]] < s.key[0]:
            s.heap[s.node[0]] = s.heap[s.child[0]]
            s.node[0] = s.child[0]
            s.child[0] = s.node[0] * 2 + 1
        else:
            s.child[0] = size
    s.heap[s.node[0]] = s.key[0]


@phase
def fill_heap(k, /, io, row, s):
    """Make a heap of the first k elements.

    Reads: the first k elements. Writes: `heap`. After: it holds them as a heap.
    """
    for j in range(k):
        s.heap[j] = heap_key(element(io, row, j), j)
    for j in range(k // 2):
        s.node[0] = k // 2 - 1 - j
        s.key[0] = s.heap[s.node[0]]
        sift_down(s, k)


@phase
def offer(k, /, io, row, s, j):
    """An element into the heap if it belongs there.

    Reads: the element in column j. Writes: `heap`, if the element is better than the k-th best.
    """
    s.key[0] = heap_key(element(io, row, j), j)
    if s.key[0] > s.heap[0]:
        s.node[0] = 0
        sift_down(s, k)


@phase
def begin_row(extents, /, io, row, s):
    """Begin a row: the first k elements in the heap, and sums of 0.

    Reads: the first k elements. Writes: `m`, `part`, `heap`, `tau`. After: the heap holds the first k elements.
    """
    s.m[0] = T.min_value("float32")
    for lane in T.vectorized(extents.lanes):
        s.part[lane] = T.float64(0)
    fill_heap(extents.k)(io, row, s)
    s.tau[0] = value_of(s.heap[0])


@phase
def chunk_maximum(extents, /, io, row, s, c):
    """A chunk's maximum.

    Reads: chunk c. Writes: `top`, `fold`. After: `top` has each lane's largest element, `fold[0]` the chunk's.
    """
    lanes = T.meta_var(extents.lanes)
    for lane in T.vectorized(lanes):
        s.top[lane] = T.min_value("float32")
    for u in range(vectors_of(extents, c)):
        for lane in T.vectorized(lanes):
            s.top[lane] = T.max(s.top[lane], element(io, row, (c * extents.step + u) * lanes + lane))
    # By halving, in vectors; lanes past the half only repeat a comparison.
    for lane in T.vectorized(lanes):
        s.fold[lane] = s.top[lane]
    for h in T.unroll(lanes.bit_length() - 1):
        for lane in T.vectorized(lanes // 2):
            s.fold[lane] = T.max(s.fold[lane], s.fold[lane + (lanes >> (h + 1))])


@phase
def rescale_sums(extents, /, io, row, s):
    """Make the sums relative to a new maximum.

    Reads: `fold[0]`, a new maximum of the row. Writes: `part`, `m`. After: the sums are relative to it.
    """
    for lane in T.vectorized(extents.lanes):
        s.part[lane] = s.part[lane] * T.Cast("float64", T.exp((s.m[0] - s.fold[0]) * io.scale))
    s.m[0] = s.fold[0]


@phase
def offer_from_chunk(extents, /, io, row, s, c):
    """A chunk's elements that reach the threshold, into the heap.

    Few lanes have the elements that made the chunk exceed the threshold. A lane's elements are `lanes` columns apart,
    so they are not offered in the order of columns, and equals of the threshold must be offered too: keys decide.

    Reads: chunk c, `top`, `tau`. Writes: `heap`, `tau`. After: the heap holds the k best of all up to this chunk.
    """
    for lane in range(extents.lanes):
        if s.top[lane] >= s.tau[0]:
            for u in range(vectors_of(extents, c)):
                s.j[0] = (c * extents.step + u) * extents.lanes + lane
                if element(io, row, s.j[0]) >= s.tau[0] and s.j[0] >= extents.k:
                    offer(extents.k)(io, row, s, s.j[0])
                    s.tau[0] = value_of(s.heap[0])


@phase
def add_exponentials(extents, /, io, row, s, c):
    """Add a chunk's exponentials to the sums.

    A chunk's exponentials are added to each other first, since each addition to a long row's sum rounds.

    Reads: chunk c, `m`. Writes: `part`; as scratch `top`.
    """
    lanes = T.meta_var(extents.lanes)
    for lane in T.vectorized(lanes):
        s.top[lane] = T.float32(0)
    for u in range(vectors_of(extents, c)):
        for lane in T.vectorized(lanes):
            s.top[lane] = s.top[lane] + exp_nonpositive(
                (element(io, row, (c * extents.step + u) * lanes + lane) - s.m[0]) * io.scale
            )
    for lane in T.vectorized(lanes):
        s.part[lane] = s.part[lane] + T.Cast("float64", s.top[lane])


@phase
def finish_row(extents, /, io, row, s):
    """One sum, and the elements that no vector covers.

    Reads: `part`, the elements after the last vector.
    Writes: `d`, `m`, `heap`, `tau`.
    After: `d` is the sum of exp(scale * (element - m)) over the row, and the heap holds the k best, but for NaN.
    """
    scalars = T.meta_var(extents.whole * extents.lanes)
    for lane in range(extents.lanes - 1):
        s.part[0] = s.part[0] + s.part[lane + 1]
    s.d[0] = T.Cast("float32", s.part[0])
    for i in range(extents.vocab - scalars):
        s.top[0] = element(io, row, scalars + i)
        if s.top[0] > s.m[0]:
            s.d[0] = s.d[0] * T.exp((s.m[0] - s.top[0]) * io.scale)
            s.m[0] = s.top[0]
        s.d[0] = s.d[0] + T.exp((s.top[0] - s.m[0]) * io.scale)
        if s.top[0] > s.tau[0] and scalars + i >= extents.k:
            offer(extents.k)(io, row, s, scalars + i)
            s.tau[0] = value_of(s.heap[0])


@phase
def refill_heap(extents, /, io, row, s):
    """Fill the heap again, for a row with a NaN.

    Reads: the row. Writes: `heap`. After: it holds the k best, NaN first.
    """
    fill_heap(extents.k)(io, row, s)
    for i in range(extents.vocab - extents.k):
        offer(extents.k)(io, row, s, extents.k + i)


@phase
def sort_heap(extents, /, io, row, s):
    """Sort the keys.

    Reads, writes: `heap`. After: its keys are in descending order (heapsort: the least goes to the end).
    """
    k = T.meta_var(extents.k)
    for i in range(k - 1):
        s.key[0] = s.heap[k - 1 - i]
        s.heap[k - 1 - i] = s.heap[0]
        s.node[0] = 0
        sift_down(s, k - 1 - i)


@phase
def write_outputs(extents, /, io, row, s):
    """Values, indices and given columns.

    Reads: `heap`, `m`, `d`, `ids` and the elements in these columns. Writes: all outputs.
    """
    for i in range(extents.k):
        io.indices[row, i] = index_of(s.heap[i])
        write_value(
            io.values, row, i, (value_of(s.heap[i]) - s.m[0]) * io.scale,
            T.float32(1) / s.d[0], T.log(s.d[0]), io.log)
    if extents.ids > 0:
        for i in range(extents.ids):
            write_given(
                io.given, row, i, io.ids[row, i], extents.vocab,
                (element(io, row, io.ids[row, i]) - s.m[0]) * io.scale,
                T.float32(1) / s.d[0], T.log(s.d[0]), io.log)
# fmt: on


def program(problem: SoftmaxTopk, decisions: Decisions) -> Program:
    """The program of a point."""
    extents = Extents(problem.vocab, problem.k, problem.ids, decisions["chunk"], decisions["simd"])
    return cpu_program(problem, function(extents, own_of(problem, of_row=own_on_cpu)))
