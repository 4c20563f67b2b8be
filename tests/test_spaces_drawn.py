"""Spaces of drawn problems, on GPUs of several kinds: what applies has a default, and something always applies."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
from cases import RUN_SEED as SEED

from tvm_sparse.core import distribution, machine, registry, spaces
from tvm_sparse.core.problem import Problem, ProblemError
from tvm_sparse.core.template import NotApplicable

OPERATORS = tuple(operator.name for operator in registry.BUILTIN)
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
EACH = 6


def stretched(problem: Problem, rng: random.Random) -> Problem | None:
    """A problem with one extent but the batch up to 2^31 - 2, half of them with a batch of 1; None if the operator
    has no such, or its arrays would be too large.
    """
    extents = [name for name, value in problem.axes.items() if isinstance(value, int) and name != problem.batch_axis]
    if not extents:
        return None
    name, batch = rng.choice(extents), rng.choice((1, int(2 ** rng.uniform(1, 12))))
    try:
        return dataclasses.replace(problem.with_batch(batch), **{name: int(2 ** rng.uniform(16, 31)) - 2}).as_called()
    except (ProblemError, ValueError):
        return None


def problems(name: str) -> Iterator[Problem]:
    kind, rng = registry.find(name).problem, random.Random(f"{SEED}/{name}")
    for _ in range(EACH):
        problem = distribution.problem(kind, rng)
        yield problem
        for _ in range(2):
            if (larger := stretched(problem, rng)) is not None:
                yield larger


@pytest.mark.parametrize("name", OPERATORS)
def test_every_space_that_applies_has_a_default(name: str) -> None:
    for problem in problems(name):
        for arch in ARCHES:
            where, said = machine.resolve(arch), f"seed {SEED}: {problem} on {arch}"
            assert spaces.fallback(problem, where) is not None, said
            for template in spaces.templates(name):
                if template.kind != "cuda":
                    continue
                try:
                    template.space(problem, where)
                except NotApplicable:
                    continue
                try:
                    reason = template.point(problem, where, template.default(problem, where))
                except Exception as error:
                    raise AssertionError(f"{said}: {template.name}: {error!r}") from error
                assert reason is None, f"{said}: {template.name}: {reason}"


@pytest.mark.parametrize("axes", ["batch=64,vocab=1000000,hidden=128,k=20", "batch=17,vocab=2000000,hidden=64,k=5"])
def test_a_head_of_a_million_words_has_a_kernel_at_every_batch(axes: str) -> None:
    for arch in ARCHES:
        assert spaces.fallback(registry.parse(f"head_topk/{axes},dtype=bfloat16"), machine.resolve(arch)) is not None


def test_a_row_of_five_million_words_has_a_kernel() -> None:
    """Survivors of its tiles are more than shared memory of one thread block holds."""
    problem = registry.parse("softmax_topk/batch=1,vocab=5000000,k=10")
    for arch in ARCHES:
        where = machine.resolve(arch)
        candidate = spaces.fallback(problem, where)
        assert spaces.refusal(candidate, problem, where) is None and candidate.template != "threshold_gate"
