"""The child that compiles candidates: `python -m tvm_sparse.workers.building`, started by `processes.Worker`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..artifacts import manifest
from ..artifacts.compile import CompileError
from ..artifacts.manifest import Entry, digest
from ..core import scratch
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.registry import add_plugins, parse, plugins
from .absent import without
from .processes import Pool
from .serving import serve

BUILD_TIMEOUT = 300.0
KEEP_SECONDS = 60.0
BUILD_WORKER = (sys.executable, "-m", "tvm_sparse.workers.building")


def request(
    problem: Any,
    candidate: Candidate,
    machine: Machine,
    path: Path,
    symbol: str = "main",
    *,
    quick_host: bool = False,
) -> dict[str, Any]:
    """The message that requests one library; arguments as in `compile_candidate`."""
    return {
        "problem": problem.key,
        "candidate": str(candidate),
        "machine": asdict(machine),
        "path": str(path),
        "symbol": symbol,
        "quick_host": quick_host,
        "plugins": plugins(),
    }


def bundle_request(kernels: Sequence[tuple[Problem, Candidate]], machine: Machine, path: Path) -> dict[str, Any]:
    """The message that requests one library of several kernels, each with the symbol of `manifest.symbol_of`.

    The reply is a list: for each kernel the result of `compile_candidate`, or the text of its error.
    """
    return {
        "kernels": [(problem.key, str(candidate), "") for problem, candidate in kernels],
        "machine": asdict(machine),
        "path": str(path),
        "plugins": plugins(),
    }


def handle(message: dict[str, Any]) -> Any:
    from ..artifacts.compile import compile_bundle, compile_candidate

    add_plugins(message["plugins"])
    if "kernels" in message:
        kernels = [(parse(key), Candidate.parse(text), symbol) for key, text, symbol in message["kernels"]]
        found = compile_bundle(kernels, Machine(**message["machine"]), Path(message["path"]))
        return [str(one) if isinstance(one, CompileError) else asdict(one) for one in found]
    compiled = compile_candidate(
        parse(message["problem"]),
        Candidate.parse(message["candidate"]),
        Machine(**message["machine"]),
        Path(message["path"]),
        message["symbol"],
        quick_host=message["quick_host"],
    )
    return asdict(compiled)


def library_name(problem: Problem, candidate: Candidate, arch: str) -> str:
    """A file name that is unique to a problem, candidate, architecture and compiler version."""
    return bundle_name([(problem, candidate)], arch)


def bundle_name(kernels: Sequence[tuple[Problem, Candidate]], arch: str) -> str:
    """A file name for a library with several kernels of one operator, unique like `library_name`."""
    named = (f"{problem.key}|{candidate}" for problem, candidate in kernels)
    text = "|".join((*named, arch, str(sorted(manifest.versions().items()))))
    return f"{kernels[0][0].operator}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"


def described(
    problem: Problem,
    candidate: Candidate,
    machine: Machine,
    chosen: str,
    compiled: Mapping[str, Any],
    figures: Mapping[str, Any],
    sha256: str | None = None,
) -> Entry:
    """The manifest's entry of a kernel; `compiled` is the build's reply, `sha256` that of the library, if known."""
    path = Path(compiled["path"])
    return Entry(
        problem=problem.key,
        arch=machine.arch,
        kind=machine.kind,
        candidate=candidate,
        chosen=chosen,
        library=path.name,
        sha256=sha256 or digest(path),
        workspaces=tuple(compiled["workspaces"]),
        figures=dict(figures),
        resources=compiled["resources"],
        resident=compiled["resident"],
        symbol=compiled["symbol"],
    )


def build(
    jobs: Sequence[tuple[Problem, Candidate, str, Mapping[str, Any]]],
    machine: Machine,
    folder: Path,
    *,
    builders: int = 1,
    show: Callable[[Entry], None] = lambda entry: None,
    using: Pool | None = None,
    skip: Callable[[int, str], None] | None = None,
) -> list[Entry]:
    """Compile (problem, candidate, chosen, figures) jobs into `folder` and describe the libraries.

    Child processes compile, `builders` new ones or those of `using`, so that the caller's process imports no compiler
    and survives its crashes.

    Parameters
    ----------
    skip
        Called with the index of a job that does not compile, and the reason; the other jobs continue.

    Raises
    ------
    CompileError
        Without `skip`, for the first problem that does not compile, which it names.
    """
    entries = []
    requests = [
        request(problem, candidate, machine, folder / library_name(problem, candidate, machine.arch), symbol="")
        for problem, candidate, _, _ in jobs
    ]
    with _no_parts_left(folder), contextlib.ExitStack() as stack:
        pool = using or stack.enter_context(Pool(builders, BUILD_WORKER, name="build"))
        for number, reply in enumerate(pool.map(requests, timeout=BUILD_TIMEOUT)):
            problem, candidate, chosen, figures = jobs[number]
            if not reply.ok and skip is not None:
                skip(number, reply.message)
                continue
            if not reply.ok:
                raise CompileError(f"{problem} with {candidate}: {reply.message}")
            entry = described(problem, candidate, machine, chosen, reply.value, figures)
            entries.append(entry)
            show(entry)
    return entries


@contextlib.contextmanager
def _no_parts_left(folder: Path) -> Iterator[None]:
    """If the block fails, remove files that its workers had begun to write, since killed ones could not."""
    try:
        yield
    except BaseException:
        scratch.sweep(folder)
        raise


class Kept:
    """A worker that stays alive for a while after a request, so that the next request finds its modules imported.

    Thread-safe. The worker ends `seconds` after its last request, and with this process.

    Parameters
    ----------
    argv, name
        As in `Pool`; by default a build worker.
    """

    def __init__(self, seconds: float = KEEP_SECONDS, argv: Sequence[str] = BUILD_WORKER, name: str = "build") -> None:
        self._seconds, self._argv, self._name = seconds, argv, name
        self._pool: Pool | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()
        self._watches_forks = False

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """The worker, as a pool of size one, during the block."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if not self._watches_forks:
                os.register_at_fork(after_in_child=self._forget)
                self._watches_forks = True
            if self._pool is None:
                self._pool = Pool(1, self._argv, name=self._name)
            try:
                yield self._pool
            except BaseException:
                self.close()
                raise
            self._timer = threading.Timer(self._seconds, self.close)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """End the worker. The next request starts a new one."""
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.close()

    def _forget(self) -> None:
        """After a fork: drop the worker and the timer, which belong to the parent process, and make a new lock."""
        self._pool = self._timer = None
        self._lock = threading.RLock()


# The process's own worker, for compilation at first calls.
kept = Kept()

if __name__ == "__main__":
    # Compiling needs neither PyTorch, which tvm_ffi imports if it is installed (half of this process's imports), nor
    # TVM's distributed runtime, without which TVM works (a fifth of the rest).
    with without("torch", "tvm.runtime.disco"):
        serve(handle)
