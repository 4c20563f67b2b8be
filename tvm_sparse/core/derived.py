"""Numbers that follow from others, such as the extents of a kernel from its decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

E = TypeVar("E")
V = TypeVar("V")


class Derived(Generic[E, V]):
    """An attribute of a dataclass that follows from others; computed at its first use, then kept.

    A class with many of them declares what it derives in a line each:

        extent = Derived["Extents", int]

        @dataclass(frozen=True)
        class Extents:
            threads: int
            # Warps of a thread block.
            warps = extent(lambda e: e.threads // 32)

    The alias names the class for mypy, which checks the function's body by it.
    """

    def __init__(self, find: Callable[[E], V]) -> None:
        self.find = find

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, holder: None, owner: type) -> Self: ...
    @overload
    def __get__(self, holder: object, owner: type) -> V: ...
    def __get__(self, holder: Any, owner: type) -> Any:
        if holder is None:
            return self
        # From now on the attribute is found in the instance, before this descriptor.
        value = holder.__dict__[self.name] = self.find(holder)
        return value
