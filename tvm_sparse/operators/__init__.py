"""The operators, by name, and the way from a text key to a `Problem`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from .bsr_matmul import BsrMatmul
from .nhot_lookup import NhotLookup
from .problem import Argument, Cost, Mismatch, Problem, ProblemError
from .softmax import LogSumExp, Softmax
from .softmax_topk import SoftmaxTopk

__all__ = [
    "OPERATORS",
    "Argument",
    "BsrMatmul",
    "Cost",
    "LogSumExp",
    "Mismatch",
    "NhotLookup",
    "Problem",
    "ProblemError",
    "Softmax",
    "SoftmaxTopk",
    "make",
    "parse",
]

OPERATORS: Mapping[str, type[Problem]] = {
    cls.operator: cls for cls in (SoftmaxTopk, BsrMatmul, NhotLookup, Softmax, LogSumExp)
}


def make(operator: str, axes: Mapping[str, Any]) -> Problem:
    """The problem of `operator` with these axes; numbers may be given as text.

    Raises
    ------
    ProblemError
        For an unknown operator or axis (with the nearest valid names), a missing axis, or a value out of range.
    """
    if operator not in OPERATORS:
        raise ProblemError(f"operator: got {operator!r}; {_nearest(operator, OPERATORS)}")
    cls = OPERATORS[operator]
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in axes:
        if name not in fields:
            raise ProblemError(f"{operator}: unknown axis {name!r}; {_nearest(name, fields)}")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in axes]
    if missing:
        raise ProblemError(f"{operator}: missing axis {', '.join(missing)}; expected {', '.join(fields)}")
    return cls(**{name: _convert(operator, fields[name], value) for name, value in axes.items()})


def parse(key: str) -> Problem:
    """The problem of a text key, as `Problem.key` writes it."""
    operator, _, text = key.partition("/")
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    bad = [name for name, equals, _ in pairs if not equals]
    if bad:
        raise ProblemError(f"problem key: expected axis=value, got {bad[0]!r} in {key!r}")
    return make(operator, {name: value for name, _, value in pairs})


def _convert(operator: str, field: dataclasses.Field, value: Any) -> Any:
    # Dataclass annotations are text under `from __future__ import annotations`.
    kind = {"int": int, "float": float}.get(str(field.type))
    if kind is None or not isinstance(value, str):
        return value
    try:
        return kind(value.replace("_", ""))
    except ValueError:
        raise ProblemError(f"{operator}: {field.name} must be {field.type}, got {value!r}") from None


def _nearest(name: str, valid: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, valid, n=2, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(valid)}"
