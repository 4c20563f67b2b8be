"""What all tests share: Ctrl-C works; GPU tests run one at a time, and where there is no GPU are skipped, or left out
of a run of all tests; what another test is almost sure to catch too is run only by `pytest --thorough`.

A run of all tests draws half of the cases of each test marked as `drawn`, by a seed that it prints at its end: emulated
kernels and calls take most of the time, and the next run has others. A run that names files or tests has all of their
cases.

pyproject.toml runs the tests in two processes. GPU tests form a group (`--dist loadgroup`), which one of the two gets:
two processes on one GPU would disturb each other's timings and share its memory. The other one goes on with the rest.
On a machine with many cores, `-m gpu -n 14 --dist load` runs them beside each other, but those that need most of the
GPU's memory alone. Tests that share a fixture of their module form a group as well, so that it is made once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import core_only
import platformdirs
import pytest
import quick_build_worker
from turns import turn

from tvm_sparse.core import machine
from tvm_sparse.workers import building

# Idle threads of the CPU kernels, of PyTorch (OpenMP) and of NumPy (OpenBLAS, in powers of two of cycles) would spin
# beside the other tests, and so would those that wait for one without a core; child processes inherit it.
for name, value in {
    "TVM_THREAD_POOL_SPIN_COUNT": "0",
    "OMP_WAIT_POLICY": "passive",
    "OPENBLAS_THREAD_TIMEOUT": "4",
}.items():
    os.environ.setdefault(name, value)
# Some hundred processes of the tests, and both that run them, would each compile the package's sources and theirs anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# As where the environment is activated: commands in messages are then short.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# A shell starts what it puts into the background with SIGINT ignored, and every child inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


DRAW = "TVM_SPARSE_TEST_DRAW"  # the seed by which a run's processes draw cases
# Kernels for the emulator, lowered and compiled by g++ in this or earlier runs.
EMULATED = platformdirs.user_cache_path("tvm_sparse", appauthor=False) / "emulated"
# Libraries of the CPU kernels that calls run, built in this or earlier runs.
LIBRARIES = EMULATED.with_name("tested")
MOST_CACHED = 2**30  # bytes on a GPU that a process may keep between tests, if others run beside it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run also what is marked as thorough, and draw nothing")
    parser.addoption("--draw", metavar="SEED", help="draw cases as the run did that printed this seed")


def pytest_configure(config: pytest.Config) -> None:
    """Choose a seed, which xdist's workers inherit; none where no cases are to be drawn."""
    if hasattr(config, "workerinput"):
        return
    os.environ.pop(DRAW, None)
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if config.getoption("draw") or (everything and not config.getoption("thorough")):
        os.environ[DRAW] = config.getoption("draw") or str(random.randrange(10**6))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if seed := os.environ.get(DRAW):
        terminalreporter.write_line(f"Half of the cases of some tests were drawn: --draw {seed} draws them again.")
        if not machine.gpu():
            terminalreporter.write_line("Tests that need a CUDA GPU were left out: the driver finds none.")


def drawn(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """The items, of tests marked as `drawn` half of the cases; GPU tests have all."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn") and not item.get_closest_marker("gpu"):
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    left_out: set[pytest.Item] = set()
    for (path, name), ones in cases.items():
        left_out.update(random.Random(f"{seed} {path.stem} {name}").sample(ones, len(ones) // 2))
    return [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)  # before xdist, which looks for groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    if seed := os.environ.get(DRAW):
        # To skip two thousand tests one by one takes seconds.
        runnable = [item for item in items if machine.gpu() or not item.get_closest_marker("gpu")]
        kept = drawn(runnable, seed)
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept
    absent = pytest.mark.skip(reason="needs a CUDA GPU, and the driver finds none")
    alone = pytest.mark.xdist_group("gpu") if machine.gpu() else absent
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(alone)
        elif shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish() -> None:
    """Keep objects that exist now out of later collections of garbage: they stay until the end.

    Kernels that tests emulate or call are compiled once, by whichever run needs them first; a file that no run needed
    for a month is removed.
    """
    gc.freeze()
    # It imports the compiler, and is not always needed.
    if (emulation := sys.modules.get("tvm_sparse.emulation")) and may_keep(EMULATED):
        emulation.keep_objects(EMULATED)
    if may_keep(LIBRARIES):
        os.environ[quick_build_worker.KEPT] = str(LIBRARIES)


def may_keep(folder: Path) -> bool:
    """Whether files may be written to a folder that runs share, from which old ones are removed."""
    for file in folder.glob("*.*"):
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_mtime < time.time() - 30 * 86400:
                file.unlink()
    with contextlib.suppress(OSError):  # a home that is not to be written to
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def shares_a_fixture(item: pytest.Item) -> bool:
    """Whether a fixture of the test's module is made once for several tests: most of them compile something."""
    known = getattr(item, "_fixtureinfo", None)
    made = known.name2fixturedefs.values() if known else ()
    return any(one.scope == "module" for fixtures in made for one in fixtures)


@pytest.fixture(scope="session", autouse=True)
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that tests start have all there is, but time in rounds that are short.

    They and the tests share a cache of compiled kernels, begun anew: with the user's, a template that changed would not
    be compiled again.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("children")
        patch.setenv("PYTHONPATH", core_only.environment(folder, absent=())["PYTHONPATH"])
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def kept_libraries(children: None) -> Iterator[None]:
    """First calls copy the CPU's libraries of programs that an earlier run had too; where a GPU is, its are built."""
    if machine.gpu():
        yield
        return
    worker = (sys.executable, quick_build_worker.__file__, quick_build_worker.OPTIMISED)
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(building.Kept(argv=worker)) as kept:
        patch.setattr(building, "kept", kept)
        yield


@pytest.fixture(autouse=True)
def gpu_turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a GPU test wait for its turn if several processes share the GPU, and then free the memory that it cached."""
    node = request.node
    if "PYTEST_XDIST_WORKER" not in os.environ or not node.get_closest_marker("gpu"):
        yield
        return
    with turn(tmp_path_factory.getbasetemp().parent, alone=node.get_closest_marker("alone") is not None):
        yield
        if (torch := sys.modules.get("torch")) and torch.cuda.memory_reserved() > MOST_CACHED:
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def path_without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH of processes that find no PyTorch. TVM imports it wherever it is, which is most of their start."""
    return core_only.environment(tmp_path_factory.mktemp("without_torch"), absent=("torch",))["PYTHONPATH"]


@pytest.fixture
def children_without_torch(path_without_torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of processes that are started often and do nothing with PyTorch, as those of a tuning run."""
    monkeypatch.setenv("PYTHONPATH", path_without_torch)
