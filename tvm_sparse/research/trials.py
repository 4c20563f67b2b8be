"""Recorded trials as a table of pandas, the input of every study."""

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
    """Every recorded trial of one kind of timing, one row each, in the order of their measurement.

    Columns are those of `records.database.rows`: `axis.NAME` and `decision.NAME` hold the problem's axes and the
    point's decisions under the names of the vocabulary, `<NA>` where an operator or a template lacks it; `seconds` is
    the median of the repeats in `seconds_all`, NaN unless `outcome` is "ok".

    Parameters
    ----------
    logs
        A folder of records or a file with a measured space, or several; by default the package's and the user's logs.
    operator, arch
        Only trials of this operator, and of this architecture.
    fresh
        Whether to take trials with fresh inputs, or all others. Their times must not be compared.
    """
    import pandas

    roots = [logs] if isinstance(logs, str | Path) else logs or [paths.shipped_logs(), paths.user_logs()]
    found = list(rows(map(Path, roots), operator=operator, arch=arch))
    found = [row for row in found if row["kind"] == "trial" and row["fresh"] == fresh]
    found = [{name: row[name] for name in row if name not in ("kind", "fallback_seconds")} for row in found]
    columns = {name: [row[name] for row in found] for name in (found[0] if found else ())}
    return pandas.DataFrame({name: pandas.Series(values, dtype=_dtype(values)) for name, values in columns.items()})


def _dtype(values: Sequence[Any]) -> str | None:
    """The pandas dtype for a column: integers stay integers even if some rows lack them, which pandas would convert to
    floats.
    """
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        return "Int64"
    return "float64" if not kinds or kinds <= {int, float} else None
