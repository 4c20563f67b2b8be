"""The SVG files."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from .headlines import headlines
from .text import times_as

INK, PALE, BAR, OURS = "#24292f", "#d0d7de", "#8250df", "#6e7781"
FONT = "font-family='Helvetica, Arial, sans-serif'"


def headline_chart() -> str:
    """Bars of geometric means on a logarithmic axis, with the range over shapes as a line."""
    left, top, row, width = 330, 58, 34, 470
    height = top + row * len(headlines()) + 34
    # Powers of two that include every range.
    least = 2.0 ** math.floor(math.log2(min(min(h.ratios) for h in headlines())))
    most = 2.0 ** math.ceil(math.log2(max(max(h.ratios) for h in headlines())))

    def x(ratio: float) -> float:
        return left + width * math.log2(ratio / least) / math.log2(most / least)

    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {left + width + 70} {height}' {FONT} font-size='13'>",
        f"<rect width='{left + width + 70}' height='{height}' rx='8' fill='white'/>",
        f"<text x='20' y='28' font-size='15' font-weight='bold' fill='{INK}'>"
        "How many times as long the fastest other library takes</text>",
    ]
    tick = least
    while tick <= most:
        at = x(tick)
        stroke, wide = (OURS, 1.5) if tick == 1 else (PALE, 1)
        lines.append(
            f"<line x1='{at:.1f}' y1='{top - 12}' x2='{at:.1f}' y2='{height - 30}' stroke='{stroke}'"
            f" stroke-width='{wide}'/>"
        )
        label = "1 (tvm_sparse)" if tick == 1 else f"{tick:g}"
        lines.append(
            f"<text x='{at:.1f}' y='{height - 12}' text-anchor='middle' fill='{INK}' font-size='11'>{label}</text>"
        )
        tick *= 2
    for number, found in enumerate(headlines()):
        y = top + row * number
        lines += [
            f"<text x='{left - 12}' y='{y + 7}' text-anchor='end' fill='{INK}'>{escape(found.what)}</text>",
            f"<text x='{left - 12}' y='{y + 20}' text-anchor='end' fill='{OURS}' font-size='10.5'>"
            f"{escape(found.against)}</text>",
            f"<rect x='{x(1):.1f}' y='{y}' width='{x(found.mean) - x(1):.1f}' height='16' rx='2' fill='{BAR}'/>",
            f"<line x1='{x(min(found.ratios)):.1f}' y1='{y + 8}' x2='{x(max(found.ratios)):.1f}' y2='{y + 8}'"
            f" stroke='{INK}' stroke-width='1.5'/>",
            f"<text x='{x(max(found.ratios)) + 6:.1f}' y='{y + 12}' fill='{INK}' font-weight='bold'>"
            f"{times_as(found.mean)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])


STAGES = (
    ("Problem", "axes, reference,", "inputs, check"),
    ("definition", "TE or TIR,", "no threads"),
    ("template", "a space of", "decisions"),
    ("candidate", "one point", "of the space"),
    ("trial", "checked,", "then timed"),
    ("record", "the best,", "kept"),
    ("library", ".so and", "manifest"),
    ("call", "zero copy,", "current stream"),
)


def flow_chart() -> str:
    """The one-way flow: each stage, and the part of the package that makes it."""
    wide, gap, high, top = 108, 22, 62, 48
    total = len(STAGES) * (wide + gap) - gap + 40
    rooms = (
        (0, 2, "operators/", "what is computed"),
        (2, 4, "schedules/", "how it is mapped to machines"),
        (4, 6, "tuning/, records/", "search, measure, keep"),
        (6, 8, "shipping/, runtime/", "no compiler in a call"),
    )
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {total} 164' {FONT} font-size='13'>",
        f"<rect width='{total}' height='164' rx='8' fill='white'/>",
        f"<defs><marker id='head' markerWidth='8' markerHeight='8' refX='6' refY='3' orient='auto'>"
        f"<path d='M0,0 L6,3 L0,6 z' fill='{INK}'/></marker></defs>",
    ]
    for number, (name, *about) in enumerate(STAGES):
        x = 20 + number * (wide + gap)
        lines.append(
            f"<rect x='{x}' y='{top}' width='{wide}' height='{high}' rx='6' fill='#f6f8fa' stroke='{BAR}'"
            " stroke-width='1.5'/>"
        )
        middle = x + wide / 2
        lines.append(
            f"<text x='{middle:g}' y='{top + 20}' text-anchor='middle' font-weight='bold' fill='{INK}'>{name}</text>"
        )
        lines += [
            f"<text x='{middle:g}' y='{top + 37 + 14 * i}' text-anchor='middle' font-size='11.5' fill='{INK}'>"
            f"{escape(words)}</text>"
            for i, words in enumerate(about)
        ]
        if number:
            y = top + high / 2
            lines.append(
                f"<line x1='{x - gap}' y1='{y:g}' x2='{x - 3}' y2='{y:g}' stroke='{INK}' stroke-width='1.5'"
                " marker-end='url(#head)'/>"
            )
    for first, last, name, role in rooms:
        start, end = 20 + first * (wide + gap), 20 + last * (wide + gap) - gap
        middle, y = (start + end) / 2, top + high + 12
        lines += [
            f"<path d='M{start},{y} v6 H{end} v-6' fill='none' stroke='{OURS}'/>",
            f"<text x='{middle:g}' y='{y + 22}' text-anchor='middle' fill='{BAR}' font-weight='bold'>{name}</text>",
            f"<text x='{middle:g}' y='{y + 36}' text-anchor='middle' font-size='11.5' fill='{OURS}'>{role}</text>",
        ]
    lines.append(
        f"<text x='20' y='28' font-size='15' font-weight='bold' fill='{INK}'>One declaration, one direction: nothing on"
        " the right is imported by anything on the left</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


CHARTS = {"headline.svg": headline_chart, "flow.svg": flow_chart}
