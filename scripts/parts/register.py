"""What fills the generated parts of the documentation, by name."""

from __future__ import annotations

from collections.abc import Callable

PARTS: dict[str, Callable[[], str]] = {}


def part(function: Callable[[], str]) -> Callable[[], str]:
    """Register what fills the parts of this name, with hyphens for underscores."""
    PARTS[function.__name__.replace("_", "-")] = function
    return function
