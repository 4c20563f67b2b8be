"""`warmup(seconds=)` and `configure(measure=)`: a few candidates are timed here, and the fastest one is kept."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_sparse
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.registry import parse
from tvm_sparse.records import MEASURED, Best, Log
from tvm_sparse.runtime import dispatch, lookup, measuring
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.runtime.lookup import Evidence, Known

CPU = machine.cpu()
KEY = "softmax_topk/batch=5,vocab=701,k=8"
PROBLEM = parse(KEY)
SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children_without_torch: None) -> Iterator[Dispatcher]:
    found = Dispatcher(logs=(tmp_path / "shipped", tmp_path / "mine"), shipped=tmp_path / "none", cache=tmp_path / "c")
    monkeypatch.setattr(dispatch, "dispatcher", found)
    monkeypatch.setattr("tvm_sparse.operators.softmax_topk.call.dispatcher", found)
    monkeypatch.setattr(measuring, "MOST", 3)
    yield found
    measuring.kept.close()


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.timeout(200)
def test_the_fastest_is_recorded_and_found_by_later_processes(
    own: Dispatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [found] = tvm_sparse.warmup(KEY, target="cpu", seconds=150, builders=1)
    assert found.how == "exact" and found.why.startswith("measured here: the fastest of a few candidates on ")
    assert found.tune and found.tune.startswith("tvm-sparse tune softmax_topk batch=5")
    assert "measured 20" in str(found) and found.library
    log = Log(tmp_path / "mine", CPU.arch, "softmax_topk")
    best = log.best()[PROBLEM.key]
    contents = log.read()
    tried = {trial.candidate for trial in contents.trials}
    assert best.candidate in tried and len(tried) == 3 and {one.strategy for one in contents.sessions} == {MEASURED}
    assert best.seconds <= best.fallback_seconds

    monkeypatch.setattr(measuring, "measure", lambda *arguments: pytest.fail("it has a record"))
    tvm_sparse.warmup(KEY, target="cpu", seconds=150)
    later = Dispatcher(logs=(tmp_path / "shipped", tmp_path / "mine"), shipped=tmp_path / "none", cache=tmp_path / "c")
    assert later.explain(PROBLEM, CPU).why == found.why
    values, indices = tvm_sparse.softmax_topk(logits := np.random.default_rng(0).standard_normal((5, 701), "f4"), 8)
    assert np.array_equal(indices, np.argsort(-logits, axis=1, kind="stable")[:, :8])


@pytest.mark.timeout(200)
def test_a_first_call_measures_where_it_is_told_to(
    own: Dispatcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[Any, ...]] = []

    def nothing(problem: Any, where: Any, candidates: Any, logs: Path, seconds: float, builders: int) -> dict[str, Any]:
        asked.append((problem.key, seconds, [str(one) for one in candidates]))
        return {"reason": "the device is busy"}

    monkeypatch.setattr(measuring, "measure", nothing)
    logits = np.zeros((5, 701), np.float32)
    tvm_sparse.softmax_topk(logits, 8)
    assert not asked
    tvm_sparse.configure(measure=7)
    with caplog.at_level(logging.WARNING, "tvm_sparse"):
        for _ in range(2):
            tvm_sparse.softmax_topk(logits, 8)
    [(key, seconds, candidates)] = asked
    assert (key, seconds) == (PROBLEM.key, 7) and str(spaces.fallback(PROBLEM, CPU)) in candidates
    assert len(said(caplog, "not measured: the device is busy")) == 1
    tvm_sparse.configure(measure=0)
    tvm_sparse.softmax_topk(np.zeros((5, 702), np.float32), 8)
    assert len(asked) == 1


@pytest.mark.timeout(200)
def test_what_goes_wrong_leaves_the_choice_of_look_up(
    own: Dispatcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No time, a process that ends, one that does not start."""
    before = own.explain(PROBLEM, CPU).candidate
    with caplog.at_level(logging.WARNING, "tvm_sparse"):
        tvm_sparse.warmup(KEY, target="cpu", seconds=0)
        for code in ("import os; os._exit(3)", None):
            argv = ("python", "-c", code) if code else (str(tmp_path / "nothing"),)
            monkeypatch.setattr(measuring, "kept", measuring.Kept(1.0, argv, "measured"))
            own._measured.clear()
            [found] = tvm_sparse.warmup(KEY, target="cpu", seconds=5)
            assert (found.candidate, found.how) == (before, "fallback")
    assert len(said(caplog, "not measured: ")) == 3 and said(caplog, "no time is left")
    for wrong in (-1, "5", True, float("nan"), 1e9):
        with pytest.raises(ValueError, match="seconds: expected seconds, from 0 to 1,000,000, got"):
            tvm_sparse.warmup(KEY, target="cpu", seconds=wrong)
        with pytest.raises(ValueError, match="measure: expected seconds"):
            tvm_sparse.configure(measure=wrong)


def test_contenders_are_points_of_the_problem_the_likely_ones_first() -> None:
    """Of records near and far, of another number of multiprocessors, of another architecture; and neighbours."""
    problem, where = parse("softmax_topk/batch=4,vocab=32000,k=5"), machine.resolve("rtx5090")
    fallback, held = spaces.fallback(problem, where), spaces.find("held_rows")
    decisions = {"cluster": 16, "threads": 256, "staged": 0, "row_bound": 0}
    wide = Candidate(held.name, held.version, tuple(decisions.items()))
    narrow = held.candidate({**decisions, "cluster": 8})
    choice = lookup.fallback(problem, where, "")
    evidence = Evidence(
        borrowed={"softmax_topk/batch=4,vocab=32768,k=5,dtype=float32": Known(wide, {})}, lender="sm_90a"
    )
    found = measuring.contenders(problem, where, choice, evidence)
    assert found[0] == fallback and narrow in found[:4] and wide not in found
    assert len(found) == len(set(found)) == measuring.MOST
    assert all(spaces.refusal(one, problem, where) is None for one in found)
    assert found == measuring.contenders(problem, where, choice, evidence)
    one = lookup.Choice("nearby", "", problem, narrow, None, {})
    assert measuring.contenders(problem, where, one, evidence)[:2] == [narrow, fallback]


@pytest.mark.parametrize("order", [1, -1])
def test_of_many_records_the_nearest_are_contenders(order: int) -> None:
    """Whatever their order in the evidence."""
    problem, where = parse("softmax_topk/batch=4,vocab=32000,k=5"), machine.resolve("h200")
    points = [
        one
        for one in spaces.points(problem, where, spaces.applicable(problem, where)[0])
        if one.template == "threshold_gate" and one != spaces.fallback(problem, where)
    ][: 8 * measuring.RUNNERS_UP]
    keys = [f"softmax_topk/batch=4,vocab={32000 + 1000 * n},k=5,dtype=float32" for n in range(1, len(points) + 1)]
    known = list(zip(keys, (Known(one, {}) for one in points), strict=True))[::order]
    found = measuring.contenders(problem, where, lookup.fallback(problem, where, ""), Evidence(dict(known)))
    assert found[1 : measuring.RUNNERS_UP + 1] == points[: measuring.RUNNERS_UP]


@pytest.mark.timeout(280)
def test_the_script_shows_regret_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, children_without_torch: None
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("measured_warmup")
    monkeypatch.setattr(measuring, "MOST", 2)
    monkeypatch.setattr(script, "ROUNDS", 1)
    best = spaces.fallback(PROBLEM, CPU)
    record = Best(PROBLEM.key, CPU.arch, best, 1e-6, best, 2e-6, 3, "s")
    monkeypatch.setattr(script, "best_records", lambda roots, arch: {PROBLEM.key: (record, {})})
    script.main(target="cpu", problems=1, seconds=100, operators="", csv=tmp_path / "found.csv")
    assert "before: " in capsys.readouterr().out
    lines = (tmp_path / "found.csv").read_text().splitlines()
    assert lines[0].startswith("# device: ") and lines[-1].startswith(f'"{PROBLEM.key}"')
