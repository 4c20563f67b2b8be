"""What head and sampler cost of a decoding step, at the sizes of real models: tokens a second with each sampler.

    python examples/decode_models.py --quick                   # a tiny model, in seconds, on a CPU as well
    python examples/decode_models.py --csv FILE.csv            # on a GPU: three models, batches 1, 16 and 64

The models are decoders in plain PyTorch with the sizes of Llama 3.2 1B, Qwen 2.5 0.5B and 7B, and random weights: what
is timed is the step, not what it says. On a GPU the whole step is a CUDA graph. Ways to a token of each row:

    body alone        the layers, no head and no sampler: what every way adds to
    torch             product with the embedding, torch.topk, softmax, cumulative sums, an exponential race
    FlashInfer        product with the embedding, its softmax and its top-k top-p sampler; if `flashinfer` is importable
    softmax_sample    product with the embedding, and one kernel in the place of all that follows
    head_sample       one call from the hidden states to tokens
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

import tvm_sparse

TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.95
COLUMNS = ("model", "batch", "way", "microseconds", "first_quartile", "third_quartile", "tokens_per_second",
           "share_of_head_and_sampler", "context", "dtype")  # fmt: skip
Draw = Callable[[torch.Tensor], torch.Tensor]  # from the hidden state of each row to its token


@dataclasses.dataclass(frozen=True)
class Sizes:
    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    head: int
    inner: int


MODELS = (
    Sizes("Qwen 2.5 0.5B", 151936, 896, 24, 14, 2, 64, 4864),
    Sizes("Llama 3.2 1B", 128256, 2048, 16, 32, 8, 64, 8192),
    Sizes("Qwen 2.5 7B", 152064, 3584, 28, 28, 4, 128, 18944),
)
TINY = (Sizes("tiny", 1000, 64, 2, 4, 2, 16, 128),)


class Decoder:
    """A decoder with rotary attention over a cache of fixed size, for one token of each row at a time."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes, self.device = sizes, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        width = (sizes.heads + 2 * sizes.key_heads) * sizes.head
        self.layers = [
            (
                self._weight(width, sizes.hidden),
                self._weight(sizes.hidden, sizes.heads * sizes.head),
                self._weight(2 * sizes.inner, sizes.hidden),
                self._weight(sizes.hidden, sizes.inner),
            )
            for _ in range(sizes.layers)
        ]
        self.embedding = self._weight(sizes.vocab, sizes.hidden)

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device).normal_(std=columns**-0.5)

    def begin(self, batch: int, context: int) -> None:
        """An empty conversation of `batch` rows, as if after `context` tokens."""
        sizes = self.sizes
        shape = (sizes.layers, 2, batch, sizes.key_heads, context + 1, sizes.head)
        self.cache = torch.zeros(shape, dtype=self.dtype, device=self.device).normal_()
        self.token = torch.zeros(batch, dtype=torch.int64, device=self.device)
        # All steps are at the last position, so that every replay of a graph does the same work.
        angles = context / 10000 ** (torch.arange(0, sizes.head, 2, device=self.device) / sizes.head)
        self.turn = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.turn
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def body(self) -> torch.Tensor:
        """The hidden state of each row, `(batch, hidden)`."""
        sizes, x = self.sizes, self.embedding[self.token]
        for (qkv, o, gate_up, down), cache in zip(self.layers, self.cache, strict=True):
            y = functional.rms_norm(x, (sizes.hidden,))
            heads = functional.linear(y, qkv).view(len(x), -1, sizes.head)
            q, k, v = heads.split([sizes.heads, sizes.key_heads, sizes.key_heads], 1)
            cache[0, :, :, -1], cache[1, :, :, -1] = self._turned(k), v
            y = functional.scaled_dot_product_attention(self._turned(q)[:, :, None], *cache, enable_gqa=True)
            x = x + functional.linear(y.reshape(len(x), -1), o)
            gate, up = functional.linear(functional.rms_norm(x, (sizes.hidden,)), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.rms_norm(x, (sizes.hidden,))


def ways_of(model: Decoder, batch: int) -> dict[str, Draw]:
    embedding = model.embedding
    seeds = torch.stack([torch.arange(batch), torch.zeros(batch, dtype=torch.int64)], 1).to(model.device)

    def in_torch(hidden: torch.Tensor) -> torch.Tensor:
        scores, words = ((hidden @ embedding.T).float() / TEMPERATURE).topk(TOP_K)
        p = scores.softmax(-1)
        left = p.masked_fill(p.cumsum(-1) - p >= TOP_P, 0)
        return words.gather(1, (left / torch.empty_like(left).exponential_()).argmax(1, keepdim=True))[:, 0]

    def sampler(hidden: torch.Tensor) -> torch.Tensor:
        filters = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}
        tokens, _ = tvm_sparse.softmax_sample(hidden @ embedding.T, **filters, seed=seeds)
        seeds[:, 1] += 1
        return tokens

    def head(hidden: torch.Tensor) -> torch.Tensor:
        filters = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}
        tokens, _ = tvm_sparse.head_sample(hidden, embedding, **filters, seed=seeds, constant=True)
        seeds[:, 1] += 1
        return tokens

    found: dict[str, Draw] = {"body alone": lambda hidden: hidden[:, 0].long(), "torch": in_torch}
    try:
        from flashinfer import sampling
    except ImportError:
        print("FlashInfer: absent, not timed")
    else:
        numbers = {"temperature": torch.full((batch,), TEMPERATURE, device=model.device)}
        kept = torch.full((batch,), TOP_K, dtype=torch.int32, device=model.device)
        share = torch.full((batch,), TOP_P, device=model.device)
        found["FlashInfer"] = lambda hidden: sampling.top_k_top_p_sampling_from_probs(
            sampling.softmax((hidden @ embedding.T).float(), **numbers), kept, share
        )
    return {**found, "softmax_sample": sampler, "head_sample": head}


def check(model: Decoder, hidden: torch.Tensor, ways: dict[str, Draw]) -> None:
    """Every token is one of the k best; but for words whose scores rounding makes equal."""
    scores = hidden.float() @ model.embedding.float().T
    kth = scores.topk(TOP_K).values[:, -1]
    slack = 0.05 if model.dtype == torch.bfloat16 else 1e-4
    for name, draw in ways.items():
        if name != "body alone":
            token = draw(hidden).long()
            assert (scores.gather(1, token[:, None])[:, 0] >= kth - slack).all(), f"{name}: a token beyond the top-k"


def step_of(model: Decoder, draw: Draw) -> Callable[[], None]:
    """One token of each row, as a CUDA graph on a GPU."""

    def step() -> None:
        model.token.copy_(draw(model.body()) % model.sizes.vocab)

    if model.device == "cpu":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # loads kernels and libraries
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds_of(step: Callable[[], None], steps: int, device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - begun) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, in seconds")
    parser.add_argument("--batch", type=int, action="append", help="rows; 1, 16 and 64 by default")
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache")
    parser.add_argument("--csv", type=Path, help="write the times")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps, rounds, context = (3, 2, 16) if given.quick else (16, 7, given.context)
    lines = []
    torch.manual_seed(0)
    print(f"{'model':>14} {'batch':>5} {'way':>15} {'us a step':>10} {'tokens/s':>9} {'head and sampler':>17}")
    with torch.no_grad():
        for sizes in TINY if given.quick else MODELS:
            model = Decoder(sizes, device)
            for batch in given.batch or ((3,) if given.quick else (1, 16, 64)):
                model.begin(batch, context)
                ways = ways_of(model, batch)
                check(model, model.body(), ways)
                ready = {name: step_of(model, draw) for name, draw in ways.items()}
                times: dict[str, list[float]] = {name: [] for name in ready}
                for number in range(rounds + 1):
                    for name, step in ready.items():
                        seconds = seconds_of(step, steps, device)
                        if number:  # the first round warms up
                            times[name].append(seconds)
                body = statistics.median(times["body alone"])
                for name, found in times.items():
                    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
                    share = max(0.0, 1 - body / middle)
                    figures = [f"{1e6 * one:.1f}" for one in (middle, low, high)]
                    row = (sizes.name, batch, name, *figures, round(batch / middle), f"{share:.4f}", context)
                    lines.append((*row, str(model.dtype).removeprefix("torch.")))
                    print(
                        f"{sizes.name:>14} {batch:5} {name:>15} {figures[0]:>10} {row[6]:9} {share:17.1%}", flush=True
                    )
                del ready
            del model
    if given.csv:
        with given.csv.open("w", newline="") as file:
            where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
            file.write(f"# device: {where}\n# date: {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")
            file.write(f"# tvm_sparse: {tvm_sparse.__version__}\n# torch: {torch.__version__}\n")
            file.write(f"# timing: {steps} steps a round, median of {rounds} rounds in turn\n")
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(lines)


if __name__ == "__main__":
    main()
