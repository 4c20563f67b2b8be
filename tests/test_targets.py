"""Targets: the least compute capability, cards, and what is done for a GPU that is not here."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from cases import MACHINES, REALISTIC
from typer.testing import CliRunner

import tvm_sparse
from tvm_sparse.artifacts import manifest
from tvm_sparse.artifacts.compile import CompileError
from tvm_sparse.cli import app
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import BelowFloor, Machine, UnknownArch, resolve
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Best, Log
from tvm_sparse.runtime import arrays, calls
from tvm_sparse.shipping import export

KEY = "softmax_topk/batch=2,vocab=64,k=3"
T4 = Machine("cuda", "sm_75", "Tesla T4", cores=40)
SENTENCE = "compute capability 7.5.* is below 8.0 \\(sm_80\\)"


def invoked(*words: str) -> Any:
    return CliRunner().invoke(app.app, list(words))


@pytest.mark.parametrize("target", ["sm_75", "sm_70", "sm_61", "compute_75", "sm_75:multiprocessors=40"])
def test_targets_below_the_floor_are_refused_everywhere(target: str, tmp_path: Path) -> None:
    for call in (
        resolve,
        lambda one: tvm_sparse.explain(KEY, target=one),
        lambda one: tvm_sparse.warmup(KEY, target=one),
    ):
        with pytest.raises(BelowFloor, match="is below 8.0"):
            call(target)
    for words in (
        ("export", "-o", str(tmp_path / "out")),
        ("tune", KEY),
        ("tune", KEY, "--dry-run"),
        ("bench", KEY),
        ("explain", KEY),
        ("space", KEY),
    ):
        done = invoked(*words, "--target", target)
        assert done.exit_code == 2 and "is below 8.0" in done.output and "Traceback" not in done.output, words
        assert len(done.output.strip().splitlines()) == 1


def test_a_gpu_below_the_floor_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: (T4,))
    assert resolve("auto") == machine.cpu() and machine.gpu() is None
    with pytest.raises(BelowFloor, match=f"target: got 'cuda': {SENTENCE}"):
        resolve("cuda")
    on_gpu = dataclasses.replace(arrays.facts("logits", __import__("numpy").zeros((2, 4), "float32")), device="cuda")
    with pytest.raises(ValueError, match=f"logits: lies on a GPU, but {SENTENCE}"):
        calls.machine_of("logits", on_gpu)
    assert "of the Tesla T4 is below 8.0" in " ".join(invoked("doctor").output.split())
    a100 = Machine("cuda", "sm_80", "NVIDIA A100-SXM4-80GB", cores=108)
    monkeypatch.setattr(machine, "gpus", lambda: (T4, a100))
    assert machine.gpu() == resolve("auto") == resolve("cuda") == resolve("a100") == resolve("sm_80") == a100


def test_cards_are_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ())
    for word, card in machine.CARDS.items():
        found = resolve(word)
        assert (found.arch, found.cores, found.l2_bytes) == (card.arch, card.multiprocessors, card.l2_bytes)
        assert resolve(word.upper()) == found and resolve(machine.target(found)).cores == found.cores
        assert machine.below_floor(found) is None
    assert resolve("sm_89:multiprocessors=128").cores == resolve("rtx4090").cores == 128
    assert resolve("sm_89").cores == resolve("l40s").cores == 142
    assert machine.target(resolve("l40s")) == "sm_89" and machine.target(resolve("l4")) == "sm_89:multiprocessors=58"
    h100 = Machine("cuda", "sm_90a", "NVIDIA H100 80GB HBM3", cores=132)
    monkeypatch.setattr(machine, "gpus", lambda: (h100,))
    assert resolve("h100") == h100 and resolve("h200").name == "H200"
    for wrong in ("sm_89:cores=3", "sm_89:multiprocessors=", "sm_89:multiprocessors=0", "sm_89:multiprocessors=-1"):
        with pytest.raises(UnknownArch, match="expected sm_89:multiprocessors=NUMBER"):
            resolve(wrong)
    with pytest.raises(UnknownArch, match="nearest valid names: .*rtx4090"):
        resolve("rtx409")


@pytest.mark.parametrize("word", machine.CARDS)
def test_no_space_has_a_larger_cluster_than_the_card_launches(word: str) -> None:
    where = resolve(word)
    for problem in REALISTIC:
        for name, table in spaces.applicable(problem, where)[0].items():
            assert max(table.get("cluster", (1,))) <= where.most_cluster, f"{name} for {problem}"
        chosen = spaces.fallback(problem, where)
        assert chosen.values.get("cluster", 1) <= where.most_cluster
    assert (
        MACHINES["cuda"].most_cluster == 16
        and resolve("rtx5090").most_cluster == 8
        and resolve("a100").clusters((1, 2)) == (1,)
    )


@pytest.mark.parametrize("target", ["sm_80", "rtx4090", "sm_90a", "rtx5090"])
def test_a_plan_needs_no_gpu(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ())
    done = invoked("tune", KEY, "--target", target, "--dry-run", "--logs", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert resolve(target).arch in done.output and not list(tmp_path.iterdir())
    done = invoked("tune", KEY, "--target", target, "--logs", str(tmp_path))
    assert done.exit_code == 2 and "is not here" in done.output


def test_export_reports_what_does_not_compile(tmp_path: Path) -> None:
    """A record that no longer compiles is left out, and the others are exported; --strict fails, or nothing at all."""
    where, logs = machine.cpu(), tmp_path / "logs"
    version = spaces.find("row_scan").version

    def record(vocab: int, chunk: int) -> None:
        candidate = Candidate("row_scan", version, (("chunk", chunk), ("simd", 8)))
        key = parse(f"softmax_topk/batch=3,vocab={vocab},k=4").key
        Log(logs, where.arch, "softmax_topk").append_best(
            Best(key, where.arch, candidate, 1e-6, candidate, 2e-6, 3, "s")
        )

    record(38, 7)
    words = ("export", "--target", "cpu", "--logs", str(logs), "-o", str(tmp_path / "out"))
    done = invoked(*words)
    assert done.exit_code == 1 and "none of 1 kernels compiles" in done.output and not (tmp_path / "out").exists()
    record(39, 64)
    done = invoked(*words)
    assert done.exit_code == 0, done.output
    assert "Left out for" in done.output and "chunk=7 is not" in re.sub(r"\s+", " ", done.output)
    assert [parse(entry.problem).vocab for entry in manifest.read(tmp_path / "out")] == [39]
    assert invoked(*words, "--strict").exit_code == 1


def test_borrowed_decisions_that_do_not_compile_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, problem = machine.cpu(), parse("softmax_topk/batch=3,vocab=38,k=4")
    wrong = Candidate("row_scan", spaces.find("row_scan").version, (("chunk", 7), ("simd", 8)))
    left: list[export.LeftOut] = []
    job = (problem, wrong, "borrowed", {})
    [entry] = export.built([job], where, tmp_path, 1, lambda entry: None, left.append)
    assert entry.chosen == "fallback" and entry.candidate == spaces.fallback(problem, where) == left[0].instead
    with pytest.raises(CompileError, match="none of 1 kernels"):
        export.built([(problem, wrong, "exact", {})], where, tmp_path, 1, lambda entry: None, left.append)


def test_figures_of_other_problems_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tvm_sparse.cli.export import print_entries

    (tmp_path / "a.so").write_bytes(b"x")
    candidate = Candidate("row_scan", 1, ())
    figures = {"seconds": 1e-6, "fallback_seconds": 2e-6, "arch": "sm_90a", "machine": "H200", "date": ""}
    borrowed = manifest.Entry(KEY, "sm_89", "cuda", candidate, "borrowed", "a.so", "0" * 64, (), figures, None)
    own = dataclasses.replace(borrowed, arch="sm_90a", chosen="exact", symbol="")
    print_entries([borrowed], tmp_path)
    said = capsys.readouterr().out
    assert "borrowed: sm_90a" in said and "1.00*" in said and "* measured for" in said
    print_entries([own], tmp_path)
    assert "*" not in capsys.readouterr().out


def test_the_page_lists_every_card() -> None:
    page = (Path(__file__).parent.parent / "docs" / "your-gpu.md").read_text()
    for word, card in machine.CARDS.items():
        assert f"| `{word}` | {card.name} | `{card.arch}` | {card.multiprocessors} |" in page
    assert page.count("\n| `") == len(machine.CARDS)
