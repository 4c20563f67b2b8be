"""Modules that a worker does without, though they are installed: their imports take seconds, and nothing needs them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class _Finder:
    """For `sys.meta_path`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Within the block these modules are not found, as if they were not installed.

    No entry of `sys.modules` stands for them, where SciPy looks whether its arguments may be PyTorch's.
    """
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
