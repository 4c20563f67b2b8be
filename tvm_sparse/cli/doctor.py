"""`tvm-sparse doctor`: check what is installed and whether it works, with commands that repair it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import manifest, runtime_libraries
from ..artifacts.packages import kernel_packages
from ..core import commands, machine, registry
from .adopt import Chosen, Shapes, read
from .common import (
    FAILED,
    AsJson,
    Plugins,
    ProgramSet,
    console,
    default_roots,
    echo_json,
    errors,
    require,
    table,
)

# Seconds: the compiler's smoke test imports all of it, possibly from a cold disk.
SMOKE_SECONDS = 180.0
STYLES = {"ok": "green", "broken": "red", "absent": "dim", "info": ""}


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: str  # a key of STYLES
    found: str
    mend: str = ""  # the command that repairs it
    needed: bool = False  # whether the CPU path depends on it


def doctor(
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--arch",
            help="Report instead how calls would be served there: a card (rtx4090, a100, b200) or an architecture.",
        ),
    ] = None,
    chosen: Chosen = ProgramSet.all,
    shapes: Shapes = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="With --target: compile every kernel, for minutes.")
    ] = False,
    logs: Annotated[
        list[Path] | None,
        typer.Option(help="With --target: folder of records.  \\[default: the package's, then yours]"),
    ] = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Report versions, compiler, GPU and missing parts, with commands that install or repair them.

    The exit code is 0 if kernels run on the CPU, compiled or built ahead. A missing GPU is not an error. With --target:
    which kernels of a set of problems are tuned, borrowed or a default on a GPU that need not be here.
    """
    if target is not None:
        with errors():
            _served(target, chosen, shapes, compile, default_roots(logs), as_json)
        return
    compiles = runtime_libraries.compiler() is not None
    checks = [*_packages(), *_plugins(), *(_tools() if compiles else ()), *_prebuilt(compiles)]
    checks += [*(_smoke() if compiles else ()), *_gpu()]
    works = not any(check.needed and check.state != "ok" for check in checks)
    if as_json:
        echo_json({"works": works, "checks": [asdict(check) for check in checks]})
    else:
        made = table("", "", "found", "to mend it")
        for check in checks:
            style = STYLES[check.state]
            state = f"[{style}]{check.state}[/{style}]" if style else check.state
            made.add_row(check.name, state, check.found.replace("[", "\\["), check.mend.replace("[", "\\["))
        console().print(made)
        typer.echo(_verdict(checks, works))
    if not works:
        raise typer.Exit(FAILED)


def _served(
    target: str, chosen: ProgramSet, shapes: Path | None, compiles: bool, roots: tuple[Path, ...], as_json: bool
) -> None:
    """Show how look-up would serve a set of problems on a target, from records alone, and which
    commands to run there.
    """
    from ..core import scratch
    from ..tuning import adopting

    where = machine.resolve(target)
    problems = adopting.problems_of(chosen) if shapes is None else read(shapes)
    found = adopting.standings(problems, where, roots)
    faults = {one.problem: one.refusal for one in found}
    if compiles:
        from ..shipping import export

        require("compiler", *(["cuda"] if where.kind == "cuda" else []))
        jobs: list[export.Job] = [(one.choice.compiled_for, one.choice.candidate, one.choice.how, {}) for one in found]
        left: dict[tuple[str, str], str] = {}

        def skip(out: export.LeftOut) -> None:
            left[out.problem.key, str(out.candidate)] = f"does not compile: {out.why.partition(chr(10))[0]}"

        with scratch.folder() as folder:
            export.built(jobs, where, folder, machine.default_builders(), lambda entry: None, skip)
        for one in found:
            faults[one.problem] = left.get((one.choice.compiled_for.key, str(one.choice.candidate)))
    if as_json:
        lines = [
            {
                "problem": one.problem.key,
                "how": one.how,
                "candidate": str(one.choice.candidate),
                "why": one.choice.why,
                "record": one.choice.record,
                "fault": faults[one.problem],
            }
            for one in found
        ]
        echo_json({"target": where.arch, "multiprocessors": where.cores, "problems": lines})
        return
    made = table(
        "problem", "look-up", "kernel", "", title=f"{where.name} ({where.arch}, {where.cores} multiprocessors)"
    )
    for one in found:
        fault = (faults[one.problem] or "").replace("[", "\\[")
        made.add_row(one.problem.typed, one.how, str(one.choice.candidate), fault)
    console().print(made)
    counts = Counter(one.choice.how.replace("fallback", "default") for one in found)
    typer.echo(", ".join(f"{count} {how}" for how, count in counts.most_common()) + f" of {len(found)} problems.")
    if any(not one.own for one in found):
        words: tuple[str | Path, ...] = ("--shapes", shapes) if shapes is not None else ("--set", chosen)
        words = () if shapes is None and chosen is ProgramSet.all else words
        typer.echo(f"On such a GPU, to check and tune them in half an hour: {commands.command('adopt', *words)}")


def _verdict(checks: list[Check], works: bool) -> str:
    if not works:
        return "The CPU path does not work: mend what is marked broken, from the top."
    cuda = next((check for check in checks if check.name == "CUDA smoke test"), None)
    if cuda is None:
        return "Kernels that were built ahead can be called; none can be compiled here."
    if cuda.state != "ok":
        return "The CPU path works; CUDA code cannot be built here."
    if machine.gpu() is None:
        return "The CPU path works. CUDA kernels can be built (export --arch sm_90a); there is no GPU to run them."
    return "CPU and GPU work."


# ---------------------------------------------------------------------------------------------------- packages


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def required(package: str) -> str:
    """The range of versions of a package that tvm_sparse's metadata declares."""
    for line in importlib.metadata.requires("tvm_sparse") or ():
        match = re.match(r"([A-Za-z0-9_.-]+)\s*([^;]*)", line)
        if match and match[1] == package and ("extra ==" not in line or "compiler" in line):
            return match[2].strip(" ()")
    return ""


def in_range(version: str, wanted: str) -> bool:
    """Whether a version satisfies a range such as `>=0.1.14.post0,<0.1.15`.

    Only the numbers are compared, which suffices for ranges of releases and needs no dependency on `packaging`.
    """

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(n) for n in re.findall(r"\d+", text))

    found = numbers(version)
    for clause in filter(None, wanted.split(",")):
        match = re.fullmatch(r"\s*(>=|<=|==|<|>)\s*(\S+)\s*", clause)
        if match is None:
            continue
        bound = numbers(match[2])
        fits = {
            ">=": found >= bound,
            "<=": found <= bound,
            "==": found == bound,
            # 0.1.15.dev0 and 0.1.15.post1 do not count as 0.1.14 either.
            "<": found < bound,
            ">": found > bound,
        }[match[1]]
        if not fits:
            return False
    return True


def _packages() -> list[Check]:
    checks = [
        Check("python", "ok", f"{platform.python_version()} at {sys.executable}", needed=True),
        Check("tvm_sparse", "ok", _version("tvm_sparse") or "not installed (run from its sources)"),
    ]
    for package in ("apache-tvm", "apache-tvm-ffi", "numpy"):
        version, wanted = _version(package), required(package)
        mend = f'{commands.python()} -m pip install "{package}{wanted}"'
        if version is None and package == "apache-tvm":
            mend = commands.install("compiler")
            checks.append(Check(package, "absent", "not installed (optional: compiles kernels)", mend))
        elif version is None:
            checks.append(Check(package, "broken", "not installed", mend, needed=True))
        elif not in_range(version, wanted):
            checks.append(Check(package, "broken", f"{version}, outside of {wanted}", mend, needed=True))
        else:
            checks.append(Check(package, "ok", f"{version}, in the working range {wanted}", needed=True))
    for names, extra, use in (
        (("xgboost", "xgboost-cpu"), "tune", "the search's cost model"),
        (("scipy",), "tune", "sparse peers"),
        (("psutil",), "tune", "the search"),
        (("cloudpickle",), "tune", "the search"),
        (("torch",), "torch", "tensors and peers"),
        (("cuda-bindings",), "cuda", "CUDA"),
        (("nvidia-cuda-nvrtc",), "cuda", "the CUDA compiler"),
        (("nvidia-cuda-cccl",), "cuda", "CUDA headers"),
    ):
        found = next(((name, v) for name in names if (v := _version(name))), None)
        if found:
            checks.append(Check(found[0], "ok", found[1]))
        else:
            mend = commands.install(extra)
            checks.append(Check(names[0], "absent", f"not installed (optional: {use})", mend))
    return checks


def _prebuilt(compiles: bool) -> list[Check]:
    """Installed packages of kernels; without one, and without the compiler, nothing can be called."""
    checks = []
    for folder in kernel_packages():
        name = f"kernels for {folder.name}"
        try:
            entries = manifest.read(folder)
        except manifest.ManifestError as error:
            checks.append(Check(name, "broken", str(error)))
        else:
            checks.append(Check(name, "ok", f"{len(entries)} in {folder}"))
    if not compiles:
        found, mend = "carried by the kernels' package", ""
        if runtime_libraries.version() is None:
            found, mend = "none; kernels call them", commands.install("compiler")
        checks.append(Check("TVM's runtime libraries", "broken" if mend else "ok", found, mend, needed=True))
    return checks


def _plugins() -> list[Check]:
    """The operators of plugins, each with missing parts."""
    checks = []
    try:
        known = registry.operators().values()
    except registry.PluginError as error:
        return [Check("operators", "broken", str(error), needed=True)]
    for operator in known:
        if operator in registry.BUILTIN:
            continue
        missing = []
        for part in ("problem", "templates", "fallbacks", "call", "peers", "shapes"):
            try:
                getattr(operator, part)
            except Exception as error:  # the plugin's module may raise anything
                missing.append(f"{part}: {type(error).__name__}: {error}")
        found = "; ".join(missing) or f"{operator.home}, {len(operator.templates)} templates"
        checks.append(Check(f"operator {operator.name}", "broken" if missing else "ok", found))
    return checks


# ------------------------------------------------------------------------------------------------------- tools


def _tools() -> list[Check]:
    # The names that TVM tries when it links an exported library.
    for name in (os.environ.get("CXX"), os.environ.get("CC"), "g++", "gcc", "clang++", "clang", "c++", "cc"):
        path = shutil.which(name) if name else None
        if path:
            first = _output([path, "--version"]).split("\n")[0]
            return [Check("C compiler", "ok", f"{path}: {first}", needed=True)]
    return [Check("C compiler", "broken", "none; it links libraries", "apt-get install g++", needed=True)]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def smoke(name: str) -> tuple[dict | None, str]:
    """The result of a smoke test in a separate process, or None and the reason of its failure."""
    command = [sys.executable, "-m", "tvm_sparse.cli.smoke", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMOKE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None, f"did not end within {SMOKE_SECONDS:g} s"
    if done.returncode < 0:
        return None, f"killed by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        lines = done.stderr.strip().split("\n")
        return None, lines[-1] if lines[-1] else f"exit status {done.returncode}"
    try:
        return json.loads(done.stdout.strip().split("\n")[-1]), ""
    except ValueError:
        return None, f"printed no result: {done.stdout[-200:]!r}"


def _smoke() -> list[Check]:
    # At the same time, since each spends seconds on importing the compiler.
    with ThreadPoolExecutor() as pool:
        serialise, cpu, cuda = pool.map(smoke, ("serialise", "cpu", "cuda"))
    ffi = f'{commands.python()} -m pip install "apache-tvm-ffi{required("apache-tvm-ffi")}"'
    checks = []
    result, why = serialise
    name = "compiler IR"
    if result:
        checks.append(Check(name, "ok", "serialised in a subprocess", needed=True))
    else:
        checks.append(Check(name, "broken", why, ffi, needed=True))
    result, why = cpu
    name = "CPU smoke test"
    if result:
        found = f"compiled for {result['arch']} in {result['seconds']} s, called, right"
        checks.append(Check(name, "ok", found, needed=True))
    else:
        checks.append(Check(name, "broken", why, _command(why) or "see the lines above; else report it", needed=True))
    result, why = cuda
    name = "CUDA smoke test"
    if result:
        called = "called, right" if result["run"] else "not called: no GPU"
        found = f"cubin for {result['arch']} by NVRTC {result['nvrtc']} in {result['seconds']} s, {called}"
        checks.append(Check(name, "ok", found))
    else:
        # With a GPU this is a fault; otherwise CUDA may not be needed.
        checks.append(Check(name, "broken" if machine.gpu() else "absent", why, _command(why)))
    return checks


def _command(message: str) -> str:
    """The command that a message suggests; empty if there is none."""
    found = re.search(r"(?:pip|apt-get) install [^\s;:,)]+", message)
    return found[0] if found else ""


# --------------------------------------------------------------------------------------------------------- GPU


def _gpu() -> list[Check]:
    cpu = machine.cpu()
    checks = [Check("CPU", "info", f"{cpu.name}, {cpu.cores} cores, {cpu.arch}")]
    found = machine.gpu()
    refused = [reason for one in machine.gpus() if (reason := machine.below_floor(one))]
    checks += [Check("GPU", "broken", f"{reason}; kernels run on the CPU") for reason in refused]
    if found is None and not refused:
        checks.append(Check("GPU", "absent", "the driver reports none; kernels run on the CPU"))
    if found is None:
        return checks
    limit = f", reads {found.bandwidth / 1e12:.2f} TB/s" if found.bandwidth else ""
    checks.append(Check("GPU", "info", f"{found.name}, {found.arch}, {found.cores} multiprocessors{limit}"))
    fields = "driver_version,memory.free,clocks.sm,clocks.mem,power.limit"
    state = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"])
    if state:
        pairs = zip(fields.split(","), state.split(","), strict=False)
        checks.append(Check("driver", "info", ", ".join(f"{name} {value.strip()}" for name, value in pairs)))
    return checks
