"""Problems drawn at random: what operators declare for studies of look-up."""

import random

import pytest
from cases import SM90, thorough

from tvm_sparse.core import distribution, registry, spaces
from tvm_sparse.core.problem import Problem, ProblemError

OPERATORS = tuple(operator.name for operator in registry.BUILTIN)


@pytest.mark.parametrize("name", OPERATORS)
def test_drawn_problems_are_within_the_bounds_and_as_calls_ask_for_them(name: str) -> None:
    kind, rng = registry.find(name).problem, random.Random(f"bounds/{name}")
    drawn = [distribution.problem(kind, rng) for _ in range(50)]
    assert len(set(drawn)) > 40
    for problem in drawn:
        assert registry.parse(problem.key) == problem == problem.as_called()
        assert distribution.array_bytes(problem) <= kind.most_drawn_bytes
        assert problem.cost().operations <= distribution.MOST_OPERATIONS
    batches = sorted(problem.batch_extent for problem in drawn)
    assert batches[0] * 8 < batches[-1]


@pytest.mark.parametrize("name", OPERATORS)
def test_any_two_problems_have_a_distance(name: str) -> None:
    """Look-up asks it of every record, whatever the problem; and a problem of what its record would be."""
    kind, rng = registry.find(name).problem, random.Random()
    drawn = [distribution.problem(kind, rng) for _ in range(40)]
    for problem in drawn:
        near = [problem.as_tuned(), *problem.as_shipped(), problem.with_batch(problem.batch_extent + 1)]
        for other in (*drawn, *near):
            found = problem.distance(other)
            assert found is None or found >= 0
        assert problem.distance(problem) == 0 and problem.distance(problem.as_tuned()) is not None


def test_what_is_drawn_follows_from_the_seed() -> None:
    for name in OPERATORS:
        kind = registry.find(name).problem
        one, again, other = (distribution.problem(kind, random.Random(seed)) for seed in (5, 5, 6))
        assert one == again != other


def test_every_dtype_and_extra_is_drawn() -> None:
    kind, rng = registry.find("softmax_topk").problem, random.Random(0)
    drawn = [distribution.problem(kind, rng).axes for _ in range(100)]
    assert {axes["dtype"] for axes in drawn} == {"float32", "float16", "bfloat16"}
    assert {axes["bias"] for axes in drawn} == {0, 1}
    assert any(axes["ids"] for axes in drawn)


def test_an_operator_without_a_distribution_says_so() -> None:
    class Other(Problem):
        operator = "other"

    with pytest.raises(ProblemError, match="other: declares no distribution"):
        distribution.problem(Other, random.Random(0))


@pytest.mark.drawn
@pytest.mark.parametrize("count", [3, thorough(30)])
@pytest.mark.parametrize("name", OPERATORS)
def test_defaults_of_drawn_problems_become_programs(name: str, count: int) -> None:
    """Every template that takes the problem builds its default; a program with misaligned vectors is refused."""
    kind, rng = registry.find(name).problem, random.Random()
    for _ in range(count):
        problem = distribution.problem(kind, rng)
        for template in spaces.applicable(problem, SM90)[0]:
            found = spaces.find(template, name)
            values = found.default(problem, SM90)
            try:
                assert found.build(problem, values).module
            except Exception as error:
                raise AssertionError(f"{problem.key}, {found.candidate(values)}: {error}") from error
