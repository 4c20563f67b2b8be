"""`tvm-sparse explain`: the kernel that a call runs, and the reason for it."""

from __future__ import annotations

import dataclasses

import typer

from .common import (
    AsJson,
    Axes,
    Kernels,
    Operator,
    Plugins,
    ReadLogs,
    Target,
    echo_json,
    errors,
    looking_in,
    problem_of,
)


def explain(
    operator: Operator,
    axes: Axes = None,
    target: Target = "auto",
    logs: ReadLogs = None,
    kernels: Kernels = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Print the kernel that a call of this shape runs, and why: a record, a prediction, or a template's default."""
    with errors(), looking_in(logs, kernels):
        from ..runtime import dispatch

        found = dispatch.explain(problem_of(operator, axes), target=target)
        if as_json:
            echo_json(dataclasses.asdict(found))
        else:
            typer.echo(str(found))
