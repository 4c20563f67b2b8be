"""scripts/regret.py: what look-up chooses for drawn problems, timed beside the fallback and a tuning, on the CPU."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest

from tvm_sparse.core import registry, spaces
from tvm_sparse.core.machine import Machine, cpu
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Log
from tvm_sparse.runtime import paths
from tvm_sparse.runtime.lookup import Choice
from tvm_sparse.tuning import plans

SCRIPTS = Path(__file__).parent.parent / "scripts"
SMALL = [parse("softmax_topk/batch=4,vocab=700,k=5"), parse("logsumexp/batch=3,vocab=900")]


@pytest.fixture
def regret(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("regret")


@pytest.mark.timeout(280)
def test_problems_are_tuned_beside_what_look_up_chooses(
    regret: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, children_without_torch: None
) -> None:
    monkeypatch.setattr(plans, "FINAL_ROUNDS", 2)
    monkeypatch.setattr(regret, "draw", lambda operators, seed, count: SMALL)
    csv_path, logs = tmp_path / "regret.csv", tmp_path / "logs"
    regret.main(problems=2, trials=3, target="cpu", logs=logs, csv=csv_path, builders=1)
    lines = regret.read(csv_path)
    assert {line["problem"] for line in lines} == {problem.key for problem in SMALL}
    assert csv_path.read_text().startswith("# device: ")
    for line in lines:
        assert not line["note"]
        assert 1 <= float(line["regret"]) < 1000 and float(line["over_fallback"]) > 0
        assert 1 <= int(line["trials"]) <= 4
        best = Log(logs, cpu().arch, line["operator"]).best()[line["problem"]]
        assert str(best.fallback) == line["fallback"]
    said = capsys.readouterr().out
    assert "operator logsumexp" in said and "were not reached" not in said

    regret.main(summary=csv_path)
    assert "operator logsumexp" in capsys.readouterr().out

    regret.main(problems=2, trials=3, target="cpu", logs=logs, csv=csv_path, builders=1, minutes=1e-9)
    assert "2 of 2 problems were not reached" in capsys.readouterr().out
    assert regret.read(csv_path) == []


def test_draws_of_an_operator_do_not_depend_on_the_others(regret: Any) -> None:
    names = list(registry.operators())
    drawn = regret.draw(names, 3, 40)
    assert len(set(drawn)) == 40 and {problem.operator for problem in drawn} == set(names)
    own = [problem for problem in drawn if problem.operator == "softmax"]
    assert own == regret.draw(["softmax"], 3, len(own))


def test_the_chosen_kernel_is_first_and_in_the_final(regret: Any, tmp_path: Path) -> None:
    problem = SMALL[0]
    tables, _ = spaces.searched(problem, cpu())
    candidate = random.Random(0).choice(list(spaces.points(problem, cpu(), tables)))
    choice = Choice("nearby", "", problem.with_batch(8), candidate, None, {})
    log = Log(tmp_path, cpu().arch, problem.operator)
    plan = regret.plan_of(problem, cpu(), choice, 8, log, log, 1)
    assert plan.proposed[0] == candidate and plan.rivals == {candidate: problem.with_batch(8)}


def test_all_gpus_of_one_kind_take_part(regret: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    h200, other = (Machine("cuda", "sm_90a", name, cores=132) for name in ("H200", "H100"))
    monkeypatch.setattr(regret.machine, "gpus", lambda: (h200, other, h200))
    assert regret.like(h200) == [0, 2] and regret.like(other) == [1] and regret.like(cpu()) == [0]


def test_the_summary_counts_bad_and_lost_choices(regret: Any) -> None:
    def line(operator: str, how: str, ratio: float, over: float) -> dict[str, str]:
        return {"operator": operator, "how": how, "regret": str(ratio), "over_fallback": str(over)}

    lines = [line("a", "nearby", 2.0, 1.0), line("a", "exact", 1.0, 1.1), line("b", "nearby", 1.0, 0.5)]
    lines.append({"operator": "b", "how": "exact", "regret": "", "over_fallback": ""})
    rows = {row[0]: row[1:] for row in regret.summary(lines)}
    assert rows["all"][:4] == ["3", "1.260", "2.00", "33%"]
    assert rows["way nearby"] == ["2", "1.414", "2.00", "50%", "0.707", "1.00", "0%", "2.000"]
    assert rows["operator a"][6] == "50%"
    assert regret.summary([]) == []


def test_winners_that_look_up_would_take_elsewhere_rarely_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the records that ship: what the rule of look-up rests on."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    transfer = importlib.import_module("study_transfer")
    operators = ("bsr_matmul", "nhot_lookup", "softmax_topk")
    pairs = [pair for name in operators for pair in transfer.pairs_of(Log(paths.shipped_logs(), "sm_90a", name))]
    assert sum(pair.same and pair.near for pair in pairs) > 100
    taken = [pair for pair in pairs if pair.same and pair.gained and pair.near]
    assert sum(pair.ratio > transfer.LOST for pair in taken) <= 0.05 * len(taken)
    assert transfer.line("bsr_matmul", taken, "taken", len(pairs))[3] == str(len(taken))
    assert transfer.line("bsr_matmul", [], "none", 0)[3:] == ["0", "", "", ""]
