"""`tvm-sparse db restamp`: records of an earlier version count for the present one, and nothing else changes."""

from __future__ import annotations

import importlib
import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tvm_sparse.cli.app import app
from tvm_sparse.core import machine, registry, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import ProblemError
from tvm_sparse.core.template import Template
from tvm_sparse.records import Log, Trial, codec, predictor
from tvm_sparse.records.migrate import restamp
from tvm_sparse.runtime.paths import shipped_logs

ARCH = "sm_90a"
# Operators with a predictor and few records.
OPERATORS = ("softmax", "logsumexp", "compaction", "wta_hash")


@pytest.fixture(params=OPERATORS)
def raised(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Template, Path]:
    """A template of the operator with winners on the GPU, its version raised by one, and a copy of the records."""
    operator = registry.find(request.param)
    root = tmp_path / "logs"
    for path in shipped_logs().glob(f"*/{operator.name}"):
        shutil.copytree(path, root / path.parent.name / path.name)
    winners = {best.candidate.template for best in Log(root, ARCH, operator.name).best().values()}
    versions = {template.name: template.version for template in operator.templates}
    name = random.Random().choice(sorted(winners & versions.keys()))
    package = importlib.import_module(operator.schedules)
    anew = tuple(replace(one, version=one.version + 1) if one.name == name else one for one in package.TEMPLATES)
    monkeypatch.setattr(package, "TEMPLATES", anew)
    return spaces.find(name), root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("*/*/*.json*") if path.is_file()}


def as_version(text: str, template: str, before: int, now: int) -> str:
    """A line or predictor with the version of one template's candidates replaced, by its text alone."""
    return text.replace(f'"template":"{template}","version":{before}', f'"template":"{template}","version":{now}')


def test_records_get_the_version_and_keep_everything_else(raised: tuple[Template, Path]) -> None:
    template, root = raised
    now, before = template.version, template.version - 1
    old = contents(root)
    said = restamp(root, template.name, before, now, dry_run=True)
    assert contents(root) == old and sum(one.changed for one in said.values()) > 0
    assert restamp(root, template.name, before, now) == said
    new = contents(root)
    assert new.keys() - {name for name in new if name.endswith(".lock")} == old.keys()
    for name, data in old.items():
        if name.endswith(".jsonl"):
            lines = zip(data.splitlines(), new[name].splitlines(), strict=True)
            for one, other in lines:
                record, found = json.loads(one), json.loads(other)
                wanted = json.loads(as_version(one.decode(), template.name, before, now))
                changed = {key: value for key, value in wanted.items() if key != "sum"}
                # Fields that later versions added are written at their neutral values.
                assert found.items() >= changed.items()
                assert (record["sum"] != found["sum"]) == (wanted != record)
    log = Log(root, ARCH, template.operator)
    assert not log.read().skipped and not log.read_best().skipped
    versions = Counter(one.candidate.version for one in log.read().trials if one.candidate.template == template.name)
    assert versions[before] == 0 < versions[now]
    model = predictor.read(root / ARCH / template.operator / predictor.NAME)
    shipped = predictor.read(shipped_logs() / ARCH / template.operator / predictor.NAME)
    assert model.outdated == shipped.outdated if template.name not in shipped.templates else model.outdated is None
    assert model.trees == shipped.trees
    for one, other in zip(shipped.known, model.known, strict=True):
        assert other == (replace(one, version=now) if one.template == template.name else one)
    for probe in model.probes:
        assert (
            Candidate.parse(probe.candidate).version == spaces.find(Candidate.parse(probe.candidate).template).version
        )
    again = restamp(root, template.name, before, now)
    assert contents(root) == new and not any(one.changed for one in again.values())


def test_refused_versions_change_nothing(raised: tuple[Template, Path]) -> None:
    template, root = raised
    now, old = template.version, contents(root)
    for before, to, what in (
        (now - 1, now + 1, f"is at version {now}"),
        (now - 2, now - 1, f"is at version {now}"),
        (now, now, "expected an earlier version"),
        (-1, now, "expected an earlier version"),
    ):
        with pytest.raises(ProblemError, match=what):
            restamp(root, template.name, before, to)
    with pytest.raises(ProblemError, match="did you mean"):
        restamp(root, template.name[:-1], now - 1, now)
    path = root / ARCH / template.operator / predictor.NAME
    path.write_text("{}")
    with pytest.raises(predictor.PredictorError):
        restamp(root, template.name, now - 1, now)
    assert contents(root) == old | {str(path.relative_to(root)): b"{}"}


def test_lines_that_mean_nothing_now_stay(raised: tuple[Template, Path]) -> None:
    """Damaged lines, and candidates whose decisions have other names than the template's."""
    template, root = raised
    log = Log(root, ARCH, template.operator)
    best = next(one for one in log.best().values() if one.candidate.template == template.name)
    earlier = replace(best, candidate=replace(best.candidate, decisions=(("of_before", 1),)), fallback=best.candidate)
    damaged = codec.encode(best).replace(b'"rounds":', b'"rounds":1')
    log.best_path.write_bytes(log.best_path.read_bytes() + damaged + codec.encode(earlier))
    words = ("db", "restamp", template.name, "--from", template.version - 1, "--to", template.version, "--logs", root)
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert f"{log.best_path}: 1 candidates stay at version {template.version - 1}: decisions are of_before" in (
        result.output.replace("\n", "")
    )
    *_, broken, last = log.best_path.read_bytes().splitlines(keepends=True)
    assert broken == damaged
    found = json.loads(last)
    assert found["candidate"]["version"] == template.version - 1 and found["fallback"]["version"] == template.version


def test_winners_are_compared_with_todays_defaults(tmp_path: Path) -> None:
    """Rankings against an earlier default change if their session timed today's, by the ratio of the trials."""
    where = machine.resolve(ARCH)
    log = Log(shipped_logs(), ARCH, "softmax")
    anew = Log(tmp_path, ARCH, "softmax")
    wanted = {}
    for number, (key, best) in enumerate(log.best().items()):
        today = spaces.fallback(registry.parse(key), where)
        other = best.candidate if best.candidate != today else replace(today, decisions=(("of_before", 1),))
        ranked = replace(best, fallback=other, fallback_seconds=2 * best.seconds, session="one")
        anew.append_best(ranked)
        ratio = random.Random(key).choice((0.5, 1.25, 2.0))  # without rounding
        trial = Trial(key, ARCH, best.candidate, "ok", "", (2.0**-16,), 1.0, "one", 0)
        # Every third session did not time today's default.
        session = "two" if number % 3 == 2 else "one"
        anew.append(trial, replace(trial, candidate=today, seconds=(ratio * 2.0**-16,), session=session, order=1))
        wanted[key] = ranked
        if (session == "one" or today == best.candidate) and other != today:
            timed = best.seconds * (1.0 if today == best.candidate else max(1.0, ratio))
            wanted[key] = replace(ranked, fallback=today, fallback_seconds=timed, fallback_all=())
    before = contents(tmp_path)
    CliRunner().invoke(app, ["db", "compare", str(tmp_path)], catch_exceptions=False)
    after, found = contents(tmp_path), anew.best()
    assert found == wanted and before != after
    assert {name for name in before if before[name] != after[name]} == {f"{ARCH}/softmax/best.jsonl"}
    CliRunner().invoke(app, ["db", "compare", str(tmp_path)], catch_exceptions=False)
    assert contents(tmp_path) == after
