"""The LSH head: its candidates are the paper's, its probabilities those over them, and it says what it does."""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import each_with_some, thorough

import tvm_sparse
from tvm_sparse.core import machine
from tvm_sparse.core.problem import FLOATS, numpy_dtype
from tvm_sparse.formats import wta
from tvm_sparse.layers import codes as band_codes
from tvm_sparse.layers import fitting, storage, survey
from tvm_sparse.layers.settings import Measured
from tvm_sparse.runtime import dispatch

VOCAB, HIDDEN = 301, 40
SMALL: dict[str, Any] = {"k": 5, "units": 2, "bands": 48, "threshold": 5, "frequent": 17, "path": "lsh"}
numbers = itertools.count(int.from_bytes(os.urandom(4), "little"))


def drawn(rows: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """An embedding, and hidden states that are near some of its words."""
    rng = np.random.default_rng(next(numbers))
    embedding = rng.standard_normal((VOCAB, HIDDEN))
    hidden = embedding[rng.integers(VOCAB, size=rows)] * 0.3 + 0.1 * rng.standard_normal((rows, HIDDEN))
    return embedding.astype(numpy_dtype(dtype)), hidden.astype(numpy_dtype(dtype))


def codes(rows: np.ndarray, permutations: np.ndarray) -> np.ndarray:
    """Equations 4 to 8, literally."""
    bands, units, k = permutations.shape
    bits = (k - 1).bit_length()
    found = np.zeros((len(rows), bands), np.int64)
    for i, row in enumerate(rows.astype(np.float64)):
        for w in range(bands):
            for u in range(units):
                found[i, w] = found[i, w] << bits | int(np.argmax(row[permutations[w, u]]))
    return found


def candidates(head: Any, embedding: np.ndarray, hidden: np.ndarray, sentences: int) -> list[np.ndarray]:
    """Equations 9, 10 and 3."""
    hashing = head.hashing
    permutations = np.asarray(hashing.permutations)
    words, states = codes(embedding, permutations), codes(hidden, permutations)
    hits = (states[:, None] == words[None]).sum(axis=2)
    chosen = (hits >= head.settings.threshold).reshape(sentences, -1, len(embedding)).any(axis=1)
    chosen[:, head.frequent] = True
    return [np.flatnonzero(row) for row in chosen]


def expected(
    embedding: np.ndarray, hidden: np.ndarray, lists: list[np.ndarray], bias: np.ndarray | None = None
) -> np.ndarray:
    """Log-probabilities of all words in float64, -inf where they are no candidates."""
    logits = hidden.astype(np.float64) @ embedding.astype(np.float64).T
    logits += 0 if bias is None else bias
    allowed = np.zeros(logits.shape, bool)
    for row in range(len(hidden)):
        allowed[row, lists[row * len(lists) // len(hidden)]] = True
    logits[~allowed] = -np.inf
    top = logits.max(axis=1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


def check_topk(values: Any, indices: Any, log_probs: np.ndarray, tolerance: float = 1e-4) -> None:
    """The n best of these log-probabilities, whichever of nearly equal ones comes first."""
    values, indices = np.asarray(values), np.asarray(indices)
    best = -np.sort(-log_probs, axis=1)[:, : values.shape[1]]
    assert np.allclose(values, best, atol=tolerance)
    assert np.allclose(np.take_along_axis(log_probs, indices, 1), best, atol=tolerance)
    assert all(len(set(row)) == len(row) for row in indices.tolist())


# ---- candidates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "sentences"), each_with_some(("direct", "cuckoo"), (1, 3, 6)))
def test_candidates_are_those_of_the_equations(table: str, sentences: int) -> None:
    embedding, hidden = drawn(6)
    ids = np.random.default_rng(next(numbers)).permutation(VOCAB)[:9]
    head = tvm_sparse.LshHead(embedding, **SMALL | {"frequent": ids, "capacity": VOCAB, "table": table})
    log_probs, words, info = head.log_softmax(hidden, sentences=sentences)
    wanted = candidates(head, embedding, hidden, sentences)
    assert info.candidates.tolist() == [len(row) for row in wanted] and not info.overflow.any()
    full = np.full((6, VOCAB), -np.inf)
    for place, row in enumerate(wanted):
        assert words[place, : len(row)].tolist() == row.tolist() and (words[place, len(row) :] == -1).all()
        for r in range(place * 6 // sentences, (place + 1) * 6 // sentences):
            full[r, row] = log_probs[r, : len(row)]
            assert (log_probs[r, len(row) :] == -np.inf).all()
    reference = expected(embedding, hidden, wanted)
    assert np.allclose(full, reference, atol=1e-4)
    check_topk(*head.topk(hidden, 4, sentences=sentences, log=True)[:2], reference)


@pytest.mark.parametrize("dtype", FLOATS)
def test_topk_is_that_of_the_candidates(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    embedding, hidden = drawn(5, dtype)
    bias = np.random.default_rng(next(numbers)).standard_normal(VOCAB).astype(np.float32)
    head = tvm_sparse.LshHead(embedding, bias=bias, **SMALL)
    wanted = expected(embedding, hidden, candidates(head, embedding, hidden, 1), bias)
    values, indices, info = head.topk(hidden, 7, log=True)
    check_topk(values, indices, wanted)
    probabilities = head.topk(hidden, 7)[0]
    assert np.allclose(probabilities, np.exp(values), atol=1e-6)
    moved = head.to(torch.device("cpu"))
    assert moved is head
    tensors = tvm_sparse.LshHead(tensor(embedding), bias=torch.from_numpy(bias), **SMALL)
    for found, other in zip((values, indices), tensors.topk(tensor(hidden), 7, log=True), strict=False):
        assert isinstance(other, torch.Tensor) and np.array_equal(found, other.numpy())
    assert tensors.topk(tensor(hidden), 7)[2].overflow.tolist() == [0] and tensors.to("cpu") is tensors
    # The normaliser is what makes probabilities of logits.
    best = (hidden.astype(np.float64) @ embedding.astype(np.float64).T + bias)[np.arange(5), indices[:, 0]]
    assert np.allclose(best - info.log_normaliser, values[:, 0], atol=1e-4)


def tensor(array: np.ndarray) -> Any:
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.parametrize("dtype", FLOATS)
def test_threshold_0_is_the_full_softmax(dtype: str) -> None:
    embedding, hidden = drawn(5, dtype)
    head = tvm_sparse.LshHead(embedding, threshold=0)
    everything = expected(embedding, hidden, [np.arange(VOCAB)])
    values, indices, info = head.topk(hidden, 11, log=True)
    check_topk(values, indices, everything)
    assert head.hashing is None and info.candidates.tolist() == [VOCAB] and info.overflow.tolist() == [0]
    if dtype == "float32":
        logits = hidden @ embedding.T
        check_topk(*head.topk(hidden, 11)[:2], np.exp(everything))
        assert np.allclose(values, tvm_sparse.softmax_topk(logits, 11, log=True)[0], atol=1e-4)
    log_probs, words, info = head.log_softmax(hidden, sentences=5)
    assert np.allclose(log_probs, everything, atol=1e-4) and words.shape == (5, VOCAB)
    assert info.candidates.tolist() == [VOCAB] * 5
    assert "threshold=0" in str(head.explain(5, 11))


def test_what_does_not_fit_is_counted() -> None:
    embedding, hidden = drawn(6)
    roomy = tvm_sparse.LshHead(embedding, **SMALL | {"capacity": VOCAB})
    wanted = candidates(roomy, embedding, hidden, 2)
    capacity = min(len(row) for row in wanted) - 1
    head = tvm_sparse.LshHead(embedding, **SMALL | {"capacity": capacity})
    _, words, info = head.log_softmax(hidden, sentences=2)
    assert info.candidates.tolist() == [len(row) for row in wanted]
    assert info.overflow.tolist() == [len(row) - capacity for row in wanted]
    assert words.tolist() == [row[:capacity].tolist() for row in wanted]
    values, indices, info = head.topk(hidden, 3, sentences=2, log=True)
    check_topk(values, indices, expected(embedding, hidden, [row[:capacity] for row in wanted]))
    assert (info.overflow > 0).all()


def test_fewer_candidates_than_asked_for() -> None:
    embedding, hidden = drawn(2)
    head = tvm_sparse.LshHead(embedding, **SMALL | {"threshold": 48, "frequent": [5, 3], "capacity": 8})
    values, indices, info = head.topk(hidden, 4)
    assert np.sort(indices, axis=1).tolist() == [[-1, -1, 3, 5]] * 2 and (values[:, 2:] == 0).all()
    assert np.allclose(values.sum(axis=1), 1) and info.candidates.tolist() == [2]
    words, log_probs, _ = head.sample(hidden, seed=1)
    assert set(words.tolist()) <= {3, 5} and np.isfinite(log_probs).all()


@pytest.mark.parametrize("path", ["lsh", "exact"])
def test_nan_stays_in_its_row(path: str) -> None:
    embedding, hidden = drawn(6)
    head = tvm_sparse.LshHead(embedding, **SMALL | {"path": path})
    hidden[2, 7] = np.nan
    values, _, info = head.topk(hidden, 5, log=True)
    assert np.isnan(values[2]).all() and np.isnan(info.log_normaliser[2])
    others = np.delete(np.arange(6), 2)
    assert np.isfinite(values[others]).all() and np.isfinite(info.log_normaliser[others]).all()
    for options in ({}, {"top_k": 3}):
        words, log_probs, _ = head.sample(hidden, seed=2, **options)
        assert (words >= 0).all() and np.isnan(log_probs[2]) and np.isfinite(log_probs[others]).all()
    # Candidates of the other rows of its sentence are there, and those of other sentences are the same.
    alone = head.topk(hidden[3:], 5, log=True)[0]
    assert np.allclose(head.topk(hidden, 5, sentences=2, log=True)[0][3:], alone, atol=1e-5)


def test_sentences_are_apart() -> None:
    embedding, hidden = drawn(12)
    head = tvm_sparse.LshHead(embedding, **SMALL)
    together = head.topk(hidden, 5, sentences=4)
    for place in range(4):
        rows = slice(3 * place, 3 * place + 3)
        values, indices, info = head.topk(hidden[rows], 5)
        assert np.array_equal(together[1][rows], indices) and np.allclose(together[0][rows], values, atol=1e-6)
        assert together[2].candidates[place] == info.candidates[0]


def test_no_rows() -> None:
    embedding, hidden = drawn(0)
    head = tvm_sparse.LshHead(embedding, **SMALL)
    values, indices, info = head.topk(hidden, 5)
    assert values.shape == indices.shape == (0, 5) and info.log_normaliser.shape == (0,)
    assert head.log_softmax(hidden)[0].shape[0] == 0 and head.sample(hidden)[0].shape == (0,)


# ---- sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"path": "exact"}, {"top_k": 20, "top_p": 0.6}, {"min_p": 0.2}], ids=str
)
def test_samples_follow_the_distribution(options: dict[str, Any]) -> None:
    embedding, hidden = drawn(1)
    head = tvm_sparse.LshHead(embedding, **SMALL)
    rows, temperature = 4000, 1.7
    states = np.repeat(hidden, rows, 0)
    words, log_probs, info = head.sample(states, temperature, seed=next(numbers), **options)
    lists = [np.arange(VOCAB)] if "path" in options else candidates(head, embedding, hidden, 1)
    wanted = expected(embedding, hidden / np.float32(temperature), lists)[0]
    # As of `softmax_sample`: before all filters.
    assert words.dtype == np.int32 and np.allclose(log_probs, wanted[words], atol=1e-4)
    order = np.argsort(-wanted)[: options.get("top_k", VOCAB)]
    chances = np.exp(wanted[order])
    before = np.cumsum(chances) - chances
    left = order[(before < options.get("top_p", 1) * chances.sum()) & (chances >= options.get("min_p", 0) * chances[0])]
    probabilities = np.where(np.isin(np.arange(VOCAB), left), np.exp(wanted), 0)
    probabilities /= probabilities.sum()
    assert np.isin(words, left).all()
    error = np.sqrt(probabilities * (1 - probabilities) / rows)
    assert (np.abs(np.bincount(words, minlength=VOCAB) / rows - probabilities) < 6 * error + 1e-3).all()
    assert info.log_normaliser.shape == (rows,)


def test_a_seed_draws_the_same_again() -> None:
    torch = pytest.importorskip("torch")
    embedding, hidden = drawn(20)
    for head, states in (
        (tvm_sparse.LshHead(embedding, **SMALL), hidden),
        (tvm_sparse.LshHead(tensor(embedding), **SMALL), tensor(hidden)),
    ):
        first, again, other = (head.sample(states, 3.0, seed=seed)[0].tolist() for seed in (4, 4, 5))
        assert first == again != other and first != head.sample(states, 3.0, seed=4, offset=1)[0].tolist()
        torch.manual_seed(7)
    drawn_by_torch = [head.sample(states, 3.0)[0].tolist()]
    torch.manual_seed(7)
    assert [head.sample(states, 3.0)[0].tolist()] == drawn_by_torch


def test_samples_are_those_of_softmax_sample() -> None:
    """Of the logits of all candidates, whatever way they are drawn; filters and temperatures of each row, too."""
    embedding, hidden = drawn(20)
    head = tvm_sparse.LshHead(embedding, **SMALL | {"path": "exact"})
    logits = hidden @ embedding.T
    uniforms = np.random.default_rng(2).random(20, dtype=np.float32)
    heats, many = np.linspace(0, 3, 20, dtype=np.float32), np.arange(20, dtype=np.int32)
    for options in (
        {"top_k": 5},
        {"temperature": 0},
        {"temperature": np.inf, "top_k": 4},
        {"temperature": 2.0, "top_p": 0.8, "min_p": 0.01},
        {"temperature": heats, "top_k": many},
        {"temperature": heats, "top_k": 7},
        {"top_k": 0},
        {"top_k": VOCAB},
    ):
        words, log_probs, info = head.sample(hidden, uniforms=uniforms, **options)
        wanted = tvm_sparse.softmax_sample(logits, uniforms=uniforms, **options)
        assert (words == wanted[0]).mean() >= 0.9  # another one where u is within rounding of a bound
        assert np.allclose(log_probs[words == wanted[0]], wanted[1][words == wanted[0]], atol=1e-4)
        assert info.log_normaliser.shape == (20,)


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "dtype", "table"),
    [
        # Each two of the three are together in a run that is not thorough.
        thorough(suffix, dtype, table) if (i + j + k) % 2 else (suffix, dtype, table)
        for i, suffix in enumerate(("npz", "safetensors"))
        for j, dtype in enumerate(FLOATS)
        for k, table in enumerate(("direct", "cuckoo"))
    ],
)
def test_a_head_comes_back_as_it_was(suffix: str, dtype: str, table: str, tmp_path: Path) -> None:
    if suffix == "safetensors":
        pytest.importorskip("safetensors")
    embedding, hidden = drawn(4, dtype)
    bias = np.random.default_rng(next(numbers)).standard_normal(VOCAB).astype(np.float32)
    head = tvm_sparse.LshHead(embedding, bias=bias, **SMALL | {"table": table})
    head.measured[4, 1] = Measured("sm_90a", 1e-6, 2e-6)
    path = head.save(tmp_path / f"head.{suffix}")
    again = tvm_sparse.LshHead.load(path)
    assert (again.settings, again.path, again.measured) == (head.settings, head.path, head.measured)
    assert again.embedding.dtype == embedding.dtype
    for found, wanted in zip(again.topk(hidden, 5)[:2], head.topk(hidden, 5)[:2], strict=True):
        assert np.array_equal(found, wanted)
    torch = pytest.importorskip("torch")
    tensors = tvm_sparse.LshHead.load(path, device="cpu")
    assert torch.equal(tensors.topk(tensor(hidden), 5)[1], torch.from_numpy(head.topk(hidden, 5)[1]))
    tensors.save(path)
    assert isinstance(tvm_sparse.LshHead.load(path).embedding, torch.Tensor)
    with pytest.raises(TypeError, match="hidden: expected an array of the embedding's library"):
        tensors.topk(hidden, 5)


def test_a_head_that_was_called_is_copied_and_pickled() -> None:
    embedding, hidden = drawn(4)
    head = tvm_sparse.LshHead(embedding, **SMALL)
    wanted = head.topk(hidden, 5)
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        for have, want in zip(other.topk(hidden, 5)[:2], wanted[:2], strict=True):
            np.testing.assert_array_equal(have, want)


def test_a_file_without_the_embedding(tmp_path: Path) -> None:
    embedding, hidden = drawn(4)
    head = tvm_sparse.LshHead(embedding, **SMALL)
    path = head.save(tmp_path / "head.npz", embedding=False)
    with pytest.raises(ValueError, match="holds no embedding; pass it"):
        tvm_sparse.LshHead.load(path)
    with pytest.raises(ValueError, match=r"embedding: expected shape \(301, 40\), got \(300, 40\)"):
        tvm_sparse.LshHead.load(path, embedding=embedding[1:])
    again = tvm_sparse.LshHead.load(path, embedding=embedding)
    assert np.array_equal(again.topk(hidden, 5)[1], head.topk(hidden, 5)[1])
    exact = tvm_sparse.LshHead(embedding, threshold=0)
    assert tvm_sparse.LshHead.load(exact.save(tmp_path / "exact.npz")).settings == exact.settings


def test_files_that_are_no_heads(tmp_path: Path) -> None:
    embedding, _ = drawn(1)
    head = tvm_sparse.LshHead(embedding, **SMALL)
    path = head.save(tmp_path / "head")
    assert path.suffix in storage.SUFFIXES
    arrays, meta = storage.read(path)

    def refused(message: str, changed: dict[str, np.ndarray] | None = None, **numbers: Any) -> None:
        where = tmp_path / "other.npz"
        storage.write(where, arrays | (changed or {}), meta | numbers)
        with pytest.raises(ValueError, match=message):
            tvm_sparse.LshHead.load(where)

    words = arrays["words"].copy()
    words[3, 4] = VOCAB
    refused(r"words: expected ids in \[0, 301\)", {"words": words})
    refused("words: expected shape", {"words": words[:, 1:]})
    table = arrays["table"].copy()
    table[0, 3] = VOCAB + 9
    refused("table: bucket starts must .* end at vocab=301", {"table": table})
    permutations = arrays["permutations"].copy()
    permutations[0, 0, 0] = HIDDEN
    refused(r"permutations.*outside \[0, 40\)", {"permutations": permutations})
    refused(r"embedding: expected shape \(301, 40\)", {"embedding": embedding[1:]})
    refused("format 99", format=99)
    refused("capacity: expected between", settings=meta["settings"] | {"capacity": 5})
    refused("not a head", settings={"vocab": 3})
    broken = tmp_path / "broken.npz"
    broken.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a file that `save` wrote"):
        tvm_sparse.LshHead.load(broken)
    np.savez(broken, tvm_sparse=np.array([{"a": print}], object))  # a pickle inside
    with pytest.raises(ValueError, match="not a file that `save` wrote"):
        tvm_sparse.LshHead.load(broken)
    with pytest.raises(ValueError, match="path: expected a name that ends in"):
        head.save(tmp_path / "head.pkl")


# ---- which path ----------------------------------------------------------------------------------


def test_the_faster_path_is_taken_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, hidden = drawn(6)
    head = tvm_sparse.LshHead(embedding, **SMALL | {"path": "auto", "capacity": 64})
    found = head.explain(6, 5)
    assert found.path == "lsh" and "no record tells the time of lsh and exact" in found.why
    assert [one.problem.partition("/")[0] for one in found.kernels] == ["lsh_candidates", "candidate_topk"]
    assert "it was asked for" in str(head.explain(6, 5, path="exact"))
    assert "exceeds the capacity of 64" in head.explain(6, 65).why
    assert head.topk(hidden, 65)[2].candidates.tolist() == [VOCAB]

    # By records: seconds of the kernels, by operator.
    seconds = {"lsh_candidates": 3e-6, "candidate_topk": 4e-6, "head_topk": 8e-6}
    how = dict.fromkeys(seconds, "exact")
    plain = dispatch.dispatcher.explain

    behind: set[str] = set()  # operators whose records are with fresh inputs

    def recorded(problem: Any, where: Any) -> Any:
        figures = {"seconds": seconds[problem.operator], "fallback_seconds": 1.0, "machine": "", "date": ""}
        if problem.operator in behind:
            figures["inputs"] = "fresh"
        return dataclasses.replace(plain(problem, where), how=how[problem.operator], figures=figures)

    monkeypatch.setattr(dispatch.dispatcher, "explain", recorded)

    def taken(rows: int = 6, **options: Any) -> tuple[str, str]:
        monkeypatch.setattr(dispatch.dispatcher, "launchers", {})
        found = head.explain(rows, 5, **options)
        return found.path, str(found)

    path, why = taken()
    assert path == "lsh" and "the faster one, by the records" in why and "lsh 7.0 us, exact 8.0 us" in why
    seconds["candidate_topk"] = 6e-6
    path, why = taken()
    assert path == "exact" and "head_topk" in why
    assert head.topk(hidden, 5)[2].candidates.tolist() == [VOCAB]
    # Times with hot inputs and with fresh ones do not compare.
    behind.add("head_topk")
    assert taken()[0] == "lsh"
    behind |= set(seconds)
    assert taken()[0] == "exact"
    behind.clear()
    how["head_topk"] = "nearby"
    assert taken()[0] == "lsh" and "no record tells the time of exact" in taken()[1]

    # By what fit measured, on this architecture alone.
    head.measured[6, 1] = Measured(machine.cpu().arch, 2e-6, 1e-6)
    path, why = taken()
    assert path == "exact" and "measured by fit for 6 rows" in why
    assert taken(12)[0] == "lsh"
    head.measured[6, 1] = Measured("elsewhere", 2e-6, 1e-6)
    assert taken()[0] == "lsh"


# ---- fit -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick() -> Any:
    """Timing that takes no time: what is tested is what is found."""
    with pytest.MonkeyPatch.context() as patch:
        calls: list[str] = []

        def clock(contenders: Any, rounds: int) -> Any:
            calls.extend(contenders)
            for call in contenders.values():
                call()
            return {name: ("eager", [1.0 if name == "exact" else 0.5 + int(name) / 100]) for name in contenders}

        patch.setattr(fitting, "time_cpu", clock)
        yield calls


def samples(grouped: bool) -> tuple[np.ndarray, np.ndarray]:
    embedding, hidden = drawn(64)
    return embedding, hidden.reshape(16, 4, HIDDEN) if grouped else hidden


@pytest.mark.parametrize("grouped", [thorough(False), True])
def test_fit_reaches_the_recall_it_says(quick: list[str], grouped: bool) -> None:
    embedding, hidden = samples(grouped)
    order = np.random.default_rng(next(numbers)).permutation(VOCAB)
    head, frontier = tvm_sparse.LshHead.fit(
        embedding, hidden, 0.8, 2, rows=4, hashes=((5, 2), (2, 4)), bands=(48, 96), order=order, trials=2
    )
    chosen = frontier.chosen
    assert chosen in frontier.points and chosen.seconds < 1 and min(chosen.recall, chosen.search_recall) >= 0.8
    assert head.settings.threshold == chosen.threshold and head.settings.bands == chosen.bands
    assert sorted(head.frequent) == sorted(order[: chosen.frequent])
    assert head.explain(4, 2).path == "lsh" and "measured by fit" in head.explain(4, 2).why

    # Recall and sizes of the held-out half, counted anew by the equations.
    held = hidden.reshape(16, 4, HIDDEN)[1::2].reshape(-1, HIDDEN)
    truth = np.argsort(-(held @ embedding.T), axis=1, kind="stable")[:, :2]
    lists = candidates(head, embedding, held, 8)
    own = np.repeat(np.arange(8), 4) if grouped else np.arange(32)
    allowed = lists if grouped else candidates(head, embedding, held, 32)
    kept = np.array([np.isin(words, allowed[place]) for words, place in zip(truth, own, strict=True)])
    assert np.isclose(kept.mean(), chosen.recall) and np.isclose(kept[:, 0].mean(), chosen.recall_1)
    assert np.isclose(np.mean([len(row) for row in lists]), chosen.candidates)
    assert chosen.overflowed == np.mean([len(row) > chosen.capacity for row in lists])

    rows = list(csv.DictReader(io.StringIO(frontier.csv())))
    assert len(rows) == len(frontier.points) and [row["chosen"] for row in rows].count("1") == 1
    assert "of the top 2 from" in str(frontier) and str(frontier).count("\n") == len(rows) + 1


def test_fit_says_where_the_exact_head_wins(quick: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # So many states that in no draw the setting that is chosen by one half misses the recall on the other.
    embedding, hidden = drawn(1024)
    options: dict[str, Any] = {"rows": 4, "hashes": ((5, 2),), "bands": (24, 48), "trials": 4}
    slow = lambda contenders, rounds: {name: ("eager", [float(name != "exact")]) for name in contenders}  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "time_cpu", slow)
        head, frontier = tvm_sparse.LshHead.fit(embedding, hidden, 0.5, 3, **options)
    assert frontier.chosen is None and "beats the exact head" in frontier.verdict
    assert head.explain(4, 3).path == "exact" and head.settings.threshold
    pytest.importorskip("matplotlib")
    frontier.plot(tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 1000

    head, frontier = tvm_sparse.LshHead.fit(embedding, hidden, 1.0, 3, **options | {"frequent": [0], "bands": (1,)})
    assert head.settings.threshold == 0 and frontier.chosen is None
    assert "no setting reaches a recall of 1.0" in frontier.verdict


def test_an_interrupted_fit_has_what_was_counted(quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, hidden = samples(False)
    options: dict[str, Any] = {"rows": 4, "hashes": ((5, 2), (2, 4)), "bands": (48,), "trials": 2, "progress": True}
    counted = survey.Survey.points

    def interrupted(self: Any, words: Any, samples: Any, k: int, *rest: Any) -> Any:
        if k == 2:
            raise KeyboardInterrupt
        return counted(self, words, samples, k, *rest)

    monkeypatch.setattr(survey.Survey, "points", interrupted)
    _, frontier = tvm_sparse.LshHead.fit(embedding, hidden, 0.8, 2, **options)
    assert "interrupted after 1 of 2 hashes" in frontier.verdict and all(p.k == 5 for p in frontier.points)
    with pytest.raises(KeyboardInterrupt):
        tvm_sparse.LshHead.fit(embedding, hidden, 0.8, 2, **options | {"hashes": ((2, 4),)})


@pytest.mark.parametrize("bits", [1, 8, 16, 24])
def test_hits_are_equal_codes(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(band_codes, "COMPARED", 300)  # parts of the words
    rng = np.random.default_rng(next(numbers))
    last = (1 << bits) - 1  # a code that no word has
    words = rng.integers(last, size=(600, 70)).astype(np.int32)
    states = rng.integers(last + 1, size=(600, 11)).astype(np.int32)
    words[:, 3] = states[:, 5] = last - 1  # as many hits as bands, more than a byte counts
    states[:, 0] = last
    for convert in (np.asarray, torch.from_numpy):
        given = (band_codes.narrow(convert(one), bits) for one in (words, states))
        found = {bands: np.asarray(hits).copy() for bands, hits in band_codes.hits_by_band(*given, (7, 600))}
        assert list(found) == [7, 600] and found[600][5, 3] == 600
        for bands, hits in found.items():
            assert np.array_equal(hits, (states[:bands, :, None] == words[:bands, None]).sum(axis=0))


@pytest.mark.parametrize(("k", "units"), [(2, 1), (3, 4), (16, 3)])
def test_codes_are_the_same_on_every_device(k: int, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(band_codes, "ON_GPU", 500)  # parts of the bands
    rng = np.random.default_rng(next(numbers))
    rows = rng.integers(-2, 3, (70, 24)).astype(np.float32)  # with many ties
    rows[3, 5], rows[4], rows[6] = np.nan, np.nan, -np.inf
    permutations = wta.permutations(24, k, units, 9)
    wanted = wta.hash_rows(rows, permutations).T
    assert np.array_equal(band_codes.hash_tensor(torch.from_numpy(rows), permutations).numpy(), wanted)
    assert np.array_equal(band_codes.codes_of(torch.from_numpy(rows).bfloat16(), permutations), wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sentences": 17}, "sentences: expected between 1 and 16 lists of samples, got 17"),
        ({"n": 0}, r"n: expected 1 <= n <= vocab \(301\), got 0"),
        ({"recall": 0.0}, "recall: expected 0 < recall <= 1"),
        ({"rows": 40}, r"hidden_samples: expected at least 2 lists .* got \(64, 40\) for lists of 40 rows"),
        ({"order": [0, 0]}, r"order: expected every id of \[0, 301\) once"),
        ({"frequent": [302]}, "frequent: expected counts between 0 and the vocab"),
        ({"bands": []}, "bands: expected numbers of at least 1"),
        ({"trials": 0}, "trials: expected at least 1"),
        ({"hashes": [(64, 2)]}, "k.*hidden=40"),
    ],
)
def test_fit_refuses(options: dict[str, Any], message: str) -> None:
    embedding, hidden = samples(False)
    with pytest.raises(ValueError, match=message):
        tvm_sparse.LshHead.fit(embedding, hidden, **{"recall": 0.9, "n": 3, "rows": 4} | options)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 41}, ValueError, "k=41.*hidden=40"),
        ({"k": 1}, ValueError, "k: expected an integer of at least 2, got 1"),
        ({"units": 11}, ValueError, "33 bits"),
        ({"bands": 0, "threshold": 0, "path": "lsh"}, ValueError, "with threshold=0 every word is a candidate"),
        ({"bands": 1 << 24}, ValueError, "bands: expected at most 65535, got 16777216"),
        ({"bands": 1 << 16}, ValueError, "bands: expected at most 65535, got 65536"),
        ({"threshold": 49}, ValueError, r"threshold: expected 0 <= threshold <= bands \(48\), got 49"),
        ({"threshold": 2.5}, TypeError, "threshold: expected an integer, got float"),
        ({"frequent": 302}, ValueError, r"frequent: expected between 0 and the vocab \(301\), got 302"),
        ({"frequent": [3, 301]}, ValueError, r"frequent: expected ids in \[0, 301\), got 301"),
        ({"frequent": [0.5]}, TypeError, "frequent: expected a count or one dimension of integers"),
        ({"capacity": 16}, ValueError, r"capacity: expected between 17 .* and the vocab \(301\), got 16"),
        ({"capacity": 302}, ValueError, "capacity: expected between 17"),
        ({"table": "hash"}, ValueError, "table: expected one of direct, cuckoo or None, got 'hash'"),
        ({"table": "direct", "units": 6}, ValueError, "table: codes have 18 bits"),
        ({"bias": np.zeros(300, np.float32)}, ValueError, r"bias: expected shape \(301,\)"),
        ({"path": "fast"}, ValueError, "path: expected one of auto, lsh, exact, got 'fast'"),
    ],
)
def test_what_cannot_be_built(options: dict[str, Any], error: type[Exception], message: str) -> None:
    embedding, hidden = drawn(2)
    with pytest.raises(error, match=message):
        tvm_sparse.LshHead(embedding, **SMALL | options).topk(hidden, 1)


def test_what_cannot_be_called() -> None:
    embedding, hidden = drawn(6)
    head = tvm_sparse.LshHead(embedding, **SMALL | {"capacity": 32})
    for arguments, options, error, message in (
        ((hidden, 0), {}, ValueError, r"n: expected 1 <= n <= vocab \(301\), got 0"),
        ((hidden, 302), {}, ValueError, r"n: expected 1 <= n <= vocab \(301\), got 302"),
        ((hidden, 33), {}, ValueError, r"n: expected at most the capacity \(32\), got 33"),
        ((hidden, "3"), {}, TypeError, "n: expected an integer, got str"),
        ((hidden, 3), {"sentences": 4}, ValueError, "sentences: expected a divisor of the 6 rows, got 4"),
        ((hidden, 3), {"temperature": 0}, ValueError, "temperature: expected a finite number above 0"),
        ((hidden[:, 1:], 3), {}, ValueError, r"hidden: expected shape \(rows, 40\) and dtype float32"),
        ((hidden[0], 3), {}, ValueError, "hidden: expected 2 dimensions"),
        ((hidden.astype(np.float16), 3), {}, ValueError, "hidden: expected shape .* float32, .* float16"),
        ((hidden.tolist(), 3), {}, TypeError, "hidden: expected a torch tensor"),
    ):
        with pytest.raises(error, match=message):
            head.topk(*arguments, **options)
    for arguments, error, message in (
        ({"top_k": 2.0}, TypeError, "top_k: expected an integer, got float"),
        ({"temperature": -1}, ValueError, "temperature: expected a number of at least 0, got -1"),
        ({"temperature": "hot"}, TypeError, "temperature: expected"),
        ({"seed": 1, "uniforms": np.zeros(6, np.float32)}, ValueError, "uniforms: expected these or a seed"),
    ):
        with pytest.raises(error, match=message):
            head.sample(hidden, **arguments)
    with pytest.raises(ValueError, match="a CUDA graph needs a head on a GPU"):
        head.capture(6, 3)
    with pytest.raises(TypeError, match="embedding: expected a torch tensor or a NumPy array, got list"):
        tvm_sparse.LshHead(embedding.tolist())
    with pytest.raises(ValueError, match="embedding: expected dtype float32, float16, bfloat16, got float64"):
        tvm_sparse.LshHead(embedding.astype(np.float64))


# ---- GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.allocator  # a captured graph allocates
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("path", ["lsh", "exact"])
def test_a_step_is_one_graph(path: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    embedding, hidden = drawn(12, dtype)
    head = tvm_sparse.LshHead(embedding, **SMALL | {"path": path}).to("cuda")
    with pytest.raises(ValueError, match="hidden: expected an array on cuda:0"):
        head.topk(tensor(hidden), 5)
    captured = head.capture(12, 5, sentences=2, log=True)
    host = tvm_sparse.LshHead(embedding, **SMALL | {"path": path})
    for _ in range(3):
        _, hidden = drawn(12, dtype)
        states = tensor(hidden).cuda()
        values, indices, info = captured(states)
        assert values is captured.values and indices is captured.indices
        torch.cuda.synchronize()
        eager = head.topk(states, 5, sentences=2, log=True)
        assert torch.equal(values, eager[0]) and torch.equal(indices, eager[1])
        assert torch.equal(info.candidates, eager[2].candidates) and torch.equal(info.overflow, eager[2].overflow)
        wanted = host.topk(hidden, 5, sentences=2, log=True)
        assert np.allclose(values.cpu(), wanted[0], atol=1e-3)
        assert info.candidates.tolist() == wanted[2].candidates.tolist()
    assert captured.topk(states, 5, sentences=2, log=True)[0] is values
    with pytest.raises(ValueError, match="captured was n=5, sentences=2, log=True; got 5, 1, True"):
        captured.topk(states, 5, log=True)
    with pytest.raises(ValueError, match="hidden: the graph takes shape"):
        captured(states[1:])


@pytest.mark.gpu
@pytest.mark.allocator  # a captured graph allocates
def test_a_search_through_a_graph() -> None:
    torch = pytest.importorskip("torch")
    embedding, _ = drawn(1)
    head = tvm_sparse.LshHead(tensor(embedding).cuda(), **SMALL)
    weight = torch.randn(HIDDEN, HIDDEN, device="cuda") / 4

    def step(words: Any, state: Any) -> tuple[Any, Any]:
        after = torch.tanh(state @ weight + head.embedding[words])
        return after, after

    start, state = torch.tensor([1, 2], device="cuda"), torch.zeros(2, HIDDEN, device="cuda")
    found = [
        tvm_sparse.beam_search(step, which, start, state=state, beam=4, length=12)
        for which in (head, head.capture(8, 4, sentences=2, log=True))
    ]
    assert torch.equal(found[0].sequences, found[1].sequences) and torch.equal(found[0].scores, found[1].scores)


@pytest.mark.gpu
def test_a_head_on_the_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    embedding, hidden = drawn(6)
    host = tvm_sparse.LshHead(embedding, **SMALL)
    head = tvm_sparse.LshHead(tensor(embedding).cuda(), **SMALL)
    states = tensor(hidden).cuda()
    words, log_probs, _ = head.sample(states, seed=3)
    assert torch.equal(head.sample(states, seed=3)[0], words) and log_probs.is_cuda
    again = tvm_sparse.LshHead.load(head.save(tmp_path / "head.npz"), device="cuda")
    for found in (head, again, host.to("cuda")):
        results = found.log_softmax(states, sentences=3)
        wanted = host.log_softmax(hidden, sentences=3)
        assert np.array_equal(results[1].cpu(), wanted[1]) and np.allclose(results[0].cpu(), wanted[0], atol=1e-4)


@pytest.mark.gpu
def test_settings_are_timed_on_the_gpu() -> None:
    pytest.importorskip("torch")
    embedding, hidden = drawn(6)
    states = tensor(hidden).cuda()
    fitted, frontier = tvm_sparse.LshHead.fit(
        tensor(embedding).cuda(), states.repeat(4, 1), 0.5, 3, hashes=((5, 2),), bands=(48,), trials=1
    )
    assert frontier.exact_seconds > 0 and fitted.topk(states, 3)[0].is_cuda
