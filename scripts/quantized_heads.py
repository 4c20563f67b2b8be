"""Output layers that read an embedding in eight bits, beside the same in 16 bits.

    python scripts/quantized_heads.py --csv scripts/results/quantized-heads-h200.csv     # two minutes, on a GPU
    python scripts/quantized_heads.py --shape 256000,4608 --rows 1 --rows 48

Timed are `head_topk` with the embedding, and with its roundings to int8 and float8_e4m3fn. For k = 20 also with int8
and scales for groups of 128 columns, and with a bitmap of allowed words. For up to 16 rows also with `shard=`, which
returns scores, and `ScreenedHead`, with and without the normaliser, whose words and scores have to be those with
`shard=`. Embeddings and states are random, in bfloat16, with the promise that embeddings are constant. Calls are in
CUDA graphs.
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
from tvm_sparse.formats.bitmap import pack_bits

# vocab, hidden
SHAPES = ("128256,4096", "151936,4096", "256000,4608", "128256,8192")
ROWS, K = (1, 4, 16, 24, 48), (1, 20)
WHOLE, INT8, FLOAT8, SCORES, SCREENED, NORMALISED = (
    "bfloat16", "int8", "float8_e4m3fn", "with shard", "screened", "screened, normaliser",
)  # fmt: skip
GROUP = 128
GROUPED, ALLOWED = f"int8, groups of {GROUP}", "{}, allowed"
EVERY = (WHOLE, INT8, FLOAT8, GROUPED, *(ALLOWED.format(name) for name in (WHOLE, INT8)), SCORES, SCREENED, NORMALISED)
# The most rows for which a screened head reads its copy; more have k = 20 alone.
FEW = 16
COLUMNS = ("vocab", "hidden", "rows", "k", "contender", "us", "over_bfloat16", "survivors", "timed", "note")


def contenders(
    states: torch.Tensor, embedding: torch.Tensor, small: dict[str, Any], head: Any, k: int
) -> tuple[dict[str, Call], dict[str, Check]]:
    """Calls by name, and checks of their results against the rounded embedding, or against the exact scores."""
    shard, vocab = (0, len(embedding)), len(embedding)
    mask = torch.rand(len(states), vocab, device=states.device) < 0.5
    allowed = torch.from_numpy(pack_bits(mask.cpu().numpy())).to(states.device)

    def best(words: Any, **options: Any) -> Call:
        return lambda: tvm_sparse.head_topk(states, words, k, log=True, constant=True, **options)

    def probable(words: torch.Tensor, masked: bool = False) -> Check:
        scores = states.float() @ words.float().T
        wanted = (scores.masked_fill(~mask, -torch.inf) if masked else scores).log_softmax(1).topk(k).values

        def check(found: Any) -> None:
            if not torch.allclose(found[0], wanted, rtol=0, atol=1e-2):
                raise Mismatch("log-probabilities are not those of the reference")

        return check

    def exact(found: Any) -> None:
        values, indices, _ = tvm_sparse.head_topk(states, embedding, k, shard=shard)
        if not (torch.equal(found.indices, indices) and torch.equal(found.values, values)):
            raise Mismatch("words or scores are not those of the exact head")

    calls: dict[str, Call] = {WHOLE: best(embedding)}
    checks: dict[str, Check] = {WHOLE: probable(embedding)}
    for name, words in small.items():
        if name != GROUPED or k > 1:
            calls[name], checks[name] = best(words), probable(words.dequantized())
    if k > 1:
        for name, words in ((WHOLE, embedding), (INT8, small[INT8])):
            calls[ALLOWED.format(name)] = best(words, allowed=allowed)
            checks[ALLOWED.format(name)] = probable(words if name == WHOLE else words.dequantized(), True)
    if len(states) <= FEW:
        for normaliser in (False, True):  # kernels that a graph captures
            head.topk(states, k, normaliser=normaliser, synchronise=False)
        calls |= {
            SCORES: lambda: tvm_sparse.head_topk(states, embedding, k, shard=shard, constant=True),
            SCREENED: lambda: head.topk(states, k, synchronise=False),
            NORMALISED: lambda: head.topk(states, k, normaliser=True, synchronise=False),
        }
        checks |= {SCREENED: exact, NORMALISED: exact}
    return calls, checks


def main(
    target: Target = "auto",
    shape: Annotated[list[str] | None, typer.Option(help="Only these vocab,hidden.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Only these rows.")] = None,
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
            small[GROUPED] = tvm_sparse.quantize_embedding(embedding, INT8, GROUP)
            head = tvm_sparse.ScreenedHead(embedding)
            for count, k in ((n, k) for n in rows or ROWS for k in (K if n <= FEW else K[1:])):
                calls, checks = contenders(many[:count], embedding, small, head, k)
                screened = count <= FEW and head.survivors is not None
                survivors = f"{head.survivors.float().mean().item():.0f}" if screened else ""
                found = timed(calls, checks, where.device, rounds)
                for name, result in found.items():
                    report.add(
                        vocab=vocab, hidden=hidden, rows=count, k=k, contender=name, us=micro(result),
                        over_bfloat16=over(result, found[WHOLE]), timed=result.how, note=result.note,
                        survivors=survivors if name == SCREENED else "",
                    )  # fmt: skip
                ratios = [over(found.get(name), found[WHOLE]) for name in EVERY if name != WHOLE]
                lines.append([f"{text}: {count}, {k}", found[WHOLE], *ratios, survivors])
            del embedding, many, small, head
        show("microseconds a call, and times as long", ["shape: rows, k", *EVERY, "survivors"], lines)
        report.close()


if __name__ == "__main__":
    typer.run(main)
