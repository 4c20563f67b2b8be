"""`softmax_topk`, `softmax`, `softmax_sample`, and the figures of Milakov & Gimelshein."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from tvm_sparse.bench.compare import NAME
from tvm_sparse.core import machine, registry
from tvm_sparse.core.problem import Problem

from .headlines import headlines
from .register import PARTS, part
from .results import RESULTS, best, results, where
from .text import code, listed, percent, span, table, times_as, us

# Rows of a batch, and one row without a top_k.
SAMPLED = ("peers-sample-h200", "peers-sample-row-h200")


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
    """Bytes per second that one kernel reads on the measured card."""
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


READING = "rows-reading-h200"


@part
def rows_reading() -> str:
    """Shares of the card's limit that rows of logits reach."""
    if not (RESULTS / f"{READING}.csv").exists():
        return ""
    rows = []
    for row in results(READING).rows:
        problem = registry.parse(row["problem"])
        shape = f"{problem.axes['batch']} x {problem.axes['vocab']}"
        k = str(problem.axes.get("k", "-"))
        cells = [us(float(row["microseconds"])), percent(float(row["share_of_limit"]))]
        rows.append([code(problem.operator), shape, k, problem.axes["dtype"], *cells])
    return f"{where(READING)}\n\n{table(['operator', 'logits', 'k', 'dtype', 'us', 'share of the limit'], rows)}"


@part
def softmax_sample_peers() -> str:
    rows = []
    found = [case for name in SAMPLED for case in results(name).by("problem", "settings").items()]
    for (key, settings), times in sorted(found, key=lambda case: registry.parse(case[0][0]).axes["batch"]):
        problem = registry.parse(key)
        kept = settings.replace("=", " ") if problem.axes["whole"] else f"top {problem.axes['k']}"
        peers = {name: time for name, time in times.items() if name != NAME}
        fastest = min(peers, key=peers.__getitem__)
        ours = [us(times[NAME]), *(us(best(times, library)) for library in ("torch", "FlashInfer"))]
        shape = f"{problem.axes['batch']} x {problem.axes['vocab']}"
        rows.append([shape, kept, *ours, times_as(peers[fastest] / times[NAME])])
    head = ["softmax_sample", "of", "tvm_sparse", "PyTorch", "FlashInfer", "fastest peer / ours"]
    return table(head, rows)


PARTS["where-peers"] = partial(where, "peers-h200")
PARTS["where-softmax"] = partial(where, "peers-softmax-h200")
PARTS["where-sample"] = partial(where, *SAMPLED)
PARTS["where-milakov"] = partial(where, "milakov-gimelshein-h200")
PARTS["where-milakov-cpu"] = partial(where, "milakov-gimelshein-x86-64-v4")


@part
def batch_invariance() -> str:
    """Times of functions with one kernel for all batches, over those with the kernels of each batch."""
    rows = [
        [code(row["problem"].partition("/")[0]), row["batch"], us(float(row["microseconds"])),
         us(float(row["invariant_microseconds"])), row["ratio"]]
        for row in results("batch-invariance-h200").rows
    ]  # fmt: skip
    heads = ("function, 128,256 words of bfloat16", "rows", "by default", "one kernel for all batches", "ratio")
    return f"{where('batch-invariance-h200')}\n\n{table(heads, rows)}"
