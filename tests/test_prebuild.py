"""Kernels built ahead: several in a library, for architectures that are not here, in a wheel, without the compiler."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.util
import json
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import core_only
import numpy as np
import pytest
import tvm_ffi
from typer.testing import CliRunner

import tvm_sparse
from tvm_sparse.artifacts import manifest, runtime_libraries
from tvm_sparse.artifacts.compile import Compiled, CompileError, compile_bundle
from tvm_sparse.cli.app import app
from tvm_sparse.cli.common import ProgramSet
from tvm_sparse.core import machine, registry, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Best, Log
from tvm_sparse.runtime import dispatch, loading, paths
from tvm_sparse.runtime.lookup import Evidence, Known, choose
from tvm_sparse.shipping import hub, prebuild, wheel
from tvm_sparse.shipping.export import planned
from tvm_sparse.workers import building
from tvm_sparse.workers.processes import Reply

CPU = machine.cpu()
OTHER = "x86-64-v3" if CPU.arch != "x86-64-v3" else "x86-64-v2"
TOPK, SUM = "softmax_topk/batch=4,vocab=37,k=4", "logsumexp/batch=3,vocab=50"


def test_kernels_of_one_library_are_each_right(tmp_path: Path) -> None:
    """What does not compile is left out, and said."""
    path = tmp_path / "several.so"
    jobs = [(parse(key), spaces.fallback(parse(key), CPU), f"k{i}") for i, key in enumerate((TOPK, SUM))]
    wrong = Candidate("row_scan", spaces.find("row_scan").version, (("chunk", 7), ("simd", 8)))
    found = compile_bundle([jobs[0], (parse(TOPK), wrong, "bad"), jobs[1]], CPU, path)
    assert isinstance(found[1], CompileError) and "chunk=7 is not among" in str(found[1])
    for (problem, _, symbol), compiled in zip(jobs, (found[0], found[2]), strict=True):
        assert isinstance(compiled, Compiled) and (compiled.path, compiled.symbol) == (str(path), symbol)
        inputs, outputs = problem.generate(7), problem.empty_outputs()
        arguments = (tvm_ffi.from_dlpack(a) if isinstance(a, np.ndarray) else a for a in (*inputs, *outputs))
        loading.load_function(path, "llvm", None, symbol)(*arguments)
        problem.check(inputs, problem.reference(inputs), outputs)
    with pytest.raises(loading.LoadError, match=r"several\.so.*bad"):
        loading.load_function(path, "llvm", None, "bad")


@pytest.mark.parametrize("arch", ["x86-64-v3", "x86-64-v4"])
def test_every_record_can_be_built_for_any_cpu_of_its_architecture(arch: str) -> None:
    where, logs = machine.resolve(arch), [paths.shipped_logs()]
    jobs = planned(where, logs)
    assert len(jobs) > 40 and not any(spaces.refusal(candidate, problem, where) for problem, candidate, *_ in jobs)
    able = dataclasses.replace(where, instructions=machine.X86_INSTRUCTIONS.get(arch, ""))
    other = [job for job, own in zip(planned(able, logs), jobs, strict=True) if job[1] != own[1]]
    assert bool(other) == bool(able.instructions)
    for problem, candidate, _, figures in other:
        known = {problem.key: Known(candidate, figures)}
        assert choose(problem, able, Evidence(known)).candidate == candidate
        choice = choose(problem, where, Evidence(known))
        assert (choice.how, choice.candidate.values["dots"]) == ("exact", 0) and "this one lacks" in choice.why


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="the CUDA packages are absent")
@pytest.mark.parametrize("arch", ["sm_90a", "compute_80"])
def test_cuda_kernels_of_one_library(arch: str, tmp_path: Path) -> None:
    """Machine code with what each kernel takes, or PTX for any GPU from a number on."""
    where = machine.resolve(arch)
    keys = ("logsumexp/batch=3,vocab=50", "bsr_matmul/m=8,k=64,n=64,block=16,sparsity=0.5")
    jobs = [(parse(key), spaces.fallback(parse(key), where), f"k{i}") for i, key in enumerate(keys)]
    found = compile_bundle(jobs, where, tmp_path / "a.so")
    taken = [one.resources if isinstance(one, Compiled) else one for one in found]
    code = (tmp_path / "a.so").read_bytes()
    if arch == "sm_90a":
        assert taken[0] != taken[1] and all(one["registers"] > 0 for one in taken)
        assert b".target sm_" not in code
    else:
        assert taken == [{"dynamic_shared_bytes": 16}, None] and code.count(b".target sm_80") == 2
        assert code.count(b".version 9.0") == 2  # which the oldest driver that can load TVM's runtime takes


class Here:
    """In the place of child processes: a request for more than one kernel ends its process."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, requests: Iterable[dict[str, Any]], *, timeout: float) -> Iterator[Reply]:
        for request in requests:
            several = len(request["kernels"]) > 1
            yield Reply("crash", message="killed") if several else Reply("ok", building.handle(request))


def test_an_architecture_without_records_borrows_what_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked so, with where it was measured; a default takes the place of what does not compile, or crashes."""
    monkeypatch.setattr(prebuild, "Pool", Here)
    version = spaces.find("row_scan").version
    for key, chunk in ((TOPK, 64), (TOPK.replace("37", "39"), 7)):
        candidate = Candidate("row_scan", version, (("chunk", chunk), ("simd", 8)))
        log = Log(tmp_path / "logs", CPU.arch, "softmax_topk")
        default = spaces.fallback(parse(key), CPU)
        log.append_best(Best(parse(key).key, CPU.arch, candidate, 1e-6, default, 2e-6, 3, "s"))
    # Decisions that look up lets pass, and the compiler does not.
    monkeypatch.setattr("tvm_sparse.core.spaces.refusal", lambda candidate, problem, machine: None)
    [built] = prebuild.prebuild([OTHER], tmp_path, [tmp_path / "logs"])
    assert built.entries == manifest.read(tmp_path / OTHER) and len(built.libraries) == 2
    by_problem = {entry.problem: entry for entry in built.entries}
    borrowed, default = by_problem[parse(TOPK).key], by_problem[parse(TOPK.replace("37", "39")).key]
    assert (borrowed.chosen, borrowed.figures["arch"], borrowed.arch) == ("borrowed", CPU.arch, OTHER)
    assert (default.chosen, default.figures) == ("fallback", {})
    [dropped] = built.dropped
    assert "vocab=39" in dropped and "chunk=7 is not among" in dropped
    with pytest.raises(LookupError, match="nothing to build: no records in"):
        prebuild.prebuild(["sm_80"], tmp_path, [tmp_path / "logs"])


PROGRAM = """
import sys
import numpy as np
import tvm_sparse
from tvm_sparse.artifacts import runtime_libraries

assert runtime_libraries.compiler() is None
logits = np.random.default_rng().standard_normal((9, 37), np.float32)
values, indices = tvm_sparse.softmax_topk(logits, 4)
assert np.array_equal(indices, np.argsort(-logits, axis=1, kind="stable")[:, :4])
found = tvm_sparse.explain("softmax_topk", batch=9, vocab=37, k=4, target="cpu")
assert "tvm_sparse_kernels" in found.library and found.how == "fallback", found
try:
    tvm_sparse.softmax_topk(logits, 5)
except tvm_sparse.Miss as error:
    assert '-m pip install "tvm_sparse[compiler]"' in str(error), error
    assert "prebuild softmax_topk batch=9 vocab=37 k=8 --target" in str(error), error
else:
    raise AssertionError("nothing was built for k=5")
assert "tvm" not in sys.modules
"""


def test_a_wheel_of_kernels_needs_no_compiler(tmp_path: Path) -> None:
    """Built, packed, unpacked as pip does it, and called by a process that cannot import apache-tvm."""
    built = prebuild.prebuild([CPU.arch], tmp_path / "kernels", [], [parse(TOPK)])
    [folder] = [one.folder for one in built]
    (folder / "notes.txt").write_text("not part of it")
    package = wheel.pack([folder], tmp_path / "dist")
    assert package.read_bytes() == wheel.pack([folder], tmp_path / "again").read_bytes()
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert not any("notes" in name for name in names) and any(name.endswith("libtvm_runtime.so") for name in names)
    [record] = (tmp_path / "site").glob("*.dist-info/RECORD")
    assert sorted(line.split(",")[0] for line in record.read_text().splitlines()) == sorted(names)

    environment = core_only.environment(tmp_path, core_only.EXTRAS + core_only.COMPILER)
    environment["PYTHONPATH"] += f":{tmp_path / 'site'}"
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, timeout=100)
    command = [sys.executable, "-m", "tvm_sparse", "doctor"]
    doctor = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert doctor.returncode == 0 and "Kernels that were built ahead can be called" in doctor.stdout, doctor.stdout


def run_cli(*words: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "160"})
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result.stderr if code else result.stdout


def test_prebuild_is_a_command(tmp_path: Path) -> None:
    """A problem, the records of a set, and the command that a missing kernel names; what it says can be pasted."""
    dispatcher = dispatch.Dispatcher((), tmp_path / "none", tmp_path / "cache")
    dispatcher.configure(compiles=False)
    with pytest.raises(loading.Miss) as miss:
        dispatcher.kernel(parse(SUM), CPU)
    said = shlex.split(str(miss.value).partition("compiler: ")[2])
    text = run_cli(*said[said.index("prebuild") :][:-1], tmp_path / "dist")
    [package] = (tmp_path / "dist").glob("*.whl")
    assert f"pip install {package}" in text and "1 kernel in 1 library" in text
    [entry] = manifest.read(tmp_path / "dist" / "kernels" / CPU.arch)
    assert entry.problem == parse(SUM).key

    point = spaces.fallback(parse(TOPK), CPU)
    for key in (TOPK, "bsr_matmul/m=8,k=64,n=64,block=16,sparsity=0.5"):
        problem = parse(key)
        point = spaces.fallback(problem, CPU)
        Log(tmp_path / "logs", CPU.arch, problem.operator).append_best(
            Best(problem.key, CPU.arch, point, 1e-6, point, 2e-6, 3, "s")
        )
    own = ("--logs", tmp_path / "logs", "--target", CPU.arch, "-o", tmp_path / "sparse")
    run_cli("prebuild", "--set", "sparse", *own)
    assert [entry.problem.partition("/")[0] for entry in manifest.read(tmp_path / "sparse" / "kernels" / CPU.arch)] == [
        "bsr_matmul"
    ]
    assert "set: an operator is named, too" in run_cli("prebuild", "softmax", "--set", "serve", *own, code=2)
    assert "did you mean softmax" in run_cli("prebuild", "softmaxx", *own, code=2)
    assert "nothing to build" in run_cli("prebuild", "--set", "recurrent", *own, code=1)


def test_every_operator_is_in_one_set() -> None:
    listed = [name for names in registry.SETS.values() for name in names]
    assert sorted(listed) == sorted(operator.name for operator in registry.BUILTIN)
    assert [one.value for one in ProgramSet] == [*registry.SETS, "all"]


def test_a_repository_of_the_library_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs in one variant; every file has its digest; imported, it shows the functions and is looked up first.

    That the library itself takes it was tried with kernels 0.17.2 (`get_local_kernel`).
    """
    candidate, folders = Candidate("row_scan", 1, ()), []
    for arch, kind in (("sm_90a", "cuda"), ("compute_80", "cuda"), (CPU.arch, "llvm")):
        folders.append(tmp_path / arch)
        folders[-1].mkdir()
        library = f"{arch}.so"
        (folders[-1] / library).write_text(arch)
        digest = manifest.digest(folders[-1] / library)
        manifest.write(
            folders[-1],
            [manifest.Entry(parse(TOPK).key, arch, kind, candidate, "exact", library, digest, (), {}, None)],
        )
    gpu, cpu = hub.arrange(folders, tmp_path / "repository", version=3)
    tag = tvm_ffi.__version__.split(".")
    assert gpu.name.startswith(f"tvm-ffi{tag[0]}{tag[1]}-cu130-") and "-cpu-" in cpu.name
    said = json.loads((gpu / "metadata.json").read_text())
    assert (said["name"], said["version"]) == ("tvm-sparse", 3)
    assert said["backend"] == {"type": "cuda", "archs": ["8.0+PTX", "9.0a"]}
    digests = said["digest"]["files"]
    files = {path.relative_to(gpu).as_posix(): path for path in gpu.rglob("*") if path.is_file()}
    assert set(files) == {*digests, "metadata.json"} and "runtime/libtvm_runtime_cuda.so" in files
    for name, expected in digests.items():
        assert base64.b64encode(hashlib.sha256(files[name].read_bytes()).digest()).decode() == expected

    monkeypatch.setattr(dispatch, "dispatcher", dispatch.Dispatcher((), tmp_path / "none", tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("built_ahead", cpu / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.softmax_topk is tvm_sparse.softmax_topk
    assert [entry.library for entry in dispatch.dispatcher.installed(CPU)] == [f"{CPU.arch}.so"]


def test_names_of_wheels() -> None:
    assert wheel.distribution(["sm_90a"]) == "tvm-sparse-kernels-sm90a"
    assert wheel.distribution(["x86-64-v4"]) == "tvm-sparse-kernels-x86-64-v4"
    assert wheel.distribution(["compute_80"]) == "tvm-sparse-kernels-compute80"
    assert runtime_libraries.version() == manifest.versions()["apache-tvm"]


def test_a_sampler_is_built_for_each_way_to_say_its_numbers() -> None:
    """Calls with a seed, or without one, find the kernel that a record chose, also where nothing compiles."""
    logs = [paths.shipped_logs()]
    for arch in ("sm_90a", "x86-64-v4"):
        where = machine.resolve(arch)
        jobs = [job for job in planned(where, logs) if job[0].operator == "softmax_sample"]
        assert jobs
        for problem, candidate, how, _ in jobs:
            alike = {one[0].axes["seeded"]: one[1] for one in jobs if one[0].as_tuned() == problem.as_tuned()}
            assert alike == dict.fromkeys((0, 1, 2), candidate) and how == "exact"
