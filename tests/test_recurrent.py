"""The sparse recurrent layer, as its user calls it: against torch's layers, and what is refused."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
from cases import each_with_some, thorough

import tvm_sparse
from tvm_sparse.core.problem import FLOATS, numpy_dtype
from tvm_sparse.core.registry import parse
from tvm_sparse.operators.sparse_recurrent import call as calls
from tvm_sparse.operators.sparse_recurrent import reference
from tvm_sparse.operators.sparse_recurrent.problem import (
    GATES,
    NOT_RANDOM,
    SOME,
    SparseRecurrent,
    entries_kept,
    longest_random,
    preferred,
)
from tvm_sparse.runtime.dispatch import dispatcher

torch = pytest.importorskip("torch")
from dense_layers import LIMIT, OF_TORCH, dense_layer  # noqa: E402

pytestmark = pytest.mark.drawn

STEPS, BATCH, INPUTS, HIDDEN = 9, 3, 11, 40
CELLS = list(GATES)
CLOSE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}


def layer(cell: str, hidden: int = HIDDEN) -> Any:
    """One of torch's, or of its kind, with a pruned recurrent weight."""
    torch.manual_seed(0)
    module = dense_layer(cell, INPUTS, hidden).requires_grad_(False)
    module.weight_hh_l0 *= torch.rand_like(module.weight_hh_l0) < 0.3
    return module


def parts(module: Any, cell: str, x: Any, dtype: Any = torch.float32) -> tuple[Any, Any, dict[str, Any]]:
    """Weights, projected input, and what the cell has beside: a hidden bias, or a limit."""
    weights = tvm_sparse.recurrent_weights(module.weight_hh_l0.to(dtype), GATES[cell])
    bias, own = module.bias_ih_l0.clone(), module.bias_hh_l0
    if cell == "gru":
        bias[: 2 * module.hidden_size] += own[: 2 * module.hidden_size]
        extra = {"hidden_bias": own[2 * module.hidden_size :].to(dtype).clone()}
    else:
        bias, extra = bias + own, {"limit": LIMIT} if cell == "clipped_relu" else {}
    return weights, (x @ module.weight_ih_l0.T + bias).to(dtype), extra


def states(cell: str, batch: int = BATCH, hidden: int = HIDDEN, dtype: Any = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(batch, hidden).to(dtype) for _ in range(1 + (cell == "lstm")))


def run_torch(module: Any, cell: str, x: Any, begin: tuple[Any, ...]) -> tuple[Any, ...]:
    first = tuple(state[None].float() for state in begin)
    output, last = module(x, first if cell == "lstm" else first[0])
    return output, *(state[0] for state in (last if cell == "lstm" else (last,)))


@pytest.mark.parametrize(("cell", "dtype"), each_with_some(CELLS, FLOATS))
def test_the_layer_is_torchs(cell: str, dtype: str) -> None:
    module, x, kind = layer(cell), torch.randn(STEPS, BATCH, INPUTS), getattr(torch, dtype)
    weights, projected, extra = parts(module, cell, x, kind)
    begin = states(cell, dtype=kind)
    wanted = run_torch(module, cell, x, begin)
    for _ in range(2):  # the second time by what was put down
        found = tvm_sparse.sparse_recurrent(weights, projected, *begin, cell=cell, **extra)
        assert len(found) == len(wanted) and {a.dtype for a in found} == {kind}
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=0, atol=CLOSE[dtype])
    assert torch.equal(found[0][-1], found[1])


@pytest.mark.parametrize("cell", [cell if cell in ("lstm", "tanh") else thorough(cell) for cell in OF_TORCH])
def test_ragged_batches_are_torchs_packed_ones(cell: str) -> None:
    module, x = layer(cell), torch.randn(STEPS, BATCH, INPUTS)
    weights, projected, extra = parts(module, cell, x)
    begin, lengths = states(cell), torch.tensor([4, STEPS, 1])
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    output, *wanted = run_torch(module, cell, packed, begin)
    output, _ = torch.nn.utils.rnn.pad_packed_sequence(output)
    for given in (lengths, lengths.int(), lengths.numpy()):
        found = tvm_sparse.sparse_recurrent(weights, projected, *begin, cell=cell, lengths=given, **extra)
        for one, other in zip(found, (output, *wanted), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    empty = torch.zeros(BATCH, dtype=torch.int32)
    found = tvm_sparse.sparse_recurrent(weights, projected, *begin, cell=cell, lengths=empty, **extra)
    assert not found[0].any() and all(map(torch.equal, found[1:], begin))


@pytest.mark.parametrize("cell", [cell if cell in ("relu", "gru_reset_before") else thorough(cell) for cell in CELLS])
def test_a_reset_begins_another_sequence(cell: str) -> None:
    module, x = layer(cell), torch.randn(STEPS, 1, INPUTS)
    weights, projected, extra = parts(module, cell, x)
    begin = states(cell, 1)
    resets = torch.zeros(STEPS, 1, dtype=torch.bool)
    resets[4] = True
    none = tuple(map(torch.zeros_like, begin))
    first = tvm_sparse.sparse_recurrent(weights, projected[:4], *begin, cell=cell, **extra)
    second = tvm_sparse.sparse_recurrent(weights, projected[4:], *none, cell=cell, **extra)
    for given in (resets, resets.int(), resets.int() * -7):
        found = tvm_sparse.sparse_recurrent(weights, projected, *begin, cell=cell, resets=given, **extra)
        assert torch.equal(found[0], torch.cat([first[0], second[0]]))
        assert all(map(torch.equal, found[1:], second[1:]))


@pytest.mark.parametrize("cell", CELLS)
def test_nan_and_infinities_go_where_torchs_go(cell: str) -> None:
    module, x = layer(cell), torch.randn(STEPS, BATCH, INPUTS)
    weights, projected, extra = parts(module, cell, x)
    begin = states(cell)
    projected[3, 1, 7], projected[5, 2, 9] = float("nan"), float("-inf")
    found = tvm_sparse.sparse_recurrent(weights, projected, *begin, cell=cell, **extra)
    # The same recurrence on an input that is projected by the identity.
    module.weight_ih_l0 = torch.nn.Parameter(torch.eye(GATES[cell] * HIDDEN), requires_grad=False)
    module.input_size = GATES[cell] * HIDDEN
    for bias in (module.bias_ih_l0, module.bias_hh_l0):
        bias.zero_()
    if cell == "gru":
        module.bias_hh_l0[2 * HIDDEN :] = extra["hidden_bias"]
    whole = copy.deepcopy(projected)
    whole[3, 1, 7], whole[5, 2, 9] = 0, -1e30  # the identity's zeros times what is not finite would be NaN
    wanted = run_torch(module, cell, whole, begin)
    assert torch.equal(found[0][:3], found[0][:3].nan_to_num()) and found[0][3, 1].isnan().any()
    assert found[0][-1, 1].isnan().all() or cell == "relu" or found[0][-1, 1].isnan().any()
    torch.testing.assert_close(found[0][:, [0, 2]], wanted[0][:, [0, 2]], rtol=0, atol=1e-4)


def test_arrays_of_numpy_come_back_as_such() -> None:
    module, x = layer("lstm"), torch.randn(STEPS, BATCH, INPUTS)
    weights, projected, _ = parts(module, "lstm", x)
    begin = states("lstm")
    wanted = tvm_sparse.sparse_recurrent(weights, projected, *begin, cell="lstm")
    found = tvm_sparse.sparse_recurrent(weights, projected.numpy(), *(s.numpy() for s in begin), cell="lstm")
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(one, np.ndarray)
        np.testing.assert_array_equal(one, other.numpy())


def test_what_is_not_contiguous_is_copied() -> None:
    module, x = layer("gru"), torch.randn(STEPS, BATCH, INPUTS)
    weights, projected, extra = parts(module, "gru", x)
    (h0,) = states("gru")
    wanted = tvm_sparse.sparse_recurrent(weights, projected, h0, cell="gru", **extra)
    apart = projected.transpose(0, 2).contiguous().transpose(0, 2)
    for _ in range(2):
        found = tvm_sparse.sparse_recurrent(weights, apart, h0.T.contiguous().T, cell="gru", **extra)
        assert all(map(torch.equal, found, wanted))


def test_a_gru_without_a_hidden_bias_has_zeros() -> None:
    module, x = layer("gru"), torch.randn(STEPS, BATCH, INPUTS)
    weights, projected, extra = parts(module, "gru", x)
    (h0,) = states("gru")
    zeros = torch.zeros_like(extra["hidden_bias"])
    wanted = tvm_sparse.sparse_recurrent(weights, projected, h0, cell="gru", hidden_bias=zeros)
    for _ in range(2):
        assert all(map(torch.equal, tvm_sparse.sparse_recurrent(weights, projected, h0, cell="gru"), wanted))


@pytest.mark.parametrize("steps", [0, 1, STEPS])
def test_outputs_are_written_where_they_are_asked_for(steps: int) -> None:
    module, x = layer("lstm"), torch.randn(steps, BATCH, INPUTS)
    weights, projected, _ = parts(module, "lstm", x)
    begin = states("lstm")
    wanted = tvm_sparse.sparse_recurrent(weights, projected, *begin, cell="lstm")
    out = tuple(torch.full_like(one, torch.nan) for one in wanted)
    for _ in range(2):
        found = tvm_sparse.sparse_recurrent(weights, projected, *begin, cell="lstm", out=out)
        assert all(one is other for one, other in zip(found, out, strict=True))
        assert all(map(torch.equal, out, wanted))
    if not steps:
        assert wanted[0].shape == (0, BATCH, HIDDEN) and all(map(torch.equal, wanted[1:], begin))


def test_an_empty_batch_and_an_empty_weight() -> None:
    weights = tvm_sparse.recurrent_weights(torch.zeros(5, 5))
    x = torch.randn(4, 2, 5)
    output, h_n = tvm_sparse.sparse_recurrent(weights, x, torch.randn(2, 5), cell="relu")
    assert torch.equal(output, x.relu()) and torch.equal(h_n, output[-1])
    output, h_n = tvm_sparse.sparse_recurrent(weights, x[:, :0], torch.randn(0, 5), cell="tanh")
    assert output.shape == (4, 0, 5) and h_n.shape == (0, 5)


def test_repeated_calls_are_put_down_but_lengths_on_the_host_are_looked_at() -> None:
    weights = tvm_sparse.recurrent_weights(torch.eye(6))
    x, h0, lengths = torch.randn(4, 2, 6), torch.randn(2, 6), torch.tensor([1, 4], dtype=torch.int32)
    tvm_sparse.sparse_recurrent(weights, x, h0, cell="tanh")
    before = len(dispatcher.launchers)
    tvm_sparse.sparse_recurrent(weights, x, h0, cell="tanh")
    tvm_sparse.sparse_recurrent(weights, x, h0, cell="tanh", lengths=lengths)
    assert len(dispatcher.launchers) == before
    with pytest.raises(ValueError, match=r"lengths: expected values in \[0, 4\], got 5 for sequence 1"):
        tvm_sparse.sparse_recurrent(weights, x, h0, cell="tanh", lengths=lengths + torch.tensor([0, 1]).int())
    # Another weight of the same shape and as many entries is taken, not the one before.
    other = tvm_sparse.recurrent_weights(2 * torch.eye(6))
    found = tvm_sparse.sparse_recurrent(other, x, h0, cell="tanh")[0]
    torch.testing.assert_close(found[0], torch.tanh(x[0] + 2 * h0))


WEIGHTS = tvm_sparse.recurrent_weights(np.eye(6, dtype=np.float32))
FOUR = tvm_sparse.recurrent_weights(np.zeros((24, 6), np.float32), 4)
X, H0 = torch.zeros(4, 2, 6), torch.zeros(2, 6)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"weights": np.eye(6)}, TypeError, "weights: expected RecurrentWeights, got ndarray; make them by"),
        ({"cell": "rnn"}, ValueError, "cell: expected one of tanh, .*, gru_reset_before, got 'rnn'"),
        ({"cell": "lstm"}, ValueError, "weights: expected 4 gates for cell='lstm', got 1"),
        ({"x_projected": X[0]}, ValueError, r"x_projected: expected 3 dimensions, got shape \(2, 6\)"),
        (
            {"x_projected": X.double()},
            ValueError,
            "x_projected: expected dtype float32, float16, bfloat16, got float64",
        ),
        (
            {"x_projected": X.half()},
            ValueError,
            r"x_projected: expected shape .* and dtype float32, as the weights have",
        ),
        ({"x_projected": X[..., :5]}, ValueError, r"x_projected: expected shape \(steps, batch, 6\)"),
        ({"x_projected": [0.0]}, TypeError, "x_projected: expected a torch tensor"),
        (
            {"x_projected": X.clone().requires_grad_(), "h0": H0.numpy()},
            RuntimeError,
            "x_projected: requires a gradient",
        ),
        ({"h0": H0[:1]}, ValueError, r"h0: expected shape \(2, 6\) and dtype float32, got \(1, 6\)"),
        ({"h0": None}, TypeError, "h0: expected a torch tensor"),
        ({"c0": H0}, ValueError, "c0: expected None for cell='tanh'"),
        ({"weights": FOUR, "cell": "lstm", "x_projected": torch.zeros(4, 2, 24)}, ValueError, "c0: expected a state"),
        ({"hidden_bias": H0[0]}, ValueError, "hidden_bias: expected None for cell='tanh'"),
        ({"limit": 20}, ValueError, "limit: expected None for cell='tanh'"),
        ({"cell": "clipped_relu"}, TypeError, "limit: expected a number, got NoneType"),
        (
            {"cell": "clipped_relu", "limit": 0},
            ValueError,
            "limit: expected a number above 0 that float32 holds, got 0",
        ),
        ({"cell": "clipped_relu", "limit": 1e39}, ValueError, "limit: expected a number above 0 that float32 holds"),
        ({"lengths": torch.zeros(3).int()}, ValueError, r"lengths: expected shape \(2,\) and dtype int32 or int64"),
        ({"lengths": torch.zeros(2)}, ValueError, "lengths: expected shape .* got .* float32"),
        (
            {"lengths": torch.tensor([0, -1])},
            ValueError,
            r"lengths: expected values in \[0, 4\], got -1 for sequence 1",
        ),
        ({"resets": torch.zeros(2, 4).int()}, ValueError, r"resets: expected shape \(4, 2\) and dtype bool or int32"),
        ({"resets": torch.zeros(4, 2)}, ValueError, "resets: expected shape .* got .* float32"),
        ({"out": H0}, ValueError, r"out: expected 2 arrays \(output, h_n\), got 1"),
        ({"out": (X, H0[:1])}, ValueError, r"out \(h_n\): expected shape \(2, 6\)"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"weights": WEIGHTS, "x_projected": X, "h0": H0, "cell": "tanh", **changed}
    with pytest.raises(error, match=message):
        tvm_sparse.sparse_recurrent(**given)


def test_a_sequence_that_is_too_large_is_refused() -> None:
    huge = torch.zeros(1, 1, 6).expand(2**26, 6, 6)
    with pytest.raises(ValueError, match="x_projected: .* must have fewer than 2.31 elements; cut the sequence up"):
        tvm_sparse.sparse_recurrent(WEIGHTS, huge, torch.zeros(6, 6), cell="tanh")


# ---- the problem ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_the_reference_is_torchs_layer_in_float64(cell: str) -> None:
    problem = parse(f"sparse_recurrent/steps=7,batch=3,hidden=31,nonzeros=9,cell={cell}")
    module = layer(cell, 31).double()
    for seed, structure in enumerate(problem.structures[:-1]):
        inputs = problem.generate(seed, structure)
        weights = tvm_sparse.RecurrentWeights(31, GATES[cell], "float32", *inputs[:3])
        module.weight_hh_l0.copy_(torch.from_numpy(weights.dense()))
        module.weight_ih_l0 = torch.nn.Parameter(torch.eye(GATES[cell] * 31).double(), requires_grad=False)
        module.input_size = GATES[cell] * 31
        for bias in (module.bias_ih_l0, module.bias_hh_l0):
            bias.zero_()
        x, *begin = (torch.from_numpy(array).double() for array in inputs[3:] if isinstance(array, np.ndarray))
        if cell == "clipped_relu":
            inputs[-1] = LIMIT
        if cell == "gru":
            module.bias_hh_l0[62:] = begin.pop()
        first = tuple(state[None] for state in begin)
        output, _ = module(x, first if cell == "lstm" else first[0])
        # The reference rounds what it carries to float32.
        np.testing.assert_allclose(problem.reference(inputs)[0], output.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cell", CELLS)
def test_roundings_stay_within_the_tolerance_and_do_not_grow_with_the_steps(cell: str, dtype: str) -> None:
    """Sums in another order and with errors of their own, as a kernel has them."""
    problem = parse(f"sparse_recurrent/steps=60,batch=2,hidden=200,nonzeros=30,cell={cell},dtype={dtype}")
    inputs = problem.generate(0)
    expected = problem.reference(inputs)
    bounds = problem.tolerance(inputs, expected)
    rng = np.random.default_rng(0)
    rows = reference.Rows.times

    def disturbed(self: Any, values: np.ndarray, given: np.ndarray) -> np.ndarray:
        found = rows(self, values, given)
        return found * (1 + 2.0**-23 * rng.standard_normal(found.shape))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.Rows, "times", disturbed)
        outputs = [array.astype(numpy_dtype(dtype)) for array in problem.reference(inputs)]
    problem.check(inputs, expected, outputs)
    assert np.median(bounds[0][-1]) < 2 * np.median(bounds[0][5])
    step = {"float32": 5e-5, "float16": 1e-2, "bfloat16": 4e-2}[dtype]
    assert np.median(bounds[0]) < step


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("steps=0,batch=1,hidden=1,nonzeros=1", "steps must be an integer of at least 1, got 0"),
        ("steps=1,batch=1,hidden=1,nonzeros=1,cell=rnn", "cell must be one of tanh, .*, gru_reset_before, got 'rnn'"),
        ("steps=1,batch=1,hidden=1,nonzeros=1,ragged=2", "ragged must be 0 or 1, got 2"),
        ("steps=1,batch=1,hidden=1,nonzeros=1,resets=-1", "resets must be 0 or 1, got -1"),
        ("steps=1,batch=1,hidden=1,nonzeros=1,dtype=int8", "dtype must be one of"),
        ("steps=65536,batch=32,hidden=1024,nonzeros=1", "x_projected must have fewer than 2^31 elements"),
    ],
)
def test_bad_keys(key: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("^", r"\^")):
        parse(f"sparse_recurrent/{key}")


def test_problems_are_alike_in_what_decisions_depend_on() -> None:
    problem = SparseRecurrent(256, 4, 1792, 200)
    near = [problem.with_batch(128), SparseRecurrent(256, 4, 1792, 200, ragged=1)]
    far = [SparseRecurrent(256, 4, 1792, 224), SparseRecurrent(256, 4, 2000, 200)]
    distances = [[problem.distance(other) or 0.0 for other in some] for some in (near, far)]
    assert 0 < min(distances[0]) <= max(distances[0]) < min(distances[1])
    for too_far in (
        SparseRecurrent(256, 8, 1792, 200),
        SparseRecurrent(256, 4, 2304, 200),
        SparseRecurrent(9, 4, 1792, 280),
    ):
        assert problem.distance(too_far) is None
    assert problem.distance(SparseRecurrent(256, 4, 1792, 200, "lstm")) is None
    assert problem.distance(SparseRecurrent(256, 4, 1792, 200, dtype="float16")) is None


def test_what_a_call_asks_for_is_a_rough_number_of_nonzeros() -> None:
    weights = tvm_sparse.recurrent_weights(np.eye(30) + np.eye(30, k=1) + np.eye(30, k=-1))
    assert calls.problem_of(weights, 5, 2, "tanh") == SparseRecurrent(5, 2, 30, 3)
    full = tvm_sparse.recurrent_weights(np.ones((30, 30), np.float32))
    assert calls.problem_of(full, 5, 2, "tanh", 1, 0) == SparseRecurrent(5, 2, 30, 30, ragged=1)


def test_what_a_call_asks_for_holds_the_longest_row() -> None:
    """Rows of a drawn random pattern are those of the mean; others, as magnitude pruning leaves them, count."""
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    for _ in range(40):
        hidden, gates = int(rng.integers(40, 900)), int(rng.integers(1, 5))
        rows, mean = gates * hidden, int(rng.integers(5, max(6, hidden // 2)))
        lengths = rng.binomial(hidden, mean / hidden, rows)
        typical = min(hidden, preferred(int(lengths.sum()), rows))
        found = entries_kept(int(lengths.sum()), rows, hidden, int(lengths.max()))
        assert found == typical
        longest = int(rng.integers(1, hidden, endpoint=True))
        found = entries_kept(int(lengths.sum()), rows, hidden, longest)
        assert typical <= found <= hidden and longest <= longest_random(found, hidden, NOT_RANDOM) + SOME
        if found > typical:  # and no more than that takes
            assert longest_random(int(found / 1.3) - 1, hidden) < longest
    # No GPU holds 20,000 full rows: one full row among rows of 10 entries does not count.
    assert entries_kept(200_000 + 19_990, 20_000, 20_000, 20_000) == preferred(200_000 + 19_990, 20_000)


def test_generated_weights_are_what_the_structure_says() -> None:
    problem = parse("sparse_recurrent/steps=3,batch=2,hidden=40,nonzeros=10,cell=lstm,ragged=1,resets=1")
    for seed, structure in enumerate(problem.structures):
        units, row_start, entries, x, h0, c0, lengths, resets = problem.generate(seed, structure)
        weights = tvm_sparse.RecurrentWeights(40, 4, "float32", units, row_start, entries)
        counts = (weights.dense() != 0).sum(axis=1)
        assert counts.sum() == weights.nonzeros == row_start[-1]
        assert sorted(units) == list(range(40)) and lengths.max() == 3 and lengths.min() >= 0
        assert resets.shape == (3, 2) and x.shape == (3, 2, 160) and h0.shape == c0.shape == (2, 40)
        if structure == "empty_rows":
            assert not counts[::2].any() and counts[1::2].any()
        elif structure == "one_long_row":
            assert counts.max() == 40 and np.sort(counts)[-2] <= 1
        elif structure == "empty":
            assert not counts.any()
        finite = np.isfinite(x).all() and np.isfinite(weights.values).all()
        assert finite == (structure != "special")
        norms = np.sqrt((np.nan_to_num(weights.dense(), posinf=0) ** 2).sum(axis=1))
        assert norms.max() < 0.7


# ---- on a GPU ------------------------------------------------------------------------------------


def on_gpu(*tensors: Any) -> tuple[Any, ...]:
    return tuple(one.cuda() for one in tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_gpu_computes_what_a_cpu_does(cell: str, dtype: str) -> None:
    module, x, kind = layer(cell, 200), torch.randn(STEPS, BATCH, INPUTS), getattr(torch, dtype)
    weights, projected, extra = parts(module, cell, x, kind)
    begin = states(cell, BATCH, 200, kind)
    lengths, resets = torch.tensor([4, STEPS, 0]), torch.rand(STEPS, BATCH) < 0.2
    bias = {name: value.cuda() if name == "hidden_bias" else value for name, value in extra.items()}
    for more in ({}, {"lengths": lengths}, {"resets": resets}, {"lengths": lengths.int(), "resets": resets.int()}):
        wanted = tvm_sparse.sparse_recurrent(weights, projected, *begin, cell=cell, **extra, **more)
        there = {name: value.cuda() for name, value in more.items()}
        for validate in (False, True, False):
            found = tvm_sparse.sparse_recurrent(
                weights, *on_gpu(projected, *begin), cell=cell, validate=validate, **bias, **there
            )
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one.cpu().float(), other.float(), rtol=0, atol=CLOSE[dtype])


@pytest.mark.gpu
@pytest.mark.allocator  # a captured graph allocates
@pytest.mark.parametrize("cell", CELLS)
def test_all_steps_are_captured_in_a_graph(cell: str) -> None:
    module, x = layer(cell), torch.randn(STEPS, BATCH, INPUTS)
    weights, projected, extra = parts(module, cell, x)
    bias = {name: value.cuda() if name == "hidden_bias" else value for name, value in extra.items()}
    given = on_gpu(projected, *states(cell))
    out = tvm_sparse.sparse_recurrent(weights, *given, cell=cell, **bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tvm_sparse.sparse_recurrent(weights, *given, cell=cell, out=out, **bias)
    for _ in range(3):
        given[0].normal_()
        for one in out:
            one.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        kept = [one.clone() for one in out]
        wanted = tvm_sparse.sparse_recurrent(weights, *given, cell=cell, **bias)
        assert all(map(torch.equal, kept, wanted))


@pytest.mark.gpu
def test_what_lies_elsewhere_is_refused_and_lengths_on_a_gpu_are_checked_if_asked() -> None:
    given = (WEIGHTS, X.cuda(), H0.cuda())
    with pytest.raises(ValueError, match=r"h0: expected an array on cuda:0, as x_projected is, got cpu:0"):
        tvm_sparse.sparse_recurrent(*given[:2], H0, cell="tanh")
    beyond = torch.tensor([9, 1], device="cuda")
    with pytest.raises(ValueError, match=r"lengths: expected values in \[0, 4\], got 9 for sequence 0"):
        tvm_sparse.sparse_recurrent(*given, cell="tanh", lengths=beyond, validate=True)
    found = tvm_sparse.sparse_recurrent(*given, cell="tanh", lengths=beyond)
    wanted = tvm_sparse.sparse_recurrent(*given, cell="tanh", lengths=beyond.clamp(0, 4))
    assert all(map(torch.equal, found, wanted))
