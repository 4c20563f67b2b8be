"""Commands that messages name, written so that they work where they are pasted: with this Python, activated or not."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

PROGRAM = "tvm-sparse"


def python() -> str:
    """This process's Python, as a shell starts it."""
    return "python" if shutil.which("python") == sys.executable else shlex.quote(sys.executable)


def program() -> str:
    """The command line as it was started; in a process that was started otherwise, that of the same environment."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == "tvm_sparse":
        return f"{python()} -m tvm_sparse"
    script = started if started.name == PROGRAM else Path(sys.executable).parent / PROGRAM
    on_path = shutil.which(PROGRAM)
    if on_path and script.exists() and Path(on_path).samefile(script):
        return PROGRAM
    return shlex.quote(str(script)) if script.exists() else f"{python()} -m tvm_sparse"


def install(*extras: str) -> str:
    """The command that installs extras of this package into the environment of this process."""
    return f'{python()} -m pip install "tvm_sparse[{",".join(extras)}]"'


def command(*words: str | Path) -> str:
    """A command of `program`, its words quoted for a shell."""
    return f"{program()} {shlex.join(map(str, words))}"


def options(name: str, values: Iterable[str | Path]) -> list[str]:
    """An option that is given once for each value."""
    return [word for value in values for word in (name, str(value))]
