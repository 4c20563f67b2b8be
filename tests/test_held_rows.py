"""What is particular to held_rows: bounds that tell little, rows that are not whole vectors, and the ways out."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import SM80, SM90, reached, thorough, watch_phases
from test_far_rows import far_logits
from test_templates import all_garbage, emulated

from tvm_sparse.core import spaces
from tvm_sparse.core.machine import resolve
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import NotApplicable, Program
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk
from tvm_sparse.schedules.device.pool import STATIC
from tvm_sparse.schedules.softmax_topk.held_rows import Layout, find, kernel, rank
from tvm_sparse.schedules.softmax_topk.held_rows.space import MAX_K, allowed, default, points
from tvm_sparse.schedules.softmax_topk.held_rows.words import LEAST, NOTHING

pytestmark = pytest.mark.drawn

TEMPLATE = spaces.find("held_rows", "softmax_topk")


# How a row is held: in registers, or staged; and each with a bound on which blocks agree, which is early or late.
REGISTERS, STAGED, EARLY, LATE = 0, 1, 2, 3


def point(cluster: int, threads: int, held: int = REGISTERS) -> dict[str, int]:
    staged, agreed = int(held in (STAGED, EARLY)), int(held in (EARLY, LATE))
    return {"cluster": cluster, "threads": threads, "staged": staged, "row_bound": agreed}


def groups_of(layout: Layout, row: int) -> np.ndarray:
    """Of each column, the group of the thread that holds it in its block."""
    lead = row * layout.vocab % layout.width
    vector = (np.arange(layout.vocab) + lead) // layout.width
    return vector % layout.share % layout.threads % layout.groups


def run(
    problem: SoftmaxTopk,
    decisions: dict[str, int],
    logits: np.ndarray,
    seed: int = 0,
    scale: float = 1.0,
    log: int | None = None,
    stale: Any = None,
) -> list[np.ndarray]:
    assert allowed(replace(problem, batch=1), SM90, decisions) is None
    inputs: list[Any] = [logits.astype(numpy_dtype(problem.dtype)), scale, seed % 2 if log is None else log]
    if problem.ids:
        vocab = problem.vocab
        ids = np.random.default_rng(seed).integers(0, vocab, (problem.batch, problem.ids))
        # The best ones, the ends, and what is out of range.
        ids[:, 0] = np.nan_to_num(inputs[0].astype("float32"), nan=np.inf).argmax(axis=1)
        some = [0, vocab - 1, -1, vocab, 2**40, -(2**40)][: problem.ids - 1]
        ids[:, 1 : 1 + len(some)] = some
        inputs.append(ids)
    outputs = problem.empty_outputs()
    program = built(replace(problem, batch=1), tuple(decisions.items()))
    emulated(program, seed, stale)([*inputs, *outputs])
    problem.check(inputs, problem.reference(inputs), outputs)
    return outputs


@pytest.fixture(scope="module", autouse=True)
def watched() -> Iterator[None]:
    """Phases that are not for every row: ways out, the ranking of many keys, what is done with many of all blocks."""
    with pytest.MonkeyPatch.context() as patch:
        watch_phases(patch, find, "find_tops", "find_firsts", "find_first_reached", "select_keys")
        watch_phases(patch, kernel, "unite_parts", "filter_parts")
        watch_phases(patch, rank, "rank_all")
        yield
        built.cache_clear()


@functools.lru_cache(maxsize=16)
def built(problem: SoftmaxTopk, decisions: tuple[tuple[str, int], ...]) -> Program:
    """The program of a point: it serves every batch, and several tests run it."""
    return TEMPLATE.build(problem, dict(decisions))


ROWS = 20


def awkward(layout: Layout, rng: np.random.Generator) -> np.ndarray:
    """ROWS rows of logits, each awkward in another way."""
    vocab, k = layout.vocab, layout.k
    x = rng.standard_normal((ROWS, vocab))
    x[0] *= 3
    x[1] = np.round(x[1])
    x[2] = 0
    x[2, ::3] = -0.0
    x[3] = np.sort(x[3])
    x[4] = -np.sort(x[4])
    # Fewer than k above minus infinity, anywhere and all in one block; in the last row exactly k are.
    few = rng.permutation(vocab)
    x[5, few[k - 1 :]] = -np.inf
    x[6, : vocab - k // 2] = -np.inf
    x[7, few[k:]] = -np.inf
    # Half of the blocks have nothing, and the others are far below 0. Of given columns the emulator, which unlike nvcc
    # makes no product and sum one, rounds the products.
    x[8, : vocab // 2] = -np.inf
    x[8, vocab // 2 :] -= 200 if layout.ids else 1000
    x[9, 7] = np.nan
    x[10, -3] = np.inf
    x[11] = -np.inf
    x[12, ::3] = np.nan
    x[13, vocab // 5 :][:40] += np.arange(40) * 8
    # All that is large, or equal, or infinite, lies in fewer than k groups.
    crowded = [groups_of(layout, row) < k - 1 for row in (14, 15, 16, 17)]
    x[14, crowded[0]] += 9
    x[15] = np.where(crowded[1], 5, -5)
    x[16, crowded[2]] = np.inf
    x[17, ~crowded[3]] = -np.inf
    # Equals of the k-th best in all blocks, with larger ones among the last columns.
    x[18] = np.minimum(x[18], 0)
    x[18, -(k // 2) - 1 :] = 3
    # Subnormal in float32, or in float16.
    x[19] *= 1e-40 if layout.dtype != "float16" else 1e-7
    return x


# vocab, k, dtype, cluster, threads, ids, how it is held, and vectors of a thread
CASES = [
    (8001, 20, "bfloat16", 4, 128, 9, 0, 2),
    (8000, 20, "float32", 8, 256, 2, 0, 1),
    (8001, 33, "float16", 1, 128, 0, 0, 8),
    # Of a block's warps several take the keys of a part, some none, or all several parts.
    (4100, 20, "float32", 2, 512, 0, 0, 2),
    (12001, 40, "float16", 16, 128, 0, 0, 1),
    # Of 128 threads of the last block, or of all, only a few have a vector.
    (1001, 50, "float32", 4, 128, 3, 0, 1),
    (50, 50, "float32", 1, 128, 0, 0, 1),
    # Of the last block some threads have fewer vectors, or none.
    (6400, 50, "float32", 2, 128, 0, STAGED, 7),
    (8000, 50, "float16", 1, 640, 150, STAGED, 2),
    (8008, 33, "bfloat16", 1, 128, 5, STAGED, 8),
    # By steps of two vectors, and in a block alone of one.
    (8000, 20, "bfloat16", 2, 128, 3, EARLY, 4),
    (6400, 24, "float32", 1, 256, 0, EARLY, 7),
    # Of a cluster whose parts the warps share evenly, or not; the others' tops come by halves of a warp, or by warps.
    (8001, 20, "bfloat16", 4, 128, 9, LATE, 2),
    (9000, 33, "float32", 3, 256, 0, LATE, 3),
    (12001, 24, "float16", 16, 128, 2, LATE, 1),
]
OTHERS = [
    (5003, 5, "float16", 1, 256, 0, 0, 3),
    (6401, 33, "float32", 1, 256, 3, 0, 7),
    (8001, 50, "bfloat16", 8, 128, 0, 0, 1),
    (8192, 5, "bfloat16", 1, 256, 0, 0, 4),
    (5003, 1, "float32", 4, 128, 0, 0, 3),
    (8192, 20, "float16", 2, 128, 0, 0, 4),
    (12802, 24, "float32", 8, 384, 0, 0, 2),
    (301, 50, "float16", 1, 128, 0, 0, 1),
    (4096, 1, "bfloat16", 2, 128, 7, STAGED, 2),
    (8200, 20, "float16", 4, 128, 0, STAGED, 3),
    (4100, 20, "float32", 2, 256, 3, STAGED, 3),
    (16008, 24, "float16", 2, 128, 9, EARLY, 8),
    (16384, 5, "bfloat16", 8, 128, 0, EARLY, 2),
    (12000, 1, "float32", 16, 128, 2, EARLY, 2),
    (4096, 20, "bfloat16", 1, 128, 0, EARLY, 4),
    (9600, 24, "bfloat16", 3, 128, 0, EARLY, 4),
    (8200, 50, "bfloat16", 6, 128, 0, LATE, 2),
    (16000, 5, "float32", 2, 256, 3, LATE, 8),
    (12003, 1, "float16", 5, 128, 0, LATE, 3),
]


@pytest.mark.parametrize(
    ("vocab", "k", "dtype", "cluster", "threads", "ids", "held", "vectors"),
    [
        # What the three that are left out have of dtypes, clusters and how a row is held others have.
        *(thorough(*case) if case in (CASES[1], CASES[2], CASES[9]) else case for case in CASES),
        *(thorough(*other) for other in OTHERS),
    ],
)
def test_awkward_rows(
    vocab: int, k: int, dtype: str, cluster: int, threads: int, ids: int, held: int, vectors: int
) -> None:
    problem, decisions = SoftmaxTopk(ROWS, vocab, k, dtype, ids=ids), point(cluster, threads, held)
    layout = Layout.of(problem, decisions)
    assert layout.vectors == vectors
    seed = [*CASES, *OTHERS].index((vocab, k, dtype, cluster, threads, ids, held, vectors))
    logits = awkward(layout, np.random.default_rng(vocab + k))
    # In every third case arrays hold garbage until the producer kernel is done.
    run(problem, decisions, logits, seed, (1.0, 0.625)[seed // 2 % 2], stale=None if seed % 3 else all_garbage(seed))


@pytest.mark.parametrize(
    ("dtype", "vocab", "cluster"), [("float32", 2051, 1), ("float16", 2048, 2), ("bfloat16", 3001, 2)]
)
def test_least_finite_numbers(dtype: str, vocab: int, cluster: int) -> None:
    """They are above minus infinity, and in many rows the bound is no more than that."""
    k = 20
    least = float(ml_dtypes.finfo(dtype).min)
    rng = np.random.default_rng(vocab)
    x = np.full((5, vocab), least)
    x[1, ::2] = -np.inf
    x[2, k // 2 :] = -np.inf
    x[3, rng.permutation(vocab)[: k - 1]] = rng.standard_normal(k - 1)
    x[4] = -np.inf
    x[4, -30:] = least
    # A scale that exponents are of a size with.
    run(SoftmaxTopk(5, vocab, k, dtype), point(cluster, 128), x, seed=1, scale=-8 / least)


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        ("float32", REGISTERS),
        thorough("float32", STAGED),
        thorough("bfloat16", REGISTERS),
        ("bfloat16", STAGED),
        thorough("float32", EARLY),
        ("bfloat16", EARLY),
        ("float32", LATE),
        thorough("bfloat16", LATE),
    ],
)
def test_numbers_that_are_rounded_by_more_than_exponents_bear(dtype: str, held: int) -> None:
    """Masks that a warp has nothing but, and rows of nothing but such numbers."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 4000))
    logits[0, 1900:] = -1e20
    logits[1, 1900:] = float(ml_dtypes.finfo(dtype).min)
    logits[2] = -1e20
    logits[3] = np.where(rng.random(4000) < 0.5, 1e12, -1e12)
    logits[4] *= 1e30
    run(SoftmaxTopk(5, 4000, 20, dtype), point(2, 128, held), logits)


@pytest.mark.parametrize(
    ("dtype", "vocab", "cluster", "held"),
    [
        ("float32", 4000, 2, EARLY),
        ("float32", 4004, 3, LATE),
        thorough("float16", 8001, 4, LATE),
        thorough("bfloat16", 8000, 2, EARLY),
        thorough("float32", 4000, 2, STAGED),
        thorough("bfloat16", 8001, 4, REGISTERS),
    ],
)
def test_rows_far_from_zero(dtype: str, vocab: int, cluster: int, held: int) -> None:
    """Sums relative to a reference whose own rounding counts, drawn anew in every run."""
    rng = np.random.default_rng()
    logits = far_logits(rng, (10, vocab), dtype).astype("float32")
    # Elements of a usual spread about any place: what rounding takes of the reference is up to a quarter.
    sizes = 10.0 ** rng.uniform(2, 6 if dtype == "float32" else 4, size=(5, 1))
    logits[5:] = rng.standard_normal((5, vocab)) * rng.choice([1, 8], size=(5, 1)) + sizes * rng.choice([-1, 1], (5, 1))
    logits[8:].sort()
    run(SoftmaxTopk(10, vocab, 20, dtype), point(cluster, 128, held), logits, log=0)


@pytest.mark.parametrize("held", [REGISTERS, LATE])
def test_same_bits_in_any_order_of_threads(held: int) -> None:
    problem, decisions = SoftmaxTopk(ROWS, 4001, 20, "bfloat16", ids=2), point(4, 128, held)
    logits = awkward(Layout.of(problem, decisions), np.random.default_rng(1))
    found = [[a.tobytes() for a in run(problem, decisions, logits, seed, log=0)[:2]] for seed in (2, 4, 6)]
    assert found[0] == found[1] == found[2]


WAYS = [
    # vocab, k, dtype, cluster, threads, and how it is held
    (8001, 20, "bfloat16", 1, 128, REGISTERS),
    (16384, 20, "float32", 2, 128, EARLY),
    (8192, 33, "float32", 2, 256, STAGED),
    (8001, 5, "float32", 4, 128, REGISTERS),
    (8001, 20, "bfloat16", 4, 128, LATE),
]
SOME_WAYS = [*WAYS[:3], thorough(*WAYS[3]), WAYS[4]]
# What finds a column up to which equals are wanted.
COLUMN = {LATE: "find_first_reached"}


@pytest.mark.parametrize(("vocab", "k", "dtype", "cluster", "threads", "held"), WAYS)
def test_random_rows_take_no_way_out(
    vocab: int, k: int, dtype: str, cluster: int, threads: int, held: int, capfd: pytest.CaptureFixture[str]
) -> None:
    logits = np.random.default_rng(vocab).standard_normal((12, vocab)) * 3
    # Minus infinity is as good as any other number, and so are a few strong outliers.
    logits[1, ::2] = -np.inf
    logits[2, : vocab // 2] -= 50
    logits[3, vocab // 3 : vocab // 3 + 5] += 100
    # Where blocks agree on a bound they have no more keys than are ranked at once.
    agreed = ["find_tops", "unite_parts", "filter_parts"] if held in (EARLY, LATE) else []
    run(SoftmaxTopk(12, vocab, k, dtype), point(cluster, threads, held), logits)
    assert not reached(capfd) & {COLUMN.get(held, "find_firsts"), "select_keys", "rank_all", *agreed}


@pytest.mark.parametrize(("vocab", "k", "dtype", "cluster", "threads", "held"), SOME_WAYS)
def test_rows_in_order_never_fill_the_room(
    vocab: int, k: int, dtype: str, cluster: int, threads: int, held: int, capfd: pytest.CaptureFixture[str]
) -> None:
    logits = np.sort(np.random.default_rng(vocab).standard_normal((4, vocab)))
    # All different, as those of 16 bits are not.
    logits[1:] = np.arange(vocab) / 64 - 60
    logits[2] = logits[2, ::-1]
    if dtype != "float32":
        most = np.arange(1, vocab + 1).astype("uint16")
        logits[:2] = np.sort(most.view(numpy_dtype(dtype)).astype("float32"))
        logits[2:] = logits[0, ::-1]
    # In ascending order most come behind an early bound: the row gets another one, with a column.
    run(SoftmaxTopk(4, vocab, k, dtype), point(cluster, threads, held), logits)
    assert not reached(capfd) & {*([COLUMN.get(held, "find_firsts")] if held != EARLY else []), "select_keys"}


@pytest.mark.parametrize(("vocab", "k", "dtype", "cluster", "threads", "held"), SOME_WAYS)
def test_equals_need_a_column_but_no_selection(
    vocab: int, k: int, dtype: str, cluster: int, threads: int, held: int, capfd: pytest.CaptureFixture[str]
) -> None:
    logits = np.round(np.random.default_rng(vocab).standard_normal((8, vocab)))
    logits[1] = 0
    logits[2] = -np.sort(logits[2])
    logits[4] = np.arange(vocab) < 2 * vocab // 3
    logits[5, :] = -2.0
    logits[5, 3 : k // 2] = 7
    logits[3] = logits[4, ::-1]
    logits[6].sort()
    logits[7] = np.sort(np.random.default_rng(k).standard_normal(vocab))
    problem, decisions = SoftmaxTopk(8, vocab, k, dtype), point(cluster, threads, held)
    run(problem, decisions, logits)
    found = reached(capfd)
    assert COLUMN.get(held, "find_firsts") in found and "select_keys" not in found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_as_many_equals_as_are_wanted(dtype: str) -> None:
    """The first block has just k elements that reach the bound, each alone in its group, the first of its vector; the
    others have as many: the last of the first block's is the k-th best."""
    k, cluster, threads = 20, 4, 128
    problem, decisions = SoftmaxTopk(4, 8192, k, dtype), point(cluster, threads, LATE)
    layout, rng = Layout.of(problem, decisions), np.random.default_rng()
    block = layout.share * layout.width
    logits = -1 - np.abs(rng.standard_normal((4, problem.vocab)))
    for row in logits:
        for part in range(cluster):
            vectors = rng.permutation(layout.groups)[:k]  # the first ones of as many threads
            row[part * block + vectors * layout.width] = 5
    _, indices = run(problem, decisions, logits)
    assert (indices < block).all()


@pytest.mark.parametrize("held", [REGISTERS, STAGED])
def test_a_block_finds_as_many_keys_as_there_is_room_for(held: int) -> None:
    """Or one more, or one less: all in k groups, the least of them alone in its group."""
    k, dtype = 20, "bfloat16"
    problem, decisions = SoftmaxTopk(6, 8192, k, dtype), point(1, 128, held)
    layout, rng = Layout.of(problem, decisions), np.random.default_rng()
    logits = np.full((6, problem.vocab), -1.0)
    for number, row in enumerate(logits):
        groups = groups_of(layout, number)
        chosen = rng.permutation(layout.groups)[:k]
        places = np.flatnonzero(np.isin(groups, chosen[1:]))
        count = layout.room + number % 3 - 1
        row[rng.permutation(places)[: count - 1]] = rng.choice([5.5, 6, 7, 8], count - 1)
        row[rng.choice(np.flatnonzero(groups == chosen[0]))] = 5
    run(problem, decisions, logits)


@pytest.mark.parametrize(
    ("structure", "vocab", "held"),
    [
        ("crowded", 8001, REGISTERS),
        ("nan", 8000, EARLY),
        ("nan", 8000, STAGED),
        ("crowded", 8001, LATE),
        thorough("few", 8001, REGISTERS),
    ],
)
def test_crowded_rows_need_the_selection(
    structure: str, vocab: int, held: int, capfd: pytest.CaptureFixture[str]
) -> None:
    problem, decisions = SoftmaxTopk(1, vocab, 20, "bfloat16"), point(2, 128, held)
    logits = np.random.default_rng(3).standard_normal((1, vocab))
    crowded = groups_of(Layout.of(problem, decisions), 0) < problem.k - 1
    if structure == "crowded":
        logits[0, crowded] += 9
    elif structure == "nan":
        logits[0, ::3] = np.nan
    else:
        logits[0, ~crowded] = -np.inf
    run(problem, decisions, logits)
    assert "select_keys" in reached(capfd)


def test_a_smaller_machine_has_smaller_shares() -> None:
    """Of which a thread block's shared memory holds less than half of what Hopper's does."""
    small = resolve("sm_120")
    problem = SoftmaxTopk(64, 128256, 20, "bfloat16")
    found = [Layout.of(problem, one) for one in points(problem, small)]
    assert found and max(layout.bytes for layout in found) + STATIC <= small.block_shared_bytes
    assert max(Layout.of(problem, one).bytes for one in points(problem, SM90)) > small.block_shared_bytes


@pytest.mark.parametrize(
    "problem",
    [
        SoftmaxTopk(1, 50, 50),
        SoftmaxTopk(10, 25000, 5),
        SoftmaxTopk(1, 151936, 20, "bfloat16"),
        SoftmaxTopk(8, 128256, 50, "float16", ids=4),
        SoftmaxTopk(132, 32001, 33),
        SoftmaxTopk(1000, 6400, 1, "bfloat16"),
    ],
    ids=lambda problem: problem.key.split("/")[1],
)
def test_default_is_a_point(problem: SoftmaxTopk) -> None:
    found = points(problem, SM90)
    chosen = TEMPLATE.default(problem, SM90)
    assert chosen == default(problem, SM90) in found and TEMPLATE.point(problem, SM90, chosen) is None
    # Every block of a small batch has a multiprocessor of its own, or there is but one for a row.
    assert chosen["cluster"] == 1 or problem.batch <= SM90.clusters_at_once(chosen["cluster"])
    for one in found:
        layout = Layout.of(problem, one)
        assert layout.vectors <= 16 and layout.threads % 32 == 0 and layout.at_once % layout.rankers == 0
        # What a warp of which not all lanes have a vector finds fits in, and so do the rows in order.
        assert layout.room >= problem.k * layout.width and layout.room % 32 == 0
        # Bytes that an mbarrier awaits.
        assert layout.cluster * (layout.room + 1) * 8 < 1 << 20


@pytest.mark.parametrize(
    ("problem", "decisions", "reason"),
    [
        (SoftmaxTopk(1, 100_000, 5), point(1, 128), "784 words of a row in a thread's registers are more than 64"),
        (SoftmaxTopk(1, 50_000, 5), point(1, 1024), "52 words of a row in a thread's registers are more than 32"),
        (SoftmaxTopk(1, 1000, 5), point(1, 512), "of 512 threads only 256 have a vector"),
        (SoftmaxTopk(1, 1000, 5), point(16, 128), "of 16 blocks the last would have nothing"),
        (SoftmaxTopk(200, 100_000, 5, "bfloat16"), point(8, 256), "1600 blocks are more than run at once"),
        (SoftmaxTopk(1, 1000, 50), point(1, 64), "64 threads are too few to rank 128 keys at once"),
        (SoftmaxTopk(1, 98304, 50, "float16"), point(32, 256), "bytes of shared memory are more than 204800"),
        (
            SoftmaxTopk(1, 100_001, 5),
            point(16, 512, STAGED),
            "rows of 100001 elements of float32 do not begin with a vector",
        ),
        (SoftmaxTopk(1, 8000, 5), point(4, 512, STAGED), "1 vectors of a thread are not staged: from 2 to 16 are"),
        (SoftmaxTopk(1, 80_000, 5), point(4, 256, STAGED), "20 vectors of a thread are not staged: from 2 to 16 are"),
        (SoftmaxTopk(1, 8000, 5), point(1, 128, LATE), "in the registers of one block is the block's own"),
        (SoftmaxTopk(1, 80_000, 25), point(4, 512, EARLY), "k=25 exceeds 24: too much of the row would reach"),
        (SoftmaxTopk(80, 32_000, 5), point(2, 512, EARLY), "160 blocks with an early bound have no multiprocessor"),
        (SoftmaxTopk(1, 80_000, 5), point(4, 1024, EARLY), "1024 threads and a warp are more than 1024"),
    ],
)
def test_points_that_are_left_out(problem: SoftmaxTopk, decisions: dict[str, int], reason: str) -> None:
    assert reason in (allowed(problem, SM90, decisions) or "")
    assert decisions not in points(problem, SM90)


def test_problems_that_it_is_not_for() -> None:
    usual = SoftmaxTopk(10, 25000, 20)
    assert TEMPLATE.space(usual, SM90)["cluster"] == (1, 2, 3, 4, 5, 6, 8, 16)
    for problem, machine, reason in (
        (SoftmaxTopk(10, 25000, MAX_K + 1), SM90, "k=51 exceeds 50"),
        (SoftmaxTopk(10, 25000, 20, bias=1), SM90, "bias"),
        (usual, SM80, "sm_80 has no thread block clusters"),
        (SoftmaxTopk(1, 1_000_000, 20), SM90, "do not hold 1 rows of 1000000 at once"),
        (SoftmaxTopk(2000, 25000, 20), SM90, "do not hold 2000 rows of 25000 at once"),
    ):
        with pytest.raises(NotApplicable, match=reason):
            TEMPLATE.space(problem, machine)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_constants_of_dtypes(dtype: str) -> None:
    kind = numpy_dtype(dtype)
    least = np.array(ml_dtypes.finfo(kind).min, kind)
    # The order of a negative number is the complement of its bits as float32.
    assert ~least.astype("float32").view("uint32") == np.uint32(LEAST[dtype])
    # The next one below is minus infinity.
    with np.errstate(over="ignore"):
        assert np.nextafter(least, np.array(-np.inf, kind)) == -np.inf
    words = np.full(4 // kind.itemsize, -np.inf, kind)
    assert words.view("uint32")[0] == NOTHING[dtype]
