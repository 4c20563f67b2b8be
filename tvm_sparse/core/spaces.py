"""Questions to the schedule spaces: which templates fit a problem on a machine, and which points they have.

No compiler is loaded: a template's tables and restrictions are plain Python.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping

from . import registry
from .candidate import Candidate
from .machine import X86_INSTRUCTIONS, Machine
from .problem import Problem, ProblemError
from .template import Decisions, NotApplicable, Table, Template

# Tables with more combinations are sampled for a search: the number of points, and of combinations tried for them.
MOST_COMBINATIONS = 1 << 20
DRAWN_POINTS, DRAWS = 1 << 14, 1 << 19


def templates(operator: str | None = None) -> tuple[Template, ...]:
    """The templates of an operator, or of all operators."""
    chosen = registry.operators().values() if operator is None else (registry.find(operator),)
    return tuple(template for one in chosen for template in one.templates)


def find(name: str, operator: str | None = None) -> Template:
    """The template of this name, of one operator or any; raises KeyError with the valid names if there is none."""
    known = templates(operator)
    for template in known:
        if template.name == name:
            return template
    raise KeyError(f"template: got {name!r}; expected one of {', '.join(t.name for t in known)}")


def named(names: Collection[str], operator: str, machine: Machine) -> list[Template]:
    """The templates of an operator for this kind of machine with these names; without names, all of them.

    Raises
    ------
    ProblemError
        For a name that none of them has.
    """
    known = {template.name: template for template in templates(operator) if template.kind == machine.kind}
    if unknown := [name for name in names if name not in known]:
        raise ProblemError(f"template: got {unknown[0]!r}; on {machine.arch} expected one of {', '.join(known)}")
    return [template for name, template in known.items() if not names or name in names]


def applicable(problem: Problem, machine: Machine) -> tuple[dict[str, Table], dict[str, str]]:
    """The decision tables of the templates that fit, and, by template name, why the operator's others do not."""
    tables, reasons = {}, {}
    for template in templates(problem.operator):
        if template.kind == machine.kind:
            try:
                tables[template.name] = template.space(problem, machine)
            except NotApplicable as error:
                reasons[template.name] = str(error)
    return tables, reasons


def searched(
    problem: Problem, machine: Machine, names: Collection[str] = (), fixed: Table | None = None
) -> tuple[dict[str, Table], dict[str, str]]:
    """The part of `applicable` that a tuning run searches: the named templates, or all but those built for comparison.

    `fixed` restricts decisions to these values, in templates that have them.
    """

    def chosen(name: str) -> bool:
        return name in names if names else not find(name).comparison

    tables, reasons = applicable(problem, machine)
    reasons = {n: r for n, r in reasons.items() if chosen(n)}
    kept = {}
    for name, table in tables.items():
        if chosen(name):
            kept[name] = narrowed(table, fixed or {})
            empty = [decision for decision, values in kept[name].items() if not values]
            if empty:
                del kept[name]
                reasons[name] = f"{empty[0]} is not to be one of {', '.join(map(str, table[empty[0]]))}"
    return kept, reasons


def narrowed(table: Table, fixed: Table) -> Table:
    """A table restricted, for each decision that it shares with `fixed`, to the values in both."""
    return {
        name: tuple(value for value in values if name not in fixed or value in fixed[name])
        for name, values in table.items()
    }


def among(candidate: Candidate, tables: Mapping[str, Table]) -> bool:
    """Whether each decision of a candidate has a value of its template's table; it is a point if it is allowed, too."""
    table = tables.get(candidate.template)
    return table is not None and all(value in table.get(name, ()) for name, value in candidate.decisions)


def points(problem: Problem, machine: Machine, tables: Mapping[str, Table]) -> Iterator[Candidate]:
    """All allowed points of the templates' spaces."""
    for name, table in tables.items():
        template = find(name)
        for values in itertools.product(*table.values()):
            decisions = dict(zip(table, values, strict=True))
            if template.allowed(problem, machine, decisions) is None:
                yield template.candidate(decisions)


def combinations(table: Table) -> int:
    """Number of points that a table would have without restrictions."""
    return math.prod(map(len, table.values()))


def drawn(tables: Mapping[str, Table]) -> list[str]:
    """The templates with too many combinations to enumerate, whose points a search samples."""
    return [name for name, table in tables.items() if combinations(table) > MOST_COMBINATIONS]


def searchable(
    problem: Problem, machine: Machine, tables: Mapping[str, Table], around: Collection[Candidate] = ()
) -> Iterator[Candidate]:
    """The points that a search chooses from: all of them, but a sample for the templates that `drawn` names.

    A sample consists of points that differ from the default, or from one of `around`, in at most one decision, and of
    points drawn at random, the same ones in each run of a problem. Their order has no meaning.
    """
    for name, table in tables.items():
        if combinations(table) <= MOST_COMBINATIONS:
            yield from points(problem, machine, {name: table})
            continue
        template, found = find(name), set[Candidate]()
        starts = [template.default(problem, machine), *(one.values for one in around if one.template == name)]
        for decisions in itertools.chain(_neighbours(table, starts), _draws(table, problem.key)):
            if template.allowed(problem, machine, decisions) is None:
                candidate = template.candidate(decisions)
                if candidate not in found:
                    found.add(candidate)
                    yield candidate
            if len(found) == DRAWN_POINTS:
                break


def neighbours(candidate: Candidate, problem: Problem, machine: Machine) -> Iterator[Candidate]:
    """The allowed points that differ from a point in exactly one decision."""
    template = find(candidate.template, problem.operator)
    for decisions in _neighbours(template.space(problem, machine), [candidate.values]):
        other = template.candidate(decisions)
        if other != candidate and template.allowed(problem, machine, decisions) is None:
            yield other


def _neighbours(table: Table, starts: Collection[Decisions]) -> Iterator[Decisions]:
    """Combinations that differ from one of `starts` in at most one decision."""
    for start in starts:
        for name, values in table.items():
            for value in values:
                decisions = {**start, name: value}
                if all(decisions[other] in table[other] for other in table):
                    yield decisions


def _draws(table: Table, seed: str) -> Iterator[Decisions]:
    """Combinations of a table, drawn at random."""
    generator = random.Random(seed)
    for _ in range(DRAWS):
        yield {name: generator.choice(values) for name, values in table.items()}


def default(template: Template, table: Table, problem: Problem, machine: Machine) -> Candidate:
    """The default point of a template, with its decisions in the order of the table, as those of other points."""
    point = template.default(problem, machine)
    return template.candidate({name: point[name] for name in table})


def fallback(
    problem: Problem, machine: Machine, cooperative: bool = True, refused: Collection[Candidate] = ()
) -> Candidate:
    """The candidate that runs without tuning: the default point of the first fallback template that fits. Templates
    that decline the problem (`Template.declines`) are considered last.

    Parameters
    ----------
    cooperative
        Whether a template is admitted that needs all its thread blocks at the same time.
    refused
        Candidates to avoid. If nothing else is left, the last of these is returned.
    """
    tables, _ = applicable(problem, machine)
    possible = [t for t in registry.find(problem.operator).fallbacks[machine.kind] if t.name in tables]
    possible.sort(key=lambda template: template.declines(problem, machine))
    candidate = None
    for template in possible:
        if cooperative or not template.cooperative:
            candidate = default(template, tables[template.name], problem, machine)
            if candidate not in refused:
                break
    assert candidate is not None, f"{problem}: every operator has a fallback that fits every problem"
    return candidate


def of_any_batch(problem: Problem, machine: Machine, refused: Collection[Candidate] = ()) -> tuple[Problem, Candidate]:
    """The candidate with which a row's result does not depend on its batch, and the problem for which it is compiled.

    Both follow from the problem without its batch. If other axes than the batch count rows (`Problem.row_axes`), they
    are extents of the program, which the last fallback template fits with the same decisions whatever they are.
    """
    alike = problem.of_any_batch()
    if not problem.row_axes:
        return alike, fallback(alike, machine, cooperative=False, refused=refused)
    template = registry.find(problem.operator).fallbacks[machine.kind][-1]
    rows = {name: problem.axes[name] for name in problem.row_axes}
    candidate = default(template, template.space(alike, machine), alike, machine)
    return dataclasses.replace(alike, **rows), candidate  # type: ignore[arg-type]


def refusal(candidate: Candidate, problem: Problem, machine: Machine) -> str | None:
    """None if a candidate can be built for a problem on a machine, else the reason as a sentence."""
    try:
        template = find(candidate.template, problem.operator)
    except KeyError:
        return f"there is no template {candidate.template} of {problem.operator}"
    if template.version != candidate.version:
        return f"the template {template.name} is at version {template.version}, not {candidate.version}"
    if template.kind != machine.kind:
        return f"the template {template.name} is for {template.kind}"
    return template.point(problem, machine, candidate.values)


def built_here(candidate: Candidate, problem: Problem, machine: Machine) -> Candidate:
    """A candidate recorded for a machine's architecture, without the instructions that this CPU of it lacks."""
    all_instructions = X86_INSTRUCTIONS.get(machine.arch, "")
    if machine.instructions == all_instructions or refusal(candidate, problem, machine) is None:
        return candidate
    able = dataclasses.replace(machine, instructions=all_instructions)
    return candidate if refusal(candidate, problem, able) else adapted(candidate, problem, machine) or candidate


def adapted(candidate: Candidate, problem: Problem, machine: Machine) -> Candidate | None:
    """The point on this machine that is most like a candidate of another one, by the nearest value of each decision;
    None if that is not allowed.

    For example, programmatic dependent launch is dropped on a machine that lacks it.
    """
    try:
        template = find(candidate.template, problem.operator)
        table = template.space(problem, machine)
    except (KeyError, NotApplicable):
        return None
    same = (template.version, template.kind) == (candidate.version, machine.kind)
    if not same or list(candidate.values) != list(table) or not all(table.values()):
        return None
    values = {}
    for name, value in candidate.values.items():
        values[name] = min((abs(other - value), other) for other in table[name])[1]
    return template.candidate(values) if template.allowed(problem, machine, values) is None else None
