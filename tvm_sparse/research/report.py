"""Recorded trials as one self-contained HTML page, without scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import registry, scratch
from . import plots, study

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto; max-width: 62rem;
  padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
nav a { margin-right: 1rem; } p { max-width: 46rem; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: #555; font-size: .9rem; max-width: 46rem; }
.scroll { overflow-x: auto; max-height: 30rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: #f4f4f4; text-align: left; } th, td { padding: .15rem .6rem; }
td { white-space: nowrap; } td.number { text-align: right; } tr:nth-child(even) td { background: #fafafa; }
"""
# Number of templates, those with the most points, for which heat maps are drawn.
HEAT_MAPS = 4


@dataclass(frozen=True)
class Report:
    """The content of a page.

    Attributes
    ----------
    facts
        What was recorded, where and when.
    tables
        Tables by name.
    figures
        Figures by name, each with its caption.
    """

    facts: Mapping[str, str]
    tables: Mapping[str, pandas.DataFrame]
    figures: Mapping[str, tuple[Figure, str]]


def make(
    table: pandas.DataFrame, heat_maps: Sequence[tuple[str, str]] = (), parts: Sequence[str] | None = None
) -> Report:
    """Make the tables of `study`, or some `parts` of them, and the plots of `plots`, as far as the trials suffice.

    `heat_maps`: pairs of decisions; by default the two most important ones of each of the largest templates.
    """
    tables = study.sections(table, parts)
    figures: dict[str, tuple[Figure, str]] = {}

    def add(name: str, draw: Callable[[pandas.DataFrame], Figure], rows: pandas.DataFrame) -> None:
        doc = (draw.__doc__ or "").split("\n\n")[0]
        figures[name] = draw(rows), " ".join(doc.split())

    right = table[table["outcome"] == "ok"]
    for operator, rows in right.groupby("operator", sort=True):
        add(f"best-so-far-{operator}", plots.best_so_far, rows)
        add(f"distribution-{operator}", plots.distribution, rows)
        if rows["registers"].notna().any():
            add(f"frontier-{operator}", plots.frontier, rows)
        if rows["problem"].nunique() > 1:
            add(f"transfer-{operator}", plots.transfer_matrix, rows)
    if right["operator"].isin(list(registry.operators())).any():
        add("roofline", plots.roofline, right)
    if "importance" in tables:
        for operator, rows in tables["importance"].groupby("operator", sort=True):
            add(f"importance-{operator}", plots.importance, rows)
    if "models" in tables:
        add("models", plots.learning_curves, tables["models"])
    for template, one, other in _pairs(tables, heat_maps):
        rows = right if template is None else right[right["template"] == template]
        name = f"heat-map-{template or 'all'}-{one}-{other}"
        figures[name] = plots.heat_map(rows, one, other), f"{template or 'All templates'}: {one} against {other}"
    return Report(_facts(table), tables, figures)


def _pairs(
    tables: Mapping[str, pandas.DataFrame], wanted: Sequence[tuple[str, str]]
) -> list[tuple[str | None, str, str]]:
    if wanted or "importance" not in tables:
        return [(None, *pair) for pair in wanted]
    found = []
    for template, rows in tables["importance"].groupby("template", sort=False):
        if len(rows) >= 2:
            one, other = rows["decision"].iloc[:2]
            found.append((int(rows["points"].iloc[0]), str(template), one, other))
    return [(template, one, other) for _, template, one, other in sorted(found, reverse=True)[:HEAT_MAPS]]


def _facts(table: pandas.DataFrame) -> dict[str, str]:
    def listed(column: str) -> str:
        values = sorted({str(value) for value in table[column].dropna() if str(value)}) if column in table else []
        return ", ".join(values)

    dates = sorted(date for date in table["date"] if date)
    facts = {
        "trials": f"{len(table):,}, of which {int((table['outcome'] == 'ok').sum()):,} right",
        "problems": f"{table['problem'].nunique():,}",
        "operators": listed("operator"),
        "architectures": listed("arch"),
        "machines": listed("machine.name"),
        "recorded": f"{dates[0]} to {dates[-1]}" if dates else "",
        "strategies": listed("strategy"),
        "timers": listed("timer"),
        "compiler": listed("software.apache-tvm"),
    }
    return {name: value for name, value in facts.items() if value}


def write_images(found: Report, folder: Path) -> list[Path]:
    """Write each plot as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        plots.save(figure, folder / f"{name}{suffix}")
        for name, (figure, _) in found.figures.items()
        for suffix in (".png", ".svg")
    ]


def page(found: Report) -> str:
    """The page as HTML."""
    with scratch.folder() as folder:
        shown = [_shown(name, *figure, folder) for name, figure in found.figures.items()]
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in found.facts.items())
    tables = "".join(_section(name, rows) for name, rows in found.tables.items())
    links = "".join(f'<a href="#{name}">{name}</a>' for name in (*found.tables, "plots"))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Recorded trials</title><style>{STYLE}</style></head><body>"
        f"<h1>Recorded trials</h1><table>{facts}</table><nav>{links}</nav>"
        f'{tables}<h2 id="plots">plots</h2>{"".join(shown)}</body></html>\n'
    )


def _shown(name: str, figure: Figure, caption: str, folder: Path) -> str:
    # Through a file, so that the SVG stays a picture and its names cannot clash with the page's.
    data = plots.save(figure, folder / f"{name}.svg").read_bytes()
    source = f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}"
    return (
        f'<figure id="{escape(name)}"><img alt="{escape(name)}" src="{source}">'
        f"<figcaption><b>{escape(name)}</b>. {_marked(caption)}</figcaption></figure>"
    )


def _section(name: str, rows: pandas.DataFrame) -> str:
    doc = (study.PARTS[name].__doc__ or "").split("\n\n")
    text = "".join(f"<p>{_marked(' '.join(paragraph.split()))}</p>" for paragraph in doc)
    shown = study.shown(rows)
    figures = [rows[column].dtype.kind in "fiu" for column in shown]
    head = "".join(f"<th>{escape(str(column))}</th>" for column in shown)
    cells = (zip(row, figures, strict=True) for row in shown.itertuples(index=False))
    body = "".join(f"<tr>{''.join(_cell(value, figure) for value, figure in row)}</tr>" for row in cells)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f'<h2 id="{name}">{name}</h2>{text}{table}'


def _marked(text: str) -> str:
    """Text with parts between backticks marked as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _cell(value: str, figure: bool) -> str:
    return f'<td class="number">{escape(value)}</td>' if figure else f"<td>{escape(value)}</td>"
