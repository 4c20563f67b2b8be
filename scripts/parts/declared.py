"""Operators, templates, decisions and commands, as the registry and the code declare them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm_sparse.core import machine, registry
from tvm_sparse.core.problem import Argument
from tvm_sparse.core.template import NotApplicable, Template
from tvm_sparse.schedules.vocabulary import DECISIONS

from .register import PARTS, part
from .results import ROOT
from .text import code, listed, table


def first_sentence(docstring: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())


def required(function: Callable[..., Any]) -> str:
    """A call with its required arguments."""
    given = inspect.signature(function).parameters.values()
    return f"{function.__name__}({', '.join(p.name for p in given if p.default is p.empty)})"


def builtin() -> tuple[registry.Operator, ...]:
    return registry.BUILTIN


# Operators that are steps of `LshHead`, described in docs/: README.md has no room for them.
STEPS_OF_LSH = ("lsh_topk", "wta_hash", "lsh_lookup", "compaction", "lsh_candidates", "candidate_logits")


def own_functions(operator: registry.Operator) -> list[Callable[..., Any]]:
    """The operator's public calls, without functions that prepare their arguments."""
    found = (getattr(operator.call, name) for name in operator.public)
    return [one for one in found if inspect.isfunction(one) and one.__module__ == operator.call.__name__]


@part
def operators() -> str:
    rows = []
    for operator in builtin():
        for function in () if operator.name in STEPS_OF_LSH else own_functions(operator):
            page = f"[{code(required(function))}](docs/operators/{operator.name}.md)"
            rows.append([page, first_sentence(function.__doc__), operator.problem.source])
    return table(["function", "what it computes", "source"], rows)


@part
def operators_of_docs() -> str:
    rows = []
    for operator in builtin():
        pages = ", ".join(f"[{code(found.__name__)}]({operator.name}.md)" for found in own_functions(operator))
        sources = operator.problem.source
        machines = sorted({{"llvm": "CPU", "cuda": "CUDA"}[t.kind] for t in operator.templates})
        count = sum(not t.comparison for t in operator.templates)
        rows.append([pages, first_sentence(operator.problem.__doc__), sources, ", ".join(machines), str(count)])
    return table(["function", "what it computes", "source", "machines", "templates"], rows)


def tables_of(operator: registry.Operator, template: Template) -> list[Mapping[str, Sequence[int]]]:
    """The template's tables of decisions for those of the operator's own shapes that it fits."""
    keys = (*operator.shapes.QUICKSTART, *operator.shapes.REALISTIC, *operator.shapes.AWKWARD)
    problems = [registry.make(operator.name, operator.problem.example), *map(registry.parse, keys)]
    where = machine.Machine("cuda", "sm_90a", "sm_90a", cores=132)
    cpu = machine.Machine("llvm", "x86-64-v4", "x86-64-v4", cores=8)
    found: list[Mapping[str, Sequence[int]]] = []
    for problem in problems:
        try:
            found.append(template.space(problem, where if template.kind == "cuda" else cpu))
        except NotApplicable:
            continue
    return found


@functools.cache
def decisions_of(operator: registry.Operator, template: Template) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for found in tables_of(operator, template) for name in found))


def templates_part(operator: registry.Operator) -> str:
    rows = []
    for template in operator.templates:
        remarks = [{"llvm": "CPU", "cuda": "CUDA"}[template.kind]]
        if template in operator.fallbacks[template.kind]:
            remarks.append("fallback")
        if template.comparison:
            remarks.append("for comparison")
        chosen = ", ".join(map(code, decisions_of(operator, template)))
        rows.append([code(template.name), ", ".join(remarks), template.summary, chosen])
    return table(["template", "runs on", "how", "decisions"], rows)


def _shape(argument: Argument) -> str:
    return f"({', '.join(map(str, argument.shape))})" if argument.shape else "scalar"


def arguments_part(operator: registry.Operator) -> str:
    problem = operator.problem
    rows = []
    for kind, arguments in (("in", problem.inputs), ("out", problem.outputs)):
        for a in arguments:
            dtype = "the problem's" if a.dtype == "dtype" else a.dtype
            rows.append([code(a.name), kind, _shape(a), dtype, a.doc + (f" Only where {a.when} is." if a.when else "")])
    return table(["argument", "", "shape", "dtype", "what"], rows)


def axes_part(operator: registry.Operator) -> str:
    problem, names = operator.problem, []
    for field in dataclasses.fields(problem):
        default = "" if field.default is dataclasses.MISSING else f"={field.default}"
        names.append(code(f"{field.name}{default}"))
    data = f" Kernels read {listed([code(a) for a in problem.data_axes])} when they run." if problem.data_axes else ""
    return (
        f"Axes: {', '.join(names)}. One library serves every {code(problem.batch_axis)}.{data} Structures of inputs:"
        f" {', '.join(map(code, problem.structures))}; tuned and timed is {code(problem.tuned)}."
    )


for _operator in builtin():
    PARTS[f"templates-{_operator.name}"] = functools.partial(templates_part, _operator)
    PARTS[f"arguments-{_operator.name}"] = functools.partial(arguments_part, _operator)
    PARTS[f"axes-{_operator.name}"] = functools.partial(axes_part, _operator)


@part
def decisions() -> str:
    users: dict[str, list[str]] = {}
    for operator in builtin():
        for template in operator.templates:
            for name in decisions_of(operator, template):
                users.setdefault(name, []).append(template.name)
    rows = [[code(n), what, ", ".join(map(code, users.get(n, ["-"])))] for n, what in DECISIONS.items()]
    return table(["decision", "meaning", "templates"], rows)


@part
def phase_example() -> str:
    """One phase of the example's generated kernel."""
    registry.add_plugin(ROOT / "examples" / "row_norm")
    from row_norm.schedules.norm_block.kernel import join

    return f"```python\nfrom tvm_sparse.core.phase import phase\n\n\n{inspect.getsource(join)}```"


@part
def commands() -> str:
    from tvm_sparse.cli.app import app
    from tvm_sparse.cli.db import db

    rows = []
    for command in app.registered_commands:
        if command.hidden:
            continue
        assert command.callback is not None
        name = command.name or command.callback.__name__
        rows.append([code(f"tvm-sparse {name}"), first_sentence(command.callback.__doc__)])
    for command in db.registered_commands:
        assert command.callback is not None
        rows.append([code(f"tvm-sparse db {command.name}"), first_sentence(command.callback.__doc__)])
    return table(["command", "what it does"], rows)
