"""Time TVMScript's parser with and without `tvm_sparse.core.script`: `python scripts/parser_times.py [TEMPLATE ...]`.

Each template's default point of a realistic problem is built by TVM's own parser, then by the quickened one, twice: the
second time its cache is filled. Figures are processor seconds of this process, which hardly depend on the machine's
load. It needs no GPU. Given no template it writes scripts/results/parser-times.csv.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from reproduction import provenance, write_csv

from tvm_sparse.core import registry, spaces
from tvm_sparse.core.machine import cpu, resolve
from tvm_sparse.core.script import quicken_parser
from tvm_sparse.core.template import NotApplicable, Template

OUTPUT = Path(__file__).parent / "results" / "parser-times.csv"
TEMPLATES = (
    *("held_rows", "threshold_gate", "warp_rows", "softmax_streamed", "head_rings", "fused_step", "tensor_core"),
    *("warp_gather", "persistent_rows"),
)
MACHINE = resolve("sm_90a")


def seconds(template: Template) -> float:
    """Processor seconds for building the program of a realistic problem's default point."""
    for key in registry.find(template.operator).shapes.REALISTIC:
        problem = registry.parse(key)
        try:
            decisions = template.default(problem, MACHINE)
        except NotApplicable:
            continue
        began = time.process_time()
        template.program(problem, decisions)
        return time.process_time() - began
    raise ValueError(f"{template.name} fits no realistic problem of {template.operator} on {MACHINE.arch}")


def main(*names: str) -> None:
    templates = [spaces.find(name) for name in names or TEMPLATES]
    seconds(templates[0])  # imports the compiler
    own = [seconds(template) for template in templates]
    quicken_parser()
    rows = []
    for template, before in zip(templates, own, strict=True):
        first, again = seconds(template), seconds(template)
        rows.append([template.name, f"{before:.3f}", f"{first:.3f}", f"{again:.3f}"])
        print(f"{template.name:20s} {before:6.3f} s, {before / first:5.1f} and {before / again:5.1f} times as fast")
    if not names:
        write_csv(OUTPUT, provenance(cpu()), ("template", "tvm_s", "first_s", "again_s"), rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
