"""The laboratory: recorded trials as a table, studies with a known answer, exchange formats, plots and the report."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import subprocess
import xml.etree.ElementTree as tree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import MACHINES, SM90
from typer.testing import CliRunner

from tvm_sparse.cli.app import app
from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import ProblemError
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Log, Session, Trial, database, exchange
from tvm_sparse.research import space

KEY = "bsr_matmul/m={},k=64,n=64,block=16x16,sparsity=0.5,pattern=uniform,dtype=float32"
BATCHES = (1, 2, 4, 8, 16, 32)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def seconds(batch: int, vec: int, depth: int, threads: int) -> float:
    """A time in which `vec` matters most, `depth` half as much (as logarithms), and `threads` not."""
    return 1e-6 * batch * math.exp(0.4 * math.log2(vec) + 0.2 * math.log2(depth))


def failed(batch: int, depth: int) -> bool:
    return (batch, depth) == (1, 8)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six problems, each with all 64 points of a template in random order, of which 16 failed in one of them."""
    root = tmp_path_factory.mktemp("logs")
    log, draw = Log(root, "sm_90a", "bsr_matmul"), random.Random(0)
    for batch in BATCHES:
        session = Session(
            f"s{batch}",
            "2026-01-01T00:00:00Z",
            {"name": "NVIDIA H200", "cores": 132},
            {"numpy": "2"},
            "clock",
            {"seed": 0},
        )
        points = list(itertools.product((1, 2, 4, 8), repeat=3))
        draw.shuffle(points)
        trials = []
        for order, (vec, depth, threads) in enumerate(points):
            times = tuple(seconds(batch, vec, depth, threads) * factor for factor in (1.0, 1.0, 1.5))
            bad = failed(batch, depth)
            trials.append(
                Trial(
                    KEY.format(batch),
                    "sm_90a",
                    Candidate("warp_shuffle", 1, (("vec", vec), ("depth", depth), ("threads", 32 * threads))),
                    "wrong" if bad else "ok",
                    "Mismatch: y[3] is 4.5" if bad else "",
                    () if bad else times,
                    0.5,
                    session.id,
                    order,
                    {"registers": 32, "shared_bytes": 0, "local_bytes": 0, "spill_instructions": 0},
                    predicted=None if bad else 1e-6 / times[0],
                )
            )
        log.append(session, *trials)
    return root


@pytest.fixture(scope="module")
def table(logs: Path) -> Any:
    pytest.importorskip("pandas", reason="the extra lab is not installed")
    pytest.importorskip("sklearn", reason="the extra lab is not installed")
    from tvm_sparse.research.trials import trials

    return trials(logs)


TOPK = "softmax_topk/batch=10,vocab=25000,k=5,dtype=float32"


def call(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "160"})
    assert done.exit_code == code, done.output
    return done.output


# ------------------------------------------------------------------------------------------------------- the table


def test_trials_are_rows(table: Any, logs: Path) -> None:
    assert len(table) == 64 * len(BATCHES)
    assert str(table["axis.m"].dtype) == str(table["decision.vec"].dtype) == "Int64"
    row = table.iloc[70]
    assert row["number"] == row["order"] == 6 and row["session"] == "s2" and row["current"]
    assert row["seconds"] == row["seconds_all"][0] == sorted(row["seconds_all"])[1]
    assert row["candidate"].startswith("warp_shuffle@1(vec=") and row["strategy"] == "evolutionary"
    # Of 32 registers a multiprocessor has room for 64 warps; it allots them by four, and so to a block of one warp.
    assert dict(zip(table["threads"], table["occupancy"], strict=True)) == {32: 0.25, 64: 0.5, 128: 1.0, 256: 1.0}
    wrong = table[table["outcome"] == "wrong"]
    assert len(wrong) == 16 and wrong["seconds"].isna().all() and (wrong["axis.m"] == 1).all()


def test_a_measured_space_is_a_table_too(table: Any, logs: Path, tmp_path: Path) -> None:
    from tvm_sparse.records.space import Space, write
    from tvm_sparse.research.trials import trials

    whole = Log(logs, "sm_90a", "bsr_matmul").read()
    of_one = tuple(trial for trial in whole.trials if trial.problem == KEY.format(2))
    write(tmp_path / "space.jsonl.xz", Space(whole.sessions[1:2], of_one))
    found = trials(tmp_path / "space.jsonl.xz")
    wanted = table[table["problem"] == KEY.format(2)].reset_index(drop=True)
    assert found.equals(wanted) and trials(tmp_path / "space.jsonl.xz", operator="softmax").empty


def test_tables_are_written_and_read(table: Any, logs: Path, tmp_path: Path) -> None:
    import pandas

    for suffix, read in (("csv", pandas.read_csv), ("parquet", pandas.read_parquet)):
        call("db", "export", "-o", tmp_path / f"all.{suffix}", "--logs", logs)
        found = read(tmp_path / f"all.{suffix}")
        assert found["seconds"].sum() == pytest.approx(table["seconds"].sum(), rel=1e-12)
        assert found["decision.vec"].sum() == table["decision.vec"].sum()
    # Of problems that this version does not know, axes are what their keys say.
    log = Log(tmp_path / "old", "sm_90a", "bsr_matmul")
    trial = Log(logs, "sm_90a", "bsr_matmul").read().trials[0]
    log.append(trial, *(replace(trial, problem=f"bsr_matmul/m=8,gone={gone}") for gone in (3, "no")))
    call("db", "export", "-o", tmp_path / "old.parquet", "--logs", log.root)
    found = pandas.read_parquet(tmp_path / "old.parquet")
    assert list(found["axis.m"]) == [1, 8, 8] and list(found["axis.gone"])[1:] == ["3", "no"]


# ---------------------------------------------------------------------------------------------------------- studies


def test_importance_and_effects_are_those_of_the_times(table: Any) -> None:
    from tvm_sparse.research import decisions

    found = decisions.importance(table).set_index("decision")
    assert list(found.index) == ["vec", "depth", "threads"] and (found["explained"] > 0.9).all()
    # Shuffling doubles a decision's variance, which goes as the square of its slope.
    assert found["importance"]["vec"] / found["importance"]["depth"] == pytest.approx(4, rel=0.4)
    assert abs(found["importance"]["threads"]) < 0.02
    assert (found["importance_low"] <= found["importance"]).all()
    effects = decisions.main_effects(table)
    effects = effects[effects["decision"] == "vec"].set_index("value")["effect"]
    assert effects[8] / effects[1] == pytest.approx(math.exp(0.4 * 3))


def test_models_learn_and_say_how_well(table: Any) -> None:
    from tvm_sparse.research import models

    found = models.model_quality(table, sizes=(8, 40), repeats=2, problems=2).set_index(["model", "learnt"])
    # The times are a power law, which is what `linear` knows; all of them learn it from most of the points.
    assert (found["rank"].xs(40, level="learnt") > 0.85).all() and found["rank"]["linear", 40] > 0.98
    assert (found["top5"] <= found["top1"]).all() and found["top5"]["linear", 40] == 1
    trees = ["metaschedule", "log trees", "forest"]
    assert all(found["rank"][name, 40] > found["rank"][name, 8] for name in trees)
    # A larger prediction stood for a faster point.
    [line] = models.recorded_quality(table).to_dict("records")
    assert line["sessions"] == len(BATCHES) and line["rank"] == pytest.approx(-1)


def test_the_model_of_metaschedule_is_that_of_metaschedule() -> None:
    import numpy as np

    pytest.importorskip("xgboost")
    from tvm.s_tir.meta_schedule.cost_model import XGBModel

    from tvm_sparse.research.models import metaschedule

    draw = np.random.default_rng(0)
    rows = draw.integers(0, 5, size=(60, 4)).astype(np.float32)
    times = np.exp(rows @ draw.random(4)) * 1e-6
    theirs = XGBModel(num_tuning_cores=1)
    theirs._train([row[None] for row in rows[:40]], (times[:40].min() / times[:40]).astype(np.float32))
    said = theirs._predict([row[None] for row in rows[40:]])
    assert -metaschedule(rows[:40], times[:40], rows[40:]) == pytest.approx(said, abs=1e-6)


def test_transfer_and_budget_are_counted(table: Any) -> None:
    import pandas

    from tvm_sparse.research import study
    from tvm_sparse.research.points import points

    pairs = study.transfer(table)
    assert len(pairs) == len(BATCHES) ** 2 and (pairs["loss"] == 1).all()
    # The best point of one problem was not measured for another: that loss is not known.
    best = points(table[table["problem"] == KEY.format(2)]).query("ratio == 1")["candidate"]
    less = table[~((table["problem"] == KEY.format(4)) & table["candidate"].isin(best))]
    pairs = study.transfer(less).set_index(["problem", "to_problem"])["loss"]
    assert math.isnan(pairs[KEY.format(2), KEY.format(4)])
    [line] = study.transfer_summary(less).to_dict("records")
    # Of 30 pairs the five to that problem are unknown; its own best point has twice the least depth, elsewhere too.
    assert line["differs"] == "batch" and line["pairs"] == 30 and line["measured"] == 25 / 30
    assert line["loss"] == pytest.approx(math.exp(0.2 * 5 / 25)) and line["worst"] == pytest.approx(math.exp(0.2))
    # Another GPU, on which points of vec=1 take three times as long: pairs of architectures have rows of their own.
    narrow = table["seconds"].where(table["decision.vec"] > 1, 3 * table["seconds"])
    both = pandas.concat([table, table.assign(arch="sm_80", seconds=narrow)], ignore_index=True)
    found = study.transfer_summary(both).set_index(["arch", "differs"])["loss"]
    assert found["sm_90a", "batch"] == found["sm_80", "batch"] == pytest.approx(1)
    assert found["sm_90a", "arch"] == pytest.approx(3 / math.exp(0.4), rel=1e-3)
    assert found["sm_80", "arch"] == pytest.approx(math.exp(0.4), rel=1e-3)
    # Points within 5 %: those of vec=1, depth=1, one for each number of threads.
    found = study.budget(table).set_index("problem")
    assert found["good"][KEY.format(2)] == 4 / 64 and found["points"][KEY.format(1)] == 48
    order = table[(table["problem"] == KEY.format(2)) & (table["seconds"] < seconds(2, 1, 1, 1) * 1.05)]["order"]
    assert found["recorded"][KEY.format(2)] == order.min() + 1
    # Half of the trials, failures among them: 64 in each problem.
    found = study.halves(table).set_index("problem")
    assert (found["trials"] == 64).all() and found["needed"][KEY.format(2)] == order.min() + 1
    first = table[(table["problem"] == KEY.format(1)) & (table["order"] < 32)]["seconds"].min()
    assert found["loss"][KEY.format(1)] == pytest.approx(first / seconds(1, 1, 1, 1))
    assert len(study.halves(table, least=65)) == 0


@pytest.mark.parametrize("count, good", [(7, 2), (6, 1), (5, 5), (9, 3)])
def test_draws_are_those_of_all_orders(count: int, good: int) -> None:
    np = pytest.importorskip("numpy")
    from tvm_sparse.research import study

    values = np.array(sorted(1 + number**1.5 for number in range(count)))
    drawn = [list(itertools.combinations(range(count), k)) for k in range(1, count + 1)]
    expected = [np.mean([values[list(one)].min() for one in draws]) for draws in drawn]
    assert study.expected_best(values) == pytest.approx(expected)
    holds = [np.mean([min(one) < good for one in draws]) for draws in drawn]
    assert study.draws_needed(count, good) == 1 + next(k for k, share in enumerate(holds) if share >= 0.95)


def test_wilsons_interval() -> None:
    assert space.wilson(0, 0) == (0.0, 1.0)
    # Of the paper's kind: Agresti & Coull 1998 give 0.0000 to 0.1611 for 0 of 20.
    assert space.wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert space.wilson(20, 20)[0] == pytest.approx(1 - 0.1611, abs=1e-4)


# ---------------------------------------------------------------------------------------------------------- spaces


def test_restrictions_and_points_make_the_table() -> None:
    problem = parse("softmax_topk/batch=10,vocab=25000,k=5")
    parts = {part.template.name: part for part in space.parts(problem, SM90)}
    assert "exceeds" in parts["warp_rows"].reason and not parts["warp_rows"].points
    for part in parts.values():
        assert part.product == len(part.points) + sum(part.refused.values())
        assert not any(character.isdigit() for reason in part.refused for character in reason)
    assert parts["cluster_gate"].points == tuple(
        spaces.points(problem, SM90, {"cluster_gate": parts["cluster_gate"].table})
    )
    with pytest.raises(ProblemError, match="'nothing'; on sm_90a expected one of threshold_gate, "):
        space.parts(problem, SM90, ["threshold_gate", "nothing"])


def test_code_of_points_is_shown() -> None:
    problem, point = parse(KEY.format(8)), Candidate("per_element", 1, (("threads", 32),))
    assert "__launch_bounds__(32)" in space.emitted(problem, point, SM90, "cuda")
    assert ".target sm_90" in space.emitted(problem, point, SM90, "ptx")
    cpu = MACHINES["llvm"]
    [point] = space.sampled(space.parts(problem, cpu)[0].points, 1)
    assert "T.parallel" in space.emitted(problem, point, cpu, "tir")
    assert ".globl" in space.emitted(problem, point, cpu, "asm")
    with pytest.raises(ProblemError, match="expected one of tir, llvm, asm"):
        space.emitted(problem, point, cpu, "sass")


def test_machine_code_of_points_is_shown() -> None:
    from tvm_sparse.artifacts.cuda import ToolchainError

    point = Candidate("per_element", 1, (("threads", 32),))
    try:
        assert "EXIT" in space.emitted(parse(KEY.format(8)), point, SM90, "sass")
    except ToolchainError as error:
        pytest.skip(str(error))


def test_spaces_on_the_command_line() -> None:
    shape = ("space", "softmax_topk", "batch=10", "vocab=25000", "k=5", "--arch", "sm_90a")
    shown = call(*shape, "--template", "threshold_gate", "--template", "warp_rows", "--sample", "2")
    assert "warp_rows does not apply: vocab=25000 exceeds" in shown and shown.count("threshold_gate@") == 2
    assert "points: # threads are too few" in shown
    found = json.loads(call(*shape, "--diff", "batch=1000", "--json"))
    sides = {(line["template"], line["what"]): (line["one"], line["other"]) for line in found}
    assert sides["threshold_gate", "points"][0] == 340 != sides["threshold_gate", "points"][1]
    found = call(*shape, "--template", "threshold_gate", "--diff", "cluster_gate")
    assert "2, 4, 8, 16" in found
    point = "radix_select@{}(threads={})"
    version = spaces.find("radix_select").version
    found = json.loads(
        call(*shape, "--point", point.format(version, 256), "--diff", point.format(version, 512), "--json")
    )
    assert found == [{"template": "", "what": "threads", "one": 256, "other": 512}]
    assert "by --template" in call(*shape, "--diff", "radix_select", code=2)
    shape = ("space", "bsr_matmul", "m=8", "k=64", "n=64", "block=16", "sparsity=0.5", "--arch", "cpu")
    tried = json.loads(call(*shape, "--compile", "1", "--builders", "1", "--json"))
    assert tried[0]["compiled"]["fits"] == 1 and tried[0]["compiled"]["interval"][1] == 1


def test_who_goes_through_a_large_space_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ("softmax_topk", "batch=10", "vocab=25000", "k=5", "--arch", "sm_90a", "--template", "threshold_gate")
    said = f"going through {space.parts(parse(TOPK), SM90, ['threshold_gate'])[0].product:,} combinations"
    assert said not in call("space", *shape)
    monkeypatch.setattr(spaces, "MOST_COMBINATIONS", 100)
    assert said in call("space", *shape)
    assert said in call("measure-space", *shape, "--dry-run")
    assert said not in call("measure-space", *shape, "--dry-run", "--fix", "threads=256", "--fix", "vectors=2")


# ------------------------------------------------------------------------------------------------ exchange formats


def test_results_go_out_and_come_back(logs: Path, tmp_path: Path) -> None:
    call("db", "export", "-o", tmp_path / "t4.json", KEY.format(1), "--logs", logs)
    document = json.loads((tmp_path / "t4.json").read_text())
    assert document["schema_version"] == "1.0.0" and len(document["results"]) == 64
    result = next(r for r in document["results"] if r["invalidity"] == "correct")
    assert set(result["configuration"]) == {"template", "vec", "depth", "threads"}
    assert result["times"]["runtimes"][0] == pytest.approx(result["provenance"]["seconds"][0] * 1e3)
    assert {r["invalidity"] for r in document["results"]} == {"correct", "correctness"}
    assert "64 trials" in call("db", "import", tmp_path / "t4.json", "--logs", tmp_path / "mine")
    assert "0 trials" in call("db", "import", tmp_path / "t4.json", "--logs", tmp_path / "mine")
    mine, theirs = (Log(root, "sm_90a", "bsr_matmul").read() for root in (tmp_path / "mine", logs))
    assert mine.trials == theirs.trials[:64] and mine.sessions == theirs.sessions[:1]


def test_results_of_others_are_studied(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the extra lab is not installed")
    results = [
        {
            "configuration": {"block_size_x": x, "method": method, "pad": x > 64},
            "times": {"compilation": 12.0, "runtimes": [] if method == "none" else [x / 100, x / 90]},
            "invalidity": "compile" if method == "none" else "correct",
            "correctness": 1,
        }
        for x, method in itertools.product(range(16, 400, 16), ("row", "column", "none"))
    ]
    path = tmp_path / "convolution.json"
    path.write_text(json.dumps({"results": results, "schema_version": "1.0.0"}))
    found = json.loads(call("study", "--logs", path, "--part", "distribution", "--part", "effects", "--json"))
    assert json.loads(call("study", path, "--part", "distribution", "--json"))["distribution"] == found["distribution"]
    assert "nowhere.json: no such file" in call("study", tmp_path / "nowhere.json", code=2)
    [line] = found["distribution"]
    assert line["template"] == "convolution" and line["failed"] == pytest.approx(1 / 3)
    effects = {(line["decision"], line["value"]): line["effect"] for line in found["effects"]}
    assert effects["method", "row"] == pytest.approx(effects["method", "column"]) == pytest.approx(1)
    assert effects["block_size_x", 32] / effects["block_size_x", 16] == pytest.approx(2)
    assert "no result has a provenance" in call("db", "import", path, "--logs", tmp_path / "mine", code=1)
    path.write_text('{"results": [{}]}')
    assert "result 0 lacks configuration" in call("study", "--logs", path, code=1)


def test_a_space_too_large_to_go_through_is_drawn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share of points comes with an interval, which holds, and what it is doing is said; nothing lists them all."""
    shape, name = TOPK.partition("/"), "threshold_gate"
    words = ("space", shape[0], *shape[2].split(","), "--arch", "sm_90a", "--template", name)
    [whole] = space.parts(parse(TOPK), SM90, [name])
    monkeypatch.setattr(space, "MOST_COMBINATIONS", 1000)
    monkeypatch.setattr(space, "DRAWN", 3000)
    [part] = space.parts(parse(TOPK), SM90, [name])
    assert part.drawn == 3000 == len(part.points) + sum(part.refused.values()) and part.product == whole.product
    low, high = part.share
    assert low < whole.share[0] < high and set(part.points) <= set(whole.points)
    assert f"{low:.2%} to {high:.2%}" in call(*words) and "of 3,000 drawn" in call(*words)
    [said] = json.loads(call(*words, "--json"))
    assert said["points"] is None and said["share"] == [low, high]
    assert "too many to write its points" in call(*words, "--t1", tmp_path / "space.json", code=2)
    assert "too many to measure; leave some values: --fix" in call("measure-space", *words[1:], "--dry-run", code=2)


def test_spaces_go_out_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "t1.json"
    shape = ("bsr_matmul", "m=8", "k=64", "n=64", "block=16", "sparsity=0.5")
    call("space", *shape, "--arch", "sm_90a", "--template", "per_tile", "--t1", path)
    [part] = space.parts(parse(KEY.format(8)), SM90, ["per_tile"])
    read = exchange.read_inputs(path)
    assert read.table == part.table and sum(read.refused().values()) == part.product - len(part.points) > 0
    assert f"{len(part.points)} of {part.product} points" in call("space", path)
    document = json.loads(path.read_text())
    for expression, refused in (("threads * tile_m <= 64 && tile_n != 3", 68), ("max(tile_m, tile_n) % 2 == 0", 5)):
        document["ConfigurationSpace"]["Conditions"] = [{"Parameters": ["threads"], "Expression": expression}]
        path.write_text(json.dumps(document))
        assert exchange.read_inputs(path).refused() == {expression: refused}
    for expression in (
        "__import__('os').abort()",
        "().__class__",
        "threads ** threads",
        "[t for t in (1,)]",
        "other > 1",
    ):
        document["ConfigurationSpace"]["Conditions"] = [{"Parameters": [], "Expression": expression}]
        path.write_text(json.dumps(document))
        assert "is not understood" in call("space", path, code=1)


# --------------------------------------------------------------------------------------------- plots and the report


def test_the_report_is_whole_in_a_browser(table: Any, logs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra lab is not installed")
    page, images = tmp_path / "report.html", tmp_path / "images"
    parts = [word for name in ("distribution", "importance", "budget") for word in ("--part", name)]
    made = ("report", "bsr_matmul", "--logs", logs, "-o", page, *parts)
    call(*made, "--images", images, "--heat-map", "vec,depth")
    names = {path.stem for path in images.glob("*.svg")}
    assert names == {path.stem for path in images.glob("*.png")} and len(names) == 7
    assert {"roofline", "heat-map-all-vec-depth", "best-so-far-bsr_matmul", "transfer-bsr_matmul"} <= names
    for path in images.glob("*.svg"):
        assert tree.parse(path).getroot().tag.endswith("svg")
    text = page.read_text()
    assert "<script" not in text and "http:" not in text and "https:" not in text
    assert "no trial has both" in call(*made, "--heat-map", "vec,cluster", code=2)
    if CHROMIUM is None:
        pytest.skip("no chromium to look at the page with")
    # What the browser made of it, written into the page by a script that only the test adds.
    look = """<script>addEventListener("load", () => { document.title = JSON.stringify({
      pictures: [...document.images].map(i => i.naturalWidth), width: document.documentElement.scrollWidth,
      window: innerWidth, rows: document.querySelectorAll("tbody tr").length,
      foreign: performance.getEntriesByType("resource").filter(e => !e.name.startsWith("data:")).length}) })</script>"""
    (tmp_path / "looked.html").write_text(text.replace("</body>", f"{look}</body>"))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=900,800",
    ]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run([*command, f"file://{tmp_path / 'looked.html'}"], capture_output=True, text=True, timeout=100)
    seen = json.loads(done.stdout.partition("<title>")[2].partition("</title>")[0])
    assert len(seen["pictures"]) == len(names) and min(seen["pictures"]) > 100
    assert seen["width"] <= seen["window"] and seen["rows"] > 10 and seen["foreign"] == 0


def test_what_there_is_not_is_said(logs: Path) -> None:
    pytest.importorskip("sklearn", reason="the extra lab is not installed")
    assert "expected one of distribution" in call("study", "--part", "nothing", "--logs", logs, code=2)
    assert "no trial is recorded" in call("study", "softmax", "--logs", logs, code=2)
    assert "no trial has 'batch'" in call("study", "bsr_matmul", "batch=3", "--logs", logs, code=2)
    assert "m is one of 1, 2, 4, 8" in call("study", "bsr_matmul", "m=3", "--logs", logs, code=2)
    assert "expected axis=value" in call("study", "bsr_matmul", "m", "--logs", logs, code=2)
    assert "does not exist" in call("study", "--logs", logs / "gone", code=2)
    assert database.rows([logs], operator="softmax") == []
