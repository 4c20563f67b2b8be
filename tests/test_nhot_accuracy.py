"""Sums, means and maxima of the N-hot lookup: rounded once, whatever dtype, length of a row and magnitude."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import calls_run

import tvm_sparse
from tvm_sparse.core.problem import FLOATS, numpy_dtype
from tvm_sparse.operators.nhot_lookup.problem import ROUNDING, SMALLEST
from tvm_sparse.runtime.dispatch import Dispatcher

torch = pytest.importorskip("torch")

ROWS, VOCAB, WIDTH = 6, 40, 33
SUM = f"nhot_lookup/rows={ROWS},vocab={VOCAB},width={WIDTH},nonzeros=5"
TURNED = f"nhot_lookup/rows={VOCAB},vocab={ROWS},width={WIDTH},nonzeros=1"
KEYS = tuple(
    f"{key},dtype={dtype},index=int64" + (f",weighted=1{'' if dtype == 'float32' else ',value=float32'}" * weighted)
    for key, dtype, weighted in itertools.product((SUM, TURNED), FLOATS, (0, 1))
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
numbers = itertools.count(int.from_bytes(os.urandom(4), "little"))


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run(KEYS, tmp_path_factory.mktemp("kernels")) as own:
        yield own


def check(found: Any, wanted: np.ndarray, sizes: np.ndarray, roundings: float, dtype: str) -> None:
    """Within one rounding to the dtype, and some of float32 of the sums of absolute products."""
    found = found.detach().float().cpu().numpy().astype(np.float64)
    with np.errstate(over="ignore"):
        fits = np.isfinite(wanted.astype(numpy_dtype(dtype)).astype(np.float32))
    bound = 1.01 * ROUNDING[dtype] * np.abs(wanted) + roundings * 2.0**-24 * sizes + 2 * SMALLEST[dtype]
    worst = (np.abs(found - wanted) - bound)[fits]
    assert (worst <= 0).all(), f"beyond the bound by {worst.max()}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_and_their_gradients_are_rounded_once(mode: str, dtype: str, device: str) -> None:
    """Of any magnitude that the dtype holds, and rows of up to 100,000 entries, forwards and backwards."""
    rng = np.random.default_rng(next(numbers))
    for magnitude, longest in ((1000.0, 100), (0.02, 70_000), (2.0 ** rng.uniform(-8, 12), int(rng.integers(1, 3000)))):
        counts = rng.integers(0, 4, ROWS)
        counts[rng.integers(ROWS)] = longest
        if mode == "sum" and dtype == "float16":
            counts = np.minimum(counts, max(1, int(20_000 / magnitude)))
        starts, indices = np.concatenate([[0], counts.cumsum()]), rng.integers(VOCAB, size=counts.sum())
        bag = tvm_sparse.nn.NHotEmbeddingBag(VOCAB, WIDTH, mode=mode, dtype=getattr(torch, dtype), device=device)
        with torch.no_grad():
            bag.weight.copy_(torch.from_numpy(magnitude * rng.uniform(0.5, 1, bag.weight.shape)))
        table = bag.weight.detach().double().cpu().numpy()
        shares = 1 / np.maximum(counts, 1) if mode == "mean" else np.ones(ROWS)
        matrix = np.zeros((ROWS, VOCAB))
        np.add.at(matrix, (np.repeat(np.arange(ROWS), counts), indices), np.repeat(shares, counts))
        given = torch.from_numpy(indices).to(device), torch.from_numpy(starts[:-1]).to(device)
        out = bag(*given)
        # On a GPU an entry's running sum is as long as a row's share of a thread.
        roundings = 70 if device == "cpu" else longest
        check(out, matrix @ table, matrix @ np.abs(table), roundings, dtype)
        grad = rng.uniform(0.001, 1, (ROWS, WIDTH))
        leaf = torch.from_numpy(grad).to(device, out.dtype)
        out.backward(leaf)
        grad = leaf.double().cpu().numpy()
        check(bag.weight.grad, matrix.T @ grad, matrix.T @ np.abs(grad), roundings, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_padding_is_as_good_as_absent(mode: str, dtype: str, device: str) -> None:
    """Whatever its row of the table holds, forwards and backwards, of the table and of values."""
    rng, kind = np.random.default_rng(next(numbers)), getattr(torch, dtype)
    counts, padding = rng.integers(0, 9, ROWS), int(rng.integers(VOCAB))
    counts[0], counts[1] = 500, 1
    starts, indices = np.concatenate([[0], counts.cumsum()]), rng.integers(VOCAB, size=counts.sum())
    indices[rng.random(len(indices)) < 0.2] = indices[500] = padding
    real = indices != padding
    table = torch.from_numpy(rng.standard_normal((VOCAB, WIDTH))).to(device, kind)
    table[padding] = torch.tensor([np.nan, np.inf, 1e4] * (WIDTH // 3))
    grad = torch.from_numpy(rng.standard_normal((ROWS, WIDTH))).to(device, kind)
    values = rng.standard_normal(len(indices), np.float32) if mode == "sum" else None

    def found(starts: Any, indices: Any, values: Any, padding: int | None) -> tuple[Any, ...]:
        leaf = table.clone().requires_grad_()
        csr = tuple(None if one is None else torch.from_numpy(one).to(device) for one in (starts, indices, values))
        if values is not None:
            csr[2].requires_grad_()
        out = tvm_sparse.nhot_lookup(csr, leaf, mode=mode, padding_idx=padding)
        out.backward(grad)
        return out.detach(), leaf.grad, None if values is None else csr[2].grad

    out, of_table, of_values = found(starts, indices, values, padding)
    fewer = np.concatenate([[0], np.cumsum(real)])[starts]
    other, table_of_others, values_of_others = found(
        fewer, indices[real], None if values is None else values[real], None
    )
    assert not of_table[padding].any() and not out[1].any()
    matrix = np.zeros((ROWS, VOCAB))
    np.add.at(matrix, (np.repeat(np.arange(ROWS), counts)[real], indices[real]), 1 if values is None else values[real])
    plain = table.nan_to_num(0, 0, 0).double().cpu().numpy()
    if mode == "max":
        assert torch.equal(out, other)
        torch.testing.assert_close(of_table, table_of_others, rtol=0, atol=0)
        chosen = [plain[row > 0].max(0) if row.any() else np.zeros(WIDTH) for row in matrix]
        np.testing.assert_array_equal(out.double().cpu().numpy(), chosen)
        return
    shares = np.maximum(matrix.sum(1), 1) if mode == "mean" else np.ones(ROWS)
    matrix /= shares[:, None]
    check(out, matrix @ plain, np.abs(matrix) @ np.abs(plain), 500, dtype)
    slope = grad.double().cpu().numpy()
    check(of_table, matrix.T @ slope, np.abs(matrix.T) @ np.abs(slope), 500, dtype)
    if values is not None:
        assert not of_values[~torch.from_numpy(real)].any()
        torch.testing.assert_close(of_values[torch.from_numpy(real)], values_of_others, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_maximum_has_the_gradient_at_its_first_entry(device: str) -> None:
    """Also where it is minus infinity, or NaN; an empty row has none."""
    table = torch.tensor([[1.0, -np.inf, 2.0], [1.0, -np.inf, np.nan], [0.0, -np.inf, 3.0]], device=device)
    table.requires_grad_()
    starts, indices = torch.tensor([0, 3, 3, 4], device=device), torch.tensor([2, 1, 0, 0], device=device)
    out = tvm_sparse.nhot_lookup((starts, indices, None), table, mode="max")
    wanted = torch.tensor([[1.0, -np.inf, np.nan], [0, 0, 0], [1, -np.inf, 2]], device=device)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
    out.backward(torch.tensor([[1.0, 2.0, 4.0], [8, 8, 8], [16, 32, 64]], device=device))
    assert table.grad.tolist() == [[16, 32, 64], [1, 0, 4], [0, 2, 0]]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_row_of_a_million_entries(weighted: bool) -> None:
    """A running sum of equal numbers is rounded the same way again and again: an error of 3e-5, or 2e-3."""
    rng = np.random.default_rng(next(numbers))
    n = 1_000_000
    for table in (np.full((VOCAB, WIDTH), 0.02, np.float32), rng.random((VOCAB, WIDTH), np.float32)):
        indices = rng.integers(VOCAB, size=n)
        values = rng.random(n, np.float32) if weighted else None
        found = tvm_sparse.nhot_lookup((np.array([0, n]), indices, values), table)
        wanted = np.bincount(indices, values, VOCAB)[None] @ table.astype(np.float64)
        np.testing.assert_allclose(found, wanted, rtol=66 * 2.0**-24)


def test_infinities_of_a_long_row_stay() -> None:
    table = np.ones((VOCAB, WIDTH), np.float32)
    table[:3, 0] = np.inf, -np.inf, np.nan
    table[:1, 1] = np.inf
    indices = np.resize(np.arange(VOCAB), 500)
    [found] = tvm_sparse.nhot_lookup((np.array([0, 500]), indices, None), table)
    assert np.isnan(found[0]) and found[1] == np.inf and (found[2:] == 500).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_of_float32_beside_a_table_of_16_bits(dtype: str, device: str) -> None:
    rng = np.random.default_rng(next(numbers))
    kind = getattr(torch, dtype)
    counts = rng.integers(0, 9, ROWS)
    starts, indices = np.concatenate([[0], counts.cumsum()]), rng.integers(VOCAB, size=counts.sum())
    table = torch.from_numpy(rng.standard_normal((VOCAB, WIDTH))).to(device, kind).requires_grad_()
    values = torch.from_numpy(rng.standard_normal(len(indices), np.float32)).to(device).requires_grad_()
    csr = torch.from_numpy(starts).to(device), torch.from_numpy(indices).to(device), values
    matrix = np.zeros((ROWS, VOCAB))
    np.add.at(matrix, (np.repeat(np.arange(ROWS), counts), indices), values.detach().double().cpu().numpy())
    for _ in range(2):
        out = tvm_sparse.nhot_lookup(csr, table)
        plain = table.detach().double().cpu().numpy()
        check(out, matrix @ plain, np.abs(matrix) @ np.abs(plain), 20, dtype)
        with torch.no_grad():
            assert torch.equal(tvm_sparse.nhot_lookup(csr, table), out)
    out.float().square().sum().backward()
    assert values.grad.dtype is torch.float32 and table.grad.dtype is kind
    grad = 2 * out.detach().float().double().cpu().numpy()
    grad = torch.from_numpy(grad).to(kind).double().numpy()
    check(table.grad, matrix.T @ grad, np.abs(matrix.T) @ np.abs(grad), 20, dtype)
    wanted = (grad[np.repeat(np.arange(ROWS), counts)] * plain[indices]).sum(1)
    np.testing.assert_allclose(values.grad.cpu().numpy(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_means_in_graphs(dtype: str) -> None:
    bag = tvm_sparse.nn.NHotEmbeddingBag(VOCAB, WIDTH, mode="mean", dtype=getattr(torch, dtype))
    given = torch.randint(VOCAB, (20,)), torch.tensor([0, 3, 3, 9, 12, 15])
    torch._dynamo.reset()
    compiled = torch.compile(bag, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(bag, given).module()
    with torch.no_grad():
        assert torch.equal(compiled(*given), bag(*given)) and torch.equal(exported(*given), bag(*given))
    compiled(*given).float().square().sum().backward()
    found, bag.weight.grad = bag.weight.grad.clone(), None
    bag(*given).float().square().sum().backward()
    assert torch.equal(found, bag.weight.grad)
    torch._dynamo.reset()
