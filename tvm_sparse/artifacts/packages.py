"""Finding installed packages of prebuilt kernels.

Each is a folder of the namespace package `tvm_sparse_kernels`, one for each architecture, with the layout of `export`.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

PACKAGES = "tvm_sparse_kernels"


@functools.cache
def kernel_packages() -> tuple[Path, ...]:
    """Folders of the installed packages of prebuilt kernels."""
    spec = importlib.util.find_spec(PACKAGES)
    places = (spec.submodule_search_locations or []) if spec else []
    return tuple(path for place in places for path in sorted(Path(place).glob("*")) if path.is_dir())
