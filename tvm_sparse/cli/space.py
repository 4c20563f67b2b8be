"""`tvm-sparse space`: the schedule spaces of a problem."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import machine
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError
from ..core.registry import make
from ..core.spaces import searched
from .common import (
    AsJson,
    Axes,
    Builders,
    Operator,
    Plugins,
    Target,
    Templates,
    console,
    echo_json,
    errors,
    note_counting,
    problem_of,
    table,
)

if TYPE_CHECKING:
    from ..research.space import Compiled, Difference, Part


# Combinations of a file above which counting is announced; points drawn if they cannot be counted.
NOTED, DRAWN = 1_000_000, 100_000


def space(
    operator: Operator,
    axes: Axes = None,
    templates: Templates = None,
    target: Target = "auto",
    sample: Annotated[int, typer.Option(min=0, help="Show so many points of each template.")] = 0,
    point: Annotated[
        list[str] | None, typer.Option(metavar="CANDIDATE", help="Show this point; may be given again.")
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(metavar="FORM", help="With their code: tir, cuda, ptx or sass; of a CPU tir, llvm or asm."),
    ] = None,
    diff: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER",
            help="Compare with another template (--template ONE), point (--point ONE) or shape (axis=value,...).",
        ),
    ] = None,
    compile: Annotated[
        int, typer.Option(min=0, help="Compile so many points of each template: which share fits the architecture?")
    ] = 0,
    inputs: Annotated[
        Path | None,
        typer.Option("--t1", metavar="FILE.json", help="Write the space of --template NAME in the T1 format."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    builders: Builders = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Show the templates of a problem, their decisions, how large their spaces are, and what restrictions remove.

    Instead of an operator, a FILE.json with a space in the T1 format may be given.

    Any architecture can be examined on any machine; nothing is run. A restriction's count is the number of points that
    it is the first to refuse.
    """
    with errors():
        from ..research import space as spaces

        if operator.endswith(".json"):
            _print_inputs(Path(operator))
            return
        problem, where = problem_of(operator, axes), machine.resolve(target)
        if emit:
            spaces.check_form(emit, where)
        if inputs is not None:
            _write_inputs(problem, where, templates or (), inputs)
            return
        points = [_candidate(text) for text in point or ()]
        if not points:
            note_counting(searched(problem, where, templates or ())[0])
        if diff is not None:
            _compare(problem, where, templates or (), points, diff, emit, as_json)
            return
        if points:
            _show_points(problem, where, points, emit)
            return
        found = spaces.parts(problem, where, templates or ())
        workers = builders or machine.default_builders()
        tried = {
            part.template.name: spaces.compiled(
                problem,
                where,
                spaces.sampled(part.points, compile, seed),
                workers,
                of=part.product if part.drawn else len(part.points),
            )
            for part in found
            if compile and part.points
        }
        shown = {part.template.name: spaces.sampled(part.points, sample, seed) for part in found}
        if as_json:
            code = emit or ""
            echo_json([_described(problem, where, part, tried, shown[part.template.name], code) for part in found])
            return
        _print(problem, where, found, tried)
        _show_points(problem, where, [one for candidates in shown.values() for one in candidates], emit)


def _show_points(problem: Problem, where: Machine, points: Iterable[Candidate], emit: str | None) -> None:
    """Print points, each with its code if a form is requested."""
    from ..research.space import emitted

    for point in points:
        typer.echo(str(point))
        if emit:
            typer.echo(emitted(problem, point, where, emit))


def _write_inputs(problem: Problem, where: Machine, names: Sequence[str], path: Path) -> None:
    import json

    from ..records.exchange import inputs_of
    from ..research import space as spaces

    if len(names) != 1 or where.kind != "cuda":
        raise ProblemError("t1: a file holds the space of one template on a CUDA GPU; name it by --template and --arch")
    [part] = spaces.parts(problem, where, names)
    if part.reason:
        raise ProblemError(f"{part.template.name} does not apply: {part.reason}")
    if part.drawn:
        raise ProblemError(f"t1: {part.template.name} has {part.product:,} combinations, too many to write its points")
    path.write_text(json.dumps(inputs_of(problem, part.template.name, part.table, part.points), indent=1) + "\n")
    typer.echo(f"{len(part.points)} points in {path}")


def _print_inputs(path: Path) -> None:
    from ..records.exchange import TooLarge, read_inputs
    from ..research.space import wilson

    found = read_inputs(path)
    made = table("parameter", "values", title=path.stem, prose=("values",))
    for name, values in found.table.items():
        made.add_row(name, ", ".join(map(str, values)))
    console().print(made)
    if found.conditions and found.product > NOTED:
        typer.echo(f"note: counting which of {found.product:,} combinations the conditions allow", err=True)
    try:
        refused = found.refused()
    except TooLarge as error:
        allowed, drawn = found.sampled(DRAWN)
        low, high = wilson(allowed, drawn)
        typer.echo(
            f"{found.product:,} combinations, of which {low:.2%} to {high:.2%} are points (95 % confidence, by"
            f" {drawn:,} that were drawn at random); not counted: {error}"
        )
        return
    typer.echo(f"{found.product - sum(refused.values()):,} of {found.product:,} points")
    for text, count in refused.items():
        typer.echo(f"  - {count:,} points: {text[:200]}")


def _candidate(text: str) -> Candidate:
    try:
        return Candidate.parse(text)
    except ValueError as error:
        raise ProblemError(f"point: {error}") from error


def _described(
    problem: Problem, where: Machine, part: Part, tried: Mapping[str, Compiled], shown: Sequence[Candidate], emit: str
) -> dict[str, Any]:
    from ..research.space import emitted

    name = part.template.name
    found: dict[str, Any] = {
        "template": name,
        "version": part.template.version,
        "summary": part.template.summary,
        "comparison": part.template.comparison,
        "reason": part.reason,
        "decisions": part.table,
        "product": part.product,
        "points": None if part.drawn else len(part.points),
        "share": part.share,
        "drawn": part.drawn,
        "refused": part.refused,
    }
    if name in tried:
        one = tried[name]
        found["compiled"] = {
            "tried": one.tried, "fits": one.fits, "interval": one.interval, "failures": one.failures
        }  # fmt: skip
    if shown:
        found["sample"] = {str(one): emitted(problem, one, where, emit) if emit else None for one in shown}
    return found


def _print(problem: Problem, where: Machine, parts: Sequence[Part], tried: Mapping[str, Compiled]) -> None:
    screen = console()
    typer.echo(f"{problem.key} on {where.arch} ({where.cores} cores)")
    right = ("of table", "points", "compile")
    made = table("template", "what it does", *right, right=right)
    for part in parts:
        if not part.reason:
            note = " (for comparison)" if part.template.comparison else ""
            fits = _share(tried[part.template.name]) if part.template.name in tried else "-"
            low, high = part.share
            points = f"{low:.2%} to {high:.2%}" if part.drawn else f"{len(part.points):,}"
            made.add_row(part.template.name + note, part.template.summary, f"{part.product:,}", points, fits)
    screen.print(made)
    for part in parts:
        if part.reason:
            screen.print(f"{part.template.name} does not apply: {part.reason}", markup=False)
            continue
        made = table("decision", "candidates", title=part.template.name, prose=("candidates",))
        for name, values in part.table.items():
            made.add_row(name, ", ".join(map(str, values)))
        screen.print(made)
        of = f" of {part.drawn:,} drawn" if part.drawn else ""
        for reason, count in part.refused.items():
            screen.print(f"  - {count:,} points{of}: {reason}", markup=False)
        for reason, count in (tried[part.template.name].failures if part.template.name in tried else {}).items():
            screen.print(f"  x {count:,} of the sample: {reason}", markup=False)


def _share(one: Compiled) -> str:
    low, high = one.interval
    return f"{one.fits} of {one.tried}: " + (f"{low:.0%} to {high:.0%}" if low < high else f"{low:.0%}")


def _compare(
    problem: Problem,
    where: Machine,
    names: Sequence[str],
    points: Sequence[Candidate],
    other: str,
    emit: str | None,
    as_json: bool,
) -> None:
    from ..research import space as spaces

    if points:
        one, two = points[0], _candidate(other)
        found = [("", difference) for difference in spaces.point_differences(one, two)]
        heads = (str(one), str(two))
    elif "=" in other:
        changed = make(problem.operator, {**problem.axes, **dict(_pairs(other))})
        mine = {part.template.name: part for part in spaces.parts(problem, where, names)}
        theirs = {part.template.name: part for part in spaces.parts(changed, where, names)}
        found = [
            (name, difference)
            for name in mine
            for difference in spaces.differences(mine[name], theirs[name])
            if difference.one != difference.other
        ]
        heads = (problem.typed, changed.typed)
    else:
        if len(names) != 1:
            raise ProblemError(f"diff: name the template to compare {other} with, by --template")
        [a], [b] = (spaces.parts(problem, where, [name]) for name in (names[0], other))
        found = [("", difference) for difference in spaces.differences(a, b)]
        heads = (names[0], other)
    if as_json:
        echo_json([{"template": name, "what": d.what, "one": d.one, "other": d.other} for name, d in found])
        return
    _print_differences(heads, found)
    if points and emit:
        one_code, other_code = (spaces.emitted(problem, c, where, emit).splitlines() for c in (one, two))
        typer.echo("\n".join(difflib.unified_diff(one_code, other_code, *heads, lineterm="")))


def _pairs(text: str) -> Iterable[tuple[str, str]]:
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if not equals:
            raise ProblemError(f"diff: expected axis=value,..., got {word!r}")
        yield name, value


def _print_differences(heads: tuple[str, str], found: Sequence[tuple[str, Difference]]) -> None:
    by_template = any(name for name, _ in found)
    made = table(*(["template"] if by_template else []), "differs", *heads, prose=("differs", *heads))
    for name, difference in found:
        sides = [
            ", ".join(map(str, side)) if isinstance(side, tuple) else "-" if side is None else str(side)
            for side in (difference.one, difference.other)
        ]
        made.add_row(*([name] if by_template else []), difference.what, *sides)
    console().print(made)
