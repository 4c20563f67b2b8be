"""A file of shapes: many problems in TOML.

[[softmax_topk]]            # one table a group; the table's name is the operator
batch = [1, 10]             # a list stands for each of its values: this table means
vocab = 25000               # 2 x 1 x 2 problems
k = [5, 50]

[[bsr_matmul]]
m = 8
k = 1024
n = 1024
block = 16
sparsity = [0.8, 0.95]

A file may come from somebody else: its size and nesting are limited before it is parsed, and the number of problems
before any is made.
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from . import plain_files, registry
from .problem import Problem, ProblemError
from .registry import make

# Problems in one file: more than anybody tunes, and few enough to be written out in seconds.
MOST_PROBLEMS = 100_000
# Bytes of a file, which is parsed at about a megabyte a second.
MOST_BYTES = 1 << 20
# Depth of nested brackets, and parts of a dotted key: shapes need two and one. The parser recurses as deep as the text,
# and its time grows with the square of a key's parts.
MOST_NESTING, MOST_PARTS = 16, 8
# Text without structure: strings, on one line or several, terminated or not, and comments.
_TEXT = re.compile(
    r""""{3}(?:\\.|[^\\])*?(?:"{3,5}|\Z)|\'{3}.*?(?:\'{3,5}|\Z)|"(?:\\.|[^"\\\n])*+"?|'[^'\n]*+'?|\#[^\n]*+""",
    re.DOTALL,
)
_BETWEEN_KEYS = re.compile(r"[=,\n\[\]{}]")


class ShapesError(ProblemError):
    """A file of shapes that does not describe problems; the message names the file, the table and the axis."""


def read(path: Path) -> list[Problem]:
    """The problems of a file in their order, without duplicates.

    Raises
    ------
    ShapesError
        If the file cannot be read, is not TOML, or a table has an axis or value that its operator cannot have.
    """
    try:
        with plain_files.opened(path, MOST_BYTES) as file:
            text = file.read(MOST_BYTES).decode()
    except plain_files.NotPlain as error:
        raise ShapesError(str(error)) from None
    except OSError as error:
        raise ShapesError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ShapesError(f"{path}: not TOML: {error}") from None
    _check_depth(path, text)
    try:
        content = tomllib.loads(text.replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:  # also for an integer of thousands of digits
        raise ShapesError(f"{path}: not TOML: {_shown(error)}") from None
    groups: list[tuple[str, str, dict[str, list[Any]]]] = []
    for operator, tables in content.items():
        # A single table may also be written [softmax_topk].
        tables = [tables] if isinstance(tables, dict) else tables
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ShapesError(
                f"{path}: {operator}: expected tables [[{operator}]] with axes, got {_shown(tables)};"
                f" operators are {', '.join(registry.operators())}"
            )
        for number, table in enumerate(tables, start=1):
            where = f"{path}: [[{operator}]] number {number}"
            groups.append((where, operator, _lists(where, table)))
    counts = [math.prod(map(len, lists.values())) for _, _, lists in groups]
    for (where, _, _), count in zip(groups, counts, strict=True):
        if count > MOST_PROBLEMS:
            raise ShapesError(f"{where}: its lists mean {count:,} problems; expected at most {MOST_PROBLEMS:,}")
    if (count := sum(counts)) > MOST_PROBLEMS:
        raise ShapesError(
            f"{path}: its {len(groups):,} tables mean {count:,} problems; expected at most {MOST_PROBLEMS:,} in a file"
        )
    problems: dict[Problem, None] = {}
    for where, operator, lists in groups:
        problems.update(dict.fromkeys(_expand(where, operator, lists)))
    if not problems:
        raise ShapesError(f"{path}: no shapes; write one table [[operator]] for each, with its axes")
    return list(problems)


def _check_depth(path: Path, text: str) -> None:
    """Raise if brackets are nested too deep, or a key has too many parts; other errors are left to the parser."""
    structure = _TEXT.sub(" ", text)
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", structure):
        depth = max(0, depth + (1 if bracket in "[{" else -1))
        if depth > MOST_NESTING:
            raise ShapesError(
                f"{path}: brackets lie more than {MOST_NESTING} deep within each other; write a table [[operator]] for"
                " each shape, with a number, a text or a list of these for each axis"
            )
    if (most := max(piece.count(".") for piece in _BETWEEN_KEYS.split(structure)) + 1) > MOST_PARTS:
        raise ShapesError(
            f"{path}: a key has {most:,} parts; expected at most {MOST_PARTS}, and one for an axis of [[operator]]"
        )


def _lists(where: str, table: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of each axis of a table."""
    values = {name: value if isinstance(value, list) else [value] for name, value in table.items()}
    for name, choices in values.items():
        if not choices:
            raise ShapesError(f"{where}: {name}: the list is empty")
        for value in choices:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ShapesError(f"{where}: {name}: expected a number, a text or a list of these, got {_shown(value)}")
    return values


def _expand(where: str, operator: str, lists: dict[str, list[Any]]) -> list[Problem]:
    problems = []
    for combination in itertools.product(*lists.values()):
        try:
            problems.append(make(operator, dict(zip(lists, combination, strict=True))))
        except (ProblemError, TypeError, ValueError, OverflowError) as error:
            raise ShapesError(f"{where}: {_shown(error)}") from None
    return problems


def _shown(value: Any) -> str:
    """A value or an error as text, cut to a length that fits into a message."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_MOST_SHOWN = 1000
