"""Output layers that read an embedding in eight bits, beside the same in 16 bits.

    python scripts/quantized_heads.py --csv scripts/results/quantized-heads-h200.csv     # two minutes, on a GPU
    python scripts/quantized_heads.py --shape 256000,4608

Timed are `head_topk` with the embedding, with its roundings to int8 and float8_e4m3fn, and with `shard=`, which returns
scores; and `ScreenedHead`, with and without the normaliser, whose words and scores have to be those with `shard=`.
Embeddings and states are random, in bfloat16, with the promise that embeddings are constant. Calls are in CUDA graphs.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from heads import Call, Check, CsvFile, Report, Rounds, Seed, gpu_here, micro, over, show, timed
from reproduction import provenance

import tvm_sparse
from tvm_sparse.cli.common import Target, errors
from tvm_sparse.core.problem import Mismatch

# vocab, hidden
SHAPES = ("128256,4096", "151936,4096", "256000,4608")
ROWS, K = (1, 4, 16), (1, 20)
WHOLE, INT8, FLOAT8, SCORES, SCREENED, NORMALISED = (
    "bfloat16", "int8", "float8_e4m3fn", "with shard", "screened", "screened, normaliser",
)  # fmt: skip
COLUMNS = ("vocab", "hidden", "rows", "k", "contender", "us", "over_bfloat16", "survivors", "timed", "note")


def contenders(
    states: torch.Tensor, embedding: torch.Tensor, small: dict[str, Any], head: Any, k: int
) -> tuple[dict[str, Call], dict[str, Check]]:
    """Calls by name, and checks of their results against the rounded embedding, or against the exact scores."""
    shard = (0, len(embedding))

    def best(words: Any) -> Call:
        return lambda: tvm_sparse.head_topk(states, words, k, log=True, constant=True)

    def probable(words: torch.Tensor) -> Check:
        wanted = (states.float() @ words.float().T).log_softmax(1).topk(k).values

        def check(found: Any) -> None:
            if not torch.allclose(found[0], wanted, rtol=0, atol=1e-2):
                raise Mismatch("log-probabilities are not those of the reference")

        return check

    def exact(found: Any) -> None:
        values, indices, _ = tvm_sparse.head_topk(states, embedding, k, shard=shard)
        if not (torch.equal(found.indices, indices) and torch.equal(found.values, values)):
            raise Mismatch("words or scores are not those of the exact head")

    for normaliser in (False, True):  # kernels that a graph captures
        head.topk(states, k, normaliser=normaliser, synchronise=False)
    calls: dict[str, Call] = {
        WHOLE: best(embedding),
        **{name: best(words) for name, words in small.items()},
        SCORES: lambda: tvm_sparse.head_topk(states, embedding, k, shard=shard, constant=True),
        SCREENED: lambda: head.topk(states, k, synchronise=False),
        NORMALISED: lambda: head.topk(states, k, normaliser=True, synchronise=False),
    }
    checks: dict[str, Check] = {name: probable(words.dequantized()) for name, words in small.items()}
    return calls, {WHOLE: probable(embedding), **checks, SCREENED: exact, NORMALISED: exact}


def main(
    target: Target = "auto",
    shape: Annotated[list[str] | None, typer.Option(help="Only these vocab,hidden.")] = None,
    csv_path: CsvFile = None,
    rounds: Rounds = 9,
    seed: Seed = 0,
) -> None:
    """Time heads in eight bits."""
    with errors():
        where = gpu_here(target)
        report, lines = Report(csv_path, provenance(where, rounds=rounds), COLUMNS), []
        generator = torch.Generator(where.device).manual_seed(seed)
        for text in shape or SHAPES:
            vocab, hidden = map(int, text.split(","))
            drawn = [torch.randn(n, hidden, device=where.device, generator=generator) for n in (vocab, max(ROWS))]
            embedding, many = (one.bfloat16() for one in drawn)
            del drawn
            small = {name: tvm_sparse.quantize_embedding(embedding, name) for name in (INT8, FLOAT8)}
            head = tvm_sparse.ScreenedHead(embedding)
            for rows, k in ((rows, k) for rows in ROWS for k in K):
                calls, checks = contenders(many[:rows], embedding, small, head, k)
                survivors = head.survivors.float().mean().item()
                found = timed(calls, checks, where.device, rounds)
                for name, result in found.items():
                    report.add(
                        vocab=vocab, hidden=hidden, rows=rows, k=k, contender=name, us=micro(result),
                        over_bfloat16=over(result, found[WHOLE]), timed=result.how, note=result.note,
                        survivors=f"{survivors:.0f}" if name == SCREENED else "",
                    )  # fmt: skip
                ratios = [over(one, found[WHOLE]) for name, one in found.items() if name != WHOLE]
                lines.append([f"{text}: {rows}, {k}", found[WHOLE], *ratios, f"{survivors:.0f}"])
            del embedding, many, small, head
        show("microseconds a call, and times as long", ["shape: rows, k", *found, "survivors"], lines)
        report.close()


if __name__ == "__main__":
    typer.run(main)
