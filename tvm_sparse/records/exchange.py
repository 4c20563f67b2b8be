"""The auto-tuning community's open formats (github.com/odgaard/TuningSchema): T1, a space as JSON, and T4, its results.

Kernel Tuner and others read and write them. A T4 file written here holds, beside what the format requires, the content
of a log under `provenance`, so that reading it gives the same trials. A foreign T4 file gives rows with the same
columns (`database.rows`), whose operator is the name of the file and whose decisions may be texts.

Programs here are generated point by point, not by a preprocessor, so a T1 file describes the space to other tools but
not how to compile its points. They can search it on recorded results.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.candidate import Candidate
from ..core.problem import Problem
from .expressions import MOST_ITEMS, Condition, ExpressionError, condition, evaluated
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
    """A file that does not follow the format; the message says where."""


# --------------------------------------------------------------------------------------------------- results (T4)


def results_of(sessions: Iterable[Session], trials: Iterable[Trial]) -> dict[str, Any]:
    """Trials and their sessions as a T4 document. Times are in milliseconds, as Kernel Tuner writes them.

    The sessions in the metadata say whether inputs were fresh.
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
    """The sessions and trials in a document that `results_of` made; none for foreign results.

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
    """Read a T4 document.

    Raises
    ------
    ExchangeError
        If the file does not hold one.
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
    """Foreign results as rows; `name` is used as operator, problem and template.

    Beside the time, the measurements named in `resources` are kept.

    A result without run times takes the value of its objective as the time, in milliseconds unless another unit is
    given.

    Raises
    ------
    ExchangeError
        If a result does not follow the format.
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

    Restrictions here are Python code, so the condition in the document is a list of the allowed points. `results` names
    a file of recorded results, `source` a file with the CUDA source of a point.
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
        # Generated code has its extents built in.
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
    """The arguments of a problem's kernels, as T1 describes arguments."""
    found = []
    for argument, access in [
        *((one, "ReadOnly") for one in problem.kernel_inputs),
        *((one, "WriteOnly") for one in problem.kernel_outputs),
    ]:
        dtype = problem.dtype_of(argument)
        described: dict[str, Any] = {
            "Name": argument.name,
            "Type": _TYPES.get(dtype, "custom"),
            "MemoryType": "Vector" if argument.shape else "Scalar",
            "AccessType": access,
            "FillType": "Random",
        }
        with contextlib.suppress(KeyError):  # its extent is known only with the data
            described["Size"] = math.prod(problem.extent(name) for name in argument.shape)
        found.append(described)
    return found


# Limits: combinations of one condition's parameters, which are evaluated, and of all connected parameters, which are
# counted.
MOST_EVALUATIONS = 20_000_000
MOST_COUNTED = 1 << 30
_AT_ONCE = 1 << 24  # combinations evaluated in one array
_FAILS = 2  # instead of a truth value: the condition cannot be evaluated there


class TooLarge(ExchangeError):
    """A space with too many combinations to enumerate."""


@dataclass(frozen=True)
class Inputs:
    """The space of a T1 file: values by parameter, and conditions as written in the file."""

    table: Mapping[str, tuple[Any, ...]]
    conditions: tuple[str, ...]

    @property
    def product(self) -> int:
        """Number of points without conditions."""
        return math.prod(map(len, self.table.values()))

    def refused(self) -> Mapping[str, int]:
        """Number of points by the first condition that refuses them.

        Parameters that no condition connects are counted separately, so that a space may have any number of points.

        Raises
        ------
        ExchangeError
            If a condition cannot be evaluated, as where it divides by zero; as `TooLarge` if more than
            `MOST_EVALUATIONS` combinations of a condition's parameters, or `MOST_COUNTED` of parameters that conditions
            connect, would have to be gone through.
        """
        conditions = self._conditions()
        groups = _connected(self.table, conditions)
        left = {group: math.prod(len(self.table[name]) for name in group) for group in groups}
        first: dict[str, int] = {}
        for group in groups:
            own = [one for one in conditions if set(one.parameters) <= set(group) and one.parameters]
            first |= dict(zip((one.text for one in own), self._first_refused(group, own), strict=True))
        found = {}
        for one in conditions:
            if not one.parameters:
                found[one.text] = 0
                if (everything := math.prod(left.values())) and not self._truth(one, ()):
                    found[one.text], left = everything, dict.fromkeys(left, 0)
                continue
            [mine] = [group for group in groups if one.parameters[0] in group]
            # Nothing remains of a group where a condition without parameters has refused everything.
            refused = min(first[one.text], left[mine])
            found[one.text] = refused * math.prod(count for group, count in left.items() if group != mine)
            left[mine] -= refused
        return found

    def sampled(self, count: int, seed: int = 0) -> tuple[int, int]:
        """Draw `count` points at random; returns how many of them all conditions allow, and how many were drawn."""
        import random

        conditions, draw = self._conditions(), random.Random(seed)
        allowed = 0
        for _ in range(count):
            point = {name: draw.choice(values) for name, values in self.table.items()}
            allowed += all(self._truth(one, [point[name] for name in one.parameters]) for one in conditions)
        return allowed, count

    def _conditions(self) -> list[Condition]:
        return [condition(text, self.table) for text in dict.fromkeys(self.conditions)]

    def _truth(self, one: Condition, values: Sequence[Any]) -> bool:
        try:
            return bool(one.function(*values))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ExchangeError(_cannot(one, error)) from error

    def _truths(self, one: Condition) -> Any:
        """An array of the condition's value for each combination of its parameters: 1, 0 or `_FAILS`."""
        import numpy as np

        values = [self.table[name] for name in one.parameters]
        count = math.prod(map(len, values))
        if count > MOST_EVALUATIONS:
            raise TooLarge(
                f"condition {one.text[:100]!r}: its parameters have {count:,} combinations; at most"
                f" {MOST_EVALUATIONS:,} are gone through"
            )

        def careful(*point: Any) -> int:
            try:
                return bool(one.function(*point))
            except (TypeError, ValueError, ArithmeticError):
                return _FAILS

        try:
            said = np.fromiter(map(bool, itertools.starmap(one.function, itertools.product(*values))), np.int8, count)
        except (TypeError, ValueError, ArithmeticError):
            said = np.fromiter(itertools.starmap(careful, itertools.product(*values)), np.int8, count)
        return said.reshape([len(choices) for choices in values])

    def _first_refused(self, group: Sequence[str], conditions: Sequence[Condition]) -> list[int]:
        """Number of combinations of these parameters by the first condition that refuses them."""
        import numpy as np

        if not conditions:
            return []
        extents = [len(self.table[name]) for name in group]
        if (count := math.prod(extents)) > MOST_COUNTED:
            names = ", ".join(group)
            raise TooLarge(
                f"conditions connect {names}: {count:,} combinations; at most {MOST_COUNTED:,} are gone through"
            )
        truths = []
        for one in conditions:
            shape = [len(self.table[name]) if name in one.parameters else 1 for name in group]
            truths.append(self._truths(one).reshape(shape))
        outer = 0
        while math.prod(extents[outer:]) > _AT_ONCE:
            outer += 1
        found = [0] * len(conditions)
        for place in itertools.product(*map(range, extents[:outer])):
            alive = np.ones(extents[outer:], bool)
            for number, (one, truth) in enumerate(zip(conditions, truths, strict=True)):
                said = truth[tuple(at if truth.shape[axis] > 1 else 0 for axis, at in enumerate(place))]
                if np.any(alive & (said == _FAILS)):
                    self._raise(one)
                refused = alive & (said == 0)
                found[number] += int(np.count_nonzero(refused))
                alive &= ~refused
        return found

    def _raise(self, one: Condition) -> None:
        """Raise for the first combination for which a condition cannot be evaluated."""
        for point in itertools.product(*(self.table[name] for name in one.parameters)):
            self._truth(one, point)


def _cannot(one: Condition, error: Exception) -> str:
    return f"condition {one.text[:100]!r} cannot be evaluated: {type(error).__name__}: {error}"


def _connected(table: Mapping[str, Sequence[Any]], conditions: Iterable[Condition]) -> list[tuple[str, ...]]:
    """Groups of parameters such that no condition names parameters of two of them."""
    group = {name: {name} for name in table}
    for one in conditions:
        joined = set().union(*(group[name] for name in one.parameters))
        group.update(dict.fromkeys(joined, joined))
    return list(dict.fromkeys(tuple(name for name in table if name in group[first]) for first in table))


def read_inputs(path: Path) -> Inputs:
    """The space of a T1 file.

    Values are a list, or a text with an expression that gives a list: numbers and texts, `range`, comprehensions,
    arithmetic (`records.expressions`). No code of the file is run.

    Raises
    ------
    ExchangeError
        If the file holds no space, values that are not a list, or a condition with more than arithmetic and
        comparisons.
    """
    try:
        space = json.loads(path.read_text())["ConfigurationSpace"]
        listed = {one["Name"]: one["Values"] for one in space["TuningParameters"]}
        conditions = tuple(one["Expression"] for one in space.get("Conditions") or ())
        if not all(isinstance(name, str) for name in listed):
            raise ValueError("a parameter's name is a text")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ExchangeError(f"{path}: expected a space (T1): {type(error).__name__}: {error}") from error
    table = {name: _listed(f"{path}: parameter {name}", values) for name, values in listed.items()}
    for text in conditions:
        try:
            condition(text, table)
        except ExpressionError as error:
            raise ExchangeError(f"{path}: condition {str(text)[:100]!r}: {error}") from error
    return Inputs(table, conditions)


def _listed(where: str, values: Any) -> tuple[Any, ...]:
    """The values of a parameter."""
    try:
        found = evaluated(values) if isinstance(values, str) else values
    except ExpressionError as error:
        raise ExchangeError(f"{where}: values {values[:100]!r}: {error}") from error
    if isinstance(found, range) and len(found) <= MOST_ITEMS:
        found = list(found)
    if not isinstance(found, list | tuple) or not 0 < len(found) <= MOST_ITEMS:
        what = f"{len(found):,} values" if isinstance(found, list | tuple | range) else type(found).__name__
        raise ExchangeError(f"{where}: expected a list of 1 to {MOST_ITEMS:,} values, got {what}")
    for value in found:
        if not isinstance(value, int | float | str):
            raise ExchangeError(f"{where}: expected numbers and texts, got {value!r:.100}")
    return tuple(found)
