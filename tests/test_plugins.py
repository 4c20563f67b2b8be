"""Operators outside of the package: what `test_examples.py`, which runs every command with one, leaves out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import plugins
import pytest

from tvm_sparse.core import machine, registry

ARCH = machine.cpu().arch


def run(*words: str | Path, code: int = 0, **environment: str) -> str:
    """A command in a process of its own: what is registered stays there. Its stdout; stderr where it is to fail."""
    command = [sys.executable, "-m", "tvm_sparse", *map(str, words)]
    environment = {**os.environ, "COLUMNS": "160", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def test_an_interrupted_run_names_its_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm_sparse.cli.tune import STRATEGY, resume_command

    monkeypatch.setattr(registry, "plugins", lambda: ("/a b/double",))
    command = resume_command("double", ["n=1"], None, "auto", 8, None, None, None, None, STRATEGY, 0, limit=2.5)
    assert command == "tvm-sparse tune double n=1 --trials 8 --limit 2.5 --plugin '/a b/double'"


@pytest.mark.parametrize(
    "name, changed, said",
    [
        ("one", {"__init__": "x = 1"}, "defines no OPERATOR"),
        ("two", {"schedules": "import nothing_of_this_name"}, "No module named 'nothing_of_this_name'"),
        ("three", {"__init__": plugins.FILES["__init__.py"].replace('"double", home', '"softmax", home')},
         "the name is taken by tvm_sparse.operators.softmax"),
        ("four", {"schedules": plugins.FILES["schedules.py"].replace("double_lanes", "row_scan")},
         "the template row_scan has the name of one of softmax_topk's"),
        ("json", {}, "another module is imported as json"),
    ],
)  # fmt: skip
def test_a_plugin_that_does_not_fit_is_named(tmp_path: Path, name: str, changed: dict[str, str], said: str) -> None:
    path = plugins.write(tmp_path, name, **changed)
    error = run("list", "--plugin", path, code=2)
    assert said in error and str(path) in error or "name is taken" in error
    assert "Traceback" not in error


TEMPLATE = """
from tvm_sparse.core.template import Template

TEMPLATES = [Template(name="{name}", version=1, operator="{operator}", kind="llvm", summary="mine", program=None,
    space=lambda problem, machine: {{"threads": (1,)}}, default=lambda problem, machine: {{"threads": 1}})]
"""


@pytest.mark.parametrize(
    "text, said",
    [
        (TEMPLATE.format(name="block_rows", operator="bsr_matmul"), "block_rows has the name of one of bsr_matmul's"),
        (TEMPLATE.format(name="new", operator="bsr_matmull"), "no operator; did you mean bsr_matmul or bsr_sddmm?"),
        ("TEMPLATES = [3]", "TEMPLATES holds 3, which is no template"),
    ],
)
def test_templates_that_do_not_fit_are_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert said in run("list", "--plugin", tmp_path / "mine.py", code=2)


def test_templates_from_one_file_are_listed_and_counted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TEMPLATE.format(name="new", operator="bsr_matmul"))
    words = ("space", "bsr_matmul", "m=8", "k=64", "n=64", "block=16", "sparsity=0.5", "--arch", "cpu", "--json")
    found = json.loads(run(*words, "--plugin", tmp_path / "mine.py"))
    assert [(part["template"], part["points"]) for part in found][1:] == [("new", 1)]


def test_a_plugin_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "does not exist" in run("list", "--plugin", tmp_path / "nowhere", code=2)


def test_a_program_that_promises_alignment_is_refused(tmp_path: Path) -> None:
    """NumPy's arrays would not keep the promise, and an aligned vector access would end the caller's process."""
    careless = plugins.FILES["schedules.py"].replace(", align=2", "")
    plugin = plugins.write(tmp_path, schedules=careless)
    error = run("tune", "double", "n=9", "--target", "cpu", "--logs", tmp_path / "logs", "--plugin", plugin, code=1)
    assert "the argument x promises an alignment of 64 bytes" in error and "declare it with align=4" in error
