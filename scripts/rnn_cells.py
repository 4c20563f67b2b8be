"""Cells of other libraries beside the cells of PyTorch, and LSTM layers with projected states beside cuDNN's.

    python scripts/rnn_cells.py --csv scripts/results/rnn-cells-h200.csv      # under a minute on a GPU
    python scripts/rnn_cells.py --case 512,32,128,0.1 --projection 512,128,1

A case is hidden units, batch, steps and density, with a random pattern: the GRU with the reset before the product
beside the GRU with the reset after it, and the clipped ReLU beside the ReLU, without the input product. A projection is
hidden units, `proj_size` and batch of a dense LSTM layer with as many inputs as projected states: the folded weight,
PyTorch's layer in our stack, and PyTorch's module alone, all with the input product. `over_first` is the time over that
of the first of a case.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from heads import Call, Check, Report, micro, over, ready, show, timed
from recurrent import NORM, TOLERANCE
from reproduction import provenance

import tvm_sparse
from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.layers.pruning import pruning_mask
from tvm_sparse.runtime.dispatch import dispatcher

CASES = ("1024,4,256,0.1", "1024,16,256,0.1", "1024,64,64,0.1", "512,32,128,0.1", "1792,4,256,0.1")
PROJECTIONS = (
    *(f"{shape},{batch}" for shape in ("512,128", "1024,256") for batch in (1, 4, 8, 16, 32)),
    "2048,512,1", "2048,512,8",
)  # fmt: skip
# The second of each pair is timed beside the first.
CELLS = ("gru", "gru_reset_before"), ("relu", "clipped_relu")
MODULE, WAY, FOLDED = "torch module", "PyTorch's layer in the stack", "folded weight"
# Limit of the clipped ReLU, as in Deep Speech.
LIMIT = 20.0
COLUMNS = ("group", "hidden", "proj_size", "batch", "steps", "density", "dtype", "implementation", "microseconds",
           "over_first", "timed", "kernel", "note")  # fmt: skip


def numbers(text: str, count: int, option: str) -> list[float]:
    """`count` numbers between commas. Raises `typer.BadParameter`."""
    parts = text.split(",")
    try:
        if len(parts) != count:
            raise ValueError
        return [float(part) for part in parts]
    except ValueError:
        raise typer.BadParameter(f"expected {count} numbers between commas, got {text}", param_hint=option) from None


def layer_of(cell: str, weight: torch.Tensor, dtype: str) -> Any:
    """Our layer of a cell with the nonzeros of a weight."""
    if cell.startswith("gru"):
        return tvm_sparse.SparseGRU(weight, dtype=dtype, form="entries", reset_after=cell == "gru")
    limit = {"limit": LIMIT} if cell == "clipped_relu" else {}
    return tvm_sparse.SparseRNN(weight, dtype=dtype, form="entries", nonlinearity=cell, **limit)


class Group(NamedTuple):
    """Calls that are timed in turn.

    Attributes
    ----------
    facts
        Cells of all lines.
    calls
        By name, the first one first.
    problems
        Those of each call's kernels.
    notes
        What the column `kernel` says of a call without problems.
    check
        Raises ValueError for outputs that differ from the first call's.
    """

    facts: dict[str, Any]
    calls: dict[str, Call]
    problems: dict[str, list[Problem]]
    notes: dict[str, str] = {}
    check: Check | None = None


def cells(case: str, dtype: str, where: Machine, generator: torch.Generator) -> Iterator[Group]:
    """Both pairs of cells."""
    hidden, batch, steps, density = (*map(int, (found := numbers(case, 4, "--case"))[:3]), found[3])
    for pair in CELLS:
        rows = hidden * (3 if pair[0] == "gru" else 1)
        weight = torch.randn((rows, hidden), generator=generator) * (NORM / (hidden * density) ** 0.5)
        weight *= pruning_mask(weight, density, method="row_balanced")
        x = torch.randn((steps, batch, rows), generator=generator).to(where.device, getattr(torch, dtype))
        layers = {cell: layer_of(cell, weight, dtype) for cell in pair}
        facts = {"hidden": hidden, "batch": batch, "steps": steps, "density": density, "dtype": dtype}
        yield Group(
            {"group": pair[0], **facts},
            {cell: functools.partial(own, x) for cell, own in layers.items()},
            {cell: list(own.problems(steps, batch, target=where.device).values()) for cell, own in layers.items()},
        )


@functools.cache
def projected(hidden: int, proj: int, dtype: str, device: str) -> dict[str, Any]:
    """A dense LSTM layer with projected states: PyTorch's module, and stacks by name."""
    module = torch.nn.LSTM(proj, hidden, proj_size=proj).to(device, getattr(torch, dtype)).eval()
    ways = {FOLDED: False, WAY: True}
    return {MODULE: module} | {
        name: tvm_sparse.from_torch(module, dtype=dtype, dense=dense).to(device) for name, dense in ways.items()
    }


def projections(shape: str, steps: int, dtype: str, where: Machine) -> Group:
    """Calls of a dense LSTM layer with projected states."""
    hidden, proj, batch = map(int, numbers(shape, 3, "--projection"))
    calls = projected(hidden, proj, dtype, where.device)
    x = torch.randn(steps, batch, proj, device=where.device).to(getattr(torch, dtype))
    wanted = calls[MODULE](x)[0].float()

    def check(outputs: Any) -> None:
        error = float((outputs[0].float() - wanted).abs().max())
        if not error <= TOLERANCE[dtype]:
            raise ValueError(f"differs from PyTorch's module by {error:.2g}")

    stack = calls[FOLDED]
    problems = list(stack.layers[0].folded.problems(steps, batch, target=where.device).values())
    stack.dense = None
    taken = f"a stack takes {stack.explain(steps, batch, target=where.device)[0].way}"
    stack.dense = False
    facts = {"hidden": hidden, "proj_size": proj, "batch": batch, "steps": steps, "density": 1, "dtype": dtype}
    return Group(
        {"group": "projected", **facts},
        {name: functools.partial(own, x) for name, own in calls.items()},
        {FOLDED: problems},
        {WAY: taken},
        check,
    )


def lines_of(group: Group, where: Machine) -> Iterator[dict[str, Any]]:
    """A line for each call."""
    names = list(group.calls)
    checks = dict.fromkeys(names[1:], group.check) if group.check is not None else {}
    found = timed(group.calls, checks, where.device)
    for name, result in found.items():
        problems = group.problems.get(name, [])
        kernel = str(dispatcher.explain(problems[0], where).candidate) if problems else group.notes.get(name, "")
        yield group.facts | {
            "implementation": name, "microseconds": micro(result), "over_first": over(result, found[names[0]]),
            "timed": result.how, "kernel": kernel, "note": result.note,
        }  # fmt: skip


def main(
    target: Target = "auto",
    case: Annotated[list[str] | None, typer.Option(help="Only these hidden,batch,steps,density.")] = None,
    projection: Annotated[list[str] | None, typer.Option(help="Only these hidden,proj_size,batch.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Default: float16.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of projections.")] = 128,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, patterns and inputs.")] = 0,
) -> None:
    """Time cells beside those that they extend, and projected states beside PyTorch's."""
    with errors(), torch.no_grad():
        where = machine_here(target, "comparing")
        report, generator = Report(csv_path, provenance(where), COLUMNS), torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        groups = [
            group
            for kind in dtype or ["float16"]
            for group in (
                *(pair for one in case or CASES for pair in cells(one, kind, where, generator)),
                *(projections(one, steps, kind, where) for one in projection or PROJECTIONS),
            )
        ]
        rows = []
        with ready([p for group in groups for problems in group.problems.values() for p in problems], where):
            for line in (line for group in groups for line in lines_of(group, where)):
                report.add(**line)
                shape = " x ".join(str(line[n]) for n in ("hidden", "proj_size", "batch", "steps") if n in line)
                rows.append([f"{line['group']}, {shape}", *(line[n] for n in COLUMNS[6:10])])
        show("microseconds a call", ("case", *COLUMNS[6:10]), rows)
        report.close()


if __name__ == "__main__":
    typer.run(main)
