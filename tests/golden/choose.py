"""Which points of a template to keep: a few that together reach every line of its program.

A TVMScript kernel is read by a parser, which Python's own tracing does not see: statements are noted as the parser
visits them, and the lines of plain Python functions as they run. Points are taken greedily, those that reach the most
lines which none before reached.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases import AWKWARD, REALISTIC, drawn

import tvm_sparse.operators
import tvm_sparse.schedules
from tvm_sparse.core import spaces
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable, Template

from . import MACHINES, OLDER, Point

# Problems with branches that the generic tests' shapes do not reach: long rows shared by clusters, on tensor cores too.
BESIDES = tuple(
    parse(f"bsr_matmul/{key}")
    for key in (
        "m=8,k=1024,n=64,block=16,sparsity=0.5,pattern=skewed,dtype=bfloat16,bias=1,activation=gelu",
        "m=20,k=512,n=64,block=32x16,sparsity=0.5,pattern=skewed,dtype=float16,activation=relu",
    )
)
# Sampled points a problem, and points that are kept at most and at least.
SAMPLED, MOST, LEAST = 8, 12, 3


@contextmanager
def visited(roots: tuple[str, ...]) -> Iterator[set[tuple[str, int]]]:
    """The lines under `roots` that run or that TVMScript's parser visits, while the context lasts."""
    from tvm.script.parser.core.parser import Parser

    lines: set[tuple[str, int]] = set()
    visit = Parser.visit

    def noting(self: Any, node: Any) -> None:
        if hasattr(node, "lineno"):
            source = self.diag.source
            if source.source_name.startswith(roots):
                lines.add((source.source_name, source.start_line + node.lineno))
        visit(self, node)

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(roots):
            return None
        lines.add((frame.f_code.co_filename, -frame.f_lineno))
        return trace

    Parser.visit = noting
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)
        Parser.visit = visit


def candidates(template: Template, problems: tuple[Problem, ...]) -> Iterator[Point]:
    """The default and sampled points of every problem that the template applies to."""
    machine = MACHINES[template.kind]
    for problem in problems:
        if problem.operator != template.operator:
            continue
        try:
            default = template.candidate(template.default(problem, machine))
            others = drawn(template, problem, machine, SAMPLED, f"{template.name} {problem.key}")
        except NotApplicable:
            continue
        for candidate in dict.fromkeys([default, *others]):
            yield Point(problem.key, candidate)


def realistic(template: Template) -> list[Point]:
    """The default of a CUDA template for a realistic problem; where an older GPU takes any, for one of those and on
    both, best in bfloat16, which has fewer instructions there."""

    def runs(problem: Problem, machine: Machine) -> bool:
        return template.name in spaces.applicable(problem, machine)[0]

    newer = MACHINES["cuda"]
    problems = [p for p in REALISTIC if p.operator == template.operator and runs(p, newer)]
    if template.kind != "cuda" or not problems:
        return []
    problem = max(problems, key=lambda p: (runs(p, OLDER), p.axes.get("dtype") == "bfloat16"))
    return [
        Point(problem.key, template.candidate(template.default(problem, machine)), machine is OLDER)
        for machine in (newer, OLDER)
        if runs(problem, machine)
    ]


def choose(template: Template) -> list[Point]:
    """A few points that reach every line that any of the sampled ones reaches, and the realistic ones."""
    # A schedule is applied to a definition, which has branches of its own.
    roots = tuple(str(Path(package.__file__).parent) for package in (tvm_sparse.schedules, tvm_sparse.operators))
    reached: dict[Point, set[tuple[str, int]]] = {}
    for point in candidates(template, (*AWKWARD, *REALISTIC, *BESIDES)):
        with visited(roots) as lines:
            template.build(parse(point.problem), point.candidate.values)
        reached[point] = lines
    chosen: list[Point] = []
    left = set().union(*reached.values())
    while len(chosen) < MOST and len(reached) > len(chosen):
        best = max((p for p in reached if p not in chosen), key=lambda p: len(reached[p] & left))
        if not reached[best] & left and len(chosen) >= LEAST:
            break
        chosen.append(best)
        left -= reached[best]
    return list(dict.fromkeys([*chosen, *realistic(template)]))
