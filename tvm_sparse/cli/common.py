"""Code shared by the commands: arguments, messages, exit codes, and the format of figures.

Exit codes: 0 success, 1 failure, 2 a wrong or unknown argument, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.util
import os
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from ..bench.load import FEWEST_ROUNDS, WIDE, comparable, spread
from ..core import machine, registry
from ..core.commands import PROGRAM as PROGRAM
from ..core.commands import install
from ..core.commands import program as program
from ..core.machine import CARDS, Machine, UnknownArch
from ..core.problem import FROM_FILE, Problem, ProblemError
from ..core.registry import PluginError, add_plugins, make, parse

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..bench.load import Load
    from ..records import Best
    from ..records.queries import Failure

FAILED, USAGE, INTERRUPTED = 1, 2, 130

# What names a file with a sparse matrix, among the axes of a problem.
STRUCTURE = "structure"

# Characters: more than any row of a table has.
UNLIMITED = 100_000

# Default architectures for which kernels are built ahead; others can be named.
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120", "compute_80", "x86-64-v3", "x86-64-v4")

# The modules of each extra, by the names under which they are imported.
EXTRAS = {
    "compiler": ("tvm",),
    "tune": ("xgboost", "psutil", "cloudpickle", "scipy"),
    "cuda": ("cuda.bindings",),
    "torch": ("torch",),
    "ray": ("ray",),
    "plot": ("matplotlib",),
    "sign": ("cryptography",),
    "lab": ("pandas", "pyarrow", "sklearn", "matplotlib", "scipy", "optuna", "nevergrad"),
}


class Inputs(enum.StrEnum):
    """State of the inputs when calls are timed."""

    hot = "hot"
    fresh = "fresh"


# ---- shell completion --------------------------------------------------------------------------


def operator_names(incomplete: str) -> list[str]:
    """Names of operators with this prefix, including those of plugins."""
    return [name for name in registry.operators() if name.startswith(incomplete)]


def axis_words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Axes of the named operator that are not given yet (`batch=` and so on), or values of an axis of names."""
    given = [str(word) for word in ctx.params.get("axes") or ()]
    operator = registry.operators().get(str(ctx.params.get("operator")))
    if operator is None:
        return []
    name, equals, value = incomplete.partition("=")
    if equals:
        return [f"{name}={choice}" for choice in axis_choices(operator, name) if choice.startswith(value)]
    taken = {word.partition("=")[0] for word in given}
    names = (field.name for field in dataclasses.fields(operator.problem))
    return [f"{one}=" for one in names if one.startswith(name) and one not in taken]


def axis_choices(operator: registry.Operator, name: str) -> list[str]:
    """The values of an axis of names in the operator's own shapes; empty for an axis of numbers."""
    shapes = [parse(key) for key in (*operator.shapes.AWKWARD, *operator.shapes.REALISTIC)]
    found = dict.fromkeys(shape.axes[name] for shape in shapes if name in shape.axes)
    return [value for value in found if isinstance(value, str)]


def target_names(incomplete: str) -> list[str]:
    """Values for `--target`, as far as they can be listed."""
    return [name for name in ("auto", "cpu", "cuda", *ARCHS, *CARDS) if name.startswith(incomplete)]


def template_names(incomplete: str) -> list[str]:
    """All templates: a shell's completion does not pass the words before an option without a value."""
    templates = (template for one in registry.operators().values() for template in one.templates)
    return [template.name for template in templates if template.name.startswith(incomplete)]


def recorded_keys(ctx: typer.Context, incomplete: str) -> list[str]:
    """Operators, and, once one is complete, its problems with a ranking in the folders that are read."""
    from ..records.database import logs_of

    operator, slash, _ = incomplete.partition("/")
    if not slash:
        return [f"{name}/" for name in operator_names(operator)]
    logs = ctx.params.get("logs")
    roots = default_roots([logs] if isinstance(logs, Path) else logs)
    keys = (key for root in roots for log in logs_of(root) if log.operator == operator for key in log.best())
    return sorted({key for key in keys if key.startswith(incomplete)})


Operator = Annotated[
    str,
    typer.Argument(
        metavar="OPERATOR",
        help="An operator (see tvm-sparse list), or a problem's whole key.",
        autocompletion=operator_names,
    ),
]
Axes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="AXIS=VALUE",
        help="Its axes, such as batch=10 vocab=25000 k=5. structure=FILE gives those that the sparse matrix in a .smtx,"
        " .mtx or .npz file decides.",
        autocompletion=axis_words,
    ),
]


class ProgramSet(enum.StrEnum):
    """The sets of `registry.SETS`, and `all`."""

    serve = "serve"
    sparse = "sparse"
    recurrent = "recurrent"
    all = "all"


Target = Annotated[
    str,
    typer.Option(
        "--target",
        "--arch",
        help="auto (the GPU if there is one), cpu, cuda, an architecture (sm_80, sm_90a, x86-64-v3,"
        " sm_89:multiprocessors=128), or a card (a100, rtx4090, l40s, h100, h200, b200, rtx5090, ...).",
        autocompletion=target_names,
    ),
]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        metavar="NAME",
        help="This template only; may be given again.",
        autocompletion=template_names,
    ),
]
# For commands that look a kernel up as a call does; `looking_in` uses both.
ReadLogs = Annotated[
    list[Path] | None,
    typer.Option(
        "--logs",
        metavar="FOLDER",
        help="Folder of records that is read besides the package's and yours, and wins, as by"
        " tvm_sparse.configure(logs=FOLDER); may be given again.",
    ),
]
Kernels = Annotated[
    list[Path] | None,
    typer.Option(
        "--kernels",
        metavar="FOLDER",
        help="Folder that tvm-sparse export wrote, used as by tvm_sparse.load(FOLDER); may be given again.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Fixed = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        metavar="NAME=VALUE,...",
        help="Only these values of a decision, as blocks=132,264; may be given again.",
    ),
]
Builders = Annotated[
    int | None, typer.Option(min=1, help="Processes that compile.  \\[default: a core each, 16 at most]")
]


def _add_plugins(paths: list[Path] | None) -> None:
    with errors():
        add_plugins(paths or ())


# Every command has it as `plugin`, before or after the command's name; plugins are registered while arguments are
# parsed, so commands need not do it.
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="PATH",
        callback=_add_plugins,
        help="Folder or file outside of the package with an operator, or templates; may be given again.",
    ),
]


# ---- problems and machines ----------------------------------------------------------------------


def problem_of(operator: str, axes: Sequence[str] | None) -> Problem:
    """The problem for an operator's name and `axis=value` texts, or for a key. In the place of the axes that a sparse
    matrix decides, `structure=FILE` may name a file with one.
    """
    if "/" in operator and not axes:
        return parse(operator)
    values: dict[str, str] = {}
    for text in axes or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ProblemError(f"{operator}: expected axis=value, got {text!r}")
        if name in values:
            raise ProblemError(f"{operator}: axis {name} is given twice")
        values[name] = value
    path = values.pop(STRUCTURE, None)
    if path is not None:
        of_file = registry.find(operator).problem.axes_of_file(Path(path), values)
        for name in of_file.keys() & values.keys() - {"block"}:
            raise ProblemError(f"{operator}: {name} comes from the file of {STRUCTURE}; leave it out")
        return make(operator, {**values, **of_file})
    return make(operator, values)


def structure_of(axes: Sequence[str] | None) -> str | None:
    """The structure of a problem's inputs that `axis=value` texts name: that of a file, or None."""
    paths = (text.partition("=")[2] for text in axes or () if text.startswith(f"{STRUCTURE}="))
    return next((f"{FROM_FILE}{Path(path).resolve()}" for path in paths), None)


def as_called(problems: Sequence[Problem], done: str = "tuned", *, err: bool = False) -> list[Problem]:
    """The problems under which calls look up the given ones, without duplicates; reports those that differ."""
    for problem in problems:
        if problem.as_called() != problem:
            text = f"{problem.typed} is {done} as {problem.as_called().typed}: calls with such data ask for it"
            typer.echo(text, err=err)
    return list(dict.fromkeys(problem.as_called() for problem in problems))


def machine_here(target: str, doing: str) -> Machine:
    """The machine of a target, which must be this one; `doing` is the activity, for the message.

    For a CPU, its level and lower ones (`x86-64-v3`) are accepted too, since it runs code for those.
    """
    wanted = machine.resolve(target)
    present = [*machine.gpus(), machine.cpu()]
    if wanted.kind == "llvm" and is_here(wanted):
        return dataclasses.replace(wanted, name=machine.cpu().name)
    if wanted not in present:
        names = " and ".join(dict.fromkeys(f"{found.arch} ({found.name})" for found in present))
        raise UnknownArch(
            f"target: {wanted.arch} is not here, and {doing} runs kernels; this machine has {names}."
            " Other architectures can be exported for (tvm-sparse export), not measured"
        )
    return wanted


def is_here(wanted: Machine) -> bool:
    """Whether a machine is this one, or a CPU whose level this CPU has."""
    if wanted.kind == "llvm":
        return machine.suitability(wanted.arch, machine.cpu()) is not None
    return wanted in machine.gpus()


def require(*extras: str) -> None:
    """Exit with the command that installs the missing packages of these extras."""
    missing = {extra: [name for name in EXTRAS[extra] if not _installed(name)] for extra in extras}
    lacking = {extra: names for extra, names in missing.items() if names}
    if lacking:
        fail(_lacking([name for names in lacking.values() for name in names], *lacking))


def _lacking(modules: Sequence[str], *extras: str) -> str:
    return f"{', '.join(modules)} missing; install with: {install(*extras)}"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised by the parent package
        return False


@contextlib.contextmanager
def looking_in(logs: Sequence[Path] | None, kernels: Sequence[Path] | None) -> Iterator[None]:
    """Within the block, calls and look-up use the folders of `--logs` and `--kernels`."""
    from ..runtime import dispatch

    with dispatch.dispatcher.kept():
        if logs:
            dispatch.configure(logs=logs)
        for folder in kernels or ():
            dispatch.load(folder)
        yield


# --------------------------------------------------------------------------------------------------- messages


def fail(message: str, code: int = FAILED) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Errors that users can fix become one message on stderr; all others keep their traceback."""
    try:
        yield
    except (ProblemError, UnknownArch, PluginError) as error:
        fail(str(error), USAGE)
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        for extra, modules in EXTRAS.items():
            if top in {module.partition(".")[0] for module in modules}:
                fail(_lacking([error.name or top], extra))
        raise
    except Exception as error:
        # Imported here, since most commands need none of them.
        from ..artifacts.compile import CompileError
        from ..artifacts.cuda import ToolchainError
        from ..artifacts.manifest import ManifestError
        from ..records.exchange import ExchangeError
        from ..records.predictor import PredictorError
        from ..records.space import SpaceError
        from ..runtime.loading import LoadError
        from ..tuning.cluster import ClusterError
        from ..tuning.workbench import NoValidRecord
        from ..workers.processes import StartError

        known = (
            CompileError,
            ToolchainError,
            ManifestError,
            LoadError,
            StartError,
            NoValidRecord,
            ClusterError,
            OSError,
            ExchangeError,
            PredictorError,
            SpaceError,
        )
        if isinstance(error, known):
            fail(str(error))
        raise


# ---------------------------------------------------------------------------------------------------- printing


def console() -> Console:
    """A console on the present stdout. Cells are never cut, and only columns of prose wrap, so a table may be wider
    than the terminal. Without a terminal each row is one line, unless COLUMNS sets a width.
    """
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    def least(made: Table) -> int:
        """Characters that a table needs."""
        widest = screen.options.update_width(UNLIMITED)
        for column in made.columns:
            if column.no_wrap:
                cells = [Measurement.get(screen, widest, cell).maximum for cell in (column.header, *column.cells)]
                column.min_width = max(cells, default=0)
        return Measurement.get(screen, widest, made).minimum

    class Screen(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            before, needed = self.width, max((least(one) for one in objects if isinstance(one, Table)), default=0)
            self.width = max(before, needed)
            super().print(*objects, **options)
            self.width = before

    limited = sys.stdout.isatty() or "COLUMNS" in os.environ
    screen = Screen(highlight=False, width=None if limited else UNLIMITED)
    return screen


def table(
    *columns: str, title: str | None = None, right: Sequence[str] = (), prose: Sequence[str] = ("what it does",)
) -> Table:
    """An empty table in the package's style; columns in `right` hold figures, those in `prose` may wrap."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, no_wrap=column not in prose, overflow="fold")
    return made


def us(seconds: float | None) -> str:
    """Microseconds with about four digits."""
    if seconds is None or seconds == float("inf"):
        return "-"
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def ratio(numerator: float | None, denominator: float | None) -> str:
    """A speed-up: `1.83x`."""
    if not numerator or not denominator or float("inf") in (numerator, denominator):
        return "-"
    value = numerator / denominator
    return f"{value:.0f}x" if value >= 100 else f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def apart(seconds: Sequence[float]) -> str:
    """Spread of rounds, as a share of their median: `4 %`."""
    found = spread(seconds)
    return "-" if found is None else f"{100 * found:.0f} %"


def ratio_of_rounds(numerator: Sequence[float], denominator: Sequence[float]) -> str:
    """The ratio of two medians; no ratio if the rounds of either are spread widely, or too few."""
    if not comparable(numerator, denominator):
        return "-"
    return ratio(statistics.median(numerator), statistics.median(denominator))


def gain(best: Best) -> str:
    """Speed-up of a ranking's winner over the fallback; as in `ratio_of_rounds` if the ranking has rounds."""
    if best.seconds_all and best.fallback_all:
        return ratio_of_rounds(best.fallback_all, best.seconds_all)
    return ratio(best.fallback_seconds, best.seconds)


def gain_apart(best: Best) -> str:
    """Spread of the rounds of winner or fallback, whichever is larger."""
    return apart(max(best.seconds_all, best.fallback_all, key=lambda rounds: spread(rounds) or 0.0))


def widest(best: Best) -> float | None:
    """The larger spread as a number; None for a ranking without rounds."""
    return max(
        (found for one in (best.seconds_all, best.fallback_all) if (found := spread(one)) is not None), default=None
    )


def load_line(*loads: Load | None) -> list[str]:
    """Load by other processes during the measurement, the largest of several samples; empty if it is not known."""
    known = [load for load in loads if load is not None]
    if not known:
        return []
    worst = max(known, key=lambda load: load.others / load.cores)
    return [f"Load: {worst}." + (" Times on this CPU are those of a busy machine." if worst.busy else "")]


def failure_lines(found: Sequence[Failure], most: int) -> list[str]:
    """Reasons why trials failed, one line each with a candidate that reproduces it, and the number
    of further reasons.
    """
    lines = [f"  {one.count} x {one.outcome}: {one.reason}\n      as {one.candidate}" for one in found[:most]]
    rest = found[most:]
    if rest:
        lines.append(f"  and {sum(one.count for one in rest)} trials for {len(rest)} other reasons")
    return lines


WIDE_NOTE = (
    f"spread: interquartile range of the rounds over their median; no ratio where it is above {WIDE:.0%}, or of fewer"
    f" than {FEWEST_ROUNDS} rounds."
)


def rate(byte_count: int, seconds: float | None) -> str:
    """Compulsory bytes per second, in GB/s."""
    if seconds is None or seconds == float("inf"):
        return "-"
    value = byte_count / seconds / 1e9
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def share(byte_count: int, seconds: float | None, where: Machine) -> str:
    """Compulsory bytes per second as a share of the memory's bandwidth, if that is known."""
    if seconds is None or seconds == float("inf") or where.bandwidth is None:
        return "-"
    return f"{byte_count / seconds / where.bandwidth:.0%}"


def duration(seconds: float) -> str:
    """`8 s`, `2 min 5 s`, `1 h 3 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(byte_count: int) -> str:
    return f"{byte_count / 1024:,.0f} KiB"


def echo_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, indent=2, default=str))


def note_counting(tables: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    """Announce that all combinations of some templates will be enumerated, if that takes a while."""
    from ..core import spaces
    from ..research.space import DRAWN, MOST_COMBINATIONS

    for name in spaces.drawn(tables):
        count = spaces.combinations(tables[name])
        how = "going through" if count <= MOST_COMBINATIONS else f"too many to go through: {DRAWN:,} are drawn of"
        typer.echo(f"note: {how} {count:,} combinations of {name}", err=True)


def default_roots(logs: Sequence[Path] | None) -> tuple[Path, ...]:
    """The folders of records to read: those named, or the package's own and the user's."""
    from ..runtime import paths

    return tuple(logs) if logs else (paths.shipped_logs(), paths.user_logs())


def fixed_values(words: Sequence[str] | None, decisions: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The values given by `--fix`, by the name of a decision.

    Raises
    ------
    ProblemError
        If a word is not a decision with numbers.
    """
    found = {}
    for word in words or ():
        name, _, values = word.partition("=")
        if name not in decisions:
            raise ProblemError(f"fix: expected one of {', '.join(decisions)}, got {name!r}")
        try:
            found[name] = tuple(int(value) for value in values.split(","))
        except ValueError:
            raise ProblemError(f"fix: expected numbers for {name}, as {name}=1,2, got {values!r}") from None
    return found
