"""Phases of warp_rows, each run alone in the emulator, on rows of several kinds and on state that the test has made.

What a phase left is copied to the kernel's workspace, an int64 array with as many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cases import SM90, thorough
from tvm.script import tirx as T

from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.core.template import Workspace
from tvm_sparse.emulation import run_on_cpu
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk
from tvm_sparse.schedules.device.arithmetic import LOG2_E
from tvm_sparse.schedules.device.selection import MINUS_INFINITY, PLUS_INFINITY
from tvm_sparse.schedules.device.words import held_address
from tvm_sparse.schedules.softmax_topk.interface import gpu_program
from tvm_sparse.schedules.softmax_topk.warp_rows import bins, bisection, counting, levels, row
from tvm_sparse.schedules.softmax_topk.warp_rows.space import CROWD, WARP, Layout
from tvm_sparse.schedules.softmax_topk.warp_rows.state import Place, State

pytestmark = pytest.mark.drawn

# All elements of a row of this length are in one vector a lane: lane l has columns 4 * l to 4 * l + 3.
VOCAB = 128


def layout_of(vocab: int, k: int) -> Layout:
    return Layout.of(SoftmaxTopk(1, vocab, k), {"rows": 1, "overlap": 0, "lanes": 32})


def run(
    layout: Layout,
    x: np.ndarray,
    phases: Sequence[Callable[..., Any]],
    see: Callable[..., Any],
    seen: np.ndarray,
    seed: int = 0,
) -> list[np.ndarray]:
    """Run the phases on rows x, a warp each, and then `see(io, at, s, seen)`, which writes a row of `seen`.

    Gives the outputs, NaN and the least integer where nothing was written.
    """
    load, maxima = row.load_row(layout), row.find_maxima(layout)

    def one_by_one(io: Any, at: Place, s: State) -> None:
        for phase in phases:
            phase(io, at, s)

    # fmt: off
    @T.inline
    def body(io):
        T.device_entry()
        block = T.cta_id([io.batch])
        t = T.thread_id([WARP])
        s = T.meta_var(State.alloc(layout, layout.bytes))
        at = T.meta_var(Place(lane=t, warp=0, row=T.Cast("int64", block), lead=0, keys=0, left=layout.vocab))
        s.factor[0] = io.scale * T.float32(LOG2_E)
        load(io, at, s)
        maxima(io, at, s)
        one_by_one(io, at, s)
        see(io, at, s, io.seen)
    # fmt: on

    problem = SoftmaxTopk(len(x), layout.vocab, layout.k)
    program = gpu_program(problem, body, (Workspace("seen", ("batch", seen.shape[1]), "int64"),))
    outputs = problem.empty_outputs()
    arguments = [x, 1.0, 0, *outputs, seen]
    run_on_cpu(program.module, target_of(SM90), arguments, pipeline=program.pipeline, seed=seed)
    return outputs


def order_bits(x: np.ndarray) -> np.ndarray:
    """Integers that order as the floats do, NaN above all."""
    bits = (np.where(np.isnan(x), np.float32(np.nan), x) + np.float32(0)).astype(np.float32).view(np.uint32)
    bits = np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits)
    return np.where(bits >> 31 != 0, ~bits, bits | np.uint32(1 << 31)).astype(np.int64)


def columns(keys: np.ndarray) -> np.ndarray:
    """Of keys the columns."""
    return (0xFFFFFFFF - (keys & 0xFFFFFFFF)).astype(np.int64)


def first_of(x: np.ndarray) -> np.ndarray:
    """The columns of a row in the order in which the operator has them."""
    return np.lexsort((np.arange(len(x)), -order_bits(x)))


@T.inline
def see_bounds(io, at, s, seen):
    if at.lane == 0:
        seen[at.row, 0] = T.Cast("int64", s.top_bits[0])
        seen[at.row, 1] = T.Cast("int64", s.lower[0])


KINDS = ("random", "ties", "nan", "masked", "equal")


def rows_of(vocab: int, k: int) -> np.ndarray:
    """A row of each kind."""
    x = np.random.default_rng(vocab + k).standard_normal((len(KINDS), vocab)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, :: max(vocab // (k + 1), 1)] = np.nan  # more than k
    x[3, 10:] = -np.inf
    x[4, ::2], x[4, 1::2] = 0.0, -0.0
    return x


@pytest.mark.parametrize("k", [1, thorough(5), 16])
def test_lane_maxima_give_a_threshold(k: int) -> None:
    layout, x, seen = layout_of(VOCAB, k), rows_of(VOCAB, k), np.zeros((len(KINDS), 2), np.int64)
    run(layout, x, [row.bound_by_lanes(layout)], see_bounds, seen)
    lanes = np.sort(np.fmax.reduce(x.reshape(len(x), WARP, 4), axis=2))[:, ::-1]
    assert seen[:, 0].tolist() == order_bits(np.fmax.reduce(x, axis=1)).tolist()
    assert seen[:, 1].tolist() == order_bits(lanes[:, k - 1]).tolist()


@pytest.mark.parametrize("k", [17, thorough(40), 100])
def test_group_maxima_give_a_bound(k: int) -> None:
    # Without NaN: what a group of nothing else gives is left to the bisection.
    layout, x, seen = layout_of(VOCAB, k), rows_of(VOCAB, k)[[0, 1, 3, 4]], np.zeros((4, 2), np.int64)
    run(layout, x, [row.bound_by_groups(layout)], see_bounds, seen)
    for elements, (top, lower) in zip(x, seen, strict=True):
        # Element e of a lane is in group e % groups.
        groups = np.fmax.reduce(elements.reshape(WARP, -1, layout.groups), axis=1)
        finite = elements[elements > -np.inf]
        bound = np.min(groups) if np.min(groups) > -np.inf else np.min(finite)
        assert top == order_bits(np.fmax.reduce(elements)) and lower == order_bits(bound)


def test_small_k_collects_what_reaches_the_threshold() -> None:
    layout, x = layout_of(VOCAB, 12), rows_of(VOCAB, 12)
    seen = np.zeros((len(KINDS), layout.keys + 3), np.int64)

    @T.inline
    def see(io, at, s, seen):
        T.cuda.warp_sync()
        if at.lane == 0:
            seen[at.row, 0] = T.Cast("int64", s.settled[0])
            seen[at.row, 1] = T.Cast("int64", s.size[0])
            seen[at.row, 2] = T.Cast("int64", s.lower[0])
            if s.settled[0] != 0:
                for i in T.serial(s.size[0]):
                    seen[at.row, 3 + i] = T.Cast("int64", s.keys[i])

    run(layout, x, [row.bound_by_lanes(layout), counting.collect_reached(layout)], see, seen)
    for elements, (settled, size, lower, *keys) in zip(x, seen, strict=True):
        reaching = np.flatnonzero((order_bits(elements) >= lower) & ~(elements == -np.inf))
        assert size == len(reaching) and settled == (12 <= size <= layout.room)
        assert not settled or sorted(columns(np.array(keys[:size]))) == reaching.tolist()
    # The row with ten elements above minus infinity is left to the bisection.
    assert seen[:, 0].tolist() == [1, 1, 1, 0, 1]


def bins_up_to_scan(layout: Layout) -> list[Callable[..., Any]]:
    return [bins.clear_bins(layout), row.bound_by_groups(layout), bins.count_bins(layout), bins.scan_bins(layout)]


@pytest.mark.parametrize(("vocab", "k"), [(512, 40), (512, 200)])
def test_bins_hold_what_is_up_to_the_cut_in_order(vocab: int, k: int) -> None:
    """Sparse, then dense: the two ways to fill bins."""
    layout, x = layout_of(vocab, k), rows_of(vocab, k)[:1]
    assert layout.sparse == (k == 40)
    seen = np.zeros((1, layout.keys + layout.bins + 3), np.int64)

    @T.inline
    def see(io, at, s, seen):
        T.cuda.warp_sync()
        if at.lane == 0:
            seen[at.row, 0] = T.Cast("int64", s.settled[0])
            seen[at.row, 1] = T.Cast("int64", s.size[0])
            seen[at.row, 2] = T.Cast("int64", s.cut[0])
            for b in T.serial(layout.bins):
                seen[at.row, 3 + b] = T.Cast("int64", s.counts[4 + b])
            for i in T.serial(s.size[0]):
                seen[at.row, 3 + layout.bins + i] = T.Cast("int64", s.keys[i])

    run(layout, x, [*bins_up_to_scan(layout), bins.fill_bins(layout)], see, seen)
    settled, size, cut = seen[0, :3]
    ends, keys = seen[0, 3 : 3 + layout.bins][: cut + 1], seen[0, 3 + layout.bins :][:size]
    starts = np.concatenate([[0], ends[:-1]])
    assert settled and k <= size <= layout.room and starts[-1] < k and ends[-1] == size
    assert (starts <= ends).all() and (ends - starts).max() <= CROWD
    expected = first_of(x[0])[:size]
    for start, end in zip(starts, ends, strict=True):
        assert sorted(columns(keys[start:end])) == sorted(expected[start:end])


def test_crowded_bins_are_not_settled() -> None:
    layout, x, seen = layout_of(512, 40), rows_of(512, 40), np.full((len(KINDS), 1), -1)

    @T.inline
    def see(io, at, s, seen):
        if at.lane == 0:
            seen[at.row, 0] = T.Cast("int64", s.settled[0])

    run(layout, x, bins_up_to_scan(layout), see, seen)
    assert dict(zip(KINDS, seen[:, 0], strict=True)) == {"random": 1, "ties": 0, "nan": 0, "masked": 0, "equal": 0}


@pytest.mark.parametrize(("vocab", "k"), [(512, 40), (1000, 400), (300, 300)])
def test_few_values_are_placed_one_after_another(vocab: int, k: int) -> None:
    """And given up where they are many; the order has the elements of the row alone."""
    layout, x = layout_of(vocab, k), rows_of(vocab, k)
    seen = np.zeros((len(KINDS), k + 1), np.int64)

    @T.inline
    def see(io, at, s, seen):
        if at.lane == 0:
            seen[at.row, 0] = T.Cast("int64", s.settled[0])
            for i in T.serial(k):
                seen[at.row, 1 + i] = T.Cast("int64", s.keys[i])

    run(layout, x, [levels.order_row(layout), levels.place_levels(layout)], see, seen)
    # The row that is masked has ten values before that which many have: too many.
    settled = {"random": 0, "ties": 1, "nan": 1, "masked": 0, "equal": 1}
    assert dict(zip(KINDS, seen[:, 0], strict=True)) == settled
    for elements, (done, *keys) in zip(x, seen, strict=True):
        if done:
            assert columns(np.array(keys)).tolist() == first_of(elements)[:k].tolist()


@pytest.mark.parametrize("k", [3, thorough(16), 30])
def test_bisection_selects_the_k_largest(k: int) -> None:
    """From the widest interval: at least k elements are no less than its lower end."""
    layout, x = layout_of(256, k), rows_of(256, k)
    seen = np.zeros((len(KINDS), layout.keys + 4), np.int64)

    @T.inline
    def widest(io, at, s):
        s.lower[0] = T.uint32(MINUS_INFINITY)
        s.upper[0] = T.uint32(PLUS_INFINITY)

    @T.inline
    def see(io, at, s, seen):
        T.cuda.warp_sync()
        if at.lane == 0:
            seen[at.row, 0] = T.Cast("int64", s.size[0])
            seen[at.row, 1] = T.Cast("int64", s.equals[0])
            seen[at.row, 2] = T.Cast("int64", s.lower[0])
            seen[at.row, 3] = T.Cast("int64", s.cut[0])
            for i in T.serial(s.size[0]):
                seen[at.row, 4 + i] = T.Cast("int64", s.keys[i])

    bound = (row.bound_by_lanes if layout.counted else row.bound_by_groups)(layout)
    phases = [bound, row.sum_exponentials(layout), widest]
    run(layout, x, [*phases, bisection.bisect(layout), bisection.collect_selected(layout)], see, seen)
    for elements, (size, equals, lower, above, *keys) in zip(x, seen, strict=True):
        bits, best = order_bits(elements), first_of(elements)
        chosen = columns(np.array(keys[:size]))
        assert above == (bits > lower).sum() and size <= layout.selected
        assert sorted(chosen) == sorted(best[:size])
        if equals:
            # Of elements that equal the k-th largest the first columns, behind the others.
            assert size == k and above + equals == k and lower == bits[best[k - 1]]
            assert chosen[above:].tolist() == best[above:k].tolist()
        else:
            assert size == above >= k
    # NaN, minus infinity and equals cannot be told apart by their bits.
    assert [bool(equals) for equals in seen[2:, 1]] == [True, k > 10, True]


@pytest.mark.parametrize("size", [thorough(64), 61, 1])
def test_sort_puts_keys_in_order(size: int) -> None:
    layout, x = layout_of(256, 50), rows_of(256, 50)[:1]
    seen = np.random.default_rng(size).integers(1, 2**62, size=(1, layout.sorted_keys))
    expected = np.sort(seen[0, :size])[::-1]

    @T.inline
    def given(io, at, s):
        for i in T.serial((size - at.lane + 31) // 32):
            s.keys[i * 32 + at.lane] = T.Cast("uint64", io.seen[at.row, i * 32 + at.lane])
        s.size[0] = size
        s.cut[0] = 1

    @T.inline
    def see(io, at, s, seen):
        for i in T.serial(layout.sorted_keys // 32):
            seen[at.row, i * 32 + at.lane] = T.Cast("int64", s.keys[i * 32 + at.lane])

    run(layout, x, [given, bisection.sort_keys(layout)], see, seen)
    assert seen[0, :size].tolist() == expected.tolist() and not seen[0, size:].any()


def test_ranking_by_counting_writes_by_rank() -> None:
    """Of given keys the k largest are written, and their values are exponentials of the differences to the top."""
    layout, x = layout_of(VOCAB, 7), rows_of(VOCAB, 7)[:1]
    chosen = first_of(x[0])[:40]
    seen = order_bits(x[0, chosen]).astype(np.uint64) << np.uint64(32) | (0xFFFFFFFF - chosen).astype(np.uint64)
    seen = seen.view(np.int64)[None].copy()
    np.random.default_rng(0).shuffle(seen[0])

    @T.inline
    def given(io, at, s):
        for i in T.serial((40 - at.lane + 31) // 32):
            s.keys[i * 32 + at.lane] = T.Cast("uint64", io.seen[at.row, i * 32 + at.lane])
        s.size[0] = 40
        s.outputs_at[0] = held_address("u64", io.values.ptr_to([at.row, 0]))
        s.outputs_at[1] = held_address("u64", io.indices.ptr_to([at.row, 0]))

    @T.inline
    def see(io, at, s, seen):
        T.evaluate(0)

    phases = [row.bound_by_lanes(layout), row.sum_exponentials(layout), given, counting.rank_by_counting(layout)]
    values, indices = run(layout, x, phases, see, seen)
    assert indices[0].tolist() == first_of(x[0])[:7].tolist()
    power = np.exp(x[0].astype(np.float64) - x[0].max())
    np.testing.assert_allclose(values[0], power[indices[0]] / power.sum(), rtol=2e-5)
