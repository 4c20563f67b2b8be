"""Fingerprints outlive a template's decisions: stored points are compared at the neutral value of a new one."""

from __future__ import annotations

import importlib
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
from golden.__main__ import main

from tvm_sparse.core import registry, spaces
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, Program, Table, Template
from tvm_sparse.schedules import vocabulary

NAME, DECISION = "softmax_rows", "later"
Change = Callable[[Template], Template]


@pytest.fixture
def altered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Change], None]:
    """Replaces the template by a changed one; fingerprints are those of a folder of the test's own."""
    shutil.copy(golden.FOLDER / f"{NAME}.json", tmp_path)
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    package = importlib.import_module(registry.find(spaces.find(NAME).operator).schedules)

    def alter(change: Change) -> None:
        templates = tuple(change(one) if one.name == NAME else one for one in package.TEMPLATES)
        monkeypatch.setattr(package, "TEMPLATES", templates)

    return alter


def with_decision(values: tuple[int, ...], neutral: int | None, place: int) -> Change:
    """A template that got a decision at this place, whose `neutral` value leaves the program as it is."""

    def change(template: Template) -> Template:
        def inserted(decisions: dict[str, Any], value: Any) -> dict[str, Any]:
            items = list(decisions.items())
            return dict([*items[:place], (DECISION, value), *items[place:]])

        def space(problem: Problem, machine: Machine) -> Table:
            return inserted(dict(template.space(problem, machine)), values)

        def default(problem: Problem, machine: Machine) -> Decisions:
            return inserted(dict(template.default(problem, machine)), values[-1])

        def program(problem: Problem, decisions: Decisions) -> Program:
            own = {name: value for name, value in decisions.items() if name != DECISION}
            if decisions[DECISION] != neutral:
                own["simd"] = own["simd"] // 2 if own["simd"] > 4 else own["simd"] * 2
            return template.program(problem, own)

        def allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
            own = {name: value for name, value in decisions.items() if name != DECISION}
            return template.allowed(problem, machine, own)

        return replace(template, space=space, default=default, program=program, allowed=allowed)

    return change


def drawn(neutral: bool) -> tuple[tuple[int, ...], int | None, int]:
    """Values of a decision, the neutral one among them or none, and the decision's place in the table."""
    generator = random.Random()
    values = tuple(generator.sample(range(9), 2))
    return values, generator.choice(values) if neutral else None, generator.randint(0, 2)


def test_a_declared_decision_keeps_the_points(
    altered: Callable[[Change], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values, neutral, place = drawn(neutral=True)
    before = golden.read(NAME)
    altered(with_decision(values, neutral, place))
    monkeypatch.setattr(vocabulary, "ADDED", {**vocabulary.ADDED, NAME: {DECISION: neutral}})
    assert main(["check", NAME]) == 0
    assert capsys.readouterr().out == (
        f"{NAME}: {len(before.points)} of {len(before.points)} points have earlier decisions in their keys:"
        f" python -m golden update {NAME}\n"
    )
    assert main(["update", "--quiet", NAME]) == 0
    after = golden.read(NAME)
    assert sorted(map(str, after.points.values())) == sorted(map(str, before.points.values()))
    assert all(f"{DECISION}={neutral}" in key for key in after.points)
    capsys.readouterr()
    assert main(["check", NAME]) == 0 and not capsys.readouterr().out


def test_the_neutral_value_is_found(altered: Callable[[Change], None], capsys: pytest.CaptureFixture[str]) -> None:
    """It is named, and has to be declared before fingerprints are taken anew, as records need it too."""
    values, neutral, place = drawn(neutral=True)
    before = (golden.FOLDER / f"{NAME}.json").read_text()
    altered(with_decision(values, neutral, place))
    for command in (["check", NAME], ["update", "--quiet", NAME]):
        assert main(command) == 1
        assert f"{DECISION}={neutral} keeps the code of all" in capsys.readouterr().out
    assert (golden.FOLDER / f"{NAME}.json").read_text() == before


def test_a_decision_without_a_neutral_value(
    altered: Callable[[Change], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """It changes machine code: the version has to rise, and then points keep their other decisions."""
    values, _, place = drawn(neutral=False)
    before = golden.read(NAME)
    altered(with_decision(values, None, place))
    assert main(["check", NAME]) == 1
    said = capsys.readouterr().out
    assert f"no value of {DECISION} keeps the code of all points" in said and "machine code: " in said
    assert main(["update", "--quiet", NAME]) == 1 and "the version is still" in capsys.readouterr().out
    assert golden.read(NAME) == before
    altered(lambda template: replace(template, version=template.version + 1))
    assert main(["update", "--quiet", NAME]) == 0
    after = golden.read(NAME)
    assert after.version == before.version + 1 and len(after.points) == len(before.points)
    problems = [sorted(key.partition(" (")[0] for key in one.points) for one in (before, after)]
    assert problems[0] == problems[1]


def test_points_of_a_removed_value_go(altered: Callable[[Change], None], capsys: pytest.CaptureFixture[str]) -> None:
    stored = golden.read(NAME)
    value, _ = Counter(stored.point(key).candidate.values["simd"] for key in stored.points).most_common()[-1]
    gone = {key for key in stored.points if stored.point(key).candidate.values["simd"] == value}

    def without(template: Template) -> Template:
        def space(problem: Problem, machine: Machine) -> Table:
            table = dict(template.space(problem, machine))
            return {**table, "simd": tuple(one for one in table["simd"] if one != value)}

        return replace(template, space=space)

    altered(without)
    assert main(["check", NAME]) == 1
    said = capsys.readouterr().out
    assert all(f"no point any more: {key}: simd={value} is not among" in said for key in gone)
    assert main(["update", "--quiet", NAME]) == 0
    assert golden.read(NAME).points == {key: one for key, one in stored.points.items() if key not in gone}


def test_a_removed_decision(
    altered: Callable[[Change], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Points at the value that means the present program stay, once that value is declared; the others go."""
    values, neutral, place = drawn(neutral=True)
    assert neutral is not None
    (other,) = {*values} - {neutral}
    stored = golden.read(NAME)
    keys = sorted(stored.points)
    gone = random.Random().choice(keys)
    points = {}
    for key in keys:
        point = stored.point(key)
        decisions = ((DECISION, other if key == gone else neutral), *point.candidate.decisions)
        renamed = replace(point, candidate=replace(point.candidate, decisions=decisions))
        points[renamed.key] = stored.points[key]
    golden.Golden(NAME, stored.version, stored.assembler, points).write()
    for command in (["check", NAME], ["update", "--quiet", NAME]):
        assert main(command) == 1
        assert f"{DECISION}={neutral} is no decision any more" in capsys.readouterr().out
    rule = {DECISION: {neutral: {}}}
    monkeypatch.setattr(vocabulary, "RENAMED", {**vocabulary.RENAMED, NAME: rule})
    assert main(["check", NAME]) == 1
    said = capsys.readouterr().out
    assert said.count(f"{DECISION}={other} is no decision any more") == 1 and f"{DECISION}={neutral} is" not in said
    assert main(["update", "--quiet", NAME]) == 0
    assert golden.read(NAME).points == {key: one for key, one in stored.points.items() if key != gone}


def test_records_of_a_removed_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that means another program stays, and look-up passes over the record."""
    monkeypatch.setattr(vocabulary, "RENAMED", {NAME: {DECISION: {1: {}}}})
    assert vocabulary.renamed(NAME, (("simd", 8), (DECISION, 1))) == (("simd", 8),)
    assert vocabulary.renamed(NAME, (("simd", 8), (DECISION, 3))) == (("simd", 8), (DECISION, 3))
