"""Softmax + top-k on a CPU: one pass over the row in chunks that stay in L1, a heap behind a threshold.

A thread takes a row. Of each chunk it finds the maximum (a vector loop), rescales the running sum if that rose,
and adds the chunk's exponentials (a second vector loop, now from L1): Algorithm 3 of Milakov & Gimelshein with one
rescaling a chunk instead of one an element. Elements are looked at one by one only in chunks whose maximum
exceeds the k-th best so far; those that do go into a binary heap of k keys. Nothing else touches the row, so main
memory is read once, and the cost hardly grows with k.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, Program, Table, Template

# Elements between two looks at the threshold: a float32 chunk of 1024 is 4 KB of the 32 KB or more of L1.
CHUNK = (64, 128, 256, 512, 1024)
# Elements a vector loop steps by; beyond the register width they are independent accumulators.
LANES = (8, 16, 32, 64)


def space(problem: Problem, machine: Machine) -> Table:
    return {"chunk": CHUNK, "simd": LANES}


def default(problem: Problem, machine: Machine) -> Decisions:
    return {"chunk": 256, "simd": 16}


def build(problem: Problem, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..device.arithmetic import exp_nonpositive, is_nan, key_index, key_value, order_key
    from .elements import element, write_given, write_value
    from .interface import cpu_program

    vocab, k, n = problem.vocab, problem.k, problem.ids
    chunk, lanes = decisions["chunk"], decisions["simd"]
    whole = vocab // lanes  # vectors
    step = chunk // lanes  # vectors a chunk
    chunks = -(-whole // step)
    scalars = whole * lanes  # the first element that no vector covers
    halvings = lanes.bit_length() - 1
    lowest = T.min_value("float32")

    # fmt: off
    @T.inline
    def sift_down(heap, node, child, key, size):
        """Let `key` sink from the hole at `node` of the min-heap of `size` keys."""
        child[0] = node[0] * 2 + 1
        while child[0] < size:
            if child[0] + 1 < size:
                if heap[child[0] + 1] < heap[child[0]]:
                    child[0] = child[0] + 1
            if heap[child[0]] < key[0]:
                heap[node[0]] = heap[child[0]]
                node[0] = child[0]
                child[0] = node[0] * 2 + 1
            else:
                child[0] = size
        heap[node[0]] = key[0]

    @T.inline
    def fill_heap(io, row, heap, node, child, key):
        """The first k elements as a heap."""
        for j in range(k):
            heap[j] = order_key(element(io, row, j), j)
        for j in range(k // 2):
            node[0] = k // 2 - 1 - j
            key[0] = heap[node[0]]
            sift_down(heap, node, child, key, k)

    @T.inline
    def offer(io, row, j, heap, node, child, key):
        """Put element j into the heap if it is better than the k-th."""
        key[0] = order_key(element(io, row, j), j)
        if key[0] > heap[0]:
            node[0] = 0
            sift_down(heap, node, child, key, k)

    @T.inline
    def body(io):
        for b in T.parallel(io.batch):
            with T.sblock("row"):
                row = T.axis.spatial(io.batch, b)
                T.reads(io.logits[row, 0:vocab])
                T.writes(io.values[row, 0:k], io.indices[row, 0:k])
                top = T.sblock_alloc_buffer((lanes,), "float32")
                part = T.sblock_alloc_buffer((lanes,), "float32")
                m = T.sblock_alloc_buffer((1,), "float32")
                d = T.sblock_alloc_buffer((1,), "float32")
                tau = T.sblock_alloc_buffer((1,), "float32")
                heap = T.sblock_alloc_buffer((k,), "int64")
                key = T.sblock_alloc_buffer((1,), "int64")
                node = T.sblock_alloc_buffer((1,), "int32")
                child = T.sblock_alloc_buffer((1,), "int32")
                fold = T.sblock_alloc_buffer((lanes,), "float32")
                j = T.sblock_alloc_buffer((1,), "int32")
                m[0] = lowest
                for lane in T.vectorized(lanes):
                    part[lane] = T.float32(0)
                fill_heap(io, row, heap, node, child, key)
                tau[0] = key_value(heap[0])
                for c in range(chunks):
                    for lane in T.vectorized(lanes):
                        top[lane] = lowest
                    for u in range(T.min(step, whole - c * step)):
                        for lane in T.vectorized(lanes):
                            top[lane] = T.max(top[lane], element(io, row, (c * step + u) * lanes + lane))
                    # The chunk's maximum by halving, in vectors; lanes past the half only repeat a comparison.
                    for lane in T.vectorized(lanes):
                        fold[lane] = top[lane]
                    for h in T.unroll(halvings):
                        for lane in T.vectorized(lanes // 2):
                            fold[lane] = T.max(fold[lane], fold[lane + (lanes >> (h + 1))])
                    if fold[0] > m[0]:
                        for lane in T.vectorized(lanes):
                            part[lane] = part[lane] * T.exp((m[0] - fold[0]) * io.scale)
                        m[0] = fold[0]
                    # Few lanes have the elements that made the chunk exceed the threshold; each is a column of the
                    # chunk, not in index order, so equals must be offered too: the keys decide.
                    if fold[0] > tau[0]:
                        for lane in range(lanes):
                            if top[lane] >= tau[0]:
                                for u in range(T.min(step, whole - c * step)):
                                    j[0] = (c * step + u) * lanes + lane
                                    if element(io, row, j[0]) >= tau[0] and j[0] >= k:
                                        offer(io, row, j[0], heap, node, child, key)
                                        tau[0] = key_value(heap[0])
                    for u in range(T.min(step, whole - c * step)):
                        for lane in T.vectorized(lanes):
                            part[lane] = part[lane] + exp_nonpositive(
                                (element(io, row, (c * step + u) * lanes + lane) - m[0]) * io.scale
                            )
                d[0] = T.float32(0)
                for lane in range(lanes):
                    d[0] = d[0] + part[lane]
                for i in range(vocab - scalars):
                    top[0] = element(io, row, scalars + i)
                    if top[0] > m[0]:
                        d[0] = d[0] * T.exp((m[0] - top[0]) * io.scale)
                        m[0] = top[0]
                    d[0] = d[0] + T.exp((top[0] - m[0]) * io.scale)
                    if top[0] > tau[0] and scalars + i >= k:
                        offer(io, row, scalars + i, heap, node, child, key)
                        tau[0] = key_value(heap[0])
                # A NaN passes no comparison, but it shows in the sum; only then is the order taken over again with
                # NaN first (a row with +inf comes here too, and gets the same order twice).
                if is_nan(d[0]):
                    fill_heap(io, row, heap, node, child, key)
                    for i in range(vocab - k):
                        offer(io, row, k + i, heap, node, child, key)
                # Heapsort: the least of what is left goes to the end, which leaves the keys descending.
                for i in range(k - 1):
                    key[0] = heap[k - 1 - i]
                    heap[k - 1 - i] = heap[0]
                    node[0] = 0
                    sift_down(heap, node, child, key, k - 1 - i)
                for i in range(k):
                    io.indices[row, i] = key_index(heap[i])
                    write_value(io.values, row, i, (key_value(heap[i]) - m[0]) * io.scale,
                                T.float32(1) / d[0], T.log(d[0]), io.log)
                if n > 0:
                    for i in range(n):
                        write_given(
                            io.given, row, i, io.ids[row, i], vocab,
                            (element(io, row, io.ids[row, i]) - m[0]) * io.scale,
                            T.float32(1) / d[0], T.log(d[0]), io.log)
    # fmt: on
    return cpu_program(problem, body)


row_scan = Template(
    name="row_scan",
    version=2,
    operator="softmax_topk",
    kind="llvm",
    summary="a thread a row, one pass in chunks, a heap behind a threshold",
    space=space,
    default=default,
    program=build,
)
