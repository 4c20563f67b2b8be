"""scripts/ about output and recurrent layers: each runs, on the CPU and at small shapes; what it says of recall is so.

In processes of their own. What they are for is a GPU.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forking
import numpy as np
import pytest

from tvm_sparse.formats import wta

SCRIPTS = Path(__file__).parent.parent / "scripts"
HASH = ("--k", "4", "--units", "2", "--bands", "30")
STEP = (*HASH, "--vocab", "700", "--hidden", "40", "--candidates", "200", "--dtype", "float32", "--target", "cpu")


class Scripts:
    """Runs scripts as `python FILE WORDS...` does, in forks of one process (`forking`)."""

    def __init__(self, folder: Path) -> None:
        self._said, self._complained = folder / "stdout", folder / "stderr"
        environment = {
            **os.environ,
            "COLUMNS": "200",
            "TVM_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "XDG_DATA_HOME": str(folder / "data"),
        }
        command = [sys.executable, forking.__file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def run(self, script: str, *words: str | Path) -> str:
        """What it prints."""
        argv = [str(SCRIPTS / script), *map(str, words)]
        request = {"argv": argv, "stdout": str(self._said), "stderr": str(self._complained)}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = self.process.stdout.readline()
        said, complaints = self._said.read_text(), self._complained.read_text()
        assert code == "0\n", f"{argv}\n{code}\n{said}\n{complaints}"
        assert "has no time" not in complaints, complaints
        return said


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    pytest.importorskip("torch")
    started = Scripts(tmp_path_factory.mktemp("scripts"))
    yield started
    started.process.kill()
    started.process.communicate()


def lines_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV that says where and when it was measured."""
    text = path.read_text().splitlines()
    assert {"# device", "# date", "# torch"} <= {line.partition(":")[0] for line in text}
    return list(csv.DictReader(line for line in text if not line.startswith("# ")))


@pytest.mark.timeout(280)
def test_the_exact_head_beside_its_peers(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "head.csv"
    shapes = ("--shape", "3,500,40,5,float32", "--shape", "1,301,33,7,float16")
    assert "head / product" in scripts.run("head_bench.py", "--target", "cpu", *shapes, "--csv", out)
    lines = lines_of(out)
    assert len(lines) == 10 and all(float(line["microseconds"]) > 0 for line in lines)
    assert {line["implementation"] for line in lines} >= {"head_topk", "head_topk, no promise", "product"}


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_lists_of_candidates_a_row(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "grid.csv"
    shape = ("--target", "cpu", "--size", "40,700", "--m", "12", "--m", "90", "--batch", "3", "--dtype", "float32")
    assert "torch / ours" in scripts.run("specvocab_grid.py", *shape, "--csv", out)
    lines = lines_of(out)
    assert len(lines) == 10 and all(float(line["microseconds"]) > 0 for line in lines)


@pytest.mark.timeout(280)
def test_what_is_added_to_a_product(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "added.csv"
    shape = ("--target", "cpu", "--batch", "1", "--batch", "3", "--vocab", "500", "--hidden", "40", "--k", "5")
    assert "what is added to it" in scripts.run("after_product.py", *shape, "--dtype", "float32", "--csv", out)
    lines = lines_of(out)
    named = ["product", "softmax_topk", "torch softmax + topk", "head_topk instead"]
    assert [line["behind_product"] for line in lines] == named * 2
    assert all(float(line["microseconds"]) > 0 for line in lines)


@pytest.mark.timeout(280)
def test_what_batch_invariance_costs(scripts: Scripts, tmp_path: Path) -> None:
    out, key = tmp_path / "invariance.csv", "softmax_topk/batch=1,vocab=500,k=8"
    printed = scripts.run("batch_invariance.py", key, "--target", "cpu", "--batch", "1", "--batch", "3", "--csv", out)
    assert "one kernel for all batches" in printed
    lines = lines_of(out)
    assert [line["batch"] for line in lines] == ["1", "3"]
    assert len({line["invariant_kernel"] for line in lines}) == 1
    assert all(float(line["microseconds"]) > 0 and float(line["ratio"]) > 0 for line in lines)


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_steps_of_table_4(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "steps.csv"
    printed = scripts.run("shi_xu_knight_table4.py", *STEP, "--beam", "3", "--csv", out)
    assert "LSH head" in printed and "candidate list" in printed
    lines = {line["step"]: line for line in lines_of(out)}
    assert 180 <= int(lines["LSH head"]["candidates"]) <= 200  # as many as were asked for, or a few less
    assert all(float(line["microseconds"]) > 0 for line in lines.values())


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_a_step_by_lsh_beside_its_peers(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "lsh.csv"
    shapes = ("--target", "cpu", "--shape", "3,500,40,150,float32", "--shape", "2,300,33,90,float16")
    printed = scripts.run("lsh_bench.py", *HASH, *shapes, "--n", "5", "--csv", out)
    assert "torch / LSH" in printed
    lines = lines_of(out)
    assert len(lines) == 14 and all(float(line["microseconds"]) > 0 for line in lines)
    assert {line["path"] for line in lines if line["implementation"] == "LshHead, auto"} <= {"lsh", "exact"}


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_beams_of_table_8(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "beams.csv"
    scripts.run("shi_xu_knight_table8.py", *STEP, "--beam", "2", "--beam", "5", "--n", "4", "--csv", out)
    lines = lines_of(out)
    assert [line["beam"] for line in lines] == ["2"] * 6 + ["5"] * 6
    assert int(lines[0]["candidates"]) < int(lines[-1]["candidates"])  # a larger beam has a longer list


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_parts_of_table_1(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "parts.csv"
    scripts.run("shi_xu_knight_table1.py", *STEP, "--beam", "2", "--csv", out)
    lines = lines_of(out)
    assert len(lines) == 21 and {line["output"] for line in lines} == {
        "torch product + softmax + topk",
        "exact head",
        "LSH head",
    }


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output layer and states that are near to some words, as `examples/lsh_decoding.py --save` writes them."""
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((600, 32), dtype=np.float32)
    near = embedding[rng.integers(100, size=(640, 3))].sum(axis=1)
    path = tmp_path_factory.mktemp("states") / "states.npz"
    np.savez(path, embedding=embedding, hidden=near + rng.standard_normal(near.shape, dtype=np.float32))
    return path


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_speed_against_recall(scripts: Scripts, states: Path, tmp_path: Path) -> None:
    out = tmp_path / "points.csv"
    options = ("--target", "cpu", "--dtype", "float32", "--setting", "3,2,40", "--rows", "24", "--samples", "64")
    scripts.run("shi_xu_knight_figure6.py", states, *options, "--csv", out)
    lines = lines_of(out)
    assert {line["implementation"] for line in lines} == {
        "exact head",
        "torch product + softmax + topk",
        "TOP",
        "LSH 3, 2, 40",
    }
    assert all(float(line["microseconds"]) > 0 and 0 < float(line["share"]) <= 1 for line in lines)


@pytest.mark.parametrize(("beam", "variant"), [(1, "plain"), (4, "centred small")])
def test_recall_is_what_the_hash_gives(scripts: Scripts, states: Path, tmp_path: Path, beam: int, variant: str) -> None:
    """Shares and recalls of the CSV, recomputed from the definition: equations 3, 9 and 10."""
    out = tmp_path / "recall.csv"
    options = ("--setting", "3,2,40", "--rows", "24", "--samples", "64", "--beam", str(beam), "--variant", variant)
    assert "recall@12 of 0.99: " in scripts.run("lsh_recall.py", states, *options, "--csv", out)
    with np.load(states) as saved:
        embedding, hidden = saved["embedding"], saved["hidden"].reshape(-1, 64, 32)[:2, :12].reshape(24, 32)
    permutations = wta.permutations(32, 3, 2, 40, 0)
    words = embedding - embedding.mean(axis=0) if variant != "plain" else embedding
    equal = wta.hash_rows(hidden, permutations)[:, None] == wta.hash_rows(words, permutations)
    if variant != "plain":  # buckets of more than four times the words of an even one do not count
        equal &= equal.sum(axis=1, keepdims=True) <= 4 * len(embedding) / 9
    hits = equal.sum(axis=2)
    increments = hits.sum() / hits.size
    hits = hits.reshape(24 // beam, beam, -1).max(axis=1).repeat(beam, axis=0)
    best = np.argsort(-(hidden @ embedding.T), axis=1)[:, :12]
    lines = [line for line in lines_of(out) if line["frequent"] == "0"]
    assert [float(line["goal"]) for line in lines] == [0.9, 0.95, 0.99, 0.999]
    for line in lines:
        chosen = hits >= int(line["threshold"])
        found = np.take_along_axis(chosen, best, axis=1)
        assert found.mean() >= float(line["goal"])
        np.testing.assert_allclose(
            [float(line[name]) for name in ("share", "recall_1", "recall_12")],
            [chosen.mean(), found[:, 0].mean(), found.mean()],
            atol=6e-5,
        )
        np.testing.assert_allclose(float(line["counted"]), increments, atol=6e-3)


def bert(folder: Path, hidden: int = 24, inner: int = 48) -> None:
    """A model of one layer with random weights, in the files of a MiniLM: letters are its words."""
    rng = np.random.default_rng(0)
    pieces = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    words = ["[CLS]", "[SEP]", "[UNK]", *pieces, *(f"##{piece}" for piece in pieces)]
    shapes = {f"embeddings.{name}_embeddings.weight": (count, hidden) for name, count in
              (("word", len(words)), ("position", 80), ("token_type", 2))}  # fmt: skip
    layer = "encoder.layer.0"
    linear = {f"{layer}.attention.self.{name}": (hidden, hidden) for name in ("query", "key", "value")}
    linear |= {f"{layer}.attention.output.dense": (hidden, hidden), f"{layer}.intermediate.dense": (inner, hidden),
               f"{layer}.output.dense": (hidden, inner)}  # fmt: skip
    norms = ("embeddings.LayerNorm", f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm")
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    header, content = {}, b""
    for name, shape in shapes.items():
        array = rng.standard_normal(shape, dtype=np.float32) / 5
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(content), len(content) + array.nbytes]}
        content += array.tobytes()
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")


def test_recall_of_a_models_own_states(scripts: Scripts, tmp_path: Path) -> None:
    bert(tmp_path / "model")
    out = tmp_path / "recall.csv"
    options = ("--setting", "2,2,20", "--rows", "24", "--samples", "128")
    saved, again = tmp_path / "states.npz", tmp_path / "again.csv"
    printed = scripts.run("lsh_recall.py", tmp_path / "model", *options, "--csv", out, "--save", saved)
    assert "139 words, 24 columns" in printed
    lines = lines_of(out)
    assert all(float(line["recall_12"]) >= float(line["goal"]) for line in lines)
    # The file stands for the model; float16 changes the order of a few columns.
    scripts.run("lsh_recall.py", saved, *options, "--csv", again)
    for one, other in zip(lines, lines_of(again), strict=True):
        assert abs(float(one["share"]) - float(other["share"])) < 0.1


@pytest.mark.timeout(280)
def test_points_of_a_space_side_by_side(scripts: Scripts) -> None:
    problem = "head_topk/batch=2,vocab=97,hidden=24,k=3"
    words = ("--template", "head_rows", "--fix", "simd=8,16", "--points", "2", "--target", "cpu")
    out = scripts.run("probes/explore.py", problem, *words)
    assert "(default)" in out and len([line for line in out.splitlines() if "head_rows@" in line]) == 3
    assert not any("simd=32" in line for line in out.splitlines())


# ---- recurrent layers ----------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_recurrent_layers_beside_their_peers(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "rnn.csv"
    cases = ("--case", "40,3,9,0.2", "--case", "33,2,5,0.3,lstm", "--case", "20,18,4,0.3,gru")
    printed = scripts.run("rnn_bench.py", "--target", "cpu", *cases, "--csv", out)
    assert "torch module" in printed
    lines = lines_of(out)
    assert len(lines) == 30 and all(float(line["microseconds"]) > 0 for line in lines)
    steps = {line["implementation"]: float(line["microseconds_a_step"]) for line in lines if line["cell"] == "gru"}
    assert set(steps) == {"sparse layer", "sparse layer + input product", "layer of blocks", "torch module",
                          "dense step loop", "sparse step loop"}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_training_beside_its_peers(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "training.csv"
    cases = ("--case", "24,3,7,0.2", "--case", "17,18,4,0.3,lstm")
    printed = scripts.run("rnn_training.py", "--target", "cpu", *cases, "--dtype", "float32", "--csv", out)
    assert "torch / ours, both" in printed
    lines = lines_of(out)
    assert len(lines) == 16 and all(float(line["microseconds"]) > 0 for line in lines)
    assert all(float(line["error"]) < 1e-4 for line in lines if line["passes"] == "both")


def test_both_ways_of_products_of_entries(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "entries.csv"
    shapes = ("--shape", "3,48,32,0.7", "--shape", "9,48,32,0.7")
    printed = scripts.run("entry_products.py", "--target", "cpu", *shapes, "--dtype", "float32", "--csv", out)
    assert "regret" in printed and "worst" in printed
    for line in lines_of(out):
        kernel, dense = float(line["kernel"]), float(line["dense"])
        assert line["way"] == "kernel" and float(line["regret"]) == pytest.approx(kernel / min(kernel, dense), rel=0.1)


def test_block_sparse_products_over_a_grid(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "grid.csv"
    grid = ("--rows", "5", "--rows", "9", "--block", "8", "--sparsity", "0.8", "--weight", "48,64")
    printed = scripts.run("block_grid.py", "--target", "cpu", *grid, "--dtype", "float32", "--csv", out)
    assert "2 of 2 problems" in printed and "the fastest from" in printed
    for line in lines_of(out):
        assert float(line["over_best"]) == pytest.approx(float(line["ours"]) / float(line["dense"]), rel=0.02)
        assert line["triton"] == line["setting"] == ""


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_cells_and_projected_states(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "cells.csv"
    given = ("--case", "40,3,4,0.2", "--projection", "24,8,3", "--steps", "5", "--dtype", "float32")
    scripts.run("rnn_cells.py", "--target", "cpu", *given, "--csv", out)
    names = [line["implementation"] for line in lines_of(out)]
    assert names[:4] == ["gru", "gru_reset_before", "relu", "clipped_relu"] and len(names) == 7
    assert all(float(line["microseconds"]) > 0 and not line["note"] for line in lines_of(out))


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_ways_of_recurrent_stacks_over_a_grid(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "grid.csv"
    given = ("--cell", "tanh", "--hidden", "128", "--density", "0.1", "--density", "1", "--batch", "4", "--batch", "18")
    printed = scripts.run("rnn_grid.py", "--target", "cpu", *given, "--steps", "3", "--workers", "1", "--csv", out)
    assert '("rnn", STEPS): {' in printed and "128: (?, " in printed
    lines = lines_of(out)
    assert len(lines) == 4 and {line["form"] for line in lines} == {"entries", "blocks"}
    assert all(float(line[name]) > 0 for line in lines for name in ("sparse", "dense", "module", "regret"))


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_sweeps_of_zhu_and_pool(scripts: Scripts, tmp_path: Path) -> None:
    scripts.run(
        "zhu_pool_figures.py", "--target", "cpu", "--figure", "2d", "--shrink", "64", "--output", tmp_path / "f"
    )
    lines = lines_of(tmp_path / "f.csv")
    assert {line["figure"] for line in lines} == {"2d"} and all(float(line["microseconds"]) > 0 for line in lines)
    assert {line["steps"] for line in lines} == {"2", "4", "8", "16"}  # the first two shrink to the same


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_layers_of_zhu_and_pool(scripts: Scripts, tmp_path: Path) -> None:
    out = tmp_path / "layers.csv"
    printed = scripts.run("zhu_pool_tables23.py", "--target", "cpu", "--table", "2", "--shrink", "256", "--csv", out)
    assert "Table 2, lstm, batch 4" in printed and "7.39" in printed  # 2.44 / 0.33 is the paper's of 256 at 12.5 %
    lines = lines_of(out)
    assert {line["density"] for line in lines} == {"1", "0.125", "0.0625", "0.0417", "0.047"}


@pytest.mark.timeout(280)
def test_layouts_of_table_1(scripts: Scripts, tmp_path: Path) -> None:
    """Without a GPU: the penalties that are expected, which the better layouts lower."""
    out = tmp_path / "ablation.csv"
    printed = scripts.run("zhu_pool_table1.py", "--target", "cpu", "--case", "192,4,3,0.2", "--csv", out)
    assert "no GPU here" in printed
    penalty = {line["configuration"]: float(line["expected_penalty"]) for line in lines_of(out)}
    assert penalty["naive"] > penalty["wide loads"] > penalty["bank-aware layout, Algorithm 1"]
    assert penalty["bank-aware layout, Algorithm 1"] > penalty["bank-aware layout, by residues"]
    assert penalty["bank-aware layout, by residues"] == penalty["Lamport exchange"]


NCU = """==PROF== Connected to process 1
device: a GPU
"ID","Kernel Name","l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",\
"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
"","","",""
"0","main_kernel","1,300","2,300"
"1","main_kernel","0","500"
"""


def test_counters_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    pytest.importorskip("torch")
    from zhu_pool_table1 import penalties

    assert penalties(NCU, ["one", "two"]) == ({"one": 1.3, "two": 0.0}, "")
    found, reason = penalties(NCU, ["one"])
    assert not found and "ncu counted 2 launches in the place of 1" in reason
    assert "ERR_NVGPUCTRPERM" in penalties("==ERROR== ERR_NVGPUCTRPERM", ["one"])[1]


def test_timelines_know_the_phases_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    pytest.importorskip("torch")
    from timeline import PHASES

    for modules in PHASES.values():
        for place, names in modules.items():
            assert set(names) <= vars(importlib.import_module(place)).keys(), place


# What compute-sanitizer is asked, and what it says at its end.
SANITIZER = """#!{python}
import subprocess, sys
at = sys.argv.index("--log-file")
status = subprocess.run(sys.argv[at + 2 :]).returncode
with open(sys.argv[at + 1], "a") as log:
    print("========= Invalid __global__ read of size 4", "========= ERROR SUMMARY: 3 errors", sep="\\n", file=log)
    print("========= ERROR SUMMARY: 2 errors were not printed. Use --print-limit option to adjust", file=log)
sys.exit(99)
"""
SANITIZED = """
import os, time
from pathlib import Path
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(8))
def test_some(number):
    (Path(__file__).parent / str(os.getpid())).touch()
    time.sleep(0.1)
    assert number != 1
    largest = os.environ.get("TVM_SPARSE_TEST_CLUSTER")
    (Path(__file__).parent / f"largest cluster {largest}").touch()
    if number == 2:
        pytest.skip("has nothing to do")
    if number == 6:
        with open(os.environ["TVM_SPARSE_SANITIZE_SAID"], "a") as log:
            print("========= Warning: Race reported at main_kernel_1+0x3a0", file=log)

def test_without_a_gpu():
    raise AssertionError
"""


@pytest.mark.thorough
def test_sanitized_tests_run_in_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from sanitize import counts, device_tier, run

    program, tests = tmp_path / "compute-sanitizer", tmp_path / "tests" / "test_some.py"
    tests.parent.mkdir()
    program.write_text(SANITIZER.format(python=sys.executable))
    program.chmod(0o755)
    tests.write_text(SANITIZED)
    tests.with_name("test_others.py").write_text("import a_package_that_is_not_here")
    assert device_tier(tests.parent) == [str(tests)]
    line = run(
        str(program), "memcheck", [str(tests)], workers=2, selection="not 3", deselected=["test_some.py::test_some[4]"]
    )
    assert [line[name] for name in ("tests", "passed", "failed", "skipped", "errors")] == [6, 4, 1, 1, 3 * 3]
    # Two processes, and one in the place of that whose test failed.
    assert line["messages"] == (
        "Invalid __global__ read of size # (3); Warning: Race reported at main_kernel_#+# (1 in test_some[6])"
    )
    assert line["ended"] == "status 99"
    assert len([path for path in tests.parent.iterdir() if path.name.isdigit()]) >= 2
    # Of synccheck alone, clusters of 16 are left out.
    run(str(program), "synccheck", [str(tests)], selection="5")
    told = {path.name for path in tests.parent.iterdir() if path.name.startswith("largest")}
    assert told == {"largest cluster None", "largest cluster 8"}
    # With no tool, no sanitizer is asked.
    line = run("absent", "none", [str(tests)], selection="5")
    assert (line["passed"], line["ended"]) == (1, "whole")
    # Whose time is up at once begins no test; what was done counts where the run is killed.
    said = tmp_path / "said"
    line = run(str(program), "memcheck", [str(tests)], workers=1, minutes=1e-6, keep=said)
    assert line["ended"] == "time up" and line["tests"] == line["passed"] == 0 and line["left"] == 8
    # What was left goes on; what has ended is not begun again.
    for selection, passed, failed, errors in (("3 or 4", 2, 0, 6), ("1 or 3 or 4", 2, 1, 12)):
        line = run(str(program), "memcheck", [str(tests)], selection=selection, keep=said, resume=True)
        assert (line["passed"], line["failed"], line["left"], line["errors"]) == (passed, failed, 0, errors)
    # A test that ends its process has failed, what the sanitizer said is of it, and another process goes on.
    tests.write_text(SANITIZED.replace("    time.sleep(0.1)", "    if number == 5: os.abort()"))
    line = run(str(program), "memcheck", [str(tests)], selection="5 or 6 or 7")
    assert (line["tests"], line["passed"], line["failed"]) == (3, 2, 1)
    assert line["messages"].startswith("Invalid __global__ read of size # (2 in test_some[5])")
    # A run that is told to end says what it was in.
    tests.write_text(SANITIZED.replace("    time.sleep(0.1)", "    time.sleep(3600 if number == 5 else 0)"))
    before = set(tests.parent.iterdir())
    line = run(
        str(program), "racecheck", [str(tests)], selection="5", stop=lambda: set(tests.parent.iterdir()) != before
    )
    assert (line["ended"], line["tests"], line["messages"]) == ("stopped", 0, "in the midst of test_some[5]")
    report = tmp_path / "report"
    outcomes = [("a", "passed"), ("b", "failed"), ("b", "passed"), ("c", "left"), ("a", "failed")]
    report.write_text("".join(json.dumps([*one, 0.1]) + "\n" for one in outcomes))
    assert counts(report) == {"tests": 2, "passed": 0, "failed": 2, "skipped": 0, "left": 1}
