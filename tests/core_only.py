"""An environment without the package's extras: what a child process cannot import, as if it were not installed.

The compiler is an extra too, but one that nearly all needs: it is there unless a test says otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path

EXTRAS = ("scipy", "xgboost", "psutil", "cloudpickle", "torch", "matplotlib", "pandas", "cuda", "cryptography")

COMPILER = ("tvm",)

# What Python runs as it starts. A round of timing tells nothing here, and is as short as it can be, without a rest.
_AT_START = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec.__func__

@classmethod
def find_spec(cls, name, path=None, target=None):
    spec = None if name.partition(".")[0] in {absent!r} else find(cls, name, path, target)
    if spec and name == "tvm_sparse.bench.timing":
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.ROUND_SECONDS = module.REST_SECONDS = 1e-4

        spec.loader.exec_module = exec_module
    return spec

PathFinder.find_spec = find_spec
"""


def environment(folder: Path, absent: tuple[str, ...] = EXTRAS) -> dict[str, str]:
    """Variables for a process that has none of the extras, and whose children have none either."""
    written = folder / f"{os.getpid()}.py"
    written.write_text(_AT_START.format(absent=absent))
    written.replace(folder / "sitecustomize.py")  # at once: processes that share the folder read it
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "160"}
