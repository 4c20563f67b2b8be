"""Devices that measure, and how the sessions that run at the same time share them.

A device has one or several *seats*: processes that measure on it. A session keeps its seat, so that its problem's
inputs and references, which take seconds to make, are made there once. Several seats may verify candidates at the same
time, but only one times, alone (`Turn`). Meanwhile other sessions search, build and make references, so that a GPU
waits for none of this. On a CPU they would disturb the timing, so a CPU device has one seat.

A session takes a `Lease`. With at most as many sessions as seats no session waits for a process. Devices on which no
session has its seat work for the others, and a new session gets one of them. If a device is lost, its measurements are
repeated by another one. This module does not depend on the location of devices: `local` makes those of this machine,
`cluster` those of a Ray cluster.
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

from ..bench.measure import DRAW, PROVE, RECHECK, TIME, VERIFY
from ..core import machine as machines
from ..core.machine import Machine, UnknownArch
from ..workers.building import BUILD_WORKER
from ..workers.processes import Pool, Reply, StartError, few_threads, pin
from .measuring import Lost, Measurer, device_state
from .replies import NotBelieved, check_measured

logger = logging.getLogger("tvm_sparse")

# Number of lost devices after which a trial is not tried again in this run, since it may have caused the losses.
MOST_LOST = 3
# If no device is left: seconds to wait for one to come back.
RECOVERY_SECONDS = 120.0
# Seats of a GPU. A session uses it for some 40 % of its time (H200, products that take microseconds).
GPU_SEATS = 3
# Seconds between checks, while waiting for a turn, whether the result is still wanted.
LOOK_SECONDS = 0.2
# Least share of a candidate's time limit for each of its steps.
LEAST_SECONDS = 0.2
# Most portions of a winner's proof, beyond those that `draws.Pool.proof` has.
MOST_PORTIONS = 40


class Measures(Protocol):
    """The interface of `Measurer`; both methods may also raise `Lost`."""

    def prepare(self, problem: Mapping[str, Any], abandoned: Callable[[], bool]) -> None: ...

    def measure(
        self, problem: Mapping[str, Any], library: Mapping[str, Any], timeout: float, abandoned: Callable[[], bool]
    ) -> Reply: ...

    def recover(self, abandoned: Callable[[], bool]) -> bool: ...

    def close(self) -> None: ...


class Builds(Protocol):
    """The interface of builders: a `Pool` of build workers, or a substitute."""

    def submit(self, request: Mapping[str, Any], *, timeout: float) -> Future[Reply]: ...

    def close(self) -> None: ...


class Turn:
    """Exclusion on a device: several seats may verify, or one may time. While a seat waits to time, none may begin to
    verify.

    Attributes
    ----------
    busy
        Seconds in which the device was used.
    waited, checked, timed
        Sums over all seats of the seconds spent waiting, verifying and timing.
    """

    def __init__(self) -> None:
        self.busy = self.waited = self.checked = self.timed = 0.0
        self._changed = threading.Condition()
        self._verifying = self._waiting = 0
        self._timing = False
        self._since = 0.0

    @contextlib.contextmanager
    def beside(self, unwanted: Callable[[], bool]) -> Iterator[None]:
        """A turn to verify, possibly beside others. Raises CancelledError if `unwanted` becomes true while it waits."""
        asked = time.monotonic()
        with self._changed:
            self._until(lambda: not self._timing and not self._waiting, unwanted)
            began = self._begin(asked)
            self._verifying += 1
        try:
            yield
        finally:
            with self._changed:
                self._verifying -= 1
                self.checked += time.monotonic() - began
                self._end()

    @contextlib.contextmanager
    def alone(self, unwanted: Callable[[], bool]) -> Iterator[None]:
        """A turn to time, alone. Raises CancelledError as `beside` does."""
        asked = time.monotonic()
        with self._changed:
            self._waiting += 1
            try:
                self._until(self._is_free, unwanted)
            finally:
                self._waiting -= 1
                self._changed.notify_all()
            began = self._begin(asked)
            self._timing = True
        try:
            yield
        finally:
            with self._changed:
                self._timing = False
                self.timed += time.monotonic() - began
                self._end()

    def _is_free(self) -> bool:
        return not self._timing and not self._verifying

    def _until(self, free: Callable[[], bool], unwanted: Callable[[], bool]) -> None:
        while not self._changed.wait_for(free, LOOK_SECONDS):
            if unwanted():
                raise CancelledError("the devices are closed")

    def _begin(self, asked: float) -> float:
        now = time.monotonic()
        self.waited += now - asked
        if self._is_free():
            self._since = now
        return now

    def _end(self) -> None:
        if self._is_free():
            self.busy += time.monotonic() - self._since
        self._changed.notify_all()


@dataclass(eq=False)
class Device:
    """A device that measures candidates, and its builders."""

    name: str
    machine: Machine
    measurers: Sequence[Measures]  # one for each seat
    builders: Builds
    state: Mapping[str, Any] = field(default_factory=dict)  # driver, clocks
    cores: Collection[int] = ()  # the processors that it is bound to
    turn: Turn = field(default_factory=Turn)


@dataclass(eq=False)
class Seat:
    """One of the processes that measure on a device."""

    device: Device
    measurer: Measures


@dataclass(eq=False)
class _Job:
    problem: Mapping[str, Any]
    library: Mapping[str, Any]
    timeout: float
    seat: Seat | None  # the only seat that may do the job, if set
    future: Future[Reply | None]
    lost: int = 0


class Lease:
    """A session's seats: its own, which is the first, and seats of devices that no other session needs.

    Made by `Fleet.lease`.
    """

    def __init__(self, fleet: Fleet, machine: Machine) -> None:
        self.machine = machine
        self.seats: list[Seat] = []
        self.jobs: deque[_Job] = deque()
        self._fleet = fleet
        self._turn = itertools.count()

    def seat(self) -> Seat:
        """The session's own seat; waits until it has one.

        Raises
        ------
        StartError
            If no seat is left.
        """
        return self._fleet.first(self)

    def build(self, requests: Iterable[Mapping[str, Any]], timeout: float) -> list[Future[Reply]]:
        """Build libraries with its devices' builders, in turn."""
        found = list(dict.fromkeys(seat.device.builders for seat in self.seats or [self.seat()]))
        return [found[next(self._turn) % len(found)].submit(request, timeout=timeout) for request in requests]

    def measure(
        self,
        built: Future[Reply],
        problem: Mapping[str, Any],
        library: Callable[[Reply], Mapping[str, Any] | None],
        timeout: float,
        seat: Seat | None = None,
    ) -> Future[Reply | None]:
        """Measure a library as soon as it is built; see `Measurer.measure`.

        Parameters
        ----------
        library
            Makes the request from the build's reply; if it returns None, nothing is measured, and the result is None.
        seat
            The only seat that may measure. If it is lost, the future's exception is `Lost`.
        """
        future: Future[Reply | None] = Future()

        def go_on(built: Future[Reply]) -> None:
            try:
                found = library(built.result())
                if found is None:
                    future.set_result(None)
                else:
                    self._fleet.put(self, _Job(problem, found, timeout, seat, future))
            except Exception as error:
                future.set_exception(error)

        built.add_done_callback(go_on)
        return future

    def take(self, seat: Seat) -> _Job | None:
        """The next job that this seat may do."""
        for job in self.jobs:
            if job.seat in (None, seat):
                self.jobs.remove(job)
                return job
        return None


class Fleet:
    """Devices, with a thread for each seat that starts its processes: these end with the thread."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._seats = [Seat(device, measurer) for device in devices for measurer in device.measurers]
        self._usable = list(devices)
        self._coming_back: set[Device] = set()
        self._last_loss, self._last_error = 0.0, StartError("no device is left")
        self._leases: list[Lease] = []
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, args=(s,), name=s.device.name) for s in self._seats]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it is closed or about to be."""
        return self._closed

    @property
    def machines(self) -> dict[Machine, int]:
        """The kinds of devices, and the number of each."""
        return dict(Counter(device.machine for device in self.devices))

    def sessions(self, machine: Machine | None = None) -> int:
        """Number of sessions that can have a seat at the same time, on devices of this kind or on all."""
        return sum(machine in (None, seat.device.machine) for seat in self._seats)

    @contextlib.contextmanager
    def lease(self, machine: Machine) -> Iterator[Lease]:
        """Seats on devices of this kind, during the block; unfinished jobs are dropped at its end."""
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

    def first(self, lease: Lease) -> Seat:
        with self._changed:
            while not lease.seats:
                if self._closed or not self._hopeful(lease.machine):
                    raise self._last_error
                self._changed.wait()
            return lease.seats[0]

    def put(self, lease: Lease, job: _Job) -> None:
        with self._changed:
            if self._closed or lease not in self._leases:
                raise CancelledError("the devices are closed")
            self._enter(lease, job)

    def close(self) -> None:
        """End all jobs and processes. May be called again."""
        with self._changed:
            self._closed = True
            for lease in self._leases:
                self._drop(lease, CancelledError("the devices are closed"))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for seat in self._seats:
            seat.measurer.close()
        for builders in {id(device.builders): device.builders for device in self.devices}.values():
            builders.close()

    def _serve(self, seat: Seat) -> None:
        """The main function of a seat's thread."""
        pin(seat.device.cores)
        while (found := self._next(seat)) is not None:
            lease, job = found
            try:
                reply = self._measure(seat, job)
            except (Lost, StartError) as error:
                self._lose(seat.device, lease, job, error)
                usable = seat.measurer.recover(self._given_up(seat.device))
                with self._changed:
                    self._coming_back.discard(seat.device)
                    if usable and seat.device not in self._usable:
                        logger.warning("%s is back", seat.device.name)
                        self._usable.append(seat.device)
                    self._share()
                if not usable:
                    return
            except Exception as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(reply)

    def _measure(self, seat: Seat, job: _Job) -> Reply:
        """Prepare and draw cases at any time, verify beside other seats, and time alone.

        Verification mostly uses the host, so the device is free for others in the meantime. While one seat verifies,
        none times: what needs no device is done before, and a proof, which takes seconds, in portions.
        """
        measurer, turn, left = seat.measurer, seat.device.turn, job.timeout
        asked = job.library["steps"]

        def ask(*steps: str, **more: bool) -> Reply:
            nonlocal left
            began = time.monotonic()
            try:
                reply = measurer.measure(job.problem, {**job.library, "steps": steps, **more}, left, self._is_closed)
            finally:
                if DRAW not in steps:  # which is not the library's work
                    left = max(LEAST_SECONDS, left - (time.monotonic() - began))
            return _believed(_unchanged(reply), steps, job.timeout)

        def verified(*steps: str) -> Reply:
            with turn.beside(self._is_closed):
                reply = ask(*steps)
            if reply.environment:  # perhaps because several seats ran out of memory together
                with turn.alone(self._is_closed):
                    reply = ask(*steps)
            return reply

        measurer.prepare(job.problem, self._is_closed)
        if PROVE in asked:
            for number in range(MOST_PORTIONS):
                drawn = ask(DRAW, proof=True)
                if not drawn.ok:
                    return drawn
                if number and drawn.value.get("left") is not True:
                    break
                if not (reply := verified(PROVE)).ok:
                    break
            return reply
        if VERIFY in asked and not (drawn := ask(DRAW)).ok:
            return drawn
        reply = verified(*(step for step in asked if step not in (TIME, RECHECK)))
        if not reply.ok or TIME not in asked:
            return reply
        with turn.alone(self._is_closed):
            timed = ask(TIME)
        if not timed.ok:
            return timed
        with turn.beside(self._is_closed):
            after = ask(RECHECK)
        return timed if after.ok else after

    def _is_closed(self) -> bool:
        return self._closed

    def _next(self, seat: Seat) -> tuple[Lease, _Job] | None:
        with self._changed:
            while not self._closed:
                lease = next((lease for lease in self._leases if seat in lease.seats), None)
                if lease is not None and (job := lease.take(seat)) is not None:
                    return lease, job
                self._changed.wait()
        return None

    def _lose(self, device: Device, lease: Lease, job: _Job, error: Exception) -> None:
        with self._changed:
            if device in self._usable:  # otherwise another seat has reported it
                logger.warning("%s is lost: %s", device.name, str(error).partition("\n")[0])
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
        """For a device that may come back: a function that returns whether nobody waits for it any more."""

        def given_up() -> bool:
            with self._changed:
                others = any(one.machine == device.machine for one in self._usable)
                late = time.monotonic() > self._last_loss + RECOVERY_SECONDS
                return self._closed or (late and not others)

        return given_up

    def _enter(self, lease: Lease, job: _Job, first: bool = False) -> None:
        if job.seat is not None and job.seat not in lease.seats:
            job.future.set_exception(Lost(f"{job.seat.device.name} has gone"))
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
        """Give each lease a seat, while there are any, and distribute seats of the remaining devices evenly.

        Leases keep their seats as far as possible.
        """
        for machine in {device.machine for device in self.devices}:
            seats = [s for s in self._seats if s.device.machine == machine and s.device in self._usable]
            # Leases with a seat first: if there are fewer seats than leases, none loses its only one.
            leases = sorted((one for one in self._leases if one.machine == machine), key=lambda one: not one.seats)
            held = {seat: lease for lease in leases for seat in lease.seats}
            own = {lease: lease.seats[0] for lease in leases if lease.seats and lease.seats[0] in seats}
            for lease in leases:
                free = [seat for seat in seats if seat not in own.values()]
                if lease not in own and free:
                    sessions = Counter(seat.device for seat in own.values())
                    # The last one, since a lease's first seat is its own.
                    own[lease] = min(reversed(free), key=lambda seat: (sessions[seat.device], seat in held))
            more: dict[Lease, list[Seat]] = {lease: [] for lease in own}
            needed = {seat.device for seat in own.values()}
            spare = {seat.device: seat for seat in reversed(seats) if own and seat.device not in needed}
            for seat in reversed(spare.values()):
                least = min(map(len, more.values()))
                helped = [lease for lease in own if len(more[lease]) == least]
                more[held[seat] if held.get(seat) in helped else helped[0]].append(seat)
            for lease in leases:
                lease.seats = [own[lease], *more[lease]] if lease in own else []
                for job in [job for job in lease.jobs if job.seat is not None and job.seat not in lease.seats]:
                    lease.jobs.remove(job)
                    self._enter(lease, job)
                if not self._hopeful(machine):
                    self._drop(lease, self._last_error)
        self._changed.notify_all()


def _unchanged(reply: Reply) -> Reply:
    """A step's reply, replaced by an error if the library changed the state of its process, which was ended for that.

    Further steps would need that process's data, and times measured in it are not valid.
    """
    if not (reply.ok and reply.changed):
        return reply
    what = ", ".join(reply.changed)
    return Reply("error", message=f"calling the library changed its process: {what}", changed=reply.changed)


def _believed(reply: Reply, steps: Sequence[str], timeout: float) -> Reply:
    """The reply if its times are possible; otherwise an error that blames the library."""
    try:
        check_measured(reply, steps, timeout)
    except NotBelieved as error:
        return Reply("error", message=f"the process that measured is not believed: {error}")
    return reply


def of_one_model(found: Iterable[Machine], model: str | None = None) -> set[Machine]:
    """The machines whose names contain `model`.

    Raises
    ------
    UnknownArch
        If there is none, or if several models of one architecture remain, since their records would share a folder.
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


def local(
    machine: Machine, builders: int, *, gpus: Sequence[int] = (0,), workers: int = 1, seats: int = GPU_SEATS
) -> Fleet:
    """Devices of this machine; their processes start at the first use, which takes seconds.

    Parameters
    ----------
    machine
        A machine from `core.machine`, whose kind says whether GPUs or CPUs are the devices.
    builders
        Number of processes that compile, for all devices together.
    gpus
        Indices of GPUs in `core.machine.gpus`, which share the builders.
    workers
        Number of parts into which the processors are divided. Builders and measurers of a part are bound to its
        processors, so that parts do not disturb each other.
    seats
        Number of seats of each GPU.
    """
    if machine.kind == "cuda":
        few = few_threads(threads_of_seat(len(gpus) * seats))
        # Problems take turns: one whose candidates compile for many seconds does not hold up the others.
        pool = Pool(builders, BUILD_WORKER, env=few, name="build", kind=lambda request: request["problem"])
        all_gpus, names = machines.gpus(), machines.visible_gpus()
        return Fleet(
            [
                Device(
                    f"GPU {number}",
                    all_gpus[number],
                    [Measurer({"CUDA_VISIBLE_DEVICES": names[number], **few}) for _ in range(seats)],
                    pool,
                    device_state(machine, number),
                )
                for number in gpus
            ]
        )
    if workers == 1:
        return Fleet([Device("CPU", machine, [Measurer()], Pool(builders, BUILD_WORKER, name="build"))])
    parts = cpu_parts(workers)
    # TVM binds its threads to the machine's first cores, even if the process may not use them.
    env = {"TVM_BIND_THREADS": "0"}
    share = max(1, builders // workers)
    return Fleet(
        [
            Device(
                f"CPU {number}",
                cpu_part(machine, workers),
                [Measurer(env)],
                Pool(share, BUILD_WORKER, name=f"build-{number}", cores=part),
                cores=part,
            )
            for number, part in enumerate(parts)
        ]
    )


def imagined(machine: Machine) -> Fleet:
    """A device of a machine that need not exist here, for making plans; nothing runs on it."""
    return Fleet([Device(machine.name, machine, [], Pool(1, BUILD_WORKER, name="build"))])


def threads_of_seat(seats: int) -> int:
    """Threads for references in each seat's process: together a quarter of the processors."""
    return max(1, machines.cpu().cores // (4 * seats))


def cpu_part(machine: Machine, workers: int) -> Machine:
    """One of `workers` equal parts of the CPU, as a machine."""
    return machine if workers == 1 else dataclasses.replace(machine, cores=max(1, machine.cores // workers))


def cpu_parts(workers: int) -> list[list[int]]:
    """This process's processors in `workers` parts of equal size; if there are fewer processors, some parts coincide.

    On systems without processor binding the parts are empty, and nothing is bound.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [[]] * workers
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // workers)
    return [cores[start : start + size] for start in (size * number % len(cores) for number in range(workers))]
