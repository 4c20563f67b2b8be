"""Times behind a producer (`tune --inputs fresh`) and hot ones: how they are told, and that nothing mixes them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import SM90
from typer.testing import CliRunner

from tvm_sparse.bench import measure, timing
from tvm_sparse.bench.verification import make_case
from tvm_sparse.cli.app import app
from tvm_sparse.cli.common import Inputs
from tvm_sparse.cli.tune import STRATEGY, resume_command
from tvm_sparse.core import registry, spaces
from tvm_sparse.core.machine import cpu
from tvm_sparse.core.problem import Problem, ProblemError
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Best, Log, Session, Trial, codec, database, exchange
from tvm_sparse.records.queries import best_records
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.tuning import interchange, searching, training
from tvm_sparse.tuning.plans import make_plan, recorded

DATE = "2026-01-02T03:04:05Z"
PROBLEM = parse("softmax/batch=64,vocab=25000")
TEMPLATE = spaces.find("softmax_streamed")
ONE, TWO, THREE = (
    TEMPLATE.candidate({"threads": threads, "cluster": 1, "rows": 1, "vectors": 1}) for threads in (128, 256, 512)
)
# In microseconds. Hot ONE is the fastest, fresh TWO; each kind knows a point that the other does not.
HOT, FRESH = {ONE: 2.0, TWO: 3.0}, {ONE: 9.0, TWO: 7.0, THREE: 8.0}


def session(fresh: bool) -> Session:
    name = "fresh" if fresh else "hot"
    return Session(name, DATE, {"name": "a machine", "cores": 132}, {}, "a timer", {}, fresh=fresh)


def ranking(fresh: bool, problem: Problem = PROBLEM, seconds: float = 7e-6) -> Best:
    return Best(problem.key, SM90.arch, TWO, seconds, ONE, 2 * seconds, 5, session(fresh).id)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Trials of a problem, hot and fresh ones by turns."""
    made = Log(tmp_path / "logs", SM90.arch, PROBLEM.operator)
    trials = [
        Trial(PROBLEM.key, SM90.arch, candidate, "ok", "", (us * 1e-6,), 0.5, session(fresh).id, order)
        for fresh, times in ((False, HOT), (True, FRESH))
        for order, (candidate, us) in enumerate(times.items())
    ]
    made.append(session(False), session(True), *trials[::2], *trials[1::2])
    return made


def call(*words: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return " ".join((result.stderr if code else result.stdout).split())


# ---- the difference of two graphs ----------------------------------------------------------------


def replays(added: Sequence[float], calls: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Replays of so many calls behind a producer of 30 us, which drifts, and of that alone."""
    drift = itertools.count()
    alone_now = [0.0]

    def of_both() -> Iterator[float]:
        for seconds in added:
            alone_now[0] = calls * 30e-6 * (1 + 0.1 * next(drift))
            yield alone_now[0] + calls * seconds

    both = of_both()
    return lambda: next(both), lambda: alone_now[0]


def test_a_round_is_the_difference_of_its_two_graphs() -> None:
    added = [5e-6, 4e-6, 6e-6, 5e-6]
    np.testing.assert_allclose(timing.added_seconds(*replays(added, 20), 20, 4), added, rtol=1e-6)


def test_rounds_lost_in_noise_leave_the_median_or_are_an_error() -> None:
    added = [-1e-6, 2e-6, 9e-6, 0.0, 1e-6, 8e-6, 3e-6]
    left = timing.added_seconds(*replays(added, 20), 20, 7)
    np.testing.assert_allclose(left, [2e-6, 1e-6, 3e-6], rtol=1e-6)  # two are not positive: the two largest go as well
    assert np.median(left) == pytest.approx(np.median(added))
    for lost in ([-1e-6, 2e-6], [-1e-6, -1e-6, 5e-6], [0.0, -1e-6]):
        with pytest.raises(RuntimeError, match=f"of {len(lost)} rounds 20 calls added nothing"):
            timing.added_seconds(*replays(lost, 20), 20, len(lost))


def test_both_graphs_have_as_many_producers_and_are_replayed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[tuple[str, ...]] = []
    cost = {"producer": 30e-6, "kernel": 10e-6}

    def recorder() -> Any:
        def record(launch: Callable[[int], Any], calls: int) -> Callable[[], float]:
            launched.clear()
            for _ in range(calls):
                launch(7)
            nodes = tuple(launched)

            def replay() -> float:
                replayed.append(nodes)
                return sum(cost[node] for node in nodes)

            return replay

        return record

    launched: list[str] = []
    monkeypatch.setattr(timing, "_driver_recorder", recorder)

    def producer(stream: int) -> None:
        assert stream == 7
        launched.append("producer")

    seconds = timing.time_kernel("cuda", lambda: launched.append("kernel"), (), producer=producer)
    np.testing.assert_allclose(seconds, [10e-6] * timing.BEHIND_ROUNDS, rtol=1e-6)
    calls = int(timing.BEHIND_GRAPH_SECONDS / 40e-6)
    both, alone = ("producer", "kernel") * calls, ("producer",) * calls
    assert replayed[-2 * timing.BEHIND_ROUNDS :] == [both, alone] * timing.BEHIND_ROUNDS
    # Without one the graph has the kernel alone, as before.
    replayed.clear()
    assert len(timing.time_kernel("cuda", lambda: launched.append("kernel"), ())) == timing.ALONE_ROUNDS["cuda"]
    assert set(replayed[-1]) == {"kernel"}


# ---- the producer --------------------------------------------------------------------------------


def test_the_producer_compiles_without_headers() -> None:
    pytest.importorskip("cuda.bindings")
    from tvm_sparse.artifacts.cuda import toolchain
    from tvm_sparse.bench import producer

    for arch in ("sm_80", "sm_90"):
        assert toolchain.compiled(producer.SOURCE, arch).startswith(b"\x7fELF")
    with pytest.raises(toolchain.ToolchainError, match="for sm_90: .*error"):
        toolchain.compiled("no program", "sm_90")


@pytest.mark.parametrize(
    ("key", "batched"),
    [
        ("softmax_topk/batch=3,vocab=37,k=4", {"logits"}),
        ("bsr_matmul/m=4,k=64,n=48,block=8,sparsity=0.5", {"x"}),
        ("nhot_lookup/rows=5,vocab=30,width=8,nonzeros=2,weighted=1", {"indptr", "indices", "values"}),
        ("candidate_topk/lists=3,beam=2,vocab=64,hidden=32,m=16,k=4", {"hidden", "candidates", "counts"}),
    ],
)
def test_the_inputs_of_the_batch_are_written_and_no_others(
    key: str, batched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One producer serves all candidates that are timed with the same arguments, and goes with these."""
    made: list[list[tuple[Any, Any]]] = []

    class Producer:
        def __init__(self, arrays: list[tuple[Any, Any]]) -> None:
            made.append(arrays)

        def launch(self, stream: int) -> None: ...

    monkeypatch.setattr(measure, "Producer", Producer)
    monkeypatch.setattr(measure, "_producers", weakref.WeakKeyDictionary())
    monkeypatch.setattr(measure, "time_kernel", lambda *_, producer, **__: [1.0 if producer is None else 2.0])
    whole = make_case(parse(key), 0)
    arguments = measure.Arguments("llvm", [whole], [], offset=False)
    given = arguments.load(whole, 0)
    for library in ("one", "two"):
        checked = measure.Checked(library, "llvm", None, whole, arguments, given, [])
        assert checked.time() == [1.0] and checked.time(fresh=True) == [2.0]
    (arrays,) = made
    named = {id(slot.content): slot.name for slot in whole.slots}
    places = dict(zip((slot.name for slot in whole.slots), given, strict=True))
    assert {named[id(content)] for _, content in arrays} == batched
    assert all(array is places[named[id(content)]] for array, content in arrays)
    del checked, arguments
    assert not measure._producers


def test_every_operator_has_inputs_of_its_batch() -> None:
    for operator in registry.BUILTIN:
        problem = registry.make(operator.name, operator.problem.example)
        assert any(problem.batched(one) for one in problem.kernel_inputs if one.shape), problem


# ---- records -------------------------------------------------------------------------------------


def test_a_session_says_it_and_lines_of_before_are_hot(log: Log) -> None:
    assert [one.fresh for one in log.read().sessions] == [False, True]
    assert {name: one.state for name, one in log.sessions().items()} == {"hot": "hot", "fresh": "fresh"}
    line = json.loads(codec.encode(session(True)))
    assert line["fresh"] is True
    del line["fresh"], line["sum"]
    line["sum"] = codec._checksum(line)
    read = codec.decode(codec._canonical(line).encode(), {"session": Session})
    assert isinstance(read, Session) and not read.fresh
    with pytest.raises(TypeError, match="fresh is true or false"):
        dataclasses.replace(read, fresh=1)  # type: ignore[arg-type]


def test_a_table_and_t4_results_tell_it(log: Log, tmp_path: Path) -> None:
    log.append_best(ranking(True))
    rows = database.rows([log.root])
    told = {(row["kind"], row["session"]): row["fresh"] for row in rows}
    assert told == {("trial", "hot"): False, ("trial", "fresh"): True, ("best", "fresh"): True}
    path = tmp_path / "results.json"
    assert database.write_results([log.root], path) == 5
    assert exchange.records_of(exchange.read_results(path))[0] == list(log.read().sessions)
    assert database.rows([path]) == [row for row in rows if row["kind"] == "trial"]


def test_what_is_paid_for_is_of_one_kind(log: Log) -> None:
    def seconds(times: dict[Any, float]) -> dict[Any, float]:
        return {candidate: us * 1e-6 for candidate, us in times.items()}

    known, fresh = recorded(log), recorded(log, fresh=True)
    assert known == {PROBLEM.key: seconds(HOT)} and fresh == {PROBLEM.key: seconds(FRESH)}
    fixed = {"threads": (128, 256, 512), "cluster": (1,), "rows": (1,), "vectors": (1,)}
    paid = [make_plan(PROBLEM, SM90, 99, log, 1, [TEMPLATE.name], fixed, fresh=fresh).paid for fresh in (False, True)]
    assert paid == [2, 3]
    # Trials whose session is lost were timed as all were before there was a choice.
    log.append(Trial(PROBLEM.key, SM90.arch, THREE, "wrong", "off by 1", (), 0.5, "gone", 0))
    known, fresh = recorded(log)[PROBLEM.key], recorded(log, fresh=True)[PROBLEM.key]
    assert known[THREE] is None and fresh[THREE]


def test_models_and_exchanged_databases_know_hot_times_alone(log: Log, tmp_path: Path) -> None:
    (found,) = training.measured(log)
    assert dict(found.seconds) == {candidate: us * 1e-6 for candidate, us in HOT.items()}
    assert interchange.export([log.root], tmp_path / "database") == (len(HOT), 0)
    assert {one.candidate for one in interchange.read(tmp_path / "database")} == set(HOT)


def test_studies_are_of_one_kind(log: Log) -> None:
    pytest.importorskip("pandas", reason="the extra lab is not installed")
    from tvm_sparse.research.trials import trials

    for fresh, times in ((False, HOT), (True, FRESH)):
        table = trials(log.root, fresh=fresh)
        assert dict(zip(table["candidate"], table["seconds"] * 1e6, strict=True)) == pytest.approx(
            {str(candidate): us for candidate, us in times.items()}
        )
    words = ("study", "--part", "distribution", "--logs", log.root, "--json")
    counts = [json.loads(call(*words, *more))["distribution"][0]["trials"] for more in ((), ("--inputs", "fresh"))]
    assert counts == [len(HOT), len(FRESH)]


def test_a_fresh_search_goes_without_the_model_of_hot_times(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(searching, "predictor", lambda roots, arch, operator: asked.append(operator))
    fixed = {"threads": [128, 256, 512], "cluster": [1], "rows": [1], "vectors": [1]}
    for fresh in (False, True):
        asked.clear()
        request: dict[str, Any] = {
            "problem": PROBLEM.key, "machine": dataclasses.asdict(SM90), "named": [TEMPLATE.name], "fixed": fixed,
            "fresh": fresh, "strategy": "random", "root": str(log.root), "plugins": [], "known": {}, "trials": 3,
            "batch": 1, "seed": 0,
        }  # fmt: skip
        assert searching.handle(request) == []
        assert asked == ([] if fresh else [PROBLEM.operator])


# ---- what is said of it --------------------------------------------------------------------------


def test_a_gpu_alone_has_fresh_inputs(tmp_path: Path) -> None:
    words = ("tune", "softmax", "batch=2", "vocab=99", "--target", "cpu", "--logs", tmp_path, "--dry-run")
    assert "inputs: fresh ones are for GPUs" in call(*words, "--inputs", "fresh", code=2)
    assert "'hot', 'fresh'" in call(*words, "--inputs", "cold", code=2)
    assert "records:" in call(*words, "--inputs", "hot")
    with pytest.raises(ProblemError, match="^inputs: fresh ones are for GPUs"):
        make_plan(PROBLEM, cpu(), 1, Log(tmp_path, cpu().arch, PROBLEM.operator), 1, fresh=True)


def test_an_interrupted_run_goes_on_with_the_same_inputs() -> None:
    def command(**options: Any) -> str:
        return resume_command("softmax", ["n=1"], None, "auto", 8, None, None, None, None, STRATEGY, 0, **options)

    assert "--inputs fresh" in command(inputs=Inputs.fresh) and "--inputs" not in command(inputs=Inputs.hot)


def test_explain_tells_a_time_behind_a_producer(log: Log, tmp_path: Path) -> None:
    log.append_best(ranking(False), ranking(True, PROBLEM.with_batch(9)))
    kernels = Dispatcher(logs=(log.root,), shipped=tmp_path / "none", cache=tmp_path / "cache")
    hot, fresh = (str(kernels.explain(problem, SM90)) for problem in (PROBLEM, PROBLEM.with_batch(9)))
    assert "7.00 us, 2.00x" in hot and "7.00 us behind a kernel that writes its inputs, 2.00x" in fresh
    told = {key: figures.get("inputs") for key, (_, figures) in best_records([log.root], SM90.arch).items()}
    assert told == {PROBLEM.key: None, PROBLEM.with_batch(9).key: "fresh"}
    # The last line wins, however its inputs were.
    log.append_best(ranking(True))
    assert best_records([log.root], SM90.arch)[PROBLEM.key][1]["inputs"] == "fresh"


def test_folders_of_records_tell_it_and_no_ratio_of_both(log: Log, tmp_path: Path) -> None:
    log.append_best(ranking(True))
    other = Log(tmp_path / "other", log.arch, log.operator)
    other.append(session(False))
    other.append_best(ranking(False, seconds=3.5e-6))
    assert " fresh 7.00 " in call("db", "best", "--logs", log.root)
    assert " hot 3.50 " in call("db", "best", "--logs", other.root)
    shown = call("db", "show", PROBLEM.key, "--logs", log.root)
    assert shown.count(" fresh ") == len(FRESH) and shown.count(" hot ") == len(HOT)
    diff = call("db", "diff", log.root, other.root)
    assert "7.00 us, fresh inputs" in diff and "3.50 us, softmax" in diff and "2.00x" not in diff
    other.append(session(True))
    other.append_best(ranking(True, seconds=3.5e-6))
    assert "2.00x" in call("db", "diff", log.root, other.root)
