"""`tvm-sparse export`: compile tuned records to a folder of shared libraries."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core import registry, scratch, shape_files
from ..core.registry import parse
from .common import (
    FAILED,
    Builders,
    Plugins,
    Target,
    console,
    default_roots,
    duration,
    errors,
    fail,
    operator_names,
    ratio,
    require,
    size,
    table,
    us,
)

if TYPE_CHECKING:
    from ..artifacts.manifest import Entry
    from ..shipping.export import LeftOut


class Layout(enum.StrEnum):
    folder = "folder"
    kernels = "kernels"


def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; made if it is not there.")],
    target: Target = "auto",
    logs: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of records; of several the last wins.  \\[default: the package's, then yours]"),
    ] = None,
    operator: Annotated[str | None, typer.Option(help="Only this operator.", autocompletion=operator_names)] = None,
    shapes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Only what calls of these problems run, tuned or not; TOML as for tune."),
    ] = None,
    layout: Annotated[
        Layout, typer.Option(help="kernels: a repository as Hugging Face's library kernels loads it.")
    ] = Layout.folder,
    sign: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="Sign the folder with this private key: ssh-keygen -t ed25519 -f KEY."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with exit code 1 if any kernel does not compile.")
    ] = False,
    builders: Builders = None,
    plugin: Plugins = None,
) -> None:
    """Compile the best record of every tuned problem into a folder that tvm_sparse.load reads.

    With --shapes, kernels that were not tuned for this architecture get nearby decisions or a template's default. The
    architecture need not be this machine's: code for sm_90a is built without a GPU.
    """
    with errors():
        import time

        from ..artifacts import signing
        from ..core import machine
        from ..records.queries import best_records
        from ..shipping import hub
        from ..shipping.export import export as export_records

        if operator is not None:
            registry.find(operator)
        where = machine.resolve(target)
        require("compiler", *(["cuda"] if where.kind == "cuda" else []))
        key = None
        if sign is not None:  # before work that takes minutes
            require("sign")
            key = signing.private_key(sign, lambda: typer.prompt(f"passphrase of {sign}", hide_input=True, err=True))
        roots = default_roots(logs)
        problems = shape_files.read(shapes) if shapes is not None else None
        asked = problems if problems is not None else map(parse, best_records(roots, where.arch))
        count = sum(operator in (None, problem.operator) for problem in asked)
        started = time.monotonic()
        left_out: list[LeftOut] = []
        with contextlib.ExitStack() as stack:
            folder = output
            if layout is Layout.kernels:
                folder = stack.enter_context(scratch.folder())
            with _progress(count, where.arch) as show:
                try:
                    entries = export_records(
                        where,
                        folder,
                        roots,
                        only=lambda problem: operator in (None, problem.operator),
                        problems=problems,
                        builders=builders or machine.default_builders(),
                        show=show,
                        skip=left_out.append,
                        key=None if layout is Layout.kernels else key,
                    )
                except LookupError as error:
                    fail(str(error.args[0] if error.args else error))
            use = f"tvm_sparse.load({str(output)!r})"
            if layout is Layout.kernels:
                [folder] = hub.arrange([folder], output, key=key)
                use = f"kernels.get_local_kernel(Path({str(output)!r}))"
            print_entries(entries, folder)
        if left_out:
            print_left_out(left_out, where.arch)
        typer.echo(
            f"{len(entries)} {'library' if len(entries) == 1 else 'libraries'} for {where.arch} in {output},"
            f" {duration(time.monotonic() - started)}.\nUse them with: {use}"
        )
        if left_out and strict:
            raise typer.Exit(FAILED)


@contextlib.contextmanager
def _progress(count: int, arch: str) -> Iterator[Callable[[Entry], None]]:
    """A progress bar on a terminal; otherwise one line for each library."""
    screen = console()
    if not screen.is_terminal:
        done: list[Entry] = []

        def line(entry: Entry) -> None:
            done.append(entry)
            typer.echo(f"built {len(done)}/{count}: {parse(entry.problem).typed}")

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn(f"compiling for {arch}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=count)
        yield lambda entry: bar.advance(task)


def print_entries(entries: list[Entry], folder: Path) -> None:
    cuda = any(entry.kind == "cuda" for entry in entries)
    figures = ["us", "x fallback", "size", *(["registers", "spills"] if cuda else [])]
    made = table("problem", "candidate", "decisions", *figures, right=figures)
    foreign = False
    for entry in entries:
        seconds, fallback = entry.figures.get("seconds"), entry.figures.get("fallback_seconds")
        # Times from another problem's or architecture's record are not times of this kernel.
        mark = "" if entry.chosen == "exact" or seconds is None else "*"
        foreign = foreign or bool(mark)
        how = entry.chosen
        if (arch := entry.figures.get("arch", entry.arch)) != entry.arch:
            how = f"{how}: {arch}"
        cells = [how, us(seconds) + mark, ratio(fallback, seconds) + mark]
        cells.append(size((folder / entry.library).stat().st_size))
        if cuda:
            used = entry.resources or {}
            cells += [str(used.get("registers", "-")), str(used.get("spill_instructions", "-"))]
        made.add_row(parse(entry.problem).typed, str(entry.candidate), *cells)
    console().print(made)
    if foreign:
        typer.echo("* measured for the problem or the architecture that the decisions are from, not for this kernel")


def print_left_out(left_out: list[LeftOut], arch: str) -> None:
    """Print kernels that do not compile, the reasons, and what is built instead."""
    made = table("problem", "candidate", "decisions", "why", "built instead", title=f"Left out for {arch}")
    for one in left_out:
        why = one.why.strip().partition("\n")[0][:200]
        instead = "nothing" if one.instead is None else str(one.instead)
        made.add_row(one.problem.typed, str(one.candidate), one.chosen, why, instead)
    console().print(made)
