"""The sparse recurrent layer's persistent kernels: phases alone, and what the generic tests do not bring about."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tvm
from cases import SM80, SM90, each_with_some, thorough
from tvm.script import tirx as T

from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.core import spaces
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable
from tvm_sparse.emulation import run_on_cpu
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent
from tvm_sparse.schedules.recurrent import exchange
from tvm_sparse.schedules.sparse_recurrent.cluster_rows.space import ClusterExtents
from tvm_sparse.schedules.sparse_recurrent.persistent_rows import space as persistent_space
from tvm_sparse.schedules.sparse_recurrent.persistent_rows import step
from tvm_sparse.schedules.sparse_recurrent.persistent_rows.space import REGISTERS, Extents, longest_row
from tvm_sparse.schedules.sparse_recurrent.persistent_rows.state import State

pytestmark = pytest.mark.drawn

TARGET = target_of(SM90)
POINT = {"blocks": 2, "threads": 64, "reduce_threads": 8, "registers": 2, "pack": 4, "stages": 2}
CLUSTER = {"cluster": 2, "threads": 64, "reduce_threads": 8, "registers": 6, "pack": 4}


def problem_of(key: str) -> SparseRecurrent:
    found = parse(f"sparse_recurrent/{key}")
    assert isinstance(found, SparseRecurrent)
    return found


def run(
    template: str, problem: Problem, decisions: dict[str, int], inputs: list[Any], seed: int = 0
) -> list[np.ndarray]:
    """The outputs of a point in the emulator; also of points that are too small for their space."""
    program = spaces.find(template).build(problem, decisions)
    outputs = problem.empty_outputs()
    own = [np.full(tuple(map(problem.extent, w.shape)), 0x12345678, w.dtype) for w in program.workspaces]
    run_on_cpu(program.module, TARGET, [*inputs, *outputs, *own], pipeline=program.pipeline, seed=seed, timeout=120)
    return outputs


# ---- phases --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lanes", "pack"), [(4, 1), (4, 4), (8, 2), (16, 8), (32, 4), (32, 1)])
def test_reduction_over_lanes(lanes: int, pack: int) -> None:
    """Lane l of a group ends with the group's sums for sample l % pack, of all rows."""
    problem = problem_of("steps=1,batch=8,hidden=8,nonzeros=3,cell=gru,dtype=float16")
    e = Extents.of(problem, {**POINT, "threads": 32, "blocks": 1, "reduce_threads": lanes, "pack": pack})
    each = e.rows * e.pack
    reduce = step.reduce_lanes(e)

    @T.prim_func
    def main(given: T.Buffer((32, each), "float32"), found: T.Buffer((32, e.rows), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        s = T.meta_var(State.of(e, t))
        for i in T.unroll(each):
            s.sums[i] = given[t, i]
        reduce(s)
        for row in T.unroll(e.rows):
            found[t, row] = s.sums[row * e.pack]

    given = np.random.default_rng(0).integers(-50, 50, (32, each)).astype("float32")
    found = np.full((32, e.rows), np.nan, "float32")
    module = tvm.IRModule({"main": main.with_attr("global_symbol", "main")})
    run_on_cpu(module, TARGET, [given, found], pipeline="tirx")
    groups = given.reshape(32 // lanes, lanes, e.rows, pack).sum(1)
    for t in range(32):
        np.testing.assert_array_equal(found[t], groups[t // lanes, :, t % pack])


@pytest.mark.parametrize(
    ("dtype", "pack", "marked", "free"),
    [
        ("float32", 4, [0xFFFFFFFF], [0, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFF, 0xFFFF0000]),
        # Two halves are sent as one word.
        ("float16", 2, [0xFFFFFFFF], [0, 0x7FFF7FFF, 0xFFFF0000, 0x0000FFFF]),
        # Halves are sent by themselves, so that one may be there and its neighbour not.
        ("bfloat16", 1, [0xFFFFFFFF, 0x0000FFFF, 0xFFFF0000, 0x7FFFFFFF], [0, 0x7FFF7FFF, 0xFFFEFFFE, 0x00010000]),
    ],
)
def test_which_words_are_missing(dtype: str, pack: int, marked: list[int], free: list[int]) -> None:
    problem = problem_of(f"steps=1,batch=4,hidden=8,nonzeros=3,dtype={dtype}")
    e = Extents.of(problem, {**POINT, "pack": pack})
    vectors = [[w if i == at else 0 for i in range(4)] for w in marked for at in range(4)]
    expected = [1] * len(vectors) + [0] * len(free)
    words = np.array([*vectors, *([w] * 4 for w in free)], "uint32")
    count = len(words)

    @T.prim_func
    def main(given: T.Buffer((count, 4), "uint32"), found: T.Buffer((count,), "int32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        copied = T.alloc_local([4], "uint32")
        if t < count:
            for i in T.unroll(4):
                copied[i] = given[t, i]
            found[t] = T.Cast("int32", exchange.missing(e, copied, 0))

    found = np.full(count, -1, "int32")
    module = tvm.IRModule({"main": main.with_attr("global_symbol", "main")})
    run_on_cpu(module, TARGET, [words, found], pipeline="tirx")
    assert found.tolist() == expected


def test_batches_cover_every_round_once() -> None:
    for registers, dtype in itertools.product(REGISTERS, ("float32", "float16")):
        problem = problem_of(f"steps=1,batch=4,hidden=800,nonzeros=300,dtype={dtype}")
        points = [Extents.of(problem, {**POINT, "registers": registers})]
        points += [
            ClusterExtents.of(problem, {**CLUSTER, "registers": registers, "reduce_threads": n}) for n in (4, 32)
        ]
        for e in points:
            rounds = [first + i for first, count in e.batches for i in range(count)]
            assert rounds == list(range(registers))
            assert all(0 < count <= e.gathered for _, count in e.batches)


# ---- whole kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, thorough(1), thorough(2)])
@pytest.mark.parametrize(
    ("template", "dtype"),
    each_with_some(("persistent_rows", "cluster_rows"), ("float32", "float16", "bfloat16")),
)
def test_a_state_that_looks_like_the_mark(template: str, dtype: str, seed: int) -> None:
    """NaNs all of whose bits are ones, in the first states and in what a step adds: nobody waits for them for ever."""
    problem = problem_of(f"steps=4,batch=3,hidden=11,nonzeros=4,cell=relu,dtype={dtype}")
    inputs = problem.generate(seed)
    names = [argument.name for argument in problem.kernel_inputs]
    ones = np.full(1, 0xFF, "uint8").repeat(8).view(numpy_dtype(dtype))[0]
    for name, place in (("h0", (0, 3)), ("h0", (2, 10)), ("x_projected", (1, 1, 5))):
        inputs[names.index(name)][place] = ones
    outputs = run(template, problem, POINT if template == "persistent_rows" else CLUSTER, inputs, seed)
    problem.check(inputs, problem.reference(inputs), outputs)
    assert np.isnan(outputs[0].astype("float32")).any()


BARRIER, POLLED = "barrier_rows", "persistent_rows"


@pytest.mark.parametrize(("template", "stages"), [(BARRIER, 1), (POLLED, 2), thorough(BARRIER, 2), thorough(POLLED, 1)])
def test_thread_blocks_that_run_in_any_order(template: str, stages: int) -> None:
    """Blocks wait for each other whatever order they run in; packs of a batch follow each other."""
    problem = problem_of("steps=6,batch=5,hidden=23,nonzeros=6,cell=lstm")
    inputs = problem.generate(0)
    expected = problem.reference(inputs)
    point = {**POINT, "blocks": 3, "threads": 32, "pack": 2, "stages": stages}
    for seed in range(4):
        problem.check(inputs, expected, run(template, problem, point, inputs, seed))


@pytest.mark.parametrize(("dtype", "stages"), [("float16", 2), ("float32", 1), thorough("bfloat16", 1)])
def test_a_step_of_two_exchanges(dtype: str, stages: int) -> None:
    """With the reset before the product: several packs and units a group, sequences that end, others that begin."""
    problem = problem_of(f"steps=4,batch=5,hidden=23,nonzeros=6,cell=gru_reset_before,dtype={dtype},ragged=1,resets=1")
    for seed, structure in enumerate(("random", "special", "one_long_row")):
        inputs = problem.generate(seed, structure)
        point = {**POINT, "blocks": 3, "threads": 32, "pack": 2, "stages": stages, "registers": seed}
        problem.check(inputs, problem.reference(inputs), run(POLLED, problem, point, inputs, seed))
        point = {**CLUSTER, "threads": 32, "pack": 2}
        problem.check(inputs, problem.reference(inputs), run("cluster_rows", problem, point, inputs, seed))


@pytest.mark.parametrize(("dtype", "pack"), [("float16", 4), ("float32", 2), thorough("bfloat16", 8)])
def test_a_step_back_of_two_exchanges(dtype: str, pack: int) -> None:
    """Both regions of a copy, with a gap of one column or several, packs one after another, rows beyond registers."""
    for seed, structure in enumerate(("random", "special", "one_long_row")):
        axes = f"steps={3 - seed},batch=5,hidden=23,nonzeros=17,dtype={dtype}" + ",ragged=1,resets=1" * bool(seed)
        problem = parse(f"recurrent_backward/{axes},cell=gru_reset_before")
        inputs = problem.generate(seed, structure)
        point = {**POINT, "blocks": 3, "threads": 32, "pack": pack, "registers": seed}
        problem.check(inputs, problem.reference(inputs), run("persistent_back", problem, point, inputs, seed))


def test_entries_that_are_nowhere_on_chip() -> None:
    """Rows of very different lengths, of which registers keep the beginnings."""
    problem = problem_of("steps=3,batch=2,hidden=60,nonzeros=12,cell=gru")
    for structure, registers in (("one_long_row", 1), ("ragged", 0)):
        inputs = problem.generate(1, structure)
        outputs = run("persistent_rows", problem, {**POINT, "pack": 2, "registers": registers}, inputs)
        problem.check(inputs, problem.reference(inputs), outputs)


@pytest.mark.parametrize(
    ("template", "dtype"), each_with_some(("persistent_rows", "cluster_rows"), ("float32", "float16", "bfloat16"))
)
def test_entries_in_the_fewest_registers(template: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Column and value in one word, or two columns in one: what takes the fewest registers, where these are too few."""
    monkeypatch.setattr(persistent_space, "LEAST_BESIDES", 10_000)
    problem = problem_of(f"steps=3,batch=3,hidden=31,nonzeros=9,cell=lstm,dtype={dtype}")
    for seed, (structure, registers) in enumerate((("random", 4), ("one_long_row", 3), ("ragged", 6))):
        point = (POINT if template == "persistent_rows" else CLUSTER) | {"registers": registers, "pack": 2}
        extents = Extents if template == "persistent_rows" else ClusterExtents
        assert extents.of(problem, point).form == ("paired" if dtype == "float32" else "joined")
        inputs = problem.generate(seed, structure)
        problem.check(inputs, problem.reference(inputs), run(template, problem, point, inputs, seed))


def test_a_reset_meets_an_infinite_weight() -> None:
    """Zero times infinity is NaN, as for the reference."""
    problem = problem_of("steps=3,batch=2,hidden=9,nonzeros=4,resets=1")
    inputs = problem.generate(2, "special")
    names = [argument.name for argument in problem.kernel_inputs]
    inputs[names.index("resets")][:] = 1
    expected = problem.reference(inputs)
    assert np.isnan(expected[0]).any()
    for template, point in (("persistent_rows", {**POINT, "pack": 2}), ("cluster_rows", {**CLUSTER, "pack": 2})):
        problem.check(inputs, expected, run(template, problem, point, inputs))


def test_a_reset_meets_a_reset_gate_that_is_nan() -> None:
    """With the reset before the product, zero times the gate of a unit is NaN for all units that multiply it."""
    problem = problem_of("steps=2,batch=2,hidden=41,nonzeros=6,cell=gru_reset_before,resets=1")
    names = [argument.name for argument in problem.kernel_inputs]
    for seed in range(20):
        inputs = problem.generate(seed, "special")
        inputs[names.index("resets")][:] = 1
        expected = problem.reference(inputs)
        problem.check(inputs, expected, run("persistent_rows", problem, {**POINT, "pack": 2}, inputs))


# ---- spaces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "blocks", "threads", "stages"),
    [
        # As measured on an H200.
        ("steps=256,batch=4,hidden=1792,nonzeros=18", (48, 64), (256,), 2),
        ("steps=256,batch=4,hidden=1792,nonzeros=179", (96, 128), (256, 384, 512), 2),
        ("steps=256,batch=4,hidden=1792,nonzeros=538", (128, 132), (256, 384, 512), 2),
        ("steps=256,batch=4,hidden=2304,nonzeros=691", (128, 132), (384, 576), 2),
        ("steps=256,batch=4,hidden=5632,nonzeros=56", (128,), (512, 640), 2),
        ("steps=256,batch=4,hidden=1024,nonzeros=128,cell=lstm,dtype=float16", (128, 132), (256,), 2),
    ],
)
def test_the_default(key: str, blocks: tuple[int, ...], threads: tuple[int, ...], stages: int) -> None:
    found = spaces.find("persistent_rows").default(problem_of(key), SM90)
    assert found["blocks"] in blocks and found["threads"] in threads and found["stages"] == stages
    assert found["registers"] * found["reduce_threads"] >= longest_row(problem_of(key))


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("steps=256,batch=4,hidden=5760,nonzeros=576", 512),
    ],
)
def test_the_default_keeps_most_of_rows_that_exceed_the_registers(key: str, least: int) -> None:
    """To read an entry again at each step takes more time than any number of threads gains."""
    found = spaces.find("persistent_rows").default(problem_of(key), SM90)
    assert least <= found["registers"] * found["reduce_threads"] < longest_row(problem_of(key))


def test_what_does_not_apply() -> None:
    rows, cluster = spaces.find("persistent_rows"), spaces.find("cluster_rows")
    with pytest.raises(NotApplicable, match="exceed the shared memory of a thread block"):
        rows.space(problem_of("steps=1,batch=1,hidden=60000,nonzeros=1"), SM90)
    with pytest.raises(NotApplicable, match="16 bits have no number for absent entries beyond 65536 columns"):
        rows.space(problem_of("steps=1,batch=1,hidden=65536,nonzeros=1,dtype=float16"), SM90)
    with pytest.raises(NotApplicable, match="no cluster keeps .* entries in each row of hidden=1792"):
        cluster.space(problem_of("steps=1,batch=4,hidden=1792,nonzeros=538"), SM90)
    with pytest.raises(NotApplicable, match="gru_reset_before exchanges values twice a step"):
        spaces.find(BARRIER).space(problem_of("steps=1,batch=4,hidden=64,nonzeros=5,cell=gru_reset_before"), SM90)
    with pytest.raises(NotApplicable, match="need compute capability 9.0"):
        cluster.space(problem_of("steps=1,batch=4,hidden=64,nonzeros=5"), SM80)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        # As measured on an H200: a sample a cluster, of 16 thread blocks, a unit a group.
        ("batch=4,hidden=1792,nonzeros=20", {"cluster": 16, "threads": 512, "reduce_threads": 4, "pack": 1}),
        ("batch=4,hidden=1792,nonzeros=20,dtype=float16", {"cluster": 16, "threads": 512, "pack": 1}),
        # More clusters than there is room for would wait for each other.
        ("batch=16,hidden=1792,nonzeros=20", {"cluster": 16, "pack": 2}),
    ],
)
def test_the_default_of_a_cluster(key: str, expected: dict[str, int]) -> None:
    problem = problem_of(f"steps=256,{key}")
    found = spaces.find("cluster_rows").default(problem, SM90)
    assert {name: found[name] for name in expected} == expected
    assert ClusterExtents.of(problem, found).units == 1


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        # As measured on an H200: many rows of few entries wait for nothing in clusters of their own.
        ("steps=416,batch=36,hidden=273,nonzeros=16,cell=tanh,dtype=float32", "cluster_rows"),
        ("steps=269,batch=53,hidden=118,nonzeros=16,cell=relu,dtype=float32", "cluster_rows"),
        ("steps=156,batch=2,hidden=260,nonzeros=50,cell=gru_reset_before,dtype=float32", "cluster_rows"),
        ("steps=256,batch=4,hidden=1024,nonzeros=140,cell=gru,dtype=float16", "persistent_rows"),
        ("steps=256,batch=4,hidden=2304,nonzeros=250,cell=tanh,dtype=float16", "persistent_rows"),
        ("steps=1,batch=2,hidden=1367,nonzeros=80,cell=tanh,dtype=float32", "step_kernels"),
    ],
)
def test_which_kernel_a_layer_has_by_default(key: str, expected: str) -> None:
    assert spaces.fallback(problem_of(key), SM90).template == expected


def test_places_of_columns() -> None:
    """Chunks hold all units of a thread block and are multiples of 16 bytes; absent entries' place is behind them."""
    for cluster, hidden, pack, dtype in itertools.product((2, 16), (17, 64, 331), (1, 4), ("float32", "bfloat16")):
        problem = problem_of(f"steps=1,batch=4,hidden={hidden},nonzeros=5,dtype={dtype}")
        e = ClusterExtents.of(problem, {**CLUSTER, "cluster": cluster, "pack": pack})
        assert e.chunk >= e.most and e.chunk_bytes == e.chunk * e.column_bytes and e.chunk_bytes % 16 == 0
        assert e.stage_bytes // 2 >= (e.absent + 1) * e.column_bytes and e.absent == cluster * e.chunk


@pytest.mark.parametrize(
    ("key", "point"),
    [
        # Thread blocks of one unit more and less, chunks with places that nobody has; fewer warps than thread blocks.
        thorough("steps=5,batch=3,hidden=37,nonzeros=5", {"cluster": 16, "pack": 1}),
        ("steps=4,batch=3,hidden=37,nonzeros=5,cell=lstm,dtype=float16,ragged=1,resets=1", {"cluster": 4, "pack": 1}),
        thorough(
            "steps=3,batch=5,hidden=41,nonzeros=5,cell=gru,dtype=bfloat16", {"cluster": 8, "pack": 4, "threads": 32}
        ),
        thorough("steps=2,batch=2,hidden=19,nonzeros=5,cell=relu", {"cluster": 2, "pack": 2, "registers": 0}),
        ("steps=1,batch=2,hidden=19,nonzeros=5", {"cluster": 2, "pack": 1}),
    ],
)
def test_clusters_whose_blocks_run_in_any_order(key: str, point: dict[str, int]) -> None:
    """States arrive at any time; rows may be longer than a group keeps."""
    problem = problem_of(key)
    for structure in ("one_long_row", "ragged"):
        inputs = problem.generate(3, structure)
        expected = problem.reference(inputs)
        for seed in range(2):
            problem.check(inputs, expected, run("cluster_rows", problem, {**CLUSTER, **point}, inputs, seed))
