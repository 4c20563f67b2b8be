"""Many at once on the CPU: threads and processes that call, load and tune, and processes that meet an empty cache."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tuning_child
from cases import calls_run

import tvm_sparse
from tvm_sparse.artifacts import manifest
from tvm_sparse.core import spaces
from tvm_sparse.core.machine import cpu
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Log, database
from tvm_sparse.runtime import cache
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.tuning import plans, session
from tvm_sparse.workers.building import library_name

KEYS = ("softmax_topk/batch=8,vocab=61,k=5", "logsumexp/batch=8,vocab=97")


def checked_call(seed: int) -> None:
    """Both operators, with a batch of the seed's own, compared with the references."""
    rng = np.random.default_rng(seed)
    for key in KEYS:
        problem = parse(key).with_batch(1 + seed % 8)
        inputs = problem.generate(int(rng.integers(2**31)))
        if problem.operator == "logsumexp":
            found: Any = (tvm_sparse.logsumexp(inputs[0]),)
        else:
            found = tvm_sparse.softmax_topk(inputs[0], 5, temperature=1 / inputs[1], log=bool(inputs[2]))
        problem.check(inputs, problem.reference(inputs), list(found))


def test_threads_call_while_others_load_and_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children_without_torch: None
) -> None:
    """Tuning, in a thread and in another process on the same log, calls in four threads, and folders that come."""
    monkeypatch.setattr(plans, "FINAL_ROUNDS", 1)
    log = Log(tmp_path / "logs", cpu().arch, tuning_child.PROBLEM.operator)
    argv = [sys.executable, tuning_child.__file__, str(log.root), "2"]
    with calls_run(KEYS, tmp_path / "kernels") as own, subprocess.Popen(argv, stdout=subprocess.DEVNULL) as other:
        folder = tmp_path / "kernels" / cpu().arch
        ended = threading.Event()

        def tune() -> None:
            try:
                session.tune(plans.make_plan(tuning_child.PROBLEM, cpu(), 2, log, builders=1), log)
            finally:
                ended.set()

        def load() -> int:
            count = 0
            while not ended.wait(0.1):
                own.add(folder)
                count += 1
            return count

        def call(seed: int) -> int:
            count = 0
            while not ended.wait(0.2) or not count:
                checked_call(seed + 4 * count)
                count += 1
            return count

        with ThreadPoolExecutor(6) as pool:
            tuned, loaded, called = pool.submit(tune), pool.submit(load), [pool.submit(call, i) for i in range(4)]
            tuned.result()
            assert loaded.result() and all(one.result() for one in called)
        assert other.wait() == 0
    assert database.verify(log.root) == [] and len(log.sessions()) == 2
    assert tuning_child.PROBLEM.key in log.best() and len(log.read_best().bests) == 2


def first_call(cache: Path) -> tuple[str, bool]:
    """In a process that was forked after the import: the library that a call takes, and whether its result is right."""
    problem = parse(KEYS[0])
    own = Dispatcher(logs=(), shipped=cache / "none", cache=cache)
    found = own.kernel(problem, cpu())
    inputs, outputs = problem.generate(3), problem.empty_outputs()
    import tvm_ffi

    found.function(*(tvm_ffi.from_dlpack(a) if isinstance(a, np.ndarray) else a for a in (*inputs, *outputs)))
    problem.check(inputs, problem.reference(inputs), outputs)
    return found.entry.library, True


def test_ten_processes_race_for_a_cold_cache(tmp_path: Path, children_without_torch: None) -> None:
    """One compiles, nine wait for it, and all run the same library."""
    context = multiprocessing.get_context("forkserver")  # imports once, and forks the ten of it
    context.set_forkserver_preload(["tvm_sparse.runtime.dispatch", "tvm_ffi", "numpy", "test_concurrency"])
    with context.Pool(10) as pool:
        found = pool.map(first_call, [tmp_path] * 10, chunksize=1)
    folder = tmp_path / cpu().arch
    [entry] = manifest.read(folder)
    assert found == [(entry.library, True)] * 10
    assert entry.candidate == spaces.fallback(parse(KEYS[0]), cpu())
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert names - {".lock"} == {"manifest.json", entry.library}


def test_what_a_killed_process_left_is_gone_before_the_next_builds(tmp_path: Path) -> None:
    """Its part of the cache holds nothing then but the lock."""
    folder = tmp_path / cpu().arch
    with cache.building(folder, ["one.so"]) as place:
        (place / "half.so").write_bytes(b"half")
    with cache.building(folder, ["one.so"]) as again:
        assert again == place and {path.name for path in place.iterdir()} == {".lock"}


def test_a_library_is_compiled_while_another_process_compiles_another(tmp_path: Path) -> None:
    """It has the lock of that one's part of the cache; whoever removes all libraries waits for it."""
    folder, candidates = tmp_path / cpu().arch, [spaces.fallback(parse(key), cpu()) for key in KEYS[:2]]
    one, other = (library_name(parse(key), c, cpu().arch) for key, c in zip(KEYS[:2], candidates, strict=True))
    own = Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path)
    with ThreadPoolExecutor(1) as pool, cache.building(folder, [one]):
        assert own.kernel(parse(KEYS[1]), cpu()).entry.library == other
        assert [path.name for path in folder.glob("*.so")] == [other]
        cleaned = pool.submit(cache.clean, folder)
        with pytest.raises(TimeoutError):
            cleaned.result(timeout=0.5)
        assert (folder / other).exists()
    assert not list(folder.glob("*.so"))
