"""Table 4 of Shi, Xu & Knight 2018 on this machine: the time of every step of a softmax, over all words and by LSH.

    python scripts/shi_xu_knight_table4.py                    # the paper's shape, about a minute on a GPU
    python scripts/shi_xu_knight_table4.py --vocab 66000 --dtype float32

The paper's steps one by one, each as a separate operator: the hash, the look-up, the list, a copy of the candidates'
embeddings, the product with it, normalisation and search. Look-up and list are also timed in their naive forms, as
templates for comparison. Then the programs that a decoder calls: hash to list, and product to best words, as in the LSH
head, and the exact head. Embeddings and states are random, and threshold and frequent words are set for about the
paper's number of candidates; recall needs real data (`lsh_recall.py`). Everything is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from contenders import Libraries, Named, built
from heads import (
    CHAIN,
    EXACT,
    LSH,
    OURS,
    TORCH,
    TORCH_GATHERED,
    Call,
    Check,
    Report,
    Timed,
    draw,
    lsh_head,
    micro,
    over,
    problems_of,
    show,
    step_contenders,
    timed,
    top_check,
)
from reproduction import provenance, result_path

import tvm_sparse
from tvm_sparse.cli.common import Target, console, errors, machine_here, table, us
from tvm_sparse.core import spaces
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Mismatch, Problem
from tvm_sparse.core.registry import make
from tvm_sparse.formats import bitmap, wta

# Names of steps, and the paper's milliseconds for a sentence (Table 4, K20): full vocabulary, LSH, and the naive form's
# time relative to that.
HASH, LOOKUP, LIST, COPY, PRODUCT, SEARCH = (
    "WTA hash", "look-up", "candidate list", "copy of embeddings", "product", "softmax + top-n"
)  # fmt: skip
PAPER = {
    HASH: (None, 3.72, None), LOOKUP: (None, 7.29, 3.4), LIST: (None, 2.51, 1.7), COPY: (None, 3.01, None),
    PRODUCT: (108.16, 22.43, None), SEARCH: (12.33, 2.74, None),
}  # fmt: skip
FULL_PRODUCT, FULL_SEARCH, TORCH_SEARCH = "full: product", "full: softmax + top-n", "full: torch softmax + topk"
FUSED_LIST, GATHERED, FUSED_TOP = "hash to list, fused", "gathered product", "gathered product to top-n, fused"
COLUMNS = ("vocab", "hidden", "beam", "n", "dtype", "k", "units", "bands", "threshold", "frequent", "candidates",
           "step", "microseconds", "naive_microseconds", "naive_over_ours", "timed", "kernel", "naive_kernel",
           "note")  # fmt: skip


class Step(NamedTuple):
    """Intermediate results that the steps need, computed once."""

    head: Any
    hidden: torch.Tensor
    embedding: torch.Tensor
    codes: torch.Tensor  # (1, beam, bands)
    chosen: torch.Tensor  # (1, ceil(vocab / 32))
    candidates: torch.Tensor  # (1, capacity)
    words: torch.Tensor  # (count,) the candidates
    always: torch.Tensor
    n: int

    @classmethod
    def of(cls, head: Any, hidden: torch.Tensor, embedding: torch.Tensor, n: int) -> Step:
        hashing, settings = head.hashing, head.settings
        mask = np.isin(np.arange(settings.vocab), head.frequent)
        always = torch.from_numpy(bitmap.pack_bits(mask)).to(hidden.device)
        codes = tvm_sparse.wta_hash(hidden, hashing.permutations)[None]
        chosen = tvm_sparse.lsh_lookup(
            codes, hashing.words, hashing.table, always, settings.threshold, multipliers=hashing.multipliers
        )
        candidates, counts = tvm_sparse.compaction(chosen, settings.vocab, settings.capacity)
        words = candidates[0, : min(int(counts[0]), settings.capacity)].contiguous()
        return cls(head, hidden, embedding, codes, chosen, candidates, words, always, n)

    def problems(self) -> dict[str, Problem]:
        """The problems of the steps that are operators of ours."""
        own, dtype = self.head.settings, str(self.hidden.dtype).removeprefix("torch.")
        beam, count = len(self.hidden), len(self.words)
        shape = {"beam": beam, "vocab": own.vocab, "bands": own.bands}
        hashed = {"batch": beam, "hidden": own.hidden, "k": own.k, "units": own.units, "bands": own.bands}
        lists = {"lists": 1, "beam": beam, "vocab": own.vocab, "hidden": own.hidden, "m": count, "dtype": dtype}
        *_, fused, _, exact = problems_of(self.head, beam, self.n)
        return {
            HASH: make("wta_hash", {**hashed, "dtype": dtype}),
            LOOKUP: make(
                "lsh_lookup", {"lists": 1, **shape, "table": own.table, "bits": wta.code_bits(own.k, own.units)}
            ),
            LIST: make("compaction", {"lists": 1, "vocab": own.vocab, "capacity": own.capacity}),
            SEARCH: make("softmax_topk", {"batch": beam, "vocab": count, "k": self.n, "dtype": dtype}),
            FULL_SEARCH: make("softmax_topk", {"batch": beam, "vocab": own.vocab, "k": self.n, "dtype": dtype}),
            FUSED_LIST: fused,
            GATHERED: make("candidate_logits", lists),
            FUSED_TOP: make("candidate_topk", {**lists, "k": self.n}),
            EXACT: exact,
        }

    def calls(self) -> dict[str, Call]:
        head, hidden, embedding, n = self.head, self.hidden, self.embedding, self.n
        hashing, own, words = head.hashing, head.settings, self.words
        rows, linear = words.long(), torch.nn.functional.linear
        copy = embedding[rows]
        few, all_ = linear(hidden, copy), linear(hidden, embedding)
        tables = (hashing.words, hashing.table, self.always, own.threshold)
        return {
            FULL_PRODUCT: lambda: linear(hidden, embedding),
            FULL_SEARCH: lambda: tvm_sparse.softmax_topk(all_, n),
            TORCH_SEARCH: lambda: torch.topk(torch.softmax(all_, -1, dtype=torch.float32), n),
            HASH: lambda: tvm_sparse.wta_hash(hidden, hashing.permutations),
            LOOKUP: lambda: tvm_sparse.lsh_lookup(self.codes, *tables, multipliers=hashing.multipliers),
            LIST: lambda: tvm_sparse.compaction(self.chosen, own.vocab, own.capacity),
            COPY: lambda: embedding[rows],
            PRODUCT: lambda: linear(hidden, copy),
            SEARCH: lambda: tvm_sparse.softmax_topk(few, n),
            FUSED_LIST: lambda: tvm_sparse.lsh_candidates(
                hidden[None], hashing.permutations, *tables, own.capacity, multipliers=hashing.multipliers
            ),
            GATHERED: lambda: tvm_sparse.candidate_logits(hidden, embedding, words),
            FUSED_TOP: lambda: tvm_sparse.candidate_topk(hidden, embedding, words, n),
            **step_contenders(head, hidden, n, words)[0],
        }

    def checks(self) -> dict[str, Check]:
        def same_list(outputs: Any) -> None:
            if not torch.equal(outputs[0], self.candidates):
                raise Mismatch("the list is not that of the steps one by one")

        return {
            FUSED_LIST: same_list,
            FUSED_TOP: top_check(self.hidden, self.embedding, self.n, self.words)(OURS),
            **step_contenders(self.head, self.hidden, self.n, self.words)[1],
        }

    def naive(self, where: Machine, problems: dict[str, Problem]) -> Iterator[tuple[str, Problem, list[Any], Any]]:
        """Steps whose operator has templates for comparison: name, problem, inputs on the host, templates."""
        hashing, own = self.head.hashing, self.head.settings
        tables = [a.cpu().numpy() for a in (hashing.words, hashing.table, hashing.multipliers) if a is not None]
        inputs = {
            LOOKUP: [self.codes.cpu().numpy(), *tables, self.always.cpu().numpy(), own.threshold],
            LIST: [self.chosen.cpu().numpy()],
        }
        for step, given in inputs.items():
            applicable, _ = spaces.applicable(problems[step], where)
            named = [Named(f"{step}: {name}", name) for name in applicable if spaces.find(name).comparison]
            yield step, problems[step], given, named


def naive_calls(
    step: Step, where: Machine, libraries: Libraries, naive: list[tuple[str, Problem, list[Any], list[Named]]]
) -> tuple[dict[str, Call], dict[str, Check], dict[str, list[str]]]:
    """Calls of the templates for comparison, checks of their results, and their labels by step."""
    expected = {LOOKUP: step.chosen, LIST: step.candidates}
    calls: dict[str, Call] = {}
    checks: dict[str, Check] = {}
    labels: dict[str, list[str]] = {}

    def check_of(wanted: torch.Tensor) -> Check:
        def check(outputs: Any) -> None:
            found = outputs[0]
            found = found if isinstance(found, torch.Tensor) else torch.from_numpy(found)
            if not torch.equal(found.to(wanted.device), wanted):
                raise Mismatch("differs from ours")

        return check

    for name, problem, given, named in naive:
        for one in named:
            try:
                calls[one.label] = libraries.peer(one, problem.operator).prepare(problem, given, where.device)
            except RuntimeError as error:
                typer.echo(f"{one.label} is left out: {error}", err=True)
                continue
            checks[one.label] = check_of(expected[name])
            labels.setdefault(name, []).append(one.label)
    return calls, checks, labels


def print_table(found: dict[str, Timed], simple: dict[str, Timed], count: int, vocab: int) -> None:
    """Print the paper's table, with shares of the total."""

    def share(seconds: float | None, total: float) -> str:
        return f"{seconds / total:.1%}" if seconds and total else "-"

    full = sum(found[name].seconds or 0.0 for name in (FULL_PRODUCT, FULL_SEARCH))
    own = sum(found[name].seconds or 0.0 for name in PAPER)
    paper = {i: sum(row[i] or 0.0 for row in PAPER.values()) for i in (0, 1)}
    heads = ("us", "share", "paper's", "LSH us", "LSH share", "LSH paper's", "naive", "naive, paper's")
    printed = table("step", *heads, right=heads)
    for name, (all_words, by_lsh, slower) in PAPER.items():
        whole = found.get(f"full: {name}")
        slow = over(simple.get(name), found[name])
        printed.add_row(
            name, us(whole.seconds if whole else None), share(whole.seconds if whole else None, full),
            share(all_words, paper[0]), us(found[name].seconds), share(found[name].seconds, own),
            share(by_lsh, paper[1]), f"{slow}x" if slow else "-", f"{slower}x" if slower else "-",
        )  # fmt: skip
    printed.add_row("sum", us(full), "", "", us(own), "", "", "", "")
    typer.echo(f"\nThe paper's steps one by one: {vocab} words, or {count} candidates (paper: 40000, or 6177)")
    console().print(printed)


def main(
    target: Target = "auto",
    vocab: Annotated[int, typer.Option(min=1, help="Words.")] = 40000,
    hidden: Annotated[int, typer.Option(min=1, help="Columns.")] = 1000,
    beam: Annotated[int, typer.Option(min=1, help="Rows, which share a list; and how many best words.")] = 12,
    candidates: Annotated[int, typer.Option(min=1, help="About so many in the list.")] = 6000,
    k: Annotated[int, typer.Option(min=2)] = 16,
    units: Annotated[int, typer.Option(min=1)] = 3,
    bands: Annotated[int, typer.Option(min=1)] = 500,
    dtype: Annotated[str, typer.Option(help="Of states and embeddings.")] = "float16",
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write; default: in scripts/results/.")] = None,
    seed: Annotated[int, typer.Option(help="Of states and embeddings.")] = 0,
) -> None:
    """Time the steps of Table 4."""
    with errors():
        where = machine_here(target, "comparing")
        path = csv_path or result_path("shi-xu-knight-table4", where).with_suffix(".csv")
        report = Report(path, provenance(where), COLUMNS)
        embedding, states = draw(vocab, hidden, beam, dtype, where.device, seed)
        head = lsh_head(embedding, states, candidates, k=k, units=units, bands=bands)
        step = Step.of(head, states, embedding, min(beam, vocab))
        problems = step.problems()
        naive = list(step.naive(where, problems))
        shapes = [
            (p, [one for _, other, _, named in naive if other == p for one in named], ()) for p in problems.values()
        ]
        shapes += [(p, (), ()) for p in problems_of(head, beam, step.n) if p not in problems.values()]
        with built(shapes, where) as libraries:
            extra, extra_checks, labels = naive_calls(step, where, libraries, naive)
            found = timed({**step.calls(), **extra}, {**step.checks(), **extra_checks}, where.device)
            kernels = {name: tvm_sparse.explain(problem) for name, problem in problems.items()}
        simple = {
            name: min((found[label] for label in some), key=lambda t: t.seconds or float("inf"))
            for name, some in labels.items()
        }
        own, count = head.settings, len(step.words)
        for name in step.calls():
            other = simple.get(name)
            kernel = kernels.get(name)
            report.add(
                vocab=vocab, hidden=hidden, beam=beam, n=step.n, dtype=dtype, k=k, units=units, bands=bands,
                threshold=own.threshold, frequent=own.frequent, candidates=count, step=name,
                microseconds=micro(found[name]), naive_microseconds=micro(other) if other else "",
                naive_over_ours=over(other, found[name]), timed=found[name].how,
                kernel=f"{kernel.candidate} ({kernel.how})" if kernel else "",
                naive_kernel=", ".join(labels.get(name, ())), note=found[name].note,
            )  # fmt: skip
        print_table(found, simple, count, vocab)
        whole = (LSH, EXACT, CHAIN, TORCH, TORCH_GATHERED)
        rows = [[name, found[name], f"{over(found[name], found[LSH])}x"] for name in whole]
        parts = [[name, found[name], ""] for name in (FUSED_LIST, GATHERED, FUSED_TOP)]
        show(f"What a decoder calls, beam {beam}, {dtype}", ("step", "us", "over LSH"), [*parts, *rows])
        report.close()


if __name__ == "__main__":
    typer.run(main)
