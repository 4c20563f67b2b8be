"""Commands that are killed at drawn moments leave nothing: no process, no temporary folder, no half of a file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tuning_child
from cases import thorough

from tvm_sparse.core import scratch

KEY = tuning_child.THREADED.key
SECONDS = 30.0
COMMANDS = {
    "tune": ("tune", KEY, "--target", "cpu", "--trials", "8", "--logs", "logs"),
    "export": ("export", "--target", "cpu", "--shapes", "shapes.toml", "--logs", "logs", "-o", "kernels"),
    "bench": ("bench", KEY, "--target", "cpu"),
    "quickstart": ("quickstart",),
}


def left_in(folder: Path) -> list[Path]:
    """What is there after a while in which it may go."""
    until = time.monotonic() + SECONDS
    while (found := list(folder.iterdir())) and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("name", ["tune", "export", thorough("bench"), thorough("quickstart")])
def test_a_killed_command_leaves_nothing(name: str, tmp_path: Path, children_without_torch: None) -> None:
    rng = random.Random(seed := random.SystemRandom().randrange(2**32))
    (temporary := tmp_path / "temporary").mkdir()
    (tmp_path / "shapes.toml").write_text("[[softmax_topk]]\nbatch = [1, 2, 3, 4, 5, 6]\nvocab = 300\nk = 5\n")
    argv = [sys.executable, "-m", "tvm_sparse", *COMMANDS[name]]
    environment = os.environ | {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    used = 0
    for _ in range(3):
        command = subprocess.Popen(
            argv, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + SECONDS
        while command.poll() is None and not list(temporary.iterdir()) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 3))
        used += bool(list(temporary.iterdir()))
        if command.poll() is None:
            family = psutil.Process(command.pid).children(recursive=True)
            command.send_signal(signal.SIGKILL)
            command.wait()
            _, alive = psutil.wait_procs(family, timeout=SECONDS)
            assert not alive, seed
        assert left_in(temporary) == [], seed
    assert used
    for folder in (tmp_path / "kernels", *(tmp_path / "cache").glob("tvm_sparse/kernels/*")):
        if folder.is_dir():  # a library that was being written goes with the next one that is
            scratch.sweep(folder)
            names = {path.name for path in folder.iterdir()}
            assert not [one for one in names if one.startswith(scratch.UNFINISHED)], (seed, names)
            assert "manifest.json" in names or all(one.endswith((".so", "runtime", ".parts", ".lock")) for one in names)
