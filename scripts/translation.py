"""Translation by a recurrent model, end to end: what hashing does to its output layer, and pruning to its layers.

    pip install babel tokenizers sacrebleu            # beside tvm_sparse with its extras cuda and torch
    pip download --no-deps -d packages django wagtail ...           # what scripts/results/translation-packages.csv has
    python scripts/translation.py data packages --out corpus        # pairs of sentences, from message catalogues
    python scripts/translation.py train corpus/corpus-de.tsv.xz --out de --seconds 240
    python scripts/translation.py decode corpus/corpus-de.tsv.xz --out de     # heads: BLEU, recall, times
    python scripts/translation.py prune corpus/corpus-de.tsv.xz --out de      # densities: BLEU, times of layers

The model has two LSTM layers on either side and attention, the vocabularies some 30,000 subwords. `decode` translates
the test set with a beam of 12, one sentence at a time and a CUDA graph a step, by PyTorch's softmax, the exact head,
LSH heads (the paper's settings and those that `LshHead.fit` finds), the most frequent words alone (TOP), and the words
that translate one of the sentence's (WA). `prune` trains further while recurrent weights are pruned to lower
and lower densities. Every command stops at its time limit, and writes what it has by then. `--more` adds to the lines
of a run before, with the same model; `decode --only TOP --only WA` runs these heads beside PyTorch's and the exact one.
`join` adds the lines of parts that ran side by side to one file.

Sources: Shi, Xu & Knight 2018 (tables 1, 6, 7, 8, figures 6 to 8); Zhu, Pool et al. 2018 (appendix B, table 2).
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from reproduction import RESULTS, provenance, read_csv, result_path, write_csv
from translating import alignment, corpus, heads, quality
from translating.heads import Way
from translating.model import Limit, Pairs, Progress, Sizes, Translator, load, save, train
from translating.search import Encoded, Found, Search, encoded
from translating.vocabulary import Vocabulary

import tvm_sparse
from tvm_sparse.bench.timing import time_cpu, time_cuda
from tvm_sparse.cli.common import Target, console, errors, machine_here, table
from tvm_sparse.layers.pruning import METHODS

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)

BEAM = 12
# Seconds of a command that its last translation, its scores and its second times take.
LAST = 12.0
# Sentences that are translated a second time, and the difference of their speeds from which on all are.
AGAIN, FAR = 200, 0.05
# Sentences whose steps are timed alone.
STEPS_OF = 24
# Sentences and lists of a beam whose states choose settings, and those that recall is measured on.
FITTED_ON, MEASURED_ON = (40, 120), (40, 160)
TRANSLATIONS = (5, 20, 50)
# Groups of heads beside PyTorch's and the exact one: settings that `LshHead.fit` finds, the paper's, other tables of
# these, the most frequent words, and words that translate one of the sentence's.
FIT, PAPER, BUCKETS = "fitted", "paper", "buckets"
GROUPS = FIT, PAPER, BUCKETS, heads.TOP, heads.ALIGNED

CURVE = ("language", "step", "epoch", "seconds", "words_per_second", "train_loss", "dev_loss")
DECODED = ("language", "head", "setting", "beam", "candidates", "recall_12", "head_us", "step_us", "head_share",
           "words_per_second", "again", "over_torch", "over_exact", "bleu", "bleu_interval", "chrf", "chrf_interval",
           "p", "sentences")  # fmt: skip
PRUNED = ("language", "method", "density", "stored_density", "steps", "dev_loss", "bleu", "bleu_interval", "chrf",
          "p", "layer", "batch", "length", "torch_us", "ours_us", "torch_over_ours", "difference",
          "sentences")  # fmt: skip

Corpus = Annotated[Path, typer.Argument(help="A file that `data` wrote.")]
Out = Annotated[Path, typer.Option(help="Folder of the model.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="File to write; default: in scripts/results/.")]
More = Annotated[bool, typer.Option("--more", help="Add to the lines of the file, which are of the same model.")]


class Lines:
    """Lines of a CSV by key, written whenever one changes, so that a run that is cut leaves what it has."""

    def __init__(
        self, path: Path, facts: dict[str, str], columns: Sequence[str], key: Callable[[Any], Any] | None = None
    ) -> None:
        """`key`: of a line of the file, whose lines are kept; None: it is written anew."""
        self._path, self._facts, self._columns = path, facts, columns
        self.lines: dict[Any, dict[str, Any]] = {}
        if key is not None and path.exists():
            before, lines = read_csv(path)
            if before.get("model") != facts["model"]:
                raise ValueError(f"{path}: has lines of another model ({before.get('model')}), not of {facts['model']}")
            self.lines = {key(line): dict(line) for line in lines}

    def put(self, key: Any, **cells: Any) -> None:
        unknown = cells.keys() - set(self._columns)
        assert not unknown, unknown
        self.lines.setdefault(key, {}).update(cells)
        rows = [[_cell(line.get(column)) for column in self._columns] for line in self.lines.values()]
        write_csv(self._path, self._facts, self._columns, rows)

    def show(self, title: str, columns: Sequence[str]) -> None:
        printed = table(*columns, right=columns[2:])
        for line in self.lines.values():
            printed.add_row(*(str(_cell(line.get(column))) for column in columns))
        typer.echo(f"\n{title}")
        console().print(printed)


def _cell(value: Any) -> Any:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float | np.floating) else value


def numbers_of(text: str) -> list[float]:
    """Numbers between commas."""
    return [float(part) for part in text.split(",") if part]


def language_of(path: Path) -> str:
    """`de` of `corpus-de.tsv.xz`."""
    return path.name.partition(".")[0].rpartition("-")[2]


# ---- data --------------------------------------------------------------------------------------------------------


@app.command()
def data(
    packages: Annotated[Path, typer.Argument(help="Folder of wheels, source archives, Debian packages.")],
    out: Annotated[Path, typer.Option(help="Folder for corpus-LANGUAGE.tsv.xz.")] = Path("corpus"),
    language: Annotated[list[str] | None, typer.Option(help="Default: de, fr.")] = None,
    csv_path: Csv = None,
    samples: Annotated[int, typer.Option(help="Pairs to show of each language.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
) -> None:
    """Pairs of sentences from the message catalogues of packages."""
    languages = language or ["de", "fr"]
    files = sorted(path for path in packages.iterdir() if path.is_file())
    found = corpus.pairs_of(files, languages)
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for name, pairs in found.items():
        parts = corpus.parted(pairs)
        corpus.write(out / f"corpus-{name}.tsv.xz", parts)
        words = sum(len(pair.source.split()) for pair in parts.train)
        sizes = ", ".join(f"{part} {len(some):,}" for part, some in parts._asdict().items())
        typer.echo(f"{name}: {sizes} pairs; {words:,} English words to train on")
        for number in rng.choice(len(parts.train), min(samples, len(parts.train)), replace=False):
            typer.echo("    {} | {}".format(*parts.train[number]))
    counts = [
        [path.name, corpus.sha256(path), *(sum(name == path.name for name in found[one].values()) for one in languages)]
        for path in files
    ]
    used = [line for line in counts if any(line[2:])]
    write_csv(csv_path or RESULTS / "translation-packages.csv", {}, ["package", "sha256", *languages], used)


# ---- train -------------------------------------------------------------------------------------------------------


@app.command("train")
def train_command(
    path: Corpus,
    out: Out,
    target: Target = "auto",
    seconds: Annotated[float, typer.Option(help="Time of training.")] = 240.0,
    steps: Annotated[int | None, typer.Option(help="Or steps, if they come first.")] = None,
    vocab: Annotated[int, typer.Option(help="Subwords of each language.")] = 32000,
    width: Annotated[int, typer.Option(help="Of word embeddings.")] = 512,
    hidden: Annotated[int, typer.Option(help="Of layers, attention and output layer.")] = 1024,
    dropout: Annotated[float, typer.Option()] = 0.4,
    rate: Annotated[float, typer.Option(help="Largest learning rate.")] = 1e-3,
    words: Annotated[int, typer.Option(help="Target words of a batch.")] = 8192,
    longest: Annotated[int, typer.Option(help="Subwords of a sentence.")] = 80,
    csv_path: Csv = None,
    seed: int = 0,
) -> None:
    """Train a model; the one with the least loss on dev is kept."""
    with errors():
        where = machine_here(target, "training")
        device = "cuda" if where.kind == "cuda" else "cpu"
        torch.manual_seed(seed)
        parts, name = corpus.read(path), language_of(path)
        ours = Vocabulary.learned([pair.source for pair in parts.train], vocab)
        theirs = Vocabulary.learned([pair.target for pair in parts.train], vocab)
        pairs, dev = (Pairs.encoded(some, ours, theirs, longest) for some in (parts.train, parts.dev))
        sizes = Sizes(len(ours), len(theirs), width, hidden, dropout=dropout)
        model = Translator(sizes).to(device)
        facts = provenance(where) | {
            "timing": "wall clock",
            "corpus": f"{len(pairs.sources)} pairs, {pairs.sources.lengths.sum()} source and"
            f" {pairs.targets.lengths.sum()} target subwords of {len(ours)} and {len(theirs)}",
            "model": f"2 + 2 LSTM layers of {hidden}, embeddings of {width},"
            f" {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters",
        }
        for fact in ("corpus", "model"):
            typer.echo(f"{fact}: {facts[fact]}")
        csv = Lines(csv_path or result_path(f"translation-train-{name}", where).with_suffix(".csv"), facts, CURVE)
        out.mkdir(parents=True, exist_ok=True)
        best = float("inf")

        def keep(line: Progress) -> None:
            nonlocal best
            csv.put(line.step, language=name, **line._asdict())
            typer.echo(
                f"step {line.step}, epoch {line.epoch:.1f}, {line.seconds:.0f} s, {line.words_per_second:,.0f} words/s:"
                f" loss {line.train_loss:.3f}, dev {line.dev_loss:.3f}"
            )
            if line.dev_loss < best:
                best = line.dev_loss
                save(out / "model.pt", model, ours, theirs, language=name, dev_loss=best, words=words)

        train(model, pairs, dev, Limit(seconds, steps), rate=rate, words=words, device=device, seed=seed, keep=keep)


# ---- decode ------------------------------------------------------------------------------------------------------


class Translations:
    """The test set with a model in evaluation: its searches, and lines of their results."""

    def __init__(self, path: Path, out: Path, device: str, dtype: str, most: int | None, longest: int = 80) -> None:
        self.model, ours, self.theirs, self.facts = load(out / "model.pt", device)
        self.model.eval().to(getattr(torch, dtype))
        self.parts, self.language, self.device, self.dtype = corpus.read(path), language_of(path), device, dtype
        self._longest = longest
        # No sentence of the test set is left out; its longest are in the corpus by words, not by subwords.
        self.references = [pair.target for pair in self.parts.test[:most]]
        self.test = Pairs.encoded(self.parts.test[:most], ours, self.theirs, 10**6)
        self.vocabularies = ours, self.theirs
        self.judge = quality.Judge(self.references)

    @functools.cached_property
    def train(self) -> Pairs:
        return Pairs.encoded(self.parts.train, *self.vocabularies, self._longest)

    @functools.cached_property
    def dev(self) -> Pairs:
        return Pairs.encoded(self.parts.dev, *self.vocabularies, self._longest)

    @property
    def embedding(self) -> torch.Tensor:
        return self.model.output.weight.detach()

    def encode(self, pairs: Pairs, numbers: np.ndarray) -> Encoded:
        return encoded(self.model, pairs.sources, numbers, self.device)

    def search(self, way: Way, sentences: Encoded, beam: int) -> Search:
        return Search.of(self.model, way.head, sentences, beam)

    def texts(self, found: Found) -> list[str]:
        return self.theirs.decoded(found.sentences)


def states_of(
    search: Search, way: Way, sentences: Encoded, numbers: Sequence[int], lists: int
) -> list[tuple[int, torch.Tensor]]:
    """Numbers of sentences and inputs of the head, at steps that are evenly chosen from all; the first step, whose
    hypotheses are equal, is not among them.
    """
    found: list[tuple[int, torch.Tensor]] = []

    def after(number: int, step: int) -> None:
        if step and not bool(search.ended.all()):
            found.append((number, search.hidden.clone()))

    search(sentences, numbers, before=way.before, after=after)
    return [found[i] for i in np.linspace(0, len(found) - 1, min(lists, len(found))).astype(int)]


def microseconds(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    times = (time_cuda if device == "cuda" else time_cpu)(calls, 10 if device == "cuda" else 3)
    return {name: statistics.median(seconds) * 1e6 for name, (_, seconds) in times.items()}


def ways_of(
    given: Translations, deadline: float, trials: int, recalls: Sequence[float], groups: Sequence[str], settings: int
) -> list[Way]:
    """PyTorch's head, the exact one and those of these groups for a beam of 12, the most telling first."""
    embedding = given.embedding
    made = [heads.by_torch(embedding, BEAM), heads.exact(embedding, BEAM)]
    if heads.TOP in groups:
        made += [heads.exact(embedding, BEAM, max(BEAM, len(embedding) // share)) for share in (16, 8, 4, 2)]
    if heads.ALIGNED in groups:
        made += aligned_ways(given)
    if FIT in groups:
        made += fitted_ways(given, made[0], deadline, trials, recalls)
    if PAPER in groups or BUCKETS in groups:
        made += hashed_ways(embedding, groups, settings)
    return made


def fitted_ways(
    given: Translations, first: Way, deadline: float, trials: int, recalls: Sequence[float]
) -> Iterator[Way]:
    """LSH heads that `LshHead.fit` finds for these recalls, on states of a search with the first head."""
    embedding = given.embedding
    order = np.arange(min(FITTED_ON[0], len(given.dev.sources)))
    sentences = given.encode(given.dev, order)
    samples = states_of(given.search(first, sentences, BEAM), first, sentences, range(len(order)), FITTED_ON[1])
    if len(samples) < 2:
        typer.echo("no head is fitted: the search of the development set ends after its first step", err=True)
        return
    grouped = torch.stack([hidden for _, hidden in samples])
    for goal in recalls:
        if time.monotonic() > deadline:
            break
        begun = time.monotonic()
        head, frontier = tvm_sparse.LshHead.fit(embedding, grouped, goal, BEAM, trials=trials)
        typer.echo(f"fit for recall {goal}, {time.monotonic() - begun:.1f} s: {frontier.verdict}")
        if head.settings.threshold:
            yield heads.hashed(head, BEAM, f"{heads.FITTED} {goal:g}")


def hashed_ways(embedding: torch.Tensor, groups: Sequence[str], settings: int) -> Iterator[Way]:
    """LSH heads at the first of the paper's settings, and with other tables of its hashes."""
    vocab = len(embedding)

    @functools.cache
    def tables(k: int, units: int, bands: int) -> Any:
        return tvm_sparse.LshHead(embedding, k=k, units=units, bands=bands, threshold=1, frequent=1)

    if PAPER in groups:
        for setting in itertools.islice(heads.settings_of(*embedding.shape), settings):
            k, units, bands = (setting.pop(name) for name in ("k", "units", "bands"))
            yield heads.hashed(heads.changed(tables(k, units, bands), **setting), BEAM)
    # Real embeddings have buckets of thousands of words; these are two ways around them.
    few = max(BEAM, vocab // 128)
    options = {heads.CENTRED: {"centred": True}, heads.SMALL: {"most": few}, heads.BOTH: {"centred": True, "most": few}}
    for k, units, bands, threshold in ((16, 3, 500, 2), (8, 3, 500, 4)) if BUCKETS in groups else ():
        for name, option in options.items() if k <= embedding.shape[1] else ():
            other = heads.rehashed(tables(k, units, bands), **option)
            own = heads.changed(other, threshold=threshold, frequent=max(1, vocab // 16))
            yield heads.hashed(own, BEAM, name)


def aligned_ways(given: Translations) -> Iterator[Way]:
    """Heads over words that translate one of the sentence's."""
    vocab = len(given.embedding)
    always = max(BEAM, vocab // 128)
    words, _ = alignment.translations(
        given.train.sources, given.train.targets, (len(given.vocabularies[0]), vocab), max(TRANSLATIONS), given.device
    )
    longest = int(given.test.sources.lengths.max())
    for most in TRANSLATIONS:
        capacity = min(vocab, -(-(always + most * longest) // 256) * 256)
        found = alignment.lists(
            given.test.sources, np.arange(len(given.test.sources)), words[:, :most], always, capacity
        )
        yield heads.aligned(given.embedding, BEAM, most, found, 0)


@app.command()
def decode(
    path: Corpus,
    out: Out,
    target: Target = "auto",
    seconds: Annotated[float, typer.Option(help="After which nothing new is begun.")] = 240.0,
    sentences: Annotated[int | None, typer.Option(help="Of the test set; default: all.")] = None,
    dtype: Annotated[str, typer.Option(help="Of states and embeddings; default: float16, on a CPU float32.")] = "",
    beams: Annotated[str, typer.Option(help="Further beams of torch, the exact head and LSH.")] = "1,6,48",
    recalls: Annotated[str, typer.Option(help="For which `LshHead.fit` finds settings.")] = "0.95,0.9",
    trials: Annotated[int, typer.Option(help="Settings that it measures for each.")] = 4,
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(GROUPS)}; default: all.")] = None,
    settings: Annotated[int, typer.Option(help="Of the paper's, the most telling first.")] = 9,
    csv_path: Csv = None,
    more: More = False,
) -> None:
    """Translate the test set by every head: quality, recall, times."""
    with errors(), torch.no_grad():
        begun, groups = time.monotonic(), GROUPS if only is None else tuple(only)
        if unknown := set(groups) - set(GROUPS):
            raise ValueError(f"only: expected some of {', '.join(GROUPS)}, got {', '.join(sorted(unknown))}")
        deadline = begun + max(1.0, seconds - LAST)
        where = machine_here(target, "decoding")
        device = "cuda" if where.kind == "cuda" else "cpu"
        given = Translations(path, out, device, dtype or ("float16" if device == "cuda" else "float32"), sentences)
        csv = Lines(csv_path or result_path(f"translation-decode-{given.language}", where).with_suffix(".csv"),
                    provenance(where) | facts_of(given), DECODED, decoded_key if more else None)  # fmt: skip
        numbers = np.arange(len(given.test.sources))
        source_us = source_side(given)
        typer.echo(f"source side: {source_us:.0f} us a sentence alone")
        all_ = given.encode(given.test, numbers)
        made = ways_of(given, deadline - 0.5 * seconds, trials, numbers_of(recalls), groups, settings)
        typer.echo(f"{len(made)} heads after {time.monotonic() - begun:.0f} s")
        plan = [(way, BEAM) for way in made]
        plan += [(way, int(beam)) for beam in numbers_of(beams) for way in ways_of_beam(given, made, int(beam))]
        problems = [problem for way, beam in plan for problem in way.problems(beam)]
        tvm_sparse.warmup(list(dict.fromkeys(problems)), target=target)
        typer.echo(f"{len(problems)} kernels after {time.monotonic() - begun:.0f} s")

        runs = Runs(given, csv, all_, made[0], deadline)
        for way, beam in plan:
            key = way.name, way.setting, beam
            if time.monotonic() > deadline:
                typer.echo(f"no time is left for {key} and what comes after it", err=True)
                break
            try:
                runs.first(way, beam)
            except Exception as error:  # one head that fails is no reason to lose the others
                typer.echo(f"{key} has no result: {str(error)[:300]}", err=True)
        runs.second()
        for key, scores in given.judge.results():
            csv.put(key, **scores._asdict())
        shown = ("head", "setting", "beam", "candidates", "recall_12", "head_us", "step_us", "head_share", "again",
                 "over_torch", "over_exact", "bleu", "bleu_interval", "p")  # fmt: skip
        csv.show(f"English to {given.language}, {len(given.references)} sentences", shown)


class Run(NamedTuple):
    """A head's translations of all sentences."""

    key: tuple[str, str, int]
    way: Way
    search: Search
    found: Found


class Runs:
    """Translations by one head after the other. Each head's speed is measured a second time, on the first sentences,
    after the first translation of the next head; if both differ by more than `FAR`, all sentences are translated again,
    and the faster of both times counts.
    """

    def __init__(self, given: Translations, csv: Lines, sentences: Encoded, first: Way, deadline: float) -> None:
        """`first`: the head whose hidden states recall is measured on."""
        self._given, self._csv, self._sentences, self._deadline = given, csv, sentences, deadline
        self._numbers = range(len(given.references))
        some = self._numbers[: MEASURED_ON[0]]
        self._steps = states_of(given.search(first, sentences, BEAM), first, sentences, some, MEASURED_ON[1])
        embedding = given.embedding.float()
        self._truth = [torch.topk(hidden.float() @ embedding.T, BEAM).indices for _, hidden in self._steps]
        # Sentences of at least the median length are not at their end when their steps are timed.
        lengths = given.test.sources.lengths
        self._timed = np.flatnonzero(lengths >= np.median(lengths))[:STEPS_OF].tolist()
        self._rest: dict[int, float] = {}
        self._measured: list[tuple[str, str, int]] = []
        self._last: Run | None = None

    def first(self, way: Way, beam: int) -> None:
        """Translate by a head, and write its line."""
        given, device, key = self._given, self._given.device, (way.name, way.setting, beam)
        search = given.search(way, self._sentences, beam)
        found = search(self._sentences, self._numbers, before=way.before, deadline=self._deadline)
        if len(found.sentences) < len(self._numbers):
            raise RuntimeError(f"the time limit came after {len(found.sentences)} sentences")
        texts = given.texts(found)
        given.judge.add(key, texts)
        step_us = search.microseconds(self._sentences, self._timed, way.before)
        cells: dict[str, Any] = {}
        number, hidden = self._steps[0]
        if beam == BEAM:
            cells["recall_12"], counts = heads.recall(way, self._steps, self._truth)
            cells["candidates"] = statistics.mean(counts)
            number, hidden = self._steps[np.argsort(counts)[len(counts) // 2]]
        else:
            several = torch.cat([hidden for _, hidden in self._steps[: beam // BEAM + 1]])
            hidden = several[:beam].contiguous()
        way.before(number)
        head_us = microseconds({"head": lambda: way.head(hidden)}, device)["head"]
        scores = quality.scores(texts, given.references)
        self._csv.put(
            key, language=given.language, head=way.name, setting=way.setting, beam=beam, head_us=head_us,
            step_us=step_us, head_share=max(0.0, 1 - self._without(beam) / step_us), words_per_second=found.rate(),
            bleu=scores.bleu, chrf=scores.chrf, sentences=len(self._numbers), **cells,
        )  # fmt: skip
        self._ratios(key)
        typer.echo(
            f"{way.name} {way.setting}, beam {beam}: {found.rate():,.0f} words/s, head {head_us:.1f} of"
            f" {step_us:.1f} us, {found.steps} steps, BLEU {_cell(scores.bleu)}"
        )
        self.second()
        self._last = Run(key, way, search, found)

    def second(self) -> None:
        """Measure the last head's speed a second time."""
        if self._last is None:
            return
        (key, way, search, found), self._last = self._last, None
        again = search(self._sentences, self._numbers[:AGAIN], before=way.before)
        ratio, rate = again.rate() / found.rate(AGAIN), found.rate()
        if abs(ratio - 1) > FAR and time.monotonic() < self._deadline:
            again = search(self._sentences, self._numbers, before=way.before)
            ratio, rate = again.rate() / rate, max(again.rate(), rate)
        self._csv.put(key, again=ratio, words_per_second=rate)
        self._ratios(key)

    def _without(self, beam: int) -> float:
        """Time of a step without a head."""
        if beam not in self._rest:
            nothing = heads.nothing(beam, beam, self._given.device)
            search = self._given.search(nothing, self._sentences, beam)
            self._rest[beam] = search.microseconds(self._sentences, self._timed)
        return self._rest[beam]

    def _ratios(self, key: tuple[str, str, int]) -> None:
        """Write a line's speed over those of PyTorch's and the exact head with the same beam; the line of one of these
        changes what this run has measured before.
        """
        bases = {heads.TORCH: "over_torch", heads.EXACT: "over_exact"}
        self._measured += [key] if key not in self._measured else []
        keys = [own for own in self._measured if own[2] == key[2]] if key[0] in bases else [key]
        for own, (name, column) in itertools.product(keys, bases.items()):
            base = name, "", own[2]
            if base in self._measured:
                rates = (self._csv.lines[one]["words_per_second"] for one in (own, base))
                self._csv.put(own, **{column: next(rates) / next(rates)})


def decoded_key(line: dict[str, str]) -> tuple[str, str, int]:
    """The run that a line of `decode` belongs to."""
    return line["head"], line["setting"], int(line["beam"])


def pruned_key(line: dict[str, str]) -> tuple[Any, ...]:
    """The model that a line of `prune` is about, and the shape if it is about its layers."""
    shape = (int(line["batch"]), int(line["length"])) if line["batch"] else ()
    return line["method"], float(line["density"]), *shape


def facts_of(given: Translations) -> dict[str, str]:
    vocab, hidden = given.embedding.shape
    return {
        "timing": "one sentence at a time, wall clock of the whole test set; steps: median of replays of one graph",
        "model": f"2 + 2 LSTM layers of {hidden}, {vocab} target subwords, {given.dtype}, loss on dev"
        f" {given.facts['dev_loss']:.3f}",
        "quality": "sacrebleu, BLEU and chrF2; intervals and p-values by a paired bootstrap of 500 samples",
    }


def ways_of_beam(given: Translations, made: Sequence[Way], beam: int) -> list[Way]:
    """PyTorch's head, the exact one, and the first LSH with the paper's numbers; as many best words as hypotheses."""
    found = [heads.by_torch(given.embedding, beam), heads.exact(given.embedding, beam)]
    hashed = next((way for way in made if way.name == heads.LSH), None)
    return found if hashed is None else [*found, heads.hashed(hashed.owner, beam)]


def source_side(given: Translations) -> float:
    """Microseconds of encoding one sentence of median length alone."""
    order = np.argsort(given.test.sources.lengths)
    one_ = order[len(order) // 2 : len(order) // 2 + 1]
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        given.encode(given.test, one_)
        torch.cuda.synchronize() if given.device == "cuda" else None
        found.append(time.perf_counter() - begun)
    return statistics.median(found) * 1e6


# ---- prune -------------------------------------------------------------------------------------------------------


@app.command()
def prune(
    path: Corpus,
    out: Out,
    target: Target = "auto",
    method: Annotated[list[str] | None, typer.Option(help="Default: all.")] = None,
    densities: Annotated[str, typer.Option(help="One after the other.")] = "0.2,0.1,0.05",
    seconds: Annotated[float, typer.Option(help="Of training, for each density.")] = 30.0,
    steps: Annotated[int | None, typer.Option(help="Or steps, if they come first.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which no further density is begun.")] = 300.0,
    rate: Annotated[float, typer.Option(help="Largest learning rate.")] = 3e-4,
    sentences: Annotated[int | None, typer.Option(help="Of the test set; default: all.")] = None,
    shapes: Annotated[str, typer.Option(help="batch x steps of timed layers.")] = "1x32,4x256",
    longest: Annotated[int, typer.Option(help="Subwords of a sentence.")] = 80,
    csv_path: Csv = None,
    more: More = False,
    seed: int = 0,
) -> None:
    """Prune the recurrent weights gradually in further training: quality, and times of layers beside PyTorch's."""
    with errors():
        begun = time.monotonic()
        where = machine_here(target, "pruning")
        device = "cuda" if where.kind == "cuda" else "cpu"
        given = Translations(path, out, device, "float32", sentences, longest)
        name = f"translation-prune-{given.language}"
        facts = provenance(where) | facts_of(given)
        file = csv_path or result_path(name, where).with_suffix(".csv")
        csv = Lines(file, facts, PRUNED, pruned_key if more else None)
        sizes = [tuple(map(int, shape.split("x"))) for shape in shapes.split(",")]
        pruned_line(given, csv, given.model, ("dense", 1.0), 0, given.facts["dev_loss"])
        timed_line(given, csv, given.model, ("dense", 1.0), sizes)
        for one_ in METHODS if method is None else method:
            model = copy.deepcopy(given.model)
            for layers_ in (model.encoder, model.decoder):
                layers_.flatten_parameters()  # copies lie apart in memory
            last = 1.0
            for density in numbers_of(densities):
                if time.monotonic() - begun > limit:
                    typer.echo(f"no time is left for {one_} at {density:g}", err=True)
                    break
                curve = train_pruned(
                    model, given, Limit(seconds, steps), (last, density), one_, rate=rate, device=device, seed=seed
                )
                last = density
                pruned_line(given, csv, model, (one_, density), curve[-1].step, curve[-1].dev_loss)
                timed_line(given, csv, model, (one_, density), sizes)
        for key, found in given.judge.results():
            csv.put(key, bleu_interval=found.bleu_interval, p=found.p)
        shown = ("method", "density", "stored_density", "dev_loss", "bleu", "bleu_interval", "layer", "batch", "length",
                 "torch_us", "ours_us", "torch_over_ours", "difference")  # fmt: skip
        csv.show(f"English to {given.language}, recurrent weights pruned", shown)


def train_pruned(
    model: Translator,
    given: Translations,
    limit: Limit,
    densities: tuple[float, float],
    method: str,
    *,
    rate: float,
    device: str,
    seed: int,
    every: int = 10,
) -> list[Progress]:
    """Train while the density falls from the first to the second in two thirds of the limit, by a cubic; it is that of
    `cubic_schedule` by time.
    """

    def prepared(adam: torch.optim.Optimizer, spent: Callable[[], float]) -> None:
        done = False

        def schedule(step: int) -> float | None:
            nonlocal done
            share = min(1.0, 1.5 * spent())
            if done or (step % every and share < 1):
                return None
            done = share == 1
            return densities[1] + (densities[0] - densities[1]) * (1 - share) ** 3

        tvm_sparse.GradualPruning(model, schedule, method=method).attach(adam)

    return train(
        model, given.train, given.dev, limit, rate=rate, words=given.facts["words"], looks=2,
        device=device, seed=seed, prepared=prepared,
    )  # fmt: skip


@torch.no_grad()
def pruned_line(
    given: Translations, csv: Lines, model: Translator, key: tuple[str, float], step: int, loss: float
) -> None:
    """Quality of a model with the exact head."""
    dtype = torch.float16 if given.device == "cuda" else torch.float32
    own = copy.deepcopy(model).eval().to(dtype)
    numbers = np.arange(len(given.test.sources))
    sentences = encoded(own, given.test.sources, numbers, given.device)
    way = heads.exact(own.output.weight.detach(), BEAM)
    search = Search.of(own, way.head, sentences, BEAM)
    texts = given.theirs.decoded(search(sentences, numbers.tolist()).sentences)
    given.judge.add(key, texts)
    scores = quality.scores(texts, given.references)
    weights = [p for n, p in model.named_parameters() if "weight_hh_l" in n]
    stored = sum(int((p != 0).sum()) for p in weights) / sum(p.numel() for p in weights)
    csv.put(
        key, language=given.language, method=key[0], density=key[1], stored_density=stored, steps=step, dev_loss=loss,
        bleu=scores.bleu, chrf=scores.chrf, sentences=len(given.references),
    )  # fmt: skip
    typer.echo(f"{key[0]} at {key[1]:g}: dev {loss:.3f}, BLEU {_cell(scores.bleu)}")


def timed_line(
    given: Translations, csv: Lines, model: Translator, key: tuple[str, float], sizes: Sequence[tuple[int, ...]]
) -> None:
    """`layers`, whose failure is no reason to lose the quality of further models."""
    try:
        layers(given, csv, model, key, sizes)
    except Exception as error:
        typer.echo(f"{key[0]} at {key[1]:g}: layers have no times: {str(error)[:300]}", err=True)


@torch.no_grad()
def layers(
    given: Translations, csv: Lines, model: Translator, key: tuple[str, float], sizes: Sequence[tuple[int, ...]]
) -> None:
    """Times of the encoder's layers, sparse and by PyTorch, and the largest difference of their outputs."""
    dtype = "float16" if given.device == "cuda" else "float32"
    kind = getattr(torch, dtype)
    module = copy.deepcopy(model.encoder).eval().to(kind)
    stack = tvm_sparse.from_torch(module, dtype=dtype, dense=False).to(given.device)
    for batch, steps in sizes:
        x = torch.randn(steps, batch, module.input_size, device=given.device).to(kind)
        difference = float((stack(x)[0].float() - module(x)[0].float()).abs().max())
        calls = {"torch": lambda x=x: module(x), "ours": lambda x=x: stack(x)}
        times = microseconds(calls, given.device)
        csv.put(
            (*key, batch, steps), language=given.language, method=key[0], density=key[1],
            layer=f"{module.num_layers} LSTM of {module.hidden_size}, {dtype}", batch=batch, length=steps,
            torch_us=times["torch"], ours_us=times["ours"], torch_over_ours=times["torch"] / times["ours"],
            difference=difference,
        )  # fmt: skip


# ---- join --------------------------------------------------------------------------------------------------------


@app.command()
def join(
    first: Annotated[Path, typer.Argument(help="File of `decode` or `prune`, which is written anew.")],
    others: Annotated[list[Path], typer.Argument(help="Files of the same model, whose further lines are added.")],
) -> None:
    """Add the lines of parts that ran side by side to one file; of lines about the same, the first file's are kept."""
    with errors():
        facts, lines = read_csv(first)
        columns, key = (DECODED, decoded_key) if "head" in lines[0] else (PRUNED, pruned_key)
        whole = Lines(first, facts, columns, key)
        for path in others:
            for own, line in Lines(path, facts, columns, key).lines.items():
                if own not in whole.lines:
                    whole.put(own, **line)


if __name__ == "__main__":
    app()
