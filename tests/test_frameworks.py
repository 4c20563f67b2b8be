"""Arrays of JAX and CuPy, through DLPack."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

import tvm_sparse
from tvm_sparse.core.registry import parse
from tvm_sparse.runtime import arrays

TOPK = "softmax_topk/batch=5,vocab=61,k=4,dtype={}"
LOOKUP = "nhot_lookup/rows=7,vocab=50,width=33,nonzeros=5,weighted=1,dtype=bfloat16"
BLOCKS = "bsr_matmul/m=7,k=24,n=20,block=4,sparsity=0.5"


@pytest.fixture(scope="module")
def jax() -> Any:
    jax = pytest.importorskip("jax", reason="JAX is not installed (pip install jax)")
    if jax.default_backend() != "cpu":
        pytest.skip("JAX has arrays on an accelerator here")
    return jax


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays_go_in_and_come_back(jax: Any, dtype: str) -> None:
    problem = parse(TOPK.format(dtype))
    inputs = problem.generate(3)
    outputs = tvm_sparse.softmax_topk(jax.numpy.asarray(inputs[0]), 4)
    assert all(isinstance(one, jax.Array) for one in outputs)
    # JAX makes int32 of int64 unless jax_enable_x64 is set.
    problem.check(inputs, problem.reference(inputs), [np.asarray(outputs[0]), np.asarray(outputs[1]).astype(np.int64)])


def test_a_product_and_a_lookup_of_jax_arrays(jax: Any) -> None:
    blocks, lookup = parse(BLOCKS), parse(LOOKUP)
    x, *weight = inputs = blocks.generate(4)[:4]
    weight = tvm_sparse.BsrWeight(tuple(map(jax.numpy.asarray, weight)), columns=24)
    y = tvm_sparse.bsr_matmul(jax.numpy.asarray(x), weight)
    blocks.check(inputs, blocks.reference(inputs), [np.asarray(y)])
    entries = lookup.generate(5)
    *rows, table = map(jax.numpy.asarray, entries)
    summed = tvm_sparse.nhot_lookup(tuple(rows), table)
    assert isinstance(summed, jax.Array) and summed.dtype == jax.numpy.bfloat16
    lookup.check(entries, lookup.reference(entries), [np.asarray(summed)])


def test_what_jax_cannot_do_is_said(jax: Any) -> None:
    x = jax.numpy.ones((5, 61))
    for transformed in (jax.jit(tvm_sparse.softmax), jax.vmap(tvm_sparse.softmax), jax.grad(tvm_sparse.logsumexp)):
        with pytest.raises(TypeError, match="logits: got a tracer of JAX, .*jax.pure_callback"):
            transformed(x)
    with pytest.raises(TypeError, match="out: arrays of JAX are immutable"):
        tvm_sparse.softmax(x, out=jax.numpy.zeros_like(x))

    def softmax(logits: Any) -> Any:
        shape = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        return jax.pure_callback(lambda a: np.asarray(tvm_sparse.softmax(np.array(a))), shape, logits)

    np.testing.assert_allclose(jax.jit(softmax)(x), 1 / 61, rtol=1e-6)


def test_outputs_beside_cupy_arrays_are_made_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: CuPy itself needs a GPU."""
    entered = []

    class Device:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *_: object) -> None:
            entered.append("out")

    class Array(np.ndarray):
        device = Device()

    cupy = types.SimpleNamespace(ndarray=Array, empty=lambda shape, dtype: (entered.append("made"), shape, dtype)[1:])
    monkeypatch.setitem(arrays.sys.modules, "cupy", cupy)
    monkeypatch.setattr(arrays, "is_numpy", lambda array: False)
    known = arrays.Facts((2,), "float32", "cuda", 0, True, True)
    made = arrays.empty((2, 3), "bfloat16", np.zeros(2).view(Array), known)
    assert entered == ["in", "made", "out"] and made[0] == (2, 3) and made[1].name == "bfloat16"
