"""The product with a dense copy of a block-sparse weight: when it is taken, and that its copy is the weight's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import SM80, SM90, calls_run

torch = pytest.importorskip("torch")

import tvm_sparse.nn  # noqa: E402
from tvm_sparse.core import machine  # noqa: E402
from tvm_sparse.core.registry import parse  # noqa: E402
from tvm_sparse.operators.bsr_matmul import call  # noqa: E402
from tvm_sparse.operators.bsr_matmul.dense import DENSE, KERNEL, likely_way  # noqa: E402
from tvm_sparse.runtime import repeat  # noqa: E402
from tvm_sparse.runtime.dispatch import Dispatcher  # noqa: E402

KEY = "bsr_matmul/m=7,k=48,n=32,block=16x8,sparsity=0.5"


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run((KEY, f"{KEY},bias=1,activation=gelu"), tmp_path_factory.mktemp("kernels")) as own:
        yield own


def weight(constant: bool = True, seed: int = 0) -> tvm_sparse.BsrWeight:
    x, data, indices, indptr, *_ = parse(KEY).generate(seed)
    parts = (torch.from_numpy(data), torch.from_numpy(indices), torch.from_numpy(indptr))
    return tvm_sparse.BsrWeight(parts, columns=48, constant=constant)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the weights that have become dense."""
    made: list[int] = []
    to_dense = tvm_sparse.BsrWeight.to_dense

    def noting(self: Any) -> Any:
        made.append(id(self))
        return to_dense(self)

    monkeypatch.setattr(tvm_sparse.BsrWeight, "to_dense", noting)
    return made


def close(y: Any, x: Any, of: tvm_sparse.BsrWeight) -> None:
    data, indices, indptr = (np.asarray(one) for one in (of.data, of.indices, of.indptr))
    problem = parse(f"{KEY[:11]}m={len(x)},k=48,n=32,block=16x8,sparsity=0.5")
    inputs = [np.asarray(x), data, indices, indptr, None, -1, 0]
    problem.check(inputs, problem.reference(inputs), [np.asarray(y)])


def test_a_constant_weight_keeps_one_copy(monkeypatch: pytest.MonkeyPatch, copies: list[int]) -> None:
    """Where a dense product is likely to be faster, also in repeated calls, of other rows, and beside another weight of
    the same shape."""
    monkeypatch.setattr(call, "way", lambda problem, machine: DENSE)
    first, other = weight(), weight(seed=1)
    for rows in (7, 7, 9, 7):
        for one in (first, other):
            x = torch.randn(rows, 48)
            close(tvm_sparse.bsr_matmul(x, one), x, one)
    assert copies == [id(first), id(other)]


def test_it_is_refused(monkeypatch: pytest.MonkeyPatch, copies: list[int]) -> None:
    """By `dense=False`, by a weight that may be written, and of arrays of other libraries; also after one."""
    monkeypatch.setattr(call, "way", lambda problem, machine: DENSE)
    kept, written, x = weight(), weight(constant=False), torch.randn(7, 48)
    of_numpy = tvm_sparse.BsrWeight(
        tuple(one.numpy() for one in (kept.data, kept.indices, kept.indptr)), columns=48, constant=True
    )
    tvm_sparse.bsr_matmul(x, kept)
    copies.clear()
    for _ in range(2):
        close(tvm_sparse.bsr_matmul(x, kept, dense=False), x, kept)
        close(tvm_sparse.bsr_matmul(x, written), x, written)
        close(tvm_sparse.bsr_matmul(x.numpy(), of_numpy), x, kept)
    assert copies == []


def test_it_is_demanded(copies: list[int]) -> None:
    """A weight that may be written makes its copy in every call."""
    written, x = weight(constant=False), torch.randn(7, 48)
    for _ in range(2):
        close(tvm_sparse.bsr_matmul(x, written, dense=True), x, written)
        written.data.mul_(2)
    assert copies == [id(written)] * 2
    parts = tuple(one.numpy() for one in (written.data, written.indices, written.indptr))
    close(tvm_sparse.bsr_matmul(x.numpy(), tvm_sparse.BsrWeight(parts, columns=48), dense=True), x, written)


@pytest.mark.parametrize("native", [True, False])
def test_repeated_calls_take_the_way_that_they_ask_for(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense product makes a row with an infinity NaN, the block-sparse one only where a block is."""
    before = repeat.again is getattr(repeat.native, "again", None)
    if native and not before:
        pytest.skip("the extension is not in use")
    repeat.use_native(native)
    try:
        one = weight()
        empty = next(c for c in range(6) if not (one.indices[: one.indptr[1]] == c).any())
        x = torch.ones(7, 48)
        x[3, empty * 8] = torch.inf
        for dense in (None, True, False, True, None):
            y = tvm_sparse.bsr_matmul(x, one, dense=dense)
            assert bool(y[3, :16].isnan().all()) == bool(dense)
            assert not y[2].isnan().any()
    finally:
        repeat.use_native(before)


def test_gradients_flow_through_the_dense_product() -> None:
    parts = weight(constant=False)
    data = parts.data.clone().requires_grad_()
    x, bias = torch.randn(7, 48, requires_grad=True), torch.randn(32, requires_grad=True)
    found = []
    for dense in (True, False):
        given = (data, parts.indices, parts.indptr)
        y = tvm_sparse.bsr_matmul(x, given, bias=bias, activation="gelu", dense=dense)
        found.append(torch.autograd.grad(y.square().sum(), (x, data, bias)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_frozen_layer_keeps_one_copy(monkeypatch: pytest.MonkeyPatch, copies: list[int]) -> None:
    """In calls without a gradient, until its blocks are written as a parameter may be: in training, from a state dict,
    or by a conversion. `dense=False` refuses the copy."""
    monkeypatch.setattr(call, "way", lambda problem, machine: DENSE)
    parts, x = weight(constant=False), torch.randn(7, 48)
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


def test_which_way_is_likely() -> None:
    """More stored blocks, more rows of x and smaller blocks make the dense one likely; without evidence it is not."""

    def at(sparsity: float, m: int = 512, block: int = 32, dtype: str = "bfloat16", where: Any = SM90) -> str:
        key = f"bsr_matmul/m={m},k=4096,n=4096,block={block},sparsity={sparsity},dtype={dtype}"
        return likely_way(parse(key), where).way

    assert (at(0.0), at(0.98)) == (DENSE, KERNEL)
    assert at(0.0, m=8) == KERNEL
    assert at(0.0, dtype="float32") == at(0.0, where=SM80) == at(0.0, where=machine.cpu()) == KERNEL
    for block in (16, 64):
        shares = [[at(share / 20, m, block) == DENSE for share in range(20)] for m in (16, 128, 512, 4096)]
        assert all(row == sorted(row, reverse=True) for row in shares)
    for m in (128, 512):
        dense = [[at(share / 20, m, rows) == DENSE for rows in (8, 16, 32, 64, 128)] for share in range(20)]
        assert all(row == sorted(row, reverse=True) for row in dense)


def test_explain_says_which() -> None:
    key = "bsr_matmul/m=512,k=4096,n=4096,block=16,sparsity=0.1,dtype=bfloat16"
    found = tvm_sparse.explain(key, target="sm_90a")
    assert "dense copy" in (found.way or "") and "90%" in str(found)
    assert "the kernel" in (tvm_sparse.explain(f"{key},bias=1", target="cpu").way or "")
