"""A generate loop of transformers whose sampler, and then whose head, is replaced; each way timed.

    python examples/replace_sampler.py --quick                 # a tiny model, in seconds, on a CPU as well
    python examples/replace_sampler.py --csv FILE.csv          # on a GPU: eager, and the whole step in a CUDA graph

The model is a Llama with random weights: what is timed is the step, not what it says. Ways to a token of each row:

    body alone        the layers, no head and no sampler: what every way adds to
    transformers      lm_head, the warpers of temperature, top-k and top-p, softmax, torch.multinomial
    softmax_sample    lm_head, and one kernel in the place of all that follows
    head_sample       one call from the hidden states to tokens, which writes no logits

Needs transformers (tried with 5.24).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import inspect
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import tvm_sparse

TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.95
COLUMNS = ("way", "timed", "microseconds", "first_quartile", "third_quartile", "batch", "vocab", "hidden", "layers",
           "dtype")  # fmt: skip
# From the hidden state of each row to its token and the token's log-probability.
Draw = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int
    vocab: int
    hidden: int
    layers: int
    prompt: int
    steps: int  # timed as one
    rounds: int


QUICK = Sizes(batch=3, vocab=1000, hidden=64, layers=2, prompt=5, steps=4, rounds=3)
FULL = Sizes(batch=8, vocab=128256, hidden=2048, layers=4, prompt=128, steps=32, rounds=15)


def make_model(sizes: Sizes, device: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=max(4, sizes.hidden // 64),
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return transformers.LlamaForCausalLM(config).to(device=device, dtype=dtype).eval()


# ------------------------------------------------------------------------------------------------------------ the ways


def ways_of(model: Any, batch: int) -> dict[str, Draw]:
    device = model.lm_head.weight.device
    warpers = [
        transformers.TemperatureLogitsWarper(TEMPERATURE),
        transformers.TopKLogitsWarper(TOP_K),
        transformers.TopPLogitsWarper(TOP_P),
    ]
    # A seed and an offset for each request: its tokens do not depend on the rows beside it.
    seeds = torch.stack([torch.arange(batch), torch.zeros(batch, dtype=torch.int64)], 1).to(device)

    def theirs(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = model.lm_head(hidden).float()
        for warper in warpers:
            scores = warper(None, scores)
        logprobs = scores.log_softmax(-1)
        token = torch.multinomial(logprobs.exp(), 1)
        return token[:, 0], logprobs.gather(1, token)[:, 0]

    def sampler(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        filters = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}
        token, logprob = tvm_sparse.softmax_sample(model.lm_head(hidden), **filters, seed=seeds)
        seeds[:, 1] += 1  # the next token; in a CUDA graph this is replayed, too
        return token.long(), logprob

    def head(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # No logits are written: the k most probable words and their log-probabilities come from one kernel.
        filters = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}
        token, logprob = tvm_sparse.head_sample(hidden, model.lm_head.weight, **filters, seed=seeds, constant=True)
        seeds[:, 1] += 1
        return token.long(), logprob

    def nothing(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(batch, dtype=torch.int64, device=device), hidden[:, 0]

    return {"body alone": nothing, "transformers": theirs, "softmax_sample": sampler, "head_sample": head}


def check(model: Any, hidden: torch.Tensor, ways: Mapping[str, Draw]) -> None:
    """Every token is one that the warpers of transformers leave; but for words whose scores rounding makes equal."""
    scores = model.lm_head(hidden).float() / TEMPERATURE
    kth = scores.topk(TOP_K).values[:, -1]
    slack = 0.05 if hidden.dtype == torch.bfloat16 else 1e-4
    for name in ("transformers", "softmax_sample", "head_sample"):
        token, _ = ways[name](hidden)
        assert (scores.gather(1, token[:, None])[:, 0] >= kth - slack).all(), f"{name}: a token beyond the top-k"


# ------------------------------------------------------------------------------------------------------------ the loop


class Decoder:
    """A model with its cache, the tokens of the last step, and their position: what a step reads and writes."""

    def __init__(self, model: Any, sizes: Sizes) -> None:
        device = model.lm_head.weight.device
        # A graph is captured a few steps after the prompt, and replayed from there.
        length = sizes.prompt + (sizes.rounds + 2) * sizes.steps + 8
        self.model = model
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        names = inspect.signature(model.model.forward).parameters
        self.name = "cache" if "cache" in names else "past_key_values"  # as releases call it
        self.token = torch.zeros(sizes.batch, dtype=torch.int64, device=device)
        self.logprob = torch.zeros(sizes.batch, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)

    def body(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        given = {self.name: self.cache, "cache_position": positions, "position_ids": positions[None]}
        return self.model.model(tokens, **given, use_cache=True).last_hidden_state[:, -1]

    def start(self, prompt: torch.Tensor, draw: Draw) -> None:
        self.cache.reset()
        self.position.fill_(prompt.shape[1])
        self._take(draw(self.body(prompt, torch.arange(prompt.shape[1], device=prompt.device))))

    def step(self, draw: Draw) -> None:
        """One token of each row; everything in place, so that a CUDA graph of it can be replayed."""
        self._take(draw(self.body(self.token[:, None], self.position)))
        self.position += 1

    def capture(self, draw: Draw) -> None:
        """Record a step as a CUDA graph, which `replay` replays."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # loads kernels and libraries: nothing may be loaded while a graph is captured
                self.step(draw)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step(draw)

    def replay(self) -> None:
        """A step, of the graph: it reads and writes this decoder's tensors, which have to live as long."""
        self.graph.replay()

    def _take(self, drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.token.copy_(drawn[0])
        self.logprob.copy_(drawn[1])


def seconds_of(step: Callable[[], None], steps: int, device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - begun) / steps


def timed(model: Any, sizes: Sizes, ways: Mapping[str, Draw], device: str, graphs: bool) -> dict[str, list[float]]:
    """Seconds a step of each way, a figure a round; the ways take turns, each with a cache of its own."""
    draw_prompt = torch.Generator().manual_seed(1)
    prompt = torch.randint(sizes.vocab, (sizes.batch, sizes.prompt), generator=draw_prompt).to(device)
    steps: dict[str, Callable[[], None]] = {}
    for name, draw in ways.items():
        decoder = Decoder(model, sizes)
        decoder.start(prompt, draw)
        if not graphs:
            steps[name] = functools.partial(decoder.step, draw)
            continue
        try:
            decoder.capture(draw)
            steps[name] = decoder.replay
        except RuntimeError as error:  # something waits for the GPU
            print(f"{name}: no CUDA graph: {str(error).partition(chr(10))[0]}")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        seconds_of(step, sizes.steps, device)  # warms up
    for _ in range(sizes.rounds):
        for name, step in steps.items():
            times[name].append(seconds_of(step, sizes.steps, device))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, in seconds")
    parser.add_argument("--batch", type=int, help="rows")
    parser.add_argument("--csv", type=Path, help="write the times")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = QUICK if given.quick else FULL
    if given.batch:
        sizes = dataclasses.replace(sizes, batch=given.batch)
    lines = []
    with torch.no_grad():
        model = make_model(sizes, device)
        dtype = str(model.dtype).removeprefix("torch.")
        ways = ways_of(model, sizes.batch)
        torch.manual_seed(2)
        check(model, torch.randn(sizes.batch, sizes.hidden, device=device, dtype=model.dtype), ways)
        print(
            f"{sizes.batch} rows, {sizes.vocab} words, hidden {sizes.hidden}, {sizes.layers} layers, {dtype}, {device}"
        )
        print(f"{'way':>15} {'timed':>6} {'us a step':>10} {'quartiles':>19}")
        for graphs in [False, True] if device == "cuda" else [False]:
            for name, seconds in timed(model, sizes, ways, device, graphs).items():
                low, middle, high = (x * 1e6 for x in statistics.quantiles(seconds, n=4, method="inclusive"))
                how = "graph" if graphs else "eager"
                print(f"{name:>15} {how:>6} {middle:10.1f} {low:9.1f} {high:9.1f}")
                figures = [f"{x:.2f}" for x in (middle, low, high)]
                lines.append((name, how, *figures, sizes.batch, sizes.vocab, sizes.hidden, sizes.layers, dtype))
    if given.csv:
        with given.csv.open("w", newline="") as file:
            where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
            file.write(f"# device: {where}\n# date: {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")
            file.write(f"# tvm_sparse: {tvm_sparse.__version__}\n# torch: {torch.__version__}\n")
            file.write(f"# transformers: {transformers.__version__}\n")
            file.write(f"# timing: {sizes.steps} steps a round, median of {sizes.rounds} rounds in turn\n")
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(lines)


if __name__ == "__main__":
    main()
