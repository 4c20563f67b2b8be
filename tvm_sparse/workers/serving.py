"""The child's side of `processes`: answer requests one at a time, until the parent has ended."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "TVM_SPARSE_WORKER"
"""Tells the child its two file descriptors and its parent: ``requests,replies,pid``."""

TAIL = 2000
"""Characters of output or traceback that go into a message."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_SIGNALS = sum(1 << (number - 1) for number in signal.valid_signals())
"""The signals that programs may handle, as bits of `/proc/self/status`.

The C library keeps others for itself (glibc: 32 and 33) and takes them when a process starts its first thread or
cancels one, whichever library does so: with OMP_NUM_THREADS=1 that is the first kernel, else NumPy's import.
"""


def serve(
    handle: Callable[[dict[str, Any]], Any],
    watched: Callable[[dict[str, Any]], bool] = lambda request: False,
    begin: Callable[[], object] = lambda: None,
) -> NoReturn:
    """Answer the requests of the `Worker` that started this process, until that ends.

    Slow preparations belong into `begin`: from there on this process ends with its parent.

    The result of `handle` must be representable in JSON. An exception becomes an error with the type, the message and
    the tail of the traceback; an exception with a true attribute ``fatal`` (a CUDA error that sticks to the context,
    say) makes the parent replace this process. So does a `watched` request that changes the state of the process: an
    alarm, signal handlers, floating-point rounding, a child process.
    """
    requests, replies = _attach()
    faulthandler.enable()  # so that a segfault leaves the Python stack in the output
    # Crashes are expected here, so no core dumps of gigabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # buffered text would be lost in a crash
    begin()
    _send_line(replies, json.dumps({"token": None}))
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            message = json.loads(line)
            before = _state() if watched(message["request"]) else None
            reply: dict[str, Any] = {"token": message["token"]}
            try:
                reply["ok"] = handle(message["request"])
                json.dumps(reply)  # raises here, as an error of the handler, if the result is not JSON
            except Exception as error:
                reply.pop("ok", None)
                reply["error"] = _describe_error(error)
                reply["traceback"] = traceback.format_exc()[-TAIL:]
                reply["fatal"] = bool(getattr(error, "fatal", False))
            after = _state() if before is not None else {}
            reply["changed"] = [what for what, state in (before or {}).items() if after.get(what) != state]
            _send_line(replies, json.dumps(reply))
    os._exit(0)  # no clean-up is needed, and a driver's exit handlers can hang


def _state() -> dict[str, Any]:
    """State of this process that a request may change, to the disadvantage of later ones."""
    timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    smallest = sys.float_info.min
    found: dict[str, Any] = {
        "its alarms": [signal.getitimer(which)[0] > 0 for which in timers],
        "its folder": os.getcwd(),
        "its limits": [resource.getrlimit(which) for which in (resource.RLIMIT_AS, resource.RLIMIT_CPU)],
        "its rounding": (ctypes.CDLL(None).fegetround(), smallest / 2 > 0),  # are denormal numbers flushed to zero?
    }
    names = {"SigBlk": "signals blocked", "SigIgn": "signals ignored", "SigCgt": "signals caught", "Umask": "its umask"}
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if what := names.get(name):
                found[what] = value if name == "Umask" else int(value, 16) & _SIGNALS
        found["its timers"] = Path("/proc/self/timers").read_text()
    except OSError:  # not supported everywhere
        pass
    found["its processes"] = _children()
    return found


def _children() -> set[str]:
    """The ids of this process's children, whichever of its threads started them."""
    found: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(path.read_text().split())
    return found


def _attach() -> tuple[int, int]:
    """Take over the pipes, and tie this process's lifetime to its parent's."""
    try:
        requests, replies, parent = map(int, os.environ.pop(VARIABLE).split(","))
    except (KeyError, ValueError):
        sys.exit(f"{sys.argv[0]}: to be started by tvm_sparse, not by hand")
    # Compilers started from here must not inherit the pipes.
    os.set_inheritable(requests, False)
    os.set_inheritable(replies, False)
    if sys.platform == "linux":
        # Detecting the end of the pipe is not enough, since it waits for the handler, which may not return. It is what
        # remains where a sandbox forbids this call.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # Orphaned descendants are adopted by this process, so that they can be killed with it.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the prctl
        sys.exit("the process that started this worker is gone, or is not its direct parent")
    return requests, replies


def _send_line(fd: int, text: str) -> None:
    data = memoryview(text.encode() + b"\n")
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BrokenPipeError:
        os._exit(0)


def _describe_error(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its __str__ may be anyone's code
        return type(error).__name__
