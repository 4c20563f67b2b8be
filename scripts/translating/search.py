"""Beam search of one sentence at a time, a step of which is one CUDA graph, with any head."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tvm_sparse.layers.captured import recorded

from .model import Translator
from .vocabulary import BOS, EOS, Sentences

# Steps between checks whether all hypotheses have ended, each of which waits for the GPU.
LOOK_EVERY = 4
# Steps of a sentence before those that are timed alone, and these.
BEFORE_TIMED, TIMED = 2, 4
# Sentences that are encoded at once.
AT_ONCE = 64
# Most steps of a sentence: `STRETCH` for each of its words, plus `MORE`. Few translations are longer.
STRETCH, MORE = 2, 10

# Log-probabilities `(beam, n)` float32 and words `(beam, n)` for the head's inputs `(beam, hidden)`.
Head = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Encoded(NamedTuple):
    """Sentences after the encoder, padded to the longest: `(sentences, steps, hidden)` states and their keys, the last
    state and memory cell of each layer `(layers, sentences, hidden)`, and which states are padding.
    """

    memory: torch.Tensor
    keys: torch.Tensor
    state: torch.Tensor
    cell: torch.Tensor
    padding: torch.Tensor


@torch.no_grad()
def encoded(model: Translator, sources: Sentences, numbers: np.ndarray, device: str) -> Encoded:
    longest = int(sources.lengths[numbers].max())
    parts = []
    for start in range(0, len(numbers), AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        lengths = torch.from_numpy(sources.lengths[some])
        memory, (state, cell) = model.encode(torch.from_numpy(sources.padded(some)).to(device), lengths)
        memory = torch.nn.functional.pad(memory, (0, 0, 0, longest - memory.shape[1]))
        padding = torch.arange(longest, device=device) >= lengths.to(device)[:, None]
        parts.append((memory, model.align(memory), state, cell, padding))
    axes = (0, 0, 1, 1, 0)
    return Encoded(*(torch.cat(some, axis) for some, axis in zip(zip(*parts, strict=True), axes, strict=True)))


class Found(NamedTuple):
    """What a search of several sentences found.

    Attributes
    ----------
    sentences
        The words of the best hypothesis of each, without `EOS`.
    scores
        Its log-probability divided by the length penalty.
    steps
        Number of steps in all.
    seconds
        Wall time of each sentence, after encoding.
    """

    sentences: list[list[int]]
    scores: list[float]
    steps: int
    seconds: list[float]

    def rate(self, most: int | None = None) -> float:
        """Words a second of the first `most` sentences, `EOS` included; default: of all."""
        return sum(len(one) + 1 for one in self.sentences[:most]) / sum(self.seconds[:most])


class Search:
    """Keeps `beam` hypotheses of a sentence; ranked as `tvm_sparse.beam_search` ranks them.

    score = log p(words) / ((5 + length) / 6)^penalty

    Parameters
    ----------
    head
        See `Head`; its n is at least 1.
    length
        Largest number of words of a result.
    memory
        Steps of the encoder's states: the longest sentence.
    """

    def __init__(
        self, model: Translator, head: Head, *, beam: int, length: int, memory: int, penalty: float = 0.6
    ) -> None:
        weight = model.output.weight
        device, hidden, layers = weight.device, weight.shape[1], model.sizes.layers

        def zeros(*shape: int, dtype: torch.dtype = weight.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.model, self.head, self.beam, self.length, self.penalty = model, head, beam, length, penalty
        self.memory, self.keys = zeros(memory, hidden), zeros(memory, hidden)
        self.padding = zeros(memory, dtype=torch.bool)
        self.state, self.cell = zeros(layers, beam, hidden), zeros(layers, beam, hidden)
        self.words, self.lengths = (zeros(beam, dtype=torch.int64) for _ in range(2))
        self.log_probs, self.scores = (zeros(beam, dtype=torch.float32) for _ in range(2))
        self.ended = zeros(beam, dtype=torch.bool)
        self.position = zeros(1, dtype=torch.int64)
        self.chosen, self.parents = (zeros(length, beam, dtype=torch.int64) for _ in range(2))
        self.hidden = zeros(beam, hidden)
        self._only = torch.full((beam,), -torch.inf, device=device)
        self._only[0] = 0
        self._first = self._only.clone()
        self.step: Callable[[], Any] = self._step
        if device.type == "cuda":
            self.step = recorded(self._step, device)[0].replay

    @classmethod
    def of(cls, model: Translator, head: Head, sentences: Encoded, beam: int) -> Search:
        """A search with room for the longest of these sentences."""
        memory = sentences.memory.shape[1]
        return cls(model, head, beam=beam, length=STRETCH * memory + MORE, memory=memory)

    @torch.no_grad()
    def _step(self) -> None:
        model, beam = self.model, self.beam
        inputs = model.embed_target(self.words)[None]
        states, (state, cell) = model.decoder(inputs, (self.state, self.cell))
        hidden = model.look(states[0], self.keys, self.memory, self.padding)
        self.hidden.copy_(hidden)
        values, ids = self.head(hidden)
        n = values.shape[1]
        # A hypothesis that has ended has one continuation, itself; -1 marks the missing words of a short list.
        values = torch.where(self.ended[:, None], self._only[:n], values)
        ids = torch.where(self.ended[:, None] | (ids < 0), EOS, ids.long())
        lengths = self.lengths + ~self.ended
        totals = self.log_probs[:, None] + values
        ranked = totals / (((5.0 + lengths) / 6.0) ** self.penalty)[:, None]
        best = torch.sort(ranked.view(-1), descending=True, stable=True)[1][:beam]
        parents = best // n
        words = ids.view(-1)[best]
        self.log_probs.copy_(totals.view(-1)[best])
        self.scores.copy_(ranked.view(-1)[best])
        self.lengths.copy_(lengths[parents])
        self.ended.copy_(self.ended[parents] | (words == EOS))
        self.words.copy_(words)
        self.state.copy_(state[:, parents])
        self.cell.copy_(cell[:, parents])
        self.chosen.index_copy_(0, self.position, words[None])
        self.parents.index_copy_(0, self.position, parents[None])
        # Steps are also timed after the end of a sentence.
        self.position.add_(1).remainder_(self.length)

    def begin(self, sentences: Encoded, number: int) -> None:
        """Set the state to the beginning of a sentence."""
        self.memory.copy_(sentences.memory[number])
        self.keys.copy_(sentences.keys[number])
        self.padding.copy_(sentences.padding[number])
        self.state.copy_(sentences.state[:, number, None].expand_as(self.state))
        self.cell.copy_(sentences.cell[:, number, None].expand_as(self.cell))
        self.words.fill_(BOS)
        # At first all hypotheses are equal: only one of them counts.
        self.log_probs.copy_(self._first)
        for zero in (self.lengths, self.ended, self.position):
            zero.zero_()

    def best(self, steps: int) -> tuple[list[int], float]:
        """The words of the best hypothesis after these steps, and its score."""
        chosen, parents, scores = (array.cpu().numpy() for array in (self.chosen, self.parents, self.scores))
        at, words = int(np.argmax(scores)), []
        score = float(scores[at])
        for step in reversed(range(steps)):
            words.append(int(chosen[step, at]))
            at = parents[step, at]
        words.reverse()
        return words[: words.index(EOS)] if EOS in words else words, score

    def __call__(
        self,
        sentences: Encoded,
        numbers: Sequence[int],
        *,
        before: Callable[[int], None] = lambda number: None,
        after: Callable[[int, int], None] | None = None,
        deadline: float | None = None,
    ) -> Found:
        """Translate these sentences, one after the other.

        Parameters
        ----------
        before
            Called with each number before its first step.
        after
            Called with the number and the position after each step; the head's inputs are in `hidden`.
        deadline
            A `time.monotonic()` after which no further sentence is begun.
        """
        found, total, seconds, steps = [], [], [], 0
        most = (STRETCH * (~sentences.padding).sum(1) + MORE).tolist()
        for number in numbers:
            begun = time.monotonic()
            if deadline is not None and begun > deadline:
                break
            self.begin(sentences, number)
            before(number)
            for step in range(min(self.length, most[number])):
                self.step()
                if after is not None:
                    after(number, step)
                if step % LOOK_EVERY == LOOK_EVERY - 1 and bool(self.ended.all()):
                    break
            words, score = self.best(step + 1)
            found.append(words)
            total.append(score)
            seconds.append(time.monotonic() - begun)
            steps += step + 1
        return Found(found, total, steps, seconds)

    def microseconds(
        self, sentences: Encoded, numbers: Sequence[int], before: Callable[[int], None] = lambda number: None
    ) -> float:
        """Median time of a step near the beginning of these sentences, when no hypothesis has ended yet; on a GPU the
        device's time of replays of the graph.
        """
        found = []
        for number in numbers:
            self.begin(sentences, number)
            before(number)
            for _ in range(BEFORE_TIMED):
                self.step()
            found.append(_seconds_of(self.step, TIMED, self.memory.device))
        return statistics.median(found) * 1e6


def _seconds_of(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Mean time of calls in a row."""
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begun) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times / 1e3
