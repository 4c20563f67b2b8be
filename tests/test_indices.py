"""Arrays of indices: int32 and int64 in every mix, of every library, give what int32 gives; messages for all others."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import calls_run

import tvm_sparse
from tvm_sparse.runtime import arrays, calls
from tvm_sparse.runtime.dispatch import Dispatcher

torch = pytest.importorskip("torch")

KEYS = (
    "candidate_topk/lists=1,beam=4,vocab=60,hidden=16,m=5,k=2",
    "candidate_topk/lists=2,beam=2,vocab=60,hidden=16,m=5,k=2",
    "candidate_topk/lists=4,beam=1,vocab=60,hidden=16,m=5,k=2",
    "candidate_logits/lists=2,beam=2,vocab=60,hidden=16,m=5",
    *(f"nhot_lookup/rows=7,vocab=50,width=33,nonzeros=2,index={index}" for index in calls.INDEX),
    *(f"nhot_lookup/rows=50,vocab=7,width=33,nonzeros=1,index={index}" for index in calls.INDEX),
)
# Where arrays lie, and whose they are.
PLACES = ["numpy", "cpu", "dlpack", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = tuple(itertools.product(calls.INDEX, repeat=2))
numbers = itertools.count(int.from_bytes(os.urandom(4), "little"))


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run(KEYS, tmp_path_factory.mktemp("kernels")) as own:
        yield own


class Foreign:
    """An array of a library that is neither NumPy nor PyTorch, and has nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def there(array: np.ndarray, place: str) -> Any:
    if place == "numpy":
        return array
    return Foreign(array) if place == "dlpack" else torch.from_numpy(array).to(place)


def host(array: Any) -> np.ndarray:
    return array.cpu().numpy() if arrays.is_torch(array) else array


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", ["one", "lists", "rows"])
def test_candidates_and_counts_of_either_dtype(form: str, place: str) -> None:
    rng = np.random.default_rng(next(numbers))
    lists = {"one": 1, "lists": 2, "rows": 4}[form]
    dense = "numpy" if place == "dlpack" else place
    states, words = (there(rng.standard_normal(shape, np.float32), dense) for shape in ((4, 16), (60, 16)))
    chosen = np.stack([rng.permutation(60)[:5] for _ in range(lists)])
    many = rng.integers(2, 9, lists)
    for given in (chosen[0] if form == "one" else chosen, np.repeat(chosen, 2, axis=-1)[..., ::2]):
        if form == "one":
            given = given.reshape(-1)
        found = [
            tvm_sparse.candidate_topk(
                states,
                words,
                there(given.astype(dtype), place),
                2,
                counts=there(many.astype(of_counts), place),
                normaliser=True,
            )
            for dtype, of_counts in DTYPES
            for _ in range(2)  # the second call takes the short way
        ]
        for result in found[1:]:
            for have, want in zip(result, found[0], strict=True):
                np.testing.assert_array_equal(host(have), host(want))
    if form == "lists":
        logits = [tvm_sparse.candidate_logits(states, words, there(chosen.astype(d), place)) for d in calls.INDEX]
        np.testing.assert_array_equal(*map(host, logits))


def test_what_torch_topk_returns_are_candidates() -> None:
    states, words = torch.randn(4, 16), torch.randn(60, 16)
    drafted = torch.topk(states @ words.T, 5).indices
    values, indices = tvm_sparse.candidate_topk(states, words, drafted, 2)
    assert torch.equal(indices, drafted[:, :2])
    compiled = torch.compile(tvm_sparse.candidate_topk, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(states, words, drafted, 2)[1], indices)


@pytest.mark.parametrize("place", PLACES)
def test_row_starts_and_indices_in_every_mix_of_dtypes(place: str) -> None:
    rng = np.random.default_rng(next(numbers))
    dense = "numpy" if place == "dlpack" else place
    table = there(rng.standard_normal((50, 33), np.float32), dense)
    counts = rng.multinomial(13, [1 / 7] * 7)
    starts, columns = np.concatenate([[0], np.cumsum(counts)]), rng.integers(50, size=13)
    found = []
    for of_starts, dtype in DTYPES:
        csr = there(starts.astype(of_starts), place), there(columns.astype(dtype), place), None
        rows = tvm_sparse.CsrRows(csr, columns=50)
        assert rows.index == dtype
        found += [tvm_sparse.nhot_lookup(given, table) for given in (csr, csr, rows, rows)]
        if arrays.is_torch(table):
            leaf = table.clone().requires_grad_()
            tvm_sparse.nhot_lookup(csr, leaf).square().sum().backward()
            found.append(tvm_sparse.nhot_lookup(csr, table))
            wanted = torch.zeros_like(table).index_add_(
                0, csr[1].long(), 2 * found[0].repeat_interleave(there(counts, place), 0)
            )
            torch.testing.assert_close(leaf.grad, wanted, atol=1e-4, rtol=1e-4)
    for one in found[1:]:
        np.testing.assert_array_equal(host(one), host(found[0]))


def test_bags_take_offsets_and_indices_of_either_dtype() -> None:
    bag = tvm_sparse.nn.NHotEmbeddingBag(50, 33)
    offsets, indices = torch.tensor([0, 2, 2, 4, 5, 6, 9]), torch.randint(50, (13,))
    compiled = torch.compile(bag, backend="aot_eager", fullgraph=True)
    wanted = bag(indices, offsets)
    for of_offsets, dtype in DTYPES:
        given = indices.to(getattr(torch, dtype)), offsets.to(getattr(torch, of_offsets))
        assert torch.equal(bag(*given), wanted) and torch.equal(compiled(*given), wanted)
    torch._dynamo.reset()


def test_numbers_beyond_int32_stay_beyond_it() -> None:
    """A copy in int32 that wrapped around would make valid indices of invalid ones."""
    given = np.array([3, -1, 2**31, 2**32 + 1, -(2**32) + 7, 2**63 - 1])
    for place in ("numpy", "cpu", "dlpack"):
        array = there(given, place)
        found = calls.index_as("candidates", array, arrays.facts("candidates", array), "int32")
        assert host(found).tolist() == [3, -1, 2**31 - 1, 2**31 - 1, -(2**31), 2**31 - 1]
        assert arrays.facts("candidates", found).dtype == "int32"
    states, words = np.zeros((4, 16), np.float32), np.zeros((60, 16), np.float32)
    with pytest.raises(ValueError, match=r"candidates: expected words in \[0, 60\), got 4294967297 at \[0, 3\]"):
        tvm_sparse.candidate_topk(states, words, np.array([1, 2, 3, 2**32 + 1, 4]), 2)
    with pytest.raises(ValueError, match=r"indices\[1\]=4294967297 is outside \[0, 60\)"):
        tvm_sparse.nhot_lookup((np.array([0, 2], np.int32), np.array([1, 2**32 + 1]), None), words)


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint8", "bool"])
def test_other_dtypes_are_named(dtype: str) -> None:
    states, words = np.zeros((4, 16), np.float32), np.zeros((60, 16), np.float32)
    expected = "expected .*int32 or int64"
    given = np.ones(5, dtype)
    for call, name in (
        (lambda: tvm_sparse.candidate_topk(states, words, given, 2), "candidates"),
        (lambda: tvm_sparse.candidate_topk(states, words, np.arange(5), 2, counts=given[:1]), "counts"),
        (lambda: tvm_sparse.CsrRows((given, np.arange(5), None), columns=60), "indptr"),
        (lambda: tvm_sparse.CsrRows((np.arange(2), given, None), columns=60), "indices"),
        (lambda: tvm_sparse.nn.NHotEmbeddingBag(60, 4)(torch.from_numpy(given), torch.tensor([0])), "input"),
        (lambda: tvm_sparse.nn.NHotEmbeddingBag(60, 4)(torch.arange(5), torch.from_numpy(given)), "offsets"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"{name}: {expected}.*{dtype}"):
            call()


@pytest.mark.parametrize("shape", [(), (1, 1, 5), (0,), (2, 0), (3, 5), (0, 5)])
def test_other_shapes_of_candidates_are_named(shape: tuple[int, ...]) -> None:
    states, words = np.zeros((4, 16), np.float32), np.zeros((60, 16), np.float32)
    with pytest.raises(ValueError, match=r"candidates: expected .*got ") as caught:
        tvm_sparse.candidate_topk(states, words, np.zeros(shape, np.int64), 2)
    assert str(shape) in str(caught.value)
