"""A transformer language model whose feed-forward layers are pruned in blocks in training, then trained as sparse ones.

    python examples/pruned_transformer.py text corpus             # on any machine: a text from the installed packages
    python examples/pruned_transformer.py train corpus --csv FILE.csv       # on a GPU: minutes
    python examples/pruned_transformer.py plot FILE.csv FILE.svg            # losses by step; needs matplotlib
    python examples/pruned_transformer.py train corpus --quick    # a tiny model, in seconds, also on a CPU

The model predicts the next byte. One run stays dense. Each other run starts from the same weights and sees the same
batches: `GradualPruning` prunes the feed-forward layers block by block, `sparsify` then makes them `BsrLinear`, and
training continues with sparse products, forward and backward. Adam's moments are carried over. On a GPU every step is
a CUDA graph, since small kernels are launched faster that way. Printed are losses on held-out text, in bits a byte, and
milliseconds a step.
"""

from __future__ import annotations

import argparse
import ast
import csv
import dataclasses
import hashlib
import lzma
import math
import statistics
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import tvm_sparse

COLUMNS = ("run", "step", "phase", "density", "seconds", "ms_per_step", "train_bits", "dev_bits", "parameters")
END = b"\0"  # after each document
DEV_OF = 40  # every 40th document, by a hash of its name, is held out
# Steps, as shares of the run, at which pruning begins, and at which it ends and layers become sparse.
BEGIN, PRUNED = 0.15, 0.6
RISE = 0.05  # share of the run in which the learning rate rises


@dataclass(frozen=True)
class Scale:
    width: int
    inner: int
    layers: int
    heads: int
    span: int  # bytes of a row
    rows: int  # of a batch
    steps: int
    blocks: tuple[int, ...]
    sparsity: float = 0.8
    rate: float = 4e-4
    looks: int = 12  # evaluations of a run
    dev_batches: int = 8


FULL = Scale(2048, 8192, layers=4, heads=16, span=512, rows=32, steps=1000, blocks=(64, 32))
QUICK = Scale(64, 256, layers=2, heads=2, span=32, rows=8, steps=40, blocks=(16,), rate=3e-3, looks=8, dev_batches=2)


# ---- text --------------------------------------------------------------------------------------------------------


def documents(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each file with prose: documentation strings of modules, descriptions, manuals, licences."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix not in (".py", ".rst", ".md", ".txt") and path.name != "METADATA":
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if path.suffix == ".py":
            text = "\n\n".join(docstrings(text))
        yield str(path.relative_to(folder)), text


def docstrings(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if found := ast.get_docstring(node):
                yield found


def split(texts: Iterator[tuple[str, str]], most: int) -> dict[str, bytes]:
    """Training and held-out text of together at most `most` bytes, by file; a paragraph occurs once in both."""
    seen: set[bytes] = set()
    parts: dict[str, list[bytes]] = {"train": [], "dev": []}
    for name, text in texts:
        kept = []
        for paragraph in text.split("\n\n"):
            own = hashlib.blake2b(" ".join(paragraph.split()).lower().encode(), digest_size=12).digest()
            if paragraph.strip() and own not in seen:
                seen.add(own)
                kept.append(paragraph.strip("\n"))
        content = "\n\n".join(kept).encode()
        if len(content) < 200:
            continue
        place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
        parts["dev" if place % DEV_OF == 0 else "train"].append(content + END)
    total = sum(len(one) for some in parts.values() for one in some)
    share = min(1.0, most / max(1, total))
    rng = np.random.default_rng(0)
    chosen = {}
    for part, some in parts.items():
        order = rng.permutation(len(some))
        sizes = np.cumsum([len(some[i]) for i in order])
        count = int((sizes <= share * sizes[-1]).sum()) if len(sizes) else 0
        chosen[part] = b"".join(some[i] for i in order[: max(1, count)])
        if not chosen[part]:
            raise SystemExit(
                f"{len(parts['train'])} documents to train on, {len(parts['dev'])} held out: too few files"
            )
    return chosen


def write_text(out: Path, folder: Path, most: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for part, content in split(documents(folder), most).items():
        packed = lzma.compress(content, preset=6)
        (out / f"{part}.txt.xz").write_bytes(packed)
        print(f"{part}: {content.count(END):,} documents, {len(content):,} bytes, {len(packed):,} compressed")


def read_text(folder: Path, device: str) -> dict[str, torch.Tensor]:
    """Bytes of both parts, on the device."""
    found = {part: lzma.decompress((folder / f"{part}.txt.xz").read_bytes()) for part in ("train", "dev")}
    return {part: torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device) for part, content in found.items()}


# ---- model -------------------------------------------------------------------------------------------------------


class Norm(torch.nn.LayerNorm):
    """Layer normalisation in the dtype of its input, where autocast would return float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        with torch.autocast(x.device.type, enabled=False):
            return functional.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype))


class FeedForward(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, inner, bias=False), torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class Layer(torch.nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.heads = scale.heads
        self.before, self.between = Norm(scale.width), Norm(scale.width)
        self.qkv = torch.nn.Linear(scale.width, 3 * scale.width, bias=False)
        self.out = torch.nn.Linear(scale.width, scale.width, bias=False)
        self.feed = FeedForward(scale.width, scale.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, span, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, span, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, span, width))
        return x + self.feed(self.between(x))


class Transformer(torch.nn.Module):
    """Scores of the next byte after each byte."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.bytes, self.places = torch.nn.Embedding(256, scale.width), torch.nn.Embedding(scale.span, scale.width)
        self.layers = torch.nn.Sequential(*(Layer(scale) for _ in range(scale.layers)))
        self.last, self.output = Norm(scale.width), torch.nn.Linear(scale.width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                small = 0.02 / math.sqrt(2 * scale.layers) if name.endswith(("out.weight", "down.weight")) else 0.02
                torch.nn.init.normal_(parameter, std=small)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in bits a byte, of rows `(batch, span + 1)`."""
        x = self.bytes(rows[:, :-1]) + self.places.weight
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        scores = self.output(self.last(self.layers(x))).float()
        return functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten()) / math.log(2)


# ---- training ----------------------------------------------------------------------------------------------------


class Trainer:
    """Steps of a model on rows of a text; `rows_at` holds the first bytes of the rows of the next batch."""

    def __init__(self, model: Transformer, text: dict[str, torch.Tensor], scale: Scale, moments: Any = None) -> None:
        self.model, self.text, self.scale = model, text, scale
        self.device = next(model.parameters()).device.type
        on_gpu = self.device == "cuda"
        # Rate and count of steps lie on the device, where a graph reads them.
        rate = torch.zeros((), device=self.device) if on_gpu else 0.0
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=on_gpu, capturable=on_gpu
        )
        for parameter, state in (moments or {}).items():
            self.optimizer.state[parameter] = state
        self.rows_at = torch.zeros(scale.rows, dtype=torch.int64, device=self.device)
        self.total = torch.zeros((), device=self.device)
        self.graph: Any = None

    def rows(self, part: str, starts: torch.Tensor) -> torch.Tensor:
        ahead = torch.arange(self.scale.span + 1, device=self.device)
        return self.text[part][starts[:, None] + ahead].long()

    def casting(self) -> Any:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda", cache_enabled=False)

    def _step(self) -> None:
        with self.casting():
            loss = self.model.loss(self.rows("train", self.rows_at))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.total += loss.detach()

    def capture(self) -> None:
        """Record a step in a CUDA graph. Steps before it, at a rate of 0, make kernels and moments."""
        kept = {p: {k: v.clone() for k, v in state.items()} for p, state in self.optimizer.state.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if parameter in kept:
                    value.copy_(kept[parameter][name])
                else:
                    value.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        self.total.zero_()

    def step(self, starts: torch.Tensor, rate: float) -> None:
        self.rows_at.copy_(starts)
        for group in self.optimizer.param_groups:
            if self.device == "cuda":
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    @torch.no_grad()
    def dev_bits(self) -> float:
        batch = self.scale.rows
        starts = torch.linspace(0, len(self.text["dev"]) - self.scale.span - 2, self.scale.dev_batches * batch).long()
        found = []
        for some in starts.to(self.device).split(batch):
            with self.casting():
                found.append(float(self.model.loss(self.rows("dev", some))))
        return statistics.fmean(found)


def feed_forward(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and ".feed." in name}


def sparse(trainer: Trainer, block: int) -> Trainer:
    """The model with `BsrLinear` in the place of pruned layers, and a trainer with the moments of what is left."""
    model, old = trainer.model, dict(trainer.optimizer.state)
    dense = feed_forward(model)
    swapped = tvm_sparse.nn.sparsify(model, block=block, sparsity=None, filter=lambda name, _: name in dense)
    moments = {parameter: old[parameter] for parameter in model.parameters() if parameter in old}
    for name, layer in swapped.items():
        at = torch.arange(len(layer.indptr) - 1, device=layer.indptr.device).repeat_interleave(layer.indptr.diff())
        moments[layer.data] = {
            # Moments have the shape of the weight, the count of steps has none.
            kind: value.view(-1, block, value.shape[1] // block, block).transpose(1, 2)[at, layer.indices.long()]
            if value.dim() else value.clone()
            for kind, value in old[dense[name].weight].items()
        }  # fmt: skip
    return Trainer(model, trainer.text, trainer.scale, moments)


def run(name: str, block: int | None, text: dict[str, torch.Tensor], scale: Scale, seed: int,
        keep: Callable[..., None]) -> None:  # fmt: skip
    """Train one model: dense, or pruned in blocks and then sparse. `keep` takes a line for each look."""
    torch.manual_seed(seed)
    device = text["train"].device.type
    trainer = Trainer(Transformer(scale).to(device), text, scale)
    starts = torch.randint(len(text["train"]) - scale.span - 1, (scale.steps, scale.rows),
                           generator=torch.Generator().manual_seed(seed)).to(device)  # fmt: skip
    begin, end = round(BEGIN * scale.steps), round(PRUNED * scale.steps)
    pruning, phase = None, "dense"
    if block is not None:
        weights = [layer.weight for layer in feed_forward(trainer.model).values()]
        every = max(1, (end - begin) // 40)
        schedule = tvm_sparse.cubic_schedule(1 - scale.sparsity, begin=begin, end=end, every=every)
        pruning = tvm_sparse.GradualPruning(weights, schedule, method="block", block=block)
    if device == "cuda":
        trainer.capture()
    looks = {round(scale.steps * (i + 1) / scale.looks) for i in range(scale.looks)} | {begin, end}
    density, seconds, last, begun = 1.0, 0.0, 0, _now(device)
    for step in range(1, scale.steps + 1):
        share = step / scale.steps
        rate = scale.rate * min(share / RISE, 0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * share)))
        trainer.step(starts[step - 1], rate)
        if pruning is not None:
            pruning.after_step()  # called here, since a graph does not run the optimiser's hooks
            phase = "pruning" if begin < step else "dense"
        if step not in looks:
            continue
        spent = _now(device) - begun
        seconds += spent
        if pruning is not None and pruning.masks:
            density = pruning.density
        bits = float(trainer.total) / (step - last)
        keep(
            run=name, step=step, phase=phase, density=density, seconds=seconds, ms_per_step=1e3 * spent / (step - last),
            train_bits=bits, dev_bits=trainer.dev_bits(),
            parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        )  # fmt: skip
        trainer.total.zero_()
        if pruning is not None and step == end:
            pruning, phase = None, "sparse"
            assert block is not None
            trainer.graph = None
            trainer = sparse(trainer, block)
            if device == "cuda":
                trainer.capture()
        last, begun = step, _now(device)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def plot(source: Path, out: Path) -> None:
    """Losses of all runs of a CSV by step."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "0"  # the same bytes for the same figures
    from matplotlib import pyplot

    with source.open(newline="") as file:
        lines = list(csv.DictReader(line for line in file if not line.startswith("#")))
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in dict.fromkeys(line["run"] for line in lines):
        own = [line for line in lines if line["run"] == name]
        axes.plot([int(line["step"]) for line in own], [float(line["dev_bits"]) for line in own], marker="o",
                  markersize=3, label=name)  # fmt: skip
    axes.set(xlabel="steps", ylabel="bits a byte, held-out text")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    scale = QUICK if args.quick else FULL
    changed = {name: getattr(args, name) for name in ("steps", "blocks") if getattr(args, name) is not None}
    scale = dataclasses.replace(scale, **changed)
    text = read_text(args.corpus, device)
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    sizes = ", ".join(f"{part} {len(content)} bytes" for part, content in text.items())
    facts = {"device": machine, "date": time.strftime("%Y-%m-%d", time.gmtime()), "torch": torch.__version__,
             "timing": "wall clock, batches and masks included, evaluation not", "text": sizes,
             "scale": str(scale)}  # fmt: skip
    lines: list[dict[str, Any]] = []

    def keep(**line: Any) -> None:
        lines.append(line)
        print(
            f"{line['run']:>10} {line['step']:5} {line['phase']:>8} {line['density']:.3f} {line['ms_per_step']:8.2f} ms"
            f" train {line['train_bits']:.3f} dev {line['dev_bits']:.3f}", flush=True,
        )  # fmt: skip
        if args.csv:
            with args.csv.open("w", newline="") as file:
                file.writelines(f"# {name}: {value}\n" for name, value in facts.items())
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                for one in lines:
                    writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in one.items()})

    begun = time.monotonic()
    for block in (None, *scale.blocks):
        if block is not None and time.monotonic() - begun > args.limit:
            print(f"no time for blocks of {block}")
            break
        run("dense" if block is None else f"blocks {block}", block, text, scale, args.seed, keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    texts = commands.add_parser("text", help="write a text")
    texts.add_argument("out", type=Path)
    texts.add_argument("--packages", type=Path, default=Path(sysconfig.get_paths()["purelib"]), help="a folder")
    texts.add_argument("--most", type=int, default=20_000_000, help="bytes")
    texts.set_defaults(call=lambda args: write_text(args.out, args.packages, args.most))
    training = commands.add_parser("train", help="train a dense model, and pruned ones")
    training.add_argument("corpus", type=Path)
    training.add_argument("--quick", action="store_true")
    training.add_argument("--cpu", action="store_true")
    training.add_argument("--steps", type=int)
    training.add_argument("--blocks", type=lambda text: tuple(map(int, text.split(","))), help="such as 64,32")
    training.add_argument("--limit", type=float, default=140, help="seconds after which no further run begins")
    training.add_argument("--csv", type=Path)
    training.add_argument("--seed", type=int, default=0)
    training.set_defaults(call=train)
    plotting = commands.add_parser("plot", help="draw the losses")
    plotting.add_argument("source", type=Path, help="what train wrote")
    plotting.add_argument("out", type=Path)
    plotting.set_defaults(call=lambda args: plot(args.source, args.out))
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
