"""Beam search equals an exhaustive search where the beam is wide enough, and follows each hypothesis's own state."""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

import numpy as np
import pytest

import tvm_sparse
from tvm_sparse.layers.beam import Beams

VOCAB, HIDDEN, EOS = 5, 6, 2
numbers = itertools.count(int.from_bytes(os.urandom(4), "little"))


class Model:
    """h' = tanh(h W + x[word]): a recurrent model whose every prefix has a state of its own."""

    def __init__(self, vocab: int = VOCAB) -> None:
        rng = np.random.default_rng(next(numbers))
        self.inputs = rng.standard_normal((vocab, HIDDEN)).astype(np.float32)
        self.weight = (rng.standard_normal((HIDDEN, HIDDEN)) / 2).astype(np.float32)
        self.output = (2 * rng.standard_normal((vocab, HIDDEN))).astype(np.float32)
        self.vocab = vocab

    def step(self, words: Any, state: Any) -> tuple[Any, Any]:
        state = np.tanh(state @ self.weight + self.inputs[words])
        return state, state

    def log_probs(self, state: np.ndarray, word: int) -> tuple[np.ndarray, np.ndarray]:
        """Of all words after this one, and the state that goes with it, in float64."""
        state = np.tanh(state @ self.weight.astype(np.float64) + self.inputs[word])
        logits = self.output.astype(np.float64) @ state
        return logits - np.log(np.exp(logits).sum()), state

    def head(self, **options: Any) -> Any:
        return tvm_sparse.LshHead(self.output, **{"threshold": 0} | options)

    def exhaustive(
        self, start: int, state: np.ndarray, length: int, eos: int | None, penalty: float
    ) -> list[tuple[float, float, tuple[int, ...]]]:
        """(score, log-probability, words) of every sequence, the best first."""
        done: list[tuple[float, float, tuple[int, ...]]] = []

        def extend(words: tuple[int, ...], total: float, state: np.ndarray) -> None:
            if len(words) == length or (words and words[-1] == eos):
                done.append((total / ((5 + len(words)) / 6) ** penalty, total, words))
                return
            log_probs, after = self.log_probs(state, words[-1] if words else start)
            for word in range(self.vocab):
                extend((*words, word), total + log_probs[word], after)

        extend((), 0.0, state.astype(np.float64))
        return sorted(done, reverse=True)


def check(beams: Beams, wanted: list[list[tuple[float, float, tuple[int, ...]]]], eos: int | None) -> None:
    for place, best in enumerate(wanted):
        for rank in range(min(beams.scores.shape[1], len(best))):
            score, log_prob, words = best[rank]
            length = int(beams.lengths[place, rank])
            found = beams.sequences[place, rank].tolist()
            assert abs(float(beams.scores[place, rank]) - score) < 1e-4
            assert abs(float(beams.log_probs[place, rank]) - log_prob) < 1e-4
            assert tuple(found[:length]) == words and all(word == eos for word in found[length:])


@pytest.mark.parametrize("penalty", [0.0, 0.8])
@pytest.mark.parametrize("eos", [None, EOS])
def test_a_wide_beam_finds_the_best_of_all(eos: int | None, penalty: float) -> None:
    model, length, sentences = Model(), 3, 2
    state = np.random.default_rng(next(numbers)).standard_normal((sentences, HIDDEN)).astype(np.float32)
    start = np.array([1, 4])
    beam = VOCAB**length  # every prefix keeps its place
    beams = tvm_sparse.beam_search(
        model.step, model.head(), start, state=state, beam=beam, length=length, eos=eos, length_penalty=penalty
    )
    wanted = [model.exhaustive(int(w), s, length, eos, penalty) for w, s in zip(start, state, strict=True)]
    check(beams, wanted, eos)
    few = np.arange(len(wanted[0]), beam)
    assert (beams.log_probs[:, few] == -np.inf).all()  # fewer sequences than beams


def test_a_beam_is_the_textbook_s() -> None:
    """Against a plain search with lists and dictionaries, narrow enough that hypotheses change places."""
    model, length, beam = Model(40), 7, 4
    state = np.random.default_rng(next(numbers)).standard_normal((1, HIDDEN)).astype(np.float32)
    kept = [(0.0, (), state[0].astype(np.float64))]
    for _ in range(length):
        grown = []
        for total, words, own in kept:
            log_probs, after = model.log_probs(own, words[-1] if words else 7)
            grown += [(total + log_probs[word], (*words, word), after) for word in range(model.vocab)]
        kept = sorted(grown, key=lambda hypothesis: -hypothesis[0])[:beam]
    beams = tvm_sparse.beam_search(model.step, model.head(), np.array([7]), state=state, beam=beam, length=length)
    check(beams, [[(total, total, words) for total, words, _ in kept]], None)


class State(NamedTuple):
    cell: Any
    others: dict[str, Any]


def test_states_of_all_kinds_follow_their_hypotheses() -> None:
    torch = pytest.importorskip("torch")
    model, sentences, beam = Model(30), 3, 4
    state = np.random.default_rng(next(numbers)).standard_normal((sentences, HIDDEN)).astype(np.float32)
    start = np.array([3, 1, 2])
    plain = tvm_sparse.beam_search(model.step, model.head(), start, state=state, beam=beam, length=6, eos=EOS)

    def step(words: Any, state: Any) -> tuple[Any, Any]:
        [nested, along_columns, name] = state
        assert name == "kept as it is" and torch.equal(nested.cell, nested.others["again"][0])
        assert torch.equal(along_columns, nested.cell.T)
        after = torch.tanh(nested.cell @ weight + inputs[words])
        return after, [State(after, {"again": (after.clone(),)}), after.T.contiguous(), name]

    weight, inputs = torch.from_numpy(model.weight), torch.from_numpy(model.inputs)
    first = torch.from_numpy(state)

    def reorder(state: Any, rows: Any) -> Any:
        [nested, along_columns, name] = state
        again = nested.others["again"][0].index_select(0, rows)
        nested = State(nested.cell.index_select(0, rows), {"again": (again,)})
        return [nested, along_columns.index_select(1, rows), name]

    head = tvm_sparse.LshHead(torch.from_numpy(model.output), threshold=0)
    state = [State(first, {"again": (first.clone(),)}), first.T.contiguous(), "kept as it is"]
    tensors = tvm_sparse.beam_search(
        step, head, torch.from_numpy(start), state=state, beam=beam, length=6, eos=EOS, reorder=reorder
    )
    assert all(isinstance(part, torch.Tensor) for part in tensors)
    assert np.array_equal(tensors.sequences.numpy(), plain.sequences)
    assert np.allclose(tensors.log_probs.numpy(), plain.log_probs, atol=1e-5)

    # The same without a function of one's own: nested containers of rows.
    def simple(words: Any, state: Any) -> tuple[Any, Any]:
        after = torch.tanh(state[0].cell @ weight + inputs[words])
        return after, [State(after, {"again": (after, None)})]

    state = [State(first, {"again": (first, None)})]
    again = tvm_sparse.beam_search(simple, head, torch.from_numpy(start), state=state, beam=beam, length=6, eos=EOS)
    assert torch.equal(again.sequences, tensors.sequences)


def test_sentences_are_searched_apart() -> None:
    model = Model(30)
    state = np.random.default_rng(next(numbers)).standard_normal((3, HIDDEN)).astype(np.float32)
    start = np.array([3, 1, 2])
    options: dict[str, Any] = {"beam": 5, "length": 6, "eos": EOS, "length_penalty": 0.6}
    together = tvm_sparse.beam_search(model.step, model.head(), start, state=state, **options)
    for place in range(3):
        rows = slice(place, place + 1)
        alone = tvm_sparse.beam_search(model.step, model.head(), start[rows], state=state[rows], **options)
        length = alone.sequences.shape[2]
        assert np.array_equal(together.sequences[place, :, :length], alone.sequences[0])
        assert np.allclose(together.scores[place], alone.scores[0], atol=1e-5)


def test_a_search_ends_when_all_hypotheses_have() -> None:
    steps = 0

    class Always:
        vocab = 9

        def topk(self, hidden: Any, n: int, *, sentences: int, log: bool) -> tuple[Any, Any, Any]:
            """eos is the word after the third."""
            values = np.full((len(hidden), n), -50.0, np.float32)
            values[:, 0] = -0.1
            words = np.tile(np.arange(3, 3 + n), (len(hidden), 1))
            words[:, 0] = EOS if steps >= 3 else 7
            return values, words, None

    def step(words: Any, state: Any) -> tuple[Any, Any]:
        nonlocal steps
        steps += 1
        return np.zeros((len(words), 1)), state

    beams = tvm_sparse.beam_search(step, Always(), np.array([0]), beam=2, length=1000, eos=EOS)
    assert steps < 20 and beams.sequences[0, 0].tolist()[:3] == [7, 7, EOS] and beams.lengths[0, 0] == 3
    assert np.isclose(beams.log_probs[0, 0], -0.3) and beams.sequences.shape[2] == beams.lengths.max()


def test_nan_ends_its_hypothesis_alone() -> None:
    model = Model(30)
    state = np.random.default_rng(next(numbers)).standard_normal((2, HIDDEN)).astype(np.float32)
    whole = tvm_sparse.beam_search(model.step, model.head(), np.array([3, 1]), state=state, beam=3, length=4)
    spoilt = state.copy()
    spoilt[0, 0] = np.nan
    beams = tvm_sparse.beam_search(model.step, model.head(), np.array([3, 1]), state=spoilt, beam=3, length=4)
    assert (beams.log_probs[0] == -np.inf).all()
    assert np.array_equal(beams.sequences[1], whole.sequences[1])
    assert ((beams.sequences >= 0) & (beams.sequences < 30)).all()


def test_candidates_from_hashes_are_searched() -> None:
    """With every word among the candidates, LSH finds what the exact head does."""
    model = Model(64)
    state = np.random.default_rng(next(numbers)).standard_normal((2, HIDDEN)).astype(np.float32)
    options: dict[str, Any] = {"state": state, "beam": 4, "length": 5}
    exact = tvm_sparse.beam_search(model.step, model.head(), np.array([3, 1]), **options)
    head = model.head(k=3, units=1, bands=8, threshold=1, frequent=64, capacity=64, path="lsh")
    found = tvm_sparse.beam_search(model.step, head, np.array([3, 1]), **options)
    assert np.array_equal(found.sequences, exact.sequences)
    # And with few of them it goes on, whatever they are.
    head = model.head(k=3, units=2, bands=8, threshold=8, frequent=[5, 9], capacity=64, path="lsh")
    found = tvm_sparse.beam_search(model.step, head, np.array([3, 1]), **options)
    assert set(found.sequences.reshape(-1).tolist()) <= set(range(64)) and np.isfinite(found.log_probs[:, 0]).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"beam": 0}, ValueError, "beam, length: expected at least 1 of each, got 0 and 3"),
        ({"length": 1.5}, TypeError, "length: expected an integer, got float"),
        ({"eos": 5}, ValueError, r"eos: expected a word in \[0, 5\), got 5"),
        ({"start": np.array([[1]])}, ValueError, r"start: expected shape \(sentences,\) and dtype int64"),
        ({"start": np.array([1], np.int32)}, ValueError, "start: expected .* got .* int32"),
        ({"start": [1]}, TypeError, "start: expected a torch tensor"),
    ],
)
def test_what_cannot_be_searched(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Model()
    arguments = {"start": np.array([1]), "length": 3, "beam": 2} | options
    with pytest.raises(error, match=message):
        tvm_sparse.beam_search(model.step, model.head(), state=np.zeros((1, HIDDEN), np.float32), **arguments)


@pytest.mark.gpu
def test_a_search_on_the_gpu() -> None:
    torch = pytest.importorskip("torch")
    model = Model(300)
    state = np.random.default_rng(next(numbers)).standard_normal((3, HIDDEN)).astype(np.float32)
    start = np.array([3, 1, 2])
    options: dict[str, Any] = {"beam": 6, "length": 20, "eos": EOS, "length_penalty": 0.6}
    wanted = tvm_sparse.beam_search(model.step, model.head(), start, state=state, **options)
    weight, inputs = torch.from_numpy(model.weight).cuda(), torch.from_numpy(model.inputs).cuda()

    def step(words: Any, state: Any) -> tuple[Any, Any]:
        after = torch.tanh(state @ weight + inputs[words])
        return after, after

    found = tvm_sparse.beam_search(
        step, model.head().to("cuda"), torch.from_numpy(start).cuda(), state=torch.from_numpy(state).cuda(), **options
    )
    assert found.sequences.is_cuda and np.allclose(found.scores.cpu(), wanted.scores, atol=1e-3)
