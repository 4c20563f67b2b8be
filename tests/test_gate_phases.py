"""Phases of threshold_gate and cluster_gate, each run alone in the emulator on state that a test makes.

`Alone` builds a kernel around one phase: it allocates the state, fills the buffers that are given, calls the phase and
copies the wanted buffers out. So a phase is compared with what NumPy makes of the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases import SM90, thorough
from tvm.script import tirx as T

from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.script import quicken_parser
from tvm_sparse.core.template import Workspace
from tvm_sparse.emulation import run_on_cpu
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk
from tvm_sparse.schedules.device.cluster import cluster_barrier
from tvm_sparse.schedules.softmax_topk import finishing
from tvm_sparse.schedules.softmax_topk.interface import gpu_program
from tvm_sparse.schedules.softmax_topk.threshold_gate import (
    Layout,
    cluster,
    deferred,
    kernel,
    rank,
    sample,
    stream,
    survivors,
    tiles,
)
from tvm_sparse.schedules.softmax_topk.threshold_gate.layout import CROWD
from tvm_sparse.schedules.softmax_topk.threshold_gate.state import (
    ALL_AGAIN,
    LOWER_AGAIN,
    READINGS,
    SETTLED,
    SUM_AGAIN,
    WRITTEN,
    State,
)

pytestmark = pytest.mark.drawn

TARGET = target_of(SM90)
POINT = {"threads": 64, "vectors": 2, "stages": 1, "overlap": 0, "prefetch": 0, "deferred": 0, "unroll": 1}
LOWEST, INF, NAN = np.finfo("float32").min, np.inf, np.nan
LOG2_E = 1.4426950408889634


# ---- the harness ---------------------------------------------------------------------------------


class Region(NamedTuple):
    """Where a buffer of the state lies in the words that a block is given or leaves behind."""

    name: str
    scope: str
    dtype: str
    extent: int
    first: int

    @property
    def each(self) -> int:
        """Words of an element."""
        return 2 if self.dtype.endswith("64") else 1


def of_words(dtype: str, saved: Any, block: Any, at: Any) -> Any:
    """The element of a dtype at word `at`."""
    if dtype in ("uint64", "int64"):
        both = T.Cast("uint64", saved[block, at]) | (T.Cast("uint64", saved[block, at + 1]) << T.uint64(32))
        return both if dtype == "uint64" else T.reinterpret("int64", both)
    return T.Cast("uint16", saved[block, at]) if dtype == "uint16" else T.reinterpret(dtype, saved[block, at])


def word_of(dtype: str, value: Any, word: int) -> Any:
    """One of the words of an element."""
    if dtype in ("uint64", "int64"):
        bits = value if dtype == "uint64" else T.reinterpret("uint64", value)
        return T.Cast("uint32", (bits >> T.uint64(32 * word)) & T.uint64(0xFFFFFFFF))
    return T.Cast("uint32", value) if dtype == "uint16" else T.reinterpret("uint32", value)


# fmt: off
@T.inline
def load_region(s, region, buffer, block, threads):
    if region.scope == "local":
        for e in T.unroll(region.extent):
            buffer[e] = of_words(
                region.dtype, s.io.saved, block, region.first + (s.t * region.extent + e) * region.each)
    else:
        for i in T.serial((region.extent - s.t + (threads - 1)) // threads):
            buffer[i * threads + s.t] = of_words(
                region.dtype, s.io.saved, block, region.first + (i * threads + s.t) * region.each)


@T.inline
def save_region(s, region, buffer, block, threads):
    for w in T.unroll(region.each):
        if region.scope == "local":
            for e in T.unroll(region.extent):
                s.io.saved[block, region.first + (s.t * region.extent + e) * region.each + w] = word_of(
                    region.dtype, buffer[e], w)
        else:
            for i in T.serial((region.extent - s.t + (threads - 1)) // threads):
                s.io.saved[block, region.first + (i * threads + s.t) * region.each + w] = word_of(
                    region.dtype, buffer[i * threads + s.t], w)
# fmt: on


class Alone:
    """A kernel of one phase, for several cases at once: each is a row of the batch, and so a block (or a cluster).

    `phase(s)` is called by all threads of every block, or by the first warp only, once `given` buffers are filled and
    the row is located. Each block has its own state: arrays have an axis of blocks in front, and those of a thread's
    own buffers an axis of threads behind that. What is given is broadcast to that.
    """

    def __init__(
        self,
        layout: Layout,
        phase: Callable[..., Any],
        given: Sequence[str] = (),
        wanted: Sequence[str] = (),
        cases: int = 1,
        one_warp: bool = False,
    ) -> None:
        quicken_parser()
        self.layout = layout
        self.problem = SoftmaxTopk(cases, layout.vocab, layout.k, layout.dtype, bias=int(layout.bias), ids=layout.ids)
        self.blocks = self.problem.batch * layout.tiling.cluster
        self.given, self.wanted = self.regions(given), self.regions(wanted)
        words = sum(self.words(region) for region in (*self.given, *self.wanted))
        self.saved = Workspace("saved", (self.blocks, max(words, 1)), "uint32")
        self.program = gpu_program(self.problem, self.body(phase, one_warp), (self.saved,))

    def regions(self, names: Sequence[str]) -> list[Region]:
        declared = {field.name: field.metadata for field in dataclasses.fields(State)}
        taken = sum(self.words(region) for region in getattr(self, "given", ()))
        found = []
        for name in names:
            how = declared[name]
            extent = how["extent"](self.layout) if callable(how["extent"]) else how["extent"]
            found.append(Region(name, how["scope"], how["dtype"], extent, taken))
            taken += self.words(found[-1])
        return found

    def words(self, region: Region) -> int:
        return int(np.prod(self.shape(region)[1:])) * region.each

    def shape(self, region: Region) -> tuple[int, ...]:
        if region.scope == "local":
            return (self.blocks, self.layout.tiling.threads, region.extent)
        return (self.blocks, region.extent)

    def body(self, phase: Callable[..., Any], one_warp: bool) -> Callable[..., Any]:
        layout, clustered = self.layout, self.layout.tiling.cluster > 1
        threads, parts = layout.tiling.threads, layout.tiling.cluster
        locate = tiles.locate_row(layout)

        def load(s: Any, block: Any) -> None:
            for region in self.given:
                load_region(s, region, getattr(s, region.name), block, threads)

        def save(s: Any, block: Any) -> None:
            for region in self.wanted:
                save_region(s, region, getattr(s, region.name), block, threads)

        # fmt: off
        @T.inline
        def body(io):
            T.device_entry()
            if clustered:
                row = T.cluster_id([io.batch])
                part = T.cta_id_in_cluster([parts])
            else:
                row = T.cta_id([io.batch])
                part = T.meta_var(0)
            t = T.thread_id([threads])
            s = T.meta_var(State.alloc(layout, layout.pool.bytes, io=io, t=t, block=row, part=part))
            locate(s)
            load(s, row * parts + part)
            T.cuda.cta_sync()
            if clustered:
                cluster_barrier()
            if one_warp:
                if t < 32:
                    phase(s)
            else:
                phase(s)
            T.cuda.cta_sync()
            if clustered:
                cluster_barrier()
            save(s, row * parts + part)
        # fmt: on
        return body

    def __call__(
        self, inputs: Sequence[Any] | None = None, seed: int = 0, **given: Any
    ) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """The wanted buffers by name, and the outputs; both hold poison where nothing was written."""
        saved = np.full(self.saved.shape, 0x7FC0DEAD, "uint32")
        assert set(given) == {region.name for region in self.given}
        for region in self.given:
            values = np.broadcast_to(np.asarray(given[region.name], region.dtype), self.shape(region))
            flat = np.ascontiguousarray(values.reshape(self.blocks, -1))
            words = flat.astype("uint32") if region.dtype == "uint16" else flat.view("uint32")
            saved[:, region.first : region.first + words.shape[1]] = words
        inputs = inputs or arguments(self.problem, np.zeros((self.problem.batch, self.problem.vocab)))
        outputs = self.problem.empty_outputs()
        run_on_cpu(self.program.module, TARGET, [*inputs, *outputs, saved], pipeline=self.program.pipeline, seed=seed)
        found = {}
        for region in self.wanted:
            words = np.ascontiguousarray(saved[:, region.first : region.first + self.words(region)])
            values = words.astype("uint16") if region.dtype == "uint16" else words.view(region.dtype)
            found[region.name] = values.reshape(self.shape(region))
        return found, outputs


def arguments(problem: SoftmaxTopk, logits: np.ndarray, **extras: Any) -> list[Any]:
    """The inputs of a kernel."""
    logits = np.array(np.broadcast_to(logits, (problem.batch, problem.vocab)), numpy_dtype(problem.dtype), order="C")
    given = {"logits": logits, "scale": 1.0, "log": 0, **extras}
    return [given[argument.name] for argument in problem.kernel_inputs]


def layout_of(vocab: int, k: int, dtype: str = "float32", bias: int = 0, ids: int = 0, **decisions: int) -> Layout:
    return Layout.of(SoftmaxTopk(1, vocab, k, dtype, bias=bias, ids=ids), {**POINT, **decisions})


def orders(values: Any) -> np.ndarray:
    """Bits that order as float32 do: NaN above all, -0.0 as 0.0."""
    x = np.asarray(values, "float32") + np.float32(0)
    bits = x.view("uint32").astype("uint64")
    ordered = np.where(bits >> 31, ~bits & 0xFFFFFFFF, bits | 0x80000000)
    return np.where(np.isnan(x), 0xFFFFFFFF, ordered).astype("uint32")


def keys_of(values: Any, columns: Any) -> np.ndarray:
    columns = np.asarray(columns, "uint64")
    return (orders(values).astype("uint64") << np.uint64(32)) | (np.uint64(0xFFFFFFFF) - columns)


def columns_of(keys: np.ndarray) -> np.ndarray:
    return (np.uint64(0xFFFFFFFF) - (keys & np.uint64(0xFFFFFFFF))).astype("int64")


def in_buffer(keys: np.ndarray, capacity: int) -> np.ndarray:
    """A buffer with these keys in front, and behind them what must not be taken for one."""
    return np.concatenate([keys, np.full(capacity - len(keys), 0xFFFFFFFF_FFFFFFFF, "uint64")])


def descending(keys: np.ndarray) -> np.ndarray:
    return np.sort(keys)[::-1]


def passes(row: np.ndarray, threshold: float, equals_until: int) -> np.ndarray:
    """Columns of the elements that pass a threshold; a NaN does as it is not below."""
    columns = np.arange(len(row))
    return columns[~(row < threshold) & ((row != threshold) | (columns <= equals_until))]


def uniform(array: np.ndarray) -> np.ndarray:
    """What all threads of each block agree upon."""
    np.testing.assert_array_equal(array, np.broadcast_to(array[:, :1], array.shape))
    return array[:, 0, 0]


def rows_of(vocab: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of one kind each."""
    rng = np.random.default_rng(seed)
    random = rng.standard_normal(vocab).astype("float32")
    special = random.copy()
    special[rng.choice(vocab, 9, replace=False)] = [NAN, NAN, INF, INF, -INF, -INF, -INF, -0.0, 0.0]
    return {
        "random": random,
        "ties": np.round(random),
        "constant": np.ones(vocab, "float32"),
        "ascending": np.sort(random),
        "descending": np.sort(random)[::-1].copy(),
        "special": special,
        "nothing": np.full(vocab, -INF, "float32"),
    }


# ---- tiles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "dtype", "bias", "decisions"),
    [
        (3000, "float32", 0, {}),
        (3000, "float32", 0, {"cluster": 2, "threads": 32, "stages": 2}),
        (2047, "bfloat16", 1, {"vectors": 1, "threads": 96, "stages": 2}),
        (2101, "float32", 1, {"cluster": 2, "vectors": 3, "threads": 32}),
    ],
)
def test_tiles_are_all_of_the_row_once(vocab: int, dtype: str, bias: int, decisions: dict[str, int]) -> None:
    layout = layout_of(vocab, 5, dtype, bias, **decisions)
    tiling, start, take = layout.tiling, tiles.start_tile(layout.tiling), tiles.take_tile(layout)

    @T.inline
    def phase(s):
        # All tiles up to the one that is asked for, as the ring wants them.
        for i in T.unroll(tiling.stages):
            start(s, i)
        for i in T.serial(s.i[0]):
            take(s, i)
            start(s, i + tiling.stages)
        take(s, s.i[0])
        if layout.dense:
            tiles.find_top(s, tiling.held)

    rows = tiling.width  # as many begin at different places of a vector, where rows are not aligned
    alone = Alone(layout, phase, ["i"], ["x", "top", "at", "end"], cases=rows * tiling.tiles)
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((rows * tiling.tiles, vocab)).astype(numpy_dtype(dtype))
    logits[rows:] = np.tile(logits[:rows], (tiling.tiles - 1, 1))
    bias_row = rng.standard_normal(vocab).astype("float32")
    block_rows = np.arange(alone.blocks) // tiling.cluster
    found, _ = alone(arguments(alone.problem, logits, bias=bias_row), i=(block_rows // rows).reshape(-1, 1, 1))
    elements = logits.astype("float32") + (bias_row if bias else 0)
    e = np.arange(tiling.held)
    u = e // tiling.width
    late = (2 * u >= tiling.vectors) & (tiling.vectors > 1)
    columns = found["at"][..., late.astype(int)] + u * tiling.slot_columns + e % tiling.width
    seen, sampled = np.zeros((rows, vocab), int), []
    for block, row in enumerate(block_rows):
        mine = (columns[block] >= 0) & (columns[block] < np.minimum(found["end"][block], vocab))
        np.testing.assert_array_equal(found["x"][block][mine], elements[row][columns[block][mine]])
        assert (found["x"][block][~mine] == -INF).all()
        np.add.at(seen[row % rows], columns[block][mine], 1)
        if row < rows:
            sampled += list(columns[block][mine])
    # The first tile, which is the sample, holds both ends of a row; in a cluster, of a block's share if that is full.
    assert min(sampled) == 0 and (tiling.cluster > 1 or max(sampled) == vocab - 1)
    np.testing.assert_array_equal(found["top"][..., 0], found["x"].max(axis=-1))
    assert (seen == 1).all()


# ---- the sample ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "k", "decisions"),
    [
        (9000, 5, {}),
        (9000, 5, {"deferred": 1}),
        (9001, 200, {"threads": 256, "vectors": 1}),
        (500, 5, {"threads": 32}),
        thorough(500, 20, {"threads": 32}),
    ],
)
def test_first_threshold_is_of_the_rank_that_the_layout_says(vocab: int, k: int, decisions: dict[str, int]) -> None:
    """And lets k of the sample pass where that is sure; the reference is the sample's maximum, if it is finite."""
    layout = layout_of(vocab, k, **decisions)
    tiling, first = layout.tiling, layout.first
    assert first.gated
    offer, take = sample.offer_sample(layout), sample.take_threshold(layout)

    @T.inline
    def phase(s):
        offer(s)
        s.sum[0] = T.float32(1)
        take(s)

    given = ["x", "top", "factor", "threshold", "equals_until", "found"]
    wanted = ["threshold", "reference", "sum", "equals_until", "start", "end"]
    rows = rows_of(tiling.threads * tiling.held)
    alone = Alone(layout, phase, given, wanted, cases=len(rows))
    # In the order in which a warp's vectors of one slot are a run of the row.
    shape = (len(rows), tiling.vectors, tiling.threads, tiling.width)
    x = np.stack(list(rows.values())).reshape(shape).transpose(0, 2, 1, 3).reshape(len(rows), tiling.threads, -1)
    top = np.fmax.reduce(x, axis=2)
    found, _ = alone(x=x, top=top[..., None], factor=2.0, threshold=LOWEST, equals_until=vocab, found=0)
    values = {name: uniform(found[name]) for name in wanted if name != "sum"}
    for case, structure in enumerate(rows):
        largest, of_warp = np.fmax.reduce(top[case]), np.fmax.reduce(top[case].reshape(tiling.warps, 32), axis=1)
        reference = 2 * largest if np.isfinite(largest) else 0
        assert values["reference"][case] == np.float32(reference)
        # The sum so far was brought from the warp's own reference to the block's.
        exponents = np.where(np.isfinite(of_warp), 2 * of_warp, 0) - reference
        np.testing.assert_allclose(found["sum"][case].reshape(-1, 32)[:, 0], np.exp2(exponents), rtol=1e-5)
        by_warp = np.sort(orders(top[case]).reshape(tiling.warps, 32), axis=1)
        ranked = np.sort(by_warp[:, -first.rank.lane])[-first.rank.warp]
        threshold, reaching = values["threshold"][case], (~(x[case] < values["threshold"][case])).sum()
        if structure in ("ascending", "descending"):
            assert orders(threshold) >= ranked
            assert first.floor is None or reaching >= k
        elif ranked <= orders(-INF):
            assert threshold == LOWEST
        else:
            assert orders(threshold) == min(ranked, orders(INF))
        assert reaching >= k or not first.rank.sure or structure == "nothing"
        # Of elements that equal the threshold as many columns are let through as seem enough.
        if tiling.warps > 1:
            tied = int((by_warp[:, -first.rank.lane] == ranked).sum())
            many = tied > 1 + (tiling.warps - first.rank.warp) // 2 and threshold > LOWEST
        else:
            many = int((by_warp == ranked).sum()) > 1 + (32 - first.rank.lane) // 2 and threshold > LOWEST
        largest_alone = layout.pool.overflows and orders(threshold) == orders(top[case]).max()
        many = (many and layout.ties_limited) or largest_alone
        assert many or structure != "constant" or not (layout.ties_limited or layout.pool.overflows)
        if many:
            shown = np.array([(x[case] == threshold).sum(), (x[case] > threshold).sum()], "float64")
            unsure = layout.ties_limited and tiling.tiles > 1
            equal, larger = np.maximum(shown - (3 * np.sqrt(shown) if unsure else 0), 0) * tiling.tiles
            share = min(values["end"][case], vocab) - values["start"][case]
            enough = share * (max(k - larger, 0) * 1.125 + 64) / max(equal, 1)
            until = int(min(values["start"][case] + enough, vocab))
            assert abs(values["equals_until"][case] - until) <= 1 + vocab * 1e-6
        if structure == "random" and ranked < orders(top[case]).max():
            assert values["equals_until"][case] == vocab


# ---- the sum -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attempt", "settled"), [(0, ALL_AGAIN), (2, ALL_AGAIN), (1, SUM_AGAIN), (1, LOWER_AGAIN)])
def test_a_pass_begins_with_nothing_found_and_the_first_tile_on_its_way(attempt: int, settled: int) -> None:
    layout = layout_of(2001, 5, deferred=1, stages=2, threads=128)
    begin, take = stream.begin_pass(layout), tiles.take_tile(layout)
    wanted = ["count", "full", "found", "marks", "sum", "threshold", "equals_until", "sampling", "x"]

    @T.inline
    def phase(s):
        begin(s, attempt)
        take(s, 0)

    row = rows_of(2001, seed=3)["random"]
    assert layout.lowers
    tops = np.linspace(1.5, 3, 32, dtype="float32")
    ranked = np.where(np.arange(32) < layout.tiling.warps, orders(tops), 0)
    alone = Alone(layout, phase, ["settled", "threshold", "equals_until", "warp_ranked"], wanted)
    found, _ = alone(arguments(alone.problem, row), settled=settled, threshold=2.5, equals_until=7, warp_ranked=ranked)
    for name in ("count", "full", "marks", "sum"):
        assert (found[name] == 0).all(), name
    assert (found["found"][:, WRITTEN] == 0).all()
    threshold = {SUM_AGAIN: 2.5, LOWER_AGAIN: 1.5, ALL_AGAIN: LOWEST}[settled]
    equals_until = 7 if settled == SUM_AGAIN else layout.vocab
    assert (found["threshold"] == threshold).all() and (found["equals_until"] == equals_until).all()
    assert (found["sampling"] == (attempt == 0)).all()
    # What arrives is of the row, each element once; beyond its end there is minus infinity.
    held = found["x"][np.isfinite(found["x"])]
    assert np.isin(held, row.astype("float32")).all()
    assert len(np.unique(held)) == len(held) >= layout.tiling.threads


@pytest.mark.parametrize(("k", "prefetch"), [(5, 1), (50, 0)])
def test_what_needs_no_producer_is_done_before_the_wait(k: int, prefetch: int) -> None:
    """Bins are cleared where they will be needed. The emulator says if a prefetch leads out of the logits."""
    layout = layout_of(6007, k, "float16", overlap=1, prefetch=prefetch)
    wanted = () if layout.counted else ("counts", "flag")

    await_inputs = stream.await_producer(layout)

    @T.inline
    def phase(s):
        await_inputs(s)
        T.cuda.cta_sync()

    alone = Alone(layout, phase, (), wanted, cases=3)
    assert layout.counted == (k == 5)
    found, _ = alone(arguments(alone.problem, rows_of(6007, seed=1)["random"]))
    for name in wanted:
        assert (found[name] == 0).all(), name


def test_exponentials_add_up_to_the_sum_of_the_block() -> None:
    layout = layout_of(4000, 5, threads=96)
    add, total = stream.add_exponentials(layout), stream.add_up(layout)

    @T.inline
    def phase(s):
        add(s)
        stream.share_of_warp(s)
        T.cuda.cta_sync()
        total(s)

    given = ["x", "sum", "factor", "reference", "largest"]
    alone = Alone(layout, phase, given, ["sum", "sum_before", "warp_largest"], cases=2)
    rng = np.random.default_rng(0)
    x = rng.normal(0, 3, (96, layout.tiling.held)).astype("float32")
    x[3], x[4, 0] = -INF, -200
    before = rng.random((96, 1)).astype("float32")
    with_nan = x.copy()
    with_nan[50, 1] = NAN
    found, _ = alone(
        x=np.stack([x, with_nan]), sum=before, factor=LOG2_E, reference=x.max() * LOG2_E,
        largest=x.max(axis=1, keepdims=True),
    )  # fmt: skip
    expected = before.sum(dtype="float64") + np.exp(x.astype("float64") - x.max()).sum()
    total_of = uniform(found["sum"])
    np.testing.assert_allclose(total_of[0], expected, rtol=1e-5)
    assert np.isnan(total_of[1])
    np.testing.assert_array_equal(found["sum_before"][0], before)
    np.testing.assert_array_equal(found["warp_largest"][0, :3], orders(x.reshape(3, -1).max(axis=1)))


# ---- survivors -----------------------------------------------------------------------------------


def on_first_tile(layout: Layout, phase: Callable[..., Any]) -> Callable[..., Any]:
    """A phase on the row's first tile."""
    start, take = tiles.start_tile(layout.tiling), tiles.take_tile(layout)

    @T.inline
    def after_loading(s):
        start(s, 0)
        take(s, 0)
        phase(s)

    return after_loading


@pytest.mark.parametrize(
    ("dtype", "bias", "attempt", "k", "threads"),
    [("float32", 0, 0, 5, 32), ("bfloat16", 1, 0, 5, 32), ("float32", 0, 1, 5, 32), ("float32", 0, 0, 1, 64)],
)
def test_survivors_are_what_passes_the_threshold(dtype: str, bias: int, attempt: int, k: int, threads: int) -> None:
    vocab = 240
    layout = layout_of(vocab, k, dtype, bias, threads=threads, vectors=2 if dtype == "float32" and k > 1 else 1)
    assert layout.tiling.tiles == 1 and not layout.pool.overflows and layout.dense == (k > 1)
    take = stream.take_survivors(layout)

    @T.inline
    def phase(s):
        take(s, attempt)

    thresholds = [(1.0, vocab), (1.0, vocab // 2), (LOWEST, vocab), (INF, vocab)]
    if attempt:  # a row is read again with no threshold, at first
        thresholds = [(LOWEST, vocab), (1.0, vocab)]
    structures = rows_of(vocab)
    logits = np.repeat(np.stack(list(structures.values())), len(thresholds), axis=0)
    gates = thresholds * len(structures)
    given = ["threshold", "equals_until", "pending", "i", "called", "count", "largest"]
    alone = Alone(layout, on_first_tile(layout, phase), given, ["keys", "count"], cases=len(gates))
    added = np.random.default_rng(0).integers(-1, 2, vocab).astype("float32")
    inputs = arguments(alone.problem, logits, bias=added)
    found, _ = alone(
        inputs, threshold=np.array([g[0] for g in gates]).reshape(-1, 1, 1),
        equals_until=np.array([g[1] for g in gates]).reshape(-1, 1, 1), pending=1, i=0, called=0, count=0, largest=-INF,
    )  # fmt: skip
    elements = inputs[0].astype("float32") + (added if bias else 0)
    for case, (threshold, until) in enumerate(gates):
        got, row = found["keys"][case, : found["count"][case, 0]], elements[case]
        passing = passes(row, threshold, until)
        if attempt == 0:
            # A NaN passes beside an element that does; rows with one are read again in any case.
            got = got[got >> np.uint64(32) != 0xFFFFFFFF]
            passing = passing[~np.isnan(row[passing])]
        np.testing.assert_array_equal(descending(got), descending(keys_of(row[passing], passing)))


@pytest.mark.parametrize(("vocab", "stages", "tiles_of_row"), [thorough(6000, 1, 1), (12000, 2, 2)])
def test_sum_does_not_depend_on_a_tile_that_comes_again(vocab: int, stages: int, tiles_of_row: int) -> None:
    """Of the sample exponentials are first of the warp's own reference; yet the sum is the same to the last bit."""
    layout = layout_of(vocab, 5, threads=256, vectors=6, stages=stages)
    assert layout.compacts and layout.tiling.tiles == tiles_of_row
    start, streamed = tiles.start_tile(layout.tiling), stream.stream_tiles(layout)

    @T.inline
    def phase(s):
        for i in T.unroll(stages):
            start(s, i)
        s.pending[0] = 1
        s.i[0] = 0
        s.called[0] = T.uint32(0)
        streamed(s, 0)
        T.cuda.cta_sync()
        s.settled[0] = T.Cast("int32", s.called[0])
        if s.t == 0:
            s.count[0] = 0
        T.cuda.cta_sync()
        s.called[0] = T.uint32(0)
        streamed(s, 0)

    given = ["sum", "threshold", "equals_until", "sampling", "count", "full", "found"]
    alone = Alone(layout, phase, given, ["sum", "settled"], cases=2)
    row = np.random.default_rng(0).standard_normal(layout.vocab, dtype="float32")
    found, _ = alone(
        arguments(alone.problem, row), sum=0, threshold=LOWEST, equals_until=layout.vocab, sampling=stream.SAMPLE,
        count=np.array([[0], [layout.pool.capacity]]), full=0, found=0,
    )  # fmt: skip
    again = found["settled"][:, :, 0].reshape(2, -1, 32).all(axis=2)
    assert not again[0].any() and again[1].any()
    np.testing.assert_array_equal(found["sum"][1], found["sum"][0])


@pytest.mark.parametrize(("tile", "left"), [(0, 7), (1, 3)])
def test_full_buffer_calls_for_a_compaction_and_leaves_survivors_pending(tile: int, left: int) -> None:
    layout = layout_of(10240, 5)
    capacity = layout.pool.capacity
    assert layout.compacts
    take = stream.take_survivors(layout)

    @T.inline
    def phase(s):
        take(s, 0)

    given = ["threshold", "equals_until", "pending", "i", "called", "count", "largest", "sum", "sum_before", "full"]
    wanted = ["keys", "count", "full", "pending", "called", "sum", "x"]
    alone = Alone(layout, on_first_tile(layout, phase), given, wanted)
    row = rows_of(10240)["random"]
    found, _ = alone(
        arguments(alone.problem, row), threshold=0.0, equals_until=10240, pending=1, i=tile, called=0,
        count=capacity - 100, largest=-INF, sum=7, sum_before=3, full=0,
    )  # fmt: skip
    assert found["count"][0, 0] > capacity and found["full"][0, 0] == 1
    survives = (found["x"][0] >= 0).any(axis=1)
    waiting = survives & (found["pending"][0, :, 0] != 0)
    pushed = survives & ~waiting
    assert waiting.any() and pushed.any()
    # The whole warp comes again, and takes the tile out of its sum, unless it is the sample.
    called = found["called"][0, :, 0] != 0
    np.testing.assert_array_equal(called, np.repeat(waiting.reshape(-1, 32).any(axis=1), 32))
    np.testing.assert_array_equal(found["sum"][0, :, 0], np.where(called, left, 7))
    # What had room is in the buffer, and the rest of the room is void.
    filled = found["keys"][0, capacity - 100 :]
    filled = filled[filled != 0]
    assert (found["x"][0][pushed] >= 0).sum() == len(filled)
    np.testing.assert_array_equal(orders(row[columns_of(filled)]), filled >> np.uint64(32))


def test_compaction_keeps_the_best_and_raises_the_threshold() -> None:
    k, size = 20, 280
    layout = layout_of(10240, k)
    structures = {**rows_of(size), "many NaN": np.where(np.arange(size) < 30, NAN, INF)}
    given, wanted = ["keys", "count", "full"], ["keys", "count", "full", "threshold", "equals_until"]
    alone = Alone(layout, survivors.compact(layout), given, wanted, cases=len(structures))
    columns = np.random.default_rng(1).permutation(10240)[:size]
    keys = [keys_of(values, columns) for values in structures.values()]
    found, _ = alone(keys=np.stack([in_buffer(own, layout.pool.capacity) for own in keys]), count=size, full=1)
    assert (found["full"] == 0).all() and (found["count"] == k).all()
    thresholds, until = uniform(found["threshold"]), uniform(found["equals_until"])
    for case, structure in enumerate(structures):
        best = descending(keys[case])[:k]
        np.testing.assert_array_equal(descending(found["keys"][case, :k]), best)
        if structure == "many NaN":
            # What is no NaN has no chance, and only infinities still pass for a candidate.
            assert thresholds[case] == INF
            continue
        # The best pass the new threshold, and no other key of the buffer.
        order, others = keys[case] >> np.uint64(32), columns_of(keys[case])
        equal = (order == orders(thresholds[case])) & (others <= until[case])
        np.testing.assert_array_equal(descending(keys[case][(order > orders(thresholds[case])) | equal]), best)


@pytest.mark.parametrize(("marking", "k"), [thorough(0, 10), (0, 30), (1, 10)])
def test_stream_finds_all_that_may_be_among_the_best(marking: int, k: int) -> None:
    """The whole pass, with compactions or with the search of marked tiles."""
    vocab = 6001
    layout = layout_of(vocab, k, deferred=marking, stages=2)
    assert layout.pool.overflows and layout.dense == (k > 10)
    begin, read, total = stream.begin_pass(layout), stream.stream_row(layout), stream.add_up(layout)
    search, gather = deferred.search_marked(layout), kernel.gather_survivors(layout)

    @T.inline
    def phase(s):
        begin(s, 0)
        read(s, 0)
        total(s)
        if layout.deferred:
            search(s)
        gather(s)

    rows = rows_of(vocab)
    alone = Alone(layout, phase, [], ["keys", "size", "sum", "reference", "largest"], cases=len(rows))
    found, _ = alone(arguments(alone.problem, np.stack(list(rows.values()))))
    sizes, sums, references = (uniform(found[name]) for name in ("size", "sum", "reference"))
    for case, (structure, row) in enumerate(rows.items()):
        if structure == "special":  # a NaN, and so the row is read again
            assert np.isnan(sums[case])
            continue
        above = np.flatnonzero(row > -INF)
        best = descending(keys_of(row[above], above))[:k]
        np.testing.assert_array_equal(descending(found["keys"][case, : sizes[case]])[:k], best)
        if structure == "nothing":
            assert sizes[case] == 0
            continue
        assert uniform(found["largest"])[case] == row.max()
        exponentials = np.exp(row.astype("float64") - references[case].astype("float64") / LOG2_E)
        np.testing.assert_allclose(sums[case], exponentials.sum(), rtol=1e-4)


# ---- marked tiles --------------------------------------------------------------------------------


def test_a_tile_is_marked_and_copied_if_it_has_a_survivor() -> None:
    layout = layout_of(9000, 5, deferred=1)
    tiling, pool = layout.tiling, layout.pool
    assert layout.one_warp and pool.copies > 4
    mark = deferred.mark_tile(layout)

    @T.inline
    def phase(s):
        mark(s, 3, 0)

    given = ["x", "top", "at", "threshold", "equals_until", "marks", "largest"]
    alone = Alone(layout, phase, given, ["marks", "marked", "copied", "tops", "largest"], cases=2)
    x = np.random.default_rng(0).normal(size=(tiling.threads, tiling.held)).astype("float32")
    x[5:50:5] = 1.5
    top, at = x.max(axis=1), np.arange(tiling.threads) * 100
    before = pool.copies - 4
    found, _ = alone(
        x=x, top=top[:, None], at=np.stack([at, at], axis=1), threshold=1.5,
        equals_until=np.array([9000, 1200]).reshape(2, 1, 1), marks=before, largest=-INF,
    )  # fmt: skip
    for case, until in enumerate((9000, 1200)):
        expected = (top > 1.5) | ((top == 1.5) & (at <= until))
        count = int(found["marks"][case, 0]) - before
        assert count == expected.sum() > 4
        numbers = found["marked"][case, before:][:count].astype(int) - 3 * tiling.threads
        np.testing.assert_array_equal(np.sort(numbers), np.flatnonzero(expected))
        # The first four have room to be copied.
        copies = found["copied"][case].reshape(pool.copies, pool.padded)[-4:, : tiling.held]
        np.testing.assert_array_equal(copies, x[numbers[:4]])
        np.testing.assert_array_equal(found["tops"][case, -4:], orders(top[numbers[:4]]))
        np.testing.assert_array_equal(found["largest"][case, :, 0], np.where(expected, top, -INF))


def marked_tiles(layout: Layout, row: np.ndarray, numbers: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A list of marked tiles of a row, as `mark_tile` makes it; and their columns, -1 for those beyond the row."""
    tiling, pool = layout.tiling, layout.pool
    i, t = numbers // tiling.threads, numbers % tiling.threads
    e = np.arange(tiling.held)
    u = e // tiling.width
    late = (2 * u >= tiling.vectors) & (tiling.vectors > 1)
    chunk = np.where(late, (tiling.tiles - 1 - i)[:, None], i[:, None])
    slot = u * tiling.warps + (t // 32)[:, None]
    columns = ((slot * tiling.tiles + chunk) * 32 + (t % 32)[:, None]) * tiling.width + e % tiling.width
    columns = np.where(columns < len(row), columns, -1)
    elements = np.where(columns >= 0, row[columns], -INF).astype("float32")[: pool.copies]
    marked = np.zeros(tiling.tiles * tiling.threads, "uint16")
    marked[: len(numbers)] = numbers
    copied = np.full((pool.copies, pool.padded), NAN, "float32")
    copied[: len(elements), : tiling.held] = elements
    tops = np.zeros(pool.copies, "uint32")
    tops[: len(elements)] = orders(elements.max(axis=1))
    return {"marks": np.array([len(numbers)]), "marked": marked, "copied": copied.ravel(), "tops": tops}, columns


def test_marked_tiles_are_searched_for_survivors() -> None:
    """Those that were copied and those that are read again; and in steps, where survivors have no room."""
    k, vocab = 40, 18000
    layout = layout_of(vocab, k, threads=128, deferred=1)
    tiling, pool = layout.tiling, layout.pool
    given = ["marks", "marked", "copied", "threshold", "equals_until", "count", "full"]
    alone = Alone(layout, deferred.search_marked(layout), given, ["keys", "count"], cases=3)
    rng = np.random.default_rng(3)
    row = np.round(rng.standard_normal(vocab), 1).astype("float32")
    all_tiles = tiling.tiles * tiling.threads
    numbers, threshold = (pool.copies // 2, 2 * pool.copies, all_tiles), np.float32(1.5)
    gates, states, columns = [], [], []
    for number in numbers:
        state, own = marked_tiles(layout, row, rng.permutation(all_tiles)[:number])
        states.append(state)
        columns.append(own[own >= 0])
        # Of what is searched last, an element that just passes: it equals the threshold in its column.
        last = own[pool.copies :] if number > pool.copies else own
        equal = last[(last >= 0) & (row[last] == threshold)]
        gates.append((threshold, np.sort(equal)[len(equal) // 2]) if number < all_tiles else (LOWEST, vocab))
    found, _ = alone(
        arguments(alone.problem, row), threshold=np.array([g[0] for g in gates]).reshape(-1, 1, 1),
        equals_until=np.array([g[1] for g in gates]).reshape(-1, 1, 1), count=0, full=0,
        **{name: np.stack([state[name] for state in states]) for name in ("marks", "marked", "copied")},
    )  # fmt: skip
    for case, (threshold, until) in enumerate(gates):
        among = np.intersect1d(columns[case], passes(row, threshold, until))
        expected = descending(keys_of(row[among], among))
        got = descending(found["keys"][case, : found["count"][case, 0]])
        if len(expected) <= pool.capacity - tiling.held:
            np.testing.assert_array_equal(got, expected)
        else:
            assert case == 2
            np.testing.assert_array_equal(got[:k], expected[:k])


def test_one_warp_finishes_a_row_whose_best_are_in_tiles_of_their_own() -> None:
    k, vocab = 5, 9000
    layout = layout_of(vocab, k, deferred=1)
    given = ["marks", "marked", "copied", "tops", "threshold", "equals_until", "found"]
    given += ["factor", "reference", "inverse", "logarithm", "unit"]
    alone = Alone(layout, deferred.finish_by_one_warp(layout), given, ["found"], cases=2, one_warp=True)
    row = rows_of(vocab, seed=5)["random"]
    numbers = np.random.default_rng(0).permutation(layout.tiling.tiles * layout.tiling.threads)[:40]
    columns = marked_tiles(layout, row, numbers)[1]
    columns = columns[(columns >= 0).all(axis=1)]
    # The largest of each tile by far, and then in one tile two that are as large.
    row[columns[:, 1]] += 10
    twice = row.copy()
    best = columns[np.argmax(row[columns[:, 1]])]
    twice[best[2]] = row[best[1]]
    states = [marked_tiles(layout, elements, numbers)[0] for elements in (row, twice)]
    found, (values, indices) = alone(
        arguments(alone.problem, np.stack([row, twice])), threshold=-1.0, equals_until=vocab, found=0, factor=LOG2_E,
        reference=LOG2_E, inverse=0.5, logarithm=0, unit=np.log(2),
        **{name: np.stack([state[name] for state in states]) for name in states[0]},
    )  # fmt: skip
    expected = columns_of(descending(keys_of(row[columns[:, 1]], columns[:, 1]))[:k])
    np.testing.assert_array_equal(found["found"][:, WRITTEN], [1, 0])
    np.testing.assert_array_equal(indices[0], expected)
    np.testing.assert_allclose(values[0], np.exp(row[expected] - 1) / 2, rtol=1e-5)
    assert (indices[1] < 0).all() and np.isnan(values[1]).all()


@pytest.mark.parametrize(("good", "log"), [(True, 0), (True, 1), (False, 0)])
def test_one_warp_is_let_try_with_what_values_are_made_of(good: bool, log: int) -> None:
    """It tells whether the outputs are written: not if two tiles' best are equal, which one warp does not settle."""
    k, vocab = 5, 9000
    layout = layout_of(vocab, k, deferred=1)
    given = ["marks", "marked", "copied", "tops", "threshold", "equals_until", "found"]
    given += ["factor", "reference", "sum", "unit"]
    alone = Alone(layout, kernel.try_one_warp(layout), given, ["written", "inverse", "logarithm"])
    row = rows_of(vocab, seed=5)["random"]
    numbers = np.random.default_rng(0).permutation(layout.tiling.tiles * layout.tiling.threads)[:40]
    columns = marked_tiles(layout, row, numbers)[1]
    columns = columns[(columns >= 0).all(axis=1)]
    row[columns[:, 1]] += 10
    if not good:
        best = columns[np.argmax(row[columns[:, 1]])]
        row[best[2]] = row[best[1]]
    found, (values, indices) = alone(
        arguments(alone.problem, row, log=log), threshold=-1.0, equals_until=vocab, found=0, factor=LOG2_E,
        reference=LOG2_E, sum=2.0, unit=np.log(2), **marked_tiles(layout, row, numbers)[0],
    )  # fmt: skip
    assert (found["written"] == int(good)).all()
    np.testing.assert_allclose(found["inverse"][:, :32], 0.5)
    np.testing.assert_allclose(found["logarithm"][:, :32], np.log(2) if log else 0, rtol=1e-6)
    expected = columns_of(descending(keys_of(row[columns[:, 1]], columns[:, 1]))[:k])
    if good:
        np.testing.assert_array_equal(indices[0], expected)
        logarithms = row[expected] - 1 - np.log(2)
        np.testing.assert_allclose(values[0], logarithms if log else np.exp(logarithms), rtol=1e-5)
    else:
        assert (indices < 0).all() and np.isnan(values).all()


# ---- clusters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "threads", "more", "k"), [(4, 32, 5, 30), thorough(2, 192, 0, 24), (3, 96, 0, 33)])
def test_parts_of_a_row_are_united_in_the_first_block(parts: int, threads: int, more: int, k: int) -> None:
    """`more`: by how many keys the last block has more than it may push, so that it pushes its best k."""
    vocab = 12000
    layout = layout_of(vocab, k, threads=threads, cluster=parts)
    room, capacity = layout.pool.room, layout.pool.capacity
    share = cluster.share_parts(layout)

    @T.inline
    def phase(s):
        cluster.announce_block(s)
        cluster.await_blocks(s)
        share(s)

    given = ["keys", "size", "threshold", "equals_until", "largest", "reference", "sum"]
    alone = Alone(layout, phase, [*given, "united_count"], given)
    rng = np.random.default_rng(parts)
    sizes = rng.integers(k, room, parts)
    sizes[-1] = room + more
    values = np.round(rng.standard_normal(vocab), 2).astype("float32")
    chosen = [rng.permutation(np.arange(p, vocab, parts))[: sizes[p]] for p in range(parts)]
    keys = [keys_of(values[c], c) for c in chosen]
    # Each block's threshold is the least of its keys, which passes it.
    gates = [own.min() for own in keys]
    own = {
        "size": sizes,
        "threshold": np.array([values[columns_of(gate)] for gate in gates], "float32"),
        "equals_until": np.array([columns_of(gate) for gate in gates]),
        "largest": np.array([values[c].max() for c in chosen], "float32"),
        "reference": np.array([2 * values[c].max() for c in chosen], "float32"),
        "sum": rng.random(parts).astype("float32"),
    }
    found, _ = alone(
        keys=np.stack([in_buffer(k, capacity) for k in keys]),
        united_count=0,
        **{name: array.reshape(parts, 1, 1) for name, array in own.items()},
    )
    first = {name: uniform(found[name])[0] for name in own}
    if more:
        keys[-1] = descending(keys[-1])[:k]
        gates[-1] = keys[-1].min()
    pushed = np.concatenate(keys)
    united = descending(found["keys"][0, : first["size"]])
    gate = keys_of(first["threshold"], first["equals_until"])
    np.testing.assert_array_equal(united, descending(pushed[pushed >= max(gates)]))
    # The row's threshold is the highest; that of a selection may be lower than the k-th, but nothing else reaches it.
    assert max(gates[:-1]) <= gate <= max(gates)
    np.testing.assert_array_equal(united, descending(pushed[pushed >= gate]))
    assert first["largest"] == own["largest"].max() and first["reference"] == own["reference"].max()
    expected = (own["sum"] * np.exp2(own["reference"] - own["reference"].max())).sum()
    np.testing.assert_allclose(first["sum"], expected, rtol=1e-6)


def test_blocks_of_a_cluster_do_what_the_first_one_says() -> None:
    layout = layout_of(12000, 5, threads=32, cluster=4)
    agree = cluster.agree(layout)

    @T.inline
    def phase(s):
        agree(s)
        if s.part == 0 and s.settled[0] == SETTLED:
            cluster.await_others(s)

    alone = Alone(layout, phase, ["settled", "verdict"], ["settled"], cases=3)
    own = np.array(
        [
            [SUM_AGAIN, SETTLED, SUM_AGAIN, SETTLED],
            [SETTLED, SETTLED, SUM_AGAIN, ALL_AGAIN],
            [LOWER_AGAIN, SUM_AGAIN, SETTLED, ALL_AGAIN],
        ]
    )
    found, _ = alone(settled=own.reshape(12, 1, 1), verdict=SETTLED)
    np.testing.assert_array_equal(uniform(found["settled"]), np.repeat(own[:, 0], 4))


# ---- settling, and filling up --------------------------------------------------------------------


def test_a_row_is_read_again_if_too_few_survive_or_the_sum_overflows() -> None:
    layout = layout_of(2000, 5, threads=128)
    assert layout.lowers
    cases = [
        # survivors, threshold, sum; settled at the first attempt, and at the second
        (5, 1.0, 3.0, SETTLED, SETTLED),
        (4, 1.0, 3.0, LOWER_AGAIN, ALL_AGAIN),  # the threshold was too high
        (4, LOWEST, 3.0, SETTLED, SETTLED),  # the row has no more
        (4, 1.0, INF, LOWER_AGAIN, ALL_AGAIN),
        (4, 1.0, NAN, ALL_AGAIN, ALL_AGAIN),
        (9, 1.0, NAN, ALL_AGAIN, SETTLED),
        (9, 1.0, -NAN, ALL_AGAIN, SETTLED),
        (9, 1.0, INF, SUM_AGAIN, SETTLED),
        (9, 1.0, 0.0, SUM_AGAIN, SETTLED),
        (9, 1.0, 2.0**99, SETTLED, SETTLED),
    ]
    settle = kernel.settle(layout)

    @T.inline
    def phase(s):
        settle(s, s.i[0])

    alone = Alone(layout, phase, ["size", "threshold", "sum", "i"], ["settled"], cases=READINGS * len(cases))
    size, threshold, total, *settled = zip(*cases, strict=True)
    given = (np.array(column * READINGS).reshape(-1, 1, 1) for column in (size, threshold, total))
    attempt = np.repeat(np.arange(READINGS), len(cases)).reshape(-1, 1, 1)
    found, _ = alone(**dict(zip(("size", "threshold", "sum"), given, strict=True)), i=attempt)
    expected = np.concatenate([*settled, np.full(len(cases), SETTLED)])
    np.testing.assert_array_equal(uniform(found["settled"]), expected)


def test_rows_are_filled_up_with_the_first_elements_at_minus_infinity() -> None:
    k, vocab = 12, 700
    layout = layout_of(vocab, k, "float16")
    alone = Alone(layout, finishing.fill_up(layout.vocab, layout.k), ["keys", "size"], ["keys"], one_warp=True)
    row = np.full(vocab, -INF)
    above = np.array([3, 40, 41, 699])
    row[above] = [1, NAN, INF, -5]
    keys = in_buffer(keys_of(row[above], above), layout.pool.capacity)
    found, _ = alone(arguments(alone.problem, row), keys=keys, size=len(above))
    expected = np.setdiff1d(np.arange(vocab), above)[: k - len(above)]
    np.testing.assert_array_equal(found["keys"][0, len(above) : k], keys_of(np.full(k - 4, -INF), expected))


@pytest.mark.parametrize("size", [4, 12, 20])
def test_rows_are_completed_only_if_fewer_than_k_survived(size: int) -> None:
    k, vocab = 12, 700
    layout = layout_of(vocab, k, "float16")
    alone = Alone(layout, finishing.complete(layout.vocab, layout.k), ["keys", "size"], ["keys", "size"])
    row = np.full(vocab, -INF)
    above = np.arange(size) * 7 + 3
    row[above] = np.arange(size)
    keys = in_buffer(keys_of(row[above], above), layout.pool.capacity)
    found, _ = alone(arguments(alone.problem, row), keys=keys, size=size)
    assert (found["size"] == max(size, k)).all()
    rest = np.setdiff1d(np.arange(vocab), above)[: max(k - size, 0)]
    expected = np.concatenate([keys[:size], keys_of(np.full(len(rest), -INF), rest)])
    np.testing.assert_array_equal(found["keys"][0, : len(expected)], expected)


# ---- ranking -------------------------------------------------------------------------------------


def survivors_of(layout: Layout, size: int) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """The state in which so many survivors are ranked, of rows of every kind in turn; and their keys."""
    columns = np.random.default_rng(size).permutation(layout.vocab)[:size]
    rows = [row for name, row in rows_of(size, seed=size).items() if name != "nothing"]
    keys = [keys_of(row, columns) for row in rows]
    state = {
        "keys": np.stack([in_buffer(own, layout.pool.capacity) for own in keys]),
        "threshold": np.array([np.fmin.reduce(row[~(row == -INF)]) for row in rows]).reshape(-1, 1, 1),
        "largest": np.array([np.fmax.reduce(row) for row in rows]).reshape(-1, 1, 1),
        "size": np.full((len(rows), 1, 1), size),
    }
    return state, keys


def best_of(keys: Sequence[np.ndarray], k: int) -> np.ndarray:
    return np.stack([descending(own)[:k] for own in keys])


@pytest.mark.parametrize(("k", "size", "threads"), [(5, 60, 128), (16, 16, 32)])
def test_ranked_by_counting(k: int, size: int, threads: int) -> None:
    layout = layout_of(20000, k, threads=threads)
    counting = rank.rank_by_counting(layout, rank.place_in_kept, layout.rankers)
    state, keys = survivors_of(layout, size)
    alone = Alone(layout, counting, ["keys", "size"], ["kept"], cases=len(keys))
    found, _ = alone(keys=state["keys"], size=size)
    np.testing.assert_array_equal(found["kept"][:, :k], best_of(keys, k))


@T.inline
def place_in_keys(s, rank, key):
    """Bins are through with the buffer when they place keys."""
    s.keys[rank] = key


def in_bins_or_finer_ones(layout: Layout, each: int = 2) -> Callable[..., Any]:
    """As `rank_survivors` puts them together, after bins have become 0. Ranked keys come into `keys`."""
    threads, k, bins = layout.tiling.threads, layout.k, layout.pool.bins
    clear = rank.clear_bins(layout)
    in_bins = rank.rank_in_bins(threads, k, bins, CROWD, layout.vocab, place_in_keys, each=each)
    refine = rank.refine_bins(threads, bins, CROWD, layout.vocab, T.serial)
    in_finer_bins = rank.rank_in_bins(threads, k, bins, 2 * CROWD, layout.vocab, place_in_keys, finer=True)

    @T.inline
    def phase(s):
        clear(s)
        T.cuda.cta_sync()
        in_bins(s, s.t)
        if s.slot[0] != 0:
            refine(s, s.t)
            if s.slot[0] == 0:
                in_finer_bins(s, s.t)

    return phase


@pytest.mark.parametrize(("k", "size", "threads"), [thorough(50, 90, 64), (300, 700, 128), (60, 290, 32)])
def test_ranked_in_bins_unless_one_is_crowded(k: int, size: int, threads: int) -> None:
    layout = layout_of(20000, k, threads=threads)
    phase = in_bins_or_finer_ones(layout)

    state, keys = survivors_of(layout, size)
    alone = Alone(layout, phase, [*state, "equals_until"], ["keys", "slot"], cases=len(keys))
    found, _ = alone(**state, equals_until=layout.vocab)
    crowded = uniform(found["slot"]) != 0
    # Bins are linear in the value, or in the column where all values are equal or a few crowd theirs. An infinity makes
    # the range infinite.
    names = [name for name in rows_of(size) if name != "nothing"]
    np.testing.assert_array_equal(crowded, [name == "special" for name in names])
    np.testing.assert_array_equal(found["keys"][~crowded, :k], best_of(keys, k)[~crowded])


def test_equals_are_ranked_by_their_columns_if_these_are_spread() -> None:
    """Over all the row, or over what `equals_until` leaves of it; but not where an outlier puts others beside them."""
    vocab, size, k, threads = 40000, 400, 300, 64
    layout = layout_of(vocab, k, threads=threads)
    phase = in_bins_or_finer_ones(layout)

    rng = np.random.default_rng(0)
    values = np.repeat(np.array([3, 2.5, 2], "float32"), [40, 10, 350])  # the second ones crowd no bin
    outlier = np.concatenate([[np.float32(1e6)], values[1:] + rng.random(size - 1, "float32")])
    anywhere, first = rng.permutation(vocab)[:size], rng.permutation(500)[:size]
    cases = [
        (values, anywhere, vocab, False),
        (values, np.sort(anywhere), vocab, False),
        (values, np.concatenate([anywhere[:50], first[50:]]), 499, False),
        (values, first, vocab, True),
        (outlier, anywhere, vocab, True),
    ]
    keys = [keys_of(row, columns) for row, columns, _, _ in cases]
    alone = Alone(
        layout, phase, ["keys", "threshold", "largest", "size", "equals_until"], ["keys", "slot"], cases=len(cases)
    )
    found, _ = alone(
        keys=np.stack([in_buffer(own, layout.pool.capacity) for own in keys]), size=size, threshold=2.0,
        largest=np.array([row.max() for row, *_ in cases]).reshape(-1, 1, 1),
        equals_until=np.array([until for _, _, until, _ in cases]).reshape(-1, 1, 1),
    )  # fmt: skip
    crowded = uniform(found["slot"]) != 0
    np.testing.assert_array_equal(crowded, [fails for *_, fails in cases])
    np.testing.assert_array_equal(found["keys"][~crowded, :k], best_of(keys, k)[~crowded])


@pytest.mark.parametrize(("k", "size", "threads"), [(33, 33, 32), (300, 700, 128)])
def test_sorted_whatever_they_are(k: int, size: int, threads: int) -> None:
    layout = layout_of(20000, k, threads=threads)
    state, keys = survivors_of(layout, size)
    alone = Alone(layout, rank.sort_best(layout), ["keys", "size"], ["kept"], cases=len(keys))
    found, _ = alone(keys=state["keys"], size=size)
    np.testing.assert_array_equal(found["kept"][:, :k], best_of(keys, k))


@pytest.mark.parametrize(
    ("k", "size", "threads"),
    [
        (5, 300, 64),  # too many to be counted at once
        (20, 60, 512),  # few enough to be counted in the place of bins
        (50, 120, 128),  # in bins, and written from there
        (100, 300, 64),  # through shared memory
    ],
)
def test_survivors_become_outputs_in_order(k: int, size: int, threads: int) -> None:
    """With the threshold that they have passed, and without one."""
    layout = layout_of(20000, k, threads=threads)
    clear, ranked = rank.clear_bins(layout), rank.rank_survivors(layout)

    @T.inline
    def phase(s):
        clear(s)
        T.cuda.cta_sync()
        ranked(s)

    state, keys = survivors_of(layout, size)
    state = {name: np.concatenate([array, array]) for name, array in state.items()}
    state["threshold"][len(keys) :] = LOWEST
    given = [*state, "equals_until", "factor", "reference", "inverse", "logarithm", "unit"]
    alone = Alone(layout, phase, given, cases=2 * len(keys))
    _, (values, indices) = alone(
        **state, equals_until=layout.vocab, factor=LOG2_E, reference=LOG2_E, inverse=0.25, logarithm=0, unit=np.log(2)
    )
    best = best_of(keys * 2, k)
    np.testing.assert_array_equal(indices, columns_of(best))
    for case, own in enumerate(keys * 2):
        row = list(rows_of(size, seed=size).values())[case % len(keys)]
        of_key = dict(zip(own.tolist(), row, strict=True))
        expected = np.exp(np.array([of_key[key] for key in best[case].tolist()]) - 1) / 4
        np.testing.assert_allclose(values[case], expected, rtol=1e-5)


def test_given_columns_are_written_wherever_they_rank() -> None:
    vocab, ids = 1000, [5, 999, 0, -1, 1000, 5]
    layout = layout_of(vocab, 3, ids=len(ids), bias=1, threads=32)
    given = ["factor", "reference", "inverse", "logarithm", "unit"]
    columns = (layout.tiling.threads, layout.vocab, layout.ids)
    write = finishing.write_given_columns(*columns, rank.exponent, T.serial)
    alone = Alone(layout, write, given)
    row, bias = np.random.default_rng(0).standard_normal((2, vocab)).astype("float32")
    inputs = arguments(alone.problem, row, bias=bias, ids=np.array([ids], "int64"))
    _, outputs = alone(inputs, factor=LOG2_E, reference=LOG2_E, inverse=0.5, logarithm=0, unit=np.log(2))
    expected = [np.exp(row[i] + bias[i] - 1) / 2 if 0 <= i < vocab else NAN for i in ids]
    np.testing.assert_allclose(outputs[2][0], expected, rtol=1e-5)
