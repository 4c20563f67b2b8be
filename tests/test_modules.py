"""Every public module under all that PyTorch does to modules: it computes the same, or refuses and stays as it was."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases import calls_run

import tvm_sparse
from tvm_sparse.core.problem import FLOATS
from tvm_sparse.runtime.dispatch import Dispatcher

torch = pytest.importorskip("torch")
nn = tvm_sparse.nn

HASH: dict[str, Any] = {"k": 8, "units": 2, "bands": 64, "threshold": 1, "frequent": 10, "capacity": 60}
DTYPES = {name: getattr(torch, name) for name in FLOATS}
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run((), tmp_path_factory.mktemp("kernels")) as own:
        yield own


@dataclass(frozen=True)
class Case:
    """A module, made anew with other values each time; its input, and the module of PyTorch that it stands for."""

    make: Callable[[], Any]
    input: Callable[[], Any]
    dense: Callable[[Any], Any]
    trains: bool = True
    traces: bool = True


def stack() -> Any:
    return tvm_sparse.from_torch(torch.nn.LSTM(6, 8, bidirectional=True), density=0.5)


def dense_stack(made: Any) -> Any:
    found = torch.nn.LSTM(6, 8, bidirectional=True)
    with torch.no_grad():
        for number, suffix in enumerate(("", "_reverse")):
            getattr(found, f"weight_ih_l0{suffix}").copy_(getattr(made, f"weight_{number}"))
            getattr(found, f"bias_ih_l0{suffix}").copy_(getattr(made, f"bias_{number}"))
            getattr(found, f"bias_hh_l0{suffix}").zero_()
            dense = made.layers[number].weights.dense().astype(np.float32)
            getattr(found, f"weight_hh_l0{suffix}").copy_(torch.from_numpy(dense))
    return lambda x: found.to(x.dtype)(x)[0]


class SideBySide(torch.nn.Module):
    """Several embedding bags of PyTorch, whose tables are parts of one parameter."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.sizes, self.weight = made.sizes, torch.nn.Parameter(made.weight.detach().float())

    def forward(self, x: Any) -> Any:
        bag, tables = torch.nn.functional.embedding_bag, self.weight.split(self.sizes)
        return torch.cat([bag(one, table, mode="mean") for table, one in zip(tables, x, strict=True)], 1)


CASES = {
    "BsrLinear": Case(
        lambda: nn.BsrLinear.from_dense(torch.nn.Linear(66, 35), (5, 3), 0.5),
        lambda: torch.randn(7, 66),
        lambda made: made.to_dense(),
    ),
    "NHotEmbeddingBag": Case(
        lambda: nn.NHotEmbeddingBag(50, 33, mode="mean"),
        lambda: torch.randint(50, (4, 5)),
        lambda made: torch.nn.EmbeddingBag.from_pretrained(made.weight.detach().float(), mode="mean"),
    ),
    "NHotEmbeddingBags": Case(
        lambda: nn.NHotEmbeddingBags((50, 7), 33, mode="mean"),
        lambda: torch.randint(7, (2, 4, 5)),
        SideBySide,
    ),
    # Every word is a candidate of every row: the logits are those of the product.
    "LmHead": Case(
        lambda: nn.LmHead(torch.nn.Parameter(torch.randn(60, 16)), **{**HASH, "frequent": 60}),
        lambda: torch.randn(3, 16),
        lambda made: made.linear(),
        traces=False,
    ),
    "RecurrentStack": Case(stack, lambda: torch.randn(5, 3, 6), dense_stack, trains=False, traces=False),
}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
MODULES = pytest.mark.parametrize("name", CASES)


def out(made: Any, x: Any) -> Any:
    found = made(x)
    return found[0] if isinstance(found, tuple) else found


def as_dtype(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if x.is_floating_point() else x


def close(have: Any, want: Any, dtype: str = "float32") -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(have.float(), want.float(), atol=tolerance, rtol=tolerance)


def state(made: Any) -> dict[str, Any]:
    return {name: (t.dtype, t.device, t.clone()) for name, t in made.state_dict(keep_vars=True).items()}


def test_all_public_modules_are_cases() -> None:
    public = {name for name in nn.__all__ if isinstance(getattr(nn, name), type)}
    assert set(CASES) == {name for name in public if issubclass(getattr(nn, name), torch.nn.Module)}


@MODULES
@DEVICES
@pytest.mark.parametrize("dtype", FLOATS)
def test_conversions(name: str, dtype: str, device: str) -> None:
    """To the dtype by each of PyTorch's ways, and back."""
    case, kind = CASES[name], DTYPES[dtype]
    short: Any = {"float32": "float", "float16": "half", "bfloat16": "bfloat16"}[dtype]
    x = case.input()
    for convert in (
        lambda made: made.to(kind),
        lambda made: getattr(made, short)(),
        lambda made: torch.nn.ModuleDict({"inner": made}).to(kind)["inner"],
        lambda made: made.to(kind).float().to(kind),
    ):
        made = case.make()
        with torch.no_grad():
            wanted = out(case.dense(made), x)
            found = out(convert(made.to(device)), as_dtype(x, kind).to(device))
        assert found.dtype is kind and found.device.type == device
        close(found.cpu(), wanted, dtype)


@MODULES
@pytest.mark.parametrize("how", ["double", "to float64", "complex", "type"])
def test_what_no_kernel_computes_is_refused_and_changes_nothing(name: str, how: str) -> None:
    case = CASES[name]
    made, x = case.make(), case.input()
    with torch.no_grad():
        wanted, before = out(made, x), state(made)
    convert: Any = {
        "double": lambda: made.double(),
        "to float64": lambda: made.to("cpu", torch.float64),
        "complex": lambda: made.to(torch.complex64),
        "type": lambda: made.type(torch.float64),
    }[how]
    with pytest.raises(TypeError, match=f"dtype: {name} computes in float32, float16, bfloat16, got torch."):
        convert()
    after = state(made)
    assert all(b[:2] == a[:2] and torch.equal(b[2], a[2]) for b, a in zip(before.values(), after.values(), strict=True))
    with torch.no_grad():
        assert torch.equal(out(made, x), wanted)


@MODULES
def test_the_meta_device_and_back(name: str) -> None:
    case = CASES[name]
    made, x = case.make(), case.input()
    kept, other = copy.deepcopy(made.state_dict()), case.make()
    with torch.no_grad():
        wanted = out(made, x)
        assert other.to("meta") is other and all(t.is_meta for t in other.parameters())
        other = other.to_empty(device="cpu")
        other.load_state_dict(kept)
        assert torch.equal(out(other, x), wanted)


@MODULES
def test_copies_pickles_and_states(name: str) -> None:
    case = CASES[name]
    made, x = case.make(), case.input()
    file, whole = io.BytesIO(), io.BytesIO()
    torch.save(made.state_dict(), file)
    torch.save(made, whole)
    file.seek(0)
    whole.seek(0)
    loaded = case.make()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    if name == "LmHead":
        loaded.rebuild()
    with torch.no_grad():
        wanted = out(made, x)
        others = [loaded, copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.load(whole, weights_only=False)]
        for other in others:
            assert torch.equal(out(other, x), wanted)
        others[1].half()  # a copy that is changed leaves the first alone
        assert torch.equal(out(made, x), wanted)


@MODULES
@DEVICES
def test_modes(name: str, device: str) -> None:
    case = CASES[name]
    made, x = case.make().to(device), case.input().to(device)
    with torch.no_grad():
        wanted = out(made, x)
    with torch.inference_mode():
        assert torch.equal(out(made, x), wanted)
    for change in (made.train, made.eval, lambda: made.requires_grad_(False), lambda: made.zero_grad()):
        change()
        with torch.no_grad():
            assert torch.equal(out(made, x), wanted)
    assert torch.equal(out(made, x).detach(), wanted)  # after inference mode, and with nothing that wants a gradient
    if case.trains:
        made.requires_grad_(True)
        dense = copy.deepcopy(case.dense(made)).requires_grad_(True)
        for one in (made, dense):
            out(one, x).square().sum().backward()
        parameter = "bias" if name == "BsrLinear" else "weight"
        close(getattr(made, parameter).grad / 100, getattr(dense, parameter).grad / 100)


@MODULES
@DEVICES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast(name: str, dtype: str, device: str) -> None:
    """As of linear layers: results are of autocast's dtype, whatever the input's is. Bags are not cast by PyTorch."""
    case, kind = CASES[name], DTYPES[dtype]
    made, x = case.make(), case.input()
    with torch.no_grad():
        wanted, made, x = out(case.dense(made), x), made.to(device), x.to(device)
        plain = out(made, x)
        for _ in range(2):
            for given in (x, as_dtype(x, kind)):
                with torch.autocast(device, kind):
                    found = out(made, given)
                assert found.dtype is (torch.float32 if name.startswith("NHotEmbeddingBag") else kind)
                close(found.cpu(), wanted, dtype)
        assert torch.equal(out(made, x), plain)  # nothing of it stays


@pytest.mark.gpu
@MODULES
def test_a_compiled_module_becomes_a_cuda_graph(name: str) -> None:
    """What a module keeps from its first call must lie outside of the graph's memory."""
    case = CASES[name]
    made = case.make().to("cuda")
    compiled = torch.compile(made, backend="cudagraphs")
    with torch.no_grad():
        for _ in range(4):
            x = case.input().to("cuda")
            assert torch.equal(out(compiled, x).clone(), out(made, x))


@MODULES
def test_other_dtypes_of_inputs_are_named(name: str) -> None:
    case = CASES[name]
    made, x = case.make(), case.input()
    argument = {"BsrLinear": "x", "LmHead": "hidden"}.get(name, "input")
    given = x.double() if x.is_floating_point() else x.float()
    with torch.no_grad(), pytest.raises((TypeError, ValueError), match=f"^{argument}: expected .*float32"):
        made(given)


@MODULES
def test_traces_are_right_or_refused(name: str) -> None:
    case = CASES[name]
    made, x, other = case.make(), case.input(), case.input()
    with torch.no_grad():
        out(made, x)
        if not case.traces:
            with pytest.raises(RuntimeError, match=f"{name}: torch.jit.trace"):
                torch.jit.trace(made, (x,))
            return
        traced = torch.jit.trace(made, (x,))
        for given in (x, other):
            assert torch.equal(traced(given), out(made, given))


def pack(x: Any) -> Any:
    return torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 5, 5]), batch_first=True)


def test_a_stack_s_arguments_are_named_as_the_caller_knows_them() -> None:
    made = tvm_sparse.from_torch(torch.nn.LSTM(6, 8, batch_first=True), density=0.5)
    x, h = torch.randn(3, 5, 6), torch.zeros(1, 3, 8)
    for call, message in (
        (lambda: made(x.double()), "input: expected dtype torch.float32, as the stack has, got torch.float64"),
        (lambda: made(x.numpy()), "input: expected a torch tensor or a PackedSequence, got ndarray"),
        (lambda: made(x.to("meta")), "input: expected a tensor on cpu, as the weights of the stack are, got meta"),
        (
            lambda: made(x.detach(), (h.double(), h)),
            "hx: expected dtype torch.float32, as input has, got torch.float64",
        ),
        (lambda: made(x.detach(), (h, h.to("meta"))), "hx: expected tensors on cpu, as input is, got meta"),
        (lambda: made(x.detach(), resets=torch.zeros(5, 3).int()), r"resets: expected shape \(3, 5\), as input has"),
        (lambda: made(x.detach(), resets=torch.zeros(3, 5)), "resets: expected .* of bool or integers, got .*float32"),
        (lambda: made(x.detach(), lengths=torch.ones(4).int()), r"lengths: expected shape \(3,\)"),
        (lambda: copy.deepcopy(made).to("meta")(x.detach()), "input: the stack is on the meta device"),
        (lambda: made(x.detach(), h), r"hx: expected two tensors of shape \(1, 3, 8\), got one of \(1, 3, 8\)"),
        (lambda: made(x.detach()[0], (h[0], h[0, 0])), r"hx: expected two tensors of shape \(1, 8\), got \(3, 8\), \("),
        (lambda: made(x.detach(), (None, 3)), r"hx: expected two tensors of shape \(1, 3, 8\), got None, int"),
        (lambda: made(pack(x.detach()[..., :5])), r"input: expected .* the last of 6, got \(15, 5\)"),
        (lambda: made(pack(x.detach()), (h[:, :2], h)), r"hx: expected two tensors of shape \(1, 3, 8\), got \(1, 2"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            call()


def test_a_stack_under_autocast_takes_states_of_every_dtype() -> None:
    made = tvm_sparse.from_torch(torch.nn.GRU(6, 8), density=0.5)
    x, h = torch.randn(5, 3, 6), torch.randn(1, 3, 8)
    wanted = made(x, h)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (h, h.bfloat16(), h.double()):
            for have, want in zip(made(x, given), wanted, strict=True):
                assert have.dtype is torch.bfloat16
                close(have, want, "bfloat16")
    assert "_cast" in vars(made) and copy.deepcopy(made)._cast is None


def test_a_module_of_float64_is_refused() -> None:
    module = torch.nn.LSTM(6, 8).double()
    with pytest.raises(ValueError, match="module: is of torch.float64, .* pass dtype='float32' to round"):
        tvm_sparse.from_torch(module)
    assert tvm_sparse.from_torch(module, dtype="float32").dtype == "float32"
