"""`tvm-sparse db`: list, check, merge and convert folders of records."""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.commands import command, python
from ..core.problem import ProblemError
from .common import (
    FAILED,
    USAGE,
    AsJson,
    Inputs,
    Plugins,
    console,
    default_roots,
    echo_json,
    errors,
    fail,
    failure_lines,
    gain,
    gain_apart,
    ratio,
    recorded_keys,
    require,
    table,
    us,
)

if TYPE_CHECKING:
    from ..records import Best, Log

Logs = Annotated[list[Path] | None, typer.Option(help="Folder of records.  \\[default: the package's, then yours]")]
Own = Annotated[Path | None, typer.Option(help="Folder of records.  \\[default: yours]")]


class Format(enum.StrEnum):
    table = "table"
    metaschedule = "metaschedule"


Wanted = Annotated[
    str,
    typer.Argument(
        metavar="PROBLEM",
        help="A problem's key, or how keys begin: an operator.",
        autocompletion=recorded_keys,
    ),
]

db = typer.Typer(
    no_args_is_help=True,
    help="List, check, merge, prune, compare and export folders of tuning records.",
)


@db.command("ls")
def ls(logs: Logs = None, as_json: AsJson = False) -> None:
    """List the logs, with their numbers of problems, trials and sessions, and of lines that cannot be used."""
    with errors():
        from ..records.database import logs_of

        rows = []
        for root in default_roots(logs):
            for log in logs_of(root):
                trials, bests = log.read(), log.read_best()
                rows.append(
                    {
                        "folder": str(root),
                        "arch": log.arch,
                        "operator": log.operator,
                        "problems": len({best.problem for best in bests.bests}),
                        "trials": len(trials.trials),
                        "sessions": len(trials.sessions),
                        "damaged": len(trials.skipped) + len(bests.skipped),
                    }
                )
        if as_json:
            echo_json(rows)
            return
        columns = ("problems", "trials", "sessions", "damaged")
        made = table("folder", "arch", "operator", *columns, right=columns)
        for row in rows:
            made.add_row(*map(str, row.values()))
        console().print(made)


@db.command("show")
def show(
    problem: Wanted,
    logs: Logs = None,
    count: Annotated[int, typer.Option(min=1, help="Of trials, and of reasons.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show a problem's trials, the fastest first, and the reasons of failed ones, with their number and one candidate
    each.
    """
    with errors():
        from ..records.database import logs_of
        from ..records.queries import failures

        found = [
            (trial, inputs)
            for root in default_roots(logs)
            for log in logs_of(root)
            for contents in [log.read()]
            for inputs in Inputs
            for trial in contents.timed(inputs is Inputs.fresh)
            if trial.problem.startswith(problem)
        ]
        if not found:
            raise ProblemError(f"no trial of {problem}; see {command('db', 'ls')}")
        right = sorted((pair for pair in found if pair[0].seconds), key=lambda pair: pair[0].median)
        failed = failures(trial for trial, _ in found)
        outcomes = Counter(trial.outcome for trial, _ in found)
        if as_json:
            trials = [
                {
                    "arch": trial.arch,
                    "problem": trial.problem,
                    "candidate": str(trial.candidate),
                    "inputs": inputs,
                    "seconds": trial.median,
                }
                for trial, inputs in right[:count]
            ]
            echo_json({"outcomes": outcomes, "trials": trials, "failures": list(map(dataclasses.asdict, failed))})
            return
        made = table("arch", "problem", "candidate", "inputs", "us", right=("us",))
        for trial, inputs in right[:count]:
            made.add_row(trial.arch, trial.problem, str(trial.candidate), inputs, us(trial.median))
        console().print(made)
        typer.echo(", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()))
        for line in failure_lines(failed, count):
            typer.echo(line)


@db.command("best")
def best(problem: Wanted = "", logs: Logs = None, as_json: AsJson = False) -> None:
    """Print the last ranking of each problem: the winner, its time, and how much faster it is than the fallback."""
    with errors():
        from ..records.database import logs_of, readable

        rows = []
        for root in default_roots(logs):
            for log in logs_of(root):
                states = _states(log)
                for key, record in sorted(log.best().items()):
                    if key.startswith(problem):
                        rows.append((log.arch, key, record, states.get(record.session, "hot"), readable(key)))
        if as_json:
            found = [
                {
                    "arch": arch,
                    "problem": key,
                    "candidate": str(record.candidate),
                    "inputs": state,
                    "seconds": record.seconds,
                    "fallback_seconds": record.fallback_seconds,
                    "readable": known,
                }
                for arch, key, record, state, known in rows
            ]
            echo_json(found)
            return
        right = ("us", "spread", "x fallback")
        made = table("arch", "problem", "candidate", "inputs", *right, "note", right=right)
        for arch, key, record, state, known in rows:
            figures = us(record.seconds), gain_apart(record), gain(record)
            made.add_row(
                arch, key, str(record.candidate), state, *figures, "" if known else "no problem of this version"
            )
        console().print(made)


def _states(log: Log) -> dict[str, str]:
    """State of the inputs in each session of a log."""
    return {session.id: session.state for session in log.sessions().values()}


@db.command("merge")
def merge(
    sources: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of records.")],
    logs: Own = None,
) -> None:
    """Append to a folder the records of other folders that it lacks. A problem's latest ranking is used."""
    with errors():
        from ..records.database import merge as append
        from ..runtime import paths

        for source in sources:
            if not source.is_dir():
                raise ProblemError(f"{source}: no such folder")
        target = logs or paths.user_logs()
        typer.echo(f"{append(sources, target)} records appended in {target}")


@db.command("prune")
def prune(
    logs: Own = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Name what would be removed, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove it without asking.")] = False,
    gone: Annotated[
        bool,
        typer.Option(
            "--gone",
            help="Also records of templates and operators that are not known here; a plugin's are among them, unless"
            " --plugin names it.",
        ),
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Remove damaged lines, replaced rankings, records of other versions and decisions, and trials the machine spoilt.

    Lists everything, and asks, before it removes anything.
    """
    with errors():
        from ..records.database import prune as remove
        from ..runtime import paths
        from ..schedules.vocabulary import present

        root = logs or paths.user_logs()
        found: dict[Path, Counter[str]] = {}

        def note(log: Log, what: Counter[str]) -> bool:
            found[log.trials_path.parent] = what
            return False

        remove(root, note, gone=gone, present=present)
        for folder, what in found.items():
            typer.echo(f"{folder}: {what.total()} lines")
            for text, number in what.items():
                typer.echo(f"  {number} x {text}")
        if dry_run or not found:
            count = sum(what.total() for what in found.values())
            typer.echo(f"{count} lines would be removed" if found else "0 lines removed")
            return
        if not yes:
            if not sys.stdin.isatty():
                fail("prune asks before it removes, and there is nobody to ask; give --yes, or --dry-run", USAGE)
            typer.confirm(f"Remove these {sum(what.total() for what in found.values())} lines?", abort=True)
        removed = remove(root, lambda log, what: what == found.get(log.trials_path.parent), gone=gone, present=present)
        typer.echo(f"{sum(removed.values())} lines removed")


@db.command("migrate")
def migrate(
    logs: Annotated[list[Path] | None, typer.Argument(help="Folders of records.  \\[default: yours]")] = None,
) -> None:
    """Give records of an earlier version the present names of templates and decisions.

    Times are unchanged; running it again changes nothing.
    """
    with errors():
        from ..records.migrate import migrate as rewrite
        from ..runtime import paths
        from ..schedules.vocabulary import present

        for root in logs or [paths.user_logs()]:
            for path, count in rewrite(root, present).items():
                typer.echo(f"{path}: {count} records renamed")


@db.command("compare")
def compare(
    logs: Annotated[list[Path] | None, typer.Argument(help="Folders of records.  \\[default: yours]")] = None,
) -> None:
    """Compare winners with today's defaults, where a session has timed both.

    Look-up uses the decisions of a similar problem if they beat the default there. Run it after a change of defaults;
    running it again changes nothing.
    """
    with errors():
        from ..records.migrate import compare_anew
        from ..runtime import paths

        for root in logs or [paths.user_logs()]:
            for path, count in compare_anew(root).items():
                if count:
                    typer.echo(f"{path}: {count} winners compared with today's defaults")


@db.command("restamp")
def restamp(
    template: Annotated[
        str, typer.Argument(help="A template whose machine code changed and whose kernels are as fast as before.")
    ],
    before: Annotated[int, typer.Option("--from", help="The version that the records have.", show_default=False)],
    now: Annotated[int, typer.Option("--to", help="The template's present version.", show_default=False)],
    logs: Own = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the records, and write nothing.")] = False,
    plugin: Plugins = None,
) -> None:
    """Give records of a template's earlier version its present one, when both were timed in turns and are as fast.

    It rewrites trials, rankings and predictors. Times are unchanged, and running it again changes nothing. Compare the
    times of both versions first, with scripts/compare_trees.py.
    """
    with errors():
        from ..records.migrate import restamp as rewrite
        from ..runtime import paths

        root = logs or paths.user_logs()
        if not root.is_dir():
            raise ProblemError(f"logs: expected a folder of records, got {root}, which does not exist")
        done = rewrite(root, template, before, now, dry_run=dry_run)
        for path, one in done.items():
            if one.changed:
                typer.echo(f"{path}: {one.changed} {'predictor' if path.suffix == '.json' else 'records'}")
            for reason, count in one.left.items():
                typer.echo(f"{path}: {count} candidates stay at version {before}: {reason}")
        total = sum(one.changed for one in done.values())
        would = "would be" if dry_run else "are"
        typer.echo(f"{total} records and predictors of {template} {would} at version {now} instead of {before}")
        if any(one.left for one in done.values()):
            typer.echo(f"where decisions have earlier names: {command('db', 'migrate', str(root))}, then this again")


@db.command("diff")
def diff(one: Path, other: Path, as_json: AsJson = False) -> None:
    """Compare the last rankings of two folders; FOLDER to FOLDER."""
    with errors():
        from ..records import Log, operator_of
        from ..records.database import differences

        @functools.cache
        def states(root: Path, arch: str, operator: str) -> dict[str, str]:
            return _states(Log(root, arch, operator))

        made = table("arch", "problem", "in the first", "in the second", "x faster", right=("x faster",))
        rows = []
        for arch, problem, mine, theirs in differences(one, other):
            told, inputs = [], set()
            for root, found in ((one, mine), (other, theirs)):
                state = states(root, arch, operator_of(problem)).get(found.session, "hot") if found else ""
                inputs.add(state)
                note = ", fresh inputs" if state == "fresh" else ""
                told.append(f"{us(found.seconds)} us{note}, {found.candidate}" if found else "-")
            # Hot and fresh times cannot be compared.
            faster = ratio(mine.seconds, theirs.seconds) if mine and theirs and len(inputs) == 1 else "-"
            made.add_row(arch, problem, *told, faster)
            rows.append({"arch": arch, "problem": problem, "first": _told(mine), "second": _told(theirs)})
        if as_json:
            echo_json(rows)
            return
        console().print(made)


def _told(record: Best | None) -> dict[str, Any] | None:
    return None if record is None else {"candidate": str(record.candidate), "seconds": record.seconds}


@db.command("verify")
def verify(logs: Logs = None) -> None:
    """Print file and line of every damaged or missing record; the exit code is 1 if there is any."""
    with errors():
        from ..records.database import verify as check

        found = [damage for root in default_roots(logs) for damage in check(root)]
        for damage in found:
            typer.echo(str(damage))
        if found:
            fail(f"{len(found)} damaged", FAILED)
        typer.echo("sound")


@db.command("export")
def export(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="FILE.csv, FILE.parquet (needs pyarrow), FILE.json (results in T4); or a folder.",
        ),
    ],
    problem: Wanted = "",
    logs: Logs = None,
    format: Annotated[Format, typer.Option(help="metaschedule: trials as a database of TVM's MetaSchedule.")] = (
        Format.table
    ),
) -> None:
    """Write trials as a table with all rankings (CSV or Parquet), as results in T4, or as a MetaSchedule database."""
    with errors():
        from ..records.database import rows, write_results, write_rows

        if format is Format.metaschedule:
            from ..tuning import interchange

            require("compiler", "tune")
            count, left_out = interchange.export(default_roots(logs), output, problem)
            typer.echo(f"{count} trials in {output}; {left_out} of other versions or spaces were left out")
            return
        if output.suffix not in (".csv", ".parquet", ".json"):
            raise ProblemError(f"output: expected FILE.csv, FILE.parquet or FILE.json, got {output}")
        if output.suffix == ".json":
            typer.echo(f"{write_results(default_roots(logs), output, problem)} results in {output}")
            return
        found = [row for row in rows(default_roots(logs)) if row["problem"].startswith(problem)]
        try:
            write_rows(found, output)
        except ModuleNotFoundError:
            fail(f"pyarrow is missing, which writes Parquet: {python()} -m pip install pyarrow, or export to FILE.csv")
        typer.echo(f"{len(found)} records in {output}")


@db.command("import")
def import_results(
    source: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="What `db export` wrote: FILE.json, or a database's folder."),
    ],
    logs: Own = None,
) -> None:
    """Append to a folder of records the trials of a T4 file, or of a MetaSchedule database, that it lacks.

    Results of other tools cannot be imported: study and report read them directly, by --logs FILE.json. A MetaSchedule
    database is refused as a whole if a line contains anything but decisions.
    """
    with errors():
        from ..records.database import read_results
        from ..runtime import paths
        from ..tuning import interchange

        target = logs or paths.user_logs()
        if source.is_dir() or source.name == interchange.RECORDS:
            appended, known = interchange.import_(source, target)
            typer.echo(f"{appended} trials appended in {target}, {known} were there; a tuning run times the best again")
            return
        typer.echo(f"{read_results(source, target)} trials appended in {target}")
