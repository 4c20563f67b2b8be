"""Sampling: what calls return, how words are distributed, and what of a draw is known to be right.

That kernels agree with the reference is tested with those of all operators (test_templates.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from cases import MACHINES, SM90, built, calls_run, on_cpu, own_on_host, sampled, thorough

import tvm_sparse
from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.bench import measure
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import Mismatch, ProblemError, numpy_dtype
from tvm_sparse.core.registry import parse
from tvm_sparse.emulation import run_on_cpu
from tvm_sparse.layers.libraries import tensor, to_host
from tvm_sparse.operators.softmax_sample import edges, philox, reference
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample
from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.schedules.softmax_sample import cuts
from tvm_sparse.schedules.softmax_sample.search import crew

BATCH, VOCAB = 6, 300
RNG = np.random.default_rng(5)
LOGITS = RNG.standard_normal((BATCH, VOCAB)).astype(np.float32) * 3
BIAS = np.where(RNG.random(VOCAB) < 0.3, -np.inf, RNG.standard_normal(VOCAB)).astype(np.float32)
UNIFORMS = RNG.random(BATCH).astype(np.float32)
SEEDS = np.stack([np.full(BATCH, -3), np.arange(BATCH) * 2**40], 1)
OWN: dict[str, Any] = {
    "temperature": np.float32([0.5, 0, 1, 2, 1, 0.9]),
    "top_k": np.int32([4, 9, 0, 200, 0, VOCAB]),
    "top_p": np.float32([1, 1, 0.8, 0.9, 1, 0.99]),
    "min_p": np.float32([0, 0.5, 0, 0.01, 0.001, 0]),
}
KEYS = tuple(
    f"softmax_sample/batch={BATCH},vocab={VOCAB},{axes}"
    for axes in (
        "k=8",
        "k=8,seeded=1",
        "k=8,bias=1,per_row=1,whole=1",
        "k=128,per_row=1,seeded=1,whole=1",
        "k=128,whole=1",
        "k=8,seeded=2",
        "k=8,whole=1,seeded=2",
        "k=128,whole=1,seeded=2",
        "k=128,whole=1,seeded=3",
        "k=128,whole=1,seeded=1",
        "k=128,per_row=1,whole=1,seeded=2",
        "k=128,per_row=1,whole=1,seeded=3",
        "k=128,bias=1,per_row=1,whole=1",
        "k=128,per_row=1,whole=1",
        "k=1,whole=1",
        "k=1,whole=1,seeded=1",
        "k=1,whole=1,seeded=2",
        "k=1,whole=1,seeded=3",
        "k=1,per_row=1,whole=1",
    )
)


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run(KEYS, tmp_path_factory.mktemp("kernels"), optimised=True) as own:
        yield own


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "options", "given"),
    [
        (KEYS[0], {"top_k": 5, "top_p": 0.9, "temperature": 0.7}, {"uniforms": UNIFORMS}),
        (KEYS[1], {"top_k": 8, "min_p": 0.1}, {"seed": SEEDS}),
        (KEYS[2], {**OWN, "max_top_k": 8, "bias": BIAS}, {"uniforms": UNIFORMS}),
        (KEYS[3], OWN, {"seed": SEEDS}),
        (KEYS[4], {"top_p": 0.9, "temperature": 2.5}, {"uniforms": UNIFORMS}),
    ],
    ids=["numbers", "seeds", "per-row", "per-row-seeds", "no-top-k"],
)
def test_calls_agree_with_the_reference(key: str, options: dict[str, Any], given: dict[str, Any]) -> None:
    problem = parse(key)
    filters = [options.get(name, default) for name, default in zip(OWN, (1.0, 0, 1.0, 0.0), strict=True)]
    inputs = [LOGITS, *filters, *([BIAS] if problem.bias else []), *given.values()]
    expected = problem.reference(inputs)
    best = min(problem.k, options["top_k"]) if isinstance(options.get("top_k"), int) else problem.k
    expected = [*expected[:2], *(array[:, :best] for array in expected[2:])]
    outputs = tvm_sparse.softmax_sample(LOGITS, **options, **given, best=best)
    kinds = [array.dtype for array in outputs]
    assert kinds == [np.int32, np.float32, np.float32, np.int64]
    bounds = problem.tolerance(inputs, expected)
    problem.agree(inputs, expected, bounds, outputs)

    torch = pytest.importorskip("torch")
    tensors = {n: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for n, a in (options | given).items()}
    logits = torch.from_numpy(LOGITS)
    for _ in range(2):  # the second call takes the short way
        results = tvm_sparse.softmax_sample(logits, **tensors, best=best)
        assert all(np.array_equal(one, other) for one, other in zip(results, outputs, strict=True))
    out = torch.empty(BATCH, dtype=torch.int32), torch.empty(BATCH)
    tokens, logprobs = tvm_sparse.softmax_sample(logits, **tensors, out=out)
    assert tokens is out[0] and np.array_equal(tokens, outputs[0]) and np.array_equal(logprobs, outputs[1])


def test_leading_dimensions_and_numbers_beside_arrays() -> None:
    wanted = tvm_sparse.softmax_sample(LOGITS, **OWN, seed=SEEDS, best=3)
    shaped = {name: array.reshape(2, 3) for name, array in OWN.items()}
    found = tvm_sparse.softmax_sample(LOGITS.reshape(2, 3, VOCAB), **shaped, seed=SEEDS.reshape(2, 3, 2), best=3)
    assert [array.shape for array in found] == [(2, 3), (2, 3), (2, 3, 3), (2, 3, 3)]
    assert all(np.array_equal(one.reshape(other.shape), other) for one, other in zip(found, wanted, strict=True))
    mixed = {**OWN, "top_p": 0.75, "min_p": 0.0}
    full = {**OWN, "top_p": np.full(BATCH, 0.75, np.float32), "min_p": np.zeros(BATCH, np.float32)}
    one, other = (tvm_sparse.softmax_sample(LOGITS, **options, seed=SEEDS)[0] for options in (mixed, full))
    assert np.array_equal(one, other)
    assert tvm_sparse.softmax_sample(LOGITS[:0], top_k=5, best=2)[3].shape == (0, 2)


def test_a_row_with_a_seed_does_not_depend_on_its_place() -> None:
    order = RNG.permutation(BATCH)
    straight = tvm_sparse.softmax_sample(LOGITS, **OWN, seed=SEEDS)[0]
    shuffled = {name: array[order] for name, array in OWN.items()}
    assert np.array_equal(tvm_sparse.softmax_sample(LOGITS[order], **shuffled, seed=SEEDS[order])[0], straight[order])


def test_rows_without_a_distribution_and_ties() -> None:
    rows = np.zeros((BATCH, VOCAB), np.float32)
    rows[0, 7], rows[1, 9], rows[2] = np.nan, np.inf, -np.inf
    rows[3, 1:] = -np.inf
    for options in ({"top_k": 5}, {"top_p": 0.999}, {"min_p": 1.0}, {}):
        for uniform in (0.0, 0.7, 1.5):  # the last is taken as a little less than 1
            given = np.full(BATCH, uniform, np.float32)
            tokens, logprobs = tvm_sparse.softmax_sample(rows, **options, uniforms=given)
            assert tokens[:4].tolist() == [7, 9, 0, 0] and np.isnan(logprobs[:3]).all() and logprobs[3] == 0
            # Equals come in the order of their columns.
            left = np.ceil(options.get("top_k", VOCAB) * options.get("top_p", 1))
            assert tokens[4] == tokens[5] == min(int(float(given[4]) * left), left - 1)
    assert tvm_sparse.softmax_sample(rows, temperature=0, top_k=5)[0].tolist() == [7, 9, 0, 0, 0, 0]


def test_without_numbers_each_call_draws_anew() -> None:
    flat = np.zeros((BATCH, VOCAB), np.float32)
    torch = pytest.importorskip("torch")
    for logits in (flat, torch.from_numpy(flat)):
        first, second = (np.asarray(tvm_sparse.softmax_sample(logits)[0]) for _ in range(2))
        assert not np.array_equal(first, second)
    first, second = (tvm_sparse.softmax_sample(flat, seed=11, offset=2)[0] for _ in range(2))
    assert np.array_equal(first, second) and not np.array_equal(first, tvm_sparse.softmax_sample(flat, seed=11)[0])


# Every way to say the numbers of a call, and of which seed, offset and row each row's is made.
ROWS, OFFSETS = np.arange(BATCH), np.arange(BATCH) ** 3 * 2**30
NUMBERS: dict[str, tuple[dict[str, Any], tuple[Any, Any, Any]]] = {
    "seed": ({"seed": 3}, (3, 0, ROWS)),
    "seed and offset": ({"seed": -3, "offset": 2**40}, (-3, 2**40, ROWS)),
    "beyond int64": ({"seed": 2**64 - 7, "offset": 2**63}, (-7, -(2**63), ROWS)),
    "seed and offsets": ({"seed": 2**33, "offset": OFFSETS}, (2**33, OFFSETS, ROWS)),
    "seeds": ({"seed": SEEDS}, (SEEDS[:, 0], SEEDS[:, 1], 0)),
    "seeds and offset": ({"seed": SEEDS, "offset": -5}, (SEEDS[:, 0], SEEDS[:, 1] - 5, 0)),
    "seeds and offsets": ({"seed": SEEDS, "offset": OFFSETS}, (SEEDS[:, 0], SEEDS[:, 1] + OFFSETS, 0)),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_numbers_are_philox_of_seed_offset_and_row(name: str, library: str) -> None:
    """In the first call of a form and in later ones, which take the short way; and beside a form of another kind."""
    given, (seed, offset, row) = NUMBERS[name]
    made = philox.uniforms(np.int64(seed) + 0 * ROWS, np.int64(offset) + 0 * ROWS, row + 0 * ROWS)
    wanted = tvm_sparse.softmax_sample(LOGITS, temperature=3.0, uniforms=made)[0]
    assert len(set(wanted.tolist())) > 2
    logits: Any = LOGITS
    if library == "torch":
        torch = pytest.importorskip("torch")
        logits = torch.from_numpy(LOGITS)
        given = {n: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for n, a in given.items()}
    for _ in range(3):
        assert np.array_equal(tvm_sparse.softmax_sample(logits, temperature=3.0, **given)[0], wanted)
        tvm_sparse.softmax_sample(logits, temperature=3.0, seed=99, offset=1)


def test_one_seed_serves_where_only_a_kernel_for_uniform_numbers_is_at_hand(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k = 8 with a top_k of each row is built for given numbers alone."""
    monkeypatch.setattr(dispatcher, "_may_compile", lambda: False)
    options = {**OWN, "max_top_k": 8, "bias": BIAS}
    for given in ({"seed": 5, "offset": 7}, {"seed": 5, "offset": OFFSETS}):
        made = philox.uniforms(np.int64(5) + 0 * ROWS, np.int64(given["offset"]) + 0 * ROWS, ROWS)
        wanted = tvm_sparse.softmax_sample(LOGITS, **options, uniforms=made)[0]
        assert np.array_equal(tvm_sparse.softmax_sample(LOGITS, **options, **given)[0], wanted)
    with pytest.raises(tvm_sparse.Miss, match="per_row=1 seeded=2 whole=1"):
        tvm_sparse.softmax_sample(LOGITS[:, :299].copy(), **(options | {"bias": None}), seed=1)


def test_torch_tells_the_tokens_that_no_seed_tells() -> None:
    torch = pytest.importorskip("torch")
    logits = torch.zeros(BATCH, VOCAB)

    def drawn(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return [tvm_sparse.softmax_sample(logits)[0].tolist() for _ in range(3)]

    first, again, other = map(drawn, (1, 1, 2))
    assert first == again and first != other and first[0] != first[1] != first[2]


@pytest.mark.parametrize("top_k", [0, -1, None, VOCAB, 2**40])
def test_a_top_k_of_no_limit_is_none(top_k: Any) -> None:
    wanted = tvm_sparse.softmax_sample(LOGITS, temperature=3.0, seed=1)[0]
    assert np.array_equal(tvm_sparse.softmax_sample(LOGITS, temperature=3.0, top_k=top_k, seed=1)[0], wanted)
    if top_k is not None and top_k < 2**31:
        array = np.full(BATCH, top_k, np.int32)
        assert np.array_equal(tvm_sparse.softmax_sample(LOGITS, temperature=3.0, top_k=array, seed=1)[0], wanted)


@pytest.mark.parametrize("width", [None, 8])
def test_a_top_k_above_what_a_kernel_keeps_is_what_was_asked_for(width: int | None) -> None:
    """An array's above max_top_k, beside any top_p and min_p."""
    rows = 40 * BATCH
    logits, uniforms = np.tile(LOGITS, (40, 1)), np.linspace(0, 1, rows, dtype=np.float32)
    logits[BATCH : 5 * BATCH] = np.round(logits[BATCH : 5 * BATCH])
    filters = edges.any_filters(np.random.default_rng(1), rows, [1.0, 200, 1.0, 0.0], 150, VOCAB)
    inputs = [logits, *filters, uniforms]
    problem = SoftmaxSample(rows, VOCAB, width or 128, per_row=1, whole=1)
    expected = problem.reference(inputs)
    given = dict(zip(OWN, filters, strict=True))
    found = tvm_sparse.softmax_sample(
        logits, **given, uniforms=uniforms, max_top_k=width, best=problem.k, bias=np.zeros(VOCAB, np.float32)
    )
    problem.check(inputs, expected, found)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"min_p": 0.5}, {"top_p": 0.5}])
def test_an_infinite_temperature_leaves_words_equally_likely_but_no_masked_one(options: dict[str, Any]) -> None:
    logits = np.repeat(LOGITS[:1] * 10, 1000, axis=0)
    logits[:, 7:] = -np.inf
    logits[:, 3] = -1e30
    logits[:, 5] = np.finfo(np.float32).min
    words = {0, 1, 2, 4, 6} if options.get("top_p") is None else None
    for temperature in (np.inf, 1e39, np.full(1000, np.inf, np.float32)):
        uniforms = np.linspace(0, 1, 1000, dtype=np.float32)
        tokens, logprobs = tvm_sparse.softmax_sample(logits, temperature=temperature, uniforms=uniforms, **options)
        counts = np.bincount(tokens, minlength=7)
        left = 5 if words else 3
        assert (counts > 0).sum() == left and np.isin(tokens, [0, 1, 2, 4, 6]).all()
        assert np.ptp(counts[counts > 0]) <= 2 and np.allclose(logprobs, -np.log(5), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": 2.0}, TypeError, "top_k: expected an integer or an array with one for each row, got float"),
        ({"top_p": 0.0}, ValueError, r"top_p: expected a number in \(0, 1\], got 0\.0"),
        ({"min_p": 1.5}, ValueError, r"min_p: expected a number in \[0, 1\], got 1\.5"),
        ({"temperature": -1}, ValueError, "temperature: expected a number of at least 0, got -1"),
        ({"temperature": float("nan")}, ValueError, "temperature: expected a number of at least 0"),
        ({"temperature": "hot"}, TypeError, "temperature: expected a number or an array"),
        ({"temperature": np.ones(2, np.float32)}, ValueError, r"temperature: expected shape \(6,\) and dtype float32"),
        ({"top_k": np.ones(BATCH, np.int64)}, ValueError, "top_k: expected .* dtype int32"),
        ({"top_k": 3, "max_top_k": 4}, ValueError, "max_top_k: comes with an array"),
        ({"top_k": OWN["top_k"], "max_top_k": 2000}, ValueError, "max_top_k: expected 1 <= max_top_k <= 1024"),
        ({"top_k": 3, "best": 4}, ValueError, "best: expected at most the 3 words"),
        ({"uniforms": UNIFORMS, "seed": 1}, ValueError, "uniforms: expected these or a seed"),
        ({"uniforms": UNIFORMS[1:]}, ValueError, r"uniforms: expected shape \(6,\)"),
        ({"seed": SEEDS[:, 0].copy()}, ValueError, r"seed: expected shape \(6, 2\) and dtype int64"),
        ({"seed": "x"}, TypeError, "seed: expected an integer or an int64 array"),
        ({"seed": 1, "offset": 0.5}, TypeError, "offset: expected an integer or an int64 array"),
        ({"seed": True}, TypeError, "seed: expected an integer or an int64 array"),
        ({"seed": 1, "offset": SEEDS}, ValueError, r"offset: expected shape \(6,\) and dtype int64"),
        ({"offset": 1}, ValueError, "offset: comes with a seed, and there is none"),
        ({"uniforms": UNIFORMS, "offset": 1}, ValueError, "offset: comes with a seed, and uniforms are given"),
        ({"out": (np.empty(BATCH), np.empty(BATCH))}, ValueError, r"out \(tokens\): expected .* int32"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tvm_sparse.softmax_sample(LOGITS, **options)


def test_axes_that_no_problem_has_are_refused() -> None:
    with pytest.raises(ProblemError, match="whole is for a k below vocab"):
        SoftmaxSample(1, 8, 8, whole=1)
    with pytest.raises(ProblemError, match="seeded must be 0, 1, 2, 3, got 4"):
        SoftmaxSample(1, 8, 8, seeded=4)
    with pytest.raises(ProblemError, match="per_row must be 0 or 1, got 2"):
        SoftmaxSample(1, 8, 8, per_row=2)


# ---- distributions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_has_the_known_answers_of_random123(counter: list[int], key: list[int], words: list[int]) -> None:
    assert [int(w) for w in philox.philox([np.uint64(w) for w in counter], [np.uint64(w) for w in key])] == words


# Filters that lead to every way of drawing: from the best that a kernel keeps, and from the whole row.
DRAWN: tuple[dict[str, Any], ...] = (
    {"top_k": 8},
    {"top_k": 8, "top_p": 0.5},
    {"top_k": 7, "min_p": 0.1, "temperature": 2.0},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"temperature": 3.0, "top_p": 0.8},
    {"temperature": 3.0, "min_p": 0.05},
    {"temperature": 3.0, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 5.0, "top_k": 200},
    {"temperature": 5.0, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
)


def chances_of(logits: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """What a word of one row is drawn with, by the plainest NumPy."""
    y = logits.astype(np.float64) / options.get("temperature", 1)
    chances = np.exp(y - y.max()) / np.exp(y - y.max()).sum()
    order = np.argsort(-chances, kind="stable")
    best = chances[order][: options.get("top_k", len(y))]
    kept = np.cumsum(best) - best < options.get("top_p", 1) * best.sum()
    kept &= best >= options.get("min_p", 0) * best[0]
    found = np.zeros(len(y))
    found[order[: len(best)][kept]] = best[kept] / best[kept].sum()
    return found


def check_frequencies(tokens: np.ndarray, chances: np.ndarray) -> None:
    """Chi-squared; words that are expected fewer than five times are counted together."""
    found, wanted = np.bincount(tokens, minlength=len(chances)), len(tokens) * chances
    assert not found[chances == 0].any()
    often = wanted >= 5
    found, wanted = (np.append(a[often], [a[~often].sum()] if a[~often].any() else []) for a in (found, wanted))
    if len(found) < len(wanted):  # of the rare words none came
        found = np.append(found, 0)
    if len(wanted) == 1:  # filters left a single word
        assert found[0] == len(tokens)
    else:
        assert scipy.stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > 1e-7


def any_seed() -> int:
    return int(edges.any_integers(np.random.default_rng(), (1,))[0])


def any_numbers(way: int, draws: int, first: int) -> dict[str, Any]:
    """A seed and offsets in each way to say them, anew in every run."""
    at, rows = int(np.random.default_rng().integers(2**40)), np.arange(draws)
    return (
        {"seed": first},
        {"seed": first, "offset": at},
        {"seed": first, "offset": at + 2**33 * rows},
        {"seed": np.stack([np.full(draws, first), at + rows], axis=1)},
        {"seed": np.stack([first // 2 + rows, np.full(draws, at)], axis=1), "offset": 7},
        {},
    )[way]


@pytest.mark.drawn
@pytest.mark.parametrize(("way", "options"), [(i % 6, options) for i, options in enumerate(DRAWN)], ids=str)
def test_words_come_with_their_probabilities(way: int, options: dict[str, Any]) -> None:
    """Of 60,000 draws of one row, or a million without a top_k, with seeds of every run's own, against float64."""
    draws, rounds = 60_000, 1 if "top_k" in options else 17
    logits = np.repeat(LOGITS[:1], draws, axis=0)
    given = dict(options)
    if options.get("top_k") == 200:
        given["top_k"] = np.full(draws, 200, np.int32)
    # Other seeds in each round: of the same seed words would come again.
    first = any_seed()
    seeds = [first - turn if first > 0 else first + turn for turn in range(rounds)]
    tokens = [tvm_sparse.softmax_sample(logits, **given, **any_numbers(way, draws, seed))[0] for seed in seeds]
    check_frequencies(np.concatenate(tokens), chances_of(LOGITS[0], options))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_p": 0.9, "min_p": 0.02}], ids=str)
def test_without_a_top_k_a_larger_number_gives_a_later_column(options: dict[str, Any]) -> None:
    """And each column as many numbers as its probability says; with a top_k of as many words as are left, an earlier
    number gives a better word."""
    draws = 4001
    logits, uniforms = np.repeat(LOGITS[1:2], draws, axis=0), np.linspace(0, 1, draws, dtype=np.float32)
    tokens = tvm_sparse.softmax_sample(logits, temperature=2.0, uniforms=uniforms, **options)[0]
    assert (np.diff(tokens) >= 0).all()
    chances = chances_of(LOGITS[1], {"temperature": 2.0, **options})
    assert np.abs(np.bincount(tokens, minlength=VOCAB) - draws * chances).max() <= 1.01
    ranked = tvm_sparse.softmax_sample(logits, temperature=2.0, uniforms=uniforms, top_k=8, **options)[0]
    assert (np.diff(LOGITS[1][ranked]) <= 0).all()


def test_numbers_of_rows_offsets_and_seeds_are_independent() -> None:
    """Chi-squared of pairs: of neighbouring rows, of the next offset, of the next seed, and across these."""
    draws, parts = 60_000, 12
    flat = np.zeros((draws, VOCAB), np.float32)  # the token is floor(VOCAB * u)
    at = int(np.random.default_rng().integers(2**62))

    def drawn(**given: Any) -> np.ndarray:
        return tvm_sparse.softmax_sample(flat, **given)[0] * parts // VOCAB

    here, later, other = drawn(seed=at, offset=5), drawn(seed=at, offset=6), drawn(seed=at + 1, offset=5)
    rows = np.arange(draws)
    offsets, seeds = (np.stack(columns, axis=1) for columns in ((0 * rows + at, rows), (at + rows, 0 * rows)))
    by_offset, by_seed, by_both = drawn(seed=offsets), drawn(seed=seeds), drawn(seed=at, offset=rows)
    unsaid = drawn(), drawn()
    for one, two in (
        *((a[:-1], a[1:]) for a in (here, by_offset, by_seed, by_both, unsaid[0])),
        *((a, b) for a, b in ((here, later), (here, other), unsaid)),
        (here[1:], later[:-1]),
        (by_offset[1:], by_seed[:-1]),
    ):
        pairs = np.bincount(one * parts + two, minlength=parts**2)
        assert scipy.stats.chisquare(pairs).pvalue > 1e-7


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize("name", ["sample_slices", "sample_gate", "sample_cluster", "sample_warps", "sample_radix"])
def test_gpu_templates_draw_with_probabilities_and_no_masked_word(name: str, whole: int, tmp_path: Path) -> None:
    """With one seed and offsets of each launch; 200,000 draws of every filter."""
    torch = pytest.importorskip("torch")
    gpu, template, vocab = machine.gpu(), spaces.find(name), 4099
    assert gpu is not None
    k = 1 if name == "sample_slices" else 8
    logits = np.random.default_rng().standard_normal(vocab).astype(np.float32) * 2
    many = torch.from_numpy(logits).cuda().expand(20_000, -1).contiguous()
    for number, dtype in enumerate(("float32", "bfloat16")):
        drawn = SoftmaxSample(8, vocab, k, dtype, seeded=2, whole=whole)
        if reason := spaces.applicable(drawn, gpu)[1].get(name):
            pytest.skip(reason)
        compiled = built(drawn, template.candidate(template.default(drawn, gpu)), gpu, tmp_path / f"{number}.so")
        function, rows = measure.load(compiled.path, "cuda"), many.to(getattr(torch, dtype))
        outputs = [torch.empty(shape, dtype=getattr(torch, kind), device="cuda")
                   for shape, kind in drawn.with_batch(len(rows)).output_layouts()]  # fmt: skip
        seed = int(np.random.default_rng().integers(2**62))
        for options in DRAWN:
            if not whole and not 0 < options.get("top_k", 0) <= k:
                continue
            filters = [options.get(one, default) for one, default in zip(OWN, (1.0, 0, 1.0, 0.0), strict=True)]
            tokens = []
            for offset in range(10):
                function(rows, *filters, seed, offset, *outputs)
                tokens.append(outputs[0].cpu().numpy())
            check_frequencies(np.concatenate(tokens), chances_of(rows[0].float().cpu().numpy(), options))

        bounded = SoftmaxSample(96, vocab, k, dtype, bias=int(k > 1), per_row=1, whole=whole)
        point = template.candidate(template.default(bounded, gpu))
        function = measure.load(built(bounded, point, gpu, tmp_path / f"bounded{number}.so").path, "cuda")
        inputs = rows_at_bounds(bounded, int(np.random.default_rng().integers(2**31)))
        outputs = bounded.empty_outputs()
        on_gpu = [tensor(array, "cuda") for array in (*inputs, *outputs)]
        function(*on_gpu)
        check_drawn(bounded, inputs, list(map(to_host, on_gpu[len(inputs) :])))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_a_million_draws_of_a_large_vocabulary(options: dict[str, Any], dtype: str) -> None:
    torch = pytest.importorskip("torch")
    row = torch.randn(128256, device="cuda").to(getattr(torch, dtype))
    many = row.expand(2000, -1).contiguous()
    seed = int(np.random.default_rng().integers(2**62))
    tokens = [tvm_sparse.softmax_sample(many, **options, seed=seed, offset=i)[0] for i in range(500)]
    check_frequencies(torch.cat(tokens).cpu().numpy(), chances_of(row.float().cpu().numpy(), options))


@pytest.mark.gpu
def test_torchs_generator_on_a_gpu_tells_the_tokens_and_graphs_draw_anew() -> None:
    torch = pytest.importorskip("torch")
    logits = torch.zeros(64, VOCAB, device="cuda")
    generator = torch.cuda.default_generators[logits.device.index]

    def drawn(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return [tvm_sparse.softmax_sample(logits)[0].tolist() for _ in range(3)]

    first, again, other = map(drawn, (1, 1, 2))
    assert first == again and first != other and first[0] != first[1] != first[2]
    before = generator.get_offset()
    tvm_sparse.softmax_sample(logits)
    assert generator.get_offset() == before + 4
    offsets = torch.zeros(64, dtype=torch.int64, device="cuda")
    for options, moved in (({}, True), ({"seed": 3}, False), ({"seed": 3, "offset": offsets}, True)):
        tvm_sparse.softmax_sample(logits, **options)
        tvm_sparse.softmax_sample(logits, uniforms=torch.rand(64, device="cuda"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = tvm_sparse.softmax_sample(logits, **options)[0]
        graph.replay()
        one = tokens.tolist()
        offsets += 1
        graph.replay()
        assert (one != tokens.tolist()) is moved


def test_a_search_of_the_whole_row_is_the_inverse_of_its_distribution() -> None:
    """Of few distinct values, of which each is many words': nothing but the search tells equals apart."""
    problem = SoftmaxSample(200, 777, 4, "bfloat16", whole=1)
    template, here = spaces.find("sample_scan"), MACHINES["llvm"]
    built = on_cpu(template.build(problem, template.default(problem, here)).module)
    for seed, settings in enumerate(problem.settings):
        inputs = problem.generate(seed, "ties", settings)
        inputs[-1] = np.linspace(0, 1, 200, dtype=np.float32)
        expected, outputs = problem.reference(inputs), problem.empty_outputs()
        built(*(arrays.argument(a) if isinstance(a, np.ndarray) else a for a in (*inputs, *outputs)))
        problem.check(inputs, expected, outputs)


# ---- whatever rounding does ----------------------------------------------------------------------


def rows_at_bounds(problem: SoftmaxSample, seed: int) -> list[Any]:
    """Inputs whose rows have few words that may be drawn, with uniform numbers at the bounds of their chances.

    Every other row is what a grammar leaves: a few finite words, fewer than k, without filters and at 1 - 2^-24. There
    sums of chances that are added in another order may say that a masked word is reached. Of others one to k + 1 words
    are finite, or one, or all are equal, or all but a few below 2^-24 of the mass, or they are padding. Their numbers
    are 0, 1 - 2^-24, and where a word's part of the row ends.
    """
    rng = np.random.default_rng(seed)
    inputs = problem.generate(seed, "ties")
    x = np.full((problem.batch, problem.vocab), -np.inf, np.float32)
    for i, row in enumerate(x):
        kind, some = i // 2 % 6, rng.permutation(problem.vocab)
        if i % 2 == 0:
            finite = rng.integers(3, max(4, problem.k))
            row[some[:finite]] = rng.standard_normal(finite) * 2
        elif kind < 2:
            finite = rng.integers(1, problem.k + 2)
            row[some[:finite]] = rng.standard_normal(finite) * kind
        elif kind == 2:
            row[some[0]] = rng.choice([-1e4, 0, 1e4])
        elif kind == 3:
            row[:] = rng.choice([0.0, -6e4])
        elif kind == 4:
            row[:] = -np.linspace(14, 200, problem.vocab)[some]  # 1e-6 and less, down to 0
            row[some[:2]] = 0
        else:
            row[:] = np.where(rng.random(problem.vocab) < 0.5, -6e4, -np.inf)
            row[some[:3]] = (-1, 0, 1)
    inputs[0] = x.astype(numpy_dtype(problem.dtype))
    if not problem.seeded:
        scores = np.asarray(inputs[0], np.float64) + (inputs[5] if problem.bias else 0)
        scores[np.isneginf(scores).all(axis=1)] = 0
        chances = np.exp(
            scores - scores.max(axis=1, keepdims=True), where=np.isfinite(scores), out=np.zeros_like(scores)
        )
        ends = np.cumsum(-np.sort(-chances), axis=1)
        places = [rng.integers(np.count_nonzero(row)) if row.any() else 0 for row in chances]
        bounds = (ends / ends[:, -1:])[np.arange(len(x)), places]
        fixed = rng.choice([0, reference.BELOW_ONE], len(x))
        inputs[-1] = np.where(rng.random(len(x)) < 0.5, bounds, fixed).astype(np.float32)
        inputs[-1][::2] = reference.BELOW_ONE
    if problem.per_row:
        for one, unfiltered in zip(inputs[1:5], (1, 0, 1, 0), strict=True):
            one[::2] = unfiltered
    return inputs


def check_drawn(problem: SoftmaxSample, inputs: list[Any], outputs: list[Any]) -> None:
    """The outputs are right, and every word that is drawn is one of a finite score."""
    problem.check(inputs, problem.reference(inputs), outputs)
    scores = np.asarray(inputs[0]).astype(np.float32) + (inputs[5] if problem.bias else np.float32(0))
    known = np.isfinite(scores).any(axis=1)
    assert np.isfinite(scores[known, np.asarray(outputs[0])[known]]).all()


# Every template, with and without the whole row, and some points beside the default.
BOUNDED = (
    ("sample_scan", "batch=240,vocab=301,k=8", 0),
    ("sample_scan", "batch=240,vocab=333,k=40,dtype=bfloat16,per_row=1,bias=1,whole=1", 0),
    thorough("sample_gate", "batch=48,vocab=301,k=8", 3),
    ("sample_gate", "batch=24,vocab=301,k=64,dtype=bfloat16,per_row=1,bias=1", 0),
    ("sample_gate", "batch=18,vocab=333,k=8,dtype=float16,per_row=1,whole=1", 0),
    thorough("sample_cluster", "batch=48,vocab=2051,k=8", 2),
    ("sample_cluster", "batch=18,vocab=4096,k=8,dtype=bfloat16,per_row=1,whole=1", 0),
    ("sample_warps", "batch=48,vocab=301,k=8,per_row=1", 0),
    thorough("sample_warps", "batch=48,vocab=500,k=128,dtype=bfloat16", 2),
    ("sample_slices", "batch=18,vocab=1029,k=1,per_row=1,whole=1", 1),
    ("sample_slices", "batch=18,vocab=61,k=1,dtype=bfloat16,seeded=3,whole=1", 0),
    thorough("sample_slices", "batch=24,vocab=4096,k=1,dtype=float16,whole=1", 4),
    ("sample_radix", "batch=18,vocab=301,k=8,per_row=1", 0),
    ("sample_radix", "batch=18,vocab=301,k=8,dtype=bfloat16,whole=1", 0),
)


def runner(problem: SoftmaxSample, candidate: Candidate) -> Callable[[Sequence[Any], int], list[np.ndarray]]:
    """(inputs, seed) -> outputs of a candidate's program, a CUDA one thread by thread."""
    program = spaces.find(candidate.template).build(problem, candidate.values)
    if spaces.find(candidate.template).kind == "llvm":
        function = on_cpu(program.module)

    def run(inputs: Sequence[Any], seed: int) -> list[np.ndarray]:
        outputs = problem.empty_outputs()
        if spaces.find(candidate.template).kind == "llvm":
            function(*(arrays.argument(one) if isinstance(one, np.ndarray) else one for one in (*inputs, *outputs)))
        else:
            own = own_on_host(program, problem)
            for one, array in zip(program.workspaces, own, strict=True):
                if one.fill is None:  # whatever a call has left there
                    array[...] = np.random.default_rng(seed).integers(0, 4, array.shape)
            run_on_cpu(program.module, target_of(SM90), [*inputs, *outputs, *own], pipeline=program.pipeline, seed=seed)
            assert all((array == 0).all() for one, array in zip(program.workspaces, own, strict=True) if one.fill == 0)
        return outputs

    return run


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "axes", "more"), BOUNDED)
def test_no_masked_word_is_drawn(name: str, axes: str, more: int) -> None:
    """Of no template and point, at 1 - 2^-24 and wherever sums of chances may be rounded, with any filters."""
    problem, template = parse(f"softmax_sample/{axes}"), spaces.find(name)
    for number, candidate in enumerate(sampled(template, problem, MACHINES[template.kind], more)):
        run = runner(problem, candidate)
        for turn, settings in enumerate(problem.settings[:1] if problem.per_row else problem.settings[1:4]):
            inputs = rows_at_bounds(problem, 10 * number + turn)
            if not problem.per_row:
                inputs[1:5] = [int(value) if name == "top_k" else value for name, value in settings.items()]
            check_drawn(problem, inputs, run(inputs, turn))


GATE = {"threads": 64, "vectors": 1, "stages": 1, "overlap": 1, "prefetch": 0, "deferred": 0, "unroll": 1}
SHARING = {"threads": 64, "vectors": 1, "stages": 1, "deferred": 0, "unroll": 1}
SLICES = {"cluster": 1, "threads": 128, "vectors": 1, "staged": 0, "tickets": 0, "overlap": 0}
# Blocks that search: one or several, of rows that begin and end within a vector or not.
SEARCHED = (
    ("sample_scan", "vocab=1029,k=4,per_row=1,whole=1", {}),
    ("sample_scan", "vocab=403,k=1,dtype=bfloat16,per_row=1,whole=1", {}),
    ("sample_gate", "vocab=1029,k=4,per_row=1,whole=1", GATE),
    ("sample_gate", "vocab=1003,k=4,dtype=bfloat16,per_row=1,whole=1", GATE),
    ("sample_slices", "vocab=1029,k=1,per_row=1,whole=1", SLICES),
    ("sample_slices", "vocab=4099,k=1,dtype=bfloat16,per_row=1,whole=1",
     {**SLICES, "cluster": 2, "vectors": 2, "staged": 1}),
    thorough("sample_slices", "vocab=4096,k=1,dtype=float16,per_row=1,whole=1", {**SLICES, "cluster": 4, "vectors": 1}),
    ("sample_slices", "vocab=2053,k=1,per_row=1,whole=1", {**SLICES, "tickets": 2}),
    ("sample_slices", "vocab=4096,k=1,dtype=bfloat16,per_row=1,whole=1,bias=1", {**SLICES, "tickets": 4, "overlap": 1}),
    ("sample_cluster", "vocab=2048,k=4,dtype=bfloat16,per_row=1,whole=1",
     {"cluster": 2, **SHARING}),  # of few threads, so that each block has some of the row
    thorough("sample_cluster", "vocab=4099,k=4,bias=1,per_row=1,whole=1",
             {"cluster": 4, **SHARING, "threads": 128}),
    thorough("sample_radix", "vocab=701,k=4,dtype=float16,per_row=1,whole=1", {"threads": 256}),
)  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "axes", "decisions"), SEARCHED)
def test_blocks_search_rows_of_any_kind(name: str, axes: str, decisions: dict[str, int]) -> None:
    """Of one value or two, in order, crowded about zero, of a long tail, with few words, or at the bounds of slices."""
    problem, template = parse(f"softmax_sample/batch=1,{axes}"), spaces.find(name)
    point = decisions or template.default(problem, MACHINES[template.kind])
    run = None
    # A CPU has time for some more.
    for _ in range(10 if template.kind == "llvm" else 1):
        seed = int(np.random.default_rng().integers(2**31))
        inputs, problem = rows_to_search(problem, seed)
        run = run or runner(problem, template.candidate(point))
        outputs = run(inputs, seed % 1000)
        try:
            problem.check(inputs, problem.reference(inputs), outputs)
        except Mismatch as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        # Most words are none of the best: they were searched for.
        assert (outputs[3] != outputs[0][:, None]).all(axis=1).mean() > 0.3


@pytest.fixture
def nothing_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of the whole row, which runs where a bracket or a list does not suffice, finds nothing."""
    for name in ("locate", "narrow"):
        monkeypatch.setattr(crew, name, lambda *_: lambda *_: None)


@pytest.mark.usefixtures("nothing_searched")
@pytest.mark.parametrize("dtype", ["float32", thorough("bfloat16")])
def test_a_bracket_finds_the_bound_of_top_p(dtype: str) -> None:
    """Flat rows and peaked ones."""
    problem = parse(f"softmax_sample/batch=12,vocab=40000,k=1,dtype={dtype},whole=1")
    rng = np.random.default_rng(5)
    flat = rng.standard_normal((12, problem.vocab))
    flat[4:8] *= 4
    flat[8:10] = -1.1 * np.log1p(rng.permuted(np.tile(np.arange(problem.vocab), (2, 1)), axis=1))
    flat[10:] = flat[10:] / 9 + 20 * (np.arange(problem.vocab) == 77)
    inputs = [flat.astype(numpy_dtype(dtype)), 1.0, 0, 0.9, 0.0, rng.random(12, dtype=np.float32)]
    point = {**SLICES, "cluster": 2, "vectors": 2}
    outputs = runner(problem, spaces.find("sample_slices").candidate(point))(inputs, 5)
    problem.check(inputs, problem.reference(inputs), outputs)


@pytest.mark.usefixtures("nothing_searched")
def test_words_far_above_a_thread_blocks_first_tile() -> None:
    """They are counted in its first bin, though they have more mass: nothing is known of that bin and larger ones."""
    problem = parse("softmax_sample/batch=12,vocab=2053,k=1,per_row=1,whole=1")
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((12, problem.vocab)).astype(np.float32)
    logits[:, 5] = 10  # so that bins of the first thread block begin higher
    logits[:4, 1000] = 16
    logits[4:, 1440:1520:2] += 9  # most of the mass, in the second one; a warp's first tile ends before
    top_p = np.tile(np.float32([0.05, 0.3, 0.5, 0.9]), 3)
    ones = np.ones(12, np.float32)
    inputs = [logits, ones, np.zeros(12, np.int32), top_p, 0 * ones, rng.random(12, dtype=np.float32)]
    outputs = runner(problem, spaces.find("sample_slices").candidate({**SLICES, "tickets": 2}))(inputs, 5)
    problem.check(inputs, problem.reference(inputs), outputs)


@pytest.mark.parametrize("tickets", [0, 2])
def test_the_least_number_is_a_word_beside_masked_ones(tickets: int) -> None:
    """A slice of nothing above minus infinity has the same maximum as one whose only word is the least float32."""
    problem = parse("softmax_sample/batch=12,vocab=2053,k=1,per_row=1,whole=1")
    rng = np.random.default_rng()
    logits = np.full((12, problem.vocab), -np.inf, np.float32)
    for row in logits:
        row[rng.choice(problem.vocab, rng.integers(1, 4), replace=False)] = np.finfo(np.float32).min
    logits[0, :-1], logits[0, -1] = -np.inf, np.finfo(np.float32).min
    ones = np.ones(12, np.float32)
    inputs = [logits, ones, np.zeros(12, np.int32), ones, 0 * ones, rng.random(12, dtype=np.float32)]
    outputs = runner(problem, spaces.find("sample_slices").candidate({**SLICES, "tickets": tickets}))(inputs, 5)
    problem.check(inputs, problem.reference(inputs), outputs)


@pytest.mark.parametrize("whose", ["a row's", thorough("a thread's")])
def test_rows_with_too_long_lists_are_searched(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of a row, of one thread block or of a thread are too long; other rows are drawn from their lists."""
    if whose == "a row's":
        monkeypatch.setattr(cuts, "LISTED", 20)
    else:
        monkeypatch.setattr(cuts, "room", lambda blocks: 0)
    problem = parse("softmax_sample/batch=12,vocab=2053,k=1,per_row=1,whole=1")
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((12, problem.vocab)).astype(np.float32)
    logits[3:6] = 1
    logits[6:9] /= 50
    logits[9] = np.where(np.arange(problem.vocab) < 30, 3, logits[9])
    filters = [
        np.full(12, one, dtype)
        for one, dtype in zip((1.0, 0, 0.9, 0.01), (np.float32, np.int32, np.float32, np.float32), strict=True)
    ]
    inputs = [logits, *filters, rng.random(12, dtype=np.float32)]
    outputs = runner(problem, spaces.find("sample_slices").candidate({**SLICES, "tickets": 2}))(inputs, 5)
    problem.check(inputs, problem.reference(inputs), outputs)


def rows_to_search(problem: SoftmaxSample, seed: int) -> tuple[list[Any], SoftmaxSample]:
    """Inputs of a problem of some rows, in which of every kind a row comes with each of some filters, and two with any.

    Uniform numbers are at bounds or not.
    """
    rng, vocab = np.random.default_rng(seed), problem.vocab
    # Slices are eighths of an octave at a temperature of 1: words at their bounds, or some roundings beside them.
    bounds = np.float32(-np.log(2) / 8) * rng.integers(0, 200, vocab).astype(np.float32)
    bounds = (bounds.view(np.int32) + rng.integers(-2, 3, vocab) * (bounds != 0)).astype(np.int32).view(np.float32)
    bounds[0] = 0
    kinds = [
        np.zeros(vocab),
        rng.choice([0.5, -0.25], vocab),
        np.sort(rng.standard_normal(vocab)),
        rng.standard_normal(vocab) * 1e-30,
        rng.standard_normal(vocab) * np.where(rng.random(vocab) < 0.5, 1e-3, 1),
        np.linspace(-40, 0, vocab),
        np.where(rng.random(vocab) < 0.9, -np.inf, rng.standard_normal(vocab)),
        rng.standard_normal(vocab) + 60,
        np.round(rng.standard_normal(vocab) * 2),
        -np.linspace(0, 3, vocab),
        bounds,
        bounds + np.float32(60),
        bounds / 8 + np.float32(1000),
        # A few words with two thirds of the mass: a top_k above k changes what the best of them are a share of.
        np.where(np.arange(vocab) < 9, np.log(vocab / 4) - np.arange(vocab) / 8, rng.standard_normal(vocab) / 9),
    ]
    some = [(1, 0, 1, 0), (2, 0, 0.9, 0), (0.5, 0, 1, 0.02), (1, 0, 0.7, 1e-3), (3, vocab // 2, 1, 0), (2, 9, 0.8, 0.1)]
    some += [(1, 9, 0.25, 0), (1, 9, 1, 0)]
    problem = problem.with_batch((len(some) + 2) * len(kinds))
    logits = np.repeat(np.stack(kinds), len(some) + 2, axis=0).astype(numpy_dtype(problem.dtype))
    filters = edges.any_filters(rng, problem.batch, [1.0, 0, 1.0, 0.0], problem.k, vocab)
    for one, values in zip(filters, zip(*some, strict=True), strict=True):
        one.reshape(len(kinds), -1)[:, : len(some)] = values
    uniforms = edges.at_bounds(rng, rng.random(problem.batch, dtype=np.float32))
    # Where the mass of nine words, and not that of all, tells the word.
    uniforms.reshape(len(kinds), -1)[:, len(some) - 2 : len(some)] = reference.BELOW_ONE, 0.25
    bias = [rng.standard_normal(vocab).astype(np.float32)] if problem.bias else []
    return [logits, *filters, *bias, uniforms], problem


def test_a_wrong_word_is_found_out() -> None:
    """Checks allow for rounding, and for no more."""
    problem = parse(KEYS[0]).with_batch(64)
    inputs = problem.generate(0)
    expected = problem.reference(inputs)
    problem.check(inputs, expected, expected)
    for wrong in (np.roll(expected[3], 1, axis=1)[:, 0], expected[3][:, -1]):
        tokens = wrong.astype(np.int32)
        changed = tokens != expected[0]
        tokens[np.flatnonzero(changed)[1:]] = expected[0][np.flatnonzero(changed)[1:]]  # in one row alone
        with pytest.raises(Mismatch, match="tokens"):
            problem.check(inputs, expected, [tokens, *expected[1:]])
    # A word that another library may draw is one that is left.
    assert problem.admits(inputs, expected) and not problem.admits(inputs, [np.full(64, 299), *expected[1:]])


def test_rounding_is_allowed_for_at_the_bounds() -> None:
    """A uniform number at a word's bound, and a top_p at that of the nucleus, may go either way."""
    chances = np.array([[0.5, 0.25, 0.125, 0.125]])
    limits, zero, columns = np.array([4]), np.zeros(1), np.array([[6, 9, 1, 3]])

    def filters(top_p: float) -> reference.Filters:
        return reference.Filters(np.ones(1), np.array([4]), np.array([top_p]), zero)

    def ranks(top_p: float, uniform: float, free: bool = False) -> list[int]:
        given = chances, filters(top_p), limits, np.array([uniform])
        return [
            r
            for r in range(4)
            if reference.possible(given[0], np.array([r]), *given[1:], 1e-5, columns, np.array([free])).all()
        ]

    assert ranks(1.0, 0.5) == [0, 1] and ranks(1.0, 0.6) == [1] and ranks(0.7, 0.999) == [1]
    assert ranks(0.75, 0.9) == [1, 2]  # 0.9 of 0.75, or of 0.875 if a sum came out below 0.75
    # In the order of columns: words 2, 3, 0, 1.
    assert ranks(1.0, 0.25, True) == [0, 3] and ranks(1.0, 0.8, True) == [1] and ranks(1.0, 0.0, True) == [2]
    assert ranks(0.75, 0.1, True) == [0, 2]  # of the first two words, or of three if a sum came out below 0.75


def test_offsets_and_seeds_in_graphs_and_under_vmap() -> None:
    """As eager calls have them; rows of vmap have numbers of their own."""
    torch = pytest.importorskip("torch")
    logits, offsets = torch.from_numpy(LOGITS), torch.from_numpy(OFFSETS)
    seeds = torch.from_numpy(SEEDS)

    def sampled(rows: Any, at: Any, each: Any) -> list[Any]:
        ways = {"seed": 2**63 + 5, "offset": at}, {"seed": 7, "offset": 3}, {"seed": each, "offset": at}, {"seed": each}
        return [tvm_sparse.softmax_sample(rows, temperature=3.0, **way)[0] for way in ways]

    wanted = sampled(logits, offsets, seeds)
    graph = torch.compile(sampled, backend="eager", fullgraph=True)
    assert all(map(torch.equal, graph(logits, offsets, seeds), wanted))
    two = logits.reshape(2, 3, VOCAB), offsets.reshape(2, 3), seeds.reshape(2, 3, 2)
    mapped = torch.vmap(lambda *given: tuple(sampled(*given)))(*two)
    assert all(torch.equal(found.reshape(-1), want) for found, want in zip(mapped, wanted, strict=True))
