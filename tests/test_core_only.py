"""Without the extras: exported kernels are called, every command works or says in one line what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import core_only
import pytest

from tvm_sparse.artifacts import manifest
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.registry import parse
from tvm_sparse.workers import building

CPU = machine.cpu()
SHAPE = ("softmax_topk", "batch=4", "vocab=37", "k=4")
INSTALL = "missing; install with: "


def run(folder: Path, *words: str | Path, code: int = 0) -> str:
    """A command in a process without extras; its stdout, or stderr where it is to fail."""
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "data")}
    command = [sys.executable, "-m", "tvm_sparse", *map(str, words)]
    environment = core_only.environment(folder) | own
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `export` writes it, with one library for this machine's CPU."""
    folder = tmp_path_factory.mktemp("kernels")
    problem = parse("softmax_topk/batch=4,vocab=37,k=4")
    figures = {"seconds": 1e-6, "fallback_seconds": 1e-6, "machine": "", "date": "", "session": ""}
    job = (problem, spaces.fallback(problem, CPU), "exact", figures)
    manifest.write(folder, building.build([job], CPU, folder))
    return folder


LOADED = """
import sys

def loaded(*names):
    return {name.partition(".")[0] for name in sys.modules} & set(names)

heavy = ("tvm", "torch", "scipy", "xgboost", "psutil", "cloudpickle", "matplotlib")
"""


def test_a_look_up_loads_no_compiler_no_kernel_and_no_extra() -> None:
    """Where all of them are installed. The programs of the templates are written in TIR: without tvm none is loaded."""
    program = f"""{LOADED}
import tvm_sparse
from tvm_sparse.core import registry

for operator in registry.operators().values():
    for target in ("cpu", "sm_90a", "sm_80"):
        assert tvm_sparse.explain(operator.name, target=target, **operator.problem.example).candidate
assert not loaded(*heavy, "tvm_ffi"), loaded(*heavy, "tvm_ffi")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_exported_library_is_called_with_nothing_but_the_core(kernels: Path, tmp_path: Path) -> None:
    program = f"""{LOADED}
import numpy as np
import tvm_sparse

assert tvm_sparse.load({str(kernels)!r}) == 1
found = tvm_sparse.explain("softmax_topk", batch=4, vocab=37, k=4, target="cpu")
assert found.how == "exact" and found.library.startswith({str(kernels)!r}), found
logits = np.random.default_rng(0).standard_normal((4, 37), np.float32)
values, indices = tvm_sparse.softmax_topk(logits, 4)
assert np.array_equal(indices, np.argsort(-logits, axis=1, kind="stable")[:, :4])
assert not loaded(*heavy), loaded(*heavy)
"""
    environment = core_only.environment(tmp_path) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    assert not (tmp_path / "cache").exists()


def test_commands_that_need_no_extra_work(tmp_path: Path) -> None:
    assert "softmax_topk" in run(tmp_path, "list", "softmax_topk")
    assert "library:" in run(tmp_path, "explain", *SHAPE, "--target", "cpu")
    assert "library:" in run(tmp_path, "explain", *SHAPE, "--target", "sm_90a")
    assert "row_scan" in run(tmp_path, "tune", *SHAPE, "--target", "cpu", "--dry-run")
    assert "NumPy" in run(tmp_path, "bench", *SHAPE, "--target", "cpu")
    assert "The CPU path works" in run(tmp_path, "doctor")


@pytest.mark.parametrize(
    "words, extra",
    [
        (("tune", *SHAPE, "--target", "cpu"), "tune"),
        (("quickstart",), "tune"),
        (("export", "-o", "kernels", "--target", "sm_90a"), "cuda"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_the_other_commands_say_which_extra_they_need(words: tuple[str, ...], extra: str, tmp_path: Path) -> None:
    error = run(tmp_path, *words, code=1)
    assert INSTALL in error and f'"tvm_sparse[{extra}]"' in error and error.count("\n") == 1


def test_an_import_of_an_extra_deep_inside_is_named(tmp_path: Path) -> None:
    program = """
from tvm_sparse.cli.common import errors
with errors():
    import cuda.bindings.nvrtc
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=core_only.environment(tmp_path))
    assert '-m pip install "tvm_sparse[cuda]"' in done.stderr


def test_without_a_c_compiler(tmp_path: Path) -> None:
    """`doctor` names what installs one, and a command that has to link says so in one line."""
    environment = core_only.environment(tmp_path)
    environment |= {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in ("CC", "CXX"):
        environment.pop(name, None)

    def output(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tvm_sparse", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)

    doctor = output("doctor")
    assert doctor.returncode == 1 and "apt-get install g++" in doctor.stdout
    assert "no C compiler, which links libraries" in doctor.stdout and "TypeError" not in doctor.stdout + doctor.stderr
    bench = output("bench", *SHAPE, "--target", "cpu")
    assert bench.returncode == 1 and "no C compiler, which links libraries" in bench.stderr
    assert "Traceback" not in bench.stderr
