"""`bsr_matmul` compared with the libraries of Gu and with dense products, and the least time of a launch."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from tvm_sparse.bench.compare import NAME
from tvm_sparse.core import spaces
from tvm_sparse.core.machine import resolve
from tvm_sparse.operators.bsr_matmul.dense import likely_way
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul
from tvm_sparse.operators.bsr_sddmm.problem import BsrSddmm
from tvm_sparse.runtime.dense import DENSE, KERNEL

from .headlines import headlines
from .register import PARTS, part
from .results import Times, best, results, where
from .text import percent, span, table, times_as, us

SM90 = resolve("sm_90a")
# A call counts as no slower than another product up to this ratio, and as ahead beyond it. Many rows of x.
EQUAL, MANY = 1.03, 512


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
def bsr_many_rows() -> str:
    cases: dict[BsrMatmul, dict[tuple[str, str], float]] = {}
    for row in results("block-products-h200").rows:
        m, k, n = (int(row[name]) for name in ("m", "k", "n"))
        problem = BsrMatmul(m, k, n, row["block"], float(row["sparsity"]), dtype="bfloat16")
        cases.setdefault(problem, {})[row["contender"], row["decisions"]] = float(row["us"])
    lines = []
    for problem, times in cases.items():
        chosen = spaces.fallback(problem, SM90)
        point = chosen.template, " ".join(f"{name}={value}" for name, value in chosen.decisions)
        taken = ("dense", "") if likely_way(problem, SM90).way == DENSE else point
        if taken not in times:  # that point was not timed: the fastest of the template
            taken = min((key for key in times if key[0] == taken[0]), key=lambda key: times[key])
        cells = []
        for name in ("block_warpgroups", "tensor_core", "dense"):
            found = times[taken] if name == taken[0] else min(t for (of, _), t in times.items() if of == name)
            cells.append(f"**{us(found)}**" if name == taken[0] else us(found))
        rate = times["dense", ""] * (1 - problem.sparsity) / times[taken]
        share = "-" if taken[0] == "dense" else percent(rate)
        shape = f"({problem.m}, {problem.k}, {problem.n}), {problem.block_shape[0]}"
        lines.append([shape, f"{problem.sparsity:g}", *cells, share])
    head = ["`block_warpgroups`", "`tensor_core`", "cuBLAS", "of cuBLAS's rate"]
    return table(["(m, k, n), block", "sparsity", *head], lines)


@part
def block_grid() -> str:
    """For each block and sparsity the time of a call over that of the fastest other product: the mean over rows of x,
    and the worst.
    """
    rows = results("block-grid-h200").rows
    ratios: dict[tuple[int, float], list[float]] = {}
    for row in rows:
        ratios.setdefault((int(row["block"]), float(row["sparsity"])), []).append(float(row["over_best"]))
    sparsities = sorted({sparsity for _, sparsity in ratios})
    lines = []
    for block in sorted({block for block, _ in ratios}):
        own = [ratios.get((block, sparsity), []) for sparsity in sparsities]
        cells = [f"{statistics.geometric_mean(one):.2f} ({max(one):.2f})" if one else "-" for one in own]
        many = [row for row in rows if int(row["block"]) == block and int(row["m"]) >= MANY]
        behind = max((float(row["sparsity"]) for row in many if float(row["over_best"]) * EQUAL > 1), default=0.0)
        lines.append([str(block), *cells, next((f"{s:g}" for s in sparsities if s > behind), "-")])
    return table(["block", *(f"{sparsity:g}" for sparsity in sparsities), "ahead from"], lines)


@part
def block_grid_worst() -> str:
    rows = results("block-grid-h200").rows
    slower = sorted((row for row in rows if float(row["over_best"]) > EQUAL), key=lambda row: -float(row["over_best"]))
    worst = ", ".join(
        f"{float(row['over_best']):.2f} (m = {row['m']}, blocks of {row['block']}, {row['sparsity']})"
        for row in slower[:5]
    )
    return (
        f"{len(rows) - len(slower)} of {len(rows)} calls take at most {EQUAL} times as long as the fastest other"
        f" product, {sum(row['way'] == DENSE for row in rows)} by the dense way."
        f" The others: {worst}."
    )


@part
def sampled_blocks() -> str:
    """The blocks' gradient by the default point of `sampled_warpgroups`, the best of its points, and dense products."""
    cases: dict[BsrSddmm, dict[str, float]] = {}
    for row in results("block-sampled-h200").rows:
        m, k, n = (int(row[name]) for name in ("m", "k", "n"))
        problem = BsrSddmm(m, k, n, row["block"], float(row["sparsity"]), dtype="bfloat16")
        times, us_, point = cases.setdefault(problem, {}), float(row["us"]), row["decisions"]
        times[row["contender"]] = min(us_, times.get(row["contender"], us_))
        decisions = dict(spaces.fallback(problem, SM90).decisions)
        if point == " ".join(f"{name}={value}" for name, value in decisions.items()):
            times["default"] = us_
    head = ("default", "sampled_warpgroups", "dense", "dense, then blocks")
    lines = [
        [f"({p.m}, {p.k}, {p.n}), {p.block_shape[0]}", f"{p.sparsity:g}", *(us(times[name]) for name in head)]
        for p, times in cases.items()
    ]
    names = ["default", "best of its points", "cuBLAS, all of it", "and its blocks taken"]
    return f"{where('block-sampled-h200')}\n\n{table(['(m, k, n), block', 'sparsity', *names], lines)}"


@part
def block_training() -> str:
    """A layer's step, forward and backward, beside that of a dense layer."""
    lines = [
        [f"({row['m']}, {row['k']}, {row['n']}), {row['block']}", row["sparsity"],
         *(row[name] for name in ("dense_graph_us", "graph_us", "graph_ratio", "dense_us", "us", "ratio"))]
        for row in results("block-training-h200").rows
    ]  # fmt: skip
    head = ["(m, k, n), block", "sparsity", "dense, in a graph", "sparse", "times faster", "dense, eager", "sparse",
            "times faster"]  # fmt: skip
    return table(head, lines)


@part
def entry_products() -> str:
    """Both ways of `csr_linear`, the one that calls take in bold."""
    rows = results("entry-products-h200").rows
    shapes = dict.fromkeys((row["k"], row["n"], row["sparsity"]) for row in rows)
    batches = sorted({int(row["m"]) for row in rows})
    cells = {}
    for row in rows:
        times = {way: us(float(row[way])) for way in (KERNEL, DENSE)}
        times[row["way"]] = f"**{times[row['way']]}**"
        cells[row["k"], row["n"], row["sparsity"], int(row["m"])] = " / ".join(times.values())
    lines = [[f"({k}, {n})", sparsity, *(cells[k, n, sparsity, m] for m in batches)] for k, n, sparsity in shapes]
    return table(["(k, n)", "sparsity", *(f"m = {m}" for m in batches)], lines)


@part
def pruned_transformer() -> str:
    """Losses and times of the example's runs at their end, and the time of a step in each phase."""
    found = results("pruned-transformer-h200")
    lines = []
    for run in dict.fromkeys(row["run"] for row in found.rows):
        own = [row for row in found.rows if row["run"] == run]
        last = own[-1]
        parameters = f"{int(last['parameters']) / 1e6:.0f} million"
        share = percent(float(last["density"]))
        lines.append([run, parameters, share, last["dev_bits"], last["ms_per_step"], f"{float(last['seconds']):.0f}"])
    head = ["run", "parameters at the end", "of the feed-forward blocks", "bits a byte", "ms a step at the end",
            "seconds in all"]  # fmt: skip
    return table(head, lines)


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


PARTS["where-gu"] = partial(where, "gu-tables-h200")
PARTS["where-float16"] = partial(where, "peers-float16-h200")
PARTS["where-rotated"] = partial(where, "peers-rotated-h200")
PARTS["where-blocks"] = partial(where, "block-products-h200")
PARTS["where-grid"] = partial(where, "block-grid-h200")
PARTS["where-training"] = partial(where, "block-training-h200")
PARTS["where-entries"] = partial(where, "entry-products-h200")
PARTS["where-launch"] = partial(where, "launch-floor-h200")
