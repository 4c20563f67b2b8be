"""Recorded trials as points of spaces: the rows for studies, and their numbers for models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pandas


def points(table: pandas.DataFrame) -> pandas.DataFrame:
    """A row for each right point, from its fastest trial, with `ratio`: its time over the problem's best.

    If a template has several versions, the latest one counts, since decisions of others mean other programs.
    """
    right = table[table["outcome"] == "ok"]
    latest = right.groupby(["operator", "template"])["version"].transform("max")
    right = right[right["version"] == latest]
    first = right.sort_values("seconds", kind="stable").drop_duplicates(["arch", "problem", "candidate"])
    first = first.sort_index()
    best = first.groupby(["arch", "problem"])["seconds"].transform("min")
    return first.assign(ratio=first["seconds"] / best)


def searches(table: pandas.DataFrame) -> pandas.DataFrame:
    """The right points of each problem's longest session, in the order of their measurement, with `ratio`: time over
    the best of that session. A completely measured space counts as a session.

    Other sessions of a problem began with known points, or had other templates.
    """
    right = table[table["outcome"] == "ok"].drop_duplicates(["arch", "problem", "session", "candidate"])
    length = right.groupby(["arch", "problem", "session"])["order"].transform("size")
    right = right[length == length.groupby([right["arch"], right["problem"]]).transform("max")]
    first = right.groupby(["arch", "problem"])["session"].transform("first")
    right = right[right["session"] == first].sort_values(["arch", "problem", "order"], kind="stable")
    return right.assign(ratio=right["seconds"] / right.groupby(["arch", "problem"])["seconds"].transform("min"))


def numbers(values: pandas.Series) -> np.ndarray:
    """Values as numbers: log2(value + 1), since decisions and extents are mostly powers of two; a text's index; -1 for
    missing ones.
    """
    import numpy as np
    import pandas

    if not pandas.api.types.is_numeric_dtype(values):
        return pandas.factorize(values)[0].astype(float)
    found = values.astype(float)
    return (np.log2(found + 1) if not (found < 0).any() else found).fillna(-1.0).to_numpy()
