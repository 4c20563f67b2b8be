"""Problems told as calls: what commands make of `top_k=50` and `seed=array` is what a call with these runs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tvm_sparse
from tvm_sparse import softmax_sample
from tvm_sparse.core.problem import Problem, ProblemError
from tvm_sparse.core.registry import make, parse
from tvm_sparse.runtime import dispatch


@pytest.mark.parametrize("top_k", [None, 1, 50, 64, 129, 1024, 5000])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("seed", [None, 3, "array"])
def test_a_problem_told_as_a_call_is_the_one_that_the_call_runs(
    top_k: int | None, per_row: bool, seed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`explain`, `tune` and the others take the arguments of a call, and round them as the call does."""
    asked: list[Problem] = []

    def kernel(problem: Problem, machine: Any) -> Any:
        asked.append(problem)
        raise StopIteration

    monkeypatch.setattr(dispatch.dispatcher, "kernel", kernel)
    rows, vocab = 3, 2000
    logits = np.zeros((rows, vocab), np.float32)
    given: dict[str, Any] = {"top_k": top_k, "seed": np.zeros((rows, 2), np.int64) if seed == "array" else seed}
    words: dict[str, Any] = {"top_k": "none" if top_k is None else str(top_k), "seed": str(seed)}
    if per_row:
        given["temperature"], words["temperature"] = np.ones(rows, np.float32), "array"
    with pytest.raises(StopIteration):
        softmax_sample(logits, **given)
    told = make("softmax_sample", {"batch": rows, "vocab": vocab, **words})
    assert told.as_called() == asked[0]
    with_arrays = make("softmax_sample", {"batch": rows, "vocab": vocab, **given})
    assert with_arrays.as_called() == asked[0]


def test_an_array_top_k_and_its_bound_as_words() -> None:
    told = make("softmax_sample", {"batch": 8, "vocab": 32000, "top_k": "array", "max_top_k": "50"})
    assert told.as_called() == parse("softmax_sample/batch=8,vocab=32000,k=64,per_row=1,seeded=2,whole=1")
    for words, said in (
        ({"top_k": "many"}, "top_k must be a number, none or array, got 'many'"),
        ({"top_k": "5", "max_top_k": "9"}, "max_top_k: comes with an array top_k"),
        ({"top_k": "50", "k": "64"}, "k follow from top_k; give the axes or the arguments of a call"),
        ({"temprature": "array"}, "unknown axis 'temprature'; did you mean temperature"),
    ):
        with pytest.raises(ProblemError, match=re.escape(said)):
            make("softmax_sample", {"batch": 8, "vocab": 32000, **words})


def test_what_calls_never_ask_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = tvm_sparse.explain("softmax_sample", target="sm_90a", batch=8, vocab=32000, top_k=50)
    assert "k=64" in found.problem and found.asked is not None and "k=50" in found.asked
    assert str(found).startswith(f"calls of {found.asked} run {found.problem}\n")
    # Numbers that leave the whole row keep 128 words, whatever is said.
    whole = tvm_sparse.explain("softmax_sample/batch=8,vocab=32000,k=64,whole=1", target="sm_90a")
    assert "k=128" in whole.problem
    assert tvm_sparse.explain("softmax_sample/batch=8,vocab=32000,k=64", target="sm_90a").asked is None
