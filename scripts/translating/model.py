"""An encoder and a decoder of LSTM layers with attention, and its training within a time.

The decoder's states look at the encoder's by a bilinear form (Luong et al. 2015, "general"), after the layers and not
between their steps, so that in training all steps of a layer are one call.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .vocabulary import BOS, EOS, Sentences, Vocabulary

# Share of the time in which the learning rate rises; afterwards it falls to 0 like a quarter of a cosine.
RISE = 0.03
SMOOTHING = 0.1
LARGEST_GRADIENT = 1.0
# First scale of the loss: gradients of a mean over thousands of words vanish in float16 otherwise.
SCALE = 4096.0
# Batches between two looks at the time on a GPU, which is ahead of the host.
LOOK_EVERY = 20


@dataclass(frozen=True)
class Sizes:
    """Sizes of a translator; the defaults are those of Shi, Xu & Knight 2018 rounded to powers of two."""

    sources: int = 32000
    targets: int = 32000
    width: int = 512
    hidden: int = 1024
    layers: int = 2
    dropout: float = 0.4


class Translator(torch.nn.Module):
    """Translates by `layers` LSTM layers on either side; `output.weight` is the head's embedding, without a bias."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, width, layers = sizes.hidden, sizes.width, sizes.layers
        between = sizes.dropout if layers > 1 else 0.0
        self.sizes = sizes
        self.embed_source = torch.nn.Embedding(sizes.sources, width)
        self.embed_target = torch.nn.Embedding(sizes.targets, width)
        self.encoder = torch.nn.LSTM(width, hidden, layers, dropout=between)
        self.decoder = torch.nn.LSTM(width, hidden, layers, dropout=between)
        self.align = torch.nn.Linear(hidden, hidden, bias=False)
        self.combine = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.output = torch.nn.Linear(hidden, sizes.targets, bias=False)
        self.dropout = torch.nn.Dropout(sizes.dropout)

    def encode(self, sources: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """States `(sentences, steps, hidden)` and the last ones of all layers, of padded sources; `lengths` are on the
        host.
        """
        inputs = self.dropout(self.embed_source(sources)).transpose(0, 1)
        packed = pack_padded_sequence(inputs, lengths, enforce_sorted=False)
        states, last = self.encoder(packed)
        return pad_packed_sequence(states)[0].transpose(0, 1), last

    def look(
        self, states: torch.Tensor, keys: torch.Tensor, memory: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """The head's input: tanh(W [context; state]), where the context is the mean of the memory, weighted by the
        softmax of the products of state and keys. `hidden` marks what is padding.
        """
        scores = (states @ keys.transpose(-1, -2)).float().masked_fill(hidden, -math.inf)
        context = torch.softmax(scores, -1).to(memory.dtype) @ memory
        return torch.tanh(self.combine(torch.cat([context, states], -1)))

    def forward(self, sources: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The head's inputs `(sentences, steps, hidden)` after each of the given target words."""
        memory, last = self.encode(sources, lengths)
        states, _ = self.decoder(self.dropout(self.embed_target(targets)).transpose(0, 1), last)
        padding = torch.arange(memory.shape[1], device=memory.device) >= lengths.to(memory.device)[:, None]
        return self.look(states.transpose(0, 1), self.align(memory), memory, padding[:, None])

    def loss(self, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
        """Cross entropy of a word, and with `smoothing` a share of that of a uniform distribution."""
        states = self(batch.sources, batch.lengths, batch.given).flatten(0, 1)[batch.counted]
        wanted = batch.wanted.flatten()[batch.counted]
        logits = self.output(self.dropout(states)).float()
        return torch.nn.functional.cross_entropy(logits, wanted, label_smoothing=smoothing)


# ---- batches -----------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Padded sentences: sources and their lengths, which are on the host, the target words before each place, the words
    there, and which of them, counted through all sentences, are no padding.
    """

    sources: torch.Tensor
    lengths: torch.Tensor
    given: torch.Tensor
    wanted: torch.Tensor
    counted: torch.Tensor


class Pairs(NamedTuple):
    """Sentences of both languages, by number."""

    sources: Sentences
    targets: Sentences

    @classmethod
    def encoded(cls, pairs: list[Any], ours: Vocabulary, theirs: Vocabulary, longest: int) -> Pairs:
        """Pairs of which both sides have 1 to `longest` words."""
        sides = zip(ours.encoded(p.source for p in pairs), theirs.encoded(p.target for p in pairs), strict=True)
        kept = [(s, t) for s, t in sides if 1 <= len(s) <= longest and 1 <= len(t) <= longest]
        return cls(Sentences([s for s, _ in kept]), Sentences([t for _, t in kept]))

    def batch(self, numbers: np.ndarray, device: str) -> Batch:
        lengths = self.targets.lengths[numbers]
        sources, given, wanted = (
            torch.from_numpy(rows).to(device, non_blocking=True)
            for rows in (
                self.sources.padded(numbers),
                self.targets.padded(numbers, begin=BOS),
                self.targets.padded(numbers, end=EOS),
            )
        )
        # Found here: a mask of the device would have to be counted before it selects.
        places = np.flatnonzero(np.arange(wanted.shape[1]) <= lengths[:, None])
        counted = torch.from_numpy(places).to(device, non_blocking=True)
        return Batch(sources, torch.from_numpy(self.sources.lengths[numbers]), given, wanted, counted)

    def batches(self, words: int, rng: np.random.Generator | None = None) -> Iterator[np.ndarray]:
        """Numbers of sentences of similar lengths, with at most `words` target words together, padding included; in an
        order by chance, if a generator is given.
        """
        noise = 0.0 if rng is None else rng.uniform(-0.5, 0.5, len(self.sources))
        order = np.lexsort((self.sources.lengths, self.targets.lengths + noise))
        longest = np.maximum(self.targets.lengths, self.sources.lengths)[order] + 1
        cut, parts = 0, []
        while cut < len(order):
            # The longest of a run of sorted sentences is near its end.
            most = np.maximum.accumulate(longest[cut : cut + words])
            size = max(1, int((most * np.arange(1, len(most) + 1) <= words).sum()))
            parts.append(order[cut : cut + size])
            cut += size
        if rng is not None:
            rng.shuffle(parts)  # type: ignore[arg-type]
        yield from parts


# ---- training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limit:
    """An end of training by time, or by steps if that comes first."""

    seconds: float
    steps: int | None = None

    def spent(self, begun: float, step: int) -> float:
        """Share of it, between 0 and 1."""
        share = (time.monotonic() - begun) / self.seconds if self.seconds > 0 else 1.0
        return min(1.0, max(share, step / self.steps if self.steps else 0.0))


class Progress(NamedTuple):
    """A line of a training's curve."""

    step: int
    epoch: float
    seconds: float
    words_per_second: float
    train_loss: float
    dev_loss: float


@torch.no_grad()
def dev_loss(model: Translator, dev: Pairs, words: int, device: str) -> float:
    """Mean cross entropy of a word, without smoothing and dropout."""
    was = model.training
    model.eval()
    total = count = 0.0
    for numbers in dev.batches(words):
        batch = dev.batch(numbers, device)
        with casting(device):
            own = len(batch.counted)
            total += float(model.loss(batch)) * own
            count += own
    model.train(was)
    return total / count


def casting(device: str) -> Any:
    """On a GPU products and layers are of float16: autocast runs cuDNN's layers in no other dtype."""
    return torch.autocast(device, torch.float16, enabled=device == "cuda")


def optimiser(model: Translator, rate: float, device: str) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98), fused=device == "cuda")


def train(
    model: Translator,
    pairs: Pairs,
    dev: Pairs,
    limit: Limit,
    *,
    rate: float = 1e-3,
    words: int = 8192,
    looks: int = 8,
    device: str,
    seed: int = 0,
    prepared: Callable[[torch.optim.Optimizer, Callable[[], float]], Any] | None = None,
    keep: Callable[[Progress], None] | None = None,
) -> list[Progress]:
    """Train within a limit; the rate rises and falls with it. At `looks` times the loss on `dev` is computed, and
    `keep` called, which may save the model.

    `prepared(optimiser, spent)` may add hooks to the optimiser's steps: `spent()` is the share of the limit by then.
    """
    rng, begun, step, epoch, curve = np.random.default_rng(seed), time.monotonic(), 0, 0, []
    adam = optimiser(model, rate, device)
    scaler = torch.amp.GradScaler(device, init_scale=SCALE, enabled=device == "cuda")
    share = 0.0
    if prepared is not None:
        prepared(adam, lambda: share)
    model.train()
    looked, seen, seen_at, since = 0, 0, begun, []
    count = sum(1 for _ in pairs.batches(words))
    while share < 1:
        for number, numbers in enumerate(pairs.batches(words, rng)):
            batch = pairs.batch(numbers, device)
            rise = min(1.0, share / RISE + 1e-3)
            for group in adam.param_groups:
                group["lr"] = rate * rise * math.cos(math.pi / 2 * share)
            with casting(device):
                loss = model.loss(batch, SMOOTHING)
            adam.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(adam)
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            scaler.step(adam)
            scaler.update()
            step += 1
            seen += int(pairs.targets.lengths[numbers].sum()) + len(numbers)
            since.append(loss.detach())
            if step % LOOK_EVERY == 0 and device == "cuda":
                torch.cuda.synchronize()
            share = limit.spent(begun, step)
            if share >= (looked + 1) / looks or share >= 1:
                looked = int(share * looks)
                now = time.monotonic()
                found = dev_loss(model, dev, words, device)
                mean = float(torch.stack(since).mean())
                line = Progress(step, epoch + (number + 1) / count, now - begun, seen / (now - seen_at), mean, found)
                curve.append(line)
                if keep is not None:
                    keep(line)
                seen, seen_at, since = 0, time.monotonic(), []
            if share >= 1:
                break
        epoch += 1
    return curve


# ---- files -------------------------------------------------------------------------------------------------------


def save(path: Path, model: Translator, ours: Vocabulary, theirs: Vocabulary, **facts: Any) -> None:
    """A checkpoint, in the place of an earlier one only when it is complete."""
    held = {
        "sizes": dataclasses.asdict(model.sizes),
        "state": model.state_dict(),
        "vocabularies": (ours.saved(), theirs.saved()),
        "facts": facts,
    }
    partial = path.with_suffix(".partial")
    torch.save(held, partial)
    partial.replace(path)


def load(path: Path, device: str) -> tuple[Translator, Vocabulary, Vocabulary, dict[str, Any]]:
    """What `save` saved."""
    held = torch.load(path, map_location=device, weights_only=True)
    model = Translator(Sizes(**held["sizes"])).to(device)
    model.load_state_dict(held["state"])
    ours, theirs = map(Vocabulary.loaded, held["vocabularies"])
    return model, ours, theirs, held["facts"]
