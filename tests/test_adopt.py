"""`tvm-sparse adopt` and `doctor --target`: a machine that nobody has tuned on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tvm_sparse.bench import probe
from tvm_sparse.cli import adopt, app
from tvm_sparse.core import commands, machine, registry, spaces
from tvm_sparse.core.machine import resolve
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Best, Log, Session, Trial
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.runtime.lookup import Choice
from tvm_sparse.shipping import export
from tvm_sparse.tuning import adopting, plans

CPU = machine.cpu()
TINY = [parse(key) for key in ("softmax_topk/batch=2,vocab=301,k=5", "softmax/batch=2,vocab=777")]


def invoked(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app.app, list(map(str, words)), env={"COLUMNS": "200"})
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    return done.output


@pytest.mark.timeout(280)
def test_a_bundle_is_written_resumed_and_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children_without_torch: None
) -> None:
    """Checked, tuned as far as the time goes, and found by look-up once it is merged."""
    monkeypatch.setattr(adopting, "problems_of", lambda name: TINY if name == "serve" else pytest.fail(name))
    monkeypatch.setattr(adopting, "PASSES", (2, 3))
    monkeypatch.setattr(plans, "FINAL_ROUNDS", 1)
    bundle, mine = tmp_path / "bundle", tmp_path / "mine"
    words = ("adopt", "--set", "serve", "--target", "cpu", "--logs", tmp_path / "none", "-o", bundle, "--builders", "1")
    said = invoked(*words, "--minutes", "0.05")
    assert "0 were tuned on" in said and f"db merge {bundle}" in said
    assert f"To go on from here: {commands.program()} adopt --minutes 0.05 --set serve" in said
    counts = {one.key: len(Log(bundle, CPU.arch, one.operator).read().trials) for one in TINY}
    said = invoked(*words, "--minutes", "4")
    for problem in TINY:
        log = Log(bundle, CPU.arch, problem.operator)
        tried = [trial.candidate for trial in log.read().trials if trial.problem == problem.key]
        assert len(set(tried)) == 3 and tried[0] == spaces.fallback(problem, CPU) and counts[problem.key] <= 3
        assert problem.key in log.best()
    assert "tuned over default" in said and "To go on from here" not in said
    assert "records appended" in invoked("db", "merge", bundle, "--logs", mine)
    own = Dispatcher(logs=(mine,), shipped=tmp_path / "none", cache=tmp_path / "cache")
    assert {own.explain(problem, CPU).how for problem in TINY} == {"exact"}
    assert "2 were tuned on" in invoked(*words[:-4], "--logs", mine, "-o", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_sets_are_problems_that_calls_ask_for() -> None:
    every = adopting.problems_of("all")
    assert len(every) == len(set(every)) == sum(len(adopting.problems_of(name)) for name in adopting.SETS)
    assert every == [problem.as_called() for problem in every]
    assert {one.operator for one in every} <= set(registry.operators()) and len({one.operator for one in every}) >= 8


@pytest.mark.parametrize("card", ["a100", "rtx4090", "rtx5090", "b200", "h200"])
def test_doctor_tells_how_calls_are_served_on_a_card(card: str) -> None:
    """By records alone; what look-up chooses can be built there."""
    found = json.loads(invoked("doctor", "--target", card, "--json"))
    assert (found["target"], found["multiprocessors"]) == (resolve(card).arch, resolve(card).cores)
    hows = {line["how"].partition(" ")[0] for line in found["problems"]}
    assert len(found["problems"]) == len(adopting.problems_of("all"))
    assert not any(line["fault"] for line in found["problems"])
    assert "exact" in hows if card == "h200" else hows <= {"borrowed", "default"}
    said = invoked("doctor", "--target", card, "--set", "recurrent")
    assert f"of {len(adopting.problems_of('recurrent'))} problems." in said
    assert "adopt --set recurrent" in said or card == "h200"


def test_doctor_compiles_when_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = tmp_path / "shapes.toml"
    shapes.write_text("[[softmax]]\nbatch = 2\nvocab = 77\n")
    words = ("doctor", "--target", "cpu", "--shapes", shapes, "--logs", tmp_path / "none", "--json")
    [line] = json.loads(invoked(*words))["problems"]
    assert line["how"] == "default" and line["fault"] is None
    [line] = json.loads(invoked(*words, "--compile"))["problems"]
    assert line["fault"] is None

    def unable(jobs: Any, where: Any, folder: Path, builders: int, show: Any, skip: Any) -> list[Any]:
        (problem, candidate, chosen, _) = jobs[0]
        skip(export.LeftOut(problem, candidate, chosen, "NVRTC: no such instruction\nline 3"))
        return []

    monkeypatch.setattr(export, "built", unable)
    [line] = json.loads(invoked(*words, "--compile"))["problems"]
    assert line["fault"] == "does not compile: NVRTC: no such instruction"


def test_what_a_run_has_found_is_read_from_its_folder(tmp_path: Path) -> None:
    """Kernels that are wrong here are named; times that were taken in turn are compared; the slowest come first."""
    chosen = spaces.find("row_scan")
    first, second = (parse(f"softmax_topk/batch={batch},vocab=301,k=5") for batch in (2, 3))
    borrowed = chosen.candidate({"chunk": 64, "simd": 8})
    fallback = spaces.fallback(first, CPU)
    standings = [
        adopting.Standing(one, CPU, Choice("borrowed", "", one, borrowed, one.key, {"machine": "another"}))
        for one in (first, second)
    ]
    log = Log(tmp_path, CPU.arch, "softmax_topk")
    log.append(Session("s", "2026-01-01T00:00:00Z", {"name": "here"}, {}, "t", {}))

    def trial(problem: Any, candidate: Any, seconds: float | None) -> Trial:
        outcome, reason = ("ok", "") if seconds else ("wrong", "Mismatch: values differ")
        return Trial(
            problem.key, CPU.arch, candidate, outcome, reason, (seconds,) if seconds else (), 1.0, "s", 0, None
        )

    log.append(trial(first, fallback, 4e-6), trial(first, borrowed, 3e-6), trial(second, fallback, 9e-6))
    log.append(trial(second, borrowed, None))
    log.append_best(Best(first.key, CPU.arch, fallback, 2e-6, fallback, 2e-6, 1, "s"))
    one, two = adopting.rows(standings, tmp_path)
    assert (one.before, one.after, one.fault, one.trials) == (3e-6, 2e-6, "", 2) and one.gain == pytest.approx(1.5)
    assert two.before is None and two.fault == "wrong: Mismatch: values differ" and two.gain is None
    [one, _] = adopting.rows(standings, tmp_path, {first.key: {borrowed: 2.4e-6, fallback: 2e-6}})
    assert one.gain == pytest.approx(1.2)
    assert one.standing.how == "borrowed (another)" and not one.standing.own
    assert adopting.checks([one, two], 1) == []
    plans = adopting.searches([one, two], 16, None, 1)
    assert [plan.problem for plan in plans] == [second, first] and [plan.trials for plan in plans] == [14, 14]
    assert list(plans[1].rivals) == [borrowed] and not plans[0].rivals
    said = "\n".join(adopt.notes([one, two], CPU, tmp_path, 61.0))
    assert "tuned over borrowed (another): 1.20x in the mean of 1" in said and "1 kernels that look-up" in said


def test_what_is_as_fast_as_a_launch_can_be_is_tuned_last() -> None:
    """Reading so few bytes takes a launch's time, whatever the bandwidth."""
    tiny, large = (parse(f"softmax_topk/batch={batch},vocab=301,k=5") for batch in (1, 4000))
    rows = [
        adopting.Row(
            adopting.Standing(one, CPU, Choice("fallback", "", one, spaces.fallback(one, CPU), None, {})),
            None, seconds, None, 1, "",
        )
        for one, seconds in ((tiny, 2.2e-6), (large, 4e-5))
    ]  # fmt: skip
    for bandwidth in (2e11, 4e12):
        worth = [adopting.worth(row, bandwidth) for row in rows]
        assert worth[0] == pytest.approx(1.1) and worth[1] > 1.5
        assert [plan.problem for plan in adopting.searches(rows, 16, bandwidth, 1)] == [large, tiny]


def test_limits_are_shown_beside_what_is_assumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = resolve("rtx5090")
    told = {
        "multiprocessors": 170,
        "l2_bytes": where.l2_bytes,
        "block_shared_bytes": where.block_shared_bytes,
        "shared_bytes": 102400,
        "registers": 65536,
        "threads": 1536,
        "max_threads": 1024,
        "largest_cluster": 4,
        "clusters_at_once": [170, 85, 50, 40],
        "cooperative_blocks": 170,
    }
    monkeypatch.setattr(machine, "gpus", lambda: (where,))
    monkeypatch.setattr(machine, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(probe, "probe", lambda env: {"limits": told, "bandwidth": 1.6e12, "problems": ["a note"]})
    assert adopt.show_limits(where) == 1.6e12
    said = capsys.readouterr()
    lines = {line.split("  ")[0].strip(): line for line in said.out.splitlines()}
    assert "8 !" in lines["thread blocks of the largest cluster"] and "!" not in lines["multiprocessors"]
    assert "1.60" in lines["read bandwidth, TB/s"] and "clusters of 8 at once" not in lines and "a note" in said.err
    assert adopt.show_limits(CPU) is None


@pytest.mark.gpu
def test_the_probe_tells_the_bandwidth() -> None:
    found = probe.probe()
    assert not found["problems"], found
    where = machine.gpu()
    if where.bandwidth:
        assert 0.8 < found["bandwidth"] / where.bandwidth < 1.1
