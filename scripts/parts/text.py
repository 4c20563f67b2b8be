"""Formatting numbers and tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDTH = 120  # of a line of prose


def us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def times_as(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def span(values: Iterable[float], digits: int = 2) -> str:
    """`0.93 to 1.13`, or `0.93` if minimum and maximum are printed alike."""
    some = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (some[0], some[-1])))


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def code(text: str) -> str:
    return f"`{text}`"
