"""The phases of rows and of softmax one by one, on states made by hand, in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from cases import SM90
from tvm.script import tirx as T

from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.script import quicken_parser
from tvm_sparse.emulation import EmulationError, run_on_cpu
from tvm_sparse.operators.logsumexp.problem import LogSumExp
from tvm_sparse.operators.softmax.problem import Softmax
from tvm_sparse.schedules.device.cluster import cluster_arrive
from tvm_sparse.schedules.rows import hold, join
from tvm_sparse.schedules.rows import sum as sums
from tvm_sparse.schedules.rows.cut import Extents, Keep
from tvm_sparse.schedules.rows.state import BlockState, RowState, Views
from tvm_sparse.schedules.softmax import problems
from tvm_sparse.schedules.softmax.problems import RowProblem
from tvm_sparse.schedules.softmax.vectors import write as results

pytestmark = pytest.mark.drawn

LOWEST = np.finfo(np.float32).min


def extents(problem: RowProblem, keep: Keep = "nowhere", **decisions: int) -> Extents:
    return problems.extents(problem, {"threads": 32, "cluster": 1, "vectors": 2, **decisions}, keep)


def run(
    ext: Extents, body: Callable[..., Any], logits: np.ndarray, given: np.ndarray | None = None, log: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """What threads told, and the probabilities; both NaN where nothing was written.

    `body(s, views, block, io, told, given)`: the last two are four and two numbers of the thread.
    """

    quicken_parser()

    # fmt: off
    @T.prim_func
    def main(logits_h: T.handle, log: T.int32, given_h: T.handle, told_h: T.handle, out_h: T.handle):
        batch = T.int32()
        logits = T.match_buffer(logits_h, (batch, ext.vocab), ext.dtype)
        given = T.match_buffer(given_h, (batch, ext.cluster, ext.threads, 2), "float32")
        told = T.match_buffer(told_h, (batch, ext.cluster, ext.threads, 4), "float32")
        out = T.match_buffer(out_h, (batch, ext.vocab), ext.dtype)
        T.device_entry()
        if ext.cluster > 1:
            row = T.cluster_id([batch])
            part = T.cta_id_in_cluster([ext.cluster])
        else:
            row = T.cta_id([batch])
            part = 0
        t = T.thread_id([ext.threads])
        io = T.meta_var(SimpleNamespace(logits=logits, log=log, probabilities=out, batch=batch))
        block = BlockState(ext)
        views = Views(ext, io)
        s = RowState(ext, T.Cast("int64", row), part, t)
        body(s, views, block, io, told, given)
    # fmt: on

    shape = (len(logits), ext.cluster, ext.threads)
    given = np.zeros((*shape, 2), np.float32) if given is None else given
    told, out = np.full((*shape, 4), np.nan, np.float32), np.full_like(logits, np.nan)
    arguments = [np.ascontiguousarray(logits), log, given, told, out]
    module = tvm.IRModule({"main": main.with_attr("global_symbol", "main")})
    run_on_cpu(module, target_of(SM90), arguments, pipeline="tirx", seed=len(logits))
    return told, out


def rows(ext: Extents, batch: int) -> np.ndarray:
    """Normal logits with infinities among them, and a row of nothing but minus infinity."""
    x = np.random.default_rng(ext.vocab).standard_normal((batch, ext.vocab)) * 4
    x[1, ::5] = -np.inf
    x[2] = -np.inf
    return x.astype(numpy_dtype(ext.dtype))


def owners(ext: Extents, batch: int) -> np.ndarray:
    """The thread of the row, over all of its parts, that each element belongs to, from the layout's description."""
    own = np.empty((batch, ext.vocab), np.int64)
    for row in range(batch):
        begin = -(-row * ext.vocab // ext.width)  # the row's first whole vector
        before = min(begin * ext.width - row * ext.vocab, ext.vocab)
        whole = (ext.vocab - before) // ext.width
        own[row, :before] = np.arange(before)
        number = np.arange(whole)
        place = number // ext.part * ext.threads + number % ext.part % ext.threads
        own[row, before : before + whole * ext.width] = np.repeat(place, ext.width)
        tail = ext.vocab - before - whole * ext.width
        own[row, ext.vocab - tail :] = ext.width + np.arange(tail)
    return own


def pairs(ext: Extents, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(m, d) of every thread by Algorithm 2; of its own elements alone."""
    x, own = x.astype(np.float64), owners(ext, len(x))
    m = np.full((len(x), ext.cluster * ext.threads), LOWEST, np.float64)
    for row in range(len(x)):
        np.maximum.at(m[row], own[row], x[row])
    if ext.algorithm == "naive":
        m[...] = 0
    if not ext.writes:
        m = np.minimum(m, np.finfo(np.float32).max)
    d = np.zeros_like(m)
    with np.errstate(over="ignore"):
        for row in range(len(x)):
            np.add.at(d[row], own[row], np.exp(x[row] - m[row, own[row]]))
    shape = (len(x), ext.cluster, ext.threads)
    return m.reshape(shape), d.reshape(shape)


def joined(m: np.ndarray, d: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Equation 4 over axes, which stay as axes of one."""
    top = m.max(axis=axes, keepdims=True)
    return top, (d * np.exp(m - top)).sum(axis=axes, keepdims=True)


# ---- which elements are a thread's ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "dtype", "cluster"),
    [(61, "float32", 1), (64, "float16", 1), (3, "bfloat16", 1), (301, "float16", 4)],
)
def test_every_element_is_of_one_thread(vocab: int, dtype: str, cluster: int) -> None:
    ext = extents(Softmax(1, vocab, dtype=dtype), cluster=cluster)
    locate = hold.locate(ext)

    @T.inline
    def body(s, views, block, io, told, given):
        locate(s, io.logits)
        told[s.row, s.part, s.t, 0] = T.Cast("float32", s.first)
        told[s.row, s.part, s.t, 1] = T.Cast("float32", s.count)
        told[s.row, s.part, s.t, 2] = T.Cast("float32", s.edge_at)
        told[s.row, s.part, s.t, 3] = s.edge

    batch = 2 * ext.width + 1  # rows that begin at every place in a vector
    x = rows(ext, batch)
    told, _ = run(ext, body, x)
    seen = np.zeros((batch, vocab), int)
    for row, part in np.ndindex(batch, cluster):
        first, count = told[row, part, 0, :2].astype(int)
        assert (told[row, part, :, :2] == (first, count)).all()
        assert ext.part_fewest <= count <= ext.part or (count <= ext.part and part < cluster - 1)
        begin = first * ext.width - row * vocab
        seen[row, begin : begin + count * ext.width] += 1
        at = told[row, part, :, 2].astype(int)
        seen[row, at[at >= 0]] += 1
        assert np.array_equal(told[row, part, at >= 0, 3], x[row, at[at >= 0]].astype(np.float32))
        assert np.isneginf(told[row, part, at < 0, 3]).all()
    assert (seen == 1).all()


# ---- pairs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ext",
    [
        extents(Softmax(1, 523), "registers", threads=64),
        extents(Softmax(1, 1029, dtype="bfloat16"), "registers"),
        extents(Softmax(1, 2051, dtype="float16"), "shared", threads=64),
        extents(Softmax(1, 1501, "safe"), threads=64, cluster=2),
        extents(Softmax(1, 610, "naive")),
        extents(LogSumExp(1, 1501, dtype="float16"), vectors=4),
    ],
    ids=lambda ext: f"{ext.keep}-{ext.algorithm}-{ext.dtype}",
)
def test_pair_of_a_thread(ext: Extents) -> None:
    locate, begin_pair, accumulate = hold.locate(ext), sums.begin_pair(ext), sums.accumulate(ext)
    add_edge = sums.add_edge(ext)

    @T.inline
    def body(s, views, block, io, told, given):
        locate(s, io.logits)
        begin_pair(s)
        accumulate(s, views.words, block, io.log)
        add_edge(s)
        told[s.row, s.part, s.t, 0] = s.m
        told[s.row, s.part, s.t, 1] = s.d

    x = rows(ext, 4)
    if not ext.writes:
        x[3, 7] = np.inf  # the maximum stays finite, so that the sum is infinite and not NaN
    told, _ = run(ext, body, x)
    m, d = pairs(ext, x)
    assert np.array_equal(told[..., 0], m.astype(np.float32))
    np.testing.assert_allclose(told[..., 1], d, rtol=2e-6)
    if not ext.writes:
        assert np.isposinf(told[3, ..., 1]).sum() == 1 and not np.isnan(told[..., :2]).any()


def hand_made_pairs(ext: Extents, batch: int) -> np.ndarray:
    """Far apart, of threads without elements, and all of a row empty."""
    rng = np.random.default_rng(ext.pairs)
    shape = (batch, ext.cluster, ext.threads)
    given = np.stack([rng.normal(0, 30, shape), rng.uniform(1, 9, shape)], axis=-1).astype(np.float32)
    given[1, :, ::3] = (LOWEST, 0)
    given[2] = (LOWEST, 0)
    given[3, 0, 5, 0] = 1e30
    return given


@pytest.mark.parametrize(
    ("threads", "cluster"),
    [(32, 1), (96, 1), (64, 4), (544, 2)],  # the last: more pairs than a warp has threads
)
def test_pairs_are_joined(threads: int, cluster: int) -> None:
    ext = extents(Softmax(1, 2**14), threads=threads, cluster=cluster)
    join_warp, join_block, join_cluster = join.join_warp, join.join_block(ext), join.join_cluster(ext)

    # fmt: off
    @T.inline
    def body(s, views, block, io, told, given):
        if ext.cluster > 1:
            cluster_arrive()
        s.m = given[s.row, s.part, s.t, 0]
        s.d = given[s.row, s.part, s.t, 1]
        join_warp(s)
        told[s.row, s.part, s.t, 0] = s.top
        told[s.row, s.part, s.t, 1] = s.d
        if ext.cluster > 1:
            join_cluster(s, block)
        elif ext.warps > 1:
            join_block(s, block)
        told[s.row, s.part, s.t, 2] = s.top
        told[s.row, s.part, s.t, 3] = s.d
    # fmt: on

    given = hand_made_pairs(ext, 4)
    told, _ = run(ext, body, np.zeros((4, ext.vocab), np.float32), given)
    of_warps = given.astype(np.float64).reshape(4, cluster, ext.warps, 32, 2)
    top, d = joined(of_warps[..., 0], of_warps[..., 1], (3,))
    found = told.reshape(4, cluster, ext.warps, 32, 4)
    assert (found[..., 0] == top).all()
    np.testing.assert_allclose(found[..., 1], np.broadcast_to(d, found.shape[:-1]), rtol=1e-6)
    top, d = joined(top, d, (1, 2))
    assert (found[..., 2] == top).all()
    np.testing.assert_allclose(found[..., 3], np.broadcast_to(d, found.shape[:-1]), rtol=1e-6)


def test_a_cluster_may_not_be_joined_before_its_blocks_have_begun() -> None:
    ext = extents(Softmax(1, 2**10), cluster=2)
    join_warp, join_cluster = join.join_warp, join.join_cluster(ext)

    # fmt: off
    @T.inline
    def body(s, views, block, io, told, given):
        s.m = T.float32(0)
        s.d = T.float32(1)
        join_warp(s)
        join_cluster(s, block)  # waits for arrivals that nobody has sent
        told[s.row, s.part, s.t, 0] = s.d
    # fmt: on

    with pytest.raises(EmulationError):
        run(ext, body, np.zeros((1, ext.vocab), np.float32))


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [0, 1])
@pytest.mark.parametrize(
    "ext",
    [
        extents(Softmax(1, 523), "registers", threads=64),
        extents(Softmax(1, 1029, dtype="float16"), "registers"),
        extents(Softmax(1, 2051), "shared", threads=64),
        extents(Softmax(1, 1501, dtype="bfloat16"), cluster=2),
    ],
    ids=lambda ext: f"{ext.keep}-{ext.dtype}",
)
def test_results_for_a_pair_that_is_given(ext: Extents, log: int) -> None:
    """Any pair: not that of the row, so that what is written can come from nothing else."""
    locate, begin_pair, accumulate = hold.locate(ext), sums.begin_pair(ext), sums.accumulate(ext)
    normalise, write, write_edge = results.normalise(ext), results.write(ext), results.write_edge(ext)

    @T.inline
    def body(s, views, block, io, told, given):
        locate(s, io.logits)
        begin_pair(s)
        accumulate(s, views.words, block, io.log)
        s.top = given[s.row, s.part, s.t, 0]
        s.d = given[s.row, s.part, s.t, 1]
        normalise(s, io.log)
        write(s, views, block, io.log)
        write_edge(s, io.probabilities, io.log)

    x = rows(ext, 5)[[0, 1, 3, 4]]
    given = np.empty((4, ext.cluster, ext.threads, 2), np.float32)
    given[...] = np.array([(20, 3), (15, 1), (30, 200), (25, 0.5)])[:, None, None]
    _, out = run(ext, body, x, given, log)
    top, d = given[:, 0, :1, 0].astype(np.float64), given[:, 0, :1, 1].astype(np.float64)
    shifted = x.astype(np.float64) - top
    problem = Softmax(4, ext.vocab, dtype=ext.dtype)
    problem.check([x, log], [shifted - np.log(d) if log else np.exp(shifted) / d], [out])
