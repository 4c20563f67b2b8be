"""Which decisions look-up takes: none of them ends a call, and none is taken where the default is as good."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import long_log
import pytest

from tvm_sparse.core import distribution, machine, registry, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem, ProblemError
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Best, Log, Session
from tvm_sparse.records.codec import decode
from tvm_sparse.records.queries import best_records, predictor
from tvm_sparse.runtime import lookup, paths
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.runtime.lookup import Evidence, Known

SM90 = machine.resolve("sm_90a")
GPUS = tuple(map(machine.resolve, ("sm_90a", "sm_80", "sm_89")))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Dispatcher:
    """Look-up in the records that ship alone."""
    nothing = tmp_path_factory.mktemp("nothing")
    return Dispatcher(logs=(paths.shipped_logs(),), shipped=nothing / "none", cache=nothing / "cache")


def at_batch(problem: Problem, extent: int) -> Problem | None:
    try:
        return problem.with_batch(extent)
    except ProblemError:
        return None


def largest(problem: Problem) -> Problem:
    """The same problem at the largest batch that it can have."""
    low, high = 1, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at_batch(problem, middle) else (low, middle)
    return problem.with_batch(low)


@pytest.mark.parametrize("name", [operator.name for operator in registry.BUILTIN])
def test_look_up_never_raises(name: str, shipped: Dispatcher) -> None:
    """Drawn problems of a new seed in every run, and each at its largest batch, for which no record fits any more."""
    seed = random.SystemRandom().randrange(1 << 32)
    rng, kind = random.Random(f"{seed}/{name}"), registry.find(name).problem
    for _ in range(4):
        drawn = distribution.problem(kind, rng)
        most = largest(drawn)
        for problem in (drawn, most, most.with_batch(max(1, most.batch_extent * 2 // 3))):
            for where in GPUS:
                try:
                    found = shipped.choice(problem, where)
                except Exception as error:
                    pytest.fail(f"seed {seed}: {problem} on {where.arch}: {error!r}")
                assert spaces.refusal(found.candidate, found.compiled_for, where) is None, (seed, str(problem))


@pytest.mark.parametrize(
    "key",
    [
        "bsr_matmul/m=100000,k=512,n=256,block=16,sparsity=0.9,dtype=float16",
        "head_topk/batch=54000,vocab=300,hidden=64,k=5",
        "candidate_topk/lists=23302,beam=1,vocab=1000,hidden=64,m=10,k=5",
    ],
)
def test_a_record_that_has_no_such_batch_is_passed_over(key: str, shipped: Dispatcher) -> None:
    for where in GPUS:
        assert shipped.choice(parse(key), where).candidate


# On an H200, microseconds of the decisions that are not to be taken, and of the default.
BAD = [
    # 105 and 52.9: won for 64 rows
    (
        "logsumexp/batch=4000,vocab=25000,dtype=bfloat16",
        "logsumexp_streamed@1(threads=640, cluster=2, rows=1, vectors=2)",
    ),
    # 12.9 and 10.0: best by the model for 32 rows, not for 24
    (
        "softmax_topk/batch=24,vocab=256000,k=50",
        "cluster_gate@10(cluster=2, threads=896, vectors=6, stages=1, deferred=0, unroll=0)",
    ),
]


@pytest.mark.parametrize(("key", "bad"), BAD)
def test_decisions_that_lost_to_the_default_are_not_taken(key: str, bad: str, shipped: Dispatcher) -> None:
    problem = parse(key)
    found = shipped.choice(problem, SM90)
    template = Candidate.parse(bad).template
    bad_now = dataclasses.replace(Candidate.parse(bad), version=spaces.find(template).version)
    assert found.candidate != bad_now
    # A record of the very problem may come, or a model that knows enough problems; else nothing beats the default.
    assert found.how in ("exact", "predicted") or found.candidate == spaces.fallback(problem, SM90)


# ---- what is taken from other problems ----------------------------------------------------------


def rows(batch: int, dtype: str = "float32", vocab: int = 500) -> Problem:
    """So short that a warp takes a row, with any number of rows."""
    return parse(f"softmax/batch={batch},vocab={vocab},dtype={dtype}")


DEFAULT = spaces.fallback(rows(64), SM90)
WON = dataclasses.replace(DEFAULT, decisions=(("threads", 64), ("cluster", 1), ("rows", 1)))


def chosen(
    problem: Problem, of: Problem, gain: float, where: Machine = SM90, fallback: Candidate = DEFAULT, **how: object
) -> lookup.Choice:
    """With one record, of decisions that were e^gain as fast as the fallback."""
    figures = {"seconds": 1e-6, "fallback_seconds": 1e-6 * math.exp(gain)}
    known = {of.key: Known(WON, figures, fallback=fallback)}
    return lookup.choose(problem, where, Evidence(known, **how))  # type: ignore[arg-type]


def test_a_record_that_was_compared_with_another_default_is_named() -> None:
    other = dataclasses.replace(DEFAULT, decisions=(("threads", 64), ("cluster", 1), ("rows", 2)))
    found = chosen(rows(60), rows(64), 1.0, fallback=other)
    assert found.how == "fallback" and "batch=64 vocab=500, the most like it, was compared with another" in found.why
    # What a comparable record says counts more.
    assert "1.00x the default's speed" in chosen(rows(60), rows(64), 0.0).why


def test_the_points_of_these_tests_are_points() -> None:
    for batch in (16, 64, 250, 256, 1024):
        assert spaces.fallback(rows(batch), SM90) == DEFAULT
        assert spaces.refusal(WON, rows(batch), SM90) is None


def test_the_farther_a_record_is_the_more_it_has_to_have_gained() -> None:
    for of, octaves in ((rows(32), 1), (rows(16), 2), (rows(64, vocab=1000), 1)):
        problem = rows(64)
        for share, taken in ((1.05, True), (0.95, False)):
            gain = lookup.SURE + octaves * lookup.DOUBT * share
            found = chosen(problem, of, gain)
            assert (found.how, found.candidate) == (("nearby", WON) if taken else ("fallback", DEFAULT)), (of.key, gain)
    assert "x the default's speed there, too little to count on here" in chosen(rows(64), rows(32), 0.01).why


def test_a_larger_batch_is_a_bucket_by_the_same_rule() -> None:
    assert chosen(rows(64), rows(128), 0.5).how == "bucket"
    assert chosen(rows(64), rows(128), 0.01).how == "fallback"
    assert chosen(rows(64), rows(256), 0.5).how == "bucket"
    assert chosen(rows(64), rows(257), 0.5).how == "fallback"  # more than four times as many rows


def test_batches_and_problems_too_far_away_say_nothing() -> None:
    assert chosen(rows(64), rows(16), 2.0).how == "nearby"
    assert chosen(rows(64), rows(15), 2.0).how == "fallback"
    assert chosen(rows(64), rows(64, vocab=4000), 2.0).how == "nearby"
    assert chosen(rows(64), rows(64, vocab=4100), 2.0).how == "fallback"


def test_a_record_that_was_compared_with_another_default_says_nothing() -> None:
    """Its problem is of another regime, where the author's rule takes other decisions."""
    other = dataclasses.replace(DEFAULT, decisions=(("threads", 128), ("cluster", 1), ("rows", 1)))
    assert chosen(rows(64), rows(32), 2.0, fallback=other).how == "fallback"
    assert chosen(rows(64), rows(128), 2.0, fallback=other).how == "fallback"
    assert chosen(rows(64), rows(64), 0.0, fallback=other).how == "exact"  # of the very problem it needs no gain


@pytest.mark.parametrize("order", [1, -1])
def test_a_library_of_a_larger_batch_comes_before_one_of_a_smaller(order: int) -> None:
    """Though that is nearer: of the larger ones the nearest, and of the smaller ones if there are no others."""
    built = [lookup.Built(rows(batch).key, WON, "fallback", {}) for batch in (6, 9, 40, 70)][::order]
    for batch, taken in ((5, 6), (8, 9), (10, 40), (41, 70), (71, 70), (100, 70)):
        found = lookup.choose(rows(batch), SM90, Evidence(built=built))
        assert found.compiled_for == rows(taken), batch


def test_the_record_most_like_it_decides() -> None:
    """Where that one gained nothing, a farther one that did is not asked."""
    near, far = ({"seconds": 1e-6, "fallback_seconds": 1e-6 * ratio} for ratio in (1.0, 2.0))
    known = {rows(60).key: Known(WON, near, fallback=DEFAULT), rows(32).key: Known(WON, far, fallback=DEFAULT)}
    assert lookup.choose(rows(64), SM90, Evidence(known)).how == "fallback"


def test_records_of_another_architecture_have_to_have_gained_more() -> None:
    problem = rows(64)
    where = machine.resolve("sm_80")
    for share, how in ((1.1, "borrowed"), (0.9, "fallback")):
        gain = lookup.SURE + lookup.DOUBT * share
        figures = {"seconds": 1e-6, "fallback_seconds": 1e-6 * math.exp(gain)}
        default = spaces.fallback(problem, where)
        tables, _ = spaces.applicable(problem, where)
        won = next(one for one in spaces.points(problem, where, tables) if one != default)
        borrowed = {problem.key: Known(won, figures, fallback=default)}
        found = lookup.choose(problem, where, Evidence(borrowed=borrowed, lender="sm_90a"))
        assert found.how == how


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes_come_before_nothing(dtype: str) -> None:
    """If the record was compared with the default that the problem has here."""
    problem = rows(64, dtype)
    default = spaces.fallback(problem, SM90)
    won = next(one for one in spaces.points(problem, SM90, spaces.applicable(problem, SM90)[0]) if one != default)
    for share, how in ((1.05, "nearby"), (0.95, "fallback")):
        gain = lookup.SURE + lookup.DOUBT * lookup.BETWEEN_WIDTHS * share
        figures = {"seconds": 1e-6, "fallback_seconds": 1e-6 * math.exp(gain)}
        known = {rows(64).key: Known(won, figures, fallback=default)}
        found = lookup.choose(problem, SM90, Evidence(known))
        assert found.how == how and found.record == (rows(64).key if how == "nearby" else None)


def test_a_policy_without_the_fallback_takes_what_there_is() -> None:
    """What a user forbids to run does not become an error where a record of a larger batch could run."""
    far = dict(problem=rows(8), of=rows(4096), gain=0.0)
    assert chosen(**far).how == "fallback"  # type: ignore[arg-type]
    for policy in ("exact", "nearest"):
        found = chosen(**far, permitted=lookup.POLICIES[policy])  # type: ignore[arg-type]
        assert (found.how, found.candidate) == ("bucket", WON)


def test_the_batch_of_shipped_records_is_within_four_times(shipped: Dispatcher) -> None:
    """Also of those that another architecture borrows."""
    for name in ("nhot_lookup", "softmax", "bsr_matmul"):
        rng, kind = random.Random(f"batches/{name}"), registry.find(name).problem
        for _ in range(10):
            problem = distribution.problem(kind, rng)
            for where in GPUS:
                found = shipped.choice(problem, where)
                if found.how in ("bucket", "nearby", "borrowed"):
                    ratio = parse(found.record or "").batch_extent / problem.batch_extent
                    assert 1 / 4 <= ratio <= 4


# ---- logs ---------------------------------------------------------------------------------------

KEY = rows(64).key


def ranking(root: Path, threads: int = 64, version: int = 0, seconds: float = 1e-6, key: str = KEY) -> None:
    """Append a session and a ranking; `version` is relative to the template's."""
    log = Log(root, SM90.arch, "softmax")
    name = f"s{threads}"
    log.append(Session(name, "2026-01-02T03:04:05Z", {"name": f"machine {threads}"}, {}, "a timer", {}))
    values = WON.values | {"threads": threads}
    won = Candidate(WON.template, WON.version + version, tuple(values.items()))
    log.append_best(Best(key, SM90.arch, won, seconds, DEFAULT, 2e-6, 3, name))


def best_of(*roots: Path) -> tuple[int, str]:
    """Threads of what is known of the problem, and the machine of the session."""
    best, figures = best_records(roots, SM90.arch, ("softmax",))[KEY]
    return best.candidate.values["threads"], figures["machine"]


@pytest.mark.parametrize("version", [-1, 1])
def test_a_ranking_of_another_version_hides_none_of_this_one(version: int, tmp_path: Path) -> None:
    """Two versions of the package may append to one log; each reads what it knows."""
    ranking(tmp_path, 64)
    ranking(tmp_path, 128, version)
    assert best_of(tmp_path) == (64, "machine 64")
    ranking(tmp_path, 256)
    ranking(tmp_path, 512, version)
    assert best_of(tmp_path) == (256, "machine 256")


@pytest.mark.parametrize("version", [-1, 1])
def test_rankings_of_other_versions_alone_are_none(version: int, tmp_path: Path) -> None:
    ranking(tmp_path, 64, version)
    assert best_records([tmp_path], SM90.arch, ("softmax",)) == {}


def test_later_folders_and_later_lines_win(tmp_path: Path) -> None:
    """Whatever their times: a later measurement is of the machine and the software as they are now."""
    ranking(tmp_path / "a", 64, seconds=1e-6)
    ranking(tmp_path / "b", 128, seconds=3e-6)
    assert best_of(tmp_path / "a", tmp_path / "b") == (128, "machine 128")
    assert best_of(tmp_path / "b", tmp_path / "a") == (64, "machine 64")
    ranking(tmp_path / "a", 256, seconds=9e-6)
    assert best_of(tmp_path / "b", tmp_path / "a") == (256, "machine 256")
    ranking(tmp_path / "c", 512, version=1)  # of which nothing is read
    assert best_of(tmp_path / "a", tmp_path / "c") == (256, "machine 256")


def test_the_last_folder_with_a_model_has_the_model(tmp_path: Path) -> None:
    model = predictor([paths.shipped_logs()], SM90.arch, "softmax")
    assert model is not None
    for name in ("a", "b"):
        dataclasses.replace(model, loss=2.0 if name == "b" else 1.0).write(tmp_path / name)
    for order in (("a", "b"), ("b", "a")):
        found = predictor([tmp_path / name for name in order], SM90.arch, "softmax")
        assert found is not None and found.loss == (2.0 if order[-1] == "b" else 1.0)


def test_rankings_are_read_once_until_their_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new shape of a process looks up in what was read, and trials are never read."""
    ranking(tmp_path, 64)
    kernels = Dispatcher(logs=(tmp_path,), shipped=tmp_path / "none", cache=tmp_path / "cache")
    read: list[Path] = []
    original = Log.best

    def best(self: Log, *arguments: Any) -> Any:
        read.append(self.root)
        return original(self, *arguments)

    monkeypatch.setattr(Log, "best", best)
    monkeypatch.setattr(Log, "read", lambda self: pytest.fail("all trials were read"))
    for batch in (64, 63, 65, 64):
        kernels.explain(rows(batch), SM90)
    assert read == [tmp_path]
    ranking(tmp_path, 64, seconds=1.5e-6)
    assert kernels.explain(rows(64), SM90).figures["seconds"] == 1.5e-6 and len(read) == 2


@pytest.mark.parametrize("trials", [2000])  # 450,000 take a few seconds to write, and show the same
def test_a_long_log_is_not_decoded_for_one_problem(
    trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rankings need the sessions, and a tuning run its problem's trials: no other line is decoded."""
    long_log.write(tmp_path, trials)
    decoded: list[bytes] = []

    def counted(line: bytes, kinds: Any) -> Any:
        decoded.append(line)
        return decode(line, kinds)

    monkeypatch.setattr("tvm_sparse.records.log.decode", counted)
    log = Log(tmp_path, long_log.ARCH, long_log.OPERATOR)
    problems = len(best_records([tmp_path], log.arch, (log.operator,)))
    assert problems == trials // long_log.EACH and len(decoded) == 2 * problems
    decoded.clear()
    key = long_log.key(1)
    known = log.of_problem(key)
    assert len(known.trials) == long_log.EACH and {trial.problem for trial in known.trials} == {key}
    assert len(decoded) == long_log.EACH + problems
    assert known.trials == tuple(trial for trial in log.read().trials if trial.problem == key)


def test_where_uniform_numbers_come_from_makes_no_other_record(shipped: Dispatcher) -> None:
    """A record of one is the other's own, and so is that of a larger batch; but a library is not."""
    known = "softmax_sample/batch=64,vocab=128256,k=64,dtype=bfloat16"
    for seeded in (1, 2, 3):
        for batch, how in ((64, "exact"), (60, "bucket")):
            problem = dataclasses.replace(parse(known).with_batch(batch), seeded=seeded)
            found, given = (shipped.choice(one, SM90) for one in (problem, dataclasses.replace(problem, seeded=0)))
            assert found.how == given.how == how and found.candidate == given.candidate
            assert found.compiled_for == dataclasses.replace(given.compiled_for, seeded=seeded)
    at_hand = Known(shipped.choice(parse(known), SM90).candidate, {}, at_hand=True)
    other = dataclasses.replace(parse(known), seeded=2)
    assert lookup.choose(other, SM90, Evidence({known: at_hand}, compiles=False)).how == "fallback"
