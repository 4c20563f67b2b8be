"""Beam search for any model and any head with a method `topk`, with NumPy arrays or torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..core.given import integer
from ..runtime import arrays
from .libraries import library

# Steps between checks whether all hypotheses have ended, each of which waits for the GPU.
LOOK_EVERY = 8

Step = Callable[[Any, Any], tuple[Any, Any]]
Reorder = Callable[[Any, Any], Any]


class Head(Protocol):
    """The interface of a head for beam search; `LshHead` has it."""

    @property
    def vocab(self) -> int: ...

    def topk(self, hidden: Any, n: int, *, sentences: int, log: bool) -> tuple[Any, Any, Any]: ...


class Beams(NamedTuple):
    """The result of `beam_search`, with the best hypothesis of each sentence first.

    Attributes
    ----------
    sequences
        `(sentences, beam, length)` int64: the words after the start, including `eos`, and padded with it.
    log_probs
        `(sentences, beam)` float32: log-probabilities of the sequences; -inf if there are fewer hypotheses than beams.
    scores
        `(sentences, beam)` float32: log_probs divided by the length penalty, by which hypotheses are ranked.
    lengths
        `(sentences, beam)` int64: number of words of each, including `eos`.
    """

    sequences: Any
    log_probs: Any
    scores: Any
    lengths: Any


def beam_search(
    step: Step,
    head: Head,
    start: Any,
    *,
    state: Any = None,
    beam: int = 12,
    length: int,
    eos: int | None = None,
    length_penalty: float = 0.0,
    reorder: Reorder | None = None,
) -> Beams:
    """The most probable continuations, keeping `beam` hypotheses per sentence at every step.

    score = log p(words) / ((5 + length) / 6)^length_penalty

    Parameters
    ----------
    step
        `step(words, state) -> (hidden, state)`: the model. `words` `(rows,)` int64 are the last ones of all hypotheses,
        `hidden` `(rows, hidden)` is the input of the head; rows = sentences * beam at every step, with those of one
        sentence side by side.
    head
        An `LshHead`, or any object with the attribute `vocab` and the method `topk(hidden, n, sentences=, log=True)`.
        Hypotheses of one sentence share candidates.
    start
        `(sentences,)` int64: the first input words of the model, as a torch tensor or a NumPy array. Results are in the
        same library and on the same device.
    state
        The model's state before the first step, with one row per sentence: an array, or tuples, lists and dicts of
        arrays; other values are passed unchanged.
    beam
        Number of hypotheses that are kept. A hypothesis that has ended keeps its place.
    length
        Largest number of words of a result.
    eos
        The word that ends a hypothesis; None: all have the full length, and the search does not wait for the GPU, so
        that a CUDA graph can contain it.
    length_penalty
        0: log-probabilities are compared; larger values prefer longer hypotheses (Wu et al. 2016, equation 14).
    reorder
        `reorder(state, rows)` returns the state of these rows (int64), for a state whose arrays do not have the rows as
        their first axis.

    Returns
    -------
    beams
        See `Beams`. Equal scores are ranked by the order of their hypotheses, then of the words' probabilities. A
        hypothesis whose hidden state has NaN ends with log-probability -inf; others continue.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit, naming them.

    Notes
    -----
    Source: the search of Shi, Xu & Knight 2018, section 4; length penalty of Wu et al. 2016, "Google's Neural Machine
    Translation System", equation 14 without coverage.
    """
    beam, length = integer("beam", beam), integer("length", length)
    if beam < 1 or length < 1:
        raise ValueError(f"beam, length: expected at least 1 of each, got {beam} and {length}")
    known = arrays.facts("start", start)
    if len(known.shape) != 1 or known.dtype != "int64" or not known.shape[0]:
        raise ValueError(f"start: expected shape (sentences,) and dtype int64, got {known.shape} and {known.dtype}")
    if eos is not None and not 0 <= integer("eos", eos) < head.vocab:
        raise ValueError(f"eos: expected a word in [0, {head.vocab}), got {eos}")
    xp, reorder = library("start", start), _rows_of if reorder is None else reorder
    sentences, width = known.shape[0], min(beam, head.vocab)
    filler = 0 if eos is None else eos
    impossible = -float("inf")

    ranks = xp.arange(sentences * beam, "int64", start).reshape(sentences, beam)
    offsets = ranks[:, :1]  # index of each sentence's first row
    words, state = xp.take(start, (ranks // beam).reshape(-1)), reorder(state, (ranks // beam).reshape(-1))
    sequences = xp.full((sentences * beam, length), filler, "int64", start)
    # At first all hypotheses of a sentence are equal: only one of them counts.
    scores = log_probs = xp.where(ranks == offsets, 0.0, xp.full((sentences, beam), impossible, "float32", start))
    lengths, ended = ranks * 0, ranks < 0

    for position in range(length):
        hidden, state = step(words, state)
        values, ids, _ = head.topk(hidden, width, sentences=sentences, log=True)
        values, ids = values.reshape(sentences, beam, width), ids.reshape(sentences, beam, width)
        # A hypothesis that has ended has one continuation, itself.
        only = xp.where(xp.arange(width, "int64", start) == 0, 0.0, xp.full((width,), impossible, "float32", start))
        values, ids = xp.where(ended[:, :, None], only, values), xp.where(ended[:, :, None], filler, ids)
        lengths = xp.where(ended, lengths, lengths + 1)

        totals = log_probs[:, :, None] + values
        totals = xp.where(xp.isnan(totals), impossible, totals)
        penalty = ((5.0 + xp.cast(lengths, "float32")) / 6.0) ** length_penalty
        ranked = (totals / penalty[:, :, None]).reshape(sentences, beam * width)
        totals = totals.reshape(sentences, beam * width)
        best = xp.descending(ranked)[:, :beam]
        log_probs, scores = xp.take_along(totals, best), xp.take_along(ranked, best)

        parents, rows = best // width, (best // width + offsets).reshape(-1)
        lengths, ended = xp.take_along(lengths, parents), xp.take_along(ended, parents)
        chosen = xp.take_along(ids.reshape(sentences, beam * width), best)
        # -1 marks missing candidates of a short list; the model needs a valid word.
        chosen = xp.where(chosen < 0, filler, chosen)
        sequences, state = xp.take(sequences, rows), reorder(state, rows)
        words = sequences[:, position] = chosen.reshape(-1)
        if eos is not None:
            ended = ended | (chosen == eos)
            if position % LOOK_EVERY == LOOK_EVERY - 1 and bool(ended.all()):
                break
    longest = length if eos is None else int(lengths.max())
    return Beams(sequences.reshape(sentences, beam, length)[:, :, :longest], log_probs, scores, lengths)


def _rows_of(state: Any, rows: Any) -> Any:
    """Select rows of all arrays in tuples, lists and dicts."""
    if isinstance(state, dict):
        return {name: _rows_of(part, rows) for name, part in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_rows_of(part, rows) for part in state))
    if isinstance(state, (tuple, list)):
        return type(state)(_rows_of(part, rows) for part in state)
    if arrays.is_torch(state) or arrays.is_numpy(state):
        return library("state", state).take(state, rows)
    return state
