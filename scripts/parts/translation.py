"""Translation end to end: quality and speed of heads and of pruned layers."""

from __future__ import annotations

from .register import part
from .results import Row, provenance, results
from .text import percent, span, table, times_as, us

TRAIN, DECODE, PRUNE, PACKAGES = (
    "translation-train-de-h200", "translation-decode-de-h200", "translation-prune-de-h200", "translation-packages",
)  # fmt: skip
TORCH, EXACT, FITTED, LSH, TOP, ALIGNED = "torch", "exact head", "LSH, fitted 0.95", "LSH", "TOP", "WA"
BEAM = "12"
SHAPES = ("1 x 32", "4 x 256")


def decoded(name: str, beam: str = BEAM) -> list[Row]:
    """Lines of a head by its name, with a beam."""
    return [row for row in results(DECODE).rows if row["head"] == name and row["beam"] == beam]


def value(row: Row, column: str) -> float:
    return float(row[column])


def lost(row: Row) -> float:
    """BLEU below that of PyTorch's head."""
    return value(decoded(TORCH)[0], "bleu") - value(row, "bleu")


def signed(loss: float) -> str:
    """Two digits, without a sign of what is printed as zero."""
    return f"{round(loss, 2) + 0.0:.2f}"


def disturbed(row: Row) -> bool:
    """Whether the time of all sentences and that of one step do not fit together: words a step, by both, are far from
    those of the exact head, whose translations are as long.
    """
    [exact] = decoded(EXACT)
    words = [value(one, "words_per_second") * value(one, "step_us") for one in (row, exact)]
    return not 0.7 < words[0] / words[1] < 1.4


def over_exact(row: Row) -> float:
    """Speed of translating with a head over that with the exact one."""
    return value(row, "words_per_second") / value(decoded(EXACT)[0], "words_per_second")


def paper_settings() -> list[Row]:
    """LSH at the paper's hashes, without lines whose times were disturbed."""
    return [row for row in decoded(LSH) if not disturbed(row)]


def pruned() -> dict[tuple[str, str], tuple[Row, dict[str, Row]]]:
    """By method and density: the line of quality, and lines of times by `batch x steps`."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in results(PRUNE).rows:
        rows.setdefault((row["method"], row["density"]), []).append(row)
    return {
        key: (
            next(row for row in some if row["bleu"]),
            {f"{row['batch']} x {row['length']}": row for row in some if row["layer"]},
        )
        for key, some in rows.items()
    }


def pruned_loss(key: tuple[str, str]) -> float:
    """BLEU below that of the dense model, by method and density."""
    return value(pruned()["dense", "1"][0], "bleu") - value(pruned()[key][0], "bleu")


def pruned_gains(key: tuple[str, str]) -> list[float]:
    """cuDNN's time over ours at all timed shapes."""
    return [value(row, "torch_over_ours") for row in pruned()[key][1].values()]


@part
def translation_findings() -> str:
    [torch], [exact], [fitted] = (decoded(name) for name in (TORCH, EXACT, FITTED))
    others = paper_settings()
    mildest = min(others, key=lost)
    fastest = max(others, key=over_exact)
    tenth = "row_balanced", "0.1"
    lists = (
        "**Lists without a hash.** " + " ".join(map(of_list, (TOP, ALIGNED)))
        if decoded(TOP) and decoded(ALIGNED)
        else "Lists without a hash, of frequent words (TOP) or of words that translate the sentence's (WA), have no"
        " BLEU here yet. By recall frequent words alone [beat LSH](papers.md#speed-against-quality) on another model."
    )
    return (
        f"**Use the exact head.** It translates {times_as(value(exact, 'speedup'))} times as fast as PyTorch's product,"
        f" log-softmax and top-k with the same BLEU (p {value(exact, 'p'):.2f}): the head's share of a step falls from"
        f" {percent(value(torch, 'head_share'))} to {percent(value(exact, 'head_share'))}.\n\n"
        f"**Use LSH only where a loss of BLEU is allowed.** The setting that `LshHead.fit` chose for a recall of 0.95"
        f" loses none (p {value(fitted, 'p'):.2f}), and translates {over_exact(fitted):.2f} times as fast as the exact"
        f" head: no gain. At the paper's hashes LSH loses {span((lost(row) for row in others), 1)} BLEU. The setting"
        f" that loses least is {over_exact(mildest):.2f} times as fast as the exact head; the fastest,"
        f" {over_exact(fastest):.2f} times, loses {lost(fastest):.1f}.\n\n"
        f"{lists}\n\n"
        f"**Pruning to 10 % costs {pruned_loss(tenth):.1f} BLEU** after {pruned()[tenth][0]['steps']} further steps of"
        f" training; both encoder layers together run {span(pruned_gains(tenth), 1)} times as fast as cuDNN's dense"
        " ones."
    )


def of_list(name: str) -> str:
    """What the lists of a name lose and gain."""
    rows = decoded(name)
    mildest, fastest = min(rows, key=lost), max(rows, key=over_exact)
    what = {TOP: "The most frequent words (TOP)", ALIGNED: "Words that translate one of the sentence's (WA)"}[name]
    return (
        f"{what} lose {signed(lost(mildest))} BLEU at least, with {value(mildest, 'candidates'):,.0f} words and"
        f" {over_exact(mildest):.2f} times the exact head's speed; the fastest list, {over_exact(fastest):.2f} times,"
        f" loses {signed(lost(fastest))}."
    )


@part
def translation_beams() -> str:
    lines = [
        [row["beam"], f"{row['head']} {row['setting']}".strip(), us(value(row, "head_us")), us(value(row, "step_us")),
         f"{value(row, 'words_per_second'):,.0f}",
         f"{value(row, 'words_per_second') / value(decoded(TORCH, row['beam'])[0], 'words_per_second'):.2f}",
         f"{value(row, 'bleu'):.2f} ± {value(row, 'bleu_interval'):.1f}"]
        for row in results(DECODE).rows if row["beam"] != BEAM
    ]  # fmt: skip
    if not lines:
        return "No other beam has been measured."
    return table(["beam", "head", "us alone", "us a step", "words a second", "over torch", "BLEU"], lines)


@part
def translation_heads() -> str:
    lines = []
    for row in results(DECODE).rows:
        if row["beam"] != BEAM:
            continue
        speeds = ["-"] * 3 if disturbed(row) else [
            f"{value(row, 'words_per_second'):,.0f}", times_as(value(row, "speedup")), f"{over_exact(row):.2f}",
        ]  # fmt: skip
        lines.append([
            f"{row['head']} {row['setting']}".strip(), f"{value(row, 'candidates'):,.0f}",
            f"{value(row, 'recall_12'):.3f}", us(value(row, "head_us")), *speeds,
            f"{value(row, 'bleu'):.2f} ± {value(row, 'bleu_interval'):.1f}", signed(lost(row)),
            f"{value(row, 'p'):.3f}" if row["p"] else "-",
        ])  # fmt: skip
    heads = ["head", "words multiplied", "recall@12", "us alone", "words a second", "over torch", "over exact", "BLEU",
             "lost", "p"]  # fmt: skip
    first = decoded(TORCH)[0]
    return (
        f"{provenance(DECODE)}; {first['sentences']} sentences, one at a time, beam {first['beam']}, float16.\n\n"
        f"{table(heads, lines)}"
    )


@part
def translation_pruned() -> str:
    lines = []
    for (method, density), (quality, timed) in pruned().items():
        cells = [method, percent(float(density)), quality["steps"], f"{value(quality, 'dev_loss'):.2f}",
                 f"{value(quality, 'bleu'):.2f} ± {value(quality, 'bleu_interval'):.1f}",
                 signed(pruned_loss((method, density)))]  # fmt: skip
        for shape in SHAPES:
            row = timed.get(shape)
            cells += ["-", "-"] if row is None else [
                f"{us(value(row, 'ours_us'))} / {us(value(row, 'torch_us'))}", times_as(value(row, "torch_over_ours")),
            ]  # fmt: skip
        lines.append(cells)
    heads = ["weights", "density", "further steps", "loss on dev", "BLEU", "lost"]
    for shape in SHAPES:
        heads += [f"us, ours / cuDNN, {shape}", "gain"]
    return f"{provenance(PRUNE)}; both encoder layers in float16, batch x steps.\n\n{table(heads, lines)}"


@part
def translation_data() -> str:
    facts, rows = results(TRAIN).facts, results(TRAIN).rows
    best = min(rows, key=lambda row: value(row, "dev_loss"))
    some = [row for row in results(PACKAGES).rows if int(row["de"])]
    return (
        f"{provenance(TRAIN)}. Sentences come from the message catalogues of {len(some)} packages of translated"
        " programs, whose names, versions and hashes are in `scripts/results/translation-packages.csv`. Training data:"
        f" {facts['corpus']}. Model: {facts['model']}. It was trained for {value(best, 'seconds'):.0f} seconds,"
        f" {value(best, 'epoch'):.0f} epochs, to a loss of {value(best, 'dev_loss'):.2f} a word on the development set."
    )
