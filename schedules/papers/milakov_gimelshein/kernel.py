"""The kernels of the three templates of `insertion`, in phases.

A phase is made for a `Layout` and called with (io, at, s): the kernel's arguments, the thread's `Place` and its state.
All threads of the thread block take part. A key is an element's value, as bits that order, above the complement of its
column, so that keys of a row are never equal; of a list of keys the first is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.arithmetic import LOG2_E, is_nan
from ...device.selection import FULL_WARP, MINUS_INFINITY, key_bits, key_index, key_value, make_key
from ...device.state import Buffers, local, shared
from ...softmax_topk.elements import element, write_value, write_wanted

# Probabilities a > b are those of elements in the same order if a - b exceeds APART * |a| + VANISHING: exponentials and
# products keep the order of their arguments to 2^-21, and what is below the least normal number may be 0.
APART, VANISHING = 2.0**-18, 2e-38


@dataclass(frozen=True)
class Place:
    """Where a thread works."""

    row: Any  # of the thread block; int64, as offsets into rows pass 2^31
    t: Any  # the thread


@dataclass
class SoftmaxState(Buffers):
    """What the kernel that writes probabilities keeps."""

    group: Any = shared("float32", 32)  # shared: room for a reduction over the thread block
    group_sum: Any = shared("float32", 32)  # shared: for another one
    x: Any = local("float32", lambda layout: layout.loads)  # the thread's elements of a tile
    m: Any = local("float32")  # the row's maximum
    d: Any = local("float32")  # the sum of exponentials
    inverse: Any = local("float32")  # 1 / d
    logarithm: Any = local("float32")  # ln(d)
    factor: Any = local("float32")  # scale * log2(e)


@dataclass
class State(Buffers):
    """What a kernel that selects keeps."""

    group: Any = shared("float32", 32)  # shared: room for a reduction over the thread block
    group_sum: Any = shared("float32", 32)  # shared: for another one
    # shared: a list of `kept` keys for each warp
    lists: Any = shared("uint64", lambda layout: layout.warps * layout.kept)
    joined: Any = shared("uint64", lambda layout: layout.kept)  # shared: the list of the thread block
    x: Any = local("float32", lambda layout: layout.loads)  # the thread's elements of a tile
    m: Any = local("float32")  # the largest element: of the row, or those that the thread has seen
    top: Any = local("float32")  # the row's maximum
    d: Any = local("float32")  # the sum of exponentials: of the row, or the thread's part
    factor: Any = local("float32")  # scale * log2(e)
    gate: Any = local("float32")  # the value of the list's last key: elements below it do not belong into the list
    keys: Any = local("uint64", lambda layout: layout.kept)  # the thread's list
    key: Any = local("uint64")  # scratch: a key
    best: Any = local("uint64")  # the largest key of a warp
    sure: Any = local("int32")  # whether the order of the probabilities is that of their elements


def probability(io: Any, row: Any, column: Any) -> tirx.PrimExpr:
    """In the place of `element`, for a pass over the probabilities."""
    return io.probabilities[row, column]


@phase
def unfused(layout, /, io):
    """The body of two kernels: one writes all probabilities, the other finds the k largest."""
    # fmt: off
    join = T.meta_var(join_lists(layout))
    with T.launch_thread("blockIdx.x", io.batch) as block:
        t = T.launch_thread("threadIdx.x", layout.threads)
        at = T.meta_var(Place(T.Cast("int64", block), t))
        s = T.meta_var(SoftmaxState.alloc(layout))
        s.factor[0] = io.scale * T.float32(LOG2_E)
        row_maximum(layout)(io, at, s)
        sum_elements(layout)(io, at, s)
        write_softmax(layout)(io, at, s)
    with T.launch_thread("blockIdx.x", io.batch) as block:
        t = T.launch_thread("threadIdx.x", layout.threads)
        at = T.meta_var(Place(T.Cast("int64", block), t))
        s = T.meta_var(State.alloc(layout))
        begin(io, at, s)
        scan(layout, probability, False)(io, at, s)
        join(io, at, s)
        check_order(layout)(io, at, s)
        if s.sure[0] == 0:
            T.cuda.cta_sync()
            scan(layout, element, False)(io, at, s)
            join(io, at, s)
        copy_topk(layout)(io, at, s)
        if layout.ids > 0:
            copy_asked(layout)(io, at, s)


@phase
def fused(layout, /, io):
    """The body of the one kernel of the fused forms."""
    # fmt: off
    T.device_entry()
    # One: else the compiler parks some keys of the longest lists in memory to have more thread blocks at once.
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
    block = T.cta_id([io.batch])
    t = T.thread_id([layout.threads])
    at = T.meta_var(Place(T.Cast("int64", block), t))
    s = T.meta_var(State.alloc(layout))
    begin(io, at, s)
    if layout.form == "safe":
        row_maximum(layout)(io, at, s)
    scan(layout, element, True)(io, at, s)
    combine_sums(layout)(io, at, s)
    join_lists(layout)(io, at, s)
    compute_topk(layout)(io, at, s)
    if layout.ids > 0:
        write_wanted(layout.vocab, layout.ids, layout.threads)(io, at.row, at.t, s)


# fmt: off
@T.inline
def begin(io, at, s):
    """No elements yet.

    Writes: `factor`, `d`, `m`.
    """
    s.factor[0] = io.scale * T.float32(LOG2_E)
    s.d[0] = T.float32(0)
    s.m[0] = T.min_value("float32")


@phase
def load_tile(layout, source, /, i, io, at, s):
    """The thread's elements of a tile.

    Beyond the row there is minus infinity, whose keys are below all of the row's.

    Reads: tile i of the row, by `source`. Writes: `x`. Barriers: none.
    """
    for u in T.unroll(layout.loads):
        s.x[u] = T.if_then_else(
            i * layout.tile + u * layout.threads + at.t < layout.vocab,
            source(io, at.row, i * layout.tile + u * layout.threads + at.t), -T.infinity("float32"))


@phase
def row_maximum(layout, /, io, at, s):
    """A pass for the maximum.

    Reads: the row.
    Writes: `m`, `x`.
    Barriers: those of a reduction.
    After: `m` is the row's maximum, NaN left out, in all threads.
    """
    s.m[0] = T.min_value("float32")
    for i in T.serial(layout.tiles):
        load_tile(layout, element)(i, io, at, s)
        for u in T.unroll(layout.loads):
            if s.x[u] > s.m[0]:
                s.m[0] = s.x[u]
    s.m[0] = T.cuda.cta_max(s.m[0], layout.warps, s.group.data)


@phase
def sum_elements(layout, /, io, at, s):
    """A pass for the sum.

    Reads: the row, `m`.
    Writes: `d`, `inverse`, `logarithm`, `x`.
    Barriers: those of a reduction.
    After: `d` is the sum of exp(scale * (element - m)) over the row, in all threads.
    """
    s.d[0] = T.float32(0)
    for i in T.serial(layout.tiles):
        load_tile(layout, element)(i, io, at, s)
        for u in T.unroll(layout.loads):
            s.d[0] = s.d[0] + T.exp2((s.x[u] - s.m[0]) * s.factor[0])
    s.d[0] = T.cuda.cta_sum(s.d[0], layout.warps, s.group_sum.data)
    s.inverse[0] = T.float32(1) / s.d[0]
    s.logarithm[0] = T.log(s.d[0])


@phase
def write_softmax(layout, /, io, at, s):
    """A pass that writes all probabilities.

    Reads: the row, `m`, `inverse`, `logarithm`. Writes: the workspace's row, `x`. Barriers: none.
    """
    for i in T.serial(layout.tiles):
        load_tile(layout, element)(i, io, at, s)
        for u in T.unroll(layout.loads):
            if i * layout.tile + u * layout.threads + at.t < layout.vocab:
                write_value(
                    io.probabilities, at.row, i * layout.tile + u * layout.threads + at.t,
                    (s.x[u] - s.m[0]) * io.scale, s.inverse[0], s.logarithm[0], io.log)


@phase
def insert(layout, /, s):
    """Insertion of a key into the thread's list.

    Every key is looked at: registers cannot be indexed at run time.

    Reads: `key`. Writes: `keys`, into which it is inserted; the last one drops out. Barriers: none.
    """
    kept = T.meta_var(layout.kept)
    for i in T.unroll(kept - 1):
        if s.key[0] > s.keys[kept - 2 - i]:
            s.keys[kept - 1 - i] = s.keys[kept - 2 - i]
        else:
            if s.key[0] > s.keys[kept - 1 - i]:
                s.keys[kept - 1 - i] = s.key[0]
    if s.key[0] > s.keys[0]:
        s.keys[0] = s.key[0]


@phase
def scan(layout, source, sums, /, io, at, s):
    """A pass for the thread's best elements, and with `sums` for the sum.

    Reads: the row, by `source`; `m` and `d` if `sums`.
    Writes: `keys`, `gate`, `x`, `key`; `m` and `d` if `sums`.
    Barriers: none.
    After: `keys` are the best of the thread's elements. If `sums`, `d` has grown by its exponentials, and in the online
        form `m` is the largest of them.
    """
    for i in T.unroll(layout.kept):
        s.keys[i] = T.Cast("uint64", T.uint32(MINUS_INFINITY)) << T.uint64(32)
    s.gate[0] = -T.infinity("float32")
    for i in T.serial(layout.tiles):
        load_tile(layout, source)(i, io, at, s)
        for u in T.unroll(layout.loads):
            if sums:
                if (layout.form == "online"):
                    if s.x[u] > s.m[0]:
                        s.d[0] = s.d[0] * T.exp2((s.m[0] - s.x[u]) * s.factor[0])
                        s.m[0] = s.x[u]
                s.d[0] = s.d[0] + T.exp2((s.x[u] - s.m[0]) * s.factor[0])
            if s.x[u] >= s.gate[0] or is_nan(s.x[u]):
                s.key[0] = make_key(s.x[u], i * layout.tile + u * layout.threads + at.t)
                if s.key[0] > s.keys[layout.kept - 1]:
                    insert(layout)(s)
                    s.gate[0] = key_value(s.keys[layout.kept - 1])


@phase
def combine_sums(layout, /, io, at, s):
    """From the threads' sums to the row's.

    Reads: `m`, `d`.
    Writes: `top`, `d`.
    Barriers: those of one or two reductions.
    After: `top` is the row's maximum and `d` the sum of exp(scale * (element - top)), in all threads.
    """
    s.top[0] = s.m[0]
    if layout.form == "online":
        s.top[0] = T.cuda.cta_max(s.m[0], layout.warps, s.group.data)
        s.d[0] = s.d[0] * T.exp2((s.m[0] - s.top[0]) * s.factor[0])
    s.d[0] = T.cuda.cta_sum(s.d[0], layout.warps, s.group_sum.data)


@T.inline
def warp_best(s):
    """The largest of the lanes' keys. Reads: `key`. Writes: `best`."""
    high = T.alloc_local([1], "uint32")
    low = T.alloc_local([1], "uint32")
    high[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), key_bits(s.key[0]))
    low[0] = T.Select(
        key_bits(s.key[0]) == high[0], T.Cast("uint32", s.key[0] & T.uint64(0xFFFFFFFF)), T.uint32(0))
    low[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), low[0])
    s.best[0] = (T.Cast("uint64", high[0]) << T.uint64(32)) | T.Cast("uint64", low[0])


@phase
def join_lists(layout, /, io, at, s):
    """From the threads' lists to the row's.

    Reads: `keys`.
    Writes: `joined`, `lists`, `key`, `best`, `keys`.
    Barriers: two, the last one at the end.
    After: `joined` are the best of all threads' keys. Each warp has joined its lanes' lists, and the first warp those
        of the warps; each time the largest head of the lists is taken off, `kept` times. `keys` are lost.
    """
    kept = T.meta_var(layout.kept)
    for r in T.serial(kept):
        s.key[0] = s.keys[0]
        warp_best(s)
        if s.key[0] == s.best[0]:
            for i in T.unroll(kept - 1):
                s.keys[i] = s.keys[i + 1]
            s.keys[kept - 1] = T.uint64(0)
        if at.t % 32 == 0:
            s.lists[at.t // 32 * kept + r] = s.best[0]
    T.cuda.cta_sync()
    if at.t < 32:
        place = T.alloc_local([1], "int32")
        place[0] = 0
        for r in T.serial(kept):
            s.key[0] = T.uint64(0)
            if at.t < layout.warps and place[0] < kept:
                s.key[0] = s.lists[at.t * kept + place[0]]
            warp_best(s)
            if s.key[0] == s.best[0]:
                place[0] = place[0] + 1
            if at.t == 0:
                s.joined[r] = s.best[0]
    T.cuda.cta_sync()


@phase
def check_order(layout, /, io, at, s):
    """Whether probabilities tell the order of their elements.

    Reads: `joined`, keys of probabilities.
    Writes: `sure`.
    Barriers: none.
    After: `sure` is 1 if each probability exceeds the next by more than rounding explains.
    """
    s.sure[0] = 1
    for i in T.serial(layout.kept - 1):
        # No `not`: the simplifier would turn the comparison round, and NaN passes neither.
        s.sure[0] = T.Select(
            key_value(s.joined[i]) - key_value(s.joined[i + 1])
            > T.abs(key_value(s.joined[i])) * T.float32(APART) + T.float32(VANISHING),
            s.sure[0], 0)


@phase
def copy_topk(layout, /, io, at, s):
    """Values from the probabilities, and indices.

    Reads: `joined`, the workspace. Writes: values and indices. Barriers: none.
    """
    if at.t < layout.k:
        io.indices[at.row, at.t] = T.Cast("int64", key_index(s.joined[at.t]))
        io.values[at.row, at.t] = io.probabilities[at.row, T.Cast("int32", key_index(s.joined[at.t]))]


@phase
def copy_asked(layout, /, io, at, s):
    """The probabilities of given columns, from those of all.

    Reads: `ids`, the workspace. Writes: `given`. Barriers: none.
    """
    threads = T.meta_var(layout.threads)
    for i in T.serial((layout.ids - at.t + (threads - 1)) // threads):
        io.given[at.row, i * threads + at.t] = T.if_then_else(
            io.ids[at.row, i * threads + at.t] >= T.int64(0)
            and io.ids[at.row, i * threads + at.t] < T.int64(layout.vocab),
            io.probabilities[at.row, io.ids[at.row, i * threads + at.t]], T.float32("nan"))


@phase
def compute_topk(layout, /, io, at, s):
    """Values from the elements, and indices.

    Reads: `joined`, `top`, `d`. Writes: values and indices. Barriers: none.
    """
    if at.t < layout.k:
        io.indices[at.row, at.t] = T.Cast("int64", key_index(s.joined[at.t]))
        write_value(
            io.values, at.row, at.t, (key_value(s.joined[at.t]) - s.top[0]) * io.scale,
            T.float32(1) / s.d[0], T.log(s.d[0]), io.log)
# fmt: on
