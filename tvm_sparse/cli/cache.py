"""`tvm-sparse cache`: show or remove the libraries that calls have compiled for this user."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from .common import errors, size


class Action(enum.StrEnum):
    show = "show"
    clean = "clean"


def cache(
    action: Annotated[
        Action, typer.Argument(help="clean removes the libraries; calls compile them again.")
    ] = Action.show,
    arch: Annotated[str | None, typer.Option("--target", "--arch", help="Only this architecture's.")] = None,
) -> None:
    """Show the libraries that calls have compiled for this user, or remove them. Records stay."""
    with errors():
        from ..runtime import cache as compiled
        from ..runtime import paths

        root = paths.user_cache()
        folders = sorted(path for path in root.glob("*") if path.is_dir() and arch in (None, path.name))
        for folder in folders:
            count, total = _libraries(folder)
            if action is Action.clean:
                compiled.clean(folder)
            done = "removed" if action is Action.clean else f"in {folder}"
            typer.echo(f"{folder.name}: {count} {'library' if count == 1 else 'libraries'}, {size(total)}, {done}")
        if not folders:
            typer.echo(f"nothing{f' for {arch}' if arch else ''} in {root}")


def _libraries(folder: Path) -> tuple[int, int]:
    """Number of libraries, and their bytes."""
    sizes = [path.stat().st_size for path in folder.glob("*.so")]
    return len(sizes), sum(sizes)
