"""Measuring on a device by a supervised process, which prepares each problem's inputs before its candidates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..core import machine as machines
from ..core.machine import Machine
from ..workers.processes import Reply, StartError, Worker

MEASURE_WORKER = (sys.executable, "-m", "tvm_sparse.bench.measure")
# Seconds to make a problem's inputs and references: on a busy machine, gigabytes of them take minutes.
PREPARE_TIMEOUT = 600.0


class PrepareError(RuntimeError):
    """A problem's inputs and references could not be made; no candidate is to blame."""


class Lost(RuntimeError):
    """A device was lost during a measurement; nothing is known about the candidate."""


class Measurer:
    """A process that measures on one device of this machine. Not thread-safe: it ends with the thread that starts it.

    Parameters
    ----------
    env : mapping, optional
        Environment variables of the process, which select its device.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._worker = Worker(MEASURE_WORKER, env=env, name="measure")
        self._prepared: tuple[Any, ...] = ()  # the process, and the problem for which it is prepared
        self._ready: int | None = None  # the process whose device was tested

    @property
    def processes(self) -> int:
        """Number of processes started: one, and one more for each that was ended."""
        return self._worker.started

    def prepare(self, problem: Mapping[str, Any], abandoned: Callable[[], bool] = lambda: False) -> None:
        """Make a problem's inputs and references in the process, unless it has them. The device is not used.

        Parameters
        ----------
        problem
            The request of `bench.measure`, without a library.
        abandoned
            As in `Worker.call`.

        Raises
        ------
        PrepareError
            If they cannot be made.
        StartError
            If the process does not start.
        """
        self._worker.start()
        wanted = (self._worker.pid, problem["problem"], problem["seed"], problem.get("structure"))
        if self._prepared != wanted:
            reply = self._worker.call(problem, timeout=PREPARE_TIMEOUT, abandoned=abandoned)
            if not reply.ok:
                self._try_device(problem["kind"], abandoned)  # which may be the reason
                raise PrepareError(reply.message)
            self._prepared = wanted

    def measure(
        self,
        problem: Mapping[str, Any],
        library: Mapping[str, Any],
        timeout: float,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> Reply:
        """Verify and time one library, for at most `timeout` seconds, after preparing the problem if necessary.

        Parameters
        ----------
        problem, abandoned
            As in `prepare`.
        library
            The other fields of the request of `bench.measure`: a path, and the layouts of workspaces.

        Raises
        ------
        PrepareError
            As in `prepare`.
        StartError
            If the process does not start, or has no working device.
        """
        self.prepare(problem, abandoned)
        if self._ready != self._worker.pid:
            self._try_device(problem["kind"], abandoned)
        return self._worker.call({**problem, **library}, timeout=timeout, abandoned=abandoned)

    def _try_device(self, kind: str, abandoned: Callable[[], bool]) -> None:
        """Use the device for the first time, which takes a second that must not count against a candidate."""
        reply = self._worker.call({"kind": kind}, timeout=PREPARE_TIMEOUT, abandoned=abandoned)
        if not reply.ok:
            raise StartError(f"the device: {reply.message}")
        self._ready = self._worker.pid

    def recover(self, abandoned: Callable[[], bool]) -> bool:
        """Whether it can be used again after `StartError` or `Lost`; false here, since a local process would fail
        again.
        """
        return False

    def close(self) -> None:
        """End the process."""
        self._worker.close()


def device_state(machine: Machine, number: int = 0) -> dict[str, str]:
    """Driver and clocks of the GPU with this number, as far as nvidia-smi reports them; empty for a CPU."""
    if machine.kind != "cuda":
        return {}
    fields = "driver_version,clocks.sm,clocks.mem,power.limit"
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={machines.gpu_bus(number)}"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields.split(","), (value.strip() for value in text.split(",")), strict=False))
