"""A child's side of `processes`: requests are answered one at a time, until the parent is gone."""

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
    """Answer the requests of the `Worker` that started this process, until it goes away.

    What takes long before the first one belongs into `begin`: from there on this process ends with its parent.

    What `handle` returns has to be JSON. What it raises becomes an error with the type, the message
    and the tail of the traceback; an exception with a true attribute ``fatal`` (a CUDA error that
    sticks to the context, say) makes the parent replace this process. So does a request that is `watched`, and that
    leaves the process in another state than it found it in: an alarm, signals, the rounding of numbers, a child.
    """
    requests, replies = _attach()
    faulthandler.enable()  # a segfault leaves the Python stack in the output
    # Crashes are expected here: no gigabytes of core for each.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what is in a buffer is lost in a crash
    begin()
    _send_line(replies, json.dumps({"token": None}))
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            message = json.loads(line)
            before = _state() if watched(message["request"]) else None
            reply: dict[str, Any] = {"token": message["token"]}
            try:
                reply["ok"] = handle(message["request"])
                json.dumps(reply)  # what is not JSON is the handler's error
            except Exception as error:
                reply.pop("ok", None)
                reply["error"] = _describe_error(error)
                reply["traceback"] = traceback.format_exc()[-TAIL:]
                reply["fatal"] = bool(getattr(error, "fatal", False))
            after = _state() if before is not None else {}
            reply["changed"] = [what for what, state in (before or {}).items() if after.get(what) != state]
            _send_line(replies, json.dumps(reply))
    os._exit(0)  # nobody is left to clean up for, and a driver's exit handlers can hang


def _state() -> dict[str, Any]:
    """What a request may leave behind in this process that others would meet."""
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
    except OSError:  # not everywhere
        pass
    found["its processes"] = _children()
    return found


def _children() -> set[str]:
    """The processes that run as children of this one, whichever of its threads has started them."""
    found: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(path.read_text().split())
    return found


def _attach() -> tuple[int, int]:
    """Take over the pipes, and tie this process's life to its parent's."""
    try:
        requests, replies, parent = map(int, os.environ.pop(VARIABLE).split(","))
    except (KeyError, ValueError):
        sys.exit(f"{sys.argv[0]}: to be started by tvm_sparse, not by hand")
    # Compilers started from here must not keep the pipes open.
    os.set_inheritable(requests, False)
    os.set_inheritable(replies, False)
    if sys.platform == "linux":
        # Reading the end of the pipe is not enough: it waits for the handler, which may not return.
        # Where a sandbox forbids this call, it is what remains.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # What is started here stays a descendant of this process, whoever started it has ended: with it, it is ended.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:  # it died before the prctl
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
    except Exception:  # its __str__ is somebody else's code
        return type(error).__name__
