"""Child processes: whatever the child does, an answer comes in time and nothing is left."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from tvm_sparse.core import locking, scratch, spaces
from tvm_sparse.core import machine as machines
from tvm_sparse.core.registry import parse
from tvm_sparse.workers import building, processes
from tvm_sparse.workers.absent import without
from tvm_sparse.workers.building import BUILD_WORKER, Kept
from tvm_sparse.workers.processes import Pool, StartError, Worker

PACKAGE_ROOT = Path(processes.__file__).parents[2]
ENV = {"PYTHONPATH": str(PACKAGE_ROOT)}
linux = pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")

CHILD = """
import ctypes, os, signal, subprocess, sys, tempfile, time
from tvm_sparse.workers.serving import serve

class Sticky(RuntimeError):
    fatal = True

class Rude(Exception):
    def __str__(self):
        raise ValueError

def handle(request):
    match request["do"]:
        case "echo": return request["value"]
        case "pid": return os.getpid()
        case "size": return len(request["value"])
        case "grow": return "x" * request["size"]
        case "env": return {name: os.environ.get(name) for name in request["names"]}
        case "meet":
            open(os.path.join(request["folder"], str(request["number"])), "w").close()
            while len(os.listdir(request["folder"])) < request["all"]: time.sleep(0.01)
            return request["number"]
        case "nap": time.sleep(request["seconds"]); return request["seconds"]
        case "print":
            print('{"number": 0, "ok": "from stdout"}')
            os.write(1, b'{"number": 0, "ok": "from C"}\\n' * 1000)
            print("noise", file=sys.stderr)
            return "printed"
        case "raise": raise KeyError("missing")
        case "rude": raise Rude
        case "sticky": raise Sticky("CUDA_ERROR_ILLEGAL_ADDRESS")
        case "object": return object()
        case "exit": sys.exit(3)
        case "_exit": print("last words"); os._exit(7)
        case "abort": print("last words"); os.abort()
        case "segfault": ctypes.string_at(0)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "close": os.closerange(3, 65536); time.sleep(60)
        case "garble": os.write(request["fd"], b"[]\\n"); time.sleep(60)
        case "flood":
            while True: os.write(request["fd"], b"x" * 65536)
        case "print on":
            while True: os.write(1, b"x" * 65536)
        case "hold": kept.append(bytearray(b"x") * request["size"]); time.sleep(60)
        case "leave": open(tempfile.mkstemp()[1], "w").write("left"); return tempfile.gettempdir()
        case "alarm": signal.alarm(60)
        case "thread":
            import threading
            thread = threading.Thread(target=lambda: None)
            thread.start(); thread.join()
            return len(signal.valid_signals())
        case "catch": signal.signal(signal.SIGUSR1, lambda *_: None)
        case "spin":
            while True: pass
        case "stop": os.kill(os.getpid(), signal.SIGSTOP)
        case "gil": ctypes.PyDLL(None).sleep(60)
        case "spawn": return subprocess.Popen(["sleep", "60"]).pid
        case "escape":
            # A session of its own, and a parent that has ended.
            code = "import subprocess; how = dict(stdout=subprocess.DEVNULL, start_new_session=True);"
            code += "print(subprocess.Popen(['sleep', '60'], **how).pid)"
            how = dict(env={} if request.get("clean") else None, start_new_session=True)
            return int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, **how).stdout)
        case "escape and die":
            open(os.environ["TMPDIR"] + "/here", "w").close()
            subprocess.Popen(["sh", "-c", f"echo $$ > {request['path']}; exec sleep 60"], start_new_session=True)
            while not (os.path.exists(request["path"]) and open(request["path"]).read()): time.sleep(0.01)
            os._exit(1)
        case "fork and die":
            pid = os.fork()
            if pid == 0: time.sleep(60)
            os._exit(1)
        case "later":
            import threading
            threading.Timer(0.05, os._exit, [9]).start()

kept = []
serve(handle, watched=lambda request: "watched" in request)
"""


@pytest.fixture(scope="module")
def argv(tmp_path_factory) -> list[str]:
    script = tmp_path_factory.mktemp("child") / "child.py"
    script.write_text(CHILD)
    return [sys.executable, str(script)]


@pytest.fixture
def worker(argv) -> Iterator[Worker]:
    with Worker(argv, env=ENV, name="worker") as worker:
        yield worker


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        if sys.platform == "linux":
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
    return True


def is_gone(pid: int, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while is_alive(pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def pid_of(worker: Worker) -> int:
    return worker.call({"do": "pid"}, timeout=10).value


# Answers ---------------------------------------------------------------------------------------


def test_answers(worker):
    value = {"a": [1, 2.5, None, True], "b": "\u2028 \ud800 é\n"}
    reply = worker.call({"do": "echo", "value": value}, timeout=10)
    assert reply.ok and reply.value == value
    assert worker.pid == pid_of(worker) == pid_of(worker)
    worker.close()
    worker.close()
    assert worker.pid is None


def test_prints_do_not_disturb(worker):
    for _ in range(3):
        assert worker.call({"do": "print"}, timeout=10).value == "printed"


def test_output_does_not_pile_up(worker):
    worker.call({"do": "print"}, timeout=10)
    reply = worker.call({"do": "_exit"}, timeout=10)
    assert "last words" in reply.message and "noise" not in reply.message
    assert "\0" not in reply.message


def test_big_messages(worker):
    text = "y" * 5_000_000
    assert worker.call({"do": "size", "value": text}, timeout=20).value == len(text)
    assert worker.call({"do": "grow", "size": len(text)}, timeout=20).value == "x" * len(text)
    assert worker.call({"do": "echo", "value": text}, timeout=20).value == text


def test_errors_keep_the_process(worker):
    pid = pid_of(worker)
    reply = worker.call({"do": "raise"}, timeout=10)
    assert (reply.kind, reply.message, reply.fatal) == ("error", "KeyError: 'missing'", False)
    assert 'raise KeyError("missing")' in reply.traceback
    assert worker.call({"do": "rude"}, timeout=10).message == "Rude"
    assert worker.call({"do": "object"}, timeout=10).message.startswith("TypeError: Object of type")
    assert pid_of(worker) == pid


def test_fatal_error_renews_the_process(worker):
    pid = pid_of(worker)
    reply = worker.call({"do": "sticky"}, timeout=10)
    assert reply.kind == "error" and reply.fatal and "ILLEGAL_ADDRESS" in reply.message
    assert is_gone(pid)
    assert pid_of(worker) != pid


def test_environment_is_added_to(argv):
    with Worker(argv, env={**ENV, "EXTRA": "1"}, name="worker") as worker:
        names = ["EXTRA", "PATH", "TVM_SPARSE_WORKER"]
        value = worker.call({"do": "env", "names": names}, timeout=10).value
    assert value == {"EXTRA": "1", "PATH": os.environ["PATH"], "TVM_SPARSE_WORKER": None}


def test_request_that_is_not_json(worker):
    with pytest.raises(TypeError):
        worker.call({"do": object()}, timeout=10)
    assert worker.call({"do": "echo", "value": 1}, timeout=10).ok


def test_foreign_reaping(worker):
    """A host application may ignore SIGCHLD: the kernel then reaps, and nobody has a status."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert worker.call({"do": "_exit"}, timeout=10).kind == "crash"
        assert worker.call({"do": "echo", "value": 1}, timeout=10).ok
        worker.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


# Crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "do, message, output",
    [
        ("abort", "worker was killed by SIGABRT", "last words"),
        ("segfault", "worker was killed by SIGSEGV", "string_at"),  # faulthandler's stack
        ("kill", "worker was killed by SIGKILL, perhaps", ""),
        ("_exit", "worker ended with exit status 7", "last words"),
        ("exit", "worker ended with exit status 3", ""),
        ("close", "worker closed its pipe", ""),
    ],
)
def test_crash(worker, do, message, output):
    pid = pid_of(worker)
    reply = worker.call({"do": do}, timeout=20)
    assert reply.kind == "crash" and not reply.ok
    assert reply.message.startswith(message)
    assert output in reply.message
    assert reply.environment == (do == "kill")
    assert pid_of(worker) != pid and is_gone(pid)


def test_crash_while_a_forked_process_holds_the_pipe(worker):
    worker.start()
    reply = worker.call({"do": "fork and die"}, timeout=20)
    assert reply.kind == "crash" and reply.message.startswith("worker ended with exit status 1")


def test_crash_between_calls_is_nobodys(worker):
    assert worker.call({"do": "later"}, timeout=10).ok
    assert is_gone(worker.pid)
    assert worker.call({"do": "echo", "value": 1}, timeout=10).ok


def reply_pipe(worker: Worker) -> int:
    """The number of the child's end: the only pipe that it writes, but for none of 0 to 2."""
    for entry in sorted(Path(f"/proc/{worker.pid}/fd").iterdir(), key=lambda p: int(p.name)):
        if int(entry.name) > 2 and os.readlink(entry).startswith("pipe:"):
            flags = Path(f"/proc/{worker.pid}/fdinfo/{entry.name}").read_text().split()[3]
            if int(flags, 8) & os.O_ACCMODE == os.O_WRONLY:
                return int(entry.name)
    raise AssertionError("no pipe")


@linux
def test_rubbish_in_the_pipe(worker):
    worker.start()
    reply = worker.call({"do": "garble", "fd": reply_pipe(worker)}, timeout=20)
    assert reply.kind == "crash" and "not a reply: b'[]'" in reply.message
    worker.start()
    reply = worker.call({"do": "flood", "fd": reply_pipe(worker)}, timeout=0.3)
    assert not reply.ok
    assert worker.call({"do": "echo", "value": 1}, timeout=10).ok


def test_output_and_memory_are_bounded(worker, monkeypatch):
    monkeypatch.setattr(processes, "_MOST_OUTPUT", 1 << 20)
    reply = worker.call({"do": "print on"}, timeout=20)
    assert reply.kind == "crash" and "printed more than 1 MiB" in reply.message and not reply.environment
    worker.memory = 256 << 20
    reply = worker.call({"do": "hold", "size": 1 << 29}, timeout=20)
    assert reply.kind == "crash" and "more than 0.2 GiB of memory" in reply.message and not reply.environment


def test_a_request_that_changes_the_process_renews_it(worker):
    pid = pid_of(worker)
    assert worker.call({"do": "echo", "value": 1, "watched": 1}, timeout=10).ok and worker.pid == pid
    reply = worker.call({"do": "alarm", "watched": 1}, timeout=10)
    assert reply.ok and reply.changed == ("its alarms",) and is_gone(pid)
    reply = worker.call({"do": "catch", "watched": 1}, timeout=10)
    assert reply.ok and reply.changed == ("signals caught",) and worker.started == 2 and worker.pid is None


def test_the_first_thread_of_a_process_changes_nothing(worker):
    """The C library catches a signal of its own from then on."""
    assert worker.call({"do": "thread", "watched": 1}, timeout=10) == processes.Reply(
        "ok", value=len(signal.valid_signals())
    )


def test_a_reply_needs_the_token_of_its_request(worker):
    """A child that guesses what the next reply looks like does not answer for others."""
    worker.start()
    os.write(worker._child.requests, b'{"token": "0", "request": {"do": "echo", "value": "forged"}}\n')
    assert worker.call({"do": "echo", "value": "right"}, timeout=10).value == "right"


def test_temporary_files_go_with_the_process(worker):
    where = Path(worker.call({"do": "leave"}, timeout=10).value)
    assert where.name.startswith(scratch.PREFIX) and len(list(where.iterdir())) == 1
    worker.close()
    assert not where.exists()


@pytest.mark.parametrize("within", [False, True])
def test_what_killed_processes_left_is_removed(tmp_path, monkeypatch, within):
    """By the next one that begins, where what watches over a process has been killed as well."""
    place = tmp_path if within else None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = scratch.Scratch(place)
    of = "scratch.Scratch(Path(sys.argv[1]))" if within else "scratch.Scratch()"
    start = "import os, sys; from pathlib import Path; from tvm_sparse.core import scratch;"
    start += f"scratch._watcher = lambda *_: None; s = {of};"
    ended = f"{start} child = os.fork(); child and os.waitpid(child, 0); print(s.path.exists())"
    killed = f"{start} print(s.path, flush=True); os._exit(9)"
    environment = os.environ | ENV | {"TMPDIR": str(tmp_path)}

    def run(code):
        argv = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    left = run(killed)
    # A process that ends takes its own along; one that begins beside it may have removed what was left.
    assert run(ended).count("True") == 2
    assert {str(path) for path in tmp_path.iterdir()} == {str(mine.path)} if within else {str(mine.path), left}
    left = run(killed)
    assert Path(left).is_dir()
    assert Path(left) in scratch.sweep(place) and mine.path.is_dir() and scratch.sweep(place) == []
    mine.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    real, swept = tempfile.mkdtemp, []

    def mkdtemp(**how):
        made = real(**how)
        if len(swept) < 2:
            swept.extend(scratch.sweep(tmp_path))
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with scratch.folder(tmp_path) as folder:
        assert len(swept) == 2 and folder.is_dir() and folder not in swept


def test_a_file_system_without_locks_keeps_folders_for_a_while(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(scratch.fcntl, "flock", flock)
    with scratch.folder(tmp_path) as folder:
        assert scratch.sweep(tmp_path) == [] and folder.is_dir()
        os.utime(folder, (0, 0))
        assert scratch.sweep(tmp_path) == [folder]


def test_what_is_written_takes_its_place_whole_or_not_at_all(tmp_path):
    path = tmp_path / "library.so"
    path.write_text("before")
    with path.open() as mapped:
        with pytest.raises(KeyError), scratch.written(path) as unfinished:
            unfinished.write_text("half")
            raise KeyError
        with scratch.written(path):
            pass
        assert path.read_text() == "before"
        with scratch.written(path, mode=0o640) as unfinished:
            unfinished.write_text("after")
            assert path.read_text() == "before"
        assert mapped.read() == "before" and path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o640
    assert [one.name for one in tmp_path.iterdir()] == ["library.so"]


def test_without_room_for_temporary_files_no_child_starts(worker, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(StartError, match=r"the temporary folder .*TMPDIR.*: No space left on device"):
        worker.start()


# Time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do", ["spin", "stop", "gil"])
def test_timeout(worker, do):
    pid = pid_of(worker)
    begin = time.monotonic()
    reply = worker.call({"do": do}, timeout=0.5)
    taken = time.monotonic() - begin
    assert reply.kind == "timeout" and "within 0.5 s" in reply.message
    assert reply.environment or do != "stop"  # who stops a process is not known; it is not for want of time
    assert 0.5 <= taken < 30
    assert not is_alive(pid)
    assert pid_of(worker) != pid


def test_a_timeout_for_want_of_a_processor_is_the_machines(worker, monkeypatch):
    waits = iter([{"1": 7.0}, {"1": 7.4}, {"1": 7.0}, {"1": 7.1}])  # seconds of a thread, before and after
    monkeypatch.setattr(processes, "_waited", lambda pid: next(waits))
    worker.start()
    reply = worker.call({"do": "nap", "seconds": 9}, timeout=0.5)
    assert reply.environment and "within 0.5 s: it waited 0.4 s for a processor" in reply.message
    worker.start()
    assert not worker.call({"do": "nap", "seconds": 9}, timeout=0.5).environment


def test_timeout_while_sending(worker):
    """A stopped child reads nothing, and the request does not fit into the pipe."""
    worker.start()
    os.kill(worker.pid, signal.SIGSTOP)
    assert worker.call({"do": "size", "value": "y" * 5_000_000}, timeout=0.3).kind == "timeout"


def test_starting_is_not_part_of_the_timeout(argv, tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("import time; time.sleep(2)\n" + CHILD)
    with Worker([sys.executable, str(script)], env=ENV, name="slow") as worker:
        assert worker.call({"do": "echo", "value": 1}, timeout=1.5).ok


@pytest.mark.parametrize(
    "code, message",
    [
        ("raise ImportError('no tvm here')", "exit status 1(?s:.*)no tvm here"),
        ("import time; time.sleep(60)", "not ready within 0.5 s"),
    ],
)
def test_child_that_does_not_start(code, message):
    command = [sys.executable, "-c", code]
    with Worker(command, name="bad", start_timeout=0.5) as worker:
        if "tvm" in code:
            worker.start_timeout = 30.0
        with pytest.raises(StartError, match=message):
            worker.call({}, timeout=10)
        with pytest.raises(StartError, match=message):
            worker.start()
        assert worker.pid is None


def test_command_that_does_not_exist():
    with pytest.raises(StartError, match="bad cannot be started.*No such file"):
        Worker(["/no/such/python"], name="bad").call({}, timeout=10)


def test_serve_by_hand(argv):
    done = subprocess.run(argv, env=os.environ | ENV, capture_output=True, text=True)
    assert done.returncode == 1 and "not by hand" in done.stderr


# Nothing is left -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "timeout"])
def test_whole_group_ends(worker, how):
    grandchild = worker.call({"do": "spawn"}, timeout=10).value
    assert is_alive(grandchild)
    if how == "close":
        worker.close()
    else:
        worker.call({"do": "spin"}, timeout=0.1)
    assert is_gone(grandchild)


@linux
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("how", ["close", "timeout", "alarm"])
def test_what_has_a_session_of_its_own_ends(worker, how, clean):
    """Also whose parent has ended, and without any variable of the worker's."""
    escaped = worker.call({"do": "escape", "clean": clean}, timeout=20).value
    assert is_alive(escaped) and os.getsid(escaped) == escaped
    if how == "close":
        worker.close()
    elif how == "timeout":
        worker.call({"do": "spin"}, timeout=0.1)
    else:
        assert worker.call({"do": "alarm", "watched": 1}, timeout=10).changed
    assert not is_alive(escaped)


@linux
def test_what_a_crashed_worker_leaves_ends(worker, tmp_path):
    reply = worker.call({"do": "escape and die", "path": str(tmp_path / "pid")}, timeout=20)
    assert reply.kind == "crash" and not is_alive(int((tmp_path / "pid").read_text()))


@linux
def test_a_library_that_leaves_a_process_is_told(worker):
    escaped = worker.call({"do": "escape", "watched": 1}, timeout=20)
    assert escaped.changed == ("its processes",) and not is_alive(escaped.value)


@linux
@pytest.mark.parametrize("ends", ["kill", "exit"])
def test_the_end_of_a_process_removes_what_it_leaves_at_once(argv, tmp_path, ends):
    """Its folders and those of its workers, and processes of these with a session of their own."""
    code = """
import sys
from tvm_sparse.core import scratch
from tvm_sparse.workers.processes import Worker
mine, worker = scratch.Scratch(), Worker(sys.argv[1:], name="worker")
print(worker.call({"do": "escape"}, timeout=60).value, flush=True)
sys.stdin.read()
"""
    (tmp_path / "temporary").mkdir()
    environment = os.environ | ENV | {"TMPDIR": str(tmp_path / "temporary")}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *argv], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    escaped = int(parent.stdout.readline())
    assert is_alive(escaped) and len(list((tmp_path / "temporary").iterdir())) == 2
    if ends == "kill":
        parent.kill()
    parent.communicate()
    assert is_gone(escaped)
    until = time.monotonic() + 20
    while list((tmp_path / "temporary").iterdir()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not list((tmp_path / "temporary").iterdir())


def test_no_descriptor_leaks(argv):
    if not os.path.isdir("/dev/fd"):
        pytest.skip("needs /dev/fd")
    scratch.Scratch().close()  # what watches over this process has a pipe to it
    before = len(os.listdir("/dev/fd"))
    with Worker(argv, env=ENV, name="worker") as worker:
        for _ in range(3):
            worker.call({"do": "_exit"}, timeout=10)
    with pytest.raises(StartError):
        Worker(["/no/such/python"], name="bad").start()
    assert len(os.listdir("/dev/fd")) == before


PARENT = """
import sys, time
from tvm_sparse.workers.processes import Worker, Pool
workers = [Worker(sys.argv[2:], name=str(i)) for i in range(2)]
print(*(w.call({"do": "pid"}, timeout=10).value for w in workers), flush=True)
workers[0].call({"do": sys.argv[1]}, timeout=60)
"""


def start_parent(argv: list[str], do: str) -> tuple[subprocess.Popen, list[int]]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, do, *argv],
        env=os.environ | ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 2 and all(map(is_alive, children))
    time.sleep(0.2)  # into the second call
    return parent, children


@linux
@pytest.mark.parametrize("do", ["gil", "stop"])
def test_killed_parent_leaves_no_child(argv, do):
    parent, children = start_parent(argv, do)
    parent.kill()
    parent.communicate()
    assert all(is_gone(pid) for pid in children)


def test_interrupt_is_the_parents(argv):
    """Ctrl-C goes to the terminal's process group, and the children are not in it."""
    parent, children = start_parent(argv, "gil")
    assert [os.getsid(pid) for pid in children] == children
    os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == -signal.SIGINT and errors.endswith("KeyboardInterrupt\n")
    assert all(is_gone(pid) for pid in children)


def test_interrupted_call_leaves_a_usable_worker(worker):
    pid = pid_of(worker)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        worker.call({"do": "nap", "seconds": 30}, timeout=60)
    assert is_gone(pid)
    assert worker.call({"do": "echo", "value": 2}, timeout=10).value == 2


# Locks -----------------------------------------------------------------------------------------

HOLDER = """
import os, signal, sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@linux
@linux
def test_a_claim_is_one_holders_until_it_ends(tmp_path):
    path = tmp_path / "claims"
    mine, other = locking.Claims(path), locking.Claims(path)
    assert mine.take("a") and mine.take("a") and not other.take("a") and other.take("b") and not mine.take("b")
    mine.release("a")
    assert other.take("a") and not mine.take("a")
    other.close()
    other.close()
    assert mine.take("a") and mine.take("b")
    code = "import sys, time; from pathlib import Path; from tvm_sparse.core.locking import Claims;"
    code += "claims = Claims(Path(sys.argv[1])); print(claims.take('c'), claims.take('a'), flush=True); time.sleep(60)"
    argv = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(argv, env=os.environ | ENV, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "True False\n" and not mine.take("c")
        holder.kill()
    assert mine.take("c")
    mine.close()


def test_a_lock_whose_holder_is_stopped_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "STOPPED_SECONDS", 0.1)
    monkeypatch.setattr(locking, "_LOOK_SECONDS", 0.1)
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(locking.LockTimeout, match=f"{path}: process {holder.pid} holds this lock and is stopped"):
        with locking.held(path, 60.0):
            pass
    holder.send_signal(signal.SIGCONT)
    holder.communicate()
    with locking.held(path, 60.0):
        other = threading.Thread(target=lambda: refused.append(wait_for(path)))
        refused = []
        other.start()
        other.join()
    assert "has held this lock for 0 s" in refused[0]


def wait_for(path):
    """The message of a wait of no time."""
    try:
        with locking.held(path, 0.0):
            return ""
    except locking.LockTimeout as error:
        return str(error)


# Pools -----------------------------------------------------------------------------------------


def test_pool_keeps_the_order_and_runs_at_the_same_time(argv, tmp_path):
    with Pool(3, argv, env=ENV, name="pool") as pool:
        naps = [0.3, 0.01, 0.2, 0.01, 0.1]
        requests = [{"do": "nap", "seconds": seconds} for seconds in naps]
        assert [reply.value for reply in pool.map(requests, timeout=30)] == naps
        # Each waits until all have come.
        requests = [{"do": "meet", "folder": str(tmp_path), "number": number, "all": 3} for number in range(3)]
        assert [reply.value for reply in pool.map(requests, timeout=30)] == [0, 1, 2]
        assert [*pool.map([], timeout=1)] == []


def test_kinds_of_a_pool_take_turns(argv):
    with Pool(1, argv, env=ENV, name="pool", kind=lambda request: request["kind"]) as pool:
        first = pool.submit({"do": "nap", "seconds": 0.5, "kind": "a"}, timeout=20)
        while not first.running():
            time.sleep(0.01)
        names, ended = ("a1", "a2", "a3", "b1", "b2", "c1"), []
        futures = {name: pool.submit({"do": "pid", "kind": name[0]}, timeout=20) for name in names}
        assert futures.pop("a2").cancel()
        for name, future in futures.items():
            future.add_done_callback(lambda _, name=name: ended.append(name))
        assert all(future.result().ok for future in futures.values())
    assert ended == ["a1", "b1", "c1", "b2", "a3"]


def test_a_closed_pool_cancels_what_waits(argv):
    pool = Pool(1, argv, env=ENV, name="pool")
    running, waiting = (pool.submit({"do": "nap", "seconds": 20}, timeout=60) for _ in range(2))
    while not running.running():
        time.sleep(0.01)
    pool.close()
    assert waiting.cancelled()
    with pytest.raises(CancelledError):
        running.result()
    with pytest.raises(RuntimeError):
        pool.submit({"do": "pid"}, timeout=1)


def test_pool_failures_cost_themselves(argv):
    bad = {2: "abort", 5: "spin", 6: "segfault", 9: "raise", 11: "sticky"}
    requests = [{"do": bad[i]} if i in bad else {"do": "echo", "value": i} for i in range(14)]
    with Pool(2, argv, env=ENV, name="pool") as pool:
        replies = [*pool.map(requests, timeout=2.0)]
    kinds = {2: "crash", 5: "timeout", 6: "crash", 9: "error", 11: "error"}
    assert {i: reply.kind for i, reply in enumerate(replies) if not reply.ok} == kinds
    assert all(reply.value == i for i, reply in enumerate(replies) if reply.ok)


def test_pool_starts_only_what_it_needs(argv):
    with Pool(8, argv, env=ENV, name="pool") as pool:
        assert [reply.value for reply in pool.map([{"do": "echo", "value": 1}], timeout=10)] == [1]
        assert sum(worker.pid is not None for worker in pool.workers) == 1


def test_slow_consumer_is_not_a_timeout(argv):
    requests = [{"do": "echo", "value": 0}, {"do": "grow", "size": 1_000_000}]
    with Pool(2, argv, env=ENV, name="pool") as pool:
        for worker in pool.workers:
            worker.start()
        replies = pool.map(requests, timeout=1.5)
        assert next(replies).ok
        time.sleep(2.0)
        assert next(replies).ok


def test_leaving_a_map_ends_what_is_under_way(argv):
    with Pool(2, argv, env=ENV, name="pool") as pool:
        requests = [{"do": "pid"}, *({"do": "nap", "seconds": 60} for _ in range(3))]
        replies = pool.map(requests, timeout=100)
        next(replies)
        replies.close()
        assert pool.workers[1].pid is None
        again = pool.map([{"do": "echo", "value": i} for i in range(4)], timeout=10)
        assert [reply.value for reply in again] == [0, 1, 2, 3]


def test_pool_that_does_not_start():
    with Pool(2, [sys.executable, "-c", "raise ImportError('no tvm here')"], name="bad") as pool:
        with pytest.raises(StartError, match="no tvm here"):
            list(pool.map([{}, {}, {}], timeout=10))
        assert all(worker.pid is None for worker in pool.workers)


# ------------------------------------------------------------------------------------------ the build worker kept warm


def started_pid(keeper: Kept) -> int:
    """The id of the build worker that a request gets."""
    with keeper.pool() as pool:
        assert not next(pool.map([{"no": "request"}], timeout=60)).ok
        [worker] = pool.workers
        assert worker.pid is not None
        return worker.pid


def test_what_a_worker_does_without_is_absent_for_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with without("antigravity", "colorsys"):
        with pytest.raises(ModuleNotFoundError, match="colorsys"):
            importlib.import_module("colorsys")
        assert "colorsys" not in sys.modules and importlib.import_module("json")
    assert importlib.import_module("colorsys")


@linux
def test_a_build_worker_does_without_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    problem, machine = parse("softmax/batch=2,vocab=8"), machines.cpu()
    request = building.request(problem, spaces.fallback(problem, machine), machine, tmp_path / "k.so")
    with Pool(1, BUILD_WORKER, name="build") as pool:
        reply = next(pool.map([request], timeout=120))
        assert reply.ok, reply.message
        loaded = Path(f"/proc/{pool.workers[0].pid}/maps").read_text()
    assert "libtvm" in loaded and "libtorch" not in loaded


def test_a_build_worker_is_kept_for_all_threads_and_ends_after_a_while() -> None:
    keeper = Kept(seconds=1.5)
    pids: list[int] = []
    thread = threading.Thread(target=lambda: pids.append(started_pid(keeper)))
    thread.start()
    thread.join()
    assert [started_pid(keeper)] == pids  # it outlives the thread that asked for it first
    assert is_gone(pids[0], seconds=20)
    assert started_pid(keeper) not in pids
    keeper.close()


def test_a_build_worker_is_not_kept_after_an_error() -> None:
    keeper = Kept()
    with pytest.raises(KeyboardInterrupt), keeper.pool() as pool:
        pool.workers[0].start()
        raise KeyboardInterrupt
    assert pool.workers[0].pid is None


def test_a_forked_process_leaves_the_kept_build_worker_alone() -> None:
    keeper = Kept()
    pid = started_pid(keeper)
    forked = os.fork()
    if not forked:
        keeper.close()  # has nothing to close here
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0
    assert is_alive(pid) and started_pid(keeper) == pid
    keeper.close()
    assert is_gone(pid)
