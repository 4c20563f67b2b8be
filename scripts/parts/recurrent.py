"""Recurrent layers compared with cuDNN, and the tables of Zhu, Pool et al."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from .register import part
from .results import Times, exists, provenance, results, where
from .text import table, times_as, us

RNN, ZHU_TABLE1, ZHU_FIGURES, ZHU_TABLES = (
    "rnn-h200", "zhu-pool-table1-h200", "zhu-pool-figures-h200", "zhu-pool-tables23-h200"
)  # fmt: skip
# The second has the dense way, and replaces lines of the first.
RNN_TRAINING = ("rnn-training-h200", "rnn-training-dense-h200")
OF_CALL = ("cell", "hidden", "batch", "steps", "density")
LAYER, LAYER_PRODUCT, MODULE, DENSE_WAY = (
    "sparse layer", "sparse layer + input product", "torch module", "dense way"
)  # fmt: skip


def recurrent_rows(name: str, *more: str, first: Callable[[Sequence[str]], str]) -> Iterator[list[str]]:
    """A line for each call: `first` of its columns (`more` of them before those of a call), times, and ratios."""
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


def peers_table(file: str) -> str:
    """Layers beside cuDNN and loops of products, as `rnn_bench.py` has timed them."""

    def first(key: Sequence[str]) -> str:
        cell, *numbers, density = key
        return f"{cell}, {' x '.join(numbers)}, {float(density):.3g}"

    rows = recurrent_rows(file, first=first)
    return f"{where(file)}\n\n{table(['cell, hidden x batch x steps, density', *RNN_COLUMNS], rows)}"


@part
def rnn_peers() -> str:
    return peers_table(RNN)


@part
def rnn_training() -> str:
    """Forward alone, and forward and backward, with the input product; lines of a call in one dtype."""
    cases: dict[tuple[str, ...], dict[str, Times]] = {}
    for name in RNN_TRAINING:
        for (*key, passes), times in results(name).by(*OF_CALL, "dtype", "passes").items():
            cases.setdefault(tuple(key), {})[passes] = times
    rows = []
    for (cell, hidden, batch, steps, density, dtype), passes_of in cases.items():
        ways = (LAYER_PRODUCT, DENSE_WAY, MODULE)
        cells = [us(passes_of[passes].get(way)) for way in ways for passes in ("forward", "both")]
        ratio = times_as(passes_of["both"][MODULE] / passes_of["both"][LAYER_PRODUCT])
        rows.append([f"{cell}, {hidden} x {batch} x {steps}, {float(density):.3g}", dtype, *cells, ratio])
    head = ["cell, hidden x batch x steps, density", "dtype", "sparse, forward", "and backward", "dense way, forward",
            "and backward", "cuDNN, forward", "and backward", "cuDNN / sparse, both"]  # fmt: skip
    return f"{where(*RNN_TRAINING)}\n\n{table(head, rows)}"


@part
def zhu_pool_table1() -> str:
    columns = ("speed_up", "paper_speed_up", "expected_penalty", "measured_penalty", "paper_penalty")
    rows = [
        [row["configuration"], us(float(row["microseconds"])), *(row[name] or "-" for name in columns)]
        for row in results(ZHU_TABLE1).rows
    ]
    head = ["configuration", "microseconds", "over the dense loop", "paper's", "bank conflicts, expected", "measured",
            "paper's"]  # fmt: skip
    return f"{where(ZHU_TABLE1)}\n\n{table(head, rows)}"


@part
def zhu_pool_figures() -> str:
    def first(key: Sequence[str]) -> str:
        figure, _, hidden, batch, steps, density = key
        return f"{figure}: {hidden} x {batch} x {steps}, {float(density):.3g}"

    rows = recurrent_rows(ZHU_FIGURES, "figure", first=first)
    head = ["figure: hidden x batch x steps, density", *RNN_COLUMNS]
    return f"{where(ZHU_FIGURES)}\n\n{table(head, rows)}"


@part
def zhu_pool_tables23() -> str:
    def first(key: Sequence[str]) -> str:
        table_, cell, hidden, batch, _, density = key
        return f"{table_}: {cell}, {hidden} at {float(density):.3g}, batch {batch}"

    rows = recurrent_rows(ZHU_TABLES, "table", first=first)
    return f"{where(ZHU_TABLES)}\n\n{table(['table: layer', *RNN_COLUMNS], rows)}"


CELLS, AGAIN, BFLOAT16 = "rnn-cells-h200", "rnn-again-h200", "rnn-grid-bfloat16-h200"
NOT_MEASURED = "Not measured."


def cell_groups() -> dict[tuple[str, ...], dict[str, float]]:
    """Microseconds by implementation, by group, units, `proj_size`, batch and steps."""
    return dict(results(CELLS).by("group", "hidden", "proj_size", "batch", "steps")) if exists(CELLS) else {}


@part
def rnn_cells() -> str:
    """The GRU with the reset before the product, and the clipped ReLU, beside the cells that they extend."""
    rows = []
    for (group, hidden, _, batch, steps), times in cell_groups().items():
        if group != "projected":
            other = next(name for name in times if name != group)
            names = f"`{other}` / `{group}`"
            cells = (us(times[other]), us(times[group]), times_as(times[other] / times[group]))
            rows.append([names, f"{hidden} x {batch} x {steps}", *cells])
    if not rows:
        return NOT_MEASURED
    head = ["cells", "units x batch x steps, 10 %", "us", "us of the second", "ratio"]
    return f"{where(CELLS)} Weights of entries in float16, without the input product.\n\n{table(head, rows)}"


@part
def rnn_projected() -> str:
    """Dense LSTM layers with projected states: the folded weight beside PyTorch's module and its layer in a stack."""
    rows = []
    for (group, hidden, proj, batch, steps), times in cell_groups().items():
        if group == "projected":
            names = ("folded weight", "PyTorch's layer in the stack", "torch module")
            rows.append([f"{hidden}, {proj}", f"{batch} x {steps}", *(us(times.get(name)) for name in names)])
    if not rows:
        return NOT_MEASURED
    head = ["units, `proj_size`", "batch x steps", "folded weight", "PyTorch's layer in a stack", "PyTorch's module"]
    return f"{where(CELLS)} Dense layers in float16, with the input product.\n\n{table(head, rows)}"


@part
def rnn_again() -> str:
    """Wide float32 layers, and a narrow LSTM of many steps."""
    return peers_table(AGAIN) if exists(AGAIN) else NOT_MEASURED


@part
def rnn_bfloat16() -> str:
    """The way that stacks take of drawn calls in bfloat16."""
    if not exists(BFLOAT16):
        return NOT_MEASURED
    rows = [row for row in results(BFLOAT16).rows if row["over_cudnn"]]
    ratios, regrets = ([float(row[name]) for row in rows] for name in ("over_cudnn", "regret"))
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    slower = sum(ratio > 1.05 for ratio in ratios)
    return (
        f"In bfloat16 ({len(rows)} drawn calls, {provenance(BFLOAT16)}) the way that stacks take has {mean:.2f} of"
        f" cuDNN's time in the mean and {max(ratios):.2f} at most; {slower or 'none'} of the calls"
        f" {'is' if slower == 1 else 'are'} slower by more than 5 %. It is at most {max(regrets):.2f} times as slow as"
        " the other way."
    )


PRUNED = "pruned-lstm-h200"


@part
def pruned_lstm() -> str:
    """Losses of the example's language model, dense, pruned at once, and pruned gradually."""
    if not exists(PRUNED):
        return "It prints the losses; the machine of this project's figures has not run it since it writes them down."
    found = results(PRUNED)
    rows = [[row["model"], row["loss"]] for row in found.rows]
    kept = f"{100 * float(found.rows[0]['density']):.3g} % of the recurrent weights are kept"
    return f"{provenance(PRUNED)}; {kept}.\n\n{table(['model', 'nats a word of held-out text'], rows)}"


REAL, REAL_GPU = "real-models-x86-64-v3", "real-models-h200"


@part
def real_models() -> str:
    """Layers of real models: what pruning changes, and times of PyTorch's modules and of the converted ones."""
    return _models(REAL)


@part
def real_models_gpu() -> str:
    return _models(REAL_GPU)


def _models(name: str) -> str:
    rows = [
        [
            *(row[name] for name in ("model", "layers", "dtype", "steps")), f"{float(row['density']):.3g}",
            row["quality"], *(us(float(row[name])) for name in ("torch_us", "ours_us")),
        ]
        for row in results(name).rows
    ]  # fmt: skip
    heads = ["model", "layers", "dtype", "steps", "density", "quality", "PyTorch's module", "ours"]
    return f"{where(name)}\n\n{table(heads, rows)}"
