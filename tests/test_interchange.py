"""MetaSchedule's databases: what is exported MetaSchedule reads, what is imported decides nothing but parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import SM90

from tvm_sparse.core import spaces
from tvm_sparse.core.machine import cpu
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Log, Trial
from tvm_sparse.tuning import interchange, search
from tvm_sparse.tuning.interchange import RECORDS, Refused
from tvm_sparse.tuning.plans import make_plan

PRODUCT = parse("bsr_matmul/m=4,k=64,n=48,block=8,sparsity=0.5")
TOPK = parse("softmax_topk/batch=3,vocab=37,k=4")
OUTCOMES: list[tuple[str, str, tuple[float, ...]]] = [
    ("ok", "", (3e-6, 1e-6)), ("wrong", "off by 1", ()), ("ok", "", (2e-6,)), ("environment", "full disk", ()),
]  # fmt: skip


def recorded(root: Path) -> list[Trial]:
    """Trials of a product on a GPU, and of another problem on this CPU; two of them are not exchanged."""
    written = []
    for problem, where in ((PRODUCT, SM90), (TOPK, cpu())):
        tables = spaces.applicable(problem, where)[0]
        candidates = list(spaces.points(problem, where, tables))[:: 7 if where is SM90 else 3]
        trials = [
            Trial(problem.key, where.arch, candidate, *outcome, 0.5, "s", order)
            for order, (candidate, outcome) in enumerate(zip(candidates, OUTCOMES, strict=False))
        ]
        Log(root, where.arch, problem.operator).append(*trials)
        written += trials
    return written


def test_what_is_exported_metaschedule_reads_and_an_import_gives_back(tmp_path: Path) -> None:
    trials = [trial for trial in recorded(tmp_path / "logs") if trial.outcome != "environment"]
    assert interchange.export([tmp_path / "logs"], tmp_path / "database") == (6, 0)
    with pytest.raises(ValueError, match="has database_tuning_record.json already"):
        interchange.export([tmp_path / "logs"], tmp_path / "database")

    from tvm.s_tir import Schedule
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(work_dir=str(tmp_path / "database"))
    found = {}
    for record in database.get_all_tuning_records():
        schedule = Schedule(record.workload.mod)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
        notes = dict(schedule.mod["main"].attrs)
        place = str(notes[interchange.PROBLEM]), str(notes[interchange.ARCH])
        template, values = search.decisions_of(schedule.mod)
        found[*place, spaces.find(template).candidate(values)] = tuple(map(float, record.run_secs))
    assert found == {(t.problem, t.arch, t.candidate): t.seconds or (interchange.FAILED,) for t in trials}
    # A query gives the best of that very problem on that architecture.
    module = search.placeholder(**{interchange.PROBLEM: PRODUCT.key, interchange.ARCH: "sm_90a"})
    [top] = database.get_top_k(database.commit_workload(module), 1)
    assert min(map(float, top.run_secs)) == 1e-6

    assert interchange.import_(tmp_path / "database", tmp_path / "back") == (6, 0)
    assert interchange.import_(tmp_path / "database" / RECORDS, tmp_path / "back") == (0, 6)
    for trial in trials:
        log = Log(tmp_path / "back", trial.arch, trial.problem.partition("/")[0])
        [there] = [one for one in log.read().trials if one.candidate == trial.candidate]
        assert (there.seconds, there.outcome) == (trial.seconds, "ok" if trial.seconds else "run-error")
        assert len(log.sessions()) == 1 and not log.best()  # no call runs by it
    # The next run takes them for measured.
    assert make_plan(TOPK, cpu(), 8, Log(tmp_path / "back", cpu().arch, TOPK.operator), 1).paid == 3


def line(candidate: Any = None) -> list[Any]:
    """A line as `export` writes it, for the fallback of a product on a GPU."""
    candidate = candidate or spaces.fallback(PRODUCT, SM90)
    notes = {
        interchange.PROBLEM: PRODUCT.key, interchange.ARCH: "sm_90a", interchange.VERSION: str(candidate.version),
        "tvm_sparse.template": candidate.template,
    }  # fmt: skip
    instructions: list[Any] = [["GetSBlock", [], ["root", "main"], ["b0"]]]
    instructions += [["Annotate", ["b0", f'"{text}"'], [name], []] for name, text in notes.items()]
    decisions = []
    for number, (name, value) in enumerate(candidate.decisions):
        decisions.append([len(instructions), 1])
        instructions.append(["SampleCategorical", [], [[0, value], [0.5, 0.5]], [f"v{number}"]])
        instructions.append(["Annotate", ["b0", f"v{number}"], [f"tvm_sparse.{name}"], []])
    return [0, [[instructions, decisions], [1e-6], {"kind": "cuda", "arch": "sm_90a"}, []]]


def imported(folder: Path, *lines: Any) -> tuple[int, int]:
    (folder / RECORDS).write_text("".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines))
    return interchange.import_(folder, folder / "logs")


def test_a_line_as_it_is_written_is_imported(tmp_path: Path) -> None:
    """The changes below are refused for what they change."""
    right = line()
    right[1][0][0].append(["EnterPostproc", [], [], []])
    assert imported(tmp_path, right, "\n", line()) == (1, 1)


def replace(place: tuple[Any, ...], value: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for step in place[:-1]:
            content = content[step]
        content[place[-1]] = value

    return change


def append(instruction: Any) -> Callable[[Any], None]:
    return lambda content: content[1][0][0].append(instruction)


INSTRUCTIONS = (1, 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (append(["Unroll", ["l1"], [], []]), "instruction 'Unroll' is none of those"),
        (
            append(["Annotate", ["b0", '"define void @f()"'], ["pragma_import_llvm"], []]),
            "'pragma_import_llvm' is none",
        ),
        (append(["Annotate", ["b1", '"x"'], ["tvm_sparse.x"], []]), "Annotate of main's root"),
        (append(["Annotate", ["b0", "v9"], ["tvm_sparse.x"], []]), "a text or what was drawn, got 'v9'"),
        (append(["Annotate", ["b0", '"7"'], ["tvm_sparse.x"], []]), "a note that is to be a number is none"),
        (append(["GetSBlock", [], ["root", "main"], ["b1"]]), "one block"),
        (append(["SampleCategorical", [], [[1.5], [1]], ["v"]]), "whole numbers"),
        (append(["SampleCategorical", [], [[1], [1]], ["v"]]), "a decision for each drawing"),
        (append(7), "as an instruction"),
        (append([["Annotate"], [], [], []]), "lists"),
        (replace((*INSTRUCTIONS, 0, 2), ["update", "main"]), "GetSBlock of main's root"),
        (replace((*INSTRUCTIONS, 1, 1, 1), '"softmax_topk/batch=4"'), "softmax_topk"),
        (replace((*INSTRUCTIONS, 2, 1, 1), '"sm_91"'), "sm_91"),
        (replace((*INSTRUCTIONS, 3, 1, 1), '"77"'), "not 77"),
        (replace((*INSTRUCTIONS, 3, 1, 1), '"x"'), "a note that is to be a number is none"),
        (replace((*INSTRUCTIONS, 4, 1, 1), '"none"'), "there is no template none"),
        (replace((*INSTRUCTIONS, 5, 2, 0), [0, 7]), "is not a point of the space"),
        (replace((1, 0, 1, 0, 1), 9), "a decision for each drawing, of its values"),
        (replace((1, 0, 1, 0), ["5", 0]), "pairs of numbers"),
        (replace((1, 1), [float("nan")]), "NaN is not JSON"),
        (replace((1, 1), [0.0]), "finite and positive"),
        (replace((1, 1), None), "a list of times"),
        (replace((1, 2, "kind"), "llvm"), "a target of kind cuda"),
        (replace((1, 2, "arch"), "sm_80"), "a target for sm_90a"),
        (replace((1, 0), []), r"\[instructions, decisions\]"),
        (replace((1,), 0), r"\[workload, "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_line_that_does_anything_else_is_refused_with_its_number(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    changed = line()
    change(changed)
    with pytest.raises(Refused, match=f"^nothing was imported:\n.*{RECORDS}:2: .*{message}"):
        imported(tmp_path, line(), changed)
    assert not (tmp_path / "logs").exists()


NO_LINES = ("{", "[" * 100_000, "[0, [[[], []], [1e-6], {}, []]]", "\xff", "1" * 5000, "[" + "0," * 600_000)


@pytest.mark.parametrize("text", NO_LINES, ids=lambda text: text[:9])
def test_what_is_no_line_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(Refused, match=f"{RECORDS}:1: "):
        imported(tmp_path, text)
    with pytest.raises(Refused, match="No such file"):
        interchange.import_(tmp_path / "gone", tmp_path / "logs")
