"""The house: which rooms may import which, and that no arrow runs back."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import conftest
import pytest

from tvm_sparse.core import spaces
from tvm_sparse.schedules.vocabulary import DECISIONS

ROOT = Path(__file__).parent.parent
# From the ground up: a room imports of lower floors only.
FLOORS = (
    ("core",),
    ("formats", "records", "emulation"),
    ("artifacts",),
    ("workers",),
    ("runtime",),
    ("bench",),
    ("operators", "shipping", "tuning"),
    ("schedules", "layers"),
    ("research",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module by its installed name; `schedules/` is installed inside of the package."""
    for root, prefix in ((ROOT / "tvm_sparse", "tvm_sparse"), (ROOT / "schedules", "tvm_sparse.schedules")):
        for path in sorted(root.rglob("*.py")):
            parts = [prefix, *path.relative_to(root).with_suffix("").parts]
            yield ".".join(parts).removesuffix(".__init__"), path


@functools.cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Also those inside of functions; kept, because several tests look at each file."""
    found = ast.walk(ast.parse(path.read_text()))
    return tuple(node for node in found if isinstance(node, ast.Import | ast.ImportFrom))


def imports(name: str, path: Path) -> Iterator[str]:
    """What a module imports of this package, also inside of functions, by absolute name."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        yield from (one for one in found if one.split(".")[0] == "tvm_sparse")


def room(name: str) -> str:
    """The folder of a module under the package, or the package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else ""


def test_a_template_has_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the root of a checkout `schedules` would be a second package, with templates that nobody registers."""
    monkeypatch.syspath_prepend(ROOT)
    for operator in (None, *(path.parent.name for path in sorted(ROOT.glob("schedules/*/__init__.py")))):
        with pytest.raises(ImportError, match="import tvm_sparse.schedules"):
            importlib.import_module(f"schedules.{operator}" if operator else "schedules")
    assert not [name for name in sys.modules if name.partition(".")[0] == "schedules"]


KNOWN = {name: path for name, path in modules() if "tuning_logs" not in name}


def test_no_arrow_runs_back() -> None:
    wrong = []
    for name, path in KNOWN.items():
        here = room(name)
        for imported in imports(name, path):
            there = room(imported)
            if there and here and there != here and LEVEL[there] >= LEVEL[here]:
                wrong.append(f"{name} (floor {LEVEL[here]}) imports {imported} (floor {LEVEL[there]})")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_a_detour() -> None:
    edges = {name: {one for one in imports(name, path) if one in KNOWN and one != name} for name, path in KNOWN.items()}
    # A package's own names come with its parts: only files count.
    edges = {name: {one for one in found if not name.startswith(f"{one}.")} for name, found in edges.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for one in edges[name]:
                visit(one, (*way, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_private_names_stay_in_their_file() -> None:
    wrong = []
    for name, path in KNOWN.items():
        for node in import_statements(path):
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                if private and (node.level or (node.module or "").startswith("tvm_sparse")):
                    wrong.append(f"{name} imports {', '.join(private)}")
    assert not wrong, "\n".join(wrong)


def test_what_is_temporary_is_removed_by_one_rule() -> None:
    """That of `core.scratch`, which holds however a process ends."""
    makers = {"mkdtemp", "mkstemp", "mktemp", "TemporaryDirectory", "NamedTemporaryFile", "SpooledTemporaryFile"}
    wrong = []
    for name, path in KNOWN.items():
        found = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute | ast.Name)
        }
        if found & makers and name != "tvm_sparse.core.scratch":
            wrong.append(f"{name}: use core.scratch.folder or core.scratch.written")
    assert not wrong, "\n".join(wrong)


def test_every_module_is_in_a_package() -> None:
    """The build finds packages by their `__init__.py`; `schedules/` is linked into the package."""
    assert (ROOT / "tvm_sparse" / "schedules").resolve() == ROOT / "schedules"
    for name, path in KNOWN.items():
        assert (path.parent / "__init__.py").exists(), name


def test_decisions_are_in_the_vocabulary() -> None:
    from cases import AWKWARD, MACHINES, REALISTIC

    seen = set()
    for problem, machine in itertools.product((*AWKWARD, *REALISTIC), MACHINES.values()):
        for name, table in spaces.applicable(problem, machine)[0].items():
            assert set(table) <= set(DECISIONS), name
            seen.add(name)
    assert seen == {template.name for template in spaces.templates()}, "no shape of an operator reaches a template"


class Case:
    """A stand-in for an item of pytest, with what drawing reads."""

    def __init__(self, name: str, markers: tuple[str, ...]) -> None:
        self.path, self.name, self.markers = Path("test_x.py"), name, markers

    def get_closest_marker(self, name: str) -> bool:
        return name in self.markers


def test_half_of_what_is_drawn_runs_and_every_case_has_its_turn() -> None:
    many = [Case("many", ("drawn",)) for _ in range(9)]
    always = [Case("one", ("drawn",)), Case("on a GPU", ("drawn", "gpu")), Case("on a GPU", ("drawn", "gpu"))]
    always += [Case("other", ()) for _ in range(4)]
    seen: set[Case] = set()
    for seed in range(20):
        kept = conftest.drawn([*always, *many], str(seed))
        assert kept[: len(always)] == always and len(kept) == len(always) + 5
        assert kept == conftest.drawn([*always, *many], str(seed))
        seen.update(kept)
    assert seen.issuperset(many)
