"""Recorded trials as points of spaces: the rows from which studies are made, and what models see of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pandas


def points(table: pandas.DataFrame) -> pandas.DataFrame:
    """A row for each point that was right, at its fastest trial, with `ratio`: its time over the problem's best.

    Of several versions of a template the latest one counts: decisions of others mean other programs.
    """
    right = table[table["outcome"] == "ok"]
    latest = right.groupby(["operator", "template"])["version"].transform("max")
    right = right[right["version"] == latest]
    first = right.sort_values("seconds", kind="stable").drop_duplicates(["arch", "problem", "candidate"])
    first = first.sort_index()
    best = first.groupby(["arch", "problem"])["seconds"].transform("min")
    return first.assign(ratio=first["seconds"] / best)


def searches(table: pandas.DataFrame) -> pandas.DataFrame:
    """The points of each problem's longest session that were right, in the order in which they were measured, with
    `ratio`: over the best of that session. A space that was measured in full is one.

    Other sessions of a problem began with what was known already, or had other templates.
    """
    right = table[table["outcome"] == "ok"].drop_duplicates(["arch", "problem", "session", "candidate"])
    length = right.groupby(["arch", "problem", "session"])["order"].transform("size")
    right = right[length == length.groupby([right["arch"], right["problem"]]).transform("max")]
    first = right.groupby(["arch", "problem"])["session"].transform("first")
    right = right[right["session"] == first].sort_values(["arch", "problem", "order"], kind="stable")
    return right.assign(ratio=right["seconds"] / right.groupby(["arch", "problem"])["seconds"].transform("min"))


def numbers(values: pandas.Series) -> np.ndarray:
    """log2(value + 1), as decisions and extents are mostly powers of two, or a text's place; -1 where there is none."""
    import numpy as np
    import pandas

    if not pandas.api.types.is_numeric_dtype(values):
        return pandas.factorize(values)[0].astype(float)
    found = values.astype(float)
    return (np.log2(found + 1) if not (found < 0).any() else found).fillna(-1.0).to_numpy()
