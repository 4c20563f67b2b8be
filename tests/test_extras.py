"""Temperature, bias and given ids of softmax_topk, as its callers have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tvm_sparse
from tvm_sparse.core.registry import parse
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

BATCH, VOCAB, K, N = 5, 61, 4, 3
RNG = np.random.default_rng(11)
LOGITS = RNG.standard_normal((BATCH, VOCAB)).astype(np.float32)
BIAS = np.where(RNG.random(VOCAB) < 0.3, -np.inf, RNG.standard_normal(VOCAB)).astype(np.float32)
IDS = np.array([[0, 60, -1], [3, 3, 61], [5, 6, 7], [59, 58, 57], [2**40, 1, 2]])


def expected(log: bool, temperature: float = 1.0, bias: Any = None, ids: Any = None) -> tuple[SoftmaxTopk, list, list]:
    problem = SoftmaxTopk(BATCH, VOCAB, K, "float32", int(bias is not None), 0 if ids is None else ids.shape[1])
    inputs = [LOGITS, 1.0 / temperature, int(log), *(a for a in (bias, ids) if a is not None)]
    return problem, inputs, problem.reference(inputs)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "extras",
    [
        {"temperature": 0.7},
        {"temperature": 3, "bias": BIAS},
        {"ids": IDS},
        {"temperature": 0.25, "bias": BIAS, "ids": IDS},
    ],
    ids=lambda extras: " ".join(extras),
)
def test_extras_agree_with_the_reference(extras: dict[str, Any], log: bool) -> None:
    problem, inputs, wanted = expected(log, **extras)
    outputs = tvm_sparse.softmax_topk(LOGITS, K, log=log, **extras)
    problem.check(inputs, wanted, outputs)
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for name, a in extras.items()}
    logits = torch.from_numpy(LOGITS)
    out = tuple(torch.full_like(torch.from_numpy(a), -1) for a in outputs)
    for number in range(3):  # the second call takes the short way
        given = {"out": out} if number == 2 else {}
        results = tvm_sparse.softmax_topk(logits, K, log=log, **tensors, **given)
        assert len(results) == 2 + ("ids" in extras)
        problem.check(inputs, wanted, [a.numpy() for a in results])


def test_ids_of_no_column_and_of_no_row() -> None:
    values, indices, given = tvm_sparse.softmax_topk(LOGITS, K, ids=np.zeros((BATCH, 0), np.int64))
    assert given.shape == (BATCH, 0) and values.shape == indices.shape == (BATCH, K)
    assert tvm_sparse.softmax_topk(LOGITS[:0], K, ids=IDS[:0])[2].shape == (0, N)


def test_a_key_names_extras_only_where_there_are_any() -> None:
    assert SoftmaxTopk(1, 8, 2).key == "softmax_topk/batch=1,vocab=8,k=2,dtype=float32"
    key = "softmax_topk/batch=1,vocab=8,k=2,dtype=float32,bias=1,ids=3"
    assert parse(key).key == key and [a.name for a in parse(key).kernel_outputs] == ["values", "indices", "given"]


@pytest.mark.parametrize(
    ("extras", "error", "message"),
    [
        ({"temperature": 0}, ValueError, "temperature: expected a finite number above 0, .*got 0"),
        ({"temperature": -1.0}, ValueError, "temperature: expected a finite number above 0, .*got -1.0"),
        ({"temperature": float("inf")}, ValueError, "temperature: expected a finite number above 0, .*got inf"),
        ({"temperature": float("nan")}, ValueError, "temperature: expected a finite number above 0, .*got nan"),
        (
            {"temperature": np.ones(2)},
            ValueError,
            r"temperature: expected shape \(5,\) and dtype float32, got \(2,\) and",
        ),
        ({"temperature": "hot"}, TypeError, "temperature: expected one number, for all rows, got str"),
        ({"bias": BIAS[:-1]}, ValueError, r"bias: expected shape \(61,\) and dtype float32, got \(60,\)"),
        ({"bias": BIAS.astype(np.float64)}, ValueError, "bias: expected shape .* dtype float32, got .* float64"),
        ({"bias": BIAS[None]}, ValueError, r"bias: expected shape \(61,\)"),
        ({"bias": [0.0] * VOCAB}, TypeError, "bias: expected a torch tensor, a NumPy array"),
        ({"ids": IDS[:-1]}, ValueError, r"ids: expected shape \(5, n\) and dtype int64 or int32, got \(4, 3\)"),
        ({"ids": IDS.astype(np.int16)}, ValueError, "ids: expected shape .* dtype int64 or int32, got .* int16"),
        ({"ids": IDS[0]}, ValueError, r"ids: expected shape \(5, n\)"),
        ({"ids": IDS, "out": (1, 2)}, ValueError, "out: expected 3 arrays"),
    ],
)
def test_extras_that_are_wrong(extras: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tvm_sparse.softmax_topk(LOGITS, K, **extras)
