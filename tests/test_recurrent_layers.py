"""Recurrent layers and stacks on the CPU: torch's own, with the masked weights, is the reference."""

from __future__ import annotations

import copy
import csv
import importlib.util
import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import thorough

import tvm_sparse
from tvm_sparse.core.problem import FLOATS, numpy_dtype
from tvm_sparse.formats.recurrent import recurrent_weights
from tvm_sparse.layers import recurrent, storage
from tvm_sparse.layers import recurrent_weights as forms
from tvm_sparse.layers.libraries import kept

torch = pytest.importorskip("torch")
from dense_layers import LIMIT, dense_layer  # noqa: E402

from tvm_sparse.layers.recurrent_stack import RecurrentStack  # noqa: E402

numbers = itertools.count(int.from_bytes(os.urandom(4), "little"))
MODULES: dict[str, Any] = {
    "tanh": lambda *a, **k: torch.nn.RNN(*a, nonlinearity="tanh", **k),
    "relu": lambda *a, **k: torch.nn.RNN(*a, nonlinearity="relu", **k),
    "lstm": torch.nn.LSTM,
    "gru": torch.nn.GRU,
}
CELLS = tuple(MODULES)
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(next(numbers))


def module(cell: str, *sizes: int, density: float | None = 0.3, **options: Any) -> Any:
    """With recurrent weights that are pruned already, unless the density is None."""
    made = MODULES[cell](*sizes, **options).eval()
    if density is not None:
        for name, parameter in made.named_parameters():
            if name.startswith("weight_hh"):
                parameter.detach().copy_(tvm_sparse.prune(parameter, density))
    return made


def layer_of(made: Any, cell: str, **options: Any) -> Any:
    """Our layer of a module, of entries unless another form is asked for."""
    weight, options = made.weight_hh_l0.detach(), {"form": "entries", **options}
    if cell == "lstm":
        return tvm_sparse.SparseLSTM(weight, **options)
    if cell == "gru":
        return tvm_sparse.SparseGRU(weight, made.bias_hh_l0.detach(), **options)
    return tvm_sparse.SparseRNN(weight, nonlinearity=cell, **options)


def projected(layer: Any, made: Any, x: Any) -> Any:
    with torch.no_grad():
        return layer.project_inputs(x, made.weight_ih_l0, made.bias_ih_l0, made.bias_hh_l0)


def states_of(cell: str, layers: int, batch: int, hidden: int) -> Any:
    shape = (layers, batch, hidden)
    return (torch.randn(shape), torch.randn(shape)) if cell == "lstm" else torch.randn(shape)


def flat(found: Any) -> list[Any]:
    """Output and states of a module or a stack."""
    output, states = found
    return [output, *states] if isinstance(states, tuple) else [output, states]


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    found, wanted = (a.double().numpy() if isinstance(a, torch.Tensor) else a for a in (found, wanted))
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(wanted, np.float64), tolerance, tolerance)


# ---- one layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), thorough((7, 3, 33)), thorough((5, 16, 64)), (3, 17, 20), thorough((2, 40, 9))]
)
@pytest.mark.parametrize("cell", CELLS)
def test_a_layer_is_torch_s(cell: str, sizes: tuple[int, int, int]) -> None:
    steps, batch, hidden = sizes
    made = module(cell, 6, hidden)
    layer, x, hx = layer_of(made, cell), torch.randn(steps, batch, 6), states_of(cell, 1, batch, hidden)
    given = hx if cell == "lstm" else (hx,)
    with torch.no_grad():
        wanted, none = flat(made(x, hx)), flat(made(x))
    found = layer(projected(layer, made, x), *(state[0] for state in given))
    assert len(found) == len(wanted) == (3 if cell == "lstm" else 2)
    for one, other in zip(found, wanted, strict=True):
        close(one, other.reshape(one.shape))
    for one, other in zip(layer(projected(layer, made, x)), none, strict=True):
        close(one, other.reshape(one.shape))


@pytest.mark.parametrize("kind", ["scipy", "csr", "coo", "numpy", "prepared"])
def test_weights_of_every_kind(kind: str) -> None:
    import scipy.sparse

    made = module("lstm", 4, 19)
    dense = made.weight_hh_l0.detach()
    weight: Any = {
        "scipy": lambda: scipy.sparse.csc_array(dense.numpy()),
        "csr": lambda: dense.to_sparse_csr(),
        "coo": dense.to_sparse,
        "numpy": dense.numpy,
        "prepared": lambda: recurrent_weights(dense, 4, order="columns"),
    }[kind]()
    layer, x = tvm_sparse.SparseLSTM(weight), torch.randn(5, 2, 4)
    with torch.no_grad():
        wanted = made(x)[0]
    close(layer(projected(layer, made, x))[0], wanted)
    assert layer.hidden == 19 and layer.dtype == "float32" and "SparseLSTM" in repr(layer)


@pytest.mark.parametrize("method", ["magnitude", "row_balanced", "block"])
def test_a_dense_weight_is_pruned(method: str) -> None:
    weight = torch.randn(32, 32)
    layer = tvm_sparse.SparseRNN(weight, density=0.25, method=method, block=8)
    wanted = tvm_sparse.prune(weight, 0.25, method=method, block=8)
    assert np.array_equal(layer.weights.dense(), wanted.numpy()) and layer.weights.nonzeros == 256


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cell", CELLS)
def test_dtypes_and_libraries(cell: str, dtype: str) -> None:
    made = module(cell, 6, 24)
    layer = layer_of(made, cell, dtype=dtype)
    kind = getattr(torch, dtype)
    rounded = copy.deepcopy(made).to(kind).float()  # weights as the layer has them
    x = torch.randn(6, 3, 6).to(kind)
    weights = [a.detach().to(kind) for a in (made.weight_ih_l0, made.bias_ih_l0, made.bias_hh_l0)]
    given = layer.project_inputs(x, *weights)
    found = layer(given)
    with torch.no_grad():
        wanted = flat(rounded(x.float()))
    assert all(one.dtype is kind for one in found)
    for one, other in zip(found, wanted, strict=True):
        close(one, other.reshape(one.shape), TOLERANCE[dtype])
    # The same arrays in NumPy.
    arrays = layer(as_numpy(given))
    for one, other in zip(arrays, found, strict=True):
        assert isinstance(one, np.ndarray) and one.dtype == numpy_dtype(dtype)
        assert np.array_equal(one.astype(np.float32), other.float().numpy())
    ours = layer.project_inputs(as_numpy(x), *map(as_numpy, weights))
    close(ours.astype(np.float32), given.float(), TOLERANCE[dtype])


def as_numpy(tensor: Any) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def layer_torch_lacks(cell: str, made: Any, **options: Any) -> Any:
    own = {"reset_after": False} if cell == "gru_reset_before" else {"nonlinearity": cell, "limit": LIMIT}
    kind = tvm_sparse.SparseGRU if cell == "gru_reset_before" else tvm_sparse.SparseRNN
    return kind(made.weight_hh_l0.detach(), **own, **options)


@pytest.mark.parametrize("form", ["entries", "blocks"])
@pytest.mark.parametrize("cell", ["clipped_relu", "gru_reset_before"])
def test_cells_that_torch_lacks(cell: str, form: str, tmp_path: Any) -> None:
    """In several launches, from a file, in another dtype, and in a stack of both directions that is trained."""
    made = dense_layer(cell, 5, 24)
    layer, x, h0 = layer_torch_lacks(cell, made, form=form), torch.randn(6, 18, 5), torch.rand(1, 18, 24)
    wanted, last = made(x, h0)
    given = projected(layer, made, x)
    kept = type(layer).load(layer.save(tmp_path / "layer.npz"))
    for one in (layer, kept, pickle.loads(pickle.dumps(layer))):
        output, h_n = one(given, h0[0])
        close(output, wanted.detach())
        close(h_n, last[0].detach())
    half = kept.astype("float16")
    close(half(given.half(), h0[0].half())[0], wanted.detach(), 1e-2)
    lengths = torch.randint(0, 7, (18,))
    close(layer(given, h0[0], lengths=lengths)[0], wanted.detach() * (torch.arange(6)[:, None] < lengths)[..., None])

    bias = (made.bias_ih_l0 + made.bias_hh_l0).detach()
    options = {"bidirectional": True, "dense": True}
    stack = tvm_sparse.RecurrentStack([layer, layer], [(made.weight_ih_l0.detach(), bias)] * 2, **options)
    assert f"PyTorch has no layer of {cell}" in stack.explain(6, 18)[0].way
    found = stack.trainable()(x, h0.repeat(2, 1, 1))[0]
    both = torch.cat([wanted, made(x.flip(0), h0)[0].flip(0)], 2)
    close(found.detach(), both.detach())
    weighed = torch.randn_like(both)
    (found * weighed).sum().backward()
    (both * weighed).sum().backward()
    rows, columns, _ = layer.weights.coordinates()
    close(stack.values_0.grad + stack.values_1.grad, made.weight_hh_l0.grad[rows, columns], 1e-4)
    close(stack.weight_0.grad + stack.weight_1.grad, made.weight_ih_l0.grad, 1e-4)
    loaded = tvm_sparse.RecurrentStack.load(stack.save(tmp_path / "stack.npz"))
    close(loaded(x, h0.repeat(2, 1, 1))[0], both.detach())


def test_what_cells_need_is_asked_for() -> None:
    weight = torch.randn(12, 12)
    with pytest.raises(ValueError, match="limit: expected a number above 0 for nonlinearity='clipped_relu', got None"):
        tvm_sparse.SparseRNN(weight, nonlinearity="clipped_relu")
    with pytest.raises(ValueError, match="limit: expected None for nonlinearity='relu', got 20"):
        tvm_sparse.SparseRNN(weight, nonlinearity="relu", limit=20)
    with pytest.raises(ValueError, match="limit: expected a number above 0 that float16 holds, got 1000000"):
        tvm_sparse.SparseRNN(weight, nonlinearity="clipped_relu", limit=1e6, dtype="float16")
    with pytest.raises(ValueError, match="hidden_bias: expected None with reset_after=False"):
        tvm_sparse.SparseGRU(torch.randn(36, 12), torch.zeros(12), reset_after=False)


# Pruned in blocks of 16 or 8 units, and dense.
PRUNED = ((16, 0.4), (8, 0.5), (1, 1.0))


# Each way to prune with each dtype, and each cell with some: the weights' format alone tells the blocks apart.
WAYS = [(CELLS[(3 * i + j) % 4], dtype, *pruned) for i, pruned in enumerate(PRUNED) for j, dtype in enumerate(FLOATS)]


@pytest.mark.parametrize(
    ("cell", "dtype", "block", "density"), [way if i % 2 == 0 else thorough(*way) for i, way in enumerate(WAYS)]
)
def test_a_layer_of_blocks_is_torch_s(cell: str, dtype: str, block: int, density: float) -> None:
    """With lengths and resets, in several launches."""
    made, kind = module(cell, 6, 40, density=None), getattr(torch, dtype)
    weight = tvm_sparse.prune(made.weight_hh_l0, density, method="block", block=block).to(kind)
    made.weight_hh_l0.detach().copy_(weight)
    layer = layer_of(made, cell, dtype=dtype, form="blocks")
    assert layer.form == "blocks" and "BlockRecurrentWeights" in repr(layer)
    weights = [a.detach().to(kind) for a in (made.weight_ih_l0, made.bias_ih_l0, made.bias_hh_l0)]
    x = torch.randn(5, 19, 6).to(kind)
    found, entries = layer(given := layer.project_inputs(x, *weights)), layer_of(made, cell, dtype=dtype)
    with torch.no_grad():
        wanted = flat(copy.deepcopy(made).to(kind).float()(x.float()))
    for one, other in zip(found, wanted, strict=True):
        close(one, other.reshape(one.shape), TOLERANCE[dtype])
    more = {"lengths": torch.randint(0, 6, (19,)), "resets": torch.rand(5, 19) < 0.3}
    for one, other in zip(layer(given, **more), entries(given, **more), strict=True):
        close(one, other, TOLERANCE[dtype])


def test_forms_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.sparse

    dense = torch.randn(64, 64)
    bsr = tvm_sparse.prune(dense, 0.3, method="block", block=16)
    for weight, dtype, form in (
        (dense, "float16", "blocks"),
        (dense, "float32", "entries"),
        (bsr, "bfloat16", "blocks"),
        (bsr.to_sparse_bsr((16, 16)), "float16", "blocks"),
        (scipy.sparse.bsr_array(bsr.numpy(), blocksize=(16, 16)), "float16", "blocks"),
        (tvm_sparse.prune(dense, 0.3), "float16", "blocks"),
        (tvm_sparse.prune(dense, 0.3), "float32", "entries"),
        (tvm_sparse.prune(dense, 0.1), "float16", "entries"),
        (torch.zeros(64, 64), "float16", "entries"),
    ):
        layer = tvm_sparse.SparseRNN(weight, dtype=dtype)
        assert layer.form == form, (weight, dtype)
        other = tvm_sparse.SparseRNN(weight, dtype=dtype, form="entries" if form == "blocks" else "blocks")
        assert other.form != form and np.array_equal(layer.weights.dense(), other.weights.dense())
    layer = tvm_sparse.SparseRNN(bsr, dtype="float16").to(torch.float32)
    assert layer.form == "blocks" and layer.dtype == "float32"
    # Blocks of a GRU have rows of all gates, as tiles do, which have rows of zeros too.
    stack = tvm_sparse.from_torch(torch.nn.GRU(4, 32), density=0.25, method="block", block=8, dtype="bfloat16")
    assert stack.layers[0].form == "blocks"
    # What exceeds a few bytes has to be more than half full.
    monkeypatch.setattr(forms, "FEW_BYTES", 0)
    assert tvm_sparse.SparseRNN(tvm_sparse.prune(dense, 0.3), dtype="float16").form == "entries"
    apart = tvm_sparse.prune(torch.randn(96, 32), 0.25, method="block", block=8)
    assert tvm_sparse.SparseGRU(apart, dtype="float16").form == "entries"
    assert tvm_sparse.from_torch(torch.nn.GRU(4, 32), form="blocks").layers[0].form == "blocks"
    explained = tvm_sparse.SparseRNN(bsr, dtype="float16").explain(3, 2, target="sm_90a")
    assert explained.kernels[0].problem.startswith("block_recurrent/")


@pytest.mark.parametrize("batch", [3, 18])
@pytest.mark.parametrize("cell", CELLS)
def test_lengths_and_resets(cell: str, batch: int) -> None:
    """Every sequence by itself, cut where it starts anew."""
    steps, hidden = 7, 12
    made = module(cell, 5, hidden)
    layer, x = layer_of(made, cell), torch.randn(steps, batch, 5)
    hx = states_of(cell, 1, batch, hidden)
    given = [state[0] for state in (hx if cell == "lstm" else (hx,))]
    lengths = torch.randint(0, steps + 1, (batch,))
    lengths[:2] = torch.tensor([0, steps])
    resets = torch.rand(steps, batch) < 0.3
    found = layer(projected(layer, made, x), *given, resets=resets, lengths=lengths)
    for row in range(batch):
        state = [part[None, row : row + 1] for part in given]
        for t in range(steps):
            if t >= lengths[row]:
                assert not found[0][t, row].any()
                continue
            if resets[t, row]:
                state = [torch.zeros_like(part) for part in state]
            with torch.no_grad():
                output, *state = flat(made(x[t : t + 1, row : row + 1], tuple(state) if cell == "lstm" else state[0]))
            close(found[0][t, row], output[0, 0])
        for one, other in zip(found[1:], state, strict=True):
            close(one[row], other[0, 0])
    # As integers of other widths, lists, and NumPy.
    other = layer(projected(layer, made, x), *given, resets=resets.to(torch.int64) * 5, lengths=lengths.tolist())
    assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))
    arrays = [part.numpy() for part in given]
    other = layer(projected(layer, made, x).numpy(), *arrays, resets=resets.numpy(), lengths=lengths.numpy())
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(found, other, strict=True))


@pytest.mark.parametrize("cell", ["relu", "lstm"])
def test_many_steps_are_cut(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = module(cell, 5, 8)
    layer, x = layer_of(made, cell), torch.randn(11, 20, 5)
    lengths, resets = torch.randint(0, 12, (20,)), torch.rand(11, 20) < 0.2
    given = projected(layer, made, x)
    whole = layer(given, lengths=lengths, resets=resets)
    monkeypatch.setattr(recurrent, "EXCHANGED", 1)
    monkeypatch.setattr(recurrent, "LEAST_STEPS", 4)
    out = tuple(torch.empty_like(part) for part in whole)
    cut = layer(given, lengths=lengths, resets=resets, out=out)
    for one, other, place in zip(cut, whole, out, strict=True):
        close(one, other)
        assert one is place
    assert layer.launches(11, 20) == ((4, 16), (4, 16), (3, 16), (4, 4), (4, 4), (3, 4))


@pytest.mark.parametrize("sizes", [(0, 3), (4, 0), (0, 20)])
def test_nothing_to_compute(sizes: tuple[int, int]) -> None:
    layer = tvm_sparse.SparseLSTM(torch.randn(20, 5))
    h0, c0 = torch.randn(sizes[1], 5), torch.randn(sizes[1], 5)
    output, h_n, c_n = layer(torch.randn(*sizes, 20), h0, c0)
    assert output.shape == (*sizes, 5) and torch.equal(h_n, h0) and torch.equal(c_n, c0) and h_n is not h0


def test_an_empty_matrix_and_empty_rows() -> None:
    x = torch.randn(4, 3, 8)
    output, h_n = tvm_sparse.SparseRNN(torch.zeros(8, 8))(x)
    close(output, torch.tanh(x))
    weight = torch.randn(8, 8)
    weight[3] = 0
    close(tvm_sparse.SparseRNN(weight)(x, torch.randn(3, 8))[0][:, :, 3], torch.tanh(x[:, :, 3]))


def test_nan_goes_where_torch_s_goes() -> None:
    made = module("gru", 5, 16, density=None)
    layer, x = layer_of(made, "gru"), torch.randn(5, 3, 5)
    x[2, 1, 0] = float("nan")
    with torch.no_grad():
        wanted = made(x)[0]
    found = layer(projected(layer, made, x))[0]
    assert torch.equal(found.isnan(), wanted.isnan()) and not found[:, 0].isnan().any()


def test_outputs_are_written_in_place() -> None:
    layer, x = tvm_sparse.SparseGRU(torch.randn(24, 8)), torch.randn(5, 3, 24)
    out = torch.empty(5, 3, 8), torch.empty(3, 8)
    found = layer(x, out=out)
    assert found[0] is out[0] and found[1] is out[1]
    assert all(torch.equal(a, b) for a, b in zip(found, layer(x), strict=True))


LAYER = tvm_sparse.SparseLSTM(np.eye(12, 3, dtype=np.float32))
X, H = np.zeros((4, 2, 12), np.float32), np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LAYER(X[0]), ValueError, "x_projected: expected 3 dimensions"),
        (lambda: LAYER(X[:, :, :8]), ValueError, r"x_projected: expected shape \(steps, batch, 12\)"),
        (lambda: LAYER(X.astype(np.float16)), ValueError, "x_projected: expected .* dtype float32"),
        (lambda: LAYER([1]), TypeError, "x_projected: expected a torch tensor or a NumPy array"),
        (lambda: LAYER(X, H[:1]), ValueError, "h0: expected shape"),
        (lambda: LAYER(X, H, H.astype(np.float64)), ValueError, "c0: expected shape"),
        (lambda: LAYER(X, resets=np.zeros((4, 3), bool)), ValueError, "resets: expected shape"),
        (lambda: LAYER(X, resets=np.zeros((4, 2))), ValueError, "resets: .* of bool or integers"),
        (lambda: LAYER(X, lengths=[1, 2, 3]), ValueError, r"lengths: expected shape \(2,\)"),
        (lambda: LAYER(X, lengths=[1, 5]), ValueError, r"lengths: expected values in \[0, 4\] \(steps\), got 5 at 1"),
        (lambda: LAYER(X, lengths=[-1, 1]), ValueError, "lengths: expected values"),
        (lambda: LAYER(X, lengths=[0.5, 1]), ValueError, "lengths: expected .* integers"),
        (lambda: LAYER(np.zeros((4, 20, 12), np.float32), H), ValueError, "h0: expected shape"),
        (lambda: LAYER(X, out=(X, H, H)), ValueError, r"out \(output\)"),
        (lambda: tvm_sparse.SparseRNN(np.ones((3, 4))), ValueError, "expected shape"),
        (lambda: tvm_sparse.SparseLSTM(np.ones((9, 3))), ValueError, "4 \\* hidden"),
        (lambda: tvm_sparse.SparseGRU(np.ones((9, 3)), np.ones(4)), ValueError, "hidden_bias: expected shape"),
        (lambda: tvm_sparse.SparseRNN(np.eye(3), nonlinearity="elu"), ValueError, "nonlinearity: expected one of"),
        (lambda: tvm_sparse.SparseRNN(np.eye(3), dtype="int8"), ValueError, "dtype"),
        (lambda: tvm_sparse.SparseRNN(np.eye(3), density=2), ValueError, "density"),
        (lambda: tvm_sparse.SparseRNN(torch.eye(3).to_sparse(), density=0.5), ValueError, "density: is for a dense"),
        (lambda: tvm_sparse.SparseLSTM(recurrent_weights(np.eye(3))), ValueError, "weight_hh: expected 4 gates"),
        (lambda: tvm_sparse.SparseRNN(recurrent_weights(np.eye(3)), density=1), ValueError, "is prepared already"),
        (
            lambda: tvm_sparse.SparseRNN(np.eye(3), form="csr"),
            ValueError,
            "form: expected one of auto, entries, blocks",
        ),
        (lambda: tvm_sparse.SparseRNN(recurrent_weights(np.eye(3)), form="blocks"), ValueError, "is prepared already"),
        (lambda: LAYER.astype("float64"), ValueError, "dtype: expected one of"),
        (lambda: LAYER.to(dtype=torch.float64), ValueError, "dtype: expected one of"),
        (lambda: LAYER.to("cpu").capture(3, 2), ValueError, "device: a CUDA graph needs a GPU"),
        (lambda: LAYER.project_inputs(X, H), ValueError, "weight_ih: expected shape"),
        (lambda: tvm_sparse.project_inputs(X, X[0].T, cell="elman"), ValueError, "cell: expected one of"),
        (lambda: tvm_sparse.project_inputs(None, X[0], cell="lstm"), TypeError, "x: expected a torch tensor or a"),
        (lambda: LAYER.project_inputs(X, 7), TypeError, "weight_ih: expected a torch tensor or a NumPy"),
        (lambda: LAYER.project_inputs(X, np.zeros((12, 12)), H), ValueError, "bias_ih: expected shape"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_calls_are_explained(target: str) -> None:
    layer = tvm_sparse.SparseGRU(torch.randn(96, 32), density=0.2)
    found = layer.explain(7, 20, resets=True, target=target)
    assert found.launches == layer.launches(7, 20) == ((7, 16), (7, 4))
    assert [kernel.arch for kernel in found.kernels] == [(layer.explain(1, 1, target=target).kernels[0].arch)] * 2
    assert "2 launches: 7 steps of 16, 7 steps of 4" in str(found) and "resets=1" in str(found)
    assert "nothing to compute" in str(layer.explain(0, 5, target=target))


def test_many_sequences_are_one_launch_on_tensor_cores() -> None:
    """Entries are laid out as blocks, if these stay on the chip; not in float32, nor where the batch must not count."""
    dense, few = torch.randn(4 * 64, 64), tvm_sparse.SparseRNN(np.eye(4096, dtype=np.float16))
    layer = tvm_sparse.SparseLSTM(dense, density=0.1, dtype="float16")
    found = layer.explain(7, 40, target="h200")
    assert layer.form == "entries" and found.launches == layer.launches(7, 40, target="h200") == ((7, 40),)
    assert "persistent_tiles" in str(found) and layer.launches(9, 300, target="h200") == ((9, 256), (9, 44))
    assert len(layer.launches(7, 40, target="cpu")) == len(few.launches(7, 40, target="h200")) == 3
    assert len(tvm_sparse.SparseLSTM(dense, density=0.1).launches(7, 40, target="h200")) == 3
    tvm_sparse.configure(batch_invariant=True)
    try:
        assert len(layer.launches(7, 40, target="h200")) == 3
    finally:
        tvm_sparse.configure(batch_invariant=False)
    assert pickle.loads(pickle.dumps(layer))._tiles is None


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [17, 45, 128])
@pytest.mark.parametrize("cell", ["tanh", "lstm", "gru"])
def test_many_sequences_agree_with_launches_of_few(cell: str, batch: int) -> None:
    made = module(cell, 64, 200)
    layer = layer_of(made, cell).astype("float16")
    x = projected(layer_of(made, cell), made, torch.randn(12, batch, 64)).half().cuda()
    lengths, resets = torch.randint(0, 13, (batch,)), torch.rand(12, batch) < 0.2
    whole = layer(x, lengths=lengths, resets=resets.cuda())
    parts = [
        layer(x[:, at : at + 16].contiguous(), lengths=lengths[at : at + 16], resets=resets[:, at : at + 16].cuda())
        for at in range(0, batch, 16)
    ]
    for one, *others in zip(whole, *parts, strict=True):
        torch.testing.assert_close(one, torch.cat(others, one.dim() - 2), rtol=1e-2, atol=4e-3)


def test_a_gradient_is_computed_where_it_is_wanted() -> None:
    stack = tvm_sparse.from_torch(torch.nn.GRU(4, 6))
    x = torch.randn(3, 2, 4, requires_grad=True)
    assert stack(x)[0].requires_grad and not stack(x.detach())[0].requires_grad
    with torch.no_grad():
        assert not stack(x)[0].requires_grad


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [
        file if file in ((".npz", "bfloat16"), (".safetensors", "float16")) else thorough(*file)
        for file in itertools.product((".npz", ".safetensors"), FLOATS)
    ],
)
@pytest.mark.parametrize("cell", CELLS)
def test_layers_are_saved(cell: str, dtype: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    layer = layer_of(module(cell, 5, 14), cell, dtype=dtype)
    path = layer.save(tmp_path / f"layer{suffix}")
    again = type(layer).load(path)
    x = torch.randn(3, 2, 14 * layer.weights.gates).to(getattr(torch, dtype))
    assert again.cell == cell and again.weights.order == "banks"
    assert all(torch.equal(a, b) for a, b in zip(layer(x), again(x), strict=True))


def test_layers_of_blocks_are_saved(tmp_path: Path) -> None:
    layer = tvm_sparse.SparseLSTM(torch.randn(40, 10), form="blocks", dtype="bfloat16")
    path, x = layer.save(tmp_path / "layer.npz"), torch.randn(3, 2, 40).bfloat16()
    again = tvm_sparse.SparseLSTM.load(path)
    assert again.form == "blocks" and all(torch.equal(a, b) for a, b in zip(layer(x), again(x), strict=True))
    held, meta = storage.read(path)
    for name, value in (
        ("group_start", held["group_start"][::-1]),
        ("group_start", held["group_start"][1:]),
        ("groups", held["groups"] + 1),
        ("groups", held["groups"].astype(np.int64)),
        ("weights", held["weights"][1:]),
        ("weights", held["weights"].astype(np.float32)),
        ("form", "csr"),
        ("hidden", 13),
    ):
        arrays, words = dict(held), dict(meta)
        (arrays if name in arrays else words)[name] = value
        with pytest.raises(ValueError, match=r"bad\.npz"):
            tvm_sparse.SparseLSTM.load(storage.write(tmp_path / "bad.npz", arrays, words))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    layer = tvm_sparse.SparseGRU(np.random.default_rng(next(numbers)).standard_normal((21, 7)), density=0.4)
    held, meta = storage.read(layer.save(tmp_path / "layer.npz"))
    changes: list[tuple[str, Any]] = [
        ("units", held["units"][::-1] * 0),
        ("units", held["units"][1:]),
        ("row_start", held["row_start"][::-1]),
        ("row_start", held["row_start"].astype(np.int64)),
        ("entries", held["entries"][1:]),
        ("entries", held["entries"] + 1000),
        ("entries", held["entries"][:, :1]),
        ("hidden_bias", held["hidden_bias"][1:]),
        ("hidden_bias", held["hidden_bias"].astype(np.float64)),
        ("hidden", 0),
        ("hidden", 8),
        ("cell", "lstm"),
        ("dtype", "float16"),
        ("order", "random"),
        ("banks", 7),
        ("format", 99),
    ]
    for name, value in changes:
        arrays, words = dict(held), dict(meta)
        (arrays if name in arrays else words)[name] = value
        with pytest.raises(ValueError, match=r"bad\.npz"):
            tvm_sparse.SparseGRU.load(storage.write(tmp_path / "bad.npz", arrays, words))
    for name in held:
        arrays = {other: a for other, a in held.items() if other != name}
        with pytest.raises(ValueError, match=r"bad\.npz"):
            tvm_sparse.SparseGRU.load(storage.write(tmp_path / "bad.npz", arrays, meta))
    with pytest.raises(ValueError, match="not a SparseLSTM"):
        tvm_sparse.SparseLSTM.load(tmp_path / "layer.npz")


def test_layers_change_dtype_and_device() -> None:
    layer = tvm_sparse.SparseGRU(torch.randn(30, 10), torch.randn(10))
    half = layer.astype("float16")
    assert half.dtype == "float16" and layer.astype("float32") is layer and half.hidden_bias.dtype == np.float16
    close(half.weights.dense().astype(np.float32), layer.weights.dense(), 1e-3)
    moved = layer.to("cpu")
    assert moved.device == "cpu" and moved.to("cpu") is moved and moved.weights is layer.weights


def test_a_compiled_call_keeps_nothing_of_a_graph() -> None:
    """Zeros of a state that a traced call made would belong to a graph, which may write something else there."""
    store: dict[str, Any] = {}
    compiled = torch.compile(
        lambda x: x + kept(store, "zeros", lambda: torch.zeros(3)), backend="eager", fullgraph=True
    )
    x = torch.randn(3)
    assert torch.equal(compiled(x), x) and not store
    zeros = kept(store, "zeros", lambda: torch.zeros(3))
    assert kept(store, "zeros", lambda: pytest.fail("made twice")) is zeros


# ---- stacks --------------------------------------------------------------------------------------


# Any two ways together.
STACKED = {
    *((1, True, True, True), (1, False, False, False), (1, False, False, True)),
    *((2, True, False, True), (2, False, True, False), (2, True, True, False)),
}


@pytest.mark.parametrize(
    ("layers", "bidirectional", "batch_first", "bias"),
    [way if way in STACKED else thorough(*way) for way in itertools.product((1, 2), *[(True, False)] * 3)],
)
@pytest.mark.parametrize("cell", CELLS)
def test_a_stack_is_torch_s(cell: str, layers: int, bidirectional: bool, batch_first: bool, bias: bool) -> None:
    made = module(cell, 6, 20, density=0.4, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first,
                  bias=bias, dropout=0.5 if layers > 1 else 0.0)  # fmt: skip
    stack = tvm_sparse.from_torch(made)
    x, hx = torch.randn(3, 5, 6), states_of(cell, layers * (1 + bidirectional), 3 if batch_first else 5, 20)
    with torch.no_grad():
        wanted = [flat(made(x)), flat(made(x, hx)), flat(made(x[0], _first(hx)))]
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, [2, 5, 3], batch_first=True, enforce_sorted=False)
        hx_packed = states_of(cell, layers * (1 + bidirectional), 3, 20)
        packed_wanted = made(packed, hx_packed)
    found = [flat(stack(x)), flat(stack(x, hx)), flat(stack(x[0], _first(hx)))]
    for these, others in zip(found, wanted, strict=True):
        for one, other in zip(these, others, strict=True):
            assert one.shape == other.shape
            close(one, other)
    packed_found = stack(packed, hx_packed)
    for field in ("data", "batch_sizes", "sorted_indices", "unsorted_indices"):
        close(getattr(packed_found[0], field), getattr(packed_wanted[0], field))
    for one, other in zip(flat(packed_found)[1:], flat(packed_wanted)[1:], strict=True):
        close(one, other)


def _first(hx: Any) -> Any:
    return tuple(state[:, 0] for state in hx) if isinstance(hx, tuple) else hx[:, 0]


@pytest.mark.parametrize("dense", [False, None])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_projected_states(bidirectional: bool, dense: bool | None, tmp_path: Path) -> None:
    """Results and gradients of an LSTM with `proj_size`, by the folded weight and by torch's layer."""
    made = module("lstm", 6, 20, num_layers=2, proj_size=7, bidirectional=bidirectional, bias=not bidirectional)
    stack, many = tvm_sparse.from_torch(made, dense=dense), 2 + 2 * bidirectional
    x, hx = torch.randn(5, 18, 6), (torch.randn(many, 18, 7), torch.randn(many, 18, 20))
    lengths = torch.randint(1, 6, (18,))
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    told = stack.explain(5, 18)[0].way
    assert "proj_size=7" in repr(stack) and ("PyTorch's layer" in told) == (dense is None)
    half = copy.deepcopy(stack).half()
    with torch.no_grad():
        wanted, wanted_packed = made(x, hx), made(packed, hx)
        close(stack(x)[0], made(x)[0])
        close(half(x.half())[0], made(x)[0], 1e-2)
        close(stack(x[:0], hx)[1][0], hx[0])
        for one, other in zip(flat(stack(packed, hx))[1:], flat(wanted_packed)[1:], strict=True):
            close(one, other)
        close(stack(packed, hx)[0].data, wanted_packed[0].data)
        h_n, c_n = stack(x, hx, lengths=torch.zeros(18, dtype=torch.int32))[1]
        assert torch.equal(h_n, hx[0]) and torch.equal(c_n, hx[1])
        # Two sequences in one row, the first of which starts anew at once.
        resets = torch.zeros(5, 18, dtype=torch.bool)
        resets[0] = resets[3] = True
        apart = torch.cat([made(x[:3])[0], made(x[3:])[0]]) if not bidirectional else None
        found = stack(x, hx, resets=resets)[0]
        assert apart is None or np.allclose(found, apart, 1e-5, 1e-5)
    kept = RecurrentStack.load(stack.save(tmp_path / "stack.npz"), dense=dense)
    other = tvm_sparse.from_torch(module("lstm", 6, 20, num_layers=2, proj_size=7, bidirectional=bidirectional,
                                         bias=not bidirectional), dense=dense)  # fmt: skip
    other.load_state_dict(stack.state_dict())
    trained = copy.deepcopy(stack).trainable()
    for one in (stack, kept, other, trained, trained.frozen(), pickle.loads(pickle.dumps(stack))):
        for mine, theirs in zip(flat(one(x, hx)), flat(wanted), strict=True):
            close(mine.detach(), theirs)
    weighed = torch.randn_like(wanted[0])
    (trained(x, hx)[0] * weighed).sum().backward()
    (made(x, hx)[0] * weighed).sum().backward()
    rows, columns, _ = stack.layers[0].weights.coordinates()
    close(trained.values_0.grad, made.weight_hh_l0.grad[rows, columns], 1e-4)
    close(trained.projection_0.grad, made.weight_hr_l0.grad, 1e-4)
    close(trained.weight_0.grad, made.weight_ih_l0.grad, 1e-4)
    with pytest.raises(ValueError, match=r"hx: expected two tensors of shapes \(\d, 18, 7\) and \(\d, 18, 20\), got"):
        stack(x, (hx[1], hx[1]))
    with pytest.raises(ValueError, match="state: expected .* layers of lstm and 20 units"):
        other.set_extra_state(tvm_sparse.from_torch(module("lstm", 6, 20, num_layers=2)).get_extra_state())
    held, meta = storage.read(tmp_path / "stack.npz")
    for projection in (held["projection_0"][:1], held["projection_0"][:, 1:], held["projection_0"].astype("f8")):
        with pytest.raises(ValueError, match="layer 0: projection: expected"):
            RecurrentStack.load(storage.write(tmp_path / "bad.npz", {**held, "projection_0": projection}, meta))


@pytest.mark.gpu
@pytest.mark.parametrize("dense", [False, None, True])
def test_projected_states_on_a_gpu(dense: bool | None) -> None:
    made = module("lstm", 40, 128, num_layers=2, proj_size=32)
    x, hx = torch.randn(9, 20, 40), (0.5 * torch.randn(2, 20, 32), 0.5 * torch.randn(2, 20, 128))
    with torch.no_grad():
        wanted = flat(made(x, hx))
    for dtype in ("float32", "float16"):
        kind = getattr(torch, dtype)
        stack = tvm_sparse.from_torch(made, dtype=dtype, dense=dense).cuda()
        given = x.cuda().to(kind).requires_grad_(), tuple(state.cuda().to(kind) for state in hx)
        for _ in range(2):
            found = flat(stack(*given))
        for one, other in zip(found, wanted, strict=True):
            close(one.detach().float().cpu(), other, 1e-2)
        trained = stack.trainable()
        trained(*given)[0].float().square().mean().backward()
        assert given[0].grad.isfinite().all() and trained.projection_0.grad.abs().max() > 0


@pytest.mark.parametrize("method", ["magnitude", "row_balanced", "block"])
def test_a_stack_prunes(method: str) -> None:
    made = module("lstm", 6, 32, density=None, num_layers=2, bidirectional=True)
    stack = tvm_sparse.from_torch(made, density=0.25, method=method, block=8)
    masked = copy.deepcopy(made)
    for name, parameter in masked.named_parameters():
        if name.startswith("weight_hh"):
            parameter.detach().copy_(tvm_sparse.prune(parameter, 0.25, method=method, block=8, gates=4))
    x = torch.randn(4, 3, 6)
    with torch.no_grad():
        wanted = flat(masked(x))
    for one, other in zip(flat(stack(x)), wanted, strict=True):
        close(one, other)
    assert "density=0.25" in repr(stack) and not stack.training


@pytest.mark.parametrize("cell", CELLS)
def test_sequences_side_by_side_are_those_one_after_the_other(cell: str) -> None:
    """`resets` in both directions: two sequences in one row are each what they are alone."""
    made = module(cell, 6, 12, num_layers=2, bidirectional=True, batch_first=True)
    stack = tvm_sparse.from_torch(made)
    first, second = torch.randn(1, 4, 6), torch.randn(1, 3, 6)
    both = torch.cat([first, second, torch.randn(1, 2, 6)], 1)
    resets = torch.zeros(1, 9, dtype=torch.int32)
    resets[0, 4] = resets[0, 7] = 1
    with torch.no_grad():
        wanted = torch.cat([made(first)[0], made(second)[0]], 1)
    close(stack(both, resets=resets, lengths=[7])[0][:, :7], wanted)
    close(stack(both, resets=resets)[0][:, :7], wanted)
    close(stack(both, lengths=torch.tensor([4]))[0][:, :4], wanted[:, :4])


@pytest.mark.parametrize("dtype", [thorough("float16"), "bfloat16"])
def test_stacks_are_of_other_dtypes(dtype: str) -> None:
    kind = getattr(torch, dtype)
    made = module("gru", 6, 16, num_layers=2)
    x = torch.randn(5, 2, 6)
    with torch.no_grad():
        wanted = made(x)[0]
    for stack in (
        tvm_sparse.from_torch(made, dtype=dtype),
        tvm_sparse.from_torch(made).to(kind),
        tvm_sparse.from_torch(copy.deepcopy(made).to(kind)),
    ):
        found = stack(x.to(kind))[0]
        assert found.dtype is kind and stack.dtype == dtype
        close(found, wanted, 10 * TOLERANCE[dtype])
    with pytest.raises(TypeError, match="dtype: RecurrentStack computes in float32, float16, bfloat16, got"):
        tvm_sparse.from_torch(made).double()


def test_a_stack_takes_the_module_s_place(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = module("lstm", 6, 16, num_layers=2, bidirectional=True)
            self.out = torch.nn.Linear(32, 3)

        def forward(self, x: Any) -> Any:
            return self.out(self.rnn(x)[0])

    model, x = Model().eval(), torch.randn(4, 3, 6)
    with torch.no_grad():
        wanted = model(x)
        model.rnn = tvm_sparse.from_torch(model.rnn)
        close(model.to("cpu")(x), wanted)
        state = model.state_dict()
        assert state["rnn._extra_state"].dtype is torch.uint8 and "rnn.weight_3" in state
        other = Model().eval()
        other.rnn = tvm_sparse.from_torch(other.rnn, density=0.5)
        other.load_state_dict(state)
        close(other(x), wanted)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.rnn))):
            assert copied(x) is not None
        with pytest.raises(ValueError, match="state: not what a layer is kept as"):
            other.load_state_dict({**state, "rnn._extra_state": state["rnn._extra_state"][:-40]})
        lstm = tvm_sparse.from_torch(module("lstm", 6, 16, num_layers=1))
        with pytest.raises(ValueError, match="state: expected 1 layers of lstm and 16 units, got 4"):
            lstm.set_extra_state(state["rnn._extra_state"])
        path = model.rnn.save(tmp_path / "stack.npz")
        model.rnn = RecurrentStack.load(path)
        close(model(x), wanted)
    held, meta = storage.read(path)
    del held["entries_2"]
    with pytest.raises(ValueError, match="layer 2"):
        RecurrentStack.load(storage.write(tmp_path / "bad.npz", held, meta))
    with pytest.raises(ValueError, match="not a stack"):
        RecurrentStack.load(storage.write(tmp_path / "bad.npz", held, {**meta, "format": 7}))
    with pytest.raises(ValueError, match="not a stack"):
        RecurrentStack.load(storage.write(tmp_path / "bad.npz", held, {"format": 1, "layers": 3}))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tvm_sparse.from_torch(torch.nn.Linear(3, 4)), TypeError, "module: expected a torch.nn.RNN"),
        (lambda: tvm_sparse.from_torch(torch.nn.GRU(3, 4), dtype="int8"), ValueError, "dtype: expected one of"),
        (lambda: tvm_sparse.from_torch(torch.nn.GRU(3, 4))(torch.zeros(2, 5)), ValueError, "input: expected two or"),
        (
            lambda: tvm_sparse.from_torch(torch.nn.GRU(3, 4))(torch.zeros(2, 1, 3), torch.zeros(2, 1, 4)),
            ValueError,
            "hx: expected one tensor of shape",
        ),
        (
            lambda: tvm_sparse.from_torch(torch.nn.LSTM(3, 4))(torch.zeros(2, 1, 3), torch.zeros(1, 4)),
            ValueError,
            "hx: expected two tensors of shape",
        ),
        (
            lambda: tvm_sparse.from_torch(torch.nn.GRU(3, 4))(torch.zeros(2, 1, 3), lengths=[3]),
            ValueError,
            "lengths: expected values",
        ),
    ],
)
def test_what_does_not_fit_a_stack_is_named(call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message), torch.no_grad():
        call()


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_layer_on_the_gpu(cell: str, dtype: str) -> None:
    """As on the CPU, with resets and lengths, in one launch and in several."""
    made, kind = module(cell, 16, 77), getattr(torch, dtype)
    layer = layer_of(made, cell, dtype=dtype)
    for batch in (1, 5, 16, 21):
        x = torch.randn(9, batch, 77 * layer.weights.gates).to(kind)
        states = [torch.randn(batch, 77).to(kind) for _ in range(2 if cell == "lstm" else 1)]
        lengths, resets = torch.randint(0, 10, (batch,)), torch.rand(9, batch) < 0.2
        for given in ({}, {"resets": resets}, {"lengths": lengths}, {"resets": resets, "lengths": lengths}):
            wanted = layer(x, *states, **given)
            placed = {name: array.cuda() for name, array in given.items()}
            for some in (placed, {**placed, **({"lengths": lengths} if "lengths" in given else {})}):
                found = layer(x.cuda(), *(state.cuda() for state in states), **some)
                for one, other in zip(found, wanted, strict=True):
                    assert one.is_cuda and one.dtype is kind
                    close(one.cpu(), other, 4 * TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
def test_a_layer_is_its_module_on_the_gpu(cell: str) -> None:
    """On the CPU, that is: initcheck finds that kernels of cuDNN read what nobody wrote."""
    made, x = module(cell, 64, 512, density=0.1), torch.randn(64, 4, 64)
    with torch.no_grad():
        wanted = made(x)
    layer = layer_of(made.cuda(), cell)
    found = layer(projected(layer, made, x.cuda()))
    close(found[0].cpu(), wanted[0], 1e-3)


@pytest.mark.gpu
@pytest.mark.allocator  # a captured graph allocates
@pytest.mark.parametrize("batch", [4, 20])
@pytest.mark.parametrize("cell", CELLS)
def test_a_call_is_one_graph(cell: str, batch: int) -> None:
    layer = layer_of(module(cell, 8, 96), cell).to("cuda")
    names = ("h0", "c0") if cell == "lstm" else ("h0",)
    captured = layer.capture(12, batch, resets=True, lengths=True)
    assert set(captured.inputs) == {"x_projected", *names, "resets", "lengths"}
    for _ in range(3):
        inputs = {"x_projected": torch.randn(12, batch, 96 * layer.weights.gates, device="cuda")}
        inputs |= {name: torch.randn(batch, 96, device="cuda") for name in names}
        inputs["resets"] = (torch.rand(12, batch, device="cuda") < 0.2).int()
        inputs["lengths"] = torch.randint(0, 13, (batch,), device="cuda", dtype=torch.int32)
        found = [part.clone() for part in captured(**inputs)]
        states = [inputs[name] for name in names]
        wanted = layer(inputs["x_projected"], *states, resets=inputs["resets"], lengths=inputs["lengths"])
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    again = captured(x_projected=inputs["x_projected"])
    assert all(torch.equal(one, other) for one, other in zip(again, wanted, strict=True))
    with pytest.raises(ValueError, match="h0: the graph takes shape"):
        captured(h0=torch.zeros(batch, 95, device="cuda"))
    with pytest.raises(TypeError, match="bias: the graph was captured with x_projected"):
        captured(bias=inputs["h0"])


@pytest.mark.gpu
@pytest.mark.allocator  # a captured graph allocates
@pytest.mark.parametrize("cell", CELLS)
def test_a_stack_on_the_gpu(cell: str, tmp_path: Path) -> None:
    made = module(cell, 24, 64, num_layers=2, bidirectional=True)
    stack = tvm_sparse.from_torch(made)
    x, lengths = torch.randn(10, 3, 24), torch.tensor([3, 10, 0])
    wanted = flat(stack(x, lengths=lengths))
    moved = copy.deepcopy(stack).to("cuda")
    loaded = RecurrentStack.load(stack.save(tmp_path / "stack.npz"), device="cuda")
    for one in (moved, loaded, tvm_sparse.from_torch(made.cuda())):
        for where in ("cpu", "cuda"):
            found = flat(one(x.cuda(), lengths=lengths.to(where)))
            for these, others in zip(found, wanted, strict=True):
                assert these.is_cuda
                close(these.cpu(), others, 1e-4)
    # In a graph of the caller's own.
    placed, given = x.cuda(), lengths.cuda()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        moved(placed, lengths=given)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        output, _ = moved(placed, lengths=given)
    placed.copy_(torch.randn(10, 3, 24))
    graph.replay()
    torch.cuda.synchronize()
    close(output.cpu(), moved(placed, lengths=given)[0].cpu(), 1e-6)
    with pytest.raises(ValueError, match="lengths: expected values"):
        moved(placed, lengths=[11, 1, 1])


@pytest.mark.gpu
def test_half_precision_stacks_on_the_gpu() -> None:
    # initcheck takes what PyTorch's product of 4 x 128 columns wrote for unwritten, even where PyTorch reads it.
    made = module("lstm", 32, 129, density=0.1)
    x = torch.randn(20, 4, 32)
    with torch.no_grad():
        wanted = made(x)[0]
    for kind in (torch.float16, torch.bfloat16):
        stack = tvm_sparse.from_torch(made).to("cuda", kind)
        close(stack(x.to("cuda", kind))[0].float().cpu(), wanted, 5e-2)


@pytest.mark.gpu
def test_weights_on_the_gpu_are_prepared() -> None:
    weight = torch.randn(3 * 40, 40, device="cuda")
    layer = tvm_sparse.SparseGRU(weight, torch.randn(120, device="cuda"), density=0.2)
    assert np.array_equal(layer.weights.dense(), tvm_sparse.prune(weight.cpu(), 0.2).numpy())
    sparse = tvm_sparse.SparseGRU(tvm_sparse.prune(weight, 0.2).to_sparse_csr())
    assert np.array_equal(sparse.weights.dense(), layer.weights.dense())
    for method in ("magnitude", "row_balanced", "block"):
        ours = tvm_sparse.pruning_mask(weight, 0.3, method=method, block=8)
        assert ours.is_cuda and torch.equal(
            ours.cpu(), tvm_sparse.pruning_mask(weight.cpu(), 0.3, method=method, block=8)
        )
    with pytest.raises(ValueError, match="lengths: expected an array on the host or beside x_projected"):
        layer(torch.zeros(2, 1, 120), lengths=torch.ones(1, dtype=torch.int32, device="cuda"))


@pytest.mark.gpu
def test_persistent_kernels_beside_other_processes_and_a_busy_stream() -> None:
    """All their thread blocks are resident at the same time, whoever else wants the GPU: nothing waits for ever."""
    # A sanitizer takes a thousand times as long: it sees the same kernels with fewer steps.
    sanitized = "TVM_SPARSE_SANITIZE_SAID" in os.environ
    patience, sizes = (600, ["4", "256"]) if sanitized else (120, ["256", "4096"])
    child = str(Path(__file__).with_name("recurrent_child.py"))
    # The first one builds the kernels.
    subprocess.run([sys.executable, child, "0", *sizes], check=True, timeout=patience, stdout=subprocess.DEVNULL)
    command = [sys.executable, child, "4", *sizes]
    together = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        for process in together:
            printed, _ = process.communicate(timeout=patience)
            assert process.returncode == 0
            calls = dict(line.split() for line in printed.splitlines())
            assert set(calls) == {"rows", "cluster", "tiles"} and min(map(int, calls.values())) >= 5
    finally:
        for process in together:
            process.kill()


@pytest.mark.thorough
def test_layers_of_real_models(tmp_path: Path) -> None:
    """Three models that packages carry: the converted layers give what PyTorch's give, and the model its results."""
    packages = ("resemblyzer", "silero_vad", "g2p_en")
    if any(importlib.util.find_spec(package) is None for package in packages):
        pytest.skip("the packages are not installed: pip install --no-deps resemblyzer silero-vad g2p_en")
    script = Path(__file__).parent.parent / "scripts" / "real_models.py"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    options = ["--target", "cpu", "--densities", "1", "--rounds", "1", "--csv", tmp_path / "out"]
    run = subprocess.run(
        [sys.executable, script, *options], env=environment, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stderr
    lines = [line for line in (tmp_path / "out").read_text().splitlines() if not line.startswith("#")]
    found = {line["model"]: float(line["quality"]) for line in csv.DictReader(lines)}
    assert found["resemblyzer"] > 0.9999 and found["silero-vad"] < 1e-4 and found["g2p_en"] > 0.6
