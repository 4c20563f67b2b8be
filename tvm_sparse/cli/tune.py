"""`tvm-sparse tune`: search, measure, verify, record."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import machine, registry, shape_files
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError
from ..tuning.ask_tell import LIBRARIES
from ..tuning.strategies import DEFAULT as STRATEGY
from ..tuning.strategies import names as strategy_names
from .common import (
    FAILED,
    INTERRUPTED,
    Axes,
    Builders,
    Fixed,
    Plugins,
    Target,
    console,
    duration,
    errors,
    fixed_values,
    machine_here,
    problem_of,
    program,
    rate,
    ratio,
    require,
    share,
    table,
    us,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ..records import Best
    from ..tuning.session import Plan, Progress

# Rows of the live table around the problem that is running: it must fit a terminal of 24 lines.
ROWS_BEFORE, ROWS_AFTER = 6, 3


def tune(
    operator: Annotated[
        str | None,
        typer.Argument(metavar="OPERATOR", help="An operator (see tvm-sparse list), or a problem's whole key."),
    ] = None,
    axes: Axes = None,
    shapes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Many problems in TOML: a table \\[\\[operator]] each, whose lists mean the product of their values.",
        ),
    ] = None,
    target: Target = "auto",
    trials: Annotated[int, typer.Option(min=1, help="Candidates a problem, counting those measured before.")] = 64,
    logs: Annotated[Path | None, typer.Option(help="Folder of records.  \\[default: your data folder]")] = None,
    builders: Builders = None,
    templates: Annotated[
        list[str] | None,
        typer.Option(
            "--template",
            metavar="NAME",
            help="Search this template only; may be given again. Templates for comparison are searched only so.",
        ),
    ] = None,
    fix: Fixed = None,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="How the search proposes what to measure: see docs/simulated-search.md.")
    ] = STRATEGY,
    seed: Annotated[int, typer.Option(help="Of the inputs and the search.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    plugin: Plugins = None,
) -> None:
    """Tune problems on this machine: every candidate is checked against the reference before its time counts.

    Everything measured is recorded at once. Ctrl-C ends after the batch in hand and prints the command that resumes;
    the same command with more trials goes on from what is recorded.
    """
    with errors():
        problems = _as_called(_problems(operator, axes, shapes))
        where = machine_here(target, "tuning")
        _require_templates(templates or (), problems, where)
        _require_strategy(strategy)
        from ..runtime import paths

        folder = logs if logs is not None else paths.user_logs()
        fixed = fixed_values(fix, _decisions(problems, where) if fix else ())
        builders_now = builders or machine.default_builders()
        plans = make_plans(problems, where, trials, folder, builders_now, templates or (), fixed, strategy)
        console().print(plan_table(plans))
        left_out = left_out_lines(plans)
        if left_out:
            typer.echo("\n".join(left_out) + "\n")
        typer.echo(f"On {where.name} ({where.arch}); records: {folder}")
        if dry_run:
            return
        require("tune", *(["cuda"] if where.kind == "cuda" else []))
        again = resume_command(operator, axes, shapes, target, trials, logs, builders, templates, fix, strategy, seed)
        outcome = run(plans, folder, seed, again)
        if outcome.bests:
            console().print(result_table(plans, outcome.bests))
            typer.echo(f"Recorded in {folder / where.arch}")
        if outcome.interrupted:
            left = len(plans) - len(outcome.bests) - outcome.failures
            state = f", {left} of {len(plans)} problems not begun" if left else ""
            typer.echo(f"\nInterrupted{state}. What was measured is recorded; resume with:\n  {again}", err=True)
            raise typer.Exit(INTERRUPTED)
        if outcome.failures:
            raise typer.Exit(FAILED)
        to = "" if logs is None else f" --logs {shlex.quote(str(logs))}"
        typer.echo(f"Next: {program()} export -o kernels{to}")


def _problems(operator: str | None, axes: Sequence[str] | None, shapes: Path | None) -> list[Problem]:
    if shapes is not None:
        if operator is not None:
            raise ProblemError(f"--shapes: a file and an operator ({operator}) are both given; give one of them")
        return shape_files.read(shapes)
    if operator is None:
        raise ProblemError("operator: none given; see tvm-sparse list, or give a file of shapes with --shapes")
    return [problem_of(operator, axes)]


def _as_called(problems: Sequence[Problem]) -> list[Problem]:
    """The problems that calls ask for in the place of those given, each once; says which are others."""
    for problem in problems:
        if problem.as_called() != problem:
            typer.echo(f"{problem.typed} is tuned as {problem.as_called().typed}: calls with such data ask for it")
    return list(dict.fromkeys(problem.as_called() for problem in problems))


def _require_templates(names: Sequence[str], problems: Sequence[Problem], where: Machine) -> None:
    """Raise unless each name is a template of one of the problems' operators for this machine."""
    from ..core import spaces

    operators = {problem.operator for problem in problems}
    valid = [t.name for t in spaces.templates() if t.operator in operators and t.kind == where.kind]
    for name in names:
        if name not in valid:
            raise ProblemError(f"template: got {name!r}; on {where.arch} expected one of {', '.join(valid)}")


def _require_strategy(name: str) -> None:
    """Raise unless there is such a strategy; end with what to install if its library is missing."""
    if name not in strategy_names():
        raise ProblemError(f"strategy: got {name!r}; expected one of {', '.join(strategy_names())}")
    if name in LIBRARIES:
        require("lab")


def _decisions(problems: Sequence[Problem], where: Machine) -> list[str]:
    """The decisions of all templates that fit one of the problems."""
    from ..core import spaces

    tables = [table for problem in problems for table in spaces.applicable(problem, where)[0].values()]
    return sorted({name for table in tables for name in table})


def resume_command(
    operator: str | None,
    axes: Sequence[str] | None,
    shapes: Path | None,
    target: str,
    trials: int,
    logs: Path | None,
    builders: int | None,
    templates: Sequence[str] | None,
    fix: Sequence[str] | None,
    strategy: str,
    seed: int,
) -> str:
    """The command that does the same again; what was measured is not measured anew."""
    words = ["tune", *([operator] if operator else []), *(axes or ())]
    for name, value, default in (
        ("shapes", shapes, None),
        ("target", target, "auto"),
        ("trials", trials, None),
        ("logs", logs, None),
        ("builders", builders, None),
        ("strategy", strategy, STRATEGY),
        ("seed", seed, 0),
    ):
        if value != default:
            words += [f"--{name}", str(value)]
    for template in templates or ():
        words += ["--template", template]
    for word in fix or ():
        words += ["--fix", word]
    for plugin in registry.plugins():
        words += ["--plugin", plugin]
    return f"{program()} {shlex.join(words)}"


# --------------------------------------------------------------------------------------------------------- plan


def make_plans(
    problems: Sequence[Problem],
    where: Machine,
    trials: int,
    folder: Path,
    builders: int,
    templates: Sequence[str] = (),
    fixed: Mapping[str, tuple[int, ...]] | None = None,
    strategy: str = STRATEGY,
) -> list[Plan]:
    from ..records import Log
    from ..tuning.session import make_plan

    return [
        make_plan(p, where, trials, Log(folder, where.arch, p.operator), builders, templates, fixed, strategy)
        for p in problems
    ]


def plan_table(plans: Sequence[Plan]) -> Table:
    right = ("points", "trials now", "paid", "about")
    made = table("problem", "templates", *right, right=right)
    for plan in plans:
        made.add_row(
            plan.problem.typed,
            "\n".join(plan.templates),
            "\n".join(f"{size:,}" for size in plan.templates.values()),
            str(plan.trials),
            str(plan.paid),
            duration(plan.seconds),
        )
    if len(plans) > 1:
        total = [sum(plan.trials for plan in plans), sum(plan.paid for plan in plans)]
        made.add_section()
        made.add_row(f"{len(plans)} problems", "", "", *map(str, total), duration(sum(plan.seconds for plan in plans)))
    return made


def left_out_lines(plans: Sequence[Plan]) -> list[str]:
    """Templates that do not apply, each reason once with the number of problems that it holds for."""
    reasons: dict[tuple[str, str, str], int] = {}
    for plan in plans:
        for name, reason in plan.left_out.items():
            key = (plan.problem.operator, name, reason)
            reasons[key] = reasons.get(key, 0) + 1
    many = len(plans) > 1
    return [
        f"Left out of {operator}{f' ({count} of {len(plans)} problems)' if many else ''}: {name}: {reason}"
        for (operator, name, reason), count in reasons.items()
    ]


# ---------------------------------------------------------------------------------------------------------- run


class Outcome:
    """What a run of several plans came to."""

    def __init__(self) -> None:
        self.bests: dict[Problem, Best] = {}
        self.failures = 0
        self.interrupted = False


def run(plans: Sequence[Plan], folder: Path, seed: int, again: str) -> Outcome:
    """Run plans one after another; one that fails does not keep the others from their turn."""
    from ..records import Log
    from ..tuning import session

    outcome = Outcome()
    try:
        with session.stop_on_interrupt() as stop, _view(plans, stop) as view, _workers(plans) as workers:
            for plan in plans:
                if stop():
                    break
                log = Log(folder, plan.machine.arch, plan.problem.operator)
                view.begin(plan)
                try:
                    best = session.tune(plan, log, seed=seed, show=view.show, stop=stop, **workers)
                except session.NoValidRecord as error:
                    outcome.failures += 1
                    view.end(plan, None)
                    typer.echo(f"error: {error}", err=True)
                else:
                    outcome.bests[plan.problem] = best
                    view.end(plan, best)
            outcome.interrupted = stop()
    except KeyboardInterrupt:
        typer.echo(f"\nEnded at once; the batch in hand is lost. Resume with:\n  {again}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    return outcome


@contextlib.contextmanager
def _workers(plans: Sequence[Plan]) -> Iterator[dict[str, Any]]:
    """The processes that build and measure, shared by all plans: each takes seconds to start."""
    from ..tuning import session

    if not plans:
        yield {}
        return
    with session.workers(plans[0].builders) as pair:
        yield {"using": pair}


@contextlib.contextmanager
def _view(plans: Sequence[Plan], stop: Callable[[], bool]) -> Iterator[Lines | Live]:
    screen = console()
    if not screen.is_terminal:
        yield Lines(plans, stop)
        return
    from rich.live import Live as RichLive

    view = Live(plans, stop)
    # transient: the table of results takes its place.
    with RichLive(get_renderable=view.render, console=screen, refresh_per_second=4, transient=True):
        yield view


def _counts(progress: Progress) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in progress.outcomes.items()) or "starting"


class Lines:
    """Progress for a file or a pipe: a line a batch."""

    def __init__(self, plans: Sequence[Plan], stop: Callable[[], bool]) -> None:
        self._count, self._number, self._stop = len(plans), 0, stop
        self._said_stop = False
        self._next = 0

    def begin(self, plan: Plan) -> None:
        self._number += 1
        self._next = 0
        self._name = f"[{self._number}/{self._count}] {plan.problem.typed}"

    def show(self, progress: Progress) -> None:
        from ..tuning.session import BATCH

        if self._stop() and not self._said_stop:
            self._said_stop = True
            typer.echo("stopping after this batch (once more: at once)")
        final = progress.phase == "final"
        if not final and progress.measured < min(self._next, progress.plan.trials):
            return
        self._next = progress.measured + BATCH
        if final and not progress.final_share:
            typer.echo(f"{self._name}: {progress.measured} measured, final between the best")
        elif final:
            pass
        elif progress.measured:
            bytes_ = progress.plan.problem.cost().bytes
            typer.echo(
                f"{self._name}: {progress.measured}/{progress.plan.trials} ({_counts(progress)}),"
                f" best {us(progress.best_seconds)} us, {rate(bytes_, progress.best_seconds)} GB/s,"
                f" {duration(progress.seconds_left)} left"
            )
        else:
            typer.echo(f"{self._name}: {progress.plan.trials} trials, {progress.plan.paid} paid for")

    def end(self, plan: Plan, best: Best | None) -> None:
        if best is None:
            typer.echo(f"{self._name}: no valid record")
        else:
            typer.echo(
                f"{self._name}: {us(best.seconds)} us, {ratio(best.fallback_seconds, best.seconds)} fallback,"
                f" {best.candidate}"
            )


class Live:
    """Progress for a terminal: one table, drawn anew."""

    def __init__(self, plans: Sequence[Plan], stop: Callable[[], bool]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._plans, self._stop = plans, stop
        self._limit = any(plan.machine.bandwidth for plan in plans)
        self._states: dict[Problem, Progress] = {}
        self._bests: dict[Problem, Best | None] = {}
        self._now = 0
        self._bar = Bar(
            TextColumn("trials"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._task = self._bar.add_task("", total=sum(plan.trials for plan in plans), left="")

    def begin(self, plan: Plan) -> None:
        self._now = self._plans.index(plan)

    def show(self, progress: Progress) -> None:
        self._states[progress.plan.problem] = progress

    def end(self, plan: Plan, best: Best | None) -> None:
        self._bests[plan.problem] = best

    def render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        measured = sum(state.measured for state in self._states.values())
        self._bar.update(self._task, completed=measured, left=f"about {duration(self._seconds_left())} left")
        right = ("us", "GB/s", *(("of limit",) if self._limit else ()), "x fallback", "trials")
        made = table("problem", *right, "outcomes", right=right)
        rest = [""] * (len(right) + 1)
        first = max(0, self._now - ROWS_BEFORE)
        shown = self._plans[first : self._now + ROWS_AFTER + 1]
        if first:
            made.add_row(f"... {first} before", *rest, style="dim")
        for plan in shown:
            made.add_row(*self._row(plan), style="dim" if plan.problem not in self._states else None)
        after = len(self._plans) - first - len(shown)
        if after:
            made.add_row(f"... {after} more", *rest, style="dim")
        stopping = self._stop()
        note = (
            "stopping after this batch (again: at once)" if stopping else "Ctrl-C stops after a batch; nothing is lost"
        )
        return Group(made, self._bar, Text(note, style="yellow" if stopping else "dim"))

    def _row(self, plan: Plan) -> list[str]:
        state, best = self._states.get(plan.problem), self._bests.get(plan.problem)
        if state is None:
            return [plan.problem.typed, *[""] * (4 if self._limit else 3), str(plan.trials), "waiting"]
        seconds = best.seconds if best else state.best_seconds
        # Only after the final, which times the two in turn: the least of many single figures is a lucky one.
        gain = ratio(best.fallback_seconds, best.seconds) if best else ""
        bytes_ = plan.problem.cost().bytes
        if plan.problem in self._bests:
            what = "done: " + _counts(state) if best else "no valid record"
        else:
            what = "final" if state.phase == "final" else _counts(state)
        figures = [us(seconds), rate(bytes_, seconds)]
        if self._limit:
            figures.append(share(bytes_, seconds, plan.machine))
        return [
            plan.problem.typed,
            *figures,
            gain,
            f"{state.measured}/{plan.trials}",
            what,
        ]

    def _seconds_left(self) -> float:
        """Of the problem that is running and of those that wait, by the pace of the first."""
        running = self._states.get(self._plans[self._now].problem)
        waiting = [plan.seconds for plan in self._plans if plan.problem not in (*self._states, *self._bests)]
        if running is None:
            return sum(waiting)
        left = 0.0 if running.plan.problem in self._bests else running.seconds_left
        return left + running.slowness * sum(waiting)


def result_table(plans: Sequence[Plan], bests: dict[Problem, Best]) -> Table:
    limit = any(plan.machine.bandwidth for plan in plans)
    right = ("us", "fallback us", "gain", "GB/s", *(("of limit",) if limit else ()))
    made = table("problem", "best candidate", *right, right=right)
    for plan in plans:
        best = bests.get(plan.problem)
        if best is None:
            continue
        bytes_ = plan.problem.cost().bytes
        cells = [us(best.seconds), us(best.fallback_seconds), ratio(best.fallback_seconds, best.seconds)]
        cells.append(rate(bytes_, best.seconds))
        if limit:
            cells.append(share(bytes_, best.seconds, plan.machine))
        made.add_row(plan.problem.typed, str(best.candidate), *cells)
    return made
