"""A language model's LSTM, pruned while it is trained, and run by kernels for sparse recurrent weights.

    python examples/pruned_lstm.py                   # on a GPU: a minute; prunes to 10 %
    python examples/pruned_lstm.py --quick           # a small model, in seconds, also on a CPU
    python examples/pruned_lstm.py --csv FILE.csv    # and write the losses

A word-level LSTM learns the documentation strings of the installed Python packages. Its recurrent weights are pruned
step by step (Zhu & Gupta 2017, or with a master copy as in Zhu, Pool et al. 2018) while training continues. Once the
pattern stands, the sparse layer itself is trained further. The example prints losses on held-out text - dense, pruned
at once, pruned gradually, computed by the sparse kernels, and trained by them - and tokens per second compared with
torch's LSTM, which on a GPU is cuDNN's.
"""

from __future__ import annotations

import argparse
import copy
import csv
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lsh_decoding import read_text

import tvm_sparse

SPAN = 64  # words that gradients go through
BATCHES = (1, 4, 16)  # of what is timed
METHODS = ("magnitude", "row_balanced", "block")


@dataclass(frozen=True)
class Scale:
    vocab: int
    hidden: int
    words: int  # of text
    streams: int  # rows of a batch, each from another place of the text
    steps: int  # of training before anything is pruned
    pruning: int  # steps in which the density falls; a third as many follow
    length: int  # words of a sequence that is timed
    rate: float = 2e-3


FULL = Scale(16384, 1024, 6_000_000, streams=128, steps=2000, pruning=1500, length=256)
QUICK = Scale(1200, 96, 60_000, streams=8, steps=90, pruning=60, length=32, rate=1e-2)


class Model(torch.nn.Module):
    """An LSTM layer over word embeddings, and a row of a matrix for each word."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(vocab, hidden)
        self.rnn = torch.nn.LSTM(hidden, hidden)
        self.output = torch.nn.Linear(hidden, vocab, bias=False)

    def forward(self, words: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Scores `(steps, batch, vocab)` of the words that follow `(steps, batch)`, and the state after them."""
        hidden, state = self.rnn(self.words(words), state)
        return self.output(hidden), state


def streams_of(text: np.ndarray, count: int, device: str) -> torch.Tensor:
    """The text cut into `count` streams: `(words, count)`."""
    length = len(text) // count
    return torch.from_numpy(text[: length * count].reshape(count, length).T.copy()).to(device)


def train(model: Model, text: torch.Tensor, steps: int, scale: Scale, pruning: dict[str, Any] | None = None) -> float:
    """Truncated backpropagation through time; the learning rate falls to a tenth. Returns the density at its end.

    `pruning` holds arguments of `GradualPruning` beside the module.
    """
    device = text.device.type
    optimizer = torch.optim.Adam(model.parameters())
    callback = tvm_sparse.GradualPruning(model.rnn, **pruning).attach(optimizer) if pruning else None
    state, at = None, 0
    for step in range(steps):
        if at + SPAN >= len(text):
            at, state = 0, None
        words, following = text[at : at + SPAN], text[at + 1 : at + SPAN + 1]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            scores, state = model(words, state)
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), following.flatten())
        state = tuple(part.detach() for part in state)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = scale.rate * min(1.0, (step + 1) / 20, max(0.1, 1.3 * (1 - step / steps)))
        optimizer.step()
        at += SPAN
    if callback is None:
        return 1.0
    callback.detach()
    return callback.density


@torch.no_grad()
def loss_of(model: Model, text: torch.Tensor) -> float:
    """Mean of -log p of all words of the text but the first, in nats."""
    total, state = 0.0, None
    for at in range(0, len(text) - 1, SPAN):
        words, following = text[at : at + SPAN], text[at + 1 : at + SPAN + 1]
        scores, state = model(words[: len(following)], state)
        total += torch.nn.functional.cross_entropy(
            scores.flatten(0, 1).float(), following.flatten(), reduction="sum"
        ).item()
    return total / (len(text) - 1) / text.shape[1]


def with_rnn(model: Model, rnn: torch.nn.Module) -> Model:
    """The model with another recurrent part, and the same words."""
    changed = copy.copy(model)
    changed._modules = {**model._modules, "rnn": rnn}
    return changed


def seconds_of(call: Callable[[], Any], device: str, rounds: int = 7) -> float:
    """Seconds of a call; on a GPU as a CUDA graph, since Python's launches would take longer than the layers."""
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    call()
    if device == "cuda":
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            call()
        call = graph.replay
    times = []
    for _ in range(rounds):
        wait()
        begun = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, in seconds")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--method", choices=METHODS, default="magnitude")
    parser.add_argument("--master", action="store_true", help="the paper's schedule: a master copy, pruned anew often")
    parser.add_argument("--steps", type=int, help="of training before anything is pruned")
    parser.add_argument("--save", help="file for the sparse layers, .npz or .safetensors")
    parser.add_argument("--csv", type=Path, help="write the losses")
    given = parser.parse_args()
    scale = QUICK if given.quick else FULL
    if given.steps:
        scale = dataclasses.replace(scale, steps=given.steps)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    vocabulary, train_text, held_out = read_text(scale)
    text, unseen = streams_of(train_text, scale.streams, device), streams_of(held_out, 4, device)
    print(f"text: {len(train_text) + len(held_out)} words, {len(vocabulary)} different")
    torch.manual_seed(0)
    dense = Model(len(vocabulary), scale.hidden).to(device)
    begun = time.perf_counter()
    with torch.enable_grad():
        train(dense, text, scale.steps, scale)
    pruned, every = copy.deepcopy(dense), max(1, scale.pruning // 20)
    if given.master:
        schedule = tvm_sparse.constant_schedule(given.density, begin=1, end=scale.pruning, every=every)
    else:
        schedule = tvm_sparse.cubic_schedule(given.density, begin=1, end=scale.pruning, every=every)
    options = {"schedule": schedule, "method": given.method, "master": given.master}
    with torch.enable_grad():
        density = train(pruned, text, scale.pruning + scale.pruning // 3, scale, options)
        longer = copy.deepcopy(dense)
        train(longer, text, scale.pruning + scale.pruning // 3, scale)
    print(f"trained in {time.perf_counter() - begun:.0f} s; recurrent weights pruned to {density:.1%}")
    # The pattern stands: its weights are parameters of the sparse layer now.
    tuned = with_rnn(copy.deepcopy(pruned), tvm_sparse.from_torch(pruned.rnn).trainable())
    begun, further = time.perf_counter(), scale.pruning // 3
    with torch.enable_grad():
        train(tuned, text, further, dataclasses.replace(scale, rate=scale.rate / 4))
    print(f"sparse layer trained for {further} more steps in {time.perf_counter() - begun:.0f} s")

    at_once = with_rnn(dense, tvm_sparse.from_torch(dense.rnn, density=given.density, method=given.method))
    sparse = with_rnn(pruned, tvm_sparse.from_torch(pruned.rnn))
    if given.save:
        print(f"saved: {sparse.rnn.save(given.save)}")
    print(f"\n{'model':>28} {'loss a word':>11} {'perplexity':>10}")
    losses = []
    for name, model in {
        "dense": dense,
        "dense, trained on as long": longer,
        "pruned at once": at_once,
        "pruned gradually, torch": pruned,
        "pruned gradually, sparse": sparse,
        "trained as a sparse layer": tuned,
    }.items():
        loss = loss_of(model, unseen)
        print(f"{name:>28} {loss:11.4f} {math.exp(loss):10.1f}")
        losses.append((name, f"{loss:.4f}", len(vocabulary), scale.hidden, f"{density:.4f}"))
    if given.csv:
        with given.csv.open("w", newline="") as file:
            where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
            file.write(f"# device: {where}\n# date: {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")
            file.write(f"# tvm_sparse: {tvm_sparse.__version__}\n# torch: {torch.__version__}\n")
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("model", "loss", "vocab", "hidden", "density"))
            writer.writerows(losses)

    dtypes = ("float32", "float16") if device == "cuda" else ("float32",)
    peer = "cuDNN's LSTM" if device == "cuda" else "torch's LSTM"
    print(f"\ntokens a second through the LSTM, input product included, {scale.length} steps")
    print(f"{'batch':>6} {'dtype':>8} {peer:>13} {'sparse':>12} {'ratio':>6}")
    for dtype in dtypes:
        kind = getattr(torch, dtype)
        theirs = copy.deepcopy(pruned.rnn).to(kind)
        theirs.flatten_parameters()
        ours = tvm_sparse.from_torch(theirs)
        for batch in BATCHES:
            x = torch.randn(scale.length, batch, scale.hidden, device=device).to(kind)
            tokens = [scale.length * batch / seconds_of(lambda rnn=rnn, x=x: rnn(x), device) for rnn in (theirs, ours)]
            print(f"{batch:6} {dtype:>8} {tokens[0]:13.0f} {tokens[1]:12.0f} {tokens[1] / tokens[0]:6.2f}")
    print(f"\n{sparse.rnn}")
    print(sparse.rnn.layers[0].explain(scale.length, 4))


if __name__ == "__main__":
    main()
