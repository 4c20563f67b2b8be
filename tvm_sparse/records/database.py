"""Operations on whole folders of records: listing, verification, merging, pruning, tables."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import machine, registry, spaces
from ..core.problem import ProblemError
from ..core.template import Launch, NotApplicable
from . import exchange, space
from .codec import encode
from .log import Contents, Log
from .migrate import Present
from .values import FOLDER_NAME, Best, Record, Session, Trial, operator_of


@dataclass(frozen=True)
class Damage:
    """A defect of a file; line 0 stands for the file as a whole."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def logs_of(root: Path) -> list[Log]:
    """The logs in a folder, one for each architecture and operator."""
    places = {path.parent for name in ("trials", "best") for path in Path(root).glob(f"*/*/{name}.jsonl")}
    named = [place for place in places if all(map(FOLDER_NAME.fullmatch, (place.parent.name, place.name)))]
    return [Log(root, place.parent.name, place.name) for place in sorted(named)]


def verify(root: Path) -> list[Damage]:
    """The defects of the logs in a folder.

    A defect is a line that cannot be used. Since a file that was cut between two lines has only valid lines, a session
    is a defect too if trials in its middle are missing, if it has fewer trials than its ranking says, or if its own
    line is missing.
    """
    found = []
    for log in logs_of(root):
        trials, bests = log.read(), log.read_best()
        for path, contents in ((log.trials_path, trials), (log.best_path, bests)):
            found += [Damage(path, skipped.line, skipped.reason) for skipped in contents.skipped]
        orders: dict[str, Counter[int]] = defaultdict(Counter)
        problems: dict[str, Counter[str]] = defaultdict(Counter)
        for trial in trials.trials:
            orders[trial.session][trial.order] += 1
            problems[trial.session][trial.problem] += 1
        known = {session.id for session in trials.sessions}
        for session, order in orders.items():
            there = sorted(number for number in order if number >= 0)
            # Counted, not listed: a damaged line may claim any number.
            lacking = there[-1] + 1 - len(there) if there else 0
            if session not in known:
                found.append(Damage(log.trials_path, 0, f"session {session} has trials, and no line of its own"))
            if lacking:
                gaps = (range(before + 1, number) for before, number in itertools.pairwise([-1, *there]))
                first = list(itertools.islice(itertools.chain.from_iterable(gaps), 5))
                numbers = ", ".join(map(str, first)) + (", ..." if lacking > 5 else "")
                found.append(Damage(log.trials_path, 0, f"session {session} lacks {lacking} trials: {numbers}"))
        for best in bests.bests:
            left = problems[best.session][best.problem]
            if best.trials is not None and left < best.trials:
                what = f"session {best.session} had {best.trials} trials of {best.problem}, of which {left} are here"
                found.append(Damage(log.trials_path, 0, what))
    return found


def merge(sources: Sequence[Path], target: Path) -> int:
    """Append to `target` the records of other folders that it lacks; returns their number.

    If a problem has several rankings, that of the latest session is written last and therefore used.
    """
    count = 0
    for source in sources:
        for log in logs_of(source):
            into = Log(target, log.arch, log.operator)
            new = _absent(log.read(), into.read())
            into.append(*new)
            theirs = log.read_best().bests
            mine = into.read_best().bests
            added = [best for best in theirs if best not in mine]
            dates = {session.id: session.date for session in into.sessions().values()}
            # A session's record may have several copies: take the one with more fields set.
            ranked = sorted((*mine, *added), key=lambda best: (dates.get(best.session, ""), best.ways is not None))
            latest = {best.problem: best for best in ranked}
            added.sort(key=lambda best: best == latest[best.problem])
            last = {best.problem: best for best in (*mine, *added)}
            added += [best for problem, best in latest.items() if last[problem] != best]
            into.append_best(*added)
            count += len(new) + len(added)
    return count


def _absent(theirs: Any, mine: Any) -> list[Trial | Session]:
    """Sessions, followed by trials, that are not in `mine`."""
    there = {encode(record) for record in (*mine.sessions, *mine.trials)}
    return [record for record in (*theirs.sessions, *theirs.trials) if encode(record) not in there]


def prune(
    root: Path,
    ask: Callable[[Log, Counter[str]], bool] = lambda log, what: True,
    *,
    gone: bool = False,
    present: Present = lambda candidate: candidate,
) -> dict[Path, int]:
    """Remove records that neither look-up nor tuning will read; returns the number of removed lines for each log's
    folder.

    These are damaged lines, rankings that a later one replaced, records of other template versions and of removed
    decisions, trials that failed because of the machine, and sessions without remaining records. `ask` gets a log and
    the number of lines by kind, and may refuse.

    Parameters
    ----------
    present
        (candidate) -> the same point under the present names of its template and its decisions, as for `migrate`: what
        that completes stays.
    gone
        Also remove records of templates and operators that this process does not know, including those of plugins that
        are not registered.
    """
    removed = {}
    for log in logs_of(root):
        trials, bests = log.read(), log.read_best()
        superfluous = functools.cache(functools.partial(_superfluous, _present(log.operator), gone))
        names = functools.cache(functools.partial(_decision_names, log.arch))

        def reason(
            record: Trial | Best, superfluous: Callable[[str, int], str] = superfluous, names: _Names = names
        ) -> str:
            candidate = present(record.candidate)
            why = superfluous(candidate.template, candidate.version)
            known = None if why else names(candidate.template, record.problem)
            lacking = [name for name in candidate.values if name not in (known or ())]
            return why or ("" if known is None or not lacking else f"{lacking[0]} is none of its decisions now")

        last = {best.problem: best for best in bests.bests}
        what: Counter[str] = Counter()
        kept: set[Trial | Session | Best] = set()
        for trial in trials.trials:
            why = reason(trial)
            why = why or ("the machine spoilt it" if trial.outcome == "environment" else "")
            if why:
                what[f"trial of {trial.candidate.template}@{trial.candidate.version}: {why}"] += 1
            else:
                kept.add(trial)
        for best in bests.bests:
            why = reason(best)
            why = why or ("a later one replaced it" if last[best.problem] != best else "")
            if why:
                what[f"ranking of {best.problem}, {best.candidate.template}@{best.candidate.version}: {why}"] += 1
            else:
                kept.add(best)
        used = {record.session for record in kept if not isinstance(record, Session)}
        for session in trials.sessions:
            if session.id not in used:
                what[f"session of {session.date}: nothing of it is left"] += 1
        for path, contents in ((log.trials_path, trials), (log.best_path, bests)):
            if contents.skipped:
                what[f"damaged line of {path.name}"] += len(contents.skipped)

        def keep(record: Trial | Session | Best, kept: set[Any] = kept, used: set[str] = used) -> bool:
            return record.id in used if isinstance(record, Session) else record in kept

        if what and ask(log, what):
            removed[log.trials_path.parent] = log.prune(keep, _counted(one for one in kept if isinstance(one, Trial)))
    return removed


def _counted(trials: Iterable[Trial]) -> Callable[[Record], Record]:
    """What renews records of a log that has only these trials left, so that `verify` misses none: trials of a session
    are numbered without gaps, and its rankings count those that there are."""
    orders: dict[str, list[int]] = defaultdict(list)
    problems: Counter[tuple[str, str]] = Counter()
    for trial in trials:
        orders[trial.session].append(trial.order)
        problems[trial.session, trial.problem] += 1
    places = {
        (session, order): place for session, found in orders.items() for place, order in enumerate(sorted(set(found)))
    }

    def renew(record: Record) -> Record:
        if isinstance(record, Trial):
            return dataclasses.replace(record, order=places[record.session, record.order])
        if isinstance(record, Best) and record.trials is not None:
            left = problems[record.session, record.problem]
            return dataclasses.replace(record, trials=min(record.trials, left))
        return record

    return renew


def _superfluous(present: Mapping[str, int], gone: bool, template: str, version: int) -> str:
    """Why records of this template are no longer read, as a text; empty if they are, or would be with a plugin
    registered.
    """
    if template not in present:
        return "there is no such template" if gone else ""
    return "" if present[template] == version else f"its version is {present[template]} now"


_Names = Callable[[str, str], tuple[str, ...] | None]


def _decision_names(arch: str, template: str, problem: str) -> tuple[str, ...] | None:
    """The decisions that a template has for a problem; None where it does not apply, or is not known."""
    try:
        parsed = registry.parse(problem)
        return tuple(spaces.find(template, parsed.operator).space(parsed, machine.resolve(arch)))
    except (KeyError, NotApplicable, ProblemError, machine.UnknownArch):
        return None


def _present(operator: str) -> dict[str, int]:
    """The templates of an operator with their versions; empty for an unknown operator."""
    try:
        return {template.name: template.version for template in spaces.templates(operator)}
    except (KeyError, ProblemError):
        return {}


def differences(one: Path, other: Path) -> Iterator[tuple[str, str, Best | None, Best | None]]:
    """Architecture, problem and the last ranking in each folder, wherever these differ."""
    places = sorted({(log.arch, log.operator) for root in (one, other) for log in logs_of(root)})
    for arch, operator in places:
        mine, theirs = (Log(root, arch, operator).best() for root in (one, other))
        for problem in sorted({*mine, *theirs}):
            if mine.get(problem) != theirs.get(problem):
                yield arch, problem, mine.get(problem), theirs.get(problem)


def rows(roots: Iterable[Path], *, operator: str | None = None, arch: str | None = None) -> list[dict[str, Any]]:
    """All trials and rankings as flat rows with the same columns, in the order of their logs.

    `roots` are folders of logs, files that hold a measured space (`records.space`), and T4 results
    (`records.exchange`), whose names end in .json.

    Columns
    -------
    kind, arch, operator, problem
        "trial" or "best", and the keys of its log and problem.
    axis.NAME
        The problem's axes, under `operator`'s names; None where the operator has no such axis.
    candidate, template, version, current
        What was tried; `current`: whether this version of the package has the template at that version.
    decision.NAME
        The decisions; None where the template does not have this one.
    outcome, reason, build_seconds, seconds, seconds_all
        How the trial ended; `seconds` is the median of `seconds_all`, the repeats of a trial or the rounds of a
        ranking.
    fallback_seconds
        For a ranking: time of the candidate that would run without tuning.
    registers, shared_bytes, local_bytes, spill_instructions
        Resources of a CUDA kernel: registers per thread, static shared memory per thread block, and so on. If a library
        has several kernels, the maximum of each.
    threads, dynamic_shared_bytes
        Threads and dynamic shared memory of a thread block, from the template (`Template.launch`) if the candidate is a
        point of its present space. Otherwise threads are taken from the record, or from the decision of that name.
    occupancy
        Share of a multiprocessor's threads that are resident, by threads, registers and shared memory: an upper bound
        where the template does not declare its dynamic shared memory. None where the threads are not known, and where a
        kernel with these resources could not run, which happens since the maxima of several kernels are recorded.
    predicted
        The score that the cost model gave the candidate before the measurement; larger is better.
    order, number
        Place within the session, and among the problem's trials of this log or file, from 0.
    session, date, strategy, fresh, timer, machine.NAME, inputs.NAME, software.NAME
        Provenance. `strategy` proposed the session's candidates. `fresh`: whether every timed call followed a kernel
        that had just written the inputs of the batch; such times must not be compared with others.
    """
    found: list[dict[str, Any]] = []
    for root in roots:
        if root.suffix == ".json":
            document = exchange.read_results(root)
            known, trials = exchange.records_of(document)
            others = () if trials else exchange.foreign_rows(document, root.stem, RESOURCES)
            read = [row for name in _operators(trials) for row in _rows_of(name, known, _of(trials, name))]
            found += [r for r in (*read, *others) if operator in (None, r["operator"]) and arch in (None, r["arch"])]
            continue
        if root.is_file():
            measured = space.read(root)
            if operator in (None, operator_of(measured.problem)) and arch in (None, measured.arch):
                found += _rows_of(operator_of(measured.problem), measured.sessions, measured.trials)
            continue
        for log in logs_of(root):
            if operator in (None, log.operator) and arch in (None, log.arch):
                contents = log.read()
                found += _rows_of(log.operator, contents.sessions, [*contents.trials, *log.read_best().bests])
    # All tables order their columns alike: a group (all axes, all decisions) is placed at its first column.
    names = list(dict.fromkeys(name for row in found for name in row))
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        first.setdefault(name.partition(".")[0] if "." in name else name, index)
    names.sort(key=lambda name: first[name.partition(".")[0] if "." in name else name])
    return [{name: row.get(name) for name in names} for row in found]


def _operators(trials: Iterable[Trial]) -> list[str]:
    return sorted({operator_of(trial.problem) for trial in trials})


def _of(trials: Iterable[Trial], operator: str) -> list[Trial]:
    return [trial for trial in trials if operator_of(trial.problem) == operator]


def _rows_of(operator: str, known: Iterable[Session], records: Iterable[Trial | Best]) -> Iterator[dict[str, Any]]:
    sessions = {session.id: session for session in known}
    present = _present(operator)
    numbers: Counter[str] = Counter()
    axes = functools.cache(_axes)
    for record in records:
        session = sessions.get(record.session)
        trial = record if isinstance(record, Trial) else None
        ranked = record if isinstance(record, Best) else None
        seconds = ranked.seconds if ranked else trial.median if trial and trial.seconds else None
        candidate = record.candidate
        row: dict[str, Any] = {
            "kind": record.kind,
            "arch": record.arch,
            "operator": operator,
            "problem": record.problem,
            **{f"axis.{name}": value for name, value in axes(record.problem).items()},
            "candidate": str(candidate),
            "template": candidate.template,
            "version": candidate.version,
            "current": present.get(candidate.template) == candidate.version,
            **{f"decision.{name}": value for name, value in candidate.decisions},
            "outcome": trial.outcome if trial else "ok",
            "reason": trial.reason if trial else "",
            "build_seconds": trial.build_seconds if trial else None,
            "seconds": seconds,
            "seconds_all": trial.seconds if trial else ranked.seconds_all if ranked else (),
            "fallback_seconds": ranked.fallback_seconds if ranked else None,
            **dict.fromkeys(RESOURCES),
            **_resources(trial, session),
            "predicted": trial.predicted if trial else None,
            "order": trial.order if trial else None,
            "number": numbers[record.problem] if trial else None,
            "session": record.session,
            "date": session.date if session else "",
            "strategy": session.strategy if session else "",
            "fresh": session is not None and session.fresh,
            "timer": session.timer if session else "",
        }
        numbers[record.problem] += trial is not None
        for group in ("machine", "inputs", "versions") if session else ():
            facts = getattr(session, group)
            prefix = "software" if group == "versions" else group
            row |= {f"{prefix}.{name}": value for name, value in sorted(facts.items()) if name != "arch"}
        yield row


_RECORDED = ("registers", "shared_bytes", "local_bytes", "spill_instructions", "threads")
RESOURCES = (*_RECORDED, "dynamic_shared_bytes", "occupancy")


def _axes(problem: str) -> dict[str, Any]:
    """The axes of a problem's key, read as text if no operator of this version has such a problem."""
    try:
        return registry.parse(problem).axes
    except ProblemError:
        pairs = (pair.partition("=") for pair in problem.partition("/")[2].split(","))
        return {name: _read(value) for name, equals, value in pairs if equals}


def _read(text: str) -> int | float | str:
    """A value in a key: a number if it reads as one, else the text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _resources(trial: Trial | None, session: Session | None) -> dict[str, Any]:
    """GPU resources of a trial's kernel, and its occupancy; empty for other trials."""
    if trial is None or not trial.resources:
        return {}
    found: dict[str, Any] = {name: trial.resources.get(name) for name in _RECORDED}
    cores = session.machine.get("cores", 1) if session else 1
    cores = cores if isinstance(cores, int) and cores > 0 else 1
    try:
        here = dataclasses.replace(machine.resolve(trial.arch), cores=cores)
    except machine.UnknownArch:  # in a foreign file, or one of a later version
        return found
    if launch := _launch(trial, here):
        found |= {"threads": launch.threads, "dynamic_shared_bytes": launch.dynamic_shared_bytes}
    # Earlier records lack the threads of a thread block, which many templates have as a decision.
    if threads := found["threads"] or trial.candidate.values.get("threads"):
        shared = (found["shared_bytes"] or 0) + (found.get("dynamic_shared_bytes") or 0)
        blocks = here.blocks_at_once(threads, found["registers"] or 0, shared) // cores
        found |= {"threads": threads, "occupancy": blocks * threads / here.threads_at_once or None}
    return found


def _launch(trial: Trial, here: machine.Machine) -> Launch | None:
    """The launch that the template declares for a trial's kernel; None if its candidate is no longer a point."""
    try:
        problem = registry.parse(trial.problem)
        template = spaces.find(trial.candidate.template, problem.operator)
    except (KeyError, ProblemError):
        return None
    if template.launch is None or spaces.refusal(trial.candidate, problem, here) is not None:
        return None
    return template.launch(problem, trial.candidate.values)


def _column(values: list[Any]) -> list[Any]:
    """Values of one type, as a Parquet column requires: all texts if numbers and texts are mixed."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2 or kinds == {int, float}:
        return values
    return [None if value is None else str(value) for value in values]


def write_results(roots: Iterable[Path], path: Path, problem: str = "") -> int:
    """Write the trials of problems whose keys begin with `problem` as a T4 document; returns their number."""
    sessions: list[Session] = []
    trials: list[Trial] = []
    for root in roots:
        logs = [space.read(root)] if root.is_file() else [log.read() for log in logs_of(root)]
        for one in logs:
            mine = [trial for trial in one.trials if trial.problem.startswith(problem)]
            used = {trial.session for trial in mine}
            trials += mine
            sessions += [session for session in one.sessions if session.id in used]
    path.write_text(json.dumps(exchange.results_of(sessions, trials), indent=1) + "\n")
    return len(trials)


def read_results(path: Path, target: Path) -> int:
    """Append to `target` the trials that it lacks, from a T4 document written by this package; returns their number.

    Raises
    ------
    ExchangeError
        If the file is no such document: foreign results are for studies and cannot be added to a log.
    """
    sessions, trials = exchange.records_of(exchange.read_results(path))
    if not trials:
        raise exchange.ExchangeError(f"{path}: no result has a provenance that tells its problem and candidate")
    count = 0
    places = sorted({(trial.arch, operator_of(trial.problem)) for trial in trials})
    for arch, operator in places:
        log = Log(target, arch, operator)
        mine = [trial for trial in _of(trials, operator) if trial.arch == arch]
        used = {trial.session for trial in mine}
        new = _absent(Contents(tuple(mine), tuple(s for s in sessions if s.id in used)), log.read())
        log.append(*new)
        count += sum(isinstance(record, Trial) for record in new)
    return count


def write_rows(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows as CSV, or as Parquet if the name ends in .parquet. In CSV, lists are numbers separated by spaces.

    Raises
    ------
    ModuleNotFoundError
        For Parquet without pyarrow.
    """
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        columns = {name: _column([row[name] for row in found]) for name in (found[0] if found else ())}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]) if found else ["kind"], lineterminator="\n")
        writer.writeheader()
        for row in found:
            writer.writerow({k: " ".join(map(str, v)) if isinstance(v, tuple) else v for k, v in row.items()})


def readable(problem: str) -> bool:
    """Whether this version has the operator of a problem key, and the problem is valid."""
    try:
        registry.parse(problem)
    except ProblemError:
        return False
    return True
