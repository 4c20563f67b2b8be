"""`tvm-sparse report`: recorded trials as a page of tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core.problem import ProblemError
from .common import Axes, Inputs, Plugins, errors, require
from .study import Arch, Parts, Recorded, Some, Timed, checked_parts, recorded


def report(
    operator: Some = None,
    axes: Axes = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html")] = Path("report.html"),
    images: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the plots there, too, as PNG and SVG.")
    ] = None,
    decisions: Annotated[
        list[str] | None,
        typer.Option(
            "--heat-map",
            metavar="ONE,OTHER",
            help="Two decisions to draw against each other; may be given again.  \\[default: the two that matter most"
            " in each template]",
        ),
    ] = None,
    parts: Parts = None,
    logs: Recorded = None,
    arch: Arch = None,
    inputs: Timed = Inputs.hot,
    plugin: Plugins = None,
) -> None:
    """Write recorded trials as one self-contained HTML page: tables of `study`, and plots."""
    with errors():
        require("lab")
        from ..research import report as reports

        pairs = []
        for text in decisions or ():
            one, comma, other = text.partition(",")
            if not comma:
                raise ProblemError(f"heat-map: expected ONE,OTHER, got {text!r}")
            pairs.append((one, other))
        found = reports.make(recorded(operator, axes, logs, arch, inputs), pairs, checked_parts(parts))
        if images is not None:
            for path in reports.write_images(found, images):
                typer.echo(str(path))
        output.write_text(reports.page(found))
        typer.echo(f"{len(found.figures)} plots and {len(found.tables)} tables in {output}")
