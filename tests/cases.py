"""What the tests of operators, templates and GPU have in common: awkward problems, machines, sampled candidates."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import core_only
import pytest
import quick_build_worker
from turns import once

from tvm_sparse.artifacts.compile import Compiled, compile_candidate, target_of
from tvm_sparse.core import registry, scratch, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine, cpu, default_builders
from tvm_sparse.core.problem import Problem, Settings
from tvm_sparse.core.registry import make, parse
from tvm_sparse.core.template import Program, Table, Template
from tvm_sparse.runtime import dispatch, loading
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.workers import building

SM90 = Machine("cuda", "sm_90a", "sm_90a", cores=132)
SM80 = Machine("cuda", "sm_80", "sm_80", cores=108)
MACHINES = {"llvm": cpu(), "cuda": SM90}
# The environment variable for a folder that keeps what tests of one revision build for a GPU: `scripts/sanitize.py`
# runs the same tests four times.
BUILDS = "TVM_SPARSE_TEST_BUILDS"
# And the one for the largest cluster of the candidates that are sampled, where a tool cannot have larger ones.
LARGEST_CLUSTER = "TVM_SPARSE_TEST_CLUSTER"
# The assembler parks a few values outside of the loops if that brings a kernel to the next step of occupancy (32, 40,
# 48, 64, 96, 128 registers a thread), whatever the block needs: its choice, and no harm. What is beyond are registers
# that ran out, or an array that is indexed dynamically, and the template's `allowed` has to leave it out.
PARKED_BYTES = 48
# Combinations of decisions that are tried where points of a space are drawn.
MOST = 50_000

# Seeds tests whose cases are drawn where they are collected: another number in every run, the same in its processes.
RUN_SEED = zlib.crc32(os.environ.get("PYTEST_XDIST_TESTRUNUID", "").encode() or os.urandom(8))

AWKWARD = tuple(parse(key) for operator in registry.operators().values() for key in operator.shapes.AWKWARD)
REALISTIC = tuple(parse(key) for operator in registry.operators().values() for key in operator.shapes.REALISTIC)


@functools.cache
def applicable(kind: str, problem: Problem) -> tuple[Template, ...]:
    """Kept, because a space whose first point is searched for takes a while and the tests list it many times."""
    return tuple(map(spaces.find, spaces.applicable(problem, MACHINES[kind])[0]))


def cases(kind: str, problems: tuple[Problem, ...] = AWKWARD, **having: Any) -> list[tuple[Template, Problem]]:
    """The templates of a kind of machine whose attributes are `having`, with each problem that they apply to."""
    pairs = [(template, problem) for problem in problems for template in applicable(kind, problem)]
    return [pair for pair in pairs if all(getattr(pair[0], name) == value for name, value in having.items())]


def combinations(table: Table, seed: str) -> Iterator[dict[str, int]]:
    """Combinations of a table's values in random order, each once, the same ones in every run: all of them, or MOST."""
    total = math.prod(map(len, table.values()))
    for number in random.Random(seed).sample(range(total), min(total, MOST)):
        decisions = {}
        for name, values in table.items():
            number, place = divmod(number, len(values))
            decisions[name] = values[place]
        yield decisions


def drawn(template: Template, problem: Problem, machine: Machine, count: int, seed: str) -> list[Candidate]:
    """Distinct points of a template's space, every one as likely as another: `count`, or as many as are found. Nothing
    is listed, as some spaces are of a million combinations."""
    tried = combinations(template.space(problem, machine), seed)
    allowed = (one for one in tried if template.allowed(problem, machine, one) is None)
    return [template.candidate(one) for one in itertools.islice(allowed, count)]


def sampled(template: Template, problem: Problem, machine: Machine, count: int) -> list[Candidate]:
    """The default, and `count` other points of the space, the same ones in every run."""
    default = template.candidate(template.default(problem, machine))
    largest = int(os.environ.get(LARGEST_CLUSTER, 0))
    # Without clusters beyond the largest, fewer are left of what is drawn.
    found = drawn(template, problem, machine, (count + 1) * (8 if largest else 1), f"{template.name} {problem}")
    kept = [c for c in [default, *found] if not largest or c.values.get("cluster", 1) <= largest]
    return list(dict.fromkeys(kept))[: count + 1]


def settings_of(problem: Problem, number: int) -> Settings:
    """The problem's settings in turn."""
    return problem.settings[number % len(problem.settings)]


def thorough(*case: Any, id: str | None = None) -> Any:
    """A case of `pytest.mark.parametrize` that only `pytest --thorough` runs: what it is alone to catch is a change of
    a kernel's code, which golden fingerprints do not let pass unseen."""
    return pytest.param(*case, marks=pytest.mark.thorough, id=id)


def each_with_some(ones: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """All pairs; in a run that is not thorough each of `others` with some of `ones`, and each of these with at least
    one."""
    usual = {(i % len(ones), i % len(others)) for i in range(max(len(ones), len(others)))}
    return [
        (one, other) if (i, j) in usual else thorough(one, other)
        for i, one in enumerate(ones)
        for j, other in enumerate(others)
    ]


def choices(problem: Problem) -> set[tuple[str, Any]]:
    """What selects code rather than its extents: dtypes, cells, activations, shapes of blocks, extras."""
    extras = {field.name for field in dataclasses.fields(problem) if field.metadata.get("optional")}
    told = {name: bool(axis) if isinstance(axis, int) else axis for name, axis in problem.axes.items()}
    return {(name, axis) for name, axis in told.items() if name in extras or isinstance(axis, str)}


def size(problem: Problem) -> int:
    return math.prod(axis for axis in problem.axes.values() if isinstance(axis, int) and axis)


def of_each_choice(problems: Iterable[Problem], more: Iterable[Problem] = ()) -> list[Problem]:
    """The least, `more`, and as few others, two in all at least, as show each choice that any has."""
    left = list(problems)
    chosen = [min(left, key=size), *more]
    while left := [problem for problem in left if problem not in chosen]:
        shown = set().union(*map(choices, chosen))
        best = max(left, key=lambda problem: (len(choices(problem) - shown), size(problem)))
        if not choices(best) - shown and len(chosen) > 1:
            break
        chosen.append(best)
    return chosen


@functools.cache
def of_each_operator() -> list[Any]:
    """All awkward problems; those that show no choice of their operator's that others do not, in a thorough run."""
    usual: set[Problem] = set()
    for name in registry.operators():
        usual.update(of_each_choice(problem for problem in AWKWARD if problem.operator == name))
    return [problem if problem in usual else thorough(problem) for problem in AWKWARD]


def _have_cuda() -> bool:
    try:
        bindings = importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:
        return False
    nvidia = importlib.util.find_spec("nvidia")
    roots = [Path(p, "cu13") for p in (nvidia.submodule_search_locations or [])] if nvidia else []
    roots.append(Path("/usr/local/cuda"))
    return bindings is not None and any((r / "include" / "cccl").is_dir() for r in roots)


needs_cuda = pytest.mark.skipif(not _have_cuda(), reason='the CUDA packages are absent: pip install "tvm_sparse[cuda]"')


def case_id(value: Any) -> str | None:
    """For `pytest.mark.parametrize(ids=)`: the template's name, the problem's axes without what is default."""
    if isinstance(value, Template):
        return value.name
    if isinstance(value, Problem):
        full = {"dtype": "float32", "pattern": "uniform"}
        full |= {field.name: field.default for field in dataclasses.fields(value) if field.metadata.get("optional")}
        return ",".join(f"{name}={axis}" for name, axis in value.axes.items() if full.get(name) != axis)
    if isinstance(value, dict):
        return ",".join(f"{name}={choice}" for name, choice in value.items())
    return None


def number_of_builds() -> int:
    """What seeds the problems that a test draws and builds: another one in every run, the same in all with one folder
    of builds."""
    kept = os.environ.get(BUILDS)
    return os.stat(kept).st_ino if kept else int.from_bytes(os.urandom(4), "little")


def own_on_host(program: Program, problem: Problem) -> list[Any]:
    """A program's workspaces."""
    return loading.allocated(map(dataclasses.asdict, program.workspaces), problem, loading.on_host)


def run_emulated(
    program: Program, problem: Problem, inputs: Sequence[Any], own: Sequence[Any], seed: int = 0, stale: Any = None
) -> Sequence[Any]:
    """The outputs of a CUDA program, which runs with no GPU and has to be right."""
    from tvm_sparse.emulation import run_on_cpu

    outputs = problem.empty_outputs()
    arguments = [*inputs, *outputs, *own]
    run_on_cpu(
        program.module, target_of(SM90), arguments, pipeline=program.pipeline, seed=seed,
        stale=stale and stale(arguments),
    )  # fmt: skip
    problem.check(inputs, problem.reference(inputs), outputs)
    return outputs


def check_emulated(
    problem: Problem,
    template: Template,
    point: Mapping[str, int],
    constant: Sequence[str] = (),
    first: int = 0,
    step: int = 1,
) -> None:
    """That a CUDA program is right on every structure, or on each `step`-th from the `first` on, with no GPU, and
    whatever its arrays hold before the producer kernel is done; but for inputs that are `constant`, which it is
    told."""
    import numpy as np

    program = template.build(problem, point)
    kept = [i for i, argument in enumerate(problem.kernel_inputs) if argument.name in constant]

    def garbage(arguments: Sequence[Any]) -> dict[int, Any]:
        return {
            i: np.full_like(a, -7 if a.dtype.kind == "i" else np.nan)
            for i, a in enumerate(arguments)
            if isinstance(a, np.ndarray) and a.dtype.kind != "u" and i not in kept
        }

    for seed, structure in list(enumerate(problem.structures))[first::step]:
        settings = dict(problem.settings[seed % len(problem.settings)])
        if "constant" in settings:
            settings["constant"] = int(bool(constant))
        inputs = problem.generate(seed, structure, settings)
        run_emulated(program, problem, inputs, own_on_host(program, problem), seed, garbage)


def watch_phases(patch: pytest.MonkeyPatch, place: Any, *names: str) -> None:
    """Let each thread that reaches a phase, made by one of these factories of a module, print the factory's name.

    Whatever is asked of a kernel, its text is the same: it is compiled once.
    """
    from tvm.script import tirx as T

    def watched(name: str, factory: Callable[..., Any]) -> Callable[..., Any]:
        line = f"{name} "

        def made(*extents: Any, **how: Any) -> Any:
            inner = factory(*extents, **how)

            @T.inline
            def phase(*given):
                T.evaluate(T.call_extern("int64", "write", 1, line, len(line)))
                inner(*given)

            return phase

        return made

    for name in names:
        patch.setattr(place, name, watched(name, getattr(place, name)))


def reached(capture: pytest.CaptureFixture[str]) -> set[str]:
    """The watched phases that kernels have reached since the last question, with `capfd`."""
    return set(capture.readouterr().out.split())


def built(problem: Problem, candidate: Candidate, gpu: Machine, path: Path) -> Compiled:
    """Compile to `path`; or, where a folder keeps what is built, to a place of its own there, once."""
    kept = os.environ.get(BUILDS)
    if not kept:
        return compile_candidate(problem, candidate, gpu, path)
    name = hashlib.sha256(f"{problem.key} {candidate} {gpu.arch}".encode()).hexdigest()[:32]
    library = Path(kept) / f"{name}.so"
    facts = library.with_suffix(".json")
    if facts.exists():
        return Compiled(**{**json.loads(facts.read_text()), "path": str(library)})
    compiled = compile_candidate(problem, candidate, gpu, library)
    written = library.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(dataclasses.asdict(compiled)))
    written.replace(facts)
    return compiled


def on_cpu(module: Any) -> Any:
    """The function `main` of a module on the CPU, not optimised: of a library that an earlier run has kept, or compiled
    now."""
    import tvm

    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
    if not (folder := os.environ.get(quick_build_worker.KEPT)):
        return tvm.compile(module, target=target)["main"]
    kept = Path(folder) / quick_build_worker.name_of(module, target, "default")
    if not kept.exists():
        with scratch.written(kept) as unfinished:
            tvm.compile(module, target=target).export_library(str(unfinished))
    os.utime(kept)
    return tvm.runtime.load_module(str(kept))["main"]


def use_dispatcher(patch: pytest.MonkeyPatch, own: Dispatcher) -> None:
    """Let the public calls use another dispatcher."""
    for operator in registry.operators().values():
        patch.setattr(operator.call, "dispatcher", own)
    patch.setattr(dispatch, "dispatcher", own)


@contextmanager
def calls_run(keys: Iterable[str], cache: Path, optimised: bool = False) -> Iterator[Dispatcher]:
    """The public functions run the fallbacks of these problems on the CPU, built side by side, and what else they are
    called for, built when it is.

    Most libraries are not optimised, which takes most of a build: these tests are about calls. Those of templates run
    what users have, and `optimised` is for tests that call often. Libraries of programs that an earlier run had too are
    copied (`quick_build_worker`).
    """
    own, builders = Dispatcher(logs=(), shipped=cache / "none", cache=cache), max(2, default_builders())
    (beside := cache / "beside").mkdir(parents=True, exist_ok=True)
    how = (quick_build_worker.OPTIMISED,) if optimised else ()
    worker = (sys.executable, quick_build_worker.__file__, *how)
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(building.Kept(argv=worker)) as kept:
        patch.setattr(building, "BUILD_WORKER", worker)
        patch.setattr(building, "kept", kept)
        with pytest.MonkeyPatch.context() as first:
            # The processes that compile start sooner without PyTorch, which TVM imports wherever it is.
            first.setenv("PYTHONPATH", core_only.environment(beside, absent=("torch",))["PYTHONPATH"])
            once(beside, lambda: own.warmup([parse(key) for key in keys], cpu(), builders))
        use_dispatcher(patch, own)
        yield own


@contextmanager
def calls_run_without_gpu(cache: Path) -> Iterator[Dispatcher | None]:
    """As `calls_run` without a problem, but where PyTorch finds a GPU calls go as they do for users."""
    import torch

    if torch.cuda.is_available():
        yield None
        return
    with calls_run((), cache) as own:
        yield own


__all__ = [
    "AWKWARD", "MACHINES", "PARKED_BYTES", "REALISTIC", "SM80", "SM90", "calls_run", "calls_run_without_gpu",
    "case_id", "cases", "each_with_some", "make", "needs_cuda", "of_each_choice", "of_each_operator", "sampled",
    "settings_of", "thorough", "use_dispatcher",
]  # fmt: skip
