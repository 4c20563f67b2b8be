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
"""

from __future__ import annotations

import itertools
import math
import tomllib
from pathlib import Path
from typing import Any

from . import registry
from .problem import Problem, ProblemError
from .registry import make

# Of a table. More than anybody tunes, and few enough to be written out in a second.
MOST_PROBLEMS = 100_000


class ShapesError(ProblemError):
    """A file of shapes that does not mean problems; the message names the file, the table and the axis."""


def read(path: Path) -> list[Problem]:
    """The problems of a file, in its order, each once.

    Raises
    ------
    ShapesError
        If the file cannot be read, is not TOML, or a table has an axis or value that its operator cannot have.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ShapesError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # also of a whole number of thousands of digits
        raise ShapesError(f"{path}: not TOML: {error}") from None
    problems: dict[Problem, None] = {}
    for operator, tables in content.items():
        # One table may be written [softmax_topk] as well.
        tables = [tables] if isinstance(tables, dict) else tables
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ShapesError(
                f"{path}: {operator}: expected tables [[{operator}]] with axes, got {tables!r};"
                f" operators are {', '.join(registry.operators())}"
            )
        for number, table in enumerate(tables, start=1):
            where = f"{path}: [[{operator}]] number {number}"
            problems.update(dict.fromkeys(_expand(where, operator, table)))
    if not problems:
        raise ShapesError(f"{path}: no shapes; write one table [[operator]] for each, with its axes")
    return list(problems)


def _expand(where: str, operator: str, table: dict[str, Any]) -> list[Problem]:
    values = {name: value if isinstance(value, list) else [value] for name, value in table.items()}
    for name, choices in values.items():
        if not choices:
            raise ShapesError(f"{where}: {name}: the list is empty")
        for value in choices:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ShapesError(f"{where}: {name}: expected a number, a text or a list of these, got {value!r}")
    if (count := math.prod(map(len, values.values()))) > MOST_PROBLEMS:
        raise ShapesError(f"{where}: its lists mean {count:,} problems; expected at most {MOST_PROBLEMS:,}")
    problems = []
    for combination in itertools.product(*values.values()):
        try:
            problems.append(make(operator, dict(zip(values, combination, strict=True))))
        except (ProblemError, TypeError) as error:
            raise ShapesError(f"{where}: {error}") from None
    return problems
