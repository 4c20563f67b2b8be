"""`tvm-sparse study`: what recorded trials say about schedule spaces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.problem import ProblemError
from .common import (
    AsJson,
    Axes,
    Inputs,
    Plugins,
    console,
    default_roots,
    echo_json,
    errors,
    operator_names,
    require,
    table,
)

if TYPE_CHECKING:
    import pandas

Recorded = Annotated[
    list[Path] | None,
    typer.Option(
        exists=True,
        help="Folder of records, a measured space, or results in T4; may be given again."
        "  \\[default: the package's logs, then yours]",
    ),
]
Some = Annotated[
    str | None,
    typer.Argument(
        metavar="OPERATOR|FILE...",
        help="Only this operator; or files that measure-space has written, or results in T4, as by --logs.",
        autocompletion=operator_names,
    ),
]
Arch = Annotated[str | None, typer.Option("--arch", "--target", help="Only records of this architecture.")]
Timed = Annotated[Inputs, typer.Option("--inputs", help="Only trials that were timed so.  See docs/tuning.md.")]

Parts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        metavar="NAME",
        help="distribution, failures, importance, effects, models, recorded-models, transfer, budget or halves; may be"
        " given again.  \\[default: all]",
    ),
]


def study(
    operator: Some = None,
    axes: Axes = None,
    logs: Recorded = None,
    arch: Arch = None,
    inputs: Timed = Inputs.hot,
    parts: Parts = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write each table there as CSV, too.")
    ] = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Study recorded trials: distributions, important decisions, cost models, transfer between problems, budgets.

    Needs no GPU and compiles nothing. Intervals have 95 % confidence.
    """
    with errors():
        require("lab")
        from ..research import study as studies

        found = studies.sections(recorded(operator, axes, logs, arch, inputs), checked_parts(parts))
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            for name, rows in found.items():
                rows.to_csv(output / f"{name}.csv", index=False, lineterminator="\n")
        if as_json:
            echo_json({name: rows.to_dict("records") for name, rows in found.items()})
            return
        from rich.markup import escape

        screen = console()
        for name, rows in found.items():
            doc = " ".join((studies.PARTS[name].__doc__ or "").split())
            screen.print(f"[bold]{name}[/bold]: {escape(doc)}")
            shown = studies.shown(rows)
            made = table(*shown.columns, right=[c for c in shown if rows[c].dtype.kind in "fiu"])
            for row in shown.itertuples(index=False):
                made.add_row(*row)
            screen.print(made)


def checked_parts(names: list[str] | None) -> list[str] | None:
    """The names given by `--part`, checked."""
    from ..research.study import PARTS

    unknown = [name for name in names or () if name not in PARTS]
    if unknown:
        raise ProblemError(f"part: got {unknown[0]!r}; expected one of {', '.join(PARTS)}")
    return names


# Suffixes of words that are files, never an operator or an axis.
_OF_FILES = (".jsonl", ".xz", ".json", ".csv", ".parquet")


def _parted(operator: str | None, axes: list[str] | None) -> tuple[str | None, list[str], list[Path]]:
    """Operator, axes and files among the words of a command."""
    words = [*([operator] if operator else []), *(axes or ())]
    files = [word for word in words if word.endswith(_OF_FILES) or ("=" not in word and Path(word).is_file())]
    for word in files:
        if not Path(word).is_file():
            raise ProblemError(f"{word}: no such file")
    left = [word for word in words if word not in files]
    named = left.pop(0) if left and "=" not in left[0] else None
    return named, left, [Path(word) for word in files]


def recorded(
    operator: str | None,
    axes: list[str] | None,
    logs: list[Path] | None,
    arch: str | None,
    inputs: Inputs = Inputs.hot,
) -> pandas.DataFrame:
    """The trials that a command selects: of an operator, an architecture, and problems with these axes."""
    from ..core import registry
    from ..research.trials import trials

    operator, axes, files = _parted(operator, axes)
    logs = [*(logs or ()), *files] or None
    if operator is not None:
        registry.find(operator)
    found = trials(default_roots(logs), operator=operator, arch=arch, fresh=inputs is Inputs.fresh)
    if not len(found):
        raise ProblemError("no trial is recorded of what was asked for; see tvm-sparse db ls")
    for text in axes or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ProblemError(f"expected axis=value, got {text!r}")
        if f"axis.{name}" not in found:
            valid = [column.removeprefix("axis.") for column in found if column.startswith("axis.")]
            raise ProblemError(f"axis: no trial has {name!r}; expected one of {', '.join(valid)}")
        there = found[f"axis.{name}"]
        found = found[there.astype(str) == value]
        if not len(found):
            values = ", ".join(map(str, sorted(there.dropna().unique())))
            raise ProblemError(f"axis: no trial has {text}; {name} is one of {values}")
    return found
