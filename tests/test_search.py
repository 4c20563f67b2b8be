"""The search: small spaces whole, large ones with a model that learns, and nothing measured twice."""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import SM90, thorough

from tvm_sparse.cli.tune import plan_table
from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.registry import parse
from tvm_sparse.core.spaces import points
from tvm_sparse.records import Log
from tvm_sparse.tuning import ask_tell, strategies
from tvm_sparse.tuning.domain import Domain
from tvm_sparse.tuning.plans import make_plan
from tvm_sparse.tuning.strategies import Strategy

LARGE = parse("bsr_matmul/m=64,k=4096,n=4096,block=32,sparsity=0.9")
SMALL = parse("softmax_topk/batch=10,vocab=25000,k=5")
BATCH = 16


@functools.cache
def tables(problem):
    """The templates that fit; of block-sparse products those that have a time here."""
    found = spaces.applicable(problem, SM90)[0]
    return {name: table for name, table in found.items() if problem.operator != "bsr_matmul" or name in BASE}


@functools.cache
def space(problem) -> tuple[Candidate, ...]:
    return tuple(points(problem, SM90, tables(problem)))


BASE = {"per_element": 40, "per_tile": 20, "warp_shuffle": 10, "cross_thread": 12}
IDEAL = {"reduce_threads": 16, "rows": 8, "tile_m": 4, "tile_n": 2, "vec": 4, "threads": 128}


def separable(candidate: Candidate) -> float:
    """A time that each decision lengthens by itself, from 10 us at (warp_shuffle, IDEAL)."""
    factors = (1 + 0.35 * abs(math.log2(value / IDEAL[name])) for name, value in candidate.decisions)
    return BASE[candidate.template] * math.prod(factors) * 1e-6


def run(
    search: Strategy,
    trials: int,
    cost: Callable[[Candidate], float | None],
    known: Mapping[Candidate, float | None] = {},
    ahead: bool = False,
) -> dict[Candidate, float | None]:
    """What a tuning run does with a search; checks every batch. Fewer than `trials` if the search has no more.

    `ahead`: as on a GPU, each batch is proposed before the one before it is reported.
    """
    measured: dict[Candidate, float | None] = {}
    waiting: dict[Candidate, float | None] = {}
    while len(measured) < trials and (batch := search.propose()[: trials - len(measured)]):
        assert len(set(batch)) == len(batch)
        assert not set(batch) & (set(measured) | set(known))
        results = {candidate: cost(candidate) for candidate in batch}
        measured.update(results)
        search.report(waiting if ahead else results)
        waiting = results
    return measured


def start(
    problem,
    trials: int,
    *,
    known: Mapping[Candidate, float | None] = {},
    seed: int = 0,
    batch: int = BATCH,
    strategy: str = "evolutionary",
) -> Strategy:
    domain = Domain.of(problem, SM90, tables(problem))
    return strategies.make(strategy, domain, known=known, trials=trials, batch=batch, seed=seed)


@pytest.mark.parametrize("known", [0, thorough(1), 7])
def test_a_budget_that_covers_the_space_covers_it_exactly_once(known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_sparse.tuning.search._MetaSchedule", None)  # not needed, so never made
    paid = dict.fromkeys(space(SMALL)[:known], 1e-5)
    rest = len(space(SMALL)) - known
    search = start(SMALL, rest, known=paid)
    measured = run(search, rest + 1, lambda c: 1e-5, paid)
    assert set(measured) | set(paid) == set(space(SMALL))
    assert len(measured) == rest
    assert search.propose() == []


@pytest.fixture
def few_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let spaces count as too large to go through."""
    monkeypatch.setattr(spaces, "MOST_COMBINATIONS", 100)
    monkeypatch.setattr(spaces, "DRAWN_POINTS", 80)


def test_of_a_large_space_a_draw_is_listed(few_combinations: None) -> None:
    names, every = spaces.drawn(tables(LARGE)), space(LARGE)
    listed = list(spaces.searchable(LARGE, SM90, tables(LARGE), every[-1:]))
    assert len(set(listed)) == len(listed) and set(listed) < set(every)
    assert listed == list(spaces.searchable(LARGE, SM90, tables(LARGE), every[-1:]))
    for name in tables(LARGE):
        mine = {point for point in every if point.template == name}
        if name not in names:
            assert mine <= set(listed)
            continue
        assert len(mine & set(listed)) == min(80, len(mine))
        start = spaces.find(name).default(LARGE, SM90)
        starts = [start, every[-1].values] if every[-1].template == name else [start]
        near = {one for one in mine if any(len(one.values.items() - other.items()) <= 1 for other in starts)}
        assert near <= set(listed) and near < mine


@pytest.mark.parametrize(
    ("strategy", "ahead"), [("evolutionary", True), thorough("replay", False), ("boosting", False), ("random", False)]
)
def test_a_search_of_a_draw(strategy: str, ahead: bool, few_combinations: None) -> None:
    every, domain = space(LARGE), Domain.of(LARGE, SM90, tables(LARGE))
    known = {every[-1]: 1e-5}
    measured = run(start(LARGE, 60, strategy=strategy, known=known), 60, separable, known, ahead=ahead)
    assert len(measured) == 60 and set(measured) < set(every)
    # MetaSchedule makes points up, and is taught others; the other strategies choose among what is listed.
    assert (set(measured) <= set(domain.points)) == (strategy in ("boosting", "random"))


def test_what_is_not_allowed_is_no_point_of_a_draw(few_combinations: None) -> None:
    domain, every = Domain.of(LARGE, SM90, tables(LARGE)), set(space(LARGE))
    for name, table in tables(LARGE).items():
        for values in itertools.islice(itertools.product(*table.values()), 0, None, 7):
            found = domain.candidate(name, dict(zip(table, values, strict=True)))
            wanted = spaces.find(name).candidate(dict(zip(table, values, strict=True)))
            assert found == (wanted if wanted in every else None)


def test_a_plan_says_what_is_drawn(tmp_path: Path) -> None:
    """The space of a step of an LSH head has tens of millions of combinations."""
    step = parse("lsh_topk/lists=1,beam=12,hidden=1000,vocab=25000,frequent=5500,n=12,dtype=float16")
    plan = make_plan(step, SM90, 8, Log(tmp_path, SM90.arch, step.operator), 1)
    assert plan.drawn == ("fused_step",) and 1000 < plan.templates["fused_step"] <= spaces.DRAWN_POINTS
    sizes = list(plan_table([plan]).columns[2].cells)[0].split("\n")
    assert [size.endswith(" drawn") for size in sizes] == [name == "fused_step" for name in plan.templates]


def test_points_are_distinct_and_allowed() -> None:
    for problem in (SMALL, LARGE):
        assert len(set(space(problem))) == len(space(problem))
        for candidate in space(problem):
            assert spaces.find(candidate.template).point(problem, SM90, candidate.values) is None


@pytest.mark.parametrize("ahead", [thorough(False), True])
@pytest.mark.parametrize("strategy", ["evolutionary", "replay"])
@pytest.mark.parametrize(("trials", "batch"), [(17, 16), thorough(5, 2)])
def test_a_space_barely_larger_than_the_budget_does_not_run_dry(
    trials: int, batch: int, strategy: str, ahead: bool
) -> None:
    assert len(space(SMALL)) > trials
    search = start(SMALL, trials, batch=batch, strategy=strategy)
    measured = run(search, trials, lambda c: 1e-5, ahead=ahead)
    assert len(measured) == trials and set(measured) <= set(space(SMALL))


@pytest.mark.parametrize("fails", [lambda c: True, lambda c: c.template != "per_tile"], ids=["all", "most"])
def test_failures_do_not_stop_a_search(fails: Callable[[Candidate], bool]) -> None:
    measured = run(start(LARGE, 48), 48, lambda c: None if fails(c) else separable(c))
    assert len(measured) == 48 and set(measured) <= set(space(LARGE))


def test_an_optimiser_is_told_failures_as_worse_than_all_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also than times that were known before, and than those of the same batch."""
    told: list[float] = []

    class Anything:
        def __init__(self, sizes: Sequence[int], *_: Any) -> None:
            self.sizes = sizes

        def ask(self) -> tuple[Any, Sequence[int]]:
            return None, [0 for _ in self.sizes]

        def tell(self, token: Any, value: float) -> None:
            told.append(value)

    monkeypatch.setitem(ask_tell.LIBRARIES, "anything", Anything)
    draw, worst = random.Random(4), 3e-5
    domain = Domain.of(LARGE, SM90, tables(LARGE))
    search = ask_tell.AskTell("anything", domain, known={space(LARGE)[0]: worst}, trials=60, batch=10, seed=0)
    for _ in range(6):
        results = {one: draw.choice((None, draw.uniform(1e-6, 1e-4))) for one in search.propose()}
        search.report(results)
        worst = max([worst, *filter(None, results.values())])
        for seconds, value in zip(results.values(), told[-len(results) :], strict=True):
            assert value == pytest.approx(math.log(seconds) if seconds else math.log(2 * worst))


def test_replayed_traces_are_new_points() -> None:
    measured = run(start(LARGE, 40, strategy="replay"), 40, lambda c: 1e-5)
    assert len(measured) == 40 and set(measured) <= set(space(LARGE))


def test_a_seed_tells_the_search() -> None:
    one, other = (list(run(start(LARGE, 48, seed=5), 48, separable)) for _ in range(2))
    assert one == other


@pytest.mark.thorough
def test_search_learns_what_random_choice_does_not() -> None:
    trials, costs = 96, {candidate: separable(candidate) for candidate in space(LARGE)}
    assert len(costs) > 10 * trials
    guided, blind, first, last = [], [], [], []
    for seed in range(5):
        times = list(run(start(LARGE, trials, seed=seed), trials, costs.__getitem__).values())
        assert len(times) == trials
        guided.append(min(times))
        first.append(statistics.median(times[:BATCH]))
        last.append(statistics.median(times[2 * BATCH : 4 * BATCH]))
        blind.append(min(random.Random(seed).sample(list(costs.values()), trials)))
    # The middle one of five searches finds a point that is among the best 0.5 % of the space,
    best = sorted(costs.values())
    assert statistics.median(guided) <= best[len(best) // 200]
    # which the middle random one does not,
    assert statistics.median(guided) < statistics.median(blind)
    # and not by luck: what it proposes gets better while it learns.
    assert statistics.median(late / early for early, late in zip(first, last, strict=True)) < 0.7


def test_a_resumed_search_is_taught_and_proposes_nothing_known() -> None:
    ranked = sorted(space(LARGE), key=separable)
    known: dict[Candidate, float | None] = {c: separable(c) for c in random.Random(2).sample(space(LARGE), 120)}
    known |= dict.fromkeys(random.Random(3).sample(ranked, 10))  # failures
    known |= {c: separable(c) for c in ranked[:5]}  # the best of all: a taught search would choose them
    search = start(LARGE, 32, known=known, seed=4)
    measured = run(search, 32, separable, known)
    assert len(measured) == 32
    # What the model said of the last batch before it was measured is there; of an untaught search there is nothing.
    assert len(search.predicted) > 1 and set(list(measured)[-2:]) <= set(search.predicted)
    assert len(set(search.predicted.values())) > 1
    # Taught, so that the first batch is better than a first batch that knows nothing.
    search = start(LARGE, 32, seed=4)
    untaught = run(search, BATCH, separable)
    assert search.predicted == {}
    assert statistics.median(list(measured.values())[:BATCH]) < 0.7 * statistics.median(untaught.values())


def test_records_of_other_decisions_do_not_disturb() -> None:
    """Records whose decisions the template no longer has, or of templates that do not apply here, teach nothing."""
    foreign = {
        Candidate("warp_shuffle", 1, (("reduce_threads", 32), ("gone", 3))): 1e-9,
        Candidate(
            "warp_shuffle", 1, (("reduce_threads", 33), ("rows", 4), ("tile_m", 4), ("tile_n", 1), ("vec", 1))
        ): 1e-9,
        Candidate("threshold_gate", 1, (("threads", 128), ("vectors", 1))): 1e-9,
    }
    measured = run(start(LARGE, 32, known=foreign), 32, separable, foreign)
    assert len(measured) == 32 and set(measured) <= set(space(LARGE))
