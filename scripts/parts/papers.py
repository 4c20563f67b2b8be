"""The claims of the five papers with the measurements here, and the short tables of the page on papers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from tvm_sparse.bench.compare import NAME

from .output_layer import CHAIN, EXACT_HEAD, LSH_HEAD, OF_HEAD, QUALITY, TABLE1, TABLE4, TABLE8, TORCH_HEAD, heads
from .recurrent import LAYER, LAYER_PRODUCT, MODULE, ZHU_FIGURES, ZHU_TABLE1, ZHU_TABLES
from .register import part
from .results import Times, best, results, where
from .text import percent, span, table, times_as, us
from .translation import DECODE, PRUNE, TORCH, chosen_lsh, losing, lost_at_a_tenth, over, over_exact

SOFTMAX, SOFTMAX_CPU, LOOKUPS, TOP_N, TILES = (
    "milakov-gimelshein-h200", "milakov-gimelshein-x86-64-v4", "argueta-chiang-table1-h200",
    "argueta-chiang-table2-h200", "gu-tables-h200",
)  # fmt: skip
PACKED, ONLINE = "packed insertion", "online insertion"
UNFUSED, SAFE_FUSED, ONLINE_FUSED = "safe, then top-k", "safe, fused", "online, fused"
CSR, CSR_VENDOR = "torch CSR @ dense", "cuSPARSE CSR @ dense"
LOOP, SPARSE_LOOP, DENSE_BLOCKS = "dense step loop", "sparse step loop", "layer of blocks"


def tenths(values: Iterable[float]) -> str:
    return span(values, 1)


def softmax_ratios(name: str, over: str, under: str, **having: str) -> dict[tuple[int, int, int], float]:
    """Ratio of the times of two algorithms by (vocab, k, batch), with k = 0 for a softmax alone."""
    return {
        (problem.axes["vocab"], problem.axes.get("k", 0), problem.axes["batch"]): times[over] / times[under]
        for problem, times in results(name).by_problem(**having).items()
        if over in times and under in times
    }


def milakov_claims() -> list[list[str]]:
    large = softmax_ratios(SOFTMAX, "safe", "online", figure="1")
    small = softmax_ratios(SOFTMAX, "safe", "online", figure="2")
    fused = {figure: softmax_ratios(SOFTMAX, UNFUSED, ONLINE_FUSED, figure=figure) for figure in ("3", "4", "5.2")}
    widest = max(fused["3"])
    fusion = softmax_ratios(SOFTMAX, UNFUSED, SAFE_FUSED, figure="3")[widest]
    online = softmax_ratios(SOFTMAX, SAFE_FUSED, ONLINE_FUSED, figure="3")[widest]
    by_k = [f"{fused['5.2'][key]:.2f}" for key in sorted(fused["5.2"])]
    cpu = softmax_ratios(SOFTMAX_CPU, "safe", "online")
    most = max(small)
    middle = [ratio for (vocab, *_), ratio in small.items() if 1000 <= vocab < most[0]]
    return [
        ["figure 1", "online softmax is 1.3 times as fast as safe: 4,000 rows of 4,000 columns and more",
         f"no: {span(ratio for (vocab, *_), ratio in large.items() if vocab >= 4000)}", SOFTMAX],
        ["figure 2", "1.15 times: 10 rows of 1,000 and more",
         f"no: {span(middle)}; yes at {most[0]:,}: {small[most]:.2f}", SOFTMAX],
        ["figure 3", "online softmax with top-k in one kernel is 1.5 to 5 times as fast as safe softmax, then top-k:"
         " 4,000 rows, k = 5; 2.5 by fusion, 2 by the online pass",
         f"partly: {tenths(fused['3'].values())}, from {fusion:.1f} by fusion and {online:.2f} by the online pass",
         SOFTMAX],
        ["figure 4", "1.5 to 2.5 times: 10 rows", f"partly: {tenths(fused['4'].values())}", SOFTMAX],
        ["section 5.2", "the gain falls with k: 5, 3.5, 2, 1.4 at k = 5, 10, 15, 30",
         f"yes: {', '.join(by_k)}", SOFTMAX],
        ["section 7", "CPUs may gain as much", f"no: {span(cpu.values())}", SOFTMAX_CPU],
    ]  # fmt: skip


def argueta_claims() -> list[list[str]]:
    lookups = {
        int(n): times for (kind, n), times in results(LOOKUPS).by("values", "nonzeros").items() if kind == "stored"
    }
    over = [lookups[n][CSR] / lookups[n][NAME] for n in (min(lookups), max(lookups))]
    at_ten = [times for problem, times in results(TOP_N).by_problem().items() if problem.axes["k"] == 10]
    plain = span(times[ONLINE] / times[PACKED] for times in at_ten)
    skip = span(times[ONLINE] / times[f"{PACKED}, skip"] for times in at_ten)
    return [
        ["table 1", "look-ups are 7.5 times as fast as cuSPARSE at one entry per row, 1.7 times at 100",
         f"yes: {over[0]:.1f} and {over[1]:.1f} (`nhot_lookup`)", LOOKUPS],
        ["table 2", "packed insertion is 50 to 55 times as fast as Milakov's kernel at N = 10",
         f"no: {plain}; {skip} where elements below the N-th best are skipped, which the paper does not do", TOP_N],
    ]  # fmt: skip


def gu_cases() -> dict[tuple[str, ...], Times]:
    """By (m, k, n, block, sparsity), the least time of each schedule over its timed points."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in results(TILES).rows:
        if row["microseconds"]:
            times = found.setdefault(tuple(row[name] for name in ("m", "k", "n", "block", "sparsity")), {})
            name, time = row["implementation"], float(row["microseconds"])
            times[name] = min(time, times.get(name, time))
    return dict(found)


def within_blocks(times: Times) -> float:
    return min(times["cross_thread"], times["warp_shuffle"])


def gu_claims() -> list[list[str]]:
    cases = gu_cases()
    largest = [times for key, times in cases.items() if key[:3] == ("8", "1024", "1024")]
    vendor = [times[CSR_VENDOR] / within_blocks(times) for times in cases.values()]
    return [
        ["table 1", "tiles per thread (PTP) take 1.9 to 7.9 times as long as elements per thread (PEP)",
         f"no: {span(times['per_tile'] / times['per_element'] for times in cases.values())}", TILES],
        ["table 1", "reductions over blocks (PROB) lose to PEP at (8, 1024, 1024)",
         f"no: {tenths(times['per_element'] / times['over_blocks'] for times in largest)} times as fast", TILES],
        ["table 2", "tuned reductions within blocks (PRWB) beat cuSPARSE in half of the cases",
         f"yes: in {sum(ratio > 1 for ratio in vendor)} of {len(vendor)}, {tenths(vendor)} times as fast"
         " (CSR; Gray's kernels were not measured)", TILES],
    ]  # fmt: skip


def quality_rows(series: str) -> list[Mapping[str, str]]:
    """Lines of one way to get candidates: frequent words alone (TOP), or LSH."""
    return [row for row in results(QUALITY).rows if row["implementation"].split(" ")[0] == series]


def fastest_at(series: str, goal: float) -> Mapping[str, str]:
    """The fastest line of a way to get candidates that reaches a recall of the 12 best words."""
    return min(
        (row for row in quality_rows(series) if float(row["recall_12"]) >= goal),
        key=lambda row: float(row["microseconds"]),
    )


def beams(over: str) -> dict[int, float]:
    """Time of another head over that of the LSH head, by beam."""
    return {int(beam): times[over] / times[LSH_HEAD] for (beam,), times in results(TABLE8).by("beam").items()}


def shi_claims() -> list[list[str]]:
    steps = {row["step"]: row for row in results(TABLE4).rows}
    naive = [float(steps[name]["naive_microseconds"]) / float(steps[name]["microseconds"])
             for name in ("look-up", "candidate list")]  # fmt: skip
    parts: dict[str, dict[str, float]] = {}
    for row in results(TABLE1).rows:
        parts.setdefault(row["part"], {})[row["output"]] = float(row["microseconds"])
    gains = [[parts[name][output] / parts[name][LSH_HEAD] for name in ("softmax and top-n", "step")]
             for output in (TORCH_HEAD, EXACT_HEAD)]  # fmt: skip
    top, hashed = (float(fastest_at(series, 0.99)["microseconds"]) for series in ("TOP", "LSH"))
    torch, exact = beams(TORCH_HEAD), beams(EXACT_HEAD)
    first, last = min(torch), max(torch)
    chosen = chosen_lsh()
    translated = "not measured"
    if chosen is not None:
        gain = times_as(over(chosen, TORCH))
        translated = f"no: {gain} with {losing(chosen)} lost, {over_exact(chosen):.2f} over our exact head"
    return [
        ["table 1", "LSH makes softmax and top-n 3.2 times as fast, the decoder's step 2.25",
         f"yes over PyTorch: {times_as(gains[0][0])} and {times_as(gains[0][1])}; over our exact head"
         f" {times_as(gains[1][0])} and {times_as(gains[1][1])}", TABLE1],
        ["table 4", "naive look-ups take 3.4 times as long, naive candidate lists 1.7",
         f"yes: {times_as(naive[0])} and {naive[1]:.1f}", TABLE4],
        ["figure 6", "LSH beats lists of frequent words (TOP) at equal speed",
         f"no on our model: 99 % of the 12 best words take TOP {us(top)} us, LSH {us(hashed)}", QUALITY],
        ["table 7", "twice as fast, 0.4 BLEU lost", translated, DECODE],
        ["table 8", f"the gain holds from beam {first} to {last}: 2.06 to 2.21",
         f"yes over the exact head: {exact[first]:.2f} to {exact[last]:.2f}; over PyTorch it falls from"
         f" {times_as(torch[first])} to {times_as(torch[last])}", TABLE8],
    ]  # fmt: skip


def sweeps() -> dict[tuple[str, ...], Times]:
    """Times in float32 by figure, hidden, batch, steps and density, as in the file."""
    found = results(ZHU_FIGURES).by("figure", "hidden", "batch", "steps", "density", "dtype")
    return {key[:-1]: times for key, times in found.items() if key[-1] == "float32" and LAYER in times}


def zhu_claims() -> list[list[str]]:
    steps = {row["configuration"]: row for row in results(ZHU_TABLE1).rows}
    gains = [float(steps[name]["speed_up"]) for name in ("naive", "Lamport exchange")]
    found = sweeps()

    def next_best(hidden: str) -> dict[float, float]:
        """Time of the fastest peer over ours, by density; cuDNN's includes the input product."""
        found: dict[float, float] = {}
        for key, times in sweeps().items():
            if key[1:4] == (hidden, "4", "256"):
                others = [times[name] / times[LAYER] for name in (LOOP, SPARSE_LOOP)]
                found[float(key[4])] = min(*others, times[MODULE] / times[LAYER_PRODUCT])
        return found

    def over(loop: str, figure: str, axis: int) -> dict[float, float]:
        """The loop's time over ours, by the value that the figure varies."""
        return {float(key[axis]): times[loop] / times[LAYER] for key, times in found.items() if key[0] == figure}

    density, batch, length = over(LOOP, "2a", 4), over(LOOP, "2c", 2), over(LOOP, "2d", 3)
    batch[4.0] = density[0.1]
    wide, sparse = over(LOOP, "3b", 4), over(SPARSE_LOOP, "3b", 4)
    size = over(LOOP, "2b", 1)
    layers = results(ZHU_TABLES).by("table", "hidden", "batch", "density", "dtype")
    translation = layers["2", "1024", "4", "0.125", "float32"]
    speech = layers["3", "1760", "1", "0.12", "float32"]
    constant = [min(times[LOOP], times[SPARSE_LOOP]) / times[LAYER] for key, times in found.items() if key[0] == "4"]
    shown = ", ".join(f"{batch[n]:.1f}" for n in sorted(batch))
    losses, pruned = lost_at_a_tenth().values(), "not measured"
    if losses:
        answer = "no" if min(losses) > 0.45 else "yes"
        pruned = f"{answer}: 1,024 units at 10 % lost {span(losses, 1)} after short training"
    return [
        ["table 1", "three optimisations together gain 2.15, bank conflicts fall from 1.3 to 0.3",
         f"yes: {gains[1] / gains[0]:.2f}, from {steps['naive']['measured_penalty']} to"
         f" {steps['Lamport exchange']['measured_penalty']}", ZHU_TABLE1],
        ["figure 2a", "7.3 times as fast as a dense product per step at a density of 10 %, 15.0 times at 1 %",
         f"yes: {density[0.1]:.1f} and {density[0.01]:.1f}", ZHU_FIGURES],
        ["figure 2b", "layers of up to 5,632 units at 10 % stay on the chip",
         f"yes: {tenths(size.values())} times as fast as a dense product per step", ZHU_FIGURES],
        ["figure 2c", "the gain holds at larger batches",
         f"no: {shown} times as fast at batches of {', '.join(str(int(n)) for n in sorted(batch))}", ZHU_FIGURES],
        ["figure 2d", "the number of steps does not matter", f"yes: {tenths(length.values())}", ZHU_FIGURES],
        ["figure 3a", "2,304 units at 1 to 30 %: some 5 times as fast as the next best",
         f"yes: {tenths(next_best('2304').values())}", ZHU_FIGURES],
        ["figure 3b", "5,760 units: 10.6 times at 1 %; at 5 % a sparse product per step is faster",
         f"yes: {wide[0.01]:.1f}; no: at 5 % ours is {sparse[0.05]:.1f} times as fast as it", ZHU_FIGURES],
        ["figure 4", "1.3 million weights in 2,304 to 11,520 units: persistent is the fastest",
         f"yes: {tenths(constant)} times as fast as the better loop", ZHU_FIGURES],
        ["table 2", "1,024 units at 12.5 %: 5.8 times as fast as dense in cuDNN",
         f"partly: {translation[MODULE] / translation[LAYER_PRODUCT]:.1f}", ZHU_TABLES],
        ["table 2", "at 12.5 % 0.3 BLEU are lost",
         pruned, PRUNE],
        ["table 3", "1,760 units at 12 %, batch 1: 1.5 times as fast as dense in cuDNN",
         f"yes: {speech[MODULE] / speech[LAYER_PRODUCT]:.1f}", ZHU_TABLES],
        ["section 7", "7,168 units at 2.6 % and 11,520 at 1 %: 1.9 times as fast as the next best",
         f"yes: {max(next_best('7168').values()):.1f} and {max(next_best('11520').values()):.1f}", ZHU_FIGURES],
    ]  # fmt: skip


CLAIMS: Mapping[str, Callable[[], list[list[str]]]] = {
    "Milakov": milakov_claims,
    "Argueta": argueta_claims,
    "Gu": gu_claims,
    "Shi": shi_claims,
    "Zhu": zhu_claims,
}


@part
def claims() -> str:
    """Each claim of the five papers with the figure measured here, and the file that contains it."""
    rows = [
        [f"{paper}, {place}", claim, answer, f"`{name}`"]
        for paper, lines in CLAIMS.items()
        for place, claim, answer, name in lines()
    ]
    return table(["paper", "claim", "here", "file"], rows)


@part
def argueta_chiang_table2_times() -> str:
    """Times by batch and N of the public function, the papers' kernels and PyTorch."""
    rows = []
    for problem, times in results(TOP_N).by_problem().items():
        if problem.axes["k"] in (10, 400):
            names = (NAME, PACKED, f"{PACKED}, skip", ONLINE)
            cells = [us(times.get(name)) for name in names]
            rows.append([str(problem.axes["batch"]), str(problem.axes["k"]), *cells, us(best(times, "torch"))])
    return table(["rows", "N", "tvm_sparse", "packed", "with skip", "Milakov's", "PyTorch"], rows)


@part
def gu_schedules() -> str:
    """Time of each of Gu's schedules over that of look-up's kernel."""
    cases = gu_cases().values()
    schedules = (
        ("per_element", "4.1"), ("per_tile", "4.2"), ("staged_x", "4.3"), ("over_blocks", "4.4.1"),
        ("cross_thread", "4.4.2"), ("warp_shuffle", "4.4.3"),
    )  # fmt: skip
    rows = []
    for name, section in schedules:
        ratios = [times[name] / times[NAME] for times in cases]
        mean = statistics.geometric_mean(ratios)
        rows.append([f"`{name}`", section, f"{min(ratios):.2f}", f"{mean:.2f}", f"{max(ratios):.2f}"])
    return table(["schedule", "section", "least", "mean", "most"], rows)


@part
def lsh_quality_best() -> str:
    """The fastest setting of each way to get candidates that reaches a recall."""
    rows = []
    for goal in (0.8, 0.9, 0.95, 0.99, 0.999):
        cells = [f"{100 * goal:g} %"]
        for series in ("TOP", "LSH"):
            row = fastest_at(series, goal)
            cells += [us(float(row["microseconds"])), f"{100 * float(row['share']):.1f} %"]
        rows.append(cells)
    return table(["recall@12", "TOP", "of the words", "LSH", "of the words"], rows)


def chosen_heads() -> dict[tuple[str, ...], tuple[Times, float]]:
    """For each embedding, the lines of the largest batch up to 16 and of the largest of all."""
    found: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for key in heads():
        found.setdefault((*key[1:3], key[4]), []).append(key)
    chosen: dict[tuple[str, ...], tuple[Times, float]] = {}
    for keys in found.values():
        keys.sort(key=lambda key: int(key[0]))
        few = [key for key in keys if int(key[0]) <= 16]
        for key in dict.fromkeys([*few[-1:], keys[-1]]):
            chosen[key] = heads()[key]
    return chosen


@part
def head_summary() -> str:
    rows = []
    for key, (times, share) in chosen_heads().items():
        values = dict(zip(OF_HEAD, key, strict=True))
        ours = times["head_topk"]
        rows.append([values["batch"], f"{values['vocab']} x {values['hidden']}", values["dtype"], us(ours)]
                    + [us(times[name]) for name in ("product", CHAIN, TORCH_HEAD)]
                    + [f"{ours / times['product']:.2f}", percent(share)])  # fmt: skip
    head = ["batch", "words x hidden", "dtype", "`head_topk`", "product", "+ `softmax_topk`", "PyTorch"]
    return table([*head, "head / product", "of the limit"], rows)


SWEEPS = {
    "2a": ("1792 x 4 x 256", "density 1 to 30 %"), "2b": ("4 x 256, 10 %", "1,152 to 5,632 units"),
    "2c": ("1792 x 256 steps, 10 %", "batch 1 to 32"), "2d": ("1792 x 4, 10 %", "16 to 1,024 steps"),
    "3a": ("2304 x 4 x 256", "density 1 to 30 %"), "3b": ("5760 x 4 x 256", "density 1 to 10 %"),
    "4": ("4 x 256, 1.3 million weights", "2,304 to 11,520 units"),
}  # fmt: skip


def halves() -> dict[tuple[str, ...], Times]:
    found = results(ZHU_FIGURES).by("figure", "hidden", "batch", "steps", "density", "dtype")
    return {key[:-1]: times for key, times in found.items() if key[-1] == "float16"}


def gains(cases: Mapping[tuple[str, ...], Times], over: str, ours: str, keep: Callable[[Sequence[str]], bool]) -> str:
    """Range of the time of `over` over that of `ours`."""
    ratios = [t[over] / t[ours] for key, t in cases.items() if over in t and ours in t and keep(key)]
    return tenths(ratios) if ratios else "-"


@part
def zhu_pool_sweeps() -> str:
    rows = []
    for figure, (call, varied) in SWEEPS.items():

        def of_figure(key: Sequence[str], figure: str = figure) -> bool:
            return key[0] == figure

        rows.append([figure, call, varied, gains(sweeps(), LOOP, LAYER, of_figure)]
                    + [gains(sweeps(), SPARSE_LOOP, LAYER, of_figure)]
                    + [gains(some, MODULE, LAYER_PRODUCT, of_figure) for some in (sweeps(), halves())]
                    + [gains(halves(), DENSE_BLOCKS, LAYER, of_figure)])  # fmt: skip
    head = ["figure", "call", "varied", "cuBLAS loop", "cuSPARSE loop", "cuDNN", "cuDNN, float16"]
    return f"{where(ZHU_FIGURES)}\n\n{table([*head, 'dense in blocks, float16'], rows)}"


@part
def zhu_pool_layers() -> str:
    """Layers of tables 2 and 3, dense and pruned: the times of cuDNN and of dense blocks over ours."""
    found = results(ZHU_TABLES).by("table", "cell", "batch", "density", "dtype", "hidden")
    groups: dict[tuple[str, ...], dict[tuple[str, ...], Times]] = {}
    for key, times in found.items():
        number, cell, batch, density, dtype, hidden = key
        kind = "dense" if float(density) == 1 else "pruned"
        groups.setdefault((number, cell, batch, kind), {})[hidden, density, dtype] = times
    rows = []
    for key, cases in groups.items():

        def single(case: Sequence[str]) -> bool:
            return case[-1] == "float32"

        def half(case: Sequence[str]) -> bool:
            return case[-1] == "float16"

        rows.append([*key, *(gains(cases, MODULE, LAYER_PRODUCT, keep) for keep in (single, half))]
                    + [gains(cases, DENSE_BLOCKS, LAYER, half)])  # fmt: skip
    head = ["table", "cell", "batch", "weights", "cuDNN, float32", "cuDNN, float16", "dense in blocks, float16"]
    return f"{where(ZHU_TABLES)}\n\n{table(head, rows)}"
