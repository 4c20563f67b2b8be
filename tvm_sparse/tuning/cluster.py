"""The devices of a Ray cluster: an actor for each device that measures, and tasks on any node that build.

Actors and tasks start and supervise the same worker processes as a driver does on one machine. Search, records and
libraries stay with the driver: a node holds nothing that another one needs. An actor whose GPU is lost is restarted by
Ray when another GPU is available.

Actors and tasks reply with plain data as bytes, which Ray does not unpickle, and which is checked (`replies`).

The package and Ray must be installed on every node, in the driver's versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core import machine as machines
from ..core import scratch
from ..core.machine import Machine
from ..workers.building import BUILD_WORKER
from ..workers.processes import Reply, StartError, Worker
from .fleet import GPU_SEATS, Device, Fleet, of_one_model
from .measuring import Lost, Measurer, PrepareError, device_state
from .replies import (
    MOST_TEXT,
    NotBelieved,
    check_built,
    check_described,
    check_measured,
    of_request,
    packed,
    unpacked,
)

# Seconds between checks, during a wait for the cluster, whether the result is still wanted.
LOOK_SECONDS = 0.5
# Seconds to wait for a device. One that becomes ready later is used from then on.
READY_SECONDS = 120.0
# Free bytes of a node's temporary folder below which a failed build is not blamed on its candidate.
LEAST_DISK = 1 << 20
CONNECT_SECONDS = 10.0
LOCAL = "local"
_PLACE = re.compile(r"\[?(?P<host>[^\]/]+)\]?:(?P<port>\d{1,5})")


class ClusterError(RuntimeError):
    """The cluster cannot be used; the message says why."""


def _ray() -> Any:
    """The Ray module; machines without it can import this module and be examined."""
    import ray

    return ray


def versions() -> dict[str, str]:
    """Versions that must be the same on all nodes: a candidate means the same only with the same templates and
    compiler.
    """
    names = ("tvm_sparse", "apache-tvm", "ray")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


# ---------------------------------------------------------------------------------------------------- on the nodes


class Place:
    """The actor: one device of a node, with a supervised measuring process for each seat.

    Each seat handles one request at a time; several seats work at the same time.
    """

    def __init__(self, kind: str, seats: int) -> None:
        self._kind = kind
        self._measurers = [Measurer() for _ in range(seats)]
        self._scratch = [scratch.Scratch() for _ in range(seats)]

    def describe(self) -> bytes:
        """The device, its node and its software."""
        machine = machines.gpu() if self._kind == "cuda" else machines.cpu()
        return packed(
            {
                "host": platform.node(),
                "node": _ray().get_runtime_context().get_node_id(),
                "machine": asdict(machine) if machine else None,
                "state": device_state(machine) if machine else {},
                "versions": versions(),
            }
        )

    def prepare(self, seat: int, problem: Mapping[str, Any]) -> bytes:
        """As `Measurer.prepare`, for one seat."""

        def prepare() -> dict[str, Any]:
            self._measurers[seat].prepare(problem)
            return {"problem": problem["problem"]}

        return _answer(prepare)

    def measure(
        self, seat: int, problem: Mapping[str, Any], library: Mapping[str, Any], content: bytes, timeout: float
    ) -> bytes:
        """As `Measurer.measure`, for one seat and a library with this content."""

        def measure() -> dict[str, Any]:
            path = self._scratch[seat].path / "library.so"
            path.unlink(missing_ok=True)  # never overwritten: a process may have the previous one loaded
            path.write_bytes(content)
            reply = self._measurers[seat].measure(problem, {**library, "library": str(path)}, timeout)
            return {"problem": problem["problem"], "sha256": _sha256(content), "reply": asdict(reply)}

        return _answer(measure)


# Exceptions that a place reports by their names.
_RAISED = {cls.__name__: cls for cls in (PrepareError, StartError)}


def _answer(work: Callable[[], dict[str, Any]]) -> bytes:
    """Run a task of the cluster; its result, or one of its documented exceptions, as bytes."""
    try:
        return packed(work())
    except tuple(_RAISED.values()) as error:
        return packed({"raised": type(error).__name__, "message": str(error)})


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def build(request: Mapping[str, Any], timeout: float) -> bytes:
    """The task: a build worker's reply, and the library. The worker is kept for this process's next task."""
    global _builder
    _builder = _builder or Worker(BUILD_WORKER, name="build")
    with scratch.folder() as folder:
        path = folder / "library.so"
        reply = _builder.call({**request, "path": str(path)}, timeout=timeout)
        wanting = not reply.ok and shutil.disk_usage(folder).free < LEAST_DISK
        content = path.read_bytes() if reply.ok else b""
    asked = {name: request[name] for name in ("problem", "candidate")}
    found = asdict(reply) | ({"environment": True} if wanting else {})
    return packed({**asked, "sha256": _sha256(content), "reply": found}, content)


_builder: Worker | None = None


# -------------------------------------------------------------------------------------------------- with the driver


class RemoteMeasurer:
    """A seat of a `Place`, as a measurer for a fleet."""

    def __init__(self, actor: Any, seat: int, described: Mapping[str, Any]) -> None:
        self._actor, self._seat, self._machine = actor, seat, described["machine"]
        self._prepared: tuple[Any, ...] = ()  # the prepared problem; a place repeats lost preparations
        self.node = described["node"]

    def prepare(self, problem: Mapping[str, Any], abandoned: Callable[[], bool]) -> None:
        wanted = (problem["problem"], problem["seed"], problem.get("structure"))
        if self._prepared != wanted:
            found = _result(self._actor.prepare.remote(self._seat, problem), abandoned)
            try:
                _raise_what_it_says(unpacked(found)[0])
            except NotBelieved as error:
                raise StartError(f"a device is not believed: {error}") from None
            self._prepared = wanted

    def measure(
        self, problem: Mapping[str, Any], library: Mapping[str, Any], timeout: float, abandoned: Callable[[], bool]
    ) -> Reply:
        content = Path(library["library"]).read_bytes()
        found = _result(self._actor.measure.remote(self._seat, problem, library, content, timeout), abandoned)
        try:
            value, _ = unpacked(found)
            _raise_what_it_says(value)
            reply = of_request(value, problem=problem["problem"], sha256=_sha256(content))
            check_measured(reply, library["steps"], timeout)
        except NotBelieved as error:
            reply = Reply("crash", message=f"its device is not believed: {error}", environment=True)
        if not reply.ok:  # its process may have been replaced
            self._prepared = ()
        return reply

    def recover(self, abandoned: Callable[[], bool]) -> bool:
        """Wait until Ray has restarted the actor, if it does. The new one must have a device of the same kind."""
        self._prepared = ()
        dead = _ray().exceptions.ActorDiedError
        while not abandoned():
            try:
                value, _ = unpacked(_result(self._actor.describe.remote(), abandoned))
                return value.get("machine") == self._machine
            except NotBelieved:
                return False
            except Lost as error:
                if isinstance(error.__cause__, dead):
                    return False
                time.sleep(LOOK_SECONDS)  # between two states of the actor calls fail at once
        return False

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the cluster may have ended
            _ray().kill(self._actor)


class RemoteBuilders:
    """Build tasks instead of a pool: as many at a time as the cluster has room for."""

    def __init__(self) -> None:
        # Ray retries a task whose node or process is lost.
        self._build = _ray().remote(num_cpus=1, max_retries=3)(build)
        self._refs: set[Any] = set()

    def submit(self, request: Mapping[str, Any], *, timeout: float) -> Future[Reply]:
        future: Future[Reply] = Future()
        ref = self._build.remote({**request, "path": None}, timeout)
        self._refs.add(ref)

        def take(done: Future[Any]) -> None:
            self._refs.discard(ref)
            try:
                value, content = unpacked(done.result())
                reply = of_request(value, problem=request["problem"], candidate=request["candidate"])
                check_built(reply, content, value.get("sha256"))
                if reply.ok:
                    Path(request["path"]).write_bytes(content)
                    reply = dataclasses.replace(reply, value={**reply.value, "path": request["path"]})
                future.set_result(reply)
            except NotBelieved as error:
                reply = Reply("crash", message=f"its builder is not believed: {error}", environment=True)
                future.set_result(reply)
            except OSError as error:
                future.set_exception(error)
            except Exception as error:
                future.set_result(lost_build(error))

        ref.future().add_done_callback(take)
        return future

    def close(self) -> None:
        for ref in tuple(self._refs):
            with contextlib.suppress(Exception):  # the cluster may have ended
                _ray().cancel(ref, force=True)


def lost_build(error: Exception) -> Reply:
    """The reply for a build that was lost, which does not blame its candidate."""
    return Reply("crash", message=f"its node or its task was lost: {error}", environment=True)


def _result(ref: Any, abandoned: Callable[[], bool]) -> Any:
    """The result of an actor's call.

    Raises
    ------
    Lost
        If the actor or its node was lost.
    """
    ray = _ray()

    while not ray.wait([ref], timeout=LOOK_SECONDS)[0]:
        if abandoned():
            ray.cancel(ref)
            raise Lost("given up")
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        raise Lost(str(error).partition("\n")[0]) from error


def _raise_what_it_says(value: Mapping[str, Any]) -> None:
    """Raise `PrepareError` or `StartError` if a place replied with one."""
    if "raised" in value:
        if value["raised"] not in _RAISED:
            raise NotBelieved(f"raised is {str(value['raised'])[:100]!r}, expected {' or '.join(_RAISED)}")
        raise _RAISED[value["raised"]](str(value.get("message"))[:MOST_TEXT])


@contextlib.contextmanager
def connected(
    address: str,
    target: str = "auto",
    *,
    model: str | None = None,
    workers: int | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Iterator[Fleet]:
    """The devices of a cluster.

    Parameters
    ----------
    address
        An address for `ray.init`, or "local" for a cluster of this machine alone, which ends with the block.
    target
        A target as for `core.machine.resolve`, applied to the cluster: "auto" for its GPUs if it has any, else its
        processors; "cpu" or "cuda"; or an architecture, of which all devices are used.
    model
        As in `of_one_model`.
    workers
        Number of measuring processes if CPUs are the devices. Default: one for each node.
    show
        Called with a message about each device that is not used, with the reason.

    Raises
    ------
    ClusterError
        If there is no such cluster, or nothing in it to measure or to build with.
    UnknownArch
        As in `of_one_model`.
    """
    ray = _ray()

    started = _connect(address)
    actors: list[Any] = []
    try:
        resources = ray.cluster_resources()
        gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
        kind = _kind(target, gpus)
        options: dict[str, Any]
        if kind == "cuda":
            # Each GPU gets a core, and a new GPU brings its own.
            count, options = gpus, {"num_gpus": 1, "num_cpus": 1, "max_restarts": -1}
            missing = "it has no GPU" if not gpus else f"of its {cores} cores none is left to build"
        else:
            nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
            # Restarted, it would take the core of a builder, perhaps of the last one.
            count, options = workers or nodes, {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
            missing = f"of its {cores} cores {count} are to measure, and none is left to build"
        if not 0 < count < cores:
            raise ClusterError(f"ray: the cluster at {address} cannot be used: {missing}")
        # The driver gives a lost actor's work to another one; Ray must not repeat it.
        seats = GPU_SEATS if kind == "cuda" else 1
        place = ray.remote(max_task_retries=0, max_concurrency=seats, **options)(Place)
        actors = [place.remote(kind, seats) for _ in range(count)]
        found = _described(actors, show)
        devices = _devices(actors, seats, found, target, show)
        if not devices:
            raise ClusterError(f"ray: the cluster at {address} has no device for the target {target}")
        chosen = of_one_model((device.machine for device in devices), model)
        with Fleet([device for device in devices if device.machine in chosen]) as fleet:
            yield fleet
    finally:
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if started:
            ray.shutdown()


def _connect(address: str) -> bool:
    """Connect this process to a cluster, unless it is connected; returns whether it was not."""
    ray = _ray()

    if ray.is_initialized():
        return False
    # A private cluster sends no usage statistics.
    own = address == LOCAL
    if own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if place := _PLACE.fullmatch(address):  # Ray would retry for minutes
            socket.create_connection((place["host"], int(place["port"])), CONNECT_SECONDS).close()
        ray.init(
            address=LOCAL if own else address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({"include_dashboard": False} if own else {}),
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ClusterError(f"ray: no connection to {address}: {str(error).partition(chr(10))[0]}") from None
    return True


def _kind(target: str, gpus: int) -> str:
    if target == "auto":
        return "cuda" if gpus else "llvm"
    if target in ("cpu", "cuda"):
        return {"cpu": "llvm"}.get(target, target)
    return "cuda" if target.startswith("sm_") else "llvm"


def _described(actors: Sequence[Any], show: Callable[[str], None]) -> dict[int, dict[str, Any]]:
    """The description of each actor that has started in time, by its number."""
    ray = _ray()

    refs = {actor.describe.remote(): number for number, actor in enumerate(actors)}
    ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=READY_SECONDS)
    if late:
        show(f"{len(late)} of {len(refs)} devices were not ready within {READY_SECONDS:g} s and are not used")
    found = {}
    for ref in ready:
        try:
            value, _ = unpacked(ray.get(ref))
            check_described(value)
            found[refs[ref]] = value
        except NotBelieved as error:
            show(f"a device is not used: it is not believed: {error}")
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            show(f"a device is not used: {lines[-1] if lines else type(error).__name__}")
    return dict(sorted(found.items()))


def _devices(
    actors: Sequence[Any], seats: int, found: Mapping[int, Mapping[str, Any]], target: str, show: Callable[[str], None]
) -> list[Device]:
    builders, ours, devices = RemoteBuilders(), versions(), []
    for number, described in found.items():
        name = f"device {number} on {described['host']}"
        theirs = described["versions"]
        if theirs != ours:
            other = ", ".join(f"{what} {theirs[what]} for {ours[what]}" for what in ours if theirs[what] != ours[what])
            show(f"{name} is not used: it has {other}")
        elif described["machine"] is None:
            show(f"{name} is not used: its driver finds no GPU")
        else:
            machine = Machine(**described["machine"])
            if target == machine.arch:
                machine = dataclasses.replace(machine, instructions="")  # as in `core.machine.resolve`
            if target in ("auto", "cpu", "llvm", "cuda", machine.arch):
                measurers = [RemoteMeasurer(actors[number], seat, described) for seat in range(seats)]
                devices.append(Device(name, machine, measurers, builders, described["state"]))
    return devices
