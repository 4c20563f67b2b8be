"""An environment without the package's extras: what a child process cannot import, as if it were not installed.

The compiler is an extra too, but one that nearly all needs: it is there unless a test says otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path

EXTRAS = ("scipy", "xgboost", "psutil", "cloudpickle", "torch", "matplotlib", "pandas", "cuda", "cryptography")

COMPILER = ("tvm",)

_BLOCKER = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec.__func__

@classmethod
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {absent!r} else find(cls, name, path, target)

PathFinder.find_spec = find_spec
"""


def environment(folder: Path, absent: tuple[str, ...] = EXTRAS) -> dict[str, str]:
    """Variables for a process that has none of the extras, and whose children have none either."""
    (folder / "sitecustomize.py").write_text(_BLOCKER.format(absent=absent))
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "160"}
