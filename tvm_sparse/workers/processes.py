"""Child processes for builds and measurements that may crash, hang or spoil a GPU context.

A `Worker` is a child that answers requests one at a time; a `Pool` is several of them. Whatever the child does, the
parent gets a `Reply` in time: the parent keeps the deadline, and kills the child and all its descendants with SIGKILL.
This includes children that are stopped, hold the GIL or wait for a kernel that never ends. The child side is one call,
`serving.serve`::

    # build_child.py
    def handle(request: dict) -> object: ...
    serve(handle)

    # the tuner
    with Worker([sys.executable, "-m", "build_child"], name="build") as worker:
        reply = worker.call({"problem": "..."}, timeout=30)

Messages are JSON lines over two separate pipes: standard output is left to compiled code and libraries, and its tail is
shown when they crash.

A child's output and memory are limited, its temporary files are removed with it, and a reply counts only with the token
of its request. A `Reply` says whether the request itself or its environment caused a failure.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import math
import os
import re
import resource
import secrets
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from ..core.scratch import Scratch
from .serving import TAIL, VARIABLE

logger = logging.getLogger("tvm_sparse")

_START_SECONDS = 120.0
"""How long a child may import: TVM and PyTorch from a cold network disk take most of a minute."""

_REAP_SECONDS = 10.0
"""How long a killed child may take to go. The driver tears its context down first, and until then
it would disturb the next measurement; beyond that it hangs in the kernel and is abandoned."""

_LOOK_SECONDS = 0.2
"""How often a busy child is looked at. Its pipe tells of its end, unless a process that it forked
holds the other end."""

_MOST_OUTPUT = 64 << 20
"""Bytes that a child may print for one request, and that a reply may have."""

_MEMORY_SHARE = 0.8
"""The share of this machine's memory, or of its control group's, that a child may take."""

_STARVED_SHARE = 0.75
"""A request that spent as much of its time waiting for a processor timed out for want of one."""

_UNWATCHED_SHARE = 0.1
"""The share of a request's time after which the waits of its threads are read: nearly all requests end before."""

_FOREIGN_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Sent by the kernel for want of memory, or by whoever ends processes. No fault in a program raises them."""

_WANTING = re.compile(
    "No space left on device|Disk quota exceeded|Read-only file system|Too many open files|Cannot allocate memory|"
    "MemoryError|std::bad_alloc|Resource temporarily unavailable|out of memory|OUT_OF_MEMORY|cudaErrorMemoryAllocation"
)
"""What systems, compilers and drivers say where the machine lacks something."""


class StartError(RuntimeError):
    """A child could not be started, or ended before it was ready for a request.

    Not a `Reply`, since no request caused it, and the next one would fail too.
    """


@dataclass(frozen=True)
class Reply:
    """The outcome of a request.

    Parameters
    ----------
    kind : str
        ``ok``; ``error``: the handler raised; ``crash``: the child died; ``timeout``.
    value : object
        The handler's result after a round trip through JSON; None unless ``ok``.
    message : str
        A description of the failure (``Type: message`` for an error); empty when ``ok``.
    traceback : str
        Tail of the child's traceback, for an error.
    fatal : bool
        Whether the child was replaced after an error whose exception had the attribute ``fatal``.
    environment : bool
        Whether it failed for lack of memory, disk space or processors, or because another process ended or stopped the
        child: the same request may succeed later.
    changed : tuple of str
        Parts of the process's state that the request changed (`serve`); the child was replaced for that.
    """

    kind: Literal["ok", "error", "crash", "timeout"]
    value: Any = None
    message: str = ""
    traceback: str = ""
    fatal: bool = False
    environment: bool = False
    changed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the reply has a value."""
        return self.kind == "ok"


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    requests: int  # the parent's ends of the two pipes; neither ever blocks
    replies: int
    output: IO[bytes]
    scratch: Scratch  # for its temporary files
    ready_by: float
    ready: bool = False
    received: bytearray = field(default_factory=bytearray)
    searched: int = 0  # length of the prefix of `received` known to contain no end of line
    look_at: float = 0.0  # time of the next check of its output and memory


@dataclass
class _Job:
    token: str
    timeout: float
    unsent: memoryview
    deadline: float
    watched: float | None = None  # start of watching how long its threads wait for a processor
    waited: Mapping[str, float] = field(default_factory=dict)  # those waits at that time


class Worker:
    """A child process that answers requests one at a time, and is replaced when it fails.

    Starting is lazy. After a crash, a timeout or a fatal error, or if the child died between two calls, the next call
    gets a fresh process.

    Not thread-safe; and because Linux ties the parent-death signal to the *thread* that started
    the child, the thread that makes the calls should live as long as the worker does.

    Parameters
    ----------
    argv : sequence of str
        Command whose process (not a child of it) calls `serve`.
    env : mapping, optional
        Variables to set in addition to those of this process.
    name : str
        For messages.
    start_timeout : float
        Seconds until the child has to be ready; not part of any request's time.
    memory : int, optional
        Bytes of memory beyond which the child is killed; its own children's memory does not count. Default: four fifths
        of the machine's.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        name: str,
        start_timeout: float = _START_SECONDS,
        memory: int | None = None,
    ) -> None:
        self.argv = tuple(argv)
        self.env = dict(env or {})
        self.name = name
        self.start_timeout = start_timeout
        self.memory = int(_MEMORY_SHARE * _memory()) if memory is None else memory
        self.started = 0  # number of children started so far
        self._child: _Child | None = None
        self._job: _Job | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Id of the child and of its process group; None while there is none."""
        return self._child.process.pid if self._child else None

    def start(self) -> None:
        """Start the child if it is not running, and wait until it is ready.

        Raises
        ------
        StartError
            If it cannot be started, ends at once, or takes longer than `start_timeout`.
        """
        self.spawn()
        try:
            while self._child and not self._child.ready:
                self._wait()
                self._advance()
        except BaseException:
            self.close()
            raise

    def spawn(self) -> None:
        """Start the child if it is not running, without waiting.

        Raises
        ------
        StartError
            If it cannot be started.
        """
        if self._child and _has_ended(self._child.process):
            self.close()
        if self._child is None:
            self._child = _spawn(self.argv, self.env, self.name, self.start_timeout)
            self.started += 1

    def call(
        self, request: Mapping[str, Any], *, timeout: float, abandoned: Callable[[], bool] = lambda: False
    ) -> Reply:
        """Send a request and wait for its reply, at most `timeout` seconds.

        Parameters
        ----------
        abandoned
            Called a few times a second; if it returns True, the child and the call end.

        Raises
        ------
        StartError
            As in `start`. Anything that the request does is a `Reply`.
        concurrent.futures.CancelledError
            If the call was abandoned.
        TypeError, ValueError
            If the request cannot be JSON, or another one is running.
        """
        self._submit(request, timeout)
        try:
            while (reply := self._advance()) is None:
                if abandoned():
                    raise CancelledError(f"{self.name}: the request was abandoned")
                self._wait()
        except BaseException:  # Ctrl-C, for example: the child's work is discarded
            self.close()
            raise
        return reply

    def close(self) -> None:
        """Kill the child and all processes that it has started, and wait for it. May be called again."""
        self._job = None
        child, self._child = self._child, None
        if child is not None:
            _kill(child)
            os.close(child.requests)
            os.close(child.replies)
            child.output.close()

    def _submit(self, request: Mapping[str, Any], timeout: float) -> None:
        if self._job is not None:
            raise ValueError(f"{self.name} is busy")
        # Not a counter: a message of a process that an earlier request printed or forked must not pass for the reply to
        # this one.
        token = secrets.token_hex(16)
        line = json.dumps({"token": token, "request": dict(request)}).encode() + b"\n"
        self.spawn()
        assert self._child is not None
        self._job = _Job(token, timeout, memoryview(line), deadline=math.inf)
        if self._child.ready:
            self._begin(self._child, self._job)
            # Discard output of earlier requests, which is not this one's and must not fill the disk.
            os.ftruncate(self._child.output.fileno(), 0)

    def _begin(self, child: _Child, job: _Job) -> None:
        """Start the request's time."""
        job.deadline = time.monotonic() + job.timeout

    def _advance(self) -> Reply | None:
        """Send and receive as much as possible without waiting; returns the reply once it is complete."""
        child, job = self._child, self._job
        assert child is not None
        ended = _has_ended(child.process)  # before reading, so that nothing it sent is missed
        closed = self._receive(child)
        while (end := child.received.find(b"\n", child.searched)) >= 0:
            line = bytes(child.received[:end])
            del child.received[: end + 1]
            child.searched = 0
            try:
                message = json.loads(line)
                token = message["token"]
            except (ValueError, TypeError, KeyError):
                return self._fail("crash", f"sent what is not a reply: {line[:80]!r}")
            if token is None:
                if not child.ready:
                    child.ready = True
                    if job:
                        self._begin(child, job)
            elif job and token == job.token:
                return self._finish(message)
            # A message with another token: a late reply of a process that the child forked, or no reply at all.

        child.searched = len(child.received)

        if child.ready and job:
            closed = self._send(child, job) or closed
        if ended or closed:
            return self._fail("crash")
        now = time.monotonic()
        if now >= child.look_at:
            child.look_at = now + _LOOK_SECONDS
            if taken := self._takes_too_much(child):
                return self._fail("crash", taken)
            if job and job.watched is None and now > job.deadline - (1 - _UNWATCHED_SHARE) * job.timeout:
                job.watched, job.waited = now, _waited(child.process.pid)
        if not child.ready and now >= child.ready_by:
            return self._fail("timeout", f"was not ready within {self.start_timeout:g} s")
        if job and now >= job.deadline:
            reason = _kept_from_running(child.process.pid, job)
            what = f"did not reply within {job.timeout:g} s{reason and ': '}{reason}"
            return self._fail("timeout", what, environment=bool(reason))
        return None

    def _takes_too_much(self, child: _Child) -> str:
        """The resource of which the child uses too much, for a message; empty if none."""
        if os.fstat(child.output.fileno()).st_size > _MOST_OUTPUT:
            return f"printed more than {_MOST_OUTPUT >> 20} MiB"
        if len(child.received) > _MOST_OUTPUT:
            return f"sent more than {_MOST_OUTPUT >> 20} MiB that are no reply"
        if _resident(child.process.pid) > self.memory:
            return f"held more than {self.memory / 2**30:.1f} GiB of memory"
        return ""

    def _receive(self, child: _Child) -> bool:
        """Read available data; returns whether the child has closed its end."""
        # The limit keeps a child that floods the pipe from delaying the deadline. A child that has ended leaves at most
        # a pipe's capacity, which is far below it.
        for _ in range(64):
            try:
                data = os.read(child.replies, 1 << 16)
            except BlockingIOError:
                return False
            if not data:
                return True
            child.received += data
        return False

    def _send(self, child: _Child, job: _Job) -> bool:
        """Write as much as fits; returns whether the child has closed its end."""
        try:
            while job.unsent:
                job.unsent = job.unsent[os.write(child.requests, job.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return True
        return False

    def _finish(self, message: dict[str, Any]) -> Reply:
        self._job = None
        fatal, changed = bool(message.get("fatal")), tuple(message.get("changed", ()))
        if changed:
            logger.info("%s is renewed: a request has changed %s", self.name, ", ".join(changed))
        if fatal or changed:
            self.close()
        if "error" not in message:
            return Reply("ok", value=message.get("ok"), changed=changed)
        return Reply(
            "error",
            message=message["error"],
            traceback=message.get("traceback", ""),
            fatal=fatal,
            environment=_WANTING.search(message["error"]) is not None,
            changed=changed,
        )

    def _fail(self, kind: Literal["crash", "timeout"], what: str = "", environment: bool = False) -> Reply:
        """Kill the child; `what` says what it did, unless it ended by itself."""
        child = self._child
        assert child is not None
        if not what and not _ends_soon(child.process):
            what = "closed its pipe"
        output = _tail(child.output)
        self.close()
        if not what:
            status = child.process.returncode
            what = _describe_status(status)
            foreign = status is not None and -status in _FOREIGN_SIGNALS
            environment = foreign or _WANTING.search(output) is not None
        message = f"{self.name} {what}"
        if output:
            message += f"\n--- end of its output ---\n{output}"
        if not child.ready:
            raise StartError(f"{message}\n(command: {' '.join(self.argv)})")
        return Reply(kind, message=message, environment=environment)

    def _wait(self) -> None:
        """Wait until data can be sent or received, the deadline, or the next check."""
        child, job = self._child, self._job
        assert child is not None
        until = time.monotonic() + _LOOK_SECONDS
        poller = select.poll()
        poller.register(child.replies, select.POLLIN)
        if child.ready and job and job.unsent:
            poller.register(child.requests, select.POLLOUT)
        until = min(until, child.ready_by if not child.ready else math.inf)
        until = min(until, job.deadline if job else math.inf)
        poller.poll(max(0, math.ceil((until - time.monotonic()) * 1000)))


_Waiting = tuple[Future[Reply], Mapping[str, Any], float, threading.Event | None]


class Pool:
    """Several workers for independent requests. Thread-safe.

    A thread waits for each busy worker, so that requests proceed even if nobody waits for replies. The threads live as
    long as the pool, since children end with the thread that started them.

    Parameters
    ----------
    size : int
        How many children run at the same time.
    argv, env, name, start_timeout
        As in `Worker`.
    cores : collection of int, optional
        The processors that the children may use. Default: those of this process.
    kind : callable, optional
        Returns the kind of a request. Kinds take turns, so that many requests of one do not delay those of another;
        requests of one kind keep their order. Default: all are of one kind.
    """

    def __init__(
        self,
        size: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        name: str,
        start_timeout: float = _START_SECONDS,
        cores: Collection[int] = (),
        kind: Callable[[Mapping[str, Any]], Hashable] = lambda request: None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool has at least one worker, not {size}")
        self.workers = tuple(
            Worker(argv, env=env, name=f"{name}-{number}", start_timeout=start_timeout) for number in range(size)
        )
        self._idle = list(self.workers)
        self._kind = kind
        self._waiting: dict[Hashable, deque[_Waiting]] = {}  # by kind; the kind whose turn it is comes first
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(size, f"{name}-pool", initializer=pin, initargs=(cores,))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self, request: Mapping[str, Any], *, timeout: float, abandoned: threading.Event | None = None
    ) -> Future[Reply]:
        """Give a request to a free worker when it is its turn; `timeout` counts from then on.

        The future's exceptions are those of `Worker.call`. A request that kills its worker does not affect others.
        Setting `abandoned`, or closing the pool, ends it.
        """
        future: Future[Reply] = Future()
        with self._lock:
            self._threads.submit(self._run_next)
            self._waiting.setdefault(self._kind(request), deque()).append((future, request, timeout, abandoned))
        return future

    def start(self) -> None:
        """Start the workers that are not running, and wait until all are ready. The pool must be idle.

        Raises
        ------
        StartError
            As in `Worker.start`.
        """
        together = threading.Barrier(len(self.workers))  # each in a thread of its own, with which the child would end

        def start(worker: Worker) -> None:
            together.wait()
            worker.start()

        for future in [self._threads.submit(start, worker) for worker in self.workers]:
            future.result()

    def map(self, requests: Iterable[Mapping[str, Any]], *, timeout: float) -> Generator[Reply]:
        """Yield a reply for each request, in the order of the requests; closing the generator early ends running
        requests.

        Raises
        ------
        StartError
            As in `Worker.start`.
        """
        abandoned = threading.Event()
        futures = [self.submit(request, timeout=timeout, abandoned=abandoned) for request in requests]
        try:
            for future in futures:
                yield future.result()
        finally:
            abandoned.set()
            wait([future for future in futures if not future.cancel()])

    def _run_next(self) -> None:
        """Run the request whose turn it is."""
        with self._lock:
            if not self._waiting:  # all were cancelled by `close`
                return
            kind = next(iter(self._waiting))
            waiting = self._waiting.pop(kind)
            future, request, timeout, abandoned = waiting.popleft()
            if waiting:
                self._waiting[kind] = waiting  # after the other kinds
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._run(request, timeout, abandoned))
        except BaseException as error:
            future.set_exception(error)

    def _run(self, request: Mapping[str, Any], timeout: float, abandoned: threading.Event | None) -> Reply:
        with self._lock:
            # Running workers first, so that few requests start few children.
            worker = max(self._idle, key=lambda worker: worker.pid is not None)
            self._idle.remove(worker)
        try:
            return worker.call(
                request,
                timeout=timeout,
                abandoned=lambda: self._closed.is_set() or (abandoned is not None and abandoned.is_set()),
            )
        finally:
            with self._lock:
                self._idle.append(worker)

    def close(self) -> None:
        """End every worker and all running requests; new ones are refused. May be called again."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future, *_ in itertools.chain.from_iterable(waiting.values()):
            future.cancel()
        self._threads.shutdown()
        for worker in self.workers:
            worker.close()


def pin(cores: Collection[int]) -> None:
    """Bind the calling thread, and processes that it starts, to these processors; no effect if `cores` is empty."""
    if cores:
        os.sched_setaffinity(0, cores)


def _spawn(argv: Sequence[str], env: Mapping[str, str], name: str, timeout: float) -> _Child:
    try:
        output, scratch = tempfile.TemporaryFile(), Scratch()
    except OSError as error:
        where = f"the temporary folder {tempfile.gettempdir()} (TMPDIR sets another)"
        raise StartError(f"{name} cannot be started: {where}: {error.strerror or error}") from error
    request_reader, request_writer = os.pipe()
    reply_reader, reply_writer = os.pipe()
    # Appending, so that the file can be truncated between requests while the child has it open.
    flags = fcntl.fcntl(output, fcntl.F_GETFL)
    fcntl.fcntl(output, fcntl.F_SETFL, flags | os.O_APPEND)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                "TMPDIR": str(scratch.path),
                **env,
                VARIABLE: f"{request_reader},{reply_writer},{os.getpid()}",
            },
            pass_fds=(request_reader, reply_writer),
            start_new_session=True,  # a process group that can be killed, and that gets no Ctrl-C from the terminal
        )
    except BaseException as error:
        os.close(request_writer)
        os.close(reply_reader)
        output.close()
        scratch.close()
        if isinstance(error, OSError):
            raise StartError(f"{name} cannot be started: {error}") from error
        raise
    finally:
        os.close(request_reader)
        os.close(reply_writer)
    scratch.lend(process.pid)
    os.set_blocking(request_writer, False)
    os.set_blocking(reply_reader, False)
    return _Child(process, request_writer, reply_reader, output, scratch, time.monotonic() + timeout)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the child has ended, without reaping it, since its id stays reserved until then."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    if process.returncode is not None:
        return True
    try:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, flags) is not None
    except ChildProcessError:  # reaped by other code of this process, or SIGCHLD is ignored
        return True


def _ends_soon(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child that has closed its pipe ends within a moment."""
    until = time.monotonic() + 0.5
    while not (ended := _has_ended(process)) and time.monotonic() < until:
        time.sleep(0.005)
    return ended


def _waited(pid: int) -> dict[str, float]:
    """Seconds that each thread of a process has waited for a processor, by thread id; empty where Linux does not report
    it.
    """
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            found[path.parent.name] = int(path.read_text().split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
    return found


def _kept_from_running(pid: int, job: _Job) -> str:
    """Why a request that ran out of time was delayed by other processes; empty if it was not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    if state in "Tt":
        return "the process was stopped"
    if job.watched is None:
        return ""
    waited = max((now - job.waited.get(thread, 0.0) for thread, now in _waited(pid).items()), default=0.0)
    starved = waited > _STARVED_SHARE * (time.monotonic() - job.watched)
    return f"it waited {waited:.1f} s for a processor" if starved else ""


def few_threads(count: int) -> dict[str, str]:
    """Environment variables that limit the threads of a process for NumPy's matrix products to `count`.

    By default each process has one for each processor, which keep spinning after their work.
    """
    return dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(count))


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 if it has ended, or where the system does not report it."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:  # called several times a second
            return int(file.read(64).split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _memory() -> int:
    """Bytes of memory of this machine, or the limit of this process's control group."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # another version of control groups, or "max"
        return machine


def _kill(child: _Child) -> None:
    """Kill the child and all its descendants, whatever their process group or session, and reap it."""
    child.scratch.close()
    try:
        os.killpg(child.process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS refuses if only a zombie is left
        pass
    child.process.kill()  # in case it left its group
    try:
        child.process.wait(_REAP_SECONDS)
    except subprocess.TimeoutExpired:
        pass


def _describe_status(status: int | None) -> str:
    if status is None:
        return "is stuck in the kernel and does not end"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    hint = ", perhaps for want of memory" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _tail(output: IO[bytes]) -> str:
    size = os.fstat(output.fileno()).st_size
    start = max(0, size - 4 * TAIL)  # a character takes at most four bytes
    text = os.pread(output.fileno(), size - start, start).decode(errors="replace")
    return text[-TAIL:].strip()
