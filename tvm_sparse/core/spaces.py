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

# Of tables with more combinations than this a search gets a draw: so many points, of so many combinations at most.
MOST_COMBINATIONS = 1 << 20
DRAWN_POINTS, DRAWS = 1 << 14, 1 << 19


def templates(operator: str | None = None) -> tuple[Template, ...]:
    """The templates of an operator, or of all."""
    chosen = registry.operators().values() if operator is None else (registry.find(operator),)
    return tuple(template for one in chosen for template in one.templates)


def find(name: str, operator: str | None = None) -> Template:
    """The template of this name, of an operator or of all; KeyError with the valid names if there is none."""
    known = templates(operator)
    for template in known:
        if template.name == name:
            return template
    raise KeyError(f"template: got {name!r}; expected one of {', '.join(t.name for t in known)}")


def named(names: Collection[str], operator: str, machine: Machine) -> list[Template]:
    """The templates of an operator for this kind of machine that have these names; all of them without names.

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
    """The decision tables of the templates that fit, and why the operator's others do not, by template name."""
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
    """What of `applicable` a tuning run searches: the named templates, or all but those built for comparison.

    `fixed`: the only values of these decisions, of templates that have them.
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
    """A table with only those values of a decision that `fixed` has, too, if it has the decision."""
    return {
        name: tuple(value for value in values if name not in fixed or value in fixed[name])
        for name, values in table.items()
    }


def among(candidate: Candidate, tables: Mapping[str, Table]) -> bool:
    """Whether a candidate's decisions are in the tables of templates; a point of them it is if they are allowed."""
    table = tables.get(candidate.template)
    return table is not None and all(value in table.get(name, ()) for name, value in candidate.decisions)


def points(problem: Problem, machine: Machine, tables: Mapping[str, Table]) -> Iterator[Candidate]:
    """Every allowed point of the templates' spaces."""
    for name, table in tables.items():
        template = find(name)
        for values in itertools.product(*table.values()):
            decisions = dict(zip(table, values, strict=True))
            if template.allowed(problem, machine, decisions) is None:
                yield template.candidate(decisions)


def combinations(table: Table) -> int:
    """How many points a table would have without restrictions."""
    return math.prod(map(len, table.values()))


def drawn(tables: Mapping[str, Table]) -> list[str]:
    """The templates of which a search gets a draw, for they have too many combinations to go through."""
    return [name for name, table in tables.items() if combinations(table) > MOST_COMBINATIONS]


def searchable(
    problem: Problem, machine: Machine, tables: Mapping[str, Table], around: Collection[Candidate] = ()
) -> Iterator[Candidate]:
    """The points that a search chooses from: all, or, of the templates that `drawn` names, some.

    These are what differs from the default, or from one of `around`, in one decision at most, and points that are drawn
    at random: always the same ones for a problem. They come in no order.
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
    """The allowed points that differ from a point of the problem's spaces in one decision."""
    template = find(candidate.template, problem.operator)
    for decisions in _neighbours(template.space(problem, machine), [candidate.values]):
        other = template.candidate(decisions)
        if other != candidate and template.allowed(problem, machine, decisions) is None:
            yield other


def _neighbours(table: Table, starts: Collection[Decisions]) -> Iterator[Decisions]:
    """What differs from one of some points in one decision at most."""
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


def fallback(
    problem: Problem, machine: Machine, cooperative: bool = True, refused: Collection[Candidate] = ()
) -> Candidate:
    """What runs without tuning: the first fallback template that fits, at its default point; those that decline the
    problem (`Template.declines`) come last.

    Parameters
    ----------
    cooperative
        Whether it may be one that needs all its thread blocks at the same time.
    refused
        What it must not be. If nothing else is left, it is the last of these.
    """
    tables, _ = applicable(problem, machine)
    possible = [t for t in registry.find(problem.operator).fallbacks[machine.kind] if t.name in tables]
    possible.sort(key=lambda template: template.declines(problem, machine))
    candidate = None
    for template in possible:
        if cooperative or not template.cooperative:
            candidate = template.candidate(template.default(problem, machine))
            if candidate not in refused:
                break
    assert candidate is not None, f"{problem}: every operator has a fallback that fits every problem"
    return candidate


def refusal(candidate: Candidate, problem: Problem, machine: Machine) -> str | None:
    """None if a candidate can be built for a problem on a machine, else why not."""
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
    """A candidate that was recorded for a machine's architecture, without instructions that this CPU of it lacks."""
    all_instructions = X86_INSTRUCTIONS.get(machine.arch, "")
    if machine.instructions == all_instructions or refusal(candidate, problem, machine) is None:
        return candidate
    able = dataclasses.replace(machine, instructions=all_instructions)
    return candidate if refusal(candidate, problem, able) else adapted(candidate, problem, machine) or candidate


def adapted(candidate: Candidate, problem: Problem, machine: Machine) -> Candidate | None:
    """The point here that is most like a candidate of another machine, or None: each decision takes the nearest value.

    So one that asks for what this machine lacks, such as programmatic dependent launch, goes without it.
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
