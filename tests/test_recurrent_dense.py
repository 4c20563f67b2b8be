"""The dense way of recurrent stacks: the same results as the sparse way, and taken where it should be."""

from __future__ import annotations

import copy
import csv
import pickle
from pathlib import Path
from typing import Any

import pytest
from cases import thorough

import tvm_sparse
from tvm_sparse.core import machine
from tvm_sparse.operators.sparse_recurrent.problem import GATES

torch = pytest.importorskip("torch")
from tvm_sparse.layers import recurrent_dense, recurrent_stack  # noqa: E402
from tvm_sparse.layers.recurrent_dense import FEW, MANY, STEPS, DenseCall, likely_way  # noqa: E402

CELLS = tuple(recurrent_stack.CELLS.values())
KINDS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
RESULTS = Path(__file__).parent.parent / "scripts" / "results"
TOLERANCE = {"float32": 5e-6, "float16": 4e-3, "bfloat16": 4e-2}


def module_of(cell: str, *sizes: int, **options: Any) -> Any:
    options |= {"nonlinearity": cell} if GATES[cell] == 1 else {}
    return KINDS.get(cell, torch.nn.RNN)(*sizes, **options)


def flat(found: Any) -> list[Any]:
    output, states = found
    return [output, *(states if isinstance(states, tuple) else [states])]


def agree(found: Any, wanted: Any, tolerance: float) -> None:
    for one, other in zip(flat(found), flat(wanted), strict=True):
        assert one.shape == other.shape and one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the dense way."""
    calls: list[Any] = []

    def run(*given: Any) -> Any:
        calls.append(given)
        return recurrent_dense.run_dense(*given)

    monkeypatch.setattr(recurrent_stack, "run_dense", run)
    return calls


@pytest.mark.parametrize("dtype", ["float32", thorough("float16"), thorough("bfloat16")])
@pytest.mark.parametrize(("batch_first", "bias"), [(False, True), (True, False)])
@pytest.mark.parametrize("cell", CELLS)
def test_both_ways_agree(cell: str, batch_first: bool, bias: bool, dtype: str, taken: list[Any]) -> None:
    made = module_of(cell, 6, 20, num_layers=2, bidirectional=True, batch_first=batch_first, bias=bias)
    stack = tvm_sparse.from_torch(made, density=0.3, dtype=dtype, dense=True)
    sparse = tvm_sparse.from_torch(made, density=0.3, dtype=dtype, dense=False)
    kind = getattr(torch, dtype)
    x = torch.randn(3, 5, 6, dtype=kind)
    states = [0.5 * torch.randn(4, 3 if batch_first else 5, 20, dtype=kind) for _ in range(1 + (cell == "lstm"))]
    hx = tuple(states) if cell == "lstm" else states[0]
    for given in ((x,), (x, hx)):
        agree(stack(*given), sparse(*given), TOLERANCE[dtype])
    assert len(taken) == 8
    agree(stack(x[0]), sparse(x[0]), TOLERANCE[dtype])


def test_calls_that_torchs_layer_cannot_compute_run_the_sparse_way(taken: list[Any]) -> None:
    made = module_of("lstm", 6, 20)
    stack, sparse = tvm_sparse.from_torch(made, dense=True), tvm_sparse.from_torch(made, dense=False)
    x, lengths = torch.randn(5, 3, 6), [5, 2, 3]
    resets = torch.zeros(5, 3, dtype=torch.int32)
    resets[2] = 1
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    agree(stack(x, lengths=lengths), sparse(x, lengths=lengths), 0)
    agree(stack(x, resets=resets), sparse(x, resets=resets), 0)
    assert torch.equal(stack(packed)[0].data, sparse(packed)[0].data)
    assert stack(x[:0])[0].shape == (0, 3, 20) and stack(x[:, :0])[0].shape == (5, 0, 20)
    assert not taken
    agree(stack(x), sparse(x), 5e-6)
    assert len(taken) == 1
    stack.dense = None
    stack(x)  # on a CPU nothing is known of a faster dense layer
    assert len(taken) == 1


def test_the_dense_copy_follows_the_weights() -> None:
    """The copy is kept from call to call, and made again when a weight has changed."""
    torch.manual_seed(3)
    x = torch.randn(4, 3, 6)
    stack = tvm_sparse.from_torch(module_of("gru", 6, 20), density=0.3, dense=True)

    def check(stack: Any, x: Any = x, tolerance: float = 5e-6) -> None:
        sparse = copy.deepcopy(stack)
        sparse.dense = False
        agree(stack(x), sparse(x), tolerance)

    with torch.inference_mode():
        check(stack)
    [(_, kept)] = stack._flat.values()
    mine = x.clone().requires_grad_()
    stack(mine)[0].sum().backward()  # with the copy that was made in inference mode
    assert mine.grad.abs().max() > 0 and next(iter(stack._flat.values()))[1] is kept
    stack.weight_0.mul_(2)
    check(stack)
    stack.bias_0.add_(1)
    check(stack)
    other = tvm_sparse.from_torch(module_of("gru", 6, 20), density=0.2)
    stack.load_state_dict(other.state_dict())
    check(stack)
    agree(stack(x), other(x), 5e-6)
    with torch.autocast("cpu", torch.bfloat16):
        check(stack, tolerance=4e-2)
    check(stack)
    assert len(stack._flat) == 2
    check(stack.half(), x.half(), 4e-3)
    copied = pickle.loads(pickle.dumps(stack))
    assert copied.dense is True and not copied._flat
    check(copied, x.half(), 4e-3)


def test_the_dense_way_in_training_follows_the_optimiser(tmp_path: Any) -> None:
    torch.manual_seed(4)
    stack = tvm_sparse.from_torch(module_of("lstm", 6, 20), density=0.3, dense=True).trainable()
    x, optimizer = torch.randn(5, 3, 6), torch.optim.SGD(stack.parameters(), 0.1)
    first = stack(x)[0].square().sum()
    for _ in range(3):
        optimizer.zero_grad()
        stack(x)[0].square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        after = stack(x)
    assert after[0].square().sum() < first and stack.frozen().dense is True
    agree(stack.frozen()(x), after, 5e-6)
    path = stack.save(tmp_path / "stack.npz")
    assert tvm_sparse.RecurrentStack.load(path, dense=True).dense is True
    assert tvm_sparse.RecurrentStack.load(path).dense is None
    with torch.autocast("cpu", torch.bfloat16):
        output = stack(x)[0]
    output.float().sum().backward()
    assert output.dtype is torch.bfloat16 and stack.values_0.grad.dtype is torch.float32


# A table of the rule, so that the tests do not depend on measurements.
TABLE = {
    ("lstm", FEW): {512: (512, 64, 16, 8), 1024: (64, 16, 8, 8)},
    ("lstm", MANY): {512: (512, 65, 33, 33), 1024: (65, 17, 17, 17)},
    ("lstm", STEPS): {1024: (129, 65, 33, 33), 2048: (129, 33, 33, 16)},
}


def test_the_way_is_a_rule_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_dense, "LEAST_BATCH", TABLE)
    call = DenseCall("lstm", 1024, 1024, 16, 0.1, "float16")
    here = machine.resolve("h200")

    def way(where: Any = here, **changed: Any) -> str:
        return likely_way(DenseCall(**{**vars(call), **changed}), where).way

    assert way() == way(batch=24) == way(batch=128) == way(hidden=512, batch=72) == way(density=0.5, batch=8) == "dense"
    # A few sequences, and not more of them.
    assert way(hidden=512, density=0.3) == "dense" and way(hidden=512, density=0.3, batch=24) == "kernel"
    # Where cuDNN has no persistent kernel the other row of the table counts.
    for changed in ({"batch": 100}, {"dtype": "bfloat16", "batch": 65}, {"inputs": 100, "batch": 65}, {"batch": 256}):
        assert way(**changed) == "dense", changed
    for changed in (
        {"batch": 8}, {"batch": 17}, {"hidden": 512, "batch": 56}, {"inputs": 100, "batch": 48}, {"density": 0.02},
        {"dtype": "bfloat16"}, {"dtype": "float32", "batch": 256}, {"cell": "gru", "batch": 256}, {"batch": 256,
        "density": 0.001}, {"cell": "tanh", "batch": 256}, {"hidden": 384, "batch": 128}, {"hidden": 256},
        {"hidden": 4096, "batch": 256}, {"resets": True}, {"ragged": True},
    ):  # fmt: skip
        assert way(**changed) == "kernel", changed
    assert way(machine.resolve("a100"), batch=128) == way(machine.resolve("cpu"), batch=128) == "kernel"


def test_least_batches_are_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_dense, "LEAST_BATCH", TABLE)

    def least(*given: Any) -> int | None:
        return recurrent_dense.least_batch("lstm", *given)

    assert [least(MANY, 512, one) for one in recurrent_dense.DENSITIES] == [512, 65, 33, 33]
    assert least(FEW, 1024, 0.01) == 49 and least(FEW, 1024, 0.009) is None
    # Geometric means, of 32 and 46, where a launch of 16 sequences begins.
    assert least(FEW, 724, 0.1) == 17 and least(STEPS, 1448, 0.1) == 33
    assert least(FEW, 1024, (0.1 * 0.3) ** 0.5) == 11
    assert least(STEPS, 512, 0.1) is None and least(STEPS, 2049, 0.1) is None


def test_the_table_of_least_batches_is_whole() -> None:
    for (cell, _), rows in recurrent_dense.LEAST_BATCH.items():
        assert cell in map(recurrent_dense.family, CELLS) and list(rows) == sorted(rows)
        for row in rows.values():
            assert len(row) == len(recurrent_dense.DENSITIES)
            assert all(1 <= batch <= recurrent_dense.NEVER for batch in row)


@pytest.mark.parametrize(("name", "most"), [("rnn-grid-h200", 1.05), ("rnn-grid-drawn-h200", 1.05)])
def test_no_call_that_was_measured_is_slower_than_cudnn(name: str, most: float) -> None:
    """By the committed times; drawn calls are between those of the table, and may cost more."""
    rows = [line for line in (RESULTS / f"{name}.csv").read_text().splitlines() if not line.startswith("#")]
    counted = 0
    for row in csv.DictReader(rows):
        units, batch = int(row["hidden"]), int(row["batch"])
        call = DenseCall(row["cell"], units, units, batch, float(row["density"]), "float16")
        time = row["dense" if likely_way(call, machine.resolve("h200")).way == "dense" else "sparse"]
        assert float(time) <= most * float(row["module"]), row
        counted += 1
    assert counted >= 71


def test_persistent_kernels_of_cudnn() -> None:
    call = DenseCall("lstm", 1024, 1024, 16, 0.1, "float16")

    def has(**changed: Any) -> bool:
        return recurrent_dense.persistent(DenseCall(**{**vars(call), **changed}))

    assert has() and has(cell="relu") and has(cell="tanh", hidden=768, batch=128) and has(batch=128)
    for changed in ({"cell": "gru"}, {"dtype": "bfloat16"}, {"hidden": 1152}, {"hidden": 1000}, {"inputs": 100},
                    {"batch": 12}, {"batch": 136}, {"cell": "tanh", "batch": 96}):  # fmt: skip
        assert not has(**changed), changed


def test_the_way_is_explained() -> None:
    stack = tvm_sparse.from_torch(module_of("lstm", 6, 20, num_layers=2), density=0.3, dtype="float16")

    def told(**given: Any) -> str:
        [text] = {one.way for one in stack.explain(4, 3, target="h200", **given)}
        assert f"calls take {text}" in str(stack.explain(4, 3, target="h200", **given)[1])
        return text

    assert told().startswith(
        "the sparse layer: cuDNN has kernels of a step for 20 units with 1 of the weights stored, and"
    )
    stack.dense = True
    assert told() == "PyTorch's layer with dense weights: dense=True"
    assert told(lengths=True).startswith("the sparse layer: PyTorch's layers take lengths")
    assert told(resets=True) == "the sparse layer: PyTorch's layers have no resets"
    stack.dense = False
    assert told() == "the sparse layer: dense=False"


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:RNN module weights")  # the copy lies as cuDNN reads it
@pytest.mark.parametrize("cell", CELLS)
def test_both_ways_agree_on_a_gpu(cell: str) -> None:
    made = module_of(cell, 128, 256, num_layers=2, bidirectional=cell == "gru", bias=cell != "relu")
    stack = tvm_sparse.from_torch(made, density=0.1, dtype="float16", dense=True).cuda()
    x = torch.randn(12, 16, 128, device="cuda", dtype=torch.float16)
    sparse = copy.deepcopy(stack)
    sparse.dense = False
    for _ in range(2):
        agree(stack(x), sparse(x), 1e-2)
    grads = []
    for one in (stack.trainable(), sparse.trainable()):
        one(x)[0].float().square().mean().mul(1000).backward()
        grads.append([parameter.grad for parameter in one.parameters()])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-2 * other.abs().max().item() + 1e-5)


@pytest.mark.gpu
def test_the_faster_way_runs_without_being_asked_for(taken: list[Any]) -> None:
    stack = tvm_sparse.from_torch(module_of("lstm", 128, 1024), density=0.125, dtype="float16").cuda()
    x = torch.randn(6, 16, 128, device="cuda", dtype=torch.float16)
    [told] = stack.explain(6, 16)
    found = stack(x)
    assert len(taken) == int(told.way.startswith("PyTorch's layer"))
    assert torch.cuda.get_device_capability() != (9, 0) or len(taken) == 1
    stack.dense = False
    agree(found, stack(x), 1e-2)
