"""What is particular to threshold_gate and cluster_gate: thresholds that miss, sums that overflow, buffers that do."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import SM90, reached, thorough, watch_phases
from test_templates import emulated, verify

from tvm_sparse.core import machine, spaces
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk
from tvm_sparse.schedules.device import thresholds
from tvm_sparse.schedules.device.pool import STATIC
from tvm_sparse.schedules.device.thresholds import Floor, first_threshold, floor_of_runs, more_than
from tvm_sparse.schedules.softmax_topk.threshold_gate import Layout, rank, survivors

pytestmark = pytest.mark.drawn

BLOCK = {"threads": 256, "vectors": 1, "stages": 1, "overlap": 1, "prefetch": 0, "deferred": 0, "unroll": 1}
CLUSTER = {"cluster": 2, "threads": 256, "vectors": 1, "stages": 2, "deferred": 0, "unroll": 0}
GATES = [
    (name, {**decisions, "deferred": deferred})
    for name, decisions in (("threshold_gate", BLOCK), ("cluster_gate", CLUSTER))
    for deferred in (0, 1)
]


def sampled_columns(problem: SoftmaxTopk, decisions: dict[str, int]) -> np.ndarray:
    """The columns that the first tiles of a row's blocks hold."""
    tiling = Layout.of(problem, decisions).tiling
    columns = []
    for part in range(tiling.cluster):
        for slot in range(tiling.vectors * tiling.warps):
            upper = slot >= (tiling.warps + 1) // 2
            chunk = slot * tiling.tiles + (tiling.tiles - 1 if upper else 0)
            start = (part * tiling.share + chunk * 32) * tiling.width
            columns.append(np.arange(start, start + 32 * tiling.width))
    columns = np.concatenate(columns)
    return columns[columns < problem.vocab]


def run(
    name: str, problem: SoftmaxTopk, decisions: dict[str, int], logits: np.ndarray, seed: int = 0, batch: int = 0
) -> None:
    """`batch` is that of the problem that the kernel is built for, if another."""
    template = spaces.find(name)
    tuned = problem.with_batch(batch or problem.batch)
    assert template.point(tuned, SM90, decisions) is None
    program = template.build(tuned, decisions)
    inputs = [logits.astype(numpy_dtype(problem.dtype)), 1.0, seed % 2]
    outputs = problem.empty_outputs()
    emulated(program, seed)([*inputs, *outputs])
    problem.check(inputs, problem.reference(inputs), outputs)


@pytest.mark.parametrize(("name", "decisions"), [GATES[0], GATES[3], *(thorough(*gate) for gate in GATES[1:3])])
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


@pytest.mark.parametrize("dtype", ["float32", thorough("bfloat16")])
@pytest.mark.parametrize(("name", "decisions"), [thorough(*GATES[0]), *GATES[1:3], thorough(*GATES[3])])
def test_masks_that_are_rounded_by_more_than_exponents_bear(name: str, decisions: dict[str, int], dtype: str) -> None:
    """All that a block of the cluster, or a warp, has of a row."""
    logits = np.random.default_rng(2).standard_normal((4, 6000))
    logits[0, 2900:] = -1e10
    logits[1, 2900:] = -1e30
    logits[2, 2900:] = np.finfo("float32").min if dtype == "float32" else -3.3e38
    logits[3, :3100] = -1e20
    run(name, SoftmaxTopk(4, 6000, 20, dtype), decisions, logits)


@pytest.mark.parametrize(
    ("structure", "deferred"),
    [
        ("ties", 0),
        ("ascending", 1),
        *(thorough(*other) for other in [("ties", 1), ("ascending", 0)]),
        *(thorough(structure, deferred) for structure in ("constant", "special") for deferred in (0, 1)),
    ],
)
def test_buffer_that_overflows_is_compacted(structure: str, deferred: int) -> None:
    problem = SoftmaxTopk(4, 10240, 5)
    decisions = {**BLOCK, "threads": 64, "vectors": 3, "stages": 2, "deferred": deferred}
    assert Layout.of(problem, decisions).pool.overflows
    template = spaces.find("threshold_gate")
    verify(problem, structure, 3, emulated(template.build(problem, decisions), 3))


@pytest.mark.parametrize("deferred", [thorough(0), 1])
def test_equals_of_the_threshold_in_several_blocks(deferred: int) -> None:
    """The first of equals are wanted, wherever the others lie."""
    problem = SoftmaxTopk(3, 6000, 40)
    logits = np.zeros((3, problem.vocab))
    logits[1, 3500:] = 1  # only in the second block
    logits[2, [17, 2999, 3000, 5999]] = 2
    run("cluster_gate", problem, {**CLUSTER, "deferred": deferred}, logits)


@pytest.mark.parametrize("deferred", [0, thorough(1)])
def test_infinities_of_which_only_the_first_pass(deferred: int) -> None:
    """The sample's maximum, and so the threshold, is infinite; zeros tell nothing of how dense the infinities are."""
    problem = SoftmaxTopk(1, 6000, 40)
    logits = np.where(np.arange(problem.vocab) % 2 == 0, 0, np.inf)[None]
    run("threshold_gate", problem, {**BLOCK, "deferred": deferred}, logits)


GATES_IN_ORDER = [
    # (template, vocab, k, dtype, decisions), and tiles
    thorough("threshold_gate", 4096, 5, "float32", {**BLOCK, "vectors": 4}, 1),
    thorough("threshold_gate", 3600, 1, "float16", {**BLOCK, "vectors": 2}, 1),
    ("threshold_gate", 3001, 33, "bfloat16", BLOCK, 2),
    thorough("threshold_gate", 8186, 128, "float32", {**BLOCK, "vectors": 2}, 4),
    ("threshold_gate", 8192, 129, "float32", BLOCK, 8),
    thorough("threshold_gate", 8400, 400, "float32", {**BLOCK, "vectors": 3}, 3),
    ("threshold_gate", 4091, 5, "bfloat16", {**BLOCK, "deferred": 1}, 3),
    thorough("threshold_gate", 8192, 129, "float32", {**BLOCK, "stages": 2, "deferred": 1}, 8),
    thorough("threshold_gate", 8404, 50, "float32", {**BLOCK, "vectors": 3, "deferred": 1}, 3),
    ("cluster_gate", 8002, 33, "float32", {**CLUSTER, "stages": 1, "deferred": 1}, 4),
    thorough("cluster_gate", 7900, 50, "float32", {**CLUSTER, "cluster": 4, "vectors": 2, "stages": 1}, 1),
    thorough("cluster_gate", 8001, 5, "bfloat16", {**CLUSTER, "stages": 1}, 2),
    ("cluster_gate", 5200, 400, "float32", {**CLUSTER, "vectors": 3, "stages": 1}, 1),
]


@pytest.mark.parametrize(("name", "vocab", "k", "dtype", "decisions", "tiles"), GATES_IN_ORDER)
def test_rows_in_order(name: str, vocab: int, k: int, dtype: str, decisions: dict[str, int], tiles: int) -> None:
    problem = SoftmaxTopk(9, vocab, k, dtype)
    layout = Layout.of(problem, decisions)
    assert layout.first.floor is not None and layout.tiling.tiles == tiles
    rng = np.random.default_rng(vocab)
    logits = np.sort(rng.standard_normal((9, vocab)), axis=1)
    logits[1] = logits[1, ::-1]
    logits[2] = 1
    logits[3] = np.round(logits[3])
    # Its maximum in the middle, and in order but for one element.
    logits[4] = np.concatenate([logits[4, ::2], logits[4, 1::2][::-1]])
    logits[5, [vocab - 3, 7]] = logits[5, [7, vocab - 3]]
    # Infinities at the ends, NaN among the largest elements and NaN in all but a few vectors.
    logits[6, : vocab // 2], logits[6, -3:] = -np.inf, np.inf
    logits[7] = logits[7, ::-1]
    logits[[5, 7], [vocab - 6, 5]] = np.nan
    logits[8, np.arange(vocab) % 8 != 3] = np.nan
    run(name, problem, decisions, logits, seed=k)


@pytest.mark.parametrize(
    ("vocab", "k", "dtype", "decisions"),
    [
        thorough(4096, 5, "float32", {"vectors": 2, "stages": 2}),
        (6007, 5, "float32", {"threads": 128, "vectors": 6, "deferred": 1}),
        thorough(9001, 50, "bfloat16", {"threads": 64, "vectors": 4, "stages": 2}),
        thorough(7001, 400, "float16", {"threads": 128, "vectors": 4}),
    ],
)
def test_rows_to_come_are_prefetched(vocab: int, k: int, dtype: str, decisions: dict[str, int]) -> None:
    """More rows than the machine is taken to hold blocks; the emulator says if a prefetch leads out of the array."""
    problem = SoftmaxTopk(37, vocab, k, dtype)
    logits = np.random.default_rng(vocab).standard_normal((37, vocab))
    run("threshold_gate", problem, {**BLOCK, **decisions, "prefetch": 1}, logits, batch=4000)


def test_rows_to_come_are_prefetched_where_they_come_from_memory() -> None:
    """Only a second wave of blocks has rows to come, and only more than the L2 cache holds."""
    template = spaces.find("threshold_gate")
    ways = {(4000, 25000): ((0, 1), (0, 1)), (1024, 10240): ((0, 1), (0,)), (100, 200000): ((1,), (0,))}
    for (batch, vocab), (overlap, prefetch) in ways.items():
        table = template.space(SoftmaxTopk(batch, vocab, 5), SM90)
        assert (table["overlap"], table["prefetch"]) == (overlap, prefetch)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Radix selection, ranking in bins, and the bitonic sort."""
    watch_phases(monkeypatch, survivors, "radix_selection")
    watch_phases(monkeypatch, rank, "rank_in_bins", "sort_descending")


@pytest.mark.parametrize(
    ("name", "vocab", "k", "decisions", "unneeded"),
    [
        # Few enough keys are left to be ranked by counting alone.
        ("threshold_gate", 4096, 5, {**BLOCK, "vectors": 4}, ["radix_selection", "rank_in_bins"]),
        ("threshold_gate", 4075, 5, {**BLOCK, "vectors": 4}, ["radix_selection", "rank_in_bins"]),
        thorough("threshold_gate", 4000, 50, {**BLOCK, "vectors": 4}, ["radix_selection"]),
        thorough("threshold_gate", 8192, 50, BLOCK, ["radix_selection"]),
        ("threshold_gate", 8192, 50, {**BLOCK, "deferred": 1}, ["radix_selection"]),
        # The last block has 385 vectors, the others have 512.
        ("cluster_gate", 7684, 50, {**CLUSTER, "cluster": 4, "vectors": 2, "stages": 1}, ["radix_selection"]),
        thorough("cluster_gate", 7684, 400, {**CLUSTER, "cluster": 4, "vectors": 2, "stages": 1}, ["radix_selection"]),
        # Blocks of so many threads are alone on a multiprocessor, and take its shared memory.
        (
            "cluster_gate",
            60000,
            5,
            {**CLUSTER, "threads": 640, "vectors": 3, "stages": 2, "deferred": 1},
            ["radix_selection"],
        ),
    ],
)
def test_rows_in_order_never_fill_a_buffer(
    name: str,
    vocab: int,
    k: int,
    decisions: dict[str, int],
    unneeded: list[str],
    watched: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    problem = SoftmaxTopk(3, vocab, k)
    logits = np.sort(np.random.default_rng(vocab).standard_normal((3, vocab)), axis=1)
    logits[1] = logits[1, ::-1]
    logits[2] = 1
    run(name, problem, decisions, logits)
    assert not reached(capfd) & {*unneeded}


@pytest.mark.parametrize(
    ("name", "k", "decisions"),
    [
        ("threshold_gate", 50, {**BLOCK, "deferred": 1}),
        ("threshold_gate", 5, {**BLOCK, "vectors": 2, "stages": 2, "unroll": 0}),
        ("cluster_gate", 50, CLUSTER),
        thorough("cluster_gate", 5, {**CLUSTER, "deferred": 1}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", thorough("bfloat16")])
def test_rows_whose_sum_overflows_keep_their_threshold(
    name: str, k: int, decisions: dict[str, int], dtype: str, watched: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second reading in which all elements pass would fill the buffer."""
    problem = SoftmaxTopk(3, 16384, k, dtype)
    assert Layout.of(problem, decisions).pool.overflows
    sampled = sampled_columns(problem, decisions)
    others = np.setdiff1d(np.arange(problem.vocab), sampled)
    logits = np.random.default_rng(k).standard_normal((3, problem.vocab))
    logits[0] *= 64
    logits[0, others[7]] = np.abs(logits[0]).max() + 70
    logits[1, others[:3]] += 300
    # The part of a block is infinite, and nothing beside what the sample of the last one has.
    logits[2, others[:3]] += 300
    logits[2, sampled[-2:]] += 600
    run(name, problem, decisions, logits)
    assert not reached(capfd) & {"radix_selection"}


@pytest.mark.parametrize(
    ("name", "k", "decisions"),
    [
        ("threshold_gate", 50, {**BLOCK, "vectors": 2, "deferred": 1}),
        ("cluster_gate", 20, {**CLUSTER, "vectors": 4, "stages": 1, "deferred": 1}),
    ],
)
def test_too_high_a_threshold_is_lowered(
    name: str, k: int, decisions: dict[str, int], watched: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fewer than k elements reach the first threshold, as the sample has more large ones than its share. Not all of
    the warps have them, so that a lower one is found, which does not let all elements pass."""
    problem = SoftmaxTopk(2, 16384, k)
    layout = Layout.of(problem, decisions)
    assert layout.lowers and layout.pool.overflows
    tiling, rank = layout.tiling, layout.first.rank
    sampled = sampled_columns(problem, decisions).reshape(tiling.cluster, -1, tiling.warps, 32, tiling.width)
    logits = np.random.default_rng(k).standard_normal((2, problem.vocab))
    few = sampled[0, 0, : rank.warp, : rank.lane, 0].ravel()
    assert len(few) < k
    logits[1, few] = logits[1].max() + np.linspace(0.1, 0.5, len(few))
    run(name, problem, decisions, logits)
    assert not reached(capfd) & {"radix_selection"}


@pytest.mark.parametrize(
    ("name", "vocab", "k", "decisions"),
    [
        ("threshold_gate", 4096, 50, {**BLOCK, "vectors": 4}),
        ("threshold_gate", 8192, 400, {**BLOCK, "threads": 256}),
        thorough("threshold_gate", 8192, 5, {**BLOCK, "deferred": 1}),
        thorough("threshold_gate", 8192, 50, {**BLOCK, "deferred": 1}),
        ("cluster_gate", 7684, 50, {**CLUSTER, "cluster": 4, "vectors": 2, "stages": 1}),
        thorough("cluster_gate", 12000, 400, {**CLUSTER, "vectors": 3, "stages": 1}),
    ],
)
def test_rows_of_few_values_need_neither_a_compaction_nor_a_sort(
    name: str, vocab: int, k: int, decisions: dict[str, int], watched: None, capfd: pytest.CaptureFixture[str]
) -> None:
    problem = SoftmaxTopk(3, vocab, k)
    logits = np.round(np.random.default_rng(vocab).standard_normal((3, vocab)))
    run(name, problem, decisions, logits)
    assert not reached(capfd) & {"radix_selection", "sort_descending"}


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


def test_points_are_chosen_without_scipy_or_the_compiler() -> None:
    code = (
        "import sys; sys.modules['scipy'] = None; from cases import SM90; from tvm_sparse.core import spaces;"
        " from tvm_sparse.core.registry import parse;"
        " point = spaces.fallback(parse('softmax_topk/batch=10,vocab=25000,k=100'), SM90);"
        " print(point.template, 'tvm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout.split() == ["cluster_gate", "False"], done.stderr


def test_tails_of_binomials_are_those_of_scipy() -> None:
    special = pytest.importorskip("scipy.special")
    chances = np.concatenate([[0, 1e-9, 0.5, 1 - 1e-9, 1], np.random.default_rng(0).random(40)])
    for n, p in itertools.product((1, 2, 7, 16, 32), chances):
        found = [more_than(least, n, float(p)) for least in range(n)]
        np.testing.assert_allclose(found, special.bdtrc(np.arange(n), n, p), rtol=1e-10, atol=1e-300)


def test_first_thresholds_are_those_of_scipys_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records hold decisions whose programs depend on them: another rank would be another program."""
    special = pytest.importorskip("scipy.special")
    samples = list(itertools.product((1, 2, 5, 16, 50, 128, 400, 2048), (1.0, 0.43, 0.1, 0.017), (1, 2, 7, 8, 24, 32)))
    found = [first_threshold.__wrapped__(*sample) for sample in samples]
    monkeypatch.setattr(thresholds, "more_than", lambda least, n, p: float(special.bdtrc(least, n, p)))
    assert found == [first_threshold.__wrapped__(*sample) for sample in samples]
    assert len(set(found)) > 50


def test_first_threshold_where_none_is_any_good() -> None:
    assert first_threshold(400, 1.0, 1) is None


def test_floor_takes_as_few_lanes_as_hold_k() -> None:
    assert floor_of_runs(1, 4, 32, 1) == Floor(1, 1)
    assert floor_of_runs(50, 4, 32, 8) == Floor(1, 13)
    assert floor_of_runs(128, 4, 32, 1) == Floor(1, 32)
    assert floor_of_runs(128, 4, 31, 8) == Floor(2, 16)
    assert floor_of_runs(400, 8, 32, 8) == Floor(2, 25)
    assert floor_of_runs(400, 4, 32, 3) is None
    assert floor_of_runs(2048, 4, 32, 32) is None


@pytest.mark.parametrize(("name", "arch"), [("threshold_gate", "sm_86"), ("cluster_gate", "sm_120")])
def test_what_a_block_has_no_shared_memory_for_is_no_point(name: str, arch: str) -> None:
    where, problem = machine.resolve(arch), SoftmaxTopk(4, 100_000, 400)
    table, most = spaces.applicable(problem, where)[0][name], 0
    for point in itertools.islice(spaces.points(problem, where, {name: table}), 500):
        most = max(most, Layout.of(problem, point.values).pool.bytes)
    assert 0 < most <= where.block_shared_bytes - STATIC
