"""README.md and docs/: their snippets run, and their generated parts are as generated.

Snippets run in a folder in which `examples/` is: blocks with a title are written to the file of that name, blocks of
`sh` are run, with few trials, and then the page's blocks of Python, one after the other.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import quick_build_worker

from tvm_sparse.core import shape_files

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r'^```(\w+)(?: title="([\w.-]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Pages that run in the folder that README's snippets leave behind: theirs begin with what those have exported.
AFTER_README = ("docs/shipping.md",)
PAGES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
WITH_PYTHON = [page for page in PAGES if "```python" in (ROOT / page).read_text() and page not in AFTER_README]


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """Language, title and text of a page's fenced blocks."""
    for found in FENCE.finditer((ROOT / page).read_text()):
        yield found[1], found[2] or "", found[3]


# Every page has names of its own. Libraries of programs that an earlier run had too are copied.
PYTHON = """
import json, sys

from tvm_sparse.workers import building

building.BUILD_WORKER = sys.executable, sys.argv[2]
building.kept = building.Kept(argv=building.BUILD_WORKER)
for page, text in json.loads(sys.argv[1]):
    print(page, flush=True)
    exec(compile("from __future__ import annotations\\n" + text, page, "exec"), {"__name__": "__page__"})
"""


def run(pages: list[str], folder: Path) -> None:
    (folder / "examples").symlink_to(ROOT / "examples")
    own = {name: str(folder / name.lower()) for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME")}
    scripts = str(Path(sys.executable).parent)
    # README's commands are those of a checkout whose environment is not activated.
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(scripts)
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    # One thread: on a machine with more to do than cores, those of a kernel wait for each other for long.
    environment = {**os.environ, **own, "PATH": path, "TVM_NUM_THREADS": "1"}

    def spawn(*command: str) -> None:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=270)
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"

    python = []
    for page in pages:
        for language, title, text in blocks(page):
            if language == "sh":
                spawn("bash", "-euc", re.sub(r"--trials \d+", "--trials 2", text))
            elif title:
                (folder / title).write_text(text)
        python.append((page, "".join(text for language, _, text in blocks(page) if language == "python")))
    spawn(sys.executable, "-c", PYTHON, json.dumps(python), quick_build_worker.__file__)


@pytest.mark.timeout(280)
def test_snippets_of_readme_run(tmp_path: Path) -> None:
    """And those of the pages that take what README's have exported."""
    pytest.importorskip("torch")
    run(["README.md", *AFTER_README], tmp_path)


@pytest.mark.timeout(280)
def test_snippets_of_the_pages_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run(WITH_PYTHON, tmp_path)


def test_a_template_takes_fewer_than_40_lines_from_empty_file_to_library() -> None:
    plugin, commands = (text for _, title, text in blocks("docs/adding-a-template.md") if title or "--plugin" in text)
    assert len((plugin + commands).splitlines()) < 40


def test_shapes_in_pages_are_shapes(tmp_path: Path) -> None:
    tables = [text for page in ("README.md", *PAGES) for kind, _, text in blocks(page) if text.startswith("[[")]
    assert len(tables) >= 2
    for text in tables:
        path = tmp_path / "shapes.toml"
        path.write_text(text)
        assert shape_files.read(path)


def test_readme_is_one_page_and_its_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"):
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert ((ROOT / name).parent / target).exists(), f"{name}: {target}"
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 130
    # What .ci/run installs is what README says the tests need.
    [tested] = re.findall(r"pip install -e (\S+) && .venv/bin/pytest", readme)
    assert f"install -q -e {tested}\n" in (ROOT / ".ci/run").read_text()


def test_links_of_the_pages_lead_to_a_page_and_a_heading() -> None:
    def headings(text: str) -> set[str]:
        found = re.findall(
            r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
        )
        return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in found}

    wrong = []
    for page in ("README.md", "CONTRIBUTING.md", *PAGES):
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text()):
            name, _, heading = link.partition("#")
            target = (ROOT / page).parent / name if name else ROOT / page
            if not target.exists() or heading and heading not in headings(target.read_text()):
                wrong.append(f"{page}: {link}")
    assert not wrong, "\n".join(wrong)


def test_sections_of_docstrings_hold_items_alone() -> None:
    """Prose after the last item of a section becomes an item on the site: it belongs before them or under Notes."""
    wrong = []
    for path in sorted((ROOT / "tvm_sparse").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                lines = (ast.get_docstring(node) or "").splitlines()
                section = ""
                for above, line, below in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
                    if re.fullmatch("-{3,}", below):
                        section = line
                    elif re.fullmatch(r"\w.*", line) and not above and not below.startswith("    "):
                        if section in ("Parameters", "Attributes", "Returns", "Raises"):
                            wrong.append(f"{path}, {section}: {line}")
    assert not wrong, "\n".join(wrong)


def test_the_page_on_papers_has_results_alone() -> None:
    """What was tried has its place in docs/notes/."""
    assert len((ROOT / "docs/papers.md").read_text().split()) <= 5000


@pytest.mark.thorough  # .ci/run does the same before the tests
def test_generated_parts_are_as_generated() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/figures.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
