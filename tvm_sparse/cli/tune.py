"""`tvm-sparse tune`: search, measure, verify, record."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.load import sampled
from ..core import machine, registry, shape_files
from ..core.commands import command
from ..core.machine import Machine
from ..core.problem import FROM_FILE, Problem, ProblemError
from ..tuning.ask_tell import LIBRARIES
from ..tuning.strategies import DEFAULT as STRATEGY
from ..tuning.strategies import names as strategy_names
from .common import (
    FAILED,
    INTERRUPTED,
    WIDE_NOTE,
    Axes,
    Builders,
    Fixed,
    Inputs,
    Plugins,
    Target,
    as_called,
    console,
    duration,
    errors,
    failure_lines,
    fixed_values,
    gain,
    gain_apart,
    is_here,
    load_line,
    machine_here,
    operator_names,
    problem_of,
    program,
    rate,
    require,
    share,
    structure_of,
    table,
    template_names,
    us,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ..core.candidate import Candidate
    from ..records import Best
    from ..tuning.fleet import Fleet
    from ..tuning.plans import Plan, Progress

# Rows of the live table around the running problem, which must fit into a terminal of 24 lines.
ROWS_BEFORE, ROWS_AFTER = 6, 3


def tune(
    operator: Annotated[
        str | None,
        typer.Argument(
            metavar="OPERATOR",
            help="An operator (see tvm-sparse list), or a problem's whole key.",
            autocompletion=operator_names,
        ),
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
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="all|0,1,...", help="GPUs of this machine that measure at the same time.  \\[default: the first]"
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Parts of the CPU that measure at the same time, each on its share of the cores."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Build and measure on a Ray cluster; local starts one on this machine.  See docs/many-gpus.md.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only devices with this in their names, as H200.")
    ] = None,
    templates: Annotated[
        list[str] | None,
        typer.Option(
            "--template",
            metavar="NAME",
            help="Search this template only; may be given again. Templates for comparison are searched only so.",
            autocompletion=template_names,
        ),
    ] = None,
    fix: Fixed = None,
    vary: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Search these decisions alone, with all others as they won: of problems that have a record in --logs,"
            " and of all of an OPERATOR's without axes.",
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the search proposes what to measure: see docs/simulated-search.md.",
            autocompletion=lambda incomplete: [n for n in strategy_names() if n.startswith(incomplete)],
        ),
    ] = STRATEGY,
    inputs: Annotated[
        Inputs,
        typer.Option(
            help="As timed calls find them: hot, as the caches hold them after the call before; or fresh, on a GPU:"
            " behind a kernel that has read other data and just written them, as in a model.  See docs/tuning.md.",
        ),
    ] = Inputs.hot,
    limit: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="What checking and timing a candidate may take before it is ended.  \\[default: 30]",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs and the search.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    plugin: Plugins = None,
) -> None:
    """Tune problems here or on a cluster: every candidate is checked against the reference before its time counts.

    Every measurement is recorded at once. Ctrl-C stops after the current batch and prints the command that resumes; the
    same command with more trials continues.
    """
    with errors():
        if vary is not None and (templates or fix):
            raise ProblemError("vary: template and other decisions are as recorded; leave out --template, --fix")
        given = None if vary is not None and _whole(operator, axes) else as_called(_problems(operator, axes, shapes))
        asked: dict[str, Any] = {"devices": devices, "workers": workers, "ray": ray, "model": model}
        with _devices(target, builders, planned=dry_run, **asked) as fleet:
            machines = list(fleet.machines)
            from ..runtime import paths

            folder = logs if logs is not None else paths.user_logs()
            problems = given if given is not None else _recorded(str(operator), machines, folder)
            _require_templates(templates or (), problems, machines)
            _require_strategy(strategy)
            fixed = fixed_values(fix, _decisions(problems, machines) if fix else ())
            gpus = sum(count for where, count in fleet.machines.items() if where.kind == "cuda")
            builders_now = builders or machine.default_builders(gpus)
            fresh = inputs is Inputs.fresh
            if vary is None:
                plans = make_plans(
                    problems, machines, trials, folder, builders_now, templates or (), fixed, strategy, fresh=fresh
                )
            else:
                names = vary.split(",")
                plans = varied_plans(problems, machines, trials, folder, builders_now, names, strategy, fresh=fresh)
            structure = structure_of(axes)
            plans = [dataclasses.replace(plan, limit=limit, structure=structure) for plan in plans]
            console().print(plan_table(plans, len(fleet.devices)))
            left_out = left_out_lines(plans)
            if left_out:
                typer.echo("\n".join(left_out) + "\n")
            on = ", ".join(
                f"{f'{count} x ' if count > 1 else ''}{where.name} ({where.arch})"
                for where, count in fleet.machines.items()
            )
            typer.echo(f"On {on}; records: {folder}")
            if fresh:
                typer.echo("Inputs: fresh, each timed call behind a kernel that has just written those of the batch")
            if structure is not None:
                typer.echo(f"Timed with the structure of {structure.removeprefix(FROM_FILE)}")
            if dry_run:
                return
            here = ray is None and any(where.kind == "cuda" for where in machines)  # CUDA code is compiled
            require("tune", *(["cuda"] if here else []))
            again = resume_command(
                operator,
                axes,
                shapes,
                target,
                trials,
                logs,
                builders,
                templates,
                fix,
                strategy,
                seed,
                limit=limit,
                inputs=inputs,
                vary=vary,
                **asked,
            )
            before = sampled()
            outcome = run(plans, folder, seed, again, fleet)
        if outcome.bests:
            console().print(result_table(plans, outcome.bests))
            typer.echo("\n".join([WIDE_NOTE[0].upper() + WIDE_NOTE[1:], *load_line(before, sampled())]))
            typer.echo(f"Recorded in {', '.join(str(folder / where.arch) for where in machines)}")
        for line in failed_lines(plans, outcome, folder):
            typer.echo(line)
        if outcome.interrupted:
            left = len(plans) - len(outcome.bests) - outcome.failures
            state = f", {left} of {len(plans)} problems not begun" if left else ""
            typer.echo(f"\nInterrupted{state}. What was measured is recorded; resume with:\n  {again}", err=True)
            raise typer.Exit(INTERRUPTED)
        if outcome.failures:
            raise typer.Exit(FAILED)
        to = "" if logs is None else f" --logs {shlex.quote(str(logs))}"
        typer.echo(f"Next: {program()} export -o kernels{to}")


# Reasons that a run prints for each problem; `db show` has the others.
MOST_REASONS = 3


def failed_lines(plans: Sequence[Plan], outcome: Outcome, folder: Path) -> list[str]:
    """Why candidates of this run failed, by problem."""
    from ..records import Log
    from ..records.queries import failures

    lines = []
    for plan, sessions in outcome.sessions.items():
        log = Log(folder, plan.machine.arch, plan.problem.operator)
        found = failures(
            one for one in log.read().trials if one.problem == plan.problem.key and one.session in sessions
        )
        if found:
            count = sum(one.count for one in found)
            more = command("db", "show", plan.problem.key, "--logs", folder)
            lines.append(f"{_named(plan, plans)}: {count} {'candidate' if count == 1 else 'candidates'} failed: {more}")
            lines += failure_lines(found, MOST_REASONS)
    return lines


def _problems(operator: str | None, axes: Sequence[str] | None, shapes: Path | None) -> list[Problem]:
    if shapes is not None:
        if operator is not None:
            raise ProblemError(f"--shapes: a file and an operator ({operator}) are both given; give one of them")
        return shape_files.read(shapes)
    if operator is None:
        raise ProblemError("operator: none given; see tvm-sparse list, or give a file of shapes with --shapes")
    return [problem_of(operator, axes)]


def _whole(operator: str | None, axes: Sequence[str] | None) -> bool:
    """Whether an operator is named without any of its problems."""
    return operator is not None and not axes and "/" not in operator


def _recorded(operator: str, machines: Sequence[Machine], folder: Path) -> list[Problem]:
    """An operator's problems with a record in this folder, for one of these machines."""
    from ..records import Log

    registry.find(operator)
    keys = {key for where in machines for key in Log(folder, where.arch, operator).best()}
    if not keys:
        archs = " or ".join(where.arch for where in machines)
        raise ProblemError(f"vary: {folder} has no record of {operator} for {archs}")
    return [registry.parse(key) for key in sorted(keys)]


@contextlib.contextmanager
def _devices(
    target: str,
    builders: int | None,
    *,
    planned: bool,
    devices: str | None,
    workers: int | None,
    ray: str | None,
    model: str | None,
) -> Iterator[Fleet]:
    """The devices that measure and build, by the options; `planned`: nothing will run, and the machine need not be
    here.
    """
    from ..tuning import cluster, fleet

    if ray is not None:
        if devices is not None or builders is not None:
            raise ProblemError("ray: the cluster has all its GPUs measure and all its cores build; leave out --devices")
        require("ray")
        with cluster.connected(ray, target, model=model, workers=workers, show=_say) as found:
            yield found
        return
    if planned and devices is None and workers is None and not is_here(where := machine.resolve(target)):
        fleet.of_one_model([where], model)
        with fleet.imagined(where) as found:
            yield found
        return
    where = machine_here(target, "tuning")
    if where.kind == "llvm":
        if devices is not None:
            raise ProblemError("devices: these are GPUs, and the target is the CPU, which --workers divides")
        fleet.of_one_model([where], model)
        parts = workers or 1
        with fleet.local(where, builders or machine.default_builders(), workers=parts) as found:
            yield found
        return
    if workers is not None:
        raise ProblemError(
            "workers: these are parts of a CPU, and the target is the GPU, of which --devices names many"
        )
    present = machine.gpus()
    numbers = _numbers(devices, len(present)) if devices is not None else [present.index(where)]
    if target not in ("auto", "cuda"):
        numbers = [number for number in numbers if present[number].arch == where.arch]
    chosen = fleet.of_one_model((present[number] for number in numbers), model)
    numbers = [number for number in numbers if present[number] in chosen]
    with fleet.local(where, builders or machine.default_builders(len(numbers)), gpus=numbers) as found:
        yield found


def _numbers(text: str, count: int) -> list[int]:
    """The GPUs given by `--devices`, of `count` in all."""
    if text == "all":
        return list(range(count))
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [-1]
    if not all(0 <= number < count for number in numbers) or len(set(numbers)) < len(numbers):
        raise ProblemError(f"devices: expected all, or different numbers from 0 to {count - 1}, got {text!r}")
    return numbers


def _say(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def _require_templates(names: Sequence[str], problems: Sequence[Problem], machines: Sequence[Machine]) -> None:
    """Raise unless each name is a template of one of the problems' operators for one of these machines."""
    from ..core import spaces

    operators, kinds = {problem.operator for problem in problems}, {where.kind for where in machines}
    valid = [t.name for t in spaces.templates() if t.operator in operators and t.kind in kinds]
    for name in names:
        if name not in valid:
            archs = " and ".join(where.arch for where in machines)
            raise ProblemError(f"template: got {name!r}; on {archs} expected one of {', '.join(valid)}")


def _require_strategy(name: str) -> None:
    """Raise unless there is such a strategy; exit with the command that installs its library if that is missing."""
    if name not in strategy_names():
        raise ProblemError(f"strategy: got {name!r}; expected one of {', '.join(strategy_names())}")
    if name in LIBRARIES:
        require("lab")


def _decisions(problems: Sequence[Problem], machines: Sequence[Machine]) -> list[str]:
    """Names of the decisions of all templates that fit one of the problems."""
    from ..core import spaces

    pairs = itertools.product(problems, machines)
    tables = [table for problem, where in pairs for table in spaces.applicable(problem, where)[0].values()]
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
    *,
    limit: float | None = None,
    inputs: Inputs = Inputs.hot,
    vary: str | None = None,
    devices: str | None = None,
    workers: int | None = None,
    ray: str | None = None,
    model: str | None = None,
) -> str:
    """The command that repeats the run, without repeating its measurements."""
    words = ["tune", *([operator] if operator else []), *(axes or ())]
    for name, value, default in (
        ("shapes", shapes, None),
        ("target", target, "auto"),
        ("trials", trials, None),
        ("logs", logs, None),
        ("builders", builders, None),
        ("devices", devices, None),
        ("workers", workers, None),
        ("ray", ray, None),
        ("model", model, None),
        ("limit", limit, None),
        ("vary", vary, None),
        ("strategy", strategy, STRATEGY),
        ("inputs", inputs, Inputs.hot),
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
    machines: Sequence[Machine],
    trials: int,
    folder: Path,
    builders: int,
    templates: Sequence[str] = (),
    fixed: Mapping[str, tuple[int, ...]] | None = None,
    strategy: str = STRATEGY,
    *,
    fresh: bool = False,
) -> list[Plan]:
    from ..records import Log
    from ..tuning.plans import make_plan, recorded

    # The plans of all problems read a log once.
    log_of = functools.cache(functools.partial(Log, folder))
    known_of = functools.cache(functools.partial(recorded, fresh=fresh))
    how, plans = (builders, templates, fixed, strategy), []
    for problem, where in itertools.product(problems, machines):
        log = log_of(where.arch, problem.operator)
        plans.append(make_plan(problem, where, trials, log, *how, fresh=fresh, known=known_of(log)))
    return plans


def varied_plans(
    problems: Sequence[Problem],
    machines: Sequence[Machine],
    trials: int,
    folder: Path,
    builders: int,
    decisions: Sequence[str],
    strategy: str = STRATEGY,
    *,
    fresh: bool = False,
) -> list[Plan]:
    """Plans for the problems whose record has one of these decisions, in which only these are searched.

    Raises
    ------
    ProblemError
        If no record has one.
    """
    from ..records import Log
    from ..tuning.plans import make_plan, recorded

    plans: list[Plan] = []
    had: set[str] = set()
    log_of, best_of = functools.cache(functools.partial(Log, folder)), functools.cache(Log.best)
    known_of = functools.cache(functools.partial(recorded, fresh=fresh))
    for problem, where in itertools.product(problems, machines):
        log = log_of(where.arch, problem.operator)
        best = best_of(log).get(problem.key)
        if best is None:
            continue
        won = best.candidate.values
        had |= won.keys()
        if not won.keys().isdisjoint(decisions):
            fixed = {name: (value,) for name, value in won.items() if name not in decisions}
            how = builders, (best.candidate.template,), fixed, strategy
            plans.append(make_plan(problem, where, trials, log, *how, fresh=fresh, known=known_of(log)))
    if not had:
        raise ProblemError(f"vary: {folder} has no record of any of these problems")
    for name in decisions:
        if name not in had:
            raise ProblemError(
                f"vary: expected some of {', '.join(sorted(had))}, which these records have, got {name!r}"
            )
    return plans


def _named(plan: Plan, plans: Sequence[Plan]) -> str:
    """The problem, with the architecture if it is tuned on several."""
    several = len({one.machine for one in plans}) > 1
    return f"{plan.problem.typed}{f' on {plan.machine.arch}' if several else ''}"


def plan_table(plans: Sequence[Plan], devices: int = 1) -> Table:
    right = ("points", "trials now", "paid", "about")
    made = table("problem", "templates", *right, right=right)
    for plan in plans:
        made.add_row(
            _named(plan, plans),
            "\n".join(plan.templates),
            "\n".join(f"{size:,}{' drawn' * (name in plan.drawn)}" for name, size in plan.templates.items()),
            str(plan.trials),
            str(plan.paid),
            duration(plan.seconds),
        )
    if len(plans) > 1:
        total = [sum(plan.trials for plan in plans), sum(plan.paid for plan in plans)]
        made.add_section()
        seconds = sum(plan.seconds for plan in plans) / min(devices, len(plans))
        made.add_row(f"{len(plans)} problems", "", "", *map(str, total), duration(seconds))
    return made


def left_out_lines(plans: Sequence[Plan]) -> list[str]:
    """Templates that do not apply: each reason once, with the number of problems for which it holds."""
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
    """Results of a run of several plans."""

    def __init__(self) -> None:
        self.bests: dict[Plan, Best] = {}
        self.sessions: dict[Plan, set[str]] = {}  # sessions in which trials of a plan failed
        self.finals: dict[str, dict[Candidate, float]] = {}  # by problem key, median seconds of the finalists
        self.failures = 0
        self.interrupted = False


def run(
    plans: Sequence[Plan],
    folder: Path,
    seed: int,
    again: str,
    using: Fleet | None = None,
    over: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run plans on these devices, or on the first one of this machine, and show their progress.

    Once `over` returns true no plan is begun, and running ones end after the current batch.
    """
    from ..tuning import fleet, session
    from ..tuning.workbench import NoValidRecord

    outcome = Outcome()
    if not plans:
        return outcome

    def show(progress: Progress) -> None:
        if progress.last is not None and progress.last.outcome != "ok":
            outcome.sessions.setdefault(progress.plan, set()).add(progress.last.session)
        if progress.medians:
            outcome.finals[progress.plan.problem.key] = progress.medians
        view.show(progress)

    def end(plan: Plan, found: Best | NoValidRecord) -> None:
        if isinstance(found, NoValidRecord):
            outcome.failures += 1
            view.end(plan, None)
            typer.echo(f"error: {found}", err=True)
        else:
            outcome.bests[plan] = found
            view.end(plan, found)

    try:
        with contextlib.ExitStack() as stack:
            devices = using or stack.enter_context(fleet.local(plans[0].machine, plans[0].builders))
            stop = stack.enter_context(session.stop_on_interrupt())
            view = stack.enter_context(_view(plans, stop, devices.sessions()))
            session.tune_all(
                plans,
                folder,
                devices,
                seed=seed,
                begin=view.begin,
                show=show,
                end=end,
                stop=lambda: stop() or over(),
            )
            outcome.interrupted = stop()
    except KeyboardInterrupt:
        typer.echo(f"\nEnded at once; the batch in hand is lost. Resume with:\n  {again}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    return outcome


@contextlib.contextmanager
def _view(plans: Sequence[Plan], stop: Callable[[], bool], together: int) -> Iterator[Lines | Live]:
    screen = console()
    if not screen.is_terminal:
        yield Lines(plans, stop)
        return
    from rich.live import Live as RichLive

    view = Live(plans, stop, together)
    # transient: the table of results replaces it.
    with RichLive(get_renderable=view.render, console=screen, refresh_per_second=4, transient=True):
        yield view


def _counts(progress: Progress) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in progress.outcomes.items()) or "starting"


class Lines:
    """Progress for a file or a pipe: one line for each batch."""

    def __init__(self, plans: Sequence[Plan], stop: Callable[[], bool]) -> None:
        self._plans, self._stop = plans, stop
        self._said_stop = False
        self._names: dict[Plan, str] = {}
        self._next: dict[Plan, int] = {}  # number of trials at which the next line is due

    def begin(self, plan: Plan) -> None:
        self._names[plan] = f"[{len(self._names) + 1}/{len(self._plans)}] {_named(plan, self._plans)}"
        self._next[plan] = 0

    def show(self, progress: Progress) -> None:
        from ..tuning.plans import BATCH

        if self._stop() and not self._said_stop:
            self._said_stop = True
            typer.echo("stopping after this batch (once more: at once)")
        plan, final = progress.plan, progress.phase == "final"
        name = self._names[plan]
        if not final and progress.measured < min(self._next[plan], plan.trials):
            return
        self._next[plan] = progress.measured + BATCH
        if final and not progress.final_share:
            typer.echo(f"{name}: {progress.measured} measured, final between the best")
        elif final:
            pass
        elif progress.measured:
            bytes_ = plan.problem.cost().bytes
            typer.echo(
                f"{name}: {progress.measured}/{plan.trials} ({_counts(progress)}),"
                f" best {us(progress.best_seconds)} us, {rate(bytes_, progress.best_seconds)} GB/s,"
                f" {duration(progress.seconds_left)} left"
            )
        else:
            typer.echo(f"{name}: {plan.trials} trials, {plan.paid} paid for")

    def end(self, plan: Plan, best: Best | None) -> None:
        if best is None:
            typer.echo(f"{self._names[plan]}: no valid record")
        else:
            inputs = ", fresh inputs" if plan.fresh else ""
            faster = found if (found := gain(best)) != "-" else "no ratio (spread) to the"
            typer.echo(f"{self._names[plan]}: {us(best.seconds)} us{inputs}, {faster} fallback, {best.candidate}")


class Live:
    """Progress for a terminal: one table, redrawn. `together`: number of plans that run at the same time."""

    def __init__(self, plans: Sequence[Plan], stop: Callable[[], bool], together: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._plans, self._stop, self._together = plans, stop, together
        self._limit = any(plan.machine.bandwidth for plan in plans)
        self._states: dict[Plan, Progress] = {}
        self._bests: dict[Plan, Best | None] = {}
        self._bar = Bar(
            TextColumn("trials"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._task = self._bar.add_task("", total=sum(plan.trials for plan in plans), left="")

    def begin(self, plan: Plan) -> None:
        pass

    def show(self, progress: Progress) -> None:
        self._states[progress.plan] = progress

    def end(self, plan: Plan, best: Best | None) -> None:
        self._bests[plan] = best

    def render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        states = tuple(self._states.values())  # a copy, since other threads add to them
        measured = sum(state.measured for state in states)
        self._bar.update(self._task, completed=measured, left=f"about {duration(self._seconds_left())} left")
        right = ("us", "GB/s", *(("of limit",) if self._limit else ()), "x fallback", "trials")
        made = table("problem", *right, "outcomes", right=right, prose=("problem", "outcomes"))
        rest = [""] * (len(right) + 1)
        # Up to the plan begun last: other running ones are above it.
        last = max((self._plans.index(state.plan) for state in states), default=0)
        first = max(0, last - ROWS_BEFORE)
        shown = self._plans[first : last + ROWS_AFTER + 1]
        if first:
            made.add_row(f"... {first} before", *rest, style="dim")
        for plan in shown:
            made.add_row(*self._row(plan), style="dim" if plan not in self._states else None)
        after = len(self._plans) - first - len(shown)
        if after:
            made.add_row(f"... {after} more", *rest, style="dim")
        stopping = self._stop()
        note = (
            "stopping after this batch (again: at once)" if stopping else "Ctrl-C stops after a batch; nothing is lost"
        )
        return Group(made, self._bar, Text(note, style="yellow" if stopping else "dim"))

    def _row(self, plan: Plan) -> list[str]:
        state, best = self._states.get(plan), self._bests.get(plan)
        if state is None:
            return [_named(plan, self._plans), *[""] * (4 if self._limit else 3), str(plan.trials), "waiting"]
        seconds = best.seconds if best else state.best_seconds
        # Only after the final, which times both in turn: the minimum of many single measurements is too small.
        faster = gain(best) if best else ""
        bytes_ = plan.problem.cost().bytes
        if plan in self._bests:
            what = "done: " + _counts(state) if best else "no valid record"
        else:
            what = "final" if state.phase == "final" else _counts(state)
        figures = [us(seconds), rate(bytes_, seconds)]
        if self._limit:
            figures.append(share(bytes_, seconds, plan.machine))
        return [
            _named(plan, self._plans),
            *figures,
            faster,
            f"{state.measured}/{plan.trials}",
            what,
        ]

    def _seconds_left(self) -> float:
        """Estimated seconds for the running and the waiting problems, by the pace of the first."""
        states = tuple(self._states.values())
        running = [state for state in states if state.plan not in self._bests]
        waiting = sum(plan.seconds for plan in self._plans if plan not in self._states)
        pace = statistics.fmean(state.slowness for state in running) if running else 1.0
        longest = max((state.seconds_left for state in running), default=0.0)
        everything = sum(state.seconds_left for state in running) + pace * waiting
        return max(longest, everything / self._together)


def result_table(plans: Sequence[Plan], bests: Mapping[Plan, Best]) -> Table:
    limit = any(plan.machine.bandwidth for plan in plans)
    right = ("us", "fallback us", "spread", "gain", "GB/s", *(("of limit",) if limit else ()))
    title = "times with fresh inputs" if any(plan.fresh for plan in plans) else None
    made = table("problem", "best candidate", *right, title=title, right=right)
    for plan in plans:
        best = bests.get(plan)
        if best is None:
            continue
        bytes_ = plan.problem.cost().bytes
        cells = [us(best.seconds), us(best.fallback_seconds), gain_apart(best), gain(best)]
        cells.append(rate(bytes_, best.seconds))
        if limit:
            cells.append(share(bytes_, best.seconds, plan.machine))
        made.add_row(_named(plan, plans), str(best.candidate), *cells)
    return made
