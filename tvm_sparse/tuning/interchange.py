"""Conversion of trials to and from MetaSchedule's databases (`database_workload.json`, `database_tuning_record.json`).

An exported trace contains a candidate's decisions: it samples each decision on a placeholder function and annotates it,
as in the search (`search`). Problem, architecture and the template's version are annotations of the trace and
attributes of the workload, so that a query never returns one problem's record for another. Kernels are not included:
MetaSchedule can read, rank and merge such a database, but not compile from it.

A trace can contain code that runs when it is loaded (`pragma_import_llvm`). So no trace is loaded: an imported file is
parsed as JSON, every instruction and annotation must be one that `export` writes, and the values must be a point of the
template's space. The workloads' file, serialised IR, is not opened. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts import trust
from ..core import machine, spaces
from ..core.candidate import Candidate
from ..core.machine import Machine, UnknownArch
from ..core.problem import Problem, ProblemError
from ..core.registry import parse
from ..core.template import NotApplicable
from ..records import Log, Session, Trial, utc_now
from ..records.database import logs_of
from . import search
from .search import MARK

RECORDS, WORKLOADS = "database_tuning_record.json", "database_workload.json"
PROBLEM, ARCH, VERSION = "tvm_sparse_problem", "tvm_sparse_arch", "tvm_sparse_version"
# MetaSchedule's time for a candidate that failed.
FAILED = 1e10
UNKNOWN_REASON = "failed before it was imported: MetaSchedule's records do not say how"
MOST_BYTES = 1 << 30
_MOST_LINE = 1 << 20
_SHOWN = 10  # lines that an error names


class Refused(ProblemError):
    """A database that is refused; the message names the lines and the defect of each."""


@dataclass(frozen=True)
class Read:
    """The content of one line of a database."""

    problem: Problem
    machine: Machine
    candidate: Candidate
    seconds: tuple[float, ...] | None  # None for a failure


# ---------------------------------------------------------------------------------------------------- export


def export(roots: Iterable[Path], folder: Path, wanted: str = "") -> tuple[int, int]:
    """Write the trials of folders of records as a database; returns the number of trials, and of those left out because
    they are not points of a present space.

    Trials that failed because of the machine are left out; a candidate's own failures get MetaSchedule's time for
    failures. Trials with fresh inputs are left out too, since a database cannot mark their times.

    Parameters
    ----------
    wanted
        Only problems whose keys begin with this text.

    Raises
    ------
    ProblemError
        If the folder has a database already.
    """
    present = [name for name in (RECORDS, WORKLOADS) if (folder / name).exists()]
    if present:
        raise ProblemError(f"{folder}: has {present[0]} already; name another folder")
    search.prepare()
    from tvm.s_tir import meta_schedule as ms

    from ..artifacts.compile import target_of

    folder.mkdir(parents=True, exist_ok=True)
    database = ms.database.JSONDatabase(work_dir=str(folder), allow_missing=True)
    workloads: dict[tuple[str, str], Any] = {}
    count = left_out = 0
    for log in (log for root in roots for log in logs_of(root)):
        for trial in log.read().timed(fresh=False):
            if trial.outcome == "environment" or not trial.problem.startswith(wanted):
                continue
            try:
                problem, where = parse(trial.problem), machine.resolve(trial.arch)
                reason = spaces.refusal(trial.candidate, problem, where)
                table = {} if reason else spaces.find(trial.candidate.template).space(problem, where)
            except (ProblemError, UnknownArch, NotApplicable) as error:
                reason = str(error)
            if reason:
                left_out += 1
                continue
            notes = {PROBLEM: problem.key, ARCH: trial.arch}
            place = problem.key, trial.arch
            if place not in workloads:
                module = search.placeholder(**notes)
                workloads[place] = module, database.commit_workload(module)
            module, workload = workloads[place]
            notes[VERSION] = str(trial.candidate.version)
            schedule = search.drawn(module, trial.candidate.template, table, trial.candidate.values, **notes)
            seconds = list(trial.seconds) or [FAILED]
            record = ms.database.TuningRecord(schedule.trace, workload, seconds, target_of(where), [])
            database.commit_tuning_record(record)
            count += 1
    return count, left_out


# ---------------------------------------------------------------------------------------------------- import


def import_(path: Path, root: Path) -> tuple[int, int]:
    """Append a database's trials to the logs under a folder; returns the number of new trials, and of those already
    present.

    They form a session of their own without a ranking, so look-up does not use them. The next tuning run treats them as
    measured, and verifies and times the best of all known candidates again in its final.

    Parameters
    ----------
    path
        A folder with `database_tuning_record.json`, or that file.

    Raises
    ------
    Refused
        If a line differs from what `export` writes; then nothing is imported.
    """
    found = list(read(path))
    places = dict.fromkeys((one.machine.arch, one.problem.operator) for one in found)
    session = Session(
        id=uuid.uuid4().hex[:12],
        date=utc_now(),
        machine={"name": "unknown (imported)"},
        versions={},
        timer="unknown (imported from MetaSchedule's JSON)",
        inputs={},
    )
    appended = 0
    for arch, operator in places:
        log = Log(root, arch, operator)
        there = {(trial.problem, trial.candidate, trial.seconds) for trial in log.read().timed(fresh=False)}
        new: dict[Any, Trial] = {}
        for one in found:
            key = one.problem.key, one.candidate, one.seconds or ()
            if (one.machine.arch, one.problem.operator) == (arch, operator) and key not in there and key not in new:
                outcome = ("run-error", UNKNOWN_REASON, ()) if one.seconds is None else ("ok", "", one.seconds)
                new[key] = Trial(one.problem.key, arch, one.candidate, *outcome, None, session.id, len(new))
        if new:
            log.append(session, *new.values())
        appended += len(new)
    return appended, len(found) - appended


def read(path: Path) -> Iterator[Read]:
    """Read and check the lines of a database; see `import_`."""
    file = path / RECORDS if path.is_dir() else path
    try:
        content = trust.read(file, MOST_BYTES, owned=False)
    except OSError as error:
        raise Refused(f"{file}: {error.strerror or error}") from None
    found, refused = [], []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(_line(line))
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            refused.append(f"{file}:{number}: {str(error)[:300]}")
    if refused:
        more = [f"and {len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else []
        raise Refused(os.linesep.join(["nothing was imported:", *refused[:_SHOWN], *more]))
    return iter(found)


def _line(line: bytes) -> Read:
    if len(line) > _MOST_LINE:
        raise ValueError(f"has {len(line)} bytes; expected at most {_MOST_LINE}")
    content = json.loads(line, parse_constant=_no_number)
    _expect(_is_list(content, 2) and _is_list(content[1], 4), "[workload, [trace, times, target, arguments]]")
    trace, times, target, _ = content[1]
    _expect(_is_list(trace, 2) and all(isinstance(part, list) for part in trace), "[instructions, decisions]")
    notes = _notes(*trace)
    for name in (PROBLEM, ARCH, VERSION, MARK + "template"):
        if not isinstance(notes.get(name), str):
            raise ValueError(f"the trace does not note {name}: it is of another program than a template's decisions")
    problem, where = parse(str(notes.pop(PROBLEM))), machine.resolve(str(notes.pop(ARCH)))
    template, version = str(notes.pop(MARK + "template")), str(notes.pop(VERSION))
    values = [(name.removeprefix(MARK), value) for name, value in notes.items() if isinstance(value, int)]
    if not version.isdecimal() or len(version) > 9 or len(values) != len(notes):
        raise ValueError("a note that is to be a number is none")
    candidate = Candidate(template, int(version), tuple(values))
    if reason := spaces.refusal(candidate, problem, where):
        raise ValueError(f"{candidate} is not a point of the space for {problem} on {where.arch}: {reason}")
    _expect(isinstance(target, dict) and target.get("kind") == where.kind, f"a target of kind {where.kind}")
    named = target.get("arch" if where.kind == "cuda" else "mcpu", where.arch)
    _expect(named == where.arch.replace("compute_", "sm_"), f"a target for {where.arch}")
    return Read(problem, where, candidate, _seconds(times))


def _notes(instructions: Sequence[Any], decisions: Sequence[Any]) -> dict[str, str | int]:
    """A trace's annotations on its placeholder, if the trace does nothing else."""
    drawn: dict[int, int] = {}
    for pair in decisions:
        _expect(_is_list(pair, 2) and all(type(number) is int for number in pair), "pairs of numbers as decisions")
        drawn[pair[0]] = pair[1]
    notes: dict[str, str | int] = {}
    variables: dict[str, int] = {}
    block = None
    for number, instruction in enumerate(instructions):
        _expect(_is_list(instruction, 4), "[kind, inputs, attributes, outputs] as an instruction")
        kind, inputs, attributes, outputs = instruction
        _expect(isinstance(kind, str) and all(isinstance(part, list) for part in instruction[1:]), "lists")
        if kind == "EnterPostproc":
            _expect(not inputs and not attributes and not outputs, "EnterPostproc without arguments")
        elif kind == "GetSBlock":
            _expect(attributes == ["root", "main"] and not inputs and _is_name(outputs), "GetSBlock of main's root")
            _expect(block is None, "one block")
            block = outputs[0]
        elif kind == "SampleCategorical":
            _expect(not inputs and _is_name(outputs) and _is_list(attributes, 2), "SampleCategorical of values")
            choices, which = attributes[0], drawn.get(number)
            _expect(isinstance(choices, list) and all(type(choice) is int for choice in choices), "whole numbers")
            _expect(which is not None and 0 <= which < len(choices), "a decision for each drawing, of its values")
            assert which is not None
            variables[outputs[0]] = choices[which]
        elif kind == "Annotate":
            _expect(_is_list(inputs, 2) and _is_list(attributes, 1) and not outputs, "Annotate of a block")
            name, value = attributes[0], inputs[1]
            _expect(block is not None and inputs[0] == block, "Annotate of main's root")
            if not isinstance(name, str) or not (name.startswith(MARK) or name in (PROBLEM, ARCH, VERSION)):
                raise ValueError(f"annotation {str(name)[:80]!r} is none of those that note a decision")
            _expect(isinstance(value, str) and name not in notes, "one value a note")
            is_text = len(value) >= 2 and value[0] == value[-1] == '"'
            if not is_text and value not in variables:
                raise ValueError(f"annotation {name}: expected a text or what was drawn, got {value[:80]!r}")
            notes[name] = value[1:-1] if is_text else variables[value]
        else:
            raise ValueError(f"instruction {kind[:80]!r} is none of those that note a decision")
    return notes


def _seconds(times: Any) -> tuple[float, ...] | None:
    _expect(isinstance(times, list) and all(type(one) in (int, float) for one in times), "a list of times")
    _expect(bool(times) and all(math.isfinite(one) and one > 0 for one in times), "times that are finite and positive")
    return None if any(one >= FAILED for one in times) else tuple(map(float, times))


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def _is_name(value: list[Any]) -> bool:
    return len(value) == 1 and isinstance(value[0], str)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"expected {what}")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
