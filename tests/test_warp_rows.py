"""What is particular to warp_rows: rows that its bins or its threshold do not tell apart, and where vectors end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import PARKED_BYTES, SM80, SM90, needs_cuda, thorough
from test_templates import all_garbage, emulated, verify

from tvm_sparse.artifacts.compile import compile_candidate
from tvm_sparse.core import spaces
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk
from tvm_sparse.schedules.softmax_topk.warp_rows.space import COUNTED, Layout, allowed

pytestmark = pytest.mark.drawn

TEMPLATE = spaces.find("warp_rows")
DTYPES = ("float32", "float16", "bfloat16")


def point(rows: int, lanes: int = 32) -> dict[str, int]:
    return {"rows": rows, "overlap": 1, "lanes": lanes}


def run(problem: SoftmaxTopk, logits: np.ndarray, seed: int = 0, rows: int = 2, lanes: int = 32) -> list[np.ndarray]:
    program = TEMPLATE.build(problem, point(rows, lanes))
    inputs = [logits.astype(numpy_dtype(problem.dtype)), 1.0, seed % 2]
    outputs = problem.empty_outputs()
    emulated(program, seed)([*inputs, *outputs])
    problem.check(inputs, problem.reference(inputs), outputs)
    return outputs


def sizes() -> list[Any]:
    """Around the ends of warps, vectors and registers, with each dtype, extra and number of rows a block in turn."""
    vocabs, ks = (1, 7, 33, 128, 255, 1000, 1023, 2047, 2048), (1, 5, 31, 32, 33, 50, 64, 65, 129, 400, 1000, 1024)
    pairs = [(vocab, k) for vocab in vocabs for k in ks if k <= vocab]
    # A part of these: the others differ in nothing that has a branch of its own.
    usual = {(1000, 5), (1000, 50), (1000, 400)}
    chosen = enumerate([pair for number, pair in enumerate(pairs) if number % 7 == 0 or pair in usual])
    found = [SoftmaxTopk(1 + i % 5, *pair, DTYPES[i % 3], bias=i // 3 % 2, ids=i // 2 % 2 * 3) for i, pair in chosen]
    return [one if i % 2 == 0 or one.vocab < 200 else thorough(one) for i, one in enumerate(found)]


@pytest.mark.parametrize("problem", sizes(), ids=lambda p: p.key.split("/")[1])
def test_every_size(problem: SoftmaxTopk) -> None:
    rows = TEMPLATE.space(problem, SM90)["rows"][(problem.k + problem.vocab) % 4]
    program = TEMPLATE.build(problem, point(rows))
    for seed, structure in enumerate(problem.structures[problem.k % 3 :: 3]):
        # In every other case arrays hold garbage until the producer kernel is done.
        stale = all_garbage(seed) if seed % 2 else None
        verify(problem, structure, seed, emulated(program, seed, stale))


@pytest.mark.parametrize(
    ("k", "dtype"),
    [
        (5, "float32"),
        thorough(5, "bfloat16"),
        (COUNTED, "float16"),
        thorough(COUNTED + 1, "bfloat16"),
        thorough(50, "float32"),
        (50, "float16"),
        thorough(200, "float32"),
        (200, "bfloat16"),
    ],
)
def test_values_that_are_hard_to_tell_apart(k: int, dtype: str) -> None:
    hard_rows(SoftmaxTopk(15, 515, k, dtype), point(4))


def hard_rows(problem: SoftmaxTopk, chosen: dict[str, int]) -> None:
    """Run a point on rows whose k best are hard to find."""
    vocab, k = problem.vocab, problem.k
    rng = np.random.default_rng(k)
    x = rng.standard_normal((15, vocab))
    x[0] = 0  # equal, and -0.0 as well
    x[0, ::3] = -0.0
    x[1, 100] = 1e4  # one that stretches the range
    x[2] = 1e4 + np.round(x[2])
    x[3] = np.round(x[3])
    x[4] = -np.inf
    x[5, k // 2 :] = -np.inf  # fewer than k above minus infinity
    x[6, rng.permutation(vocab)[: k + 3]] = np.nan  # more NaN than are wanted
    x[7, rng.permutation(vocab)[: k // 2]] = np.nan
    x[8, rng.permutation(vocab)[: k + 3]] = np.inf
    x[9] *= 1e-40  # subnormal in float32 and bfloat16, both signs
    x[10] = -np.abs(x[10]) * 1e-40
    x[11, 37:] = x[11, 36]  # the k-th is one of many equals, with larger ones among the first
    x[12] = np.where(x[12] > 1, 1 + x[12] * 1e-4, x[12])  # many close together at the top
    x[13, :] = np.nan
    x[14] *= 1e-37  # around the smallest normal float32
    run(problem, x, k, chosen["rows"], chosen["lanes"])


PAIRS = [
    SoftmaxTopk(3, 256, 8),
    SoftmaxTopk(7, 127, 7, "float16", ids=2, per_row=1),
    SoftmaxTopk(5, 300, 8, "bfloat16", allowed=1, bias=1),
    SoftmaxTopk(1, 33, 3, "float16"),
    SoftmaxTopk(4, 512, 1, "bfloat16", ids=20),
    SoftmaxTopk(3, 100, 4, capped=1),
]


@pytest.mark.parametrize("problem", [PAIRS[0], *map(thorough, PAIRS[1:])], ids=lambda p: p.key.split("/")[1])
def test_two_rows_a_warp(problem: SoftmaxTopk) -> None:
    chosen = point((2, 4, 8)[problem.k % 3], lanes=16)
    assert allowed(problem, SM90, chosen) is None
    program = TEMPLATE.build(problem, chosen)
    for seed, structure in enumerate(problem.structures):
        verify(problem, structure, seed, emulated(program, seed, all_garbage(seed) if seed % 2 else None))


@pytest.mark.parametrize(("k", "dtype"), [(8, "float32"), thorough(5, "bfloat16"), thorough(1, "float16")])
def test_hard_rows_two_a_warp(k: int, dtype: str) -> None:
    hard_rows(SoftmaxTopk(15, 501, k, dtype), point(4, lanes=16))


def test_where_a_warp_may_have_two_rows() -> None:
    cases = ((SoftmaxTopk(9, 256, 9), 4, "k=9"), (SoftmaxTopk(9, 513, 8), 4, "36 words"), (PAIRS[0], 1, "has 2 rows"))
    for problem, rows, reason in cases:
        assert reason in (allowed(problem, SM90, point(rows, lanes=16)) or "")


def test_range_beyond_float32() -> None:
    x = np.random.default_rng(0).standard_normal((3, 300))
    x[0, :9], x[1, 9:40] = 3e38, -3e38
    x[2, ::2], x[2, 1::2] = 3e38, -3e38
    for k in (5, 40, 160):
        problem = SoftmaxTopk(3, 300, k)
        # The exponentials are not in question here, which such a range does not fit.
        program, inputs = TEMPLATE.build(problem, point(1)), [x.astype(np.float32), 1e-38, 0]
        outputs = problem.empty_outputs()
        emulated(program, k)([*inputs, *outputs])
        assert np.array_equal(outputs[1], problem.reference(inputs)[1])


@pytest.mark.parametrize("k", [9, thorough(60), 300])
def test_same_bits_in_any_order_of_threads(k: int) -> None:
    x = np.random.default_rng(k).standard_normal((3, 700))
    x[2] = np.round(x[2])
    results = [[a.tobytes() for a in run(SoftmaxTopk(3, 700, k), x, seed)] for seed in (2, 4, 6)]
    assert results[0] == results[1] == results[2]


def test_registers_hold_the_row_and_shared_memory_what_survives() -> None:
    layout = Layout.of(SoftmaxTopk(4000, 1000, 400), point(4))
    assert (layout.held, layout.groups, layout.bins) == (32, 16, 512)
    # A multiprocessor holds all the rows that it gets of 4000, with a KB that each block of four takes for itself.
    assert 8 * layout.bytes + 8 * 1024 <= 227 * 1024
    assert Layout.of(SoftmaxTopk(1, 2048, 1024), point(8)).bytes <= 112 * 1024
    for k in (1, 16, 17, 400, 1000):
        layout = Layout.of(SoftmaxTopk(1, 1001, k), point(1))
        assert layout.groups * 32 >= k and layout.held % layout.groups == 0
        assert layout.bytes % 8 == 0 and layout.keys >= layout.room + 2


@needs_cuda
@pytest.mark.thorough
@pytest.mark.parametrize(("vocab", "k"), [(1000, 400), (2047, 5)])
def test_machine_code_keeps_to_registers(vocab: int, k: int, tmp_path: Path) -> None:
    cases = [(SM90, 1, "float32"), (SM90, 4, "bfloat16"), (SM80, 4, "float16")]
    for number, (machine, rows, dtype) in enumerate(cases):
        problem = SoftmaxTopk(4000, vocab, k, dtype)
        candidate = TEMPLATE.candidate({**point(rows), "overlap": int(machine.has_clusters)})
        resources = compile_candidate(problem, candidate, machine, tmp_path / f"{number}.so").resources
        assert resources is not None
        assert resources["registers"] <= (64 if vocab == 1000 else 128), candidate
        # One keeps some registers in memory while it looks at rows of ties.
        parked = machine != SM90 or (vocab, k, dtype) == (1000, 400, "bfloat16")
        assert resources["local_bytes"] <= (PARKED_BYTES if parked else 0), candidate


def test_rows_too_long_or_k_too_large() -> None:
    for problem, reason in ((SoftmaxTopk(1, 2049, 5), "vocab=2049 exceeds"), (SoftmaxTopk(1, 2048, 1025), "k=1025")):
        assert reason in (TEMPLATE.point(problem, SM90, point(1)) or "")
