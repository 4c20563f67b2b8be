"""The heads that a search may have: over all words, over the most frequent ones, over words that translate one of the
sentence's, and over words found by hashing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import tvm_sparse
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import make
from tvm_sparse.layers.libraries import library, to_host
from tvm_sparse.layers.settings import hash_words

from .search import Head

TORCH, EXACT, TOP, ALIGNED, LSH, FITTED, CENTRED, SMALL, BOTH, NONE = (
    "torch", "exact head", "TOP", "WA", "LSH", "LSH, fitted", "LSH, centred", "LSH, small buckets",
    "LSH, centred, small buckets", "no head",
)  # fmt: skip


def _nothing(number: int) -> None:
    pass


@dataclass(frozen=True)
class Way:
    """A head, and what is said of it.

    Attributes
    ----------
    problems
        Those of its kernels for a number of rows.
    before
        Called with a sentence's number before its first step.
    candidates
        Mean number of words that it multiplied with, for hidden states of one list.
    owner
        The `LshHead`, of one.
    """

    name: str
    setting: str
    head: Head
    candidates: Callable[[torch.Tensor], float]
    problems: Callable[[int], list[Problem]] = lambda rows: []
    before: Callable[[int], None] = _nothing
    owner: Any = None


def _axes(embedding: torch.Tensor) -> dict[str, Any]:
    vocab, hidden = embedding.shape
    return {"vocab": vocab, "hidden": hidden, "dtype": str(embedding.dtype).removeprefix("torch.")}


def by_torch(embedding: torch.Tensor, n: int) -> Way:
    def head(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden, embedding)
        values, ids = torch.topk(torch.log_softmax(logits, -1, dtype=torch.float32), n)
        return values, ids

    return Way(TORCH, "", head, lambda hidden: len(embedding))


def exact(embedding: torch.Tensor, n: int, words: int | None = None) -> Way:
    """The exact head over the first `words`; None: over all."""
    few = embedding[:words]
    n = min(n, len(few))

    def head(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = tvm_sparse.head_topk(hidden, few, n, log=True, constant=True)
        return values, ids

    def problems(rows: int) -> list[Problem]:
        return [make("head_topk", {"batch": rows, "k": n, **_axes(few)})]

    name, setting = (EXACT, "") if words is None else (TOP, f"T {words}")
    return Way(name, setting, head, lambda hidden: len(few), problems)


def aligned(embedding: torch.Tensor, n: int, most: int, lists: tuple[np.ndarray, np.ndarray], first: int) -> Way:
    """Words that translate a word of the sentence: `lists` are those of the sentences from number `first` on, with at
    most `most` for each word.
    """
    rows, counts = (torch.from_numpy(a).to(embedding.device) for a in lists)
    own, count = rows[0].clone()[None], counts[:1].clone()

    def head(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = tvm_sparse.candidate_topk(hidden, embedding, own, n, counts=count, log=True)
        return values, ids

    def before(number: int) -> None:
        own.copy_(rows[number - first][None])
        count.copy_(counts[number - first][None])

    def problems(beam: int) -> list[Problem]:
        return [make("candidate_topk", {"lists": 1, "beam": beam, "m": rows.shape[1], "k": n, **_axes(embedding)})]

    return Way(ALIGNED, f"{most} a word", head, lambda hidden: float(count), problems, before)


def hashed(head: Any, n: int, name: str = LSH) -> Way:
    """An `LshHead`, by its LSH path."""
    own = head.settings

    def call(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids, _ = head.topk(hidden, n, log=True, path="lsh")
        return values, ids

    def candidates(hidden: torch.Tensor) -> float:
        return float(head.topk(hidden, n, path="lsh")[2].candidates.float().mean())

    def problems(rows: int) -> list[Problem]:
        axes = {"lists": 1, "beam": rows, **_axes(head.embedding)}
        codes = {"k": own.k, "units": own.units, "bands": own.bands, "table": own.table}
        if head.embedding.device.type == "cuda" and own.frequent:
            return [make("lsh_topk", {**axes, **codes, "frequent": own.frequent, "n": n})]
        return [
            make("lsh_candidates", {**axes, **codes, "capacity": own.capacity}),
            make("candidate_topk", {**axes, "m": own.capacity, "k": n}),
        ]

    setting = f"k {own.k}, u {own.units}, W {own.bands}, t {own.threshold}, T {own.frequent}"
    return Way(name, setting, call, candidates, problems, owner=head)


def changed(head: Any, *, threshold: int, frequent: int, **_: int) -> Any:
    """The head with the same tables, another threshold and another number of frequent words, and room for all."""
    own = dataclasses.replace(head.settings, threshold=threshold, frequent=frequent, capacity=head.vocab)
    return type(head).assembled(head.embedding, head.bias, own, head.hashing, np.arange(frequent), path="lsh")


def rehashed(head: Any, *, centred: bool = False, most: int | None = None) -> Any:
    """The head with direct tables of other codes of its words.

    Parameters
    ----------
    centred
        Codes of the embedding without its mean word: h (e_j - m) ranks words as h e_j does, and a column in which most
        words are large does not give most of them the same code.
    most
        Buckets of more words than this are left empty, as stop words are left out of an index: they cost most of a
        look-up, and a hit in them tells least.
    """
    embedding = head.embedding
    mean = embedding.float().mean(0, keepdim=True)
    of_words = (embedding.float() - mean).to(embedding.dtype) if centred else embedding
    hashing = hash_words(of_words, to_host(head.hashing.permutations), "direct", 0)
    if most is not None:
        words, starts = to_host(hashing.words), to_host(hashing.table)
        lengths = np.diff(starts, axis=1)
        small = lengths <= most
        # Words of buckets that are left out come after all others, where no bucket reaches.
        for band, (own, length, kept) in enumerate(zip(words.copy(), lengths, small, strict=True)):
            words[band] = own[np.argsort(~np.repeat(kept, length), kind="stable")]
        starts[:, 1:] = np.cumsum(np.where(small, lengths, 0), axis=1)
        move = library("embedding", embedding).from_host
        hashing = dataclasses.replace(hashing, words=move(words, embedding), table=move(starts, embedding))
    return type(head).assembled(embedding, head.bias, head.settings, hashing, head.frequent, path="lsh")


def nothing(rows: int, n: int, device: str) -> Way:
    """A head that returns the same words at no cost, which tells the time of the rest of a step."""
    values = torch.zeros((rows, n), device=device)
    ids = torch.arange(2, n + 2, device=device).expand(rows, n).contiguous()
    return Way(NONE, "", lambda hidden: (values, ids), lambda hidden: 0.0)


def recall(
    way: Way, steps: Sequence[tuple[int, torch.Tensor]], truth: Sequence[torch.Tensor]
) -> tuple[float, list[float]]:
    """Share of the best words of these steps' rows that are among a head's candidates, and the number of those at each
    step.

    `steps` are sentences' numbers with hidden states, `truth` the best words of each row. A head's own best words
    contain all of those that are candidates.
    """
    kept = total = 0.0
    counts = []
    for (number, hidden), best in zip(steps, truth, strict=True):
        way.before(number)
        ids = way.head(hidden)[1]
        kept += float((best[:, :, None] == ids[:, None, :].long()).any(-1).sum())
        total += best.numel()
        counts.append(way.candidates(hidden))
    return kept / max(1.0, total), counts


def settings_of(vocab: int, hidden: int) -> Iterator[dict[str, int]]:
    """The paper's hashes with several thresholds and numbers of frequent words, the most telling first."""
    few, some, many = (max(1, vocab // share) for share in (64, 16, 8))
    grid = [
        (16, 3, 500, 3, some), (8, 3, 500, 4, some), (16, 3, 500, 2, some), (8, 3, 500, 5, some), (16, 3, 500, 4, some),
        (16, 3, 500, 3, many), (8, 3, 500, 5, many), (16, 3, 500, 3, few), (8, 3, 500, 6, few),
    ]  # fmt: skip
    for k, units, bands, threshold, frequent in grid:
        if k <= hidden:
            yield {"k": k, "units": units, "bands": bands, "threshold": threshold, "frequent": frequent}
