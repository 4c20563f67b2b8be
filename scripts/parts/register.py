"""The functions that fill the generated parts of the documentation, by name."""

from __future__ import annotations

from collections.abc import Callable

PARTS: dict[str, Callable[[], str]] = {}


def part(function: Callable[[], str]) -> Callable[[], str]:
    """Register a function for the part with its name, with hyphens instead of underscores."""
    PARTS[function.__name__.replace("_", "-")] = function
    return function
