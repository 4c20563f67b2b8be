"""Translation end to end: quality and speed of heads and of pruned layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .register import part
from .results import Row, exists, provenance, results
from .text import listed, percent, span, table, times_as, us

TRAIN, DECODE, PRUNE, PACKAGES = (
    "translation-train-de-h200", "translation-decode-de-h200", "translation-prune-de-h200", "translation-packages",
)  # fmt: skip
FRENCH, FRENCH_TRAIN = "translation-decode-fr-h200", "translation-train-fr-h200"
TORCH, EXACT, FITTED, LSH, TOP, ALIGNED = "torch", "exact head", "LSH, fitted 0.95", "LSH", "TOP", "WA"
# Heads of the first table; the others, LSH at the paper's settings and with other tables, have one of their own.
FIRST = TORCH, EXACT, TOP, ALIGNED, FITTED
LISTS = {TOP: "the most frequent words (TOP)", ALIGNED: "words that translate one of the sentence's (WA)"}
METHODS = {"row_balanced": "row-balanced", "magnitude": "by magnitude", "block": "in blocks"}
# Dense models of fewer units, trained for as long.
SMALLER = {units: f"translation-dense-{units}-de-h200" for units in (256, 512)}
BEAM = "12"
SHAPES = ("1 x 32", "4 x 256")
# p-value below which a difference of BLEU counts.
SIGNIFICANT = 0.05


def decoded(name: str, beam: str = BEAM, file: str = DECODE) -> list[Row]:
    """Lines of a head by its name, with a beam."""
    return [row for row in results(file).rows if row["head"] == name and row["beam"] == beam]


def chosen_lsh(file: str = DECODE) -> Row | None:
    """The setting of LSH that `LshHead.fit` chose; else that of the paper's which loses least; None: there is none."""
    found = decoded(FITTED, file=file) or sorted(decoded(LSH, file=file), key=lambda row: lost(row, file))
    return found[0] if found else None


def hashed() -> list[Row]:
    """Lines of LSH at the paper's settings and with other tables."""
    return [row for row in results(DECODE).rows if row["beam"] == BEAM and row["head"] not in FIRST]


def value(row: Row, column: str) -> float:
    return float(row[column])


def lost(row: Row, file: str = DECODE) -> float:
    """BLEU below that of PyTorch's head."""
    return value(decoded(TORCH, file=file)[0], "bleu") - value(row, "bleu")


def signed(loss: float) -> str:
    """Two digits, without a sign of what is printed as zero."""
    return f"{round(loss, 2) + 0.0:.2f}"


def losing(row: Row, file: str = DECODE) -> str:
    """What a head loses beside PyTorch's: BLEU, or none if the difference may be chance."""
    loss = f"{signed(lost(row, file))} BLEU" if value(row, "p") < SIGNIFICANT and lost(row, file) > 0 else "no BLEU"
    return f"{loss} (p {value(row, 'p'):.2g})"


def harmless(rows: Iterable[Row], file: str = DECODE) -> Row | None:
    """The head that loses least of those that are faster than the exact one and whose loss may be chance."""
    free = [row for row in rows if value(row, "p") >= SIGNIFICANT and over_exact(row, file) > 1.02]
    return min(free, key=lambda row: lost(row, file), default=None)


def over(row: Row, name: str, file: str = DECODE) -> float:
    """Time of a step with the head of this name over that with a line's; both with the same beam."""
    return value(decoded(name, row["beam"], file)[0], "step_us") / value(row, "step_us")


def over_exact(row: Row, file: str = DECODE) -> float:
    return over(row, EXACT, file)


def pruned(file: str = PRUNE) -> dict[tuple[str, str], tuple[Row, dict[str, Row]]]:
    """By method and density: the line of quality, and lines of times by `batch x steps`."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in results(file).rows:
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


def lost_at_a_tenth() -> dict[str, float]:
    """BLEU lost at a density of 10 %, by the method's name on the page."""
    return {METHODS[method]: pruned_loss((method, density)) for method, density in pruned() if density == "0.1"}


@part
def translation_findings() -> str:
    [torch], [exact] = (decoded(name) for name in (TORCH, EXACT))
    parts = [
        f"**The exact head** makes a step {times_as(over(exact, TORCH))} times as fast as PyTorch's product, "
        f"log-softmax and top-k, and loses {losing(exact)}: its share of a step is"
        f" {percent(value(exact, 'head_share'))}, theirs {percent(value(torch, 'head_share'))}."
    ]
    lists = [name for name in LISTS if decoded(name)]
    if lists:
        free = harmless(row for name in lists for row in decoded(name))
        use = "Lists without a hash lose BLEU" if free is None else f"Use a list without a hash: {named(free)}"
        parts.append(f"**{use}.** " + " ".join(map(of_list, lists)))
    own = decoded(LSH)
    free = harmless([*decoded(FITTED), *hashed()])
    text = (
        "**LSH gains no time without a loss.**"
        if free is None
        else f"**LSH gains time without a loss: {named(free)}.**"
    )
    for fitted in decoded(FITTED):
        text += (
            f" The setting that `LshHead.fit` chose for a recall of 0.95 loses {losing(fitted)}, and translates"
            f" {over_exact(fitted):.2f} times as fast as the exact head."
        )
    if own:
        mildest, fastest = min(own, key=lost), max(own, key=over_exact)
        text += (
            f" At the paper's hashes LSH loses {span((lost(row) for row in own), 1)} BLEU: the setting that loses least"
            f" is {over_exact(mildest):.2f} times as fast as the exact head, and the fastest, {over_exact(fastest):.2f}"
            f" times, loses {lost(fastest):.1f}."
        )
    if own or decoded(FITTED):
        parts.append(text + beaten())
    if lost_at_a_tenth():
        parts.append(pruning())
    if exists(FRENCH):
        parts.append(into_french())
    return "\n\n".join(parts)


def gains_of(method: str, density: str) -> str:
    """cuDNN's time for the dense layers over ours, over the timed shapes."""
    return span((value(row, "torch_over_ours") for row in pruned()[method, density][1].values()), 1)


def pruning() -> str:
    """What the layers lose and gain at a density of 10 %."""
    tenths = {method: quality for (method, density), (quality, _) in pruned().items() if density == "0.1"}
    costs = listed([f"{pruned_loss((method, '0.1')):.1f} BLEU {METHODS[method]}" for method in tenths])
    gains = listed([f"{gains_of(method, '0.1')} ({METHODS[method]})" for method in tenths])
    steps = span((value(quality, "steps") for quality in tenths.values()), 0)
    dense = ""
    if pruned()["dense", "1"][1]:
        dense = f" The dense layers themselves, kept in tiles, are {gains_of('dense', '1')} times as fast as cuDNN's."
    return (
        f"**Pruning to 10 % costs** {costs}, after {steps} further steps of training; both encoder layers together run"
        f" {gains} times as fast as cuDNN's dense ones.{dense}"
    )


def of_list(name: str) -> str:
    """What the lists of a name lose and gain."""
    mildest, fastest = min(decoded(name), key=lost), max(decoded(name), key=over_exact)
    what = LISTS[name]
    text = (
        f"{what[0].upper()}{what[1:]} lose {losing(mildest)} with {value(mildest, 'candidates'):,.0f} words, at"
        f" {over_exact(mildest):.2f} times the exact head's speed"
    )
    if fastest is mildest:
        return text + "."
    return text + f"; the fastest such list, {over_exact(fastest):.2f} times, loses {signed(lost(fastest))} BLEU."


def beaten() -> str:
    """How many settings of LSH a list without a hash beats."""
    lists = [row for name in LISTS for row in decoded(name)]
    own = [*decoded(FITTED), *hashed()]
    if not lists or not own:
        return ""
    worse = [row for row in own if any(over_exact(a) >= over_exact(row) and lost(a) <= lost(row) for a in lists)]
    return f" A list without a hash is both faster and better than {len(worse)} of {len(own)} settings of LSH."


def into_french() -> str:
    """The same findings in the other language."""
    [exact], lsh = decoded(EXACT, file=FRENCH), chosen_lsh(FRENCH)
    free = harmless((row for name in LISTS for row in decoded(name, file=FRENCH)), FRENCH)
    others = [
        f"with {name} it is {over_exact(row, FRENCH):.2f} times as fast as with the exact head, and loses"
        f" {losing(row, FRENCH)}"
        for name, row in (("LSH", lsh), (free and named(free), free))
        if row is not None
    ]
    return (
        f"**Into French** a step with the exact head is {times_as(over(exact, TORCH, FRENCH))} times as fast as with"
        f" PyTorch's; {'; '.join(others)} ([table](#english-to-french))."
    )


def named(row: Row) -> str:
    """A line's head and setting."""
    return f"{row['head']} {row['setting']}".strip()


def heads_table(rows: Iterable[Row], file: str) -> str:
    lines = [
        [named(row), f"{value(row, 'candidates'):,.0f}", f"{value(row, 'recall_12'):.3f}", us(value(row, "head_us")),
         us(value(row, "step_us")), percent(value(row, "head_share")), times_as(over(row, TORCH, file)),
         f"{over_exact(row, file):.2f}", f"{value(row, 'words_per_second'):,.0f}",
         f"{value(row, 'bleu'):.2f} ± {value(row, 'bleu_interval'):.1f}", signed(lost(row, file)),
         f"{value(row, 'p'):.3f}" if row["p"] else "-",
         f"{value(row, 'chrf'):.1f} ± {value(row, 'chrf_interval'):.1f}"]
        for row in rows
    ]  # fmt: skip
    heads = ["head", "words multiplied", "recall@12", "us alone", "us a step", "head's share", "over torch",
             "over exact", "words a second", "BLEU", "lost", "p", "chrF"]  # fmt: skip
    return table(heads, lines)


def ordered(file: str) -> list[Row]:
    """Lines of the first table, in its order."""
    return [row for name in FIRST for row in decoded(name, file=file)]


def first_table(file: str) -> str:
    first = decoded(TORCH, file=file)[0]
    return (
        f"{provenance(file)}; {first['sentences']} sentences, one at a time, beam {first['beam']}, float16.\n\n"
        f"{heads_table(ordered(file), file)}{twice(ordered(file))}"
    )


def twice(rows: Sequence[Row]) -> str:
    """How far second measurements of words a second are from the first."""
    ratios = [value(row, "again") for row in rows if row["again"]]
    if not ratios:
        return ""
    return f"\n\nWords a second were measured twice; the second time is {span(ratios)} of the first."


@part
def translation_heads() -> str:
    return first_table(DECODE)


@part
def translation_hashes() -> str:
    rows = hashed()
    text = heads_table(rows, DECODE) + twice(rows)
    # Other tables of the same hashes.
    if any(row["head"] != LSH for row in rows):
        text += (
            "\n\n*Centred*: codes of the embedding without its mean word, which changes no ranking. *Small buckets*:"
            " buckets of more than 250 words are left empty, as stop words are left out of an index."
        )
    return text


@part
def translation_french() -> str:
    return first_table(FRENCH) if exists(FRENCH) else "Not measured."


@part
def translation_beams() -> str:
    lines = [
        [row["beam"], named(row), us(value(row, "head_us")), us(value(row, "step_us")),
         times_as(over(row, TORCH)), f"{value(row, 'words_per_second'):,.0f}",
         f"{value(row, 'bleu'):.2f} ± {value(row, 'bleu_interval'):.1f}"]
        for row in sorted(results(DECODE).rows, key=lambda row: int(row["beam"])) if row["beam"] != BEAM
    ]  # fmt: skip
    if not lines:
        return "No other beam has been measured."
    return table(["beam", "head", "us alone", "us a step", "over torch", "words a second", "BLEU"], lines)


@part
def translation_pruned() -> str:
    lines = []
    models = [(units, pruned(file)["dense", "1"]) for units, file in SMALLER.items() if exists(file)]
    named = [(f"dense, {units} units", "1", *found) for units, found in models]
    named += [(METHODS.get(method, method), density, *found) for (method, density), found in pruned().items()]
    whole = value(pruned()["dense", "1"][0], "bleu")
    for name, density, quality, times in named:
        cells = [name, percent(float(density)), quality["steps"], f"{value(quality, 'dev_loss'):.2f}",
                 f"{value(quality, 'bleu'):.2f} ± {value(quality, 'bleu_interval'):.1f}",
                 signed(whole - value(quality, "bleu"))]  # fmt: skip
        for shape in SHAPES:
            row = times.get(shape)
            cells += ["-", "-"] if row is None else [
                f"{us(value(row, 'ours_us'))} / {us(value(row, 'torch_us'))}", times_as(value(row, "torch_over_ours")),
            ]  # fmt: skip
        lines.append(cells)
    heads = ["weights", "density", "further steps", "loss on dev", "BLEU", "lost"]
    for shape in SHAPES:
        heads += [f"us, ours / cuDNN, {shape}", "gain"]
    sentences = pruned()["dense", "1"][0]["sentences"]
    counted = f", {sentences} sentences" if sentences else ""
    return f"{provenance(PRUNE)}; both encoder layers in float16, batch x steps{counted}.\n\n{table(heads, lines)}"


def trained(file: str, language: str) -> str:
    """Size of the data, the model, and its training."""
    facts, rows = results(file).facts, results(file).rows
    best = min(rows, key=lambda row: value(row, "dev_loss"))
    packages = sum(int(row[language]) > 0 for row in results(PACKAGES).rows)
    return (
        f"{facts['corpus']}, from the message catalogues of {packages} packages. The model was trained for"
        f" {value(best, 'seconds'):.0f} seconds, {value(best, 'epoch'):.0f} epochs, to a loss of"
        f" {value(best, 'dev_loss'):.2f} a word on the development set."
    )


@part
def translation_data() -> str:
    french = f" Into French: {trained(FRENCH_TRAIN, 'fr')}" if exists(FRENCH_TRAIN) else ""
    return (
        f"{provenance(TRAIN)}. Names, versions and hashes of the packages are in"
        f" `scripts/results/translation-packages.csv`. Model: {results(TRAIN).facts['model']}. Into German:"
        f" {trained(TRAIN, 'de')}{french}"
    )
