"""Recorded trials as a table of pandas: what every study here starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..records.database import rows
from ..runtime import paths

if TYPE_CHECKING:
    import pandas


def trials(
    logs: Path | Sequence[Path] | None = None,
    *,
    operator: str | None = None,
    arch: str | None = None,
    fresh: bool = False,
) -> pandas.DataFrame:
    """Every recorded trial of one kind of timing, a row each, in the order in which they were measured.

    Columns are those of `records.database.rows`: `axis.NAME` and `decision.NAME` hold the problem's axes and the
    point's decisions under the names of the vocabulary, `<NA>` where an operator or a template has no such; `seconds`
    is the median of the repeats in `seconds_all`, NaN unless `outcome` is "ok".

    Parameters
    ----------
    logs
        A folder of records or a file with a measured space, or several; by default the package's and the user's logs.
    operator, arch
        Only these.
    fresh
        Trials with fresh inputs; else all others. No study may compare times of both.
    """
    import pandas

    roots = [logs] if isinstance(logs, str | Path) else logs or [paths.shipped_logs(), paths.user_logs()]
    found = list(rows(map(Path, roots), operator=operator, arch=arch))
    found = [row for row in found if row["kind"] == "trial" and row["fresh"] == fresh]
    found = [{name: row[name] for name in row if name not in ("kind", "fallback_seconds")} for row in found]
    columns = {name: [row[name] for row in found] for name in (found[0] if found else ())}
    return pandas.DataFrame({name: pandas.Series(values, dtype=_dtype(values)) for name, values in columns.items()})


def _dtype(values: Sequence[Any]) -> str | None:
    """Whole numbers stay so where some rows lack them; pandas by itself would make floats of them."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        return "Int64"
    return "float64" if not kinds or kinds <= {int, float} else None
