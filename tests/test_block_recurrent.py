"""The block recurrent layer: its layout, its calls against torch's layers, what is refused, and its default points."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
from cases import SM80, SM90, case_id, cases, each_with_some, own_on_host, run_emulated, thorough

import tvm_sparse
from tvm_sparse.core import registry, spaces
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.core.template import NotApplicable, Template
from tvm_sparse.formats.block_recurrent import block_recurrent_weights, tile_units, tiles_of
from tvm_sparse.operators.block_recurrent.call import problem_of
from tvm_sparse.operators.sparse_recurrent.problem import GATES, MARKS

pytestmark = pytest.mark.drawn

DTYPES = ("float32", "float16", "bfloat16")


def in_blocks(rng: np.random.Generator, rows: int, columns: int, block: int, density: float) -> np.ndarray:
    """A matrix of which whole blocks are zero, in float32; the last ones may be cut off."""
    there = rng.random((-(-rows // block), -(-columns // block))) < density
    return (rng.standard_normal((rows, columns)) * np.kron(there, np.ones((block, block)))[:rows, :columns]).astype(
        "f4"
    )


# ---- layout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gates", [1, 3, 4])
@pytest.mark.parametrize("hidden", [1, 8, 37, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layout_is_the_matrix(gates: int, hidden: int, dtype: str) -> None:
    matrix = in_blocks(np.random.default_rng(hidden), gates * hidden, hidden, 8, 0.4)
    weights = block_recurrent_weights(matrix, gates, dtype=dtype)
    np.testing.assert_array_equal(weights.dense(), matrix.astype(numpy_dtype(dtype)))
    assert len(weights.group_start) == tiles_of(hidden, gates) + 1 == -(-hidden // tile_units(gates)) + 1
    for first, behind in zip(weights.group_start[:-1], weights.group_start[1:], strict=True):
        assert np.all(np.diff(weights.groups[first:behind]) > 0)
    # Nothing is kept that is zero throughout.
    assert weights.weights.astype(np.float32).any(axis=(1, 2)).all()


@pytest.mark.parametrize("block", [8, 16, 32])
def test_all_kinds_of_matrices_give_the_same_layout(block: int) -> None:
    torch = pytest.importorskip("torch")
    matrix = in_blocks(np.random.default_rng(block), 4 * 96, 96, block, 0.3)
    wanted = block_recurrent_weights(matrix, 4)
    found = scipy.sparse.bsr_array(matrix, blocksize=(block, block))
    for same in (found, scipy.sparse.csr_array(found), torch.from_numpy(matrix)):
        assert_same(wanted, block_recurrent_weights(same, 4))
    assert_same(wanted, block_recurrent_weights(torch.from_numpy(matrix).to_sparse_bsr((block, block)), 4))


def assert_same(one: Any, other: Any) -> None:
    for mine, theirs in zip(one.held, other.held, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_block_of_16_takes_no_more_than_itself_and_a_dense_weight_is_full() -> None:
    rng = np.random.default_rng(0)
    matrix = in_blocks(rng, 320, 320, 16, 0.2)
    weights = block_recurrent_weights(matrix)
    assert weights.weights.size == np.count_nonzero(matrix)
    dense = block_recurrent_weights(rng.standard_normal((3 * 40, 40)), 3)
    assert dense.density == 1
    assert problem_of(dense, 5, 2, "gru").nonzeros == 5
    assert 5 <= problem_of(weights, 5, 2, "tanh").nonzeros <= 16  # of 40


def test_blocks_of_zeros_that_are_stored_and_nan_are_kept() -> None:
    matrix = scipy.sparse.bsr_array((np.zeros((1, 8, 8), "f4"), [1], [0, 1, 1]), shape=(16, 16))
    assert block_recurrent_weights(matrix).groups.tolist() == [1]
    dense = np.zeros((16, 16), "f4")
    dense[3, 4] = np.nan
    assert np.isnan(block_recurrent_weights(dense).dense()[3, 4])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("text",), TypeError, "matrix: expected a SciPy"),
        ((np.zeros((4, 5)),), ValueError, "matrix: expected shape"),
        ((np.zeros((8, 4)), 2), ValueError, "gates: expected 1, 3 or 4, got 2"),
        ((np.zeros((4, 4), np.int32),), ValueError, "matrix: expected a matrix of float32"),
    ],
)
def test_other_weights_are_refused(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        block_recurrent_weights(*arguments)


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cell", "dtype"), each_with_some(("tanh", "relu", "lstm", "gru"), DTYPES))
def test_a_call_is_torchs_layer(cell: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    hidden, gates = 40, GATES[cell]
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(cell, torch.nn.RNN)
    module = kind(11, hidden, **({"nonlinearity": cell} if gates == 1 else {})).requires_grad_(False)
    module.weight_hh_l0 *= torch.from_numpy(in_blocks(np.random.default_rng(1), gates * hidden, hidden, 8, 0.5) != 0)
    kept = getattr(torch, dtype)
    module.weight_hh_l0.copy_(module.weight_hh_l0.to(kept))
    x, h0, c0 = torch.randn(9, 3, 11), torch.randn(3, hidden).to(kept), torch.randn(3, hidden).to(kept)
    own, given = module.bias_hh_l0.clone(), {}
    if cell == "gru":
        given["hidden_bias"] = own[2 * hidden :].to(kept).clone()
        module.bias_hh_l0[2 * hidden :] = given["hidden_bias"]
        own[2 * hidden :] = 0
    projected = (x @ module.weight_ih_l0.T + module.bias_ih_l0 + own).to(kept)
    weights = tvm_sparse.block_recurrent_weights(module.weight_hh_l0.to(kept), gates)
    states = (h0, c0) if cell == "lstm" else (h0,)
    called = [tvm_sparse.block_recurrent(weights, projected, *states, cell=cell, **given) for _ in range(2)]
    before = tuple(s.float()[None] for s in states)
    wanted, last = module(x, before if cell == "lstm" else before[0])
    close = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}[dtype]
    for results in called:  # the second call takes the short way
        torch.testing.assert_close(results[0].float(), wanted, rtol=0, atol=close)
        for one, other in zip(results[1:], last if cell == "lstm" else (last,), strict=True):
            torch.testing.assert_close(one.float(), other[0], rtol=0, atol=close)


def test_a_weight_without_groups_and_another_kind_of_weight() -> None:
    x, h0 = np.random.default_rng(0).standard_normal((4, 2, 24)).astype("f4"), np.ones((2, 24), "f4")
    nothing = tvm_sparse.block_recurrent_weights(np.zeros((24, 24), "f4"))
    output, _ = tvm_sparse.block_recurrent(nothing, x, h0, cell="tanh")
    np.testing.assert_allclose(output, np.tanh(x), atol=1e-6)
    with pytest.raises(TypeError, match="weights: expected BlockRecurrentWeights, got RecurrentWeights"):
        tvm_sparse.block_recurrent(tvm_sparse.recurrent_weights(np.eye(24, dtype="f4")), x, h0, cell="tanh")
    with pytest.raises(ValueError, match="weights: expected 4 gates for cell='lstm', got 1"):
        tvm_sparse.block_recurrent(nothing, x, h0, h0, cell="lstm")


# ---- the persistent kernel's space ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "blocks"),
    [
        ("batch=4,hidden=1152,nonzeros=144", 72),
        ("batch=4,hidden=1536,nonzeros=192", 96),
        ("batch=4,hidden=1792,nonzeros=224", 112),
        ("batch=8,hidden=1024,nonzeros=128,cell=lstm", 128),
        ("batch=4,hidden=1792,nonzeros=20", 112),
        ("batch=4,hidden=1792,nonzeros=50", 112),
    ],
)
def test_realistic_weights_stay_in_registers(axes: str, blocks: int) -> None:
    problem = registry.parse(f"block_recurrent/steps=256,{axes},dtype=float16")
    template = spaces.find("persistent_tiles")
    point = template.default(problem, SM90)
    groups, warps = problem.axes["nonzeros"], point["threads"] // 32
    assert point["blocks"] == blocks
    assert point["registers"] * 4 * warps >= groups


@pytest.mark.parametrize(
    ("axes", "machine", "reason"),
    [
        ("batch=4,hidden=64,nonzeros=8", SM90, "16 bits"),
        ("batch=1025,hidden=64,nonzeros=8,dtype=float16", SM90, "more than 32 passes"),
        ("batch=4,hidden=64,nonzeros=8,dtype=float16", Machine("cuda", "sm_75", "sm_75", cores=40), "tensor cores"),
        ("batch=32,hidden=9000,nonzeros=70,cell=lstm,dtype=float16", SM80, "shared memory"),
    ],
)
def test_what_the_kernel_is_not_for_takes_a_kernel_a_step(axes: str, machine: Machine, reason: str) -> None:
    problem = registry.parse(f"block_recurrent/steps=8,{axes}")
    with pytest.raises(NotApplicable, match=reason):
        spaces.find("persistent_tiles").space(problem, machine)
    assert spaces.fallback(problem, machine).template == "step_tiles"


@pytest.mark.parametrize(("dtype", "point"), [
    ("float16", {"blocks": 4, "registers": 1, "stages": 1, "passes": 3}),
    thorough("bfloat16", {"blocks": 10, "registers": 1, "stages": 0, "passes": 3}),
    thorough("bfloat16", {"blocks": 5, "registers": 0, "stages": 1, "passes": 1}),
])  # fmt: skip
def test_a_step_of_two_exchanges(dtype: str, point: dict[str, int]) -> None:
    """With the reset before the product: several passes and tiles, sequences that end, others that begin."""
    key = f"block_recurrent/steps=4,batch=19,hidden=37,nonzeros=4,cell=gru_reset_before,dtype={dtype},ragged=1,resets=1"
    problem, template = registry.parse(key), spaces.find("persistent_tiles")
    decisions = {**point, "threads": 64}
    assert template.allowed(problem, SM90, decisions) is None
    program = template.build(problem, decisions)
    for seed, structure in enumerate(("random", "special", "one_long_row")):
        run_emulated(program, problem, problem.generate(seed, structure), own_on_host(program, problem), seed)


# ---- resets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", MARKS, ids=["positive", "negative", "mixed"])
@pytest.mark.parametrize(
    ("template", "problem"),
    cases("cuda", (
        registry.parse("sparse_recurrent/steps=4,batch=3,hidden=24,nonzeros=4,cell=gru,resets=1"),
        registry.parse("block_recurrent/steps=4,batch=3,hidden=24,nonzeros=3,cell=lstm,dtype=float16,resets=1"),
    )),
    ids=case_id,
)  # fmt: skip
def test_whatever_is_not_zero_begins_anew(template: Template, problem: Problem, marks: tuple[int, ...]) -> None:
    """In every template's kernel, wherever it looks at a mark."""
    program = template.build(problem, template.default(problem, SM90))
    inputs = problem.generate(3)
    resets = inputs[[argument.name for argument in problem.kernel_inputs].index("resets")]
    resets[:] = np.where(np.arange(resets.size).reshape(resets.shape) % 2, np.resize(marks, resets.shape), 0)
    run_emulated(program, problem, inputs, own_on_host(program, problem))
