"""The command line: real runs on tiny shapes, what it prints, and its exit codes."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import plugins
import pytest
from cases import thorough
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from typer.main import get_command
from typer.testing import CliRunner

import tvm_sparse
from tvm_sparse.artifacts import manifest, signing
from tvm_sparse.bench import compare as comparing
from tvm_sparse.bench import load, timing
from tvm_sparse.bench.compare import compare
from tvm_sparse.bench.contenders import Peer
from tvm_sparse.cli import bench, common, doctor, tune
from tvm_sparse.cli.app import app
from tvm_sparse.core import commands, machine, registry, shape_files, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine, UnknownArch
from tvm_sparse.core.problem import ProblemError
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Best, Log, Trial
from tvm_sparse.runtime import paths
from tvm_sparse.shipping import export as shipping
from tvm_sparse.tuning import plans

TINY = ("bsr_matmul", "m=2", "k=64", "n=64", "block=16", "sparsity=0.5")
HERE = machine.cpu()


def call(*words: str | Path, code: int = 0) -> str:
    """Run a command in this process; what it prints on stdout, or on stderr where it is to fail."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "160"})
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result.stderr if code else result.stdout


def started(*words: str | Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tvm_sparse", *map(str, words)]
    environment = {**os.environ, "COLUMNS": "160", **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, path_without_torch: str) -> tuple[Path, str]:
    """Records of the tiny problem, and what the run printed."""
    logs = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path_without_torch)
        return logs, call("tune", *TINY, "--target", "cpu", "--trials", "3", "--builders", "1", "--logs", logs)


def test_db(tuned: tuple[Path, str], tmp_path: Path) -> None:
    """Each command once on what a run has recorded; `verify` by its exit code, with file and line."""
    logs, _ = tuned
    own = ("--logs", logs)
    assert "bsr_matmul" in call("db", "ls", *own) and "3 ok" in call("db", "show", "bsr_matmul", *own)
    assert "block_rows" in call("db", "best", *own) and call("db", "verify", *own) == "sound\n"
    copy = tmp_path / "copy"
    assert call("db", "merge", logs, "--logs", copy).startswith("5 records appended")  # a session, 3 trials, a ranking
    assert "bsr_matmul/" not in call("db", "diff", logs, copy)
    assert "0 lines removed" in call("db", "prune", "--logs", copy)
    assert [row["trials"] for row in json.loads(call("db", "ls", "--json", *own))] == [3]
    [ranked] = json.loads(call("db", "best", "--json", *own))
    shown = json.loads(call("db", "show", "bsr_matmul/", "--json", *own))
    assert ranked["problem"] == shown["trials"][0]["problem"] and shown["outcomes"] == {"ok": 3}
    assert json.loads(call("db", "diff", logs, copy, "--json")) == []
    assert call("db", "migrate", copy).endswith("0 records renamed\n")
    renamed = CliRunner().invoke(app, ["migrate", str(copy)])
    assert renamed.stdout == call("db", "migrate", copy) and "db migrate now" in renamed.stderr
    assert "4 records" in call("db", "export", "-o", tmp_path / "a.csv", *own)
    call("db", "export", "-o", tmp_path / "a.txt", *own, code=2)
    database = tmp_path / "database"
    assert "3 trials" in call("db", "export", "--format", "metaschedule", "-o", database, *own)
    assert call("db", "import", database, "--logs", tmp_path / "imported").startswith("3 trials appended")
    [path] = copy.glob("*/*/trials.jsonl")
    path.write_bytes(path.read_bytes() + b"{}\n")
    damaged = CliRunner().invoke(app, ["db", "verify", "--logs", str(copy)])
    assert damaged.exit_code == 1 and f"{path}:5: missing field: sum" in damaged.stdout


# ------------------------------------------------------------------------------------------------- at a glance


def test_help_and_version_load_no_compiler() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from tvm_sparse.cli.app import app;"
        "r = CliRunner().invoke(app, ['--help']); assert r.exit_code == 0, r.output;"
        "heavy = {'tvm', 'torch', 'numpy', 'scipy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert re.fullmatch(r"tvm-sparse \d+\.\d+\.\d+\n", call("--version"))
    for command in ("tune", "export", "explain", "list", "doctor", "bench", "quickstart"):
        assert command in call("--help") and "--help" in call(command, "--help")


def test_list_names_operators_templates_and_records(tuned: tuple[Path, str]) -> None:
    text = call("list", "--logs", tuned[0])
    for word in ("softmax_topk", "bsr_matmul", "block_rows (fallback)", "Milakov", HERE.arch, "m=2 k=64 n=64"):
        assert word in text
    [one] = json.loads(call("list", "bsr_matmul", "--logs", tuned[0], "--json"))
    [record] = one["tuned"][HERE.arch].values()
    assert record["seconds"] > 0 and record["candidate"].startswith("block_rows@")
    assert [axis for axis, facts in one["axes"].items() if facts["batch"]] == ["m"]
    assert "did you mean bsr_matmul" in call("list", "bsr_matmull", code=2)
    [one] = json.loads(call("list", "bsr_matmul", "--logs", tuned[0], "--json", "--target", "sm_80"))
    assert one["tuned"] == {} and {template["kind"] for template in one["templates"]} == {"cuda"}
    [one] = json.loads(call("list", "bsr_matmul", "--logs", tuned[0], "--json", "--target", "cpu"))
    assert list(one["tuned"]) == [HERE.arch]
    assert "nearest valid names" in call("list", "--target", "sm80", code=2)


# ------------------------------------------------------------------------------------ what was tuned, in each command


def test_what_was_tuned_is_found_by_logs_and_kernels(
    tuned: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `explain`, `bench` and calls, and forgotten after the command; records added meanwhile are read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "ROUND_SECONDS", 1e-4)
    monkeypatch.setattr(timing, "REST_SECONDS", 1e-4)
    logs, kernels, words = tuned[0], tmp_path / "kernels", (*TINY, "--target", "cpu", "--json")
    call("export", "-o", kernels, "--logs", logs, "--target", "cpu")
    axes = dict(word.split("=") for word in TINY[1:])

    def how() -> tuple[str, str | None]:
        found = tvm_sparse.explain("bsr_matmul", target="cpu", **axes)
        return found.how, found.library

    before = how()
    assert before[0] != "exact"
    assert json.loads(call("explain", *words, "--logs", logs))["how"] == "exact"
    found = json.loads(call("explain", *words, "--kernels", kernels))
    assert found["how"] == "exact" and found["library"].startswith(str(kernels)) and how() == before
    assert json.loads(call("bench", *words, "--kernels", kernels))["how"] == "exact"
    later = tmp_path / "later"
    later.mkdir()
    try:
        tvm_sparse.configure(logs=later)
        assert how() == before
        shutil.copytree(logs, later, dirs_exist_ok=True)
        tvm_sparse.configure(logs=[str(later)])
        assert how()[0] == "exact"
    finally:
        tvm_sparse.configure(logs=())
    assert how() == before
    with pytest.raises(NotADirectoryError, match="logs: expected a folder of records.*no_such"):
        tvm_sparse.configure(logs=tmp_path / "no_such")
    assert "no_such" in call("explain", *words, "--logs", tmp_path / "no_such", code=1)
    assert "no_such" in call("explain", *words, "--kernels", tmp_path / "no_such", code=1)


def commands_of(group: object) -> dict[str, object]:
    """Every command of the program by its words, hidden ones too."""
    found = {}
    for name, one in group.commands.items():  # type: ignore[attr-defined]
        inner = commands_of(one) if hasattr(one, "commands") else {"": one}
        found |= {f"{name} {rest}".strip(): command for rest, command in inner.items()}
    return found


COMMANDS = commands_of(get_command(app))
# They look up what they have made themselves, or nothing of a caller's.
APART = {"quickstart", "doctor", "cache"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_looks_a_kernel_up_can_be_told_where(name: str) -> None:
    """Known by its module: it uses the dispatcher, or compares calls with other libraries'."""
    command = COMMANDS[name]
    source = inspect.getsource(inspect.getmodule(command.callback.__wrapped__))  # type: ignore[attr-defined]
    options = {option for one in command.params for option in one.opts}  # type: ignore[attr-defined]
    looks_up = re.search(r"runtime\.dispatch|bench\.compare import compare", source) is not None
    if looks_up and name not in APART:
        assert {"--logs", "--kernels"} <= options, options
    assert "--help" in call(*name.split(), "--help")


LONG = (
    "lsh_topk/lists=1,beam=3,hidden=40,vocab=517,frequent=13,n=5,k=8,units=2,bands=13,dtype=float32,table=direct",
    "softmax_topk/batch=100,vocab=250000,k=50,dtype=bfloat16",
)


@pytest.mark.parametrize("columns", ["30", "100", None], ids=str)
def test_keys_and_candidates_are_printed_whole(
    columns: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However narrow the terminal: each can be copied, parses, and is the one that was recorded."""
    candidates, other = {}, tmp_path / "other"
    other.mkdir()
    for key in LONG:
        problem = parse(key)
        candidates[problem.key] = spaces.fallback(problem, HERE)
        log = Log(tmp_path / "logs", HERE.arch, problem.operator)
        ok, bad = (
            Trial(problem.key, HERE.arch, candidates[problem.key], *how, None, "s", order)
            for order, how in enumerate((("ok", "", (1e-6,)), ("wrong", f"Mismatch: off by {len(key)}.5", ())))
        )
        log.append(ok, bad)
        given = candidates[problem.key]
        log.append_best(Best(problem.key, HERE.arch, given, 1e-6, given, 2e-6, rounds=1, session="s"))
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    logs = ("--logs", str(tmp_path / "logs"))
    for words in (
        ("db", "best", *logs),
        *(("db", "show", key, *logs) for key in candidates),
        ("db", "diff", logs[1], other),
    ):
        text = call_plain(*map(str, words))
        found = re.findall(r"\w+/\w+=\S+", text)
        assert found and all(parse(key).key == key and key in candidates for key in found), text
        for key in found:
            assert str(candidates[key]) in text
    text = call_plain("list", "softmax_topk", *logs)
    assert parse(LONG[1]).typed.removeprefix("softmax_topk ") in text
    if columns is None:  # a row is a line, its cells two spaces apart
        rows = [re.split(r" {2,}", line.strip()) for line in call_plain("db", "best", *logs).splitlines()]
        assert {row[1]: row[2] for row in rows if len(row) > 3 and row[0] == HERE.arch} == {
            key: str(candidate) for key, candidate in candidates.items()
        }


def call_plain(*words: str) -> str:
    return CliRunner().invoke(app, list(words)).stdout


def test_why_candidates_failed_is_said(tmp_path: Path) -> None:
    """By reason, numbers aside, the most frequent first, with a candidate that can be tried again."""
    problem = parse("softmax_topk/batch=2,vocab=100,k=3")
    points = list(spaces.points(problem, HERE, spaces.applicable(problem, HERE)[0]))[:6]
    ends = [("wrong", f"Mismatch: values differ by {n}.5 at row {n}\nmore") for n in range(3)]
    ends += [("crash", "killed by SIGSEGV"), ("build-error", "build: no"), ("environment", "full disk")]
    log = Log(tmp_path, HERE.arch, problem.operator)
    for order, (point, (outcome, reason)) in enumerate(zip(points, ends, strict=False)):
        log.append(Trial(problem.key, HERE.arch, point, outcome, reason, (), None, "s", order))
    text = call("db", "show", problem.key, "--logs", tmp_path)
    assert "3 x wrong: Mismatch: values differ by 0.5 at row 0\n" in text and f"as {points[0]}" in text
    assert text.index("3 x wrong") < text.index("1 x crash: killed by SIGSEGV") and "more" not in text
    assert "and 3 trials for 3 other reasons" in call("db", "show", problem.key, "--logs", tmp_path, "--count", "1")
    found = json.loads(call("db", "show", problem.key, "--logs", tmp_path, "--json"))["failures"]
    assert [one["count"] for one in found] == [3, 1, 1, 1]


def test_tune_says_why_candidates_of_its_run_failed(tmp_path: Path) -> None:
    problem = parse("softmax_topk/batch=2,vocab=100,k=3")
    points = list(spaces.points(problem, HERE, spaces.applicable(problem, HERE)[0]))[:3]
    log = Log(tmp_path, HERE.arch, problem.operator)
    for order, (point, session) in enumerate(zip(points, ("before", "now", "now"), strict=True)):
        log.append(Trial(problem.key, HERE.arch, point, "wrong", f"Mismatch: {session}", (), None, session, order))
    plan = plans.Plan(problem, HERE, {}, {}, 3, 0, 1, 0.0)
    outcome = tune.Outcome()
    assert tune.failed_lines([plan], outcome, tmp_path) == []
    outcome.sessions[plan] = {"now"}
    head, *reasons = tune.failed_lines([plan], outcome, tmp_path)
    assert head.startswith(f"{problem.typed}: 2 candidates failed: tvm-sparse db show {problem.key} --logs ")
    assert len(reasons) == 1 and reasons[0].startswith("  2 x wrong: Mismatch: now") and "before" not in reasons[0]


def test_prune_names_what_it_removes_and_spares_plugins(tmp_path: Path) -> None:
    row = Candidate("row_scan", spaces.find("row_scan").version, (("chunk", 64), ("simd", 8)))
    old, theirs = dataclasses.replace(row, version=1), Candidate("of_a_plugin", 3, (("threads", 32),))
    more = dataclasses.replace(row, decisions=(*row.decisions, ("skip", 1)))
    log = Log(tmp_path, HERE.arch, "softmax_topk")
    key = parse("softmax_topk/batch=2,vocab=100,k=3").key
    for order, candidate in enumerate((row, old, more, theirs)):
        log.append(Trial(key, HERE.arch, candidate, "ok", "", (1e-6,), None, "s", order))
    for seconds in (2e-6, 1e-6):
        log.append_best(Best(key, HERE.arch, row, seconds, row, 2e-6, rounds=1, session="s", trials=4))
    foreign = Log(tmp_path, HERE.arch, "operator_of_a_plugin")
    foreign.append(Trial("operator_of_a_plugin/n=1", HERE.arch, theirs, "ok", "", (1e-6,), None, "s", 0))
    own = ("db", "prune", "--logs", tmp_path)
    named = call(*own, "--dry-run")
    assert f"1 x trial of row_scan@1: its version is {row.version} now" in named
    assert f"1 x trial of row_scan@{row.version}: skip is none of its decisions now" in named
    assert f"1 x ranking of {key}, row_scan@{row.version}: a later one replaced it" in named
    assert "plugin" not in named and "3 lines would be removed" in named and len(log.read().trials) == 4
    assert "give --yes, or --dry-run" in call(*own, code=2) and len(log.read().trials) == 4
    assert call(*own, "--yes").endswith("3 lines removed\n")
    assert [trial.candidate for trial in log.read().trials] == [row, theirs] and len(foreign.read().trials) == 1
    # Remaining trials are numbered and counted anew: none seems to be missing.
    assert [trial.order for trial in log.read().trials] == [0, 1] and log.best()[key].trials == 2
    assert "trial of of_a_plugin@3: there is no such template" in call(*own, "--gone", "--yes")
    assert [trial.candidate for trial in log.read().trials] == [row] and not foreign.read().trials


def test_shapes_that_nobody_tuned_are_exported(tuned: tuple[Path, str], tmp_path: Path) -> None:
    """And those that somebody did as they won; each program once, for any batch."""
    path = tmp_path / "shapes.toml"
    path.write_text(
        "[[bsr_matmul]]\nm = [1, 2]\nk = 64\nn = 64\nblock = 16\nsparsity = [0.5, 0.9]\n"
        "[[softmax]]\nbatch = [1, 2]\nvocab = 37\n"
    )
    folder = tmp_path / "kernels"
    call("export", "--target", "cpu", "--shapes", path, "--logs", tuned[0], "--operator", "softmax", "-o", folder)
    [entry] = manifest.read(folder)
    assert entry.chosen == "fallback" and entry.candidate == spaces.fallback(parse(entry.problem), HERE)
    jobs = shipping.planned(HERE, [tuned[0]], shape_files.read(path))
    assert {(job[0].key, job[2]) for job in jobs} >= {(parse("softmax/batch=1,vocab=37").key, "fallback")}
    assert [job[2] for job in jobs].count("exact") == 1
    assert "(--shapes FILE)" in call("export", "--target", "sm_80", "--logs", tuned[0], "-o", folder, code=1)


def test_the_cache_is_shown_and_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = paths.user_cache()
    assert call("cache") == f"nothing in {root}\n"
    for arch in ("sm_90a", "x86-64-v4"):
        (root / arch).mkdir(parents=True)
        (root / arch / "one.so").write_bytes(bytes(2048))
        (root / arch / manifest.NAME).write_text("{}")
    assert f"sm_90a: 1 library, 2 KiB, in {root / 'sm_90a'}\n" in call("cache", "show")
    assert call("cache", "clean", "--target", "sm_90a") == "sm_90a: 1 library, 2 KiB, removed\n"
    assert [path.name for path in root.rglob("*.so")] == ["one.so"]
    call("cache", "clean")
    assert not [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]
    assert "show" in call("cache", "drop", code=2)


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    environment = {
        "_TVM_SPARSE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("tvm-sparse", *words)),
        "COMP_CWORD": str(len(words)),
    }
    return CliRunner().invoke(app, [], prog_name="tvm-sparse", env=environment).stdout.split()


def test_a_shell_completes_commands() -> None:
    assert completed("ex") == ["export", "explain"] and "migrate" not in completed("m")


@pytest.mark.parametrize("command", ["tune", "explain", "bench", "space", "measure-space", "prebuild"])
def test_a_shell_completes_operators_axes_and_targets(command: str) -> None:
    names = list(registry.operators())
    assert set(completed(command, "s")) >= {name for name in names if name.startswith("s")}
    # All operators once: the commands declare these arguments by the same types.
    for name in names if command == "tune" else names[:1]:
        axes = [field.name for field in dataclasses.fields(registry.find(name).problem)]
        assert completed(command, name, "") == [f"{axis}=" for axis in axes]
    assert completed(command, "softmax_topk", "batch=3", "v") == ["vocab="]
    assert "dtype=bfloat16" in completed(command, "softmax_topk", "dtype=")
    assert completed(command, "softmax_topk", "--target", "sm_9") == ["sm_90a"]
    assert completed(command, "softmax_topk", "--target", "rtx4") == ["rtx4090", "rtx4080"]


def test_a_shell_completes_templates_and_keys(tuned: tuple[Path, str]) -> None:
    assert set(completed("tune", "bsr_matmul", "--template", "")) >= {
        template.name for template in registry.find("bsr_matmul").templates
    }
    keys = completed("db", "show", "--logs", str(tuned[0]), "bsr_matmul/")
    assert keys == list(Log(tuned[0], HERE.arch, "bsr_matmul").best())
    assert "bsr_matmul/" in completed("db", "show", "bsr")


def test_the_package_tells_its_names_and_version() -> None:
    assert call("--version") == f"tvm-sparse {tvm_sparse.__version__}\n"
    assert {"softmax_topk", "warmup", "BsrWeight", "__version__"} <= set(dir(tvm_sparse))


def test_an_old_python_is_told_which_one_is_needed() -> None:
    code = "import sys; sys.version_info = (3, 10, 4); exec(open('setup.py').read())"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "tvm_sparse needs Python 3.11 or later; this is Python 3.10\n"


def test_what_calls_ask_for_is_tuned(tmp_path: Path) -> None:
    """A look-up's number of nonzeros is known to calls in steps only: a record of another would never be found."""
    shape = ("nhot_lookup", "rows=7", "vocab=50", "width=33")
    plan = call("tune", *shape, "nonzeros=4", "--target", "cpu", "--logs", tmp_path, "--dry-run")
    said, _, rest = plan.partition("\n")
    assert said.startswith("nhot_lookup rows=7 vocab=50 width=33 nonzeros=4 is tuned as nhot_lookup rows=7 vocab=50 wi")
    assert "nonzeros=5" in rest and "nonzeros=4" not in rest
    rows = tvm_sparse.CsrRows((np.arange(8) * 4, np.zeros(28, np.int64), None), columns=50)
    given = registry.parse("nhot_lookup/rows=7,vocab=50,width=33,nonzeros=4,index=int64")
    assert given.as_called() == rows.problem(33, "float32")
    assert "nonzeros=5" in call("explain", *shape, "nonzeros=4", "--target", "cpu")
    assert "is tuned as" not in call("tune", *TINY, "--target", "cpu", "--logs", tmp_path, "--dry-run")


# ---------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "words, said",
    [
        (("softmx_topk", "batch=1"), "did you mean softmax_topk"),
        (("softmax_topk", "batch=1", "vocb=10", "k=1"), "did you mean vocab"),
        (("softmax_topk", "batch=1"), "missing axis vocab, k"),
        (("softmax_topk", "batch"), "expected axis=value, got 'batch'"),
        (("softmax_topk", "batch=1", "batch=2"), "batch is given twice"),
        (("softmax_topk", "batch=one", "vocab=10", "k=1"), "batch must be int, got 'one'"),
        (("softmax_topk", "batch=1", "vocab=10", "k=11"), "k must be at most vocab"),
        ((*TINY, "--target", "sm_9"), "sm_90a"),
        ((*TINY, "--target", "l4"), "is not here, and tuning runs kernels"),
        ((*TINY, "--target", "sm_60"), "capability 6.0 is below 8.0"),
        ((*TINY, "--shapes", "nowhere.toml"), "give one of them"),
        (("--shapes", "nowhere.toml"), "nowhere.toml: No such file"),
        ((), "see tvm-sparse list"),
    ],
)
def test_mistakes_are_named_and_exit_with_2(words: tuple[str, ...], said: str) -> None:
    assert said in call("tune", *words, code=2)


def test_a_cpu_measures_what_is_compiled_for_lower_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine("llvm", "x86-64-v3", "a CPU", cores=2)
    monkeypatch.setattr(machine, "cpu", lambda: here)
    assert common.machine_here("x86-64-v2", "tuning") == Machine("llvm", "x86-64-v2", "a CPU", cores=2)
    assert common.machine_here("x86-64-v3", "tuning") == here
    for target in ("x86-64-v4", "aarch64"):
        with pytest.raises(UnknownArch, match=f"{target} is not here"):
            common.machine_here(target, "tuning")


@pytest.mark.parametrize(
    "text, said",
    [
        ("[[softmax_topk]\n", r"shapes\.toml: not TOML: .*line 1"),
        ("[[softmax_topk]]\nk = " + 5000 * "1", r"shapes\.toml: not TOML: .*digits"),
        ("", r"no shapes"),
        ("[[softmax_topk]]\nbatch = 1\nvocab = 10\nk = 1\n[[softmax_topk]]\nbatch = 1\nvocabb = 10\nk = 1\n",
         r"shapes\.toml: \[\[softmax_topk\]\] number 2: .*unknown axis 'vocabb'; did you mean vocab"),
        ("[[softmaxx]]\nbatch = 1\n", r"\[\[softmaxx\]\] number 1: operator: got 'softmaxx'; did you mean softmax"),
        ("[[softmax_topk]]\nbatch = []\nvocab = 10\nk = 1\n", r"batch: the list is empty"),
        ("[[softmax_topk]]\nbatch = true\nvocab = 10\nk = 1\n", r"batch: expected a number"),
        ("[[softmax_topk]]\nbatch = 1.5\nvocab = 10\nk = 1\n", r"batch must be an integer"),
        (f"[[softmax_topk]]\nbatch = {[1] * 1000}\nvocab = {[9] * 1000}\nk = {[1] * 18}\n",
         r"number 1: its lists mean 18,000,000 problems; expected at most 100,000"),
        ("softmax_topk = 3\n", r"expected tables \[\[softmax_topk\]\]"),
    ],
)  # fmt: skip
def test_a_bad_file_of_shapes_is_named_with_its_table_and_axis(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "shapes.toml"
    path.write_text(text)
    with pytest.raises(ProblemError, match=said):
        shape_files.read(path)
    assert str(path) in call("tune", "--shapes", path, "--dry-run", code=2)


def test_fix_leaves_some_values_of_a_decision(tmp_path: Path) -> None:
    words = ("tune", "softmax_topk", "batch=2", "vocab=500", "k=3", "--target", "cpu", "--dry-run")
    assert re.search(r"row_scan +2 ", call(*words, "--fix", "chunk=64,128", "--fix", "simd=8"))
    assert "fix: expected one of chunk, simd, got 'chunks'" in call(*words, "--fix", "chunks=64", code=2)
    assert "chunk=1,2" in call(*words, "--fix", "chunk=many", code=2)
    # No value that the space has: the template is left out, and says so.
    assert "row_scan: chunk is not to be one of" in call(*words, "--fix", "chunk=7")


def test_lists_in_a_file_of_shapes_mean_their_product(tmp_path: Path) -> None:
    path = tmp_path / "shapes.toml"
    path.write_text(
        "[[softmax_topk]]\nbatch = [1, 2]\nvocab = 100\nk = [1, 5]\n"
        "[[softmax_topk]]\nbatch = 1\nvocab = 100\nk = 1\n"  # one of them again
        '[[bsr_matmul]]\nm = 1\nk = 64\nn = 64\nblock = [8, "8x16"]\nsparsity = 0.5\n'
    )
    problems = shape_files.read(path)
    assert [(p.operator, p.batch_extent) for p in problems[:4]] == [("softmax_topk", b) for b in (1, 1, 2, 2)]
    assert [p.axes["block"] for p in problems[4:]] == ["8x8", "8x16"]
    plan = call("tune", "--shapes", path, "--target", "cpu", "--trials", "5", "--dry-run", "--logs", tmp_path / "logs")
    assert "6 problems" in plan and "30" in plan and not (tmp_path / "logs").exists()


def test_export_without_a_record_says_what_to_do(tmp_path: Path) -> None:
    said = call("export", "-o", tmp_path / "out", "--logs", tmp_path, "--target", "cpu", code=1)
    assert "no record" in said and "tvm-sparse tune" in said and not (tmp_path / "out").exists()
    assert "did you mean bsr_matmul" in call("export", "-o", tmp_path / "out", "--operator", "bsr_matmu", code=2)


def test_export_names_the_architectures_that_have_records(tuned: tuple[Path, str], tmp_path: Path) -> None:
    said = call("export", "-o", tmp_path / "out", "--logs", tuned[0], "--target", "x86-64-v2", code=1)
    assert "no record for x86-64-v2" in said and f"There are records for {HERE.arch}" in said


def test_a_folder_with_nothing_for_this_machine_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tvm_sparse.runtime import dispatch

    entry = manifest.Entry(
        *("softmax_topk/batch=1,vocab=8,k=1", "sm_00", "cuda", Candidate("threshold_gate", 1, ()), "exact"),
        *("a.so", "0" * 64, (), {}, None),
    )
    manifest.write(tmp_path, [entry])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "dispatcher", dispatch.Dispatcher())
        assert dispatch.load(str(tmp_path)) == 0
    assert f"{tmp_path} holds kernels for sm_00; this machine is" in caplog.text and HERE.arch in caplog.text


def test_commands_in_messages_work_where_they_are_copied_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "some where" / "tvm-sparse"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(script), "list"])
    assert common.program() == f"'{script}'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert common.program() == "tvm-sparse"
    monkeypatch.setattr(sys, "argv", ["/lib/tvm_sparse/__main__.py"])
    assert common.program() == f"{sys.executable} -m tvm_sparse"


def test_the_help_names_every_operator_of_the_package() -> None:
    said = " ".join(call("--help").split())
    assert all(operator.name in said for operator in registry.BUILTIN)


def test_the_time_left_does_not_jump() -> None:
    """A start of 20 s, then batches of 16 that are built for 8 s and measured for 0.1 s each."""
    plan = plans.Plan(parse("softmax_topk/batch=2,vocab=99,k=3"), HERE, {}, {}, 96, 0, 1, 0.0)
    progress = plans.Progress(plan)
    first, now, estimates = plan.trials * plan.trial_seconds + plan.final_seconds, 20.0, []
    for number in range(plan.trials):
        now += 8.0 * (number % plans.BATCH == 0) + 0.1
        progress.ends.append(now)
        progress.measured += 1
        estimates.append(progress.seconds_left)
    assert all(before / 2 < after < 2 * before for before, after in zip([first, *estimates], estimates, strict=False))
    assert estimates[-1] == pytest.approx(plan.final_seconds * progress.slowness)
    progress.phase, progress.final_share = "final", 1.0
    assert progress.seconds_left == 0


def test_a_missing_extra_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(common, "_installed", lambda module: module != "xgboost")
    said = call("tune", *TINY, "--target", "cpu", "--logs", tmp_path, code=1)
    assert f'xgboost missing; install with: {commands.python()} -m pip install "tvm_sparse[tune]"' in said


# ------------------------------------------------------------------------------------------------ the main job


def test_tune_prints_the_plan_its_progress_and_the_result(tuned: tuple[Path, str]) -> None:
    logs, text = tuned
    assert "block_rows" in text and "trials now" in text and f"records: {logs}" in text
    assert "3/3 (3 ok)" in text and "final between the best" in text
    assert "fallback us" in text and f"Recorded in {logs / HERE.arch}" in text
    assert "\x1b" not in text, "control codes where stdout is no terminal"
    log = Log(logs, HERE.arch, "bsr_matmul")
    assert len(log.read().trials) == 3 and len(log.best()) == 1


def test_tuning_again_goes_on_from_what_is_recorded(tuned: tuple[Path, str]) -> None:
    logs, _ = tuned
    text = call("tune", *TINY, "--target", "cpu", "--trials", "4", "--logs", logs, "--dry-run")
    row = next(line for line in text.splitlines() if "bsr_matmul" in line)
    assert re.search(r"\s1\s+3\s", row), "1 trial now, 3 paid"


def test_some_decisions_vary_and_others_stay_as_recorded(tuned: tuple[Path, str], tmp_path: Path) -> None:
    logs = shutil.copytree(tuned[0], tmp_path / "logs")
    log = Log(logs, HERE.arch, "bsr_matmul")
    [(key, best)] = log.best().items()
    before, values = len(log.read().trials), best.candidate.values
    table = spaces.applicable(parse(key), HERE)[0][best.candidate.template]
    name = max(table, key=lambda one: len(table[one]))
    words = ("tune", "bsr_matmul", "--target", "cpu", "--vary", name, "--builders", "1", "--logs", logs)
    call(*words)
    trials = Log(logs, HERE.arch, "bsr_matmul").read().trials
    made = [trial.candidate for trial in trials[before:] if trial.order]
    assert all(candidate.values | {name: values[name]} == values for candidate in made)
    tried = {
        trial.candidate.values[name] for trial in trials if trial.candidate.values | {name: values[name]} == values
    }
    point = spaces.find(best.candidate.template).point
    assert tried == {value for value in table[name] if point(parse(key), HERE, values | {name: value}) is None}
    assert len(tried) > 1
    axes = ("tune", *TINY, "--target", "cpu", "--logs", logs)
    assert "vary: expected some of" in call(*axes, "--vary", "no_such", code=2)
    assert "leave out --template, --fix" in call(*axes, "--vary", name, "--fix", f"{name}=1", code=2)
    assert "has no record of softmax for" in call("tune", "softmax", *words[2:], code=2)
    other = ("tune", "bsr_matmul", "m=2", "k=64", "n=64", "block=32", "sparsity=0.5", *words[2:])
    assert "has no record of any of these problems" in call(*other, code=2)


def test_export_writes_a_folder_that_loads(tuned: tuple[Path, str], tmp_path: Path) -> None:
    logs, _ = tuned
    key = ed25519.Ed25519PrivateKey.generate()
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (tmp_path / "key").write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    own = ("export", "-o", tmp_path / "kernels", "--logs", logs, "--target", "cpu", "--sign")
    assert "gone: No such file" in call(*own, tmp_path / "gone", code=1)
    text = call(*own, tmp_path / "key")
    assert signing.is_signed(tmp_path / "kernels")
    assert "1 library" in text and "KiB" in text and "block_rows@" in text
    code = (
        f"import tvm_sparse; assert tvm_sparse.load({str(tmp_path / 'kernels')!r}) == 1;"
        "e = tvm_sparse.explain('bsr_matmul', m=2, k=64, n=64, block=16, sparsity=0.5, target='cpu');"
        f"assert e.how == 'exact' and e.library.startswith({str(tmp_path)!r}), e"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cuda_is_exported_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    problem, where = parse("softmax_topk/batch=10,vocab=3000,k=5"), machine.resolve("sm_90a")
    fallback = spaces.fallback(problem, where)
    best = Best(problem.key, where.arch, fallback, 1e-6, fallback, 1e-6, rounds=1, session="none")
    Log(tmp_path, where.arch, problem.operator).append_best(best)
    text = call("export", "-o", tmp_path / "kernels", "--logs", tmp_path, "--arch", "sm_90a", "--builders", "1")
    assert "registers" in text and "spills" in text and "1 library for sm_90a" in text
    [kernel] = json.loads((tmp_path / "kernels" / "manifest.json").read_text())["kernels"]
    assert kernel["arch"] == "sm_90a" and kernel["resources"]["registers"] > 0


def test_explain_takes_axes_or_a_key() -> None:
    by_axes = call("explain", "softmax_topk", "batch=3", "vocab=77", "k=2", "--target", "sm_90a")
    by_key = call("explain", "softmax_topk/batch=3,vocab=77,k=2,dtype=float32", "--target", "sm_90a")
    assert by_axes == by_key and "on sm_90a" in by_axes
    found = json.loads(call("explain", "softmax_topk", "batch=3", "vocab=77", "k=2", "--target", "cpu", "--json"))
    assert found["arch"] == HERE.arch and found["how"] in ("exact", "bucket", "nearby", "fallback")
    assert "did you mean vocab" in call("explain", "softmax_topk", "batch=3", "vocb=77", "k=2", code=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", "cpu", "--devices", "0"), "devices: these are GPUs, and the target is the CPU"),
        (("--target", "cpu", "--model", "H200"), "model: none of the devices has 'H200' in its name"),
        (("--ray", "local", "--devices", "all"), "ray: the cluster has all its GPUs measure"),
    ],
)
def test_devices_that_cannot_be(words: tuple[str, ...], said: str) -> None:
    assert said in " ".join(call("tune", *TINY, "--dry-run", *words, code=2).split())


def test_parts_of_a_cpu_are_in_the_plan(tmp_path: Path) -> None:
    words = ("tune", *TINY, "--target", "cpu", "--trials", "4", "--logs", tmp_path, "--workers", "3", "--dry-run")
    assert f"On 3 x {HERE.name} ({HERE.arch})" in call(*words)


def test_gpus_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    h200, a100 = machine.Machine("cuda", "sm_90a", "H200", 132), machine.Machine("cuda", "sm_80", "A100", 108)
    monkeypatch.setattr(machine, "gpus", lambda: (h200, a100, h200))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-8a2")
    monkeypatch.setattr("tvm_sparse.tuning.fleet.device_state", lambda where, number: {"number": number})
    found: list[str] = []

    def noted(problems: object, machines: list[machine.Machine], *_: object, **__: object) -> list[object]:
        found[:] = [one.arch for one in machines]
        return []

    monkeypatch.setattr("tvm_sparse.cli.tune.make_plans", noted)
    for words, archs, on in (
        ((), ["sm_90a"], "On H200 (sm_90a)"),
        (("--devices", "all"), ["sm_90a", "sm_80"], "On 2 x H200 (sm_90a), A100 (sm_80)"),
        (("--devices", "all", "--model", "a100"), ["sm_80"], "On A100"),
        (("--devices", "0,2", "--target", "sm_90a"), ["sm_90a"], "On 2 x H200"),
        (("--target", "sm_80"), ["sm_80"], "On A100"),
    ):
        assert on in call("tune", *TINY, "--dry-run", *words) and found == archs
    for wrong in ("3", "0,0", "-1", "one"):
        said = call("tune", *TINY, "--dry-run", "--devices", wrong, code=2)
        assert "expected all, or different numbers from 0 to 2" in " ".join(said.split())
    assert "workers: these are parts of a CPU" in call("tune", *TINY, "--dry-run", "--workers", "2", code=2)

    from tvm_sparse.tuning import fleet

    with fleet.local(h200, 1, gpus=(0, 2)) as devices:
        measurers = [measurer for device in devices.devices for measurer in device.measurers]
        seen = [measurer._worker.env["CUDA_VISIBLE_DEVICES"] for measurer in measurers]
    assert seen == ["4"] * fleet.GPU_SEATS + ["GPU-8a2"] * fleet.GPU_SEATS


def test_an_interrupted_run_holds_its_final_and_says_how_to_resume(
    tmp_path: Path, children_without_torch: None
) -> None:
    tiny = ("softmax_topk", "batch=2", "vocab=100", "k=3", "--target", "cpu")
    process = started("tune", *tiny, "--trials", "20", "--builders", "1", "--logs", tmp_path)
    assert process.stdout is not None
    for line in process.stdout:  # the fallback has been measured: trials are under way
        if "20 trials" in line:
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, out + err
    assert "stopping after this batch" in out and "Recorded in" in out
    resume = f"-m tvm_sparse tune {' '.join(tiny)} --trials 20 --logs {tmp_path} --builders 1"
    assert re.search(rf"resume with:\n  \S*python\S* {re.escape(resume)}\n", err)
    log = Log(tmp_path, HERE.arch, "softmax_topk")
    assert log.best() and 1 <= len(log.read().trials) < 20
    assert call(*resume.split()[2:], "--dry-run")


def test_a_second_interrupt_ends_at_once(tmp_path: Path, children_without_torch: None) -> None:
    process = started("tune", *TINY, "--target", "cpu", "--trials", "30", "--logs", tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if "30 trials" in line:
            break
    for _ in range(2):
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert (
        process.returncode == 130 and "Ended at once" in err and "-m tvm_sparse tune" in err and "Traceback" not in err
    )


def test_bench_checks_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("bench", *TINY, "--target", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "ROUND_SECONDS", 1e-4)
    monkeypatch.setattr(timing, "REST_SECONDS", 1e-4)
    result = json.loads(call(*words, "--json"))
    ours, *others = result["timings"]
    assert ours["name"] == "tvm_sparse" and ours["correct"] and ours["seconds"] > 0
    numpy = next(t for t in others if t["name"] == "NumPy dense")
    assert numpy["correct"] and numpy["seconds"] > 0
    assert all(t["correct"] or "absent" in t["note"] or "not available" in t["note"] for t in others)


def test_a_ratio_is_printed_of_rounds_that_agree() -> None:
    steady, wide = (1.0, 1.01, 1.02, 0.99, 1.0), (1.0, 9.0, 2.0, 30.0, 1.0)
    assert common.ratio_of_rounds([2 * x for x in steady], steady) == "2.00x"
    for one, other in ((wide, steady), (steady, wide), ((1.0,), steady), (steady, ())):
        assert common.ratio_of_rounds(one, other) == "-"
    assert common.apart(steady) == "1 %" and common.apart((1.0, 2.0)) == "-"
    problem = parse("softmax_topk/batch=3,vocab=500,k=4")
    point = spaces.fallback(problem, HERE)
    best = Best(problem.key, HERE.arch, point, 1.0, point, 2.0, 5, "s")
    assert common.gain(best) == "2.00x"  # of before rounds were kept
    assert common.gain(dataclasses.replace(best, seconds_all=steady, fallback_all=wide)) == "-"
    lines = (comparing.Timing("tvm_sparse", steady, "eager", True), comparing.Timing("NumPy", wide, "eager", True))
    table = bench.comparison_table(comparing.Comparison(problem, HERE, lines, None, "exact", "row_scan", "tvm 1"))
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["ours is"] == ["1.00x", "-"] and cells["spread"] == ["1 %", "400 %"]


def test_the_load_of_a_machine_is_that_of_others() -> None:
    found = load.sampled(0.05)
    if found is None:
        pytest.skip("the system does not tell")
    assert 0 <= found.others <= found.cores
    busy = load.Load(3.0, 4)
    assert busy.busy and not load.Load(0.5, 4).busy
    assert common.load_line(None) == []
    [line] = common.load_line(load.Load(0.1, 4), busy, None)
    assert line.startswith("Load: other processes kept 3.0 of 4 cores busy") and "busy machine" in line


def test_bench_notes_in_a_record_which_way_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse("head_topk/batch=2,vocab=400,hidden=32,k=3")
    words = ("bench", problem.key, "--target", "cpu", "--record", "--logs", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "ROUND_SECONDS", 1e-4)
    monkeypatch.setattr(timing, "REST_SECONDS", 1e-4)
    assert "has none of head_topk" in " ".join(call(*words, code=2).split())
    log, fallback = Log(tmp_path, HERE.arch, "head_topk"), spaces.fallback(problem, HERE)
    best = Best(problem.key, HERE.arch, fallback, 1e-6, fallback, 1e-6, rounds=1, session="none")
    log.append_best(best)
    found = json.loads(call(*words, "--json"))["ways"]
    assert found.keys() == {"kernel", "product"} and min(found.values()) > 0
    assert log.best()[problem.key] == dataclasses.replace(best, ways=found)
    assert "kernel: " in call(*words) and call("db", "verify", "--logs", tmp_path)
    alone = ("softmax", "batch=2", "vocab=64")
    text = " ".join(call("bench", *alone, "--target", "cpu", "--record", "--logs", tmp_path, code=2).split())
    assert "softmax has no other way to its result" in text


def test_a_comparison_takes_a_structure_and_names_one_that_is_unknown() -> None:
    problem = parse("softmax_topk/batch=3,vocab=500,k=4")
    result = compare(problem, machine.cpu(), structure="constant", peers=(), host=False)
    assert result.ours.correct and result.best_peer is None and not result.rotated
    with pytest.raises(ProblemError, match="structure: got 'sorted'"):
        compare(problem, machine.cpu(), structure="sorted", peers=())


def test_a_peer_that_is_wrong_has_no_time() -> None:
    problem = parse("softmax_topk/batch=2,vocab=50,k=2")
    inputs = problem.generate(0)
    sample = comparing.Sample(problem, inputs)
    expected = sample.expected
    call_wrong = lambda: (expected[0], expected[1] * 0)  # noqa: E731
    wrong = Peer("wrong", "numpy", ("cpu",), lambda p, i, d: call_wrong)
    failing = Peer("failing", "numpy", ("cpu",), lambda p, i, d: 1 / 0)
    absent = Peer("absent", "no_such_library", ("cpu",), lambda p, i, d: 1 / 0)
    fewer = Peer("fewer", "numpy", ("cpu",), lambda p, i, d: lambda: expected[:1])
    lines = [comparing.admit(peer, problem, inputs, sample, "cpu") for peer in (wrong, failing, absent, fewer)]
    assert [call for _, call in lines] == [None] * 4
    assert lines[0][0].correct is False and "largest" in lines[0][0].note
    assert "division by zero" in lines[1][0].note and "absent" in lines[2][0].note
    assert lines[3][0].note == "1 outputs, expected 2"


def test_peers_of_words_are_compared_in_the_form_of_the_operator() -> None:
    """Lists of numbers of any length, and masks: no output is a number with a tolerance. Of a step of an LSH head the
    best words alone: no peer has the normaliser and the counts."""
    for key in (
        "compaction/lists=2,vocab=100,capacity=40",
        "lsh_lookup/lists=2,beam=2,vocab=70,bands=9,bits=3",
        "lsh_topk/lists=1,beam=3,hidden=40,vocab=517,frequent=13,n=5,k=8,units=2,bands=13,table=direct",
    ):
        result = compare(parse(key), machine.cpu(), host=False, rounds=1)
        assert [line.correct for line in result.timings] == [True] * len(result.timings), result.timings


# ------------------------------------------------------------------------------------------- doctor, quickstart


def test_doctor_reports_in_json(tmp_path: Path) -> None:
    process = started("doctor", "--json", "--plugin", plugins.write(tmp_path))
    out, err = process.communicate(timeout=200)
    report = json.loads(out)
    assert process.returncode == 0 and report["works"], out + err
    checks = {check["name"]: check for check in report["checks"]}
    for name in ("python", "apache-tvm", "apache-tvm-ffi", "C compiler", "compiler IR", "CPU smoke test"):
        assert checks[name]["state"] == "ok", checks[name]
    assert "working range" in checks["apache-tvm-ffi"]["found"] and "operator double" in checks


@pytest.mark.parametrize(
    "version, fits",
    [("0.1.14", False), ("0.1.14.post0", True), ("0.1.14.post1", True), ("0.1.15", False), ("0.1.15.post2", False)],
)
def test_doctor_knows_the_working_range(version: str, fits: bool) -> None:
    assert doctor.in_range(version, "<0.1.15,>=0.1.14.post0") == fits


def test_doctor_survives_and_names_a_smoke_test_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    crash = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    monkeypatch.setattr(doctor.subprocess, "run", lambda command, **options: run(crash, **options))
    assert doctor.smoke("serialise") == (None, "killed by SIGSEGV")


# Runs the command as `python -m tvm_sparse` does, with few shapes in the place of the quickstart's own.
OF_FEW_SHAPES = """
import runpy, sys
from tvm_sparse.core import registry

given = sys.argv.pop(1).split()
for operator in registry.operators().values():
    operator.shapes.QUICKSTART = tuple(key for key in given if key.startswith(operator.name + "/"))
runpy.run_module("tvm_sparse", run_name="__main__", alter_sys=True)
"""
FEW_SHAPES = ("softmax_topk/batch=4,vocab=200,k=5", "bsr_matmul/m=1,k=128,n=768,block=32,sparsity=0.8")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("few", [True, thorough(False)], ids=["few", "all"])
def test_the_quickstart_runs_the_whole_way(few: bool, tmp_path: Path) -> None:
    """In a run that is not thorough with two small shapes of its own."""
    own = [key for operator in registry.operators().values() for key in operator.shapes.QUICKSTART]
    shapes = FEW_SHAPES if few else own
    assert {key.partition("/")[0] for key in own} == {key.partition("/")[0] for key in FEW_SHAPES}
    begin = ("-c", OF_FEW_SHAPES, " ".join(shapes)) if few else ("-m", "tvm_sparse")
    kept = tmp_path / "cache" / "tvm_sparse" / "quickstart" if few else tmp_path / "kept"
    command = [sys.executable, *begin, "quickstart", "--trials", "1", *([] if few else ["--keep", str(kept)])]
    environment = {**os.environ, "COLUMNS": "160", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    out, err = process.communicate(timeout=270)
    assert process.returncode == 0, out + err
    assert "correct" in out and out.count(" yes") == len(shapes) and " NO" not in out
    assert (kept / "kernels" / "manifest.json").exists() and (kept / "logs").is_dir()
    assert "Next:" in out and "-m tvm_sparse tune" in out and "Load: " in out  # as it was started
    # The commands that it names find what it has tuned.
    [explained] = re.findall(r"which kernel runs: +\S+ -m tvm_sparse (.*)", out)
    assert "exact: tuned for this very problem" in call(*shlex.split(explained))
    if importlib.util.find_spec("torch") is None:
        assert "PyTorch is not installed" in out
