"""Speed of parsing programs, and the programs with CUDA text."""

from __future__ import annotations

from .register import part
from .results import ROOT, results
from .text import code, listed, span, table


@part
def parser_times() -> str:
    rows = results("parser-times").rows
    ratios = {name: [float(row["tvm_s"]) / float(row[name]) for row in rows] for name in ("first_s", "again_s")}
    head = ("template", "TVM's parser, s", "quickened, s", "again, s", "times as fast", "again")
    lines = [
        [
            code(row["template"]),
            *(f"{float(row[name]):.2f}" for name in ("tvm_s", "first_s", "again_s")),
            *(f"{values[number]:.1f}" for values in ratios.values()),
        ]
        for number, row in enumerate(rows)
    ]
    facts = results("parser-times").facts
    where = f"{facts['device']}, TVM {facts['apache-tvm']}, {facts['date'][:10]}"
    said = (
        f"The first build of a process is {span(ratios['first_s'], 0)} times as fast, later ones are"
        f" {span(ratios['again_s'], 0)} times. Processor seconds; {where}."
    )
    return f"{said}\n\n{table(head, lines)}"


@part
def cuda_text() -> str:
    folder = ROOT / "schedules"
    files = [path for path in sorted(folder.rglob("*.py")) if "func_call(" in path.read_text()]
    names = [code(str(path.relative_to(folder))) for path in files]
    return f"`T.cuda.func_call` stands in {len(names)} files of `schedules/`: {listed(names)}."
