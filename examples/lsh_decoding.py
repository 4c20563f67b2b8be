"""Beam search with a language model that is trained here: the exact head beside the LSH head.

    python examples/lsh_decoding.py             # on a GPU: trains for about a minute, decodes, measures
    python examples/lsh_decoding.py --quick     # a small model, in seconds, also on a CPU

A word-level LSTM learns the documentation strings of the Python packages that are installed. Then passages that it has
not seen are continued by beam search, once with every word multiplied and once with candidates from locality sensitive
hashing (Shi, Xu & Knight 2018). Printed are tokens a second, how often both find the same continuation, and what is
lost: log-probability under the full softmax, which tells whether a shorter list has missed something.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import importlib.util
import itertools
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tvm_sparse

# In this order, until there are words enough; the standard library is always there.
PACKAGES = ("numpy", "torch", "sympy", "networkx", "scipy")
DOCSTRING = re.compile(r'"""(.+?)"""', re.DOTALL)
WORD = re.compile(r"[a-z_]\w*|\d|[^\w\s]")
HELD_OUT = 20  # one string in 20 is not trained on
OTHER = 0  # stands for all words beyond the vocabulary
SPAN = 64  # words that gradients go through
SAVED = 8192  # hidden states that --save writes
COLUMNS = ("head", "k", "units", "bands", "threshold", "frequent", "tokens_per_second", "same_continuations",
           "same_words", "log_probability_a_word", "lost_a_word")  # fmt: skip


@dataclass(frozen=True)
class Scale:
    vocab: int
    hidden: int
    words: int  # of text
    streams: int  # rows of a batch, each from another place of the text
    steps: int  # of training
    passages: int
    samples: int  # hidden states that the LSH heads are fitted to
    recalls: tuple[float, ...]  # of theirs
    trials: int  # settings that are measured for each


FULL = Scale(32768, 1000, 6_000_000, streams=256, steps=2000, passages=48, samples=1200, recalls=(0.9, 0.99), trials=6)
QUICK = Scale(2000, 64, 120_000, streams=16, steps=160, passages=3, samples=240, recalls=(0.99,), trials=1)


# ---- text ----------------------------------------------------------------------------------------


def documentation(words: int) -> Iterator[list[str]]:
    """Documentation strings of installed packages, as words, each string once; until there are `words` of them."""
    found = (importlib.util.find_spec(name) for name in PACKAGES)
    folders = [Path(spec.origin).parent for spec in found if spec and spec.origin]
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    seen, count = set(), 0
    for path in itertools.chain(library, *(sorted(folder.rglob("*.py")) for folder in folders)):
        for string in DOCSTRING.findall(path.read_text(encoding="utf-8", errors="ignore")):
            split = WORD.findall(string.lower())
            if len(split) > 4 and string not in seen:
                seen.add(string)
                yield split
                count += len(split)
        if count > words:
            return


def read_text(scale: Scale) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The vocabulary by falling frequency, and the words to train on and those held out, as ids."""
    strings = list(documentation(scale.words))
    counts = Counter(itertools.chain.from_iterable(strings))
    vocabulary = ["<other>", *(word for word, _ in counts.most_common(scale.vocab - 1))]
    ids = {word: number for number, word in enumerate(vocabulary)}
    parts: tuple[list[int], list[int]] = ([], [])
    for number, string in enumerate(strings):
        parts[number % HELD_OUT == 0].extend(ids.get(word, OTHER) for word in string)
    train, held_out = (np.asarray(part) for part in parts)
    return vocabulary, train, held_out


# ---- model ---------------------------------------------------------------------------------------

State = tuple[torch.Tensor, torch.Tensor]


class Model(torch.nn.Module):
    """Two LSTM layers over word embeddings. The output layer is a matrix with a row for each word."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(vocab, hidden)
        self.layers = torch.nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.output = torch.nn.Linear(hidden, vocab, bias=False)

    def forward(self, words: torch.Tensor, state: State | None = None) -> tuple[torch.Tensor, State]:
        """Hidden states `(rows, length, hidden)` of words `(rows, length)`, and the state after them."""
        return self.layers(self.words(words), state)


def train(text: np.ndarray, scale: Scale, device: str) -> Model:
    """Truncated backpropagation through time; the learning rate falls to nothing."""
    torch.manual_seed(0)
    model = Model(scale.vocab, scale.hidden).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    length = len(text) // scale.streams
    streams = torch.from_numpy(text[: length * scale.streams].reshape(scale.streams, length)).to(device)
    state: State | None = None
    begun, at, losses = time.perf_counter(), 0, []
    for step in range(scale.steps):
        if at + SPAN >= length:
            at, state = 0, None
        words, following = streams[:, at : at + SPAN], streams[:, at + 1 : at + SPAN + 1]
        hidden, state = model(words, state)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = torch.nn.functional.cross_entropy(model.output(hidden).flatten(0, 1), following.flatten())
        state = (state[0].detach(), state[1].detach())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 50, 1.5 * (1 - step / scale.steps))
        optimizer.step()
        losses.append(loss.detach())
        at += SPAN
    last = torch.stack(losses[-50:]).mean().item()
    passes, seconds = scale.steps * SPAN / length, time.perf_counter() - begun
    print(f"trained: {passes:.1f} passes over {len(text)} words in {seconds:.0f} s, loss {last:.2f} a word")
    return model.eval()


@torch.no_grad()
def states(model: Model, text: np.ndarray, rows: int) -> torch.Tensor:
    """Hidden states at `rows` words of the text, neighbours side by side."""
    device = model.output.weight.device
    words = torch.from_numpy(text[: -(-rows // SPAN) * SPAN].reshape(-1, SPAN)).to(device)
    return model(words)[0].reshape(-1, model.output.in_features)[:rows].contiguous()


# ---- decoding ------------------------------------------------------------------------------------


def search(model: Model, head: Any, passages: torch.Tensor, beam: int, length: int) -> Callable[[], Any]:
    """A call that continues every passage `(passages, words)`, each by its own beam."""

    def step(words: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        hidden, state = model(words[:, None], state)
        return hidden[:, 0], state

    def reorder(state: State, rows: torch.Tensor) -> State:
        return state[0][:, rows].contiguous(), state[1][:, rows].contiguous()  # rows follow the layers

    with torch.no_grad():
        _, state = model(passages[:, :-1])

    def run() -> Any:
        with torch.no_grad():
            return tvm_sparse.beam_search(
                step, head, passages[:, -1], state=state, beam=beam, length=length, reorder=reorder
            )

    return run


@torch.no_grad()
def log_probability(model: Model, passages: torch.Tensor, continuations: torch.Tensor) -> torch.Tensor:
    """The log-probability of each continuation after its passage, by the model and the full softmax."""
    words = torch.cat([passages, continuations], 1)
    hidden = model(words[:, :-1])[0][:, passages.shape[1] - 1 :]
    scores = torch.log_softmax(model.output(hidden).float(), -1)
    return scores.gather(-1, continuations[..., None])[..., 0].sum(1)


def seconds_of(run: Callable[[], Any], device: str, rounds: int = 5) -> tuple[float, str]:
    """Seconds of a search. On a GPU it is one CUDA graph: what Python takes to launch would hide the heads' times."""
    how, wait = "called from Python", lambda: None
    if device == "cuda":
        stream, graph, wait = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.synchronize
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        stream.synchronize()
        try:
            with torch.cuda.graph(graph, stream=stream):
                run()
            run, how = graph.replay, "a CUDA graph of the whole search"
        except RuntimeError as error:  # something waits for the GPU
            print(f"no CUDA graph of the search: {str(error).partition('.')[0]}")
    times = []
    for _ in range(rounds):
        wait()
        begun = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begun)
    return statistics.median(times), how


def write_table(path: Path, device: str, what: str, lines: list[tuple[Any, ...]]) -> None:
    """Write the table of heads, after a header with the machine, the versions and the date."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    with path.open("w", newline="") as file:
        file.write(f"# device: {name}\n# date: {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n")
        file.write(f"# tvm_sparse: {tvm_sparse.__version__}\n# torch: {torch.__version__}\n# decoded: {what}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, in seconds")
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--beam", type=int, default=12)
    parser.add_argument("--length", type=int, default=24, help="words of a continuation")
    parser.add_argument("--recall", type=float, nargs="+", help="that LSH heads are fitted to; default: 0.9 and 0.99")
    parser.add_argument("--save", type=Path, help="write output matrix and hidden states, for scripts/, as .npz")
    parser.add_argument("--csv", type=Path, help="write the table of heads")
    given = parser.parse_args()
    scale = QUICK if given.quick else FULL
    if given.steps:
        scale = dataclasses.replace(scale, steps=given.steps)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    vocabulary, text, held_out = read_text(scale)
    scale = dataclasses.replace(scale, vocab=len(vocabulary))
    print(f"text: {len(text) + len(held_out)} words, {len(vocabulary)} different; e.g. {' '.join(vocabulary[900:908])}")
    model = train(text, scale, device)
    if device == "cuda":
        model = model.half()
    embedding = model.output.weight.detach()
    samples = states(model, held_out, scale.samples)
    if given.save:
        hidden = states(model, held_out, min(SAVED, len(held_out) // SPAN * SPAN))
        np.savez(given.save, embedding=embedding.cpu().numpy(), hidden=hidden.cpu().numpy())

    heads = {"exact": tvm_sparse.LshHead(embedding, threshold=0)}
    for recall in given.recall or scale.recalls:
        head, frontier = tvm_sparse.LshHead.fit(embedding, samples, recall, given.beam, trials=scale.trials)
        print(f"\nLSH fitted to a recall of {recall:g}: {frontier}")
        if head.settings.threshold:  # else no setting reaches it
            head.path = "lsh"  # also where the exact head is faster: they are to be compared
            heads[f"LSH {recall:g}"] = head

    # Behind what the heads were fitted to.
    unseen = held_out[-(-scale.samples // SPAN) * SPAN :]
    count = min(scale.passages, len(unseen) // SPAN)
    passages = torch.from_numpy(unseen[: count * SPAN].reshape(count, SPAN)[:, :16]).to(device)
    print(f"\n{count} passages, beam {given.beam}, {given.length} words; one sentence at a time")
    print(f"{'head':>10} {'tokens/s':>9} {'same':>6} {'same words':>10} {'log p a word':>12} {'lost a word':>11}")
    expected: torch.Tensor | None = None
    best: dict[str, torch.Tensor] = {}
    lines: list[tuple[Any, ...]] = []
    for name, head in heads.items():
        one = functools.partial(search, model, head, beam=given.beam, length=given.length)
        found = torch.cat([one(passage)().sequences[:, 0] for passage in passages.split(1)])
        scores = log_probability(model, passages, found) / given.length
        if expected is None:
            expected, exact_scores = found, scores
        seconds, how = seconds_of(one(passages[:1]), device)
        same = (found == expected).all(1).float().mean().item()
        words = (found == expected).float().mean().item()
        lost = (exact_scores - scores).mean().item()
        print(
            f"{name:>10} {given.length / seconds:9.0f} {same:6.1%} {words:10.1%} {scores.mean().item():12.4f}"
            f" {lost:11.4f}"
        )
        best[name] = found
        own = head.settings
        chosen = (own.k, own.units, own.bands, own.threshold, own.frequent) if own.threshold else ("",) * 5
        results = (
            f"{given.length / seconds:.1f}",
            f"{same:.4f}",
            f"{words:.4f}",
            f"{scores.mean():.4f}",
            f"{lost:.4f}",
        )
        lines.append((name, *chosen, *results))
    print(f"tokens a second: of one sentence, {how}")
    if given.csv:
        write_table(
            given.csv, device, f"{count} passages, beam {given.beam}, {given.length} words, {scale.vocab} known", lines
        )
    for name, found in best.items():
        print(f"\n{name}: {' '.join(vocabulary[i] for i in passages[0].tolist())} >>>")
        print(f"    {' '.join(vocabulary[i] for i in found[0].tolist())}")


if __name__ == "__main__":
    main()
