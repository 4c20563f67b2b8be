"""Recurrent layers compared with cuDNN, and the tables of Zhu, Pool et al."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .register import part
from .results import RESULTS, Times, provenance, results, where
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


@part
def rnn_peers() -> str:
    def first(key: Sequence[str]) -> str:
        cell, *numbers, density = key
        return f"{cell}, {' x '.join(numbers)}, {float(density):.3g}"

    rows = recurrent_rows(RNN, first=first)
    return f"{where(RNN)}\n\n{table(['cell, hidden x batch x steps, density', *RNN_COLUMNS], rows)}"


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


PRUNED = "pruned-lstm-h200"


@part
def pruned_lstm() -> str:
    """Losses of the example's language model, dense, pruned at once, and pruned gradually."""
    if not (RESULTS / f"{PRUNED}.csv").exists():
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
