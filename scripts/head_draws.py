"""A draw from an output layer beside its best words, and beside PyTorch's product followed by a sampler.

    python scripts/head_draws.py --csv scripts/results/head-draws-h200.csv     # a minute or two, on a GPU
    python scripts/head_draws.py --shape 16,151936,3584,bfloat16

`head_sample` draws without filters, with uniform numbers and with a seed, and with a top_k and top_p. The product's
scores are float32. FlashInfer's sampler takes them divided by the temperature, and gives no log-probabilities; it is
timed where `flashinfer` can be imported. The embedding is promised to be constant. Calls are in CUDA graphs.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from heads import Call, Check, CsvFile, Report, Rounds, Seed, gpu_here, micro, over, show, timed
from heads import draw as drawn
from reproduction import provenance

import tvm_sparse
from tvm_sparse.cli.common import Target, errors
from tvm_sparse.core.problem import Mismatch

# rows, vocab, hidden, dtype
SHAPES = (
    *(f"{rows},{vocab},4096,bfloat16" for vocab in (128256, 151936) for rows in (1, 2, 4, 8, 16, 32, 64, 128)),
    *(f"{rows},{sizes},bfloat16" for sizes in ("151936,896", "128256,2048", "152064,3584") for rows in (1, 16, 64)),
)
TEMPERATURE, TOP_P = 0.8, 0.9
# Numbers of best words, by which draws with a top_k are judged.
BEST = (20, 50)
HEAD, DRAW, SEED, SAMPLE, FLASHINFER = (
    "head_topk k={}", "head_sample", "head_sample, seed", "product + softmax_sample", "product + FlashInfer",
)  # fmt: skip
TOP_K = "head_sample, top_k={}"
COLUMNS = ("rows", "vocab", "hidden", "dtype", "implementation", "microseconds", "over_head_topk", "timed", "note")


def contenders(states: torch.Tensor, embedding: torch.Tensor) -> tuple[dict[str, Call], dict[str, Check]]:
    """Calls by name, and checks that each token is one of its row, with a probability above 0; of draws with a top_k,
    that it is one of the best words.
    """
    rows = len(states)
    uniforms = torch.rand(rows, device=states.device)
    exact = states.float() @ embedding.float().T
    slack = 0.02 * exact.std()

    def sampled(**options: Any) -> Call:
        return lambda: tvm_sparse.head_sample(states, embedding, temperature=TEMPERATURE, constant=True, **options)

    def best(k: int) -> Call:
        return lambda: tvm_sparse.head_topk(states, embedding, k, constant=True)

    def scores() -> torch.Tensor:
        return torch.mm(states, embedding.T, out_dtype=torch.float32)

    def within(k: int) -> Check:
        least = exact.topk(k).values[:, -1] - slack

        def check(found: Any) -> None:
            tokens = (found if isinstance(found, torch.Tensor) else found[0]).long()
            inside = bool(((tokens >= 0) & (tokens < exact.shape[1])).all())
            if not inside or not bool((exact.gather(1, tokens[:, None])[:, 0] >= least).all()):
                raise Mismatch("a token that is not left")

        return check

    calls: dict[str, Call] = {HEAD.format(k): best(k) for k in BEST}
    calls |= {DRAW: sampled(uniforms=uniforms), SEED: sampled(seed=7)}
    calls |= {TOP_K.format(k): sampled(top_k=k, top_p=TOP_P, uniforms=uniforms) for k in BEST}
    calls[SAMPLE] = lambda: tvm_sparse.softmax_sample(scores(), temperature=TEMPERATURE, uniforms=uniforms)
    try:
        from flashinfer import sampling
    except ImportError:
        typer.echo("FlashInfer: absent, not timed")
    else:
        calls[FLASHINFER] = lambda: sampling.sampling_from_logits(scores() / TEMPERATURE)
    checks = {name: within(exact.shape[1]) for name in (DRAW, SEED, SAMPLE, FLASHINFER)}
    return calls, checks | {TOP_K.format(k): within(k) for k in BEST}


def main(
    target: Target = "auto",
    shape: Annotated[list[str] | None, typer.Option(help="Only these rows,vocab,hidden,dtype.")] = None,
    csv_path: CsvFile = None,
    rounds: Rounds = 9,
    seed: Seed = 0,
) -> None:
    """Time draws from a head and their peers."""
    with errors():
        where = gpu_here(target)
        report, lines = Report(csv_path, provenance(where, rounds=rounds), COLUMNS), []
        for text in shape or SHAPES:
            rows, vocab, hidden = map(int, text.split(",")[:3])
            dtype = text.split(",")[3]
            embedding, states = drawn(vocab, hidden, rows, dtype, where.device, seed)
            found = timed(*contenders(states, embedding), where.device, rounds)
            first = found[HEAD.format(BEST[0])]
            for name, result in found.items():
                report.add(
                    rows=rows, vocab=vocab, hidden=hidden, dtype=dtype, implementation=name, microseconds=micro(result),
                    over_head_topk=over(result, first), timed=result.how, note=result.note,
                )  # fmt: skip
            lines.append([text, first, *(over(one, first) for name, one in found.items() if one is not first)])
            del embedding, states
        show("microseconds a call, and times as long", ["rows, vocab, hidden, dtype", *found], lines)
        report.close()


if __name__ == "__main__":
    typer.run(main)
