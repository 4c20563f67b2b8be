"""The application and its commands. Heavy imports are inside the commands, so that `--help` is fast."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Annotated

import typer

from ..core.commands import command
from ..core.registry import BUILTIN
from .adopt import adopt
from .bench import bench
from .cache import cache
from .common import PROGRAM, Plugins
from .db import db, migrate
from .doctor import doctor
from .explain import explain
from .export import export
from .list import list_operators
from .measure_space import measure_space
from .prebuild import prebuild
from .quickstart import quickstart
from .report import report
from .simulate import simulate
from .space import space
from .study import study
from .tune import tune

# A plain traceback can be pasted into a bug report; typer's boxes cannot.
app = typer.Typer(name=PROGRAM, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"{PROGRAM} {importlib.metadata.version('tvm_sparse')}")
        raise typer.Exit


def _help() -> str:
    # The package's own operators: those of plugins are loaded when a command runs, and may be broken.
    names = ", ".join(operator.name for operator in BUILTIN)
    return f"Tune, export and compare kernels on Apache TVM: {names}.\n\nBegin with doctor, then quickstart."


@app.callback(help=_help())
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    plugin: Plugins = None,
) -> None:
    pass


def _migrate(
    logs: Annotated[list[Path] | None, typer.Argument(help="Folders of records.  \\[default: yours]")] = None,
) -> None:
    """The former name of `db migrate`."""
    typer.echo(f"note: this is {command('db', 'migrate')} now; migrate alone will go", err=True)
    migrate(logs)


app.command("quickstart")(quickstart)
app.command("doctor")(doctor)
app.command("list")(list_operators)
app.command("tune")(tune)
app.command("adopt")(adopt)
app.command("measure-space")(measure_space)
app.command("space")(space)
app.command("study")(study)
app.command("report")(report)
app.command("simulate")(simulate)
app.command("export")(export)
app.command("prebuild")(prebuild)
app.command("explain")(explain)
app.command("bench")(bench)
app.command("cache")(cache)
app.command("migrate", hidden=True)(_migrate)
app.add_typer(db, name="db")


def main() -> None:
    app()
