"""Templates that are built for comparison: they stay out of tuning unless named, and are right where papers are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import SM90
from typer.testing import CliRunner

from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.cli.app import app
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.registry import parse
from tvm_sparse.emulation import run_on_cpu
from tvm_sparse.records import Log, Trial
from tvm_sparse.tuning.plans import make_plan

PROBLEM = parse("softmax_topk/batch=512,vocab=10240,k=5")
COMPARISON = {"safe_then_topk", "safe_fused", "online_insertion", "packed_insertion"}


def test_they_are_searched_only_if_named(tmp_path: Path) -> None:
    everything, _ = spaces.applicable(PROBLEM, SM90)
    searched, reasons = spaces.searched(PROBLEM, SM90)
    assert set(everything) - set(searched) == COMPARISON
    assert not COMPARISON & set(reasons)
    assert set(spaces.searched(PROBLEM, SM90, ["safe_fused"])[0]) == {"safe_fused"}

    # The points of the named one and the fallback; of the log only these are paid for.
    log = Log(tmp_path, SM90.arch, PROBLEM.operator)
    fallback = spaces.fallback(PROBLEM, SM90)
    for name in ("radix_select", "safe_fused"):
        template = spaces.find(name)
        candidate = template.candidate(template.default(PROBLEM, SM90))
        log.append(Trial(PROBLEM.key, SM90.arch, candidate, "ok", "", (1e-5,), 0.1, "s", 0))
    plan = make_plan(PROBLEM, SM90, 100, log, builders=1, named=["safe_fused"])
    assert dict(plan.templates) == {"safe_fused": 6}
    assert (plan.trials, plan.paid) == (6, 1)
    log.append(Trial(PROBLEM.key, SM90.arch, fallback, "ok", "", (1e-5,), 0.1, "s", 0))
    assert make_plan(PROBLEM, SM90, 100, log, builders=1, named=["safe_fused"]).trials == 5
    assert not COMPARISON & set(make_plan(PROBLEM, SM90, 100, log, builders=1).templates)


def test_the_command_line_takes_names(tmp_path: Path) -> None:
    words = ["tune", "softmax_topk", "batch=2", "vocab=100", "k=3", "--target", "cpu", "--logs", str(tmp_path)]
    result = CliRunner().invoke(app, [*words, "--dry-run", "--template", "row_scan"])
    assert result.exit_code == 0 and "row_scan" in result.stdout
    result = CliRunner().invoke(app, [*words, "--template", "safe_fused"])
    assert result.exit_code == 2
    assert f"'safe_fused'; on {machine.cpu().arch} expected one of row_scan" in result.stderr


@pytest.mark.parametrize("log", [0, 1])
def test_unfused_top_k_tells_elements_of_equal_probability_apart(log: int) -> None:
    """Two rows whose probabilities are equal or vanish, though all of their logits differ."""
    problem = parse("softmax_topk/batch=2,vocab=300,k=6")
    x = np.random.default_rng(log).standard_normal((2, 300), dtype=np.float32)
    x[0] = x[0] * 1e-6
    x[1] = x[1] - 150
    x[:, 7] = 12
    inputs = [x, 1.0, log]
    template = spaces.find("safe_then_topk")
    program = template.build(problem, template.default(problem, SM90))
    outputs = problem.empty_outputs()
    probabilities = np.zeros((2, 300), np.float32)
    run_on_cpu(program.module, target_of(SM90), [*inputs, *outputs, probabilities], pipeline=program.pipeline)
    assert len(np.unique(probabilities[0])) < 100 or log
    problem.check(inputs, problem.reference(inputs), outputs)
