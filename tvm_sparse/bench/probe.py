"""What the first GPU of a process has: `python -m tvm_sparse.bench.probe` prints it as JSON.

The driver's limits (`artifacts.cuda.limits`), and the bytes a second that a kernel reads from device memory. A process
of its own, so that whoever asks keeps no context on the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..artifacts.cuda.limits import LimitsError, limits
from ..core import machine
from ..workers.absent import without

# Read at a time: many times the largest L2 cache.
READ_BYTES = 2 << 30
SECONDS = 180.0


def read_bandwidth() -> float:
    """Bytes a second that one kernel reads from the first GPU's memory."""
    from .producer import Producer
    from .timing import time_launch

    producer = Producer((), sweep_bytes=READ_BYTES)
    return producer.sweep_bytes / statistics.median(time_launch(producer.launch))


def probe(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`limits` and `bandwidth` of the first GPU that a process with these variables sees; without what it cannot tell.

    `problems` says why something is missing.
    """
    command = [sys.executable, "-m", "tvm_sparse.bench.probe"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **(env or {})}, check=False
        )
        return dict(json.loads(done.stdout.strip().rpartition("\n")[2]))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"problems": [f"the probe failed: {error}"]}


def _told() -> dict[str, Any]:
    found: dict[str, Any] = {"problems": []}
    where = machine.gpu()
    if where is None:
        return {"problems": ["there is no GPU"]}
    try:
        found["limits"] = asdict(limits(where, machine.gpus().index(where)))
    except LimitsError as error:
        found["problems"].append(str(error))
    with without("torch"):
        try:
            found["bandwidth"] = read_bandwidth()
        except Exception as error:  # of the driver, the compiler, or for want of memory
            found["problems"].append(f"read bandwidth: {type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        told = _told()
    print(json.dumps(told))
