"""Phases of the block-sparse product's GPU kernels, each run alone in the emulator on state that the test makes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from cases import SM90
from tvm.script import tirx as T

from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.core import spaces
from tvm_sparse.core.arguments import function
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.registry import parse
from tvm_sparse.core.rounding import ROUNDING
from tvm_sparse.core.template import Workspace
from tvm_sparse.emulation import EmulationError, run_on_cpu
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul, activated
from tvm_sparse.schedules.bsr_matmul import block_row
from tvm_sparse.schedules.bsr_matmul.interface import output
from tvm_sparse.schedules.bsr_matmul.staged_x import kernel as staged
from tvm_sparse.schedules.bsr_matmul.staged_x.space import Extents as StagedExtents
from tvm_sparse.schedules.bsr_matmul.tensor_core import kernel as tensor
from tvm_sparse.schedules.bsr_matmul.tensor_core.space import Extents as TensorExtents
from tvm_sparse.schedules.bsr_matmul.tensor_core.space import shared_bytes
from tvm_sparse.schedules.bsr_matmul.tensor_core.state import SharedSums, TileState, first_column, weight_row, x_row
from tvm_sparse.schedules.device.balance import Deal, Work, add_ranks, deal_out, hand_in, join, meet
from tvm_sparse.schedules.device.state import named, register

pytestmark = pytest.mark.drawn

TARGET = target_of(SM90)


def problem_of(key: str) -> BsrMatmul:
    """A problem with a bias: one function then takes all arguments."""
    problem = parse(f"bsr_matmul/{key},sparsity=0.5,bias=1")
    assert isinstance(problem, BsrMatmul)
    return problem


def run(
    problem: BsrMatmul,
    body: Callable[..., None],
    inputs: Sequence[np.ndarray | int],
    seen: tuple[int, ...],
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel of `body(io, seen)` leaves in `seen`, float32, and in y; both hold NaN where it wrote nothing."""

    @T.inline
    def whole(io):
        body(io, io.seen)

    y, found = problem.empty_outputs()[0], np.full(seen, np.nan, "float32")
    module = tvm.IRModule({"main": function(problem, whole, (Workspace("seen", seen, "float32"),))})
    run_on_cpu(module, TARGET, [*inputs, y, found], pipeline="tirx", seed=seed)
    return found, y


def point(name: str, problem: BsrMatmul, **decisions: int) -> dict[str, int]:
    """The default with other decisions."""
    template = spaces.find(name)
    chosen = {**template.default(problem, SM90), **decisions}
    assert template.point(problem, SM90, chosen) is None
    return chosen


def product(problem: BsrMatmul, inputs: Sequence[np.ndarray], first: int, count: int) -> np.ndarray:
    """Of x and blocks first .. first + count - 1 of one block row, (m, rows of a block), in float64."""
    x, data, indices = (np.asarray(a).astype("float64") if i < 2 else a for i, a in enumerate(inputs[:3]))
    cols = problem.block_shape[1]
    blocks = range(first, first + count)
    return sum(x[:, indices[b] * cols : (indices[b] + 1) * cols] @ data[b].T for b in blocks)


# ---- which work is whose -------------------------------------------------------------------------


@pytest.mark.parametrize(("cluster", "two_axes"), [(4, False), (1, False), (1, True)])
def test_units_are_dealt_out_as_the_table_says(cluster: int, two_axes: bool) -> None:
    """Two long rows of ten, two strips of x, which the table in `balance` shows for clusters of four."""
    problem = problem_of("m=12,k=64,n=80,block=8,dtype=float16")
    inputs = problem.generate(0)
    inputs[5] = 2
    deal = deal_out(Deal(units=10, slices=1, cluster=cluster), 8, two_axes)
    clusters = 4 if cluster == 4 else 10

    @T.inline
    def body(io, seen):
        T.device_entry()
        w = T.meta_var(Work.alloc())
        deal(w, io.m, io.long)
        t = T.thread_id([32])
        if t == 0:
            # Each thread block has a place of its own, by what it is to do.
            seen[w.strip, w.unit, w.rank, 0] = T.Cast("float32", w.ranks)

    found, _ = run(problem, body, inputs, (2, 10, cluster, 1))
    ranks = found[..., 0]
    for strip in range(2):
        for unit in range(10):
            sharing = cluster if unit < 2 else 1
            assert np.array_equal(ranks[strip, unit, :sharing], np.full(sharing, sharing))
            assert np.isnan(ranks[strip, unit, sharing:]).all()
    assert Deal(10, 1, cluster).clusters(tvm.tirx.IntImm("int32", 2)) == clusters


def test_ends_of_a_row_by_the_list_and_by_the_structure() -> None:
    """Both phases find the same block rows, in the list's order and in the structure's; two units a block row."""
    problem = problem_of("m=2,k=128,n=64,block=16,dtype=float16,pattern=skewed")
    inputs = problem.generate(3)
    order, indptr = inputs[4], inputs[3]
    listed, unlisted = block_row.listed_row(2), block_row.unlisted_row(2)

    @T.inline
    def body(io, seen):
        T.device_entry()
        block = T.cta_id([8])
        t = T.thread_id([32])
        w = T.meta_var(Work.alloc())
        s = T.meta_var(named(SimpleNamespace(row=register(), first=register(), stop=register())))
        w.unit = block
        if t == 0:
            listed(s, io, w, s.first, s.stop)
            seen[block, 0] = T.Cast("float32", s.row)
            seen[block, 1] = T.Cast("float32", s.first)
            seen[block, 2] = T.Cast("float32", s.stop)
            unlisted(s, io, w, s.first, s.stop)
            seen[block, 3] = T.Cast("float32", s.row)
            seen[block, 4] = T.Cast("float32", s.first)
            seen[block, 5] = T.Cast("float32", s.stop)

    found, _ = run(problem, body, inputs, (8, 6))
    assert np.array_equal(found[:, :3], np.repeat(order, 2, axis=0))
    assert np.array_equal(found[:, 3:], np.repeat(np.stack([np.arange(4), indptr[:-1], indptr[1:]], 1), 2, axis=0))


# ---- a long row, shared by a cluster -------------------------------------------------------------


def shared_row(barrier: bool = True) -> Callable[..., None]:
    """A kernel of one cluster of four that shares a row of `io.long` parts, in chunks of 8; two sums a thread.

    Rank r has sums (r + 1) * (t + 1) and -r of thread t. Without `barrier` rank 0 does not wait for them.
    """
    joined, met, added, handed_in = join(4, 8), meet(4, 8), add_ranks(4, 8, 2), hand_in(4)

    @T.inline
    def body(io, seen):
        T.device_entry()
        T.cluster_id([1])
        rank = T.cta_id_in_cluster([4])
        t = T.thread_id([32])
        w = T.meta_var(Work.alloc())
        w.rank = rank
        w.ranks = 4
        sums = T.alloc_local([2], "float32")
        others = T.alloc_shared([3, 32, 2], "float32")
        joined(w, io.long)
        sums[0] = T.Cast("float32", (rank + 1) * (t + 1))
        sums[1] = T.Cast("float32", 0 - rank)
        if barrier:
            met(w, io.long)
        added(w, io.long, sums, others, t)
        if rank == 0:
            seen[t, 0] = sums[0]
            seen[t, 1] = sums[1]
        if barrier:
            handed_in(w)

    return body


@pytest.mark.parametrize(("count", "ranks"), [(8, 1), (9, 2), (24, 3), (100, 4)])
def test_a_cluster_adds_up_the_sums_of_those_that_have_a_part(count: int, ranks: int) -> None:
    problem = problem_of("m=1,k=64,n=16,block=16,dtype=float16")
    inputs = problem.generate(0)
    inputs[5] = count
    for seed in range(2):
        found, _ = run(problem, shared_row(), inputs, (32, 2), seed)
        parts = np.arange(ranks)
        assert np.array_equal(found[:, 0], (parts + 1).sum() * (np.arange(32) + 1))
        assert np.array_equal(found[:, 1], np.full(32, -parts.sum()))


def test_a_cluster_that_does_not_meet_is_found_out() -> None:
    problem = problem_of("m=1,k=64,n=16,block=16,dtype=float16")
    inputs = problem.generate(0)
    inputs[5] = 100
    with pytest.raises(EmulationError):
        run(problem, shared_row(barrier=False), inputs, (32, 2))


# ---- what is stored ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "dtype", "plain"),
    [("relu", "float32", False), ("gelu", "float16", True), ("silu", "bfloat16", False)],
)
def test_bias_and_activation(activation: str, dtype: str, plain: bool) -> None:
    problem = problem_of(f"m=3,k=64,n=32,block=16,dtype={dtype},activation={activation}")
    inputs = problem.generate(1)

    @T.inline
    def body(io, seen):
        T.device_entry()
        row = T.cta_id([3])
        t = T.thread_id([32])
        io.y[row, t] = output(io, t, T.Cast("float32", row * t - 20), plain=plain)
        seen[row, t] = T.float32(0)

    _, y = run(problem, body, inputs, (3, 32))
    sums = np.arange(3)[:, None] * np.arange(32) - 20.0
    wanted = activated(sums + inputs[7].astype("float64"), activation)
    np.testing.assert_allclose(y.astype("float64"), wanted, rtol=2 * ROUNDING[dtype], atol=1e-6)


# ---- tensor_core ---------------------------------------------------------------------------------


def tile_sums(e: TensorExtents, sums: np.ndarray) -> np.ndarray:
    """The tile that the lanes of one warp hold, (tile_m, tile_n), from their registers, (32, sums of a lane)."""
    tile = np.full((e.tile_m, e.tile_n), np.nan)
    for lane, held in enumerate(sums):
        place = SimpleNamespace(group=lane // 4, member=lane % 4)
        for f in range(e.a_fragments):
            for g in range(e.b_fragments):
                for i in range(4):
                    at = x_row(e, place, f, g, i), weight_row(e, place, f, g, i)
                    assert np.isnan(tile[at])
                    tile[at] = held[(f * e.b_fragments + g) * 4 + i]
    return tile


@pytest.mark.parametrize(
    ("key", "decisions"),
    [
        ("m=8,k=512,n=32,block=16x8,dtype=float16", {"tile_m": 8, "tile_n": 16, "reduce_warps": 1, "depth": 2}),
        ("m=11,k=512,n=32,block=16,dtype=bfloat16", {"tile_m": 16, "tile_n": 16, "reduce_warps": 2, "depth": 1}),
    ],
    ids=["weight-is-a", "x-is-a"],
)
def test_loads_and_products_of_one_round(key: str, decisions: dict[str, int]) -> None:
    """Operands of the steps in hand, of a row that ends within them: what x holds beside its blocks is never met."""
    problem = problem_of(key)
    e = TensorExtents.of(problem, point("tensor_core", problem, warps_m=1, overlap=0, **decisions))
    blocks = e.chunk // e.octets - 1
    inputs = problem.generate(0)
    indptr, cols = inputs[3], e.cols
    row = int(np.argmax(np.diff(indptr)))
    first = int(indptr[row])
    assert blocks < indptr[row + 1] - first
    asked = np.isin(np.arange(problem.k) // cols, inputs[2][first : first + blocks])
    inputs[0][:, ~asked] = np.nan
    placed, columns, weight, x, multiplied = (
        tensor.take_places(e), tensor.load_columns(e), tensor.load_weight(e), tensor.load_x(e), tensor.multiply(e),
    )  # fmt: skip

    @T.inline
    def body(io, seen):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([e.threads])
        w = T.meta_var(Work.alloc())
        s = T.meta_var(TileState.alloc(e))
        w.strip = 0
        w.unit = row * e.slices
        w.rank = 0
        w.ranks = 1
        placed(s, w, t, io.m)
        s.first = first
        s.count = blocks * e.octets
        columns(s, io, s.columns)
        weight(s, io, w)
        x(s, io)
        multiplied(s)
        for i in T.unroll(e.a_fragments * e.b_fragments * 4):
            seen[t, i] = s.sums[i]

    found, _ = run(problem, body, inputs, (e.threads, e.a_fragments * e.b_fragments * 4))
    tile = sum(tile_sums(e, found[warp * 32 : warp * 32 + 32]) for warp in range(e.reduce_warps))
    expected = product(problem, inputs, first, blocks)[:, : e.tile_n]
    np.testing.assert_allclose(tile[: problem.m], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", ["nothing", "the begin", "the end", "a column of one lane"])
def test_a_wrong_guess_of_a_row_is_found_out_by_all_lanes(wrong: str) -> None:
    problem = problem_of("m=8,k=512,n=32,block=16x8,dtype=float16")
    e = TensorExtents.of(problem, point("tensor_core", problem, tile_m=8, tile_n=16, reduce_warps=1, overlap=1))
    inputs = problem.generate(0)
    indices, indptr = inputs[2], inputs[3]
    first, count = int(indptr[1]), int(indptr[2] - indptr[1]) * e.octets
    assert count >= e.chunk
    guessed_first, guessed_count = first + (wrong == "the begin"), count - (wrong == "the end")
    other_lane = 5 if wrong == "a column of one lane" else 32
    placed, columns, verified = tensor.take_places(e), tensor.load_columns(e), tensor.verify_guesses(e)

    @T.inline
    def body(io, seen):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        w = T.meta_var(Work.alloc())
        s = T.meta_var(TileState.alloc(e))
        w.strip = 0
        w.unit = e.slices
        w.rank = 0
        w.ranks = 1
        placed(s, w, t, io.m)
        s.loaded = 1
        s.first = guessed_first
        s.count = guessed_count
        columns(s, io, s.columns)
        if t == other_lane:
            s.columns[0] = s.columns[0] ^ 1
        verified(s, io, w)
        seen[t, 0] = T.Cast("float32", s.loaded)
        seen[t, 1] = T.Cast("float32", s.first)
        seen[t, 2] = T.Cast("float32", s.count)
        for d in T.unroll(e.depth):
            seen[t, 3 + d] = T.Cast("float32", s.columns[d])

    found, _ = run(problem, body, inputs, (32, 3 + e.depth))
    assert np.array_equal(found[:, 0], np.full(32, wrong == "nothing"))
    assert np.array_equal(found[:, 1:3], np.tile([first, count], (32, 1)))
    octets = np.arange(32)[:, None] % 4 + np.arange(e.depth) * e.stride
    assert np.array_equal(found[:, 3:], indices[first + octets // e.octets])


@pytest.mark.parametrize("tile_m", [8, 16])
def test_warps_add_up_their_tiles(tile_m: int) -> None:
    """Sums made by hand; rows beyond m are not stored."""
    problem = problem_of("m=5,k=512,n=64,block=32,dtype=float16")
    e = TensorExtents.of(
        problem, point("tensor_core", problem, tile_m=tile_m, tile_n=16, reduce_warps=4, depth=1, overlap=0)
    )
    inputs, held = problem.generate(0), e.a_fragments * e.b_fragments * 4
    placed, written, added = tensor.take_places(e), tensor.write_parts(e), tensor.add_parts(e)

    @T.inline
    def body(io, seen):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([e.threads])
        w = T.meta_var(Work.alloc())
        s = T.meta_var(TileState.alloc(e))
        shared = T.meta_var(SharedSums.alloc(e))
        w.strip = 0
        w.unit = 1
        w.rank = 0
        w.ranks = 1
        placed(s, w, t, io.m)
        s.row = 0
        s.count = 0
        for i in T.unroll(held):
            s.sums[i] = T.Cast("float32", (t * held + i) % 61)
            seen[t, i] = s.sums[i]
        written(s, shared, t)
        added(s, shared, io, w, t, first_column(e, s, w))

    found, y = run(problem, body, inputs, (e.threads, held))
    tile = sum(tile_sums(e, found[warp * 32 : warp * 32 + 32]) for warp in range(4))
    wanted = tile[:5] + inputs[7][16:32].astype("float64")
    np.testing.assert_allclose(y[:, 16:32].astype("float64"), wanted, rtol=ROUNDING["float16"])
    assert np.isnan(y[:, :16]).all() and np.isnan(y[:, 32:]).all()


# ---- staged_x ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "decisions"),
    [
        ("m=3,k=256,n=32,block=8,dtype=float16", {"threads": 64, "tile_m": 4, "vec": 8, "depth": 2}),
        ("m=5,k=256,n=64,block=64x8", {"threads": 32, "tile_m": 4, "vec": 4, "depth": 1}),
    ],
    ids=["several-blocks-a-warp", "several-rows-a-thread"],
)
def test_one_chunk_through_shared_memory(key: str, decisions: dict[str, int]) -> None:
    """A chunk whose last block lies beyond the row; all sums of the thread block, by the sets in shared memory."""
    problem = problem_of(key)
    e = StagedExtents.of(problem, point("staged_x", problem, overlap=0, **decisions))
    inputs = problem.generate(0)
    indptr = inputs[3]
    row = int(np.argmax(np.diff(indptr)))
    first, blocks = int(indptr[row]), max(1, e.chunk - 1)
    assert blocks <= indptr[row + 1] - first
    columns, weight, stage, multiplied, folded, written = (
        staged.load_columns(e), staged.load_weight(e), staged.stage_x(e), staged.multiply(e), staged.fold_lanes(e),
        staged.write_parts(e),
    )  # fmt: skip

    @T.inline
    def body(io, seen):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([e.threads])
        w = T.meta_var(Work.alloc())
        s = T.meta_var(staged.RowState.alloc(e))
        shared = T.meta_var(staged.SharedState.alloc(e))
        w.strip = 0
        s.first = first
        s.count = blocks
        s.begin = 0
        for i in T.unroll(e.passes * e.tile_m):
            s.sums[i] = T.float32(0)
        columns(s, io, t, s.begin)
        weight(s, io, t)
        stage(s, shared, io, w, t)
        multiplied(s, shared, t)
        folded(s)
        written(s, shared, t)
        if t == 0:
            for part, i, r in T.grid(e.sets, e.tile_m, e.rows):
                seen[part, i, r] = shared.parts[part, i, r]

    found, _ = run(problem, body, inputs, (e.sets, e.tile_m, e.rows))
    expected = product(problem, inputs, first, blocks)[: e.tile_m]
    np.testing.assert_allclose(found.sum(0)[: problem.m], expected, rtol=1e-4, atol=1e-4)


# ---- imports -------------------------------------------------------------------------------------


def test_the_spaces_load_no_compiler() -> None:
    code = (
        "import sys, tvm_sparse.schedules.bsr_matmul as b; from tvm_sparse.core.machine import resolve;"
        "from tvm_sparse.core.registry import parse; from tvm_sparse.core.spaces import applicable;"
        "p = parse('bsr_matmul/m=8,k=512,n=64,block=16,sparsity=0.5,dtype=float16');"
        "applicable(p, resolve('sm_90a'));"
        "print([name for name in ('tvm', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_shared_memory_is_what_the_kernel_allocates() -> None:
    """`shared_bytes` of both spaces against the extents of the kernels' buffers."""
    problem = problem_of("m=8,k=1024,n=64,block=16,dtype=float16,pattern=skewed")
    chosen = point("tensor_core", problem, tile_m=8, tile_n=16, reduce_warps=4, depth=1, cluster=4)
    e = TensorExtents.of(problem, chosen)
    parts = e.warps_m * e.reduce_warps * e.tile_m * e.pitch
    assert shared_bytes(chosen) == 4 * (parts + (e.cluster - 1) * e.warps_m * e.pairs * 2)
    s = StagedExtents.of(problem, point("staged_x", problem, threads=128, cluster=2))
    assert s.sets <= s.groups and numpy_dtype(s.dtype).itemsize == s.itemsize
    assert s.shared_bytes >= s.chunk * (s.tile_m + 1) * s.cols * s.itemsize + (s.sets + s.cluster - 1) * s.outputs * 4
