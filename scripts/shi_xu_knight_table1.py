"""Table 1 of Shi, Xu & Knight 2018 on this machine: the parts of the time of a beam-search step.

    python scripts/shi_xu_knight_table1.py                    # the paper's model, under a minute on a GPU

A decoder of two LSTM layers of 1,000 units with 40,000 words, random weights, and a beam of 12. The output layer is
torch's product, softmax and topk, our exact head, or the LSH head with about as many candidates as the paper has. Every
part is a separate CUDA graph; `step` is one graph of all of them. Nothing returns to the host: a topk over the beam's
best words replaces the paper's transfer and heap. The source side and quality are not included (see
`shi_xu_knight_figure6.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from heads import (
    EXACT,
    LSH,
    OURS,
    TORCH,
    Call,
    Check,
    Report,
    Timed,
    bounds,
    candidates_of,
    draw,
    lsh_head,
    micro,
    over,
    problems_of,
    ready,
    show,
    timed,
    top_check,
)
from reproduction import provenance, result_path

import tvm_sparse
from tvm_sparse.cli.common import Target, errors, machine_here

EMBED, FIRST, SECOND, SOFTMAX, EXPANSION, REORDER, STEP = (
    "embedding", "1st layer", "2nd layer", "softmax and top-n", "beam expansion", "hidden states reorder", "step"
)  # fmt: skip
PARTS = (EMBED, FIRST, SECOND, SOFTMAX, EXPANSION, REORDER, STEP)
# Table 1's speed-ups by LSH (Tesla K20). A step consists of its target side and its beam expansion.
PAPER = {FIRST: 1.0, SECOND: 1.0, SOFTMAX: 505.3 / 157, EXPANSION: (352.4 - 38.3) / (96.4 - 38.7), REORDER: 0.99,
         STEP: (735.5 + 352.4) / (387.2 + 96.4)}  # fmt: skip
COLUMNS = ("vocab", "hidden", "beam", "dtype", "k", "units", "bands", "threshold", "frequent", "candidates", "output",
           "part", "microseconds", "torch_over_this", "timed", "note")  # fmt: skip

Layers = tuple[torch.nn.LSTM, torch.nn.LSTM]


@torch.no_grad()
def parts(
    head: Callable[[torch.Tensor], Any], embedding: torch.Tensor, layers: Layers, states: torch.Tensor, beam: int
) -> dict[str, Call]:
    """The parts of a step as calls, each on the results of the previous one. `head(states)` returns log-probabilities
    and words; `states` are drawn, since states computed with random weights are not near any word.
    """
    device, width = states.device, states.shape[1]
    words = torch.arange(beam, device=device)
    scores = torch.zeros((beam, 1), device=device)
    zeros = torch.zeros((1, beam, width), dtype=states.dtype, device=device)
    memory = [(zeros, zeros), (zeros, zeros)]

    def embed() -> torch.Tensor:
        return embedding[words][:, None]

    def layer(number: int, x: torch.Tensor) -> Any:
        return layers[number](x, memory[number])

    def expand(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total, place = torch.topk((scores + values).view(-1), beam)
        return total, place // values.shape[1], ids.view(-1)[place]

    def reorder(parents: torch.Tensor, kept: Any) -> list[torch.Tensor]:
        return [part[:, parents] for pair in kept for part in pair]

    def step() -> Any:
        first, kept_first = layer(0, embed())
        _, kept_second = layer(1, first)
        total, parents, chosen = expand(*head(states))
        return total, chosen, reorder(parents, (kept_first, kept_second))

    x = embed()
    first, kept_first = layer(0, x)
    _, kept_second = layer(1, first)
    values, ids = head(states)
    _, parents, _ = expand(values, ids)
    return {
        EMBED: embed,
        FIRST: lambda: layer(0, x),
        SECOND: lambda: layer(1, first),
        SOFTMAX: lambda: head(states),
        EXPANSION: lambda: expand(values, ids),
        REORDER: lambda: reorder(parents, (kept_first, kept_second)),
        STEP: step,
    }


def of_logarithms(check: Check) -> Check:
    """The same check for log-probabilities."""
    return lambda outputs: check((outputs[0].exp(), outputs[1]))


def main(
    target: Target = "auto",
    vocab: Annotated[int, typer.Option(min=1, help="Words.")] = 40000,
    hidden: Annotated[int, typer.Option(min=1, help="Columns of states, and of both layers.")] = 1000,
    beam: Annotated[int, typer.Option(min=1, help="Hypotheses, and best words of each.")] = 12,
    candidates: Annotated[int, typer.Option(min=1, help="About so many in the list.")] = 6000,
    k: Annotated[int, typer.Option(min=2)] = 16,
    units: Annotated[int, typer.Option(min=1)] = 3,
    bands: Annotated[int, typer.Option(min=1)] = 500,
    dtype: Annotated[str, typer.Option(help="Of all weights.")] = "float16",
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write; default: in scripts/results/.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Time the parts of a beam-search step."""
    with errors(), torch.no_grad():
        where = machine_here(target, "comparing")
        path = csv_path or result_path("shi-xu-knight-table1", where).with_suffix(".csv")
        report = Report(path, provenance(where), COLUMNS)
        torch.manual_seed(seed)
        embedding, states = draw(vocab, hidden, beam, dtype, where.device, seed)
        kind = {"device": where.device, "dtype": embedding.dtype}
        layers = tuple(torch.nn.LSTM(hidden, hidden, batch_first=True, **kind).eval() for _ in range(2))
        lsh = lsh_head(embedding, states, candidates, k=k, units=units, bands=bands)

        def by_torch(h: torch.Tensor) -> Any:
            logits = torch.nn.functional.linear(h, embedding)
            return torch.topk(torch.log_softmax(logits, -1, dtype=torch.float32), beam)

        outputs = {
            TORCH: by_torch,
            EXACT: lambda h: tvm_sparse.head_topk(h, embedding, beam, log=True, constant=True),
            LSH: lambda h: lsh.topk(h, beam, log=True)[:2],
        }
        found: dict[str, dict[str, Timed]] = {}
        with ready(problems_of(lsh, beam, beam), where):
            calls = {
                f"{name}: {part}": call
                for name, head in outputs.items()
                for part, call in parts(head, embedding, layers, states, beam).items()
            }
            check = top_check(states, embedding, beam)
            words = torch.from_numpy(candidates_of(lsh, states)).to(where.device)
            counts = len(words)
            exact, peers = bounds(states, embedding, beam)
            ours = {EXACT: check(exact), LSH: top_check(states, embedding, beam, words)(OURS)}
            rounded = check(peers)
            checks = {f"{name}: {SOFTMAX}": of_logarithms(ours.get(name, rounded)) for name in outputs}
            results = timed(calls, checks, where.device)
        for name in outputs:
            found[name] = {part: results[f"{name}: {part}"] for part in PARTS}
        own = lsh.settings
        for name, times in found.items():
            for part, result in times.items():
                report.add(
                    vocab=vocab, hidden=hidden, beam=beam, dtype=dtype, k=k, units=units, bands=bands,
                    threshold=own.threshold, frequent=own.frequent, candidates=counts if name == LSH else vocab,
                    output=name, part=part, microseconds=micro(result),
                    torch_over_this=over(found[TORCH][part], result), timed=result.how, note=result.note,
                )  # fmt: skip
        rows = []
        for part in PARTS:
            gains = [over(found[TORCH][part], found[LSH][part]), f"{PAPER[part]:.2f}" if part in PAPER else "-"]
            rows.append([part, *(found[name][part] for name in outputs), *gains])
        show(
            f"microseconds, {vocab} words of {hidden}, {counts} candidates, beam {beam}, {dtype}",
            ("part", *outputs, "torch / LSH", "paper's"),
            rows,
        )
        report.close()


if __name__ == "__main__":
    typer.run(main)
