"""The model that predicts decisions: its files, its trees, what it chooses, and when look-up asks it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from cases import REALISTIC, SM90

from tvm_sparse.core import spaces
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Best, Log, Session, predictor, queries
from tvm_sparse.records.predictor import Predictor, Trees
from tvm_sparse.runtime import dispatch, lookup, paths
from tvm_sparse.runtime.lookup import Evidence, Known
from tvm_sparse.tuning import plans, training

SHIPPED = sorted(paths.shipped_logs().glob(f"*/*/{predictor.NAME}"))
KEY = "softmax/batch={batch},vocab=25000,algorithm=online,dtype=float32"


def problem(batch: int) -> Problem:
    return parse(KEY.format(batch=batch))


def test_trees_are_walked_as_xgboost_walks_them() -> None:
    xgboost = pytest.importorskip("xgboost")

    rng = np.random.default_rng()
    rows = np.round(rng.normal(size=(400, 5)), 1).astype(np.float32)
    rows[rng.random(rows.shape) < 0.2] = np.nan
    told = np.nan_to_num(rows[:, 0]) * np.nan_to_num(rows[:, 1]) + np.isnan(rows[:, 2])
    booster = xgboost.train({**training.PARAMETERS, "max_depth": 4}, xgboost.DMatrix(rows, label=told), 30)
    trees = training.trees_of([booster], tuple("abcde"))
    # Values that are thresholds, too: the rows that it was trained on were rounded.
    asked = np.concatenate([rows, np.round(rng.normal(size=(400, 5)), 1).astype(np.float32)])
    wanted = booster.predict(xgboost.DMatrix(asked))
    assert np.ptp(wanted) > 1
    np.testing.assert_allclose(trees.predict(asked), wanted, atol=3e-5)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}")
def test_what_ships_reads_and_chooses_points(path: Path, tmp_path: Path) -> None:
    shipped = predictor.read(path)
    assert shipped.write(tmp_path).read_bytes() == path.read_bytes() and path.stat().st_size < 1_500_000
    assert len(shipped.problems) >= training.LEAST_PROBLEMS and 1 <= shipped.loss <= shipped.worst_loss
    if shipped.outdated:
        pytest.skip(f"{shipped.outdated}: look-up leaves it aside; scripts/train_predictor.py trains it anew")
    # Templates say of points what they said at the training.
    for probe in shipped.probes:
        machine = dataclasses.replace(SM90, cores=probe.cores)
        row = predictor.features_of(parse(probe.problem), machine, predictor.Candidate.parse(probe.candidate))
        assert set(row) <= set(shipped.trees.features)
        assert shipped.trees.predict(shipped.trees.matrix([row])) == pytest.approx(probe.said, abs=2e-6)
    for one in (one for one in REALISTIC if one.operator == shipped.operator):
        for machine in (SM90, dataclasses.replace(SM90, cores=78)):
            found = shipped.choose(one, machine)
            assert found is not None and found.ranked >= 1
            assert spaces.refusal(found.candidate, one, machine) is None


@pytest.mark.parametrize("pattern", ["uniform", "skewed"])
def test_a_point_for_a_weight_without_blocks_has_features(pattern: str) -> None:
    empty = parse(f"bsr_matmul/m=8,k=64,n=64,block=16,sparsity=1,pattern={pattern}")
    for name in spaces.applicable(empty, SM90)[0]:
        template = spaces.find(name)
        row = predictor.features_of(empty, SM90, template.candidate(template.default(empty, SM90)))
        assert all(map(math.isfinite, row.values()))


# Problems of which nothing here has a record: as many as look-up wants a model to know.
OTHERS = tuple(f"softmax/batch=3,vocab={vocab},algorithm=online,dtype=float32" for vocab in range(1, lookup.ENOUGH + 1))


def small(*problems: str, others: tuple[str, ...] = OTHERS, version: int | None = None) -> Predictor:
    """A model of one tree: a point of `softmax_streamed` is better the more threads it has."""
    template = spaces.find("softmax_streamed")
    decisions = [{"threads": t, "cluster": 1, "rows": 1, "vectors": 1} for t in (256, 1024, 512)]
    value, left, missing_left = [512.0, 0.4, 1024.0, -0.1, -0.4], [1, 0, 3, 0, 0], [1, 0, 1, 0, 0]
    trees = Trees(("decision.threads",), [0], [0, -1, 0, -1, -1], value, left, missing_left, 0.5)
    return Predictor(
        "softmax",
        "sm_90a",
        {template.name: template.version if version is None else version, "softmax_held": 1},
        trees,
        tuple(template.candidate(one) for one in decisions),
        30,
        (*problems, *others),
        1.05,
        1.25,
        seen=dict.fromkeys((template.name, "softmax_held"), len({*problems, *others})),
    )


def record(root: Path, of: Problem, threads: int) -> None:
    template = spaces.find("softmax_streamed")
    won = template.candidate({"threads": threads, "cluster": 1, "rows": 1, "vectors": 1})
    log = Log(root, "sm_90a", "softmax")
    log.append(Session("s1", "2026-01-02T03:04:05Z", {"name": "a machine", "cores": 132}, {}, "a timer", {}))
    log.append_best(Best(of.key, "sm_90a", won, 1e-6, spaces.fallback(of, SM90), 2e-6, 3, "s1"))


def test_a_small_model_by_hand() -> None:
    trees = small().trees
    rows = trees.matrix([{"decision.threads": 511}, {"decision.threads": 512}, {"decision.threads": 2000}, {}])
    np.testing.assert_allclose(trees.predict(rows), [0.9, 0.4, 0.1, 0.9], rtol=1e-6)
    found = small().choose(problem(4000), SM90)
    assert found is not None and found.candidate.values["threads"] == 1024 and found.ranked == 5  # and two defaults
    # Nothing of it fits a CPU.
    assert small().choose(problem(4000), dataclasses.replace(SM90, kind="llvm")) is None


def test_a_model_says_nothing_of_what_it_has_not_seen() -> None:
    """A problem has an axis that no problem of its training had."""
    template, model = spaces.find("edit_slices"), small()
    plain = parse("edit_logits/batch=8,vocab=32000,words=32,dtype=bfloat16")
    capped = dataclasses.replace(plain, capped=1)
    point = template.candidate(template.default(plain, SM90))
    templates = {template.name: template.version}
    blind = dataclasses.replace(model, operator=plain.operator, templates=templates, known=(point,))
    assert blind.ranked(plain, SM90) == [point] and blind.choose(plain, SM90) is not None
    assert blind.ranked(capped, SM90) == [] and blind.choose(capped, SM90) is None
    trees = dataclasses.replace(model.trees, features=(*model.trees.features, "problem.capped"))
    assert dataclasses.replace(blind, trees=trees).ranked(capped, SM90)[0] == point


def test_when_look_up_predicts(tmp_path: Path) -> None:
    """Between bucket and nearby; not where a record says more that the model has not seen; not for policy `exact`."""
    learned = problem(640)
    record(tmp_path, learned, 256)
    small(learned.key).write(tmp_path)
    kernels = dispatch.Dispatcher(logs=(tmp_path,), shipped=tmp_path / "none", cache=tmp_path / "cache")

    def said(batch: int) -> tuple[str, str | None]:
        found = kernels.explain(problem(batch), SM90)
        return found.how, found.record

    assert said(640) == ("exact", learned.key)
    assert said(160) == ("bucket", learned.key)
    assert said(100) == said(700) == ("predicted", None)
    found = kernels.explain(problem(700), SM90)
    assert "threads=1024" in found.candidate and found.tune and not found.figures
    for part in ("the best of 5 points", f"30 trials of {1 + len(OTHERS)} problems", "1.05x", "at worst 1.25x"):
        assert part in found.why and part in str(found)
    kernels.configure("exact", None)
    assert said(100) == ("bucket", learned.key) and said(700) == ("nearby", learned.key)
    kernels.configure("any", None)

    # A record of the user's own, which the model has not seen.
    own = problem(2000)
    record(tmp_path / "own", own, 512)
    kernels = dispatch.Dispatcher(logs=(tmp_path, tmp_path / "own"), shipped=tmp_path, cache=tmp_path / "cache")
    assert said(700) == ("bucket", own.key) and said(3000) == ("nearby", own.key)
    assert said(50) == ("predicted", None) and said(5000) == ("predicted", None)


def test_a_model_of_few_problems_does_not_replace_the_default() -> None:
    for few, how in ((OTHERS, "predicted"), (OTHERS[1:], "fallback")):
        model = small(others=few)
        choice = lookup.choose(problem(700), SM90, Evidence(predictor=lambda model=model: model))
        assert choice.how == how and (how == "predicted" or f"from {len(few)} problems, too few" in choice.why)


def test_a_model_that_hardly_knows_the_default_s_template_does_not_replace_it() -> None:
    """It has times of many problems, but of few with the templates that it compares."""
    model = dataclasses.replace(small(), seen={"softmax_streamed": lookup.ENOUGH - 1, "softmax_held": lookup.ENOUGH})
    choice = lookup.choose(problem(700), SM90, Evidence(predictor=lambda: model))
    assert choice.how == "fallback" and f"softmax_streamed from {lookup.ENOUGH - 1} problems" in choice.why


def test_the_shipped_model_of_the_head_does_not_judge_products_of_warpgroups() -> None:
    """It knows them from two problems; its choices for 64 and 128 rows would read the embedding two and four times."""
    shipped = dispatch.Dispatcher()
    for batch in (64, 128):
        one = parse(f"head_topk/batch={batch},vocab=128256,hidden=4096,k=20,dtype=bfloat16")
        assert dict(shipped.choice(one, SM90).candidate.decisions)["tile_m"] == batch


def test_a_record_of_the_other_dtype_of_16_bits_comes_before_the_model() -> None:
    """Of this very problem: of another batch the model says more."""
    known = dataclasses.replace(problem(640), dtype="float16")
    candidate = spaces.find("softmax_streamed").candidate({"threads": 256, "cluster": 1, "rows": 1, "vectors": 1})
    figures = {"seconds": 1e-6, "fallback_seconds": 2e-6}
    evidence = Evidence({known.key: Known(candidate, figures)}, predictor=lambda: small(known.key))
    for batch, expected in ((640, ("nearby", known.key)), (700, ("predicted", None))):
        choice = lookup.choose(dataclasses.replace(known, dtype="bfloat16", batch=batch), SM90, evidence)
        assert (choice.how, choice.record) == expected


def test_one_library_serves_the_batches_up_to_a_power_of_two() -> None:
    evidence = Evidence(predictor=small)
    chosen = [lookup.choose(problem(batch), SM90, evidence) for batch in (1, 513, 1000, 1024, 1025)]
    assert [one.compiled_for.batch_extent for one in chosen] == [1, 1024, 1024, 1024, 2048]
    assert all(one.how == "predicted" and one.record is None for one in chosen)
    # What is at hand needs no compiler: then a bucket may be of any batch.
    known = {problem(4000).key: Known(chosen[0].candidate, {}, at_hand=True)}
    model = small(problem(4000).key)
    for at_hand, how in ((True, "bucket"), (False, "predicted")):
        records = {key: dataclasses.replace(one, at_hand=at_hand) for key, one in known.items()}
        assert lookup.choose(problem(10), SM90, Evidence(records, predictor=lambda: model)).how == how


def test_a_tuning_run_measures_what_is_predicted(tmp_path: Path) -> None:
    """If the spaces that it searches have it."""
    log, template = Log(tmp_path, "sm_90a", "softmax"), spaces.find("softmax_streamed")
    table = template.space(problem(100), SM90)
    assert plans.predicted(problem(100), SM90, {template.name: table}, log, 1) == []
    small().write(tmp_path)
    (found,) = plans.predicted(problem(100), SM90, {template.name: table}, log, 1)
    assert found.values["threads"] == 1024
    several = plans.predicted(problem(100), SM90, {template.name: table}, log, 3)
    assert several[0] == found and len(set(several)) == 3
    for tables in ({}, {template.name: spaces.narrowed(table, {"threads": (64, 128)})}):
        assert plans.predicted(problem(100), SM90, tables, log, 1) == []


def test_a_model_of_other_templates_or_a_damaged_file_is_left_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small().write(tmp_path)
    assert queries.predictor((tmp_path,), "sm_90a", "softmax") is not None
    small(version=99).write(tmp_path)
    assert queries.predictor((tmp_path,), "sm_90a", "softmax") is None and not caplog.messages
    content = json.loads(path.read_text())
    for damage, reason in (
        ({"format": 2}, "expected format 1, got 2"),
        ({"left": [1]}, "expected lists of one length"),
        ({"left": [0] * len(content["left"]), "feature": [0] * len(content["left"])}, "left: expected nodes behind"),
        ({"feature": [99] * len(content["left"])}, "feature: expected -1 to"),
        ({"roots": [2**31]}, "roots: expected nodes"),
        ({"value": ["x"] * len(content["left"])}, "value: expected a list of numbers"),
        ({"templates": {"softmax_streamed": "1"}}, "templates: expected a whole number"),
        ({"known": ["softmax_streamed"]}, "not a candidate"),
    ):
        path.write_text(json.dumps({**content, **damage}))
        with pytest.raises(predictor.PredictorError, match=reason):
            predictor.read(path)
    path.write_text("{")
    assert queries.predictor((tmp_path,), "sm_90a", "softmax") is None
    assert len(caplog.messages) == 1 and str(path) in caplog.messages[0]


def test_what_is_learned_from(tmp_path: Path) -> None:
    """Points of the spaces as they are, of problems with several; losses are of problems that were left out."""
    from tvm_sparse.records import Trial

    log = Log(tmp_path, "sm_90a", "softmax")
    log.append(Session("s1", "2026-01-02T03:04:05Z", {"name": "a machine", "cores": 132}, {}, "a timer", {}))
    template = spaces.find("softmax_streamed")
    point = {"threads": 256, "cluster": 1, "rows": 1, "vectors": 1}
    good = [template.candidate({**point, "threads": threads}) for threads in (256, 512)]
    old = dataclasses.replace(good[0], version=0)
    none = template.candidate({**point, "rows": 3})
    times = ((good[0], 2.0), (good[0], 3.0), (good[1], 1.0), (old, 0.1), (none, 0.2))
    log.append(
        *(
            Trial(problem(64).key, "sm_90a", candidate, "ok", "", (seconds,), None, "s1", order)
            for order, (candidate, seconds) in enumerate(times)
        ),
        Trial(problem(65).key, "sm_90a", good[0], "ok", "", (1.0,), None, "s1", 9),
    )
    (found,) = training.measured(log)
    assert found.problem == problem(64) and found.machine.cores == 132
    assert found.seconds == {good[0]: 2.0, good[1]: 1.0} and found.best == 1.0
    slow = Trees(("decision.threads",), [0], [0, -1, -1], [300.0, 0.0, 1.0], [1, 0, 0], [0, 0, 0], 0.0)
    assert training.loss_of(slow, found) == 2.0
    assert training.train(log) is None

    many = [dataclasses.replace(found, problem=problem(batch)) for batch in (1, 2, 3)]
    other = dataclasses.replace(found, problem=parse(KEY.format(batch=1).replace("25000", "1000")))
    left_out = [[one.problem for one in out] for _, out in training.rounds_of([*many, other])]
    assert sorted(map(len, left_out)) == [1, 3]
    assert math.prod(len(kept) for kept, _ in training.rounds_of([*many, other])) == 3
