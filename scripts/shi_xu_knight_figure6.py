"""Figure 6 of Shi, Xu & Knight 2018 on this machine: speed against quality, for LSH and for the most frequent words
only.

    python examples/lsh_decoding.py --save states.npz         # a language model's output layer and hidden states
    python scripts/shi_xu_knight_figure6.py states.npz        # or, without a file, the MiniLM of lsh_recall.py

Quality is recall: the share of a state's 12 best words among the candidates (the paper has BLEU, which needs a
translation model). TOP are lists of the T words that are most often among the best of other states, the same for every
step; LSH adds the words found by hashing. Neighbouring states share a list, like those of a beam. For each hash and
each T, the thresholds are those that just reach recalls from 0.8 to 0.999. Times are of a step with the lists of the
first beam; `speedup` is over the exact head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from heads import (
    EXACT,
    OURS,
    TORCH,
    Report,
    Timed,
    candidates_of,
    changed,
    micro,
    over,
    problems_of,
    ready,
    show,
    timed,
    top_check,
    torch_full,
)
from lsh_recall import Data, Line, N, make_data, parsed, reached, top_only
from real_vocabulary import installed
from reproduction import has_plot, provenance, result_path, write_plot

import tvm_sparse
from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core.registry import make

SETTINGS = ("8,3,500", "16,3,500", "3,3,1000")  # the paper's two, and one for weak correlations
FREQUENT = (0.0, 0.02, 0.08)  # T, as shares of the vocabulary
GOALS = (0.8, 0.9, 0.95, 0.99, 0.999)
TOP = "TOP"
COLUMNS = ("implementation", "k", "units", "bands", "threshold", "frequent", "share", "recall_1", "recall_12",
           "microseconds", "exact_over_this", "torch_over_this", "timed", "note")  # fmt: skip


class Point(NamedTuple):
    """A setting that is timed."""

    series: str
    numbers: tuple[int, ...]  # k, units, bands; empty for TOP
    line: Line
    head: Any  # None for TOP
    words: np.ndarray | None  # the candidates of the timed step; None for TOP


def points_of(
    data: Data, embedding: torch.Tensor, settings: list[tuple[int, int, int]], step: torch.Tensor, seed: int
) -> list[Point]:
    """All settings, and their heads, with room for the candidates of the timed step."""
    vocab, order, beam = len(data.rank), np.argsort(data.rank), len(step)
    found = [Point(TOP, (), line, None, None) for line in top_only(data, GOALS)]
    for k, units, bands in settings:
        series = f"LSH {k}, {units}, {bands}"
        head = tvm_sparse.LshHead(embedding, k=k, units=units, bands=bands, threshold=1, frequent=0, seed=seed)
        frequent = [round(share * vocab) for share in FREQUENT]
        for line in reached(data, k, units, bands, frequent, beam, seed, GOALS)[0]:
            # If the T words alone suffice, the hash adds nothing at any threshold.
            if 0 < line.threshold < bands:
                own = changed(head, order[: line.frequent], threshold=line.threshold, capacity=vocab)
                words = candidates_of(own, step)
                # Rounded to a few sizes, since each needs its own kernel.
                most = max(int(line.share * vocab * 1.25), len(words))
                own = changed(own, own.frequent, capacity=min(vocab, 1 << (most | 255).bit_length()))
                found.append(Point(series, (k, units, bands), line, own, words))
    return found


def main(
    states: Annotated[
        Path | None, typer.Argument(help="Folder of a MiniLM, or .npz with embedding and hidden.")
    ] = None,
    target: Target = "auto",
    setting: Annotated[list[str] | None, typer.Option(help="Only these k,units,bands.")] = None,
    beam: Annotated[int, typer.Option(min=1, help="Rows of a step, which share a list.")] = N,
    rows: Annotated[int, typer.Option(min=1, help="States that recall is measured on.")] = 300,
    samples: Annotated[int, typer.Option(min=1, help="States that choose the T words.")] = 800,
    dtype: Annotated[str, typer.Option(help="Of states and embeddings.")] = "float16",
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write; default: in scripts/results/.")] = None,
    seed: Annotated[int, typer.Option(help="Of passages and permutations.")] = 0,
) -> None:
    """Recall and time of LSH and of the most frequent words."""
    with errors():
        where = machine_here(target, "comparing")
        model = states or installed()
        data = make_data(model, rows, samples, beam, seed)
        kind = getattr(torch, dtype)
        embedding, hidden = (torch.from_numpy(a).to(where.device, kind) for a in (data.embedding, data.hidden))
        # Hashes of the rounded numbers, which the device sees.
        data = data._replace(embedding=embedding.float().cpu().numpy(), hidden=hidden.float().cpu().numpy())
        vocab, width = data.embedding.shape
        path = (csv_path or result_path(f"shi-xu-knight-figure6-{model.stem}", where)).with_suffix(".csv")
        facts = provenance(where) | {
            "states": f"{model.name}: {vocab} words of {width}; {len(hidden)} states, beam {beam}"
        }
        report = Report(path, facts, COLUMNS)
        step = hidden[:beam].contiguous()
        points = points_of(data, embedding, [parsed(text) for text in setting or SETTINGS], step, seed)
        order = torch.from_numpy(np.argsort(data.rank).astype(np.int32)).to(where.device)
        axes = {"vocab": vocab, "hidden": width, "k": N, "dtype": dtype}
        problems = [make("head_topk", {"batch": beam, **axes})]
        calls: dict[str, Any] = {
            EXACT: lambda: tvm_sparse.head_topk(step, embedding, N, constant=True),
            TORCH: torch_full(step, embedding, N),
        }
        checks = {EXACT: top_check(step, embedding, N)(OURS)}
        for number, point in enumerate(points):
            if point.head is None:
                words = order[: max(N, point.line.frequent)].sort().values.contiguous()
                problems.append(make("candidate_topk", {"lists": 1, "beam": beam, "m": len(words), **axes}))
                calls[str(number)] = _of_list(step, embedding, words)
            else:
                words = torch.from_numpy(point.words).to(where.device)
                problems += problems_of(point.head, beam, N)
                calls[str(number)] = _of_head(step, point.head)
            checks[str(number)] = top_check(step, embedding, N, words)(OURS)
        with ready(problems, where):
            found = timed(calls, checks, where.device)

        lines = []
        for name in (EXACT, TORCH):
            report.add(implementation=name, share=1.0, recall_1=1.0, recall_12=1.0, microseconds=micro(found[name]),
                       exact_over_this=over(found[EXACT], found[name]), torch_over_this=over(found[TORCH], found[name]),
                       timed=found[name].how, note=found[name].note)  # fmt: skip
            lines.append([name, "", "", "100.0%", "1.0000", "1.0000", found[name], over(found[EXACT], found[name]),
                          over(found[TORCH], found[name])])  # fmt: skip
        series: dict[str, list[tuple[float, float]]] = {}
        for number, (name, numbers, line, *_) in enumerate(points):
            result: Timed = found[str(number)]
            gains = over(found[EXACT], result), over(found[TORCH], result)
            named = dict(zip(("k", "units", "bands"), numbers, strict=False))
            report.add(
                implementation=name, **named, threshold=line.threshold, frequent=line.frequent, share=line.share,
                recall_1=float(line.recall[0]), recall_12=float(line.recall[1]), microseconds=micro(result),
                exact_over_this=gains[0], torch_over_this=gains[1], timed=result.how, note=result.note,
            )  # fmt: skip
            recalls = (f"{recall:.4f}" for recall in line.recall)
            lines.append([name, line.frequent, line.threshold, f"{line.share:.1%}", *recalls, result, *gains])
            if result.seconds and line.recall[1] < 1:
                series.setdefault(name, []).append((result.seconds * 1e6, 1 - float(line.recall[1])))
        names = ("candidates", "T", "t", "share", "recall@1", f"recall@{N}", "us", "exact / this", "torch / this")
        show(f"{vocab} words of {width}, a step of {beam} rows, {dtype}", names, lines)
        if has_plot() and series:
            title, plot = f"Recall against time, {vocab} words of {width}", path.with_suffix(".png")
            ordered = {name: sorted(some) for name, some in series.items()}
            missed = f"share of the {N} best words that is missed"
            write_plot(plot, facts, ordered, title=title, x="microseconds a step", y=missed)
        report.close()


def _of_list(step: torch.Tensor, embedding: torch.Tensor, words: torch.Tensor) -> Any:
    return lambda: tvm_sparse.candidate_topk(step, embedding, words, N)


def _of_head(step: torch.Tensor, head: Any) -> Any:
    return lambda: head.topk(step, N, path="lsh")


if __name__ == "__main__":
    typer.run(main)
