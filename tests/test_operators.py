"""What an operator declares: keys, valid inputs, references, checks that reject, definitions that are right."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import tvm
from cases import AWKWARD, case_id, of_each_operator, on_cpu, settings_of
from hypothesis import given
from hypothesis import strategies as st

from tvm_sparse.core import registry
from tvm_sparse.core.problem import FLOATS, Mismatch, Problem, ProblemError, Settings
from tvm_sparse.core.registry import make, parse
from tvm_sparse.formats.bsr import analysed, check_structure, fullest_first, like_beside, random_pattern, skew
from tvm_sparse.formats.compressed import check_compressed
from tvm_sparse.formats.quantized import QuantizedEmbedding
from tvm_sparse.operators.block_recurrent.problem import BlockRecurrent
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul
from tvm_sparse.operators.nhot_lookup.problem import INDEX, NhotLookup, typical
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent, preferred

SOFTMAX = [p for p in AWKWARD if isinstance(p, SoftmaxTopk)]
BSR = [p for p in AWKWARD if isinstance(p, BsrMatmul)]
BAGS = [p for p in AWKWARD if isinstance(p, NhotLookup)]
NHOT = [p for p in BAGS if p.plain]

softmax_problems = st.integers(1, 2**20).flatmap(
    lambda vocab: st.builds(
        SoftmaxTopk, st.integers(1, 10**5), st.just(vocab), k=st.integers(1, vocab), dtype=st.sampled_from(FLOATS)
    )
)


@st.composite
def bsr_problems(draw: st.DrawFn) -> BsrMatmul:
    rows, cols = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    k, n = cols * draw(st.integers(1, 100)), rows * draw(st.integers(1, 100))
    block = draw(st.sampled_from([f"{rows}x{cols}"] + ([rows, str(rows)] if rows == cols else [])))
    sparsity, pattern = draw(st.floats(0, 1)), draw(st.sampled_from(["uniform", "skewed"]))
    extras = draw(st.integers(0, 1)), draw(st.sampled_from(["", "relu", "gelu", "silu"]))
    return BsrMatmul(draw(st.integers(1, 500)), k, n, block, sparsity, pattern, draw(st.sampled_from(FLOATS)), *extras)


nhot_problems = st.builds(
    NhotLookup,
    *(st.integers(1, 2**20) for _ in range(3)),
    nonzeros=st.integers(1, 1000),
    dtype=st.sampled_from(FLOATS),
    weighted=st.integers(0, 1),
    index=st.sampled_from(INDEX),
)


# ---- keys ----------------------------------------------------------------------------------------


@given(st.one_of(softmax_problems, nhot_problems, bsr_problems()))
def test_keys_round_trip(problem: Problem) -> None:
    assert parse(problem.key) == problem
    assert make(problem.operator, {name: str(value) for name, value in problem.axes.items()}) == problem
    assert hash(parse(problem.key)) == hash(problem) and parse(problem.key).key == problem.key
    assert problem.with_batch(7).batch_extent == 7 and problem.with_batch(problem.batch_extent) == problem
    assert problem.distance(problem) == 0


def test_keys_are_stable() -> None:
    """They stand in records on disk: a change here orphans what was measured."""
    softmax = make("softmax_topk", {"batch": 10, "vocab": "25_000", "k": 5})
    assert softmax.key == str(softmax) == "softmax_topk/batch=10,vocab=25000,k=5,dtype=float32"
    bsr = make("bsr_matmul", {"m": 8, "k": 1024, "n": 1024, "block": 16, "sparsity": 0.899999})
    assert bsr.key == "bsr_matmul/m=8,k=1024,n=1024,block=16x16,sparsity=0.9,pattern=uniform,dtype=float32"
    nhot = make("nhot_lookup", {"rows": 100, "vocab": "10_240", "width": 512, "nonzeros": 10})
    assert nhot.key == "nhot_lookup/rows=100,vocab=10240,width=512,nonzeros=10,dtype=float32"
    nhot = dataclasses.replace(nhot, weighted=1, index="int64")
    assert nhot.key == "nhot_lookup/rows=100,vocab=10240,width=512,nonzeros=10,dtype=float32,weighted=1,index=int64"


@pytest.mark.parametrize(
    ("key", "axes"),
    [
        ("bsr_matmul/m=1,k=64,n=64,block=8,sparsity=0.512", {"block": "8x8", "sparsity": 0.51}),
        ("bsr_sddmm/m=1,k=64,n=64,block=8,sparsity=0.512", {"block": "8x8", "sparsity": 0.51}),
        ("csr_linear/m=1,k=64,n=64,sparsity=0.912", {"sparsity": 0.91}),
    ],
)
def test_axes_have_one_form(key: str, axes: dict[str, Any]) -> None:
    """Look-up compares axes, also with those of problems that came from keys."""
    problem = parse(key)
    assert problem.axes == parse(problem.key).axes and axes.items() <= problem.axes.items()


@pytest.mark.parametrize("operator", registry.operators())
def test_example_is_a_problem_and_declares_its_arguments(operator: str) -> None:
    problem = make(operator, registry.find(operator).problem.example)
    axes = {field.name for field in dataclasses.fields(problem)}
    assert problem.batch_axis in axes and problem.source
    assert problem.tuned in problem.verified and set(problem.verified) <= set(problem.structures)
    assert len({frozenset(settings) for settings in problem.settings}) == 1  # the same names in each
    assert len(problem.generate(0)) == len(problem.kernel_inputs)
    assert [a.shape for a in problem.empty_outputs()] == [r.shape for r in problem.reference(problem.generate(0))]
    assert problem.cost().bytes > 0 and problem.cost(problem.generate(0)).operations > 0


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("softmax_topkk/batch=1,vocab=2,k=1", "did you mean softmax_topk or softmax?"),
        ("conv2d/batch=1", "expected one of softmax_topk, softmax_sample, edit_logits, bsr_matmul"),
        ("softmax_topk/batch=1,vocabulary=2,k=1", "unknown axis 'vocabulary'; did you mean vocab?"),
        ("softmax_topk/batch=1,vocab=2", "missing axis k; expected batch, vocab, k, dtype"),
        ("softmax_topk/batch=1,vocab=2,k", "expected axis=value, got 'k'"),
        ("softmax_topk/batch=1,vocab=2,k=one", "k must be int, got 'one'"),
        ("softmax_topk/batch=1,vocab=2,k=1.0", "k must be int, got '1.0'"),
        ("softmax_topk/batch=0,vocab=2,k=1", "batch must be an integer of at least 1, got 0"),
        ("softmax_topk/batch=1,vocab=-5,k=1", "vocab must be an integer of at least 1, got -5"),
        ("softmax_topk/batch=1,vocab=2,k=0", "k must be an integer of at least 1, got 0"),
        ("softmax_topk/batch=1,vocab=2,k=3", "k must be at most vocab (2), got 3"),
        ("softmax_topk/batch=1,vocab=2147483648,k=3", "vocab must be below 2^31"),
        ("softmax_topk/batch=1,vocab=2,k=1,dtype=float64", "dtype must be one of float32, float16, bfloat16, got"),
        ("bsr_matmul/m=0,k=16,n=16,block=16,sparsity=0", "m must be an integer of at least 1, got 0"),
        ("bsr_matmul/m=1,k=16,n=16,block=16x,sparsity=0.5,k=17", "does not divide k=17"),
        ("bsr_matmul/m=1,k=16,n=20,block=16,sparsity=0", "block 16x16 does not divide n=20"),
        ("bsr_matmul/m=1,k=16,n=16,block=0,sparsity=0", "block must be like 16 or 16x32"),
        ("bsr_matmul/m=1,k=16,n=16,block=4x-4,sparsity=0", "block must be like 16 or 16x32"),
        ("bsr_matmul/m=1,k=16,n=16,block=big,sparsity=0", "block must be like 16 or 16x32 (rows x columns), got 'big'"),
        ("bsr_matmul/m=1,k=16,n=16,block=16,sparsity=1.5", "sparsity must lie in [0, 1], got 1.5"),
        ("bsr_matmul/m=1,k=16,n=16,block=16,sparsity=nan", "sparsity must lie in [0, 1], got nan"),
        ("bsr_matmul/m=1,k=16,n=16,block=16,sparsity=lots", "sparsity must be float, got 'lots'"),
        ("bsr_matmul/m=1,k=16,n=16,block=16,sparsity=0,pattern=diagonal", "pattern must be one of uniform, skewed"),
        ("bsr_matmul/m=1,k=65536,n=65536,block=16,sparsity=0.9", "fewer than 2^31 elements"),
        ("bsr_matmul/m=1,k=16,n=16,block=16,sparsity=0,dtype=int8", "dtype must be one of"),
        ("nhot_lookup/rows=0,vocab=2,width=3,nonzeros=1", "rows must be an integer of at least 1, got 0"),
        ("nhot_lookup/rows=1,vocab=2,width=3,nonzeros=0", "nonzeros must be an integer of at least 1, got 0"),
        ("nhot_lookup/rows=1,vocab=2147483648,width=3,nonzeros=1", "vocab must be below 2^31, got 2147483648"),
        ("nhot_lookup/rows=1,vocab=2,width=3,nonzeros=1,weighted=2", "weighted must be 0 or 1"),
        ("nhot_lookup/rows=1,vocab=2,width=3,nonzeros=1,index=int16", "index must be one of int32, int64, got 'int16'"),
        ("bsr_matmul/m=1,k=16,n=16,block=16,sparsity=0,bias=2", "bias must be 0 or 1, got 2"),
        ("bsr_matmul/m=1,k=16,n=16,block=16,sparsity=0,activation=tanh", "activation must be one of relu, gelu, silu"),
    ],
)
def test_bad_keys_name_the_axis(key: str, message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        parse(key)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [2.0, True, None, np.float32(3)])
def test_axes_are_integers(value: Any) -> None:
    with pytest.raises(ProblemError, match="batch must be an integer of at least 1"):
        make("softmax_topk", {"batch": value, "vocab": 10, "k": 1})


def test_distance_orders_by_likeness() -> None:
    softmax = parse("softmax_topk/batch=8,vocab=1000,k=5")
    near, far = softmax.with_batch(16), softmax.with_batch(256)
    assert 0 < softmax.distance(near) < softmax.distance(far)
    assert softmax.distance(dataclasses.replace(softmax, dtype="float16")) is None
    bsr = parse("bsr_matmul/m=1,k=64,n=64,block=8,sparsity=0.9")
    assert softmax.distance(bsr) is None and bsr.distance(softmax) is None
    assert bsr.distance(dataclasses.replace(bsr, block="4x4")) is None
    # Density counts, not sparsity: from 90 % to 95 % zero is half of the work, from 10 % to 15 % nearly none.
    thin, thick = (dataclasses.replace(bsr, sparsity=s) for s in (0.95, 0.15))
    assert bsr.distance(thin) > dataclasses.replace(bsr, sparsity=0.1).distance(thick)


def test_lookups_differ_in_what_their_decisions_depend_on() -> None:
    nhot = parse("nhot_lookup/rows=100,vocab=1000,width=512,nonzeros=10")
    assert nhot.distance(dataclasses.replace(nhot, vocab=10**6)) == 0  # programs read it when they run
    assert nhot.distance(dataclasses.replace(nhot, dtype="float16")) is None
    others = [dataclasses.replace(nhot, **axis) for axis in ({"index": "int64"}, {"weighted": 1}, {"nonzeros": 50})]
    distances = [nhot.distance(other) for other in others]
    assert 0 < distances[0] < distances[1] < distances[2]


def test_steps_of_another_beam_have_decisions_of_their_own() -> None:
    step = parse("lsh_topk/lists=1,beam=12,hidden=1000,vocab=40000,frequent=5500,n=12,dtype=float16")
    assert 0 < step.distance(dataclasses.replace(step, frequent=5400)) < step.distance(dataclasses.replace(step, n=13))
    assert step.distance(dataclasses.replace(step, bias=1)) == 0
    for other in ({"beam": 13}, {"dtype": "bfloat16"}, {"table": "cuckoo"}, {"vocab": 60_000}, {"frequent": 2000}):
        assert step.distance(dataclasses.replace(step, **other)) is None


def test_heads_of_few_rows_say_nothing_of_more_nor_those_of_other_columns() -> None:
    """Smaller tiles read all words again, and other columns divide otherwise among warps."""
    head = parse("head_topk/batch=10,vocab=151936,hidden=4096,k=20,dtype=bfloat16")
    assert head.distance(dataclasses.replace(head, batch=8)) is None
    assert head.distance(dataclasses.replace(head, hidden=4608)) is None
    assert 0 < head.distance(dataclasses.replace(head, batch=9)) < head.distance(dataclasses.replace(head, vocab=32000))
    assert dataclasses.replace(head, batch=8).distance(dataclasses.replace(head, batch=1)) > 0
    more = dataclasses.replace(head, batch=32)
    assert more.distance(dataclasses.replace(head, batch=16)) is None
    assert 0 < more.distance(dataclasses.replace(head, batch=33)) < more.distance(dataclasses.replace(head, batch=17))


def test_typical_rows_are_counted_roughly() -> None:
    assert [typical(n, 1) for n in (0, 1, 2, 3, 4, 7, 8, 14, 15, 100, 1000)] == [
        1,
        1,
        2,
        2,
        5,
        5,
        10,
        10,
        20,
        100,
        1000,
    ]
    assert typical(5, 10) == 1 and typical(1001, 100) == 10 and typical(10**12, 1) == 10**12
    for n in range(1, 2000):
        assert 1 / 1.6 < typical(n, 1) / n < 1.6


def test_rows_of_recurrent_weights_are_rounded_up() -> None:
    assert [preferred(n, 1) for n in (0, 1, 3, 7, 9, 18, 56, 115, 179, 538, 691)] == [
        1, 1, 3, 8, 10, 20, 63, 125, 180, 560, 710,
    ]  # fmt: skip
    # A random pattern's mean is a little more than it was asked to be.
    assert preferred(1005, 10) == 100 and preferred(1030, 10) == 112
    for n in range(1, 2000):
        assert n / 1.02 <= preferred(n, 1) <= max(n + 1, 1.34 * n)
    for operator, hidden in ((SparseRecurrent, 500), (BlockRecurrent, 4000)):
        for nonzeros, called in ((179, 180), (499, 500), (9999, 500)):
            asked = operator(4, 2, hidden, nonzeros, "tanh", "float16")
            assert asked.as_called() == operator(4, 2, hidden, called, "tanh", "float16")


# ---- generated inputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("problem", SOFTMAX, ids=case_id)
def test_logits_are_what_the_structure_says(problem: SoftmaxTopk) -> None:
    shape = (problem.batch, problem.vocab)
    for seed, structure in enumerate(problem.structures):
        settings = settings_of(problem, seed)
        logits, scale, log, *_ = problem.generate(seed, structure, settings)
        assert (logits.shape, str(logits.dtype)) == (shape, problem.dtype)
        assert log == settings["log"] and (problem.per_row or scale == settings["scale"])
        assert logits.tobytes() == problem.generate(seed, structure)[0].tobytes()
        x = logits.astype(np.float64)
        if structure == "ascending":
            assert (np.diff(x, axis=1) >= 0).all()
        elif structure == "constant":
            assert (x == x[:, :1]).all()
        elif structure == "ties" and problem.vocab > 50:
            assert all(len(np.unique(row)) < len(row) // 2 for row in x)
        elif structure == "masked":
            assert np.isneginf(x).all(axis=1).any()
        assert np.isfinite(x).all() or structure in ("masked", "special", "mixed")
    assert problem.generate(0)[0].tobytes() == problem.generate(0, problem.tuned)[0].tobytes()


def test_special_logits_are_special() -> None:
    problem = parse("softmax_topk/batch=64,vocab=100,k=5")
    logits = problem.generate(0, "special")[0]
    assert np.isnan(logits).any() and np.isposinf(logits).any() and np.isneginf(logits).any()
    assert np.signbit(logits[logits == 0]).any()


def parts_of_weight(problem: BsrMatmul, inputs: list[Any]) -> tuple[Any, Any, Any, Any]:
    """x, blocks as they stand in the weight, indices and indptr."""
    x, data, indices, indptr, _, _, _, *others = inputs
    if problem.turned:
        places = others[0]
        assert sorted(places) == list(range(len(indices)))
        data = np.array([data[place].T for place in places], data.dtype).reshape(-1, *problem.block_shape)
    return x, data, indices, indptr


@pytest.mark.parametrize("problem", BSR, ids=case_id)
def test_weights_are_valid_for_every_structure(problem: BsrMatmul) -> None:
    block_rows, block_cols = problem.grid
    for seed, structure in enumerate(problem.structures):
        inputs = problem.generate(seed, structure)
        x, data, indices, indptr = parts_of_weight(problem, inputs)
        assert [b.shape for b in problem.biases(inputs)] == [(problem.n,)] * problem.bias
        assert len(inputs) == len(problem.kernel_inputs)
        assert x.shape == (problem.m, problem.k) and data.shape == (len(indices), *problem.block_shape)
        assert str(x.dtype) == str(data.dtype) == problem.dtype and indices.dtype == indptr.dtype == np.int32
        check_structure(indptr, indices, len(data), problem.grid)
        counts = np.diff(indptr)
        assert counts.max() <= block_cols
        for start, stop in zip(indptr, indptr[1:], strict=False):
            assert (np.diff(indices[start:stop]) > 0).all() or structure == "unsorted"  # else sorted, none twice
        if structure in ("random", "special"):
            assert len(indices) == problem.nnzb
        elif structure == "empty_rows":
            assert (counts[::2] == 0).all()
        elif structure == "one_row":
            assert (counts > 0).sum() == min(problem.nnzb, 1)
            assert counts.max() == min(problem.nnzb, block_cols)


def test_skewed_patterns_are_skewed() -> None:
    uniform = parse("bsr_matmul/m=1,k=2048,n=2048,block=16,sparsity=0.95")
    skewed = dataclasses.replace(uniform, pattern="skewed")
    assert skew(skewed.generate(0)[3]) > 3 > 2.5 > skew(uniform.generate(0)[3])
    assert len(skewed.generate(0)[2]) == skewed.nnzb  # full rows pass on what they have no room for


@given(st.lists(st.integers(0, 30), max_size=40), st.sampled_from([64, 1024, 16384]))
def test_the_fullest_block_rows_come_first(counts: list[int], block_bytes: int) -> None:
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    order, long = fullest_first(indptr, block_bytes)
    assert order.shape == (len(counts), 3) and order.dtype == np.int32 and order.flags.c_contiguous
    assert sorted(order[:, 0]) == list(range(len(counts)))
    assert np.array_equal(order[:, 1], indptr[order[:, 0]]) and np.array_equal(order[:, 2], indptr[order[:, 0] + 1])
    lengths = order[:, 2] - order[:, 1]
    assert (np.diff(lengths) <= 0).all()
    most = max(1.5 * sum(counts) / max(len(counts), 1), 28 * 1024 / block_bytes)
    assert (lengths[:long] > most).all() and (lengths[long:] <= most).all()


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 2**32 - 1), st.sampled_from([64, 16384]))
def test_like_block_rows_come_in_pairs(rows: int, block_cols: int, seed: int, block_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    weights = 1 / rng.permutation(np.arange(1, rows + 1))
    indptr, indices = random_pattern(rng, int(rng.integers(0, rows * block_cols + 1)), block_cols, weights)
    before, long = fullest_first(indptr, block_bytes)
    order = like_beside(before, long, indptr, indices, block_cols)
    assert order.dtype == np.int32 and order.flags.c_contiguous and np.array_equal(order[:long], before[:long])
    assert sorted(map(tuple, order)) == sorted(map(tuple, before))
    columns = [set(indices[start:stop]) for _, start, stop in order.tolist()]
    for one in range(long + long % 2, rows - 1, 2):
        assert all(len(columns[one]) >= len(other) for other in columns[one + 1 :])
        assert all(len(columns[one] & columns[one + 1]) >= len(columns[one] & other) for other in columns[one + 2 :])


def test_a_structure_that_does_not_fit_is_not_compared() -> None:
    """Nobody has checked one on a GPU: it is refused, or read, elsewhere."""
    for indptr, indices in (([0, 2, 1, 3], [0, 1, 2]), ([0, 2, 3], [5, -7, 1]), ([0, 2, 9], [0, 1, 2])):
        order, long = analysed(np.array(indptr, np.int32), np.array(indices, np.int32), (64, 64), 4, 2)
        assert sorted(order[:, 0]) == list(range(len(indptr) - 1)) and long in (0, 1)


@given(st.integers(0, 400), st.integers(1, 12), st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=20))
def test_random_patterns_hold_as_many_blocks_as_fit(nnzb: int, block_cols: int, weights: list[float]) -> None:
    indptr, indices = random_pattern(np.random.default_rng(nnzb), nnzb, block_cols, np.array(weights))
    check_structure(indptr, indices, len(indices), (len(weights), block_cols))
    room = block_cols * np.count_nonzero(weights)
    assert len(indices) == min(nnzb, room)
    assert not np.diff(indptr)[np.array(weights) == 0].any()


@pytest.mark.parametrize("problem", [*NHOT, parse("nhot_lookup/rows=100,vocab=1000,width=8,nonzeros=10")], ids=case_id)
def test_rows_are_what_the_structure_says(problem: NhotLookup) -> None:
    for seed, structure in enumerate(problem.structures):
        indptr, indices, *values, table = problem.generate(seed, structure)
        check_compressed(indptr, indices, len(indices), (problem.rows, problem.vocab), stored_in="value")
        assert str(indptr.dtype) == str(indices.dtype) == problem.index
        assert [str(a.dtype) for a in (*values, table)] == [problem.value_dtype] * problem.weighted + [problem.dtype]
        assert table.shape == (problem.vocab, problem.width)
        counts, rows = np.diff(indptr), np.split(indices, indptr[1:-1])
        each = min(problem.nonzeros, problem.vocab)
        if structure == "random":
            assert (counts == each).all() and all((np.diff(row) > 0).all() for row in rows)
        elif structure == "empty_rows":
            assert not counts[::2].any() and (counts[1::2] == each).all()
        elif structure == "one_hot":
            assert (counts == 1).all()
        elif structure == "one_long_row":
            assert counts.max() == counts[problem.rows // 2] == problem.rows * problem.nonzeros
            assert (np.delete(counts, problem.rows // 2) <= 1).all()
        elif structure == "duplicates" and each > 1:
            assert all(len(np.unique(row)) <= len(row) // 2 for row in rows)
        elif structure == "zipf" and problem.vocab == 1000:
            assert np.bincount(indices).max() > 10 * len(indices) / problem.vocab
        assert (structure == "special" and bool(counts.any())) == (not np.isfinite(table.astype(float)).all())


def test_a_table_row_that_is_looked_up_often_costs_once() -> None:
    problem = parse("nhot_lookup/rows=50,vocab=1000,width=64,nonzeros=4,weighted=1,index=int64")
    indptr, indices, values, table = problem.generate(0)
    sizes = [len(a) * 8 for a in (indptr, indices)] + [len(values) * 4, 50 * 64 * 4]
    for columns, rows in ((indices, len(np.unique(indices))), (indices * 0, 1)):
        cost = problem.cost([indptr, columns, values, table])
        assert cost.bytes == sum(sizes) + rows * 64 * 4 and cost.operations == 2 * 200 * 64
    assert problem.cost().bytes == pytest.approx(problem.cost([indptr, indices, values, table]).bytes, rel=0.1)


@pytest.mark.parametrize("problem", [NHOT[1], parse("bsr_matmul/m=9,k=8,n=8,block=2,sparsity=0.5")], ids=case_id)
def test_a_sample_gives_the_same_rows(problem: Problem) -> None:
    for structure in problem.structures[:3]:
        inputs, rows = problem.generate(3, structure), np.array([0, 2, 3, 6])
        some = problem.with_batch(len(rows)).reference(problem.sample(inputs, rows))
        for few, full in zip(some, problem.reference(inputs), strict=True):
            np.testing.assert_array_equal(few, full[rows])


@pytest.mark.parametrize("operator", registry.operators())
def test_unknown_structure(operator: str) -> None:
    with pytest.raises(ProblemError, match="structure: got 'strange'; expected one of random"):
        make(operator, registry.find(operator).problem.example).generate(0, "strange")


@pytest.mark.parametrize("operator", registry.operators())
def test_unknown_setting(operator: str) -> None:
    with pytest.raises(
        ProblemError,
        match=f"settings: got 'logs'; {operator} has (scale, |log|balance|threshold|temperature, top_k|added|none)",
    ):
        make(operator, registry.find(operator).problem.example).generate(0, settings={"logs": 1})


@pytest.mark.parametrize("problem", AWKWARD, ids=case_id)
def test_data_depend_on_seed_and_structure_and_not_on_settings(problem: Problem) -> None:
    first = problem.generate(5)
    for settings in problem.settings:
        inputs = problem.generate(5, settings=settings)
        triples = zip(problem.kernel_inputs, first, inputs, strict=True)
        changed = {spec.name for spec, a, b in triples if np.asarray(a).tobytes() != np.asarray(b).tobytes()}
        of_rows = {"temperatures", *(f"{name}s" for name in settings)}
        assert changed <= {"order", "long", "constant", *settings, *of_rows}
        assert not changed or settings != problem.settings[0]


# ---- references ----------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", SoftmaxTopk.structures)
@pytest.mark.parametrize("log", [0, 1])
def test_softmax_topk_reference_against_torch(structure: str, log: int) -> None:
    torch = pytest.importorskip("torch")
    problem = parse("softmax_topk/batch=24,vocab=53,k=9")
    logits, *_ = problem.generate(log, structure)
    values, indices = problem.reference([logits, 1.0, log])
    x = torch.from_numpy(logits.astype(np.float64))
    every = (torch.log_softmax if log else torch.softmax)(x, -1).numpy()
    # A probability does not tell which of several logits it came from: the order is that of the logits, as torch
    # orders them, NaN first; where they are equal torch may choose any, and ours is the lowest index.
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices.numpy()[:, : problem.k]
    np.testing.assert_array_equal(indices, order)
    # The logarithm of a probability next to 1 has lost its digits.
    np.testing.assert_allclose(values, np.take_along_axis(every, indices, 1), rtol=1e-12, atol=1e-12, equal_nan=True)
    np.testing.assert_array_equal(np.take_along_axis(x.numpy(), indices, 1), torch.topk(x, problem.k).values.numpy())


@pytest.mark.parametrize("problem", BSR, ids=case_id)
def test_bsr_matmul_reference_against_scipy(problem: BsrMatmul) -> None:
    torch = pytest.importorskip("torch")
    activation = {
        "": lambda y: y,
        "relu": torch.nn.functional.relu,
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
    }[problem.activation]
    for seed, structure in enumerate(problem.structures):
        inputs = problem.generate(seed, structure)
        x, data, indices, indptr = parts_of_weight(problem, inputs)
        wide = data.astype(np.float64)
        weight = scipy.sparse.bsr_array((wide, indices, indptr), shape=(problem.n, problem.k))
        if structure == "special":
            # SciPy's zeros stay zeros times infinity: multiply block by block, as a sum of outer positions.
            wanted = np.zeros((problem.m, problem.n))
            rows, cols = problem.block_shape
            stored = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
            with np.errstate(invalid="ignore"):
                for b, (r, c) in enumerate(zip(stored, indices, strict=True)):
                    terms = x.astype(np.float64)[:, None, c * cols : (c + 1) * cols] * wide[b][None]
                    wanted[:, r * rows : (r + 1) * rows] += terms.sum(axis=2)
        else:
            wanted = (weight @ x.astype(np.float64).T).T
        wanted = wanted + sum(b.astype(np.float64) for b in problem.biases(inputs))
        wanted = activation(torch.from_numpy(wanted)).numpy()
        (y,) = problem.reference(inputs)
        np.testing.assert_allclose(y, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("problem", NHOT, ids=case_id)
def test_nhot_lookup_reference_against_scipy(problem: NhotLookup) -> None:
    for seed, structure in enumerate(problem.structures[:-1]):
        indptr, indices, *values, table = problem.generate(seed, structure)
        data = values[0].astype(np.float64) if values else np.ones(len(indices))
        a = scipy.sparse.csr_array((data, indices, indptr), shape=(problem.rows, problem.vocab))
        (out,) = problem.reference([indptr, indices, *values, table])
        np.testing.assert_allclose(out, a @ table.astype(np.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("problem", BAGS, ids=case_id)
def test_nhot_lookup_reference_against_pytorch(problem: NhotLookup) -> None:
    torch = pytest.importorskip("torch")
    for seed, structure in enumerate(problem.structures[:-1]):
        inputs = problem.generate(seed, structure)
        given = problem.named(inputs)
        kinds = {"mode": problem.mode, "padding_idx": given.padding if problem.padded else None}
        table = given.table
        if problem.stored:
            table = QuantizedEmbedding.of_octets(table, given.scales, problem.stored).dequantized()
        wanted = []
        for t, starts in enumerate(
            np.lib.stride_tricks.sliding_window_view(given.indptr, problem.rows + 1)[:: problem.rows]
        ):
            own = slice(starts[0], starts[-1])
            first = given.first_rows[t] if problem.tables > 1 else 0
            bags = torch.nn.functional.embedding_bag(
                torch.from_numpy(given.indices[own].astype(int)),
                torch.from_numpy(np.pad(table[first:].astype(float), ((0, problem.vocab), (0, 0)))),
                torch.from_numpy((starts - starts[0]).astype(int)),
                per_sample_weights=torch.from_numpy(given.values[own].astype(float)) if problem.weighted else None,
                include_last_offset=True,
                **kinds,
            )
            wanted.append(bags)
        wanted = torch.cat(wanted, 1)
        (out,) = problem.reference(inputs)
        np.testing.assert_allclose(out, wanted, **dict.fromkeys(("rtol", "atol"), 1e-5 if problem.stored else 1e-9))


# ---- checks --------------------------------------------------------------------------------------


def right(
    problem: Problem, structure: str, seed: int, settings: Settings | None = None
) -> tuple[list[Any], list[np.ndarray], list[np.ndarray]]:
    """Inputs, the reference's outputs, and those in the dtypes that a kernel writes."""
    inputs = problem.generate(seed, structure, settings)
    expected = problem.reference(inputs)
    outputs = problem.empty_outputs()
    for output, value in zip(outputs, expected, strict=True):
        output[...] = value
    return inputs, expected, outputs


@pytest.mark.parametrize("problem", of_each_operator(), ids=case_id)
def test_check_accepts_the_rounded_reference_and_rejects_poison(problem: Problem) -> None:
    for seed, (structure, settings) in enumerate(itertools.product(problem.structures, problem.settings)):
        inputs, expected, outputs = right(problem, structure, seed, settings)
        problem.check(inputs, expected, outputs)
        for number, poison in enumerate(problem.empty_outputs()):
            left = [*outputs]
            left[number] = poison
            if np.isnan(expected[number]).all() if poison.dtype.kind != "i" else False:
                continue  # NaN is right here
            with pytest.raises(Mismatch, match=problem.kernel_outputs[number].name):
                problem.check(inputs, expected, left)


@pytest.mark.parametrize("problem", AWKWARD, ids=case_id)
def test_check_rejects_one_wrong_value_anywhere(problem: Problem) -> None:
    rng = np.random.default_rng(0)
    for seed, settings in enumerate(problem.settings):
        inputs, expected, outputs = right(problem, "random", seed, settings)
        for number in range(len(outputs)):
            place = tuple(rng.integers(outputs[number].shape))
            broken = [o.copy() for o in outputs]
            if broken[number].dtype.kind == "i":
                broken[number][place] += 1
            else:
                # Twice what a kernel's rounding can make of it, for the dtype that it is written in.
                kind = getattr(problem, "precision", "") or str(broken[number].dtype)
                step = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 4e-2, "tf32": 0.3}[kind]
                value = np.nan_to_num(float(broken[number][place]))
                broken[number][place] = value * (1 + step) + (0 if abs(value) > 0.5 and number else step)
            with pytest.raises(Mismatch, match=problem.kernel_outputs[number].name):
                problem.check(inputs, expected, broken)


def test_check_rejects_swapped_indices_missing_nan_and_wrong_infinities() -> None:
    problem = parse("softmax_topk/batch=40,vocab=61,k=4")
    inputs, expected, outputs = right(problem, "ties", 0)
    equal = np.argwhere(outputs[0][:, 0] == outputs[0][:, 1])[0, 0]  # swapping these changes no value
    outputs[1][equal, :2] = outputs[1][equal, 1::-1]
    with pytest.raises(Mismatch, match=rf"indices\[{equal}, 0\] is .*2 of 160 differ"):
        problem.check(inputs, expected, outputs)

    for log in (0, 1):
        inputs, expected, outputs = right(problem, "special", log, {"log": log})
        assert np.isnan(expected[0]).any()
        for value in (0.0, np.inf):
            broken = [np.where(np.isnan(outputs[0]), value, outputs[0]), outputs[1]]
            with pytest.raises(Mismatch, match="expected nan"):
                problem.check(inputs, expected, broken)
    inputs, expected, outputs = right(problem, "masked", 1, {"log": 1})
    assert np.isneginf(expected[0]).any()
    with pytest.raises(Mismatch, match="expected -inf"):
        problem.check(inputs, expected, [np.where(np.isneginf(outputs[0]), -1e30, outputs[0]), outputs[1]])

    bsr = parse("bsr_matmul/m=16,k=64,n=64,block=8,sparsity=0.2")
    inputs, expected, outputs = right(bsr, "special", 0)
    assert np.isnan(expected[0]).any() and np.isinf(expected[0]).any()
    for wrong in (np.nan_to_num(outputs[0]), np.where(np.isinf(outputs[0]), -outputs[0], outputs[0])):
        with pytest.raises(Mismatch, match=r"y\["):
            bsr.check(inputs, expected, [wrong])


# ---- definitions ---------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize("problem", of_each_operator(), ids=case_id)
def test_definition_agrees_with_the_reference(problem: Problem) -> None:
    function = on_cpu(tvm.IRModule({"main": problem.definition()}))
    for seed, structure in enumerate(problem.structures):
        for case in (problem, problem.with_batch(problem.batch_extent + 1 + seed)):
            inputs = case.generate(seed, structure, settings_of(case, seed))
            arrays = [*inputs, *case.empty_outputs()]
            arguments = [tvm.runtime.tensor(a) if isinstance(a, np.ndarray) else a for a in arrays]
            function(*arguments)
            case.check(inputs, case.reference(inputs), [a.numpy() for a in arguments[len(inputs) :]])


# ---- structures ----------------------------------------------------------------------------------


INDPTR, INDICES, GRID = [0, 2, 2, 3], [0, 4, 1], (3, 5)


@pytest.mark.parametrize(
    ("indptr", "indices", "nnzb", "message"),
    [
        ([0, 2, 3], INDICES, 3, r"indptr: expected 4 entries .* got shape \(3,\)"),
        ([INDPTR], INDICES, 3, r"indptr: expected 4 entries .* got shape \(1, 4\)"),
        (INDPTR, [0, 4], 3, r"indices: expected 3 entries .* got shape \(2,\)"),
        (INDPTR, [[0, 4, 1]], 3, r"indices: expected 3 entries .* got shape \(1, 3\)"),
        ([1, 2, 2, 3], INDICES, 3, r"indptr: must start at 0 and end at 3 .* got 1 and 3"),
        ([0, 2, 2, 4], INDICES, 3, r"indptr: must start at 0 and end at 3 .* got 0 and 4"),
        ([0, 3, 2, 3], INDICES, 3, r"indptr: must never fall, but indptr\[2\]=2 < indptr\[1\]=3"),
        ([0, -1, 2, 3], INDICES, 3, r"indptr: must never fall, but indptr\[1\]=-1 < indptr\[0\]=0"),
        (INDPTR, [0, 5, 1], 3, r"indices: indices\[1\]=5 is outside \[0, 5\)"),
        (INDPTR, [0, 4, -1], 3, r"indices: indices\[2\]=-1 is outside \[0, 5\)"),
    ],
)
def test_bad_structures_are_named(indptr: list, indices: list, nnzb: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_structure(np.array(indptr, np.int32), np.array(indices, np.int32), nnzb, GRID)


def test_good_structures_pass() -> None:
    check_structure(np.array(INDPTR), np.array(INDICES), 3, GRID)
    check_structure(np.zeros(4, np.int32), np.zeros(0, np.int32), 0, GRID)
    assert skew(np.array([0, 4, 8])) <= skew(np.zeros(4, np.int32)) == 1.0 < skew(np.array([0, 0, 8]))
