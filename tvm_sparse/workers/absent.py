"""Hiding installed modules from a worker that does not need them, since importing them takes seconds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class _Finder:
    """A finder for `sys.meta_path` that fails for these modules."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Within the block, importing these modules fails as if they were not installed.

    `sys.modules` gets no entries for them, since SciPy checks there whether its arguments may be PyTorch's.
    """
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
