"""`tvm-sparse migrate`: records of before, under the names that decisions have now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import errors


def migrate(
    logs: Annotated[list[Path] | None, typer.Argument(help="Folders of records.  \\[default: yours]")] = None,
) -> None:
    """Rename decisions in records of an earlier version. Every figure stays; running it again changes nothing."""
    with errors():
        from ..records.migrate import migrate as rewrite
        from ..runtime import paths
        from ..schedules.vocabulary import renamed

        for root in logs or [paths.user_logs()]:
            for path, count in rewrite(root, renamed).items():
                typer.echo(f"{path}: {count} records renamed")
