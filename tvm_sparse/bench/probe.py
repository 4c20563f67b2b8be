"""Properties of a process's first GPU: `python -m tvm_sparse.bench.probe` prints them as JSON.

It reports the driver's limits (`artifacts.cuda.limits`), and the read bandwidth of device memory. A separate process is
used so that the caller gets no context on the GPU.
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

# Bytes read at a time: many times the largest L2 cache.
READ_BYTES = 2 << 30
SECONDS = 180.0


def read_bandwidth() -> float:
    """Measure the bytes per second that one kernel reads from the first GPU's memory."""
    from .producer import Producer
    from .timing import time_launch

    producer = Producer((), sweep_bytes=READ_BYTES)
    return producer.sweep_bytes / statistics.median(time_launch(producer.launch))


def probe(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`limits` and `bandwidth` of the first GPU that a process with these variables sees, as far as they can be
    determined.

    `problems` gives the reasons for missing ones.
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
        except Exception as error:  # from the driver, the compiler, or lack of memory
            found["problems"].append(f"read bandwidth: {type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        told = _told()
    print(json.dumps(told))
