"""Spaces measured whole, searches simulated on them, and what the statistics say of searches whose answer is known."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import tuning_child
from typer.testing import CliRunner

from tvm_sparse.cli.app import app
from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import cpu
from tvm_sparse.records import Session, Trial
from tvm_sparse.records import space as files
from tvm_sparse.records.space import POINTS, Space, SpaceError
from tvm_sparse.research import simulation
from tvm_sparse.research.simulation import Run
from tvm_sparse.tuning import exhaustive, fleet, strategies
from tvm_sparse.tuning.domain import Domain

TESTS = Path(__file__).parent
PROBLEM = "bsr_matmul/m=8,k=256,n=256,block=16x16,sparsity=0.9,pattern=uniform,dtype=float32"
# What it tells: decisions of two templates, a hole where a product exceeds 512, and failures.
PAIRS = [(a, b) for a in (1, 2, 4, 8, 16) for b in (2, 4, 8, 16, 32, 64) if a * b < 512]
WIDE = [Candidate("wide", 1, (("a", a), ("b", b))) for a, b in PAIRS]
DEEP = [Candidate("deep", 3, (("b", b), ("c", c), ("d", d))) for b in (1, 2, 4, 8) for c in range(8) for d in (0, 1)]


def seconds(candidate: Candidate) -> float | None:
    """The best is wide(4, 16), at 1e-5."""
    v = candidate.values
    if candidate.template == "deep":
        return None if v["c"] == 7 else 2e-5 * (1 + 0.2 * v["c"]) * (1 + 0.1 * v["d"]) * (1 + math.log2(v["b"]))
    return 1e-5 * (1 + 0.3 * abs(math.log2(v["a"] / 4))) * (1 + 0.2 * abs(math.log2(v["b"] / 16)))


def trial(number: int, candidate: Candidate) -> Trial:
    time = seconds(candidate)
    ends = ("ok", "") if time else ("build-error", "too deep")
    return Trial(PROBLEM, "x86-64-v4", candidate, *ends, (time, 1.01 * time) if time else (), 0.5, "s", number)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("spaces") / "made.jsonl.xz"
    points = [*WIDE, *DEEP]
    made = Session("s", "2026-01-01T00:00:00Z", {"cores": 2}, {}, "none", {POINTS: len(points)}, "exhaustive")
    files.write(found, Space((made,), tuple(trial(*pair) for pair in enumerate(points))))
    return found


def test_a_file_says_what_was_measured_and_what_is_damaged(path: Path, tmp_path: Path) -> None:
    space = files.read(path)
    assert space.complete and space.points == len(WIDE) + len(DEEP) and space.problem == PROBLEM
    assert {t.reason for t in space.trials} == {"", "too deep"}
    plain = tmp_path / "plain.jsonl"
    files.write(plain, Space(space.sessions, space.trials[:-1]))
    assert files.read(plain).trials == space.trials[:-1] and not files.read(plain).complete
    spoilt = dataclasses.replace(space.trials[-1], outcome="environment", reason="why", seconds=())
    assert not Space(space.sessions, (*space.trials[:-1], spoilt)).complete
    lines = plain.read_bytes().splitlines(keepends=True)
    plain.write_bytes(b"".join([*lines[:5], lines[5].replace(b"wide", b"tall"), *lines[6:]]))
    with pytest.raises(SpaceError, match="line 6: checksum"):
        files.read(plain)
    plain.write_bytes(b"".join([*lines, lines[-1]]))
    with pytest.raises(SpaceError, match="two trials"):
        files.read(plain)
    path_of_half = tmp_path / "half.jsonl.xz"
    path_of_half.write_bytes(path.read_bytes()[:200])
    with pytest.raises(SpaceError, match=r"half\.jsonl\.xz"):
        files.read(path_of_half)


@pytest.mark.parametrize("name", ["random", "boosting", "tpe", "qmc", "genetic", "portfolio"])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("ahead", [False, True])
def test_strategies_propose_points_that_are_allowed_and_new(name: str, batch: int, ahead: bool) -> None:
    """Also where a batch is proposed before the one before it is reported."""
    if name in ("tpe", "qmc", "genetic", "portfolio"):
        pytest.importorskip("optuna" if name in ("tpe", "qmc") else "nevergrad")
    domain = Domain.recorded(cpu(), [*WIDE, *DEEP])
    known: dict[Candidate, float | None] = {WIDE[0]: seconds(WIDE[0]), DEEP[7]: None}
    everything = len(domain.points) - len(known)
    search = strategies.make(name, domain, known=known, trials=everything - 1, batch=batch, seed=3)
    tried, waiting = set(known), search.propose() if ahead else []
    tried.update(waiting)
    for _ in range(max(2, 12 // batch)):
        proposed = search.propose()
        assert len(proposed) == batch == len(set(proposed))
        assert not set(proposed) & tried and set(proposed) <= set(domain.points)
        tried.update(proposed)
        search.report({point: seconds(point) for point in (waiting if ahead else proposed)})
        waiting = proposed


def test_boosting_learns_and_says_what_it_predicted() -> None:
    domain = Domain.recorded(cpu(), [*WIDE, *DEEP])
    ranks = []
    for seed in range(4):
        search = strategies.make("boosting", domain, known={}, trials=60, batch=8, seed=seed)
        first = search.propose()
        assert not search.predicted
        assert sum(c.template == "deep" for c in first) == 4  # templates alike, whatever their sizes
        for _ in range(3):
            search.report({c: seconds(c) for c in first})
            first = search.propose()
        assert set(search.predicted) == set(first)
        order = sorted(domain.points, key=lambda c: seconds(c) or math.inf)
        ranks.append(np.median([order.index(c) for c in first[:-1]]))
    assert np.median(ranks) < len(domain.points) / 5


def test_a_search_that_may_measure_all_finds_the_best(path: Path) -> None:
    recorded = simulation.load(path)
    run = simulation.simulate(recorded, "boosting", len(recorded.domain.points), seed=0)
    assert run.best[-1] == recorded.optimum == 1e-5  # of two rounds on a CPU the least
    assert (np.diff(run.best) <= 0).all() and (np.diff(run.clock) > 0).all()
    longer = simulation.simulate(recorded, "random", len(recorded.domain.points) + 5, seed=0)
    assert longer.best.shape == longer.clock.shape == (len(recorded.domain.points) + 5,)


def test_random_search_finds_as_much_as_it_should(path: Path) -> None:
    """The best of n points drawn without replacement is within the factor f with a probability that is known."""
    recorded = simulation.load(path)
    points, good = len(recorded.domain.points), int((recorded.seconds <= 1.5e-5).sum())
    runs = [simulation.simulate(recorded, "random", 12, seed) for seed in range(300)]
    found = np.mean([run.best[-1] <= 1.5e-5 for run in runs])
    expected = 1 - math.comb(points - good, 12) / math.comb(points, 12)
    assert 0.2 < expected < 0.95
    assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / len(runs))


def runs_of(name: str, ends: list[float]) -> list[Run]:
    def run(seed: int, end: float) -> Run:
        best = np.array([3.0, 2.0, 2.0, end])
        return Run("made", name, seed, best, np.arange(1.0, 5.0), 0.1)

    return [run(seed, end) for seed, end in enumerate(ends)]


def test_the_summary_of_known_searches() -> None:
    pytest.importorskip("scipy")
    worse = runs_of("worse", [1.5, 1.4, 1.6, 1.5, 1.5, 1.4, 1.6, 1.5])
    better = runs_of("better", [1.0, 1.04, 1.0, 1.2, 1.0, 1.0, 1.0, 1.01])
    same = simulation.summarise(worse, 1.0, worse, [2, 4])
    assert (same.against.value, same.against.low, same.against.high, same.wilcoxon) == (1, 1, 1, 1)
    assert same.trials_to_near is None and same.reached == 0 and same.excess[2].value == 1.0
    found = simulation.summarise(better, 1.0, worse, [2, 4])
    ratio = math.exp(np.mean(np.log([b.best[-1] / w.best[-1] for b, w in zip(better, worse, strict=True)])))
    assert found.against.value == pytest.approx(ratio)
    assert found.against.low < found.against.value < found.against.high < 0.8 and found.wilcoxon < 0.01
    assert (found.trials_to_near, found.seconds_to_near, found.reached) == (4, 4.0, 7 / 8)
    assert found.halved.value == pytest.approx(2 / math.exp(np.mean(np.log([w.best[-1] for w in worse]))))
    with pytest.raises(ValueError, match="same seeds"):
        simulation.summarise(better[:-1], 1.0, worse, [2])
    slower = [Run("other", "better", run.seed, 4 * run.best, run.clock, 0.1) for run in better]
    both = simulation.together([*better, *slower], {"made": 1.0, "other": 1.0})
    assert both[0].best[-1] == pytest.approx(2.0) and len(both) == len(better)


@pytest.mark.thorough
def test_every_point_is_measured_once_a_round_and_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four points does not compile; the run is stopped after two measurements, and started again."""
    problem, fixed = tuning_child.PROBLEM, {"chunk": (64, 128), "simd": (8, 16)}
    faulty = str(spaces.find("row_scan").candidate({"chunk": 128, "simd": 16}))
    argv = (sys.executable, str(TESTS / "faulty_build_worker.py"))
    monkeypatch.setattr(fleet, "BUILD_WORKER", (*argv, json.dumps({faulty: "compile"})))
    output, seen = tmp_path / "space.jsonl", []

    def measure(**options) -> Space:
        given = {"fixed": fixed, "rounds": 2, "show": seen.append, **options}
        return exhaustive.measure_space(problem, cpu(), output, **given)

    with fleet.local(cpu(), 1) as using:
        begun = measure(stop=lambda: len(seen) == 2, using=using)
        assert len(begun.trials) == 2 and not begun.complete
        space = measure(using=using)
    assert space.complete and space.points == 4 and space == files.read(output)
    assert len(seen) == 7  # four points, of which three are right, in two rounds: none of the first two anew
    failed = [t for t in space.trials if t.outcome != "ok"]
    assert [str(t.candidate) for t in failed] == [faulty] and "does not like" in failed[0].reason
    assert all(len(t.seconds) == 2 for t in space.trials if t.outcome == "ok")
    with pytest.raises(SpaceError, match="none of this space|restricted otherwise"):
        measure(fixed={"chunk": (64,)})


def test_the_command_compares_strategies(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    words = ["simulate", str(path), "--reference", "random", "--strategy", "boosting", "--budget", "24", "--jobs", "1"]
    words += ["--repeats", "3", "--batch", "8", "--ahead", "--csv", str(tmp_path / "curves.csv")]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})  # no word is broken
    assert done.exit_code == 0, done.output
    assert "boosting" in done.output and "6 searches of 24 trials" in done.output
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 1 + 2 * 24
    done = CliRunner().invoke(app, ["simulate", str(path), "--strategy", "lucky"])
    assert done.exit_code == 2 and "expected one of evolutionary" in done.output
