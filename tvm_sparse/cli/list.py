"""`tvm-sparse list`: operators, templates, and tuned problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.load import WIDE
from ..core import machine, registry
from ..core.machine import Machine
from ..core.registry import Operator, axis_type, parse
from ..records.queries import best_records, recorded_archs
from .common import (
    AsJson,
    Plugins,
    console,
    default_roots,
    echo_json,
    errors,
    operator_names,
    program,
    rate,
    ratio,
    table,
    us,
    widest,
)

KINDS = {"llvm": "CPU", "cuda": "CUDA"}


def list_operators(
    operator: Annotated[str | None, typer.Argument(help="Only this operator.", autocompletion=operator_names)] = None,
    logs: Annotated[
        list[Path] | None, typer.Option(help="Folder of records.  \\[default: the package's, then yours]")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "--arch", help="Only templates for it and problems tuned for it: cpu, cuda, sm_90a, ..."
        ),
    ] = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """List operators with their axes, their schedule templates, and the problems that are tuned, with figures."""
    with errors():
        chosen = [registry.find(operator)] if operator else list(registry.operators().values())
        where = machine.resolve(target) if target is not None else None
        described = [_describe(one, default_roots(logs), where) for one in chosen]
        if as_json:
            echo_json(described)
            return
        for one in described:
            _print(one)


def _describe(operator: Operator, roots: Iterable[Path], where: Machine | None) -> dict[str, Any]:
    roots, cls = tuple(roots), operator.problem
    tuned = {}
    for arch in recorded_archs(roots, [cls.operator]):
        if where is not None and arch != where.arch:
            continue
        found = best_records(roots, arch, [cls.operator])
        tuned[arch] = {
            key: {"candidate": str(best.candidate), **figures, "spread": widest(best), "bytes": parse(key).cost().bytes}
            for key, (best, figures) in sorted(found.items())
        }
    return {
        "operator": cls.operator,
        "doc": " ".join((cls.__doc__ or "").split("\n\n")[0].split()),
        "source": cls.source,
        "axes": {
            field.name: {
                "type": axis_type(field),
                "default": None if field.default is dataclasses.MISSING else field.default,
                "batch": field.name == cls.batch_axis,
            }
            for field in dataclasses.fields(cls)
        },
        "example": dict(cls.example),
        "inputs": [dataclasses.asdict(argument) for argument in cls.inputs],
        "outputs": [dataclasses.asdict(argument) for argument in cls.outputs],
        "templates": [
            {
                "name": template.name,
                "version": template.version,
                "kind": template.kind,
                "fallback": template in operator.fallbacks[template.kind],
                "summary": template.summary,
            }
            for template in operator.templates
            if where is None or template.kind == where.kind
        ],
        "tuned": tuned,
    }


def _print(one: dict[str, Any]) -> None:
    screen = console()
    screen.print(f"[bold]{one['operator']}[/bold]")
    for line in (one["doc"], f"source: {one['source']}"):
        screen.print(f"  {line}", markup=False)
    axes = [name if axis["default"] is None else f"{name}={axis['default']}" for name, axis in one["axes"].items()]
    screen.print(f"  axes: {', '.join(axes)}", markup=False, soft_wrap=True)
    example = " ".join(f"{name}={value}" for name, value in one["example"].items())
    screen.print(f"  try: {program()} tune {one['operator']} {example}\n", markup=False, soft_wrap=True)

    made = table("on", "template", "what it does")
    for template in one["templates"]:
        name = template["name"] + (" (fallback)" if template["fallback"] else "")
        made.add_row(KINDS[template["kind"]], name, template["summary"])
    screen.print(made)

    tuned = [(arch, key, record) for arch, records in one["tuned"].items() for key, record in records.items()]
    if not tuned:
        screen.print("  nothing tuned yet\n")
        return
    right = ("us", "x fallback", "GB/s")
    made = table("tuned for", "problem", "candidate", *right, right=right)
    for arch, key, record in tuned:
        made.add_row(
            arch,
            parse(key).typed.removeprefix(f"{one['operator']} "),
            record["candidate"],
            us(record["seconds"]) + (" fresh" if record.get("inputs") == "fresh" else ""),
            "-" if (record["spread"] or 0.0) > WIDE else ratio(record["fallback_seconds"], record["seconds"]),
            rate(record["bytes"], record["seconds"]),
        )
    screen.print(made)
