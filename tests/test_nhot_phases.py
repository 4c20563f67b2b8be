"""Phases of the N-hot lookup's GPU kernels, each run alone in the emulator on state that the test makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
from cases import SM90
from tvm.script import tirx as T

from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.core.arguments import function
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import Workspace
from tvm_sparse.emulation import run_on_cpu
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup
from tvm_sparse.schedules.nhot_lookup.dealt_gather import kernel as dealt
from tvm_sparse.schedules.nhot_lookup.dealt_gather.space import Extents as DealtExtents
from tvm_sparse.schedules.nhot_lookup.warp_gather import kernel as warp
from tvm_sparse.schedules.nhot_lookup.warp_gather.space import WARP, default
from tvm_sparse.schedules.nhot_lookup.warp_gather.space import Extents as WarpExtents

pytestmark = pytest.mark.drawn

TARGET = target_of(SM90)
FAR = np.iinfo("int32")


def run(
    problem: NhotLookup,
    body: Callable[..., None],
    inputs: Sequence[np.ndarray],
    given: np.ndarray,
    seen: tuple[int, int],
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel of `body(io, given, seen)` leaves in `seen`, a row of floats a thread, and in the output.

    `given`: int32 of which the body makes its state. Both results hold NaN where nothing was written.
    """

    @T.inline
    def whole(io):
        body(io, io.given, io.seen)

    own = Workspace("given", given.shape, "int32"), Workspace("seen", seen, "float32")
    module = tvm.IRModule({"main": function(problem, whole, own, index="int64")})
    out = np.full((len(inputs[0]) - 1, problem.width), np.nan, problem.dtype)
    found = np.full(seen, np.nan, "float32")
    run_on_cpu(module, TARGET, [*inputs, out, given, found], pipeline="tirx", seed=seed)
    return found, out


def example(key: str, counts: Sequence[int], seed: int = 0) -> tuple[NhotLookup, list[np.ndarray]]:
    """A weighted problem, and inputs with so many entries in each row."""
    problem = parse(f"nhot_lookup/rows={len(counts)},{key},weighted=1")
    assert isinstance(problem, NhotLookup)
    rng = np.random.default_rng(seed)
    nnz = sum(counts)
    return problem, [
        np.concatenate([[0], np.cumsum(counts)]).astype(problem.index),
        rng.integers(problem.vocab, size=nnz).astype(problem.index),
        rng.standard_normal(nnz).astype(problem.dtype),
        rng.standard_normal((problem.vocab, problem.width)).astype(problem.dtype),
    ]


def products(inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Each entry's value times its table row, in float64."""
    _, indices, values, table = inputs
    return values.astype("float64")[:, None] * table[indices]


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# ---- warp_gather ---------------------------------------------------------------------------------


def warp_extents(problem: NhotLookup, **decisions: int) -> WarpExtents:
    point = {**default(problem, SM90), **decisions}
    return WarpExtents.of(problem, point)


def in_one_block(e: WarpExtents, phase: Callable[..., None]) -> Callable[..., None]:
    """A kernel of one thread block for `phase(s, io, at, given, seen, t)`, its sums 0."""
    place = warp.place_warps(e)

    @T.inline
    def body(io, given, seen):
        T.device_entry()
        block = T.cta_id([1])
        t = T.thread_id([e.threads])
        s = T.meta_var(warp.State.alloc(e))
        at = T.meta_var(warp.Place.alloc())
        place(at, io, block, t)
        for v in T.unroll(e.vec):
            s.acc[v] = T.float32(0)
        phase(s, io, at, given, seen, t)

    return body


@pytest.mark.parametrize("begin", [0, 5])
def test_a_warp_gathers_its_share(begin: int) -> None:
    """Windows of 32 entries and a part of one, by batches of 12 that do not divide them; a group has every fourth."""
    problem, inputs = example("vocab=40,width=16,nonzeros=90", [90])
    e = warp_extents(problem, column_lanes=8, vec=2, loads=3)
    load_window, gather = warp.load_window(e), warp.gather_entries(e)

    @T.inline
    def phase(s, io, at, given, seen, t):
        s.first = given[0]
        s.last = given[1]
        load_window(s, io, s.first, at.lane, s.window)
        gather(s, io, at)
        for v in T.unroll(e.vec):
            seen[t, v] = s.acc[v]

    end = 83
    seen, _ = run(problem, in_one_block(e, phase), inputs, np.array([begin, end], "int32"), (WARP, e.vec))
    terms = products(inputs)[begin:end]
    for lane in range(WARP):
        group, column = lane // e.lanes, lane % e.lanes * e.vec
        close(seen[lane], terms[group :: e.groups, column : column + e.vec].sum(axis=0))


def test_ids_that_are_read_ahead_are_kept_within_the_table() -> None:
    """They may be any numbers while the producer kernel runs; lanes beyond the share take row 0."""
    problem, inputs = example("vocab=40,width=32,nonzeros=6", [6])
    inputs[1] = np.array([3, -1, 39, 40, FAR.max, FAR.min], "int32")
    e = warp_extents(problem, column_lanes=32, vec=1, loads=8, overlap=2)
    guess, read_ahead = warp.guess_entries(e), warp.read_ids_ahead(e)

    @T.inline
    def phase(s, io, at, given, seen, t):
        guess(s, at, given[0])
        read_ahead(s, io, at)
        seen[t, 0] = T.Cast("float32", s.guessed_column)
        for u in T.unroll(e.loads):
            seen[t, 1 + u] = T.Cast("float32", s.table_row[u])

    seen, _ = run(problem, in_one_block(e, phase), inputs, np.array([6], "int32"), (WARP, 1 + e.loads))
    kept = [3, 0, 39, 39, 39, 0]
    np.testing.assert_array_equal(seen[:, 0], kept + [0] * (WARP - 6))
    np.testing.assert_array_equal(seen[:, 1:], [kept + [0] * 2] * WARP)  # beyond the last entry that one again


@pytest.mark.parametrize("counts", [[7, 7, 7], [5, 9, 7]], ids=["right", "wrong"])
def test_guessed_ids_are_read_anew_where_rows_begin_elsewhere(counts: list[int]) -> None:
    """Row 1 is guessed to have entries 7 to 13."""
    problem, inputs = example("vocab=40,width=8,nonzeros=7", counts)
    e = warp_extents(problem, column_lanes=4, vec=2, loads=1)
    guess, ends, check = warp.guess_entries(e), warp.read_row_ends(e), warp.check_guessed_ids(e)

    @T.inline
    def phase(s, io, at, given, seen, t):
        at.row = T.int64(1)
        ends(s, io, at)
        guess(s, at, given[0])
        check(s, io, at)
        seen[t, 0] = T.Cast("float32", s.first)
        seen[t, 1] = T.Cast("float32", s.last)
        seen[t, 2] = T.Cast("float32", s.window.column)
        seen[t, 3] = s.window.value

    seen, _ = run(problem, in_one_block(e, phase), inputs, np.array([7], "int32"), (WARP, 4))
    indptr, indices, values, _ = inputs
    first, last = indptr[1:3]
    have = last - first
    assert (seen[:, :2] == [first, last]).all()
    np.testing.assert_array_equal(seen[:have, 2], indices[first:last])
    np.testing.assert_array_equal(seen[:have, 3], values[first:last])
    assert (seen[have:, 2:] == 0).all()


# What a row of 6 entries from entry 6 on was taken to be: guessed start, stop and ids, and whether that counts.
AHEAD: dict[str, tuple[int, int, Callable[[np.ndarray], np.ndarray], bool]] = {
    "right": (6, 12, lambda ids: ids, True),
    "another id in one lane": (6, 12, lambda ids: ids + (np.arange(ids.size) == 4), False),
    "another start": (5, 12, lambda ids: ids, False),
    "another stop": (6, 13, lambda ids: ids, False),
    "no entry": (6, 6, lambda ids: 0 * ids, False),
}


def test_what_was_loaded_ahead_counts_only_if_ends_and_ids_are_right() -> None:
    problem, inputs = example("vocab=40,width=16,nonzeros=6", [6, 6, 6])
    e = warp_extents(problem, column_lanes=16, vec=1, loads=2, overlap=2)
    load_ahead, choose = warp.load_rows_ahead(e), warp.choose_row(e)
    ends, check = warp.read_row_ends(e), warp.check_what_was_read_ahead(e)

    @T.inline
    def phase(s, io, at, given, seen, t):
        at.row = T.int64(1)
        s.guessed[0] = given[0]
        s.guessed[1] = given[1]
        s.first = s.guessed[0]
        s.last = s.guessed[1]
        s.count = s.last - s.first
        s.guessed_column = given[2 + at.lane]
        for u in T.unroll(e.loads):
            choose(s, u, 0, at.lane, s.guessed_column, False)
        load_ahead(s, io, at)
        ends(s, io, at)
        check(s, io, at)
        seen[t, 0] = T.Cast("float32", s.done)
        seen[t, 1] = T.Cast("float32", s.first)
        seen[t, 2] = T.Cast("float32", s.last)
        seen[t, 3] = T.Cast("float32", s.window.column)
        seen[t, 4] = s.acc[0]

    body = in_one_block(e, phase)
    terms = products(inputs)[6:12]
    lanes = np.arange(WARP)
    for seed, (name, (start, stop, taken, counts)) in enumerate(AHEAD.items()):
        ids = np.zeros(WARP, "int32")
        ids[:6] = inputs[1][6:12]
        given = np.concatenate([[start, stop], taken(ids)]).astype("int32")
        seen, _ = run(problem, body, inputs, given, (WARP, 5), seed)
        assert (seen[:, 0] == counts).all(), name
        assert (seen[:, 1:3] == [6, 12]).all(), name
        np.testing.assert_array_equal(seen[:, 3], ids, name)
        added = terms[:4] if counts else terms[:0]  # a batch: two loads in each of two groups
        close(seen[:, 4], [added[lane // 16 :: 2, lane % 16].sum() for lane in lanes])


def test_sums_of_groups_are_added_and_stored_once() -> None:
    """Two tiles in a thread block, of a row of 13 columns: no column beyond is written."""
    problem, inputs = example("vocab=4,width=13,nonzeros=1", [1])
    e = warp_extents(problem, column_lanes=8, vec=1, loads=1, tiles=2)
    groups, store = warp.reduce_groups(e), warp.store_tile(e)

    @T.inline
    def phase(s, io, at, given, seen, t):
        s.acc[0] = T.Cast("float32", given[t])
        groups(s)
        seen[t, 0] = s.acc[0]
        store(s, io, at)

    given = np.random.default_rng(0).integers(-99, 99, e.threads).astype("int32")  # their sums are exact
    for seed in range(2):
        seen, out = run(problem, in_one_block(e, phase), inputs, given, (e.threads, 1), seed)
        by_tile = given.reshape(2, e.groups, e.lanes).sum(axis=1)  # tile, lane
        np.testing.assert_array_equal(seen.reshape(2, e.groups, e.lanes), by_tile[:, None].repeat(e.groups, 1))
        np.testing.assert_array_equal(out, by_tile.reshape(1, 16)[:, :13])


def test_spare_warps_and_lanes_store_nothing() -> None:
    problem, inputs = example("vocab=4,width=6,nonzeros=1", [1])
    e = warp_extents(problem, column_lanes=4, vec=2, loads=1, tiles=2)
    store = warp.store_tile(e)

    @T.inline
    def phase(s, io, at, given, seen, t):
        seen[t, 0] = T.Cast("float32", at.row)
        for v in T.unroll(e.vec):
            s.acc[v] = T.Cast("float32", given[0] + t * e.vec + v)
        store(s, io, at)

    seen, out = run(problem, in_one_block(e, phase), inputs, np.array([7], "int32"), (2 * WARP, 1))
    assert (seen == 0).all()  # the second warp repeats the only row, without storing its 71...
    np.testing.assert_array_equal(out, [7 + np.arange(6)])


# ---- dealt_gather --------------------------------------------------------------------------------


def dealt_extents(problem: NhotLookup, **decisions: int) -> DealtExtents:
    return DealtExtents.of(problem, {"overlap": 0, **decisions})


def in_blocks(e: DealtExtents, blocks: int, share: int, more: int, phase: Callable[..., None]) -> Callable[..., None]:
    """A kernel of so many thread blocks for `phase(s, io, at, given, seen, thread)`, its sums 0."""
    deal = dealt.deal_out(e)

    @T.inline
    def body(io, given, seen):
        T.device_entry()
        block = T.cta_id([blocks])
        t = T.thread_id([e.threads])
        s = T.meta_var(dealt.State.alloc(e))
        at = T.meta_var(dealt.Place.alloc())
        deal(at, block, share, more, t)
        for v in T.unroll(e.vec):
            s.acc[v] = T.float32(0)
        s.done = 0
        phase(s, io, at, given, seen, block * e.threads + t)

    return body


@pytest.mark.parametrize(("width", "unit"), [(24, 2), (36, 1)], ids=["whole-sectors", "rows-that-end-within-a-sector"])
def test_sectors_are_dealt_out_evenly_and_once(width: int, unit: int) -> None:
    problem, inputs = example(f"vocab=4,width={width},nonzeros=6", [6] * 5)
    vectors = 5 * width // 4
    e = dealt_extents(problem, blocks=4, reduce_threads=3)
    assert (e.vec, e.unit) == (4, unit)
    share, more = divmod(vectors // unit, e.blocks)

    @T.inline
    def phase(s, io, at, given, seen, thread):
        seen[thread, 0] = T.Cast("float32", at.first)
        seen[thread, 1] = T.Cast("float32", at.have)
        seen[thread, 2] = T.Cast("float32", at.slot)
        seen[thread, 3] = T.Cast("float32", at.group)
        seen[thread, 4] = T.Cast("float32", at.row)
        seen[thread, 5] = T.Cast("float32", at.column)

    body = in_blocks(e, e.blocks, share, more, phase)
    seen, _ = run(problem, body, inputs, np.zeros(1, "int32"), (e.blocks * e.threads, 6))
    first, have, slot, group, row, column = seen.astype(int).T
    counts = have.reshape(e.blocks, e.threads)[:, 0]
    assert counts.sum() == vectors and counts.max() - counts.min() in (0, unit) and (counts % unit == 0).all()
    assert (first % unit == 0).all()
    busy = (slot < have) & (group < e.groups)
    np.testing.assert_array_equal(row[busy] * e.row_vectors + column[busy] // e.vec, (first + slot)[busy])
    worked_for = (first + slot)[busy] * e.groups + group[busy]
    np.testing.assert_array_equal(np.sort(worked_for), np.arange(vectors * e.groups))


@pytest.mark.parametrize("counts", [[5, 5, 5], [5, 4, 6], [5, 5, 3]], ids=["right", "another-begin", "another-end"])
def test_a_guessed_row_is_added_only_if_it_is_there(counts: list[int]) -> None:
    """Rows of 5 entries for 2 threads, of which the second has one less; then what is left, from where it is."""
    problem, inputs = example("vocab=40,width=8,nonzeros=5", counts)
    # A guess reads no entry beyond the arrays, because the call has as many entries as 3 rows of 5.
    inputs[1:3] = [np.concatenate([a, a[:5]])[:15] for a in inputs[1:3]]
    e = dealt_extents(problem, blocks=1, reduce_threads=2)
    guessed, rest = dealt.gather_where_guessed(e), dealt.gather_entries(e)

    @T.inline
    def phase(s, io, at, given, seen, thread):
        if at.slot < at.have and at.group < e.groups:
            guessed(s, io, at)
            seen[thread, 0] = T.Cast("float32", s.done)
            for v in T.unroll(e.vec):
                seen[thread, 1 + v] = s.acc[v]
            rest(s, io, at)
            for v in T.unroll(e.vec):
                seen[thread, 1 + e.vec + v] = s.acc[v]

    seen, _ = run(problem, in_blocks(e, 1, 3, 0, phase), inputs, np.zeros(1, "int32"), (e.threads, 1 + 2 * e.vec))
    terms, indptr = products(inputs), inputs[0]
    for group in range(2):
        for slot in range(6):
            row, column = divmod(slot, 2)
            own = terms[indptr[row] : indptr[row + 1], column * 4 : column * 4 + 4]
            # Shares of 3 entries go to the two groups in turn.
            wanted = own[np.arange(len(own)) // e.loads % 2 == group].sum(axis=0)
            thread = seen[group * e.slots + slot]
            right = indptr[row] == 5 * row and indptr[row + 1] == 5 * row + 5
            assert thread[0] == right
            close(thread[1:5], wanted if right else 0 * wanted)
            close(thread[5:], wanted)


def test_sums_of_the_threads_of_a_vector_are_added_and_stored() -> None:
    """By two thread blocks with unequal shares, of halves: two quads of partial sums a vector, an odd pitch."""
    problem, inputs = example("vocab=4,width=24,nonzeros=9,dtype=float16", [9] * 3)
    e = dealt_extents(problem, blocks=2, reduce_threads=3)
    assert (e.vec, e.unit, e.quads, e.slots, e.pitch) == (8, 1, 2, 5, 12)
    leave, store = dealt.leave_partial_sums(e), dealt.sum_groups_and_store(e)

    @T.inline
    def phase(s, io, at, given, seen, thread):
        for v in T.unroll(e.vec):
            s.acc[v] = T.Cast("float32", (given[thread] + v * v) % 61)
        leave(s, at)
        T.cuda.cta_sync()
        store(s, io, at, thread % e.threads)

    given = np.random.default_rng(0).integers(0, 61, 2 * e.threads).astype("int32")
    _, out = run(problem, in_blocks(e, 2, 4, 1, phase), inputs, given, (1, 1))
    sums = (given.reshape(2, e.threads)[..., None] + np.arange(e.vec) ** 2) % 61
    by_slot = sums[:, : e.groups * e.slots].reshape(2, e.groups, e.slots, e.vec).sum(axis=1)
    np.testing.assert_array_equal(out.reshape(-1, e.vec), np.concatenate([by_slot[0], by_slot[1, :4]]))
