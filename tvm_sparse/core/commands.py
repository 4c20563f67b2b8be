"""Commands shown in messages, written so that they run when pasted: with this Python, whether or not its environment is
activated.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

PROGRAM = "tvm-sparse"


def python() -> str:
    """The path of this process's Python, quoted for a shell."""
    return "python" if shutil.which("python") == sys.executable else shlex.quote(sys.executable)


def program() -> str:
    """The command line program as it was started; in a process started otherwise, the program of the same
    environment.
    """
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
    """Arguments that give one option once for each value."""
    return [word for value in values for word in (name, str(value))]
