"""Devices that measure, and how the sessions that run at the same time share them.

A session takes a `Lease` for its time. Every device belongs to one lease: so a problem's inputs and references, which
take seconds to make, are made on as few devices as possible, and where there are as many sessions as devices nobody
waits for another's measurement. Spare devices help the sessions that run; a new session gets its share of them.

A device that is lost gives back what it was measuring, and another one does that again. Nothing here knows where
devices are: `local` makes those of this machine, `cluster` those of a Ray cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..core import machine as machines
from ..core.machine import Machine, UnknownArch
from ..workers.building import BUILD_WORKER
from ..workers.processes import Pool, Reply, StartError, pin
from .measuring import Lost, Measurer, device_state

logger = logging.getLogger("tvm_sparse")

# A trial whose device is lost so often is not tried again in this run: perhaps it is what ends them.
MOST_LOST = 3
# Where no device is left: how long one is waited for that comes back.
RECOVERY_SECONDS = 120.0


class Measures(Protocol):
    """What `Measurer` does; `measure` may also raise `Lost`."""

    def measure(
        self, problem: Mapping[str, Any], library: Mapping[str, Any], timeout: float, abandoned: Callable[[], bool]
    ) -> Reply: ...

    def recover(self, abandoned: Callable[[], bool]) -> bool: ...

    def close(self) -> None: ...


class Builds(Protocol):
    """What compiles: a `Pool` of build workers, or what stands for one."""

    def submit(self, request: Mapping[str, Any], *, timeout: float) -> Future[Reply]: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Device:
    """Where candidates are measured, and who builds for it."""

    name: str
    machine: Machine
    measurer: Measures
    builders: Builds
    state: Mapping[str, Any] = field(default_factory=dict)  # driver, clocks
    cores: Collection[int] = ()  # the processors that it is bound to
    busy: float = 0.0  # seconds that it has measured


@dataclass(eq=False)
class _Job:
    problem: Mapping[str, Any]
    library: Mapping[str, Any]
    timeout: float
    device: Device | None  # the only one that may do it
    future: Future[Reply | None]
    lost: int = 0


class Lease:
    """A session's devices. Made by `Fleet.lease`."""

    def __init__(self, fleet: Fleet, machine: Machine) -> None:
        self.machine = machine
        self.devices: list[Device] = []
        self.jobs: deque[_Job] = deque()
        self._fleet = fleet
        self._turn = itertools.count()

    def device(self) -> Device:
        """One of them, once there is one.

        Raises
        ------
        StartError
            If none is left.
        """
        return self._fleet.first(self)

    def build(self, requests: Iterable[Mapping[str, Any]], timeout: float) -> list[Future[Reply]]:
        """Have libraries built, by the builders of its devices in turn."""
        found = list(dict.fromkeys(device.builders for device in self.devices or [self.device()]))
        return [found[next(self._turn) % len(found)].submit(request, timeout=timeout) for request in requests]

    def measure(
        self,
        built: Future[Reply],
        problem: Mapping[str, Any],
        library: Callable[[Reply], Mapping[str, Any] | None],
        timeout: float,
        device: Device | None = None,
    ) -> Future[Reply | None]:
        """Have a library measured once it is built; see `Measurer.measure`.

        Parameters
        ----------
        library
            Says what to send of a build's reply; where it is None nothing is measured, and None comes back.
        device
            The only one that may do it. If that is lost, the future's exception is `Lost`.
        """
        future: Future[Reply | None] = Future()

        def go_on(built: Future[Reply]) -> None:
            try:
                found = library(built.result())
                if found is None:
                    future.set_result(None)
                else:
                    self._fleet.put(self, _Job(problem, found, timeout, device, future))
            except Exception as error:
                future.set_exception(error)

        built.add_done_callback(go_on)
        return future

    def take(self, device: Device) -> _Job | None:
        """The next job that this device may do."""
        for job in self.jobs:
            if job.device in (None, device):
                self.jobs.remove(job)
                return job
        return None


class Fleet:
    """Devices, each with a thread of its own, which starts its processes: these end with the thread."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._usable = list(devices)
        self._coming_back: set[Device] = set()
        self._last_loss, self._last_error = 0.0, StartError("no device is left")
        self._leases: list[Lease] = []
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, args=(one,), name=one.name) for one in devices]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it is, or is about to be."""
        return self._closed

    @property
    def machines(self) -> dict[Machine, int]:
        """The kinds of devices, and how many there are of each."""
        return dict(Counter(device.machine for device in self.devices))

    def count(self, machine: Machine) -> int:
        """How many devices are of this kind."""
        return self.machines[machine]

    @contextlib.contextmanager
    def lease(self, machine: Machine) -> Iterator[Lease]:
        """Devices of this kind, for the time of the block; what is under way at its end is given up."""
        lease = Lease(self, machine)
        with self._changed:
            self._leases.append(lease)
            self._share()
        try:
            yield lease
        finally:
            with self._changed:
                self._leases.remove(lease)
                self._share()
                self._drop(lease, CancelledError("the session has ended"))

    def first(self, lease: Lease) -> Device:
        with self._changed:
            while not lease.devices:
                if self._closed or not self._hopeful(lease.machine):
                    raise self._last_error
                self._changed.wait()
            return lease.devices[0]

    def put(self, lease: Lease, job: _Job) -> None:
        with self._changed:
            if self._closed or lease not in self._leases:
                raise CancelledError("the devices are closed")
            self._enter(lease, job)

    def close(self) -> None:
        """End what is under way, and all processes. May be called again."""
        with self._changed:
            self._closed = True
            for lease in self._leases:
                self._drop(lease, CancelledError("the devices are closed"))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for device in self.devices:
            device.measurer.close()
        for builders in {id(device.builders): device.builders for device in self.devices}.values():
            builders.close()

    def _serve(self, device: Device) -> None:
        """What the thread of a device does."""
        pin(device.cores)
        while (found := self._next(device)) is not None:
            lease, job = found
            began = time.monotonic()
            try:
                reply = device.measurer.measure(job.problem, job.library, job.timeout, lambda: self._closed)
            except (Lost, StartError) as error:
                self._lose(device, lease, job, error)
                usable = device.measurer.recover(self._given_up(device))
                with self._changed:
                    self._coming_back.discard(device)
                    if usable:
                        logger.warning("%s is back", device.name)
                        self._usable.append(device)
                    self._share()
                if not usable:
                    return
            except Exception as error:
                job.future.set_exception(error)
            else:
                device.busy += time.monotonic() - began
                job.future.set_result(reply)

    def _next(self, device: Device) -> tuple[Lease, _Job] | None:
        with self._changed:
            while not self._closed:
                lease = next((lease for lease in self._leases if device in lease.devices), None)
                if lease is not None and (job := lease.take(device)) is not None:
                    return lease, job
                self._changed.wait()
        return None

    def _lose(self, device: Device, lease: Lease, job: _Job, error: Exception) -> None:
        logger.warning("%s is lost: %s", device.name, str(error).partition("\n")[0])
        with self._changed:
            self._usable.remove(device)
            self._coming_back.add(device)
            self._last_loss = time.monotonic()
            self._last_error = error if isinstance(error, StartError) else StartError(f"{device.name}: {error}")
            self._share()
            job.lost += 1
            if self._closed or lease not in self._leases:
                job.future.set_exception(CancelledError("the session has ended"))
            elif job.lost >= MOST_LOST:
                reply = Reply("crash", message=f"{job.lost} devices were lost in the midst: {error}", environment=True)
                job.future.set_result(reply)
            else:
                self._enter(lease, job, first=True)

    def _given_up(self, device: Device) -> Callable[[], bool]:
        """For a device that may come back: whether nobody waits for it any more."""

        def given_up() -> bool:
            with self._changed:
                others = any(one.machine == device.machine for one in self._usable)
                late = time.monotonic() > self._last_loss + RECOVERY_SECONDS
                return self._closed or (late and not others)

        return given_up

    def _enter(self, lease: Lease, job: _Job, first: bool = False) -> None:
        if job.device is not None and job.device not in lease.devices:
            job.future.set_exception(Lost(f"{job.device.name} has gone"))
        elif not self._hopeful(lease.machine):
            job.future.set_exception(self._last_error)
        else:
            (lease.jobs.appendleft if first else lease.jobs.append)(job)
            self._changed.notify_all()

    def _hopeful(self, machine: Machine) -> bool:
        """Whether there is a device of this kind, or one that may come back."""
        return any(device.machine == machine for device in (*self._usable, *self._coming_back))

    def _drop(self, lease: Lease, error: BaseException) -> None:
        while lease.jobs:
            lease.jobs.popleft().future.set_exception(error)

    def _share(self) -> None:
        """Give each device to a lease, evenly; it stays where it is if that is even."""
        for machine in {device.machine for device in self.devices}:
            # Those that hold one first: where devices are fewer than sessions, nobody loses its only one.
            leases = sorted((one for one in self._leases if one.machine == machine), key=lambda one: not one.devices)
            free = [device for device in self._usable if device.machine == machine]
            share, more = divmod(len(free), len(leases)) if leases else (0, 0)
            sizes = [share + (number < more) for number in range(len(leases))]
            for lease, size in zip(leases, sizes, strict=True):
                lease.devices = [device for device in lease.devices if device in free][:size]
                free = [device for device in free if device not in lease.devices]
            for lease, size in zip(leases, sizes, strict=True):
                needed = size - len(lease.devices)
                lease.devices, free = lease.devices + free[:needed], free[needed:]
                for job in [job for job in lease.jobs if job.device is not None and job.device not in lease.devices]:
                    lease.jobs.remove(job)
                    self._enter(lease, job)
                if not self._hopeful(machine):
                    self._drop(lease, self._last_error)
        self._changed.notify_all()


def of_one_model(found: Iterable[Machine], model: str | None = None) -> set[Machine]:
    """The machines whose names have `model` in them.

    Raises
    ------
    UnknownArch
        If there is none, or if several of one architecture remain: their records would lie in one folder.
    """
    all_machines = set(found)
    chosen = {machine for machine in all_machines if model is None or model.lower() in machine.name.lower()}
    names = ", ".join(sorted(f"{one.name} ({one.arch}, {one.cores} cores)" for one in chosen or all_machines))
    if not chosen:
        raise UnknownArch(f"model: none of the devices has {model!r} in its name: {names}")
    if len({machine.arch for machine in chosen}) < len(chosen):
        raise UnknownArch(f"model: records of one architecture are of one model; name one of {names}")
    return chosen


# ------------------------------------------------------------------------------------------------- this machine


def local(machine: Machine, builders: int, *, gpus: Sequence[int] = (0,), workers: int = 1) -> Fleet:
    """Devices of this machine, whose processes start when first used, which takes them seconds.

    Parameters
    ----------
    machine
        As `core.machine` gives it: its kind says whether GPUs or processors are the devices.
    builders
        Processes that compile, for all devices together.
    gpus
        Which GPUs, as numbers of `core.machine.gpus`. They share their builders.
    workers
        Into how many parts the processors are divided. What builds for a part is bound to it like what measures
        there, so that no part disturbs another one.
    """
    if machine.kind == "cuda":
        pool = Pool(builders, BUILD_WORKER, name="build")
        all_gpus, names = machines.gpus(), machines.visible_gpus()
        return Fleet(
            [
                Device(
                    f"GPU {number}",
                    all_gpus[number],
                    Measurer({"CUDA_VISIBLE_DEVICES": names[number]}),
                    pool,
                    device_state(machine, number),
                )
                for number in gpus
            ]
        )
    if workers == 1:
        return Fleet([Device("CPU", machine, Measurer(), Pool(builders, BUILD_WORKER, name="build"))])
    parts = cpu_parts(workers)
    # TVM binds its threads to the first cores, whichever those of the process are.
    env = {"TVM_BIND_THREADS": "0"}
    share = max(1, builders // workers)
    return Fleet(
        [
            Device(
                f"CPU {number}",
                cpu_part(machine, workers),
                Measurer(env),
                Pool(share, BUILD_WORKER, name=f"build-{number}", cores=part),
                cores=part,
            )
            for number, part in enumerate(parts)
        ]
    )


def cpu_part(machine: Machine, workers: int) -> Machine:
    """One of so many equal parts of the CPU, as a machine."""
    return machine if workers == 1 else dataclasses.replace(machine, cores=max(1, machine.cores // workers))


def cpu_parts(workers: int) -> list[list[int]]:
    """This process's processors in so many parts of the same size; where there are fewer, several parts are the same.

    On systems that do not bind processes the parts are empty, and nothing is bound.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [[]] * workers
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // workers)
    return [cores[start : start + size] for start in (size * number % len(cores) for number in range(workers))]
