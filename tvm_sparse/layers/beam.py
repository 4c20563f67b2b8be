"""Beam search over any model and any head that answers `topk`, with NumPy arrays or torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..core.given import integer
from ..runtime import arrays
from .libraries import library

# Steps between two looks at whether all hypotheses have ended: each waits for the GPU.
LOOK_EVERY = 8

Step = Callable[[Any, Any], tuple[Any, Any]]
Reorder = Callable[[Any, Any], Any]


class Head(Protocol):
    """What beam search asks of a head, as `LshHead` has it."""

    @property
    def vocab(self) -> int: ...

    def topk(self, hidden: Any, n: int, *, sentences: int, log: bool) -> tuple[Any, Any, Any]: ...


class Beams(NamedTuple):
    """What `beam_search` returns, the best hypothesis of each sentence first.

    Attributes
    ----------
    sequences
        `(sentences, beam, length)` int64: the words after the start, `eos` among them; behind it `eos` again.
    log_probs
        `(sentences, beam)` float32: of the sequences; -inf where there are fewer hypotheses than beams.
    scores
        `(sentences, beam)` float32: what they are ranked by, log_probs over the length penalty.
    lengths
        `(sentences, beam)` int64: words of each, `eos` included.
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
    """The most probable continuations, `beam` hypotheses a sentence kept at every step.

    score = log p(words) / ((5 + length) / 6)^length_penalty

    Parameters
    ----------
    step
        `step(words, state) -> (hidden, state)`: the model. `words` `(rows,)` int64 are the last ones of all hypotheses,
        `hidden` `(rows, hidden)` what the head takes; rows = sentences * beam at every step, those of one sentence side
        by side.
    head
        An `LshHead`, or anything that has a `vocab` and answers `topk(hidden, n, sentences=, log=True)` as it does.
        Hypotheses of one sentence share candidates.
    start
        `(sentences,)` int64 words that the model is given first, as a torch tensor or a NumPy array. Results are of the
        same library and on the same device.
    state
        Of the model before the first step, a row a sentence: an array, or tuples, lists and dicts of such; what is no
        array is passed on as it is.
    beam
        Hypotheses that are kept. A hypothesis that has ended keeps its place.
    length
        Words of the longest result.
    eos
        The word that ends a hypothesis; None: all have the full length, and nothing waits for the GPU, so that a CUDA
        graph can hold the whole search.
    length_penalty
        0: log-probabilities are compared; above, longer hypotheses are preferred (Wu et al. 2016, equation 14).
    reorder
        `reorder(state, rows)` gives the state of these rows, for a state whose arrays have the rows along another axis
        than the first. `rows` are int64.

    Returns
    -------
    beams
        See `Beams`. Equal scores are ranked by the order of their hypotheses, then of the words' probabilities. A
        hypothesis whose hidden state has NaN ends with log-probability -inf; others go on.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit, naming them.

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
    offsets = ranks[:, :1]  # of a sentence's first row
    words, state = xp.take(start, (ranks // beam).reshape(-1)), reorder(state, (ranks // beam).reshape(-1))
    sequences = xp.full((sentences * beam, length), filler, "int64", start)
    # All hypotheses of a sentence are the same one at first: only one of them counts.
    scores = log_probs = xp.where(ranks == offsets, 0.0, xp.full((sentences, beam), impossible, "float32", start))
    lengths, ended = ranks * 0, ranks < 0

    for position in range(length):
        hidden, state = step(words, state)
        values, ids, _ = head.topk(hidden, width, sentences=sentences, log=True)
        values, ids = values.reshape(sentences, beam, width), ids.reshape(sentences, beam, width)
        # A hypothesis that has ended goes on in one way, as it is.
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
        # -1 stands where a list had too few candidates: no word that a model knows.
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
    """The rows of all arrays in tuples, lists and dicts."""
    if isinstance(state, dict):
        return {name: _rows_of(part, rows) for name, part in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(_rows_of(part, rows) for part in state))
    if isinstance(state, (tuple, list)):
        return type(state)(_rows_of(part, rows) for part in state)
    if arrays.is_torch(state) or arrays.is_numpy(state):
        return library("state", state).take(state, rows)
    return state
