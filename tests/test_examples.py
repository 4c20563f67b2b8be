"""examples/: each runs as its users run it, on a machine without a GPU.

In processes of their own: what they register and load stays there.
"""

from __future__ import annotations

import csv
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PLUGIN = EXAMPLES / "row_norm"
SHAPE = ("row_norm", "rows=5", "width=96")


def spawn(folder: Path, *command: str | Path, code: int = 0) -> str:
    """What a command prints, with a cache and records of its own in `folder`; on stderr where it is to fail."""
    scripts = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "COLUMNS": "200",
        # On a machine with more to do than cores, the threads of a kernel wait for each other for long.
        "TVM_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
    }
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stderr if code else done.stdout


def cli(folder: Path, *words: str | Path) -> str:
    return spawn(folder, sys.executable, "-m", "tvm_sparse", "--plugin", PLUGIN, *words)


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_shapes_are_tuned_exported_and_served(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    printed = spawn(tmp_path, "bash", EXAMPLES / "tune_and_export.sh", tmp_path / "out", "2")
    assert "2 libraries of" in printed and "exact: tuned for this very problem" in printed
    assert f"library: {tmp_path / 'out' / 'kernels'}" in printed and "log-probabilities" in printed


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_every_command_takes_the_operator_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path_without_torch: str
) -> None:
    records, kernels = tmp_path / "records", tmp_path / "kernels"
    here = ("--target", "cpu")
    compared = json.loads(cli(tmp_path, "bench", *SHAPE, *here, "--json"))["timings"]
    assert {"tvm_sparse", "NumPy"} <= {t["name"] for t in compared if t["correct"] and t["seconds"]}
    # The others start sooner without PyTorch, and the one peer that is left is the fastest.
    monkeypatch.setenv("PYTHONPATH", path_without_torch)
    listed = cli(tmp_path, "list")
    assert "norm_rows" in listed and "norm_block" in listed and "softmax_topk" in listed
    shapes = tmp_path / "shapes.toml"
    shapes.write_text("[[row_norm]]\nrows = 5\nwidth = 96\n")
    alone = (sys.executable, "-m", "tvm_sparse")
    few = ("--trials", "3", "--builders", "1", "--logs", records, "--plugin", PLUGIN)
    tuned = spawn(tmp_path, *alone, "tune", "--shapes", shapes, *here, *few)
    assert "norm_rows" in tuned and f"Recorded in {records}" in tuned
    # Records of an operator that is not there are no obstacle to the others.
    exported = ("export", *here, "--logs", records, "-o", tmp_path / "none")
    assert "no record for" in spawn(tmp_path, *alone, *exported, code=1)
    assert "operator: got 'row_norm'" in spawn(tmp_path, *alone, "explain", *SHAPE, code=2)
    assert "1 library" in cli(tmp_path, "export", *here, "--logs", records, "-o", kernels, "--builders", "1")
    assert json.loads((kernels / "manifest.json").read_text())["kernels"][0]["problem"].startswith("row_norm/")
    assert "T.parallel" in cli(tmp_path, "space", *SHAPE, *here, "--sample", "1", "--emit", "tir")
    assert "norm_block@1" in cli(tmp_path, "explain", *SHAPE, "--target", "sm_90a")

    called = """
import sys
import numpy as np
import tvm_sparse
from tvm_sparse.core import registry

registry.add_plugin(sys.argv[1])
assert tvm_sparse.load(sys.argv[2]) == 1
x = np.random.default_rng(0).standard_normal((5, 96), dtype=np.float32)
y = tvm_sparse.row_norm(x)
assert np.allclose(y, x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6), rtol=1e-5)
explanation = tvm_sparse.explain("row_norm", rows=5, width=96, target="cpu")
assert explanation.how == "exact" and explanation.library.startswith(sys.argv[2]), explanation
assert tvm_sparse.row_norm(x[:0]).shape == (0, 96) and tvm_sparse.row_norm(x, out=y) is y
for bad, message in ((lambda: tvm_sparse.row_norm(x, eps=-1), "eps"), (lambda: tvm_sparse.row_norm(x[0]), "x: ")):
    try:
        bad()
    except ValueError as error:
        assert message in str(error)
    else:
        raise AssertionError(message)
"""
    spawn(tmp_path, sys.executable, "-c", called, PLUGIN, kernels)

    request = {"folder": str(kernels), "kind": "llvm", "problems": ["row_norm/rows=5,width=96"], "rounds": 1}
    fresh = (sys.executable, "-m", "tvm_sparse.cli.fresh", json.dumps({**request, "plugins": [str(PLUGIN)]}))
    result = json.loads(spawn(tmp_path, *fresh))
    assert result["correct"] and not result["error"] and result["seconds"] > 0
    assert result["peer"]["name"] == "NumPy"


def test_a_sampler_is_replaced(tmp_path: Path) -> None:
    """Tokens of every way are among those that the warpers of transformers leave: the script looks itself."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    printed = spawn(tmp_path, sys.executable, EXAMPLES / "replace_sampler.py", "--quick", "--csv", "steps.csv")
    facts, table = (tmp_path / "steps.csv").read_text().split("way,", 1)
    ways = [line.split(",")[0] for line in table.splitlines()[1:]]
    assert ways[:4] == ["body alone", "transformers", "softmax_sample", "head_sample"] and "# device:" in facts
    assert all(way in printed for way in ways)


def test_decoders_take_every_sampler(tmp_path: Path) -> None:
    """Tokens of every way are among the k best: the script looks itself."""
    pytest.importorskip("torch")
    printed = spawn(tmp_path, sys.executable, EXAMPLES / "decode_models.py", "--quick", "--csv", "models.csv")
    facts, table = (tmp_path / "models.csv").read_text().split("model,", 1)
    ways = [line.split(",")[2] for line in table.splitlines()[1:]]
    assert {"body alone", "torch", "softmax_sample", "head_sample"} <= set(ways) and "# device:" in facts
    assert all(way in printed for way in ways)


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_a_trained_model_decodes_with_both_heads(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = ("--quick", "--save", "states.npz", "--csv", "heads.csv")
    printed = spawn(tmp_path, sys.executable, EXAMPLES / "lsh_decoding.py", *options)
    rows = dict(re.findall(r"^ *(exact|LSH 0.99) +(.*)$", printed, re.MULTILINE))
    assert rows["exact"].split()[1:3] == ["100.0%", "100.0%"], printed
    lost = {name: float(row.split()[-1]) for name, row in rows.items()}
    # A search that misses a word seldom finds what is more probable by far, or less.
    assert lost["exact"] == 0 and abs(lost["LSH 0.99"]) < 0.5, printed
    with np.load(tmp_path / "states.npz") as saved:
        assert saved["embedding"].shape == (2000, 64) and saved["hidden"].shape[1] == 64 <= len(saved["hidden"])
    facts, table = (tmp_path / "heads.csv").read_text().split("head,", 1)
    assert "# device: CPU" in facts and [line.split(",")[0] for line in table.splitlines()[1:]] == list(rows)


@pytest.mark.thorough
@pytest.mark.timeout(280)
@pytest.mark.parametrize("options", [("--master", "--method", "row_balanced")])
def test_a_pruned_lstm_is_trained_and_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("torch")
    quick = (sys.executable, EXAMPLES / "pruned_lstm.py", "--quick", *options, "--save", "layers.npz")
    printed = spawn(tmp_path, *quick)
    loss = {name.strip(): float(value) for name, value in re.findall(r"^ *([a-z][a-z, ]+) +(\d\.\d+) +[\d.]+$", printed,
                                                                     re.MULTILINE)}  # fmt: skip
    assert loss["pruned gradually, sparse"] == pytest.approx(loss["pruned gradually, torch"], abs=1e-3), printed
    assert loss["pruned gradually, torch"] < loss["pruned at once"], printed
    assert loss["trained as a sparse layer"] < loss["pruned gradually, sparse"] + 0.05, printed
    assert re.search(r"pruned to (9\.[4-9]|10\.[0-6])%", printed) and "step_rows" in printed, printed
    assert (tmp_path / "layers.npz").exists()


def test_a_transformer_is_pruned_in_blocks_and_trained_sparse(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = sys.executable, EXAMPLES / "pruned_transformer.py"
    printed = spawn(tmp_path, *script, "text", "corpus", "--packages", EXAMPLES.parent / "tvm_sparse")
    documents = dict(re.findall(r"(train|dev): ([\d,]+) documents", printed))
    assert documents.keys() == {"train", "dev"}, printed
    texts = [lzma.decompress((tmp_path / "corpus" / f"{part}.txt.xz").read_bytes()) for part in documents]
    paragraphs = [set(re.split(rb"\n\n|\0", text)) - {b""} for text in texts]
    assert not paragraphs[0] & paragraphs[1]
    spawn(tmp_path, *script, "train", "corpus", "--quick", "--cpu", "--steps", "20", "--csv", "losses.csv")
    lines = list(csv.DictReader(x for x in (tmp_path / "losses.csv").read_text().splitlines() if x[0] != "#"))
    runs = {name: [line for line in lines if line["run"] == name] for name in ("dense", "blocks 16")}
    dense, pruned = runs.values()
    assert {line["phase"] for line in dense} == {"dense"}
    assert list(dict.fromkeys(line["phase"] for line in pruned)) == ["dense", "pruning", "sparse"]
    # Before the first pruning both runs are the same.
    assert pruned[0]["train_bits"] == dense[0]["train_bits"] and pruned[0]["phase"] == "dense"
    assert 0.19 < float(pruned[-1]["density"]) < 0.21
    assert int(pruned[-1]["parameters"]) < int(pruned[0]["parameters"]) == int(dense[-1]["parameters"])
    for own in (dense, pruned):
        assert float(own[-1]["dev_bits"]) < float(own[0]["dev_bits"]) - 1


CHECKED = """
import random
import sys

import numpy as np
import tvm

from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.core import machine, registry, spaces
from tvm_sparse.emulation import run_on_cpu

operator = registry.add_plugin(sys.argv[1])
for key in operator.shapes.AWKWARD:
    problem = registry.parse(key)
    for where in (machine.cpu(), machine.resolve("sm_90a")):
        tables, reasons = spaces.applicable(problem, where)
        assert not reasons
        [template] = map(spaces.find, tables)
        default = template.default(problem, where)
        assert template.point(problem, where, default) is None
        points = list(spaces.points(problem, where, tables))
        for candidate in {template.candidate(default), random.Random(key).choice(points)}:
            program = template.build(problem, candidate.values)
            if where.kind == "llvm":
                compiled = tvm.compile(program.module, target=target_of(where))["main"]
            for seed, structure in enumerate(problem.structures):
                settings = problem.settings[seed % len(problem.settings)]
                inputs, outputs = problem.generate(seed, structure, settings), problem.empty_outputs()
                if where.kind == "llvm":
                    tensors = [tvm.runtime.tensor(a) if isinstance(a, np.ndarray) else a for a in (*inputs, *outputs)]
                    compiled(*tensors)
                    outputs = [tensors[-1].numpy()]
                else:
                    arguments = [*inputs, *outputs]
                    run_on_cpu(program.module, target_of(where), arguments, pipeline=program.pipeline, seed=seed)
                problem.check(inputs, problem.reference(inputs), outputs)
        print(key, template.name)
"""


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_the_templates_of_the_operator_from_outside_are_right(tmp_path: Path) -> None:
    """On every structure of inputs: the CPU's as machine code, the GPU's thread by thread."""
    assert spawn(tmp_path, sys.executable, "-c", CHECKED, PLUGIN).count("norm_block") == 4
