"""The auto-tuning community's open formats (github.com/odgaard/TuningSchema): T1, a space as JSON, and T4, its results.

Kernel Tuner and others read and write them. A T4 file of ours holds what a log holds, under `provenance`, beside what
the format asks for, so that reading it gives the same trials; one of somebody else gives rows of the same columns as
ours (`database.rows`), whose operator is the name of the file and whose decisions may be texts.

Programs of ours are generated point by point, and not by a preprocessor, so a T1 file tells other tools what the space
is, not how to compile its points: they can search it on recorded results.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from ..core.candidate import Candidate
from ..core.problem import Problem
from .values import Session, Trial

SCHEMA_VERSION = "1.0.0"
INVALIDITY = {
    "ok": "correct",
    "wrong": "correctness",
    "build-error": "compile",
    "run-error": "runtime",
    "crash": "runtime",
    "timeout": "timeout",
    "rejected": "constraints",
    "environment": "runtime",
}
"""What T4 calls an outcome."""
_OUTCOMES = {"correctness": "wrong", "compile": "build-error", "runtime": "run-error", "timeout": "timeout",
             "constraints": "rejected"}  # fmt: skip
_MILLI = 1e3


class ExchangeError(ValueError):
    """A file that is not of the format; the message says where."""


# --------------------------------------------------------------------------------------------------- results (T4)


def results_of(sessions: Iterable[Session], trials: Iterable[Trial]) -> dict[str, Any]:
    """Trials and their sessions as a T4 document. Times are in milliseconds, as Kernel Tuner writes them.

    Whether inputs were fresh is told by the sessions, in the metadata.
    """
    known = {session.id: session for session in sessions}
    results = []
    for trial in trials:
        session = known.get(trial.session)
        measurements: list[dict[str, Any]] = [
            {"name": name, "value": value, "unit": "bytes" if name.endswith("bytes") else ""}
            for name, value in (trial.resources or {}).items()
        ]
        if trial.seconds:
            measurements.insert(0, {"name": "time", "value": trial.median * _MILLI, "unit": "ms"})
        results.append(
            {
                "timestamp": session.date if session else "",
                "configuration": {"template": trial.candidate.template, **trial.candidate.values},
                "objectives": ["time"],
                "times": {
                    "compilation_time": (trial.build_seconds or 0.0) * _MILLI,
                    "runtimes": [seconds * _MILLI for seconds in trial.seconds],
                },
                "invalidity": INVALIDITY[trial.outcome],
                "correctness": float(trial.outcome == "ok"),
                "measurements": measurements,
                "provenance": {**asdict(trial), "candidate": str(trial.candidate), "seconds": list(trial.seconds)},
            }
        )
    metadata = {"timeunit": "milliseconds", "sessions": [asdict(session) for session in known.values()]}
    return {"schema_version": SCHEMA_VERSION, "results": results, "metadata": metadata}


def records_of(document: Mapping[str, Any]) -> tuple[list[Session], list[Trial]]:
    """What `results_of` wrote; nothing of results of others.

    Raises
    ------
    ExchangeError
        If a record in it is damaged.
    """
    trials = []
    place = "a session"
    try:
        sessions = [Session(**one) for one in document.get("metadata", {}).get("sessions", ())]
        for number, result in enumerate(document["results"]):
            place = f"result {number}"
            found = result.get("provenance")
            if isinstance(found, dict):
                given = {**found, "candidate": Candidate.parse(found["candidate"]), "seconds": tuple(found["seconds"])}
                trials.append(Trial(**given))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ExchangeError(f"{place} is no record: {type(error).__name__}: {error}") from error
    return sessions, trials


def read_results(path: Path) -> dict[str, Any]:
    """A T4 document.

    Raises
    ------
    ExchangeError
        If the file holds none.
    """
    try:
        document = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ExchangeError(f"{path}: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("results"), list):
        raise ExchangeError(f"{path}: expected an object with a list of results (T4)")
    for number, result in enumerate(document["results"]):
        if not isinstance(result, dict):
            raise ExchangeError(f"{path}: result {number}: expected an object, got {type(result).__name__}")
        lacking = [name for name in ("configuration", "times", "invalidity") if name not in result]
        if lacking:
            raise ExchangeError(f"{path}: result {number} lacks {', '.join(lacking)}")
    return document


def foreign_rows(document: Mapping[str, Any], name: str, resources: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Results of somebody else's, as rows; `name` stands for operator, problem and template.

    Of what was measured beside the time the `resources` are kept, by their names.

    A result without run times has that of its objective, in milliseconds unless its unit is another.

    Raises
    ------
    ExchangeError
        If a result is not as the format has it.
    """
    try:
        yield from _foreign_rows(document, name, resources)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ExchangeError(f"a result of {name} is none: {type(error).__name__}: {error}") from error


def _foreign_rows(document: Mapping[str, Any], name: str, resources: Sequence[str]) -> Iterator[dict[str, Any]]:
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    named = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}
    scale = named.get(str(document.get("metadata", {}).get("timeunit", "milliseconds")).lower(), 1e-3)
    for number, result in enumerate(document["results"]):
        times, configuration = result["times"], result["configuration"]
        measured = {one["name"]: one for one in result.get("measurements", ()) if "name" in one}
        seconds = tuple(float(value) * scale for value in times.get("runtimes") or ())
        objective = measured.get(next(iter(result.get("objectives") or ["time"])))
        if not seconds and objective and isinstance(objective.get("value"), int | float):
            seconds = (objective["value"] * units.get(objective.get("unit") or "ms", 1e-3),)
        right = result["invalidity"] == "correct" and bool(seconds)
        build = times.get("compilation_time", times.get("compilation"))
        decisions = ", ".join(f"{decision}={value}" for decision, value in configuration.items())
        yield {
            "kind": "trial",
            "arch": "",
            "operator": name,
            "problem": f"{name}/",
            "candidate": f"{name}@0({decisions})",
            "template": name,
            "version": 0,
            "current": False,
            **{f"decision.{decision}": value for decision, value in configuration.items()},
            "outcome": "ok" if right else _OUTCOMES.get(result["invalidity"], "run-error"),
            "reason": "" if right else "no time" if result["invalidity"] == "correct" else str(result["invalidity"]),
            "build_seconds": None if build is None else float(build) * scale,
            "seconds": statistics.median(seconds) if right else None,
            "seconds_all": seconds if right else (),
            **{one: measured[one]["value"] if one in measured else None for one in resources},
            "predicted": None,
            "order": number,
            "number": number,
            "session": name,
            "date": str(result.get("timestamp", "")),
            "strategy": "",
            "fresh": False,
            "timer": "",
        }


# ----------------------------------------------------------------------------------------------------- inputs (T1)

_TYPES = {"float32": "float", "float16": "half", "int32": "int32", "int64": "int64"}


def inputs_of(
    problem: Problem,
    template: str,
    table: Mapping[str, Sequence[int]],
    points: Iterable[Candidate],
    *,
    results: str = "",
    source: str = "",
) -> dict[str, Any]:
    """A template's space for a problem on a CUDA GPU as a T1 document.

    Restrictions are Python there, so the condition is a list of the points that are allowed. `results` names a file of
    recorded results, `source` one with the CUDA source of a point.
    """
    names = list(table)
    allowed = sorted({tuple(value for _, value in point.decisions) for point in points})
    listed = ", ".join(f"({', '.join(map(str, values))},)" for values in allowed)
    conditions = []
    if len(allowed) < math.prod(map(len, table.values())):
        conditions = [{"Parameters": names, "Expression": f"({', '.join(names)},) in [{listed}]"}]
    kernel: dict[str, Any] = {
        "Language": "CUDA",
        "KernelName": "main_kernel",
        "KernelFile": source,
        "GlobalSizeType": "CUDA",
        # Of generated code the extents are its own.
        "GlobalSize": {"X": "1"},
        "LocalSize": {"X": "threads" if "threads" in table else "1"},
        "Arguments": _arguments(problem),
    }
    if results:
        kernel["SimulationInput"] = results
    return {
        "General": {"FormatVersion": 1, "OutputFile": f"{problem.operator}-{template}", "OutputFormat": "JSON"},
        "ConfigurationSpace": {
            "TuningParameters": [
                {"Name": name, "Type": "int", "Values": f"[{', '.join(map(str, values))}]"}
                for name, values in table.items()
            ],
            "Conditions": conditions,
        },
        "KernelSpecification": kernel,
    }


def _arguments(problem: Problem) -> list[dict[str, Any]]:
    """What the kernels of a problem are called with, as T1 describes arguments."""
    found = []
    for argument, access in [
        *((one, "ReadOnly") for one in problem.kernel_inputs),
        *((one, "WriteOnly") for one in problem.kernel_outputs),
    ]:
        dtype = str(problem.axes.get(argument.dtype, argument.dtype))
        described: dict[str, Any] = {
            "Name": argument.name,
            "Type": _TYPES.get(dtype, "custom"),
            "MemoryType": "Vector" if argument.shape else "Scalar",
            "AccessType": access,
            "FillType": "Random",
        }
        with contextlib.suppress(KeyError):  # of an extent that is known only with the data
            described["Size"] = math.prod(problem.extent(name) for name in argument.shape)
        found.append(described)
    return found


@dataclass(frozen=True)
class Inputs:
    """The space of a T1 file: values by parameter, and conditions as they stand there."""

    table: Mapping[str, tuple[Any, ...]]
    conditions: tuple[str, ...]

    @property
    def product(self) -> int:
        """How many points there are without conditions."""
        return math.prod(map(len, self.table.values()))

    def refused(self) -> Mapping[str, int]:
        """How many points each condition is the first to refuse.

        Raises
        ------
        ExchangeError
            If one cannot be evaluated, as where it divides by zero.
        """
        compiled = {text: _compiled(text, self.table) for text in self.conditions}
        found = dict.fromkeys(self.conditions, 0)
        for values in itertools.product(*self.table.values()):
            point = {**_FUNCTIONS, **dict(zip(self.table, values, strict=True))}
            try:
                text = next((t for t, code in compiled.items() if not eval(code, {"__builtins__": {}}, point)), None)
            except (TypeError, ValueError, ArithmeticError) as error:
                raise ExchangeError(f"a condition cannot be evaluated: {type(error).__name__}: {error}") from error
            if text is not None:
                found[text] += 1
        return found


def read_inputs(path: Path) -> Inputs:
    """The space of a T1 file.

    Raises
    ------
    ExchangeError
        If the file holds none, or a condition that is more than arithmetic and comparisons.
    """
    try:
        space = json.loads(path.read_text())["ConfigurationSpace"]
        table = {one["Name"]: tuple(ast.literal_eval(one["Values"])) for one in space["TuningParameters"]}
        conditions = tuple(one["Expression"] for one in space.get("Conditions", ()))
    except (KeyError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ExchangeError(f"{path}: expected a space (T1): {type(error).__name__}: {error}") from error
    for text in conditions:
        _compiled(text, table)
    return Inputs(table, conditions)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs, "int": int, "round": round}
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Tuple, ast.List, ast.IfExp, ast.Call),
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.Compare),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor),
)


def _compiled(text: str, table: Mapping[str, Any]) -> CodeType:
    """A condition, ready to be evaluated. What is more than arithmetic and comparisons of parameters is refused: a file
    of somebody else's must not run programs."""
    if not isinstance(text, str):
        raise ExchangeError(f"condition {text!r}: expected a text")
    try:
        tree = ast.parse(text.replace("&&", " and ").replace("||", " or ").strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExchangeError(f"condition {text[:100]!r}: {error}") from error
    numbers = {name for name, values in table.items() if all(isinstance(value, int | float) for value in values)}
    for node in ast.walk(tree):
        known = isinstance(node, _NODES) and not (isinstance(node, ast.Call) and node.keywords)
        if isinstance(node, ast.Call):
            known &= isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        if isinstance(node, ast.Name):
            known &= node.id in table or node.id in _FUNCTIONS
        if isinstance(node, ast.Constant):
            known &= isinstance(node.value, int | float | str | bool)
        if isinstance(node, ast.BinOp):  # a text or a list, times a number, is as long as the number is large
            inner = list(ast.walk(node))
            known &= not any(isinstance(one, ast.Tuple | ast.List) for one in inner)
            known &= all(isinstance(one.value, int | float) for one in inner if isinstance(one, ast.Constant))
            known &= all(one.id in numbers or one.id in _FUNCTIONS for one in inner if isinstance(one, ast.Name))
        if not known:
            what = node.id if isinstance(node, ast.Name) else type(node).__name__
            raise ExchangeError(f"condition {text[:100]!r}: {what} is not understood")
    return compile(tree, "<condition>", "eval")
