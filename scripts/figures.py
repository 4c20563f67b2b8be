"""Fill in the generated parts of README.md and docs/: every figure, from the CSV files in results/, and the tables of
operators, templates and decisions, from the registry.

    python scripts/figures.py             # write what has changed
    python scripts/figures.py --check     # say what has changed, and exit with 1 if anything has

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is what a module of `parts/` registers. The
charts are SVG files, listed in `parts.charts.CHARTS`. The output depends on nothing but the results and the code.
"""

from __future__ import annotations

import difflib
import re
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer
from parts.charts import CHARTS
from parts.register import PARTS
from parts.results import ROOT
from parts.text import WIDTH

IMAGES = ROOT / "docs" / "images"
PART = re.compile(r"(<!-- generated: ([\w-]+) -->).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, where: Path) -> str:
    """`text` with its generated parts brought up to date, each as a separate block of Markdown."""

    def fill(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in PARTS:
            near = difflib.get_close_matches(name, PARTS, n=3)
            raise SystemExit(f"{where}: no generated part {name!r}; nearest: {', '.join(near) or ', '.join(PARTS)}")
        content = PARTS[name]()
        if not content.startswith(("|", "```")):
            content = "\n\n".join(
                block
                if block.startswith("|")
                else textwrap.fill(block, WIDTH, break_long_words=False, break_on_hyphens=False)
                for block in content.split("\n\n")
            )
        return f"{begin}\n\n{content}\n\n{end}"

    return PART.sub(fill, text)


def generated() -> dict[Path, str]:
    """The wanted content of every file with generated parts."""
    wanted = {IMAGES / name: chart() for name, chart in CHARTS.items()}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        wanted[path] = filled(path.read_text(), path.relative_to(ROOT))
    return wanted


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if anything changed.")] = False,
) -> None:
    changed = []
    for path, text in generated().items():
        if not path.exists() or path.read_text() != text:
            changed.append(str(path.relative_to(ROOT)))
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    if changed:
        print(f"{'not as generated' if check else 'written'}: {', '.join(changed)}")
    if check and changed:
        sys.exit("run: python scripts/figures.py")


if __name__ == "__main__":
    typer.run(main)
