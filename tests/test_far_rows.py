"""Rows of padding: elements of any finite size, equal or not, where references of exponentials round by more than 2^7.

Every CUDA template of an operator that takes exponentials of logits runs on them, thread by thread, at points of its
space that are drawn anew in every run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases import RUN_SEED as SEED
from cases import SM90, drawn, own_on_host, thorough
from test_templates import emulated

from tvm_sparse.core import spaces
from tvm_sparse.core.problem import Mismatch, Problem, numpy_dtype
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable, Template

pytestmark = pytest.mark.drawn

ROWS = 5
OPERATORS = ("softmax", "logsumexp", "softmax_topk", "softmax_sample")
# Of each operator: a few problems of every template, small enough for the emulator.
PROBLEMS = {
    "softmax": ("softmax/batch=5,vocab=1003", "softmax/batch=5,vocab=3000,dtype=bfloat16"),
    "logsumexp": ("logsumexp/batch=5,vocab=1003", "logsumexp/batch=5,vocab=9000,dtype=float16"),
    "softmax_topk": (
        "softmax_topk/batch=5,vocab=1003,k=3",
        "softmax_topk/batch=5,vocab=6001,k=20,dtype=bfloat16",
        "softmax_topk/batch=5,vocab=9001,k=70,ids=3",
        "softmax_topk/batch=5,vocab=2040,k=300,dtype=float16",
    ),
    "softmax_sample": (
        "softmax_sample/batch=5,vocab=1003,k=8,per_row=1",
        "softmax_sample/batch=5,vocab=6001,k=64,dtype=bfloat16,seeded=1",
        "softmax_sample/batch=5,vocab=3001,k=128,whole=1",
    ),
}


def far_logits(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Rows whose elements are all far from 0, or but for a few; each of another kind and size."""
    most = float(np.finfo(np.float32).max) if dtype != "float16" else 65504.0
    x = np.empty(shape, np.float32)
    for row in x:
        size = min(10.0 ** rng.uniform(3, 38.5), most)
        sign = rng.choice([-1.0, -1.0, 1.0])
        kind = rng.integers(6)
        row[:] = sign * size
        if kind == 1:  # of two sizes, neighbours or not
            row[rng.random(len(row)) < 0.5] = sign * size * rng.choice([0.5, 1 - 2.0**-7])
        elif kind == 2:  # a few that are not padding
            row[:] = -size
            row[rng.integers(len(row), size=3)] = rng.standard_normal(3) * rng.choice([1, 100])
        elif kind == 3:  # padding of two kinds, and a largest element that no sample is like to have
            row[:] = rng.choice([-size, -np.inf])
            row[rng.integers(len(row), size=20)] = -80 + rng.standard_normal(20)
        elif kind == 4:
            row[:] = sign * size * (1 + rng.random(len(row)) * 2.0 ** -rng.integers(0, 8))
        elif kind == 5:  # normal elements, shifted
            row[:] = rng.standard_normal(len(row)) + sign * min(size, 1e7)
    return np.clip(x, -most, most).astype(numpy_dtype(dtype))


def inputs_of(problem: Problem, seed: int) -> list[Any]:
    """Inputs as generated, but for the logits."""
    rng = np.random.default_rng(seed)
    inputs = problem.generate(seed, problem.tuned, problem.settings[seed % len(problem.settings)])
    inputs[0] = far_logits(rng, inputs[0].shape, problem.axes["dtype"])
    return inputs


def in_reach(output: np.ndarray) -> np.ndarray:
    """Logarithms of probabilities below -2e38 may be minus infinity, as products in powers of 2 overflow."""
    return output if output.dtype.kind == "i" else np.where(output < -2e38, -np.inf, output)


def cases() -> list[Any]:
    found = []
    for operator in OPERATORS:
        for template in spaces.templates(operator):
            if template.kind != "cuda":
                continue
            fitting = []
            for key in PROBLEMS[operator]:
                try:
                    template.space(parse(key), SM90)
                except NotApplicable:
                    continue
                fitting.append(key)
            # One of each in a plain run, another one every time.
            usual = SEED % len(fitting) if fitting else 0
            found += [
                pytest.param(template, key, id=f"{template.name}-{key}") if i == usual else thorough(template, key)
                for i, key in enumerate(fitting)
            ]
    return found


@pytest.mark.parametrize(("template", "key"), cases())
def test_far_rows(template: Template, key: str) -> None:
    problem = parse(key)
    assert problem.batch_extent == ROWS
    for number, candidate in enumerate(drawn(template, problem, SM90, 2, f"{SEED}")):
        program = template.build(problem, candidate.values)
        seed = SEED % 1000 + number
        inputs, outputs = inputs_of(problem, seed), problem.empty_outputs()
        emulated(program, seed)([*inputs, *outputs, *own_on_host(program, problem)])
        try:
            expected = [in_reach(output) for output in problem.reference(inputs)]
            problem.agree(inputs, expected, problem.tolerance(inputs, expected), [in_reach(one) for one in outputs])
        except Mismatch as error:
            rows = {i: np.unique(np.asarray(row, np.float64))[[0, -1]] for i, row in enumerate(inputs[0])}
            raise AssertionError(f"{candidate}, seed {SEED}: {error}; rows from and to {rows}") from error


def test_every_operator_with_exponentials_of_logits_is_here() -> None:
    """Those whose first input is called so, and that have GPU templates; but for edits, which add to single logits."""
    with_logits = {
        template.operator
        for template in spaces.templates()
        if template.kind == "cuda" and _first_input(template.operator) == "logits"
    }
    assert with_logits - {"edit_logits"} == set(OPERATORS)


def _first_input(operator: str) -> str:
    from tvm_sparse.core import registry

    return registry.find(operator).problem.inputs[0].name


def test_rows_are_drawn_far_and_near() -> None:
    rng = np.random.default_rng(SEED)
    rows = np.concatenate([far_logits(rng, (40, 64), "float32") for _ in range(5)])
    finite = np.abs(rows[np.isfinite(rows)])
    assert finite.max() > 1e30 and finite.min() < 1e3 and dataclasses.is_dataclass(parse(PROBLEMS["softmax"][0]))
