"""examples/row_argmax: an operator outside of the package, whose kernel is made of the phases of `schedules/rows`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import PARKED_BYTES, SM90, check_emulated, needs_cuda, run_emulated, use_dispatcher

from tvm_sparse.artifacts.compile import compile_candidate
from tvm_sparse.core import registry, spaces
from tvm_sparse.core.problem import Mismatch
from tvm_sparse.runtime.dispatch import Dispatcher

PLUGIN = Path(__file__).parent.parent / "examples" / "row_argmax"
NAME = "row_argmax_logsumexp"


@pytest.fixture(scope="module")
def operator() -> Iterator[Any]:
    """The operator, registered while this module's tests run: tests of all operators are not to meet it."""
    known = dict(registry.operators())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", lambda: known)
        patch.setattr(registry, "_PLUGINS", [])
        yield registry.add_plugin(PLUGIN)


def points(key: str) -> list[dict[str, int]]:
    """The default of a problem, and the first and last point of its space."""
    template, problem = spaces.find("argmax_block", NAME), registry.parse(key)
    found = [
        dict(one.decisions) for one in spaces.points(problem, SM90, {template.name: template.space(problem, SM90)})
    ]
    return [*{str(one): one for one in (dict(template.default(problem, SM90)), found[0], found[-1])}.values()]


@pytest.mark.parametrize(
    "axes",
    [
        "batch=3,vocab=1",
        "batch=5,vocab=61,dtype=float16",
        "batch=2,vocab=1030,dtype=bfloat16",
        "batch=4,vocab=4096",
        "batch=7,vocab=259",
    ],
)
def test_the_kernel_is_right_on_every_structure(operator: Any, axes: str) -> None:
    """Rows that begin anywhere in a vector, of ties, NaN and infinities; thread by thread on the CPU."""
    problem = registry.parse(f"{NAME}/{axes}")
    for point in points(problem.key):
        check_emulated(problem, spaces.find("argmax_block", NAME), point)


def test_the_first_of_equals_is_found_in_every_column(operator: Any) -> None:
    """Rows of zeros with two equal elements, one row a column: before the first vector, inside, and after the last."""
    problem = registry.parse(f"{NAME}/batch=61,vocab=61,dtype=float16")
    [default, *_] = points(problem.key)
    logits = np.zeros((61, 61), np.float16)
    logits[np.arange(61), np.arange(61)] = 3
    logits[np.arange(61), np.maximum(np.arange(61), 40)] = 3
    program = spaces.find("argmax_block", NAME).build(problem, default)
    _, indices = run_emulated(program, problem, [logits], [])
    assert np.array_equal(indices, np.arange(61))


def test_a_wrong_column_is_no_tie(operator: Any) -> None:
    problem = registry.parse(f"{NAME}/batch=1,vocab=4")
    inputs = [np.array([[1, 3, 3, 2]], np.float32)]
    expected = problem.reference(inputs)
    assert expected[1].tolist() == [1]
    with pytest.raises(Mismatch, match="indices"):
        problem.check(inputs, expected, [expected[0].astype(np.float32), np.array([2])])


@needs_cuda
def test_the_kernel_needs_no_local_memory(operator: Any, tmp_path: Path) -> None:
    problem = registry.parse(operator.shapes.REALISTIC[0])
    template = spaces.find("argmax_block", NAME)
    candidate = template.candidate(template.default(problem, SM90))
    built = compile_candidate(problem, candidate, SM90, tmp_path / "kernel.so")
    assert built.resources and built.resources["local_bytes"] <= PARKED_BYTES


def test_the_public_function_answers_on_a_cpu(operator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path / "cache")
    use_dispatcher(monkeypatch, own)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 61)).astype(np.float16)
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    logits[3, 50] = np.inf
    logits[4, [9, 30]] = 8
    called = operator.call.row_argmax_logsumexp
    values, indices = called(logits)
    assert indices.tolist() == [int(np.argmax(logits[0])), 7, 0, 50, 9]
    assert np.isnan(values[1]) and values[2] == -np.inf and values[3] == np.inf
    wide = logits[[0, 4]].astype(np.float64)
    assert np.allclose(values[[0, 4]], np.log(np.exp(wide).sum(axis=1)), rtol=1e-6)
    out = np.empty(5, np.float32), np.empty(5, np.int64)
    assert called(logits, out=out)[0] is out[0] and np.array_equal(out[1], indices)
    with pytest.raises(ValueError, match="rows and columns"):
        called(logits[:0])
