"""`tvm-sparse prebuild`: build kernels for many architectures into wheels, on a machine without a GPU."""

from __future__ import annotations

import collections
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core import machine, registry, shape_files
from ..core.problem import Problem, ProblemError
from .common import (
    ARCHS,
    Axes,
    Builders,
    Plugins,
    ProgramSet,
    as_called,
    default_roots,
    duration,
    errors,
    fail,
    operator_names,
    problem_of,
    require,
    size,
    target_names,
)

if TYPE_CHECKING:
    from ..shipping.prebuild import Built


def prebuild(
    operator: Annotated[
        str | None,
        typer.Argument(
            metavar="OPERATOR",
            help="Only this operator; with its axes, or as a problem's whole key, only this problem.",
            autocompletion=operator_names,
        ),
    ] = None,
    axes: Axes = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where wheels go.")] = Path("dist"),
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            "--arch",
            help="As for export, or all; may be given again. compute_80 is PTX, for every GPU from sm_80 on."
            "  \\[default: auto]",
            autocompletion=target_names,
        ),
    ] = None,
    kind: Annotated[
        ProgramSet | None,
        typer.Option(
            "--set",
            help="Everything recorded of these operators.  \\[default: all, or nothing where problems are named]",
        ),
    ] = None,
    shapes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="These problems, tuned or not; TOML as for tune.")
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of records; of several the last wins.  \\[default: the package's, then yours]"),
    ] = None,
    one_wheel: Annotated[bool, typer.Option("--one-wheel", help="All architectures in one wheel.")] = False,
    repository: Annotated[
        bool, typer.Option("--repository", help="Also as a repository of Hugging Face's library kernels.")
    ] = False,
    builders: Builders = None,
    plugin: Plugins = None,
) -> None:
    """Compile kernels for other machines and pack them into wheels; with one installed no compiler is needed.

    Needs no GPU. FOLDER/kernels/<architecture> gets a few libraries for each operator, a manifest, and TVM's runtime
    libraries; FOLDER gets one wheel for each architecture, whose kernels calls find automatically.
    """
    with errors():
        from ..shipping import hub, wheel
        from ..shipping import prebuild as shipping

        named = _named(operator, axes, shapes)
        whole = operator is not None and not axes and "/" not in operator
        chosen = [operator] if whole and operator else None
        if kind is not None and kind != "all":
            if whole:
                raise ProblemError(f"set: an operator is named, too ({operator}); give one of them")
            chosen = list(registry.SETS[kind])
        targets = [name for one in target or ["auto"] for name in (ARCHS if one == "all" else [one])]
        machines = {where.arch: where for where in map(machine.resolve, targets)}
        require("compiler", *(["cuda"] if any(where.kind == "cuda" for where in machines.values()) else []))
        started = time.monotonic()
        try:
            found = shipping.prebuild(
                targets,
                output / "kernels",
                default_roots(logs),
                named,
                operators=chosen if chosen is None else [*chosen, *{one.operator for one in named}],
                records=kind is not None or not named,
                builders=builders or machine.default_builders(),
                show=lambda library, done, count: typer.echo(f"{done}/{count}: {library}", err=True),
            )
        except LookupError as error:
            fail(str(error))
        for built in found:
            _report(built)
        folders = [built.folder for built in found]
        groups = [folders] if one_wheel else [[folder] for folder in folders]
        wheels = [wheel.pack(group, output, "tvm-sparse-kernels" if one_wheel else None) for group in groups]
        for path in wheels:
            typer.echo(f"{path}: {size(path.stat().st_size)}")
        for path in hub.arrange(folders, output / "repository") if repository else ():
            typer.echo(f"{path}: {size(sum(file.stat().st_size for file in path.rglob('*') if file.is_file()))}")
        typer.echo(
            f"{duration(time.monotonic() - started)}.\n"
            "Where kernels are to be called, beside tvm_sparse of the same version (any one of these wheels):\n"
            + "\n".join(f"  pip install {shlex.quote(str(path))}" for path in wheels)
        )


def _named(operator: str | None, axes: list[str] | None, shapes: Path | None) -> list[Problem]:
    """The named problems, as calls look them up."""
    found = shape_files.read(shapes) if shapes is not None else []
    if operator is not None and (axes or "/" in operator):
        found.append(problem_of(operator, axes))
    elif operator is not None:
        registry.find(operator)
    return as_called(found, "built")


def _report(built: Built) -> None:
    chosen = collections.Counter(entry.chosen for entry in built.entries)
    weight = sum(path.stat().st_size for path in built.libraries)
    spilled = sum(bool((entry.resources or {}).get("spill_instructions")) for entry in built.entries)
    typer.echo(
        f"{built.machine.arch}: {len(built.entries)} {'kernel' if len(built.entries) == 1 else 'kernels'} in"
        f" {len(built.libraries)} {'library' if len(built.libraries) == 1 else 'libraries'}, {size(weight)}:"
        f" {', '.join(f'{count} {how}' for how, count in chosen.most_common())}"
        + (f"; {spilled} spill registers" if spilled else "")
    )
    for line in built.dropped:
        typer.echo(f"  not as recorded: {line.splitlines()[0][:300]}")
