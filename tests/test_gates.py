"""What is particular to threshold_gate and cluster_gate: thresholds that miss, sums that overflow, buffers that do."""

from __future__ import annotations

import numpy as np
import pytest
from cases import SM90
from test_templates import emulated, verify

from tvm_sparse import schedules
from tvm_sparse.operators import SoftmaxTopk
from tvm_sparse.schedules.threshold_gate import Layout
from tvm_sparse.schedules.thresholds import first_threshold

BLOCK = {"threads": 256, "vectors": 1, "stages": 1, "early": 1}
CLUSTER = {"split": 2, "threads": 256, "vectors": 1, "stages": 2, "early": 1}


def sampled_columns(problem: SoftmaxTopk, decisions: dict[str, int]) -> np.ndarray:
    """The columns that the first tiles of a row's blocks hold."""
    layout = Layout(problem, decisions)
    columns = []
    for part in range(layout.split):
        for slot in range(layout.vectors * layout.warps):
            upper = slot >= (layout.warps + 1) // 2
            chunk = slot * layout.tiles + (layout.tiles - 1 if upper else 0)
            start = (part * layout.share + chunk * 32) * layout.width
            columns.append(np.arange(start, start + 32 * layout.width))
    columns = np.concatenate(columns)
    return columns[columns < problem.vocab]


def run(name: str, problem: SoftmaxTopk, decisions: dict[str, int], logits: np.ndarray, seed: int = 0) -> None:
    template = schedules.find(name)
    assert template.point(problem, SM90, decisions) is None
    program = template.build(problem, decisions)
    inputs = [logits.astype(np.float32), 1.0, seed % 2]
    outputs = problem.empty_outputs()
    emulated(program, seed)([*inputs, *outputs])
    problem.check(inputs, problem.reference(inputs), outputs)


@pytest.mark.parametrize(("name", "decisions"), [("threshold_gate", BLOCK), ("cluster_gate", CLUSTER)])
def test_rows_that_are_read_twice(name: str, decisions: dict[str, int]) -> None:
    problem = SoftmaxTopk(2, 6000, 50)
    rng = np.random.default_rng(1)
    sampled = sampled_columns(problem, decisions)
    others = np.setdiff1d(np.arange(problem.vocab), sampled)
    assert 0 < len(sampled) < problem.vocab // 2
    logits = rng.standard_normal((2, problem.vocab))
    # Row 0: few large elements, all in the sample, so that its threshold is too high for 50 to reach it.
    logits[0, sampled[::16]] += 20
    # Row 1: the sample knows nothing of elements beside which its maximum is nothing.
    logits[1, others[:70]] += 300
    run(name, problem, decisions, logits)


@pytest.mark.parametrize("structure", ["ties", "constant", "ascending", "special"])
def test_buffer_that_overflows_is_compacted(structure: str) -> None:
    problem, decisions = SoftmaxTopk(4, 10240, 5), {"threads": 64, "vectors": 3, "stages": 2, "early": 1}
    assert Layout(problem, decisions).overflows
    template = schedules.find("threshold_gate")
    verify(problem, structure, 3, emulated(template.build(problem, decisions), 3))


def test_equals_of_the_threshold_in_several_blocks() -> None:
    """The first of equals are wanted, wherever the others lie."""
    problem = SoftmaxTopk(3, 6000, 40)
    logits = np.zeros((3, problem.vocab))
    logits[1, 3500:] = 1  # only in the second block
    logits[2, [17, 2999, 3000, 5999]] = 2
    run("cluster_gate", problem, CLUSTER, logits)


@pytest.mark.parametrize(("k", "share", "warps"), [(5, 0.3, 4), (50, 0.2, 8), (50, 0.06, 16), (400, 0.4, 16)])
def test_first_threshold_seldom_misses_and_lets_few_through(k: int, share: float, warps: int) -> None:
    place = first_threshold(k, share, warps)
    assert place is not None and place.sure == (place.lane * place.warp >= k)
    rng = np.random.default_rng(k)
    vocab, held = round(32 * warps * 8 / share), 8
    missed, passed = 0, []
    for _ in range(300):
        row = rng.permutation(vocab)  # the larger the better, all different
        maxima = np.sort(row[: 32 * warps * held].reshape(warps, 32, held).max(axis=2), axis=1)
        threshold = np.sort(maxima[:, -place.lane])[-place.warp]
        passed.append(int((row >= threshold).sum()))
        missed += passed[-1] < k
    assert missed <= 2
    assert np.median(passed) < max(6 * k, 60)


def test_first_threshold_where_none_is_any_good() -> None:
    assert first_threshold(400, 1.0, 1) is None
