"""What a problem's schedule spaces hold: their sizes, why templates do not apply, and the code of sampled points.

    python examples/template_study.py softmax_topk batch=10 vocab=25000 k=5
    python examples/template_study.py row_norm rows=64 width=4096 --plugin examples/row_norm --show cuda

Any architecture can be studied on any machine: nothing is run. `--show` prints the points as `tir`, `cuda` or nothing.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import typer

from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.core import machine, registry, spaces


def main(
    operator: str,
    axes: Annotated[list[str], typer.Argument(metavar="AXIS=VALUE...")],
    arch: str = "sm_90a",
    points: Annotated[int, typer.Option(help="Points a template.")] = 1,
    show: Annotated[str, typer.Option(help="tir, cuda or nothing.")] = "nothing",
    plugin: Annotated[Path | None, typer.Option(help="Package of an operator outside of tvm_sparse.")] = None,
) -> None:
    if plugin is not None:
        registry.add_plugin(plugin)
    problem = registry.make(operator, dict(axis.split("=", 1) for axis in axes))
    where = machine.resolve(arch)
    print(f"{problem} on {where.arch}; without tuning: {spaces.fallback(problem, where)}")

    tables, reasons = spaces.applicable(problem, where)
    for name, reason in reasons.items():
        print(f"\n{name} does not apply: {reason}")
    for name, table in tables.items():
        template = spaces.find(name)
        candidates = list(spaces.points(problem, where, {name: table}))
        print(f"\n{name}: {template.summary}; {len(candidates)} points")
        for decision, values in table.items():
            print(f"    {decision}: {', '.join(map(str, values))}")
        for candidate in random.Random(0).sample(candidates, min(points, len(candidates))):
            print(f"  {candidate}")
            if show == "nothing":
                continue
            program = template.build(problem, candidate.values)
            if show == "tir":
                print(program.module.script())
            else:
                from tvm_sparse.emulation import cuda_source

                print(cuda_source(program.module, target_of(where), pipeline=program.pipeline))


if __name__ == "__main__":
    typer.run(main)
