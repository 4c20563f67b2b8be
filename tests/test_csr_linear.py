"""`csr_linear`: linear layers with unstructured sparse weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from cases import SM90, calls_run, check_emulated, thorough

import tvm_sparse
from tvm_sparse.core import spaces
from tvm_sparse.core.registry import parse
from tvm_sparse.runtime.dispatch import Dispatcher

KEY = "csr_linear/m=7,k=50,n=33,sparsity=0.9"


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run([KEY, f"{KEY},index=int64"], tmp_path_factory.mktemp("kernels")) as own:
        yield own


# Columns of x in shared memory: of 2, 4, 8, 16 and 32 bytes, and none.
POINTS: tuple[tuple[str, dict[str, int]], ...] = (
    ("m=3,k=300,n=40,sparsity=0.5,dtype=bfloat16", {"threads": 128, "rows": 4, "tile_m": 1, "loads": 4, "staged": 1}),
    ("m=3,k=130,n=40,sparsity=0.5,dtype=float16", {"threads": 128, "rows": 8, "tile_m": 4, "loads": 1, "staged": 1}),
    ("m=9,k=67,n=37,sparsity=0.7,index=int64", {"threads": 128, "rows": 16, "tile_m": 8, "loads": 2, "staged": 1}),
    ("m=3,k=130,n=40,sparsity=0.5,dtype=bfloat16", {"threads": 128, "rows": 8, "tile_m": 2, "loads": 1, "staged": 0}),
)
OTHERS: tuple[tuple[str, dict[str, int]], ...] = (
    ("m=3,k=130,n=40,sparsity=0.5", {"threads": 256, "rows": 8, "tile_m": 1, "loads": 2, "staged": 1}),
    ("m=17,k=130,n=140,sparsity=0.9,dtype=float16", {"threads": 128, "rows": 4, "tile_m": 16, "loads": 2, "staged": 1}),
)


@pytest.mark.parametrize(("axes", "point"), [*POINTS, *(thorough(*other) for other in OTHERS)])
def test_points_equal_the_reference(axes: str, point: dict[str, int]) -> None:
    """Also with columns in any order, repeated entries, empty rows, NaN and infinities."""
    problem, template = parse(f"csr_linear/{axes}"), spaces.find("warp_entries")
    assert template.point(problem, SM90, point) is None
    check_emulated(problem, template, point)


REFUSED = {
    "are not shared evenly": {"threads": 1024, "rows": 8},
    "sums exceed": {"rows": 256, "tile_m": 16},
    "exceed a multiprocessor's shared memory": {"tile_m": 16, "staged": 1},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_point_says_why(reason: str) -> None:
    problem, template = parse("csr_linear/m=64,k=16384,n=4096,sparsity=0.9"), spaces.find("warp_entries")
    base = {"threads": 128, "rows": 4, "tile_m": 1, "loads": 1, "staged": 0}
    assert reason in (template.allowed(problem, SM90, base | REFUSED[reason]) or "")


def test_the_default_has_few_thread_blocks_with_many_rows_each() -> None:
    def default(axes: str) -> dict[str, int]:
        return dict(spaces.find("warp_entries").default(parse(f"csr_linear/{axes},sparsity=0.9"), SM90))

    eight = default("m=8,k=4096,n=4096,dtype=float16")
    assert eight["tile_m"] == 8 and eight["rows"] == 32 and eight["threads"] == 1024
    assert default("m=1,k=4096,n=4096,dtype=float16")["tile_m"] == 1
    assert default("m=8,k=4096,n=300,dtype=float16")["rows"] <= 16
    assert default("m=500,k=4096,n=4096,dtype=float16")["tile_m"] == 8  # a column of them is one load
    assert default("m=500,k=4096,n=4096")["tile_m"] == 4
    assert default("m=8,k=200000,n=100")["staged"] == 0


WRONG: dict[str, tuple[Callable[[Any, Any], Any], type[Exception]]] = {
    "^x: expected 50 columns, as the weight has": (lambda x, w: tvm_sparse.csr_linear(x[:, :49], w), ValueError),
    "^weight: expected values of float16, as x is, got float32": (
        lambda x, w: tvm_sparse.csr_linear(x.astype(np.float16), w), ValueError,
    ),
    "^weight: expected values of float32, as x is, got none": (
        lambda x, w: tvm_sparse.csr_linear(x, (w.indptr, w.indices, None)), ValueError,
    ),
    "^weight: expected a CsrRows, .* got str": (lambda x, w: tvm_sparse.csr_linear(x, "weight"), TypeError),
    "outside": (lambda x, w: tvm_sparse.csr_linear(x, (w.indptr, w.indices + 49, w.values)), ValueError),
    r"^out: expected shape \(7, 33\)": (lambda x, w: tvm_sparse.csr_linear(x, w, out=x), ValueError),
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG)
def test_wrong_calls_are_named(said: str) -> None:
    x, indptr, indices, values = parse(KEY).generate(0)
    weight = tvm_sparse.CsrRows((indptr, indices, values), columns=50)
    call, error = WRONG[said]
    with pytest.raises(error, match=said):
        call(x, weight)


def test_an_empty_weight_and_no_rows() -> None:
    x, weight = np.ones((7, 50), np.float32), scipy.sparse.csr_array((33, 50), dtype=np.float32)
    assert not tvm_sparse.csr_linear(x, weight).any()
    assert tvm_sparse.csr_linear(x[:0], weight).shape == (0, 33)
    assert tvm_sparse.csr_linear(x[0], weight).shape == (33,)


def test_sparse_rows_serve_a_layer_and_look_ups() -> None:
    """Their launchers are kept apart."""
    problem = parse(KEY)
    x, *parts = problem.generate(1)
    rows, table = tvm_sparse.CsrRows(tuple(parts), columns=50), np.ascontiguousarray(x.T)
    dense = scipy.sparse.csr_array((parts[2], parts[1], parts[0]), shape=(33, 50)).toarray()
    for _ in range(2):
        np.testing.assert_allclose(tvm_sparse.csr_linear(x, rows), x @ dense.T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(tvm_sparse.nhot_lookup(rows, table), dense @ table, rtol=1e-5, atol=1e-5)
