"""The product with a dense copy of a sparse weight: when it is taken, and that its copy is the weight's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases import SM80, SM90, calls_run

torch = pytest.importorskip("torch")

import tvm_sparse.nn  # noqa: E402
from tvm_sparse.core import machine  # noqa: E402
from tvm_sparse.core.registry import parse  # noqa: E402
from tvm_sparse.operators.bsr_matmul import call as bsr_call  # noqa: E402
from tvm_sparse.operators.bsr_matmul.dense import rows_in_cache, trains_dense  # noqa: E402
from tvm_sparse.operators.csr_linear import call as csr_call  # noqa: E402
from tvm_sparse.runtime import dispatch, repeat  # noqa: E402
from tvm_sparse.runtime.dense import DENSE, KERNEL  # noqa: E402
from tvm_sparse.runtime.dispatch import Dispatcher  # noqa: E402

KEY = "bsr_matmul/m=7,k=48,n=32,block=16x8,sparsity=0.5"
CSR_KEY = "csr_linear/m=7,k=48,n=32,sparsity=0.7"


@dataclass(frozen=True)
class Kind:
    """An operator with a dense way: its module of calls, public function, and class of prepared weights."""

    key: str
    module: Any
    product: Callable[..., Any]
    prepared: Any
    parts: tuple[str, ...]  # of the weight, in the order in which it takes them

    def weight(self, constant: bool = True, seed: int = 0, library: str = "torch") -> Any:
        problem = parse(self.key)
        drawn = dict(zip((one.name for one in problem.inputs), problem.generate(seed), strict=False))
        parts = tuple(drawn[name] for name in self.parts)
        parts = parts if library == "numpy" else tuple(map(torch.from_numpy, parts))
        return self.prepared(parts, columns=48, constant=constant)

    def values(self, weight: Any) -> Any:
        """The array of the weight's stored elements."""
        return getattr(weight, "data" if "data" in self.parts else "values")

    def close(self, y: Any, x: Any, weight: Any) -> None:
        """Within the operator's tolerance."""
        problem = parse(self.key.replace("m=7", f"m={len(x)}"))
        given = {name: np.asarray(getattr(weight, name)) for name in self.parts} | {"x": np.asarray(x)}
        inputs = [given.get(one.name, {"long": -1, "constant": 0}.get(one.name)) for one in problem.inputs]
        problem.check(inputs, problem.reference(inputs), [np.asarray(y)])


KINDS = (
    Kind(KEY, bsr_call, tvm_sparse.bsr_matmul, tvm_sparse.BsrWeight, ("data", "indices", "indptr")),
    Kind(CSR_KEY, csr_call, tvm_sparse.csr_linear, tvm_sparse.CsrRows, ("indptr", "indices", "values")),
)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.product.__name__)


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    keys = KEY, f"{KEY},bias=1,activation=gelu", CSR_KEY
    with calls_run(keys, tmp_path_factory.mktemp("kernels")) as own:
        yield own


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the weights that have become dense."""
    made: list[int] = []

    def noting(to_dense: Any) -> Any:
        def noted(self: Any) -> Any:
            made.append(id(self))
            return to_dense(self)

        return noted

    for kind in KINDS:
        monkeypatch.setattr(kind.prepared, "to_dense", noting(kind.prepared.to_dense))
    return made


@each_kind
def test_a_constant_weight_keeps_one_copy(kind: Kind, monkeypatch: pytest.MonkeyPatch, copies: list[int]) -> None:
    """Where a dense product is likely to be faster, also in repeated calls, of other rows, and beside another weight of
    the same shape."""
    monkeypatch.setattr(kind.module, "way", lambda problem, machine: DENSE)
    first, other = kind.weight(), kind.weight(seed=1)
    for rows in (7, 7, 9, 7):
        for one in (first, other):
            x = torch.randn(rows, 48)
            kind.close(kind.product(x, one), x, one)
    assert copies == [id(first), id(other)]
    assert [copy.copy(one).constant for one in (first, kind.weight(constant=False))] == [True, False]


@each_kind
def test_it_is_refused(kind: Kind, monkeypatch: pytest.MonkeyPatch, copies: list[int]) -> None:
    """By `dense=False`, by a weight that may be written, and of arrays of other libraries; also after one."""
    monkeypatch.setattr(kind.module, "way", lambda problem, machine: DENSE)
    kept, written, x = kind.weight(), kind.weight(constant=False), torch.randn(7, 48)
    of_numpy = kind.weight(library="numpy")
    kind.product(x, kept)
    copies.clear()
    for _ in range(2):
        kind.close(kind.product(x, kept, dense=False), x, kept)
        kind.close(kind.product(x, written), x, written)
        kind.close(kind.product(x.numpy(), of_numpy), x, kept)
    assert copies == []


@each_kind
def test_it_is_demanded(kind: Kind, copies: list[int]) -> None:
    """A weight that may be written makes its copy in every call; so do the parts of one."""
    written, x = kind.weight(constant=False), torch.randn(7, 48)
    for _ in range(2):
        kind.close(kind.product(x, written, dense=True), x, written)
        kind.values(written).mul_(2)
    assert copies == [id(written)] * 2
    parts = tuple(getattr(written, name) for name in kind.parts)
    kind.close(kind.product(x, parts, dense=True), x, written)
    of_numpy = kind.prepared(tuple(one.numpy() for one in parts), columns=48)
    kind.close(kind.product(x.numpy(), of_numpy, dense=True), x, written)
    assert len(copies) == 4


@each_kind
@pytest.mark.parametrize("native", [True, False])
def test_repeated_calls_take_the_way_that_they_ask_for(native: bool, kind: Kind) -> None:
    """The dense product makes a row with an infinity NaN, the sparse one only where an element is stored."""
    before = repeat.again is getattr(repeat.native, "again", None)
    if native and not before:
        pytest.skip("the extension is not in use")
    repeat.use_native(native)
    try:
        one = kind.weight()
        stored = np.asarray(one.to_dense())[0] != 0
        x = torch.ones(7, 48)
        x[3, int(np.argmin(stored))] = torch.inf
        for dense in (None, True, False, True, None):
            y = kind.product(x, one, dense=dense)
            assert bool(y[3, 0].isnan()) == bool(dense)
            assert not y[2].isnan().any()
    finally:
        repeat.use_native(before)


def test_gradients_flow_through_the_dense_product() -> None:
    parts = KINDS[0].weight(constant=False)
    data = parts.data.clone().requires_grad_()
    x, bias = torch.randn(7, 48, requires_grad=True), torch.randn(32, requires_grad=True)
    found = []
    for dense in (True, False):
        given = (data, parts.indices, parts.indptr)
        y = tvm_sparse.bsr_matmul(x, given, bias=bias, activation="gelu", dense=dense)
        found.append(torch.autograd.grad(y.square().sum(), (x, data, bias)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_gradients_of_entries_flow_through_the_dense_product() -> None:
    """Also under autocast, which the product of entries does not follow."""
    parts, x = KINDS[1].weight(constant=False), torch.randn(7, 48, requires_grad=True)
    values = parts.values.clone().requires_grad_()
    found = []
    for dense in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            y = tvm_sparse.csr_linear(x, (parts.indptr, parts.indices, values), dense=dense)
        assert y.dtype == torch.float32
        found.append(torch.autograd.grad(y.square().sum(), (x, values)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@each_kind
@pytest.mark.parametrize("dense", [True, False])
def test_another_number_of_columns_is_refused_where_gradients_are_recorded(dense: bool, kind: Kind) -> None:
    with pytest.raises(ValueError, match=r"^x: expected 48 columns, as the weight has"):
        kind.product(torch.randn(7, 40, requires_grad=True), kind.weight(), dense=dense)


def test_rows_without_values_have_no_dense_copy() -> None:
    parts = KINDS[1].weight()
    with pytest.raises(ValueError, match="^values: "):
        tvm_sparse.CsrRows((parts.indptr, parts.indices, None), columns=48).to_dense()


def test_a_frozen_layer_keeps_one_copy(monkeypatch: pytest.MonkeyPatch, copies: list[int]) -> None:
    """In calls without a gradient, until its blocks are written as a parameter may be: in training, from a state dict,
    or by a conversion. `dense=False` refuses the copy."""
    monkeypatch.setattr(bsr_call, "way", lambda problem, machine: DENSE)
    parts, x = KINDS[0].weight(constant=False), torch.randn(7, 48)
    layer = tvm_sparse.nn.BsrLinear(parts)

    def right(made: int) -> None:
        copies.clear()
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(layer(x), x @ layer.dense().T)
        assert len(copies) == made

    right(0)
    assert layer.freeze() is layer and not layer.data.requires_grad
    right(1)
    right(0)
    layer.data.requires_grad_()
    assert layer(x).requires_grad
    with torch.no_grad():
        layer.data.mul_(2)
    right(0)
    layer.data.requires_grad_(False)
    right(1)
    layer.load_state_dict({**layer.state_dict(), "data": layer.data * 2})
    right(1)
    again = copy.deepcopy(layer)
    layer.freeze(dense=False)
    right(0)
    layer = again
    right(1)


def test_many_rows_are_multiplied_in_parts(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `tensor_core`, where the L2 cache does not hold x."""
    many = "bsr_matmul/m=8192,k=4096,n=4096,block=16,sparsity=0.95,dtype=bfloat16"
    few, narrow = many.replace("8192", "2048"), many.replace("k=4096", "k=1024")
    assert [rows_in_cache(parse(key), SM90) for key in (many, few, narrow)] == [2048, 2048, 8192]
    assert rows_in_cache(parse(many), machine.cpu()) == 8192
    assert bsr_call.at_once(parse(KEY), machine.cpu()) == 7  # another template
    monkeypatch.setattr(bsr_call, "at_once", lambda problem, where: 3)
    [kind] = [kind for kind in KINDS if kind.key == KEY]
    weight, x = kind.weight(), torch.randn(7, 48)
    want = tvm_sparse.bsr_matmul(x, weight, dense=True)
    for _ in range(2):
        torch.testing.assert_close(tvm_sparse.bsr_matmul(x, weight, dense=False), want)
        into = torch.full((7, 32), torch.nan)
        assert tvm_sparse.bsr_matmul(x, weight, activation="relu", out=into) is into
        torch.testing.assert_close(into, want.relu())


def test_which_way_is_likely() -> None:
    """More stored blocks, more rows of x and smaller blocks make the dense one likely; without evidence it is not."""

    def at(sparsity: float, m: int = 512, block: int = 32, dtype: str = "bfloat16", where: Any = SM90) -> str:
        key = f"bsr_matmul/m={m},k=4096,n=4096,block={block},sparsity={sparsity},dtype={dtype}"
        return bsr_call.likely_way(parse(key), where).way

    assert (at(0.0), at(0.98)) == (DENSE, KERNEL)
    assert (at(0.0, m=8), at(0.5, m=8)) == (DENSE, KERNEL)
    assert at(0.0, dtype="float32") == at(0.0, where=SM80) == at(0.0, where=machine.cpu()) == KERNEL
    for block in (16, 64):
        shares = [[at(share / 20, m, block) == DENSE for share in range(20)] for m in (16, 128, 512, 4096)]
        assert all(row == sorted(row, reverse=True) for row in shares)
    for m in (128, 512):  # blocks of 128 rows make fewer tiles than a GPU has multiprocessors
        dense = [[at(share / 20, m, rows) == DENSE for rows in (8, 16, 32, 64)] for share in range(20)]
        assert all(row == sorted(row, reverse=True) for row in dense)


def test_which_way_of_entries_is_likely() -> None:
    """Fewer zeros and more rows of x make the dense one likely; one row takes the kernel where few are stored."""

    def at(m: int, sparsity: float, dtype: str = "float16", where: Any = SM90) -> bool:
        key = f"csr_linear/m={m},k=4096,n=4096,sparsity={sparsity},dtype={dtype}"
        return csr_call.likely_way(parse(key), where).way == DENSE

    rows = (1, 2, 4, 8, 16, 32, 64, 512)
    found = [[at(m, share / 20) for m in rows] for share in range(20)]
    assert all(row == sorted(row) for row in found)
    assert all(list(one) == sorted(one, reverse=True) for one in zip(*found, strict=True))
    assert (at(8, 0.9), at(32, 0.9), at(1, 0.3)) == (False, True, True)
    assert not any((at(512, 0.5, "float32"), at(512, 0.5, where=SM80), at(512, 0.5, where=machine.cpu())))


def test_explain_says_which() -> None:
    found = tvm_sparse.explain("csr_linear/m=32,k=4096,n=4096,sparsity=0.9,dtype=float16", target="sm_90a")
    assert "dense copy" in (found.way or "") and "10% of the entries" in str(found)
    key = "bsr_matmul/m=512,k=4096,n=4096,block=16,sparsity=0.1,dtype=bfloat16"
    found = tvm_sparse.explain(key, target="sm_90a")
    assert "dense copy" in (found.way or "") and "90%" in str(found)
    assert "the kernel" in (tvm_sparse.explain(f"{key},bias=1", target="cpu").way or "")


def test_training_is_dense_where_that_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many rows and small blocks, or many of them; in 16 bits on Hopper; never where bits may not change."""

    def dense(m: int, side: int, density: float, dtype: str = "bfloat16", where: machine.Machine = SM90) -> bool:
        return trains_dense(m, 4096, 4096, (side, side), round(density * (4096 // side) ** 2), dtype, where)

    assert dense(8192, 16, 0.2) and dense(8192, 32, 0.8) and dense(8192, 64, 0.8)
    assert not dense(8192, 64, 0.2) and not dense(8192, 32, 0.2) and not dense(64, 16, 0.2)
    assert not dense(8192, 16, 0.2, "float32") and not dense(8192, 16, 0.2, where=SM80)
    monkeypatch.setattr(dispatch.dispatcher, "batch_invariant", True)
    assert not dense(8192, 16, 0.2)


@pytest.mark.gpu
def test_both_ways_of_training_agree_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16)
    layer = tvm_sparse.nn.BsrLinear.from_dense(linear, 16, 0.5, activation="gelu")
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    towards = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    found = []
    for way in (True, False):
        monkeypatch.setattr(tvm_sparse.nn.BsrLinear, "_trains_dense", lambda *_, way=way: way)
        layer.zero_grad()
        x.grad = None
        y = layer(x)
        y.backward(towards)
        found.append((y.detach(), x.grad, layer.data.grad, layer.bias.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))
