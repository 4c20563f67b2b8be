"""Records: what is written is there, what is damaged costs itself, nothing wrong is believed."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_sparse import records
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import ProblemError
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Best, Contents, Log, Session, Trial, codec, database, exchange, utc_now
from tvm_sparse.records import log as log_module
from tvm_sparse.records.migrate import migrate
from tvm_sparse.records.queries import best_records
from tvm_sparse.runtime.paths import shipped_logs
from tvm_sparse.schedules.vocabulary import present

ARCH = "sm_90a"
DATE = "2025-01-02T03:04:05Z"
PROBLEM = "softmax_topk/batch=10,vocab=25000,k=5,dtype=float32"
CANDIDATE = Candidate("warp_shuffle", 1, (("rows", 4), ("lanes", 32)))
FALLBACK = Candidate("per_element", 1)
PACKAGE_ROOT = Path(records.__file__).parents[2]

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,8}", fullmatch=True)
candidates = st.builds(
    Candidate,
    names,
    st.integers(0, 99),
    st.dictionaries(names, st.integers(), max_size=4).map(lambda d: tuple(d.items())),
)


def trial(order: int = 0, **changes) -> Trial:
    good = Trial(PROBLEM, ARCH, CANDIDATE, "ok", "", (2.0e-6, 1.0e-6, 4.0e-6), 0.5, "s1", order, {"regs": 40})
    return replace(good, **changes)


def failed(outcome: str, reason: str = "Error: why") -> Trial:
    return trial(outcome=outcome, reason=reason, seconds=())


def test_records_that_come_with_the_package_need_no_migration(tmp_path: Path) -> None:
    """A record without a decision that its template has now is passed over, and no figure tells."""
    logs = shutil.copytree(PACKAGE_ROOT / "tuning_logs", tmp_path / "logs")
    changed = {str(path.relative_to(logs)): count for path, count in migrate(logs, present).items() if count}
    assert not changed, "run tvm-sparse db migrate tuning_logs"


def session(**changes) -> Session:
    good = Session("s1", DATE, {"device": "H100"}, {"tvm": "0.27"}, "events", {"seed": 0})
    return replace(good, **changes)


def best(**changes) -> Best:
    return replace(Best(PROBLEM, ARCH, CANDIDATE, 1e-6, FALLBACK, 2e-6, 9, "s1"), **changes)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "logs", ARCH, "softmax_topk")


def raw_line(record: Trial | Session | Best, **changes) -> bytes:
    """A line with a right checksum over changed fields; a field set to `...` is left out."""
    line = json.loads(codec.encode(record)) | changes
    line = {name: value for name, value in line.items() if value is not ... and name != "sum"}
    text = json.dumps(line, sort_keys=True, separators=(",", ":"))
    line["sum"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def put(path: Path, *lines: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))


def reasons(contents: Contents) -> dict[int, str]:
    return {skipped.line: skipped.reason for skipped in contents.skipped}


# Values ---------------------------------------------------------------------------------------


def test_a_best_record_has_times_of_ways(log):
    timed = best(ways={"kernel": 2e-6, "product": 1e-6})
    log.append_best(best(), timed)
    assert log.best() == {PROBLEM: timed} and hash(timed) == hash(best())
    for ways in ({}, {"": 1e-6}, {"kernel": 0.0}, {"kernel": "1"}, {1: 1e-6}):
        with pytest.raises((ValueError, TypeError)):
            best(ways=ways)


def test_candidate_text():
    assert str(CANDIDATE) == "warp_shuffle@1(rows=4, lanes=32)"
    assert str(FALLBACK) == "per_element@1()"
    assert Candidate.parse(" warp_shuffle@1(rows=4,lanes=32) ") == CANDIDATE
    assert CANDIDATE.values == {"rows": 4, "lanes": 32}


@settings(deadline=None)
@given(candidates)
def test_candidate_parse_is_the_inverse(candidate):
    assert Candidate.parse(str(candidate)) == candidate


@pytest.mark.parametrize(
    "text",
    ["", "a", "a@1", "a@x()", "a@1(b)", "a@1(b=)", "a@1(b=1,)", "a@1(b=1.5)", "a@1(b=1, b=2)"],
)
def test_candidate_parse_refuses(text):
    with pytest.raises(ValueError):
        Candidate.parse(text)


def test_candidate_takes_integers_only():
    class Eight:
        def __index__(self):
            return 8

    value = Candidate("t", 1, (("a", Eight()),)).decisions[0][1]
    assert (value, type(value)) == (8, int)
    with pytest.raises(TypeError):
        Candidate("t", 1, (("a", 8.0),))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1e-6])
def test_times_are_finite_and_positive(bad):
    for make in (
        lambda: trial(seconds=(1e-6, bad)),
        lambda: trial(build_seconds=bad),
        lambda: best(seconds=bad),
        lambda: best(fallback_seconds=bad),
    ):
        with pytest.raises(ValueError, match="finite and positive"):
            make()


def test_trial_is_consistent():
    assert trial().median == 2.0e-6
    assert hash(trial()) == hash(trial())
    assert len(failed("crash", "x" * 9999).reason) == 500
    with pytest.raises(ValueError, match="no time"):
        _ = failed("timeout").median
    for changes in (
        {"outcome": "fine"},
        {"seconds": ()},
        {"reason": "but"},
        {"outcome": "wrong", "reason": "off by 1"},  # with times
        {"outcome": "wrong", "seconds": ()},  # with no reason
        {"problem": "no key"},
        {"session": ""},
    ):
        with pytest.raises(ValueError):
            trial(**changes)
    with pytest.raises(TypeError):
        trial(candidate=str(CANDIDATE))


def test_session_date_is_utc():
    assert session(date="2025-01-02T03:04:05+00:00").date
    assert session(date=utc_now()).date.endswith("Z")
    for date in ("2025-01-02T03:04:05", "2025-01-02T03:04:05+02:00", "today"):
        with pytest.raises(ValueError):
            session(date=date)


# Round trips ----------------------------------------------------------------------------------


def test_round_trip(log: Log):
    assert log.read() == Contents()
    assert log.best() == {}
    assert not log.root.exists()  # reading creates nothing

    written = [
        trial(0),
        failed("crash", 'SIGSEGV\n\u2028 \ud800 "quoted"'),
        trial(2, resources=None),
    ]
    log.append(session(), *written[:2])
    log.append(written[2])
    log.append()
    assert log.read() == Contents(trials=tuple(written), sessions=(session(),))
    assert log.sessions() == {session().id: session()}
    assert log.trials_path == log.root / ARCH / "softmax_topk" / "trials.jsonl"
    assert log.trials_path.read_bytes().count(b"\n") == 4


def test_last_best_wins(log: Log):
    other = "softmax_topk/batch=1,vocab=25000,k=5,dtype=float32"
    log.append_best(best(), best(problem=other))
    log.append_best(best(candidate=FALLBACK, seconds=2e-6))
    assert log.best() == {
        PROBLEM: best(candidate=FALLBACK, seconds=2e-6),
        other: best(problem=other),
    }
    assert len(log.read_best().bests) == 3


def test_numeric_keys_survive_their_checksum(log: Log):
    log.append(session(machine={2: "two", 10: "ten"}))
    contents = log.read()
    assert not contents.skipped
    assert contents.sessions[0].machine == {"2": "two", "10": "ten"}


def test_line_is_canonical(log: Log):
    log.append(trial())
    (line,) = log.trials_path.read_bytes().splitlines()
    fields = json.loads(line)
    assert line == json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    assert fields["kind"] == "trial" and len(fields["sum"]) == 16


def test_append_refuses_what_reading_would_skip(log: Log):
    for record in (trial(arch="sm_80"), trial(problem="csr_lookup/rows=4")):
        with pytest.raises(ValueError, match="in the folder of"):
            log.append(trial(), record)
    with pytest.raises(ValueError):
        log.append(session(machine={"clock": math.nan}))
    with pytest.raises(TypeError):
        log.append(best())
    with pytest.raises(ValueError):
        Log(log.root, "../elsewhere", "softmax_topk")
    assert not log.root.exists()


# Damage ---------------------------------------------------------------------------------------


def test_torn_tail_costs_itself(log: Log):
    log.append(trial(0), trial(1))
    data = log.trials_path.read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(first + 1, len(data) - 1, 29):
        log.trials_path.write_bytes(data[:cut])
        assert [t.order for t in log.read().trials] == [0]
        assert reasons(log.read())[2].startswith("torn last line: bad JSON")
        log.append(trial(2))
        assert [t.order for t in log.read().trials] == [0, 2]
        assert list(reasons(log.read())) == [2]


def test_only_the_newline_is_missing(log: Log):
    log.append(trial(0))
    log.trials_path.write_bytes(log.trials_path.read_bytes()[:-1])
    assert len(log.read().trials) == 1
    log.append(trial(1))
    assert [t.order for t in log.read().trials] == [0, 1] and not log.read().skipped


def test_bad_lines_are_skipped_with_number_and_reason(log: Log):
    bad = [
        ("blank line", b"\n"),
        ("bad JSON", b'{"kind": "tri\n'),
        ("bad JSON: NaN", b'{"kind":"trial","seconds":[NaN],"sum":"0"}\n'),
        ("bad JSON: an object", b"[1]\n"),
        ("bad JSON", b"[" * 200_000 + b"\n"),
        ("bad JSON: 'utf-8'", b"\xff\xfe\n"),
        ("bad JSON", b"\0" * 64 + b"\n"),  # what a power failure can leave
        ("missing field: sum", b"{}\n"),
        ("checksum", codec.encode(trial()).replace(b'"order":0', b'"order":1')),
        ("unknown kind", raw_line(trial(), kind="trail")),
        ("unknown kind: 'best'", raw_line(best())),
        ("unknown kind: ['trial']", raw_line(trial(), kind=["trial"])),
        ("missing field: outcome", raw_line(trial(), outcome=...)),
        ("invalid value: unknown outcome", raw_line(trial(), outcome="splendid")),
        ("invalid value: seconds", raw_line(trial(), seconds=[-1.0])),
        ("invalid value: seconds: not a number", raw_line(trial(), seconds=["1e-6"])),
        ("invalid value: 'NoneType'", raw_line(trial(), seconds=None)),
        ("invalid value: expected", raw_line(trial(), candidate="a@1()")),
        (
            "invalid value: not a name",
            raw_line(trial(), candidate={"template": "a b", "version": 1, "decisions": []}),
        ),
        (
            "invalid value: not enough",
            raw_line(trial(), candidate={"template": "a", "version": 1, "decisions": [["b"]]}),
        ),
        ("arch 'sm_80'", raw_line(trial(arch="sm_80"))),
        ("problem 'csr_lookup/", raw_line(trial(problem="csr_lookup/rows=4"))),
    ]
    put(log.trials_path, *(raw_line(trial(0)) + line for _, line in bad), raw_line(trial(9)))
    contents = log.read()
    assert len(contents.trials) == len(bad) + 1
    assert [skipped.line for skipped in contents.skipped] == [2 * i + 2 for i in range(len(bad))]
    for skipped, (expected, _) in zip(contents.skipped, bad, strict=True):
        assert skipped.reason.startswith(expected), skipped


def test_infinite_number_in_a_line(log: Log):
    put(log.trials_path, raw_line(trial()).replace(b"2e-06", b"2e999"), raw_line(trial()))
    assert list(reasons(log.read())) == [1]


def test_any_flipped_byte_is_noticed(log: Log):
    line = raw_line(trial())
    for position in range(len(line) - 1):
        flipped = bytearray(line)
        flipped[position] ^= 1
        put(log.trials_path, raw_line(trial(1)), bytes(flipped), raw_line(trial(2)))
        contents = log.read()
        assert [t.order for t in contents.trials] == [1, 2]
        assert contents.skipped and contents.skipped[0].line == 2


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_reading_never_raises(tmp_path_factory, junk):
    log = Log(tmp_path_factory.mktemp("logs"), ARCH, "softmax_topk")
    put(log.trials_path, raw_line(trial(1)), junk, b"\n", raw_line(trial(2)))
    assert [t.order for t in log.read().trials] == [1, 2]


def test_future_and_past_fields(log: Log):
    future = raw_line(trial(), mood="good")
    past = raw_line(trial(), resources=...)
    put(log.trials_path, future, past, future.replace(b"good", b"evil"))
    contents = log.read()
    assert contents.trials == (trial(), trial(resources=None))
    assert reasons(contents) == {3: "checksum does not match"}


# Several processes, and a full disk ------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.records import *
log = Log(Path(sys.argv[1]), "sm_90a", "softmax_topk")
for order in range(int(sys.argv[3])):
    log.append(Trial("softmax_topk/batch=1", "sm_90a", Candidate("t", 1), "ok", "", (1e-6,), None,
                     sys.argv[2], order, {"filler": 0}))
    sys.stdout.write(f"{order}\\n")
    sys.stdout.flush()
"""


def writer(log: Log, name: str, count: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(log.root), name, str(count)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(PACKAGE_ROOT)},
    )


def test_two_writers(log: Log):
    writers = [writer(log, name, 250) for name in ("a", "b")]
    for process in writers:
        process.communicate(timeout=60)
        assert process.returncode == 0
    contents = log.read()
    assert not contents.skipped
    for name in ("a", "b"):
        assert [t.order for t in contents.trials if t.session == name] == list(range(250))


def test_killed_writers_lose_nothing_they_reported(log: Log):
    reported = {}
    for round_ in range(6):
        process = writer(log, f"w{round_}", 100_000)
        assert process.stdout.readline()
        time.sleep(0.03 + 0.017 * round_)
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0]
        lines = rest.decode().rpartition("\n")[0].split()
        reported[f"w{round_}"] = int(lines[-1]) if lines else 0
    log.append(trial())  # the lock is free, and a torn line would be closed
    found = {(t.session, t.order) for t in log.read().trials}
    for name, last in reported.items():
        assert {(name, order) for order in range(last + 1)} <= found
    assert ("s1", 0) in found


def test_reading_takes_no_lock(log: Log):
    log.append(trial())
    with FileLock(f"{log.trials_path}.lock"):
        done = threading.Thread(target=log.read, daemon=True)
        done.start()
        done.join(5)
        assert not done.is_alive()


def test_stopped_holder_is_named(log: Log, monkeypatch):
    monkeypatch.setattr(log_module, "LOCK_SECONDS", 0.1)
    log.append(trial())
    held, release = threading.Event(), threading.Event()

    def hold():
        with FileLock(f"{log.trials_path}.lock"):
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        with pytest.raises(TimeoutError, match="trials.jsonl.lock"):
            log.append(trial())
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize("torn", [False, True])
def test_full_disk_leaves_the_file_as_it_was(log: Log, monkeypatch, torn):
    log.append(trial(0))
    if torn:
        with log.trials_path.open("ab") as file:
            file.write(b'{"kind":')
    before = log.trials_path.read_bytes()
    write, writes = os.write, []

    def full(fd, data):
        if writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        writes.append(write(fd, data[: len(data) // 2]))
        return writes[0]

    with monkeypatch.context() as patch:
        patch.setattr(log_module.os, "write", full)
        with pytest.raises(OSError, match="2 record.*not written.*as it was before") as caught:
            log.append(trial(1), trial(2))
    assert caught.value.errno == errno.ENOSPC
    assert str(log.trials_path) in str(caught.value)
    assert writes and log.trials_path.read_bytes() == before

    log.append(trial(3))
    assert [t.order for t in log.read().trials] == [0, 3]


def test_interrupted_append_is_undone(log: Log, monkeypatch):
    log.append(trial(0))
    before = log.trials_path.read_bytes()
    fsync, calls = os.fsync, []

    def interrupted(fd):
        calls.append(fd)
        if len(calls) == 1:
            raise KeyboardInterrupt
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(log_module.os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.append(trial(1))
    assert log.trials_path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(OSError, match=r"records cannot be written there \(.*\); name another folder: '.*trials.jsonl'"):
        Log(tmp_path / "logs", ARCH, "softmax_topk").append(trial())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_device_without_space(log: Log):
    put(log.trials_path)
    log.trials_path.unlink()
    log.trials_path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="not written") as caught:
        log.append(trial())
    assert caught.value.errno == errno.ENOSPC


# What tools say of it ----------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch, caplog) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(log_module, "_said", set())
    return caplog


def test_what_is_skipped_is_said_once(log: Log, said):
    log.append(trial(0))
    put(log.trials_path, raw_line(trial(0)), b"{}\n", b"[]\n")
    log.read()
    log.read()
    (warning,) = said.messages
    assert warning.startswith(f"{log.trials_path}: 2 lines are damaged and passed over, the first is line 2: missing")


def test_an_older_ranking_in_the_place_of_a_damaged_one_is_said(log: Log, said):
    other = "softmax_topk/batch=1,vocab=25000,k=5,dtype=float32"
    damaged = raw_line(best(seconds=5e-7)).replace(b"5e-07", b"6e-07")
    put(log.best_path, raw_line(best()), damaged, raw_line(best(problem=other)))
    assert log.best() == {PROBLEM: best(), other: best(problem=other)}
    assert f"the last ranking of {PROBLEM}, line 2, is damaged: an older one is used" in said.messages[1]
    log.append_best(best(seconds=4e-7))  # a later one that is whole makes up for it
    said.clear()
    log_module._said.clear()
    assert log.best()[PROBLEM].seconds == 4e-7 and len(said.messages) == 1


def test_lines_of_a_later_schema_are_skipped(log: Log):
    put(log.trials_path, raw_line(trial(0), schema=...), raw_line(trial(1)), raw_line(trial(2), schema=2))
    assert [t.order for t in log.read().trials] == [0, 1]
    assert reasons(log.read()) == {3: "schema 2 is none that this version reads, 1 to 1"}


def test_verify_names_what_is_damaged_and_what_is_gone(log: Log):
    log.append(session(), *(trial(i) for i in range(4)))
    log.append_best(best(trials=4))
    assert database.verify(log.root) == []
    lines = log.trials_path.read_bytes().splitlines(keepends=True)
    put(log.trials_path, *lines[:2], b"{}\n", lines[3])  # one is damaged, one cut off at a line's end
    found = [(damage.path, damage.line, damage.what) for damage in database.verify(log.root)]
    assert found == [
        (log.trials_path, 3, "missing field: sum"),
        (log.trials_path, 0, "session s1 lacks 1 trials: 1"),
        (log.trials_path, 0, f"session s1 had 4 trials of {PROBLEM}, of which 2 are here"),
    ]


def test_verify_counts_gaps_of_any_size(log: Log):
    """What a damaged line claims to be the number of its trial costs no memory."""
    log.append(session(), trial(1), trial(10**40))
    [damage] = database.verify(log.root)
    assert damage.what == f"session s1 lacks {10**40 - 1} trials: 0, 2, 3, 4, 5, ..."


def test_merged_folders_have_all_records_once(tmp_path: Path):
    one, two = (Log(tmp_path / name, ARCH, "softmax_topk") for name in ("one", "two"))
    one.append(session(id="new", date="2025-02-02T00:00:00Z"), trial(0, session="new"))
    one.append_best(best(session="new", seconds=9e-7))
    two.append(session(id="old", date=DATE), trial(0, session="old"))
    two.append_best(best(session="old"))
    assert database.merge([two.root], one.root) == 4  # the newer ranking stands last again
    assert database.merge([two.root], one.root) == 0
    assert one.best()[PROBLEM].session == "new" and len(one.read().trials) == 2
    assert list(database.differences(one.root, two.root)) == [(ARCH, PROBLEM, one.best()[PROBLEM], best(session="old"))]


@pytest.mark.parametrize("of", [0, 1])
def test_of_two_rankings_of_a_session_the_one_with_times_of_ways_is_kept(tmp_path: Path, of: int):
    logs = [Log(tmp_path / name, ARCH, "softmax_topk") for name in ("one", "two")]
    timed = best(ways={"kernel": 1e-6})
    for log, one in zip(logs, (best(), timed) if of else (timed, best()), strict=True):
        log.append(session())
        log.append_best(one)
    database.merge([logs[1].root], logs[0].root)
    assert logs[0].best() == {PROBLEM: timed} and database.merge([logs[1].root], logs[0].root) == 0


def test_pruning_leaves_what_is_used(log: Log):
    row = Candidate("row_scan", spaces.find("row_scan").version, (("chunk", 64), ("simd", 8)))
    good = [trial(0, candidate=row), best(candidate=row, fallback=row)]
    log.append(session(), session(id="gone"), good[0], trial(1, session="gone"), failed("environment"))
    log.append_best(best(candidate=row, fallback=row, seconds=5e-6), good[1])
    with log.trials_path.open("ab") as file:
        file.write(b"damaged\n")
    assert database.prune(log.root, lambda *_: False) == {}
    assert database.prune(log.root, gone=True) == {log.trials_path.parent: 5}
    assert log.read() == Contents(trials=(good[0],), sessions=(session(),))
    assert log.read_best().bests == (good[1],) and database.prune(log.root) == {}


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_of_drawn_records_is_whole(log: Log, seed: int):
    """Trials keep their order, rankings never claim more trials than there were or are, and nothing seems to lack."""
    draw = random.Random(seed)
    row = Candidate("row_scan", spaces.find("row_scan").version, (("chunk", 64), ("simd", 8)))
    problems = (PROBLEM, PROBLEM.replace("k=5", "k=6"))
    trials: list[Trial] = []
    for name in ("one", "two", "three"):
        log.append(session(id=name))
        for order in range(draw.randint(0, 9)):
            outcome = draw.choice(("ok", "ok", "wrong", "environment"))
            seconds = (draw.uniform(1e-6, 2e-6),) if outcome == "ok" else ()
            old = draw.random() < 0.3
            trials.append(
                trial(
                    order,
                    session=name,
                    problem=draw.choice(problems),
                    candidate=replace(row, version=row.version - 1) if old else row,
                    outcome=outcome,
                    reason="" if seconds else "why",
                    seconds=seconds,
                )
            )
    log.append(*trials)
    counts = {}
    for number, problem in enumerate(problems):
        name = draw.choice(("one", "two", "three"))
        # Later trials of a session do not count for its ranking.
        there = sum((one.session, one.problem) == (name, problem) for one in trials)
        counts[problem] = name, draw.choice((None, draw.randint(0, there)))
        log.append_best(
            best(
                problem=problem,
                candidate=row,
                fallback=row,
                seconds=number + 1e-6,
                session=name,
                trials=counts[problem][1],
            )
        )
    database.prune(log.root)
    left, expected = log.read(), [one for one in trials if one.candidate == row and one.outcome != "environment"]
    assert [replace(one, order=0) for one in left.trials] == [replace(one, order=0) for one in expected]
    assert {one.id for one in left.sessions} == {one.session for one in expected} | {
        name for name, _ in counts.values()
    }
    for problem, (name, count) in counts.items():
        there = sum((one.session, one.problem) == (name, problem) for one in expected)
        assert log.best()[problem].trials == (None if count is None else min(count, there))
    assert database.verify(log.root) == [] and database.prune(log.root) == {}


def test_results_go_out_with_their_own_sessions(log: Log, tmp_path: Path):
    other = PROBLEM.replace("k=5", "k=6")
    log.append(session(id="one"), session(id="two"), session(id="three"))
    log.append(trial(0, session="one"), trial(0, session="two", problem=other), trial(1, session="one", problem=other))
    assert database.write_results([log.root], tmp_path / "t4.json", other) == 2
    sessions, trials = exchange.records_of(exchange.read_results(tmp_path / "t4.json"))
    assert [one.id for one in sessions] == ["one", "two"] and {one.problem for one in trials} == {other}


@pytest.mark.parametrize("unit", ["seconds", "milliseconds", "microseconds", "nanoseconds"])
def test_times_of_others_are_in_their_own_unit(unit: str):
    times = {"compilation_time": 30.0, "runtimes": [2.0, 4.0, 3.0]}
    results = [{"configuration": {"x": 1}, "times": times, "invalidity": "correct"}]
    [row] = exchange.foreign_rows({"metadata": {"timeunit": unit}, "results": results}, "theirs", ())
    assert row["build_seconds"] == pytest.approx(10 * row["seconds"])
    scale = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}[unit]
    assert row["seconds_all"] == pytest.approx([2 * scale, 4 * scale, 3 * scale])


def test_damage_has_the_same_line_however_little_is_read(log: Log):
    """A reader of one problem's lines, or of sessions alone, counts those between."""
    log.append(session(), trial(0), session(id="s2"), trial(1))
    lines = log.trials_path.read_bytes().splitlines(keepends=True)
    spoilt = [line.replace(b'"sum":"', b'"sum":"x') for line in (raw_line(trial(2)), raw_line(session(id="s3")))]
    put(log.trials_path, *lines[:2], spoilt[0], lines[2], spoilt[1], lines[3], spoilt[0])
    assert [one.line for one in log.read().skipped] == [3, 5, 7]
    assert [one.line for one in log.of_problem(PROBLEM).skipped] == [3, 5, 7]


def test_records_as_a_table(log: Log, tmp_path: Path):
    log.append(session(machine={"name": "H100"}), trial(0), failed("crash"))
    log.append_best(best())
    rows = database.rows([log.root])
    database.write_rows(rows, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [(row["kind"], row["outcome"], row["seconds"], row["machine.name"]) for row in read] == [
        ("trial", "ok", "2e-06", "H100"), ("trial", "crash", "", "H100"), ("best", "ok", "1e-06", "H100")
    ]  # fmt: skip


def test_a_record_of_a_huge_batch_breaks_no_other(log: Log):
    """Its arithmetic would be that of every problem that is compared with it."""
    put(log.best_path, raw_line(best(problem=PROBLEM.replace("batch=10", "batch=1" + "0" * 400))))
    assert best_records([log.root], ARCH, ["softmax_topk"]) == {}
    with pytest.raises(ProblemError, match="batch must be below 2\\^48"):
        parse(PROBLEM.replace("batch=10", f"batch={2**50}"))


def test_imports_neither_tvm_nor_numpy():
    code = (
        "import sys; before = set(sys.modules); import tvm_sparse.records;"
        "print({'tvm', 'torch', 'numpy'} & (set(sys.modules) - before))"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE_ROOT)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "path", sorted(shipped_logs().glob("*/*/best.jsonl")), ids=lambda path: "-".join(path.parts[-3:-1])
)
def test_what_ships_is_a_point_of_its_space(path: Path) -> None:
    """Look-up passes over a winner whose decisions the template no longer has, or has in another order."""
    arch, operator = path.parts[-3:-1]
    where = replace(machine.resolve(arch), instructions=machine.X86_INSTRUCTIONS.get(arch, ""))
    winners = Log(shipped_logs(), arch, operator).best()
    assert winners
    for key, best in winners.items():
        template = spaces.find(best.candidate.template, operator)
        assert template.version == best.candidate.version, key
        assert template.point(parse(key), where, best.candidate.values) is None, key
