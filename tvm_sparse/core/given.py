"""Arguments that are not arrays: checks of integers, and descriptions of wrong arguments for messages."""

from __future__ import annotations

import operator
import os
from typing import Any

LONGEST = 60  # characters of a text that a message shows


def integer(name: str, value: Any) -> int:
    """The argument `name` as an int.

    Raises
    ------
    TypeError
        If it is not an integer.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}") from None


def described(given: Any) -> str:
    """Describe an argument for a message: its kind, and, where known, the call that turns it into an array
    or a matrix.
    """
    if isinstance(given, (str, bytes, os.PathLike)):
        text = os.fsdecode(given) if not isinstance(given, bytes) else given.decode(errors="replace")
        text = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
        return (
            f"{type(given).__name__} {text!r}; read a file first, as by scipy.io.mmread, scipy.sparse.load_npz,"
            " numpy.load or torch.load"
        )
    kind = type(given).__name__
    if isinstance(given, type):
        return f"the class {given.__name__}"
    layout = getattr(given, "format", None)
    if isinstance(layout, str) and hasattr(given, "tocsr"):
        return f"{kind}, a SciPy matrix in {layout.upper()} format"
    if callable(getattr(given, "to_numpy", None)):
        return f"{kind}; use its to_numpy()"
    if isinstance(given, (list, tuple)):
        return f"{kind}; use numpy.asarray or torch.as_tensor"
    return kind


def block_of(block: Any) -> tuple[int, int]:
    """Rows and columns of a block, given as one number or two. Raises ValueError for numbers below 1."""
    given = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    if len(given) != 2 or any(integer("block", extent) < 1 for extent in given):
        raise ValueError(f"block: expected a positive number, or one for rows and one for columns, got {block!r}")
    return given[0], given[1]
