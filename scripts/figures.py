"""Fill in the generated parts of README.md and docs/: every figure, from the CSV files in results/, and the tables of
operators, templates and decisions, from the registry.

    python scripts/figures.py             # write what has changed
    python scripts/figures.py --check     # say what has changed, and exit with 1 if anything has

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a function in `PARTS`. The charts are SVG
files, listed in `CHARTS`. The output depends on nothing but the results and the code.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import difflib
import functools
import inspect
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from xml.sax.saxutils import escape

import typer

from tvm_sparse.bench.compare import NAME
from tvm_sparse.core import machine, registry, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import Argument, Problem
from tvm_sparse.core.template import NotApplicable, Template
from tvm_sparse.records import Log
from tvm_sparse.records.space import read as read_space
from tvm_sparse.schedules.vocabulary import DECISIONS, renamed
from tvm_sparse.tuning.strategies import DEFAULT

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
IMAGES = ROOT / "docs" / "images"
WIDTH = 120  # of a line of prose
PART = re.compile(r"(<!-- generated: ([\w-]+) -->).*?(<!-- end -->)", re.DOTALL)

PARTS: dict[str, Callable[[], str]] = {}


def part(function: Callable[[], str]) -> Callable[[], str]:
    """Register what fills the parts of this name, with hyphens for underscores."""
    PARTS[function.__name__.replace("_", "-")] = function
    return function


# -------------------------------------------------------------------------------------------------------- results

Row = Mapping[str, str]
Times = Mapping[str, float]  # microseconds by implementation


@dataclass(frozen=True)
class Results:
    """One CSV file: what its comments say of where and when, and its lines."""

    facts: Mapping[str, str]
    rows: tuple[Row, ...]

    def by_problem(self, **having: str) -> dict[Problem, Times]:
        """Microseconds by implementation, of the problems of the lines whose columns are `having`."""
        found: dict[Problem, dict[str, float]] = {}
        for row in self.rows:
            if row["microseconds"] and all(row[name] == value for name, value in having.items()):
                found.setdefault(registry.parse(row["problem"]), {})[row["implementation"]] = float(row["microseconds"])
        return dict(found)

    def by(self, *columns: str) -> dict[tuple[str, ...], Times]:
        """Microseconds by implementation, of the lines that agree in these columns."""
        found: dict[tuple[str, ...], dict[str, float]] = {}
        for row in self.rows:
            if row["microseconds"]:
                key = tuple(row[column] for column in columns)
                found.setdefault(key, {})[row["implementation"]] = float(row["microseconds"])
        return dict(found)


@functools.cache
def results(name: str) -> Results:
    lines = (RESULTS / f"{name}.csv").read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    return Results(facts, tuple(csv.DictReader(line for line in lines if not line.startswith("#"))))


def provenance(*names: str) -> str:
    """Device, versions and dates of some files of results, as half a sentence."""
    files = [results(name).facts for name in names]
    days = sorted({facts["date"][:10] for facts in files})
    devices = " and ".join(dict.fromkeys(facts["device"] for facts in files))
    torch = " and ".join(
        dict.fromkeys(
            f"PyTorch {f['torch']}" + (f" with CUDA {f['torch_cuda']}" if "torch_cuda" in f else "") for f in files
        )
    )
    return f"{devices}, {torch}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def best(times: Times, *prefixes: str) -> float:
    """The least time of the others, or of those of them whose name begins so."""
    return min(t for name, t in times.items() if name != NAME and name.startswith(prefixes or ("",)))


# --------------------------------------------------------------------------------------------------------- writing


def us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def times_as(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def span(values: Iterable[float], digits: int = 2) -> str:
    """`0.93 to 1.13`, or `0.93` where least and most are alike."""
    some = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (some[0], some[-1])))


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def code(text: str) -> str:
    return f"`{text}`"


# -------------------------------------------------------------------------------------------------------- headline


@dataclass(frozen=True)
class Headline:
    """Ratios of one kind: how many times as long as ours another takes, a problem each."""

    what: str
    against: str
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.geometric_mean(self.ratios)


GU_SPARSE = ("torch BSR", "torch bsr_dense_mm", "cuSPARSE")
HEAD, SPECVOCAB, TABLE4, STEPS = "head-h200", "specvocab-h200", "shi-xu-knight-table4-h200", "lsh-h200"
SAMPLED = "peers-sample-h200"
QUALITY = "shi-xu-knight-figure6-docstrings-lstm-h200"
OF_HEAD, OF_LISTS = ("batch", "vocab", "hidden", "k", "dtype"), ("hidden", "vocab", "m")
CHAIN, TORCH_HEAD = "product + softmax_topk", "torch product + softmax + topk"
TORCH_LISTS = "torch gather + bmm + softmax + topk"
RNN, ZHU_TABLE1, ZHU_FIGURES, ZHU_TABLES = (
    "rnn-h200", "zhu-pool-table1-h200", "zhu-pool-figures-h200", "zhu-pool-tables23-h200"
)  # fmt: skip
OF_CALL = ("cell", "hidden", "batch", "steps", "density")
LAYER, LAYER_PRODUCT, MODULE = "sparse layer", "sparse layer + input product", "torch module"
HEADLINE_FILES = ("peers-h200", "peers-softmax-h200", "gu-tables-h200", "peers-float16-h200", "peers-rotated-h200",
                  "argueta-chiang-table1-h200", HEAD, SPECVOCAB, RNN)  # fmt: skip


@functools.cache
def headlines() -> tuple[Headline, ...]:
    def ratios(cases: Iterable[Times], *prefixes: str) -> tuple[float, ...]:
        return tuple(best(times, *prefixes) / times[NAME] for times in cases)

    gu = list(results("gu-tables-h200").by("m", "k", "n", "block", "sparsity").values())
    half = list(results("peers-float16-h200").by_problem().values())
    lookups = [t for (_, values), t in results("argueta-chiang-table1-h200").by("nonzeros", "values").items()]
    heads = [times for times in results(HEAD).by(*OF_HEAD).values() if "head_topk" in times]
    lists = results(SPECVOCAB).by(*OF_LISTS).values()
    layers = results(RNN).by(*OF_CALL, "dtype")
    half_layers = [times for (*_, dtype), times in layers.items() if dtype == "float16"]
    loops = [times for (*_, dtype), times in layers.items() if dtype == "float32" and "sparse step loop" in times]
    return (
        Headline("softmax_topk, float32", "PyTorch", ratios(results("peers-h200").by_problem().values(), "torch")),
        Headline("softmax, float32", "PyTorch", ratios(results("peers-softmax-h200").by_problem().values(), "torch")),
        Headline("bsr_matmul, float32", "sparse: cuSPARSE, PyTorch, Triton", ratios(gu, *GU_SPARSE)),
        Headline("bsr_matmul, float32", "dense: cuBLAS in float32, TF32, float16", ratios(gu, "cuBLAS")),
        Headline("bsr_matmul, float16", "sparse: PyTorch, Triton", ratios(half, "torch BSR", "torch bsr_dense_mm")),
        Headline("bsr_matmul, float16", "dense: cuBLAS", ratios(half, "torch dense")),
        Headline(
            "bsr_matmul, float16, from memory",
            "dense: cuBLAS",
            ratios(results("peers-rotated-h200").by_problem().values(), "torch dense"),
        ),
        Headline("nhot_lookup, float32", "PyTorch, cuSPARSE", ratios(lookups)),
        Headline("head_topk", "PyTorch", tuple(t[TORCH_HEAD] / t["head_topk"] for t in heads)),
        Headline("head_topk", "cuBLAS, then softmax_topk", tuple(t[CHAIN] / t["head_topk"] for t in heads)),
        Headline(
            "candidate_topk, bfloat16, a list a row",
            "PyTorch",
            tuple(t[TORCH_LISTS] / t["candidate_topk"] for t in lists),
        ),
        Headline("SparseRNN, LSTM, GRU, float16", "cuDNN", tuple(t[MODULE] / t[LAYER_PRODUCT] for t in half_layers)),
        Headline(
            "SparseRNN, float32",
            "a step: cuBLAS, cuSPARSE",
            tuple(best(t, "dense", "sparse step") / t[LAYER] for t in loops),
        ),
    )


def loses(ratio: float) -> bool:
    """Whether another one's time over ours is less than 1 as it is printed; two runs of one kernel differ by more."""
    return round(ratio, 2) < 1


@part
def headline_sentence() -> str:
    topk = headlines()[0]
    lost = [f"{h.what}, against {h.against} ({min(h.ratios):.2f})" for h in headlines() if loses(min(h.ratios))]
    return (
        f"Times of the fastest other library over ours: {provenance(*HEADLINE_FILES)}. Bars are geometric means, lines"
        f" reach from the least favourable shape to the most; `softmax_topk` is {times_as(min(topk.ratios))} to"
        f" {times_as(max(topk.ratios))} times as fast as PyTorch, {times_as(topk.mean)} in the mean of"
        f" {len(topk.ratios)} shapes."
    ) + (f" The other is faster at some shapes of {listed(lost)}." if lost else "")


# ------------------------------------------------------------------------------------------------- figures by operator


def shapes_of(cases: Iterable[Problem]) -> list[tuple[int, int]]:
    """(batch, vocab) of problems, by vocab."""
    return sorted({(p.axes["batch"], p.axes["vocab"]) for p in cases}, key=lambda shape: (shape[1], shape[0]))


@part
def softmax_topk_peers() -> str:
    cases = results("peers-h200").by_problem()
    ks = sorted({p.axes["k"] for p in cases})
    found = {(p.axes["batch"], p.axes["vocab"], p.axes["k"]): times for p, times in cases.items()}
    rows = []
    for batch, vocab in shapes_of(cases):
        cells = [c for k in ks for t in [found[batch, vocab, k]] for c in (us(t[NAME]), us(best(t, "torch")))]
        rows.append([f"{batch} x {vocab}", *cells])
    return table(["softmax + top-k", *(name for k in ks for name in (f"k = {k}", "PyTorch"))], rows)


@part
def softmax_topk_ratios() -> str:
    topk, shares = headlines()[0], results("peers-h200").rows
    largest = max(shapes_of(results("peers-h200").by_problem()), key=lambda shape: shape[0] * shape[1])
    reached = {}
    for row in shares:
        problem = registry.parse(row["problem"])
        if row["implementation"] == NAME and (problem.axes["batch"], problem.axes["vocab"]) == largest:
            reached[problem.axes["k"]] = float(row["share_of_limit"])
    parts = [f"{percent(share)} (k = {k})" for k, share in sorted(reached.items())]
    return (
        f"PyTorch is the faster of `softmax` + `topk` and `topk` + `logsumexp`; it takes {times_as(min(topk.ratios))}"
        f" to {times_as(max(topk.ratios))} times as long, {times_as(topk.mean)} in the geometric mean. At"
        f" {largest[0]} x {largest[1]} the kernel reads at {listed(parts)} of the card's limit of"
        f" {limit() / 1e12:.2f} TB/s."
    )


def limit() -> float:
    """Bytes a second that one kernel reads on the card that was measured."""
    return dict(machine.READ_BANDWIDTH)["H200"]


@part
def limits_of_cards() -> str:
    rates = [f"{rate / 1e12:.2f} TB/s for an {chip}" for chip, rate in machine.READ_BANDWIDTH]
    return (
        f"The share of the limit is of the bandwidth at which one kernel reads device memory: {listed(rates)}. That of"
        " the H200 was measured on one card; that of the H100 is the data sheets' ratio applied to it. Where less than"
        " the L2 cache holds is read again and again, the share may exceed 100 %."
    )


@part
def softmax_topk_structures() -> str:
    names = ("structures-softmax_topk-h200", "structures-softmax_topk-4000x25000-h200")
    over: dict[str, list[float]] = {}
    for name in names:
        for row in results(name).rows:
            over.setdefault(row["inputs"], []).append(float(row["over_first"]))
    first, *others = over
    what = {
        "ascending": "ascending rows, of which every element exceeds those before it",
        "constant": "constant rows",
        "zipf": "rows of a few large values and a long tail (Zipf)",
        "ties": "rows of a few distinct values",
    }
    rows = [[what.get(name, name), span(over[name])] for name in others]
    return table(["inputs", f"time over that of {first} ones, over {len(over[first])} shapes"], rows)


@part
def milakov_gimelshein() -> str:
    rows = []
    cases = results("milakov-gimelshein-h200").by_problem(figure="5.2")
    columns = ("safe, then top-k", "safe, fused", "online, fused", NAME)
    for problem, times in sorted(cases.items(), key=lambda case: case[0].axes["k"]):
        rows.append([str(problem.axes["k"]), *(us(times.get(name)) for name in columns)])
    return table(["k, at 4000 x 25000", *columns], rows)


@part
def milakov_gimelshein_ratio() -> str:
    times = next(
        t
        for p, t in results("milakov-gimelshein-h200").by_problem(figure="5.2").items()
        if (p.axes["batch"], p.axes["vocab"], p.axes["k"]) == (4000, 25000, 5)
    )
    one = times["online, fused"] / times["safe, fused"]
    return (
        f"At 4000 x 25000 and k = 5 the paper's online algorithm with insertion takes {one:.2f} of the time of the safe"
        f" one in one kernel ({us(times['online, fused'])} and {us(times['safe, fused'])} microseconds); the public"
        f" function takes {us(times[NAME])}."
    )


@part
def milakov_gimelshein_cpu() -> str:
    found = results("milakov-gimelshein-x86-64-v4")
    rows = []
    for problem, times in found.by_problem().items():
        if problem.operator == "softmax":
            cells = (us(times[name]) for name in ("naive", "safe", "online"))
            shape = f"{problem.axes['batch']} x {problem.axes['vocab']}"
            rows.append([shape, *cells, f"{times['safe'] / times['online']:.2f}"])
    return table(["softmax on a CPU", "naive", "safe", "online", "safe over online"], rows)


@part
def argueta_chiang_table2() -> str:
    others, packed = [], []
    for times in results("argueta-chiang-table2-h200").by_problem().values():
        others.append(best(times, "torch", "FlashInfer") / times[NAME])
        packed.append(times["packed insertion"] / times[NAME])
    return (
        f"For N = 10 to 400 in batches of 1, 512 and 1024 rows of 10,240 the best other library takes"
        f" {times_as(min(others))} to {times_as(max(others))} times as long as ours, and that paper's own packed"
        f" insertion {times_as(min(packed))} to {times_as(max(packed))} times."
    )


RECALLS = ("lsh-recall-minilm", "lsh-recall-minilm-beam12")


def least_read(name: str) -> dict[tuple[str, ...], dict[str, Row]]:
    """By hash (k, units, bands) and recall the line that reads least, over all numbers of frequent words."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in results(name).rows:
        lines = found.setdefault((row["k"], row["units"], row["bands"]), {})
        if row["goal"] not in lines or float(row["share"]) < float(lines[row["goal"]]["share"]):
            lines[row["goal"]] = row
    return found


@part
def lsh_recall() -> str:
    found = least_read(RECALLS[0])
    goals = list(next(iter(found.values())))
    rows = []
    for numbers, lines in found.items():
        named = numbers[0] if numbers[0] == "TOP" else ", ".join(numbers)
        cells = []
        for goal in goals:
            row = lines[goal]
            at = f"T {row['frequent']}" + (f", t {row['threshold']}" if row["threshold"] else "")
            cells.append("all" if row["threshold"] == "0" else f"{100 * float(row['share']):.1f} % ({at})")
        rows.append([named, *cells])
    return table(["k, units, bands", *(f"recall@12 of {goal}" for goal in goals)], rows)


@part
def lsh_recall_sentence() -> str:
    own, shared = (
        {goal: min((lines[goal] for lines in least_read(name).values()), key=lambda row: float(row["share"]))
         for goal in ("0.9", "0.95", "0.99", "0.999")}
        for name in RECALLS
    )  # fmt: skip
    parts = [f"{100 * float(row['share']):.1f} % for {goal}" for goal, row in own.items()]
    row = own["0.99"]
    return (
        f"Of {results(RECALLS[0]).facts['model'].partition(': ')[2]}: the least share of the vocabulary is"
        f" {listed(parts)} of the 12 best words. That for 0.99 is of k = {row['k']}, units = {row['units']}, bands ="
        f" {row['bands']}; the best word itself is then found at {float(row['recall_1']):.4f} of the states, and the"
        f" look-up counts up {float(row['increments']):.0f} times as many words as there are. Where 12 neighbouring"
        f" states of a text share a list, it is"
        f" {100 * float(shared['0.99']['share']):.1f} % for 0.99."
    )


# The steps of Shi, Xu & Knight 2018, table 4, and the programs that hold several.
LSH_STEPS = ("WTA hash", "look-up", "candidate list", "copy of embeddings", "product", "softmax + top-n")
FUSED_STEPS = {"hash to list, fused": "lsh_candidates", "gathered product": "candidate_logits",
               "gathered product to top-n, fused": "candidate_topk"}  # fmt: skip
LSH_HEAD, EXACT_HEAD, TORCH_GATHERED = "LSH head", "exact head", "torch gather + product + softmax + topk"
LSH_LISTS = "LSH by lists"
TABLE1, TABLE8 = "shi-xu-knight-table1-h200", "shi-xu-knight-table8-h200"


def table4() -> dict[str, Row]:
    return {row["step"]: row for row in results(TABLE4).rows}


def step_sums() -> tuple[float, float]:
    """Microseconds of the steps one after the other: over all words, and by LSH."""
    steps = table4()
    full, lsh = (
        sum(float(steps[prefix + n]["microseconds"]) for n in LSH_STEPS if prefix + n in steps)
        for prefix in ("full: ", "")
    )
    return full, lsh


@part
def shi_xu_knight_table4() -> str:
    steps = table4()
    rows = []
    for name in LSH_STEPS:
        full, row = steps.get(f"full: {name}"), steps[name]
        naive = row["naive_microseconds"]
        rows.append([name, us(float(full["microseconds"])) if full else "-", us(float(row["microseconds"]))]
                    + [us(float(naive)) if naive else "-"]
                    + [times_as(float(naive) / float(row["microseconds"])) if naive else "-"])  # fmt: skip
    rows.append(["sum", *map(us, step_sums()), "-", "-"])
    return table(["step", "all words", "LSH", "naive form", "naive over ours"], rows)


@part
def shi_xu_knight_calls() -> str:
    steps = table4()
    ours = float(steps[LSH_HEAD]["microseconds"])
    rows = []
    for name in (*FUSED_STEPS, LSH_HEAD, EXACT_HEAD, CHAIN, TORCH_HEAD, TORCH_GATHERED):
        time = float(steps[name]["microseconds"])
        rows.append([name, us(time), "-" if name in FUSED_STEPS else times_as(time / ours)])
    return table(["program, or what a decoder calls", "microseconds", "over the LSH head"], rows)


@part
def lsh_steps() -> str:
    """Steps of the LSH head beside its peers, a line a vocabulary and dtype."""
    names = (LSH_HEAD, EXACT_HEAD, CHAIN, TORCH_HEAD)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in results(STEPS).rows:
        found.setdefault((row["vocab"], row["dtype"]), {})[row["implementation"]] = float(row["microseconds"])
    rows = [
        [vocab, dtype, *(us(times[name]) for name in names), times_as(times[TORCH_HEAD] / times[LSH_HEAD])]
        for (vocab, dtype), times in found.items()
    ]
    return table(["words", "dtype", *names, "PyTorch / LSH"], rows)


@part
def predicted_choices() -> str:
    """What choices for problems that nobody tuned take over the best recorded, all batches of a problem left out."""
    found: dict[str, dict[str, Row]] = {}
    for row in results("prediction-sm_90a").rows:
        if row["left_out"] == "all batches":
            found.setdefault(row["operator"], {})[row["way"]] = row
    rows = []
    for operator, ways in found.items():
        losses = [
            f"{float(row['geometric_mean']):.2f}, worst {float(row['worst']):.2f} ({row['measured']})"
            for row in (ways["default"], ways["nearest"], ways["chosen"])
        ]
        nearest = ways["nearest"]
        over = f"{float(nearest['over_chosen']):.2f} ({nearest['both']})"
        rows.append([code(operator), ways["chosen"]["problems"], *losses, over])
    head = "operator", "problems", "template's default", "nearest record", "chosen by the model", "nearest over chosen"
    return table(head, rows)


@part
def lsh_beam_step() -> str:
    """Parts of a beam-search step, by what its output layer is."""
    found: dict[str, dict[str, float]] = {}
    for row in results(TABLE1).rows:
        found.setdefault(row["part"], {})[row["output"]] = float(row["microseconds"])
    names = (TORCH_HEAD, EXACT_HEAD, LSH_HEAD)
    rows = [
        [name, *(us(times[one]) for one in names), times_as(times[TORCH_HEAD] / times[LSH_HEAD])]
        for name, times in found.items()
    ]
    return table(["part", *names, "PyTorch / LSH"], rows)


@part
def lsh_beams() -> str:
    """Steps of the LSH head by the size of the beam, and its speed-up over PyTorch against that of the first."""
    names = (LSH_HEAD, LSH_LISTS, EXACT_HEAD, CHAIN, TORCH_HEAD)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in results(TABLE8).rows:
        found.setdefault((row["beam"], row["candidates"]), {})[row["implementation"]] = float(row["microseconds"])
    gains = [times[TORCH_HEAD] / times[LSH_HEAD] for times in found.values()]
    rows = [
        [*key, *(us(times[name]) for name in names), times_as(gain), f"{gain / gains[0]:.0%}"]
        for (key, times), gain in zip(found.items(), gains, strict=True)
    ]
    return table(["beam", "candidates", *names, "PyTorch / LSH", "of the first"], rows)


@part
def shi_xu_knight_sentence() -> str:
    steps = table4()
    row, (full, lsh) = steps[LSH_HEAD], step_sums()
    ours, slower = float(row["microseconds"]), []
    for name in LSH_STEPS:
        naive, time = steps[name]["naive_microseconds"], float(steps[name]["microseconds"])
        if naive and float(naive) < time:
            kernel = steps[name]["kernel"].partition("@")[0]
            plain = steps[name]["naive_kernel"].partition(": ")[2]
            slower.append(
                f"The {name} is slower than its naive form here: `{kernel}`, at its default and untuned, takes"
                f" {us(time)} microseconds, `{plain}` {us(float(naive))}."
            )
    others = [
        f"{what} {us(float(steps[name]['microseconds']))} ({times_as(float(steps[name]['microseconds']) / ours)} times)"
        for name, what in (
            (EXACT_HEAD, "the exact head"),
            (CHAIN, "product + `softmax_topk`"),
            (TORCH_HEAD, "PyTorch's product, softmax and top-k"),
        )
    ]
    return " ".join(
        [
            f"At {int(row['vocab']):,} words, hidden {row['hidden']}, beam {row['beam']}, {row['dtype']} and"
            f" {int(row['candidates']):,} candidates the LSH head takes {us(ours)} microseconds, {listed(others)}."
            f" One by one its steps take {us(lsh)}, and product and `softmax_topk` over all words {us(full)}.",
            *slower,
        ]
    )


def of_shape(key: Sequence[str]) -> str:
    batch, vocab, hidden, _, dtype = key
    return f"({batch}, {vocab}, {hidden}) in {dtype}"


def head_share(key: Sequence[str], name: str) -> float:
    """The share of the limit at which a contender reads the embedding."""
    return next(
        float(row["share_of_matrix_limit"])
        for row in results(HEAD).rows
        if row["implementation"] == name and tuple(row[c] for c in OF_HEAD) == key
    )


@part
def head_peers() -> str:
    rows = []
    for key, times in results(HEAD).by(*OF_HEAD).items():
        ours = times.get("head_topk")
        cells = [us(ours), us(times["product"]), us(times[CHAIN]), us(times[TORCH_HEAD])]
        if ours is None:
            cells += ["-"] * 4
        else:
            ratios = (ours / times["product"], times[CHAIN] / ours, times[TORCH_HEAD] / ours)
            cells += [*(f"{ratio:.2f}" for ratio in ratios), percent(head_share(key, "head_topk"))]
        rows.append([*key, *cells])
    return table(
        [*OF_HEAD, "`head_topk`", "product", "+ `softmax_topk`", "PyTorch", "head / product", "+ `softmax_topk` / head",
         "PyTorch / head", "of the limit"],
        rows,
    )  # fmt: skip


@part
def head_sentence() -> str:
    found = {key: times for key, times in results(HEAD).by(*OF_HEAD).items() if "head_topk" in times}
    chain = {key: times[CHAIN] / times["head_topk"] for key, times in found.items()}
    lost = [f"{of_shape(key)} ({ratio:.2f})" for key, ratio in chain.items() if loses(ratio)]
    won = [ratio for ratio in chain.values() if not loses(ratio)]
    product = {key: times["head_topk"] / times["product"] for key, times in found.items()}
    half = [ratio for key, ratio in product.items() if key[-1] != "float32"]
    full = [ratio for key, ratio in product.items() if key[-1] == "float32"]
    shares = [100 * head_share(key, "head_topk") for key in found]
    added = [times[CHAIN] - times["product"] for key, times in found.items() if key[-1] != "float32"]
    missing = [
        f"At {of_shape([row[c] for c in OF_HEAD])} it has no time: {row['note']}."
        for row in results(HEAD).rows
        if row["implementation"] == "head_topk" and not row["microseconds"]
    ]
    return " ".join(
        [
            f"The exact head takes {span(half)} times as long as the product alone in float16 and bfloat16,"
            f" {span(full)} times in float32, and reads the embedding at {span(shares, 0)} % of the card's limit."
            f" PyTorch's product, softmax and top-k take"
            f" {span(times[TORCH_HEAD] / times['head_topk'] for times in found.values())} times as long."
            f" Product + `softmax_topk` takes {span(won)} times as long at {len(won)} shapes."
            + (f" The head loses to it at {len(lost)}, (batch, vocab, hidden): {listed(lost)}." if lost else "")
            + f" To the product of 16 bits alone `softmax_topk` adds {span(added, 1)} microseconds.",
            *missing,
        ]
    )


@part
def specvocab() -> str:
    shares = {
        tuple(row[c] for c in OF_LISTS): float(row["share_of_limit"])
        for row in results(SPECVOCAB).rows
        if row["implementation"] == "candidate_topk"
    }
    names = ("candidate_topk", TORCH_LISTS, "candidate_logits", "torch gather + bmm", "head_topk")
    rows = []
    for key, times in results(SPECVOCAB).by(*OF_LISTS).items():
        ratio = times[TORCH_LISTS] / times["candidate_topk"]
        rows.append([*key, *(us(times[name]) for name in names), f"{ratio:.2f}", percent(shares[key])])
    return table(
        [*OF_LISTS, "`candidate_topk`", "PyTorch", "`candidate_logits`", "PyTorch's", "`head_topk`", "PyTorch / ours",
         "of the limit"],
        rows,
    )  # fmt: skip


@part
def specvocab_sentence() -> str:
    found = results(SPECVOCAB).by(*OF_LISTS)
    row = results(SPECVOCAB).rows[0]
    gains = {key: times[TORCH_LISTS] / times["candidate_topk"] for key, times in found.items()}
    shares: dict[str, list[float]] = {}
    for line in results(SPECVOCAB).rows:
        if line["implementation"] == "candidate_topk":
            shares.setdefault(line["m"], []).append(100 * float(line["share_of_limit"]))
    parts = [f"{span(some, 0)} % at {m}" for m, some in shares.items()]
    logits = [times["torch gather + bmm"] / times["candidate_logits"] for times in found.values()]
    exact = [times["head_topk"] / times["candidate_topk"] for times in found.values()]
    return (
        f"{row['batch']} rows in {row['dtype']}, k = {row['k']}: PyTorch's gather, product, softmax and top-k take"
        f" {span(gains.values())} times as long as `candidate_topk`, the gather and product alone {span(logits)} times"
        f" as long as `candidate_logits`; the exact head takes {span(exact)} times as long as `candidate_topk`. The"
        f" rows that the lists name, each once, are read at {listed(parts)} candidates of the card's limit."
    )


@part
def lsh_quality() -> str:
    rows = []
    for row in results(QUALITY).rows:
        hashed = ", ".join(row[name] for name in ("k", "units", "bands")) if row["k"] else "-"
        shares = [f"{100 * float(row[name]):.1f} %" for name in ("share", "recall_1", "recall_12")]
        time = us(float(row["microseconds"])) if row["microseconds"] else "-"
        series = row["implementation"].split(" ")[0] if row["k"] else row["implementation"]
        gains = (f"{float(row[name]):.2f}" if row[name] else "-" for name in ("exact_over_this", "torch_over_this"))
        rows.append([series, hashed, row["frequent"] or "-", row["threshold"] or "-", *shares, time, *gains])
    names = ["candidates", "k, units, bands", "T", "t", "of the words", "recall@1", "recall@12", "microseconds"]
    return table([*names, "exact head / this", "PyTorch / this"], rows)


@part
def lsh_quality_data() -> str:
    facts = results(QUALITY).facts
    return (
        f"{_where(QUALITY)()} {facts['states'].partition(': ')[2][0].upper()}{facts['states'].partition(': ')[2][1:]}."
    )


def measured_decisions() -> Iterator[tuple[str, Problem, str, str]]:
    """File, problem, decisions and their origin of what the runs of the output layer have measured of ours."""
    for name in (HEAD, SPECVOCAB, TABLE4):
        for row in results(name).rows:
            operator = FUSED_STEPS.get(row["step"]) if name == TABLE4 else row["implementation"]
            if not operator or not row["kernel"] or not row["microseconds"]:
                continue
            if name == TABLE4:
                given = {**row, "lists": "1", "m": row["candidates"], "capacity": row["candidates"]}
                given["k"] = row["k" if operator == "lsh_candidates" else "n"]
            else:
                given = {**row, "lists": row["batch"], "beam": "1"}
            axes = [f.name for f in dataclasses.fields(registry.find(operator).problem) if f.name in given]
            problem = registry.parse(f"{operator}/{','.join(f'{axis}={given[axis]}' for axis in axes)}")
            decisions, _, origin = row["kernel"].rpartition(" (")
            run = Candidate.parse(decisions)
            # Under the names of now, and with what came later.
            run = dataclasses.replace(run, decisions=renamed(run.template, run.decisions))
            yield name, problem, str(run), origin.rstrip(")")


OUTPUT_LAYER = (
    "head_topk", "lsh_topk", "candidate_topk", "candidate_logits", "lsh_candidates", "wta_hash", "lsh_lookup",
    "compaction",
)  # fmt: skip


def records_of(operator: str) -> int:
    """Problems of an operator that a record of the H200 ships for."""
    return len(Log(ROOT / "tuning_logs", "sm_90a", operator).best())


@part
def head_decisions() -> str:
    """Whose decisions the runs of the output layer were made with, and which are still the defaults."""
    card = machine.Machine("cuda", "sm_90a", "sm_90a", cores=132)
    recorded: list[str] = []
    changed: dict[str, list[bool]] = {}
    for name, problem, decisions, origin in measured_decisions():
        if origin == "fallback":
            what = f"`{problem.operator}` in `{name}.csv`"
            changed.setdefault(what, []).append(str(spaces.fallback(problem, card)) != decisions)
        elif problem.operator == "head_topk":
            recorded.append(of_shape([str(problem.axes[axis]) for axis in OF_HEAD]))
    moved = [f"{sum(some)} of {len(some)} shapes of {what}" for what, some in changed.items() if any(some)]
    tuned = {name: records_of(name) for name in OUTPUT_LAYER}
    have = [f"{number} of `{name}`" for name, number in tuned.items() if number]
    lack = [f"`{name}`" for name, number in tuned.items() if not number]
    sentence = f"Records for {card.arch}: {listed(have)}" if have else "No records ship"
    if have and lack:
        sentence += f"; none of {listed(lack)}, whose figures are those of the templates' defaults"
    if recorded:
        sentence += f". Of `head_topk` the figures at {listed(recorded)} are of decisions that a record held"
    if moved:
        sentence += f". The default has changed since for {listed(moved)}; these files do not have the present one"
    return f"{sentence}."


def recurrent_rows(name: str, *more: str, first: Callable[[Sequence[str]], str]) -> Iterator[list[str]]:
    """Of each call a line: `first` of its columns (`more` of them before those of a call), times, and ratios."""
    cases: dict[tuple[str, ...], dict[str, Times]] = {}
    for (*key, dtype), times in results(name).by(*more, *OF_CALL, "dtype").items():
        cases.setdefault(tuple(key), {})[dtype] = times
    for key, by_dtype in cases.items():
        single, half = by_dtype.get("float32", {}), by_dtype.get("float16", {})
        cells = [first(key)]
        for times in (single, half):
            cells += [us(times.get(n)) for n in (LAYER, LAYER_PRODUCT, MODULE)]
        cells.insert(-1, us(half.get("layer of blocks")))
        cells += [us(single.get(n)) for n in ("dense step loop", "sparse step loop")]
        ours = half.get(LAYER_PRODUCT)
        cells.append(times_as(half[MODULE] / ours) if ours and MODULE in half else "-")
        step = single.get(LAYER)
        yield [*cells, f"{step / int(key[-2]):.2f}" if step else "-"]


RNN_COLUMNS = ("ours, float32", "with product", "cuDNN", "ours, float16", "with product", "dense in blocks", "cuDNN",
               "cuBLAS loop", "cuSPARSE loop", "cuDNN / ours, float16", "a step, float32")  # fmt: skip


@part
def rnn_peers() -> str:
    def first(key: Sequence[str]) -> str:
        cell, *numbers, density = key
        return f"{cell}, {' x '.join(numbers)}, {float(density):.3g}"

    rows = recurrent_rows(RNN, first=first)
    return f"{_where(RNN)()}\n\n{table(['cell, hidden x batch x steps, density', *RNN_COLUMNS], rows)}"


@part
def zhu_pool_table1() -> str:
    columns = ("speed_up", "paper_speed_up", "expected_penalty", "measured_penalty", "paper_penalty")
    rows = [
        [row["configuration"], us(float(row["microseconds"])), *(row[name] or "-" for name in columns)]
        for row in results(ZHU_TABLE1).rows
    ]
    head = ["configuration", "microseconds", "over the dense loop", "paper's", "bank conflicts, expected", "measured",
            "paper's"]  # fmt: skip
    return f"{_where(ZHU_TABLE1)()}\n\n{table(head, rows)}"


@part
def zhu_pool_figures() -> str:
    def first(key: Sequence[str]) -> str:
        figure, _, hidden, batch, steps, density = key
        return f"{figure}: {hidden} x {batch} x {steps}, {float(density):.3g}"

    rows = recurrent_rows(ZHU_FIGURES, "figure", first=first)
    head = ["figure: hidden x batch x steps, density", *RNN_COLUMNS]
    return f"{_where(ZHU_FIGURES)()}\n\n{table(head, rows)}"


@part
def zhu_pool_tables23() -> str:
    def first(key: Sequence[str]) -> str:
        table_, cell, hidden, batch, _, density = key
        return f"{table_}: {cell}, {hidden} at {float(density):.3g}, batch {batch}"

    rows = recurrent_rows(ZHU_TABLES, "table", first=first)
    return f"{_where(ZHU_TABLES)()}\n\n{table(['table: layer', *RNN_COLUMNS], rows)}"


@part
def softmax_peers() -> str:
    cases = results("peers-softmax-h200").by_problem()
    found = {(p.axes["batch"], p.axes["vocab"]): times for p, times in cases.items()}
    names = (NAME, "torch softmax", "torch.compile softmax")
    rows = [
        [f"{batch} x {vocab}", *(us(found[batch, vocab].get(name)) for name in names)]
        for batch, vocab in shapes_of(cases)
    ]
    return table(["softmax", "tvm_sparse", "PyTorch", "torch.compile"], rows)


@part
def softmax_ratios() -> str:
    found = headlines()[1]
    return (
        f"The faster of `torch.softmax`, eager and compiled, takes {times_as(min(found.ratios))} to"
        f" {times_as(max(found.ratios))} times as long, {times_as(found.mean)} in the geometric mean."
    )


@part
def softmax_sample_peers() -> str:
    names = (NAME, "torch topk, cumsum, multinomial", "torch sort, cumsum, multinomial")
    rows = []
    for problem, times in results(SAMPLED).by_problem().items():
        axes = problem.axes
        kept = "all words" if axes["whole"] else f"top {axes['k']}"
        cells = [us(times.get(name)) for name in names]
        rows.append([f"{axes['batch']} x {axes['vocab']}", kept, *cells, times_as(best(times, "torch") / times[NAME])])
    head = ["softmax_sample", "of", "tvm_sparse", "PyTorch's topk", "PyTorch's sort", "PyTorch / ours"]
    return table(head, rows)


# ------------------------------------------------------------------------------------------------- many devices

# A projection is made of parts of what has been measured on most devices' kind: GPUs where there are such results.
SCALING = ("tuning-scaling-h200", "tuning-scaling-x86-64-v4")
PROJECTED = (1, 8, 100)


def scaling_results() -> list[str]:
    return [name for name in SCALING if (RESULTS / f"{name}.csv").exists()]


@part
def tuning_scaling() -> str:
    parts = []
    for name in scaling_results():
        found = results(name)
        rows = []
        for row in found.rows:
            seconds, count = float(row["seconds"]), int(row["devices"])
            busy = float(row["device_seconds"]) / seconds / count
            rows.append(
                [
                    row["devices"],
                    row["builders"],
                    f"{int(row['trials']):,}",
                    f"{seconds:.1f}",
                    times_as(float(found.rows[0]["seconds"]) / seconds),
                    percent(busy),
                ]
            )
        facts = found.facts
        where = (
            f"{facts['device']}, {facts['cores']} cores, load average {facts['load']} at the end, {facts['date'][:10]}"
        )
        head = ("devices", "builders", "trials", "seconds", "times as fast", "busy")
        parts.append(f"{where}:\n\n{table(head, rows)}" + (f"\n\n{facts['runs']}" if "runs" in facts else ""))
    return "\n\n".join(parts)


@part
def tuning_projection() -> str:
    found = results(scaling_results()[0])
    one, last = found.rows[0], found.rows[-1]
    trials = int(last["trials"])
    driver, search, build = (float(last[f"{what}_seconds"]) / trials for what in ("driver", "search", "build"))
    rate = int(one["trials"]) / float(one["seconds"])
    rows = [
        [
            str(count),
            f"{rate * count:,.1f}",
            f"{rate * count * build:,.1f}",
            f"{rate * count * search:,.1f}",
            percent(rate * count * driver),
        ]
        for count in PROJECTED
    ]
    head = ("devices", "trials/s", "cores that build", "cores that search", "of the driver's core")
    full = f"The driver's core is full at about {1 / (rate * driver):,.0f} devices of {found.facts['device']}."
    return f"{table(head, rows)}\n\n{full}"


@part
def call_costs() -> str:
    found = results("host-time-h200")
    shown = ("raw", "allocations", "ours", "torch", "custom", "idle")
    ratios = ("ours / (raw + allocations)", "ours / torch", "custom / ours")
    rows = [
        [code(row["problem"].split()[0]), *(us(float(row[name])) for name in shown), *(row[name] for name in ratios)]
        for row in found.rows
    ]
    return f"{provenance('host-time-h200')}:\n\n{table(('call', *shown, *ratios), rows)}"


@part
def first_calls() -> str:
    """Of calls whose kernel was compiled, and of those whose kernel was built ahead."""
    sentences = []
    for name, what in (
        ("first-call-compiled-h200", "at shapes that nobody had tuned, in a process with PyTorch imported"),
        ("first-call-prebuilt-h200", "whose kernels a wheel brought"),
    ):
        rows = results(name).rows
        seconds = [float(row["first result ms"].split()[0]) / 1e3 for row in rows]
        calls = listed([code(row["problem"].split()[0]) for row in rows])
        sentences.append(f"First results of {calls} {what}: {span(seconds, 2)} seconds ({provenance(name)}).")
    return textwrap.fill(" ".join(sentences), WIDTH, break_long_words=False, break_on_hyphens=False)


@part
def gu_tables() -> str:
    cases = results("gu-tables-h200").by("m", "k", "n", "block", "sparsity")
    shapes = list(dict.fromkeys(key[:3] for key in cases))
    blocks = list(dict.fromkeys(key[3] for key in cases))
    rows = []
    for shape in shapes:
        at = {block: cases[*shape, block, "0.85"] for block in blocks}
        dense = min(best(times, "cuBLAS") for times in at.values())
        some = at["16"]
        others = (some["torch BSR @ dense"], some["cuSPARSE CSR @ dense"])
        rows.append([f"({', '.join(shape)})", *(us(at[block][NAME]) for block in blocks), *map(us, (*others, dense))])
    head = [*(f"block {block}" for block in blocks), "PyTorch BSR, 16", "cuSPARSE, 16", "best cuBLAS"]
    return table(["(m, k, n)", *head], rows)


@part
def gu_ratios() -> str:
    sparse, dense = headlines()[2], headlines()[3]
    return (
        f"Over all {len(sparse.ratios)} cases of the paper (blocks of 8, 16 and 32, sparsities of 0.8, 0.85 and 0.95)"
        f" the best other sparse product takes {times_as(sparse.mean)} times as long in the geometric mean and at least"
        f" {times_as(min(sparse.ratios))} times, the best dense one of float32, TF32 and float16"
        f" {times_as(dense.mean)} times and at least {times_as(min(dense.ratios))}."
    )


@part
def bsr_float16() -> str:
    cases = results("peers-float16-h200").by_problem()
    rows: dict[tuple[Any, ...], dict[float, Times]] = {}
    for problem, times in cases.items():
        axes = problem.axes
        rows.setdefault((axes["m"], axes["k"], axes["n"], axes["block"]), {})[axes["sparsity"]] = times
    sparsities = sorted({s for found in rows.values() for s in found if s != 0.9})
    lines = []
    for (m, k, n, block), found in sorted(rows.items(), key=lambda item: (item[0][0], item[0][3])):
        cells = [us(found[s][NAME]) for s in sparsities] + [
            us(found[s]["torch bsr_dense_mm (Triton)"]) for s in sparsities
        ]
        dense = min(times["torch dense linear"] for times in found.values())
        lines.append([f"({m}, {k}, {n}), {block}", *cells, us(dense)])
    head = [f"{s}" for s in sparsities] + [f"Triton, {s}" for s in sparsities]
    return table(["(m, k, n), block", *head, "dense cuBLAS"], lines)


@part
def bsr_rotated() -> str:
    found = results("peers-rotated-h200")
    rows = []
    for problem, times in found.by_problem().items():
        ours = next(r for r in found.rows if r["problem"] == problem.key and r["implementation"] == NAME)
        axes, dense = problem.axes, times["torch dense linear"]
        share = percent(float(ours["share_of_limit"]))
        rows.append(
            [f"({axes['m']}, {axes['k']}, {axes['n']}), {axes['block']}", us(times[NAME]), share, us(dense)]
            + [f"{dense / times[NAME]:.1f}"]
        )
    return table(["(m, k, n), block", "microseconds", "of the limit", "dense cuBLAS", "dense over ours"], rows)


@part
def bsr_skewed() -> str:
    ratios = [float(r["over_first"]) for r in results("structures-bsr_matmul-h200").rows if r["inputs"] == "skewed"]
    return (
        f"A weight whose blocks crowd in a few block rows (Zipf) takes {span(ratios)} times what an even one takes,"
        f" over {len(ratios)} shapes."
    )


@part
def launch_floor() -> str:
    rows = []
    for row in results("launch-floor-h200").rows:
        size = f"{int(row['weight_bytes']) / 1e6:.1f} MB" if int(row["weight_bytes"]) else "-"
        share = percent(float(row["of_limit"])) if row["inputs"] == "rotated" else "-"
        rows.append([row["blocks"], row["threads"], size, row["weight"], row["x"], row["inputs"]]
                    + [f"{float(row['microseconds']):.2f}", share])  # fmt: skip
    return table(
        ["thread blocks", "threads", "weight", "weight read", "x", "inputs", "microseconds", "of the limit"], rows
    )


@part
def nhot_table1() -> str:
    cases = results("argueta-chiang-table1-h200").by("values", "nonzeros")
    counts = sorted({int(nonzeros) for _, nonzeros in cases})
    wanted = (("tvm_sparse", NAME), ("torch embedding_bag", "torch embedding_bag"), ("cuSPARSE", "torch CSR @ dense"))
    rows = [[shown, *(us(cases["stored", str(n)].get(name)) for n in counts)] for shown, name in wanted]
    return table(["nonzeros a row", *map(str, counts)], rows)


@part
def nhot_ratios() -> str:
    full, half = (results(f"argueta-chiang-table1{d}-h200").by("values", "nonzeros") for d in ("", "-float16"))
    most = str(max(int(nonzeros) for _, nonzeros in full))
    one = full["ones", "1"]
    return (
        f"One-hot rows without values take {us(one[NAME])}, `F.embedding` {us(one['torch embedding'])}. At {most}"
        f" nonzeros a float16 table takes {us(half['stored', most][NAME])} with values and"
        f" {us(half['ones', most][NAME])} without, a float32 one {us(full['stored', most][NAME])} and"
        f" {us(full['ones', most][NAME])}."
    )


@part
def host_time() -> str:
    spent = [float(r["host_microseconds"]) for r in results("peers-h200").rows if r["host_microseconds"]]
    return (
        f"A call of `softmax_topk` from Python, which allocates two outputs, costs the host {min(spent):.0f} to"
        f" {max(spent):.0f} microseconds in these runs, {statistics.median(spent):.0f} in the median; hosts differ by a"
        " factor of two."
    )


@part
def fault_tables() -> str:
    """What `scripts/faults.py` has injected, a table for each machine that it has run on."""
    tables = []
    for path in sorted(RESULTS.glob("faults-*.csv")):
        found = results(path.stem)
        head = ("what goes wrong", "injected", "lost trials", "wrong records", "silent wrong results", "")
        columns = ("injected", "lost_trials", "wrong_records", "silent_wrong_results", "note")
        rows = [[row["kind"], *(row[column] for column in columns)] for row in found.rows]
        total = sum(int(row["injected"]) for row in found.rows)
        tables.append(
            f"{found.facts['device']}, {found.facts['date'][:10]}: {total:,} injected.\n\n{table(head, rows)}"
        )
    return "\n\n".join(tables)


@part
def sanitizer_table() -> str:
    """What `scripts/sanitize.py` has found, a line for each run."""
    [path] = RESULTS.glob("sanitize-*.csv")
    found = results(path.stem)
    columns = ("tool", "date", "passed", "failed", "skipped", "left", "errors", "seconds")
    every = max((row["files"] for row in found.rows), key=len)  # what the script runs unless it is told which
    rows = [[row["tool"], _checked(row, every), *(row[column] for column in columns[1:])] for row in found.rows]
    return f"{found.facts['device']}:\n\n{table(('tool', 'tests', *columns[1:]), rows)}"


def _checked(row: dict[str, str], every: str) -> str:
    """Of which tests a run of the sanitizer was, where `every` are the files of all."""
    first = row["selection"].split()[0]
    if first != "not":
        return code(first)
    if row["files"] == every:
        return "all files"
    return listed([code(name.removesuffix(".py")) for name in row["files"].split()])


@part
def fuzz_table() -> str:
    """What `scripts/fuzz.py` has tried."""
    [path] = RESULTS.glob("fuzz-*.csv")
    found = results(path.stem)
    head = ("reader or function", "inputs", "taken", "refused", "inputs that showed more", "findings")
    columns = ("target", "cases", "taken", "refused", "kept", "findings")
    rows = [[row[c] if c != "kept" or row["how"] != "property-based" else "-" for c in columns] for row in found.rows]
    total = sum(int(row["cases"]) for row in found.rows)
    return f"{found.facts['device']}, {found.facts['date'][:10]}: {total:,} inputs.\n\n{table(head, rows)}"


def _where(*names: str) -> Callable[[], str]:
    """Where, when and how some files of results were measured."""

    def sentence() -> str:
        timing = {results(name).facts["timing"] for name in names}
        graphs = all(text.startswith("CUDA graphs") for text in timing)
        rotated = all("past the L2 cache" in text for text in timing)
        return (
            f"{provenance(*names)}; microseconds a call {'in CUDA graphs' if graphs else 'from Python'}, inputs"
            f" {'rotated past the L2 cache' if rotated else 'hot'}."
            # Of a file that was put together of several runs.
            + "".join(f" {results(name).facts['runs']}" for name in names if "runs" in results(name).facts)
        )

    return sentence


PARTS["where-peers"] = _where("peers-h200")
PARTS["where-softmax"] = _where("peers-softmax-h200")
PARTS["where-sample"] = _where(SAMPLED)
PARTS["where-gu"] = _where("gu-tables-h200")
PARTS["where-float16"] = _where("peers-float16-h200")
PARTS["where-rotated"] = _where("peers-rotated-h200")
PARTS["where-launch"] = _where("launch-floor-h200")
PARTS["where-nhot"] = _where("argueta-chiang-table1-h200", "argueta-chiang-table1-float16-h200")
PARTS["where-head"] = _where(HEAD)
PARTS["where-specvocab"] = _where(SPECVOCAB)
PARTS["where-table4"] = _where(TABLE4)
PARTS["where-milakov"] = _where("milakov-gimelshein-h200")
PARTS["where-milakov-cpu"] = _where("milakov-gimelshein-x86-64-v4")


# ------------------------------------------------------------------------------------------- operators and templates


def first_sentence(docstring: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())


def required(function: Callable[..., Any]) -> str:
    """A call with the arguments that have to be given."""
    given = inspect.signature(function).parameters.values()
    return f"{function.__name__}({', '.join(p.name for p in given if p.default is p.empty)})"


def builtin() -> tuple[registry.Operator, ...]:
    return registry.BUILTIN


# Operators that are steps of `LshHead`, which docs/ describes: README.md has no room for them.
STEPS_OF_LSH = ("lsh_topk", "wta_hash", "lsh_lookup", "compaction", "lsh_candidates", "candidate_logits")


def own_functions(operator: registry.Operator) -> list[Callable[..., Any]]:
    """The operator's public calls, without what prepares their arguments."""
    found = (getattr(operator.call, name) for name in operator.public)
    return [one for one in found if inspect.isfunction(one) and one.__module__ == operator.call.__name__]


@part
def operators() -> str:
    rows = []
    for operator in builtin():
        for function in () if operator.name in STEPS_OF_LSH else own_functions(operator):
            page = f"[{code(required(function))}](docs/operators/{operator.name}.md)"
            rows.append([page, first_sentence(function.__doc__), operator.problem.source])
    return table(["function", "what it computes", "source"], rows)


@part
def operators_of_docs() -> str:
    rows = []
    for operator in builtin():
        pages = ", ".join(f"[{code(found.__name__)}]({operator.name}.md)" for found in own_functions(operator))
        sources = operator.problem.source
        machines = sorted({{"llvm": "CPU", "cuda": "CUDA"}[t.kind] for t in operator.templates})
        count = sum(not t.comparison for t in operator.templates)
        rows.append([pages, first_sentence(operator.problem.__doc__), sources, ", ".join(machines), str(count)])
    return table(["function", "what it computes", "source", "machines", "templates"], rows)


def tables_of(operator: registry.Operator, template: Template) -> list[Mapping[str, Sequence[int]]]:
    """The template's tables of decisions for the operator's own shapes that it fits."""
    keys = (*operator.shapes.QUICKSTART, *operator.shapes.REALISTIC, *operator.shapes.AWKWARD)
    problems = [registry.make(operator.name, operator.problem.example), *map(registry.parse, keys)]
    where = machine.Machine("cuda", "sm_90a", "sm_90a", cores=132)
    cpu = machine.Machine("llvm", "x86-64-v4", "x86-64-v4", cores=8)
    found: list[Mapping[str, Sequence[int]]] = []
    for problem in problems:
        try:
            found.append(template.space(problem, where if template.kind == "cuda" else cpu))
        except NotApplicable:
            continue
    return found


@functools.cache
def decisions_of(operator: registry.Operator, template: Template) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for found in tables_of(operator, template) for name in found))


def templates_part(operator: registry.Operator) -> str:
    rows = []
    for template in operator.templates:
        remarks = [{"llvm": "CPU", "cuda": "CUDA"}[template.kind]]
        if template in operator.fallbacks[template.kind]:
            remarks.append("fallback")
        if template.comparison:
            remarks.append("for comparison")
        chosen = ", ".join(map(code, decisions_of(operator, template)))
        rows.append([code(template.name), ", ".join(remarks), template.summary, chosen])
    return table(["template", "runs on", "how", "decisions"], rows)


def _shape(argument: Argument) -> str:
    return f"({', '.join(map(str, argument.shape))})" if argument.shape else "scalar"


def arguments_part(operator: registry.Operator) -> str:
    problem = operator.problem
    rows = []
    for kind, arguments in (("in", problem.inputs), ("out", problem.outputs)):
        for a in arguments:
            dtype = "the problem's" if a.dtype == "dtype" else a.dtype
            rows.append([code(a.name), kind, _shape(a), dtype, a.doc + (f" Only where {a.when} is." if a.when else "")])
    return table(["argument", "", "shape", "dtype", "what"], rows)


def axes_part(operator: registry.Operator) -> str:
    problem, names = operator.problem, []
    for field in dataclasses.fields(problem):
        default = "" if field.default is dataclasses.MISSING else f"={field.default}"
        names.append(code(f"{field.name}{default}"))
    data = f" Kernels read {listed([code(a) for a in problem.data_axes])} when they run." if problem.data_axes else ""
    return (
        f"Axes: {', '.join(names)}. One library serves every {code(problem.batch_axis)}.{data} Structures of inputs:"
        f" {', '.join(map(code, problem.structures))}; tuned and timed is {code(problem.tuned)}."
    )


for _operator in builtin():
    PARTS[f"templates-{_operator.name}"] = functools.partial(templates_part, _operator)
    PARTS[f"arguments-{_operator.name}"] = functools.partial(arguments_part, _operator)
    PARTS[f"axes-{_operator.name}"] = functools.partial(axes_part, _operator)


@part
def decisions() -> str:
    users: dict[str, list[str]] = {}
    for operator in builtin():
        for template in operator.templates:
            for name in decisions_of(operator, template):
                users.setdefault(name, []).append(template.name)
    rows = [[code(n), what, ", ".join(map(code, users.get(n, ["-"])))] for n, what in DECISIONS.items()]
    return table(["decision", "meaning", "templates"], rows)


@part
def phase_example() -> str:
    """One phase of the example's generated kernel."""
    registry.add_plugin(ROOT / "examples" / "row_norm")
    from row_norm.schedules.norm_block import join

    return f"```python\n{inspect.getsource(join)}```"


@part
def commands() -> str:
    from tvm_sparse.cli.app import app
    from tvm_sparse.cli.db import db

    rows = []
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        rows.append([code(f"tvm-sparse {name}"), first_sentence(command.callback.__doc__)])
    for command in db.registered_commands:
        assert command.callback is not None
        rows.append([code(f"tvm-sparse db {command.name}"), first_sentence(command.callback.__doc__)])
    return table(["command", "what it does"], rows)


# ----------------------------------------------------------------------------------------- what recorded trials tell

TRIALS_GPU = "sm_90a"


def _number(row: Row, name: str, digits: int = 2) -> str:
    """A figure, with its interval where it has one; empty where there is none."""
    if not row[name]:
        return ""
    text = f"{float(row[name]):.{digits}f}"
    low, high = row.get(f"{name}_low", ""), row.get(f"{name}_high", "")
    return f"{text} [{float(low):.{digits}f}, {float(high):.{digits}f}]" if low and high else text


@part
def trials_distribution() -> str:
    rows = [
        [code(r["operator"]), code(r["template"]), r["problems"], f"{int(r['trials']):,}", percent(float(r["failed"]))]
        + [r["wins"], _number(r, "best"), _number(r, "median"), percent(float(r["within_1.25"] or 0))]
        for r in results("trials-distribution").rows
        if r["arch"] == TRIALS_GPU
    ]
    head = ["operator", "template", "problems", "trials", "failed", "wins", "its best", "its median", "within 1.25x"]
    return table(head, rows)


@part
def trials_failures() -> str:
    rows = [
        [code(r["template"]), r["arch"], r["outcome"], r["reason"], r["trials"]]
        for r in results("trials-failures").rows
    ]
    return table(["template", "arch", "outcome", "reason", "trials"], rows)


@part
def trials_importance() -> str:
    """Of each template the decisions whose interval leaves 0 out, where the model explains something."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for name in ("trials-importance", "trials-spaces-importance"):
        for r in results(name).rows if (RESULTS / f"{name}.csv").exists() else ():
            kinds.setdefault((r["template"], r["arch"], "space" if "spaces" in name else "logs"), []).append(r)
    rows = []
    for (template, arch, data), found in kinds.items():
        explained = float(found[0]["explained"])
        matter = [r for r in found if r["importance_low"] and float(r["importance_low"]) > 0.01]
        if explained < 0.2:
            told, rest = "-", "-"
        else:
            told = ", ".join(f"{code(r['decision'])} {_number(r, 'importance')}" for r in matter)
            rest = ", ".join(code(r["decision"]) for r in found if r not in matter)
        rows.append([code(template), arch, data, found[0]["points"], f"{explained:.2f}", told, rest])
    head = ["template", "arch", "data", "points", "explained", "matter", "not told apart from nothing"]
    return table(head, rows)


@part
def trials_models() -> str:
    rows = [
        [
            code(r["operator"]),
            r["learnt"],
            r["problems"],
            r["model"],
            *(_number(r, n) for n in ("rank", "top1", "top5")),
        ]
        for r in results("trials-models").rows
        if r["arch"] == TRIALS_GPU and r["learnt"] in ("8", "16", "32")
    ]
    return table(["operator", "learnt", "problems", "model", "rank correlation", "top 1", "top 5"], rows)


@part
def trials_models_sentence() -> str:
    """Which model's favourite is fastest, after how many points, and where intervals tell it from MetaSchedule's."""
    rows = [r for r in results("trials-models").rows if r["arch"] == TRIALS_GPU and r["top5_low"]]
    said = []
    for learnt in ("8", "16", "32"):
        mine = [r for r in rows if r["learnt"] == learnt]
        models = list(dict.fromkeys(r["model"] for r in mine))
        means = {m: statistics.geometric_mean(float(r["top5"]) for r in mine if r["model"] == m) for m in models}
        ranked = sorted(means, key=lambda m: means[m])
        listed_models = ", ".join(f"{m} {means[m]:.3f}" for m in ranked)
        said.append(f"after {learnt} points {listed_models}")
    apart = [
        f"{r['model']} on {code(r['operator'])} after {r['learnt']}"
        for r in rows
        for base in rows
        if base["model"] == "metaschedule"
        and (base["operator"], base["learnt"]) == (r["operator"], r["learnt"])
        and float(r["top5_high"]) < float(base["top5_low"])
    ]
    verdict = f"Better than MetaSchedule's beyond both intervals: {', '.join(apart)}." if apart else (
        "No other model is better than MetaSchedule's by more than the intervals."
    )  # fmt: skip
    text = f"The best of the five favourites takes, over operators: {'; '.join(said)}. {verdict}"
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


@part
def trials_transfer() -> str:
    rows = [
        [code(r["operator"]), r["arch"], r["differs"], r["pairs"], percent(float(r["measured"])), _number(r, "loss"),
         f"{float(r['worst']):.2f}"]
        for r in results("trials-transfer").rows
        if r["loss"] and (r["arch"] == TRIALS_GPU or r["differs"] == "arch")
    ]  # fmt: skip
    return table(["operator", "of", "the two differ in", "pairs", "measured", "loss", "worst"], rows)


@part
def trials_budget() -> str:
    rows = []
    for name in ("trials-budget", "trials-spaces-budget"):
        for r in results(name).rows if (RESULTS / f"{name}.csv").exists() else ():
            data = "space" if "spaces" in name else "logs"
            cells = [code(r["operator"]), r["arch"], data, r["problems"], r["points"], percent(float(r["good"]))]
            rows.append([*cells, r["random"], r["recorded"], r["recorded_90"]])
    head = ["operator", "arch", "data", "problems", "points", "within 5 %", "random draws", "as recorded", "90 %"]
    return table(head, rows)


# ---------------------------------------------------------------------------------------------------------- charts

INK, PALE, BAR, OURS = "#24292f", "#d0d7de", "#8250df", "#6e7781"
FONT = "font-family='Helvetica, Arial, sans-serif'"


def headline_chart() -> str:
    """Bars of geometric means on a logarithmic axis, with the range over shapes as a line."""
    left, top, row, width = 330, 58, 34, 470
    height = top + row * len(headlines()) + 34
    # Powers of two that hold every range.
    least = 2.0 ** math.floor(math.log2(min(min(h.ratios) for h in headlines())))
    most = 2.0 ** math.ceil(math.log2(max(max(h.ratios) for h in headlines())))

    def x(ratio: float) -> float:
        return left + width * math.log2(ratio / least) / math.log2(most / least)

    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {left + width + 70} {height}' {FONT} font-size='13'>",
        f"<rect width='{left + width + 70}' height='{height}' rx='8' fill='white'/>",
        f"<text x='20' y='28' font-size='15' font-weight='bold' fill='{INK}'>"
        "How many times as long the fastest other library takes</text>",
    ]
    tick = least
    while tick <= most:
        at = x(tick)
        stroke, wide = (OURS, 1.5) if tick == 1 else (PALE, 1)
        lines.append(
            f"<line x1='{at:.1f}' y1='{top - 12}' x2='{at:.1f}' y2='{height - 30}' stroke='{stroke}'"
            f" stroke-width='{wide}'/>"
        )
        label = "1 (tvm_sparse)" if tick == 1 else f"{tick:g}"
        lines.append(
            f"<text x='{at:.1f}' y='{height - 12}' text-anchor='middle' fill='{INK}' font-size='11'>{label}</text>"
        )
        tick *= 2
    for number, found in enumerate(headlines()):
        y = top + row * number
        lines += [
            f"<text x='{left - 12}' y='{y + 7}' text-anchor='end' fill='{INK}'>{escape(found.what)}</text>",
            f"<text x='{left - 12}' y='{y + 20}' text-anchor='end' fill='{OURS}' font-size='10.5'>"
            f"{escape(found.against)}</text>",
            f"<rect x='{x(1):.1f}' y='{y}' width='{x(found.mean) - x(1):.1f}' height='16' rx='2' fill='{BAR}'/>",
            f"<line x1='{x(min(found.ratios)):.1f}' y1='{y + 8}' x2='{x(max(found.ratios)):.1f}' y2='{y + 8}'"
            f" stroke='{INK}' stroke-width='1.5'/>",
            f"<text x='{x(max(found.ratios)) + 6:.1f}' y='{y + 12}' fill='{INK}' font-weight='bold'>"
            f"{times_as(found.mean)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])


STAGES = (
    ("Problem", "axes, reference,", "inputs, check"),
    ("definition", "TE or TIR,", "no threads"),
    ("template", "a space of", "decisions"),
    ("candidate", "one point", "of the space"),
    ("trial", "checked,", "then timed"),
    ("record", "the best,", "kept"),
    ("library", ".so and", "manifest"),
    ("call", "zero copy,", "current stream"),
)


def flow_chart() -> str:
    """The one-way flow: what each stage is, and which part of the package makes it."""
    wide, gap, high, top = 108, 22, 62, 48
    total = len(STAGES) * (wide + gap) - gap + 40
    rooms = (
        (0, 2, "operators/", "what is computed"),
        (2, 4, "schedules/", "how it is mapped to machines"),
        (4, 6, "tuning/, records/", "search, measure, keep"),
        (6, 8, "shipping/, runtime/", "no compiler in a call"),
    )
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {total} 164' {FONT} font-size='13'>",
        f"<rect width='{total}' height='164' rx='8' fill='white'/>",
        f"<defs><marker id='head' markerWidth='8' markerHeight='8' refX='6' refY='3' orient='auto'>"
        f"<path d='M0,0 L6,3 L0,6 z' fill='{INK}'/></marker></defs>",
    ]
    for number, (name, *about) in enumerate(STAGES):
        x = 20 + number * (wide + gap)
        lines.append(
            f"<rect x='{x}' y='{top}' width='{wide}' height='{high}' rx='6' fill='#f6f8fa' stroke='{BAR}'"
            " stroke-width='1.5'/>"
        )
        middle = x + wide / 2
        lines.append(
            f"<text x='{middle:g}' y='{top + 20}' text-anchor='middle' font-weight='bold' fill='{INK}'>{name}</text>"
        )
        lines += [
            f"<text x='{middle:g}' y='{top + 37 + 14 * i}' text-anchor='middle' font-size='11.5' fill='{INK}'>"
            f"{escape(words)}</text>"
            for i, words in enumerate(about)
        ]
        if number:
            y = top + high / 2
            lines.append(
                f"<line x1='{x - gap}' y1='{y:g}' x2='{x - 3}' y2='{y:g}' stroke='{INK}' stroke-width='1.5'"
                " marker-end='url(#head)'/>"
            )
    for first, last, name, role in rooms:
        start, end = 20 + first * (wide + gap), 20 + last * (wide + gap) - gap
        middle, y = (start + end) / 2, top + high + 12
        lines += [
            f"<path d='M{start},{y} v6 H{end} v-6' fill='none' stroke='{OURS}'/>",
            f"<text x='{middle:g}' y='{y + 22}' text-anchor='middle' fill='{BAR}' font-weight='bold'>{name}</text>",
            f"<text x='{middle:g}' y='{y + 36}' text-anchor='middle' font-size='11.5' fill='{OURS}'>{role}</text>",
        ]
    lines.append(
        f"<text x='20' y='28' font-size='15' font-weight='bold' fill='{INK}'>One declaration, one direction: nothing on"
        " the right is imported by anything on the left</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


CHARTS = {"headline.svg": headline_chart, "flow.svg": flow_chart}


# -------------------------------------------------------------------------------------------------------- searches

SEARCHES, GAINS = "searches", "tuning-gain"
STARTS = {"cold": "defaults", "warm": "defaults and other problems' winners"}


@part
def recorded_spaces() -> str:
    rows = []
    for path in sorted((RESULTS / "spaces").glob("*.jsonl.xz")):
        space = read_space(path)
        outcomes = collections.Counter(trial.outcome for trial in space.trials)
        right = [trial.seconds for trial in space.trials if trial.outcome == "ok"]
        best = min(map(min if space.arch.startswith("x86") else statistics.median, right))
        spread = statistics.median(max(times) / min(times) - 1 for times in right)
        failed = ", ".join(f"{n} {what}" for what, n in outcomes.most_common() if what != "ok") or "none"
        cells = [path.name.removesuffix(".jsonl.xz"), code(registry.parse(space.problem).typed)]
        cells += [f"{len(space.trials):,}{'' if space.complete else f' of {space.points:,}'}", failed]
        rows.append([*cells, us(best * 1e6), f"{len(right[0])}", f"{100 * spread:.1f} %"])
    head = ["space", "problem", "points", "not right", "best, us", "rounds", "between rounds"]
    return table(head, rows)


def _search_rows(start: str, space: str | None = None) -> list[Row]:
    return [r for r in results(SEARCHES).rows if r["start"] == start and space in (None, r["space"])]


def _searches_of(start: str) -> str:
    rows = []
    for r in _search_rows(start):
        excess = [f"{100 * float(r[f'excess_{n}']):.1f} %" if r[f"excess_{n}"] else "" for n in (16, 32, 64)]
        over = f"{float(r['over_reference']):.3f} [{float(r['low']):.3f}, {float(r['high']):.3f}]" if r["p"] else ""
        half = f"{float(r['half']):.3f} [{float(r['half_low']):.3f}, {float(r['half_high']):.3f}]" if r["p"] else ""
        near = f"{r['trials_to_5'] or '-'} ({100 * float(r['reached']):.0f} %)" if r["reached"] else ""
        rows.append([r["space"], r["strategy"], *excess, near, over, half, r["own_seconds"]])
    head = ["space", "strategy", "16 trials", "32", "64", "to 5 %", "over evolutionary", "with half", "s"]
    return table(head, rows)


@part
def searches_cold() -> str:
    return _searches_of("cold")


@part
def searches_warm() -> str:
    return _searches_of("warm")


@part
def searches_findings() -> str:
    """What the rows of all spaces together say, in words."""
    blocks, each = [], list[str]()
    for start, after in STARTS.items():
        rows = {r["strategy"]: r for r in _search_rows(start, "all")}
        if not rows:
            continue
        spaces_ = len({r["space"] for r in _search_rows(start)} - {"all"})
        said = [f"**Started from {after}** ({spaces_} spaces, {rows['random']['searches']} seeds each)."]
        blind = rows["random"]
        value, low, high = (1 / float(blind[name]) for name in ("over_reference", "high", "low"))
        told = not low <= 1 <= high and float(blind["p"]) < 0.05
        verdict = ("a gain" if high < 1 else "a loss") if told else "no difference that can be told"
        said.append(
            f"After 64 trials what the evolutionary search with XGBoost has found takes {value:.3f} times"
            f" [{low:.3f}, {high:.3f}] as long as what random search has found (p = {blind['p']}): {verdict}."
        )
        better = [r for r in rows.values() if r["p"] and float(r["high"]) < 1]
        each = [f"{code(r['strategy'])} takes {float(r['over_reference']):.3f} times as long" for r in better]
        said.append(f"Better than it with its whole interval: {listed(each) if each else 'none'}.")
        halves = [r for r in rows.values() if r["p"] and r["strategy"] != "evolutionary"]
        enough = [r["strategy"] for r in halves if float(r["half_high"]) <= 1.02]
        point = [r["strategy"] for r in halves if float(r["half"]) <= 1.02 and r["strategy"] not in enough]
        said.append(
            "With half of the trials, 32, these come within 2 % of what the evolutionary search finds with 64: "
            + (f"{listed(list(map(code, enough)))}, the whole interval" if enough else "none with its whole interval")
            + (f"; {listed(list(map(code, point)))} by the mean alone" if point else "")
            + "."
        )
        apart = [r for r in _search_rows(start) if r["p"] and r["space"] != "all"]
        names = list(dict.fromkeys(r["strategy"] for r in apart))
        within = {n: sum(float(r["half"]) <= 1.02 for r in apart if r["strategy"] == n) for n in names}
        said.append(
            f"Space by space, of {spaces_}, by the mean: "
            + ", ".join(f"{code(name)} on {count}" for name, count in within.items())
            + "."
        )
        blocks.append(" ".join(said))
    # What the loop leaves is of the start that `tune` has.
    verdict = f"there {listed(each)}" if each else "nothing is better there"
    blocks.append(
        f"`tune` starts in the second way. It takes {code(DEFAULT)} unless `--strategy` names another: {verdict}."
    )
    return "\n\n".join(blocks)


@part
def tuning_gain() -> str:
    over = {"fallback": "over the fallback", "defaults": "over the best default", "predicted": "over the prediction",
            "peers": "over peers"}  # fmt: skip
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in results(GAINS).rows:
        found.setdefault((row["operator"], row["arch"]), {})[row["over"]] = row
    rows = []
    for (operator, arch), by in found.items():
        cells = [code(operator), arch]
        for name in over:
            r = by.get(name)
            ends = (
                f" [{float(r['low']):.2f}, {float(r['high']):.2f}]" if r and r["low"] and r["problems"] != "1" else ""
            )
            cells.append(f"{float(r['gain']):.2f}{ends} ({r['problems']})" if r else "")
        trials = by.get("trials")
        rows.append([*cells, f"{trials['gain']}, {trials['high']} ({trials['problems']})" if trials else ""])
    return table(["operator", "arch", *over.values(), "trials to 95 %"], rows)


HALVES = "half-the-trials"


@part
def halves_recorded() -> str:
    rows = [
        [r["operator"] if r["operator"] == "all" else code(r["operator"]), r["least"], r["way"], r["problems"],
         r["trials"], f"{float(r['loss']):.3f}" + (f" [{r['low']}, {r['high']}]" if r["low"] else ""), r["worst"],
         percent(float(r["close"])), percent(float(r["measured"]))]
        for r in results(f"{HALVES}-{TRIALS_GPU}").rows
    ]  # fmt: skip
    head = ["operator", "trials, at least", "way", "problems", "trials", "loss", "worst", "within 2 %", "measured"]
    return table(head, rows)


@part
def halves_measured() -> str:
    found = results(f"{HALVES}-h200") if (RESULTS / f"{HALVES}-h200.csv").exists() else None
    if found is None:
        return "No GPU has tuned these anew yet: `python scripts/half_the_trials.py --measure`."
    rows = [
        [code(r["problem"]), r["shipped_trials"], r["trials"], r["shipped_us"], r["found_us"], r["fallback_us"],
         f"{float(r['ratio']):.3f}"]
        for r in found.rows
    ]  # fmt: skip
    head = ["problem", "trials shipped", "trials", "shipped, us", "found, us", "fallback, us", "found / shipped"]
    return f"{provenance(f'{HALVES}-h200')}: {found.facts['ratio']}.\n\n" + table(head, rows)


# ----------------------------------------------------------------------------------------------------------- files


def filled(text: str, where: Path) -> str:
    """`text` with its generated parts as they are now, each a block of Markdown of its own."""

    def fill(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in PARTS:
            near = difflib.get_close_matches(name, PARTS, n=3)
            raise SystemExit(f"{where}: no generated part {name!r}; nearest: {', '.join(near) or ', '.join(PARTS)}")
        content = PARTS[name]()
        if not content.startswith(("|", "```")):
            content = "\n\n".join(
                block
                if block.startswith("|")
                else textwrap.fill(block, WIDTH, break_long_words=False, break_on_hyphens=False)
                for block in content.split("\n\n")
            )
        return f"{begin}\n\n{content}\n\n{end}"

    return PART.sub(fill, text)


def generated() -> dict[Path, str]:
    """Every file that has generated parts, as it should be."""
    wanted = {IMAGES / name: chart() for name, chart in CHARTS.items()}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        wanted[path] = filled(path.read_text(), path.relative_to(ROOT))
    return wanted


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if anything changed.")] = False,
) -> None:
    changed = []
    for path, text in generated().items():
        if not path.exists() or path.read_text() != text:
            changed.append(str(path.relative_to(ROOT)))
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    if changed:
        print(f"{'not as generated' if check else 'written'}: {', '.join(changed)}")
    if check and changed:
        sys.exit("run: python scripts/figures.py")


if __name__ == "__main__":
    typer.run(main)
